"""Orders of a worker: it takes them from its own or a newer generation, when it is free. Few tests have a training thread."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from tests.controller.runs import until
from tests.workers.tiny import tiny, write_text
from vescale_ray.config.rank_grid import RankGrid
from vescale_ray.workers import membership
from vescale_ray.workers.building import model_building
from vescale_ray.workers.building.model_building import NextModel
from vescale_ray.workers.membership import Membership
from vescale_ray.workers.messages import FaultKind, Give, Happened, Join, Origin, Save, SavedShard, Seat, Ticket, WorkerPhase
from vescale_ray.workers.monitoring.heartbeat import Heartbeat
from vescale_ray.workers.network import process_groups
from vescale_ray.workers.network.process_groups import GroupFailed
from vescale_ray.workers.resharding import shard_move
from vescale_ray.workers.resharding.held_state import Resume
from vescale_ray.workers.resharding.shard_move import move
from vescale_ray.workers.saving import Writer
from vescale_ray.workers.worker import Worker
from vescale_ray.workers.worker_state import Refused, WorkerState


@pytest.fixture
def state() -> WorkerState:
    made = WorkerState("w7")
    made.enter(Ticket(4, 1), WorkerPhase.PARKED)
    return made


def resources(**given: Any) -> Any:
    """Resources of a worker whose snapshots and writer do nothing, but for those ``given``."""
    nothing = SimpleNamespace(held=tuple, copied=lambda: None, abandon=lambda: None, verify=lambda: None)
    made = {
        "config": SimpleNamespace(
            elastic=SimpleNamespace(collective_timeout_s=30.0), train=SimpleNamespace(steps=5), grid=partial(RankGrid, 1)
        ),
        "device": torch.device("cpu"),
        "dataset": None,
        "snapshots": nothing,
        "writer": SimpleNamespace(abandon=lambda: None, writing=False),
        "heartbeat": Heartbeat(),
        "next_model": SimpleNamespace(prepare=lambda: None, take=object),
        "profiler": SimpleNamespace(finish=lambda wait_s: None),
    }
    return SimpleNamespace(**{"eval_sets": {}, **made, **given})


def started(monkeypatch: pytest.MonkeyPatch, has: Any) -> Any:
    """A worker with these resources, a training thread and its heartbeat; the plain class, as Ray's decorators only mark its methods."""
    monkeypatch.setattr(Worker, "_warm_up", lambda self, heartbeat: (None, SimpleNamespace(**{**vars(has), "heartbeat": heartbeat})))
    return Worker("w7", {})


def join(generation: int, attempt: int = 1) -> Join:
    return Join(Ticket(generation, attempt), Seat("host", 1, "prefix", 0, 2), Origin.FRESH, "prefix")


def refused(call: Callable[[], None], words: str) -> None:
    with pytest.raises(Refused, match=words):
        call()


def test_orders_of_current_or_older_generations_are_refused(state: WorkerState) -> None:
    for order in (join(3), join(4)):
        refused(lambda order=order: state.give_order(order), r"w7: an order of .* comes too late: 4\.1 has ended or is running")  # type: ignore[misc]
    state.give_order(join(4, 2))
    assert state.next_order().ticket == Ticket(4, 2)


def test_fenced_generation_is_never_joined(state: WorkerState) -> None:
    state.fence(Ticket(6, 1))
    state.fence(Ticket(5, 1))  # an older fence does not open it again
    refused(lambda: state.give_order(join(5)), r"5\.1 comes too late: 6\.1")
    refused(lambda: state.give_order(join(6)), r"6\.1 comes too late: 6\.1")
    state.give_order(join(7))


def test_fence_cuts_all_groups_of_its_generation_and_no_other(state: WorkerState) -> None:
    """Without the cut, a rank waits in a move for a leaver on a stopped machine until the collectives' time limit."""

    def connected(generation: int) -> tuple[socket.socket, socket.socket]:
        with state.connecting(Ticket(generation, 1)) as connections, connections.recorded():
            return socket.socketpair()

    state.enter(Ticket(5, 1), WorkerPhase.FORMING)
    ends = [connected(5), connected(5)]
    state.fence(Ticket(4, 1))
    for one, other in ends:
        one.send(b"x")
        assert other.recv(1) == b"x", "it is another generation that was closed"
    state.fence(Ticket(5, 1))
    assert [other.recv(1) for _, other in ends] == [b"", b""]
    state.enter(Ticket(6, 1), WorkerPhase.FORMING)
    ends.append(connected(6))
    state.fence(Ticket(5, 1))
    ends[-1][0].send(b"x")
    assert ends[-1][1].recv(1) == b"x"
    for one, other in ends:
        one.close()
        other.close()


def test_fence_cuts_a_group_that_is_connected_only_afterwards(state: WorkerState) -> None:
    state.enter(Ticket(5, 1), WorkerPhase.FORMING)
    with state.connecting(Ticket(5, 1)) as connections:
        state.fence(Ticket(5, 1))
        with connections.recorded():
            one, other = socket.socketpair()
    assert other.recv(1) == b""
    one.close()
    other.close()


def test_busy_worker_refuses_orders_and_stale_requests(state: WorkerState) -> None:
    state.give_order(join(5))
    refused(lambda: state.give_order(join(6)), "takes an order of 6.1 once it is parked")
    state.next_order()
    state.enter(Ticket(5, 1), WorkerPhase.TRAINING)
    refused(lambda: state.give_order(join(6)), "is training in 5.1")
    refused(lambda: state.ask(Ticket(4, 1), 1), "it takes no request for 4.1")
    state.ask(Ticket(5, 1), 1)
    state.ask(Ticket(5, 1), 4)
    assert (state.take_flags(), state.take_flags()) == (5, 0)
    old = Save(Ticket(4, 1), resume=None, ranks=(0,), attempt="a", epoch=1)  # type: ignore[arg-type]
    refused(lambda: state.give_order(old), "4.1 comes too late")


def test_worker_reports_out_of_generation_fenced_before_it_began(state: WorkerState) -> None:
    """The controller waits for this report. Without it the controller ended the worker after 3 s as if it hung."""
    begun: list[Ticket] = []
    state.give_order(join(5))
    state.fence(Ticket(5, 1))
    threading.Thread(target=lambda: begun.append(state.next_order().ticket), daemon=True).start()  # it sees the order only now
    report = state.report(0, (WorkerPhase.FORMING, Ticket(5, 1)), 5.0, tuple)
    assert (report.ticket, report.phase, report.out, begun) == (Ticket(5, 1), WorkerPhase.PARKED, True, [])
    until(lambda: state.report(0, None, 0.0, tuple).fault is not None, 5, "the reason")
    fault = state.report(0, None, 0.0, tuple).fault
    assert fault is not None and fault.kind is FaultKind.PEER and "5.1 was closed before it began" in fault.text
    state.give_order(join(6))
    until(lambda: bool(begun), 5, "the next generation")
    assert begun == [Ticket(6, 1)]


def test_restarted_controller_gets_the_last_vote_again(state: WorkerState) -> None:
    vote = SavedShard(Ticket(4, 1), "r-g4-s8", 8, 4, 0, 1, "{}", None, 0.1)
    for item in (replace(vote, step=4), vote, Happened(Ticket(4, 1), "checkpoint_skipped", {"step": 12})):
        state.publish(item)
    assert [number for number, _ in state.report(0, None, 0.0, tuple).items] == [1, 2, 3]
    assert state.report(3, None, 0.0, tuple).items == (), "all are acknowledged"
    assert state.report(-1, None, 0.0, tuple).items == ((2, vote),)


def test_worker_that_cannot_start_says_why_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Worker, heartbeat: Heartbeat) -> None:
        raise ValueError("no corpus\n  at /data")

    monkeypatch.setattr(Worker, "_warm_up", fail)
    worker: Any = Worker("w7", {})
    with pytest.raises(RuntimeError, match=r"^worker w7 cannot start: ValueError: no corpus at /data$"):
        worker.hello(5.0)


def test_worker_that_cannot_check_copies_fails_save_and_parks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The worker's training thread used to end. The controller waited ten minutes for the last checkpoint, and then the run failed."""

    def shards(generation: int, step: int) -> list[Any]:
        raise MemoryError("no room for checksums")

    told: list[Any] = []
    has = resources(snapshots=SimpleNamespace(shards=shards, held=tuple), writer=Writer(tmp_path, told.append, read_back=False))
    worker = started(monkeypatch, has)
    until(lambda: worker.poll(0, None, 0.0).phase is WorkerPhase.IDLE, 5, "the training thread")
    worker.give_order(Save(Ticket(4, 1), Resume(4, 2, 40, {0: "w7", 1: "w7"}), (0, 1), "r-h9-s40", 9))
    until(lambda: worker.poll(0, None, 0.0).phase is not WorkerPhase.SAVING, 5, "the votes")
    assert all(isinstance(item, SavedShard) for item in told)
    assert [(item.rank, item.vote) for item in told] == [(0, None), (1, None)] and "no room for checksums" in told[1].error
    assert worker.poll(0, None, 0.0).phase is WorkerPhase.IDLE and "rank 1" in told[1].error


def test_worker_exits_when_its_training_thread_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker whose training thread had ended used to answer every poll, so all others waited for it."""
    ended: list[int] = []

    def fail(*about: Any) -> None:
        raise RuntimeError("not foreseen")

    monkeypatch.setattr("vescale_ray.workers.membership.Membership", fail)
    monkeypatch.setattr("vescale_ray.workers.worker.os._exit", ended.append)
    worker = started(monkeypatch, resources())
    until(lambda: worker.poll(0, None, 0.0).phase is WorkerPhase.IDLE, 5, "the training thread")
    worker.give_order(join(5))
    until(lambda: bool(ended), 5, "the exit")
    assert ended == [1]


@pytest.mark.parametrize("leaver", [True, False])
def test_leaver_waits_longer_than_members_for_the_transfer_group(state: WorkerState, monkeypatch: pytest.MonkeyPatch, leaver: bool) -> None:
    """If building a model took over half a minute, each planned change with a leaver failed, and the run failed after four of them."""

    def come_after_two_minutes(*about: Any, meet_timeout_s: float, **rest: Any) -> None:
        assert meet_timeout_s >= 120.0
        raise GroupFailed("that was all")

    monkeypatch.setattr(process_groups, "open_transfer", come_after_two_minutes)
    snapshots: Any = SimpleNamespace(shards=lambda generation, step: [], word=lambda trainer: b"")
    seat, resume = Seat("host", 1, "prefix/move", 2, 3), Resume(4, 3, 40, {0: "w7"})
    order = Give(Ticket(5, 1), seat, resume) if leaver else replace(join(5), transfer=seat, resume=resume)
    trainer: Any = None if leaver else object()
    with pytest.raises(GroupFailed if leaver else AssertionError):
        move(order, trainer, snapshots, state, 30.0)


def test_leaver_that_cannot_give_parks_with_the_reason(state: WorkerState, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*about: Any) -> None:
        raise GroupFailed("a peer is gone")

    monkeypatch.setattr(shard_move, "move", lost)
    order = Give(Ticket(5, 1), Seat("host", 1, "prefix/move", 2, 3), Resume(4, 3, 40, {0: "w7"}))
    shard_move.give(order, resources().snapshots, state, 30.0)
    report = state.report(0, None, 0.0, tuple)
    assert (report.ticket, report.phase) == (Ticket(5, 1), WorkerPhase.PARKED)
    assert report.fault is not None and (report.fault.kind, report.fault.text) == (FaultKind.PEER, "GroupFailed: a peer is gone")


def test_own_copy_is_unhurried_and_wait_for_a_buddys_copy_is_not(state: WorkerState) -> None:
    """Copies are made beside the step. Copying large shards takes longer than a step and is no hang; a buddy that stands still is one."""
    seen: list[tuple[str, bool]] = []
    has: Any = resources(
        snapshots=SimpleNamespace(
            copied=lambda: seen.append(("copied", has.heartbeat.in_long_work)),
            settle=lambda: seen.append(("settled", has.heartbeat.in_long_work)),
        )
    )
    Membership(join(5), has, state).settle_copies()
    assert seen == [("copied", True), ("settled", False)]


def test_worker_building_a_model_reports_forming_once_ordered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker used to report that it was out of the group.

    It was ended after 3 s if another was lost, and its hangs were never found.
    """
    makes, made = threading.Event(), threading.Event()
    slow = False

    def build(config: Any, compiler: Any) -> None:
        if slow:
            makes.set()
            made.wait(10)
        raise SystemExit("a factory that gives up")

    joined: list[Ticket] = []

    def member(order: Join, has: Any, state: WorkerState) -> Any:
        nonlocal slow
        slow = True
        joined.append(order.ticket)
        return SimpleNamespace(run=lambda: state.settle(WorkerPhase.PARKED, None))

    monkeypatch.setattr("vescale_ray.workers.building.model_building.Blank", build)
    monkeypatch.setattr("vescale_ray.workers.membership.Membership", member)
    has = resources(next_model=NextModel(None))  # type: ignore[arg-type]
    worker = started(monkeypatch, has)
    until(lambda: worker.poll(0, None, 0.0).phase is WorkerPhase.IDLE, 5, "the training thread")
    worker.give_order(join(4))
    assert makes.wait(5)
    until(lambda: worker.poll(0, None, 0.0).phase is WorkerPhase.PARKED, 5, "the end of the first generation")
    worker.give_order(join(5))
    report = worker.poll(0, None, 0.0)
    assert (report.ticket, report.phase, report.out) == (Ticket(5, 1), WorkerPhase.FORMING, False)
    assert "build (test_orders.py" in report.where
    made.set()
    until(lambda: len(joined) == 2, 5, "the generation")
    assert joined == [Ticket(4, 1), Ticket(5, 1)]


@pytest.mark.parametrize("origin", [Origin.MEMORY, Origin.CHECKPOINT, Origin.FRESH])
def test_finished_worker_parks_only_after_all_have_their_values(
    state: WorkerState, monkeypatch: pytest.MonkeyPatch, origin: Origin
) -> None:
    """The first to finish used to cut the connections of the move while others still received: no later step makes it wait."""
    happened: list[str] = []
    monkeypatch.setattr(process_groups, "form", lambda *about, **rest: None)
    # One rank may read its values minutes longer than another, which is more than the time limit of a step's collective.
    monkeypatch.setattr(process_groups, "barrier", lambda bound_s: happened.append(f"all have their values within {bound_s / 3600:g} h"))
    monkeypatch.setattr(membership, "rank_meshes", lambda *about: None)
    trainer = SimpleNamespace(completed=5, read_ahead=lambda: None, close=lambda: happened.append("closed"))
    monkeypatch.setattr(membership, "Trainer", lambda *about, **rest: trainer)
    monkeypatch.setattr(Membership, "fill", lambda self, trainer: (None, 0))
    monkeypatch.setattr(membership, "outline_of", lambda trainer: None)
    snapshots = SimpleNamespace(
        begin=lambda *about: None, copied=lambda: None, settle=lambda: None, park=lambda trainer: happened.append("parked")
    )
    state.enter(Ticket(5, 1), WorkerPhase.FORMING)
    member = Membership(replace(join(5), origin=origin), resources(snapshots=snapshots), state)
    assert member.train() is WorkerPhase.FINISHED
    assert happened == ["all have their values within 1 h", "parked", "closed"]


def test_of_a_shards_replicas_one_stages_it_for_a_checkpoint(state: WorkerState) -> None:
    staged: list[int] = []
    has = resources(snapshots=SimpleNamespace(stage=lambda trainer: staged.append(trainer.rank)), writer=Mock())
    for replicas, writers in ((1, [0, 1]), (2, [0, 3]), (3, [0, 3])):
        grid = RankGrid(replicas, 2)
        for rank in range(grid.size):
            trainer: Any = SimpleNamespace(rank=rank, grid=grid, generation=5)
            Membership(join(5), has, state)._stage(trainer, 10, {})
        assert staged == writers
        staged.clear()


@pytest.mark.parametrize("origin", [Origin.FRESH, Origin.CHECKPOINT])
@pytest.mark.fault("W12")
def test_fence_ends_loading_of_values_at_the_next_piece(state: WorkerState, monkeypatch: pytest.MonkeyPatch, origin: Origin) -> None:
    """A rank was lost during minutes of reading checkpoints. All others read on, and were ended for that after half a minute."""
    pieces: list[int] = []

    class Trainer:
        completed = 0

        def __init__(self) -> None:
            self.beat: Callable[[], None] = lambda: pieces.append(len(pieces))

        def initialize(self) -> None:
            for piece in range(5):
                if piece == 2:
                    state.fence(Ticket(4, 9))
                if piece == 3:
                    state.fence(Ticket(5, 1))
                self.beat()

        def load_base(self) -> None:
            pass

    monkeypatch.setattr(membership, "restore_from_checkpoint", lambda trainer, opened: trainer.initialize() or 0)
    monkeypatch.setattr("vescale_ray.checkpoint.open", lambda root, commit: None)
    has = resources(config=SimpleNamespace(checkpoint_root="/nowhere"))
    trainer: Any = Trainer()
    beat = trainer.beat
    with pytest.raises(GroupFailed, match=r"generation 5\.1 ended while its values were still being loaded"):
        Membership(replace(join(5), origin=origin), has, state).fill(trainer)
    assert pieces == [0, 1, 2, 3] and trainer.beat is beat, "the beats of a step leave nowhere"
    assert Membership(replace(join(6), origin=origin), has, state).fill(trainer) == (None, 0)
    trainer.beat()


def test_copy_verification_after_a_failure_is_unhurried(state: WorkerState, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies may have tens of gigabytes on each of a host's eight ranks.

    All verifying workers were ended as hung, and their copies lost.
    """
    seen: list[tuple[str, bool]] = []

    def note(what: str) -> Callable[[], None]:
        return lambda: seen.append((what, has.heartbeat.in_long_work))

    def fail(self: Membership) -> WorkerPhase:
        raise GroupFailed("a peer is gone")

    has = resources(snapshots=SimpleNamespace(copied=note("copied"), abandon=note("abandoned"), verify=note("verified"), held=tuple))
    monkeypatch.setattr(Membership, "train", fail)
    Membership(join(5), has, state).run()
    assert seen == [("copied", True), ("abandoned", False), ("verified", True)]
    report = state.report(0, None, 0.0, tuple)
    assert report.phase is WorkerPhase.PARKED and report.fault is not None and report.fault.kind is FaultKind.PEER
    assert not has.heartbeat.in_long_work


@pytest.mark.parametrize("slow", [True, False])
def test_slow_model_is_built_once_and_copied_afterwards(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, slow: bool) -> None:
    """With a model factory of one minute, each change of the world paused for a minute.

    A joiner with a ready model did not wait that long.
    """
    made: list[nn.Module] = []

    monkeypatch.setattr(model_building, "COPIED_SECONDS", -1.0 if slow else 60.0)
    models_ahead = NextModel(tiny(write_text(tmp_path), model_tie=True))
    blanks: list[Any] = []
    with monkeypatch.context() as patch:
        real = model_building.build_model
        patch.setattr(model_building, "build_model", lambda config: made.append(real(config)) or made[-1])
        for _ in range(3):
            models_ahead.prepare()
            models_ahead.prepare()  # there is one already, so this builds none
            blanks.append(models_ahead.take())
    assert len(made) == (1 if slow else 3)
    models = [blank.model for blank in blanks]
    for model, blank in zip(models, blanks, strict=True):
        assert model.head.weight is model.embed.weight and model.head.weight.is_meta
        assert all(blank.routing.block_policy(name, parameter) is None for name, parameter in model.named_parameters())
        assert [n for n, _ in model.named_parameters()] == [n for n, _ in made[0].named_parameters()]
    parameters = [id(p) for model in (*models, *made[:1] * slow) for p in model.parameters()]
    assert len(set(parameters)) == len(parameters), "each has its own"


def test_uncopyable_slow_model_is_built_for_each_generation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[nn.Module] = []
    real = model_building.build_model

    def build(config: Any) -> nn.Module:
        made.append(real(config))
        made[-1].lock = threading.Lock()  # type: ignore[assignment]
        return made[-1]

    monkeypatch.setattr(model_building, "COPIED_SECONDS", -1.0)
    monkeypatch.setattr(model_building, "build_model", build)
    models_ahead = NextModel(tiny(write_text(tmp_path)))
    for number in range(1, 4):
        models_ahead.prepare()
        models_ahead.prepare()
        blank = models_ahead.take()
        assert blank is not None and blank.model is made[-1] and len(made) == number
