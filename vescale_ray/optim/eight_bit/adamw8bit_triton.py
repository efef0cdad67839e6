"""The step of 8-bit AdamW as one Triton kernel per region, with the arithmetic of ``adamw8bit.step_region_torch``.

This module is imported only if Triton and a GPU are present. One program handles one block: it decodes m and v, advances them,
updates the parameters, finds the two scales, and encodes. A block that fits into registers takes one pass. A larger one takes two
over the same memory; the second reads from the cache. A step with BF16 gradients and FP32 parameters moves 4 + 4 + 2 + 2 + 2 bytes
per element.

Every operation matches the reference in order and rounding (``div_rn``, ``sqrt_rn``, no fused multiply-add), so codes are equal.
Functions under ``triton.jit`` have no type annotations, because Triton gives annotations its own meaning.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vescale_ray.optim.blocks import Region
from vescale_ray.optim.eight_bit.adamw8bit_values import Held, Hyper
from vescale_ray.optim.eight_bit.codec import CELL_SHIFT, root_codebook, signed_codebook

ONE_PASS = 4096
"""Elements of the largest block that is handled in one pass, and of one piece of a larger block."""
_TINY_BITS = 0x00800000
"""Bits of torch.finfo(torch.float32).tiny."""


@triton.jit
def _encode(x, cells, borders, mask, SHIFT: tl.constexpr):
    cell = (x.to(tl.int32, bitcast=True) >> SHIFT) & 0x7FFF
    lower = tl.load(cells + cell, mask=mask, other=0).to(tl.int32)
    above = x > tl.load(borders + lower, mask=mask, other=0.0)
    return (lower + above.to(tl.int32)).to(tl.uint8)


@triton.jit
def _moved(
    element, mask, grad, m_code, v_code, m_old, v_old, m_values, v_values,
    beta1, rest1, beta2, rest2,
):  # fmt: skip
    """Return m and sqrt(v) advanced by this step's gradient; 0 where masked."""
    g = tl.load(grad + element, mask=mask, other=0.0).to(tl.float32)
    m = tl.load(m_values + tl.load(m_code + element, mask=mask, other=0).to(tl.int32), mask=mask, other=0.0) * m_old
    s = tl.load(v_values + tl.load(v_code + element, mask=mask, other=0).to(tl.int32), mask=mask, other=0.0) * v_old
    m = m * beta1 + g * rest1
    v = s * s * beta2 + g * g * rest2
    return m, tl.sqrt_rn(v)


@triton.jit
def _place(k, rows, cols, block_cols, columns, block, FLAT: tl.constexpr):
    """Return the elements (in the region) at positions ``k`` of a block, and a mask of the positions that lie in it."""
    if FLAT:  # a separate branch, so that the compiler sees consecutive elements and loads several at a time
        return block.to(tl.int64) * cols + k, k < cols
    band, column = block // columns, block % columns
    row, col = k // block_cols, column * block_cols + k % block_cols
    element = (band.to(tl.int64) * rows + row) * cols + col
    return element, (row < rows) & (col < cols)


@triton.jit
def _step(
    param, grad, m_code, m_scale, v_code, v_scale,
    m_values, m_borders, m_cells, v_values, v_borders, v_cells,
    rows, cols, block_cols, columns, pieces,
    beta1, rest1, beta2, rest2, eps, decay, step_size, root_correction,
    TINY_BITS: tl.constexpr, SHIFT: tl.constexpr, PIECE: tl.constexpr, ONE: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    m_old, v_old = tl.load(m_scale + block), tl.load(v_scale + block)
    at = tl.arange(0, PIECE)
    m_new, v_new = tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    m, s = tl.zeros((PIECE,), tl.float32), tl.zeros((PIECE,), tl.float32)
    for piece in range(pieces):
        element, mask = _place(piece * PIECE + at, rows, cols, block_cols, columns, block, FLAT)
        m, s = _moved(element, mask, grad, m_code, v_code, m_old, v_old, m_values, v_values, beta1, rest1, beta2, rest2)
        # Magnitudes are compared as integers. The order is the same, and NaN is the largest, as in torch's amax.
        m_new = tl.maximum(m_new, tl.max(tl.abs(m).to(tl.int32, bitcast=True), 0))
        v_new = tl.maximum(v_new, tl.max(tl.abs(s).to(tl.int32, bitcast=True), 0))
    m_by = tl.div_rn(1.0, tl.maximum(m_new, TINY_BITS).to(tl.float32, bitcast=True))
    v_by = tl.div_rn(1.0, tl.maximum(v_new, TINY_BITS).to(tl.float32, bitcast=True))
    for piece in range(pieces):
        element, mask = _place(piece * PIECE + at, rows, cols, block_cols, columns, block, FLAT)
        if not ONE:
            m, s = _moved(element, mask, grad, m_code, v_code, m_old, v_old, m_values, v_values, beta1, rest1, beta2, rest2)
        update = tl.div_rn(m, s * root_correction + eps)
        p = tl.load(param + element, mask=mask, other=0.0).to(tl.float32)
        tl.store(param + element, (p * decay - update * step_size).to(param.dtype.element_ty), mask=mask)
        tl.store(m_code + element, _encode(m * m_by, m_cells, m_borders, mask, SHIFT), mask=mask)
        tl.store(v_code + element, _encode(s * v_by, v_cells, v_borders, mask, SHIFT), mask=mask)
    tl.store(m_scale + block, m_new.to(tl.float32, bitcast=True))
    tl.store(v_scale + block, v_new.to(tl.float32, bitcast=True))


def step_region_triton(held: Held, region: Region, hyper: Hyper) -> None:
    """:func:`vescale_ray.optim.eight_bit.adamw8bit.step_region_torch` for CUDA tensors."""
    signed, root = signed_codebook(held.param.device), root_codebook(held.param.device)
    numel = region.rows * region.block_cols
    piece = min(triton.next_power_of_2(numel), ONE_PASS)
    _step[(region.bands * region.columns,)](
        *held,
        signed.values, signed.borders, signed.cells_uint8, root.values, root.borders, root.cells_uint8,
        region.rows, region.cols, region.block_cols, region.columns, -(-numel // piece),
        hyper.beta1, 1 - hyper.beta1, hyper.beta2, 1 - hyper.beta2, hyper.eps, hyper.decay, hyper.step_size, hyper.root_correction,
        TINY_BITS=_TINY_BITS, SHIFT=CELL_SHIFT, PIECE=piece, ONE=numel <= piece, FLAT=region.rows == 1 and region.columns == 1,
        num_warps=max(1, min(8, piece // 256)),
        enable_fp_fusion=False,
    )  # fmt: skip
