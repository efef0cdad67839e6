"""Decisions about nodes that don't reach each other: the nodes a run gives up, and the workers it admits. No Ray; the test gives the
answers."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.controller.stage import BEGAN, TICKET, WORLD, Stage, WorkerGroup, node_of, report
from vescale_ray.config import ElasticSection
from vescale_ray.controller.failures.budget import Cause
from vescale_ray.controller.failures.connectivity import (
    GAP_S,
    NOBODY,
    PROVEN_S,
    TRY_S,
    Admission,
    Connectivity,
    CutOff,
    Network,
    Probe,
    fewest,
)
from vescale_ray.controller.failures.failure_detector import network
from vescale_ray.controller.failures.hang import FIRST_S, LEAST_S, HangWatch
from vescale_ray.controller.protocol import Bounds, Ending, Event, Places, RunState
from vescale_ray.controller.scaling.nodes import EXCLUDED_S, FORGET_S, LONGEST_EXCLUDED_S, Nodes
from vescale_ray.controller.worker_group.worker_group import WorkerGroup as RealWorkerGroup
from vescale_ray.workers.messages import FaultKind, Ticket, WorkerFault, WorkerInfo, WorkerPhase

pytestmark = pytest.mark.usefixtures("clock")


class Hosts:
    """Workers named by node and number, such as ``a1``, and the pairs of nodes that don't reach each other."""

    def __init__(self, broken: str = "") -> None:
        self.broken = {frozenset(pair) for pair in broken.split()}
        self.mute: set[str] = set()
        self.asked: list[dict[str, tuple[str, ...]]] = []
        self.now = 100.0
        self.doorless: set[str] = set()
        self.policy = Connectivity(ElasticSection(workers=2))
        self.probe = Probe({})

    def network(self, workers: Collection[str]) -> Network:
        address = {w: "" if w in self.doorless else "h:1" for w in workers}
        infos = {w: WorkerInfo(w, 1, 1, w[0], f"host-{w[0]}", "cpu", 1.0, address=address[w]) for w in workers}
        return Network(infos, self.mute, self.now)

    def asks(self, probe: Probe) -> None:
        self.asked.append({worker: tuple(sorted(others)) for worker, others in probe.tries.items()})
        self.probe = probe

    def answer(self) -> None:
        found = {w: [o for o in others if frozenset((w[0], o[0])) in self.broken] for w, others in self.probe.tries.items()}
        self.policy.answered(self.probe, {w: others for w, others in found.items() if w not in self.mute})

    def look(self, members: Sequence[str], leavers: Sequence[str] = ()) -> CutOff | None:
        found = self.policy.cut_off(members, leavers, self.network([*members, *leavers]))
        if isinstance(found, Probe):
            self.asks(found)
            return None
        return found

    def admitted(self, joiners: Sequence[str], members: Sequence[str]) -> tuple[list[str], CutOff]:
        admission = self.policy.admit(joiners, members, self.network([*members, *joiners]))
        if admission.probe is not None:
            self.asks(admission.probe)
        return list(admission.admitted), admission.refused

    def cut_off(self, members: str, looks: int = 2, leavers: str = "") -> CutOff | None:
        """The result of ``looks`` probes in succession."""
        found: CutOff | None = None
        for _ in range(looks):
            for _ in range(2):
                assert self.look(members.split(), leavers.split()) is None, "it has just been asked, and nobody has answered"
            self.answer()
            self.now += TRY_S
            found = self.look(members.split(), leavers.split())
        return found


def test_unreached_node_is_cut_off_whole_after_two_probes() -> None:
    hosts = Hosts("ac bc")
    assert hosts.cut_off("a1 a2 b1 b2 c1 c2", looks=1) is None, "a network may stumble"
    found = hosts.cut_off("a1 a2 b1 b2 c1 c2", looks=1)
    names = {"a": "host-a", "b": "host-b", "c": "host-c"}
    assert found == CutOff({"c1": "c", "c2": "c"}, {"c": ("a", "b")}, names, 2 * TRY_S)
    assert found.why("c") == "its node (host-c) and host-a, host-b do not reach each other"
    assert hosts.asked == 2 * [{"a1": ("b1", "c1"), "b1": ("a1", "c1"), "c1": ("a1", "b1")}], "one of each node tries"
    # Until the controller acts on the break, it is probed again at once, and its known duration grows.
    for looks in (3, 4, 5):
        found = hosts.cut_off("a1 a2 b1 b2 c1 c2", looks=1)
        assert found is not None and set(found.workers) == {"c1", "c2"} and found.lasts_s == looks * TRY_S
    # Only breaks that every probe has found count.
    hosts.broken = {frozenset("bc")}
    found = hosts.cut_off("a1 a2 b1 b2 c1 c2", looks=1)
    assert found is not None and found.unreached == {"c": ("b",)} and found.lasts_s == 6 * TRY_S
    hosts.broken = set()
    assert hosts.cut_off("a1 a2 b1 b2 c1 c2", looks=1) == NOBODY


def test_unconfirmed_break_between_nodes_counts_for_nothing() -> None:
    hosts = Hosts("ac")
    hosts.cut_off("a1 b1 c1", looks=1)
    hosts.broken = {frozenset("ab")}
    assert hosts.cut_off("a1 b1 c1", looks=1) is None
    hosts.broken = set()
    assert hosts.cut_off("a1 b1 c1", looks=1) == NOBODY
    hosts.broken = {frozenset("ab")}
    hosts.now += 10 * GAP_S
    assert hosts.cut_off("a1 b1 c1", looks=1) is None
    found = hosts.cut_off("a1 b1 c1", looks=1)
    assert found is not None and set(found.workers) == {"b1"} and found.lasts_s == 2 * TRY_S
    # If the members have changed or made progress, earlier findings no longer count.
    for moves in (True, False):
        other = Hosts("ab")
        other.cut_off("a1 b1", looks=1)
        if moves:
            other.policy.progressed()
        assert other.cut_off("a1 b1" if moves else "a1 b1 b2", looks=1) is None


def test_stalled_workers_are_probed_less_often_until_they_move() -> None:
    hosts, times = Hosts(), []
    for _ in range(2000):
        before = len(hosts.asked)
        assert hosts.look(["a1", "b1"]) in (None, NOBODY)
        if len(hosts.asked) > before:
            times.append(hosts.now)
            hosts.answer()
        hosts.now += 0.1
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert gaps[:5] == pytest.approx([GAP_S * 2**n for n in range(5)], abs=0.3) and max(gaps) < 61
    for again in (hosts.policy.progressed, hosts.policy.hurry):
        before = len(hosts.asked)
        again()
        for _ in range(2):
            hosts.look(["a1", "b1"])
            hosts.answer()
        assert len(hosts.asked) == before + 1 and hosts.look(["a1", "b1"]) is None


def test_answering_worker_speaks_for_its_node_if_it_has_a_peer() -> None:
    hosts = Hosts("ac bc")
    hosts.mute = {"c1"}
    hosts.cut_off("a1 b1 c1 c2", looks=1)
    assert hosts.asked[-1]["c2"] == ("a1", "b1") and "c1" not in hosts.asked[-1]
    hosts.mute = {"c1", "c2"}  # no worker on c answers, but others report that they don't reach it
    hosts.policy.progressed()
    found = hosts.cut_off("a1 b1 c1 c2")
    assert found is not None and set(found.workers) == {"c1", "c2"}
    alone = Hosts("ab")
    alone.doorless = {"b1"}
    for members in (["a1", "a2"], ["a1", "b1"]):
        assert alone.look(members) == NOBODY and not alone.asked


def test_a_leaver_goes_before_those_that_train() -> None:
    found = Hosts("ab").cut_off("a1", leavers="b1 b2")
    assert found is not None and set(found.workers) == {"b1", "b2"}


def admitted(hosts: Hosts, joiners: str, members: str, looks: int) -> tuple[list[str], CutOff]:
    found: tuple[list[str], CutOff] = ([], NOBODY)
    for _ in range(looks):
        for _ in range(2):
            fine, cut = hosts.admitted(joiners.split(), members.split())
            assert cut is NOBODY
        hosts.answer()
        found = hosts.admitted(joiners.split(), members.split())
    return found


def test_joiner_is_admitted_once_its_node_reaches_all_others() -> None:
    hosts = Hosts()
    assert hosts.admitted(["b2"], ["a1", "b1"]) == (["b2"], NOBODY) and not hosts.asked, "its node trains"
    assert admitted(hosts, "b2 c1 c2", "a1 a2 b1", 1) == (["b2"], NOBODY), "found, and let in from the next round on"
    assert hosts.asked == [{"a1": ("c1",), "b1": ("c1",), "c1": ("a1", "b1")}], "only the ways of the new one count"
    assert hosts.admitted(["b2", "c1", "c2"], ["a1", "a2", "b1"]) == (["b2", "c1", "c2"], NOBODY)
    assert hosts.admitted(["c3"], ["a1", "b1"]) == (["c3"], NOBODY) and len(hosts.asked) == 1, "it is known"
    hosts.now += PROVEN_S - 1
    assert hosts.admitted(["c3"], ["a1", "b1"])[0] == ["c3"]
    hosts.now += 2
    assert hosts.admitted(["c3"], ["a1", "b1"])[0] == [] and len(hosts.asked) == 2, "a spare that has waited for long"


@pytest.mark.fault("N5")
def test_joiner_unreached_by_a_member_is_refused_with_its_node() -> None:
    hosts = Hosts("ac bd")  # the break between b and d does not concern c
    assert admitted(hosts, "b2 c1 c2 d1", "a1 b1", 1) == (["b2"], NOBODY)
    fine, cut = admitted(hosts, "b2 c1 c2 d1", "a1 b1", 1)
    assert fine == ["b2"] and cut.workers == {"c1": "c", "c2": "c"} and cut.unreached == {"c": ("a",)}
    assert cut.why("c") == "its node (host-c) and host-a do not reach each other"


def test_mutually_unreachable_joiners_are_not_both_admitted() -> None:
    hosts = Hosts("cd")
    admitted(hosts, "c1 d1", "a1 b1", 1)
    assert hosts.admitted(["c1", "d1"], ["a1", "b1"]) == (["c1"], NOBODY)
    hosts.answer()
    assert hosts.admitted(["c1", "d1"], ["a1", "b1"]) == (["c1"], NOBODY)
    hosts.admitted(["c1", "d1"], ["a1", "b1"])
    hosts.answer()
    fine, cut = hosts.admitted(["c1", "d1"], ["a1", "b1"])
    assert fine == ["c1"] and cut.workers == {"d1": "d"} and cut.unreached == {"d": ("c",)}


def test_removed_node_is_probed_again_before_it_is_admitted() -> None:
    hosts = Hosts()
    admitted(hosts, "c1", "a1 b1", 1)
    hosts.broken = {frozenset("ac"), frozenset("bc")}
    found = hosts.cut_off("a1 b1 c1")
    assert found is not None and set(found.workers) == {"c1"}
    before = len(hosts.asked)
    hosts.policy.progressed()
    assert hosts.admitted(["c2"], ["a1", "b1"]) == ([], NOBODY) and len(hosts.asked) == before + 1


def test_stalled_members_suspend_joiner_probes_and_void_results() -> None:
    """While a cut-off member is not ended yet, joiners and spares on good nodes must not be refused, nor their nodes excluded."""
    hosts = Hosts("ab bc")
    admitted(hosts, "c1", "a1 b1", 1)  # c1 is not reached once, since b is cut off
    found = hosts.cut_off("a1 b1")
    assert found is not None and set(found.workers) == {"b1"}
    before = len(hosts.asked)
    for _ in range(50):
        assert hosts.admitted(["a2", "c1"], ["a1", "b1"]) == (["a2"], NOBODY)
        hosts.now += 1.0
    assert len(hosts.asked) == before
    hosts.broken = set()
    hosts.policy.progressed()
    assert admitted(hosts, "c1", "a1 b1", 1) == ([], NOBODY) and hosts.admitted(["c1"], ["a1", "b1"]) == (["c1"], NOBODY)


def test_cut_off_majority_is_reported_once_and_never_ended() -> None:
    policy, most = Connectivity(ElasticSection(workers=3, replace_lost=True)), CutOff({"b": "n", "c": "n"}, {"n": ("m",)}, {}, 1e6)
    told = Event("network_broken", {"workers": ["b", "c"], "unreached": {"n": ["m"]}})
    later = Ticket(TICKET.generation + 1, 1)
    assert [policy.due(most, "abc", 9, ticket) for ticket in (TICKET, TICKET, later)] == [(False, [told]), (False, []), (False, [told])]
    assert policy.due(most, "abcd", 0, later) == (True, []) and policy.due(NOBODY, "abcd", 0, later) == (False, [])


NODES = "abcdefg"


@given(
    st.sets(st.sampled_from(list(itertools.combinations(NODES, 2))), min_size=1),
    st.lists(st.integers(1, 5), min_size=len(NODES), max_size=len(NODES)),
)
def test_no_broken_pair_of_nodes_is_left(broken: set[tuple[str, str]], sizes: list[int]) -> None:
    gone = fewest(broken, dict(zip(NODES, sizes, strict=True)), {node: place for place, node in enumerate(NODES)})
    assert all(gone & set(pair) for pair in broken)


@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 5))
@pytest.mark.fault("N4")
def test_lighter_of_two_groups_of_nodes_is_removed(first: int, light: int, heavy: int) -> None:
    groups = NODES[:first], NODES[first:]
    weights = {node: size for nodes, size in zip(groups, (light, heavy), strict=True) for node in nodes}
    gone = fewest(list(itertools.product(*groups)), weights, {node: place for place, node in enumerate(NODES)})
    assert set(gone) in [set(nodes) for nodes in groups]
    assert sum(weights[n] for n in gone) == min(sum(weights[n] for n in nodes) for nodes in groups)


def test_ties_remove_the_node_with_more_broken_links_then_later() -> None:
    even, order = dict.fromkeys(NODES, 2), {node: place for place, node in enumerate(NODES)}
    assert fewest([("a", "b")], even, order) == {"b"}
    assert fewest([("a", "b")], {**even, "b": 3}, order) == {"a"}
    assert fewest([], even, order) == frozenset()
    halves = [(f"l{i}", f"r{j}") for i in range(60) for j in range(64)]
    names = [name for pair in halves for name in pair]
    began = time.monotonic()
    assert fewest(halves, dict.fromkeys(names, 8), {name: i for i, name in enumerate(dict.fromkeys(names))}) == {f"l{i}" for i in range(60)}
    assert time.monotonic() - began < 5.0


def test_unreached_node_is_excluded_for_a_while_then_forgiven(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes, now = Nodes(), 50.0
    monkeypatch.setattr("vescale_ray.controller.scaling.nodes.time.monotonic", lambda: now)
    assert max(EXCLUDED_S, LONGEST_EXCLUDED_S) < min(Bounds().start, Bounds().replace), "who waits for a place there outlasts it"
    for lasts in (EXCLUDED_S, LONGEST_EXCLUDED_S, LONGEST_EXCLUDED_S, EXCLUDED_S):
        nodes.exclude("a")
        now += lasts - 1
        assert nodes.avoided == {"a"}
        now += 2
        assert nodes.avoided == frozenset()
        if lasts == LONGEST_EXCLUDED_S and nodes._excluded["a"][1] == 3:
            now += FORGET_S
    for _ in range(2000):  # a month of it
        nodes.exclude("a")
    now += LONGEST_EXCLUDED_S + 1
    nodes._draining = {"b": float("inf")}
    assert nodes.avoided == {"b"}


def test_generation_is_stalled_after_a_bound_without_any_beat() -> None:
    watch = HangWatch(patience_s=30.0)
    watch.begin(TICKET, 2)
    forming = [report(w, WorkerPhase.FORMING) for w in "ab"]
    for one in forming:
        watch.heard(one, 0.0)
    now = 0.0
    while now < FIRST_S - 0.1:
        assert not watch.verdict("ab", now) and not watch.stalled("ab", now)
        now += 0.1
    watch.verdict("ab", FIRST_S)
    assert watch.stalled("ab", FIRST_S), "before any step was seen, and not after ten times the bound of the collectives only"
    assert not watch.stalled("abc", FIRST_S), "of c nothing is known"
    for step in range(4):
        watch.stepped(TICKET, step, 0.1)
    for w in "ab":
        watch.heard(replace(report(w, WorkerPhase.TRAINING), beats=7), 10.0)
    watch.verdict("ab", 10.0)  # a gap of the test's own: the watch listens first
    for tenth in range(102, 130):
        now = tenth / 10
        watch.verdict("ab", now)
        assert watch.stalled("ab", now) == (now - 10.0 >= LEAST_S + 0.001 and now >= 10.0 + LEAST_S), now
    watch.heard(report("a", WorkerPhase.PARKED), 13.0)
    assert not watch.stalled("ab", 13.0), "one of them is out: that is another matter"
    # Even if steps, or a fixed bound, take minutes, the nodes are probed long before the collective fails, here at 30 s.
    for slow in (HangWatch(patience_s=30.0), HangWatch(fixed=300.0, patience_s=30.0)):
        slow.begin(TICKET, 2)
        for step in range(4):
            slow.stepped(TICKET, step, 200.0)
        for phase, bound in ((WorkerPhase.TRAINING, 10.0), (WorkerPhase.FORMING, FIRST_S)):
            for w in "ab":
                slow.heard(replace(report(w, phase), beats=hash(phase) % 1000), 0.0)
            slow._asked = None
            assert not slow.verdict("ab", bound - 0.1) and not slow.stalled("ab", bound - 0.1)
            assert slow.stalled("ab", bound + 0.1)
    never = HangWatch(fixed=0)
    never.begin(TICKET, 2)
    for one in forming:
        never.heard(one, 0.0)
    assert not never.stalled("ab", 1000.0)


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
