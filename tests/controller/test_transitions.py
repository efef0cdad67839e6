"""The table of states; transitions as functions: the actions that follow from a state and observations; and simulated runs under faults."""

from __future__ import annotations

import random
import socket
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.controller.simulated import Simulated
from tests.controller.stage import BEGAN, PEER, TICKET, WORLD, Stage, WorkerGroup, node_of, report
from vescale_ray.controller import actions, states
from vescale_ray.controller.checkpointing import coordinator
from vescale_ray.controller.checkpointing.committer import SaveResult
from vescale_ray.controller.controller import Controller
from vescale_ray.controller.failures.budget import Cause
from vescale_ray.controller.policy import CommittedCheckpoint
from vescale_ray.controller.protocol import FINAL, TRANSITIONS, Ending, Event, Outcome, Places, RunState, StateSource, check_transition
from vescale_ray.controller.scaling.autoscaling import PLACE_S
from vescale_ray.controller.scaling.capacity import Free
from vescale_ray.controller.state import snapshot
from vescale_ray.controller.state.run_lifecycle import outcome_of
from vescale_ray.controller.worker_group.worker_news import Lost, News, SupervisorLost
from vescale_ray.workers.messages import RESCALE, STOP, FaultKind, Origin, WorkerFault, WorkerPhase

pytestmark = pytest.mark.usefixtures("clock")


def test_every_state_can_be_reached_and_leads_to_an_end() -> None:
    def reach(state: RunState) -> set[RunState]:
        seen = {state}
        while new := {after for one in seen for after in TRANSITIONS[one]} - seen:
            seen |= new
        return seen

    assert reach(RunState.PENDING) == set(RunState)
    assert all(reach(state) & FINAL for state in RunState)
    assert all(RunState.FAILED in TRANSITIONS[state] for state in set(RunState) - FINAL)
    assert all(not TRANSITIONS[state] for state in FINAL)
    assert tuple(RunState) == snapshot.STATES


def test_transition_outside_the_table_names_the_allowed_states() -> None:
    assert check_transition(RunState.RUNNING, RunState.RESCALING) is RunState.RESCALING
    with pytest.raises(ValueError, match="RUNNING can't become PENDING; allowed: CHECKPOINTING, FAILED"):
        check_transition(RunState.RUNNING, RunState.PENDING)
    with pytest.raises(ValueError, match="DONE can't become RUNNING; allowed: nothing"):
        check_transition(RunState.DONE, RunState.RUNNING)


def training(folder: Path, workers: str = "ab", **about: Any) -> Stage:
    """A generation of two members that has done a step. Other ``workers`` are warm."""
    group = WorkerGroup(*(report(w, WorkerPhase.TRAINING if w in "ab" else WorkerPhase.IDLE) for w in workers))
    group.infos |= {w: node_of(w) for w in workers}
    stage = Stage(group, folder, filled=True, state=RunState.RUNNING, **about)
    stage.run.stats.steps.last["generation"] = TICKET.generation
    return stage


def test_a_transition_performs_none_of_its_actions(tmp_path: Path) -> None:
    """The same state and observations give the same actions, and the worker group and the run's folder are as before."""
    stage = training(tmp_path)
    del stage.worker_group.reports["b"]
    events = stage.events
    first, again = (stage.step(states.Running(stage.world)) for _ in range(2))
    assert first == again and not stage.worker_group.fenced and not stage.executor.performed and stage.events == events


@pytest.mark.fault("W1", "N1")
@pytest.mark.parametrize(("cause", "crashes", "nodes"), [(Cause.KILLED, 1, 0), (Cause.NODE, 0, 1), (Cause.HANG, 1, 0)])
def test_a_failed_generation_is_counted_once_by_its_cause(cause: Cause, crashes: int, nodes: int, tmp_path: Path) -> None:
    stage = training(tmp_path)
    stage.worker_group.reports = {"a": report("a", WorkerPhase.PARKED, fault=PEER)}
    lost = Lost("b", node_of("b"), "gone", cause)
    state, do = stage.step(states.Running(stage.world), losses={"b": lost})
    assert isinstance(state, states.Recovering) and state.ended.lost == {"b": "gone"} and state.ended.causes == {"b": str(cause)}
    (spent,) = [one.budget for one in do if isinstance(one, actions.Spend)]
    assert (spent.crashes, spent.nodes) == (crashes, nodes)
    assert actions.Note({"counted_generation": TICKET.generation}) in do
    _, again = stage.step(states.Running(stage.world), durable=replace(stage.seen.durable, counted_generation=TICKET.generation))
    assert not [one for one in again if isinstance(one, actions.Spend)], "an earlier controller has counted it"


@pytest.mark.fault("G4", "E1")
def test_a_request_travels_with_one_member_into_the_step(tmp_path: Path) -> None:
    stage = training(tmp_path)
    stage.executor.layouts.take(None)
    running = states.Running(stage.world)
    begun = (actions.BeginRescale("manual", 2), actions.Enter(RunState.RESCALING))
    fewer = replace(stage.seen.durable, target=1, reason="manual")
    assert stage.step(running, durable=fewer) == (running, [actions.Ask(stage.world, RESCALE, begun)])
    ask = actions.Ask(stage.world, STOP, (actions.Enter(RunState.STOPPING),))
    assert stage.step(running, stop="asked to") == (running, [ask])


@pytest.mark.fault("E2")
def test_a_stop_ends_the_reading_of_a_state_at_once(tmp_path: Path) -> None:
    group = WorkerGroup(report("a", WorkerPhase.FORMING), report("b", WorkerPhase.FORMING))
    stage = Stage(group, tmp_path, world=replace(WORLD, source=StateSource(Origin.CHECKPOINT, 40, "c40", "/c40")))
    state, do = stage.step(states.Running(stage.world), stop="SIGTERM")
    assert state == states.Running(stage.world, cut_short=True)
    assert do == [actions.Enter(RunState.STOPPING), actions.Fence(("a", "b"), TICKET)]
    assert stage.step(state, stop="SIGTERM") == (state, []), "once"


@pytest.mark.fault("E3")
def test_a_stop_waits_for_its_checkpoint_and_begins_nothing_else(tmp_path: Path) -> None:
    """If the job's grace is over before the checkpoint, nothing was given up for it: the newest checkpoint is the one before."""
    stage = training(tmp_path)
    state, do = stage.loop.transition(states.Recovering(Ending(("a", "b"))), replace(stage.seen, stop="ray job stop"))
    assert do == [actions.RequestPlaces(None), actions.Enter(RunState.STOPPING)]
    save = actions.SaveParked(("a", "b"))
    assert stage.step(state) == (state, [save]) == stage.step(state)
    kept = SaveResult("r-h8-s40", 40, 8, 1.0, CommittedCheckpoint("c40", "/c40", 40))
    assert stage.step(state, answers={save: kept}) == (states.Concluding(kept), [])


def test_steps_before_a_wrong_input_are_saved(tmp_path: Path) -> None:
    """A damaged record, or a base of adapters that is gone, stops the run in the middle. Starting again does not repeat its steps."""
    stage = training(tmp_path)
    ended = Ending(("a", "b"), faults={"a": WorkerFault(FaultKind.INPUT, "bad data"), "b": PEER})
    state, _ = stage.step(states.Recovering(ended))
    save = actions.SaveParked(("a", "b"), only_newer=True)
    assert stage.step(state) == (state, [save])
    kept = SaveResult("r-h8-s40", 40, 8, 1.0, CommittedCheckpoint("c40", "/c40", 40))
    state, _ = stage.step(state, answers={save: kept})
    stage.has(kept.kept)
    outcome = stage.rounds(begin=state).outcome
    assert outcome.refused and outcome.error == "bad data; it can be resumed from step 40 (/c40)"


@pytest.mark.fault("S1")
def test_damaged_checkpoint_is_left_for_the_one_before(tmp_path: Path) -> None:
    """Both members find that the bytes of the checkpoint are damaged."""
    fault = WorkerFault(FaultKind.DATA, "c40: its checksum differs")
    group = WorkerGroup(*(report(w, WorkerPhase.PARKED, fault=fault) for w in "ab"))
    stage = Stage(group, tmp_path, world=replace(WORLD, source=StateSource(Origin.CHECKPOINT, 40, "c40", "/c40")))
    state, do = stage.step(states.Running(stage.world))
    assert isinstance(state, states.Recovering)
    assert do[0] == actions.Conclude(stage.world, state.ended, failed=True, damaged="c40")
    assert [one.name for one in do if isinstance(one, Event)] == ["checkpoint_load_failed", "generation_failed"]
    state, _ = stage.step(state)
    find = actions.FindCheckpoint(("a", "b"))
    assert stage.step(state) == (state, [find])
    running, do = stage.step(state, answers={find: CommittedCheckpoint("c30", "/c30", 30)})
    assert isinstance(running, states.Running) and running.world.source == StateSource(Origin.CHECKPOINT, 30, "c30", "/c30")
    assert actions.Launch(running.world, (), False, 0.0, "layouts") in do


def grows(folder: Path) -> Stage:
    config = {"elastic_max_workers": 4, "elastic_grow_after_s": 5.0}
    return training(folder, config=config, grow=True)


@pytest.mark.parametrize(("seconds", "hires"), [(20.0, True), (3.0, False)], ids=["they stay", "they go again"])
@pytest.mark.fault("G1", "G2")
def test_run_grows_into_places_that_have_been_free_for_long(seconds: float, hires: bool, tmp_path: Path) -> None:
    stage = grows(tmp_path)
    group = stage.worker_group

    def play(passed: float) -> None:
        there = 1.0 < passed < 1.0 + seconds
        nodes = frozenset({"n-a", "n-b", *(["n-c"] if there else [])})
        stage.executor.nodes._free = Free(group.now, {"n-c": 1} if there else {}, nodes)

    group.each_round = play
    while group.now < BEGAN + 15.0 and not group.hired:
        stage.loop.step()
    assert (group.hired == 1) is hires is bool(stage.of("growth"))
    assert stage.seen.durable.target == (3 if hires else 2) and not group.fenced
    if hires:
        assert group.now - BEGAN > 6.0, "not before they were free for 5 s"


@pytest.mark.fault("G3")
def test_run_gives_up_a_place_that_another_job_has_taken(tmp_path: Path) -> None:
    """The place was free, and the run has hired a worker for it. Another job was faster."""
    stage = grows(tmp_path)
    group = stage.worker_group
    group.on_the_way, group.places = ["new1"], Places((), frozenset({"new1"}))
    stage.durable.note(target=3, reason="growth")
    stage.loop.step()
    assert not group.dismissed, "it may still come"
    group.age = lambda worker: PLACE_S + 1.0  # type: ignore[method-assign]
    _, do = stage.step(states.Running(stage.world))
    about = {"from": 2, "to": 3, "error": "no place or not warm after 11 s"}
    request, *do = do
    assert isinstance(request, actions.RequestPlaces) and do[:3] == [
        actions.Dismiss("new1"),
        Event("rescale_abandoned", about),
        actions.Note({"target": 2, "reason": "growth"}, write=True),
    ]


@pytest.mark.fault("C5")
def test_loss_of_the_supervisor_orphans_the_run(tmp_path: Path) -> None:
    """Its workers are gone with it. The driver begins the run again from its checkpoint, so nothing is ended or ordered here."""
    stage = training(tmp_path)
    stage.executor.begin = lambda: None
    stage.run.stats.checkpoints.path = "/c30"

    def pump(seconds: float) -> list[News]:
        raise SupervisorLost("the supervisor actor does not answer")

    stage.worker_group.pump = pump  # type: ignore[method-assign]
    outcome = outcome_of(stage.loop.run, stage.run.log, stage.run.publisher)
    assert outcome == Outcome("FAILED", 40, "SupervisorLost: the supervisor actor does not answer", "/c30", orphaned=True)
    assert not stage.worker_group.orders and not stage.worker_group.ended and not stage.worker_group.dismissed


@pytest.mark.fault("S8")
def test_metrics_are_served_on_another_port_if_theirs_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        controller: Any = SimpleNamespace(_spec=SimpleNamespace(token="t"), _take=None, _known=threading.Event(), _notices=[])
        server = Controller._serve(controller, "127.0.0.1", 0, port)
        try:
            assert server.port != port and f"metrics.port = {port}: in use" in controller._notices[0]
        finally:
            server.close()


@pytest.mark.parametrize(
    ("seed", "shard_group"),
    [
        *((seed, None) for seed in range(2)),
        (9, 2),
        *(pytest.param(seed, None, marks=pytest.mark.slow) for seed in range(2, 8)),
        *(pytest.param(seed, 2, marks=pytest.mark.slow) for seed in (8, 10, 11)),
    ],
)
@pytest.mark.fault("B2")
def test_run_of_simulated_workers_outlives_random_faults(
    seed: int, shard_group: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault every second: kills, stops and lost nodes of members, spares and workers on their way; rescales between them."""
    chance = random.Random(seed)
    first = 3 if shard_group is None else 4
    world = replace(WORLD, members=tuple("abcd"[:first]), source=StateSource(Origin.MEMORY, 40))
    sharding = None if shard_group is None else {"shard_group": shard_group}
    config = {"train_steps": 240, "train_slots": 8, "train_sharding": sharding, "elastic_workers": first, "elastic_max_workers": 6}
    limits = {"max_node_losses_without_progress": 1000, "max_recoveries_without_progress": 1000}
    about: dict[str, Any] = {"replace_lost": True, "spares": seed % 2, **limits}
    group = Simulated(world.members, TICKET, 40, 240)
    stage = Stage(group, tmp_path, filled=True, state=RunState.RUNNING, world=world, config=config, **about)
    group.grid = stage.config.grid
    stage.durable.note(target=first)
    c40 = CommittedCheckpoint("c40", "/c40", 40)
    stage.run.stats.checkpoints.step, stage.run.stats.checkpoints.path = 40, "/c40"

    def save(workers: tuple[str, ...]) -> SaveResult | None:
        if not any(w in group.held for w in workers):
            return None
        return SaveResult("s", group.step, 99, 0.1, CommittedCheckpoint(f"c{group.step}", "/c", group.step))

    stage.saves(save)
    monkeypatch.setattr(coordinator, "newest_kept", lambda *about: c40)
    at = [1.0]

    def play(passed: float) -> None:
        if passed > at[0] and passed < 60.0:
            at[0] = passed + chance.uniform(0.2, 3.0)
            kind = chance.choice(["kill", "kill", "stop", "node", "rescale"])
            if kind == "rescale":
                stage.loop.commands.want(stage.config.whole(chance.randint(2, 5)), "manual")
            else:
                group.strike(kind, group.anyone(chance))

    group.each_round = play
    outcome = stage.rounds().outcome
    assert (outcome.state, outcome.step) == ("DONE", 240), outcome
    numbers = [event["generation"] for event in stage.of("generation")]
    assert all(stage.config.whole(size := len(event["workers"])) == size for event in stage.of("generation"))
    assert numbers == sorted(set(numbers)) and len(group.orders) == len(numbers) - 1, "no number is given out twice"
    assert stage.seen.budget.total.keys() <= {Cause.KILLED, Cause.HANG, Cause.NODE}, "no fault of the loop's own"
