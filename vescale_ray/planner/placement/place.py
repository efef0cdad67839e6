"""Earliest placement of tensors in a fixed order: checks whether a shard size is enough, and computes each tensor's offset.

The earliest placement is the best one. The allowed offsets of a tensor depend on the shard size alone. An earlier end therefore
leaves at least the choices of a later one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from vescale_ray.planner.placement.layout import PART_BYTES, START_BYTES, TensorSpec

NOWHERE = 1 << 60
"""In place of the start of a tensor that shards of this size can't hold."""


@dataclass(frozen=True)
class PlacementProblem:
    """The tensors as numbers. All sizes are in elements."""

    sizes: tuple[int, ...]
    blocks: tuple[int, ...]
    """Distance between possible cuts of each tensor. Tensors and boundaries start at multiples of ``start``, so a cut at a multiple
    of ``g`` lies at a multiple of ``lcm(g, start)``."""
    periods: tuple[int, ...]
    """Number of elements after which each tensor's possible cuts repeat: one matrix of a stack if its last block is shorter, else the
    block."""
    num_shards: int
    quantum: int
    """The shard size is a multiple of this."""
    start: int
    """Alignment of every tensor's start; it divides ``quantum``."""

    @classmethod
    def of(cls, sizes: Sequence[int], cuts: Sequence[int], num_shards: int, quantum: int, start: int) -> PlacementProblem:
        """Build the problem of tensors whose blocks are all alike."""
        blocks = tuple(math.lcm(cut, start) for cut in cuts)
        return cls(tuple(sizes), blocks, blocks, num_shards, quantum, start)

    @classmethod
    def of_specs(cls, specs: Sequence[TensorSpec], num_shards: int, align: int = PART_BYTES) -> PlacementProblem:
        """Build the problem for parts that are multiples of ``align`` bytes.

        A stack whose blocks or matrices are no multiples of ``start`` is cut between matrices only if its last blocks are shorter.
        """
        itemsize = min((s.dtype.itemsize for s in specs), default=1)
        start = START_BYTES // itemsize
        blocks, periods = [], []
        for spec in specs:
            block, period = spec.granularity, spec.period
            uneven = period != block and block % start == 0 and period % start == 0
            periods.append(period if uneven else math.lcm(period, start))
            blocks.append(block if uneven else periods[-1])
        return cls(tuple(s.numel for s in specs), tuple(blocks), tuple(periods), num_shards, align // itemsize, start)

    def with_blocks(self, cuts: Mapping[int, int]) -> PlacementProblem:
        """Return the same tensors, some of them with other blocks, by index."""
        new = {i: math.lcm(cut, self.start) for i, cut in cuts.items()}
        blocks = tuple(new.get(i, block) for i, block in enumerate(self.blocks))
        return replace(self, blocks=blocks, periods=tuple(new.get(i, period) for i, period in enumerate(self.periods)))

    @cached_property
    def units(self) -> tuple[int, ...]:
        """For each tensor, a number that divides all of its pieces: the greatest common divisor of block and period."""
        return tuple(math.gcd(block, period) for block, period in zip(self.blocks, self.periods, strict=True))

    @cached_property
    def padded(self) -> tuple[int, ...]:
        """Sizes rounded up to multiples of ``start``: the room that each tensor takes up."""
        return tuple(-(-size // self.start) * self.start for size in self.sizes)

    @cached_property
    def total(self) -> int:
        return sum(self.padded)

    @cached_property
    def distinct(self) -> list[tuple[int, int, int]]:
        """Distinct triples of size, block and period, without empty tensors."""
        return sorted({kind for kind in zip(self.sizes, self.blocks, self.periods, strict=True) if kind[0]})

    @cached_property
    def coarse(self) -> list[tuple[int, list[tuple[int, int]]]]:
        """Pairs of a divisor ``d`` and the other tensors, for the bound "full ranks" (``bounds.py``).

        Kinds are sorted by their elements, the largest first. For each prefix of kinds, ``d`` divides all of its pieces. The other
        tensors are (elements, count). Only divisors above the alignment are listed.
        """
        counts: dict[tuple[int, int], int] = {}
        for numel, block in zip(self.padded, self.units, strict=True):
            if numel:
                counts[numel, block] = counts.get((numel, block), 0) + 1
        ordered = sorted(counts, key=lambda kind: (-kind[0] * counts[kind], kind))
        found, unit = [], 0
        for k, (numel, block) in enumerate(ordered):
            unit = math.gcd(unit, numel if block >= numel else math.gcd(block, numel % block))
            if unit <= self.start:
                break
            if unit > self.quantum or unit % self.quantum:
                found.append((unit, [(other[0], counts[other]) for other in ordered[k + 1 :]]))
        return found


def earliest(position: int, numel: int, block: int, shard: int, period: int) -> int | None:
    """Return the first start of a tensor of ``numel`` elements from ``position`` on (a multiple of the alignment), or None.

    The tensor moves right until the next boundary lies at a block's edge. If it then reaches a second boundary, and the block does
    not divide the shard, it must start at or behind the first one. A tensor longer than a shard starts ``S mod g`` behind it, which
    puts the second boundary at an edge.
    """
    boundary = (position // shard + 1) * shard
    if position + numel <= boundary:
        return position
    if period != block:
        found = int(_earliest_uneven(np.array([position]), numel, block, np.array([shard]), period)[0])
        return None if found == NOWHERE else found
    shifted = position + (boundary - position) % block
    rest = shard % block
    if rest == 0 or shifted + numel <= boundary + shard:
        return shifted
    if numel <= shard:
        return boundary
    return boundary + rest if numel <= 2 * shard - rest else None


def place(problem: PlacementProblem, order: Sequence[int], shard: int) -> list[int] | None:
    """Return offsets of the tensors by index if they fit into shards of ``shard`` elements in this order, else None."""
    offsets = [0] * len(problem.sizes)
    position, limit = 0, problem.num_shards * shard
    if problem.total > limit:
        return None
    sizes, blocks, periods, padded = problem.sizes, problem.blocks, problem.periods, problem.padded
    left = problem.total
    for i in order:
        if not sizes[i]:
            offsets[i] = position
            continue
        at: int | None = position
        if position % shard + sizes[i] > shard:
            at = earliest(position, sizes[i], blocks[i], shard, periods[i])
            if at is None or at + left > limit:
                return None
        assert at is not None
        offsets[i] = at
        position = at + padded[i]
        left -= padded[i]
    return offsets


def fits(problem: PlacementProblem, order: Sequence[int], shards: np.ndarray) -> np.ndarray:
    """Return a mask of the shard sizes for which :func:`place` succeeds; each must let every single tensor be placed.

    Cost: O(n) numpy operations; sizes without room for the remaining tensors are dropped on the way.
    """
    enough = np.zeros(len(shards), dtype=bool)
    alive = np.arange(len(shards))
    sizes = shards
    position = np.zeros_like(shards)
    left = problem.total
    for i in order:
        numel = problem.sizes[i]
        if not numel:
            continue
        position = earliest_many(position, numel, problem.blocks[i], sizes, problem.periods[i]) + problem.padded[i]
        left -= problem.padded[i]
        ok = position + left <= problem.num_shards * sizes
        if not ok.all():
            alive, sizes, position = alive[ok], sizes[ok], position[ok]
            if not len(alive):
                return enough
    enough[alive] = True
    return enough


def earliest_many(position: np.ndarray, numel: int, block: int, shards: np.ndarray, period: int) -> np.ndarray:
    """:func:`earliest` for arrays of positions and shard sizes; each size must let the tensor be placed."""
    if period != block:
        return _earliest_uneven(position, numel, block, shards, period)
    boundary = (position // shards + 1) * shards
    shifted = position + (boundary - position) % block
    rest = shards % block
    twice = (shifted + numel > boundary + shards) & (rest != 0)
    # A tensor of at most one shard never reaches a second boundary: shifted <= boundary.
    return np.where(position + numel > boundary, np.where(twice, boundary + rest, shifted), position)


def _earliest_uneven(position: np.ndarray, numel: int, block: int, shards: np.ndarray, period: int) -> np.ndarray:
    """:func:`earliest_many` for a stack of matrices of ``period`` elements whose last blocks are shorter; NOWHERE if there is no start.

    Let ``x`` be the distance from the tensor's start to its first boundary. The next ones follow at ``x + S``, ``x + 2 S``, .., and all
    must lie at a cut, ``a mod period`` at a multiple of the block. If ``S mod period`` is 0, all lie at the same place of their matrices.
    Otherwise they move by ``S mod period`` to the right, or by the rest to the left. Either must be a multiple of the block, and none
    may pass a matrix's end, since the shorter block there shifts all that follow. The largest ``x`` gives the earliest start.
    """
    drift = shards % period
    right, left = (drift != 0) & (drift % block == 0), (drift != 0) & ((period - drift) % block == 0)
    last = (period - 1) // block * block
    boundary = (position // shards + 1) * shards
    found = np.where(position + numel <= boundary, position, NOWHERE)
    for first, most in ((boundary, boundary - position), (boundary + shards, shards)):
        boundaries = -((most - numel) // shards)
        for _ in range(2):  # a smaller distance may add one boundary
            moves = np.maximum(boundaries - 1, 0)
            high = np.where(right, (period - 1 - moves * drift) // block * block, last)
            high = np.where((moves > 0) & (drift != 0) & ~right & ~left, -1, high)
            low = np.where(left, moves * (period - drift), 0)
            at = most % period
            x = np.where(at >= low, most - at + np.minimum(at // block * block, high), most - at - period + high)
            x = np.where(numel <= most, most, x)
            needed = -((x - numel) // shards)
            good = ((high >= low) & (x > 0) & (needed <= boundaries)) | (numel <= most)
            found = np.where((found == NOWHERE) & good, first - x, found)
            boundaries = np.maximum(boundaries, needed)
    return found


def smallest_for_ordered_pieces(problem: PlacementProblem, order: Sequence[int], least: int) -> int:
    """Return a lower bound for this order, from which the search can start.

    The bound drops the rule that a tensor is contiguous: padding may stand before any boundary inside it. The tensors are then pieces
    in a given order. Filling each rank as far as possible is optimal, and a larger shard never needs more ranks. Bisection therefore
    finds the smallest shard.
    """
    quantum = problem.quantum
    low, high = -(-least // quantum), -(-problem.total // quantum)
    while low < high:
        middle = (low + high) // 2
        if _pieces_fit(problem, order, middle * quantum):
            high = middle
        else:
            low = middle + 1
    return low * quantum


def _pieces_fit(problem: PlacementProblem, order: Sequence[int], shard: int) -> bool:
    position, limit = 0, problem.num_shards * shard
    for i in order:
        numel, block = problem.padded[i], min(problem.units[i], problem.padded[i])
        room = -position % shard or shard
        if numel <= room:
            position += numel
            continue
        per_rank = shard // block * block
        if not per_rank:
            return False
        here = room // block * block if position % shard else 0
        boundary = position + room if position % shard else position
        rest = numel - here
        full = max(0, -((shard - rest) // per_rank))
        position = boundary + full * shard + rest - full * per_rank
        if position > limit:
            return False
    return position <= limit
