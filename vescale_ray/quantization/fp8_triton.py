"""FP8 weights as Triton kernels, with the results of ``fp8.quantize_range`` and ``fp8.scale_whole`` bit for bit.

This module is imported only if Triton and a GPU are present. A :class:`Table` lists the regions of many tensors, and one launch serves all
of one kind: a launch takes longer than the device needs for a million elements.

One program handles one tile of 128 x 128, which stays in registers (64 FP32 numbers in each of 256 threads): the weight is read once,
the largest magnitude is found, and the codes are written. A program handles several smaller tiles. Tiles of more than :data:`AREA`
elements are read twice, piece by piece.

Functions under ``triton.jit`` have no type annotations, because Triton gives annotations its own meaning.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vescale_ray.block_grid import Grid, Region
from vescale_ray.geometry import Block

AREA = 16384
"""Number of elements of the largest tile that a program keeps in registers."""
SMALL_AREA = 8192
"""Number of elements of a program that handles several tiles."""
_FIELDS = 8
"""Numbers of a region in a table: the offsets of values, codes, scales and known magnitudes, rows, cols, columns, number of tiles."""


@triton.jit
def codes_of(x, scale, POWER: tl.constexpr, HARDWARE: tl.constexpr):
    """Return the e4m3 codes of x / scale: the quotient is rounded to FP32, and then to e4m3, both to the nearest even number.

    ``scale`` is at least 2^-126; POWER: it is a power of two, and the product with its reciprocal has the bits of the quotient.
    """
    if POWER:
        quotient = x * tl.div_rn(1.0, scale)
    else:
        # The quotient's remainder is exact and corrects it. The result has a division's bits, except perhaps next to a tie of FP32
        # numbers, and never where the code depends on them: tests/quantization/test_fp8_triton.py tries all such operands. Both operands
        # are multiplied by 2^64 if remainders could be subnormal otherwise. It takes a third of the instructions of a division.
        shift = tl.where(scale < 5.421010862427522e-20, -18446744073709551616.0, -1.0)
        minus, by = x * shift, -scale * shift
        inverse = tl.div_rn(-1.0, by)
        quotient = minus * inverse
        quotient = tl.fma(tl.fma(by, quotient, minus), inverse, quotient)  # with these signs, -0 stays -0
    if HARDWARE:
        return quotient.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    # From 2^-6 on a code has 3 bits of mantissa. Below, its unit is 2^-9, to which the addition of 2^14 rounds.
    bits = magnitudes(quotient)
    normal = (bits + 0x7FFFF + ((bits >> 20) & 1) - 0x3C000000) >> 20
    subnormal = (tl.abs(quotient) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(bits < 0x3C800000, subnormal, tl.minimum(normal, 0x7F))
    return (code | ((quotient.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def values_of(code, HARDWARE: tl.constexpr):
    """Return the FP32 values of e4m3 codes."""
    if HARDWARE:
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    wide = code.to(tl.int32)  # the fields of a code are those of an FP32 number, but for the exponent's bias
    return (((wide & 0x7F) << 20) | ((wide & 0x80) << 24)).to(tl.float32, bitcast=True) * 1.329227995784916e36


@triton.jit
def magnitudes(x):
    """Return integers in the order of the magnitudes of FP32 numbers; Inf and NaN are the largest, as in torch's amax."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_of(most, POWER: tl.constexpr):
    """Return the FP32 scale of a tile with the largest magnitude ``most``, an integer. Inf and NaN give NaN."""
    whole = most.to(tl.float32, bitcast=True)
    seventh = whole * 0.142857149243354797
    seventh = tl.fma(tl.fma(-7.0, seventh, whole), 0.142857149243354797, seventh)  # the bits of whole / 7, for all FP32 numbers
    scale = seventh * 0.015625
    scale = tl.where(scale < 1.1754943508222875e-38, 1.1754943508222875e-38, scale)  # NaN stays
    if POWER:
        up = (scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
        scale = tl.where(most < 0x7F800000, up.to(tl.float32, bitcast=True), scale)
    return scale


@triton.jit
def _region(table, FIELDS: tl.constexpr):
    """Return this program's first tile, and the address of its region's fields."""
    packed = tl.load(table + tl.program_id(0))
    return (packed & 0xFFFFFFFF).to(tl.int32), table + tl.num_programs(0) + (packed >> 32) * FIELDS


@triton.jit
def _offset(fields, index: tl.constexpr, VEC: tl.constexpr):
    return tl.multiple_of(tl.load(fields + index), VEC)


@triton.jit
def _place(
    fields, tile, blocks, rows, piece,
    ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK_COLS: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Return the elements of a piece of the tiles, counted from the region's first, and a mask of those that exist."""
    cols = tl.multiple_of(tl.load(fields + 5), VEC)
    columns = tl.load(fields + 6).to(tl.int32)
    column = (tile % columns) * BLOCK_COLS
    first = ((tile // columns).to(tl.int64) * rows) * cols + column
    across: tl.constexpr = (BLOCK_COLS + COLS - 1) // COLS
    row = piece // across * ROWS + tl.arange(0, ROWS)
    col = piece % across * COLS + tl.arange(0, COLS)
    start = first[:, None, None] + (row.to(tl.int64) * cols)[None, :, None]
    element = tl.max_contiguous(tl.multiple_of(start + col[None, None, :], [1, 1, VEC]), [1, 1, VEC])
    inside = (tile < blocks)[:, None, None] & (row < rows)[None, :, None]
    mask = inside & (col < BLOCK_COLS)[None, None, :] & (column[:, None, None] + col[None, None, :] < cols)
    return element, tl.max_constancy(mask, [1, 1, VEC])


@triton.jit
def _quantize(
    table, values, codes, scales, largest,
    KNOWN: tl.constexpr, POWER: tl.constexpr, HARDWARE: tl.constexpr, FIELDS: tl.constexpr,
    TILES: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK_COLS: tl.constexpr, PIECES: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    first, fields = _region(table, FIELDS)
    values += _offset(fields, 0, VEC)
    codes += _offset(fields, 1, VEC)
    rows, blocks = tl.load(fields + 4).to(tl.int32), tl.load(fields + 7).to(tl.int32)
    tile = first + tl.arange(0, TILES)
    element, mask = _place(fields, tile, blocks, rows, 0, ROWS, COLS, BLOCK_COLS, VEC)
    x = tl.load(values + element, mask=mask, other=0.0).to(tl.float32)
    most = tl.max(tl.max(magnitudes(x), 2), 1)
    if PIECES > 1:
        for piece in range(1, PIECES):
            element, mask = _place(fields, tile, blocks, rows, piece, ROWS, COLS, BLOCK_COLS, VEC)
            x = tl.load(values + element, mask=mask, other=0.0).to(tl.float32)
            most = tl.maximum(most, tl.max(tl.max(magnitudes(x), 2), 1))
    if KNOWN:
        known = tl.load(fields + 3)
        if known >= 0:
            most = tl.load(largest + known + tile, mask=tile < blocks, other=0.0).to(tl.int32, bitcast=True)
    scale = scale_of(most, POWER)
    bits = scale.to(tl.int32, bitcast=True)
    stored = ((bits >> 23) & 0xFF).to(tl.uint8) if POWER else scale
    tl.store(scales + tl.load(fields + 2) + tile, stored, mask=tile < blocks)
    if PIECES == 1:
        tl.store(codes + element, codes_of(x, scale[:, None, None], POWER, HARDWARE), mask=mask)
    else:
        for piece in range(PIECES):
            element, mask = _place(fields, tile, blocks, rows, piece, ROWS, COLS, BLOCK_COLS, VEC)
            x = tl.load(values + element, mask=mask, other=0.0).to(tl.float32)
            tl.store(codes + element, codes_of(x, scale[:, None, None], POWER, HARDWARE), mask=mask)


@triton.jit
def _dequantize(
    table, values, codes, scales,
    POWER: tl.constexpr, HARDWARE: tl.constexpr, FIELDS: tl.constexpr,
    TILES: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK_COLS: tl.constexpr, PIECES: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    first, fields = _region(table, FIELDS)
    values += _offset(fields, 0, VEC)
    codes += _offset(fields, 1, VEC)
    rows, blocks = tl.load(fields + 4).to(tl.int32), tl.load(fields + 7).to(tl.int32)
    tile = first + tl.arange(0, TILES)
    scale = tl.load(scales + tl.load(fields + 2) + tile, mask=tile < blocks, other=0)
    if POWER:
        scale = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    for piece in range(PIECES):
        element, mask = _place(fields, tile, blocks, rows, piece, ROWS, COLS, BLOCK_COLS, VEC)
        code = tl.load(codes + element, mask=mask, other=0)
        tl.store(values + element, (values_of(code, HARDWARE) * scale[:, None, None]).to(values.dtype.element_ty), mask=mask)


class TileRun(NamedTuple):
    """A run of whole rows of one tensor. Offsets are from the start of the buffers that a launch gets."""

    power: bool
    """Scales are exponents of powers of two."""
    regions: Sequence[Region]
    values: int
    """Offset of its values, in elements."""
    codes: int
    """Offset of its codes."""
    scales: int
    """Offset of its scales, in scales."""
    cut: Mapping[int, int] = {}
    """Offset of the known largest magnitudes of a region's tiles, by the region's first element."""


class _TileKind(NamedTuple):
    """Common properties of the regions of one launch."""

    power: bool
    block_cols: int
    vec: int
    """Consecutive elements that lie in one tile, at offsets that are multiples of it."""


class _Launch(NamedTuple):
    """One launch for all regions of a kind."""

    power: bool
    programs: int
    numbers: Tensor
    """Each program's region and first tile, and then the regions' fields."""
    compiled: dict[str, int]
    """The kernel's constants."""


def _launch(kind: _TileKind, fields: list[tuple[int, ...]]) -> _Launch:
    tile_rows = max(rows for *_, rows, _, _, _ in fields)
    cols = min(triton.next_power_of_2(kind.block_cols), AREA)
    rows = min(triton.next_power_of_2(tile_rows), AREA // cols)
    pieces = -(-tile_rows // rows) * -(-kind.block_cols // cols)
    tiles = max(1, SMALL_AREA // (rows * cols)) if pieces == 1 else 1
    programs = torch.cat([torch.arange(0, count, tiles) | at << 32 for at, (*_, count) in enumerate(fields)])
    compiled = {
        "POWER": kind.power, "FIELDS": _FIELDS, "TILES": tiles, "ROWS": rows, "COLS": cols, "BLOCK_COLS": kind.block_cols,
        "PIECES": pieces, "VEC": kind.vec, "num_warps": max(1, tiles * rows * cols // 2048),
    }  # fmt: skip
    return _Launch(kind.power, len(programs), torch.cat([programs, torch.tensor(fields).view(-1)]), compiled)


class Table:
    """The regions of ``pieces``, for launches on any buffers of the same layout."""

    def __init__(self, pieces: Iterable[TileRun]) -> None:
        kinds: dict[_TileKind, list[tuple[int, ...]]] = {}
        for piece in pieces:
            for region in piece.regions:
                values, codes = piece.values + region.element, piece.codes + region.element
                vec = math.gcd(8, values, codes, region.cols, region.block_cols)
                kind = _TileKind(piece.power, region.block_cols, vec)
                kinds.setdefault(kind, []).append((
                    values, codes, piece.scales + region.block, piece.cut.get(region.element, -1),
                    region.rows, region.cols, region.columns, region.bands * region.columns,
                ))  # fmt: skip
        self._launches = [_launch(kind, fields) for kind, fields in kinds.items()]
        self._copies: dict[tuple[torch.device, int], list[Tensor]] = {}
        """The launches' numbers on the device, by the stream that copied them."""

    def quantize(self, values: Tensor, codes: Tensor, scales: Tensor, largest: Tensor | None = None) -> None:
        """Write the codes and scales of ``values``. All tensors are 1-D, contiguous, and on one device.

        Args:
            values: FP32, BF16 or FP16.
            codes: uint8.
            scales: the FP32 or E8M0 scales as bytes.
            largest: FP32 magnitudes of the tiles that have an offset in ``TileRun.cut``.
        """
        with current_device(values.device):
            for launch, numbers, constants in self._on(values, codes):
                typed = scales if launch.power else scales.view(torch.float32)
                _quantize[(launch.programs,)](
                    numbers, values, codes, typed, values if largest is None else largest, KNOWN=largest is not None, **constants
                )

    def dequantize(self, codes: Tensor, scales: Tensor, values: Tensor) -> None:
        """Write ``values`` in their dtype, rounded once from FP32. Arguments as for :meth:`quantize`."""
        with current_device(values.device):
            for launch, numbers, constants in self._on(values, codes):
                typed = scales if launch.power else scales.view(torch.float32)
                _dequantize[(launch.programs,)](numbers, values, codes, typed, **constants)
        # Unlike torch's operations, a kernel counts no write.
        torch.autograd.graph.increment_version(values)

    def _on(self, *buffers: Tensor) -> Iterator[tuple[_Launch, Tensor, dict[str, Any]]]:
        device = buffers[0].device
        key = device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        if key not in self._copies:
            hosts = [launch.numbers for launch in self._launches]
            self._copies[key] = [host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host for host in hosts]
        aligned = all(buffer.data_ptr() % 16 == 0 for buffer in buffers)
        for launch, numbers in zip(self._launches, self._copies[key], strict=True):
            yield launch, numbers, {**launch.compiled, **common(device), **({} if aligned else {"VEC": 1})}


@lru_cache(maxsize=64)
def whole_table(shape: tuple[int, ...], block: Block, power: bool) -> Table:
    """Return the table of one whole tensor."""
    grid = Grid.of(shape, block)
    return Table([TileRun(power, tuple(grid.regions(0, grid.numel)), 0, 0, 0)])


def common(device: torch.device) -> dict[str, Any]:
    """Return the constants of all kernels."""
    # 128 registers leave room for two programs of 8 warps on a multiprocessor: one loads while the other computes.
    limit = {"maxnreg": 128} if device.type == "cuda" and torch.version.hip is None else {}
    return {"HARDWARE": _casts(device), "enable_fp_fusion": False, **limit}


@lru_cache(maxsize=64)
def _casts(device: torch.device) -> bool:
    """Return True if the device has instructions that cast to and from e4m3."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


def current_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which Triton launches on ``device``."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
