"""Places of the codes and scales of a quantized group in each rank's part of its all-gather. Pure arithmetic.

    a rank's part  |-- codes, one byte for each element of its shard --|-- FP32 scales --|-- exponents --|pad|

No shard boundary cuts a tile, so each rank holds whole tiles and their scales. The code of element ``e`` of a shard is byte ``e`` of the
part. The scales follow from a multiple of 128 bytes on, tensor by tensor. All parts have the same length, a multiple of 128 bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
    """

    codes: slice
    scales: slice
    regions: tuple[Region, ...]


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
        ends: dict[int, int] = {}
        for name in sorted(layout.order, key=lambda name: -forms[name].scale_dtype.itemsize):
            self.scale_spans[name] = {}
            for rank in layout.ranks_of(name):
                start = ends.get(rank, layout.shard_numel)
                ends[rank] = start + self.scale_count(name, rank) * forms[name].scale_dtype.itemsize
                self.scale_spans[name][rank] = slice(start, ends[rank])
        scale_bytes = max((end - layout.shard_numel for end in ends.values()), default=0)
        self.part_bytes = layout.shard_numel + -(-scale_bytes // ALIGN) * ALIGN

    @property
    def code_bytes(self) -> int:
        """Bytes of codes in each part, padding between tensors included."""
        return self.layout.shard_numel

    @property
    def scale_bytes(self) -> int:
        """Bytes of scales in each part, padding included."""
        return self.part_bytes - self.layout.shard_numel

    def scale_count(self, name: str, rank: int) -> int:
        """Return the number of the tensor's tiles that ``rank`` holds."""
        grid, (start, end) = self.grids[name], self.layout.local_range(name, rank)
        return (grid.band_of(end) - grid.band_of(start)) * grid.columns

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
        at = self.layout.shard_offset(name, rank)
        return CodePiece(slice(at, at + end - start), self.scale_spans[name][rank], tuple(self.grids[name].regions(start, end)))
