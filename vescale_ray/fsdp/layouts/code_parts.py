"""Places of the codes and scales of a quantized group in each rank's part of its all-gather. Pure arithmetic.

    a rank's part  |-- codes, one byte for each element of its shard --|-- FP32 scales --|-- exponents --|pad|

Most layouts cut no tile. If whole tiles would take much padding, a shard boundary may lie between two rows of a *band*, a row of tiles.
Each rank sends the scales of all tiles of which it holds some rows, so two ranks send those of a band that their boundary cuts.

The code of element ``e`` of a shard is byte ``e`` of the part. The scales follow from a multiple of 128 bytes on, tensor by tensor. All
parts have the same length, a multiple of 128 bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vescale_ray.block_grid import Grid, Region
from vescale_ray.planner import Layout
from vescale_ray.quantization import Fp8Block

ALIGN = 128
"""Parts are multiples of this many bytes."""


@dataclass(frozen=True)
class CodePiece:
    """A rank's piece of one tensor.

    Attributes:
        codes: bytes of the part that hold its codes.
        scales: bytes of the part that hold its scales.
        regions: its tiles.
        cut: for each region that is a part of a band, its first element and the places of the band's tiles among those that are cut.
    """

    codes: slice
    scales: slice
    regions: tuple[Region, ...]
    cut: dict[int, slice]


class CodeParts:
    """The parts of all ranks of ``layout``.

    Args:
        layout: planned with one byte per element, without gaps.
        forms: format of every tensor.
    """

    def __init__(self, layout: Layout, forms: Mapping[str, Fp8Block]) -> None:
        self.layout, self.forms = layout, dict(forms)
        shapes = {spec.name: spec.shape for spec in layout.specs}
        self.grids = {name: Grid.of(shapes[name], forms[name].block) for name in layout.order}
        self._pieces: list[tuple[int, str, CodePiece]] | None = None
        self.scale_spans: dict[str, dict[int, slice]] = {}
        """Bytes of each tensor's scales in the parts of the ranks that hold some of it, in rank order."""
        self.cut_tiles = 0
        """Number of tiles that shard boundaries cut."""
        self._cut: dict[tuple[str, int], slice] = {}
        ends: dict[int, int] = {}
        for name in sorted(layout.order, key=lambda name: -forms[name].scale_dtype.itemsize):
            self.scale_spans[name] = {}
            for rank in layout.ranks_of(name):
                start = ends.get(rank, layout.shard_numel)
                ends[rank] = start + self.scale_count(name, rank) * forms[name].scale_dtype.itemsize
                self.scale_spans[name][rank] = slice(start, ends[rank])
                self._note_cut(name, layout.local_range(name, rank)[0])
        scale_bytes = max((end - layout.shard_numel for end in ends.values()), default=0)
        self.part_bytes = layout.shard_numel + -(-scale_bytes // ALIGN) * ALIGN

    @property
    def scale_bytes(self) -> int:
        """Bytes of scales in each part, padding included."""
        return self.part_bytes - self.layout.shard_numel

    @property
    def notes(self) -> tuple[str, ...]:
        """One line for each tile that is larger than its tensor, and one if ranks share tiles."""
        large = (replace(spec, block=self.forms[spec.name].block).note for spec in self.layout.specs)
        shared = f"tiles that shard boundaries cut: {self.cut_tiles:,}; each all-gather follows an exchange of their largest magnitudes"
        return (*(note for note in large if note is not None), *([shared] if self.cut_tiles else []))

    def scale_count(self, name: str, rank: int) -> int:
        """Return the number of the tensor's tiles that ``rank`` holds."""
        grid = self.grids[name]
        return grid.band_count(*self.layout.local_range(name, rank)) * grid.columns

    def scales_of(self, name: str, parts: Tensor) -> Tensor:
        """Return a tensor's stored scales, each once, from the parts of all ranks ``(ranks, part_bytes)``."""
        grid, form = self.grids[name], self.forms[name]
        found = []
        for rank, span in self.scale_spans[name].items():
            start = self.layout.local_range(name, rank)[0]
            again = 0 if grid.allows_cut(start) else grid.columns * form.scale_dtype.itemsize  # the rank before sends them, too
            found.append(parts[rank, span.start + again : span.stop])
        return torch.cat(found).view(form.scale_dtype)

    def _note_cut(self, name: str, start: int) -> None:
        grid = self.grids[name]
        key = name, grid.band_of(start)
        if not grid.allows_cut(start) and key not in self._cut:
            self._cut[key] = slice(self.cut_tiles, self.cut_tiles + grid.columns)
            self.cut_tiles += grid.columns

    def pieces(self) -> list[tuple[int, str, CodePiece]]:
        """Return the pieces of all tensors on all ranks."""
        if self._pieces is None:
            held = ((rank, name) for name in self.layout.order for rank in self.layout.ranks_of(name))
            self._pieces = [(rank, name, piece) for rank, name in held if (piece := self.piece(name, rank)) is not None]
        return self._pieces

    def piece(self, name: str, rank: int) -> CodePiece | None:
        """Return the rank's piece of a tensor, or None if it holds none of it."""
        start, end = self.layout.local_range(name, rank)
        if end == start:
            return None
        at, grid = self.layout.shard_offset(name, rank), self.grids[name]
        regions = tuple(grid.regions(start, end))
        first = grid.band_of(start)
        bands = {region.element: (name, first + region.block // grid.columns) for region in regions}
        cut = {element: self._cut[key] for element, key in bands.items() if key in self._cut}
        return CodePiece(slice(at, at + end - start), self.scale_spans[name][rank], regions, cut)
