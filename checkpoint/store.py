"""The seam between the checkpoint and where it is kept: a few operations on immutable objects under string keys.

Nothing above this file knows about files. A store must give: exclusive creation (two creators of one key: exactly one
wins), durability when a call returns, and listing that sees every object whose creation has returned. That is what a
local or shared POSIX file system and S3 with conditional writes both give.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from vescale_ray.lasting import misread

ALIGNMENT = 4096
"""Bytes. Streams and reads that keep addresses, offsets and lengths multiples of this can bypass the page cache."""

_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*(\.[A-Za-z0-9_-]+)*(/[A-Za-z0-9][A-Za-z0-9_-]*(\.[A-Za-z0-9_-]+)*)*")


class KeyExists(FileExistsError):
    """Exclusive creation of a key that is there already."""


class KeyMissing(FileNotFoundError):
    """No such object."""


_OURS = {errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM}


def out_of_reach(error: OSError) -> bool:
    """Whether ``error`` speaks of this process, and not of the object: no permission, no file descriptor or memory left. The object may be
    whole, and a person can help; it must not be taken for damaged. (One that does not answer within the time limit is as good as lost.)"""
    return isinstance(error, PermissionError) or error.errno in _OURS


@dataclass(frozen=True, slots=True)
class Entry:
    """One object of a listing."""

    key: str
    bytes: int
    modified: float
    """Seconds of the store's own :meth:`ObjectStore.clock` at the last write."""


class RangeReader(Protocol):
    """An object opened for reading at any offset."""

    def expect(self, ranges: Sequence[tuple[int, int]]) -> None:
        """A hint: these (offset, bytes) will be read next, in this order. A store with a long way to its data fetches them ahead."""
        ...

    def read_into(self, offset: int, view: memoryview) -> int:
        """Fill ``view`` from ``offset`` on; return the bytes read, fewer only at the object's end."""
        ...


UNDER_WAY = 4
"""Chunks of an object that are being made or written at once, so that the memory of so many is kept. Two processes save 1 GiB to a local
disk (2 cores, 15 interleaved rounds): with 3, 4, 5 and 6 they are 0.79, 0.83, 0.85 and 0.86 times as fast as a raw write."""


@runtime_checkable
class ObjectStore(Protocol):
    """Immutable objects under keys such as ``data/<attempt>/r00000.safetensors``."""

    request_bytes: int
    """What is asked for at once where that may be chosen: small where a request costs nothing, so that the bytes are still in
    the processor's cache when they are checked and copied; large where each waits for an answer from afar. A power of two."""

    def describe(self, key: str = "") -> str:
        """Where the object lies, for messages."""
        ...

    def put_stream(self, key: str, chunks: Iterable[memoryview], size: int) -> None:
        """Create ``key`` from ``chunks`` (``size`` bytes in total; every chunk starts 4096-aligned in memory and, the last
        one apart, is a multiple of 4096 long). They are asked for one at a time, by any thread, and a chunk's memory may be
        used again once the fourth after it is asked for (:data:`UNDER_WAY`). Durable on return. A reader may see a torn object
        before that: only for objects that nothing refers to yet.

        Raises:
            KeyExists: the key is taken. OSError: nothing is left behind, as far as the store allows.
        """
        ...

    def put(self, key: str, data: bytes) -> None:
        """Create a small object exclusively, atomically (readers see all of it or nothing) and durably. Raises KeyExists."""
        ...

    def get(self, key: str) -> bytes:
        """The whole object. Raises KeyMissing."""
        ...

    def open_read(self, key: str) -> AbstractContextManager[RangeReader]:
        """Raises KeyMissing."""
        ...

    def size(self, key: str) -> int | None:
        """Bytes of the object, ``None`` if there is none."""
        ...

    def list(self, prefix: str) -> list[Entry]:
        """Every object below ``prefix`` (a key up to and with a slash), sorted by key."""
        ...

    def clock(self) -> float:
        """The store's time in seconds, for ages: hosts' clocks may differ by days."""
        ...

    def delete(self, key: str) -> bool:
        """Delete one object; ``False`` if it was not there."""
        ...

    def delete_many(self, keys: Sequence[str]) -> Iterator[tuple[str, OSError | None]]:
        """Delete objects, as many with one request as the store can: each key with the reason why it is still there, as it goes. One
        that was not there has gone."""
        ...

    def tidy(self, prefix: str, older_than_s: float) -> int:
        """Remove what interrupted calls left below ``prefix`` (temporary files, empty folders, unfinished uploads); how many."""
        ...


def delete_each(store: ObjectStore, keys: Sequence[str]) -> Iterator[tuple[str, OSError | None]]:
    """:meth:`ObjectStore.delete_many` of a store that has no such request."""
    for key in keys:
        try:
            store.delete(key)
        except OSError as error:
            yield key, error
        else:
            yield key, None


Root = str | os.PathLike[str] | ObjectStore


def store_of(root: Root) -> ObjectStore:
    """The store behind ``root``: a path, a URL, or a store itself.

    ``s3://`` is an :class:`S3Store`, ``file://`` and paths a :class:`PosixStore`, every other URL an :class:`FsspecStore`.

    Raises:
        ValueError: an empty or ill-formed root, or a URL of a kind that nothing here serves.
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


def check_key(key: str) -> str:
    """``key`` itself if it stays below the root: letters, digits, ``_ - .`` and single slashes; no ``..``, no leading dot."""
    if not is_key(key):
        raise ValueError(f"{key!r} is no object key: letters, digits, '_', '-', single dots and slashes only")
    return key


def is_key(text: str) -> bool:
    """Whether :func:`check_key` accepts it. A listing leaves out what it does not: people put files of their own beside ours."""
    return _KEY.fullmatch(text) is not None
