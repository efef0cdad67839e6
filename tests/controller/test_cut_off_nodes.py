"""The control loop when nodes don't reach each other: who is ended, excluded, awaited and admitted. No Ray."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.controller.stage import BEGAN, WORLD, Stage, WorkerGroup, node_of, report
from vescale_ray.controller.failures.budget import Cause
from vescale_ray.controller.failures.connectivity import (
    NOBODY,
    TRY_S,
    Admission,
    CutOff,
    Probe,
)
from vescale_ray.controller.failures.failure_detector import network
from vescale_ray.controller.protocol import Ending, Places, RunState
from vescale_ray.controller.worker_group.worker_group import WorkerGroup as RealWorkerGroup
from vescale_ray.workers.messages import FaultKind, Ticket, WorkerFault, WorkerInfo, WorkerPhase

pytestmark = pytest.mark.usefixtures("clock")


class Cut:
    """A stage of two workers on two nodes, and the controller's reaction to a break. b's node is cut off for as long as the test says."""

    def __init__(
        self, folder: Path, members: str = "ab", cut: str = "b", leavers: tuple[str, ...] = (), filled: bool = True, **elastic: Any
    ) -> None:
        self.worker_group = worker_group = WorkerGroup(*(report(w, WorkerPhase.TRAINING) for w in members))
        world = replace(WORLD, members=tuple(members))
        config = {"elastic_workers": len(members), "elastic_max_workers": 6}
        self.stage = Stage(worker_group, folder, leavers, filled=filled, state=RunState.RUNNING, world=world, config=config, **elastic)
        self.found: CutOff | None
        self.found = CutOff(dict.fromkeys(cut, "n2"), {"n2": ("n1",)}, {"n1": "10.0.0.1", "n2": "10.0.0.2"}, 3.0)
        worker_group.infos |= {"spare": replace(node_of("spare"), node="n2"), "other": replace(node_of("other"), node="n1")}
        self.detector = self.stage.executor.detector
        self.connectivity = self.stage.executor.connectivity
        self.connectivity.cut_off = lambda members, leavers, network: self.found
        self.detector.hangs = SimpleNamespace(stalled=lambda members, now: True, heard=lambda *about: None, forming_s=1e9, bound_s=1e9)

    def beside(self, *workers: str) -> None:
        """Add these workers beside the members. ``warming`` is not warm."""
        self.worker_group.reports |= {w: report(w, WorkerPhase.IDLE, Ticket(0, 0)) for w in workers if w != "warming"}
        self.worker_group.on_the_way = [w for w in workers if w == "warming"]

    @property
    def excluded(self) -> frozenset[str]:
        return self.stage.seen.avoided

    def acts(self) -> bool:
        before = len(self.stage.of("cut_off"))
        self.stage.executor.perform(self.detector.cut_off(self.stage.world, self.stage.seen))
        return len(self.stage.of("cut_off")) > before

    def fail(self, kind: FaultKind = FaultKind.PEER) -> Ending:
        """Let a collective fail on all workers at once, and return how the generation has ended."""
        fault = WorkerFault(kind, "gloo: no route to host")
        self.worker_group.reports |= {w: report(w, WorkerPhase.PARKED, fault=fault) for w in self.worker_group.reports}
        return self.stage.watch()


@pytest.mark.fault("N4")
def test_a_worker_that_is_cut_off_is_ended_and_its_node_excluded(tmp_path: Path) -> None:
    cut = Cut(tmp_path, replace_lost=True)
    cut.beside("spare", "warming")
    moved: list[bool] = []
    cut.connectivity.progressed = lambda: moved.append(True)
    cut.detector.hangs.stalled = lambda members, now: False
    assert not cut.acts() and moved
    cut.detector.hangs.stalled = lambda members, now: True
    assert cut.acts() and len(moved) == 1
    assert cut.excluded == {"n2"} and cut.worker_group.dismissed == ["spare"]
    (event,) = cut.stage.of("cut_off")
    assert event["workers"] == {"b": "its node (10.0.0.2) and 10.0.0.1 do not reach each other"} and event["unreached"] == {"n2": ["n1"]}
    assert set(cut.worker_group.ended) == {"b"} and not cut.acts(), "what follows from that is seen in a moment"


@pytest.mark.parametrize(
    ("elastic", "beside", "waits"),
    [
        ({"replace_lost": True}, "", False),
        ({"grow": True, "max_workers": 3}, "", False),
        ({"spares": 1}, "other", False),
        ({"spares": 1}, "spare", True),
        ({}, "", True),
        ({"replace_lost": True, "min_workers": 2}, "", True),
    ],
    ids=["replaced", "grows", "spare", "the spare is cut off too", "nobody comes", "too few would be left"],
)
def test_broken_network_is_awaited_if_no_replacement_comes(tmp_path: Path, elastic: dict[str, Any], beside: str, waits: bool) -> None:
    for lasts_s, acts in ((3.0, not waits), (9.9, not waits), (10.0, True)):
        cut = Cut(tmp_path / str(lasts_s), collective_timeout_s=20.0, **elastic)
        cut.beside(*([beside] if beside else []))
        assert cut.found is not None
        cut.found = replace(cut.found, lasts_s=lasts_s)
        assert cut.acts() == acts


def test_cut_off_worker_is_kept_if_its_end_would_end_the_run(tmp_path: Path) -> None:
    cut = Cut(tmp_path, min_workers=2, spares=1)  # the only spare is on the node that is cut off
    cut.beside("spare")
    assert cut.found is not None
    cut.found = replace(cut.found, lasts_s=1e6)
    assert not cut.acts() and not cut.excluded


def test_detector_ends_no_worker_if_most_of_a_run_is_cut_off(tmp_path: Path) -> None:
    cut = Cut(tmp_path, "abc", "bc", replace_lost=True)
    assert cut.found is not None
    cut.found = replace(cut.found, lasts_s=1e6)
    assert not cut.acts() and not cut.acts() and not cut.excluded
    assert len(cut.stage.of("network_broken")) == 1, "told of once"


@pytest.mark.parametrize("kind", [FaultKind.PEER, FaultKind.OWN])
@pytest.mark.fault("N4")
def test_a_cut_off_node_is_found_before_the_next_group_is_formed(tmp_path: Path, kind: FaultKind) -> None:
    """A refused connection or an unreachable host fails at once. After three such generations, the run would have failed."""
    cut = Cut(tmp_path, replace_lost=True)
    ending = cut.fail(kind)
    if kind is FaultKind.PEER:
        assert ending.living == ("a",) and set(ending.lost) == {"b"} and ending.causes == {"b": "node"}
        assert "do not reach each other" in ending.lost["b"]
        assert (cut.stage.budget.crashes, cut.stage.budget.nodes) == (0, 1)
    else:
        assert ending.living == ("a", "b") and not cut.worker_group.ended and cut.stage.budget.crashes == 1


def test_a_leaver_that_alone_is_cut_off_counts_as_a_lost_node(tmp_path: Path) -> None:
    cut = Cut(tmp_path, cut="l", leavers=("l",), filled=False)
    cut.worker_group.reports["l"] = report("l", WorkerPhase.GIVING)
    ending = cut.fail()
    assert ending.living == ("a", "b") and not ending.lost and not cut.stage.seen.leavers
    budget = cut.stage.budget
    assert (budget.crashes, budget.nodes) == (0, 1) and "do not reach each other" in budget.errors[-1]


def test_generation_ends_at_once_if_all_nodes_reach_each_other(tmp_path: Path) -> None:
    cut = Cut(tmp_path / "1")
    answers: list[CutOff | None] = [None, None, NOBODY]
    cut.connectivity.cut_off = lambda members, leavers, network: answers.pop(0)
    ending = cut.fail()
    assert ending.living == ("a", "b") and not answers and cut.worker_group.now < BEGAN + 1.0 and cut.stage.budget.crashes == 1
    # If a probe is never answered, the wait still ends.
    other = Cut(tmp_path / "2")
    other.found = None
    assert other.fail().living == ("a", "b") and 14.0 < other.worker_group.now - BEGAN < 25.0
    # A worker that dies meanwhile is lost.
    third = Cut(tmp_path / "3")
    third.found = None
    third.worker_group.each_round = lambda passed: (
        third.stage.lose("b", Cause.KILLED) if passed > 1.0 and "b" in third.worker_group.reports else None
    )
    ending = third.fail()
    assert ending.living == ("a",) and set(ending.lost) == {"b"} and third.worker_group.now < BEGAN + 2.0


class Steered:
    """The scaling of a run of two workers that wants three. The workers ``ready`` are warm."""

    def __init__(self, folder: Path, ready: str = "") -> None:
        self.worker_group = worker_group = WorkerGroup(
            *(report(w, WorkerPhase.TRAINING) for w in "ab"), *(report(w, WorkerPhase.IDLE) for w in ready)
        )
        worker_group.infos |= {w: node_of(w) for w in "abcdefg"}
        self.stage = Stage(worker_group, folder, filled=True, state=RunState.RUNNING, config={"elastic_max_workers": 6})
        self.scaling = self.stage.executor.scaling
        self.connectivity = self.stage.executor.connectivity
        self.requested: list[int] = []
        worker_group.request_places = self._request_places  # type: ignore[method-assign]

    def admits(self, admit: Callable[[Sequence[str]], Admission]) -> None:
        self.connectivity.admit = lambda ready, members, network: admit(ready)

    def admitted(self, *ready: str) -> list[str]:
        """The workers of ``ready`` that may join, in the next round."""
        self.stage.executor.collect()
        fine, do = self.scaling._admitted(list(ready), WORLD, self.stage.seen)
        self.stage.executor.perform(do)
        return list(fine)

    def cut_off(self) -> CutOff | None:
        """The members that are cut off, in the next round."""
        self.stage.executor.collect()
        found = self.connectivity.cut_off(WORLD.members, [], network(self.stage.seen, WORLD.members))
        self.stage.executor.perform([found] if isinstance(found, Probe) else [])
        return found if isinstance(found, CutOff) else None

    def gives_up(self) -> bool:
        """Return whether the policy finds that the workers on their way do not come."""
        durable = self.stage.seen.durable
        do = self.scaling._cannot_grow(WORLD, ["g"], durable.target, durable.reason, self.stage.seen)
        self.stage.executor.perform(do)
        return bool(do)

    def frees(self) -> None:
        self.stage.executor.perform(self.scaling.replace_overconstrained(self.stage.seen.avoided, self.stage.seen))

    def _request_places(self, count: int, avoid: Collection[str] = ()) -> None:
        self.requested.append(count)
        assert count == len(self.worker_group.places.requests) and not avoid


def test_workers_run_the_probes_and_their_answers_are_used(tmp_path: Path) -> None:
    table = Steered(tmp_path, "c")
    scaling, asked, answers = table.scaling, list[Any](), list[Any]()

    def ask(tries: Mapping[str, Collection[str]], wait_s: float) -> Any:
        asked.append(({worker: sorted(others) for worker, others in tries.items()}, wait_s))
        return SimpleNamespace(unreached=lambda: answers.pop() if answers else None)

    table.worker_group.ask_reachability = ask  # type: ignore[method-assign]
    for _ in range(3):
        assert table.admitted("c") == [] and scaling.untried == {"c"}
    assert asked == [({"a": ["c"], "b": ["c"], "c": ["a", "b"]}, TRY_S)], "once, as long as nobody answers"
    answers.append({"a": frozenset(), "b": frozenset(), "c": frozenset()})
    assert table.admitted("c") == [] and table.admitted("c") == ["c"] and not table.worker_group.dismissed
    for looks in (2, 3):
        for _ in range(3):
            assert table.cut_off() is None
        assert len(asked) == looks and asked[-1] == ({"a": ["b"], "b": ["a"]}, TRY_S)
        answers.append({"a": frozenset("b")})
        found = table.cut_off()
    assert found is not None and found.workers == {"b": "n-b"} and found.hosts == {"n-a": "host-a", "n-b": "host-b"}


def test_refused_joiners_go_and_their_node_is_excluded_once(tmp_path: Path) -> None:
    """After three refusals no more are hired."""
    table = Steered(tmp_path, "cde")
    scaling = table.scaling
    cut = CutOff({"c": "n2", "d": "n2"}, {"n2": ("n1",)}, {"n1": "10.0.0.1", "n2": "10.0.0.2"})
    table.admits(lambda ready: Admission((), cut))
    assert table.admitted("c", "d", "e") == [] and table.worker_group.dismissed == ["c", "d"]
    assert table.stage.executor.nodes._excluded["n2"][1] == 1 and table.stage.seen.avoided == {"n2"}
    assert [(event["worker"], event["node"]) for event in table.stage.of("joiner_refused")] == [("c", "n2"), ("d", "n2")]
    assert scaling.untried == {"c", "d", "e"}, "and e is the last to be taken, should one be needed now"
    assert len(scaling.refusals) == len(scaling.hire_failures) == scaling.failed_hires == 1, "the node"
    scaling.forget_hires()  # as each worker that becomes warm does
    assert len(scaling.refusals) == 1
    table.admits(lambda ready: Admission(tuple(ready)))
    assert table.admitted("e") == ["e"] and not scaling.untried and not scaling.refusals, "one is let in"
    scaling.refusals.append("of another")
    for fine in ([], ["e"]):
        table.admits(lambda ready, fine=fine: Admission(tuple(fine)))  # type: ignore[misc]
        assert table.admitted("e") == fine
        assert scaling.refusals == ["of another"], "a spare that is tried again, and does: else it was hired and refused for ever"
    table.admits(lambda ready: Admission(tuple(ready)))
    assert table.admitted("e", "f") and not scaling.refusals, "another"


def test_growth_goes_on_with_the_admitted_joiners(tmp_path: Path) -> None:
    """Four refusals are more than the limit. The growth must not be abandoned in each round without ever admitting the good joiner."""
    table = Steered(tmp_path, "cdefg")
    commands = table.stage.loop.commands
    commands.want(7, "growth")
    hosts = {f"n{n}": f"10.0.0.{n}" for n in range(1, 6)}
    table.admits(lambda ready: Admission(("g",), CutOff(dict.fromkeys("cdef", "n2"), {"n2": ("n1",)}, hosts)))
    table.admitted(*"cdefg")
    assert len(table.worker_group.dismissed) == 4 and not table.gives_up(), "all on one node: others are yet to be tried"
    for n in (3, 4, 5):
        cut = CutOff({"c": f"n{n}"}, {f"n{n}": ("n1",)}, hosts)
        table.admits(lambda ready, cut=cut: Admission(("g",), cut))  # type: ignore[misc]
        table.admitted("c", "g")
    assert table.gives_up() and commands.target == 3
    commands.want(7, "growth")
    assert not table.gives_up() and commands.target == 7, "it is acted on once"


def test_worker_barred_from_a_restored_node_is_hired_anew(tmp_path: Path) -> None:
    table = Steered(tmp_path)
    worker_group = table.worker_group
    avoided: list[Any] = []
    worker_group.overconstrained = lambda nodes: ["new1", "new2"] if not nodes else []  # type: ignore[method-assign, assignment]
    worker_group.hire = lambda nodes=(): avoided.append(nodes)  # type: ignore[method-assign, assignment]
    table.stage.executor.nodes.exclude("n2")
    table.frees()
    assert not table.requested and not avoided, "nothing is asked while all are where they may be"
    worker_group.now += 1e9
    table.frees()
    assert len(table.requested) == 1 and not avoided, "of none it is known that it has no place"
    worker_group.places = Places((None,), frozenset({"new2", "new3"}))
    table.frees()
    assert worker_group.dismissed == ["new2"] and avoided == [frozenset()]


def test_unplaced_hire_of_an_earlier_controller_is_hired_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The list of nodes that the worker must avoid was lost with that controller. The worker would wait for another node to the time
    limit."""
    worker_group = RealWorkerGroup(None, call_s=1.0, epoch=2)
    call = SimpleNamespace(remote=lambda *about: None)
    handle = SimpleNamespace(lifeline=call, hello=call)
    monkeypatch.setattr(worker_group, "_ask_supervisor", lambda method, epoch: {"w0": handle, "w1": handle})
    worker_group.adopt({"w0": WorkerInfo("w0", 1, 1, "n1", "host", "cpu", 1.0)})
    for avoided in ((), ("n2",)):
        assert worker_group.overconstrained(avoided) == ["w1"], "and w0 is warm"
