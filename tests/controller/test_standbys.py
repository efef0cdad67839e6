"""Standbys without Ray: which processes the supervisor keeps, who gets the place of a lost worker, and the recovery that waits for one."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.controller.runs import until
from tests.controller.stage import BEGAN, PEER, Stage, WorkerGroup, report
from vescale_ray.controller import actions, states
from vescale_ray.controller.failures.budget import Cause
from vescale_ray.controller.protocol import Dismissal, Ending
from vescale_ray.controller.transitions.recovery import STANDBY_S
from vescale_ray.controller.worker_group import standbys as subject
from vescale_ray.controller.worker_group import supervisor as supervisors
from vescale_ray.controller.worker_group import worker_group as worker_groups
from vescale_ray.controller.worker_group.supervisor import Supervisor
from vescale_ray.workers.messages import WorkerInfo, WorkerPhase


class Process:
    """A worker process. ``where``: its placement group, or a standby's node. ``dies`` and ``stops``: what it does as a new worker."""

    def __init__(self, worker: str, where: str, standby: bool) -> None:
        self.worker, self.where, self.standby = worker, where, standby
        self.dies = self.stops = self.killed = False
        self.devices: str | None = None
        self.ready, self.life = Future[None](), Future[None]()
        self.prepared = SimpleNamespace(remote=lambda: SimpleNamespace(future=lambda: self.ready))
        self.lifeline = SimpleNamespace(remote=lambda call: SimpleNamespace(future=lambda: self.life))
        self.employ = SimpleNamespace(remote=self._employ)

    def _employ(self, devices: str) -> Process:
        self.devices = devices
        return self


class Cluster:
    """All processes that were started, and the placement groups that were not given back, by node."""

    def __init__(self) -> None:
        self.started: list[Process] = []
        self.groups: list[str] = []
        self.supervisors: list[Any] = []

    def supervised(self, standby: int = 1, gpus: float = 0.0) -> Any:
        """A run's supervisor. It ends with the test, so that none of its threads is left for the next one."""
        config = {"elastic": {"standby": standby}, "ray": {"cpus_per_worker": 1.0, "gpus_per_worker": gpus}}
        self.supervisors.append(Supervisor(config, "run"))
        return self.supervisors[-1]

    def start(self, scheduling_strategy: str, **_: Any) -> Any:
        def remote(worker: str, config: Any, standby: bool = False) -> Process:
            self.started.append(Process(worker, scheduling_strategy, standby))
            return self.started[-1]

        return SimpleNamespace(remote=remote)

    @property
    def standing(self) -> list[Process]:
        return [one for one in self.started if one.standby and one.devices is None and not one.killed]

    def stands(self, supervisor: Any, count: int = 1) -> list[Process]:
        """Wait until the supervisor has so many standbys, all prepared."""

        def are_ready() -> bool:
            for one in self.standing:
                if not one.ready.done():
                    one.ready.set_result(None)
            return sum(supervisor.standbys().values()) == count

        until(are_ready, 20, "a standby")
        return self.standing


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    made = Cluster()

    def get(process: Process, timeout: float) -> None:
        if process.dies or process.stops:
            raise RuntimeError("it does not answer")

    monkeypatch.setattr(supervisors.ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "head"))
    monkeypatch.setattr(supervisors.ray, "kill", lambda handle, no_restart: setattr(handle, "killed", True))
    monkeypatch.setattr(supervisors.ray, "get", get)
    monkeypatch.setattr(
        supervisors, "placement_group", lambda bundles, strategy, name, bundle_label_selector: made.groups.append(name) or name
    )
    monkeypatch.setattr(supervisors, "remove_placement_group", made.groups.remove)
    monkeypatch.setattr(supervisors, "PlacementGroupSchedulingStrategy", lambda group, placement_group_bundle_index: group)
    monkeypatch.setattr(supervisors, "NodeAffinitySchedulingStrategy", lambda node, soft: node)
    monkeypatch.setattr(supervisors, "_node_of", lambda group: "head" if group in made.groups else None)
    monkeypatch.setattr(supervisors, "actor_class", lambda: SimpleNamespace(options=made.start))
    monkeypatch.setattr(supervisors, "PLACED_S", 0.05)
    monkeypatch.setattr(subject, "FILL_S", 0.01)
    yield made
    for supervisor in made.supervisors:
        supervisor.close()


def info(worker: str, devices: str = "", node: str = "head") -> WorkerInfo:
    """The description of a worker whose process is gone."""
    return WorkerInfo(worker, 1 << 22, 1, node, "host", "cpu", 1.0, devices=devices)


def arrived(supervisor: Any) -> str:
    """A worker that is warm on the supervisor's node."""
    worker = str(supervisor.hire()[0])
    supervisor.station(worker, "head")
    return worker


@pytest.mark.fault("W17")
def test_the_standby_gets_a_lost_workers_place_and_devices(cluster: Cluster) -> None:
    supervisor = cluster.supervised(gpus=1.0)
    lost = arrived(supervisor)
    (standby,) = cluster.stands(supervisor)
    assert (lost, standby.worker, standby.where) == ("w0", "w1", "head") and supervisor.standbys() == {"head": 1}
    assert set(supervisor.roster()) == {"w0"}, "a standby is no worker"
    assert supervisor.dismiss(lost, info(lost, "GPU-5"), True) is Dismissal.GONE
    assert cluster.groups == ["run:w0"], "the place stays reserved"
    assert supervisor.hire((), 0, Dismissal.GONE) == ("w1", standby, True)
    assert standby.devices == "GPU-5" and cluster.groups == ["run:w0"] and set(supervisor.roster()) == {"w1"}
    (other,) = cluster.stands(supervisor)
    assert other.worker == "w3" and len(cluster.started) == 3, "no process was started for the place"
    supervisor.dismiss("w1", info("w1", "GPU-5"), True)
    assert supervisor.hire()[1] is other and other.devices == "GPU-5", "and so on"


@pytest.mark.parametrize("gpus", [0.0, 1.0])
def test_a_new_place_goes_to_a_standby_on_a_cpu_only(cluster: Cluster, gpus: float) -> None:
    """The GPU of a new place is not known before a process is started there."""
    supervisor = cluster.supervised(gpus=gpus)
    arrived(supervisor)
    (standby,) = cluster.stands(supervisor)
    worker, handle, taken = supervisor.hire()
    if gpus:
        assert not taken and not handle.standby and handle.where == f"run:{worker}"
    else:
        assert taken and handle is standby and standby.devices == ""


def test_a_place_without_a_standby_is_given_back(cluster: Cluster) -> None:
    supervisor = cluster.supervised()
    lost = arrived(supervisor)
    supervisor.dismiss(lost, info(lost), True)
    until(lambda: not cluster.groups, 5, "that the place is back")
    _, handle, taken = supervisor.hire()
    assert not taken and not handle.standby


@pytest.mark.fault("W18")
@pytest.mark.parametrize("how", ["dies", "stops"])
def test_a_standby_that_does_not_answer_is_ended(cluster: Cluster, how: str) -> None:
    supervisor = cluster.supervised(2)
    lost = arrived(supervisor)
    first, second = cluster.stands(supervisor, 2)
    setattr(first, how, True)
    supervisor.dismiss(lost, info(lost), True)
    assert supervisor.hire()[1] is second
    until(lambda: first.killed, 5, "its end")


@pytest.mark.fault("W18")
def test_standbys_death_costs_a_new_one_later_each_time(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A standby that can't be prepared, as there is no memory for it, must not be started again and again."""
    waits: list[float] = []
    later = subject.later
    monkeypatch.setattr(subject, "later", lambda wait_s, *about: waits.append(wait_s) or later(0.0, *about))
    supervisor = cluster.supervised()
    arrived(supervisor)
    cluster.stands(supervisor)[0].life.set_exception(RuntimeError("its process died"))
    until(lambda: len(cluster.started) == 3, 5, "another")
    for count in (4, 5):
        cluster.standing[0].ready.set_exception(RuntimeError("cannot start"))
        until(lambda count=count: len(cluster.started) == count, 5, "another")  # type: ignore[misc]
    assert waits == pytest.approx([0.01, 0.02, 0.04, 0.08]) and supervisor.standbys() == {}
    cluster.stands(supervisor)[0].life.set_exception(RuntimeError("its process died"))
    until(lambda: len(waits) == 5, 5, "another")
    assert waits[-1] == pytest.approx(0.02), "the row has ended"


def test_standbys_end_with_the_last_worker_of_their_node(cluster: Cluster) -> None:
    supervisor = cluster.supervised()
    worker = arrived(supervisor)
    (standby,) = cluster.stands(supervisor)
    supervisor.dismiss(worker, info(worker))
    until(lambda: standby.killed and not cluster.groups, 5, "its end")
    lost = arrived(supervisor)
    (standby,) = cluster.stands(supervisor)
    supervisor.dismiss(lost, info(lost), True)
    assert not standby.killed and cluster.groups, "it waits for the place to be taken"
    supervisor.close()
    assert standby.killed and not cluster.groups


def test_a_vacant_place_that_nobody_may_take_is_given_back(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = cluster.supervised()
    lost = arrived(supervisor)
    (standby,) = cluster.stands(supervisor)
    supervisor.dismiss(lost, info(lost), True)
    monkeypatch.setattr(supervisors, "_node_of", lambda group: None)
    assert not supervisor.hire(("head",))[2]
    until(lambda: standby.killed and cluster.groups == ["run:w2"], 5, "that it is given back")
    monkeypatch.setattr(supervisors, "VACANT_S", 0.05)
    lost = arrived(supervisor)
    cluster.stands(supervisor)
    supervisor.dismiss(lost, info(lost), True)
    until(lambda: f"run:{lost}" not in cluster.groups, 5, "that it is given back")


def test_without_standbys_no_place_is_kept(cluster: Cluster) -> None:
    supervisor = cluster.supervised(0)
    lost = arrived(supervisor)
    supervisor.dismiss(lost, info(lost), True)
    until(lambda: not cluster.groups, 5, "that the place is back")
    assert len(cluster.started) == 1 and supervisor.standbys() == {}


# ---------------------------------------------------------------------------------------------------- the controller's view


def test_a_hire_waits_for_the_ends_of_lost_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray serves both calls at a time. A hire that is faster than the end would find no place."""
    done: list[str] = []
    hires: list[tuple[Any, ...]] = []

    def wait(refs: list[str], num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
        return [ref for ref in refs if ref in done], [ref for ref in refs if ref not in done]

    monkeypatch.setattr(worker_groups.ray, "wait", wait)
    call = SimpleNamespace(remote=lambda *about: "call")
    supervisor: Any = SimpleNamespace(
        dismiss=SimpleNamespace(remote=lambda worker, about, vacate: f"end of {worker}: {vacate}"),
        hire=SimpleNamespace(remote=lambda *about: hires.append(about) or len(hires)),
    )
    group = worker_groups.WorkerGroup(supervisor, call_s=1.0, epoch=3, vacate=True)
    for worker in ("a", "b"):
        group._enroll(worker, SimpleNamespace(lifeline=call, poll=call), info(worker))
    for member in list(group.members.values()):
        group._remove_lost(member, "its process died", Cause.KILLED)
        group.hire(("n",))
    done.append("end of a: True")
    done.append("end of b: True")
    group.hire()
    assert hires == [(("n",), 3, "end of a: True"), (("n",), 3, "end of a: True", "end of b: True"), ((), 3)]
    assert group.arriving == group.hiring


def test_standby_counts_as_arriving_until_it_is_warm() -> None:
    call = SimpleNamespace(remote=lambda *about: "call")
    group = worker_groups.WorkerGroup(None, call_s=1.0, epoch=1)
    handle = SimpleNamespace(lifeline=call, hello=call)
    group._enroll("process", handle)
    assert group.arriving == 0
    group._enroll("standby", handle, standby=True)
    assert group.arriving == 1
    group.members["standby"].info = info("standby")
    assert group.arriving == 0


# ------------------------------------------------------------------------------------------------------------- the recovery


@pytest.fixture
def lost_one(tmp_path: Path, clock: None) -> Stage:
    """Worker a is left of a and b."""
    group = WorkerGroup(report("a", WorkerPhase.PARKED, fault=PEER))
    return Stage(group, tmp_path, replace_lost=True, standby=1)


LOST = states.Recovering(Ending(("a",), {"b": "its process died"}, {"a": PEER}))


def hires(stage: Stage) -> int:
    return sum(isinstance(one, actions.Hire) for one in stage.executor.performed)


@pytest.mark.fault("W17")
def test_recovery_takes_the_standby_into_the_next_generation(lost_one: Stage) -> None:
    group = lost_one.worker_group
    group.arriving = 1
    group.each_round = lambda passed: lost_one.warm("new1") if passed > 0.5 and "new1" not in group.reports else None
    following = lost_one.rounds(states.Locating, begin=LOST)
    assert following.members == ("a", "new1") and hires(lost_one) == 1
    assert group.now - BEGAN < 1.0


def test_recovery_waits_for_a_standby_only_and_not_long(lost_one: Stage) -> None:
    """The others train meanwhile; the worker joins later, in a change of its own."""
    group = lost_one.worker_group
    assert lost_one.rounds(states.Locating, begin=LOST).members == ("a",)
    assert group.now - BEGAN < 0.3 and hires(lost_one) == 1, "it was no standby"
    group.arriving, began = 1, group.now
    group.on_the_way.clear()
    assert lost_one.rounds(states.Locating, begin=LOST).members == ("a",)
    assert STANDBY_S - 0.05 <= group.now - began < STANDBY_S + 0.5


@pytest.mark.parametrize("elastic", [{"replace_lost": True}, {"standby": 1}], ids=["no standby", "no replacement"])
def test_recovery_hires_nobody_without_standbys_or_replacement(elastic: dict[str, Any], tmp_path: Path, clock: None) -> None:
    stage = Stage(WorkerGroup(report("a", WorkerPhase.PARKED, fault=PEER)), tmp_path, **elastic)
    assert stage.rounds(states.Locating, begin=LOST).members == ("a",) and hires(stage) == 0


def test_stop_ends_the_wait_for_a_standby(lost_one: Stage) -> None:
    lost_one.worker_group.arriving = 1
    lost_one.loop.state = LOST
    lost_one.loop.follow()
    waiting = lost_one.loop.state
    assert isinstance(waiting, states.Recovering) and waiting.until is not None
    following, _ = lost_one.step(waiting, stop="SIGTERM")
    assert isinstance(following, states.Checkpointing)
