"""Every second of a run is in one account: in steps that count, or lost to one cause. No account ever shrinks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vescale_ray.controller.statistics.goodput import Goodput, Loss


def accounts(goodput: Goodput) -> dict[str, float]:
    return {"productive": goodput.productive, **goodput.lost}


def test_goodput_of_a_mixed_run_is_exact_to_the_second() -> None:
    run = Goodput.beginning(100.0)
    run.advance(103.0)  # workers start
    run.step(112.0, 2.0, again=False, between={})
    run.step(115.0, 2.0, again=False, between={"checkpoint": 0.5, "peer_copy": 0.25})
    run.open(Loss.FAILURE)  # a rank died in the third step
    run.advance(118.0)
    run.turn(Loss.WAITING, 119.0)
    run.turn(Loss.FAILURE, 124.0)
    run.step(128.0, 2.0, again=True, between={"peer_copy": 9.0})
    run.step(130.0, 2.0, again=False, between={})
    run.open(Loss.RESCALE)
    run.step(133.0, 2.0, again=False, between={})
    run.open(Loss.CHECKPOINT)
    run.advance(133.5)
    run.turn(Loss.SHUTDOWN, 134.0)
    run.close(135.0)
    assert accounts(run) == {
        "productive": 8.0,
        "startup": 10.0,
        "checkpoint": 0.5 + 1.0,
        "peer_copy": 0.25,
        "stall": 0.25,
        "failure": 4.0 + 2.0,
        "wait_for_workers": 5.0,
        "replay": 2.0,
        "rescale": 1.0,
        "shutdown": 1.0,
    }
    assert sum(accounts(run).values()) == 135.0 - 100.0 and run.ratio == 8.0 / 35.0


def test_time_of_an_open_step_is_not_lost_nor_counted_twice() -> None:
    run = Goodput.beginning(0.0)
    run.step(3.0, 2.0, again=False, between={})
    run.advance(9.0)
    assert run.until == 3.0 and accounts(run) == {"productive": 2.0, "startup": 1.0}
    run.step(2.5, 1.0, again=False, between={})  # reported again, to a restarted controller
    run.step(10.0, 7.0, again=False, between={"evaluation": 5.0})
    assert accounts(run) == {"productive": 9.0, "startup": 1.0}, "there was no time between them"


times = st.floats(-5.0, 50.0, allow_nan=False)
events: list[st.SearchStrategy[Callable[[Goodput], None]]] = [
    st.builds(
        lambda ended, seconds, again, spent: lambda g: g.step(ended, seconds, again=again, between=spent),
        times,
        st.floats(-1.0, 20.0),
        st.booleans(),
        st.dictionaries(st.sampled_from(["checkpoint", "peer_copy", "evaluation"]), st.floats(-1.0, 20.0)),
    ),
    st.builds(lambda cause: lambda g: g.open(cause), st.sampled_from(Loss)),
    st.builds(lambda cause, now: lambda g: g.turn(cause, now), st.sampled_from(Loss), times),
    st.builds(lambda now: lambda g: g.advance(now), times),
]


@given(st.lists(st.one_of(events), max_size=30), times)
def test_accounts_always_add_up_and_never_fall(happened: list[Callable[[Goodput], None]], end: float) -> None:
    """This also holds for clocks that go backwards and for figures that contradict each other."""
    run = Goodput.beginning(0.0)
    for one in [*happened, lambda g: g.close(end)]:
        before = accounts(run)
        one(run)
        assert all(accounts(run)[name] >= seconds >= 0.0 for name, seconds in before.items())
        assert sum(accounts(run).values()) == pytest.approx(run.until - run.since, abs=1e-9)
    assert run.until >= end and Goodput.from_json(run.to_json()) == run


def test_accounts_of_another_form_are_refused() -> None:
    tree = Goodput.beginning(1.0).to_json()
    with pytest.raises(ValueError, match="luck"):
        Goodput.from_json({**tree, "lost": {"luck": 1.0}})
    with pytest.raises(KeyError):
        Goodput.from_json({"since": 1.0})
