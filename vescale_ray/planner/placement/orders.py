"""Search over orders of the tensors: all orders if there are few kinds of tensors, else one order grown by best fit."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from vescale_ray.planner.placement.place import NOWHERE, PlacementProblem, earliest, earliest_many


@dataclass(frozen=True)
class Kinds:
    """Groups of interchangeable tensors (same size, same block). An order is then a sequence of kinds."""

    members: tuple[tuple[int, ...], ...]
    """Indices of the tensors of each kind, without empty tensors."""
    empty: tuple[int, ...]

    MOST_STATES: ClassVar[int] = 1 << 14
    """Maximum number of states for which all orders are searched."""

    @classmethod
    def of(cls, problem: PlacementProblem) -> Kinds:
        found: dict[tuple[int, int, int], list[int]] = {}
        for i, numel in enumerate(problem.sizes):
            if numel:
                found.setdefault((numel, problem.blocks[i], problem.periods[i]), []).append(i)
        return cls(tuple(tuple(m) for m in found.values()), tuple(i for i, numel in enumerate(problem.sizes) if not numel))

    @property
    def states(self) -> int:
        """Number of states. A state is how many tensors of each kind are placed."""
        return math.prod(len(m) + 1 for m in self.members)

    @cached_property
    def levels(self) -> list[list[tuple[int, np.ndarray, np.ndarray]]]:
        """Transitions by the number of tensors placed: for each kind, the states before and after one more tensor of it."""
        counts = np.indices([len(m) + 1 for m in self.members]).reshape(len(self.members), -1)
        placed = counts.sum(axis=0)
        strides = [math.prod(len(m) + 1 for m in self.members[k + 1 :]) for k in range(len(self.members))]
        by_level = []
        for level in range(int(placed.max())):
            states = np.flatnonzero(placed == level)
            steps = []
            for kind, members in enumerate(self.members):
                before = states[counts[kind, states] < len(members)]
                if len(before):
                    steps.append((kind, before, before + strides[kind]))
            by_level.append(steps)
        return by_level


@dataclass(frozen=True)
class Proof:
    """Result of the search over all orders.

    Attributes:
        shard, order: the smallest shard and an order for it; the order is None if none of the sizes is enough.
        complete: every size below was excluded.
        excluded_below: every size below this was excluded.
    """

    shard: int
    order: list[int] | None
    complete: bool
    excluded_below: int


WORK = 4_000_000
"""Maximum number of state-kind-size triples that the search over all orders may cost (about 0.1 s); real units need 1e3 to 1e6."""
FEW = 8
"""Up to this many tensors, the search over all orders has no limit."""


def smallest_over_all_orders(problem: PlacementProblem, kinds: Kinds, chunks: Iterable[np.ndarray]) -> Proof:
    """Find the first of the sizes for which some order fits.

    ``chunks`` holds ascending sizes, each of which lets every single tensor be placed. ``end[state]`` is the earliest end of any
    placement of the tensors that ``state`` counts. Earliest is best (see ``place.py``), so some order fits iff the end of the full
    state does.
    """
    work, last = 0, 0
    limited = sum(len(m) for m in kinds.members) > FEW
    for chunk in chunks:
        width = max(1, 2_000_000 // (kinds.states * len(kinds.members)))
        for low in range(0, len(chunk), width):
            sizes = chunk[low : low + width]
            work += kinds.states * len(kinds.members) * len(sizes)
            if limited and work > WORK:
                return Proof(0, None, False, int(sizes[0]))
            ends = _earliest_ends(problem, kinds, sizes)
            enough = ends[-1] <= problem.num_shards * sizes
            if enough.any():
                at = int(enough.argmax())
                return Proof(int(sizes[at]), _trace(problem, kinds, ends[:, at : at + 1], sizes[at : at + 1]), True, int(sizes[at]))
            last = int(sizes[-1]) + 1
    return Proof(0, None, True, last)


def _earliest_ends(problem: PlacementProblem, kinds: Kinds, shards: np.ndarray) -> np.ndarray:
    ends = np.full((kinds.states, len(shards)), np.iinfo(np.int64).max // 4, dtype=np.int64)
    ends[0] = 0
    for steps in kinds.levels:
        for kind, before, after in steps:
            i = kinds.members[kind][0]
            reached = earliest_many(ends[before], problem.sizes[i], problem.blocks[i], shards, problem.periods[i]) + problem.padded[i]
            ends[after] = np.minimum(ends[after], reached)
    return ends


def _trace(problem: PlacementProblem, kinds: Kinds, ends: np.ndarray, shards: np.ndarray) -> list[int]:
    """Return an order of the tensors that ends where the state with all tensors placed does, traced from its last tensor to its first."""
    state, order = kinds.states - 1, []
    left = [list(m) for m in kinds.members]
    for steps in reversed(kinds.levels):
        for kind, before, after in steps:
            where = np.flatnonzero(after == state)
            if not len(where):
                continue
            i = kinds.members[kind][0]
            source = int(before[where[0]])
            reached = earliest_many(ends[[source]], problem.sizes[i], problem.blocks[i], shards, problem.periods[i]) + problem.padded[i]
            if int(reached[0, 0]) == int(ends[state, 0]):
                order.append(left[kind].pop())
                state = source
                break
    return [*reversed(order), *kinds.empty]


def best_fit(problem: PlacementProblem, kinds: Kinds, shard: int) -> list[int] | None:
    """Grow an order for this shard size; return None if the tensors do not fit.

    The next tensor is always of the kind that needs the least padding before it. Among kinds that need almost none, those whose block
    does not divide the shard come first, because they have the fewest places.
    """
    for patience in (0, 1):
        order = _grow(problem, kinds, shard, patience)
        if order is not None:
            return order
    return None


def _grow(problem: PlacementProblem, kinds: Kinds, shard: int, patience: int) -> list[int] | None:
    rows = []  # numel, padded, block, rest, whether it is hard to place, indices left, period
    for members in kinds.members:
        numel, block, period = (of[members[0]] for of in (problem.sizes, problem.blocks, problem.periods))
        rows.append((numel, problem.padded[members[0]], block, shard % block, shard % period != 0, list(reversed(members)), period))
    rows.sort(key=lambda r: (not r[4], -r[0], -r[2]))
    position, spare = 0, problem.num_shards * shard - problem.total
    order: list[int] = []
    count = sum(len(r[5]) for r in rows)
    while len(order) < count:
        boundary = (position // shard + 1) * shard
        best, best_key = None, (1 << 62, 0)
        for k, (numel, _, block, rest, _, left, period) in enumerate(rows):
            if not left:
                continue
            if position + numel <= boundary:
                waste = 0
            elif period != block:
                at = earliest(position, numel, block, shard, period)
                waste = NOWHERE if at is None else at - position
            else:
                waste = (boundary - position) % block
                if rest and position + waste + numel > boundary + shard:
                    waste = boundary + rest - position
            # With patience, a shift of less than a block counts as no waste, so tensors that are hard to place come earlier.
            key = (waste if not patience or waste >= block else 0, k)
            if key < best_key:
                best, best_key, best_waste = k, key, waste
                if not key[0]:
                    break
        assert best is not None
        spare -= best_waste
        if spare < 0:
            return None
        numel, padded, _, _, _, left, _ = rows[best]
        order.append(left.pop())
        position += best_waste + padded
    return [*order, *kinds.empty]
