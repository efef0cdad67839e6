"""Shard sizes that other systems would need for the same tensors, in elements per rank, by their published rules.

These functions serve comparison only. ``fsdp1`` and ``deepspeed`` ignore blocks; ``fsdp2`` keeps blocks whole if asked to pad to
them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from vescale_ray.planner.placement.layout import START_BYTES, TensorSpec
from vescale_ray.planner.placement.place import PlacementProblem, place


def fsdp1(specs: Sequence[TensorSpec], num_shards: int) -> int:
    """FSDP1 and ZeRO stages 1 and 2: one flat buffer of all tensors, cut into equal parts at any element (Zhao et al., arXiv
    2304.11277, section 3.2.1)."""
    return -(-sum(s.numel for s in specs) // num_shards)


def deepspeed(specs: Sequence[TensorSpec], num_shards: int) -> int:
    """DeepSpeed ZeRO stage 3: every tensor is flattened and cut into equal parts on its own (``partition_parameters.py``)."""
    return sum(-(-s.numel // num_shards) for s in specs)


def fsdp2(specs: Sequence[TensorSpec], num_shards: int, *, blocks: bool = False) -> int:
    """FSDP2: ``Shard(0)`` for each parameter, in chunks of ``ceil(shape[0] / N)`` rows (torch ``_fsdp_param.py``).

    ``blocks``: round chunks up to whole blocks; a user must pad parameters this way to keep blocks whole.
    """
    total = 0
    for s in specs:
        if not s.numel:
            continue
        first = s.shape[0] if s.shape else 1
        inner = s.numel // first
        if blocks and s.granularity > inner:
            pieces = -(-s.numel // s.granularity)
            total += -(-pieces // num_shards) * s.granularity
        else:
            total += -(-first // num_shards) * inner
    return total


def megatron_fsdp(specs: Sequence[TensorSpec], num_shards: int) -> int:
    """Megatron-FSDP: every part is a multiple of one chunk, the least common multiple of all tensors' rows ``shape[1:].numel()``.

    If a tensor's blocks are longer than its rows, its blocks count instead. Each tensor starts at a multiple of its own row or block.
    Tensors of at least one chunk follow each other; smaller ones fill the gaps between them, the largest first
    (``GlobalLayout.build`` of ``megatron_fsdp/experimental/layout.py``).
    """
    rows = []
    for s in specs:
        inner = math.prod(s.shape[1:]) if len(s.shape) > 1 else 1
        rows.append(math.lcm(max(1, inner), s.granularity) if s.granularity % max(1, inner) else s.granularity)
    chunk = math.lcm(*(r for r, s in zip(rows, specs, strict=True) if s.numel), 1)
    gaps: list[tuple[int, int]] = []
    end = 0
    large = [(s.numel, r) for s, r in zip(specs, rows, strict=True) if s.numel >= chunk]
    small = sorted(((s.numel, r) for s, r in zip(specs, rows, strict=True) if 0 < s.numel < chunk), reverse=True)
    for numel, _ in large:
        start = -(-end // chunk) * chunk
        if start > end:
            gaps.append((end, start))
        end = start + numel
    for numel, row in small:
        for k, (low, high) in enumerate(gaps):
            start = -(-low // row) * row
            if start + numel <= high:
                gaps[k] = (start + numel, high)
                break
        else:
            end = -(-end // row) * row + numel
    return -(-end // (chunk * num_shards)) * chunk


def algorithm1(specs: Sequence[TensorSpec], num_shards: int, *, align: int = 128) -> int:
    """The paper's heuristic ([veScale-FSDP], Algorithm 1).

    It tries three orders (as given, by block, by shape) and every prefix of the tensors sorted by size. The tensors of the prefix may
    contain a whole shard, so the shard is a multiple of their blocks and of the collective's alignment. Bisection over these multiples
    finds the smallest shard that holds all tensors in that order.
    """
    specs = [s for s in specs if s.numel]
    if not specs:
        return 0
    itemsize = min(s.dtype.itemsize for s in specs)
    problem = PlacementProblem.of(
        [s.numel for s in specs], [s.granularity for s in specs], num_shards, align // itemsize, START_BYTES // itemsize
    )
    indices = range(len(specs))
    keys: list[Callable[[int], tuple[int, ...]]] = [
        lambda i: (i,),
        lambda i: (-problem.blocks[i], -problem.sizes[i], i),
        lambda i: (*(-n for n in reversed(specs[i].shape)), i),
    ]
    units = [problem.quantum]
    for _, block in sorted({(s, b) for s, b in zip(problem.sizes, problem.blocks, strict=True)}, reverse=True):
        units.append(math.lcm(units[-1], block))
    best = 0
    for key in keys:
        order = sorted(indices, key=key)
        for unit in dict.fromkeys(units):
            low, high = max(1, -(-problem.total // (num_shards * unit))), -(-problem.total // unit)
            if best and low * unit >= best:
                continue
            while low < high:
                middle = (low + high) // 2
                if place(problem, order, middle * unit) is not None:
                    high = middle
                else:
                    low = middle + 1
            if place(problem, order, low * unit) is not None and (not best or low * unit < best):
                best = low * unit
    return best
