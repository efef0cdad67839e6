"""The control loop in situations that Ray can't be brought into in time, with workers and a clock that the test controls."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.controller.run_ends import LAST, committer, completed
from tests.controller.stage import BEGAN, PEER, TICKET, WORLD, Stage, WorkerGroup, node_of, report
from vescale_ray.config import ElasticSection
from vescale_ray.controller import states
from vescale_ray.controller.control_loop import TICK_S
from vescale_ray.controller.failures.budget import Cause
from vescale_ray.controller.policy import CommittedCheckpoint
from vescale_ray.controller.protocol import Bounds, Ending, RunState, StateSource, World
from vescale_ray.controller.scaling.autoscaling import PLACE_S
from vescale_ray.controller.scaling.scaling import PLANNED_S
from vescale_ray.controller.state.durable_state import DurableState, LaunchedGeneration
from vescale_ray.controller.state.run_lifecycle import budget_of
from vescale_ray.controller.transitions.launch import evaluation_due
from vescale_ray.controller.worker_group.worker_news import Lost
from vescale_ray.quantization.fp8 import NonFiniteWeights
from vescale_ray.workers.messages import (
    CHECKPOINT,
    RESCALE,
    Evaluated,
    FaultKind,
    Noticed,
    Origin,
    Stepped,
    StepRecord,
    Ticket,
    WorkerFault,
    WorkerPhase,
)
from vescale_ray.workers.resharding.held_state import HeldState
from vescale_ray.workers.worker_fault import fault_of

pytestmark = pytest.mark.usefixtures("clock")


def awaited(stage: Stage, ended: Ending, workers: int, hire: int) -> bool:
    """True if the awaited workers come in time."""
    waiting = states.Waiting(ended, workers, hire, stage.worker_group.now)
    recovering: states.Recovering = stage.rounds(states.Recovering, begin=waiting)
    return not recovering.waited


@pytest.mark.parametrize(
    ("deaths", "elastic", "comes"),
    [(2, {"replace_lost": True}, True), (3, {"grow": True}, True), (100, {"replace_lost": True}, False), (1, {}, False)],
    ids=["two die", "three die", "all die", "nobody is hired anew"],
)
@pytest.mark.fault("W16")
def test_dying_replacement_is_rehired_up_to_the_start_limit(deaths: int, elastic: dict[str, Any], comes: bool, tmp_path: Path) -> None:
    """A single death must not end the run with "no replacement came in time"."""
    worker_group = WorkerGroup(report("a", WorkerPhase.PARKED))
    stage = Stage(worker_group, tmp_path, **elastic)
    if not elastic:
        worker_group.on_the_way.append("spare")
    died = 0

    def play(passed: float) -> None:
        nonlocal died
        if not worker_group.on_the_way:
            return
        worker = worker_group.on_the_way.pop()
        if died < deaths:
            died += 1
            worker_group.news.append(Lost(worker, None, "its process died"))
        else:
            worker_group.reports["fresh"] = report("fresh", WorkerPhase.IDLE)

    worker_group.each_round = play
    assert awaited(stage, Ending(("a",)), 2, 1 if elastic else 0) is comes
    limit = ElasticSection(workers=2).max_recoveries_without_progress
    assert worker_group.hired == (deaths + 1 if comes else limit + 1 if elastic else 0)


@pytest.mark.parametrize("kept", [0, 2])
def test_pause_of_a_lost_lone_worker_includes_its_replacement(tmp_path: Path, kept: int) -> None:
    """Nobody notices the loss before the replacement is warm. Without a checkpoint, the state is fresh, and no step ends it."""
    worker_group = WorkerGroup(report("a", WorkerPhase.TRAINING))
    alone, began = World(TICKET, ("a",), StateSource(Origin.FRESH, 0)), time.time() - 100.0
    stage = Stage(worker_group, tmp_path, (), True, RunState.RUNNING, step=0, world=alone, workers=1, replace_lost=True)
    generation = stage.executor.generation

    def step(world: World, index: int, ended: float) -> None:
        about = (1, world.ticket.generation, (1,))
        generation.stepped(world.members[0], Stepped(world.ticket, StepRecord(index, 2.0, 64, (), 1.0, 1e-3, 0.5, 0, *about), ended))

    for index in range(5):
        step(alone, index, began + index)
    newest = CommittedCheckpoint("c2", "/c2", kept) if kept else None
    stage.has(newest)
    stage.lose("a", Cause.KILLED)
    worker_group.each_round = lambda passed: stage.warm("new1") if worker_group.hired and "new1" not in worker_group.reports else None
    while (following := stage.executor.generation.world) == alone:
        stage.loop.step()
    assert following.members == ("new1",) and following.source.step == kept
    step(following, kept, began + 24.0)
    (event,) = stage.of("rescaled")
    # The new generation's first step began at 23.5 s. Step 5 ended at 4 s, and step 2 at 1 s.
    assert event["pause_seconds"] == pytest.approx(23.5 - (1.0 if kept else 4.0))
    assert stage.run.stats.rescales.pauses.sum == pytest.approx(event["pause_seconds"])


def test_notice_of_several_workers_is_one_warning(tmp_path: Path) -> None:
    about = [replace(report(worker, WorkerPhase.TRAINING), items=((1, Noticed(TICKET, "Layer breaks the graph")),)) for worker in "ab"]
    stage = Stage(WorkerGroup(*about), tmp_path, filled=True, state=RunState.RUNNING)
    for _ in range(2):
        stage.loop.step()
    assert [event["text"] for event in stage.of("warning")] == ["Layer breaks the graph"]
    assert stage.run.snapshot.warnings == ("Layer breaks the graph",)


def test_hung_lone_worker_without_replacement_gets_more_time(tmp_path: Path) -> None:
    def replaced(name: str, **changes: Any) -> bool:
        config = {"elastic_workers": 1, "run_name": name, **changes}
        return bool(Stage(WorkerGroup(), tmp_path / name, config=config).executor.detector.hangs.replaced)

    assert not replaced("alone")
    for name, changes in (("lost", {"elastic_replace_lost": True}), ("grow", {"elastic_grow": True})):
        assert replaced(name, **changes)
    assert replaced("spare", elastic_spares=1, elastic_max_workers=2)


def test_loss_between_a_stop_and_its_boundary_still_stops(tmp_path: Path) -> None:
    """The transition from STOPPING to RESCALING is forbidden: the run would fail, and its workers' state would be lost."""
    worker_group = WorkerGroup(report("a", WorkerPhase.TRAINING), report("b", WorkerPhase.TRAINING))
    stage = Stage(worker_group, tmp_path, filled=True, state=RunState.STOPPING)
    stage.loop.commands.end("SIGTERM")

    def play(passed: float) -> None:
        if passed > 1.0 and "b" in worker_group.reports:
            stage.lose("b", Cause.KILLED)
        if worker_group.fenced:
            worker_group.reports["a"] = report("a", WorkerPhase.PARKED, fault=PEER)

    worker_group.each_round = play
    ending = stage.watch()
    assert ending.living == ("a",) and set(ending.lost) == {"b"} and worker_group.fenced
    assert stage.run.stats.state is RunState.STOPPING and stage.run.stats.rescale is None


@pytest.mark.parametrize("state", [RunState.STOPPING, RunState.STARTING, RunState.RESCALING, RunState.RUNNING])
def test_a_run_is_done_after_its_last_step_from_every_state(tmp_path: Path, state: RunState) -> None:
    """A stop may come during the last step. If a run has one step left, its first report may be that it is done."""
    stage = Stage(WorkerGroup(report("a", WorkerPhase.FINISHED), report("b", WorkerPhase.FINISHED)), tmp_path, state=state, step=60)
    committer(stage, LAST)
    outcome = stage.rounds(begin=completed()).outcome
    assert (outcome.state, outcome.step, outcome.checkpoint) == ("DONE", 60, "/c60")
    assert stage.run.stats.state is RunState.DONE


def test_storage_timeout_keeps_counting_over_waits_for_workers(tmp_path: Path) -> None:
    """A worker is lost every 20 s and replaced 5 s later. The outage still counts from its beginning."""
    group = WorkerGroup(report("a", WorkerPhase.PARKED), report("b", WorkerPhase.PARKED))
    stage = Stage(group, tmp_path, bounds=Bounds(storage=60.0, replace=600.0), min_workers=2, replace_lost=True)

    def newer() -> CommittedCheckpoint:
        raise OSError(5, "out of reach")

    stage.has(CommittedCheckpoint("c30", "/c30", 30), newer)

    def play(passed: float) -> None:
        if passed % 20 < 0.1 and passed > 1 and len(group.reports) == 2:
            stage.lose(list(group.reports)[-1], Cause.NODE)
        if passed % 20 > 5 and group.on_the_way:
            stage.warm(group.on_the_way.pop())

    group.each_round = play
    outcome = stage.rounds(begin=states.Recovering(Ending(("a", "b")))).outcome
    assert "no worker holds a state" in outcome.error and 60.0 < group.now - BEGAN < 90.0
    assert len(stage.of("storage_unreachable")) == 1


def test_weights_that_are_no_numbers_end_the_run_unsaved(tmp_path: Path) -> None:
    """Every state in memory has them, so that another attempt, or a last checkpoint, is of no use."""
    said = "NonFiniteWeights: Inf or NaN in 'ffn.up_proj.weight' (2 tiles)"
    bad = fault_of(NonFiniteWeights("Inf or NaN in 'ffn.up_proj.weight' (2 tiles)"))
    assert bad == WorkerFault(FaultKind.NUMBERS, said)
    group = WorkerGroup(*(report(w, WorkerPhase.PARKED, fault=bad) for w in "ab"))
    stage = Stage(group, tmp_path)
    stage.has(CommittedCheckpoint("c30", "/c30", 30))
    outcome = stage.rounds().outcome
    assert not outcome.refused and outcome.error == f"{said}; it can be resumed from step 30 (/c30)"
    assert stage.run.stats.nonfinite_weights == 1 and not stage.of("checkpoint_failed")
    assert stage.of("generation_failed")[-1]["nonfinite_weights"] is True


def test_lost_evaluation_is_made_up_and_none_is_made_twice(tmp_path: Path) -> None:
    config = {"train_eval_every": 20, "data_eval_samples": 8}
    stage = Stage(WorkerGroup(report("a", WorkerPhase.PARKED)), tmp_path, config=config)
    spec: Any = SimpleNamespace(source=StateSource(Origin.CHECKPOINT, 20))
    stage.executor.generation.evaluated(Evaluated(TICKET, 40, 1.5, 8))
    evaluated = stage.run.stats.evaluations
    due = [step for step in (0, 1, 20, 21, 40, 60) if evaluation_due(step, stage.config, spec, evaluated)]
    assert due == [0, 60], "that of step 20 was made before the checkpoint that the run has begun with, that of 40 is there"
    assert [step for step in (39, 40, 41) if evaluation_due(step, stage.config, spec, ())] == [40]


def trains(folder: Path, worker_group: WorkerGroup, **about: Any) -> Stage:
    """A stage whose generation trains, and has done a step."""
    world = replace(WORLD, members=tuple(w for w in "abcd" if w in worker_group.reports))
    worker_group.infos |= {w: node_of(w) for w in (*worker_group.reports, *worker_group.on_the_way)}
    stage = Stage(worker_group, folder, filled=True, state=RunState.RUNNING, world=world, **about)
    stage.run.stats.steps.last["generation"] = TICKET.generation
    return stage


@pytest.mark.parametrize(
    ("writes", "took_s", "waits_s"),
    [
        *[("a worker", None, 30.0), ("a commit", 40.0, 80.0), ("a commit", 1e4, 300.0), ("", None, 0.0)],
        # Layouts: a restarted controller knows none at first, and must not number the ranks as if all shards were equal.
        *[("plans", None, 3.0), ("no plans", None, PLANNED_S)],
    ],
)
def test_rescale_awaits_a_checkpoint_write_but_a_drain_does_not(
    writes: str, took_s: float | None, waits_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change gives up a checkpoint that is being written. With a change a minute, and a minute's writing, there would never be a
    checkpoint."""
    worker_group = WorkerGroup(*(replace(report(w, WorkerPhase.TRAINING), writing=writes == "a worker" and w == "b") for w in "ab"))
    stage = trains(tmp_path, worker_group)
    if took_s is not None:
        stage.run.stats.checkpoints.seconds = took_s
    planned = {"plans": lambda: worker_group.now > 53.0, "no plans": lambda: False}.get(writes, lambda: True)
    monkeypatch.setattr(type(stage.executor.layouts), "planned", lambda self, *worlds: planned())
    monkeypatch.setattr(type(stage.committer), "busy", property(lambda self: writes == "a commit"))
    stage.loop.commands.want(1, "manual")
    while not worker_group.asked:
        stage.loop.step()
    assert worker_group.asked == [RESCALE] and worker_group.now - BEGAN == pytest.approx(waits_s, abs=3 * TICK_S)
    other = WorkerGroup(*worker_group.reports.values())
    drained = trains(tmp_path / "drained", other)
    drained.drain("b")
    drained.loop.step()
    assert other.asked == [RESCALE], "whose node goes does not wait"


@pytest.mark.parametrize(("warming", "hiring", "wanted"), [("", 0, 2), ("x", 0, 3), ("xy", 0, 4), ("x", 1, 4), ("xy", 3, 5)])
@pytest.mark.fault("N7")
def test_a_drain_leaves_workers_on_the_way_alone(warming: str, hiring: int, wanted: int, tmp_path: Path) -> None:
    """Three workers become five, and one of the three is drained while the two are still warming. The two must not be dismissed."""
    worker_group = WorkerGroup(*(report(w, WorkerPhase.TRAINING) for w in "abc"))
    worker_group.on_the_way, worker_group.hiring = list(warming), hiring
    stage = trains(tmp_path, worker_group, config={"elastic_workers": 3, "elastic_max_workers": 6})
    stage.loop.commands.want(5, "manual")
    stage.drain("c")
    stage.loop.step()
    assert worker_group.asked == [RESCALE] and stage.of("rescale_started")[0]["reason"] == "drain" and not worker_group.dismissed
    assert stage.loop.commands.target == wanted
    assert stage.seen.durable.reason == ("manual" if warming or hiring else "drain"), "those on their way were not asked for by a drain"


@pytest.mark.parametrize(("spare", "parks"), [("ready", True), ("not reached", False), ("warming", False), ("leaving", False)])
def test_drain_counts_only_workers_that_can_join_at_once(spare: str, parks: bool, tmp_path: Path) -> None:
    """Two of four workers are drained, one can join, and three are the minimum. Training must not stay on the node until it dies."""
    worker_group = WorkerGroup(*(report(w, WorkerPhase.TRAINING) for w in "abcd"))
    if spare == "warming":
        worker_group.on_the_way = ["x"]
    else:
        worker_group.reports["x"] = report("x", WorkerPhase.IDLE)
    if spare == "not reached":
        worker_group.ask_reachability = lambda tries, wait_s: SimpleNamespace(unreached=lambda: None)  # type: ignore[method-assign]
    stage = trains(tmp_path, worker_group, config={"elastic_workers": 4}, min_workers=3, replace_lost=True, spares=1, max_workers=6)
    stage.loop.commands.want(4, "manual")
    for _ in range(5):
        stage.loop.step()  # the spare is admitted
    worker_group.asked.clear()
    stage.drain(*("cdx" if spare == "leaving" else "cd"))
    stage.loop.step()
    assert worker_group.asked[:1] == [RESCALE if parks else CHECKPOINT]


def test_warm_workers_that_die_before_they_join_are_counted(tmp_path: Path) -> None:
    """A spare that keeps dying soon after it is warm must not be hired again at once for ever."""
    worker_group = WorkerGroup(*(report(w, WorkerPhase.TRAINING) for w in "ab"))
    stage = trains(tmp_path, worker_group)
    for worker, about in (("s", node_of("s")), ("a", node_of("a")), ("x", None)):
        worker_group.news = [Lost(worker, about, f"{worker} died")]
        stage.loop.observe()
    scaling = stage.executor.scaling
    assert scaling.fleeting == ["s died"] and scaling.hire_failures == ["x died"], "a member that is lost says nothing of spares"
    assert stage.run.stats.lost == 2, "who never came up is not lost: checkpoints are made no more often for that"


@pytest.mark.parametrize(
    ("origin", "phase", "stepped", "cut"),
    [
        (Origin.CHECKPOINT, WorkerPhase.FORMING, False, True),
        (Origin.FRESH, WorkerPhase.FORMING, False, True),
        (Origin.MEMORY, WorkerPhase.FORMING, False, False),
        # A restarted controller does not know yet that the members have their state. The run's first generation trains for days.
        (Origin.FRESH, WorkerPhase.TRAINING, False, False),
        (Origin.FRESH, WorkerPhase.FORMING, True, False),
    ],
)
def test_a_stop_waits_for_no_large_state_to_be_read(origin: Origin, phase: WorkerPhase, stepped: bool, cut: bool, tmp_path: Path) -> None:
    """A stop that waits for the whole state and a step would exceed a grace of a minute: the run is killed. After 11 min it is FAILED."""
    worker_group = WorkerGroup(report("a", WorkerPhase.FORMING), report("b", phase))
    stage = Stage(worker_group, tmp_path, world=replace(WORLD, source=StateSource(origin, 40)))
    if stepped:
        stage.run.stats.steps.last["generation"] = TICKET.generation

    def play(passed: float) -> None:
        if passed > 1:
            stage.loop.commands.end("SIGTERM")
        if worker_group.fenced and passed > 3 or passed > 20:
            worker_group.reports |= {w: report(w, WorkerPhase.PARKED, fault=PEER) for w in "ab"}

    worker_group.each_round = play
    ended = stage.watch()
    assert ended.living == ("a", "b")
    assert [who for _, who in worker_group.fenced][:1] == ([("a", "b")] if cut else [])
    assert (stage.run.stats.state is RunState.STOPPING) is cut
    assert (stage.budget.tries == 0) is cut, "a stop is no failure"
    assert "checkpoint_load_failed" not in stage.events


@pytest.mark.fault("N8")
def test_parked_workers_save_their_state_where_a_node_is_to_go(tmp_path: Path) -> None:
    """No worker trains at that time. If the notice is missed, the only copies go with the node."""
    worker_group = WorkerGroup(*(report(w, WorkerPhase.PARKED) for w in "ab"))
    worker_group.infos |= {w: node_of(w) for w in "ab"}
    stage = Stage(worker_group, tmp_path, config={"elastic_workers": 3}, min_workers=3, replace_lost=True)
    stage.run.stats.checkpoints.step = 30
    made, held = committer(stage, None), HeldState(TICKET.generation, 2, 41, (0, 1))

    def play(passed: float) -> None:
        if passed > 2:
            stage.drain("b")
        phase = WorkerPhase.SAVING if 2 < passed < 6 else WorkerPhase.PARKED
        worker_group.reports |= {w: replace(report(w, phase if w == "a" else WorkerPhase.PARKED), held=(held,)) for w in "ab"}
        if passed > 4:
            worker_group.reports["c"] = report("c", WorkerPhase.IDLE)

    worker_group.each_round = play
    assert awaited(stage, Ending(("a", "b"), {"c": "its process died"}), 3, 1)
    assert made == [("a", "b")] and [event["workers"] for event in stage.of("node_draining")] == [["b"]]
    assert worker_group.now - BEGAN >= 6.0, "who still writes would be taken for one that holds nothing, and refuse to join"


@pytest.mark.parametrize("controllers", [20, 22, 23])
def test_run_with_failing_controllers_saves_its_workers_state(tmp_path: Path, controllers: int) -> None:
    """The workers train on meanwhile. Without a save, all that they hold since the last checkpoint is lost when the run ends."""
    worker_group = WorkerGroup(report("a", WorkerPhase.TRAINING), report("b", WorkerPhase.TRAINING))
    durable = DurableState(
        "r", 7, LaunchedGeneration.of(WORLD), target=2, highest_step=40, epoch=2, controller_restarts=controllers, failures={}
    )
    stage = Stage(worker_group, tmp_path, durable=durable, config={"elastic_max_controller_restarts_without_progress": 20})
    record = StepRecord(40, 2.0, 192, (1,), 1.0, 1e-3, 0.1, 0, 2, TICKET.generation, (1,) * 2)
    stepped = Stepped(TICKET, record, time.time())
    made = committer(stage, None)
    stage.has(CommittedCheckpoint("c30", "/c30", 30))
    asked: list[float] = []

    def ask(workers: Any, ticket: Ticket, flags: int) -> bool:
        asked.append(worker_group.now)
        return True

    def play(passed: float) -> None:
        if asked:
            worker_group.reports["a"] = replace(report("a", WorkerPhase.PARKED), items=((1, stepped),))
            worker_group.reports["b"] = report("b", WorkerPhase.PARKED)

    worker_group.ask, worker_group.each_round = ask, play  # type: ignore[method-assign]
    outcome = stage.rounds(begin=states.Starting()).outcome
    assert outcome.state == "FAILED" and outcome.error.startswith(f"the controller was restarted {controllers + 1} times")
    assert made[:1] == ([("a", "b")] if controllers < 23 else [()]), "the fourth that tries would come to nothing as well"
    # If the controller is killed during the save, the next one neither goes on nor calls the run stopped.
    stage.durable.update()
    last = stage.written[-1]
    assert last.stop_reason is None and last.controller_restarts == controllers + 1
    assert last.highest_step == (41 if controllers < 23 else 40)
    again = budget_of(stage.config, replace(last, epoch=9), last.highest_step)
    assert again.controllers == controllers + 2 and again.verdict is not None


def test_leavers_stay_until_the_next_generation_has_made_a_step(tmp_path: Path) -> None:
    """Until then the first copies are on their way. If a worker is lost meanwhile, its state may be with leavers alone."""
    worker_group = WorkerGroup(*(report(w, WorkerPhase.FORMING) for w in "ab"), *(report(w, WorkerPhase.PARKED) for w in "lm"))
    stage = Stage(worker_group, tmp_path, ("l", "m"))
    for _ in range(3):
        stage.loop.step()
    for worker in "ab":
        stage.fill(worker)
    stage.loop.step()
    assert stage.seen.leavers == ("l", "m") and not worker_group.dismissed
    stage.run.stats.steps.last["generation"] = TICKET.generation
    stage.loop.step()
    assert not stage.seen.leavers and worker_group.dismissed == ["l", "m"]


def test_failure_counted_by_an_earlier_controller_counts_once(tmp_path: Path) -> None:
    """While the run waits for a replacement, a restarted controller must not count the failure again, nor a lost node as a crash."""
    worker_group = WorkerGroup(report("a", WorkerPhase.PARKED, fault=PEER), report("b", WorkerPhase.TRAINING))
    first = Stage(worker_group, tmp_path, min_workers=2, replace_lost=True)
    first.lose("b", Cause.NODE)
    first.rounds(states.Waiting)
    assert first.written[-1].node_losses == 1, "it is written down before the wait"
    worker_group = WorkerGroup(report("a", WorkerPhase.PARKED, fault=PEER))
    again = Stage(worker_group, tmp_path / "again", durable=first.written[-1])
    ending = again.watch()
    assert set(ending.lost) == {"b"}
    assert (again.budget.nodes, again.budget.crashes) == (
        1,
        0,
    ) and again.budget.total == {Cause.NODE: 1}
    other = replace(WORLD, ticket=Ticket(8, 1))
    third = Stage(
        WorkerGroup(report("a", WorkerPhase.PARKED, other.ticket, PEER)), tmp_path / "third", durable=first.written[-1], world=other
    )
    third.executor.generation.adopt(other)
    third.watch()
    assert third.budget.crashes == 1, "of another generation"


@pytest.mark.parametrize("heard", [True, False], ids=["the answer came", "the answer came late"])
def test_requested_change_is_no_failure_if_its_answer_is_late(tmp_path: Path, heard: bool) -> None:
    stage = Stage(WorkerGroup(report("a", WorkerPhase.PARKED), report("b", WorkerPhase.PARKED)), tmp_path, state=RunState.RUNNING)
    stage.durable.note(reason="manual")
    if heard:
        stage.executor.generation.begin_rescale("drain", 2)
        stage.run.enter(RunState.RESCALING)
    assert stage.watch().clean
    assert stage.run.stats.rescale is not None and stage.run.stats.rescale.reason == ("drain" if heard else "manual")


def test_change_during_a_controller_kill_is_no_failure(tmp_path: Path) -> None:
    """The workers stop at the boundary as they were asked to. Neither the next controller nor the alerts may take that for a failure."""
    stage = Stage(WorkerGroup(report("a", WorkerPhase.PARKED), report("b", WorkerPhase.PARKED)), tmp_path)
    stage.inherit()
    stage.durable.note(reason="manual")
    assert stage.watch().clean
    assert stage.run.stats.rescale is not None and stage.run.stats.rescale.reason == "manual"


@pytest.mark.parametrize(("asked", "hired"), [(1, 2), (3, 3)])
def test_a_rescale_is_heeded_while_the_first_workers_are_awaited(asked: int, hired: int, tmp_path: Path) -> None:
    """The run must not wait three minutes for the number of workers that it was started with."""
    worker_group = WorkerGroup()
    stage = Stage(worker_group, tmp_path, durable=DurableState("r", 7, target=2, epoch=1), config={"elastic_max_workers": 4})

    def play(passed: float) -> None:
        if passed > 1.0:
            worker_group.reports["new1"] = report("new1", WorkerPhase.IDLE, Ticket(0, 0))
        if passed > 2.0:
            stage.loop.commands.want(asked, "manual")
        if passed > 3.0 and asked > 2:
            worker_group.reports.update({w: report(w, WorkerPhase.IDLE, Ticket(0, 0)) for w in worker_group.on_the_way})

    worker_group.each_round = play
    running = stage.rounds(states.Running, begin=states.Gathering(BEGAN + 180.0))
    assert worker_group.now - BEGAN < 4.0 and worker_group.hired == hired and running.world.size == asked


def test_cut_off_node_is_reused_if_no_other_has_a_place(tmp_path: Path) -> None:
    worker_group = WorkerGroup(report("a", WorkerPhase.PARKED))
    stage = Stage(worker_group, tmp_path, replace_lost=True, min_workers=2)
    nodes = stage.executor.nodes
    nodes.exclude("n2")
    nodes._draining = {"n3": 1.0}
    freed: list[tuple[float, frozenset[str]]] = []
    hired: list[frozenset[str]] = []

    def hire(avoid: Collection[str] = ()) -> None:
        hired.append(frozenset(avoid))
        worker_group.on_the_way.append("new")

    def overconstrained(avoid: Collection[str]) -> list[str]:
        freed.append((worker_group.now - BEGAN, frozenset(avoid)))
        return []

    worker_group.hire, worker_group.overconstrained = hire, overconstrained  # type: ignore[method-assign]
    worker_group.each_round = lambda passed: (
        worker_group.reports.update(new=report("new", WorkerPhase.IDLE)) if passed > 2 * PLACE_S else None
    )
    assert awaited(stage, Ending(("a",)), 2, 1)
    assert hired == [{"n2", "n3"}]
    assert {avoid for at, avoid in freed if at < PLACE_S} == {frozenset({"n2", "n3"})}
    assert {avoid for at, avoid in freed if at > PLACE_S + 0.2} == {frozenset({"n3"})}


def test_idle_round_leaves_the_state_equal_and_orders_nothing(tmp_path: Path) -> None:
    stage = trains(tmp_path, WorkerGroup(report("a", WorkerPhase.TRAINING), report("b", WorkerPhase.TRAINING)))
    before = stage.loop.state
    stage.loop.step()
    assert stage.loop.state == before == states.Running(stage.world) and not stage.worker_group.orders and not stage.worker_group.asked
