"""A store that fails on purpose, over any back end, to test how a program handles storage failures."""

from __future__ import annotations

import errno
import fnmatch
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from vescale_ray.checkpoint.format.digest import view_of
from vescale_ray.checkpoint.format.pages import aligned_buffer
from vescale_ray.checkpoint.stores.store import ALIGNMENT, Entry, KeyMissing, ObjectStore, RangeReader, delete_each

OPERATIONS = ("put_stream", "put", "get", "open_read", "read", "size", "list", "clock", "delete", "tidy")
ACTIONS = ("error", "hang", "delay", "lost", "torn", "cut", "flip", "short", "wrong_range", "missing", "stale")
_POSSIBLE = {
    "torn": ("put_stream", "put"),
    "cut": ("put_stream", "put"),
    "flip": ("put_stream", "put", "get", "read"),
    "short": ("get", "read"),
    "wrong_range": ("read",),
    "missing": ("get", "open_read", "size", "delete"),
    "stale": ("list",),
}


@dataclass(frozen=True)
class Fault:
    """A failure of certain store calls.

    Args:
        operation: one of ``OPERATIONS``; ``read`` is ``read_into`` of an opened object.
        action: the failure:
            ``error``: raise ``OSError(code)`` and do nothing. ``hang``: raise a timeout after ``seconds`` and do nothing. ``delay``: do the
                call after ``seconds``. ``lost``: do the call, then raise ``OSError(code)``. ``torn``: store only the first ``at`` bytes,
                then raise. ``cut``: the same, but report success. ``flip``: change one bit of the stored or read bytes. ``short``: read
                only ``at`` bytes. ``wrong_range``: read at a neighbouring offset. ``missing``: report that the object does not exist.
                ``stale``: leave keys out of a listing.
        key: glob of keys; for ``stale``, of the entries left out; for other listings and ``tidy``, of the prefix.
        after, times: number of matching calls that succeed first, and number that then fail (``None``: all).
        at: byte offset; the middle by default.
    """

    operation: str
    action: str
    key: str = "*"
    after: int = 0
    times: int | None = 1
    code: int = errno.EIO
    seconds: float = 0.0
    at: int | None = None

    def __post_init__(self) -> None:
        if self.operation not in OPERATIONS:
            raise ValueError(f"operation {self.operation!r} is none of {', '.join(OPERATIONS)}")
        if self.action not in ACTIONS:
            raise ValueError(f"action {self.action!r} is none of {', '.join(ACTIONS)}")
        possible = _POSSIBLE.get(self.action, OPERATIONS)
        if self.operation not in possible:
            raise ValueError(f"action {self.action!r} does not apply to {self.operation!r}; it applies to {', '.join(possible)}")


class FaultyStore:
    """``store`` with ``faults``. ``fired`` lists ``(fault, key)`` of every failure. Thread-safe.

    Args:
        sleep: function with which ``hang`` and ``delay`` wait; tests can replace it.
    """

    def __init__(self, store: ObjectStore, faults: Sequence[Fault] = (), *, sleep: Callable[[float], None] = time.sleep) -> None:
        self.store = store
        self.request_bytes = store.request_bytes
        self.faults = tuple(faults)
        self.fired: list[tuple[Fault, str]] = []
        self._seen = [0] * len(self.faults)
        self._sleep = sleep
        self._lock = threading.Lock()

    def describe(self, key: str = "") -> str:
        return self.store.describe(key)

    def put_stream(self, key: str, chunks: Iterable[memoryview], size: int) -> None:
        fault = self._before("put_stream", key)
        if fault and fault.action in ("torn", "cut"):
            # All pages but the last are whole, as the store interface requires. The object looks as if a client published a partial upload.
            at = min(size, fault.at if fault.at is not None else size // 2)
            self.store.put_stream(key, _limited(chunks, at), at)
            if fault.action == "torn":
                raise self._error(fault, key)
            return
        if fault and fault.action == "flip":
            chunks = _flipped(chunks, fault.at if fault.at is not None else size // 2)
        self.store.put_stream(key, chunks, size)
        self._after(fault, key)

    def put(self, key: str, data: bytes) -> None:
        fault = self._before("put", key)
        at = fault.at if fault and fault.at is not None else len(data) // 2
        if fault and fault.action in ("torn", "cut"):
            self.store.put(key, data[:at])
            if fault.action == "torn":
                raise self._error(fault, key)
            return
        self.store.put(key, _with_flip(data, at) if fault and fault.action == "flip" else data)
        self._after(fault, key)

    def get(self, key: str) -> bytes:
        fault = self._before("get", key)
        data = self.store.get(key)
        at = fault.at if fault and fault.at is not None else len(data) // 2
        if fault and fault.action == "flip":
            data = _with_flip(data, at)
        if fault and fault.action == "short":
            data = data[:at]
        self._after(fault, key)
        return data

    @contextmanager
    def open_read(self, key: str) -> Iterator[FaultyReader]:
        fault = self._before("open_read", key)
        with self.store.open_read(key) as reader:
            self._after(fault, key)
            yield FaultyReader(self, key, reader)

    def size(self, key: str) -> int | None:
        fault = self._before("size", key, missing=False)
        if fault and fault.action == "missing":
            return None
        found = self.store.size(key)
        self._after(fault, key)
        return found

    def list(self, prefix: str) -> list[Entry]:
        found: list[Entry] | None = None

        def hides(pattern: str) -> bool:
            nonlocal found
            found = self.store.list(prefix) if found is None else found
            return any(fnmatch.fnmatchcase(entry.key, pattern) for entry in found)

        fault = self._before("list", prefix, hides=hides)
        found = self.store.list(prefix) if found is None else found
        if fault and fault.action == "stale":
            found = [entry for entry in found if not fnmatch.fnmatchcase(entry.key, fault.key)]
        self._after(fault, prefix)
        return found

    def clock(self) -> float:
        fault = self._before("clock", "")
        found = self.store.clock()
        self._after(fault, "")
        return found

    def delete(self, key: str) -> bool:
        fault = self._before("delete", key, missing=False)
        if fault and fault.action == "missing":
            return False
        found = self.store.delete(key)
        self._after(fault, key)
        return found

    def delete_many(self, keys: Sequence[str]) -> Iterator[tuple[str, OSError | None]]:
        """Delete key by key; the faults of ``delete`` apply to each key."""
        return delete_each(self, keys)

    def tidy(self, prefix: str, older_than_s: float) -> int:
        fault = self._before("tidy", prefix)
        found = self.store.tidy(prefix, older_than_s)
        self._after(fault, prefix)
        return found

    def _before(self, operation: str, key: str, *, missing: bool = True, hides: Callable[[str], bool] = bool) -> Fault | None:
        """The fault that applies to this call, if any; raises if it applies before the call. A ``stale`` fault applies to listings in which
        ``hides`` finds entries to leave out."""
        fault = self._strike(operation, key, hides)
        if fault is None:
            return None
        if fault.action == "error":
            raise self._error(fault, key)
        if fault.action == "hang":
            self._sleep(fault.seconds)
            raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT), self.describe(key))
        if fault.action == "delay":
            self._sleep(fault.seconds)
        if fault.action == "missing" and missing:
            raise KeyMissing(errno.ENOENT, "no such object", self.describe(key))
        return fault

    def _strike(self, operation: str, key: str, hides: Callable[[str], bool]) -> Fault | None:
        with self._lock:
            for index, fault in enumerate(self.faults):
                if fault.operation != operation:
                    continue
                if not (hides(fault.key) if fault.action == "stale" else fnmatch.fnmatchcase(key, fault.key)):
                    continue
                self._seen[index] += 1
                count = self._seen[index] - fault.after
                if count > 0 and (fault.times is None or count <= fault.times):
                    self.fired.append((fault, key))
                    return fault
        return None

    def _after(self, fault: Fault | None, key: str) -> None:
        if fault and fault.action == "lost":
            raise self._error(fault, key)

    def _error(self, fault: Fault, key: str) -> OSError:
        return OSError(fault.code, os.strerror(fault.code), self.describe(key))


class FaultyReader:
    """An opened object whose reads are subject to the store's ``read`` faults."""

    def __init__(self, store: FaultyStore, key: str, reader: RangeReader) -> None:
        self._store = store
        self._key = key
        self._reader = reader

    def expect(self, ranges: Sequence[tuple[int, int]]) -> None:
        self._reader.expect(ranges)

    def read_into(self, offset: int, view: memoryview) -> int:
        fault = self._store._before("read", self._key)
        if fault and fault.action == "short":
            at = min(len(view), fault.at if fault.at is not None else len(view) // 2)
            return self._reader.read_into(offset, view[:at])
        if fault and fault.action == "wrong_range":
            other = offset - ALIGNMENT if offset >= ALIGNMENT else offset + ALIGNMENT
            return self._reader.read_into(other, view)
        count = self._reader.read_into(offset, view)
        if fault and fault.action == "flip" and count:
            view[min(count - 1, fault.at if fault.at is not None else count // 2)] ^= 1
        self._store._after(fault, self._key)
        return count


def _limited(chunks: Iterable[memoryview], size: int) -> Iterator[memoryview]:
    """The first ``size`` bytes, in separate memory, since the store may still write them when the next chunk overwrites theirs. The rest is
    also requested, as by a store that took everything but kept a part."""
    left = size
    for chunk in chunks:
        if left:
            kept = aligned_buffer(min(left, len(chunk)))
            view_of(kept)[:] = chunk[:left]
            yield view_of(kept)
            left -= len(kept)


def _flipped(chunks: Iterable[memoryview], at: int) -> Iterator[memoryview]:
    position = 0
    for chunk in chunks:
        if position <= at < position + len(chunk):
            chunk[at - position] ^= 1
        position += len(chunk)
        yield chunk


def _with_flip(data: bytes, at: int) -> bytes:
    harmed = bytearray(data)
    if harmed:
        harmed[min(at, len(harmed) - 1)] ^= 1
    return bytes(harmed)
