"""The learning rate, against the formula worked out by hand."""

from __future__ import annotations

import math

import pytest

from vescale_ray.config import TrainSection
from vescale_ray.lr_schedule import lr_at


def test_rate_warms_up_linearly_and_decays_as_half_a_cosine() -> None:
    train = TrainSection(steps=14, lr=1.0, warmup_steps=4, min_lr_ratio=0.2)
    rates = [lr_at(step, train) for step in range(14)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == pytest.approx(1.0)
    assert rates[13] == pytest.approx(0.2)
    assert rates[4 + 3] == pytest.approx(0.2 + 0.4 * (1 + math.cos(math.pi / 3)))
    assert all(a >= b for a, b in zip(rates[3:], rates[4:], strict=False))


def test_rate_stays_at_its_minimum_after_the_last_step() -> None:
    train = TrainSection(steps=10, lr=1.0, warmup_steps=2, min_lr_ratio=0.1)
    assert lr_at(9, train) == lr_at(10, train) == lr_at(500, train) == pytest.approx(0.1)


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (1, 1), (1, 20), (5, 4), (5, 5), (5, 20), (2, 1)])
def test_rate_is_positive_with_no_warm_up_or_only_warm_up(steps: int, warmup: int) -> None:
    train = TrainSection(steps=steps, lr=2.0, warmup_steps=warmup, min_lr_ratio=0.1)
    assert all(0 < lr_at(step, train) <= 2.0 for step in range(steps))


def test_a_negative_step_is_refused() -> None:
    with pytest.raises(ValueError, match="step = -1"):
        lr_at(-1, TrainSection())
