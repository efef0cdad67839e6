"""Blocks of tokens in memory: threads read what will be needed, in the order of need, within a bound on bytes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from vescale_ray.data.text.encoders import Tokens

READERS = 4
"""Threads that read at the same time. They hide a storage's latency; a local read keeps one of them busy."""


@dataclass
class _Reading:
    """A block that is being read, or was read. ``done`` is set once ``tokens`` or ``error`` is known."""

    done: threading.Event = field(default_factory=threading.Event)
    tokens: Tokens | None = None
    error: BaseException | None = None


class ReadAhead:
    """Reads blocks ahead of :meth:`get`. One thread calls the methods; ``read`` is called in others.

    The threads end when all expected blocks are read, and start again with new ones, so nothing has to be closed.

    Args:
        read: reads a block.
        sizes: bytes of each block.
        most_bytes: bytes of the blocks that are kept, at most. One more block is kept if it is not an expected one, and blocks that are
            still being read when they are no longer expected come on top.

    Attributes:
        waited_s: seconds that :meth:`get` has waited for a block.
        read_bytes: bytes of all blocks read.
    """

    def __init__(self, read: Callable[[int], Tokens], sizes: Sequence[int], most_bytes: int) -> None:
        self._read, self._sizes, self._most = read, sizes, most_bytes
        self.waited_s = 0.0
        self.read_bytes = 0
        self._lock = threading.Lock()
        self._expected: dict[int, None] = {}
        """Blocks that fit into the bound, in the order of need. Owned by the lock, as is all that follows."""
        self._slots: dict[int, _Reading] = {}
        self._unclaimed: list[int] = []
        """Expected blocks that no thread reads yet; the next one is last."""
        self._readers = 0
        self._other: tuple[int, Tokens] | None = None
        """The last block that was not expected."""

    @property
    def held_bytes(self) -> int:
        """Bytes of the blocks that are kept or being read."""
        with self._lock:
            return sum(self._sizes[block] for block in self._slots) + (self._sizes[self._other[0]] if self._other else 0)

    @property
    def waiting_tokens(self) -> int:
        """Number of tokens in memory."""
        with self._lock:
            return sum(len(slot.tokens) for slot in self._slots.values() if slot.tokens is not None)

    def expect(self, blocks: Iterable[int]) -> None:
        """Keep the first of ``blocks`` that fit into the bound, read those that are missing, and forget all others."""
        expected, total = dict[int, None](), 0
        for block in islice(blocks, 2 * len(self._sizes)):  # the rest of an epoch, and all of the next one
            if block in expected:
                continue
            total += self._sizes[block]
            if total > self._most:
                break
            expected[block] = None
        with self._lock:
            self._expected = expected
            for block in [one for one in self._slots if one not in expected]:
                del self._slots[block]
            self._unclaimed = [block for block in reversed(expected) if block not in self._slots]
            missing = min(READERS, len(self._unclaimed)) - self._readers
            self._readers += max(0, missing)
        for _ in range(missing):
            threading.Thread(target=self._read_all, name="vescale-read-ahead", daemon=True).start()

    def get(self, block: int) -> Tokens:
        """Return a block, from memory if it is there. Raises what ``read`` raises; the next call reads again."""
        with self._lock:
            slot = self._slots.get(block)
            if slot is not None and slot.tokens is not None:
                return slot.tokens
            if slot is None and self._other is not None and self._other[0] == block:
                return self._other[1]
            mine = slot is None
            if slot is None:
                slot = _Reading()
                if block in self._expected:
                    self._slots[block] = slot
                    self._unclaimed.remove(block)
        began = time.perf_counter()
        if mine:
            self._fill(block, slot)
        else:
            slot.done.wait()
        self.waited_s += time.perf_counter() - began
        if slot.error is not None:
            with self._lock:
                if self._slots.get(block) is slot:
                    del self._slots[block]
                    self._unclaimed.append(block)
            raise slot.error
        assert slot.tokens is not None
        with self._lock:
            if block not in self._expected:
                self._other = block, slot.tokens
        return slot.tokens

    def _read_all(self) -> None:
        while True:
            with self._lock:
                if not self._unclaimed:
                    self._readers -= 1
                    return
                block = self._unclaimed.pop()
                slot = self._slots[block] = _Reading()
            self._fill(block, slot)

    def _fill(self, block: int, slot: _Reading) -> None:
        try:
            slot.tokens = self._read(block)
            with self._lock:
                self.read_bytes += self._sizes[block]
        except BaseException as error:
            slot.error = error
        slot.done.set()
