"""FP8 weights: e4m3 codes with one scale per tile, as in DeepSeek-V3's checkpoints [arXiv 2412.19437, section 3.3].

A tile's scale is its largest magnitude divided by 448, the largest e4m3 number. A code is the e4m3 number nearest to element / scale,
and code * scale is the element's value. Tiles at the lower and right edges are smaller, and none runs into the next matrix of a stack.

| tile | use | bytes per element, FP32 scales | power-of-two scales |
|---|---|---|---|
| 128 x 128 | weights (DeepSeek-V3) | 1.0002 | 1.0001 |
| 1 x 128 | activations, weights of high accuracy | 1.031 | 1.008 |
| 32 x 32 | weights in both operand orders of MX products | 1.004 | 1.001 |

A power-of-two scale is rounded up, so that no code overflows, and is stored as its exponent (E8M0). No scale is below 2^-126: zero tiles
need no special case, and no quotient overflows. Every step is one IEEE operation per element, so CPU and GPU give the same bits. On
CUDA devices with Triton, the kernels of ``fp8_triton`` do the same.

Inf and NaN make their tile's scale Inf or NaN. Callers check the scales, because the cast itself turns Inf into 448.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from vescale_ray.block_grid import Grid, Region
from vescale_ray.geometry import Block
from vescale_ray.quantization.block_scales import largest_of, spread
from vescale_ray.quantization.kernels import on_triton

FORMAT = r"fp8(?: ([1-9]\d{0,4}x[1-9]\d{0,4}))?( power_of_two)?"
"""Pattern of a format's text."""
LARGEST = 448.0
"""The largest e4m3 number."""
SMALLEST_SCALE = 2.0**-126
"""The smallest normal FP32 number. It keeps divisors normal on devices that flush subnormal numbers to zero."""
CHUNK_NUMEL = {"cpu": 1 << 17}
"""Number of elements that are processed at a time, at least one band, by device type: temporaries then stay in a CPU core's cache."""
_OTHER_CHUNK = 1 << 24
_EXPONENT = 0x7F800000
_NO_SIGN_COPY = ~0x4000
"""Clears bit 14, to which the shift moves the second copy of a negative code's sign."""
_NO_NUMBER = 255
"""The E8M0 code of Inf and NaN."""


class NonFiniteWeights(FloatingPointError):
    """A weight holds Inf or NaN, for which FP8 has no code."""


@dataclass(frozen=True)
class Fp8Block:
    """The FP8 format of a weight: e4m3 codes in tiles of ``rows`` x ``columns`` that share a scale.

    Args:
        rows, columns: size of a tile.
        scales: ``"float32"`` (4 bytes each) or ``"power_of_two"`` (1 byte each).

    Raises:
        TypeError: a size is not a whole number.
        ValueError: a size is below 1, or there is no such kind of scale.
    """

    rows: int = 128
    columns: int = 128
    scales: Literal["float32", "power_of_two"] = "float32"

    def __post_init__(self) -> None:
        for name in ("rows", "columns"):
            count = getattr(self, name)
            if isinstance(count, bool) or not isinstance(count, int):
                raise TypeError(f"Fp8Block({name}={count!r}): give a whole number, such as 128")
            if count < 1:
                raise ValueError(f"Fp8Block({name}={count}): a tile needs at least 1 of them")
        if self.scales not in ("float32", "power_of_two"):
            raise ValueError(f"Fp8Block(scales={self.scales!r}): give 'float32' or 'power_of_two'")

    @classmethod
    def parse(cls, text: str) -> Fp8Block:
        """Parse ``"fp8"``, ``"fp8 32x32"`` or ``"fp8 32x32 power_of_two"``.

        Raises:
            ValueError: the text is none of these.
        """
        found = re.fullmatch(FORMAT, text)
        if found is None:
            raise ValueError(f"{text!r} is not an FP8 format: give fp8, fp8 32x32, or fp8 32x32 power_of_two")
        rows, columns = (int(n) for n in (found[1] or "128x128").split("x"))
        return cls(rows, columns, "power_of_two" if found[2] else "float32")

    @property
    def block(self) -> Block:
        """The tile as a block of the planner."""
        return Block.tile(self.rows, self.columns)

    @property
    def power(self) -> bool:
        """True if scales are powers of two."""
        return self.scales == "power_of_two"

    @property
    def scale_dtype(self) -> torch.dtype:
        """Dtype of stored scales: FP32, or uint8 for exponents."""
        return torch.float32 if self.scales == "float32" else torch.uint8

    def __str__(self) -> str:
        return f"FP8 {self.rows}x{self.columns}" + (" power of two" if self.scales == "power_of_two" else "")


def quantize(weight: Tensor, form: Fp8Block = Fp8Block(), *, name: str = "the weight") -> tuple[Tensor, Tensor]:
    """Quantize a whole matrix or stack of matrices.

    Returns:
        Codes (``float8_e4m3fn``, the weight's shape), and scales of shape ``[.., ceil(m / rows), ceil(n / columns)]`` (FP32, or uint8
        exponents).

    Raises:
        ValueError: the weight is not a floating-point matrix or stack of matrices.
        NonFiniteWeights: it holds Inf or NaN; the message gives ``name``.
    """
    check_weight(name, weight.shape, weight.dtype)
    grid = Grid.of(weight.shape, form.block)
    codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(grid.state_shape, dtype=form.scale_dtype, device=weight.device)
    flat = weight.detach().reshape(-1)
    if on_triton(flat):
        from vescale_ray.quantization.fp8_triton import whole_table

        whole_table(tuple(weight.shape), form.block, form.power).quantize(flat, codes.view(-1), scales.view(-1).view(torch.uint8))
    else:
        quantize_range(flat, tuple(grid.regions(0, flat.numel())), form, codes.view(-1), scales.view(-1))
    bad = int(bad_scales(scales).sum())
    if bad:
        raise NonFiniteWeights(bad_text([(name, bad)]))
    return codes.view(torch.float8_e4m3fn), scales


def dequantize(codes: Tensor, scales: Tensor, form: Fp8Block = Fp8Block(), *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the values of :func:`quantize`'s result in ``dtype``, rounded once from FP32."""
    out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    scales = scales.contiguous().view(-1)
    if on_triton(out):
        from vescale_ray.quantization.fp8_triton import whole_table

        flat = codes.contiguous().view(torch.uint8).view(-1)
        whole_table(tuple(codes.shape), form.block, form.power).dequantize(flat, scales.view(torch.uint8), out.view(-1))
        return out
    out.copy_(codes)  # exact in BF16, FP16 and FP32
    scale_whole(out.view(-1), scales, Grid.of(codes.shape, form.block))
    return out


def check_weight(name: str, shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise ValueError unless tensors of this shape and dtype can be quantized in tiles."""
    what = None
    if not dtype.is_floating_point:
        what = f"of {dtype}"
    elif len(shape) < 2 or math.prod(shape) == 0:
        what = "a vector" if len(shape) == 1 else "a scalar" if not shape else "empty"
    elif len(shape) > 3:
        what = f"of {len(shape)} dimensions"
    if what is not None:
        raise ValueError(f"{name!r} of shape {tuple(shape)} is {what}: only floating-point matrices and stacks of matrices have FP8 tiles")


def form_given(policy: str, name: str, form: Any) -> Fp8Block | None:
    """Return what the function ``policy`` gave for parameter ``name``; raise TypeError if it is neither an Fp8Block nor None."""
    if form is None or isinstance(form, Fp8Block):
        return form
    kind = f"the class {form.__name__}" if isinstance(form, type) else f"a {type(form).__name__}"
    raise TypeError(f"{policy} gave {kind} for {name!r}: it must return an Fp8Block, such as Fp8Block(128, 128), or None")


def bad_text(tiles: list[tuple[str, int]]) -> str:
    """Return the error for parameters with that many tiles that hold Inf or NaN."""
    names = ", ".join(f"{name!r} ({count} tile{'s' if count > 1 else ''})" for name, count in tiles[:4])
    more = f" and {len(tiles) - 4} more" if len(tiles) > 4 else ""
    return (
        f"Inf or NaN in {names}{more}: FP8 has no code for them; the last optimizer step made them, so lower the learning rate or clip "
        f"gradients, and resume from a checkpoint"
    )


def quantize_range(
    x: Tensor, regions: Sequence[Region], form: Fp8Block, codes: Tensor, scales: Tensor, largest: Mapping[int, Tensor] | None = None
) -> None:
    """Write the codes and scales of ``x``, a shard of whole rows, with torch's operations.

    Args:
        x: 1-D, any floating-point dtype.
        regions: its blocks, from :meth:`Grid.regions`.
        codes: uint8, like ``x``.
        scales: one per block, of ``form.scale_dtype``.
        largest: FP32 largest magnitudes of blocks that ``x`` holds only in part, by the first element of their region.
    """
    known = largest or {}
    for region, element, block, bands in _chunks(regions, x.device):
        values = x[element : element + bands * region.band_numel].float().view(bands, region.rows, region.cols)
        most = known[element] if element in known else largest_of(values, region)
        scale = (most / LARGEST).clamp_(min=SMALLEST_SCALE)
        if form.scales == "power_of_two":
            scale = rounded_up(scale)
        codes[element : element + values.numel()].copy_((values / spread(scale, region)).view(-1).to(torch.float8_e4m3fn).view(torch.uint8))
        stored = scales[block : block + scale.numel()]
        stored.copy_(scale if form.scales == "float32" else _exponents(scale))


def largest_in_part(x: Tensor, region: Region) -> Tensor:
    """Return the FP32 largest magnitudes of the blocks in ``region`` of the shard ``x``, which is a part of one band."""
    values = x[region.element : region.element + region.band_numel].float()
    return largest_of(values.view(1, region.rows, region.cols), region).abs_()  # NaN without a sign, too


def dequantize_range(codes: Tensor, scales: Tensor, regions: Sequence[Region], out: Tensor) -> None:
    """Write the values of a shard of whole rows to ``out``, rounded once from FP32. For the CPU: chunks stay in a core's cache.

    The bits of a code are moved to the places of an FP16 number, which is the code's value / 256, subnormal numbers included. This takes a
    third of the time of torch's cast. Codes of NaN, which finite tiles do not have, count as 480.
    """
    for region, element, block, bands in _chunks(regions, out.device):
        here = slice(element, element + bands * region.band_numel)
        bits = codes[here].view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(_NO_SIGN_COPY)
        values = bits.view(torch.float16).to(torch.float32).mul_(256.0).view(bands, region.rows, region.cols)
        values.mul_(spread(scale_values(scales[block : block + bands * region.columns]), region))
        out[here].copy_(values.view(-1))


def scale_whole(values: Tensor, scales: Tensor, grid: Grid) -> None:
    """Multiply a whole tensor of decoded codes (1-D) by its tiles' stored ``scales``, in two or three kernels for any number of matrices.

    Each product is rounded once from FP32.
    """
    matrices, rows, cols = grid.numel // grid.matrix_numel, grid.band_rows, grid.row_numel
    whole = grid.matrix_numel // grid.band_numel
    factors = scale_values(scales).view(matrices, grid.bands, 1, grid.columns, 1)
    if cols % grid.block_cols:  # a smaller last column: one factor for each element of a row
        factors = factors.expand(-1, -1, -1, -1, grid.block_cols).reshape(matrices, grid.bands, 1, -1)[..., :cols, None]
    stack = values.view(matrices, -1, factors.shape[3], cols // factors.shape[3])
    if whole:
        stack[:, : whole * rows].unflatten(1, (whole, rows)).mul_(factors[:, :whole])
    if whole < grid.bands:
        stack[:, whole * rows :].mul_(factors[:, whole])


def round_stochastically(quotients: Tensor, noise: Tensor) -> Tensor:
    """Round to one of the two nearest e4m3 numbers, up if ``noise`` in [0, 1) is large: the mean is the quotient itself.

    Args:
        quotients: FP32, of magnitudes up to 448. NaN stays.
    """
    power = (quotients.view(torch.int32) & _EXPONENT).view(torch.float32).clamp_(min=2.0**-6)
    step = power / 8  # numbers between two powers of two have 3 bits of mantissa; below 2^-6 their distance stays
    return torch.floor(quotients / step + noise) * step


def scale_values(scales: Tensor) -> Tensor:
    """Return stored scales as FP32."""
    return scales if scales.dtype == torch.float32 else (scales.to(torch.int32) << 23).view(torch.float32)


def bad_scales(scales: Tensor) -> Tensor:
    """Return a mask of the scales whose tile holds Inf or NaN."""
    return ~torch.isfinite(scales) if scales.dtype == torch.float32 else scales == _NO_NUMBER


def _chunks(regions: Sequence[Region], device: torch.device) -> Iterator[tuple[Region, int, int, int]]:
    """Yield runs of bands: their region, first element, first block, and number."""
    most = CHUNK_NUMEL.get(device.type, _OTHER_CHUNK)
    for region in regions:
        step = max(1, most // region.band_numel)
        for first in range(0, region.bands, step):
            bands = min(step, region.bands - first)
            yield region, region.element + first * region.band_numel, region.block + first * region.columns, bands


def rounded_up(scale: Tensor) -> Tensor:
    """Return the next power of two; Inf and NaN stay."""
    bits = (scale.view(torch.int32) + 0x7FFFFF) & _EXPONENT
    return torch.where(torch.isfinite(scale), bits.view(torch.float32), scale)


def _exponents(scale: Tensor) -> Tensor:
    return ((scale.view(torch.int32) & _EXPONENT) >> 23).to(torch.uint8)
