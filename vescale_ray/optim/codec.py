"""8-bit codes for optimizer states: two maps of 256 values, and codes to and from them. Pure functions of each element.

A block's numbers are divided by the largest magnitude among them (its FP32 *scale*); what is left, in [-1, 1], becomes the code of
the nearest value of a map. The maps are the dynamic ones of [Dettmers et al., 8-bit Optimizers via Block-wise Quantization,
arXiv 2110.02861]: seven decades, each cut into twice as many steps as the one below it, so that small numbers keep
their order of magnitude and large ones about two digits.

| map       | for     | values                                                                          |
|-----------|---------|---------------------------------------------------------------------------------|
| signed    | m       | 127 in (0, 1), their negatives, 0 and 1                                          |
| zero-free | sqrt(v) | 254 in (0, 1), 1, and 1.625e-7, half the smallest of them, where 0 would be      |

Why v is stored as a root, in a map without a zero: blocks mix rows of different size. Where a small v would round to 0 the next
update is m / eps: 1e5 times what it should be. The root halves the decades that v spans, and with no zero in the map a
denominator is never smaller than 1.6e-7 of the block's largest. (All-zero blocks have scale 0, and decode to exactly 0.)
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

FORMAT_VERSION = 1
"""Of the maps and of what is stored with them; goes up when old codes would decode to something else."""


def dynamic_values(signed: bool) -> Tensor:
    """The 256 values of the dynamic map, FP32, ascending; bitsandbytes' ``create_dynamic_map`` has the same ones."""
    values = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1.0, 2**decade + 1 if signed else 2 ** (decade + 1) + 1)
        means = ((edges[:-1] + edges[1:]) / 2.0 * 10 ** (decade - 6)).tolist()
        values += means
        if signed:
            values += [-mean for mean in means]
    return torch.tensor(sorted(values), dtype=torch.float32)


def zero_free_values() -> Tensor:
    """The unsigned dynamic map with half its smallest positive value in the place of 0."""
    values = dynamic_values(signed=False)
    values[0] = values[1] / 2
    return values


class Codebook:
    """A map on one device, with what encoding needs.

    A code is found without a search: the upper 16 bits of the number (sign, exponent, 7 bits of mantissa) name a cell of numbers that
    has at most one midpoint between map values in it; a table has the code at the cell's lower end, and one comparison with the
    midpoint that follows does the rest. (`torch.bucketize`, the same codes, takes 9 times as long on a CPU.)

    Attributes:
        values: FP32 [256].
        midpoints: FP32 [256]: between value i and i + 1; the last is infinite.
        cells: int32 [65536].
    """

    def __init__(self, values: Tensor, device: torch.device) -> None:
        exact = values.double()
        midpoints = torch.cat([(exact[:-1] + exact[1:]) / 2, torch.tensor([torch.inf], dtype=torch.float64)]).float()
        bits = torch.arange(65536, dtype=torch.int64) << 16
        bits[32768:] += 0xFFFF  # of negative numbers the lower end has the largest magnitude
        lowest = torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).view(torch.float32)
        cells = torch.bucketize(lowest.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf), midpoints[:-1])
        self.values = values.to(device)
        self.midpoints = midpoints.to(device)
        self.cells = cells.to(device=device, dtype=torch.int32)

    def decode(self, codes: Tensor) -> Tensor:
        """FP32 values of uint8 ``codes`` (1-D)."""
        return self.values.index_select(0, codes.to(torch.int32))

    def encode(self, x: Tensor) -> Tensor:
        """uint8 codes of the values nearest to FP32 ``x`` (1-D, contiguous); of two equally near ones the smaller; NaN is code 0."""
        lower = self.cells.index_select(0, (x.view(torch.int32) >> 16).bitwise_and_(0xFFFF))
        above = x > self.midpoints.index_select(0, lower)
        return lower.add_(above).to(torch.uint8)


@lru_cache(maxsize=32)
def signed_codebook(device: torch.device) -> Codebook:
    """Of m."""
    return Codebook(dynamic_values(signed=True), device)


@lru_cache(maxsize=32)
def root_codebook(device: torch.device) -> Codebook:
    """Of sqrt(v)."""
    return Codebook(zero_free_values(), device)
