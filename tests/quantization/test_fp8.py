"""FP8 tiles against an oracle in FP64 that knows e4m3 by its definition alone."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vescale_ray.block_grid import Grid
from vescale_ray.geometry import Block
from vescale_ray.quantization import Fp8Block
from vescale_ray.quantization.fp8 import bad_scales, dequantize, dequantize_range, quantize, quantize_range, scale_values

E4M3 = sorted({m / 8 * 2.0**-6 for m in range(8)} | {(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)} - {480.0})
"""Magnitudes of e4m3: 3 bits of mantissa, exponents from -6 to 8, subnormal numbers below 2^-6, and no 480."""

FORMS = [Fp8Block(), Fp8Block(1, 128), Fp8Block(32, 32), Fp8Block(32, 32, "power_of_two"), Fp8Block(128, 128, "power_of_two")]


def tiles(shape: tuple[int, ...], form: Fp8Block) -> list[tuple[tuple[int, ...], tuple[slice | int, ...]]]:
    """Index of each tile's scale, and the tile's place in the tensor."""
    *lead, m, n = shape
    found = []
    for e in range(math.prod(lead)):
        for i in range(0, m, form.rows):
            for j in range(0, n, form.columns):
                at = (e,) if lead else ()
                place = (*at, slice(i, i + form.rows), slice(j, j + form.columns))
                found.append(((*at, i // form.rows, j // form.columns), place))
    return found


def nearest_code(quotient: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """The index of the nearest number, of two equally near ones the even."""
    distance = (quotient[..., None] - numbers).abs()
    near = distance == distance.amin(dim=-1, keepdim=True)
    first = near.int().argmax(dim=-1)
    return (first + ((near.sum(dim=-1) == 2) & (first % 2 == 1))).int()


def check(x: torch.Tensor, form: Fp8Block) -> None:
    """Compare scales with their definition, and each value with the nearest e4m3 number times the scale."""
    codes, scales = quantize(x, form)
    values = dequantize(codes, scales, form, dtype=torch.float32).double()
    numbers = torch.tensor(E4M3, dtype=torch.float64)
    assert codes.shape == x.shape and codes.dtype == torch.float8_e4m3fn
    for index, place in tiles(tuple(x.shape), form):
        tile = x[place].double()
        ideal = max(float(tile.abs().max()) / 448, 2.0**-126)
        scale = float(scale_values(scales)[index])
        if form.scales == "power_of_two":
            assert scale == 2.0 ** math.ceil(math.log2(float(torch.tensor(ideal).float())))
        else:
            assert scale == float(torch.tensor(ideal, dtype=torch.float64).float())
        assert torch.equal(codes.view(torch.uint8)[place].int() & 0x7F, nearest_code((tile.abs() / scale).float().double(), numbers))
        nearest = (tile.abs()[..., None] - numbers * scale).abs().amin(dim=-1)
        error = (values[place] - tile).abs()
        slack = nearest * 2.0**-20 + values[place].abs() * 2.0**-22 + 2.0**-149
        assert bool((error <= nearest + slack).all()), (index, float((error - nearest).max()), scale)


@settings(max_examples=60)
@given(
    st.one_of(st.tuples(st.integers(1, 70), st.integers(1, 70)), st.tuples(st.integers(1, 3), st.integers(1, 40), st.integers(1, 40))),
    st.builds(Fp8Block, st.integers(1, 33), st.integers(1, 33), st.sampled_from(["float32", "power_of_two"])),
    st.integers(0, 2**31),
    st.sampled_from([1.0, 1e-30, 1e-38, 1e-42, 1e30]),
)
def test_codes_and_scales_match_the_fp64_oracle(shape: tuple[int, ...], form: Fp8Block, seed: int, size: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randn(shape, generator=generator, dtype=torch.float64).mul(6).exp()
    check((torch.randn(shape, generator=generator, dtype=torch.float64) * spread * size).clamp(-3e38, 3e38).float(), form)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_zeros_outliers_tails_and_subnormals_match_the_oracle(form: Fp8Block) -> None:
    x = torch.randn(300, 200, generator=torch.Generator().manual_seed(1))
    x[:128, :128] = 0
    x[140, 150] = 1e6
    x[256:, 128:] *= 1e-42
    x[0, 199], x[1, 199] = 2.0**-149, -0.0
    check(x, form)
    assert not dequantize(*quantize(x, form), form)[:128, :128].any()


def test_a_power_of_two_scale_is_never_below_the_exact_one() -> None:
    form = Fp8Block(1, 2, "power_of_two")
    x = torch.tensor([[448.0, 1.0], [448.0 + 2.0**-15, 1.0], [447.0, 1.0]])
    assert scale_values(quantize(x, form)[1]).flatten().tolist() == [1.0, 2.0, 1.0]
    check(x, form)


@pytest.mark.parametrize("scale", [7.0, 7.0 * 2**-20])
def test_a_quotient_between_two_codes_takes_the_even_one(scale: float) -> None:
    between = [(a + b) / 2 for a, b in zip(E4M3, E4M3[1:], strict=False)]
    check(torch.tensor([[*between, 448.0]]) * scale, Fp8Block(1, 128))


def test_the_largest_fp32_number_keeps_its_tile() -> None:
    x = torch.full((2, 2), torch.finfo(torch.float32).max)
    x[0, 0] = 0
    values = dequantize(*quantize(x, Fp8Block(2, 2)), Fp8Block(2, 2))
    assert torch.allclose(values, x, rtol=1e-6) and bool(values.isfinite().all())


def test_gaussian_weights_keep_more_than_31_db() -> None:
    x = torch.randn(512, 640, generator=torch.Generator().manual_seed(0)) * 0.02
    for dtype in (torch.float32, torch.bfloat16):
        noise = dequantize(*quantize(x), dtype=dtype).double() - x.double()
        assert 10 * math.log10(float(x.double().square().sum() / noise.square().sum())) > 31


def test_bf16_values_are_fp32_values_rounded_once() -> None:
    x = torch.randn(100, 90, generator=torch.Generator().manual_seed(3))
    codes, scales = quantize(x, Fp8Block(32, 32))
    wide = dequantize(codes, scales, Fp8Block(32, 32))
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(dequantize(codes, scales, Fp8Block(32, 32), dtype=dtype), wide.to(dtype))


def test_every_code_is_decoded_exactly() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    regions = tuple(Grid.of((2, 128), Block.tile(1, 128)).regions(0, 256))
    numbers = torch.tensor([*E4M3, 480.0], dtype=torch.float64)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        out = torch.empty(256, dtype=dtype)
        dequantize_range(codes, torch.tensor([1.0, 2.0]), regions, out)
        assert torch.equal(out.double(), torch.cat([numbers, -2 * numbers])) and bool(torch.signbit(out[128]))


@settings(max_examples=60)
@given(st.data())
def test_shards_of_whole_bands_give_the_whole_tensors_codes(data: st.DataObject) -> None:
    shape = data.draw(st.one_of(st.tuples(st.integers(1, 50), st.integers(1, 30)), st.tuples(*[st.integers(1, 14)] * 3)))
    form = data.draw(st.builds(Fp8Block, st.integers(1, 9), st.integers(1, 9), st.sampled_from(["float32", "power_of_two"])))
    x = torch.randn(shape, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    grid, flat = Grid.of(shape, form.block), x.view(-1)
    allowed = [k for k in range(1, x.numel()) if grid.allows_cut(k)]
    cuts = [0, *sorted(data.draw(st.sets(st.sampled_from(allowed), max_size=4)) if allowed else ()), x.numel()]
    codes, scales = quantize(x, form)
    at = 0
    for start, end in zip(cuts, cuts[1:], strict=False):
        regions = list(grid.regions(start, end))
        count = grid.band_of(end) * grid.columns - at if end < x.numel() else scales.numel() - at
        mine = torch.empty(end - start, dtype=torch.uint8), torch.empty(count, dtype=form.scale_dtype)
        quantize_range(flat[start:end], regions, form, *mine)
        assert torch.equal(mine[0], codes.view(torch.uint8).view(-1)[start:end])
        assert torch.equal(mine[1], scales.view(-1)[at : at + count])
        at += count


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_inf_and_nan_are_found_before_the_cast_and_named(form: Fp8Block, value: float) -> None:
    x = torch.randn(200, 150, generator=torch.Generator().manual_seed(2))
    x[130, 140] = value
    with pytest.raises(FloatingPointError, match=r"Inf or NaN in 'layers.0.up' \(1 tile\): .* lower the learning rate"):
        quantize(x, form, name="layers.0.up")
    grid = Grid.of(x.shape, form.block)
    scales = torch.empty(grid.state_shape, dtype=form.scale_dtype)
    quantize_range(x.view(-1), list(grid.regions(0, x.numel())), form, torch.empty(x.numel(), dtype=torch.uint8), scales.view(-1))
    assert bad_scales(scales).nonzero().tolist() == [[130 // form.rows, 140 // form.columns]]


@pytest.mark.parametrize(
    ("weight", "says"),
    [
        (torch.zeros(8), "of shape (8,) is a vector"),
        (torch.zeros(()), "of shape () is a scalar"),
        (torch.zeros(0, 4), "of shape (0, 4) is empty"),
        (torch.zeros(2, 2, 2, 2), "of shape (2, 2, 2, 2) is of 4 dimensions"),
        (torch.zeros(4, 4, dtype=torch.int32), "of shape (4, 4) is of torch.int32"),
    ],
)
def test_tensors_without_tiles_are_refused_by_name(weight: torch.Tensor, says: str) -> None:
    with pytest.raises(ValueError) as caught:
        quantize(weight, name="w")
    assert str(caught.value) == f"'w' {says}: only floating-point matrices and stacks of matrices have FP8 tiles"


def test_bad_formats_are_refused_with_the_value() -> None:
    for arguments, kind, says in (
        ({"rows": 0}, ValueError, r"Fp8Block\(rows=0\): a tile needs at least 1"),
        ({"columns": 1.5}, TypeError, r"Fp8Block\(columns=1.5\): give a whole number"),
        ({"scales": "fp16"}, ValueError, r"Fp8Block\(scales='fp16'\): give 'float32' or 'power_of_two'"),
    ):
        with pytest.raises(kind, match=says):
            Fp8Block(**arguments)  # type: ignore[arg-type]
