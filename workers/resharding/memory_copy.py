"""One rank's shards of one step in host memory, laid out as a checkpoint's object, with the checksums of its blocks.

A checkpoint of the step can be written from such a copy. The checksums find a copy that was damaged in transit or in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vescale_ray.checkpoint.format.digest import BLOCK_BYTES, block_sums, view_of
from vescale_ray.checkpoint.format.object_layout import ObjectLayout, lay_out
from vescale_ray.checkpoint.format.staging import Slab, SlabPool
from vescale_ray.checkpoint.format.tiling import ROWS, Tiling
from vescale_ray.workers.resharding.shards import Piece, Span, Strip, dtype_of


class CopyPlan:
    """Spans of a rank's shards, and their places in a copy."""

    def __init__(self, strips: Sequence[Strip]) -> None:
        self.spans = [span for strip in strips for span in strip.spans]
        self.layout = lay_out([_described(span) for span in self.spans])


class MemoryCopy:
    """One rank's shards of one step. ``step`` is None until they are copied, and if they are damaged."""

    def __init__(self) -> None:
        self._planned: CopyPlan | None = None
        self.slab: Slab | None = None
        self.step: int | None = None
        self.copied: Future[None] | None = None
        self.sums: Future[np.ndarray] | np.ndarray | None = None
        self.verified = False

    def make_room(self, pool: SlabPool, planned: CopyPlan) -> None:
        """Ensure that there is a buffer to copy to, which no checkpoint uses."""
        self._planned = planned
        if self.slab is not None and self.slab.shared:  # a checkpoint is still being written from this buffer
            self.slab.release()
            self.slab = None
        if self.slab is None:
            self.slab = pool.take(self.layout.bytes)
            self.slab.lay(self.layout)

    @property
    def layout(self) -> ObjectLayout:
        assert self._planned is not None
        return self._planned.layout

    @property
    def room(self) -> Slab:
        assert self.slab is not None
        return self.slab

    @property
    def data(self) -> Tensor:
        """The object without its header, which a checkpoint fills in."""
        return self.room.buffer[self.layout.header_bytes : self.layout.bytes]

    @property
    def blocks(self) -> int:
        return -(-(self.layout.bytes - self.layout.header_bytes) // BLOCK_BYTES)

    def count(self) -> np.ndarray:
        return np.array(block_sums(view_of(self.data), BLOCK_BYTES), dtype="<u8").view(np.int64)

    def expected(self) -> np.ndarray:
        if isinstance(self.sums, Future):
            self.sums = self.sums.result()
        assert self.sums is not None
        return self.sums

    def damaged(self) -> int:
        """Return the number of blocks whose checksum differs."""
        return int(np.count_nonzero(self.count() != self.expected()))

    def over(self) -> None:
        """Wait until the thread no longer uses the buffer, whether it succeeded or not."""
        if isinstance(self.sums, Future):
            self.sums.exception()

    def forget(self) -> None:
        self.over()
        self.step, self.copied, self.sums, self.verified = None, None, None, False

    def pieces(self) -> tuple[Piece, ...]:
        """Return the copied pieces as views of the buffer, in the order of the rank's spans."""
        assert self._planned is not None
        spans = self._planned.spans
        found: dict[int, Piece] = {}
        for place, index in zip(self.layout.placed, self.layout.order, strict=True):
            span = spans[index]
            data = self.room.buffer[place.offset : place.offset + span.nbytes].view(dtype_of(span.dtype))
            found[index] = Piece(span.name, span.kind, span.shape, span.start, span.end, data)
        return tuple(found[index] for index in range(len(spans)))


class _Described(NamedTuple):
    name: str
    kind: str
    start: int
    end: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    copied: bool = False
    tiling: Tiling = ROWS


def _described(span: Span) -> _Described:
    return _Described(span.name, span.kind, span.start, span.end, span.shape, dtype_of(span.dtype))
