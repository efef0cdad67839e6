"""A file system in memory whose every read takes a time, as an object store's does: ``slow://``."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import fsspec
from fsspec.implementations.memory import MemoryFileSystem


class SlowFileSystem(MemoryFileSystem):
    """``latency`` seconds a read; ``reads``: path, start and end of each; ``fails``: raise an error in the next reads."""

    protocol = "slow"
    latency = 0.0
    reads: list[tuple[str, int | None, int | None]] = []
    fails = 0
    _lock = threading.Lock()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("slow://").strip("/")

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        cls = type(self)
        with cls._lock:
            cls.reads.append((path, start, end))
            fail = cls.fails > 0
            cls.fails -= fail
        time.sleep(cls.latency)
        if fail:
            raise TimeoutError("the storage does not answer")
        content: bytes = super().cat_file(path, start=start, end=end, **kwargs)
        return content


@contextmanager
def slow_files(files: dict[str, bytes]) -> Iterator[type[SlowFileSystem]]:
    """Register ``slow://`` with these files, by path without a scheme. The latency is 0 until the test sets it."""
    fsspec.register_implementation("slow", SlowFileSystem, clobber=True)
    system = SlowFileSystem()
    SlowFileSystem.latency, SlowFileSystem.fails = 0.0, 0
    for path, content in files.items():
        system.pipe_file(path, content)
    SlowFileSystem.reads.clear()
    try:
        yield SlowFileSystem
    finally:
        SlowFileSystem.latency = 0.0
        for path in files:
            system.rm_file(path)
