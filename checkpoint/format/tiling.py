"""The order in which a tensor's elements are stored: row by row, or tile by tile.

Tensor parallelism cuts many weights by columns. Row by row, such a tensor is one interval per row and rank, hundreds of thousands in a
model. Tile by tile, each rank's part is one interval:

    [3, 4] cut in two along dimension 1       by rows   0 1 2 3 4 5 6 7 8 9 10 11
       0  1 |  2  3                           by tiles  0 1 4 5 8 9 | 2 3 6 7 10 11
       4  5 |  6  7
       8  9 | 10 11

Tiles are in row-major order of their grid, and elements in row-major order within each tile. The code uses integers only, in numpy columns,
since a tensor can have as many rows as a vocabulary has words.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from vescale_ray.geometry import Box, Shape, intervals

MOST_TILES = 1 << 16
"""Maximum number of tiles of a tensor. One with more is stored by rows."""

Sizes = tuple[tuple[int, int], ...]
"""(size, count) along a dimension, in order."""
Runs = tuple[np.ndarray, np.ndarray, np.ndarray]
"""For each run its first element, its length, and the number of requested elements before it: int64."""


@dataclass(frozen=True)
class Tiling:
    """An order of elements. ``cuts``: (dimension, sizes) for each cut dimension, ascending; none means by rows. Equal tilings are equal
    orders.

    The first dimension is never cut, since a range of rows is one interval anyway.
    """

    cuts: tuple[tuple[int, Sizes], ...] = ()

    @staticmethod
    def of(shape: Sequence[int], parts: Mapping[int, Sequence[int]]) -> Tiling:
        """Return the order for a tensor whose holders have the sizes ``parts[d]`` along dimension ``d``."""
        cuts = []
        for dim, sizes in sorted(parts.items()):
            counted: list[list[int]] = []
            for size in sizes:
                if size and counted and counted[-1][0] == size:
                    counted[-1][1] += 1
                elif size:
                    counted.append([size, 1])
            if counted not in ([], [[shape[dim], 1]]):
                cuts.append((dim, tuple((size, count) for size, count in counted)))
        found = Tiling(tuple(cuts))
        in_rows = not math.prod(shape) or len(cuts) == 1 and math.prod(shape[: cuts[0][0]]) == 1
        return ROWS if in_rows or found.tiles > MOST_TILES else found

    @staticmethod
    def around(shape: Sequence[int], box: Box) -> Tiling:
        """Return a tiling in which ``box`` is a tile, or a range of rows of a tile, so that it is stored in one or few intervals."""
        return Tiling.of(shape, {d: [o, n, shape[d] - o - n] for d, (o, n) in enumerate(zip(*box, strict=True)) if d})

    @property
    def tiles(self) -> int:
        return math.prod(sum(count for _, count in sizes) for _, sizes in self.cuts)

    def problem(self, shape: Sequence[int]) -> str | None:
        """Return the reason why this order does not fit a tensor of this shape; None if it fits."""
        dims = [dim for dim, _ in self.cuts]
        if any(not 0 < dim < len(shape) for dim in dims) or dims != sorted(set(dims)):
            return f"tiles along dimensions {dims} of shape {tuple(shape)}"
        for dim, sizes in self.cuts:
            if not sizes or any(size < 1 or count < 1 for size, count in sizes) or sum(s * c for s, c in sizes) != shape[dim]:
                return f"tiles of {[list(one) for one in sizes[:8]]} along dimension {dim} of shape {tuple(shape)}"
        return f"{self.tiles} tiles, more than {MOST_TILES}" if self.tiles > MOST_TILES else None

    def held(self, shape: Shape, boxes: Sequence[Box]) -> list[tuple[int, int]] | None:
        """Return where the boxes are stored in this order, as intervals; None if a box crosses tiles."""
        if not self.cuts:
            return intervals(shape, boxes)
        grid = _grid(shape, self)
        found: list[tuple[int, int]] = []
        for offsets, sizes in boxes:
            if not math.prod(sizes):
                continue
            place = grid.tile_of(offsets, sizes)
            if place is None:
                return None
            base, tile, within = place
            for start, end in intervals(tile, [(within, sizes)]):
                if found and found[-1][1] == base + start:
                    found[-1] = found[-1][0], base + end
                else:
                    found.append((base + start, base + end))
        return found

    def stored(self, shape: Shape, start: int, end: int) -> Runs:
        """Return where the elements that are ``[start, end)`` in row order are stored in this order."""
        runs = _one(start, end)
        return _grid(shape, self).stored(*runs) if self.cuts and end > start else runs

    def by_rows(self, shape: Shape, start: int, end: int) -> Runs:
        """Return the row-order positions of the elements that are stored at ``[start, end)`` in this order."""
        return _grid(shape, self).by_rows(start, end) if self.cuts and end > start else _one(start, end)

    def to_json(self) -> list[Any]:
        return [[dim, [list(one) for one in sizes]] for dim, sizes in self.cuts]

    @staticmethod
    def from_json(raw: Any) -> Tiling:
        """Return a tiling from JSON. Raises ValueError if it is not a list of cuts; :meth:`problem` tells whether they fit a shape."""
        try:
            if not isinstance(raw, list):
                raise TypeError
            cuts = tuple((dim, tuple((size, count) for size, count in sizes)) for dim, sizes in raw)
        except (TypeError, ValueError):
            raise ValueError(f"tiles {str(raw)[:80]} are not a list of [dimension, [[size, count], ..]]") from None
        if any(type(n) is not int for dim, sizes in cuts for n in (dim, *(m for one in sizes for m in one))):
            raise ValueError(f"tiles {str(raw)[:80]} hold something else than integers")
        return Tiling(cuts)


ROWS = Tiling()


def between(shape: Shape, order: Tiling, other: Tiling, start: int, end: int) -> Runs:
    """Return where the elements stored at ``[start, end)`` in ``order`` are stored in the order ``other``."""
    if order == other or start == end:
        return _one(start, end)
    runs = order.by_rows(shape, start, end)
    return _grid(shape, other).stored(*runs) if other.cuts else runs


def runs_between(shape: Shape, order: Tiling, other: Tiling, start: int, end: int) -> int:
    """Return an upper bound of the number of runs of :func:`between`. It never decreases with ``end``. The cost grows with the number of
    tiles of ``order``."""
    if order == other or start == end:
        return 1
    there = _grid(shape, other) if other.cuts else None
    if order.cuts:
        return _grid(shape, order).lines(start, end, there)
    return there.cells(np.array([start]), np.array([end]))[1].item() if there else 1


def _one(start: int, end: int) -> Runs:
    count = int(end > start)
    return np.full(count, start, np.int64), np.full(count, end - start, np.int64), np.zeros(count, np.int64)


class _Grid:
    """The tiles of one shape: where each begins in the stored order, and its sizes."""

    def __init__(self, shape: Shape, tiling: Tiling) -> None:
        self.last = tiling.cuts[-1][0]
        """The last cut dimension. ``inner``: number of elements per index of it."""
        self.inner = math.prod(shape[self.last + 1 :])
        self.shape = shape
        cuts = dict(tiling.cuts)
        self.sizes = [np.repeat(*np.array(cuts.get(d, ((n, 1),)), dtype=np.int64).T) for d, n in enumerate(shape[: self.last + 1])]
        self.edges = [np.concatenate((np.zeros(1, np.int64), sizes.cumsum())) for sizes in self.sizes]
        volume = np.ones(1, np.int64)
        for sizes in self.sizes:
            volume = np.multiply.outer(volume, sizes).reshape(-1)
        self.bases = np.concatenate((np.zeros(1, np.int64), (volume * self.inner).cumsum()))

    @cached_property
    def counts(self) -> tuple[int, ...]:
        return tuple(len(sizes) for sizes in self.sizes)

    def tile_of(self, offsets: Sequence[int], sizes: Sequence[int]) -> tuple[int, Shape, Shape] | None:
        """Return the base and shape of the tile that contains a box, and the box's offsets within it; None if no tile does."""
        number, tile, within = 0, list(self.shape), list(offsets)
        for dim, edges in enumerate(self.edges):
            index = int(np.searchsorted(edges, offsets[dim], side="right")) - 1
            if index >= self.counts[dim] or offsets[dim] + sizes[dim] > edges[index + 1]:
                return None
            number = number * self.counts[dim] + index
            tile[dim], within[dim] = int(self.sizes[dim][index]), offsets[dim] - int(edges[index])
        return int(self.bases[number]), tuple(tile), tuple(within)

    def cells(self, first: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the first cell and the number of cells of each run by rows. A cell is the part of one row in one tile, counted by rows."""
        found = []
        for element in (first, end - 1):
            row, within = np.divmod(element, self.shape[self.last] * self.inner)
            tile = np.searchsorted(self.edges[self.last], within // self.inner, side="right") - 1
            found.append(row * self.counts[self.last] + tile)
        return found[0], found[1] - found[0] + 1

    def lines(self, start: int, end: int, other: _Grid | None) -> int:
        """Return the number of runs of :meth:`by_rows`; with ``other``, the number of its cells that these runs cross.

        It is counted per tile, since all runs of a tile cross equally many cells.
        """
        number = np.arange(int(np.searchsorted(self.bases, start, side="right")) - 1, int(np.searchsorted(self.bases, end)))
        *outer, tile = np.unravel_index(number, self.counts)
        base, width = self.bases[number], self.sizes[self.last][tile] * self.inner
        lines = (np.minimum(end, self.bases[number + 1]) - base - 1) // width - (np.maximum(start, base) - base) // width + 1
        if other is not None:
            at, stride = self.edges[self.last][tile] * self.inner, self.shape[self.last] * self.inner
            for dim in reversed(range(self.last)):
                at, stride = at + self.edges[dim][outer[dim]] * stride, stride * self.shape[dim]
            lines = lines * other.cells(at, at + width)[1]
        return int(lines.sum())

    def stored(self, first: np.ndarray, length: np.ndarray, at: np.ndarray) -> Runs:
        """Return where runs of row-order positions are stored in this order."""
        end = first + length
        low, counts = self.cells(first, end)
        of = np.repeat(np.arange(len(first)), counts)
        prefix, tile = np.divmod(low[of] + np.arange(len(of)) - np.repeat(counts.cumsum() - counts, counts), self.counts[self.last])
        number, within = np.zeros_like(prefix), np.zeros_like(prefix)
        for dim, index in enumerate(np.unravel_index(prefix, self.shape[: self.last])):
            outer = np.searchsorted(self.edges[dim], index, side="right") - 1
            number = number * self.counts[dim] + outer
            within = within * self.sizes[dim][outer] + index - self.edges[dim][outer]
        width = self.sizes[self.last][tile] * self.inner
        here = (prefix * self.shape[self.last] + self.edges[self.last][tile]) * self.inner
        there = self.bases[number * self.counts[self.last] + tile] + within * width
        begin, stop = np.maximum(here, first[of]), np.minimum(here + width, end[of])
        return there + begin - here, stop - begin, at[of] + begin - first[of]

    def by_rows(self, start: int, end: int) -> Runs:
        row = self.shape[self.last] * self.inner
        found = []
        for number in range(int(np.searchsorted(self.bases, start, side="right")) - 1, int(np.searchsorted(self.bases, end))):
            tile = [int(i) for i in np.unravel_index(number, self.counts)]
            sizes = [int(of[i]) for of, i in zip(self.sizes, tile, strict=True)]
            offsets = [int(edges[i]) for edges, i in zip(self.edges, tile, strict=True)]
            base, width = int(self.bases[number]), sizes[-1] * self.inner
            first, last = max(start, base) - base, min(end, int(self.bases[number + 1])) - base
            line = np.arange(first // width, -(-last // width), dtype=np.int64)
            prefix = np.zeros_like(line)
            for dim, index in enumerate(np.unravel_index(line, sizes[:-1])):
                prefix = prefix * self.shape[dim] + index + offsets[dim]
            there = prefix * row + offsets[-1] * self.inner
            found.append(_clipped(base + line * width, np.full_like(line, width), there, start, end))
        first_, length, at = (np.concatenate(column) for column in zip(*found, strict=True))
        return first_, length, at


def _clipped(here: np.ndarray, length: np.ndarray, there: np.ndarray, start: int, end: int) -> Runs:
    """Return the parts within ``[start, end)`` of runs that begin at ``here`` in the first order and at ``there`` in the other."""
    low, high = np.maximum(here, start), np.minimum(here + length, end)
    kept = high > low
    return (there + low - here)[kept], (high - low)[kept], (low - start)[kept]


@lru_cache(maxsize=32)  # at most 2 MB each; a model has a few
def _grid(shape: Shape, tiling: Tiling) -> _Grid:
    return _Grid(shape, tiling)


def rows_of(shape: Shape, order: Tiling, held: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Return intervals of an order as row-order intervals, in the order of ``held``."""
    for start, end in held:
        first, length, _ = order.by_rows(shape, start, end)
        yield from zip(first.tolist(), (first + length).tolist(), strict=True)
