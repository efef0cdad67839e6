"""Decisions about nodes that don't reach each other: the nodes a run gives up, and the workers it admits. No Ray; the test gives the
answers."""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.controller.stage import TICKET, report
from vescale_ray.config import ElasticSection
from vescale_ray.controller.failures.connectivity import (
    GAP_S,
    NOBODY,
    PROVEN_S,
    TRY_S,
    Connectivity,
    CutOff,
    Network,
    Probe,
    fewest,
)
from vescale_ray.controller.failures.hang import FIRST_S, LEAST_S, HangWatch
from vescale_ray.controller.protocol import Bounds, Event
from vescale_ray.controller.scaling.nodes import EXCLUDED_S, FORGET_S, LONGEST_EXCLUDED_S, Nodes
from vescale_ray.workers.messages import Ticket, WorkerInfo, WorkerPhase

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
