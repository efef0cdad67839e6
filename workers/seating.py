"""Which worker becomes which rank: the numbering with which the fewest bytes move. Pure.

A rank owns the same part of every buffer: [j/M, (j+1)/M) of M. So what a worker that held parts of N keeps as rank j is the overlap of
intervals, and the best numbering is an assignment problem. (To within a block, at which a part is really cut.) Growing 3 -> 4
with the joiner as the last rank would move half of the state; with the joiner third, a third.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

Weights = np.ndarray[tuple[int, int], np.dtype[np.int64]]


def seated(members: Sequence[str], held: Mapping[str, Sequence[int]], before: int) -> tuple[str, ...]:
    """``members`` in the order of their new ranks, so that they hold as much as possible of what they will own.

    Args:
        members: of the next generation, in any order; kept where it costs nothing.
        held: by worker, the ranks of the state to go on from whose parts it has in memory, its own and copies; who is not named has none.
        before: the number of ranks of that state.
    """
    count = len(members)
    overlap = kept(members, held, before)
    # Of equally good numberings, the one that leaves most workers where they stand.
    places = assign(-(overlap * (count + 1) + np.eye(count, dtype=np.int64)))
    found = [""] * count
    for worker, place in zip(members, places, strict=True):
        found[place] = worker
    return tuple(found)


def kept(members: Sequence[str], held: Mapping[str, Sequence[int]], before: int) -> Weights:
    """What each member (row) keeps as each new rank (column), in units of 1 / (``before`` * members) of the state."""
    count = len(members)
    ranks = np.arange(count, dtype=np.int64)
    overlap = np.zeros((count, count), dtype=np.int64)
    for row, worker in enumerate(members):
        for old in set(held.get(worker, ())):
            ends = np.minimum((old + 1) * count, (ranks + 1) * before) - np.maximum(old * count, ranks * before)
            overlap[row] += np.maximum(0, ends)
    return overlap


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
