"""The advised checkpoint interval, against a numerical minimum of the exact model."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vescale_ray import checkpoint as ckpt


def lost(interval: float, cost: float, mtbf: float) -> float:
    """Wall time per second of work with random (Poisson) failures and free restarts: Daly's exact model (equation 20)."""
    return mtbf * math.expm1((interval + cost) / mtbf) / interval


def best(cost: float, mtbf: float) -> float:
    """Minimum by golden-section search; the model has only one."""
    low, high, ratio = mtbf * 1e-7, mtbf * 5, (math.sqrt(5) - 1) / 2
    for _ in range(200):
        a, b = high - ratio * (high - low), low + ratio * (high - low)
        if lost(a, cost, mtbf) < lost(b, cost, mtbf):
            high = b
        else:
            low = a
    return (low + high) / 2


@given(st.floats(1e-5, 0.5), st.floats(60, 1e6))
def test_the_interval_is_the_best_of_the_exact_model(share: float, mtbf: float) -> None:
    cost = share * mtbf
    found = ckpt.daly_interval(cost, mtbf)
    assert abs(found / best(cost, mtbf) - 1) < 0.02
    assert lost(found, cost, mtbf) <= lost(best(cost, mtbf), cost, mtbf) * 1.001


def test_observed_failures_outweigh_the_mtbf_prior_with_time() -> None:
    day = 86400.0
    assert ckpt.expected_mtbf(0, 0.0, day) == day
    assert ckpt.expected_mtbf(1, 0.0, day) == day / 2
    assert abs(ckpt.expected_mtbf(100, 100 * 3600.0, day) / 3600 - 1) < 0.25
    assert ckpt.expected_mtbf(0, 9 * day, day) == 10 * day


@pytest.mark.parametrize(("cost", "mtbf"), [(-1.0, 10.0), (1.0, 0.0)])
def test_impossible_figures_are_refused(cost: float, mtbf: float) -> None:
    with pytest.raises(ValueError, match="give a cost of at least 0"):
        ckpt.daly_interval(cost, mtbf)


def test_persist_time_and_bounds_override_the_formula() -> None:
    def choose(stall: float, persist: float) -> tuple[float, str]:
        found = ckpt.choose_interval(stall, persist, 86400.0, least_s=30, most_s=600)
        return found.seconds, found.by

    assert choose(1e-6, 1.0) == (30, "least")
    assert choose(100.0, 1.0) == (600, "most")
    assert choose(0.1, 5000.0) == (5000.0, "persist")
    seconds, by = choose(0.1, 1.0)
    assert by == "formula" and abs(seconds - math.sqrt(2 * 0.1 * 86400)) < 0.1
