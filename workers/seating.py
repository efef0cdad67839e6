"""Which worker becomes which rank: the numbering with which the fewest bytes move. Pure.

What a worker that held parts of N keeps as rank j of M is the overlap of what those parts and that rank own, and the best numbering is an
assignment problem. Growing 3 -> 4 with the joiner as the last rank would move half of the state; with the joiner third, a third.

The overlap is that of the planned layouts (:mod:`vescale_ray.workers.layouts`): where blocks may not be cut, the planner orders a unit's
tensors otherwise at each world size, and a rank's part is elsewhere than its number tells. Without blocks a rank owns nearly the same part
of every buffer, [j/M, (j+1)/M) of M (:func:`even`): good enough where the layouts are not known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

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


def kept(members: Sequence[str], held: Mapping[str, Sequence[int]], overlap: Weights) -> Weights:
    """What each member (row) keeps as each new rank (column)."""
    found = np.zeros((len(members), len(members)), dtype=np.int64)
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
