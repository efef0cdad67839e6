"""Positions of the scales of quantized tiles, if a group's parameters are gathered in FP8.

No shard boundary cuts a tile, so each rank holds the scales of whole tiles. They lie at the start of the rank's part, for each of
its tensors in the order of the layout. All parts have the same length, a multiple of 128 bytes, so one aligned all-gather, separate from
that of the parameters, carries the scales. (A separate layout with scales as tensors would cut elsewhere than the parameters'
layout, and ranks would have to send each other scales.)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from vescale_ray.planner.placement.layout import Layout

SCALE_BYTES = 4
"""Bytes of one scale (FP32)."""


@dataclass(frozen=True)
class ScaleShards:
    """The scales of ``rows x columns`` tiles of the tensors in ``layout`` whose block is a multiple of ``rows`` rows.

    Raises:
        ValueError: no tensor of the layout keeps tiles of that many rows whole.
    """

    layout: Layout
    rows: int = 128
    columns: int = 128
    align: int = 128
    """Alignment of each rank's part, in bytes."""

    def __post_init__(self) -> None:
        if not self.names:
            raise ValueError(
                f"no tensor of this layout has blocks of {self.rows} rows: plan it with Block.tile({self.rows}, {self.columns})"
            )

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The tensors that have scales, in the layout's order."""
        specs = {s.name: s for s in self.layout.specs}
        found = []
        for name in self.layout.order:
            spec = specs[name]
            if len(spec.shape) < 2 or spec.block is None or not spec.numel:
                continue
            whole = self.layout.granularity[name] % (self.rows * spec.shape[-1]) == 0
            if whole or self.layout.granularity[name] == spec.numel:
                found.append(name)
        return tuple(found)

    def count(self, name: str, rank: int) -> int:
        """Return the number of scales of the tensor's tiles that ``rank`` holds."""
        if name not in self.names:
            return 0
        spec = next(s for s in self.layout.specs if s.name == name)
        start, end = self.layout.local_range(name, rank)
        width = spec.shape[-1]
        height = spec.stored_shape[-2]  # a tile does not reach from one matrix of a stack into the next
        return sum(self._tile_rows(first, last) for first, last in _by_matrix(start // width, -(-end // width), height)) * -(
            -width // self.columns
        )

    def _tile_rows(self, first: int, last: int) -> int:
        return -(-last // self.rows) - first // self.rows if last > first else 0

    def offset(self, name: str, rank: int) -> int:
        """Return the offset of the tensor's scales in ``rank``'s part."""
        before = self.names[: self.names.index(name)]
        return sum(self.count(other, rank) for other in before)

    @cached_property
    def shard_numel(self) -> int:
        """Scales in each rank's part, padding included. Cost: one step for each tensor on each rank that holds a part of it."""
        counts: dict[int, int] = {}
        for name in self.names:
            for rank in self.layout.ranks_of(name):
                counts[rank] = counts.get(rank, 0) + self.count(name, rank)
        quantum = self.align // SCALE_BYTES
        return -(-max(counts.values(), default=0) // quantum) * quantum


def _by_matrix(first: int, last: int, height: int) -> list[tuple[int, int]]:
    """Split rows ``[first, last)`` of a stack into rows of each matrix of ``height`` rows."""
    found = []
    while first < last:
        stop = min(last, (first // height + 1) * height)
        base = first // height * height
        found.append((first - base, stop - base))
        first = stop
    return found
