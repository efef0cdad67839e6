"""The blocks into which a tensor is divided, computed from its shape alone, in integers.

A tensor counts as one or more matrices. With 2 dimensions it is one matrix. With 3 it is a stack of them (a fused tensor's
experts). With 4 or more it is one matrix of ``shape[0]`` rows (a convolution's filters). A matrix is cut into *bands*, runs of
consecutive elements, and each band into *columns* of blocks. The last of each may be smaller, and none runs into the next matrix::

    Block.tile(r, c)    a band is r rows,           ceil(cols / c) blocks each
    Block.rows(r)       a band is r rows,           one block each
    n (flat)            a band is n elements,       one block each       (n elements in memory order, across rows)
    Block.tensor()      a band is a whole matrix,   one block each

A shard ends between bands, so that everything per block is local, and the same on any number of ranks. Only FP8 weights may be cut
between rows within a band: the ranks then exchange the largest magnitudes of its blocks.
Optimizers with blocks (8-bit AdamW, Shampoo, SOAP) and FP8 weights use this module.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vescale_ray.geometry import Block, Shape

BlockSpec = Block | int
"""A block, or the number of elements of a flat block."""


def block_text(block: BlockSpec) -> str:
    """Return the text of a block for param groups and checkpoints: ``"flat 1024"``, ``"tile 32x32"``, ``"rows 32"``, ``"tensor"``."""
    if isinstance(block, int):
        return f"flat {block}"
    if block.kind == "tile":
        return f"tile {block.row_count}x{block.col_count}"
    return f"rows {block.row_count}" if block.kind == "rows" else block.kind


def parse_block(block: BlockSpec | str) -> BlockSpec:
    """Parse a block from its text; return blocks and numbers unchanged.

    Raises:
        ValueError: the value is not a block; the message shows it.
    """
    fault = ValueError(
        f"block = {block!r}: give a number of elements (1024), Block.tile(32, 32), Block.rows(32), or text such as 'tile 32x32'"
    )
    if isinstance(block, bool) or (isinstance(block, int) and block < 1):
        raise fault
    if isinstance(block, int | Block):
        if isinstance(block, Block) and block.kind == "element":
            raise fault
        return block
    kind, _, size = str(block).partition(" ")
    try:
        if kind == "flat" and int(size) > 0:
            return int(size)
        if kind == "tile":
            rows, cols = map(int, size.split("x"))
            return Block.tile(rows, cols)
        if kind == "rows":
            return Block.rows(int(size))
    except ValueError:
        raise fault from None
    if (kind, size) == ("tensor", ""):
        return Block.tensor()
    raise fault


class Region(NamedTuple):
    """A run of equal bands: ``bands`` bands of ``rows`` x ``cols`` elements, in blocks of ``rows`` x ``block_cols``."""

    element: int
    """First element, counted from the start of the shard."""
    block: int
    """First block, counted from the start of the shard."""
    bands: int
    rows: int
    cols: int
    block_cols: int

    @property
    def band_numel(self) -> int:
        return self.rows * self.cols

    @property
    def columns(self) -> int:
        """Number of blocks in one band."""
        return -(-self.cols // self.block_cols)


@dataclass(frozen=True)
class Grid:
    """The blocks of a tensor.

    Attributes:
        lead: dimensions before the matrix: () or (experts,).
        matrix_numel: elements of one matrix.
        row_numel: columns of the matrix; for flat blocks, elements of a block.
        band_rows, block_cols: rows and columns of a block that is not at an edge.
        per_row: number of flat blocks in a row of the matrix, if that is a whole number; else 0.
    """

    shape: Shape
    block: BlockSpec
    lead: Shape
    matrix_numel: int
    row_numel: int
    band_rows: int
    block_cols: int
    per_row: int = 0

    @classmethod
    def of(cls, shape: Sequence[int], block: BlockSpec) -> Grid:
        """Build the grid; raises ValueError for a tensor with fewer than 2 dimensions or without elements."""
        shape = tuple(int(n) for n in shape)
        if len(shape) < 2 or 0 in shape:
            raise ValueError(f"a tensor of shape {shape} has no matrix to cut into blocks")
        lead = shape[:1] if len(shape) == 3 else ()
        rows = shape[1] if len(shape) == 3 else shape[0]
        cols = math.prod(shape) // (rows * math.prod(lead))
        if isinstance(block, int):
            n = min(block, rows * cols)
            return cls(shape, block, lead, rows * cols, n, 1, n, 0 if cols % n else cols // n)
        if block.kind == "tensor":
            return cls(shape, block, lead, rows * cols, cols, rows, cols)
        return cls(shape, block, lead, rows * cols, cols, min(block.row_count, rows), min(block.col_count or cols, cols))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def band_numel(self) -> int:
        return self.band_rows * self.row_numel

    @property
    def bands(self) -> int:
        """Number of bands in one matrix."""
        return -(-self.matrix_numel // self.band_numel)

    @property
    def columns(self) -> int:
        """Number of blocks in one band."""
        return -(-self.row_numel // self.block_cols)

    @property
    def state_shape(self) -> Shape:
        """Shape of a state with one entry per block: ``(*lead, bands, columns)``; flat blocks that fill rows are counted per row."""
        if self.per_row:
            return (*self.lead, self.bands // self.per_row, self.per_row)
        return (*self.lead, self.bands, self.columns)

    @property
    def band_dims(self) -> int:
        """Number of leading dimensions of ``state_shape`` that together count bands."""
        return len(self.lead) + (2 if self.per_row else 1)

    def allows_cut(self, element: int) -> bool:
        """Return whether a shard may end before ``element`` of the tensor without cutting a block."""
        return element % self.matrix_numel % self.band_numel == 0

    def band_of(self, element: int) -> int:
        """Return the number of bands that end before ``element``: the index of its band, or the number of all at the tensor's end."""
        return element // self.matrix_numel * self.bands + element % self.matrix_numel // self.band_numel

    def band_count(self, start: int, end: int) -> int:
        """Return the number of bands with elements in ``[start, end)``."""
        return self.band_of(end - 1) + 1 - self.band_of(start) if end > start else 0

    def regions(self, start: int, end: int) -> Iterator[Region]:
        """Yield the bands of elements ``[start, end)`` in memory order, in as few regions as possible.

        The range begins and ends between rows. A band that lies in it only in part is a region of its own.
        """
        if not any(position % self.band_numel for position in (self.matrix_numel, start, end)):  # all bands are alike
            if end > start:
                yield self._region(0, 0, end - start)
            return
        position = start
        while position < end:
            stop = min(end, (position // self.matrix_numel + 1) * self.matrix_numel)
            if inside := position % self.matrix_numel % self.band_numel:
                stop = min(stop, position - inside + self.band_numel)
            whole = (stop - position) // self.band_numel * self.band_numel
            band = self.band_of(position) - self.band_of(start)
            if whole:
                yield self._region(position - start, band, whole)
            rest = stop - position - whole
            if rest:
                rows = max(1, rest // self.row_numel)
                cols = rest // rows
                block = (band + whole // self.band_numel) * self.columns
                yield Region(position + whole - start, block, 1, rows, cols, min(self.block_cols, cols))
            position = stop

    def _region(self, element: int, band: int, numel: int) -> Region:
        return Region(element, band * self.columns, numel // self.band_numel, self.band_rows, self.row_numel, self.block_cols)

    def policy_block(self) -> Block:
        """Return the block that ``block_policy`` must give for this tensor, so that ``fully_shard`` cuts no block."""
        if len(self.shape) >= 4:
            return Block.tensor()
        rows, cols = self.shape[-2:]
        need = self.band_rows if self.row_numel == cols else self.band_numel // math.gcd(self.band_numel, cols)
        return Block.rows(min(need, rows))
