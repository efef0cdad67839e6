"""Division of tensors among several buffers, and gaps behind the matrices of stacks: both reduce the padding that blocks cause."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from vescale_ray.geometry import Block
from vescale_ray.planner.placement.bounds import lower_bound
from vescale_ray.planner.placement.layout import PART_BYTES, Layout, TensorSpec
from vescale_ray.planner.placement.place import PlacementProblem
from vescale_ray.planner.placement.search import plan_layout

SETTLED = 0.01
"""Padding up to which the buffers of a unit are left as they are; up to a quarter of it, a move saves too little."""
MOVES = 2
"""Number of moves that are planned in each round; each costs two plans."""


@lru_cache(maxsize=8)  # cached as plan_layout is: a DeepSeek-V3 layer of 782 tensors takes up to a second
def per_block(specs: tuple[TensorSpec, ...], num_shards: int, gaps: frozenset[str] | None = frozenset()) -> tuple[Layout, ...]:
    """Plan one buffer for each length of block, then move tensors between them as long as that saves padding.

    Tensors without a requirement fill the padding of these buffers; the rest gets another buffer.

    ``gaps``: names of the stacks that may have gaps; None: all.
    """
    quantum = PART_BYTES // min(s.dtype.itemsize for s in specs)
    groups: dict[int, list[TensorSpec]] = {}
    free: list[TensorSpec] = []
    for spec in specs:
        if spec.granularity > 1 and spec.numel:
            groups.setdefault(spec.period, []).append(spec)
        else:
            free.append(spec)
    if gaps is None or gaps:
        groups = {g: with_gaps(members, num_shards, gaps) for g, members in groups.items()}
    layouts = _balanced([plan_layout(groups[g], num_shards) for g in sorted(groups, reverse=True)])
    left: list[TensorSpec] = []
    for spec in sorted(free, key=lambda s: (-s.numel, s.name)):
        for k in sorted(range(len(layouts)), key=lambda k: (layouts[k].tensor_numel - layouts[k].numel, k)):
            if layouts[k].numel - layouts[k].tensor_numel < spec.numel:
                left.append(spec)
                break
            filled = plan_layout([*layouts[k].specs, spec], num_shards)
            if filled.shard_numel == layouts[k].shard_numel:
                layouts[k] = filled
                break
        else:
            left.append(spec)
    if left:
        own = plan_layout(left, num_shards)
        if layouts and own.tensor_numel < num_shards * quantum:
            # This is too little for a separate collective.
            layouts[-1] = plan_layout([*layouts[-1].specs, *left], num_shards)
        else:
            layouts.append(own)
    return tuple(layouts)


def _balanced(layouts: list[Layout]) -> list[Layout]:
    """Move tensors from one buffer to another as long as that reduces the sum of the shards noticeably.

    For example, one buffer's blocks need shards that are a multiple of 3.5, and it has a shard of 3.5. Another rounds its shard of 9.25 up
    to 10. If tensors of 3.5 per shard move to the first one, the shards are 7 and 6 instead of 3.5 and 10.
    """
    layouts = list(layouts)
    while len(layouts) > 1 and sum(layout.numel for layout in layouts) > (1 + SETTLED) * sum(layout.tensor_numel for layout in layouts):
        better = _better_pair(layouts)
        if better is None:
            break
        source, target, layouts[source], layouts[target] = better
        layouts = [layout for layout in layouts if layout.specs]
    return layouts


def _better_pair(layouts: Sequence[Layout]) -> tuple[int, int, Layout, Layout] | None:
    """Return two buffers and their layouts after a move of tensors from the first to the second, if that makes the sum of their shards
    smaller. Only the moves with the smallest lower bounds are tried.
    """
    attempts = []
    least = SETTLED / 4 * sum(layout.shard_numel for layout in layouts)
    for source, target in itertools.permutations(range(len(layouts)), 2):
        giver, taker = layouts[source], layouts[target]
        for names in _moves(giver.specs):
            left = [spec for spec in giver.specs if spec.name not in names]
            more = [*taker.specs, *(spec for spec in giver.specs if spec.name in names)]
            saved = giver.shard_numel + taker.shard_numel - _bound(left, giver.num_shards) - _bound(more, giver.num_shards)
            if saved > least:
                attempts.append((saved, source, target, left, more))
    for _, source, target, left, more in sorted(attempts, key=lambda attempt: -attempt[0])[:MOVES]:
        pair = [plan_layout(side, layouts[source].num_shards) for side in (left, more)]
        if sum(layout.shard_numel for layout in pair) + least < layouts[source].shard_numel + layouts[target].shard_numel:
            return source, target, pair[0], pair[1]
    return None


def _moves(specs: Sequence[TensorSpec]) -> Iterator[Collection[str]]:
    """Yield the names of 1, 2, 4, .. and all tensors of each kind (same elements and block)."""
    kinds: dict[tuple[int, int], list[str]] = {}
    for spec in specs:
        kinds.setdefault((spec.numel, spec.granularity), []).append(spec.name)
    for members in kinds.values():
        counts = {1 << k for k in range(len(members).bit_length() - 1)} | {len(members)}
        yield from (frozenset(members[-count:]) for count in sorted(counts))


def _bound(specs: Sequence[TensorSpec], num_shards: int) -> int:
    """Return the proven bound of one buffer."""
    if not specs:
        return 0
    return lower_bound(PlacementProblem.of_specs(specs, num_shards))


def with_gaps(specs: Sequence[TensorSpec], num_shards: int, only: Collection[str] | None = None) -> list[TensorSpec]:
    """Choose the stored rows of each stack's experts; the smallest shard wins.

    A stack keeps its rows, or a whole number of experts fills a rank, or one expert fills a whole number of ranks.

    ``only``: names of the stacks that may have gaps; None: all.
    """
    specs = list(specs)
    stacks = [
        i
        for i, s in enumerate(specs)
        if len(s.shape) >= 3 and s.block is not None and s.block.kind != "tensor" and s.numel and (only is None or s.name in only)
    ]
    if not stacks or num_shards == 1:
        return specs
    bound = bound_with_gaps(specs, num_shards)
    quantum = PART_BYTES // min(s.dtype.itemsize for s in specs)
    plain = list(specs)
    best = plan_layout(plain, num_shards)
    best_specs = plain
    for modes in itertools.product(("as it is", "experts per rank", "ranks per expert"), repeat=len(_alike(specs, stacks))):
        if all(mode == "as it is" for mode in modes):
            continue
        by_kind = dict(zip(_alike(specs, stacks), modes, strict=True))
        step = quantum
        counts: dict[int, int] = {}
        for i in stacks:
            spec = specs[i]
            matrix, row = spec.shape[-2] * spec.shape[-1], spec.shape[-1]
            mode = by_kind[spec.shape, spec.block]
            if mode == "experts per rank":
                counts[i] = max(1, bound // matrix)
                step = math.lcm(step, counts[i] * row)
            elif mode == "ranks per expert":
                counts[i] = -(-matrix // max(bound, 1))
                step = math.lcm(step, plain[i].granularity)
            elif plain[i].numel > 2 * bound:
                step = math.lcm(step, plain[i].period)
        first = -(-bound // step)
        for shard in (step * k for k in range(first, first + 4)):
            if shard >= best.shard_numel:
                break
            attempt = list(plain)
            for i, count in counts.items():
                spec = specs[i]
                mode = by_kind[spec.shape, spec.block]
                stored = shard // count if mode == "experts per rank" else shard * count
                rows, rest = divmod(stored, spec.shape[-1])
                if rest or rows < spec.shape[-2]:
                    break
                block = Block.rows(rows) if mode == "experts per rank" else spec.block
                if block is not None and mode != "experts per rank" and rows % block.row_count:
                    break
                attempt[i] = replace(spec, stored_rows=rows if rows > spec.shape[-2] else None, block=block)
            else:
                layout = plan_layout(attempt, num_shards)
                if layout.shard_numel < best.shard_numel:
                    best, best_specs = layout, attempt
    return best_specs


def _alike(specs: Sequence[TensorSpec], stacks: Sequence[int]) -> list[tuple[tuple[int, ...], Block | None]]:
    return list(dict.fromkeys((specs[i].shape, specs[i].block) for i in stacks))


def bound_with_gaps(specs: Sequence[TensorSpec], num_shards: int) -> int:
    """Return the bound with each matrix of a stack as a separate tensor, which allows any gaps between matrices."""
    matrices: list[TensorSpec] = []
    for spec in specs:
        matrix, count = spec, 1
        if len(spec.shape) >= 3 and spec.block is not None:
            matrix, count = TensorSpec(spec.name, spec.shape[-2:], spec.block, spec.dtype), math.prod(spec.shape[:-2])
        matrices += [matrix] * count
    problem = PlacementProblem.of_specs(matrices, num_shards)
    return lower_bound(problem) if problem.total else 0
