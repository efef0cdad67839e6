"""The supervisor without Ray: calls that may wait for Ray's control store, and calls that must not."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.controller.runs import until
from vescale_ray.controller.failures.budget import Cause
from vescale_ray.controller.protocol import Dismissal
from vescale_ray.controller.worker_group import agents, ray_answers
from vescale_ray.controller.worker_group import supervisor as subject
from vescale_ray.controller.worker_group import worker_group as worker_groups
from vescale_ray.controller.worker_group.supervisor import Supervisor
from vescale_ray.controller.worker_group.worker_group import WorkerGroup
from vescale_ray.controller.worker_group.worker_news import Lost, SupervisorLost
from vescale_ray.workers.messages import WorkerInfo


class Store:
    """Ray's control store. It answers while it is ``open``; ``places`` are those that were made and not given back."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.places: list[str] = []
        self.killed: list[Any] = []
        self.selectors: list[Any] = []
        """Node selectors of all places that were made."""
        self.refuses = 0

    def asked(self) -> None:
        assert self.open.wait(20)
        if self.refuses:
            self.refuses -= 1
            raise RuntimeError("the control store has just come back")


class Actor:
    """A class, or a handle, of an actor. The actor starts when the store answers."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def options(self, **_: Any) -> Actor:
        return self

    def remote(self, *_: Any) -> Actor:
        self._store.asked()
        return self


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    made = Store()

    def place(bundles: Any, strategy: str, name: str, bundle_label_selector: Any) -> str:
        made.asked()
        made.places.append(name)
        made.selectors.append(bundle_label_selector)
        return name

    def gone(group: str) -> None:
        made.asked()
        made.places.remove(group)

    def kill(handle: Any, no_restart: bool) -> None:
        made.asked()
        made.killed.append(handle)

    monkeypatch.setattr(subject.ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "head"))
    monkeypatch.setattr(subject.ray, "kill", kill)
    monkeypatch.setattr(subject, "placement_group", place)
    monkeypatch.setattr(subject, "remove_placement_group", gone)
    monkeypatch.setattr(subject, "PlacementGroupSchedulingStrategy", lambda group, placement_group_bundle_index: group)
    monkeypatch.setattr(subject, "actor_class", lambda: Actor(made))
    monkeypatch.setattr(agents, "start_agent", lambda node: Actor(made).remote())
    monkeypatch.setattr(subject, "REMOVAL_GAP_S", 0.01)
    yield made
    made.open.set()


@pytest.fixture
def supervisor(store: Store) -> Any:
    return Supervisor({"elastic": {"standby": 0}, "ray": {"cpus_per_worker": 1.0, "gpus_per_worker": 0.0}}, "run")


def within(seconds: float, call: Callable[[], Any]) -> Any:
    """The answer of ``call``, which must come within ``seconds``."""
    found: list[Any] = []
    threading.Thread(target=lambda: found.append(call()), daemon=True).start()
    until(lambda: bool(found), seconds, "an answer")
    return found[0]


@pytest.mark.fault("C4")
def test_dismissal_does_not_wait_for_another_nodes_agent(supervisor: Any, store: Store) -> None:
    """If the agent is started under the lock that every dismissal takes, the controller waits 10 s and gives the run up."""
    workers = [supervisor.hire()[0] for _ in range(2)]
    store.open.clear()
    within(1.0, lambda: supervisor.station(workers[0], "elsewhere"))
    info = WorkerInfo(workers[1], 1 << 22, 1, "head", "host", "cpu", 1.0)
    assert within(1.0, lambda: supervisor.dismiss(workers[1], info)) is Dismissal.GONE
    there = WorkerInfo(workers[0], 1 << 22, 1, "elsewhere", "host", "cpu", 1.0)
    assert within(agents.AGENT_S + 1.0, lambda: supervisor.dismiss(workers[0], there)) is Dismissal.UNKNOWN
    store.open.set()
    until(lambda: not store.places and len(store.killed) == 3, 5, "that both are ended, and the agent too")


def test_worker_and_wish_avoid_the_excluded_nodes(supervisor: Any, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "_node_of", lambda group: None)
    supervisor.hire()
    supervisor.hire(("n2", "n1"))
    supervisor.request_places(1, ("n3",))
    assert store.selectors == [None, [{"ray.io/node-id": "!in(n1, n2)"}], [{"ray.io/node-id": "!in(n3)"}]]


def test_hire_of_a_controller_killed_meanwhile_is_ended(supervisor: Any, store: Store) -> None:
    """The next controller has counted its workers already. This worker would have a place until the end of the run, and train nothing."""
    first, _, _ = supervisor.hire((), 1)
    store.open.clear()
    raised: list[BaseException] = []

    def hire() -> None:
        try:
            supervisor.hire((), 1)
        except RuntimeError as error:
            raised.append(error)

    waiting = threading.Thread(target=hire, daemon=True)
    waiting.start()
    time.sleep(0.05)
    assert set(within(1.0, lambda: supervisor.roster(2))) == {first}
    store.open.set()
    waiting.join(5)
    assert "controller 1 was replaced" in str(raised[0]) and set(supervisor.roster(2)) == {first}
    until(lambda: store.places == [f"run:{first}"] and len(store.killed) == 1, 5, "that it is ended")
    assert supervisor.hire((), 2)[0] in supervisor.roster(2)


def test_place_is_returned_after_a_refusal_or_a_failed_hire(supervisor: Any, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, _, _ = supervisor.hire()
    store.refuses = 3  # one refusal for its kill, two for the return of its place
    supervisor.dismiss(worker, None)
    until(lambda: not store.places, 5, "that its place is back")
    with monkeypatch.context() as patch:
        patch.setattr(Actor, "options", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("no such resource")))
        with pytest.raises(RuntimeError, match="no such resource"):
            supervisor.hire()
    until(lambda: not store.places, 5, "that its place is back")
    assert not supervisor.roster()


def test_each_generation_has_its_own_store_and_the_last_two_stay(supervisor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The data that a group leaves in its store grows with the square of its ranks. One store for all would fill the head's memory in
    the end."""
    monkeypatch.setattr(subject.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    ports = [supervisor.store()[1] for _ in range(4)]
    assert len(set(ports)) == 4

    def takes_calls(port: int) -> bool:
        with socket.socket() as caller:
            return caller.connect_ex(("127.0.0.1", port)) == 0

    until(lambda: [takes_calls(port) for port in ports] == [False, False, True, True], 10, "that the older ones are closed")


# ---------------------------------------------------------------------------------------------------- the controller's view


class Hirings:
    """A supervisor that answers hires when the test says so, with a worker or an error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        self.answers: dict[str, Any] = {}
        self.waited = 0.0
        monkeypatch.setattr(worker_groups.ray, "wait", self._wait)
        monkeypatch.setattr(worker_groups.ray, "get", self._get)
        self.hire = SimpleNamespace(remote=self._hire)

    def _hire(self, avoid: Any, epoch: int) -> str:
        self.asked.append(f"hiring {len(self.asked)}")
        return self.asked[-1]

    def _wait(self, refs: list[str], num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
        done = [ref for ref in refs if ref in self.answers]
        self.waited += timeout if len(done) < num_returns else 0.0
        return done, [ref for ref in refs if ref not in done]

    def _get(self, ref: str, timeout: float = 0.0) -> Any:
        if isinstance(self.answers[ref], Exception):
            raise self.answers[ref]
        return self.answers[ref]


def test_many_hires_take_the_time_of_one_if_control_store_stalls(monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller hears no worker meanwhile, so 2 s for each hire would be too long."""
    hirings = Hirings(monkeypatch)
    worker_group = WorkerGroup(hirings, call_s=10.0, epoch=1)
    for _ in range(8):
        worker_group.hire()
    assert worker_group.hiring == 8 and hirings.waited <= worker_groups.HIRE_S


def test_failed_hire_is_a_lost_worker_and_not_the_end_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    hirings = Hirings(monkeypatch)
    worker_group = WorkerGroup(hirings, call_s=10.0, epoch=1)
    worker_group.hire()
    hirings.answers["hiring 0"] = worker_groups.RayTaskError("hire", "traceback", RuntimeError("the control store has just come back"))
    (news,) = worker_group.pump(0.0)
    assert isinstance(news, Lost) and news.info is None and "could not be hired: the control store has just come back" in news.reason
    assert worker_group.hiring == 0 and worker_group.pump(0.0) == []


@pytest.mark.parametrize("answers", [True, False])
def test_frozen_controller_does_not_call_the_supervisor_lost(answers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """If its container is frozen between the call and the answer, the controller's time is over before it has looked."""
    waited: list[float] = []

    def get(ref: str, timeout: float) -> str:
        waited.append(timeout)
        if len(waited) == 1 or not answers:
            raise ray_answers.GetTimeoutError("over")
        return "there"

    monkeypatch.setattr(worker_groups.ray, "get", get)
    asked: Any = SimpleNamespace(signal=SimpleNamespace(remote=lambda *about: "signal"))
    worker_group = WorkerGroup(asked, call_s=10.0, epoch=1)
    if answers:
        assert worker_group._ask_supervisor("signal") == "there"
    else:
        with pytest.raises(SupervisorLost, match="GetTimeoutError"):
            worker_group._ask_supervisor("signal")
    assert waited == [10.0, ray_answers.LOOK_AGAIN_S]


class Rack:
    """A supervisor, and workers on nodes of their own that no longer answer. To end any number of workers at once takes a second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.lost: set[str] = set()
        self.asked: list[str] = []
        monkeypatch.setattr(worker_groups.ray, "wait", lambda refs, num_returns, timeout: ([ref for ref in refs if ref in self.lost], []))
        monkeypatch.setattr(worker_groups.ray, "get", self._get)
        self.dismiss = SimpleNamespace(remote=self._dismiss)
        self.kept = SimpleNamespace(remote=lambda: (self.now, None))
        self.worker_group = WorkerGroup(self, call_s=10.0, epoch=1)
        for number in range(8):
            call = {name: SimpleNamespace(remote=lambda *about, n=number, of=name: f"{of} {n}") for name in ("lifeline", "hello", "poll")}
            info = WorkerInfo(f"w{number}", 1, 1, f"node{number}", "h", "cpu", 1.0)
            self.worker_group._enroll(f"w{number}", SimpleNamespace(**call), info)

    def _dismiss(self, worker: str, info: Any, vacate: bool = False) -> tuple[float, Dismissal]:
        self.asked.append(worker)
        return self.now + 1.0, Dismissal.UNKNOWN

    def _get(self, ref: Any, timeout: float = 0.0) -> Any:
        if isinstance(ref, str):
            raise worker_groups.RayActorError()
        self.now = max(self.now, ref[0])
        return ref[1]


@pytest.mark.fault("N3")
def test_loss_of_a_whole_rack_takes_the_time_of_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the controller waits a second for each worker in turn, all workers that are left wait, too."""
    rack = Rack(monkeypatch)
    rack.worker_group.kill({"w0": "hung", "w1": "hung", "w2": "hung"})
    assert rack.now <= 1.0 and all(rack.worker_group.ending(worker) for worker in ("w0", "w1", "w2"))
    assert {one.cause for one in rack.worker_group.pump(0.0) if isinstance(one, Lost)} == {Cause.NODE}
    rack.lost = {"lifeline 3", "lifeline 4", "lifeline 5"}
    assert sorted(one.worker for one in rack.worker_group.pump(0.0) if isinstance(one, Lost)) == ["w3", "w4", "w5"]
    rack.worker_group.dismiss("w6")
    assert rack.now <= 1.0 and rack.worker_group.ready() == ("w7",) and sorted(rack.asked) == [f"w{n}" for n in range(7)]


@pytest.mark.fault("N3")
def test_zone_loss_asks_each_node_for_one_worker_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor needs a second for its first call to a lost node, and has 16 threads.

    In the order of hiring, the threads were at two nodes of eight workers at a time: 40 nodes took 44 s. From 50 nodes on, the supervisor
    was called lost.
    """
    rack = Rack(monkeypatch)
    for number, member in enumerate(rack.worker_group.members.values()):
        member.info = replace(member.info, node=f"node{number // 4}")  # type: ignore[type-var]
    rack.worker_group.kill({f"w{number}": "hung" for number in range(8)})
    assert rack.asked[:8] == ["w0", "w4", "w1", "w5", "w2", "w6", "w3", "w7"]
    looked: list[str] = []
    monkeypatch.setattr(worker_groups.ray, "wait", lambda refs, num_returns, timeout: ([], refs))
    rack.stacks = SimpleNamespace(remote=lambda info, wait_s: looked.append(info.worker))
    for number, member in enumerate(rack.worker_group.members.values()):
        member.handle.stacks = SimpleNamespace(remote=lambda n=number: f"stacks {n}")
    rack.worker_group.stacks([f"w{number}" for number in range(8)], 0.2)
    assert looked == ["w0", "w4", "w1", "w5", "w2", "w6", "w3", "w7"]


def test_supervisor_loss_is_found_before_its_workers_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    rack = Rack(monkeypatch)
    rack.lost = {f"lifeline {n}" for n in range(8)}
    rack.kept = SimpleNamespace(remote=lambda: "the supervisor")
    with pytest.raises(SupervisorLost):
        rack.worker_group.pump(0.0)
