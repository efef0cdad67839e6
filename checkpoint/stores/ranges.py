"""Read one remote object by several ranges at once, for the S3 and fsspec stores."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

Fetch = Callable[[int, memoryview, threading.Event], None]
"""``fetch(offset, view, cancel)`` fills the whole view or raises OSError. Once ``cancel`` is set, it may stop early and raise."""


class ParallelReader:
    """Reader that fetches announced ranges ahead, in the announced order. Other ranges are fetched on demand, in pieces.

    The read-ahead takes at most ``parallel * range_bytes`` of memory, or one range if that is larger. Threads exist from the first fetch
    until :meth:`close` or the end of the ``with`` block. Only one thread at a time may use a reader; several threads open one each.
    """

    def __init__(self, fetch: Fetch, size: int, *, parallel: int, range_bytes: int) -> None:
        self._fetch = fetch
        self._size = size
        self._parallel = parallel
        self._range_bytes = range_bytes
        self._cancel = threading.Event()
        self._pool: ThreadPoolExecutor | None = None
        self._announced: deque[tuple[int, int]] = deque()
        self._ahead: deque[tuple[int, int, Future[bytearray]]] = deque()

    def __enter__(self) -> ParallelReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def expect(self, ranges: Sequence[tuple[int, int]]) -> None:
        self._announced.extend((offset, min(length, self._size - offset)) for offset, length in ranges if offset < self._size)
        self._fetch_ahead()

    def read_into(self, offset: int, view: memoryview) -> int:
        length = max(0, min(len(view), self._size - offset))
        if not length:
            return 0
        while any(at == offset for at, *_ in self._ahead):
            at, size, future = self._ahead.popleft()  # skipped ranges are dropped
            if at == offset and size == length:
                self._fetch_ahead()
                view[:length] = future.result()
                return length
        self._fetch_now(offset, view[:length])
        return length

    def close(self) -> None:
        self._cancel.set()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _fetch_ahead(self) -> None:
        budget = self._parallel * self._range_bytes
        held = sum(size for _, size, _ in self._ahead)
        while self._announced and (not self._ahead or held + self._announced[0][1] <= budget):
            offset, size = self._announced.popleft()
            self._ahead.append((offset, size, self._workers().submit(self._fetch_whole, offset, size)))
            held += size

    def _fetch_whole(self, offset: int, size: int) -> bytearray:
        buffer = bytearray(size)
        self._fetch(offset, memoryview(buffer), self._cancel)
        return buffer

    def _fetch_now(self, offset: int, view: memoryview) -> None:
        step = self._range_bytes
        if len(view) <= step:
            self._fetch(offset, view, self._cancel)
            return
        stop = threading.Event()
        work = [self._workers().submit(self._fetch, offset + k, view[k : k + step], stop) for k in range(0, len(view), step)]
        try:
            for future in work:
                future.result()
        finally:
            stop.set()
            wait(work)  # no thread may write into the caller's memory after this call

    def _workers(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._parallel, thread_name_prefix="checkpoint-read")
        return self._pool
