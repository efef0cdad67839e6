"""Hung workers are found from reports alone: the worker that the others wait for, and none if that can't be told."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from vescale_ray.controller.failures import hang_report
from vescale_ray.controller.failures.hang import (
    AGAIN,
    FACTOR,
    FIRST,
    FIRST_S,
    LEAST_S,
    LONGEST,
    OWN_GAP_S,
    PERIOD,
    RECENT,
    STEPS,
    HangWatch,
)
from vescale_ray.controller.worker_group.clocks import GAP_S, AwakeClock
from vescale_ray.controller.worker_group.member import LATE_HALF_S, POLL_WAIT_S, Member
from vescale_ray.controller.worker_group.starvation import LOOKS, SLOWER, SLOWEST_S, lateness
from vescale_ray.controller.worker_group.worker_group import WorkerGroup
from vescale_ray.controller.worker_group.worker_news import Told
from vescale_ray.workers.messages import Ticket, WorkerInfo, WorkerPhase, WorkerReport

TICKET = Ticket(3, 1)
MEMBERS = ("a", "b", "c")
IDLE = WorkerReport("", TICKET, WorkerPhase.TRAINING, 0, (), (), None, 0, where="forward (model.py:7)")


class Play:
    """Three workers that report every 0.1 s. Each makes a beat unless it is told to be ``stuck``, to wait or to be silent. A ``starved``
    one has a processor for a fifth of the time."""

    def __init__(self, fixed: float | None = None, step: float = 0.2, steps: int = STEPS, members: tuple[str, ...] = MEMBERS) -> None:
        self.watch, self.now, self.beats, self.members = HangWatch(fixed), 100.0, dict.fromkeys(members, 0), members
        self.starved_s, self.completed = dict.fromkeys(members, 0.0), steps
        self.ticket = TICKET
        self.watch.begin(TICKET, len(members))
        for number in range(steps * len(members)):
            self.watch.stepped(TICKET, 1 + number // len(members), step)

    def done(self, step: float, steps: int = 1, begins_anew: bool = False) -> None:
        """Complete the next ``steps`` steps, in ``step`` seconds each; in a new generation if ``begins_anew``."""
        if begins_anew:
            self.ticket = Ticket(self.ticket.generation + 1, 1)
            self.watch.begin(self.ticket, len(self.members))
        for _ in range(steps):
            self.completed += 1
            for _ in self.members:
                self.watch.stepped(self.ticket, self.completed, step)

    def go(self, seconds: float, tick: float = 0.1, phase: WorkerPhase = WorkerPhase.TRAINING, **acts: str) -> dict[str, str]:
        """The first verdict within ``seconds``; ``since`` is the time until then."""
        begin = self.now
        while self.now < begin + seconds:
            self.now += tick
            for worker in self.members:
                act = acts.get(worker, "beats")
                self.beats[worker] += act == "beats"
                self.starved_s[worker] += 0.8 * tick * (act == "starved")
                if act != "silent":
                    figures: Any = {"completed": self.completed, "beats": self.beats[worker], "starved_s": self.starved_s[worker]}
                    how: Any = {"ticket": self.ticket, "phase": phase, "waiting": act == "waits", "in_long_work": act == "copies"}
                    self.watch.heard(replace(IDLE, worker=worker, **figures, **how), self.now)
            hung = dict(self.watch.verdict(self.members, self.now))
            if hung:
                self.watch.ended(hung)
                self.since = self.now - begin
                return hung
        return {}


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


def test_hang_at_a_controller_kill_is_found_by_past_step_times():
    play = Play(steps=0)
    play.watch.expect(3.0)
    play.watch.begin(TICKET, 3)
    assert set(play.go(60, a="waits", b="stuck", c="waits")) == {"b"} and play.since == pytest.approx(FIRST * FACTOR * 3.0, abs=0.3)


def test_slow_steps_are_given_their_time():
    play = Play(step=3.0)
    play.go(1)
    assert play.watch.bound_s == pytest.approx(FACTOR * 3.0)
    assert play.go(20, a="waits", b="stuck", c="waits") and FACTOR * 3.0 <= play.since < 3 * 3.0


def test_the_first_steps_and_other_phases_have_other_bounds():
    play = Play(steps=0)
    assert play.go(60, a="waits", b="stuck", c="waits") == {}, "nobody knows how long a step takes"
    play = Play(steps=STEPS - 1)
    assert play.go(30, a="waits", b="stuck", c="waits") and FIRST_S <= play.since < FIRST_S + 0.3
    play = Play(steps=STEPS - 1, step=4.0)
    assert play.go(60, a="waits", b="stuck", c="waits") and FIRST * FACTOR * 4.0 <= play.since < FIRST * FACTOR * 4.0 + 0.3
    play = Play()
    play.go(1)
    assert play.go(30, phase=WorkerPhase.FORMING, a="waits", b="stuck", c="waits") == {}


@pytest.mark.fault("C2")
def test_held_up_controller_listens_before_it_accuses_a_worker():
    play = Play()
    play.go(1)
    play.now += 30  # a suspended machine: no worker was heard, and none ran
    assert play.go(LEAST_S - 0.1, a="waits", b="stuck", c="waits") == {}
    assert play.go(5, a="waits", b="stuck", c="waits")
    play = Play()
    play.go(1)
    assert play.go(60, tick=OWN_GAP_S + 0.1, a="waits", b="stuck", c="waits") == {}, "so slow a controller can't tell"
    play = Play(fixed=7.0)
    play.go(1)
    assert play.go(6.5, a="waits", b="stuck", c="waits") == {}
    play.now += 30
    assert play.go(LEAST_S - 0.1, a="waits", b="stuck", c="waits") == {}, "it may have gone on, and its answer be on its way"
    assert play.go(10) == {}, "it has"


@pytest.mark.parametrize("members", [("a",), MEMBERS], ids=["alone", "in company"])
def test_often_held_up_controller_still_finds_a_hang(members: tuple[str, ...]) -> None:
    """A busy machine holds the controller up every minute. If that restarted the time, a hang with a limit of minutes would never be
    found."""
    play = Play(members=members, steps=0)
    play.watch.patience_s = 20.0
    acts: Any = dict.fromkeys(members, "stuck")
    play.go(1)
    for _ in range(3):
        assert play.go(60, **acts) == {}
        play.now += OWN_GAP_S + 0.1
    assert set(play.go(LONGEST * 20.0 - 180.0 + 2.0, **acts)) == set(members)


def test_fixed_bound_is_used_and_zero_disables_hang_detection():
    play = Play(fixed=7.0)
    play.go(1)
    assert play.go(20, a="waits", b="stuck", c="waits") and 7.0 <= play.since < 7.3
    play = Play(fixed=0.0)
    play.go(1)
    assert play.go(60, a="waits", b="stuck", c="waits") == {}


def test_reports_of_another_generation_count_for_nothing():
    play = Play()
    play.go(1)
    play.watch.begin(Ticket(4, 1), 3)
    assert play.go(30, a="waits", b="stuck", c="waits") == {}


def test_slow_steps_of_a_smaller_world_do_not_raise_the_bound():
    play = Play(step=3.0, steps=20)
    play.watch.begin(Ticket(4, 1), 4)
    assert play.watch.bound_s == FIRST * FACTOR * 3.0, "of its own steps nothing is known"
    for number in range(STEPS * len(MEMBERS)):
        play.watch.stepped(Ticket(4, 1), number // len(MEMBERS), 0.5)
    play.watch.verdict(MEMBERS, play.now)
    assert play.watch.bound_s == LEAST_S


@pytest.mark.parametrize("first", [0, 7])
def test_wait_for_peers_in_the_first_step_is_not_step_time(first: int) -> None:
    """If the wait counted, a joiner that fills for a minute would set the bound of a minute's step, for all remembered steps."""
    watch = HangWatch()
    watch.begin(TICKET, 3)
    for _ in MEMBERS:
        watch.stepped(TICKET, first, 60.8, alone=60.0)
    assert watch.bound_s == pytest.approx(max(FIRST_S, FIRST * FACTOR * 0.8))
    for number in range(STEPS * len(MEMBERS)):
        watch.stepped(TICKET, first + 1 + number // len(MEMBERS), 3.0, alone=2.5)
    watch.verdict(MEMBERS, 100.0)
    assert watch.bound_s == pytest.approx(FACTOR * 3.0), "where one is slower than the others, all take as long as that one"
    watch.begin(Ticket(TICKET.generation + 1, 1), 3)
    watch.stepped(Ticket(TICKET.generation + 1, 1), first + 9, 61.0, alone=60.0)
    assert watch.bound_s == pytest.approx(max(FIRST_S, FIRST * FACTOR * 1.0)), "each generation has a first step"


def test_forming_bound_is_that_of_the_first_steps():
    assert HangWatch().forming_s == FIRST_S, "also before anybody has seen a step"
    slow = Play(step=4.0)
    assert slow.watch.forming_s == FIRST * FACTOR * 4.0
    slow.watch.begin(Ticket(4, 1), 3)
    assert slow.watch.forming_s == FIRST * FACTOR * 4.0
    assert HangWatch(fixed=7.0).forming_s == 7.0 and HangWatch(fixed=0.0).forming_s == float("inf")


def test_silence_does_not_count_while_the_controller_is_stopped():
    """A controller that was stopped for longer than the bound has answers that it has not read. It must not end their workers."""
    now = [100.0]
    worker_group = WorkerGroup(supervisor=None, call_s=1.0, epoch=1)
    worker_group.clock = AwakeClock(lambda: now[0])
    worker_group.members["a"] = Member("a", handle=None, hired=0.0, poll=object(), owes=True, owes_since=worker_group.clock())
    now[0] += 60.0
    assert not worker_group.silent(1.0)

    def told() -> frozenset[str]:
        now[0] += 0.1
        return worker_group.silent(1.0)

    assert next(look for look in range(100) if told() == {"a"}) == pytest.approx((1.0 + POLL_WAIT_S - GAP_S) / 0.1, abs=1)


def test_lateness_of_other_workers_on_a_node_excuses_one(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("vescale_ray.controller.worker_group.worker_group.time.monotonic", lambda: now[0])
    members = {}
    for worker, node, late in (("a", "1", 0.0), ("b", "1", 0.8), ("c", "1", 0.2), ("d", "2", 3.0)):
        info = WorkerInfo(worker, 1, 1, node, "host", "cpu", 1.0)
        members[worker] = Member(worker, handle=None, hired=0.0, info=info, heard=now[0], late_s=late)
    told = {accused: lateness(members, "2" if accused == "d" else "1", accused) for accused in ("a", "b", "ab", "abc", "d")}
    assert told == {"a": 0.8, "b": 0.2, "ab": 0.2, "abc": 0.0, "d": 0.0}
    now[0] += LATE_HALF_S
    assert lateness(members, "1", "a") == pytest.approx(0.4), "a moment's lateness is soon forgotten"


class Nodes:
    """A supervisor whose nodes report their threads' lost time as the test says, each after a delay. None: the node does not answer."""

    def __init__(self, now: list[float], told: dict[str, tuple[float, dict[str, float] | None]]) -> None:
        self.now, self.told, self.asked = now, told, 0
        self.starved = SimpleNamespace(remote=self._starved)

    def _starved(self, node: str, infos: list[WorkerInfo]) -> tuple[float, tuple[float, ...] | None]:
        self.asked += 1
        after, told = self.told[node]
        return self.now[0] + after, tuple(told[info.worker] for info in infos) if told else None

    def wait(self, refs: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        first = min(refs, key=lambda ref: ref[0])
        self.now[0] = max(self.now[0], first[0])
        return [first], [ref for ref in refs if ref is not first]


def test_silent_workers_are_credited_the_time_their_node_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    nodes = Nodes(now, {"1": (0.01, {"a": 7.5, "b": 3.0}), "2": (0.3, {"c": 0.0}), "3": (1.0, None), "4": (2.0, {"e": 0.0})})
    monkeypatch.setattr("vescale_ray.controller.worker_group.worker_group.time.monotonic", lambda: now[0])
    monkeypatch.setattr("vescale_ray.controller.worker_group.worker_group.ray.wait", nodes.wait)
    monkeypatch.setattr("vescale_ray.controller.worker_group.worker_group.ray.get", lambda ref, timeout=None: ref[1])
    worker_group = WorkerGroup(nodes, call_s=5.0, epoch=1)
    for worker, node in (("a", "1"), ("b", "1"), ("c", "2"), ("d", "3"), ("e", "4"), ("f", "1")):
        info = WorkerInfo(worker, 1, 1, node, "host", "cpu", 1.0)
        report = replace(IDLE, worker=worker, starved_s=3.0)
        worker_group.members[worker] = Member(worker, handle=None, hired=0.0, info=info, heard=now[0], report=report, owes=worker != "f")
    given = worker_group.starved("abcdef")
    assert given == pytest.approx({"a": 4.5, "c": SLOWER * 0.3, "e": SLOWEST_S}) and nodes.asked == 4
    now[0] += 1.0
    nodes.told["2"] = (0.4, {"c": 0.0})
    assert worker_group.starved("ac") == pytest.approx({"c": SLOWER * 0.1}), "only what has come since"
    for number in range(LOOKS + 1):
        info = WorkerInfo(f"n{number}", 1, 1, f"n{number}", "host", "cpu", 1.0)
        worker_group.members[f"n{number}"] = Member(f"n{number}", handle=None, hired=0.0, info=info, report=report, owes=True)
    asked = nodes.asked
    assert worker_group.starved([f"n{number}" for number in range(LOOKS + 1)]) == {} and nodes.asked == asked, "a rack, and no slow machine"


class Shelf:
    """A worker that answers at once when it is asked for the outline. None: it does not know the outline."""

    def __init__(self, outline: object | None) -> None:
        self.asked, self.outline = 0, outline
        self.outlined = SimpleNamespace(remote=self._told)

    def _told(self) -> tuple[object | None]:
        self.asked += 1
        return (self.outline,)  # references are compared by value, like Ray's


def test_worker_without_the_outline_is_not_asked_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller would ask the first worker again as fast as it answers, and never the one that knows."""
    now = [100.0]
    monkeypatch.setattr("vescale_ray.controller.worker_group.worker_group.time.monotonic", lambda: now[0])
    monkeypatch.setattr("vescale_ray.controller.worker_group.worker_group.ray.get", lambda ref: ref[0])
    worker_group = WorkerGroup(supervisor=None, call_s=1.0, epoch=1)
    joined, trains = Shelf(None), Shelf("outline")
    for worker, handle in (("a", joined), ("b", trains)):
        worker_group.members[worker] = Member(worker, handle=handle, hired=0.0, report=replace(IDLE, worker=worker))

    def ask() -> list[object]:
        worker_group.ask_outline("ab")
        assert worker_group.asking_outline
        worker_group.ask_outline("ab")  # one at a time
        (member,) = (m for m in worker_group.members.values() if m.outline is not None)
        (news,) = worker_group._receive(member, member.outline)
        assert isinstance(news, Told)
        return [member.worker, news.outlined]

    assert ask() == ["a", None] and ask() == ["b", "outline"] and (joined.asked, trains.asked) == (1, 1)
    trains.outline = None
    assert ask() == ["b", None]
    worker_group.ask_outline("ab")
    assert not worker_group.asking_outline, "nobody knows it: nobody is waited for"
    now[0] += POLL_WAIT_S
    joined.outline = "outline"
    assert ask() == ["a", "outline"]


def test_periodic_slow_step_is_known_after_its_third_time():
    """The last eight steps don't contain the slow one. If a node takes longer for it than the others, its workers must not be ended each
    time."""
    play = Play()
    play.done(0.2, steps=9)
    play.done(6.0)
    play.done(0.2, steps=RECENT + 1)
    play.done(6.0)
    play.done(0.2, steps=RECENT + 1)
    assert play.go(0.2) == {} and play.watch.bound_s == LEAST_S, "twice is a disturbance"
    play.done(6.0)
    play.done(0.2, steps=RECENT + 1)
    assert play.go(6.5, a="waits", b="stuck", c="waits") == {} and play.watch.bound_s == pytest.approx(AGAIN * 6.0)
    play.watch.expect(0.2)
    play.done(0.2, begins_anew=True, steps=9)
    assert play.go(0.2) == {} and play.watch.bound_s == pytest.approx(AGAIN * 6.0), "nor is it forgotten in a change"
    later = Play()
    later.watch.expect(0.2, [(3, 6.0 if k % 10 == 0 else 0.2) for k in range(40)])
    assert later.go(0.2) == {} and later.watch.bound_s == pytest.approx(AGAIN * 6.0), "nor by who takes the watch over"
    play.completed = 5
    play.done(0.2, steps=PERIOD + 1, begins_anew=True)
    play.go(0.2)
    assert play.watch.bound_s == LEAST_S, "also where they are done again"


def test_first_step_of_a_generation_does_not_set_the_bound():
    play = Play(step=0.2)
    for _ in range(3):
        play.done(4.0, begins_anew=True)
        play.done(0.2, steps=RECENT + 1)
    play.go(0.2)
    assert play.watch.bound_s == LEAST_S
