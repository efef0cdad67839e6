"""Saves and reads of checkpoints by the controller: votes, commits, retention and the choice of a state to go on from."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.controller.recorded import answered, generation
from vescale_ray import checkpoint
from vescale_ray.checkpoint import commits
from vescale_ray.controller.checkpointing import coordinator, parked
from vescale_ray.controller.checkpointing.committer import Committer, SaveResult, newest_kept
from vescale_ray.controller.checkpointing.coordinator import CheckpointCoordinator
from vescale_ray.controller.policy import CommittedCheckpoint, choose_source
from vescale_ray.controller.protocol import StateSource, World
from vescale_ray.controller.statistics.checkpoint_stats import CheckpointStats
from vescale_ray.workers.messages import Origin, Save, SavedShard, Ticket, WorkerPhase, WorkerReport
from vescale_ray.workers.resharding.held_state import HeldState


def vote(root: Path, attempt: str, rank: int, world: int, step: int) -> SavedShard:
    data = torch.arange(8, dtype=torch.float32)
    cut = [8 * r // world for r in range(world + 1)]
    piece = checkpoint.ShardPiece("w", "param", cut[rank], cut[rank + 1], (8,), torch.float32, data[cut[rank] : cut[rank + 1]])
    given = checkpoint.write_shard(root, attempt, rank, [piece], step=step, epoch=1)
    return SavedShard(Ticket(1, 1), attempt, step, 1, rank, world, given.to_json(), None, 1.5)


def ended(committer: Committer) -> list[SaveResult]:
    deadline = time.monotonic() + 20
    results: list[SaveResult] = []
    while not results and time.monotonic() < deadline:
        results = committer.results()
        time.sleep(0.01)
    return results


def test_checkpoint_is_committed_only_after_the_last_vote(tmp_path: Path) -> None:
    committer = Committer(str(tmp_path), lambda: checkpoint.Retention(keep_last=2), lambda step: {"at": step}, None)
    committer.take(vote(tmp_path, "t1", 0, 2, 5))
    assert committer.busy and not committer.results() and newest_kept(str(tmp_path)) is None
    committer.take(vote(tmp_path, "t1", 1, 2, 5))
    (result,) = ended(committer)
    assert result.error is None and result.kept == newest_kept(str(tmp_path)) and result.step == 5
    assert result.stages["upload"] == 1.5 and sum(result.stages.values()) == pytest.approx(result.seconds + result.stall_s)
    assert checkpoint.open(tmp_path).meta["at"] == 5 and not committer.busy


@pytest.mark.fault("S1")
def test_checkpoint_reported_damaged_at_any_time_is_not_resumed(tmp_path: Path) -> None:
    for order in ("told after the commit", "told before"):
        noted: list[str] = []
        log = log_of(None)[0]
        log.record = lambda name, noted=noted, **about: noted.append(name)
        committer = SimpleNamespace(results=lambda: [SaveResult("bad", 7, 1, 0.1, CommittedCheckpoint("c7", "/c7", 7))])
        build: Any = CheckpointCoordinator
        coordinator = build(str(tmp_path), "run", None, log, None, committer, None, 1.0, SimpleNamespace(saved=lambda _: None))
        if order == "told before":
            coordinator.damaged("bad")
        coordinator.collect()
        if order == "told after the commit":
            coordinator.damaged("bad")
        assert coordinator._bad == {"c7"} and noted == ["checkpoint_saved"], order


def log_of(kept: int | None, path: str | None = None, world: World | None = None, **stats: Any) -> tuple[Any, Any]:
    """The log and the generation of a run whose newest checkpoint is of step ``kept``."""
    about = SimpleNamespace(checkpoints=CheckpointStats(kept, path), ended=lambda step: None, **stats)
    return SimpleNamespace(stats=about, record=lambda name, **fields: None), SimpleNamespace(world=world or generation(4, 0, "a"))


def source(worker_group: Any, coordinator: CheckpointCoordinator) -> StateSource:
    """Return the source of worker ``a``'s state, given what it holds and the newest checkpoint."""
    return choose_source(parked.held(worker_group, "a"), "a", coordinator.newer("a"))


@pytest.mark.parametrize("in_memory", [41, 30, None], ids=["as new as any", "older", "nothing"])
@pytest.mark.fault("S5")
def test_recovery_needs_no_storage_if_workers_hold_a_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_memory: int | None) -> None:
    """If the storage is out of reach, the loss of a worker must not fail the run. If only the manifests are out of reach, a run without
    copies must not begin from its first step."""
    asked: list[str] = []

    def refuse(store: Any) -> Any:
        asked.append("asked")
        raise OSError(errno.EIO, "out of reach")

    monkeypatch.setattr(commits, "_listed", refuse)
    held = () if in_memory is None else (HeldState(4, 1, in_memory, (0,)),)
    worker_group: Any = SimpleNamespace(
        alive=lambda w: True, report=lambda w: WorkerReport(w, Ticket(4, 1), WorkerPhase.PARKED, 41, (), held, None, 0)
    )
    coordinator = CheckpointCoordinator(str(tmp_path), "run", worker_group, *log_of(40, "/c/e4-s40"), None, None, 1.0, None)  # type: ignore[arg-type]
    assert parked.held_step(worker_group, "a") == (-1 if in_memory is None else in_memory) and not asked
    if in_memory is None:
        with pytest.raises(OSError, match="out of reach"):
            coordinator.newer("a")
        return
    begins = source(worker_group, coordinator)
    assert (begins.origin, begins.step) == (Origin.MEMORY, in_memory)
    assert len(asked) == (in_memory < 40), "only where a checkpoint may be newer"
    newest = coordinator.newest()
    assert newest is not None and newest.path == "/c/e4-s40", "what the end of the run tells is not worth failing for"


@pytest.mark.fault("S6")
def test_vanished_checkpoints_are_no_reason_to_begin_anew(tmp_path: Path) -> None:
    """If the mount is gone, a run must not begin from its first step, and a stopped run must not announce that it will."""
    worker_group: Any = SimpleNamespace(alive=lambda w: True, report=lambda w: None)
    log, newest = log_of(40, "/c/e4-s40")
    coordinator = CheckpointCoordinator(str(tmp_path / "not mounted"), "run", worker_group, log, newest, None, None, 1.0, None)  # type: ignore[arg-type]
    with pytest.raises(OSError, match="not mounted has no checkpoint any more, though there was one of step 40: is it mounted"):
        coordinator.newer("a")
    assert coordinator.newest() == CommittedCheckpoint("e4-s40", "/c/e4-s40", 40)
    coordinator.mark_damaged("one of long ago")
    with pytest.raises(OSError, match="is it mounted"):
        coordinator.newer("a")
    log.stats.checkpoints.step = None
    assert coordinator.newest() is None and source(worker_group, coordinator).origin is Origin.FRESH, "there was none yet"


def test_run_with_only_damaged_checkpoints_begins_anew(tmp_path: Path) -> None:
    committer = Committer(str(tmp_path), lambda: checkpoint.Retention(keep_last=2), lambda step: {}, None)
    committer.take(vote(tmp_path, "t1", 0, 1, 40))
    (result,) = ended(committer)
    assert result.kept is not None
    worker_group: Any = SimpleNamespace(alive=lambda w: True, report=lambda w: None)
    log, newest = log_of(40, result.kept.path)
    coordinator = CheckpointCoordinator(str(tmp_path), "run", worker_group, log, newest, None, None, 1.0, None)  # type: ignore[arg-type]
    assert source(worker_group, coordinator).commit == result.kept.name
    coordinator.mark_damaged(result.kept.name)
    assert coordinator.newest() is None and source(worker_group, coordinator).origin is Origin.FRESH, "its data is damaged"
    again = CheckpointCoordinator(str(tmp_path), "run", worker_group, log, newest, None, None, 1.0, None)  # type: ignore[arg-type]
    for piece in (tmp_path / "data").rglob("*"):
        if piece.is_file():
            piece.write_bytes(b"")
    assert again.newest() is None and source(worker_group, again).origin is Origin.FRESH, "it is cut short"


def test_loss_while_silent_storage_is_asked_does_not_begin_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers hold a state older than the checkpoint, and one dies while the storage is asked. The run must not begin from its first
    step."""
    back, living = threading.Event(), {"a", "b"}
    monkeypatch.setattr(coordinator, "newest_kept", lambda *_: back.wait(60) and None)
    monkeypatch.setattr(coordinator, "STORAGE_S", 1.0)
    monkeypatch.setattr("vescale_ray.controller.bounded_io.PATIENCE_S", 0.3)

    def report(worker: str) -> WorkerReport:
        return WorkerReport(worker, Ticket(4, 1), WorkerPhase.PARKED, 30, (), (HeldState(4, 2, 30, ("ab".index(worker),)),), None, 0)

    worker_group: Any = SimpleNamespace(alive=lambda w: w in living, report=report)
    log, newest = log_of(40, "/c/e4-s40", generation(4, 0, "a", "b"))
    nothing: Any = None

    keeps = CheckpointCoordinator(str(tmp_path), "run", worker_group, log, newest, nothing, nothing, 1.0, nothing)  # type: ignore[arg-type]
    assert parked.held_step(worker_group, "ab") == 30
    with pytest.raises(OSError, match="does not answer"):
        answered(lambda: keeps.newer("ab"), lambda: living.discard("b"))
    back.set()


class Writers:
    """Two parked workers that hold each other's shards. ``b`` dies of its first order. ``a`` carries out its own order for 5 rounds,
    refuses others meanwhile, and its reports come 3 rounds late."""

    TICKET = Ticket(4, 1)

    def __init__(self) -> None:
        self.round, self.ordered, self.refused, self.living = 10, 0, 0, {"a", "b"}
        self.results: list[SaveResult] = []
        self.coordinator: Any = None

    def report(self, worker: str) -> WorkerReport:
        held = (HeldState(4, 2, 41, (0, 1)),)
        seen = self.round - 3
        phase = WorkerPhase.SAVING if worker == "a" and self.ordered and self.ordered <= seen < self.ordered + 5 else WorkerPhase.FINISHED
        return WorkerReport(worker, self.TICKET, phase, 41, (), held if phase is WorkerPhase.FINISHED else (), None, 0)

    def alive(self, worker: str) -> bool:
        return worker in self.living

    def stale(self, worker: str) -> bool:
        return worker == "a" and self.round - 3 <= self.ordered

    def order(self, orders: Mapping[str, Save]) -> dict[str, str]:
        if self.ordered and self.round < self.ordered + 5:
            self.refused += 1
            return dict.fromkeys(orders, "is saving")
        self.ordered = self.round
        self.living.discard("b")
        if orders.keys() == {"a"}:
            self.results.append(SaveResult(orders["a"].attempt, 41, orders["a"].epoch, 0.1, CommittedCheckpoint("c41", "/c41", 41)))
        return {}

    def save(self) -> SaveResult | None:
        """Save the checkpoint of both, in as many rounds as it takes."""
        result: SaveResult | None = answered(lambda: self.coordinator.save(["a", "b"]), self.next_round)
        return result

    def next_round(self) -> None:
        assert self.round < 110
        self.round += 1
        self.coordinator.collect()


def test_survivor_writes_last_checkpoint_after_its_broken_save(tmp_path: Path) -> None:
    """The survivor still writes when the next order would come, and its report is late. An order that it refuses would count as a try."""
    worker_group, numbers = Writers(), SimpleNamespace(take_number=iter(range(5, 100)).__next__)
    log, current = log_of(None, None, generation(4, 40, "a", "b"), step=41)
    committer: Any = SimpleNamespace(
        results=lambda: [worker_group.results.pop()] if worker_group.results else [], abandon=lambda _: [], committing=lambda _: False
    )
    cadence: Any = SimpleNamespace(saved=lambda _: None)
    worker_group.coordinator = CheckpointCoordinator(str(tmp_path), "run", worker_group, log, current, committer, numbers, 30.0, cadence)  # type: ignore[arg-type]
    result = worker_group.save()
    assert result is not None and result.kept is not None and result.error is None
    assert worker_group.refused == 0 and worker_group.living == {"a"}


def test_held_state_is_not_saved_over_a_newer_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With copies every 10 steps and a checkpoint of step 45, a worker is lost as the run stops. If the held state of step 41 became the
    newest checkpoint, retention would delete step 45."""
    worker_group, numbers = Writers(), SimpleNamespace(take_number=iter(range(5, 100)).__next__)
    newest = [CommittedCheckpoint("c45", "/c45", 45)]
    monkeypatch.setattr(coordinator, "newest_kept", lambda *about: newest[0])
    log, current = log_of(45, None, generation(4, 40, "a", "b"), step=47)
    committer: Any = SimpleNamespace(
        results=lambda: [worker_group.results.pop()] if worker_group.results else [], abandon=lambda _: [], committing=lambda _: False
    )
    cadence: Any = SimpleNamespace(saved=lambda _: None)
    worker_group.coordinator = CheckpointCoordinator(str(tmp_path), "run", worker_group, log, current, committer, numbers, 30.0, cadence)  # type: ignore[arg-type]
    assert worker_group.save() is None and worker_group.ordered == 0
    newest[0] = CommittedCheckpoint("c40", "/c40", 40)  # the checkpoint of step 45 is damaged
    result = worker_group.save()
    assert result is not None and result.kept is not None and result.step == 41


def test_hung_last_checkpoint_is_given_up_at_its_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two more orders, each with the same limit and a wait for workers that still write, would take more than an hour."""
    now, ordered = [50.0], []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    busy = WorkerReport("a", Writers.TICKET, WorkerPhase.FINISHED, 41, (), (HeldState(4, 1, 41, (0,)),), None, 0)
    log, current = log_of(None, None, generation(4, 40, "a"), step=41)
    committer: Any = SimpleNamespace(results=list, abandon=lambda _: [], committing=lambda _: False)
    stuck: Any = SimpleNamespace(
        alive=lambda w: True, stale=lambda w: bool(ordered), report=lambda w: busy, order=lambda o: ordered.append(o)
    )
    numbers: Any = SimpleNamespace(take_number=lambda: 8)
    coordinator = CheckpointCoordinator(str(tmp_path), "run", stuck, log, current, committer, numbers, 600.0, None)  # type: ignore[arg-type]
    result = answered(lambda: coordinator.save(["a"]), lambda: now.__setitem__(0, now[0] + 10.0))
    assert result is not None and result.kept is None and result.error == "it was not written within 600 s (checkpoint.last_timeout_s)"
    assert now == [650.0] and len(ordered) == 1


def test_votes_that_come_again_after_a_restart_change_nothing(tmp_path: Path) -> None:
    committer = Committer(str(tmp_path), lambda: checkpoint.Retention(keep_last=2), lambda step: {}, None)
    votes = [vote(tmp_path, "t1", rank, 2, 5) for rank in range(2)]
    for one in votes:
        committer.take(one)
    assert len(ended(committer)) == 1
    for one in votes:
        committer.take(one)
    known: Future[str | None] = Future()
    again = Committer(str(tmp_path), lambda: checkpoint.Retention(keep_last=2), lambda step: {}, known)
    for one in votes:
        again.take(one)
    assert again.busy and not again.results() and not again.committing("t1"), "a restarted controller asks the storage first"
    known.set_result("t1")
    assert not committer.busy and not again.busy and len(checkpoint.ls(tmp_path)) == 1
    # If the controller restarts before the commit is noted, the same votes make the same commit.
    third = Committer(str(tmp_path), lambda: checkpoint.Retention(keep_last=2), lambda step: {}, None)
    for one in votes:
        third.take(one)
    assert ended(third)[0].error is None and len(checkpoint.ls(tmp_path)) == 1
    for step, failed in ((6, None), (7, RuntimeError("no such store"))):
        asked: Future[str | None] = Future()
        fourth = Committer(str(tmp_path), lambda: checkpoint.Retention(keep_last=2), lambda step: {}, asked)
        fourth.take(vote(tmp_path, f"t{step}", 0, 2, step))
        if failed is None:
            asked.set_result(None)
        else:
            asked.set_exception(failed)
        fourth.take(vote(tmp_path, f"t{step}", 1, 2, step))
        (made,) = ended(fourth)
        assert made.error is None and made.step == step, "what came before the answer counts as well"


def test_failed_rank_fails_checkpoint_and_keeps_the_older_one(tmp_path: Path) -> None:
    committer = Committer(str(tmp_path), lambda: checkpoint.Retention(keep_last=2), lambda step: {}, None)
    for rank in range(2):
        committer.take(vote(tmp_path, "t1", rank, 2, 5))
    ended(committer)
    committer.take(vote(tmp_path, "t2", 0, 2, 6))
    committer.take(SavedShard(Ticket(1, 1), "t2", 6, 1, 1, 2, None, "No space left on device", 0.5))
    (result,) = ended(committer)
    assert result.kept is None and result.error == "rank 1: No space left on device"
    committer.take(vote(tmp_path, "t3", 0, 2, 7))
    (result,) = committer.abandon("a worker was lost")
    assert result.error == "a worker was lost" and not committer.busy
    kept = newest_kept(str(tmp_path))
    assert kept is not None and kept.step == 5
    assert newest_kept(str(tmp_path), frozenset({kept.name})) is None


def test_a_failed_checkpoint_keeps_no_space_on_the_disk(tmp_path: Path) -> None:
    committer = Committer(str(tmp_path), lambda: checkpoint.Retention(keep_last=2), lambda step: {}, None)
    committer.take(vote(tmp_path, "t2", 0, 2, 6))
    assert (tmp_path / "data/t2").is_dir()
    committer.take(SavedShard(Ticket(1, 1), "t2", 6, 1, 1, 2, None, "No space left on device", 0.5))
    assert ended(committer)[0].error is not None
    committer.close()
    assert not (tmp_path / "data/t2").exists()


def test_missing_vote_or_hung_commit_fails_in_bounded_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    committer = Committer(str(tmp_path), lambda: checkpoint.Retention(keep_last=2), lambda step: {}, None, 0.3)
    committer.take(vote(tmp_path, "t1", 1, 3, 5))
    (result,) = ended(committer)
    assert result.kept is None and result.error == "no vote from ranks [0, 2] for 0.3 s: given up" and not committer.busy
    gate = threading.Event()
    real = checkpoint.commit
    monkeypatch.setattr(checkpoint, "commit", lambda *a, **k: gate.wait(20) and real(*a, **k))
    committer.take(vote(tmp_path, "t2", 0, 1, 6))
    (result,) = ended(committer)
    assert result.error is not None and "no answer to its commit from" in result.error and not committer.busy
    gate.set()
    committer.take(vote(tmp_path, "t3", 0, 1, 7))
    assert ended(committer)[0].error is None, "a store that answers again is used again"


def test_checkpoint_duration_is_independent_of_host_clocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint interval is never less than the duration of a checkpoint. A clock that is a day ahead would make it a day."""
    real = time.time
    committer = Committer(str(tmp_path), lambda: checkpoint.Retention(keep_last=2), lambda step: {}, None)
    committer.take(vote(tmp_path, "t1", 0, 2, 5))
    monkeypatch.setattr(time, "time", lambda: real() + 86400)
    committer.take(vote(tmp_path, "t1", 1, 2, 5))
    (result,) = ended(committer)
    assert result.error is None and 1.5 <= result.seconds < 10


def test_retention_waits_until_the_newer_checkpoint_is_proven(tmp_path: Path) -> None:
    from vescale_ray.checkpoint.upkeep.proof import prove

    committer = Committer(str(tmp_path), lambda: checkpoint.Retention(keep_last=1), lambda step: {}, None)
    for step in (5, 6, 7):
        told = [vote(tmp_path, f"t{step}", rank, 2, step) for rank in range(2)]
        for one in told:
            committer.take(one)
        assert ended(committer)[0].error is None
        if step < 7:
            for given in (checkpoint.Vote.from_json(one.vote) for one in told if one.vote):
                assert prove(checkpoint.PosixStore(tmp_path), given.object, given.aux) is None
        else:
            # The garbage collection after step 6 may run after step 7 was committed. It must leave step 7 to its own workers all the same.
            deadline = time.monotonic() + 20
            while len(checkpoint.ls(tmp_path)) > 2 and time.monotonic() < deadline:
                time.sleep(0.02)
            time.sleep(0.3)
            assert [c.step for c in checkpoint.ls(tmp_path)] == [6, 7], "7 has not been read back"
    committer.close()
    assert [c.step for c in checkpoint.ls(tmp_path)] == [6, 7]


def test_late_vote_completes_a_begun_attempt_but_begins_none(tmp_path: Path) -> None:
    """Votes have epoch 1. An attempt with a vote before the fence may still be completed; an attempt that begins later never would be."""
    committer = Committer(str(tmp_path), lambda: checkpoint.Retention(keep_last=2), lambda step: {}, None)
    committer.take(vote(tmp_path, "t1", 0, 2, 5))
    committer.fence(2)
    committer.take(vote(tmp_path, "t2", 0, 2, 6))
    committer.take(vote(tmp_path, "t1", 1, 2, 5))
    (result,) = ended(committer)
    assert result.kept is not None and result.kept.step == 5 and not committer.busy


def test_an_attempt_that_a_later_one_has_overtaken_is_given_up(tmp_path: Path) -> None:
    """The missing vote went to a controller that no longer exists. Workers vote in order, so it will not come again."""
    committer = Committer(str(tmp_path), lambda: checkpoint.Retention(keep_last=2), lambda step: {}, None)
    committer.take(vote(tmp_path, "t1", 0, 2, 5))
    for rank in (0, 1):
        committer.take(vote(tmp_path, "t2", rank, 2, 6))
    results = ended(committer)
    assert [(r.step, r.error) for r in results] == [(6, None), (5, "a later one was complete before it")] and not committer.busy
