"""Bytes of a unit's FP8 codes and scales on the wire. Pure arithmetic; ``vescale_ray/fsdp/layouts/code_parts.py`` gives their places."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from vescale_ray.block_grid import Grid
from vescale_ray.geometry import Block
from vescale_ray.planner.placement.layout import Layout

ALIGN = 128
"""A rank's part has a multiple of this many bytes."""


@dataclass(frozen=True)
class Codes:
    """Format of codes: one byte per element, and a scale of ``scale_bytes`` per ``tile``."""

    tile: Block
    scale_bytes: int = 4

    def part_bytes(self, layout: Layout) -> int:
        """Return the bytes of each rank's part of an all-gather: the codes of its shard, and room for the most scales that a rank has."""
        scales: Counter[int] = Counter()
        for spec in layout.specs:
            grid = Grid.of(spec.shape, self.tile)
            for rank in layout.ranks_of(spec.name):
                scales[rank] += grid.band_count(*layout.local_range(spec.name, rank)) * grid.columns * self.scale_bytes
        return layout.shard_numel + -(-max(scales.values(), default=0) // ALIGN) * ALIGN
