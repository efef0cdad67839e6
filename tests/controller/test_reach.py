"""Which nodes a run does without when they don't reach each other, and whom it lets in: values, and answers that the test gives. No Ray."""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.controller.test_conductor import TICKET, WORLD, Crew, Stage, report
from vescale_ray.controller import conductor as subject
from vescale_ray.controller.hang import FIRST_S, LEAST_S, HangWatch
from vescale_ray.controller.nodes import LONGEST_SHUN_S, SHUN_S, Nodes
from vescale_ray.controller.reach import GAP_S, NOBODY, TRY_S, CutOff, Reach, fewest
from vescale_ray.workers.messages import Phase, WorkerInfo


class Reaching:
    def __init__(self, answers: dict[str, frozenset[str]]) -> None:
        self.answers, self.there = answers, False

    def unreached(self) -> dict[str, frozenset[str]] | None:
        return self.answers if self.there else None


class Hosts:
    """Workers of which each is named by its node and a number, such as ``a1``, and the pairs of nodes that don't reach each other."""

    def __init__(self, broken: str = "") -> None:
        self.broken = {frozenset(pair) for pair in broken.split()}
        self.mute: set[str] = set()
        self.asked: list[dict[str, tuple[str, ...]]] = []
        self.last: Reaching | None = None
        self.now = 100.0
        self.doorless: set[str] = set()
        self.reach = Reach(self, lambda: self.now)

    def info(self, worker: str) -> WorkerInfo | None:
        return WorkerInfo(worker, 1, 1, worker[0], f"host-{worker[0]}", "cpu", 1.0, address="" if worker in self.doorless else "h:1")

    def silent(self, seconds: float) -> list[str]:
        return sorted(self.mute)

    def ask_reach(self, asked: Mapping[str, Collection[str]], wait_s: float) -> Reaching:
        assert wait_s == TRY_S
        self.asked.append({worker: tuple(sorted(others)) for worker, others in asked.items()})
        found = {w: frozenset(o for o in others if frozenset((w[0], o[0])) in self.broken) for w, others in asked.items()}
        self.last = Reaching({w: others for w, others in found.items() if w not in self.mute})
        return self.last

    def answer(self) -> None:
        assert self.last is not None
        self.last.there = True

    def cut_off(self, members: str, looks: int = 2) -> CutOff:
        """What is found in so many looks."""
        found = NOBODY
        for _ in range(looks):
            assert self.reach.cut_off(members.split()) is NOBODY, "it has just been asked"
            assert self.reach.cut_off(members.split()) is NOBODY, "nobody has answered"
            self.answer()
            found = self.reach.cut_off(members.split())
        return found


def test_a_node_that_others_do_not_reach_has_to_go_with_all_its_workers_after_two_looks() -> None:
    hosts = Hosts("ac bc")
    assert hosts.cut_off("a1 a2 b1 b2 c1 c2", looks=1) == NOBODY, "a network may stumble"
    found = hosts.cut_off("a1 a2 b1 b2 c1 c2", looks=1)
    assert found == CutOff({"c1": "c", "c2": "c"}, {"c": ("a", "b")}, {"a": "host-a", "b": "host-b", "c": "host-c"})
    assert found.why("c") == "its node (host-c) and host-a, host-b do not reach each other"
    assert hosts.asked == 2 * [{"a1": ("b1", "c1"), "b1": ("a1", "c1"), "c1": ("a1", "b1")}], "one of each node tries"


def test_what_is_found_once_and_not_again_or_of_another_pair_each_time_counts_for_nothing() -> None:
    hosts = Hosts("ac")
    hosts.cut_off("a1 b1 c1", looks=1)
    hosts.broken = {frozenset("ab")}
    assert hosts.cut_off("a1 b1 c1", looks=1) == NOBODY
    hosts.broken = set()
    assert hosts.cut_off("a1 b1 c1", looks=1) == NOBODY
    hosts.broken = {frozenset("ab")}
    hosts.now += 10 * GAP_S
    assert hosts.cut_off("a1 b1 c1", looks=1) == NOBODY
    assert set(hosts.cut_off("a1 b1 c1", looks=1).workers) == {"b1"}
    # Those that train have changed, or moved: what was found before is of another time.
    for moves in (True, False):
        other = Hosts("ab")
        other.cut_off("a1 b1", looks=1)
        if moves:
            other.reach.moves()
        assert other.cut_off("a1 b1" if moves else "a1 b1 b2", looks=1) == NOBODY


def test_those_that_stand_still_for_another_reason_are_asked_less_and_less_often_until_they_move() -> None:
    hosts, times = Hosts(), []
    for _ in range(2000):
        before = len(hosts.asked)
        assert hosts.reach.cut_off(["a1", "b1"]) == NOBODY
        if len(hosts.asked) > before:
            times.append(hosts.now)
            hosts.answer()
        hosts.now += 0.1
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert gaps[:5] == pytest.approx([GAP_S * 2**n for n in range(5)], abs=0.3) and max(gaps) < 61
    hosts.reach.moves()
    hosts.reach.cut_off(["a1", "b1"])
    assert len(hosts.asked) == len(times) + 1


def test_who_answers_speaks_for_its_node_and_who_has_no_door_or_no_other_node_beside_it_is_not_tried() -> None:
    hosts = Hosts("ac bc")
    hosts.mute = {"c1"}
    hosts.cut_off("a1 b1 c1 c2", looks=1)
    assert hosts.asked[-1]["c2"] == ("a1", "b1") and "c1" not in hosts.asked[-1]
    hosts.mute = {"c1", "c2"}  # though nobody there answers, others tell that they don't reach it
    hosts.reach.moves()
    assert set(hosts.cut_off("a1 b1 c1 c2").workers) == {"c1", "c2"}
    alone = Hosts("ab")
    alone.doorless = {"b1"}
    for members in (["a1", "a2"], ["a1", "b1"]):
        assert alone.reach.cut_off(members) == NOBODY and not alone.asked


def admitted(hosts: Hosts, joiners: str, members: str, looks: int) -> tuple[list[str], CutOff]:
    found: tuple[list[str], CutOff] = ([], NOBODY)
    for _ in range(looks):
        for _ in range(2):
            fine, cut = hosts.reach.admitted(joiners.split(), members.split())
            assert cut is NOBODY
        hosts.answer()
        found = hosts.reach.admitted(joiners.split(), members.split())
    return found


def test_a_joiner_is_let_in_once_its_node_and_all_others_reach_each_other() -> None:
    hosts = Hosts()
    assert hosts.reach.admitted(["b2"], ["a1", "b1"]) == (["b2"], NOBODY) and not hosts.asked, "its node trains"
    assert admitted(hosts, "b2 c1 c2", "a1 a2 b1", 1) == (["b2"], NOBODY), "found, and let in from the next round on"
    assert hosts.asked == [{"a1": ("c1",), "b1": ("c1",), "c1": ("a1", "b1")}], "only the ways of the new one count"
    assert hosts.reach.admitted(["b2", "c1", "c2"], ["a1", "a2", "b1"]) == (["b2", "c1", "c2"], NOBODY)
    assert hosts.reach.admitted(["c3"], ["a1", "b1"]) == (["c3"], NOBODY) and len(hosts.asked) == 1, "it is known"
    assert admitted(hosts, "d1", "a1 b1 c1", 1)[1] is NOBODY and hosts.reach.admitted(["d1"], ["a1"])[0] == ["d1"]


def test_a_joiner_that_one_member_does_not_reach_is_refused_after_two_looks_with_all_of_its_node() -> None:
    hosts = Hosts("ac bd")  # b and d are no matter of c's
    assert admitted(hosts, "b2 c1 c2 d1", "a1 b1", 1) == (["b2"], NOBODY)
    fine, cut = admitted(hosts, "b2 c1 c2 d1", "a1 b1", 1)
    assert fine == ["b2"] and cut.workers == {"c1": "c", "c2": "c"} and cut.unreached == {"c": ("a",)}
    assert cut.why("c") == "its node (host-c) and host-a do not reach each other"


def test_a_leaver_goes_before_those_that_train() -> None:
    hosts = Hosts("ab")
    for _ in range(2):
        assert hosts.reach.cut_off(["a1"], ["b1", "b2"]) == NOBODY
        hosts.answer()
        found = hosts.reach.cut_off(["a1"], ["b1", "b2"])
    assert set(found.workers) == {"b1", "b2"}


def test_a_node_that_had_to_go_is_tried_again_before_it_is_let_in() -> None:
    hosts = Hosts()
    admitted(hosts, "c1", "a1 b1", 1)
    hosts.broken = {frozenset("ac"), frozenset("bc")}
    assert set(hosts.cut_off("a1 b1 c1").workers) == {"c1"}
    before = len(hosts.asked)
    assert hosts.reach.admitted(["c2"], ["a1", "b1"]) == ([], NOBODY) and len(hosts.asked) == before + 1


NODES = "abcdefg"


@given(
    st.sets(st.sampled_from(list(itertools.combinations(NODES, 2))), min_size=1),
    st.lists(st.integers(1, 5), min_size=len(NODES), max_size=len(NODES)),
)
def test_the_nodes_to_do_without_are_those_with_the_fewest_workers_as_brute_force_finds(
    broken: set[tuple[str, str]], sizes: list[int]
) -> None:
    weights = dict(zip(NODES, sizes, strict=True))
    gone = fewest(broken, weights, {node: place for place, node in enumerate(NODES)})
    assert all(gone & set(pair) for pair in broken)
    covers = (set(c) for n in range(len(NODES) + 1) for c in itertools.combinations(NODES, n) if all(set(c) & set(p) for p in broken))
    assert sum(weights[n] for n in gone) == min(sum(weights[n] for n in cover) for cover in covers)


def test_of_choices_that_cost_the_same_that_with_more_broken_ways_goes_then_the_later_node() -> None:
    even, order = dict.fromkeys(NODES, 2), {node: place for place, node in enumerate(NODES)}
    assert fewest([("a", "b")], even, order) == {"b"}
    assert fewest([("a", "b")], {**even, "b": 3}, order) == {"a"}
    assert fewest([], even, order) == frozenset()
    halves = [(f"l{i}", f"r{j}") for i in range(60) for j in range(64)]
    names = [name for pair in halves for name in pair]
    began = time.monotonic()
    assert fewest(halves, dict.fromkeys(names, 8), {name: i for i, name in enumerate(dict.fromkeys(names))}) == {f"l{i}" for i in range(60)}
    assert time.monotonic() - began < 5.0


def test_a_node_that_others_do_not_reach_is_shunned_for_a_time_that_doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes, now = Nodes(), 50.0
    monkeypatch.setattr("vescale_ray.controller.nodes.time.monotonic", lambda: now)
    for times in range(10):
        nodes.shun("a")
        lasts = min(SHUN_S * 2**times, LONGEST_SHUN_S)
        now += lasts - 1
        assert nodes.avoided == {"a"}
        now += 2
        assert nodes.avoided == frozenset()
    nodes._draining = {"b": float("inf")}
    assert nodes.avoided == {"b"}


def test_all_stand_still_where_nobody_makes_a_beat_for_the_bound_and_nobody_hangs() -> None:
    watch = HangWatch(patience_s=30.0)
    watch.begin(TICKET)
    forming = [report(w, Phase.FORMING) for w in "ab"]
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
        watch.heard(replace(report(w, Phase.TRAINING), beats=7), 10.0)
    watch.verdict("ab", 10.0)  # the test's own gap: it listens first
    for tenth in range(102, 130):
        now = tenth / 10
        watch.verdict("ab", now)
        assert watch.stalled("ab", now) == (now - 10.0 >= LEAST_S + 0.001 and now >= 10.0 + LEAST_S), now
    watch.heard(report("a", Phase.PARKED), 13.0)
    assert not watch.stalled("ab", 13.0), "one of them is out: that is another matter"
    never = HangWatch(fixed=0)
    never.begin(TICKET)
    for one in forming:
        never.heard(one, 0.0)
    assert not never.stalled("ab", 1000.0)


def test_who_is_cut_off_is_ended_as_one_whose_node_is_lost_and_its_node_is_shunned(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(Crew(report("a", Phase.TRAINING), report("b", Phase.TRAINING)), filled=True)
    made: Any = stage.conductor
    cut = CutOff({"b": "n2"}, {"n2": ("n1",)}, {"n1": "10.0.0.1", "n2": "10.0.0.2"})
    shunned: list[str] = []
    ended: list[tuple[Any, ...]] = []
    gone: list[str] = []
    made._steering.nodes.shun = shunned.append
    stage.crew.info = {"spare": SimpleNamespace(node="n2"), "other": SimpleNamespace(node="n1")}.get  # type: ignore[attr-defined]
    made._steering.outside, made._steering.let_go = lambda living: ["spare", "other"], gone.append
    moved: list[bool] = []
    made._steering.reach = SimpleNamespace(moves=lambda: moved.append(True), cut_off=lambda members, leavers: cut)
    made._evidence.hung = lambda path: None
    monkeypatch.setattr(subject, "end_hung", lambda crew, ledger, world, why, about: ended.append((why, about)))
    made._hangs = SimpleNamespace(stalled=lambda members, now: False)
    made._end_cut_off(WORLD)
    assert moved and not ended
    made._hangs = SimpleNamespace(stalled=lambda members, now: True)
    made._end_cut_off(WORLD)
    assert shunned == ["n2"] and gone == ["spare"] and ended == [({"b": "its node (10.0.0.2) and 10.0.0.1 do not reach each other"}, cut)]
    stage.crew.ended["b"] = 1.0
    made._end_cut_off(WORLD)
    assert len(ended) == 1, "what follows from that is seen in a moment"
