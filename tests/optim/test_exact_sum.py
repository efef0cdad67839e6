"""The exact sum of squares has the same bits for every division of the elements, and is close to rational arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_threads
from vescale_ray.optim import total_norm
from vescale_ray.optim.exact_sum import sum_of_squares

CPU = torch.device("cpu")


def values(numel: int, decades: float, seed: int = 0) -> torch.Tensor:
    """Normal FP32 numbers of both signs, spread over ``decades`` powers of ten."""
    generator = torch.Generator().manual_seed(seed)
    scale = 10 ** (torch.rand(numel, generator=generator, dtype=torch.float64) * decades - decades / 2)
    return (torch.randn(numel, generator=generator, dtype=torch.float64) * scale).float()


def cuts(whole: torch.Tensor, parts: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    at = torch.randint(0, whole.numel() + 1, (parts - 1,), generator=generator).sort().values.tolist()
    return [whole[a:b] for a, b in zip([0, *at], [*at, whole.numel()], strict=True)]


@pytest.mark.parametrize("decades", [0.0, 6.0, 60.0])
def test_any_cut_gives_equal_bits_near_the_rational_sum(decades):
    whole = values(70_001, decades)
    exact = sum(Fraction(v) ** 2 for v in whole.tolist())
    sums = {float(sum_of_squares(cuts(whole, parts, seed), [], CPU)) for parts in (1, 2, 7, 300) for seed in range(4)}
    sums.add(float(sum_of_squares([whole.flip(0)], [], CPU)))
    assert len(sums) == 1
    error = abs(Fraction(sums.pop()) - exact) / exact
    assert error <= Fraction(whole.numel(), 2**57) + Fraction(1, 2**52), float(error)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_sum_of_squares_leaves_its_input_unchanged(dtype):
    numbers = torch.tensor([3.0, -4.0, 0.5], dtype=dtype)
    assert float(sum_of_squares([numbers], [], CPU)) == 25.25
    assert numbers.tolist() == [3.0, -4.0, 0.5]


def over_ranks(rank, world, seed):
    whole = values(10_000, 1.0)
    mine = cuts(whole, world, seed)[rank]
    return float(sum_of_squares([mine] if mine.numel() else [], [dist.distributed_c10d._get_default_group()], CPU))


def test_exact_sum_is_bitwise_equal_on_any_number_of_ranks():
    whole = values(10_000, 1.0)
    here = float(sum_of_squares([whole], [], CPU))
    assert {value for world in (1, 2, 3, 5) for seed in (1, 2) for value in run_threads(world, over_ranks, seed)} == {here}
    plain = {float(sum(p.double().square().sum() for p in cuts(whole, parts, seed))) for parts in (2, 3, 5, 7) for seed in range(9)}
    assert len(plain) > 1, "the plain sums agree as well: this test shows nothing"


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ([], 0.0),
        ([0.0, -0.0], 0.0),
        ([1.0, math.nan, math.inf], math.nan),
        ([1.0, -math.inf], math.inf),
        ([3.4e38, 3.4e38], 2 * float(torch.tensor(3.4e38)) ** 2),
        ([1e-45, 1e-45, 1e-45], 3 * float(torch.tensor(1e-45)) ** 2),
        ([1.0] * 3 + [2.0**-27], 3.0 + 2.0**-54),
    ],
)
def test_zeros_nan_inf_and_subnormals_sum_as_expected(numbers, expected):
    result = float(sum_of_squares([torch.tensor(numbers, dtype=torch.float32)] if numbers else [], [], CPU))
    assert result == expected or (math.isnan(result) and math.isnan(expected))


def test_a_sum_that_needs_more_than_one_word_is_right():
    ones = torch.ones(1, dtype=torch.float32).expand(1 << 22)
    assert float(sum_of_squares([ones] * 5, [], CPU)) == 5.0 * (1 << 22)


def test_norms_that_have_no_exact_sum_are_refused():
    with pytest.raises(ValueError, match=r"norm_type = 3\.0 can't be summed exactly: give 2 or inf"):
        total_norm([torch.ones(3)], 3.0, exact=True)
    assert float(total_norm([torch.ones(4)], 2.0, exact=True)) == 2.0 and float(total_norm([torch.ones(4)], math.inf, exact=True)) == 1.0
