"""The step of 8-bit AdamW as a Triton kernel, with the arithmetic of ``adamw8bit.step_region_torch``.

This module is imported only if Triton and a GPU are present. One program decodes m and v of a block, advances them, updates the parameters,
finds the two scales, and encodes. A block that fits into registers takes one pass. A larger one takes two over the same memory; the second
reads from the cache. A step with BF16 gradients and FP32 parameters moves 4 + 4 + 2 + 2 + 2 bytes per element.

A large region has a launch of its own. All other regions of one kind share a launch, which gets their addresses and sizes in a table: a
launch takes longer than a step of a million elements.

Every operation matches the reference in order and rounding (``div_rn``, ``sqrt_rn``, no fused multiply-add), so codes are equal.
Functions under ``triton.jit`` have no type annotations, because Triton gives annotations its own meaning.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vescale_ray.block_grid import Region
from vescale_ray.optim.eight_bit.adamw8bit_values import Held, Hyper
from vescale_ray.optim.eight_bit.codec import CELL_SHIFT, root_codebook, signed_codebook

ONE_PASS = 4096
"""Number of elements of the largest block that is handled in one pass, and of one piece of a larger block."""
LARGE = 1 << 24
"""Number of elements from which a region has its own launch, which takes a tenth less time on the device."""
_BLOCKS = 4
"""Blocks that a program of a shared launch handles, so that it reads its region's entry of the table less often."""
_FIELDS = 10
"""Numbers of a region in the table: six addresses, rows, cols, columns, number of blocks."""
_TINY_BITS = 0x00800000
"""Bits of torch.finfo(torch.float32).tiny."""
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


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
def _place(k, rows, cols, columns, block, COLS: tl.constexpr, FLAT: tl.constexpr, QUADS: tl.constexpr):
    """Return the elements (in the region) at positions ``k`` of a block, and a mask of the positions that lie in it."""
    if FLAT:  # a separate branch, so that the compiler sees consecutive elements and loads several at a time
        element = block.to(tl.int64) * cols + k
        mask = k < cols
    else:
        band, column = block // columns, block % columns
        row, col = k // COLS, column * COLS + k % COLS
        element = (band.to(tl.int64) * rows + row) * cols + col
        mask = (row < rows) & (col < cols)
    if QUADS:  # four consecutive elements per thread, for all data types: then no data changes threads
        element = tl.max_contiguous(tl.multiple_of(element, [4]), [4])
        mask = tl.max_constancy(mask, [4])
    return element, mask


@triton.jit
def _step_block(
    param, grad, m_code, m_scale, v_code, v_scale, rows, cols, columns, block,
    m_values, m_borders, m_cells, v_values, v_borders, v_cells,
    pieces, beta1, rest1, beta2, rest2, eps, decay, step_size, root_correction,
    TINY_BITS: tl.constexpr, SHIFT: tl.constexpr, PIECE: tl.constexpr, ONE: tl.constexpr,
    COLS: tl.constexpr, FLAT: tl.constexpr, QUADS: tl.constexpr,
):  # fmt: skip
    m_old, v_old = tl.load(m_scale + block), tl.load(v_scale + block)
    at = tl.arange(0, PIECE)
    m_new, v_new = tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    m, s, p = tl.zeros((PIECE,), tl.float32), tl.zeros((PIECE,), tl.float32), tl.zeros((PIECE,), tl.float32)
    for piece in range(1 if ONE else pieces):
        element, mask = _place(piece * PIECE + at, rows, cols, columns, block, COLS, FLAT, QUADS)
        if ONE:
            p = tl.load(param + element, mask=mask, other=0.0).to(tl.float32)
        m, s = _moved(element, mask, grad, m_code, v_code, m_old, v_old, m_values, v_values, beta1, rest1, beta2, rest2)
        # Magnitudes are compared as integers. The order is the same, and NaN is the largest, as in torch's amax.
        m_new = tl.maximum(m_new, tl.max(tl.abs(m).to(tl.int32, bitcast=True), 0))
        v_new = tl.maximum(v_new, tl.max(tl.abs(s).to(tl.int32, bitcast=True), 0))
    m_by = tl.div_rn(1.0, tl.maximum(m_new, TINY_BITS).to(tl.float32, bitcast=True))
    v_by = tl.div_rn(1.0, tl.maximum(v_new, TINY_BITS).to(tl.float32, bitcast=True))
    for piece in range(1 if ONE else pieces):
        element, mask = _place(piece * PIECE + at, rows, cols, columns, block, COLS, FLAT, QUADS)
        if not ONE:
            m, s = _moved(element, mask, grad, m_code, v_code, m_old, v_old, m_values, v_values, beta1, rest1, beta2, rest2)
            p = tl.load(param + element, mask=mask, other=0.0).to(tl.float32)
        update = tl.div_rn(m, s * root_correction + eps)
        tl.store(param + element, (p * decay - update * step_size).to(param.dtype.element_ty), mask=mask)
        tl.store(m_code + element, _encode(m * m_by, m_cells, m_borders, mask, SHIFT), mask=mask)
        tl.store(v_code + element, _encode(s * v_by, v_cells, v_borders, mask, SHIFT), mask=mask)
    tl.store(m_scale + block, m_new.to(tl.float32, bitcast=True))
    tl.store(v_scale + block, v_new.to(tl.float32, bitcast=True))


@triton.jit
def _step_region(
    param, grad, m_code, m_scale, v_code, v_scale, rows, cols, columns,
    m_values, m_borders, m_cells, v_values, v_borders, v_cells,
    pieces, beta1, rest1, beta2, rest2, eps, decay, step_size, root_correction,
    TINY_BITS: tl.constexpr, SHIFT: tl.constexpr, PIECE: tl.constexpr, ONE: tl.constexpr,
    COLS: tl.constexpr, FLAT: tl.constexpr, QUADS: tl.constexpr,
):  # fmt: skip
    _step_block(
        param, grad, m_code, m_scale, v_code, v_scale, rows, cols, columns, tl.program_id(0),
        m_values, m_borders, m_cells, v_values, v_borders, v_cells,
        pieces, beta1, rest1, beta2, rest2, eps, decay, step_size, root_correction,
        TINY_BITS, SHIFT, PIECE, ONE, COLS, FLAT, QUADS,
    )  # fmt: skip


@triton.jit
def _address(fields, index, TYPE: tl.constexpr, QUADS: tl.constexpr):
    address = tl.load(fields + index).to(tl.pointer_type(TYPE))
    if QUADS:
        address = tl.multiple_of(address, 16)
    return address


@triton.jit
def _step_regions(
    programs, regions,
    m_values, m_borders, m_cells, v_values, v_borders, v_cells,
    pieces, beta1, rest1, beta2, rest2, eps, decay, step_size, root_correction,
    TINY_BITS: tl.constexpr, SHIFT: tl.constexpr, PIECE: tl.constexpr, ONE: tl.constexpr,
    COLS: tl.constexpr, FLAT: tl.constexpr, QUADS: tl.constexpr,
    PARAM: tl.constexpr, GRAD: tl.constexpr, BLOCKS: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    program = programs + 2 * tl.program_id(0).to(tl.int64)
    first, fields = tl.load(program + 1), regions + tl.load(program) * FIELDS
    param, grad = _address(fields, 0, PARAM, QUADS), _address(fields, 1, GRAD, QUADS)
    m_code, m_scale = _address(fields, 2, tl.uint8, QUADS), _address(fields, 3, tl.float32, False)
    v_code, v_scale = _address(fields, 4, tl.uint8, QUADS), _address(fields, 5, tl.float32, False)
    rows, cols = tl.load(fields + 6).to(tl.int32), tl.load(fields + 7).to(tl.int32)
    columns, blocks = tl.load(fields + 8).to(tl.int32), tl.load(fields + 9).to(tl.int32)
    if QUADS:
        cols = tl.multiple_of(cols, 4)
    for turn in range(BLOCKS):
        block = first + turn
        if block < blocks:
            _step_block(
                param, grad, m_code, m_scale, v_code, v_scale, rows, cols, columns, block,
                m_values, m_borders, m_cells, v_values, v_borders, v_cells,
                pieces, beta1, rest1, beta2, rest2, eps, decay, step_size, root_correction,
                TINY_BITS, SHIFT, PIECE, ONE, COLS, FLAT, QUADS,
            )  # fmt: skip


class _Kind(NamedTuple):
    """Common properties of the regions of one launch."""

    param: torch.dtype
    grad: torch.dtype
    hyper: Hyper
    cols: int
    """Columns of a block; 0: the region is flat."""
    numel: int
    """Number of elements of the largest block."""
    quads: bool
    """Four elements at a time lie in one block, and addresses are multiples of 16."""


def _kind(held: Held, region: Region, hyper: Hyper) -> _Kind:
    flat = region.rows == 1 and region.columns == 1
    aligned = all(tensor.data_ptr() % 16 == 0 for tensor in (held.param, held.grad, held.m_code, held.v_code))
    quads = aligned and region.cols % 4 == 0 and region.block_cols % 4 == 0
    numel = region.rows * region.block_cols
    return _Kind(held.param.dtype, held.grad.dtype, hyper, 0 if flat else region.block_cols, numel, quads)


@lru_cache(maxsize=256)
def _on_device(values: tuple[int, ...], dtype: torch.dtype, device: torch.device, stream: int) -> Tensor:
    """Return ``values`` on the device without waiting for it. A table belongs to the stream that fills it."""
    host = torch.tensor(values, dtype=dtype)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


@lru_cache(maxsize=256)
def _programs(blocks: tuple[int, ...], device: torch.device, stream: int) -> Tensor:
    """Return each program's region and first block. ``blocks`` counts the blocks of each region."""
    pairs = ((region, first) for region, count in enumerate(blocks) for first in range(0, count, _BLOCKS))
    return _on_device(tuple(number for pair in pairs for number in pair), torch.int32, device, stream)


def step_triton(work: Iterable[tuple[Held, Region, Hyper]]) -> None:
    """Do :func:`vescale_ray.optim.eight_bit.adamw8bit.step_region_torch` for each of ``work``, CUDA tensors of one device."""
    kinds: dict[_Kind, list[tuple[Held, Region]]] = {}
    for held, region, hyper in work:
        kind = _kind(held, region, hyper)
        if held.param.numel() >= LARGE:
            _launch(kind, [(held, region)], shared=False)
        else:
            kinds.setdefault(kind, []).append((held, region))
    for kind, regions in kinds.items():
        _launch(kind, regions, shared=True)


def _launch(kind: _Kind, regions: list[tuple[Held, Region]], *, shared: bool) -> None:
    (held, region), device, hyper = regions[0], regions[0][0].param.device, kind.hyper
    signed, root = signed_codebook(device), root_codebook(device)
    piece = min(triton.next_power_of_2(kind.numel), ONE_PASS)
    common: tuple[Any, ...] = (
        signed.values, signed.borders, signed.cells_uint8, root.values, root.borders, root.cells_uint8, -(-kind.numel // piece),
        hyper.beta1, 1 - hyper.beta1, hyper.beta2, 1 - hyper.beta2, hyper.eps, hyper.decay, hyper.step_size, hyper.root_correction,
    )  # fmt: skip
    compiled: dict[str, Any] = {
        "TINY_BITS": _TINY_BITS, "SHIFT": CELL_SHIFT, "PIECE": piece, "ONE": kind.numel <= piece,
        "COLS": kind.cols, "FLAT": kind.cols == 0, "QUADS": kind.quads,
        "num_warps": max(1, min(8, piece // 256)), "enable_fp_fusion": False,
    }  # fmt: skip
    blocks = tuple(region.bands * region.columns for _, region in regions)
    if not shared:
        _step_region[(blocks[0],)](*held, region.rows, region.cols, region.columns, *common, **compiled)
        return
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    fields: list[int] = []
    for (held, region), count in zip(regions, blocks, strict=True):
        fields += [*(tensor.data_ptr() for tensor in held), region.rows, region.cols, region.columns, count]
    programs = _programs(blocks, device, stream)
    _step_regions[(len(programs) // 2,)](
        programs, _on_device(tuple(fields), torch.int64, device, stream), *common, **compiled,
        PARAM=_TYPES[kind.param], GRAD=_TYPES[kind.grad], BLOCKS=_BLOCKS, FIELDS=_FIELDS,
    )  # fmt: skip
