"""Operands of FP8 products: codes and scales of a matrix in blocks along the dimension that a product contracts."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vescale_ray.quantization.fp8 import LARGEST, SMALLEST_SCALE, Fp8Block, rounded_up
from vescale_ray.quantization.kernels import on_triton

SIDE = 128
"""Length of the blocks that Hopper GPUs multiply, and that the kernel quantizes."""


class Operand(NamedTuple):
    """A quantized matrix ``[m, k]``. Matrix products sum over its columns."""

    codes: Tensor
    """e4m3, ``[m, k]``."""
    scales: Tensor
    """FP32, ``[ceil(m / rows), ceil(k / side)]``."""
    rows: int
    """Rows that share a scale: 1 or ``side``."""
    side: int

    def transposed(self) -> Operand:
        """Return the transposed matrix; its tiles are square, so codes and scales stay."""
        return Operand(self.codes.t(), self.scales.t(), self.rows, self.side)


class GpuOperand(NamedTuple):
    """An operand as cuBLASLt wants it, with zeros up to multiples of 16 rows and columns."""

    codes: Tensor
    """e4m3, contiguous."""
    scales: Tensor
    """FP32: of tiles a column for each row of tiles, with a multiple of four entries; else a row for each row, of stride 1."""
    tiles: bool
    rows: int
    """Rows without padding."""


def operand(x: Tensor, form: Fp8Block, *, tiles: bool) -> Operand:
    """Quantize a matrix ``[m, k]`` in tiles of ``form``, or in blocks of one row and as many columns."""
    m, k = x.shape
    side = form.columns
    rows = side if tiles else 1
    padded = F.pad(x, (0, -k % side, 0, -m % rows)).float()
    blocks = padded.view(padded.shape[0] // rows, rows, padded.shape[1] // side, side)
    scales = (blocks.abs().amax(dim=(1, 3)) / LARGEST).clamp(min=SMALLEST_SCALE)
    if form.scales == "power_of_two":
        scales = rounded_up(scales)
    # Whole blocks are cast, and then cut: inductor (torch 2.13) would otherwise split rows whose last block is smaller, and fail.
    codes = (blocks / scales[:, None, :, None]).view(padded.shape).to(torch.float8_e4m3fn)[:m, :k]
    return Operand(codes, scales, rows, side)


def operands(
    x: Tensor, form: Fp8Block, *, tiles: bool = False, rows: bool = False, columns: bool = False
) -> list[Operand] | list[GpuOperand]:
    """Return ``x`` as an operand if ``rows``, and then its transpose if ``columns``. A product sums over an operand's columns."""
    if on_triton(x) and form.columns == SIDE:
        from vescale_ray.quantization.products_triton import quantize_operands

        found = quantize_operands(x, form.power, tiles, rows, columns)
        counts = [count for wanted, count in ((rows, x.shape[0]), (columns, x.shape[1])) if wanted]
        return [GpuOperand(found[2 * at], found[2 * at + 1], tiles, count) for at, count in enumerate(counts)]
    if tiles:
        one = operand(x, form, tiles=True)
        return [each for wanted, each in ((rows, one), (columns, one.transposed())) if wanted]
    return [operand(each, form, tiles=False) for wanted, each in ((rows, x), (columns, x.t())) if wanted]


def for_gpu(a: Operand) -> GpuOperand:
    """Pad the operand with zeros to multiples of 16 rows and columns, and its scales by tile to multiples of four along k."""
    m, k = a.codes.shape
    codes, scales = a.codes, a.scales
    if m % 16 or k % 16:
        codes = F.pad(codes.view(torch.uint8), (0, -k % 16, 0, -m % 16)).view(torch.float8_e4m3fn)
        scales = F.pad(scales, (0, 0, 0, -(-codes.shape[0] // a.rows) - scales.shape[0]), value=1.0)
    if a.rows == 1:
        scales = scales.t().contiguous().t()
    else:
        scales = F.pad(scales, (0, -scales.shape[1] % 4), value=1.0).contiguous().t()
    return GpuOperand(codes.contiguous(), scales, a.rows > 1, m)
