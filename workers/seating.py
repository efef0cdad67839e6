"""Which worker becomes which rank, and who leaves where fewer are wanted: so that the fewest bytes move. Pure.

What a worker that held parts of N keeps as rank j of M is the overlap of what those parts and that rank own, and the best numbering is an
assignment problem. Growing 3 -> 4 with the joiner as the last rank would move half of the state; with the joiner third, a third.

The overlap is that of the planned layouts (:mod:`vescale_ray.workers.layouts`): where blocks may not be cut, the planner orders a unit's
tensors otherwise at each world size, and a rank's part is elsewhere than its number tells. Without blocks a rank owns nearly the same part
of every buffer, [j/M, (j+1)/M) of M (:func:`even`): good enough where the layouts are not known.

Of a smaller world the leavers are part of the same problem. From 4 to 2 every second one leaves, and half of the state moves; if the last
two left, it would be three quarters.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

TRIES, TRIED = 16, 48
"""Nodes of which it is tried whether they can become free, among so many workers: for each an assignment problem, 10 ms here, while
training stands still. Fewer among more."""
EXACT = 128
"""Among more workers than this, who stays is chosen rank by rank: nearly as good, and no matter of seconds."""

LARGEST = 55
"""Bits of a cost: 2 ** 7 of them, and their potentials, are added up in 64."""

Weights = np.ndarray[tuple[int, int], np.dtype[np.int64]]


def seated(members: Sequence[str], held: Mapping[str, Sequence[int]], overlap: Weights) -> tuple[str, ...]:
    """``members`` in the order of their new ranks, so that they hold as much as possible of what they will own.

    Args:
        members: of the next generation, in any order; kept where it costs nothing.
        held: by worker, the ranks of the state to go on from whose parts it has in memory, its own and copies; who is not named has none.
        overlap: [ranks of that state, members]: what each old rank (row) and each new one (column) have in common, in any unit.
    """
    count = len(members)
    # Of equally good numberings, the one that leaves most workers where they stand.
    places = assign(-(kept(members, held, overlap) * (count + 1) + np.eye(count, dtype=np.int64)))
    found = [""] * count
    for worker, place in zip(members, places, strict=True):
        found[place] = worker
    return tuple(found)


def staying(candidates: Sequence[str], held: Mapping[str, Sequence[int]], overlap: Weights, nodes: Sequence[Collection[str]]) -> list[str]:
    """Who of ``candidates`` stays, in their order; the others leave.

    As few bytes move as can be. Of the choices that are equal in this, one after which the most ranks have their copy on another node
    (:func:`vescale_ray.workers.snapshot.buddies`); of these, one that leaves whole nodes free, the smallest first; of these, one with which
    the last leave.

    Args:
        held: as for :func:`seated`.
        overlap: as for :func:`seated`; as many stay as it has columns.
        nodes: the workers on each node, others than candidates too.
    """
    stay = overlap.shape[1]
    leave = len(candidates) - stay
    bytes_kept = kept(candidates, held, overlap)
    if len(candidates) > EXACT:
        return [candidates[place] for place in sorted(_nearest(bytes_kept))]
    last = dict.fromkeys(candidates[stay:], 1)
    # What moves counts before copies, these before nodes, and nodes before the order.
    per_free, per_copy, per_byte = leave + 1, (leave + 1) ** 2, (leave + 1) ** 3
    bytes_kept >>= max(0, (int(bytes_kept.max(initial=0)) * per_byte).bit_length() - LARGEST)
    # All have their copy elsewhere where no node has more than half of them: so many of each node must leave.
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


def _nearest(bytes_kept: Weights) -> list[int]:
    """For each new rank (column) the row that keeps most of it and is none before's."""
    free = np.ones(len(bytes_kept), dtype=bool)
    found = []
    for column in bytes_kept.T:
        found.append(int(np.argmax(np.where(free, column, -1))))
        free[found[-1]] = False
    return found


def kept(members: Sequence[str], held: Mapping[str, Sequence[int]], overlap: Weights) -> Weights:
    """What each member (row) keeps as each new rank (column)."""
    found = np.zeros((len(members), overlap.shape[1]), dtype=np.int64)
    for row, worker in enumerate(members):
        for old in set(held.get(worker, ())):
            found[row] += overlap[old]
    return found


def even(before: int, after: int) -> Weights:
    """The overlap of ranks that own equal intervals of one another's order, in units of 1 / (``before`` * ``after``) of the state."""
    old, new = np.arange(before, dtype=np.int64)[:, None], np.arange(after, dtype=np.int64)[None, :]
    ends = np.minimum((old + 1) * after, (new + 1) * before) - np.maximum(old * after, new * before)
    return np.maximum(0, ends)


def assign(cost: Weights) -> list[int]:
    """For each row its column, so that the sum of the costs is least. Kuhn's and Munkres' algorithm with potentials, O(n^3)."""
    count = len(cost)
    nothing = np.iinfo(np.int64).max // 4
    rows, columns = np.zeros(count + 1, dtype=np.int64), np.zeros(count + 1, dtype=np.int64)  # potentials; the last column is a helper's
    owner = np.full(count + 1, -1, dtype=np.int64)  # the row of each column
    for row in range(count):
        owner[count] = row
        at = count
        least = np.full(count, nothing, dtype=np.int64)
        came = np.full(count, count, dtype=np.int64)  # the column before each on the way to it
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
