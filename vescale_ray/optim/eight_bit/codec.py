"""8-bit codes for optimizer states: two maps of 256 values, with encoding and decoding. Pure functions of each element.

A block's numbers are divided by their largest magnitude, the block's FP32 *scale*. Each quotient, in [-1, 1], is encoded as the
nearest value of a map. For m it is the nearest value that is at most a quarter too large (:data:`MOST_OVER`):

| map    | for     | values                                                                                              |
|--------|---------|-----------------------------------------------------------------------------------------------------|
| signed | m       | 127 in (0, 1), their negatives, 0 and 1: the dynamic map of [Dettmers et al., arXiv 2110.02861],    |
|        |         | seven decades, each with twice as many steps as the one below                                       |
| root   | sqrt(v) | 1, and 255 below it down to 1.1e-7, none of them 0: in each decade a geometric sequence, of 112,    |
|        |         | 56, 28, 20, 15, 13 and 11 values from the top                                                       |

v is stored as a root, in a map without a zero, because blocks mix rows of different size. If a small v were rounded to 0, the next
update would be m / eps, 1e5 times too large. The root halves the decades that v spans. Without a zero in the map, a denominator is
never smaller than 1e-7 of the block's largest.

The dynamic map does not suit v: a divisor needs *relative* accuracy, but the map's lower decades have 2 to 16 values each. m uses
the dynamic map, whose lower decades are as coarse, so the nearest value may double a number and its update. A code that is too
small only slows the element down, which is harmless.

With rows whose sizes are spread log-normally (sigma 4), the largest update of 32x32 blocks is 1.4 times FP32's. It is 2.6 times if m
takes the nearest value, and 4.4 times if the root of v uses the dynamic map, too (benchmarks/adamw8bit_updates.py).
All-zero blocks have scale 0, and decode to exactly 0.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

FORMAT_VERSION = 1
"""Version of the maps and the stored format; it rises if old codes would decode to other values."""

MOST_OVER = 1.25
"""Largest factor by which encoding may enlarge a number of m. Decoding does not depend on it, so the format does not either."""

CELL_SHIFT = 17
"""Number of low bits of an FP32 number that do not select its cell."""


def dynamic_values(signed: bool) -> Tensor:
    """Return the 256 values of the dynamic map, FP32, ascending; they equal those of bitsandbytes' ``create_dynamic_map``."""
    values = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1.0, 2**decade + 1 if signed else 2 ** (decade + 1) + 1)
        means = ((edges[:-1] + edges[1:]) / 2.0 * 10 ** (decade - 6)).tolist()
        values += means
        if signed:
            values += [-mean for mean in means]
    return torch.tensor(sorted(values), dtype=torch.float32)


def root_values() -> Tensor:
    """Return the 256 values of the map for square roots, FP32, ascending, none of them 0."""
    values = [1.0]
    for decade, count in enumerate((112, 56, 28, 20, 15, 13, 11)):
        values += [10.0 ** -(decade + (i + 0.5) / count) for i in range(count)]
    return torch.tensor(sorted(values), dtype=torch.float64).to(torch.float32)


class Codebook:
    """A map on one device, with the tables for encoding.

    Encoding needs no search. The upper 15 bits of a number (sign, exponent, 6 bits of mantissa) select a cell of numbers. A cell holds
    at most one border between map values. A table gives the code at the cell's lower end, and one comparison with the next border
    completes it. (`torch.bucketize` gives the same codes, but takes 9 times as long on a CPU core.)

    Args:
        values: FP32 [256], ascending.
        most_over: largest factor by which encoding may enlarge a number; beyond it, the value nearer to zero is taken.

    Attributes:
        values: FP32 [256].
        borders: FP32 [256]: border between values i and i + 1, their midpoint if ``most_over`` allows; the last is infinite.
        cells: int32 [32768], the code at each cell's lower end.
        cells_uint8: ``cells`` as uint8, for GPUs, where a look-up costs the cache lines that it touches.
    """

    def __init__(self, values: Tensor, device: torch.device, most_over: float = math.inf) -> None:
        below, above = values.double()[:-1], values.double()[1:]
        middle = (below + above) / 2
        inner = torch.where(below >= 0, torch.maximum(middle, above / most_over), torch.minimum(middle, below / most_over))
        borders = torch.cat([inner, torch.tensor([torch.inf], dtype=torch.float64)]).float()
        if (borders[:-1].view(torch.int32) >> CELL_SHIFT).unique().numel() < values.numel() - 1:
            raise ValueError("two borders of this map lie in one cell: its values are too close for cells of 6 bits of mantissa")
        bits = torch.arange(1 << 15, dtype=torch.int64) << CELL_SHIFT
        bits[1 << 14 :] += (1 << CELL_SHIFT) - 1  # a negative cell's lower end has the largest magnitude
        lowest = torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).view(torch.float32)
        cells = torch.bucketize(lowest.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf), borders[:-1])
        self.values = values.to(device)
        self.borders = borders.to(device)
        self.cells = cells.to(device=device, dtype=torch.int32)
        self.cells_uint8 = self.cells.to(torch.uint8)

    def decode(self, codes: Tensor) -> Tensor:
        """Return the FP32 values of uint8 ``codes`` (1-D)."""
        return self.values.index_select(0, codes.to(torch.int32))

    def encode(self, x: Tensor) -> Tensor:
        """Return the uint8 codes of FP32 ``x`` (1-D, contiguous). A number on a border takes the smaller value; NaN is code 0."""
        lower = self.cells.index_select(0, (x.view(torch.int32) >> CELL_SHIFT).bitwise_and_(0x7FFF))
        above = x > self.borders.index_select(0, lower)
        return lower.add_(above).to(torch.uint8)


@lru_cache(maxsize=32)
def signed_codebook(device: torch.device) -> Codebook:
    """Return the codebook of m."""
    return Codebook(dynamic_values(signed=True), device, MOST_OVER)


@lru_cache(maxsize=32)
def root_codebook(device: torch.device) -> Codebook:
    """Return the codebook of sqrt(v)."""
    return Codebook(root_values(), device)
