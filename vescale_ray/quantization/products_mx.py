"""FP8 products on Blackwell GPUs, whose operands have a scale for each 32 elements along the contracted dimension (MXFP8).

These scales are powers of two, so blocks and tiles of any multiple of 32 columns are MX operands if their scales are powers of two: each
32 elements get the scale of their block. The values are the same.

Sources: OCP Microscaling Formats 1.0, section 5; cuBLAS, "1D Block Scaling Factors Layout".
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from vescale_ray.quantization.operands import SIDE, GpuOperand, Operand
from vescale_ray.quantization.scaled_mm import scaled_product

GROUP = 32
"""Elements that share a scale."""
_LANES, _QUARTERS, _COLUMNS = 32, 4, 4
"""cuBLAS stores scales in tiles of 4 x 32 rows and 4 columns: row r and column c of a tile at ``(r % 32) * 16 + r // 32 * 4 + c``."""


def multiply_mx(a: Operand | GpuOperand, b: Operand | GpuOperand, dtype: torch.dtype) -> Tensor:
    """Return ``a @ b.T`` in ``dtype``. Scales are powers of two, of a multiple of 32 columns."""
    (left, left_scales), (right, right_scales) = mx_operand(a), mx_operand(b)
    out = scaled_product(left, right, left_scales, right_scales, [False, False], True, dtype)
    return out[: _rows(a), : _rows(b)]


def mx_operand(one: Operand | GpuOperand) -> tuple[Tensor, Tensor]:
    """Return codes with zeros up to multiples of 16 rows and 32 columns, and their scales as E8M0, in the order of cuBLAS."""
    rows, columns = one.codes.shape
    if isinstance(one, GpuOperand):
        side = SIDE
        scales = one.scales.t()[:, : -(-columns // side)].repeat_interleave(side, 0)[:rows] if one.tiles else one.scales
    else:
        side = one.side
        scales = one.scales.repeat_interleave(one.rows, 0)[:rows]
    codes = one.codes
    if rows % 16 or columns % GROUP:
        codes = F.pad(codes.view(torch.uint8), (0, -columns % GROUP, 0, -rows % 16)).view(torch.float8_e4m3fn)
    exponents = (scales.contiguous().view(torch.int32) >> 23 & 0xFF).to(torch.uint8)  # Inf and NaN give 255, which is NaN
    return codes.contiguous(), _in_tiles(exponents.repeat_interleave(side // GROUP, 1)[:, : codes.shape[1] // GROUP])


def _in_tiles(exponents: Tensor) -> Tensor:
    """Return the scales ``[rows, columns]`` in the order of cuBLAS, with zeros up to whole tiles."""
    rows, columns = exponents.shape
    whole = F.pad(exponents, (0, -columns % _COLUMNS, 0, -rows % (_QUARTERS * _LANES)))
    tiles = whole.view(-1, _QUARTERS, _LANES, whole.shape[1] // _COLUMNS, _COLUMNS)
    return tiles.permute(0, 3, 2, 1, 4).contiguous().view(-1).view(torch.float8_e8m0fnu)


def _rows(one: Operand | GpuOperand) -> int:
    """Return the number of rows without padding."""
    return one.rows if isinstance(one, GpuOperand) else one.codes.shape[0]
