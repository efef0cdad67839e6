"""The store behind a path or a URL."""

from __future__ import annotations

import os

from vescale_ray.lasting import misread

from .store import ObjectStore, Root


def store_of(root: Root) -> ObjectStore:
    """Return the store behind ``root``: a path, a URL, or a store itself.

    ``s3://`` is an :class:`S3Store`, ``file://`` and paths a :class:`PosixStore`, every other URL an :class:`FsspecStore`.

    Raises:
        ValueError: the root is empty or malformed, or a URL that no store supports.
    """
    if not isinstance(root, (str, os.PathLike)):
        if not isinstance(root, ObjectStore):
            shown = repr(root) if root is None or isinstance(root, (bytes, int, float)) else f"a {type(root).__name__}"
            raise ValueError(f"checkpoint root is {shown}; give a folder's path, a URL or a store")
        return root
    text = os.fspath(root)
    if not isinstance(text, str) or "\0" in text:
        raise ValueError(f"checkpoint root is {text!r}; give a path of text, without zero bytes")
    if not text:
        raise ValueError("checkpoint root is empty; give a folder's path or a URL")
    if (wrong := misread(text)) is not None:
        raise ValueError(f"checkpoint root {text!r}: {wrong}")
    scheme, found, rest = text.partition("://")
    if not found:
        from .posix import PosixStore

        return PosixStore(os.path.expanduser(text))
    if scheme == "file":
        from .posix import PosixStore

        if not rest.startswith("/"):
            raise ValueError(f"checkpoint root {text!r}: give file:///absolute/path, or the path alone")
        return PosixStore(rest)
    if scheme == "s3":
        from .s3 import S3Store

        return S3Store(text)
    from .fsspec_store import FsspecStore

    return FsspecStore(text)
