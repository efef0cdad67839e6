"""The places for more workers, and the times at which a run grows into them: values and arithmetic, with the test's own clock."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vescale_ray.config import ConfigError, parse_config
from vescale_ray.controller.policy import LONGEST_GAP_S, growth_wait, worth_growing
from vescale_ray.controller.protocol import Event
from vescale_ray.controller.scaling.autoscaling import REQUEST_AHEAD_S, Autoscaling, RunProgress
from vescale_ray.controller.scaling.capacity import STALE_S, Free, FreePlaces, places

CPU = {"CPU": 1.0}


def test_place_is_one_whole_worker_on_one_allowed_node() -> None:
    free = {"a": {"CPU": 1.9, "GPU": 4.0}, "b": {"CPU": 0.5}, "c": {"CPU": 4.0}, "d": {"memory": 1e9}}
    assert places(free, CPU) == {"a": 1, "c": 4}, "two halves on two nodes are no place"
    assert places(free, CPU, avoid={"c"}) == {"a": 1}
    assert places(free, {"CPU": 0.5, "GPU": 1.0}) == {"a": 3}
    assert places({"a": {"CPU": 0.3}}, {"CPU": 0.1}) == {"a": 3}, "what is 0.3 / 0.1 in floating point is three workers"


def looks(capacity: FreePlaces, seconds: float, free: dict[str, int], begin: float = 0.0, every: float = 0.5, nodes: str = "") -> float:
    at = begin
    while at < begin + seconds:
        capacity.look(at, free, {*free, *nodes})
        at += every
    return at


def test_place_counts_once_free_for_the_required_time() -> None:
    capacity = FreePlaces(10.0)
    end = looks(capacity, 9.9, {"a": 2})
    assert capacity.steady(end) == 0
    end = looks(capacity, 1.0, {"a": 3}, end)
    assert capacity.steady(end) == 2, "the third has come later"
    end = looks(capacity, 1.0, {"a": 1}, end)
    end = looks(capacity, 9.0, {"a": 3}, end)
    assert capacity.steady(end) == 1, "two were somebody else's in between"


@pytest.mark.parametrize("period", [1.0, 3.0, 8.0])
@pytest.mark.fault("G2")
def test_nodes_that_come_and_go_are_never_steady_room(period: float) -> None:
    capacity, rng, at = FreePlaces(10.0), random.Random(1), 0.0
    for turn in range(40):
        # Ray gives each node a new id. Every third time it is the same node, whose place is taken and given back.
        name = "same" if turn % 3 == 0 else f"n{turn}"
        at = looks(capacity, period * rng.uniform(0.5, 1.0), {name: 1}, at)
        assert capacity.steady(at) == 0


def test_successive_places_are_taken_together_in_bounded_time() -> None:
    capacity = FreePlaces(10.0)
    end = looks(capacity, 1.5, {"a": 1})
    end = looks(capacity, 9.0, {"a": 3}, end)
    assert capacity.steady(end) == 1 and capacity.ripe(end) == 0
    end = looks(capacity, 2.0, {"a": 3}, end)
    assert capacity.ripe(end) == 3
    for turn in range(18):
        end = looks(capacity, 1.0, {"a": 3, f"n{turn}": 1}, end)
    assert capacity.ripe(end) == 3, "nodes that never stay hold up those that do for a while only"


def test_stale_capacity_counts_as_none_and_a_gap_starts_anew() -> None:
    capacity = FreePlaces(10.0)
    end = looks(capacity, 20.0, {"a": 1})
    assert capacity.steady(end) == capacity.now(end) == 1
    assert capacity.steady(end + STALE_S + 1) == capacity.now(end + STALE_S + 1) == 0
    end = looks(capacity, 1.0, {"a": 1}, end + STALE_S + 1)
    assert capacity.steady(end) == 0


def test_spare_may_take_a_freed_place_but_not_on_a_new_node() -> None:
    capacity = FreePlaces(10.0)
    end = looks(capacity, 1.0, {}, nodes="a")
    assert capacity.now(end) == 0
    end = looks(capacity, 1.0, {"a": 1, "b": 2}, end)
    assert capacity.now(end) == 1, "a was there from the beginning, b has to prove itself"
    assert capacity.now(end, after=end) == 0, "what was seen before the last hiring may be the place that it took"
    end = looks(capacity, 10.0, {"a": 1, "b": 2}, end)
    assert capacity.now(end) == 3


@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.integers(0, 3)), min_size=1, max_size=60), st.integers(1, 20))
def test_steady_room_is_the_minimum_of_each_node_over_the_time(history: list[dict[str, int]], after: int) -> None:
    capacity = FreePlaces(float(after))
    for at, free in enumerate(history):
        capacity.look(float(at), {node: count for node, count in free.items() if count}, free)
    last = history[-after - 1 :]
    expected = sum(min(free.get(node, 0) for free in last) for node in "abc") if len(history) > after else 0
    assert capacity.steady(float(len(history) - 1)) == expected


def test_growths_are_spaced_and_failed_ones_back_off() -> None:
    assert growth_wait(None, 5.0, 60.0, 0) == 0
    assert growth_wait(100.0, 130.0, 60.0, 0) == 30
    assert growth_wait(100.0, 161.0, 60.0, 0) == 0
    assert [growth_wait(0.0, 0.0, 60.0, failed) for failed in range(5)] == [60, 120, 240, 480, 960]
    assert growth_wait(0.0, 0.0, 60.0, 1000) == LONGEST_GAP_S
    assert growth_wait(0.0, 0.0, 0.0, 0) == 0 and growth_wait(0.0, 0.0, 0.0, 3) == 8
    assert growth_wait(0.0, 0.0, 2 * LONGEST_GAP_S, 3) == 2 * LONGEST_GAP_S


def test_a_run_that_is_nearly_done_does_not_grow() -> None:
    assert worth_growing(1000, 0.5, 20.0) and worth_growing(5, None, 20.0)
    assert not worth_growing(50, 0.5, 20.0)


@pytest.mark.parametrize(
    ("elastic", "ray", "words"),
    [
        ({"demand": 2}, {}, "elastic.demand = 2 with elastic.grow = false: requested capacity would not be used; set elastic.grow=true"),
        ({"grow": True}, {"cpus_per_worker": 0}, "elastic.grow = true with ray.cpus_per_worker = 0 and ray.gpus_per_worker = 0"),
        ({"spares": 1}, {"cpus_per_worker": 0}, "elastic.spares = 1 with ray.cpus_per_worker = 0"),
        ({"spares": -1}, {}, "elastic.spares = -1: give at least 0"),
        ({"grow": True, "grow_after_s": -1}, {}, "elastic.grow_after_s = -1: give at least 0"),
        ({"grow": 3}, {}, "elastic.grow = 3: give true or false"),
    ],
)
def test_impossible_elastic_settings_are_refused_with_a_remedy(elastic: dict[str, object], ray: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse_config({"elastic": elastic, "ray": ray})
    assert words in str(refusal.value) and "\n" not in str(refusal.value)


def test_room_is_watched_only_by_a_run_that_would_use_it() -> None:
    assert not parse_config({}).watches_room
    assert parse_config({"elastic": {"grow": True}}).watches_room and parse_config({"elastic": {"spares": 1}}).watches_room
    assert parse_config({"ray": {"gpus_per_worker": 1}}).resources_per_worker == {"CPU": 1.0, "GPU": 1.0}
    assert parse_config({"ray": {"gpus_per_worker": 1, "cpus_per_worker": 0}}).resources_per_worker == {"GPU": 1.0}


class Grower:
    """The growth of a run of two workers, at most four, with one free place on one node and a clock of its own."""

    def __init__(self) -> None:
        section = {"workers": 2, "max_workers": 4, "grow": True, "grow_after_s": 1.0, "grow_gap_s": 60.0, "demand": 1}
        self.elastic = parse_config({"elastic": section}).elastic
        self.policy = Autoscaling(self.elastic)
        self.now, self.target, self.capacity, self.requested = 50.0, 2, 1, 0
        self.steps_left, self.warm_s = 10**6, 0.0

    def pass_(self, seconds: float, world: int) -> list[str]:
        """Let ``seconds`` pass with ``world`` members, and return the names of the events."""
        end, told = self.now + seconds, []
        while self.now < end:
            self.now += 0.5
            run = RunProgress(world, 0, 0, self.target, 4, self.steps_left, 0.1, self.warm_s)
            self.requested = self.policy.places_to_request(run, self.now)
            self.policy.look(Free(self.now, {"n": self.capacity}, frozenset("n")), (), ())
            target, events = self.policy.grow(run, self.now)
            self.target = target or self.target
            told += [event.name for event in events]
        return told


def test_granted_request_is_room_and_spares_have_it_first() -> None:
    elastic = parse_config({"elastic": {"workers": 2, "max_workers": 5, "grow": True, "grow_after_s": 0.0, "spares": 1}}).elastic
    run, policy = RunProgress(2, 0, 0, 2, 5, 100, 0.1, 0.0), Autoscaling(elastic)
    assert policy.grow(run, 1.0) == (None, []) and policy.spare_places(0, 1.0) == 0, "nothing is known yet"
    policy.look(Free(2.0, {"n": 1}, frozenset("nm")), ("n", None, "m", "x"), ("x",))
    assert policy.spare_places(0, 2.0) == 3
    assert policy.grow(run, 2.0) == (4, [Event("growth", {"from": 2, "to": 4, "room": 2})])
    policy.hired(2.0)
    assert policy.spare_places(0, 2.5) == 0, "it may be the place that was just taken"


def test_place_is_requested_only_if_the_run_would_use_it_soon() -> None:
    """A request held through a back-off of up to an hour, or in the last seconds of a run, would bring nodes without use."""
    run = Grower()
    run.capacity = 0
    run.pass_(5.0, 2)
    assert run.requested == 1
    run.capacity = 1
    for _ in range(3):
        while run.target == 2:
            run.pass_(0.5, 2)
        run.policy.ended(complete=False)
        run.target = 2
    run.capacity = 0
    run.pass_(1.0, 2)
    assert run.requested == 0, "the next growth is eight minutes away"
    run.pass_(480.0 - REQUEST_AHEAD_S, 2)
    assert run.requested == 1, "by the time a node is there it may be used"
    run.warm_s, run.steps_left = 20.0, 50
    run.pass_(1.0, 2)
    assert run.requested == 0, "the run ends before a worker would be warm"
