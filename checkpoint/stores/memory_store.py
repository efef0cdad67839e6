"""A store in this process's memory, for tests and for state that need not outlive the process."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from .store import Entry, KeyExists, KeyMissing, check_key, delete_each


class MemoryStore:
    """A store with all guarantees of the interface, exclusive creation included, except durability. Thread-safe.

    ``objects`` holds ``{key: (bytes, time of creation)}``, which a test may damage. Other processes do not see it.
    """

    request_bytes = 1 << 20

    def __init__(self, name: str = "memory") -> None:
        self.name = name
        self.objects: dict[str, tuple[bytes, float]] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"MemoryStore({self.name!r}, {len(self.objects)} objects)"

    def describe(self, key: str = "") -> str:
        return f"<{self.name}>/{key}" if key else f"<{self.name}>"

    def put_stream(self, key: str, chunks: Iterable[memoryview], size: int) -> None:
        if check_key(key) in self.objects:
            raise KeyExists(errno.EEXIST, "exists already", self.describe(key))
        body = bytearray(size)
        position = 0
        for chunk in chunks:
            if position + len(chunk) <= size:
                body[position : position + len(chunk)] = chunk
            position += len(chunk)
        if position != size:
            raise ValueError(f"{key}: {position} bytes were streamed, {size} announced")
        self.put(key, bytes(body))

    def put(self, key: str, data: bytes) -> None:
        check_key(key)
        with self._lock:
            if key in self.objects:
                raise KeyExists(errno.EEXIST, "exists already", self.describe(key))
            self.objects[key] = (bytes(data), self.clock())

    def get(self, key: str) -> bytes:
        found = self.objects.get(check_key(key))
        if found is None:
            raise KeyMissing(errno.ENOENT, "no such object", self.describe(key))
        return found[0]

    @contextmanager
    def open_read(self, key: str) -> Iterator[MemoryReader]:
        yield MemoryReader(self.get(key))

    def size(self, key: str) -> int | None:
        found = self.objects.get(check_key(key))
        return None if found is None else len(found[0])

    def list(self, prefix: str) -> list[Entry]:
        with self._lock:
            return [Entry(key, len(data), when) for key, (data, when) in sorted(self.objects.items()) if key.startswith(prefix)]

    def clock(self) -> float:
        return time.time()

    def delete(self, key: str) -> bool:
        with self._lock:
            return self.objects.pop(check_key(key), None) is not None

    def delete_many(self, keys: Sequence[str]) -> Iterator[tuple[str, OSError | None]]:
        return delete_each(self, keys)

    def tidy(self, prefix: str, older_than_s: float) -> int:
        return 0


class MemoryReader:
    """An object's bytes at the time when it was opened."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)

    def expect(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Do nothing."""

    def read_into(self, offset: int, view: memoryview) -> int:
        found = self._data[offset : offset + len(view)]
        view[: len(found)] = found
        return len(found)
