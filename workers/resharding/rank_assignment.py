"""Rank assignment: which worker becomes which rank, and which workers leave, so that the fewest bytes move. Pure.

If a worker with parts of N ranks becomes rank j of M, it keeps the overlap of those parts and rank j's part. The best numbering is an
assignment problem. If a group grows from 3 to 4 with the joiner as the last rank, half of the state moves. With the joiner third, a third
of it moves.

The overlap comes from the planned layouts (:mod:`vescale_ray.workers.resharding.shard_layouts`). If blocks must stay whole, the planner
orders a unit's tensors differently at each world size, so a rank's number does not tell its part. Without blocks a rank owns about the
interval [j/M, (j+1)/M) of every buffer (:func:`even`). That is good enough while the layouts are unknown.

If the group shrinks, the choice of leavers is part of the same problem. From 4 to 2, every second worker leaves and half of the state
moves; if the last two left, three quarters would move.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from vescale_ray.config.rank_grid import RankGrid

TRIES, TRIED = 16, 48
"""Number of nodes that are tried as candidates to become free, for up to ``TRIED`` workers; fewer for more workers. Each try solves an
assignment problem in about 10 ms, while training stands still."""
EXACT_STAYERS = 128
"""Above this many workers, the stayers are chosen greedily: nearly as good, and without seconds of delay."""
EXACT_RANKS = 512
"""Above this many workers, the ranks are assigned greedily. The exact assignment takes 0.1 s for this many, and its time grows with the
cube of the number."""

LARGEST = 55
"""Bits of a cost. The assignment adds up to 2 ** 7 costs and their potentials in 64 bits."""

Weights = np.ndarray[tuple[int, int], np.dtype[np.int64]]
Indices = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True)
class Overlap:
    """Sizes of the intersections of a state's old and new parts, in any unit; only sizes above 0. Each old part intersects few new ones. So
    the list stays small, while a matrix of ten thousand ranks takes gigabytes.

    Attributes:
        old, new, size: for each pair, the old rank, the new rank and the size of the intersection of their parts.
        before, after: number of old and of new ranks.
    """

    old: Indices
    new: Indices
    size: Indices
    before: int
    after: int

    def dense(self) -> Weights:
        """Return the weights as a matrix of [``before``, ``after``]."""
        found = np.zeros((self.before, self.after), dtype=np.int64)
        np.add.at(found, (self.old, self.new), self.size)
        return found

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.dense().astype(dtype) if dtype is not None else self.dense()


def replicated(overlap: Overlap, replicas: int) -> Overlap:
    """Return the overlap with the ranks of ``replicas`` replicas, from the ``overlap`` with the shards of one replica."""
    if replicas == 1:
        return overlap
    rows = np.repeat(np.arange(replicas, dtype=np.int64) * overlap.after, len(overlap.new))
    old, new, size = (np.tile(one, replicas) for one in (overlap.old, overlap.new, overlap.size))
    return Overlap(old, new + rows, size, overlap.before, overlap.after * replicas)


def in_rows(ranked: Sequence[str], grid: RankGrid, nodes: Sequence[Collection[str]]) -> tuple[str, ...]:
    """Exchange ranks between replicas, so that the workers of one node are in few rows of the grid. Each worker keeps its shard.

    Args:
        ranked: the workers by rank.
        nodes: the workers on each node.
    """
    if grid.replicas == 1:
        return tuple(ranked)
    place = {worker: number for number, node in enumerate(nodes) for worker in node}
    found = list(ranked)
    for shard in range(grid.shards):
        ranks = grid.replicas_of(shard)
        for rank, worker in zip(ranks, sorted((ranked[rank] for rank in ranks), key=lambda w: place.get(w, 0)), strict=True):
            found[rank] = worker
    return tuple(found)


def assign_ranks(members: Sequence[str], held: Mapping[str, Sequence[int]], overlap: Overlap) -> tuple[str, ...]:
    """Return ``members`` in the order of their new ranks, so that they hold as much as possible of the parts they will own.

    Args:
        members: workers of the next generation, in any order; ties keep it.
        held: per worker, the old ranks whose parts it has in memory, its own and copies. A worker that is missing has none.
        overlap: of the old ranks' parts and those of as many new ranks as there are members.
    """
    count = len(members)
    if count > EXACT_RANKS:
        return _filled(members, _greedy(members, held, overlap), count)
    # Among equally good numberings, take the one that keeps most workers in place.
    places = assign(-(kept(members, held, overlap) * (count + 1) + np.eye(count, dtype=np.int64)))
    found = [""] * count
    for worker, place in zip(members, places, strict=True):
        found[place] = worker
    return tuple(found)


def staying(candidates: Sequence[str], held: Mapping[str, Sequence[int]], overlap: Overlap, nodes: Sequence[Collection[str]]) -> list[str]:
    """Return the ``candidates`` that stay, in their order; the others leave.

    The fewest bytes move. Ties are broken in this order: most ranks keep their copy on another node
    (:func:`vescale_ray.workers.resharding.buddies.buddies`); whole nodes become free, the smallest first; the last candidates
    leave.

    Args:
        held: as for :func:`assign_ranks`.
        overlap: as for :func:`assign_ranks`; as many candidates stay as it has new ranks.
        nodes: the workers on each node, including workers that are no candidates.
    """
    stay = overlap.after
    leave = len(candidates) - stay
    if len(candidates) > EXACT_STAYERS:
        stays = frozenset(_filled(candidates, _greedy(candidates, held, overlap), stay))
        return [worker for worker in candidates if worker in stays]
    bytes_kept = kept(candidates, held, overlap)
    last = dict.fromkeys(candidates[stay:], 1)
    # Priorities: moved bytes, then copies, then free nodes, then the order.
    per_free, per_copy, per_byte = leave + 1, (leave + 1) ** 2, (leave + 1) ** 3
    bytes_kept >>= max(0, (int(bytes_kept.max(initial=0)) * per_byte).bit_length() - LARGEST)
    # Every rank has its copy on another node if no node has more than half of them. So this many workers of each node must leave.
    here = [set(node).intersection(candidates) for node in nodes]
    must = [node for node in here for _ in range(len(node) - stay // 2)][:leave] if stay > 1 else []
    unspread = np.zeros((len(candidates), leave), dtype=np.int64)
    for place, node in enumerate(must):
        unspread[:, place] = [per_copy * (worker not in node) for worker in candidates]

    def without(freed: Collection[str]) -> list[str]:
        cost = np.zeros((len(candidates), len(candidates)), dtype=np.int64)
        cost[:, :stay] = -bytes_kept * per_byte
        cost[:, stay:] = unspread - np.array([per_free * (worker in freed) + last.get(worker, 0) for worker in candidates])[:, None]
        return [worker for worker, place in zip(candidates, assign(cost), strict=True) if place < stay]

    freed: set[str] = set()
    found = without(freed)
    tries = int(TRIES * min(1.0, (TRIED / max(1, len(candidates))) ** 3))
    for node in sorted((set(node) for node in nodes if set(node) <= set(candidates)), key=len)[:tries]:
        if len(freed | node) <= leave and not (freed | node).intersection(there := without(freed | node)):
            freed, found = freed | node, there
    return found


def _greedy(workers: Sequence[str], held: Mapping[str, Sequence[int]], overlap: Overlap) -> dict[int, int]:
    """Return rows of ``workers`` by new rank. Ranks are assigned in the order of the size that a worker keeps, the largest first. Among
    equals, the worker whose row is nearest to the rank gets it."""
    pairs = [(row, old) for row, worker in enumerate(workers) for old in set(held.get(worker, ()))]
    if not pairs:
        return {}
    rows, olds = np.array(pairs, dtype=np.int64).T
    order = np.argsort(overlap.old, kind="stable")
    first, last = (np.searchsorted(overlap.old[order], olds, side=side) for side in ("left", "right"))
    counts = last - first
    places = order[np.repeat(first - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())]
    keys, inverse = np.unique(np.repeat(rows, counts) * overlap.after + overlap.new[places], return_inverse=True)
    sizes = np.zeros(len(keys), dtype=np.int64)
    np.add.at(sizes, inverse, overlap.size[places])
    row, rank = np.divmod(keys, overlap.after)
    taken: dict[int, int] = {}
    used: set[int] = set()
    for at in np.lexsort((np.abs(row - rank), -sizes)).tolist():
        if (r := int(row[at])) not in used and (new := int(rank[at])) not in taken:
            taken[new] = r
            used.add(r)
    return taken


def _filled(workers: Sequence[str], taken: Mapping[int, int], count: int) -> tuple[str, ...]:
    """Return the workers of ``count`` new ranks: those of ``taken``, then the others in their order."""
    used = frozenset(taken.values())
    rest = (worker for row, worker in enumerate(workers) if row not in used)
    return tuple(workers[taken[rank]] if rank in taken else next(rest) for rank in range(count))


def kept(members: Sequence[str], held: Mapping[str, Sequence[int]], overlap: Overlap) -> Weights:
    """Return the overlap that each member (row) keeps as each new rank (column)."""
    dense = overlap.dense()
    found = np.zeros((len(members), overlap.after), dtype=np.int64)
    for row, worker in enumerate(members):
        for old in set(held.get(worker, ())):
            found[row] += dense[old]
    return found


def even(before: int, after: int) -> Overlap:
    """Return the overlap of ranks that own equal intervals, in units of 1 / (``before`` * ``after``) of the state."""
    cuts = np.unique(np.concatenate([np.arange(before, dtype=np.int64) * after, np.arange(after, dtype=np.int64) * before]))
    if not before * after:
        cuts = cuts[:0]
    return Overlap(cuts // max(1, after), cuts // max(1, before), np.diff(cuts, append=before * after)[: len(cuts)], before, after)


def assign(cost: Weights) -> list[int]:
    """Return the column of each row, so that the sum of the costs is least. Kuhn-Munkres algorithm with potentials, O(n^3)."""
    count = len(cost)
    nothing = np.iinfo(np.int64).max // 4
    rows, columns = np.zeros(count + 1, dtype=np.int64), np.zeros(count + 1, dtype=np.int64)  # potentials; the last column is a dummy
    owner = np.full(count + 1, -1, dtype=np.int64)  # the row of each column
    for row in range(count):
        owner[count] = row
        at = count
        least = np.full(count, nothing, dtype=np.int64)
        came = np.full(count, count, dtype=np.int64)  # the column before each one on the augmenting path
        used = np.zeros(count + 1, dtype=bool)
        while owner[at] != -1:
            used[at] = True
            here = owner[at]
            free = ~used[:count]
            reduced = cost[here] - rows[here] - columns[:count]
            better = free & (reduced < least)
            least[better], came[better] = reduced[better], at
            nearest = int(np.argmin(np.where(free, least, nothing)))
            step = least[nearest]
            rows[owner[used]] += step
            columns[used] -= step
            least[free] -= step
            at = nearest
        while at != count:
            owner[at] = owner[came[at]]
            at = int(came[at])
    found = [0] * count
    for column in range(count):
        found[int(owner[column])] = column
    return found
