"""Deadlines for workers that are still in a generation that is over: values in, decisions out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from tests.controller.stage import WORLD
from vescale_ray.config import ElasticSection
from vescale_ray.controller.failures.exit_deadlines import FORM_S, ExitDeadlines
from vescale_ray.controller.failures.hang import FIRST_S
from vescale_ray.controller.protocol import Bounds
from vescale_ray.workers.messages import Ticket, WorkerPhase, WorkerReport

PARK_S, COLLECTIVE_S, STEP = Bounds().park, 20.0, 41


@dataclass
class Scene:
    """Three workers: ``a`` and ``b`` are out of the generation, ``c`` is as its report says. ``complete``: ``a`` and ``b`` hold the
    newest step."""

    report: WorkerReport | None
    elastic: dict[str, Any] = field(default_factory=dict)
    complete: bool = True
    silent: Sequence[str] = ()
    ending: Sequence[str] = ()
    spares: int = 0
    last: float | None = 0.5
    longest: float = 0.5

    def policy(self) -> ExitDeadlines:
        return ExitDeadlines(ElasticSection(**{"workers": 3, "collective_timeout_s": COLLECTIVE_S, **self.elastic}), Bounds())

    def late(self, since: float, inside: str = "c", out: str = "ab", policy: ExitDeadlines | None = None) -> dict[str, str]:
        spares = [f"s{i}" for i in range(self.spares)]
        workers = SimpleNamespace(report=lambda w: self.report, ending=self.ending.__contains__, ready=lambda: spares)
        workers.silent = lambda seconds: self.silent
        stats = SimpleNamespace(steps=SimpleNamespace(last_seconds=self.last, longest=self.longest))
        seen: Any = SimpleNamespace(workers=workers, stats=stats, outside=lambda members: spares)
        return (policy or self.policy()).late(WORLD, since, inside, len(out), seen, complete=self.complete)

    def ended(self, inside: str = "c", out: str = "ab") -> float:
        """Seconds after which the worker is ended, to 0.1 s."""
        policy = self.policy()
        at = next((tenth / 10 for tenth in range(1000) if self.late(tenth / 10, inside, out, policy)), float("inf"))
        assert all(self.late(at + later, inside, out, policy) for later in (0.1, 1.0, 100.0)) or at == float("inf")
        return at


def report(phase: WorkerPhase, waiting: bool = False, in_long_work: bool = False) -> WorkerReport:
    return WorkerReport("c", Ticket(3, 1), phase, STEP, (), (), None, 0, waiting=waiting, in_long_work=in_long_work)


AFTER = 0.1
WAITS = report(WorkerPhase.TRAINING, waiting=True)


def test_computing_or_silent_worker_has_the_step_bound_to_exit() -> None:
    assert Scene(report(WorkerPhase.TRAINING)).ended() == pytest.approx(PARK_S + AFTER)
    assert Scene(WAITS, silent=["c"]).ended() == pytest.approx(PARK_S + AFTER), "what it said before it fell silent is old"
    assert Scene(None).ended() == pytest.approx(PARK_S + AFTER)
    for phase in (WorkerPhase.FORMING, WorkerPhase.GIVING):
        assert Scene(report(phase)).ended() == pytest.approx(2 * FORM_S + AFTER)
        assert Scene(report(phase), silent=["c"]).ended() == pytest.approx(FIRST_S + AFTER), "it is not the forming that it waits for"


def test_copying_worker_gets_the_collective_bound_unless_silent() -> None:
    """Copies of one size take a different time on each machine, so the others may have been out for long."""
    copies = report(WorkerPhase.TRAINING, in_long_work=True)
    assert Scene(copies).ended() == pytest.approx(COLLECTIVE_S + PARK_S + AFTER)
    assert Scene(copies, {"replace_lost": True}).ended() == pytest.approx(COLLECTIVE_S + PARK_S + AFTER), "it does not wait for a rank"
    assert Scene(copies, silent=["c"]).ended() == pytest.approx(PARK_S + AFTER)


def test_saving_worker_gets_the_save_bound_and_is_ended_once() -> None:
    assert Scene(report(WorkerPhase.TRAINING), ending=["c"]).ended() == float("inf")
    for silent in ([], ["c"]):
        scene = Scene(report(WorkerPhase.SAVING), silent=silent)
        assert not scene.late(Bounds().save) and scene.late(Bounds().save + AFTER)


def test_waiting_worker_gets_the_collective_bound_to_exit() -> None:
    assert Scene(WAITS).ended() == pytest.approx(COLLECTIVE_S + PARK_S + AFTER)
    forming = report(WorkerPhase.FORMING, waiting=True)
    assert Scene(forming).ended() == pytest.approx(2 * FORM_S + AFTER), "the two bounds count side by side"
    assert Scene(forming, {"collective_timeout_s": 40.0}).ended() == pytest.approx(40.0 + PARK_S + AFTER)


@pytest.mark.parametrize("elastic", [{"replace_lost": True}, {"grow": True}, {}], ids=["replaced", "grows", "a spare"])
def test_waiting_worker_is_ended_early_if_replaced_without_loss(elastic: dict[str, Any]) -> None:
    spares = 0 if elastic else 1
    early = pytest.approx(PARK_S + AFTER)
    assert Scene(WAITS, elastic, spares=spares).ended() == early
    assert "another takes its place" in Scene(WAITS, elastic, spares=spares).late(PARK_S + 1)["c"]
    late = pytest.approx(COLLECTIVE_S + PARK_S + AFTER)
    assert Scene(WAITS, elastic, complete=False, spares=spares).ended() == late, "its shard is needed"
    assert Scene(WAITS, {**elastic, "min_workers": 3}, spares=spares).ended() == late, "the others are too few"


@pytest.mark.fault("W11")
def test_longest_recent_step_extends_the_exit_deadline() -> None:
    """If most steps take 0.5 s and every tenth 10 s, a deadline by the last step ends all survivors in a third of losses."""
    assert Scene(report(WorkerPhase.TRAINING), longest=10.0).ended() == pytest.approx(15.0 + AFTER)
    assert Scene(report(WorkerPhase.TRAINING), longest=1.5).ended() == pytest.approx(PARK_S + AFTER)


@pytest.mark.fault("W11")
def test_survivors_that_all_compute_are_not_taken_for_hung() -> None:
    """The survivors compute for longer than any step so far. If all are ended at once, what is left of the lost one's state goes with
    them."""
    patient = pytest.approx(COLLECTIVE_S + PARK_S + AFTER)
    early = pytest.approx(PARK_S + AFTER)
    busy = Scene(report(WorkerPhase.TRAINING))
    assert busy.ended("abc", "") == patient and busy.ended("c", "") == patient
    assert "after its generation was over" in busy.late(60.0, "c", "")["c"]
    assert busy.ended("bc", "a") == early, "another has left"
    assert Scene(WAITS).ended("abc", "") == patient and Scene(None).ended("abc", "") == early, "nobody has answered anything"
    # A silent worker hangs, and the others may still compute. A worker that is ended already says nothing about them.
    assert set(Scene(report(WorkerPhase.TRAINING), silent=["b"]).late(PARK_S + AFTER, "abc", "")) == {"b"}
    assert Scene(report(WorkerPhase.TRAINING), silent=["b"], ending=["b"]).ended("abc", "") == patient


def test_first_exit_restarts_the_deadline_of_the_others() -> None:
    """If the first worker leaves after 12 s, the others must not be ended at once because their first 3 s are over."""
    busy = Scene(report(WorkerPhase.TRAINING))
    policy = busy.policy()
    assert not any(busy.late(tenth / 10, "abc", "", policy) for tenth in range(120))
    left = next(tenth / 10 for tenth in range(120, 1000) if busy.late(tenth / 10, "bc", "a", policy))
    assert left == pytest.approx(11.9 + PARK_S + AFTER)
    # The next generation does not remember the exit.
    at = next(tenth / 10 for tenth in range(1000) if busy.late(tenth / 10, "bc", "a", policy))
    assert at == pytest.approx(PARK_S + AFTER)


def test_the_duration_of_the_last_step_counts_three_times() -> None:
    assert Scene(report(WorkerPhase.TRAINING), last=4.0).ended() == pytest.approx(12.0 + AFTER)
    assert Scene(WAITS, last=4.0).ended() == pytest.approx(COLLECTIVE_S + 12.0 + AFTER)
    for phase in (WorkerPhase.FORMING, WorkerPhase.GIVING):
        assert Scene(report(phase), last=None).ended() == pytest.approx(2 * FORM_S + AFTER)
