"""Earliest placement of tensors in a fixed order: is a shard size enough, and where does each tensor lie?

Earliest is best: the offsets at which a tensor may start depend on the shard size alone, so what can follow an earlier end
includes all that can follow a later one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class Problem:
    """Tensors as numbers: elements, and elements of the pieces between possible cuts."""

    sizes: tuple[int, ...]
    blocks: tuple[int, ...]
    """A tensor starts at a multiple of ``start`` and so does every boundary: a cut at a multiple of ``g`` from it is one of
    ``lcm(g, start)``."""
    num_shards: int
    quantum: int
    """The shard is a multiple of this."""
    start: int
    """Every tensor starts at a multiple of this, which divides ``quantum``."""

    @classmethod
    def of(cls, sizes: Sequence[int], cuts: Sequence[int], num_shards: int, quantum: int, start: int) -> Problem:
        return cls(tuple(sizes), tuple(math.lcm(cut, start) for cut in cuts), num_shards, quantum, start)

    def with_blocks(self, cuts: Sequence[int]) -> Problem:
        return replace(self, blocks=tuple(math.lcm(cut, self.start) for cut in cuts))

    @cached_property
    def padded(self) -> tuple[int, ...]:
        """Sizes as multiples of ``start``: what a tensor takes up before the next one."""
        return tuple(-(-size // self.start) * self.start for size in self.sizes)

    @cached_property
    def total(self) -> int:
        return sum(self.padded)

    @cached_property
    def distinct(self) -> tuple[np.ndarray, np.ndarray]:
        """Sizes and blocks of the tensors, each pair once, without empty ones."""
        pairs = sorted({(size, block) for size, block in zip(self.sizes, self.blocks, strict=True) if size})
        return np.array([p[0] for p in pairs], dtype=np.int64), np.array([p[1] for p in pairs], dtype=np.int64)

    @cached_property
    def coarse(self) -> list[tuple[int, list[tuple[int, int]]]]:
        """For the kinds with the most elements, the first one, the first two, ..: what divides all their pieces, and all other
        tensors as (elements, how many). Only where that is more than the alignment."""
        counts: dict[tuple[int, int], int] = {}
        for numel, block in zip(self.padded, self.blocks, strict=True):
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


def earliest(position: int, numel: int, block: int, shard: int) -> int | None:
    """Where a tensor of ``numel`` elements can start, from ``position`` on (both multiples of the start alignment); None: nowhere.

    Cross the next boundary at a block's edge: move right by the rest. If that takes a second boundary, too, and the block does not
    divide the shard, only a start just behind the boundary is left: ``S mod g`` after it, so that the one after is at an edge.
    """
    boundary = (position // shard + 1) * shard
    if position + numel <= boundary:
        return position
    shifted = position + (boundary - position) % block
    rest = shard % block
    if rest == 0 or shifted + numel <= boundary + shard:
        return shifted
    if numel <= shard:
        return boundary
    return boundary + rest if numel <= 2 * shard - rest else None


def place(problem: Problem, order: Sequence[int], shard: int) -> list[int] | None:
    """Offsets of the tensors (by index, not by position) if they fit into shards of ``shard`` elements in this order, else None."""
    offsets = [0] * len(problem.sizes)
    position, limit = 0, problem.num_shards * shard
    if problem.total > limit:
        return None
    sizes, blocks, padded = problem.sizes, problem.blocks, problem.padded
    left = problem.total
    for i in order:
        if not sizes[i]:
            offsets[i] = position
            continue
        at: int | None = position
        if position % shard + sizes[i] > shard:
            at = earliest(position, sizes[i], blocks[i], shard)
            if at is None or at + left > limit:
                return None
        assert at is not None
        offsets[i] = at
        position = at + padded[i]
        left -= padded[i]
    return offsets


def fits(problem: Problem, order: Sequence[int], shards: np.ndarray) -> np.ndarray:
    """:func:`place` for many shard sizes at once, each of which must let every single tensor be placed: which are enough.

    Cost: O(n) numpy operations; sizes that have no room left for the remaining tensors are dropped on the way.
    """
    enough = np.zeros(len(shards), dtype=bool)
    alive = np.arange(len(shards))
    sizes = shards
    position = np.zeros_like(shards)
    left = problem.total
    for i in order:
        numel, block = problem.sizes[i], problem.blocks[i]
        if not numel:
            continue
        position = earliest_many(position, numel, block, sizes) + problem.padded[i]
        left -= problem.padded[i]
        ok = position + left <= problem.num_shards * sizes
        if not ok.all():
            alive, sizes, position = alive[ok], sizes[ok], position[ok]
            if not len(alive):
                return enough
    enough[alive] = True
    return enough


def earliest_many(position: np.ndarray, numel: int, block: int, shards: np.ndarray) -> np.ndarray:
    """:func:`earliest` for arrays of positions and shard sizes, each of which must let the tensor be placed."""
    boundary = (position // shards + 1) * shards
    shifted = position + (boundary - position) % block
    rest = shards % block
    twice = (shifted + numel > boundary + shards) & (rest != 0)
    # A tensor of up to one shard never takes a second boundary: shifted <= boundary.
    return np.where(position + numel > boundary, np.where(twice, boundary + rest, shifted), position)


def smallest_for_ordered_pieces(problem: Problem, order: Sequence[int], least: int) -> int:
    """No shard below this holds the tensors in this order, whatever the padding: a bound to start the search from.

    Forget that a tensor must be contiguous: let padding stand before any boundary inside it. What is left is to fill ranks with
    pieces in a given order, for which filling each rank as far as it goes is optimal, and a larger shard never needs more ranks.
    So bisection finds the smallest shard.
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


def _pieces_fit(problem: Problem, order: Sequence[int], shard: int) -> bool:
    position, limit = 0, problem.num_shards * shard
    for i in order:
        numel, block = problem.padded[i], min(problem.blocks[i], problem.padded[i])
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
