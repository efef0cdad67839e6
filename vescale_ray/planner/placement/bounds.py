"""Lower bounds on the shard size, and the sizes above the bound that are worth trying.

Each test below is necessary for *any* layout, in any order. The first size that passes all of them is therefore a lower bound:

- **room**: all tensors, each padded to the start alignment, fit into N shards;
- **counting**: some rank holds ``k`` of the ``(k - 1) N + 1`` largest pieces between possible cuts;
- **each tensor alone**: ``e`` elements in blocks of ``g`` can be placed iff ``e <= S``, or ``S mod g == 0``, or
  ``e <= 2S - S mod g`` (the tensor spans one boundary). If ``e > 2S``, two boundaries lie inside it, so ``S mod g == 0``. A stack with
  shorter last blocks is placed by ``place.earliest_many``;
- **full ranks**: take some kinds of tensors, the coarse ones, whose pieces are all multiples of ``d``. A rank without any other
  tensor holds a multiple of ``d``. One other tensor of ``e`` elements touches at most ``(e - 2) // S + 2`` ranks. The elements
  must therefore fit into ``T`` full ranks and ``N - T`` ranks of ``S - S mod d``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from vescale_ray.planner.placement.place import NOWHERE, PlacementProblem, earliest_many

_FIRST_CHUNK, _LAST_CHUNK = 64, 16384
LIKELY = 64
"""Maximum number of sizes that :func:`likely_sizes` returns."""


def lower_bound(problem: PlacementProblem) -> int:
    """Return a proven bound: no layout of these tensors, in any order, has a smaller shard."""
    return int(next(candidates(problem, _room_and_counting(problem)))[0])


def candidates(problem: PlacementProblem, size: int, largest: int | None = None) -> Iterator[np.ndarray]:
    """Yield every shard size from ``size`` to ``largest`` that no test excludes, in ascending chunks."""
    quantum = problem.quantum
    sizes = np.array([size for size, _, _ in problem.distinct], dtype=np.int64)
    units = np.array([math.gcd(block, period) for _, block, period in problem.distinct], dtype=np.int64)
    largest = -(-problem.total // quantum) * quantum if largest is None else largest  # all tensors in the first shard
    chunk = _FIRST_CHUNK
    while size <= largest:
        forced = sizes > 2 * size
        step = quantum
        for unit in np.unique(units[forced]):
            step = math.lcm(step, int(unit))
        # The set of forced tensors shrinks when 2S reaches the smallest of them.
        stop = min(largest, (int(sizes[forced].min()) - 1) // 2) if forced.any() else largest
        first = -(-size // step) * step
        if first <= stop:
            count = min(chunk, (stop - first) // step + 1)
            found = first + step * np.arange(count, dtype=np.int64)
            possible = _possible(problem, found)
            if possible.any():
                yield found[possible]
            size = int(found[-1]) + quantum
            chunk = min(chunk * 4, _LAST_CHUNK)
        else:
            size = stop // quantum * quantum + quantum


def is_possible(problem: PlacementProblem, shard: int) -> bool:
    """Return whether a shard of this size passes all tests; if not, no placement fits into it."""
    return bool(_possible(problem, np.array([shard], dtype=np.int64))[0])


def _possible(problem: PlacementProblem, shards: np.ndarray) -> np.ndarray:
    """Return a mask of the sizes that pass the tests "each tensor alone" and "full ranks"."""
    alike = np.array([(size, block) for size, block, period in problem.distinct if block == period], dtype=np.int64).reshape(-1, 2)
    sizes, blocks = alike[:, 0], alike[:, 1]
    rest = shards[:, None] % blocks[None, :]
    possible = ((sizes <= shards[:, None]) | (rest == 0) | (sizes <= 2 * shards[:, None] - rest)).all(axis=1)
    for size, block, period in problem.distinct:
        if block != period:
            possible &= earliest_many(np.zeros_like(shards), size, block, shards, period) != NOWHERE
    for unit, others in problem.coarse:
        full = np.zeros_like(shards)
        for numel, count in others:
            full += count * ((numel - 2) // shards + 2 if numel > 1 else 1)
        full = np.minimum(full, problem.num_shards)
        possible &= full * shards + (problem.num_shards - full) * (shards - shards % unit) >= problem.total
    return possible


def _room_and_counting(problem: PlacementProblem) -> int:
    """Return the smallest size that passes the tests "room" and "counting"."""
    n = problem.num_shards
    least = -(-problem.total // n)
    pieces: dict[int, int] = {}
    for numel, block, period in zip(problem.sizes, problem.blocks, problem.periods, strict=True):
        if numel:
            matrices = numel // period if period != block else 1
            whole, rest = divmod(numel // matrices, block)
            pieces[block] = pieces.get(block, 0) + whole * matrices
            pieces[rest] = pieces.get(rest, 0) + matrices
    runs: list[tuple[int, int]] = []  # runs of equal pieces, the largest first: (size, number of pieces at least this large)
    seen = 0
    for size in sorted(pieces, reverse=True):
        seen += pieces[size]
        if not size or not pieces[size]:
            continue
        runs.append((size, seen))
        k = -(-seen // n)
        last, need, held = (k - 1) * n + 1, k, 0
        for index in range(len(runs) - 1, -1, -1):
            first = runs[index - 1][1] if index else 0
            take = min(need, max(0, last - first))
            held += take * runs[index][0]
            need, last = need - take, min(last, first)
            if not need:
                break
        least = max(least, held)
    return -(-least // problem.quantum) * problem.quantum


def likely_sizes(problem: PlacementProblem, bound: int) -> list[int]:
    """Return a few dozen ascending sizes from the bound on at which many tensors no longer constrain each other.

    The sizes are multiples of three kinds of numbers: divisors of the coarse pieces, blocks of tensors that may span two boundaries,
    and common multiples of these blocks. The multiple of all of them lets every tensor be cut at each of its blocks. The bound plus
    1/8192, 1/4096, .. of itself is added, because more padding is the only other way to fit the rest.
    """
    forced, longer = 1, set()
    for numel, block, period in problem.distinct:
        if numel > 2 * bound:
            forced = math.lcm(forced, math.gcd(block, period))
        if period != block or bound < numel <= 2 * bound:
            longer.add(period)
    steps = {unit for unit, _ in problem.coarse} | set(longer)
    everything = forced
    for block in sorted(longer):
        everything = math.lcm(everything, block)
    steps |= {math.lcm(a, b) for a in longer for b in longer}
    steps = {math.lcm(problem.quantum, forced, step) for step in steps | {1, everything}}
    # The common multiple of all blocks is added, too; Megatron's rule uses it.
    common = problem.quantum
    for period in sorted(set(problem.periods)):
        common = math.lcm(common, period)
    found = {-(-bound // common) * common}
    largest = -(-problem.total // problem.quantum) * problem.quantum
    for step in steps:
        first = -(-bound // step)
        found.update(step * k for k in range(first, first + 6))
    step = math.lcm(problem.quantum, forced)
    found.update(-(-(bound + (bound >> k)) // step) * step for k in range(3, 14))
    ordered = np.array(sorted(size for size in found if size <= max(largest, bound)), dtype=np.int64)
    return [int(size) for size in ordered[_possible(problem, ordered)]][:LIKELY]
