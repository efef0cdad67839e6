"""Device memory that was freed while kernels still used it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

EVERYWHERE = (0, 1 << 64)
"""The range of all addresses."""


class FreedMemory:
    """Address ranges that the host has freed, with an event of the last kernels that use them.

    The host runs ahead of a device. An allocator returns freed memory to the stream that allocated it at once, without an event. So the
    next user of a range lets its stream wait (:meth:`reuse`), but only for the kernels that used that range.
    """

    __slots__ = ("_ranges",)

    def __init__(self) -> None:
        self._ranges: list[tuple[tuple[int, int], Any]] = []

    def add(self, addresses: tuple[int, int], event: Any) -> None:
        """Record that the kernels before ``event`` are the last to use these addresses. ``event``: None on the CPU."""
        if event is not None:
            self._ranges.append((addresses, event))

    def reuse(self, addresses: tuple[int, int], stream: Any) -> None:
        """Let ``stream`` wait for the last use of every byte of these addresses."""
        start, end = addresses
        later = []
        for (first, last), event in self._ranges:
            if first < end and start < last:
                stream.wait_event(event)
            if not (start <= first and last <= end or event.query()):
                later.append(((first, last), event))
        self._ranges = later

    @contextmanager
    def borrowed(self, stream: Any) -> Iterator[None]:
        """Let operations on ``stream`` get some of this memory from the allocator inside the block, for temporaries. They wait for the last
        use of all addresses, and later users wait for them. ``stream``: None on the CPU."""
        for _, event in self._ranges:
            stream.wait_event(event)
        self._ranges = [(addresses, event) for addresses, event in self._ranges if not event.query()]
        yield
        self.add(EVERYWHERE, None if stream is None else stream.record_event())
