"""Assignment of matrices to the ranks that orthogonalize them, and to buckets. Pure integers: the same on every rank.

Every matrix has one *root*. Its pieces go there before Newton-Schulz and come back after. A good choice has two properties:

- balance: the step ends with the slowest rank. Matrices are placed by falling cost on the least loaded rank (LPT; Graham 1969: at
  most 4/3 of the optimum), over the whole model at once. A choice layer by layer, or round robin, is up to 17x worse.
- locality: pieces that the root already holds need not travel. Of the ranks that hold a piece, and whose load would stay within 5 %
  above the mean, the one that holds most is taken.

Roots are chosen first and buckets after them. Each root processes its matrices in model order, and a bucket is the same part of every
root's work. Each bucket is then as balanced as the whole, and no rank waits for another's large matrix in the middle of a step.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SLACK = 0.05


@dataclass(frozen=True)
class Roots:
    """The assignment of matrices to roots.

    Attributes:
        root: rank of each matrix's root.
        load: summed cost of each rank.
        cost: cost of each matrix, as given.
    """

    root: tuple[int, ...]
    load: tuple[int, ...]
    cost: tuple[int, ...]

    @property
    def balance(self) -> float:
        """Largest load over mean load; 1 is perfect. Steps end with the slowest rank."""
        total = sum(self.load)
        return max(self.load) * len(self.load) / total if total else 1.0

    @property
    def lower_bound(self) -> float:
        """Balance that no assignment can beat, since a matrix is not divided."""
        total = sum(self.cost)
        return max(1.0, max(self.cost) * len(self.load) / total) if total else 1.0


def assign_roots(costs: Sequence[int], held: Sequence[Mapping[int, int]], world: int) -> Roots:
    """Choose roots for matrices of ``costs``; rank r holds ``held[i].get(r, 0)`` elements of matrix i.

    A matrix that is whole on one rank stays there, unless that slows the slowest rank down and other matrices travel anyway. For other
    matrices, locality may raise the largest load to ``1 + SLACK`` times the mean, or to the largest load without locality. Cost:
    O(n (log world + holders)).
    """
    if len(costs) != len(held):
        raise ValueError(f"{len(costs)} costs for {len(held)} matrices")
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    bound = (1 + SLACK) * sum(costs) / world
    whole = {i: next(iter(ranks)) for i, ranks in enumerate(held) if len(ranks) == 1}
    pinned = _greedy(costs, held, world, order, bound, whole)
    if max(pinned.load, default=0) <= bound or len(whole) == len(costs):
        return pinned
    balanced = _greedy(costs, held, world, order, -1.0, {})
    fastest = max(bound, max(balanced.load))
    candidates = (pinned, _greedy(costs, held, world, order, bound, {}), balanced)
    return next(choice for choice in candidates if max(choice.load) <= fastest)


def _greedy(
    costs: Sequence[int], held: Sequence[Mapping[int, int]], world: int, order: Sequence[int], bound: float, fixed: Mapping[int, int]
) -> Roots:
    load, root = [0] * world, [0] * len(costs)
    for i, rank in fixed.items():
        root[i] = rank
        load[rank] += costs[i]
    heap = [(load[rank], rank) for rank in range(world)]  # may hold stale entries; an entry counts if it equals the rank's load
    heapq.heapify(heap)
    for i in (i for i in order if i not in fixed):
        fits = [(-n, load[r], r) for r, n in held[i].items() if n and load[r] + costs[i] <= bound]
        if fits:
            chosen = min(fits)[2]
        else:
            while heap[0][0] != load[heap[0][1]]:
                heapq.heappop(heap)
            chosen = heap[0][1]
        root[i] = chosen
        load[chosen] += costs[i]
        heapq.heappush(heap, (load[chosen], chosen))
    return Roots(tuple(root), tuple(load), tuple(costs))


def assign_buckets(roots: Roots, nbytes: Sequence[int], limit: int) -> tuple[tuple[int, ...], ...]:
    """Cut every root's work into the same number of parts of about equal cost; bucket k is the k-th part of all of them.

    Args:
        nbytes: bytes of each matrix on the wire.
        limit: bytes that a root should receive in one bucket; a matrix is never divided.

    Returns:
        Matrices of each bucket, ascending; each matrix appears once, and no bucket is empty.
    """
    world = len(roots.load)
    share = [0] * world
    for i, rank in enumerate(roots.root):
        share[rank] += nbytes[i]
    count = max(1, -(-max(share, default=0) // limit))
    done = [0] * world
    buckets: list[list[int]] = [[] for _ in range(count)]
    for i, rank in enumerate(roots.root):
        middle = done[rank] + roots.cost[i] / 2
        done[rank] += roots.cost[i]
        buckets[min(count - 1, int(middle * count / max(1, roots.load[rank])))].append(i)
    return tuple(tuple(bucket) for bucket in buckets if bucket)
