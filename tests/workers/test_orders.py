"""Orders of a worker: it takes them from its own or a newer generation, when it is free. The training thread is left out."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.controller.runs import until
from tests.workers.tiny import tiny, write_text
from vescale_ray.workers import trainer
from vescale_ray.workers.messages import NO_TICKET, FaultKind, Give, Join, Origin, Save, Seat, Ticket, WorkerPhase
from vescale_ray.workers.monitoring.heartbeat import Heartbeat
from vescale_ray.workers.network import process_groups
from vescale_ray.workers.network.process_groups import GroupFailed
from vescale_ray.workers.resharding.held_state import Resume
from vescale_ray.workers.worker import Refused, Worker

LIVE = Worker._live


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(Worker, "_live", lambda self: None)
    made = Worker("w7", {})  # the plain class, since Ray's decorators only mark its methods
    made._phase = WorkerPhase.PARKED
    made._ticket = Ticket(4, 1)
    return made


def join(generation: int, attempt: int = 1) -> Join:
    return Join(Ticket(generation, attempt), Seat("host", 1, "prefix", 0, 2), Origin.FRESH, "prefix")


def refused(call: Callable[[], None], words: str) -> None:
    with pytest.raises(Refused, match=words):
        call()


def test_orders_of_current_or_older_generations_are_refused(worker: Any) -> None:
    for order in (join(3), join(4)):
        refused(lambda order=order: worker.give_order(order), r"w7: an order of .* comes too late: 4\.1 has ended or is running")  # type: ignore[misc]
    worker.give_order(join(4, 2))
    assert worker._order is not None and worker._order.ticket == Ticket(4, 2)


def test_fenced_generation_is_never_joined(worker: Any) -> None:
    worker.fence(Ticket(6, 1))
    worker.fence(Ticket(5, 1))  # an older fence does not open it again
    refused(lambda: worker.give_order(join(5)), r"5\.1 comes too late: 6\.1")
    refused(lambda: worker.give_order(join(6)), r"6\.1 comes too late: 6\.1")
    worker.give_order(join(7))


def test_fence_cuts_all_groups_of_its_generation_and_no_other(worker: Any) -> None:
    """Without the cut, a rank waits in a move for a leaver on a stopped machine until the collectives' time limit."""

    def connected() -> tuple[socket.socket, socket.socket]:
        with worker._connected_by().recorded():
            return socket.socketpair()

    worker._enter(Ticket(5, 1), WorkerPhase.FORMING)
    ends = [connected(), connected()]
    worker.fence(Ticket(4, 1))
    for one, other in ends:
        one.send(b"x")
        assert other.recv(1) == b"x", "it is another generation that was closed"
    worker.fence(Ticket(5, 1))
    assert [other.recv(1) for _, other in ends] == [b"", b""]
    worker._enter(Ticket(6, 1), WorkerPhase.FORMING)
    ends.append(connected())
    worker.fence(Ticket(5, 1))
    ends[-1][0].send(b"x")
    assert ends[-1][1].recv(1) == b"x"
    for one, other in ends:
        one.close()
        other.close()


def test_busy_worker_refuses_orders_and_stale_requests(worker: Any) -> None:
    worker.give_order(join(5))
    refused(lambda: worker.give_order(join(6)), "takes an order of 6.1 once it is parked")
    worker._order, worker._phase, worker._ticket = None, WorkerPhase.TRAINING, Ticket(5, 1)
    refused(lambda: worker.give_order(join(6)), "is training in 5.1")
    refused(lambda: worker.ask(Ticket(4, 1), 1), "it takes no request for 4.1")
    worker.ask(Ticket(5, 1), 1)
    worker.ask(Ticket(5, 1), 4)
    assert worker._asked == 5
    old = Save(Ticket(4, 1), resume=None, ranks=(0,), attempt="a", epoch=1)  # type: ignore[arg-type]
    refused(lambda: worker.give_order(old), "4.1 comes too late")


def test_worker_reports_out_of_generation_fenced_before_it_began(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller waits for this report. Without it the controller ended the worker after 3 s as if it hung."""

    class Nothing:
        def held(self) -> tuple[()]:
            return ()

    begun: list[Ticket] = []
    monkeypatch.setattr(worker, "_warm_up", lambda: None)
    monkeypatch.setattr(worker, "_join", lambda order: begun.append(order.ticket))
    worker._snapshots, worker._writer = Nothing(), SimpleNamespace(writing=False)
    worker.give_order(join(5))
    worker.fence(Ticket(5, 1))
    threading.Thread(target=LIVE, args=(worker,), daemon=True).start()  # the worker's thread sees the order only now
    until(lambda: worker._fault is not None, 5, "that it knows of the generation")
    report = worker.poll(0, None, 0.0)
    assert (report.ticket, report.phase, report.out, begun) == (Ticket(5, 1), WorkerPhase.PARKED, True, [])
    assert report.fault.kind is FaultKind.PEER and "5.1 was closed before it began" in report.fault.text
    worker.give_order(join(6))
    until(lambda: bool(begun), 5, "the next generation")
    assert begun == [Ticket(6, 1)]


def test_worker_that_cannot_check_copies_fails_save_and_parks(worker: Any) -> None:
    """The worker's training thread used to end. The controller waited ten minutes for the last checkpoint, and then the run failed."""

    class Full:
        def shards(self, generation: int, step: int) -> list[Any]:
            raise MemoryError("no room for checksums")

    worker._snapshots = Full()
    save = Save(Ticket(4, 1), Resume(4, 2, 40, {0: "w7", 1: "w7"}), (0, 1), "r-h9-s40", 9)
    worker.give_order(save)
    worker._save(worker._order)
    told = [item for _, item in worker._items]
    assert [(item.rank, item.vote) for item in told] == [(0, None), (1, None)] and "no room for checksums" in told[1].error
    assert worker._phase is WorkerPhase.PARKED and "rank 1" in told[1].error


def test_worker_exits_when_its_training_thread_ends(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker whose training thread had ended used to answer every poll, so all others waited for it."""
    ended: list[int] = []

    def fail(order: Any) -> None:
        raise RuntimeError("not foreseen")

    monkeypatch.setattr(worker, "_warm_up", lambda: None)
    monkeypatch.setattr(worker, "_join", fail)
    monkeypatch.setattr("vescale_ray.workers.worker.os._exit", ended.append)
    worker.give_order(join(5))
    LIVE(worker)
    assert ended == [1]


@pytest.mark.parametrize("leaver", [True, False])
def test_leaver_waits_longer_than_members_for_the_transfer_group(
    worker: Any, monkeypatch: pytest.MonkeyPatch, leaver: bool
) -> None:
    """If building a model took over half a minute, each planned change with a leaver failed, and the run failed after four of them."""

    def come_after_two_minutes(*about: Any, meet_timeout_s: float, **rest: Any) -> None:
        assert meet_timeout_s >= 120.0
        raise GroupFailed("that was all")

    monkeypatch.setattr(process_groups, "open_transfer", come_after_two_minutes)
    worker._snapshots = SimpleNamespace(shards=lambda generation, step: [], word=lambda trainer: b"")
    worker._config = SimpleNamespace(elastic=SimpleNamespace(collective_timeout_s=30.0))
    seat, resume = Seat("host", 1, "prefix/move", 2, 3), Resume(4, 3, 40, {0: "w7"})
    order = Give(Ticket(5, 1), seat, resume) if leaver else replace(join(5), transfer=seat, resume=resume)
    with pytest.raises(GroupFailed if leaver else AssertionError):
        worker._move(order, None if leaver else object())


def test_own_copy_is_unhurried_and_wait_for_a_buddys_copy_is_not(worker: Any) -> None:
    """Copies are made beside the step. Copying large shards takes longer than a step and is no hang; a buddy that stands still is one."""
    seen: list[tuple[str, bool]] = []
    worker._heartbeat = Heartbeat()
    worker._snapshots = SimpleNamespace(
        copied=lambda: seen.append(("copied", worker._heartbeat.unhurried)),
        settle=lambda: seen.append(("settled", worker._heartbeat.unhurried)),
    )
    worker._settle_copies()
    assert seen == [("copied", True), ("settled", False)]


def test_worker_building_a_model_reports_forming_once_ordered(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker used to report that it was out of the group.

    It was ended after 3 s if another was lost, and its hangs were never found.
    """
    makes, made = threading.Event(), threading.Event()

    def build(config: Any) -> None:
        makes.set()
        made.wait(10)
        raise SystemExit("a factory that gives up")

    joined: list[Ticket] = []
    monkeypatch.setattr("vescale_ray.workers.trainer.Blank", build)
    monkeypatch.setattr("vescale_ray.workers.worker.os._exit", lambda code: joined.append(NO_TICKET))
    monkeypatch.setattr(worker, "_warm_up", lambda: None)
    monkeypatch.setattr(worker, "_join", lambda order: joined.append(order.ticket))
    worker._writer, worker._config = SimpleNamespace(writing=False), None
    threading.Thread(target=LIVE, args=(worker,), daemon=True).start()
    assert makes.wait(5)
    worker.give_order(join(5))
    report = worker.poll(0, None, 0.0)
    assert (report.ticket, report.phase, report.out) == (Ticket(5, 1), WorkerPhase.FORMING, False)
    assert "build (test_orders.py" in report.where
    made.set()
    until(lambda: bool(joined), 5, "the generation")
    assert joined == [Ticket(5, 1)]


@pytest.mark.parametrize("origin", [Origin.MEMORY, Origin.CHECKPOINT, Origin.FRESH])
def test_finished_worker_parks_only_after_all_have_their_values(worker: Any, monkeypatch: pytest.MonkeyPatch, origin: Origin) -> None:
    """The first to finish used to cut the connections of the move while others still received: no later step makes it wait."""
    happened: list[str] = []
    monkeypatch.setattr(process_groups, "form", lambda *about, **rest: None)
    monkeypatch.setattr(process_groups, "barrier", lambda bound_s: happened.append("all have their values"))
    worker._config = SimpleNamespace(elastic=SimpleNamespace(collective_timeout_s=1.0), train=SimpleNamespace(steps=5))
    worker._device = torch.device("cpu")
    worker._build = lambda order: SimpleNamespace(completed=5, close=lambda: happened.append("closed"))
    worker._fill = lambda trainer, order: (None, 0)
    worker._outline = lambda trainer: None
    worker._snapshots = SimpleNamespace(begin=lambda *about: None, park=lambda trainer: happened.append("parked"))
    worker._settle_copies = lambda: None
    worker._enter(Ticket(5, 1), WorkerPhase.FORMING)
    assert worker._generation(replace(join(5), origin=origin)) is WorkerPhase.FINISHED
    assert happened == ["all have their values", "parked", "closed"]


@pytest.mark.parametrize("origin", [Origin.FRESH, Origin.CHECKPOINT])
@pytest.mark.fault("W12")
def test_fence_ends_loading_of_values_at_the_next_piece(
    worker: Any, monkeypatch: pytest.MonkeyPatch, origin: Origin
) -> None:
    """A rank was lost during minutes of reading checkpoints. All others read on, and were ended for that after half a minute."""
    pieces: list[int] = []

    class Trainer:
        completed = 0

        def __init__(self) -> None:
            self.beat: Callable[[], None] = lambda: pieces.append(len(pieces))

        def initialize(self) -> None:
            for piece in range(5):
                if piece == 2:
                    worker.fence(Ticket(4, 9))
                if piece == 3:
                    worker.fence(Ticket(5, 1))
                self.beat()

    monkeypatch.setattr("vescale_ray.workers.resharding.reshard.restore_from_checkpoint", lambda trainer, opened: trainer.initialize() or 0)
    monkeypatch.setattr("vescale_ray.checkpoint.open", lambda root, commit: None)
    worker._config = SimpleNamespace(checkpoint_root="/nowhere")
    trainer: Any = Trainer()
    beat = trainer.beat
    with pytest.raises(GroupFailed, match=r"generation 5\.1 ended while its values were still being loaded"):
        worker._fill(trainer, replace(join(5), origin=origin))
    assert pieces == [0, 1, 2, 3] and trainer.beat is beat, "the beats of a step leave nowhere"
    assert worker._fill(trainer, replace(join(6), origin=origin)) == (None, 0)
    trainer.beat()


def test_copy_verification_after_a_failure_is_unhurried(worker: Any) -> None:
    """Copies may have tens of gigabytes on each of a host's eight ranks.

    All verifying workers were ended as hung, and their copies lost.
    """
    seen: list[tuple[str, bool]] = []

    def note(what: str) -> Callable[[], None]:
        return lambda: seen.append((what, worker._heartbeat.unhurried))

    def fail(order: Join) -> WorkerPhase:
        raise GroupFailed("a peer is gone")

    worker._heartbeat = Heartbeat()
    worker._generation, worker._writer = fail, SimpleNamespace(abandon=lambda: None, writing=False)
    worker._snapshots = SimpleNamespace(copied=note("copied"), let_go=note("let go"), verify=note("verified"), held=tuple)
    worker._join(join(5))
    assert seen == [("copied", True), ("let go", False), ("verified", True)]
    report = worker.poll(0, None, 0.0)
    assert report.phase is WorkerPhase.PARKED and report.fault is not None and report.fault.kind is FaultKind.PEER and not report.unhurried


@pytest.mark.parametrize("slow", [True, False])
def test_slow_model_is_built_once_and_copied_afterwards(
    worker: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, slow: bool
) -> None:
    """With a model factory of one minute, each change of the world paused for a minute.

    A joiner with a ready model did not wait that long.
    """
    made: list[nn.Module] = []

    monkeypatch.setattr("vescale_ray.workers.worker.COPIED_SECONDS", -1.0 if slow else 60.0)
    worker._config = tiny(write_text(tmp_path), model_tie=True)
    blanks: list[Any] = []
    with monkeypatch.context() as patch:
        real = trainer.build_model
        patch.setattr(trainer, "build_model", lambda config: made.append(real(config)) or made[-1])
        for _ in range(3):
            worker._make_blank()
            worker._make_blank()  # the worker has one already, so this builds none
            blanks.append(worker._blank)
            worker._blank = None
    assert len(made) == (1 if slow else 3)
    models = [blank.model for blank in blanks]
    for model, blank in zip(models, blanks, strict=True):
        assert model.head.weight is model.embed.weight and model.head.weight.is_meta
        assert all(blank.routing.block_policy(name, parameter) is None for name, parameter in model.named_parameters())
        assert [n for n, _ in model.named_parameters()] == [n for n, _ in made[0].named_parameters()]
    parameters = [id(p) for model in (*models, *made[:1] * slow) for p in model.parameters()]
    assert len(set(parameters)) == len(parameters), "each has its own"


def test_uncopyable_slow_model_is_built_for_each_generation(
    worker: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made: list[nn.Module] = []
    real = trainer.build_model

    def build(config: Any) -> nn.Module:
        made.append(real(config))
        made[-1].lock = threading.Lock()  # type: ignore[assignment]
        return made[-1]

    monkeypatch.setattr("vescale_ray.workers.worker.COPIED_SECONDS", -1.0)
    monkeypatch.setattr(trainer, "build_model", build)
    worker._config = tiny(write_text(tmp_path))
    for number in range(1, 4):
        worker._make_blank()
        worker._make_blank()
        assert worker._blank is not None and worker._blank.model is made[-1] and len(made) == number
        worker._blank = None
