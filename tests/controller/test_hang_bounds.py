"""Time limits of the search for hung workers: from step times, per phase, and with credit for lost time."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.controller.played_reports import IDLE, MEMBERS, TICKET, Play
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
from vescale_ray.workers.messages import Ticket, WorkerInfo, WorkerPhase


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
