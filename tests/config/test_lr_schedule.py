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


LEFT = {"linear": lambda x: 1 - x, "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2, "sqrt": lambda x: 1 - x**0.5}


@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_decay_begins_after_the_warm_up(schedule: str, warmup: int) -> None:
    train = TrainSection(schedule=schedule, steps=31, lr=2.0, warmup_steps=warmup, min_lr_ratio=0.25)  # type: ignore[arg-type]
    expected = [2.0 * (i + 1) / warmup for i in range(warmup)]
    expected += [0.5 + 1.5 * LEFT[schedule](i / (30 - warmup)) for i in range(31 - warmup)]
    assert [lr_at(step, train) for step in range(31)] == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("shape", LEFT)
@pytest.mark.parametrize("decay", [1, 5, 24])
def test_wsd_decays_in_its_last_steps_only(shape: str, decay: int) -> None:
    train = TrainSection(schedule="wsd", decay_steps=decay, decay_type=shape, steps=30, lr=2.0, warmup_steps=6, min_lr_ratio=0.1)  # type: ignore[arg-type]
    expected = [2.0 * (i + 1) / 6 for i in range(6)] + [2.0] * (24 - decay)
    expected += [0.2 + 1.8 * LEFT[shape]((i + 1) / decay) for i in range(decay)]
    assert [lr_at(step, train) for step in range(30)] == pytest.approx(expected, rel=1e-14)
    assert lr_at(29, train) == lr_at(1000, train) == pytest.approx(0.2)


def test_wsd_decays_in_a_tenth_of_the_steps_by_default() -> None:
    rates = [lr_at(step, TrainSection(schedule="wsd", steps=300, lr=1.0, warmup_steps=20)) for step in range(300)]
    assert rates[19:270] == [1.0] * 251 and rates[270] == pytest.approx(1 - 0.9 / 30) and rates[299] == pytest.approx(0.1)


def test_more_steps_delay_the_decay_and_change_no_rate_before() -> None:
    short, longer = (TrainSection(schedule="wsd", decay_steps=10, steps=steps, warmup_steps=5) for steps in (50, 80))
    assert all(lr_at(step, short) == lr_at(step, longer) for step in range(40))
    assert lr_at(49, short) < lr_at(49, longer) == longer.lr


def test_a_constant_rate_stays_after_the_warm_up() -> None:
    train = TrainSection(schedule="constant", steps=9, lr=1.0, warmup_steps=4)
    assert [lr_at(step, train) for step in range(12)] == [0.25, 0.5, 0.75, *[1.0] * 9]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd"])
@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (1, 1), (1, 20), (5, 4), (5, 5), (5, 20), (2, 1)])
def test_rate_is_positive_with_no_warm_up_or_only_warm_up(steps: int, warmup: int, schedule: str) -> None:
    train = TrainSection(schedule=schedule, steps=steps, lr=2.0, warmup_steps=warmup, min_lr_ratio=0.1)  # type: ignore[arg-type]
    assert all(0 < lr_at(step, train) <= 2.0 for step in range(steps))


def test_a_negative_step_is_refused() -> None:
    with pytest.raises(ValueError, match="step = -1"):
        lr_at(-1, TrainSection())
