"""Blocks, intervals and routes: the arithmetic under every layout, reshard and checkpoint read.

Integer arithmetic, without torch or processes. A tensor counts as its row-major elements ``[0, numel)``, and a rank holds half-open
intervals of such a space. One algebra serves the planner's layouts, redistribution between placements, the move of shards on a rescale, and
the ranges that a checkpoint reader requests.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Literal

Shape = tuple[int, ...]
Box = tuple[Shape, Shape]
"""Offsets and sizes of a box of elements."""


def row_numel(shape: Sequence[int]) -> int:
    """Return the number of elements in one row: the last dimension of a matrix (or stack of matrices), 1 for vectors and scalars."""
    return int(shape[-1]) if len(shape) >= 2 else 1


@dataclass(frozen=True)
class Block:
    """The smallest piece of a tensor that no shard boundary may cut.

    Build one with :meth:`element`, :meth:`rows`, :meth:`tile` or :meth:`tensor`. In row-major memory a block is a run of
    ``block.numel(shape)`` consecutive elements. The last block of a tensor, and of each matrix of a stack, may be shorter (a *tail
    block*), so a shard boundary may lie at element ``p`` iff ``p % period(shape) % numel(shape) == 0``.
    """

    kind: Literal["element", "rows", "tile", "tensor"]
    row_count: int = 1
    col_count: int | None = None

    def __post_init__(self) -> None:
        for count in (self.row_count, self.col_count):
            if count is not None and not isinstance(count, int):
                raise TypeError(f"a block of {count!r} rows or columns: give a whole number")
        if self.row_count < 1:
            raise ValueError(f"a block of {self.row_count} rows: give at least 1")
        if self.col_count is not None and self.col_count < 1:
            raise ValueError(f"a tile of {self.col_count} columns: give at least 1")

    @classmethod
    def element(cls) -> Block:
        """Return a block of one element: the tensor may be cut anywhere."""
        return cls("element")

    @classmethod
    def rows(cls, n: int) -> Block:
        """Return a block of ``n`` whole rows of the matrix (the last two dimensions)."""
        return cls("rows", n)

    @classmethod
    def tile(cls, r: int, c: int) -> Block:
        """Return a block of ``r x c`` tiles. In row-major memory, whole tiles need ``r`` whole rows."""
        return cls("tile", r, c)

    @classmethod
    def tensor(cls) -> Block:
        """Return a block of the whole tensor, which then lies on one rank."""
        return cls("tensor")

    def numel(self, shape: Sequence[int]) -> int:
        """Return the number of elements of one block in a tensor of ``shape``. It is at least 1, and at most that of the tensor, or of one
        matrix of a stack."""
        total = math.prod(shape)
        if self.kind == "element" or total == 0:
            return 1
        if self.kind == "tensor":
            return total
        if len(shape) >= 3 and self.row_count >= shape[-2]:
            return int(shape[-2] * shape[-1])
        return min(self.row_count * row_numel(shape), total)

    def period(self, shape: Sequence[int]) -> int:
        """Return the number of elements after which the possible cuts repeat: one matrix of a stack if its last block is shorter, else a
        block."""
        numel = self.numel(shape)
        if self.kind not in ("rows", "tile") or len(shape) < 3 or math.prod(shape[:-2]) < 2:
            return numel
        matrix = int(shape[-2] * shape[-1])
        return matrix if matrix % numel else numel

    def joined(self, other: Block) -> Block:
        """Return the smallest block that cuts neither this block nor ``other``."""
        for one, two in ((self, other), (other, self)):
            if one.kind == "element" or two.kind == "tensor":
                return two
        rows = math.lcm(self.row_count, other.row_count)
        return next((one for one in (self, other) if one.row_count == rows), Block.rows(rows))

    def __str__(self) -> str:
        if self.kind == "rows":
            return f"Block.rows({self.row_count})"
        if self.kind == "tile":
            return f"Block.tile({self.row_count}, {self.col_count})"
        return f"Block.{self.kind}()"


@dataclass(frozen=True, slots=True)
class ExpertShares:
    """Division of stacks of experts ``[E, ..]`` among ``ranks``, ``parts`` neighbours of which share all experts.

    Rank ``r`` has a piece of part ``r % parts``: the ``E / parts`` experts of that part are sharded over the ranks that have pieces of it.
    """

    ranks: int
    parts: int = 1

    @classmethod
    def of(cls, ranks: int, most: int) -> ExpertShares:
        """Return the shares of ``ranks`` ranks, at most ``most`` of which share the experts: the largest number that divides both."""
        return cls(ranks, math.gcd(ranks, most))

    @property
    def holders(self) -> int:
        """Number of ranks that have pieces of one part."""
        return self.ranks // self.parts

    def position_of(self, rank: int) -> int:
        """Return the number of ``rank`` among the holders of its part."""
        return rank // self.parts

    def rank_at(self, position: int, part: int) -> int:
        """Return the rank with this number among the holders of ``part``."""
        return position * self.parts + part

    def shape_of_part(self, stack: Shape) -> Shape:
        """Return the shape of one part of a stack."""
        return (stack[0] // self.parts, *stack[1:])

    def shape_of_stack(self, part: Shape) -> Shape:
        """Return the shape of the stack of which ``part`` is the shape of one part."""
        return (part[0] * self.parts, *part[1:])


@dataclass(frozen=True, slots=True)
class Extent:
    """Elements ``[start, end)`` of a space, stored by a holder from its own element ``offset`` on."""

    start: int
    end: int
    offset: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.end or self.offset < 0:
            raise ValueError(f"not an extent: start={self.start} end={self.end} offset={self.offset}")


@dataclass(frozen=True, slots=True)
class Route:
    """Copy of ``length`` elements from element ``src_offset`` of holder ``src`` to ``dst_offset`` of holder ``dst``."""

    src: int
    dst: int
    start: int
    """First element of the space that this route carries."""
    length: int
    src_offset: int
    dst_offset: int


class FlatSpace:
    """Named tensors laid end to end in one space of elements: tensor ``name`` starts at ``base(name)``.

    Two layouts of the same tensors, with different cuts and padding, are compared in this space.
    """

    def __init__(self, tensors: Sequence[tuple[str, int]]) -> None:
        self._base: dict[str, int] = {}
        self._numel: dict[str, int] = {}
        position = 0
        for name, numel in tensors:
            if name in self._base:
                raise ValueError(f"tensor {name!r} is listed twice")
            self._base[name], self._numel[name] = position, numel
            position += numel
        self.numel = position

    def base(self, name: str) -> int:
        return self._base[name]

    def numel_of(self, name: str) -> int:
        return self._numel[name]


def merge_adjacent(extents: Sequence[Extent]) -> list[Extent]:
    """Sort the extents, join those that are adjacent in the space *and* in the holder, and drop empty ones."""
    merged: list[Extent] = []
    for extent in sorted((e for e in extents if e.end > e.start), key=lambda e: e.start):
        if merged and merged[-1].end == extent.start and merged[-1].offset + merged[-1].end - merged[-1].start == extent.offset:
            merged[-1] = Extent(merged[-1].start, extent.end, merged[-1].offset)
        else:
            merged.append(extent)
    return merged


def routes(sources: Sequence[Sequence[Extent]], destinations: Sequence[Sequence[Extent]]) -> list[Route]:
    """Plan the copies that fill every destination extent exactly once from the sources.

    ``sources[i]`` are the extents that holder ``i`` has, and ``destinations[j]`` those that holder ``j`` wants, in one space. If
    several holders have an element, the destination itself is preferred (nothing moves), then the lowest holder. Cost: O((S + D) log
    S) for S source and D destination extents without replicas.

    Raises:
        ValueError: no source holds an interval; the message names the first one.
    """
    owned = [sorted((e for e in extents if e.end > e.start), key=lambda e: e.start) for extents in sources]
    starts = [[e.start for e in extents] for extents in owned]
    # All sources in one sorted list, for elements that the destination does not hold itself.
    everyone = sorted((e.start, i, k) for i, extents in enumerate(owned) for k, e in enumerate(extents))
    everyone_starts = [s for s, _, _ in everyone]
    longest = max((e.end - e.start for extents in owned for e in extents), default=0)

    def own(holder: int, position: int) -> tuple[Extent | None, int | None]:
        """Return the holder's own extent at ``position``, or else the start of its next one."""
        if holder >= len(owned):
            return None, None
        k = bisect_right(starts[holder], position) - 1
        if k >= 0 and owned[holder][k].end > position:
            return owned[holder][k], None
        return None, starts[holder][k + 1] if k + 1 < len(owned[holder]) else None

    def anyone(position: int) -> tuple[int, Extent] | None:
        found: tuple[int, Extent] | None = None
        k = bisect_right(everyone_starts, position) - 1
        while k >= 0 and everyone[k][0] > position - longest:
            _, holder, index = everyone[k]
            extent = owned[holder][index]
            if extent.end > position and (found is None or holder < found[0]):
                found = (holder, extent)
            k -= 1
        return found

    planned: list[Route] = []
    for dst, wanted in enumerate(destinations):
        for want in wanted:
            position = want.start
            while position < want.end:
                extent, next_own = own(dst, position)
                src, stop = dst, want.end
                if extent is None:
                    other = anyone(position)
                    if other is None:
                        raise ValueError(f"no source holds elements from {position} on (holder {dst} wants them up to {want.end})")
                    src, extent = other
                    stop = min(stop, next_own) if next_own is not None else stop
                end = min(stop, extent.end)
                planned.append(
                    Route(src, dst, position, end - position, extent.offset + position - extent.start, want.offset + position - want.start)
                )
                position = end
    return planned


@lru_cache(maxsize=65536)
def boxes(shape: Shape, start: int, end: int) -> tuple[Box, ...]:
    """Cut the flat range ``[start, end)`` of a row-major tensor into ``(offsets, sizes)`` boxes, in memory order.

    There are at most ``2 * ndim - 1`` boxes, none empty. There is one box exactly if the range is a full sub-box.
    """
    total = math.prod(shape)
    if not 0 <= start <= end <= total:
        raise ValueError(f"range [{start}, {end}) of a tensor of shape {shape} with {total} elements")
    return tuple(_boxes(shape, start, end))


def _boxes(shape: Shape, start: int, end: int) -> Iterator[Box]:
    if start == end:
        return
    if not shape:
        yield (), ()
        return
    if len(shape) == 1:
        yield (start,), (end - start,)
        return
    inner = math.prod(shape[1:])
    first, last = start // inner, (end - 1) // inner
    if first == last and (start % inner or end % inner):
        for offsets, sizes in _boxes(shape[1:], start - first * inner, end - first * inner):
            yield (first, *offsets), (1, *sizes)
        return
    if start % inner:
        for offsets, sizes in _boxes(shape[1:], start % inner, inner):
            yield (first, *offsets), (1, *sizes)
        first += 1
    whole = end // inner
    if whole > first:
        yield (first, *(0 for _ in shape[1:])), (whole - first, *shape[1:])
    if end % inner:
        for offsets, sizes in _boxes(shape[1:], 0, end % inner):
            yield (whole, *offsets), (1, *sizes)


def intervals(shape: Shape, held: Sequence[Box]) -> list[tuple[int, int]]:
    """Return the flat intervals of a row-major tensor that ``held`` boxes cover, in element order, with adjacent ones joined.

    A box that is narrower than the tensor gives one interval per row: columns 0..511 of a [1024, 1024] matrix are 1024 intervals.
    """
    found: list[tuple[int, int]] = []
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    for offsets, sizes in held:
        cut = next((d for d in reversed(range(len(shape))) if sizes[d] != shape[d]), 0)
        inner = math.prod(sizes[cut:])
        base = sum(o * s for o, s in zip(offsets, strides, strict=True))
        for index in product(*(range(n) for n in sizes[:cut])):
            start = base + sum(i * s for i, s in zip(index, strides, strict=False))
            if found and found[-1][1] == start:
                found[-1] = found[-1][0], start + inner
            elif inner:
                found.append((start, start + inner))
    return found
