"""The controller's reaction to slow workers: events, the snapshot, and replacements. No Ray."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.controller.recorded import Recorded
from tests.controller.runs import tiny
from vescale_ray.controller.failures.straggler import PAUSE_S, Stragglers
from vescale_ray.controller.http.exposition import families
from vescale_ray.controller.policy import next_members, staffing
from vescale_ray.controller.protocol import Event, StateSource, World
from vescale_ray.workers.messages import Origin, Stepped, StepRecord, Ticket, WorkerInfo
from vescale_ray.workers.monitoring.pace import View, even

START_S = 30.0


class Table:
    """A run whose events are applied to its statistics, with the straggler policy and a clock of its own."""

    def __init__(self, folder: Path, mode: str = "report", capacity: int | None = None, life: int = 1) -> None:
        config = tiny(folder, "slow", elastic_straggler=mode)
        self.now = 1000.0
        self.run = Recorded(config, epoch=life)
        if life == 1:
            self.run.started()
        self.slow = Stragglers(config, capacity, START_S)
        self.world = World(Ticket(0, 1), (), StateSource(Origin.FRESH, 0))

    def record(self, events: Sequence[Event]) -> None:
        for event in events:
            self.run.log.record(event.name, **event.about)

    def unwanted(self, members: Sequence[str], target: int, there: int, failures: int) -> frozenset[str]:
        found, events = self.slow.unwanted(members, target, there, failures, self.run.stats.stragglers, self.now)
        self.record(events)
        return found

    def adopt(self, world: World) -> None:
        """Replay the records of the controller before."""
        self.run.log.replay()
        self.run.generation.adopt(world)
        self.world = world

    def open(self, *members: str) -> None:
        self.world = World(Ticket(self.world.ticket.generation + 1, 1), members, StateSource(Origin.FRESH, self.run.stats.step))
        self.run.open(self.world)

    def step(self, factors: Sequence[float] = (), since: Sequence[int] = (), shares: Sequence[int] = ()) -> None:
        size, generation = self.world.size, self.world.ticket.generation
        view = View(tuple(factors), tuple(since) or (-1,) * size, tuple(shares) or even(6, size))
        index, stats = self.run.stats.step, self.run.stats
        seconds = tuple(0.1 * factor for factor in factors) or (0.1,) * size
        record = StepRecord(index, 2.0, 192, (1,), 1.0, 1e-3, 0.5, 0, size, generation, (1,) * size, seconds, view)
        assert self.run.stepped(Stepped(self.world.ticket, record, 10.0 + index))
        self.record(self.slow.stepped(record, stats, self.now))

    def told(self) -> list[tuple[object, ...]]:
        kept = ("worker", "rank", "factor", "since_step", "reason", "slots")
        events = [e for e in self.run.folder.read_events() if e["event"].startswith(("straggler", "slots"))]
        return [(e["event"], *(e[key] for key in kept if key in e)) for e in events]


def known(members: str, **about: Any) -> Any:
    return SimpleNamespace(**{"members": members, "stragglers": {}, "spread": (0, ()), "workers": {}, **about})


def test_straggler_policy_decides_from_values_alone(tmp_path: Path) -> None:
    slow, now = Stragglers(tiny(tmp_path, "slow", elastic_straggler="replace"), None, START_S), 5.0
    record = StepRecord(7, 2.0, 192, (1,), 1.0, 1e-3, 0.5, 0, 2, 3, (1,) * 2, (0.1, 0.3), View((1.0, 3.0), (-1, 6), even(6, 2)))
    about = {"rank": 1, "factor": 3.0, "since_step": 7, "node": None}
    assert slow.stepped(record, known("ab"), now) == [Event("straggler", {"worker": "b", **about})]
    assert slow.unwanted("ab", 2, 2, 0, {"b": about}, now) == (frozenset("b"), [])
    kept = Event("straggler_kept", {"worker": "b", "reason": "the worker that was to come in its place did not start"})
    assert slow.unwanted("ab", 2, 2, 1, {"b": about}, now) == (frozenset(), [kept])
    over = Event("straggler_over", {"worker": "b", "reason": "it has left", "since_step": 7})
    assert slow.stepped(record, known("ac", stragglers={"b": about}, spread=(3, (3, 3))), now)[0] == over


def test_straggler_is_reported_once_at_its_start_and_its_end(tmp_path: Path) -> None:
    table = Table(tmp_path)
    table.run.generation.worker_started(WorkerInfo("b", 7, 8, "node-1", "h", "cpu", 1.0))
    table.open("a", "b", "c")
    table.step()
    assert table.told() == [] and table.run.stats.stragglers == {}
    for factor in (2.0, 2.2, 2.1):
        table.step((1.0, factor, 1.0), (-1, 0, -1))
    assert table.told() == [("straggler", "b", 1, 2.0, 1)]
    assert table.run.snapshot.stragglers["b"] == {"rank": 1, "factor": 2.1, "since_step": 1, "node": "node-1"}
    table.open("c", "b")  # until the next generation has measurements, b is still the slow worker
    table.step()
    assert set(table.run.stats.stragglers) == {"b"} and len(table.told()) == 1
    table.step((1.0, 1.1), (-1, -1))
    assert table.told()[1:] == [("straggler_over", "b", 1, "it takes 1.10 times as long as the others")]
    assert table.run.stats.stragglers == {}


def test_leaving_straggler_is_over_and_a_restart_repeats_nothing(tmp_path: Path) -> None:
    table = Table(tmp_path)
    table.open("a", "b")
    table.step((1.0, 3.0), (-1, 0))
    again = Table(tmp_path, life=2)
    again.adopt(table.world)
    assert set(again.run.stats.stragglers) == {"b"}
    again.step((1.0, 3.0), (-1, 0))
    again.open("a", "c")
    again.step()
    assert [one[:2] for one in again.told()] == [("straggler", "b"), ("straggler_over", "b")]
    assert again.told()[-1][-1] == "it has left"


def test_each_new_slot_spread_is_an_event_but_not_the_even_start(tmp_path: Path) -> None:
    table = Table(tmp_path, "relieve")
    table.open("a", "b", "c")
    for shares in ((2, 2, 2), (1, 3, 2), (1, 3, 2), (2, 2, 2)):
        table.step((3.0, 1.0, 1.0), (0, -1, -1), shares)
    table.open("a", "b", "c", "d")
    table.step((), (), (2, 2, 1, 1))
    told = [one for one in table.told() if one[0] == "slots_spread"]
    assert told == [("slots_spread", {"a": 1, "b": 3, "c": 2}), ("slots_spread", {"a": 2, "b": 2, "c": 2})]


def test_restarted_controller_reports_no_slot_spread_twice(tmp_path: Path) -> None:
    table = Table(tmp_path, "relieve")
    table.open("a", "b", "c")
    table.step((3.0, 1.0, 1.0), (0, -1, -1), (1, 3, 2))
    again = Table(tmp_path, "relieve", life=2)
    again.adopt(table.world)
    for shares in ((1, 3, 2), (1, 2, 3)):
        again.step((3.0, 1.0, 1.0), (0, -1, -1), shares)
    told = [one for one in again.told() if one[0] == "slots_spread"]
    assert told == [("slots_spread", {"a": 1, "b": 3, "c": 2}), ("slots_spread", {"a": 1, "b": 2, "c": 3})]


def test_straggler_metrics_cover_only_the_current_generation(tmp_path: Path) -> None:
    def of(name: str) -> dict[str, float]:
        found = [sample for one in families(table.run.snapshot) if one.name == name for sample in one.samples]
        return {sample.labels.get("rank", ""): sample.value for sample in found}

    table = Table(tmp_path)
    table.open("a", "b", "c")
    table.step((1.0, 2.0, 1.0), (-1, 0, -1))
    assert of("vescale_worker_slowness_ratio") == {"0": 1.0, "1": 2.0, "2": 1.0} and of("vescale_stragglers") == {"": 1.0}
    assert of("vescale_worker_slot_seconds") == pytest.approx({"0": 0.1, "1": 0.2, "2": 0.1})
    assert of("vescale_worker_slots") == {"0": 2.0, "1": 2.0, "2": 2.0}
    table.open("a", "c")
    assert of("vescale_worker_slowness_ratio") == of("vescale_worker_slot_seconds") == of("vescale_worker_slots") == {}
    table.step()
    assert set(of("vescale_worker_slots")) == {"0", "1"} and of("vescale_stragglers") == {"": 0.0}


@pytest.mark.fault("W14")
def test_replacement_is_warm_before_the_slowest_worker_leaves(tmp_path: Path) -> None:
    table = Table(tmp_path, "replace")
    table.open("a", "b", "c")
    table.step((1.5, 1.0, 3.0), (0, -1, 0))
    members = table.world.members
    assert table.slow.leaving(members, (), 3) == frozenset()
    unwanted = table.unwanted(members, 3, 3, 0)
    assert unwanted == {"c"}
    assert staffing(3 - len(unwanted), 0, 0, 3).hire == 1 and not staffing(3 - len(unwanted), 0, 1, 3).regroup
    assert table.unwanted(members, 3, 4, 0) == {"c"} and staffing(3 - len(unwanted), 1, 0, 3).regroup
    # If the new worker is lost now, the slow one stays.
    assert table.slow.leaving(members, (), 3) == frozenset()
    leaving = table.slow.leaving(members, ("d",), 3)
    assert next_members(members, ("d",), 3, leaving) == (("a", "b", "d"), ("c",))
    table.open("a", "b", "d")
    table.step()
    assert table.told()[-1][-1] == "it was replaced" and table.unwanted(table.world.members, 3, 3, 0) == frozenset()
    # The other slow worker is replaced next, but not at once.
    assert set(table.run.stats.stragglers) == {"a"}
    table.now += PAUSE_S + 1
    assert table.unwanted(table.world.members, 3, 3, 0) == {"a"}


def test_shrink_removes_the_slow_worker_and_hires_none(tmp_path: Path) -> None:
    table = Table(tmp_path, "replace")
    table.open("a", "b", "c")
    table.step((3.0, 1.0, 1.0), (0, -1, -1))
    members = table.world.members
    assert table.unwanted(members, 3, 3, 0) == {"a"}
    unwanted = table.unwanted(members, 2, 4, 0)
    assert unwanted == frozenset() and staffing(3 - len(unwanted), 0, 1, 2).regroup
    assert next_members(members, (), 2, table.slow.leaving(members, (), 2)) == (("b", "c"), ("a",))


@pytest.mark.parametrize("mode", ["report", "relieve"])
def test_straggler_is_replaced_only_in_replace_mode(tmp_path: Path, mode: str) -> None:
    table = Table(tmp_path, mode)
    table.open("a", "b")
    table.step((1.0, 5.0), (-1, 0))
    assert table.unwanted(("a", "b"), 2, 2, 0) == frozenset()
    assert table.slow.leaving(("a", "b"), ("c",), 2) == frozenset()


LATE, FAILED = ("was warm in its place after 30 s", START_S + 1, 0), ("did not start", 1.0, 1)


@pytest.mark.parametrize(("why", "later_s", "failures"), [LATE, FAILED], ids=["late", "failed"])
def test_kept_straggler_is_reported_once_and_retried_more_rarely(tmp_path: Path, why: str, later_s: float, failures: int) -> None:
    table = Table(tmp_path, "replace")
    table.open("a", "b")
    table.step((1.0, 5.0), (-1, 0))
    tries = []
    for _ in range(4000):
        if table.unwanted(("a", "b"), 2, 2, len(tries) * failures):
            tries.append(table.now)
            table.now += later_s
            assert table.unwanted(("a", "b"), 2, 2, len(tries) * failures) == frozenset()
        table.now += 1.0
    kept = [one for one in table.told() if one[0] == "straggler_kept"]
    assert len(kept) == 1 and kept[0][1] == "b" and why in str(kept[0][2])
    pauses = [later - earlier - later_s for earlier, later in itertools.pairwise(tries)]
    assert pauses[:5] == pytest.approx([PAUSE_S * 2**n for n in range(5)], abs=2)


def test_full_cluster_hires_no_replacement_and_says_so(tmp_path: Path) -> None:
    table = Table(tmp_path, "replace", capacity=2)
    table.open("a", "b")
    table.step((1.0, 5.0), (-1, 0))
    for _ in range(200):
        assert table.unwanted(("a", "b"), 2, 2, 0) == frozenset()
        table.now += 1.0
    reason = "the cluster has room for 2 workers, and none more (ray.num_cpus, ray.cpus_per_worker)"
    assert [one for one in table.told() if one[0] == "straggler_kept"] == [("straggler_kept", "b", reason)]


def test_straggler_recovered_before_its_replacement_stays(tmp_path: Path) -> None:
    table = Table(tmp_path, "replace")
    table.open("a", "b", "c")
    table.step((1.0, 1.0, 3.0), (-1, -1, 0))
    assert table.unwanted(table.world.members, 3, 3, 0) == {"c"}
    table.step((1.0, 1.0, 1.0))
    assert table.unwanted(table.world.members, 3, 4, 0) == frozenset()
    assert table.slow.leaving(table.world.members, ("d",), 3) == frozenset()
