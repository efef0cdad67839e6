"""Operands of FP8 products as a Triton kernel, in the layout that cuBLASLt wants, with the codes and scales of ``operands.operand``.

This module is imported only if Triton and a GPU are present. One program reads 128 x 128 elements, which stay in registers, and writes
their codes in one order or both: one read of an output gradient serves the input gradient and the weight gradient. Transposed codes
change threads through shared memory.

Compiled graphs hold the kernel as a custom operation. Inductor's own kernels would read a matrix once for each order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vescale_ray.quantization.fp8_triton import codes_of, common, current_device, magnitudes, scale_of

SIDE = 128
"""Rows and columns of a program, and elements of a block of an operand."""


@triton.jit
def _place(row, col, m, k, VEC: tl.constexpr):
    """Return the elements at rows ``row`` and columns ``col`` of a matrix ``[m, k]``, and a mask of those in it.

    A thread has 8 consecutive elements, for all data types: then no data changes threads, and few columns have a scale in each thread.
    """
    element = row.to(tl.int64)[:, None] * k + col[None, :]
    mask = (row < m)[:, None] & (col < k)[None, :]
    return tl.max_contiguous(tl.multiple_of(element, [1, VEC]), [1, VEC]), tl.max_constancy(mask, [1, VEC])


@triton.jit
def _load(x, row, col, m, k, VEC: tl.constexpr):
    element, mask = _place(row, col, m, k, VEC)
    return tl.load(x + element, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store_rows(codes, scales, x, scale, row, col, m, padded_m, padded_k, pitch, block, POWER: tl.constexpr, HARDWARE: tl.constexpr):
    """Store the codes of some rows; ``scale``: one for each, or one for all, which the caller stores."""
    alike: tl.constexpr = len(scale.shape) == 0
    element, mask = _place(row, col, padded_m, padded_k, 8)
    tl.store(codes + element, codes_of(x, scale if alike else scale[:, None], POWER, HARDWARE), mask=mask)
    if not alike:
        tl.store(scales + block.to(tl.int64) * pitch + row, tl.where(row < m, scale, 1.0), mask=row < padded_m)


@triton.jit
def _store_tile_scale(scales, scale, i, j, across, pitch):
    """Store the scale of tile (i, j), and ones after the last tile of the row."""
    place = scales + i.to(tl.int64) * pitch
    tl.store(place + j, scale)
    if j == across - 1:
        after = across + tl.arange(0, 4)
        tl.store(place + after, tl.full((4,), 1.0, tl.float32), mask=after < pitch)


@triton.jit(do_not_specialize=["m", "k", "padded_m", "padded_k", "pitch", "pitch_t"])
def _operands(
    x, m, k, padded_m, padded_k, codes, scales, pitch, words, scales_t, pitch_t,
    SIDE: tl.constexpr, VEC: tl.constexpr,
    TILES: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, POWER: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    down, across = tl.cdiv(m, SIDE), tl.cdiv(k, SIDE)
    i, j = tl.program_id(0) // across, tl.program_id(0) % across
    row, col = i * SIDE + 4 * tl.arange(0, SIDE // 4), j * SIDE + tl.arange(0, SIDE)
    # Four rows apart: a thread then holds four codes of a column, which move as one word.
    a, b = _load(x, row, col, m, k, VEC), _load(x, row + 1, col, m, k, VEC)
    c, d = _load(x, row + 2, col, m, k, VEC), _load(x, row + 3, col, m, k, VEC)
    if TILES or COLS:
        most = tl.maximum(tl.maximum(magnitudes(a), magnitudes(b)), tl.maximum(magnitudes(c), magnitudes(d)))
        by_column = tl.max(most, 0)
        scale = scale_of(tl.max(by_column, 0) if TILES else by_column, POWER)
    if ROWS:
        scale_a = scale if TILES else scale_of(tl.max(magnitudes(a), 1), POWER)
        _store_rows(codes, scales, a, scale_a, row, col, m, padded_m, padded_k, pitch, j, POWER, HARDWARE)
        scale_b = scale if TILES else scale_of(tl.max(magnitudes(b), 1), POWER)
        _store_rows(codes, scales, b, scale_b, row + 1, col, m, padded_m, padded_k, pitch, j, POWER, HARDWARE)
        scale_c = scale if TILES else scale_of(tl.max(magnitudes(c), 1), POWER)
        _store_rows(codes, scales, c, scale_c, row + 2, col, m, padded_m, padded_k, pitch, j, POWER, HARDWARE)
        scale_d = scale if TILES else scale_of(tl.max(magnitudes(d), 1), POWER)
        _store_rows(codes, scales, d, scale_d, row + 3, col, m, padded_m, padded_k, pitch, j, POWER, HARDWARE)
        if TILES:
            _store_tile_scale(scales, scale, i, j, across, pitch)
    if COLS:
        by = scale if TILES else scale[None, :, None]
        first, second = tl.split(codes_of(tl.join(a, b), by, POWER, HARDWARE))  # cast in pairs, which are the halves of a word
        third, fourth = tl.split(codes_of(tl.join(c, d), by, POWER, HARDWARE))
        word = first.to(tl.int32) | second.to(tl.int32) << 8 | third.to(tl.int32) << 16 | fourth.to(tl.int32) << 24
        quarter = i * (SIDE // 4) + tl.arange(0, SIDE // 4)
        element, mask = _place(col, quarter, padded_k, padded_m // 4, 4)
        tl.store(words + element, tl.trans(word), mask=mask)
        if TILES:
            _store_tile_scale(scales_t, scale, j, i, down, pitch_t)
        else:
            tl.store(scales_t + i.to(tl.int64) * pitch_t + col, tl.where(col < k, scale, 1.0), mask=col < padded_k)


def quantize_operands(x: Tensor, power: bool, tiles: bool, rows: bool, columns: bool) -> list[Tensor]:
    """Return codes and scales of ``x`` if ``rows``, and then those of its transpose if ``columns``.

    Args:
        x: FP32, BF16 or FP16, ``[m, k]``, not empty.
        power: scales are powers of two.
        tiles: a scale for 128 x 128 elements; else for 128 along the columns (of the transpose: along the rows of ``x``).
    """
    if not torch.compiler.is_compiling():
        return _quantize_operands(x, power, tiles, rows, columns)
    return torch.ops.vescale_ray.fp8_operands(x, power, tiles, rows, columns)  # type: ignore[no-any-return]


def _quantize_operands(x: Tensor, power: bool, tiles: bool, rows: bool, columns: bool) -> list[Tensor]:
    x, found = x.contiguous(), _empty(x, power, tiles, rows, columns)
    m, k = x.shape
    codes, scales = (found[0].view(torch.uint8), found[1]) if rows else (x, x)
    words, scales_t = (found[-2].view(torch.int32), found[-1]) if columns else (x, x)
    vec = 8 if k % 8 == 0 and x.data_ptr() % 16 == 0 else 1
    with current_device(x.device):
        _operands[(-(-m // SIDE) * -(-k // SIDE),)](
            x, m, k, _up(m), _up(k), codes, scales, scales.stride(1), words, scales_t, scales_t.stride(1),
            SIDE=SIDE, VEC=vec, TILES=tiles, ROWS=rows, COLS=columns, POWER=power, num_warps=8, **common(x.device),
        )  # fmt: skip
    return found


def _empty(x: Tensor, power: bool, tiles: bool, rows: bool, columns: bool) -> list[Tensor]:
    """Return memory for the results of :func:`quantize_operands`."""
    found = []
    for wanted, m, k in ((rows, *x.shape), (columns, *reversed(x.shape))):
        if wanted:
            blocks = -(-k // SIDE)
            found.append(x.new_empty(_up(m), _up(k), dtype=torch.float8_e4m3fn))
            scales = (-(-m // SIDE), _up(blocks, 4)) if tiles else (blocks, _up(m))
            found.append(x.new_empty(scales, dtype=torch.float32).t())
    return found


def _up(count: int, to: int = 16) -> int:
    return -(-count // to) * to


torch.library.custom_op("vescale_ray::fp8_operands", _quantize_operands, mutates_args=()).register_fake(_empty)
