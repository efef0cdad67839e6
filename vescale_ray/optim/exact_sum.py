"""The sum of squares of all elements of a set of tensors, as bits that don't depend on where the tensors are cut.

Floating-point addition rounds, so that a sum depends on its order, and the order on which rank holds what. Here nothing rounds: each
square is cut to a multiple of a fixed fraction of the largest one (that is elementwise, and the largest is a maximum), and multiples of
one quantum add up exactly in any order as long as they stay below 2^53 of them. Two quanta, 2^-28 and 2^-56 of the largest square, keep
56 bits of each: n elements make an error of n * 2^-57 of the largest square at most. The idea is Demmel's and Nguyen's (Fast reproducible
floating-point summation, ARITH 2013); what is ours is that sums over ranks are of integers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from vescale_ray import waiting
from vescale_ray.compat.core import foreach_norm
from vescale_ray.optim.agree import largest_of_ranks

_BITS, _LEVELS = 28, 2
_CHUNK = 1 << 16
"""Elements at a time: stays in the cache in FP64, and 2^16 multiples below 2^28 stay exact."""


def sum_of_squares(tensors: Sequence[torch.Tensor], groups: Sequence[dist.ProcessGroup], device: torch.device) -> torch.Tensor:
    """FP64, shape (), the same on all ranks of ``groups``; NaN or infinite where an element or its square is. Collective: two
    all-reduces per group.

    Args:
        tensors: of floating point, on any device; what this rank has.
        groups: over whose ranks to sum, one after the other (those of a mesh's dimensions).
        device: of the result and the collectives.
    """
    largest = torch.zeros((), dtype=torch.float64, device=device)
    tensors = [t.detach() for t in tensors if t.numel()]
    if tensors:
        norms = foreach_norm(tensors, math.inf, dtype=torch.float64)
        largest = torch.stack([n.to(device) for n in norms]).amax()
    for group in groups:
        largest = largest_of_ranks(largest, group)
    top = float(largest) * float(largest)
    if not math.isfinite(top) or top == 0.0:
        return torch.full((), top, dtype=torch.float64, device=device)
    exponent = math.frexp(top)[1]
    quanta = [2.0 ** (exponent - _BITS * level) for level in range(1, _LEVELS + 1)]
    counts = torch.zeros(_LEVELS, dtype=torch.int64, device=device)
    for tensor in tensors:
        for chunk in tensor.reshape(-1).split(_CHUNK):
            # A copy, also of FP64: the counting takes away from it.
            counts += torch.stack(_counts(chunk.to(torch.float64, copy=True).square_(), quanta)).to(device)
    # Two words each: the total of a large model may not fit into one.
    words = torch.stack([counts >> 32, counts & 0xFFFFFFFF])
    for group in groups:
        with waiting.counted("all_reduce"):
            dist.all_reduce(words, group=group)
    high, low = words.tolist()
    exact = [((h << 32) + w) << (_BITS * (_LEVELS - 1 - level)) for level, (h, w) in enumerate(zip(high, low, strict=True))]
    return torch.tensor(math.ldexp(float(sum(exact)), exponent - _BITS * _LEVELS), dtype=torch.float64, device=device)


def _counts(rest: torch.Tensor, quanta: Sequence[float]) -> list[torch.Tensor]:
    """How many of each quantum the elements of ``rest`` have together, int64; what is below the last is rounded."""
    counts = []
    for quantum in quanta:
        # Adding this and taking it away rounds to the nearest multiple of the quantum.
        shift = 1.5 * 2.0**52 * quantum
        multiple = (rest + shift).sub_(shift)
        counts.append((multiple.sum() / quantum).to(torch.int64))
        rest -= multiple
    return counts
