"""Sum of squares of all elements of a set of tensors, with bits that don't depend on the cuts between ranks.

A floating-point sum rounds, so it depends on its order, and the order depends on the sharding. Here no addition rounds. Each square
is first rounded to a multiple of a quantum, a fixed fraction of the largest square. This is element-wise, and the largest is a
maximum. Fewer than 2^53 multiples of one quantum add up exactly in any order.

Two quanta, 2^-28 and 2^-56 of the largest square, keep 56 bits of each square. The error of n elements is at most n * 2^-57 of the
largest square. The idea is Demmel's and Nguyen's (Fast reproducible floating-point summation, ARITH 2013). Unlike theirs, sums over
ranks here are sums of integers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from vescale_ray.communication import wait_notes
from vescale_ray.compat.core import foreach_norm
from vescale_ray.optim.agree import largest_of_ranks

_BITS, _LEVELS = 28, 2
_CHUNK = 1 << 16
"""Number of elements per chunk. A chunk stays in the cache in FP64, and 2^16 multiples below 2^28 add up exactly."""


def sum_of_squares(tensors: Sequence[torch.Tensor], groups: Sequence[dist.ProcessGroup], device: torch.device) -> torch.Tensor:
    """Return the sum: FP64, shape (), the same on all ranks of ``groups``; NaN or infinite if an element or its square is.

    Collective: two all-reduces per group.

    Args:
        tensors: this rank's floating-point tensors, on any device.
        groups: process groups to sum over, one after the other (those of a mesh's dimensions).
        device: device of the result and the collectives.
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
            # Copy even FP64 tensors, because _counts subtracts in place.
            counts += torch.stack(_counts(chunk.to(torch.float64, copy=True).square_(), quanta)).to(device)
    # Each count travels as two words, because the total of a large model may overflow one.
    words = torch.stack([counts >> 32, counts & 0xFFFFFFFF])
    for group in groups:
        with wait_notes.counted("all_reduce"):
            dist.all_reduce(words, group=group)
    high, low = words.tolist()
    exact = [((h << 32) + w) << (_BITS * (_LEVELS - 1 - level)) for level, (h, w) in enumerate(zip(high, low, strict=True))]
    return torch.tensor(math.ldexp(float(sum(exact)), exponent - _BITS * _LEVELS), dtype=torch.float64, device=device)


def _counts(rest: torch.Tensor, quanta: Sequence[float]) -> list[torch.Tensor]:
    """Return the number of each quantum in the sum of ``rest``, int64; the part below the last quantum is rounded."""
    counts = []
    for quantum in quanta:
        # Adding and subtracting this shift rounds to the nearest multiple of the quantum.
        shift = 1.5 * 2.0**52 * quantum
        multiple = (rest + shift).sub_(shift)
        counts.append((multiple.sum() / quantum).to(torch.int64))
        rest -= multiple
    return counts
