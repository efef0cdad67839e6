"""plan_layout: the smallest equal shards that cut no block, and a proven lower bound.

The search rests on one rule. A boundary ``kS`` inside a tensor at offset ``o`` with blocks of ``g`` elements needs
``(kS - o) mod g == 0``. One boundary only fixes the offset; two or more also force ``S mod g == 0``. Only tensors that span two
boundaries therefore constrain the shard size, and no common multiple over all tensors is needed.

The search has three steps and stops as soon as a shard meets the bound that holds for every order:

1. Fixed orders (given, by size, by block, by row length): the exact smallest shard for each, by earliest placement.
2. All orders at once, if there are few *kinds* of tensors (same size, same block): dynamic programming over the number of placed
   tensors of each kind. If it finds no smaller shard, the result of step 1 is proven optimal, and the bound is raised to it.
3. Otherwise a best-fit order, grown tensor by tensor for each of a few dozen likely sizes. The next tensor is the one that needs the
   least padding behind the last.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from vescale_ray.planner.placement.bounds import candidates, is_possible, likely_sizes, lower_bound
from vescale_ray.planner.placement.layout import PART_BYTES, START_BYTES, Layout, TensorSpec
from vescale_ray.planner.placement.orders import Kinds, best_fit, smallest_over_all_orders
from vescale_ray.planner.placement.place import PlacementProblem, fits, place, smallest_for_ordered_pieces

REFINEMENTS = 6
"""Number of bisections between the likely sizes; one costs 0.3 to 3 ms for a DeepSeek-V3 layer of 782 tensors."""


SCAN = 12_000_000
"""Limit on the exhaustive scan, as sizes between the bound and the best one times the tensors squared. Below it, fixed orders try
each size: 160 sizes for 270 tensors or 19 for 782, in up to 15 ms."""


@dataclass(frozen=True)
class Found:
    """A shard size, the tensors' offsets (in the order of the specs), and the proven bound."""

    shard: int
    offsets: list[int]
    bound: int


def plan_layout(specs: Sequence[TensorSpec], num_shards: int, *, align: int = PART_BYTES, order: str = "auto") -> Layout:
    """Plan the smallest equal shards that cut no block.

    Args:
        specs: the tensors of one group.
        num_shards: number of ranks that share the buffer.
        align: bytes; every rank's part is a multiple of this in the narrowest dtype of ``specs`` (a multiple of 64).
        order: ``"given"`` keeps the order of ``specs`` and finds the exact smallest shard for it; ``"auto"`` also searches other
            orders, prefers the given one, and stops when it meets the lower bound.

    Tensors without a block requirement are cut at whole rows if that costs nothing, else at aligned elements; ``Layout.cut`` tells which.

    Cost: independent of ``num_shards``; 0.1 to 2 ms if the bound is met, below 50 ms for the units of known models.

    Raises:
        ValueError: no ranks, duplicate names, an impossible alignment, an unknown order.
    """
    specs = tuple(specs)
    for spec in specs:
        if not isinstance(spec, TensorSpec):
            raise TypeError(f"plan_layout got a {type(spec).__name__} in specs: give TensorSpec(name, shape, block, dtype)")
    if not isinstance(num_shards, int):
        raise TypeError(f"num_shards is {num_shards!r}: give the number of ranks")
    if num_shards < 1:
        raise ValueError(f"num_shards is {num_shards}: a layout needs at least one rank")
    if order not in ("auto", "given"):
        raise ValueError(f"order {order!r} is unknown: use 'auto' or 'given'")
    if align < START_BYTES or align % START_BYTES:
        raise ValueError(f"align is {align} bytes: use a multiple of {START_BYTES}")
    seen: set[str] = set()
    for spec in specs:
        if spec.name in seen:
            raise ValueError(f"tensor {spec.name!r} is listed twice")
        seen.add(spec.name)

    return _plan(specs, num_shards, align, order)


@lru_cache(maxsize=8)  # Consecutive layers of a model are mostly alike, so a small cache serves them.
def _plan(specs: tuple[TensorSpec, ...], num_shards: int, align: int, order: str) -> Layout:
    cuts = [s.granularity for s in specs]
    problem = PlacementProblem.of_specs(specs, num_shards, align)
    found = _search(problem, order, [s.shape[-1] if s.shape else 1 for s in specs])
    free = [i for i, s in enumerate(specs) if s.block is None and s.row_granularity > 1]
    if free and found.shard:
        found, cuts = _rows_where_free(specs, problem, found, cuts, free, order)
    offsets = {s.name: at for s, at in zip(specs, found.offsets, strict=True)}
    return Layout(specs, num_shards, found.shard, offsets, {s.name: cut for s, cut in zip(specs, cuts, strict=True)}, found.bound)


def _search(problem: PlacementProblem, order: str, row_lengths: Sequence[int]) -> Found:
    """Return the smallest shard that the three steps find."""
    n = len(problem.sizes)
    if not problem.total:
        return Found(0, [0] * n, 0)
    bound = lower_bound(problem)
    orders = [list(range(n))]
    if order == "auto":
        sizes, blocks = problem.sizes, problem.blocks
        orders.append(sorted(range(n), key=lambda i: (-sizes[i], i)))
        orders.append(sorted(range(n), key=lambda i: (-blocks[i], -sizes[i], i)))
        orders.append(sorted(range(n), key=lambda i: (-row_lengths[i], -sizes[i], i)))
        orders = [o for k, o in enumerate(orders) if o not in orders[:k]]
    found = _first_fit(problem, orders, bound)  # the usual case: the bound is met at once
    if found is not None:
        return Found(bound, found, bound)
    if order == "given":
        return Found(*_smallest_of_orders(problem, orders, bound), bound)

    kinds = Kinds.of(problem)
    if kinds.states <= kinds.MOST_STATES:
        shard, offsets = _smallest_of_orders(problem, orders, bound)
        proof = smallest_over_all_orders(problem, kinds, candidates(problem, bound, shard - 1))
        if proof.order is not None:
            better = place(problem, proof.order, proof.shard)
            assert better is not None
            shard, offsets = proof.shard, better
        return Found(shard, offsets, shard if proof.complete else max(bound, proof.excluded_below))

    def by_fixed_order(size: int) -> list[int] | None:
        return _first_fit(problem, orders, size)

    def by_best_fit(size: int) -> list[int] | None:
        grown = best_fit(problem, kinds, size)
        return None if grown is None else place(problem, grown, size)

    best: tuple[int, list[int]] | None = None
    failed = [bound]
    for size in likely_sizes(problem, bound):
        found = by_fixed_order(size)
        if found is not None:
            best = _refine(problem, by_fixed_order, failed[-1], size, found)
            break
        failed.append(size)
    if best is None:
        best = _smallest_of_orders(problem, orders, bound)
    for before, size in itertools.pairwise([bound, *failed]):
        found = by_best_fit(size)
        if found is not None:
            best = min(best, _refine(problem, by_best_fit, before, size, found))
            break
    if (best[0] - bound) // problem.quantum * n * n <= SCAN:
        for size in (int(s) for chunk in candidates(problem, bound, best[0] - 1) for s in chunk):
            found = by_fixed_order(size)
            if found is not None:
                return Found(size, found, bound)
    return Found(*best, bound)


def _refine(
    problem: PlacementProblem, attempt: Callable[[int], list[int] | None], low: int, high: int, found: list[int]
) -> tuple[int, list[int]]:
    """Bisect between a size that failed and one that fits.

    A larger size need not fit if a smaller one does, so the result may not be the smallest.
    """
    for _ in range(REFINEMENTS):
        middle = (low + high) // 2 // problem.quantum * problem.quantum
        if middle <= low or middle >= high:
            break
        better = attempt(middle) if is_possible(problem, middle) else None
        if better is None:
            low = middle
        else:
            high, found = middle, better
    return high, found


def _first_fit(problem: PlacementProblem, orders: Sequence[list[int]], shard: int) -> list[int] | None:
    """Return offsets for the first order that fits into shards of this size, or None."""
    for order in orders:
        offsets = place(problem, order, shard)
        if offsets is not None:
            return offsets
    return None


def _rows_where_free(
    specs: tuple[TensorSpec, ...], problem: PlacementProblem, found: Found, cuts: list[int], free: list[int], order: str
) -> tuple[Found, list[int]]:
    """Cut tensors without a requirement (``free``) at whole rows if the shard stays as large as ``found``.

    If not all of them can be cut at rows, the largest kinds come first, at the shard size found. The bound stays that of element cuts,
    because rows are the planner's choice, not the caller's.
    """
    rows = {i: specs[i].row_granularity for i in free}
    by_rows = problem.with_blocks(rows)
    current = sorted(range(len(specs)), key=lambda i: (found.offsets[i], specs[i].numel, i))
    orders = [current] if order == "given" else [current, sorted(range(len(specs)), key=lambda i: (-by_rows.blocks[i], -specs[i].numel, i))]
    for one in orders:
        offsets = place(by_rows, one, found.shard)
        if offsets is not None:
            return Found(found.shard, offsets, found.bound), [rows.get(i, cut) for i, cut in enumerate(cuts)]
    kinds: dict[tuple[int, int], list[int]] = {}
    for i in free:
        kinds.setdefault((specs[i].numel, rows[i]), []).append(i)
    chosen: dict[int, int] = {}
    offsets = found.offsets
    for _, members in sorted(kinds.items(), key=lambda item: (-item[0][0], item[0][1])):
        attempt = {**chosen, **{i: rows[i] for i in members}}
        placed = place(problem.with_blocks(attempt), current, found.shard)
        if placed is not None:
            chosen, offsets = attempt, placed
    return Found(found.shard, offsets, found.bound), [chosen.get(i, cut) for i, cut in enumerate(cuts)]


def _smallest_of_orders(problem: PlacementProblem, orders: Sequence[list[int]], bound: int) -> tuple[int, list[int]]:
    """Return the exact smallest shard over these orders, and its offsets."""
    start = min(smallest_for_ordered_pieces(problem, order, bound) for order in orders)
    for sizes in candidates(problem, start):
        hits = [fits(problem, order, sizes) for order in orders]
        best = np.stack(hits).any(axis=0)
        if best.any():
            at = int(best.argmax())
            chosen = next(k for k, hit in enumerate(hits) if hit[at])
            offsets = place(problem, orders[chosen], int(sizes[at]))
            assert offsets is not None
            return int(sizes[at]), offsets
    raise AssertionError("unreachable: a shard as large as all tensors together holds them")
