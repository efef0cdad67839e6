"""The interface between checkpoints and their storage: a few operations on immutable objects under string keys.

The code above this module knows nothing about files. A store must ensure exclusive creation (of two creators of one key, exactly one wins),
durability when a call returns, and listings with every object whose creation has returned. Local and shared POSIX file systems ensure that,
and so does S3 with conditional writes.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

ALIGNMENT = 4096
"""Alignment in bytes. Streams and reads with addresses, offsets and lengths that are multiples of it can bypass the page cache."""

_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*(\.[A-Za-z0-9_-]+)*(/[A-Za-z0-9][A-Za-z0-9_-]*(\.[A-Za-z0-9_-]+)*)*")


class KeyExists(FileExistsError):
    """The key to create exists already."""


class KeyMissing(FileNotFoundError):
    """The object does not exist."""


_OURS = {errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM}


def out_of_reach(error: OSError) -> bool:
    """Return whether ``error`` concerns this process rather than the object: no permission, no free file descriptor or memory. The object
    may be intact, and a person can help, so it must not count as damaged. (A store that does not answer in time counts as lost.)"""
    return isinstance(error, PermissionError) or error.errno in _OURS


@dataclass(frozen=True, slots=True)
class Entry:
    """One object of a listing."""

    key: str
    bytes: int
    modified: float
    """Time of the last write, in seconds of the store's own :meth:`ObjectStore.clock`."""


class RangeReader(Protocol):
    """An object opened for reading at any offset."""

    def expect(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Hint that these (offset, bytes) will be read next, in this order. A remote store fetches them ahead."""
        ...

    def read_into(self, offset: int, view: memoryview) -> int:
        """Fill ``view`` from ``offset`` on. Returns the number of bytes read; fewer only at the object's end."""
        ...


UNDER_WAY = 4
"""Chunks of an object that are being made or written at once, each with its own memory. Measured: two processes save 1 GiB to a local disk
(2 cores, 15 interleaved rounds). With 3, 4, 5 and 6 chunks they are 0.79, 0.83, 0.85 and 0.86 times as fast as a raw write."""


@runtime_checkable
class ObjectStore(Protocol):
    """Immutable objects under keys such as ``data/<attempt>/r00000.safetensors``."""

    request_bytes: int
    """Preferred bytes of a request, a power of two. It is small if requests are cheap, so that bytes are still in the processor's cache
    when they are checked and copied. It is large if each request waits for a remote answer."""

    def describe(self, key: str = "") -> str:
        """Return the object's location, for messages."""
        ...

    def put_stream(self, key: str, chunks: Iterable[memoryview], size: int) -> None:
        """Create ``key`` from ``chunks``. Durable on return. A reader may see a torn object before that, so use it only for objects that
        nothing refers to yet.

        Args:
            chunks: every chunk starts 4096-aligned in memory and, except the last, is a multiple of 4096 long. Any thread may request them,
                one at a time. A chunk's memory may be reused once the fourth chunk after it is requested (:data:`UNDER_WAY`).
            size: bytes of all chunks.

        Raises:
            KeyExists: the key exists. OSError: the storage failed; nothing is left behind, as far as the store allows.
        """
        ...

    def put(self, key: str, data: bytes) -> None:
        """Create a small object exclusively, atomically (readers see all of it or nothing) and durably. Raises KeyExists."""
        ...

    def get(self, key: str) -> bytes:
        """Return the whole object. Raises KeyMissing."""
        ...

    def open_read(self, key: str) -> AbstractContextManager[RangeReader]:
        """Open an object for reading. Raises KeyMissing."""
        ...

    def size(self, key: str) -> int | None:
        """Return the bytes of the object; ``None`` if it does not exist."""
        ...

    def list(self, prefix: str) -> list[Entry]:
        """Return every object below ``prefix`` (a key up to and with a slash), sorted by key."""
        ...

    def clock(self) -> float:
        """Return the store's time in seconds, for ages, since hosts' clocks may differ by days."""
        ...

    def delete(self, key: str) -> bool:
        """Delete one object; ``False`` if it did not exist."""
        ...

    def delete_many(self, keys: Sequence[str]) -> Iterator[tuple[str, OSError | None]]:
        """Delete objects, with as few requests as possible. Yields each key with the error that kept it, or None. A key that did not exist
        counts as deleted."""
        ...

    def tidy(self, prefix: str, older_than_s: float) -> int:
        """Remove leftovers of interrupted calls below ``prefix`` (temporary files, empty folders, unfinished uploads). Returns their
        number."""
        ...


def delete_each(store: ObjectStore, keys: Sequence[str]) -> Iterator[tuple[str, OSError | None]]:
    """:meth:`ObjectStore.delete_many` for a store without such a request."""
    for key in keys:
        try:
            store.delete(key)
        except OSError as error:
            yield key, error
        else:
            yield key, None


Root = str | os.PathLike[str] | ObjectStore


def check_key(key: str) -> str:
    """Return ``key`` itself if it stays below the root: letters, digits, ``_ - .`` and single slashes; no ``..``, no leading dot."""
    if not is_key(key):
        raise ValueError(f"{key!r} is not an object key: letters, digits, '_', '-', single dots and slashes only")
    return key


def is_key(text: str) -> bool:
    """Return whether :func:`check_key` accepts ``text``. Listings skip other names, since users put their own files next to ours."""
    return _KEY.fullmatch(text) is not None
