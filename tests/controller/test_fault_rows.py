"""The rows of the fault tables (docs/fault-tolerance.md) that the control loop decides. The tests check its orders without Ray."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.controller.stage import BEGAN, PEER, TICKET, WORLD, Stage, WorkerGroup, node_of, report
from vescale_ray.controller import states
from vescale_ray.controller.checkpointing import coordinator
from vescale_ray.controller.checkpointing.committer import SaveResult
from vescale_ray.controller.failures.budget import Cause
from vescale_ray.controller.policy import CommittedCheckpoint
from vescale_ray.controller.protocol import RunState
from vescale_ray.controller.state.durable_state import DurableState, LaunchedGeneration
from vescale_ray.controller.statistics.step_stats import StepStats
from vescale_ray.controller.worker_group.worker_news import Lost
from vescale_ray.workers.messages import RESCALE, FaultKind, Give, Join, Origin, Ticket, WorkerFault, WorkerPhase
from vescale_ray.workers.resharding.held_state import HeldState

pytestmark = pytest.mark.usefixtures("clock")

THREE = replace(WORLD, members=("a", "b", "c"))


def running(folder: Path, **about: Any) -> tuple[WorkerGroup, Stage]:
    """Three workers that train, on nodes of their own, after a step."""
    worker_group = WorkerGroup(*(report(w, WorkerPhase.TRAINING) for w in "abc"))
    worker_group.infos |= {w: node_of(w) for w in "abcdef"}
    config = {"elastic_workers": 3, "elastic_max_workers": 6, **about.pop("config", {})}
    stage = Stage(worker_group, folder, filled=True, state=RunState.RUNNING, world=THREE, config=config, **about)
    stage.loop.commands.want(3, "manual")
    stage.run.stats.steps.last["generation"] = TICKET.generation
    stage.run.stats.steps.step = 40
    return worker_group, stage


def park(
    worker_group: WorkerGroup, workers: str, *, copies: bool = True, fault: WorkerFault | None = PEER, step: int = 40, own: bool = True
) -> None:
    """These workers have left the generation. They hold their own shards of ``step``, and with ``copies`` those of the rank before."""
    for worker in workers:
        rank = "abc".index(worker)
        ranks = (*([rank] if own else []), *([(rank - 1) % 3] if copies else []))
        held = (HeldState(TICKET.generation, 3, step, ranks),) if ranks else ()
        worker_group.reports[worker] = replace(report(worker, WorkerPhase.PARKED, fault=fault), held=held)


def next_generation(stage: Stage) -> tuple[tuple[str, ...], Origin, int]:
    """Sorted members, origin and step of the generation that the loop orders next."""
    before = len(stage.worker_group.orders)
    while len(stage.worker_group.orders) == before:
        stage.loop.step()
    world = stage.loop.state.world
    assert {w for w, order in stage.worker_group.orders[-1].items() if isinstance(order, Join)} == set(world.members)
    return tuple(sorted(world.members)), world.source.origin, world.source.step


@pytest.mark.fault("W1")
def test_killed_workers_shard_comes_from_its_copy(tmp_path: Path) -> None:
    worker_group, stage = running(tmp_path)
    stage.lose("b", Cause.KILLED)
    stage.loop.step()
    ((_, told),) = worker_group.fenced
    assert told == ("a", "c"), "those that are left are told at once"
    park(worker_group, "ac")
    assert next_generation(stage) == (("a", "c"), Origin.MEMORY, 40)
    assert stage.loop.state.world.source.lender == "peer" and stage.loop.commands.target == 2


@pytest.mark.fault("W1")
def test_a_lost_worker_is_replaced_if_that_is_wanted(tmp_path: Path) -> None:
    worker_group, stage = running(tmp_path, replace_lost=True, min_workers=3)
    stage.lose("b", Cause.KILLED)
    park(worker_group, "ac")
    stage.rounds(states.Waiting)
    assert worker_group.hired == 1
    stage.warm("new1")
    assert next_generation(stage) == (("a", "c", "new1"), Origin.MEMORY, 40)


@pytest.mark.fault("W2")
def test_silent_worker_is_ended_and_the_others_go_on(tmp_path: Path) -> None:
    worker_group, stage = running(tmp_path)
    hangs = stage.executor.detector.hangs
    hangs.begin(TICKET, 3)
    for step in range(1, 20):
        for _ in "abc":
            hangs.stepped(TICKET, step, 0.1)
    worker_group.reports |= {w: replace(report(w, WorkerPhase.TRAINING), waiting=True, beats=7) for w in "ac"}
    for _ in range(3):
        stage.loop.step()
    worker_group.silence["b"] = worker_group.now
    while not worker_group.ended:
        stage.loop.step()
    assert set(worker_group.ended) == {"b"} and worker_group.now - BEGAN < 20.0
    stage.lose("b", Cause.HANG)
    park(worker_group, "ac")
    assert next_generation(stage) == (("a", "c"), Origin.MEMORY, 40)
    assert stage.budget.total == {Cause.HANG: 1}


@pytest.mark.fault("W4")
def test_a_worker_that_hangs_as_its_group_forms_is_ended(tmp_path: Path) -> None:
    worker_group = WorkerGroup(report("a", WorkerPhase.FORMING), report("b", WorkerPhase.FORMING))
    stage = Stage(worker_group, tmp_path)
    worker_group.silence["b"] = worker_group.now
    while not worker_group.ended:
        stage.loop.step()
    assert set(worker_group.ended) == {"b"}


@pytest.mark.fault("W6")
def test_without_a_copy_the_run_goes_back_to_its_checkpoint(tmp_path: Path) -> None:
    worker_group, stage = running(tmp_path)
    stage.run.stats.checkpoints.step = 30
    stage.has(CommittedCheckpoint("c30", "/c30", 30))
    stage.lose("b", Cause.KILLED)
    stage.lose("c", Cause.KILLED)
    park(worker_group, "a")
    assert next_generation(stage) == (("a",), Origin.CHECKPOINT, 30)
    assert stage.loop.state.world.source.commit == "c30"


@pytest.mark.fault("W7")
def test_loss_in_a_recovery_leads_to_another_attempt(tmp_path: Path) -> None:
    worker_group, stage = running(tmp_path)
    stage.lose("b", Cause.KILLED)
    park(worker_group, "ac", step=40)
    next_generation(stage)
    world = stage.loop.state.world
    for worker in "ac":
        worker_group.reports[worker] = report(worker, WorkerPhase.FORMING, world.ticket)
    stage.loop.step()
    stage.lose("c", Cause.KILLED)
    held = (HeldState(TICKET.generation, 3, 40, (0, 1, 2)),)
    worker_group.reports["a"] = replace(report("a", WorkerPhase.PARKED, world.ticket, PEER), held=held)
    assert next_generation(stage) == (("a",), Origin.MEMORY, 40)
    assert stage.loop.state.world.ticket.attempt == 2, "two failures without a new step"


@pytest.mark.fault("W9")
def test_leavers_serve_a_recovery_until_the_first_step_is_done(tmp_path: Path) -> None:
    """Three workers become two, and one of the two is lost before the first step. The leaver's shard is still there."""
    worker_group, stage = running(tmp_path)
    stage.loop.commands.want(2, "manual")
    while RESCALE not in worker_group.asked:
        stage.loop.step()
    park(worker_group, "abc", fault=None, copies=False)
    members, _, _ = next_generation(stage)
    (leaver,) = set("abc") - set(members)
    orders = worker_group.orders[-1]
    assert isinstance(orders[leaver], Give) and stage.seen.leavers == (leaver,)
    world = stage.loop.state.world
    lost, left = members
    ranks = {w: "abc".index(w) for w in "abc"}
    stage.lose(lost, Cause.KILLED)
    for worker in (left, leaver):
        held = (HeldState(TICKET.generation, 3, 40, (ranks[worker], (ranks[worker] - 1) % 3)),)
        worker_group.reports[worker] = replace(report(worker, WorkerPhase.PARKED, world.ticket, PEER), held=held)
    assert next_generation(stage) == (tuple(sorted((left, leaver))), Origin.MEMORY, 40)


@pytest.mark.fault("W10")
def test_a_worker_that_dies_before_it_is_warm_is_hired_again(tmp_path: Path) -> None:
    worker_group = WorkerGroup()
    stage = Stage(worker_group, tmp_path, durable=DurableState("r", 7, target=2, epoch=1))
    stage.loop.state = states.Gathering(worker_group.now + 100.0)
    stage.loop.step()
    assert worker_group.hired == 2
    worker_group.on_the_way.remove("new1")
    worker_group.news.append(Lost("new1", None, "its process died"))
    stage.loop.step()
    assert worker_group.hired == 3
    for worker in list(worker_group.on_the_way):
        stage.warm(worker)
    stage.rounds(states.Running)
    assert stage.loop.state.world.source.origin is Origin.FRESH and stage.loop.state.world.size == 2


@pytest.mark.fault("W11")
def test_computing_survivors_may_finish_their_step_after_a_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker_group, stage = running(tmp_path)
    monkeypatch.setattr(StepStats, "last_seconds", property(lambda self: 4.0))
    stage.lose("b", Cause.KILLED)
    for _ in range(100):
        stage.loop.step()
    assert not worker_group.ended, "ten seconds into a step of four: three times as long counts as usual"
    park(worker_group, "ac")
    assert next_generation(stage)[0] == ("a", "c")


@pytest.mark.fault("W13")
def test_a_spare_takes_the_place_of_a_lost_worker_at_once(tmp_path: Path) -> None:
    worker_group, stage = running(tmp_path, spares=1, max_workers=4, replace_lost=True)
    worker_group.reports["d"] = report("d", WorkerPhase.IDLE, Ticket(0, 0))
    for _ in range(4):
        stage.loop.step()
    stage.lose("b", Cause.KILLED)
    park(worker_group, "ac")
    assert next_generation(stage) == (("a", "c", "d"), Origin.MEMORY, 40)


@pytest.mark.fault("N5")
def test_a_joiner_that_does_not_reach_the_members_is_refused(tmp_path: Path) -> None:
    worker_group, stage = running(tmp_path)
    stage.loop.commands.want(4, "manual")
    worker_group.reports["d"] = report("d", WorkerPhase.IDLE, Ticket(0, 0))
    worker_group.ask_reachability = lambda tries, wait_s: SimpleNamespace(  # type: ignore[method-assign]
        unreached=lambda: {w: frozenset(others) if w == "d" else frozenset(others) & {"d"} for w, others in tries.items()}
    )
    while not stage.of("joiner_refused") and worker_group.now < BEGAN + 60:
        stage.loop.step()
    (refused,) = stage.of("joiner_refused")
    assert refused["worker"] == "d" and "d" in worker_group.dismissed and RESCALE not in worker_group.asked


@pytest.mark.fault("N6")
def test_draining_node_leaves_at_a_boundary_and_gives_its_shard(tmp_path: Path) -> None:
    worker_group, stage = running(tmp_path)
    stage.drain("c")
    stage.loop.step()
    assert worker_group.asked == [RESCALE] and stage.run.stats.state is RunState.RESCALING
    park(worker_group, "abc", fault=None)
    assert next_generation(stage) == (("a", "b"), Origin.MEMORY, 40)
    assert isinstance(worker_group.orders[-1].get("c"), Give | None) and stage.budget.total == {}


@pytest.mark.fault("C1", "C3")
def test_new_controller_adopts_the_generation_and_its_loss(tmp_path: Path) -> None:
    worker_group = WorkerGroup(*(report(w, WorkerPhase.TRAINING) for w in "abc"))
    worker_group.infos |= {w: node_of(w) for w in "abc"}
    durable = DurableState("r", 7, LaunchedGeneration.of(replace(THREE, source=replace(THREE.source, step=40))), target=3, epoch=2)
    stage = Stage(worker_group, tmp_path, world=THREE, durable=durable, config={"elastic_workers": 3})
    stage.loop.state = states.Starting()
    stage.loop.follow()
    assert isinstance(stage.loop.state, states.Adopting) and stage.written[-1].controller_restarts == 1
    del worker_group.reports["b"]  # killed together with the controller, so that its death is not reported
    park(worker_group, "ac")
    assert next_generation(stage) == (("a", "c"), Origin.MEMORY, 40)


@pytest.mark.fault("C4")
def test_workers_train_on_while_a_place_for_another_is_awaited(tmp_path: Path) -> None:
    """Ray's control store does not answer, and the hire is under way for as long as that takes."""
    worker_group, stage = running(tmp_path)
    worker_group.hire = lambda avoid=(): setattr(worker_group, "hiring", worker_group.hiring + 1)  # type: ignore[method-assign]
    stage.loop.commands.want(4, "manual")
    for _ in range(100):
        stage.loop.step()
    assert worker_group.hiring == 1 and not worker_group.asked and stage.run.stats.state is RunState.RUNNING
    worker_group.hiring = 0
    stage.warm("d")
    while RESCALE not in worker_group.asked:
        stage.loop.step()


@pytest.mark.fault("S5")
def test_a_recovery_from_memory_asks_no_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker_group, stage = running(tmp_path)
    stage.run.stats.checkpoints.step = 40
    asked: list[Any] = []
    monkeypatch.setattr(coordinator, "newest_kept", lambda *about: asked.append(about))
    stage.lose("b", Cause.KILLED)
    park(worker_group, "ac")
    assert next_generation(stage) == (("a", "c"), Origin.MEMORY, 40) and not asked


@pytest.mark.fault("W1", "B1")
def test_a_worker_that_raises_again_and_again_ends_the_run(tmp_path: Path) -> None:
    """A bug in the step: after the last allowed recovery without a new step, the run is FAILED with the error and where to resume."""
    worker_group, stage = running(tmp_path, config={"elastic_max_recoveries_without_progress": 1})
    stage.has(CommittedCheckpoint("c30", "/c30", 30), lambda: None)
    stage.saves(lambda workers: None)
    own = WorkerFault(FaultKind.OWN, "ValueError: a bad batch")
    for _ in range(2):
        world = stage.loop.state.world
        for rank, worker in enumerate(world.members):
            held = (HeldState(TICKET.generation, 3, 40, ("abc".index(worker),)),)
            fault = own if rank == 0 else PEER
            worker_group.reports[worker] = replace(report(worker, WorkerPhase.PARKED, world.ticket, fault), held=held)
        while isinstance(stage.loop.state, states.Running) and stage.loop.state.world == world:
            stage.loop.step()
    outcome = stage.rounds(states.Finished).outcome
    assert outcome.state == "FAILED" and "a bad batch" in outcome.error and "resumed from step 30 (/c30)" in outcome.error


@pytest.mark.fault("W3")
def test_worker_that_hangs_while_another_is_killed_is_ended(tmp_path: Path) -> None:
    worker_group, stage = running(tmp_path)
    worker_group.silence["c"] = worker_group.now
    stage.lose("b", Cause.KILLED)
    park(worker_group, "a", copies=True)
    while not worker_group.ended:
        stage.loop.step()
    assert set(worker_group.ended) == {"c"}
    stage.lose("c", Cause.HANG)
    held = (HeldState(TICKET.generation, 3, 40, (0, 1, 2)),)
    worker_group.reports["a"] = replace(worker_group.reports["a"], held=held)
    assert next_generation(stage) == (("a",), Origin.MEMORY, 40)


@pytest.mark.fault("W12")
def test_loss_while_a_checkpoint_is_read_fences_the_readers(tmp_path: Path) -> None:
    worker_group = WorkerGroup(*(report(w, WorkerPhase.FORMING) for w in "abc"))
    worker_group.infos |= {w: node_of(w) for w in "abc"}
    world = replace(THREE, source=replace(THREE.source, origin=Origin.CHECKPOINT, commit="c30", path="/c30"))
    stage = Stage(worker_group, tmp_path, world=world, step=30, config={"elastic_workers": 3})
    stage.has(CommittedCheckpoint("c30", "/c30", 30))
    stage.run.stats.checkpoints.step = 30
    stage.lose("b", Cause.KILLED)
    stage.loop.step()
    ((when, told),) = worker_group.fenced
    assert told == ("a", "c") and when - BEGAN < 1.0
    worker_group.reports |= {w: report(w, WorkerPhase.PARKED, fault=PEER) for w in "ac"}
    assert next_generation(stage) == (("a", "c"), Origin.CHECKPOINT, 30)


@pytest.mark.fault("N1", "N2", "N3", "N9")
def test_silent_nodes_cost_their_workers_and_no_crash(tmp_path: Path) -> None:
    """The worker group reports the losses of nodes that do not answer, as one failure; no step was lost with them."""
    worker_group, stage = running(tmp_path)
    for worker in "bc":
        stage.lose(worker, Cause.NODE)
    park(worker_group, "a")
    held = (HeldState(TICKET.generation, 3, 40, (0, 1, 2)),)
    worker_group.reports["a"] = replace(worker_group.reports["a"], held=held)
    assert next_generation(stage) == (("a",), Origin.MEMORY, 40)
    assert stage.budget.total == {Cause.NODE: 1}
    assert [event["cause"] for event in stage.of("worker_lost")] == ["node", "node"]


@pytest.mark.fault("G4")
def test_rescale_hires_first_and_stops_all_ranks_at_one_boundary(tmp_path: Path) -> None:
    worker_group, stage = running(tmp_path)
    stage.loop.commands.want(4, "manual")
    for _ in range(5):
        stage.loop.step()
    assert worker_group.hired == 1 and not worker_group.asked, "all train until the joiner is warm"
    stage.warm("new1")
    while RESCALE not in worker_group.asked:
        stage.loop.step()
    park(worker_group, "abc", fault=None)
    assert next_generation(stage) == (("a", "b", "c", "new1"), Origin.MEMORY, 40)
    assert stage.budget.total == {} and not worker_group.ended


@pytest.mark.fault("E1")
def test_stop_beside_a_lost_worker_saves_what_the_others_hold(tmp_path: Path) -> None:
    worker_group, stage = running(tmp_path)
    saved: list[tuple[str, ...]] = []
    kept = CommittedCheckpoint("c40", "/c40", 40)

    def save(workers: tuple[str, ...]) -> SaveResult:
        saved.append(tuple(sorted(workers)))
        return SaveResult("r-h9-s40", 40, 9, 1.0, kept)

    stage.saves(save)
    stage.has(kept)
    stage.loop.commands.end("asked to")
    stage.lose("b", Cause.KILLED)
    park(worker_group, "ac")
    outcome = stage.rounds(states.Finished).outcome
    assert saved == [("a", "c")] and (outcome.state, outcome.step, outcome.checkpoint) == ("STOPPED", 40, "/c40")
    assert [event["resume"] for event in stage.of("run_stopped")] == ["/c40"] and not worker_group.orders
