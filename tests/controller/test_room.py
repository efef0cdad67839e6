"""Room for more workers, and when a run grows into it: values and arithmetic, with a clock of the test's own."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vescale_ray.config import ConfigError, parse_config
from vescale_ray.controller.policy import LONGEST_GAP_S, growth_wait, worth_growing
from vescale_ray.controller.room import STALE_S, Room, places

CPU = {"CPU": 1.0}


def test_places_are_whole_workers_on_one_node_each_and_none_on_a_node_to_avoid() -> None:
    free = {"a": {"CPU": 1.9, "GPU": 4.0}, "b": {"CPU": 0.5}, "c": {"CPU": 4.0}, "d": {"memory": 1e9}}
    assert places(free, CPU) == {"a": 1, "c": 4}, "two halves on two nodes are no place"
    assert places(free, CPU, avoid={"c"}) == {"a": 1}
    assert places(free, {"CPU": 0.5, "GPU": 1.0}) == {"a": 3}
    assert places({"a": {"CPU": 0.3}}, {"CPU": 0.1}) == {"a": 3}, "what is 0.3 / 0.1 in floating point is three workers"


def looks(room: Room, seconds: float, free: dict[str, int], begin: float = 0.0, every: float = 0.5, nodes: str = "") -> float:
    at = begin
    while at < begin + seconds:
        room.look(at, free, {*free, *nodes})
        at += every
    return at


def test_a_place_counts_when_it_was_seen_free_for_as_long_as_is_wanted() -> None:
    room = Room(10.0)
    end = looks(room, 9.9, {"a": 2})
    assert room.steady(end) == 0
    end = looks(room, 1.0, {"a": 3}, end)
    assert room.steady(end) == 2, "the third has come later"
    end = looks(room, 1.0, {"a": 1}, end)
    end = looks(room, 9.0, {"a": 3}, end)
    assert room.steady(end) == 1, "two were somebody else's in between"


@pytest.mark.parametrize("period", [1.0, 3.0, 8.0])
def test_nodes_that_appear_and_disappear_are_never_steady_room_though_there_is_always_one(period: float) -> None:
    room, rng, at = Room(10.0), random.Random(1), 0.0
    for turn in range(40):
        # Ray gives each node a new id; every third time it is the same node whose place is taken and given back.
        name = "same" if turn % 3 == 0 else f"n{turn}"
        at = looks(room, period * rng.uniform(0.5, 1.0), {name: 1}, at)
        assert room.steady(at) == 0


def test_places_that_come_one_after_another_are_taken_together_but_not_waited_for_without_end() -> None:
    room = Room(10.0)
    end = looks(room, 1.5, {"a": 1})
    end = looks(room, 9.0, {"a": 3}, end)
    assert room.steady(end) == 1 and room.ripe(end) == 0
    end = looks(room, 2.0, {"a": 3}, end)
    assert room.ripe(end) == 3
    for turn in range(18):
        end = looks(room, 1.0, {"a": 3, f"n{turn}": 1}, end)
    assert room.ripe(end) == 3, "nodes that never stay hold up those that do for a while only"


def test_an_answer_that_is_old_says_nothing_and_a_gap_in_the_answers_begins_anew() -> None:
    room = Room(10.0)
    end = looks(room, 20.0, {"a": 1})
    assert room.steady(end) == room.now(end) == 1
    assert room.steady(end + STALE_S + 1) == room.now(end + STALE_S + 1) == 0
    end = looks(room, 1.0, {"a": 1}, end + STALE_S + 1)
    assert room.steady(end) == 0


def test_a_spare_may_have_a_place_that_has_just_become_free_but_not_on_a_node_that_has_just_come() -> None:
    room = Room(10.0)
    end = looks(room, 1.0, {}, nodes="a")
    assert room.now(end) == 0
    end = looks(room, 1.0, {"a": 1, "b": 2}, end)
    assert room.now(end) == 1, "a was there from the beginning, b has to prove itself"
    assert room.now(end, after=end) == 0, "what was seen before the last hiring may be the place that it took"
    end = looks(room, 10.0, {"a": 1, "b": 2}, end)
    assert room.now(end) == 3


@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.integers(0, 3)), min_size=1, max_size=60), st.integers(1, 20))
def test_steady_room_is_the_least_that_each_node_had_over_the_time(history: list[dict[str, int]], after: int) -> None:
    room = Room(float(after))
    for at, free in enumerate(history):
        room.look(float(at), {node: count for node, count in free.items() if count}, free)
    last = history[-after - 1 :]
    expected = sum(min(free.get(node, 0) for free in last) for node in "abc") if len(history) > after else 0
    assert room.steady(float(len(history) - 1)) == expected


def test_growths_keep_their_distance_and_those_that_come_to_nothing_keep_more() -> None:
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
        ({"demand": 2}, {}, "elastic.demand = 2 with elastic.grow = false: nobody would use what is asked for; set elastic.grow=true"),
        ({"grow": True}, {"cpus_per_worker": 0}, "elastic.grow = true with ray.cpus_per_worker = 0 and ray.gpus_per_worker = 0"),
        ({"spares": 1}, {"cpus_per_worker": 0}, "elastic.spares = 1 with ray.cpus_per_worker = 0"),
        ({"spares": -1}, {}, "elastic.spares = -1: give at least 0"),
        ({"grow": True, "grow_after_s": -1}, {}, "elastic.grow_after_s = -1: give at least 0"),
        ({"grow": 3}, {}, "elastic.grow = 3: give true or false"),
    ],
)
def test_what_can_not_work_is_refused_with_the_remedy(elastic: dict[str, object], ray: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse_config({"elastic": elastic, "ray": ray})
    assert words in str(refusal.value) and "\n" not in str(refusal.value)


def test_room_is_watched_only_by_a_run_that_would_use_it() -> None:
    assert not parse_config({}).watches_room
    assert parse_config({"elastic": {"grow": True}}).watches_room and parse_config({"elastic": {"spares": 1}}).watches_room
    assert parse_config({"ray": {"gpus_per_worker": 1}}).resources_per_worker == {"CPU": 1.0, "GPU": 1.0}
    assert parse_config({"ray": {"gpus_per_worker": 1, "cpus_per_worker": 0}}).resources_per_worker == {"GPU": 1.0}
