"""The rows of the fault tables (docs/fault-tolerance.md) that the control loop decides: what it orders, in milliseconds, without Ray."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.controller.stage import BEGAN, PEER, TICKET, WORLD, Crew, Stage, node_of, report
from vescale_ray.controller import states
from vescale_ray.controller.budget import Cause
from vescale_ray.controller.durable_state import DurableState, LaunchedGeneration
from vescale_ray.controller.policy import Kept
from vescale_ray.controller.protocol import RunState
from vescale_ray.controller.step_stats import StepStats
from vescale_ray.controller.worker_news import Lost
from vescale_ray.workers.holdings import Holding
from vescale_ray.workers.messages import RESCALE, Fault, FaultKind, Give, Join, Origin, Phase, Ticket

pytestmark = pytest.mark.usefixtures("clock")

THREE = replace(WORLD, members=("a", "b", "c"))


def running(folder: Path, **about: Any) -> tuple[Crew, Stage]:
    """Three workers that train, on nodes of their own, after a step."""
    crew = Crew(*(report(w, Phase.TRAINING) for w in "abc"))
    crew.infos |= {w: node_of(w) for w in "abcdef"}
    config = {"elastic_workers": 3, "elastic_max_workers": 6, **about.pop("config", {})}
    stage = Stage(crew, folder, filled=True, state=RunState.RUNNING, world=THREE, config=config, **about)
    stage.loop.desk.want(3, "manual")
    stage.run.stats.steps.last["generation"] = TICKET.generation
    stage.run.stats.steps.step = 40
    return crew, stage


def park(crew: Crew, workers: str, *, copies: bool = True, fault: Fault | None = PEER, step: int = 40, own: bool = True) -> None:
    """These have left the generation, and hold their shards of ``step``, and with ``copies`` those of the rank before."""
    for worker in workers:
        rank = "abc".index(worker)
        ranks = (*([rank] if own else []), *([(rank - 1) % 3] if copies else []))
        held = (Holding(TICKET.generation, 3, step, ranks),) if ranks else ()
        crew.reports[worker] = replace(report(worker, Phase.PARKED, fault=fault), held=held)


def next_generation(stage: Stage) -> tuple[tuple[str, ...], Origin, int]:
    """Members in any order, origin and step of the generation that the loop orders next."""
    before = len(stage.crew.orders)
    while len(stage.crew.orders) == before:
        stage.loop.step()
    world = stage.loop.state.world
    assert {w for w, order in stage.crew.orders[-1].items() if isinstance(order, Join)} == set(world.members)
    return tuple(sorted(world.members)), world.source.origin, world.source.step


@pytest.mark.fault("W1")
def test_a_killed_worker_is_done_without_and_its_shard_comes_from_the_copy(tmp_path: Path) -> None:
    crew, stage = running(tmp_path)
    stage.lose("b", Cause.KILLED)
    stage.loop.step()
    ((_, told),) = crew.fenced
    assert told == ("a", "c"), "those that are left are told at once"
    park(crew, "ac")
    assert next_generation(stage) == (("a", "c"), Origin.MEMORY, 40)
    assert stage.loop.state.world.source.copies and stage.loop.desk.target == 2


@pytest.mark.fault("W1")
def test_a_lost_worker_is_replaced_if_that_is_wanted(tmp_path: Path) -> None:
    crew, stage = running(tmp_path, replace_lost=True, min_workers=3)
    stage.lose("b", Cause.KILLED)
    park(crew, "ac")
    stage.rounds(states.Waiting)
    assert crew.hired == 1
    stage.loop._transitions = {**stage.loop._transitions, states.Waiting: stage.recovery.waiting}
    stage.warm("new1")
    assert next_generation(stage) == (("a", "c", "new1"), Origin.MEMORY, 40)


@pytest.mark.fault("W2")
def test_a_worker_that_answers_nothing_is_ended_and_the_others_go_on(tmp_path: Path) -> None:
    crew, stage = running(tmp_path)
    hangs = stage.loop._parts.detector._hangs
    hangs.begin(TICKET, 3)
    for step in range(1, 20):
        for _ in "abc":
            hangs.stepped(TICKET, step, 0.1)
    crew.reports |= {w: replace(report(w, Phase.TRAINING), waiting=True, beats=7) for w in "ac"}
    for _ in range(3):
        stage.loop.step()
    crew.silence["b"] = crew.now
    while not crew.ended:
        stage.loop.step()
    assert set(crew.ended) == {"b"} and crew.now - BEGAN < 20.0
    stage.lose("b", Cause.HANG)
    park(crew, "ac")
    assert next_generation(stage) == (("a", "c"), Origin.MEMORY, 40)
    assert stage.loop._parts.account.budget.total == {Cause.HANG: 1}


@pytest.mark.fault("W4")
def test_a_worker_that_hangs_as_its_group_forms_is_ended(tmp_path: Path) -> None:
    crew = Crew(report("a", Phase.FORMING), report("b", Phase.FORMING))
    stage = Stage(crew, tmp_path)
    crew.silence["b"] = crew.now
    while not crew.ended:
        stage.loop.step()
    assert set(crew.ended) == {"b"}


@pytest.mark.fault("W6")
def test_without_a_copy_the_run_goes_back_to_its_checkpoint(tmp_path: Path) -> None:
    crew, stage = running(tmp_path)
    stage.run.stats.checkpoints.step = 30
    keeper = stage.loop._parts.keeper
    keeper._ask_storage = lambda: Kept("c30", "/c30", 30)
    stage.lose("b", Cause.KILLED)
    stage.lose("c", Cause.KILLED)
    park(crew, "a")
    assert next_generation(stage) == (("a",), Origin.CHECKPOINT, 30)
    assert stage.loop.state.world.source.commit == "c30"


@pytest.mark.fault("W7")
def test_a_worker_that_is_lost_in_a_recovery_leads_to_another_attempt(tmp_path: Path) -> None:
    crew, stage = running(tmp_path)
    stage.lose("b", Cause.KILLED)
    park(crew, "ac", step=40)
    next_generation(stage)
    world = stage.loop.state.world
    for worker in "ac":
        crew.reports[worker] = report(worker, Phase.FORMING, world.ticket)
    stage.loop.step()
    stage.lose("c", Cause.KILLED)
    held = (Holding(TICKET.generation, 3, 40, (0, 1, 2)),)
    crew.reports["a"] = replace(report("a", Phase.PARKED, world.ticket, PEER), held=held)
    assert next_generation(stage) == (("a",), Origin.MEMORY, 40)
    assert stage.loop.state.world.ticket.attempt == 2, "two failures without a new step"


@pytest.mark.fault("W9")
def test_leavers_serve_a_recovery_until_the_first_step_is_done(tmp_path: Path) -> None:
    """Three become two; one of these is lost before the first step: the leaver's shard is still there."""
    crew, stage = running(tmp_path)
    stage.loop.desk.want(2, "manual")
    while RESCALE not in crew.asked:
        stage.loop.step()
    park(crew, "abc", fault=None, copies=False)
    members, _, _ = next_generation(stage)
    (leaver,) = set("abc") - set(members)
    orders = crew.orders[-1]
    assert isinstance(orders[leaver], Give) and stage.loop._parts.steering.leavers == (leaver,)
    world = stage.loop.state.world
    lost, left = members
    ranks = {w: "abc".index(w) for w in "abc"}
    stage.lose(lost, Cause.KILLED)
    for worker in (left, leaver):
        held = (Holding(TICKET.generation, 3, 40, (ranks[worker], (ranks[worker] - 1) % 3)),)
        crew.reports[worker] = replace(report(worker, Phase.PARKED, world.ticket, PEER), held=held)
    assert next_generation(stage) == (tuple(sorted((left, leaver))), Origin.MEMORY, 40)


@pytest.mark.fault("W10")
def test_a_worker_that_dies_before_it_is_warm_is_hired_again(tmp_path: Path) -> None:
    crew = Crew()
    stage = Stage(crew, tmp_path, durable=DurableState("r", 7, target=2, epoch=1))
    stage.loop.state = states.Gathering(crew.now + 100.0)
    stage.loop.step()
    assert crew.hired == 2
    crew.on_the_way.remove("new1")
    crew.news.append(Lost("new1", None, "its process died"))
    stage.loop.step()
    assert crew.hired == 3
    for worker in list(crew.on_the_way):
        stage.warm(worker)
    stage.rounds(states.Running)
    assert stage.loop.state.world.source.origin is Origin.FRESH and stage.loop.state.world.size == 2


@pytest.mark.fault("W11")
def test_others_that_compute_are_given_their_step_when_one_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crew, stage = running(tmp_path)
    monkeypatch.setattr(StepStats, "last_seconds", property(lambda self: 4.0))
    stage.lose("b", Cause.KILLED)
    for _ in range(100):
        stage.loop.step()
    assert not crew.ended, "ten seconds into a step of four: three times as long counts as usual"
    park(crew, "ac")
    assert next_generation(stage)[0] == ("a", "c")


@pytest.mark.fault("W13")
def test_a_spare_takes_the_place_of_a_lost_worker_at_once(tmp_path: Path) -> None:
    crew, stage = running(tmp_path, spares=1, max_workers=4, replace_lost=True)
    crew.reports["d"] = report("d", Phase.IDLE, Ticket(0, 0))
    for _ in range(4):
        stage.loop.step()
    stage.lose("b", Cause.KILLED)
    park(crew, "ac")
    assert next_generation(stage) == (("a", "c", "d"), Origin.MEMORY, 40)


@pytest.mark.fault("N1", "N9")
def test_a_lost_node_with_several_workers_counts_as_one_failure(tmp_path: Path) -> None:
    crew, stage = running(tmp_path)
    stage.lose("b", Cause.NODE)
    stage.lose("c", Cause.NODE)
    park(crew, "a", copies=True)
    held = (Holding(TICKET.generation, 3, 40, (0, 1, 2)),)
    crew.reports["a"] = replace(crew.reports["a"], held=held)
    assert next_generation(stage) == (("a",), Origin.MEMORY, 40)
    budget = stage.loop._parts.account.budget
    assert (budget.nodes, budget.crashes) == (1, 0)


@pytest.mark.fault("N5")
def test_a_joiner_that_does_not_reach_the_members_is_refused(tmp_path: Path) -> None:
    crew, stage = running(tmp_path)
    stage.loop.desk.want(4, "manual")
    crew.reports["d"] = report("d", Phase.IDLE, Ticket(0, 0))
    crew.ask_reach = lambda tries, wait_s: SimpleNamespace(  # type: ignore[method-assign]
        unreached=lambda: {w: frozenset(others) if w == "d" else frozenset(others) & {"d"} for w, others in tries.items()}
    )
    while not stage.of("joiner_refused") and crew.now < BEGAN + 60:
        stage.loop.step()
    (refused,) = stage.of("joiner_refused")
    assert refused["worker"] == "d" and "d" in crew.dismissed and RESCALE not in crew.asked


@pytest.mark.fault("N6")
def test_a_draining_node_is_left_at_a_boundary_and_gives_its_shard_first(tmp_path: Path) -> None:
    crew, stage = running(tmp_path)
    stage.drain("c")
    stage.loop.step()
    assert crew.asked == [RESCALE] and stage.run.stats.state is RunState.RESCALING
    park(crew, "abc", fault=None)
    assert next_generation(stage) == (("a", "b"), Origin.MEMORY, 40)
    assert isinstance(crew.orders[-1].get("c"), Give | None) and stage.loop._parts.account.budget.total == {}


@pytest.mark.fault("C1", "C3")
def test_a_new_controller_takes_up_the_generation_and_a_loss_in_it(tmp_path: Path) -> None:
    crew = Crew(*(report(w, Phase.TRAINING) for w in "abc"))
    crew.infos |= {w: node_of(w) for w in "abc"}
    durable = DurableState("r", 7, LaunchedGeneration.of(replace(THREE, source=replace(THREE.source, step=40))), target=3, epoch=2)
    stage = Stage(crew, tmp_path, world=THREE, durable=durable, config={"elastic_workers": 3})
    stage.loop._parts.steering.nodes.start = lambda: None
    stage.loop.state = states.Starting()
    stage.loop._follow()
    assert isinstance(stage.loop.state, states.Adopting) and stage.written[-1].controller_restarts == 1
    del crew.reports["b"]  # killed together with the controller: nobody tells of it
    park(crew, "ac")
    assert next_generation(stage) == (("a", "c"), Origin.MEMORY, 40)


@pytest.mark.fault("C4")
def test_workers_train_on_while_a_place_for_another_is_awaited(tmp_path: Path) -> None:
    """Ray's control store stands still: the hiring is under way for as long as that takes."""
    crew, stage = running(tmp_path)
    crew.hire = lambda avoid=(): setattr(crew, "hiring", crew.hiring + 1)  # type: ignore[method-assign]
    stage.loop.desk.want(4, "manual")
    for _ in range(100):
        stage.loop.step()
    assert crew.hiring == 1 and not crew.asked and stage.run.stats.state is RunState.RUNNING
    crew.hiring = 0
    stage.warm("d")
    while RESCALE not in crew.asked:
        stage.loop.step()


@pytest.mark.fault("S5")
def test_a_recovery_from_memory_asks_no_storage(tmp_path: Path) -> None:
    crew, stage = running(tmp_path)
    stage.run.stats.checkpoints.step = 40

    def asked() -> None:
        raise AssertionError("the storage was asked")

    stage.loop._parts.keeper._ask_storage = asked
    stage.lose("b", Cause.KILLED)
    park(crew, "ac")
    assert next_generation(stage) == (("a", "c"), Origin.MEMORY, 40)


@pytest.mark.fault("W1")
def test_a_worker_that_raises_again_and_again_ends_the_run(tmp_path: Path) -> None:
    """A bug in the step: three recoveries without a new step, then FAILED with the error and where to resume."""
    crew, stage = running(tmp_path, config={"elastic_max_recoveries_without_progress": 1})
    keeper = stage.loop._parts.keeper
    keeper.newest = lambda: Kept("c30", "/c30", 30)
    keeper.save = lambda workers, only_newer=False: None
    own = Fault(FaultKind.OWN, "ValueError: a bad batch")
    for _ in range(2):
        world = stage.loop.state.world
        for rank, worker in enumerate(world.members):
            held = (Holding(TICKET.generation, 3, 40, ("abc".index(worker),)),)
            fault = own if rank == 0 else PEER
            crew.reports[worker] = replace(report(worker, Phase.PARKED, world.ticket, fault), held=held)
        while isinstance(stage.loop.state, states.Running) and stage.loop.state.world == world:
            stage.loop.step()
    outcome = stage.rounds(states.Finished).outcome
    assert outcome.state == "FAILED" and "a bad batch" in outcome.error and "resumed from step 30 (/c30)" in outcome.error
