"""The control loop while shards move: members, leavers, and what a restarted controller finds. The test controls workers and clock."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.controller.run_ends import LAST, committer, completed
from tests.controller.stage import BEGAN, PEER, TICKET, WORLD, Stage, WorkerGroup, node_of, report
from vescale_ray.controller import states
from vescale_ray.controller.checkpointing.committer import SaveResult
from vescale_ray.controller.checkpointing.coordinator import Unanswered
from vescale_ray.controller.control_loop import TICK_S
from vescale_ray.controller.failures.budget import Cause
from vescale_ray.controller.failures.hang import LEAST_S
from vescale_ray.controller.policy import CommittedCheckpoint
from vescale_ray.controller.protocol import Bounds, Ending, RunState
from vescale_ray.controller.transitions.generation import GIVER_S
from vescale_ray.controller.worker_group.worker_news import Lost, Told
from vescale_ray.workers.messages import (
    FaultKind,
    SavedShard,
    Ticket,
    WorkerFault,
    WorkerPhase,
    WorkerReport,
)

pytestmark = pytest.mark.usefixtures("clock")


@pytest.mark.fault("W15")
def test_leaver_on_a_lost_node_is_not_awaited_before_it_gives(tmp_path: Path) -> None:
    """No connection breaks, so the members would wait in the move until the time limit of the collectives."""
    worker_group = WorkerGroup(report("a", WorkerPhase.FORMING), report("b", WorkerPhase.FORMING), report("l", WorkerPhase.GIVING))
    stage = Stage(worker_group, tmp_path, ("l",))

    def play(passed: float) -> None:
        if passed > 1.0 and "l" in worker_group.reports:
            stage.lose("l", Cause.NODE)
        if worker_group.fenced:
            worker_group.reports |= {w: report(w, WorkerPhase.PARKED, fault=PEER) for w in "ab"}

    worker_group.each_round = play
    ending = stage.watch()
    ((when, inside),) = worker_group.fenced
    assert when - BEGAN - 1.0 == pytest.approx(GIVER_S, abs=3 * TICK_S) and inside == ("a", "b")
    assert not ending.lost and set(ending.faults) == {"a", "b"}
    assert (stage.budget.nodes, stage.budget.crashes) == (1, 0), "it was a node, and nobody's crash"


def test_a_leaver_that_fails_before_it_gives_is_not_awaited(tmp_path: Path) -> None:
    """Otherwise the members would wait for the leaver as long as a collective may take, and then all be taken for hung."""
    worker_group = WorkerGroup(report("a", WorkerPhase.FORMING), report("b", WorkerPhase.FORMING), report("l", WorkerPhase.GIVING))
    stage = Stage(worker_group, tmp_path, ("l",))

    def play(passed: float) -> None:
        if passed > 1.0:
            worker_group.reports["l"] = report(
                "l", WorkerPhase.PARKED, fault=WorkerFault(FaultKind.OWN, "MemoryError: no room for a batch")
            )
        if worker_group.fenced:
            worker_group.reports |= {w: report(w, WorkerPhase.PARKED, fault=PEER) for w in "ab"}

    worker_group.each_round = play
    stage.watch()
    ((when, _),) = worker_group.fenced
    assert when - BEGAN - 1.0 == pytest.approx(GIVER_S, abs=3 * TICK_S)
    assert stage.budget.total == {Cause.ERROR: 1} and "no room for a batch" in stage.budget.errors[0]


@pytest.mark.parametrize("told", [True, False], ids=["it has told so", "its word was lost with it"])
def test_leaver_lost_after_it_gave_its_shard_is_not_missed(told: bool, tmp_path: Path) -> None:
    worker_group = WorkerGroup(report("a", WorkerPhase.FORMING), report("b", WorkerPhase.FORMING), report("l", WorkerPhase.GIVING))
    stage = Stage(worker_group, tmp_path, ("l",))

    def play(passed: float) -> None:
        if told and 0.4 < passed < 0.6:
            worker_group.reports["l"] = report("l", WorkerPhase.PARKED)
        if passed > 1.0 and "l" in worker_group.reports:
            stage.lose("l", Cause.NODE)
        if passed > (5.0 if told else 1.0 + GIVER_S / 2):
            for worker in "ab":
                stage.fill(worker)
        if passed > 8.0:
            worker_group.reports |= {w: report(w, WorkerPhase.PARKED) for w in "ab"}

    worker_group.each_round = play
    assert stage.watch().clean and not worker_group.fenced and stage.budget.tries == 0


def test_a_worker_without_a_processor_is_given_as_much_more_time(tmp_path: Path) -> None:
    """The worker had no processor for 3 s, so its time limit is 3 s longer."""
    worker_group = WorkerGroup(report("a", WorkerPhase.TRAINING), report("b", WorkerPhase.TRAINING))
    stage = Stage(worker_group, tmp_path, filled=True, state=RunState.RUNNING)
    hangs = stage.executor.detector.hangs
    hangs.begin(TICKET, 2)
    for step in range(1, 20):
        for _ in WORLD.members:
            hangs.stepped(TICKET, step, 0.1)
    worker_group.reports |= {w: replace(one, waiting=True) for w, one in worker_group.reports.items()}
    worker_group.starve["b"] = 3.0

    def play(passed: float) -> None:
        if passed > 1.0:
            worker_group.silence.setdefault("b", worker_group.now)
        if worker_group.ended:
            stage.lose("b", Cause.HANG)
            worker_group.reports["a"] = report("a", WorkerPhase.PARKED, fault=PEER)

    worker_group.each_round = play
    stage.watch()
    assert set(worker_group.ended) == {"b"} and not worker_group.starve
    assert worker_group.ended["b"] - BEGAN - 1.0 == pytest.approx(LEAST_S + 3.0, abs=4 * TICK_S)


def test_hang_is_reported_once_while_its_worker_dies_slowly(tmp_path: Path) -> None:
    """If the node does not report the worker's death, ten reports of one hang would stop the controller for half a second each."""
    worker_group = WorkerGroup(report("a", WorkerPhase.TRAINING), report("b", WorkerPhase.TRAINING))
    stage = Stage(worker_group, tmp_path, filled=True, state=RunState.RUNNING)
    stage.executor.detector.hangs = SimpleNamespace(
        verdict=lambda *about: {"b": "it stands"}, ended=lambda hung: None, heard=lambda *about: None, forming_s=5.0, bound_s=5.0
    )

    def play(passed: float) -> None:
        if worker_group.now - worker_group.ended.get("b", worker_group.now) > 1.0:
            stage.lose("b", Cause.HANG)
            worker_group.reports["a"] = report("a", WorkerPhase.PARKED, fault=PEER)

    worker_group.each_round = play
    stage.watch()
    (hang,) = stage.of("hang")
    assert set(hang["workers"]) == {"b"}


def test_ended_worker_that_parks_before_its_death_is_lost(tmp_path: Path) -> None:
    """If the worker became a member of the next generation, that one would fail as well."""
    worker_group = WorkerGroup(report("a", WorkerPhase.PARKED, fault=PEER), report("b", WorkerPhase.TRAINING))
    stage = Stage(worker_group, tmp_path, filled=True, state=RunState.RUNNING)

    def play(passed: float) -> None:
        if worker_group.ended:
            worker_group.reports["b"] = report("b", WorkerPhase.PARKED, fault=PEER)
        if worker_group.now - worker_group.ended.get("b", worker_group.now) > 0.3:
            stage.lose("b", Cause.HANG)

    worker_group.each_round = play
    ending = stage.watch()
    assert ending.living == ("a",) and set(ending.lost) == {"b"}


@pytest.mark.parametrize("ends", [False, True])
def test_restarted_controller_keeps_the_last_checkpoint_bound(tmp_path: Path, ends: bool) -> None:
    """The first controller would have given the checkpoint up. If the next one takes the writers for training members, it waits for
    ever."""
    worker_group = WorkerGroup(report("a", WorkerPhase.SAVING), report("b", WorkerPhase.SAVING))
    stage = Stage(worker_group, tmp_path, filled=True, bounds=Bounds(save=30.0))
    stage.inherit()

    def play(passed: float) -> None:
        if ends:
            phases = {
                "a": WorkerPhase.FINISHED if passed > 10.0 else WorkerPhase.SAVING,
                "b": WorkerPhase.FINISHED if passed > 20.0 else WorkerPhase.SAVING,
            }
            worker_group.reports |= {w: report(w, phase) for w, phase in phases.items()}
        for worker in [w for w in worker_group.ended if w in worker_group.reports]:
            stage.lose(worker, Cause.HANG)

    worker_group.each_round = play
    ending = stage.watch()
    if ends:
        assert (
            ending.clean and ending.finished and not worker_group.fenced and worker_group.now - BEGAN == pytest.approx(20.0, abs=3 * TICK_S)
        )
        return
    assert set(ending.lost) == {"a", "b"} and not worker_group.asked
    assert all(when - BEGAN == pytest.approx(30.0, abs=3 * TICK_S) for when in worker_group.ended.values())
    assert "it still writes a checkpoint after 30 s" in str(stage.of("hang")[0]["workers"])


@pytest.mark.parametrize(("stop", "step", "state"), [(None, 60, "CHECKPOINTING"), ("SIGTERM", 40, "STOPPING"), (None, 40, "RESCALING")])
def test_restarted_controller_names_the_purpose_of_a_save(tmp_path: Path, stop: str | None, step: int, state: str) -> None:
    """The state must not be RESCALING during a last checkpoint. A save of what is left of a failed run is no last checkpoint."""
    worker_group = WorkerGroup(report("a", WorkerPhase.SAVING), report("b", WorkerPhase.SAVING))
    stage, seen = Stage(worker_group, tmp_path, step=step), list[RunState]()
    stage.inherit()
    if stop:
        stage.loop.commands.end(stop)

    def play(passed: float) -> None:
        seen.append(stage.run.stats.state)
        if passed > 1.0:
            worker_group.reports |= {w: report(w, WorkerPhase.PARKED if stop else WorkerPhase.FINISHED) for w in "ab"}

    worker_group.each_round = play
    assert stage.watch().clean
    assert str(seen[-1]) == str(stage.run.stats.state) == state


def adopted(stage: Stage) -> states.Running:
    """Have a restarted controller take up the generation."""
    stage.loop.state = states.Starting()
    stage.loop.follow()
    running: states.Running = stage.rounds(states.Running)
    assert running.world == stage.world
    return running


def test_an_order_that_a_leaver_did_not_get_is_taken_back(tmp_path: Path) -> None:
    """A killed controller gave the order to the members alone. They would wait for the leaver as long as a group may take to form."""
    before = replace(TICKET, generation=6)
    worker_group = WorkerGroup(report("a", WorkerPhase.FORMING), report("b", WorkerPhase.FORMING), report("l", WorkerPhase.PARKED, before))
    adopted(Stage(worker_group, tmp_path / "1", ("l",)))
    assert [who for _, who in worker_group.fenced] == [("a", "b", "l")]
    worker_group = WorkerGroup(report("a", WorkerPhase.FORMING), report("b", WorkerPhase.FORMING), report("l", WorkerPhase.GIVING))
    adopted(Stage(worker_group, tmp_path / "2", ("l",)))
    assert not worker_group.fenced


@pytest.mark.parametrize(
    ("a", "b", "moved"),
    [
        (WorkerPhase.TRAINING, WorkerPhase.TRAINING, True),
        (WorkerPhase.TRAINING, WorkerPhase.FINISHED, True),
        (WorkerPhase.SAVING, WorkerPhase.PARKED, True),
        (WorkerPhase.FORMING, WorkerPhase.FORMING, False),
        # A member with its shard trains, and waits in its first step for members without theirs. One of these may wait for the leaver.
        (WorkerPhase.TRAINING, WorkerPhase.FORMING, False),
    ],
)
def test_restarted_controller_drops_leavers_of_a_finished_move(a: WorkerPhase, b: WorkerPhase, moved: bool, tmp_path: Path) -> None:
    """The durable state names the leavers until it is written the next time."""
    stage = Stage(WorkerGroup(report("a", a), report("b", b)), tmp_path, ("gone",))
    adopted(stage)
    assert stage.seen.leavers == (() if moved else ("gone",))


@pytest.mark.parametrize("b", [report("b", WorkerPhase.PARKED, fault=PEER), None], ids=["failed", "says nothing"])
@pytest.mark.parametrize("stepped", [True, False])
def test_a_step_of_the_generation_says_that_the_move_is_over(b: WorkerReport | None, stepped: bool, tmp_path: Path) -> None:
    """A member without a processor may be silent for a while. Meanwhile, the missing leaver, gone for hours, must not break the
    generation."""
    stage = Stage(WorkerGroup(*(one for one in (report("a", WorkerPhase.TRAINING), b) if one is not None)), tmp_path, ("gone",))
    if stepped:
        stage.run.stats.steps.last["generation"] = TICKET.generation
    adopted(stage)
    assert stage.seen.leavers == (() if stepped else ("gone",))


def test_outline_is_asked_of_the_next_worker_if_one_lacks_it(tmp_path: Path) -> None:
    worker_group = WorkerGroup(report("a", WorkerPhase.TRAINING), report("b", WorkerPhase.TRAINING))
    stage, asked = Stage(worker_group, tmp_path), list[float]()

    def ask(workers: Any) -> None:
        if len(asked) < 2 and not worker_group.asking_outline:
            asked.append(worker_group.now)
            worker_group.asking_outline = True

    def play(passed: float) -> None:
        if worker_group.asking_outline:
            worker_group.asking_outline = False  # "I don't know"
            worker_group.news.append(Told(None))

    worker_group.ask_outline, worker_group.each_round = ask, play  # type: ignore[method-assign]
    adopted(stage)
    assert len(asked) == 2


@pytest.mark.parametrize("generation", [6, 7])
def test_restarted_controller_awaits_no_old_generations_save(generation: int, tmp_path: Path) -> None:
    """Workers repeat their last votes, also those of attempts that were given up. A wait for the missing votes would delay saves by 10
    min."""
    item = SavedShard(Ticket(generation, 1), f"r-g{generation}-s40", 40, generation, 0, 2, "{}", None, 0.1)
    stage = Stage(WorkerGroup(replace(report("a", WorkerPhase.TRAINING), items=((1, item),)), report("b", WorkerPhase.TRAINING)), tmp_path)
    adopted(stage)
    assert stage.committer.busy == (generation == 7)


def test_rescale_overtaken_by_the_last_step_is_abandoned(tmp_path: Path) -> None:
    stage = Stage(WorkerGroup(report("a", WorkerPhase.FINISHED), report("b", WorkerPhase.FINISHED)), tmp_path)
    stage.executor.generation.begin_rescale("manual", 2)
    committer(stage, LAST)
    stage.rounds(begin=completed())
    assert "rescale_abandoned" in stage.events and "rescaled" not in stage.events


def completing(folder: Path, kept: int | None, *living: str) -> tuple[Stage, Any]:
    """The stage and its state after the last checkpoint of a run of 60 steps.

    Args:
        kept: step of the checkpoint; None: there is none.
        living: workers that are left after it.
    """
    stage = Stage(
        WorkerGroup(report("a", WorkerPhase.FINISHED), report("b", WorkerPhase.FINISHED)), folder, state=RunState.RUNNING, step=60
    )

    def save(workers: tuple[str, ...]) -> SaveResult | None:
        for worker in {"a", "b"} - set(living):
            stage.loop._lose(Lost(worker, node_of(worker), "its process died"))
            del stage.worker_group.reports[worker]
        return None if kept is None else SaveResult("r-h8", kept, 8, 0.1, CommittedCheckpoint(f"c{kept}", f"/c{kept}", kept))

    stage.saves(save)
    return stage, stage.rounds(states.Locating, begin=completed())


def test_a_run_is_not_done_with_a_checkpoint_of_an_earlier_step(tmp_path: Path) -> None:
    """With a copy every third step, a worker that dies in the last checkpoint takes the only shard of the last step with it."""
    stage, state = completing(tmp_path, 59, "a")
    assert isinstance(state, states.Locating) and state.members == ("a",), "training goes back to what is left"
    assert stage.budget.crashes == 1 and stage.loop.commands.target == 1, "those that are left go on"


def test_incomplete_state_after_last_step_is_no_further_failure(tmp_path: Path) -> None:
    """The loss that caused this was counted when the generation ended."""
    stage, state = completing(tmp_path, None, "a", "b")
    assert isinstance(state, states.Locating) and stage.budget.tries == 0


def decided(stage: Stage) -> list[type | tuple[str, ...]]:
    """The states after the loss of b until a generation begins, and then its members."""
    living = tuple(w for w in WORLD.members if stage.worker_group.alive(w))
    began = states.Recovering(Ending(living, {"b": "its process died"}, {}, False, {"b": "killed"}))
    state = stage.rounds(states.Locating, states.Waiting, begin=began)
    made: list[Any] = []
    if isinstance(state, states.Waiting):
        made.append(states.Waiting)
        state = stage.rounds(states.Locating)
    return [*made, state.members]


@pytest.mark.fault("W8")
def test_living_leaver_rejoins_after_a_loss_in_the_move(tmp_path: Path) -> None:
    """Three workers become two. With two warm workers left, the run must neither fail nor wait for a replacement without end."""
    worker_group = WorkerGroup(report("a", WorkerPhase.FORMING), report("b", WorkerPhase.FORMING), report("l", WorkerPhase.GIVING))
    stage = Stage(worker_group, tmp_path, ("l",), min_workers=2)

    def play(passed: float) -> None:
        if passed > 1.0 and "b" in worker_group.reports:
            stage.lose("b", Cause.KILLED)
            worker_group.reports |= {w: report(w, WorkerPhase.PARKED, fault=PEER) for w in "al"}

    worker_group.each_round = play
    stage.watch()
    assert stage.loop.commands.target == 2
    assert decided(stage) == [("a", "l")]
    assert worker_group.hired == 0


@pytest.mark.parametrize(("fewest", "members"), [(1, ("a",)), (2, ("a", "l"))])
def test_draining_leaver_rejoins_only_if_it_is_needed(fewest: int, members: tuple[str, ...], tmp_path: Path) -> None:
    worker_group = WorkerGroup(report("a", WorkerPhase.PARKED, fault=PEER), report("l", WorkerPhase.PARKED, fault=PEER))
    stage = Stage(worker_group, tmp_path, ("l",), min_workers=fewest)
    stage.drain("l")
    stage.watch()
    assert stage.loop.commands.target == fewest
    assert decided(stage) == [members]


def test_a_growing_run_hires_one_worker_where_one_is_missing(tmp_path: Path) -> None:
    """The run must not alternate between too few workers and enough: it would hire another one in each round, for ever."""
    worker_group = WorkerGroup(report("a", WorkerPhase.PARKED, fault=PEER))
    stage = Stage(worker_group, tmp_path, min_workers=2, grow=True)
    worker_group.each_round = lambda passed: worker_group.reports.update(
        {w: report(w, WorkerPhase.IDLE, Ticket(0, 0)) for w in worker_group.on_the_way}
    )
    stage.watch()
    made = decided(stage)
    assert worker_group.hired == 1 and made == [states.Waiting, ("a", "new1")]


def test_hire_in_progress_counts_when_another_worker_is_lost(tmp_path: Path) -> None:
    worker_group = WorkerGroup(report("a", WorkerPhase.PARKED, fault=PEER))
    worker_group.hiring = 1
    stage = Stage(worker_group, tmp_path)
    stage.watch()
    assert stage.loop.commands.target == 2


@pytest.mark.parametrize(("out_s", "ends"), [(20.0, "begun"), (1e9, "FAILED"), (1e9, "STOPPED")], ids=["comes back", "stays away", "stop"])
@pytest.mark.fault("S6")
def test_unreachable_storage_is_awaited_if_no_worker_holds_state(out_s: float, ends: str, tmp_path: Path) -> None:
    """The loss of two neighbours during an outage must not end the run at once. The error must name the lost state, not only a socket."""
    worker_group = WorkerGroup(report("a", WorkerPhase.PARKED))
    stage = Stage(worker_group, tmp_path, bounds=Bounds(storage=60.0))

    def newer() -> CommittedCheckpoint:
        if worker_group.now - BEGAN < out_s:
            raise OSError(5, f"s3://bucket: no answer to request {worker_group.now}")
        return CommittedCheckpoint("c30", "/c30", 30)

    stage.has(CommittedCheckpoint("c30", "/c30", 30), newer)
    if ends == "STOPPED":
        worker_group.each_round = lambda passed: stage.loop.commands.end("asked to") if passed > 10.0 else None
    state = stage.rounds(states.Running, begin=states.Recovering(Ending(("a",), {"b": "its process died"})))
    if ends == "begun":
        assert state.world.members == ("a",) and state.world.source.step == 30 and 20.0 <= worker_group.now - BEGAN < 23.0
    elif ends == "FAILED":
        assert "no worker holds a state" in state.outcome.error and "s3://bucket: no answer to" in state.outcome.error
        assert not state.outcome.refused and 60.0 < worker_group.now - BEGAN < 65.0
    else:
        assert state.outcome.state == "STOPPED" and worker_group.now - BEGAN < 11.0, "whoever stops it need not wait"
    assert len(stage.of("storage_unreachable")) == 1, "told of once"


def test_silent_storage_blocks_neither_the_loop_nor_a_stop(tmp_path: Path) -> None:
    """The loop waits in its rounds, so that a command reaches it. A worker that dies meanwhile is no member of the next generation."""
    worker_group = WorkerGroup(report("a", WorkerPhase.PARKED), report("b", WorkerPhase.PARKED))
    stage = Stage(worker_group, tmp_path)
    died, c30 = [False], CommittedCheckpoint("c30", "/c30", 30)

    def newer() -> CommittedCheckpoint:
        if worker_group.now - BEGAN < 5.0:
            raise Unanswered
        return c30

    def play(passed: float) -> None:
        if passed > 2.0 and not died[0]:
            died[0] = True
            stage.lose("b", Cause.KILLED)

    stage.has(c30, newer)
    worker_group.each_round = play
    state = stage.rounds(states.Running, begin=states.Recovering(Ending(("a", "b"))))
    assert state.world.members == ("a",) and 5.0 <= worker_group.now - BEGAN < 5.5
    again = Stage(WorkerGroup(report("a", WorkerPhase.PARKED)), tmp_path / "again")

    def never() -> CommittedCheckpoint:
        raise Unanswered

    again.has(c30, never)
    again.loop.commands.end("asked to")
    began = states.Locating(Ending(("a",)), ("a",), ())
    assert again.rounds(begin=began).outcome.state == "STOPPED" and again.worker_group.now - BEGAN < 1.0
