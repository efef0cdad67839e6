"""Hung workers are found from reports alone: the worker that the others wait for, and none if that can't be told."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.controller.played_reports import IDLE, MEMBERS, TICKET, Play
from vescale_ray.controller.failures import hang_report
from vescale_ray.controller.failures.hang import (
    AGAIN,
    FACTOR,
    FIRST,
    FIRST_S,
    LEAST_S,
    LONGEST,
    PERIOD,
    RECENT,
    STEPS,
    HangWatch,
)
from vescale_ray.workers.messages import WorkerPhase


@pytest.mark.fault("W2")
def test_stuck_worker_is_hung_at_a_named_place_if_others_wait():
    play = Play()
    assert play.go(5) == {}
    hung = play.go(5, a="waits", b="stuck", c="waits")
    assert set(hung) == {"b"} and re.fullmatch(r"it stands at forward \(model\.py:7\) for 1\.[23] s, and the others wait for it", hung["b"])
    assert LEAST_S <= play.since < 1.5


@pytest.mark.fault("W2")
def test_silent_worker_is_hung():
    play = Play()
    play.go(1)
    hung = play.go(5, a="waits", b="waits", c="silent")
    assert set(hung) == {"c"} and "answered nothing for 1." in hung["c"]
    assert play.since < 1.5


def test_silent_worker_is_hung_even_if_no_peer_is_seen_waiting():
    """On an accelerator a thread that waits for a collective looks like one that computes."""
    play = Play()
    play.go(1)
    assert set(play.go(5, a="stuck", b="silent", c="stuck")) == {"b"}


@pytest.mark.parametrize("fixed", [None, 3.0])
def test_silent_worker_of_a_profiled_step_gets_more_time(fixed: float | None):
    """torch holds the interpreter lock for seconds while it ends a profile."""
    play = Play(fixed, steps=4)
    play.watch.patience_s, play.watch.slow_steps = 20.0, range(6, 8)
    play.go(1)
    for _ in range(2):
        play.done(0.2)
        assert play.go(19, a="waits", b="waits", c="silent") == {}
        play.go(1)
    play.done(0.2)
    assert set(play.go(5, a="waits", b="waits", c="silent")) == {"c"} and play.since < 4
    other = Play(fixed, steps=5)
    other.watch.patience_s, other.watch.slow_steps = 20.0, range(6, 8)
    other.go(1)
    assert set(other.go(30, a="waits", b="waits", c="silent")) == {"c"} and 20 <= other.since < 21


def test_two_workers_are_found_hung_at_once():
    play = Play()
    play.go(1)
    assert set(play.go(5, a="silent", b="waits", c="stuck")) == {"a", "c"}


@pytest.mark.parametrize(
    "acts",
    [
        {"a": "waits", "b": "waits", "c": "waits"},
        {"a": "stuck", "b": "stuck", "c": "stuck"},
        {"a": "silent", "b": "silent", "c": "silent"},
        {"a": "beats", "b": "silent", "c": "waits"},
        {"a": "waits", "b": "copies", "c": "waits"},
    ],
    ids=["all wait", "all compute", "all are silent", "one goes on", "one copies its shards"],
)
def test_no_worker_is_hung_if_none_is_awaited_or_one_progresses(acts):
    play = Play()
    play.go(1)
    assert play.go(60, **acts) == {}


def test_end_of_a_long_copy_starts_a_new_hang_bound():
    """If a worker answers between the end of its copy and its next beat, it must not look hung at once."""
    play = Play()
    play.go(1)
    assert play.go(30, a="waits", b="copies", c="waits") == {}
    assert set(play.go(5, a="waits", b="stuck", c="waits")) == {"b"} and LEAST_S <= play.since < 1.5


def test_lone_or_all_stuck_workers_get_the_collective_bound():
    play = Play(members=("a",))
    play.watch.patience_s = 20.0
    play.go(1)
    hung = play.go(60, a="stuck")
    assert set(hung) == {"a"} and 20.0 <= play.since < 20.3 and "others" not in hung["a"]
    play = Play()
    play.watch.patience_s = 20.0
    play.go(1)
    assert set(play.go(60, a="stuck", b="stuck", c="copies")) == {"a", "b"} and 40.0 <= play.since < 40.3
    play = Play(fixed=0.0)
    play.watch.patience_s = 20.0
    assert play.go(60, a="stuck", b="stuck", c="stuck") == {}


@pytest.mark.parametrize("act", ["stuck", "silent"])
def test_replaceable_lone_worker_has_the_normal_hang_bound(act):
    """Ending a worker that is replaced costs the steps since the checkpoint. Ending one without replacement costs the run, so it gets
    more time."""
    play = Play(members=("a",))
    play.watch.patience_s, play.watch.replaced = 20.0, True
    assert play.go(5) == {} and play.go(30, a="copies") == {}
    assert set(play.go(60, a=act)) == {"a"} and LEAST_S <= play.since < 1.5
    slow = Play(members=("a",), step=3.0)
    slow.watch.replaced = True
    slow.go(1)
    assert set(slow.go(60, a=act)) == {"a"} and FACTOR * 3.0 <= slow.since < 3 * 3.0
    many = Play()
    many.watch.replaced = True
    many.go(1)
    assert many.go(60, a=act, b=act, c=act) == {}


def test_slow_step_is_remembered_by_steps_and_not_by_reports():
    """With 1,000 ranks, the last 32 reports are of one step. A step of twice the time must not be taken for a hang."""
    bounds = set()
    for world in (1, 4, 1000):
        watch = HangWatch()
        watch.begin(TICKET, 3)
        members = [str(rank) for rank in range(world)]
        for step, seconds in enumerate([1.0] * 5 + [2.0] + [1.0] * (RECENT - 1), start=1):
            for _ in members:
                watch.stepped(TICKET, step, seconds)
        watch.verdict(members, 0.0)
        bounds.add(watch.bound_s)
        for _ in members:
            watch.stepped(TICKET, 100, 1.0)
        assert watch.bound_s == pytest.approx(FACTOR * 1.0)
    assert bounds == {FACTOR * 2.0}


def test_starved_worker_is_not_hung():
    """Other processes may take a worker's cores, as a test suite on two cores did. Ending the worker would lose its shard."""
    play = Play()
    play.go(1)
    assert play.go(5 * LEAST_S - 0.2, a="waits", b="starved", c="starved") == {}
    hung = play.go(1, a="waits", b="starved", c="starved")
    assert set(hung) == {"b", "c"} and "for 1.2 s" in hung["b"], "so long it had a processor, and made no beat"
    play = Play()
    play.go(1, b="starved")  # long ago
    assert set(play.go(5, a="waits", b="stuck", c="waits")) == {"b"} and LEAST_S <= play.since < 1.5
    play = Play()
    play.go(1)
    assert set(play.go(5, a="starved", b="silent", c="waits")) == set(), "who is slow may be the one that is waited for"
    assert set(play.go(5, a="waits", b="silent", c="waits")) == {"b"}


def test_starvation_reported_by_its_node_excuses_silence():
    play = Play()
    play.go(1)
    assert play.go(1, a="waits", b="waits", c="silent") == {}
    play.watch.starved("c", 0.7)
    play.watch.starved("c", 0.3)
    assert play.go(LEAST_S - 0.2, a="waits", b="waits", c="silent") == {}
    hung = play.go(0.5, a="waits", b="waits", c="silent")
    assert set(hung) == {"c"} and re.search(r"answered nothing for 1\.[23] s", hung["c"])
    play.go(1)
    assert set(play.go(5, a="waits", b="waits", c="silent")) == {"c"} and play.since < 2 * LEAST_S + 0.3, "that counts for one silence"


def test_repeated_hang_step_gets_a_doubled_bound_until_done():
    """The step may really take that long. If it is ended each time, it is never done."""
    play = Play(steps=20)
    play.go(1)
    bounds = []
    for _ in range(3):
        assert play.go(300, a="waits", b="stuck", c="waits")
        bounds.append(play.since)
        play.done(0.2, 0, begins_anew=True)
    first = max(FIRST_S, FIRST * FACTOR * 0.2)
    assert bounds == pytest.approx([LEAST_S, 2 * first, 4 * first], abs=0.2)
    play.done(4.0)
    play.done(0.2, steps=RECENT + 1)
    play.go(1)
    assert play.watch.bound_s == pytest.approx(AGAIN * 4.0), "what the step really took, and no more"
    play.done(0.2, steps=PERIOD)
    play.go(1)
    assert play.watch.bound_s == LEAST_S


def test_rare_slow_step_is_taken_for_a_hang_only_once():
    play = Play(steps=20)
    play.go(1)
    assert play.go(5, a="waits", b="stuck", c="waits")
    play.done(3.0, begins_anew=True)
    play.done(0.2, steps=60, begins_anew=True)  # the world changes in between
    play.done(0.2, steps=39)
    play.go(1)
    assert play.go(3.2, a="waits", b="stuck", c="waits") == {}
    assert set(play.go(1, a="waits", b="stuck", c="waits")) == {"b"}
    play = Play(steps=20)
    play.go(1)
    assert play.go(5, a="waits", b="silent", c="waits")
    play.done(3.0, begins_anew=True)
    play.done(0.2, steps=RECENT)
    play.go(1)
    assert play.watch.bound_s == LEAST_S, "silence tells nothing of what a step takes"


@pytest.mark.parametrize("where", [WorkerPhase.FORMING, WorkerPhase.TRAINING])
@pytest.mark.fault("W4")
def test_lone_worker_hung_before_any_step_is_found_at_last(where):
    """Without a limit, a worker that reads its checkpoint from a file system that does not answer would go on for ever."""
    play = Play(members=("a",), steps=0)
    play.watch.patience_s = 20.0
    assert play.go(5) == {} and play.go(3 * 20.0, phase=where, a="stuck") == {}
    hung = play.go(600, phase=where, a="stuck")
    assert set(hung) == {"a"} and 3 * 20.0 + play.since == pytest.approx(LONGEST * 20.0, abs=0.3)
    assert ("while its group forms" in hung["a"]) == (where is WorkerPhase.FORMING) and "forward (model.py:7)" in hung["a"]
    play = Play(members=("a",), steps=0)
    play.watch.patience_s = 20.0
    assert play.go(600, phase=where) == {}, "it makes beats: a checkpoint may take long to read"
    assert Play(fixed=0.0).watch.longest_s == float("inf")


@pytest.mark.parametrize("members", [("a",), MEMBERS], ids=["alone", "in company"])
def test_endless_unhurried_work_is_found_and_its_bound_doubles(members):
    """Nothing else ends an evaluation whose text is in a file system that does not answer, or code that is compiled for ever."""
    play = Play(members=members)
    play.watch.patience_s = 20.0
    bound = 2 * LONGEST * 20.0
    acts: Any = dict.fromkeys(members, "copies")
    assert play.go(1) == {} and play.go(bound - 2.0, **acts) == {}
    hung = play.go(5, **acts)
    assert set(hung) == set(members) and "forward (model.py:7)" in hung["a"]
    play.done(0.2, begins_anew=True)
    play.watch._patience = 2
    assert play.go(2 * bound - 2.0, **acts) == {} and set(play.go(5, **acts)) == set(members)


@pytest.mark.fault("W4")
def test_forming_hang_ends_the_stuck_worker_and_no_waiting_one():
    play = Play()
    play.watch.patience_s = 20.0
    play.go(1)
    assert play.go(LONGEST * 20.0 - 2.0, phase=WorkerPhase.FORMING, a="waits", b="stuck", c="waits") == {}
    assert set(play.go(5, phase=WorkerPhase.FORMING, a="waits", b="stuck", c="waits")) == {"b"}
    play.go(1)
    assert play.go(600, phase=WorkerPhase.FORMING, a="waits", b="waits", c="waits") == {}


@pytest.mark.parametrize("phase", [WorkerPhase.FORMING, WorkerPhase.TRAINING], ids=["as it builds its model", "in the first step"])
def test_hang_before_any_step_doubles_the_bound_each_time(phase: WorkerPhase) -> None:
    """If a model takes 6 min to build, a fixed limit of 5 min would end it each time, until the run has failed."""
    play = Play(steps=0)
    play.watch.patience_s = 20.0
    for times in (1, 2, 4):
        play.done(0.0, steps=0, begins_anew=True)
        play.go(1, phase=phase)
        assert set(play.go(2000, phase=phase, a="waits", b="stuck", c="waits")) == {"b"}
        assert play.since == pytest.approx(times * LONGEST * 20.0, abs=0.3)
    play.done(300.0, steps=STEPS)
    play.go(1)
    assert set(play.go(2000, a="waits", b="stuck", c="waits")) == {"b"} and play.since < FACTOR * 300.0 + 1.0, "it is done"


def test_report_marks_a_silent_workers_place_as_last_known() -> None:
    """A worker that is stopped, or holds the interpreter's lock, may have left the place that it reported two seconds before."""
    told: dict[str, Any] = {}
    reports = {worker: replace(IDLE, worker=worker, where="all_reduce (distributed_c10d.py:3252)") for worker in "ab"}
    stacks = {"a": "in: all-gather of body .., 2,688 bytes, 2 ranks\n\nThread 1", "b": 'File "model.py", line 7 in forward'}
    worker_group: Any = SimpleNamespace(
        report=reports.get, given=lambda worker: 0.001, silent=lambda seconds: ["b"], kill=lambda whom, cause: None
    )
    worker_group.stacks = lambda workers, seconds: {worker: stacks[worker] for worker in workers}
    journal = SimpleNamespace(report=lambda keep, name, text: told.update(text=text))
    log: Any = SimpleNamespace(stats=SimpleNamespace(step=0), journal=journal, folder=SimpleNamespace(write_hang=None))
    log.record = lambda name, **about: told.update(about)
    world: Any = SimpleNamespace(members=("a", "b"), ticket=TICKET)
    hang_report.end_hung(worker_group, log, world, {"b": "it is hung: it has answered nothing for 1.8 s"})
    first, second, *rest = told["text"].splitlines()
    place = "training, 0 steps, at all_reduce (distributed_c10d.py:3252)"
    assert first == f"rank 0 a: {place}, in all-gather of body .., 2,688 bytes, 2 ranks"
    assert second == f"rank 1 b: {place} when it last answered <- it is hung: it has answered nothing for 1.8 s"
    assert stacks["b"] in rest and told["where"]["b"].endswith("when it last answered") and told["ranks"] == {"b": 1}
