"""A worker's checkpoints, written beside its training.

They hold exactly the step's bits, use the buddy's copy, and contain nothing of a generation that is over.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.checkpoint.faulty_store import Fault, FaultyStore
from tests.workers.fleet import State
from tests.workers.tiny import running, same_bits, tiny
from vescale_ray import checkpoint
from vescale_ray.config.rank_grid import RankGrid
from vescale_ray.workers.membership import Membership
from vescale_ray.workers.messages import Damaged, Join, Origin, SavedShard, Seat, Ticket
from vescale_ray.workers.saving import Writer
from vescale_ray.workers.worker_state import WorkerState


class Gated(checkpoint.PosixStore):
    """A store whose data writes wait until the gate is opened."""

    def __init__(self, root: Any) -> None:
        super().__init__(root)
        self.gate = threading.Event()

    def put_stream(self, key: str, chunks: Any, size: int) -> None:
        assert self.gate.wait(30)
        super().put_stream(key, chunks, size)


def begin_saving(state: State, root: str, attempt: str) -> bool:
    """Stage the live state and begin to write it behind a gate. Returns whether it shares the buddy's copy."""
    if "writer" not in state:
        state["store"], state["votes"] = Gated(root), []
        state["writer"] = Writer(state["store"], state["votes"].append, read_back=True)
    staged = state["snapshots"].stage(state["trainer"])
    state["writer"].submit(staged, Ticket(1, 1), attempt, 0.5)
    return bool(staged.shared)


def busy(state: State) -> bool:
    answer: bool = state["writer"].busy
    return answer


def finish(state: State, count: int) -> list[SavedShard]:
    state["store"].gate.set()
    deadline = time.monotonic() + 20
    while (len(state["votes"]) < count or state["writer"].busy) and time.monotonic() < deadline:
        time.sleep(0.01)
    return list(state["votes"])


def save_with_a_flipped_bit(state: State, root: str) -> list[SavedShard | Damaged]:
    """Save to a storage that flips a bit. Returns all published reports."""
    told: list[SavedShard | Damaged] = []
    store = FaultyStore(checkpoint.PosixStore(root), [Fault("put_stream", "flip")])
    writer = Writer(store, told.append, read_back=True)
    writer.submit(state["snapshots"].stage(state["trainer"]), Ticket(1, 1), "flipped", 0.5)
    deadline = time.monotonic() + 20
    while len(told) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    return told


def give_up(state: State) -> list[SavedShard]:
    """Abandon the save, then let the storage go on."""
    state["writer"].abandon()
    state["store"].gate.set()
    deadline = time.monotonic() + 20
    while state["writer"]._jobs and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not state["writer"]._jobs
    return list(state["votes"])


@pytest.mark.parametrize(
    "every",
    [pytest.param(0, marks=pytest.mark.slow), 1, pytest.param(2, marks=pytest.mark.slow)],
    ids=["no copies", "every step", "every second step"],
)
def test_checkpoint_keeps_its_steps_bits_while_training_goes_on(text: str, tmp_path: Path, every: int) -> None:
    root = str(tmp_path)
    with running(tiny(text, elastic_snapshot_every=every), 2) as (fleet, run):
        truth = {}
        for step in (2, 3):
            run.train(step)
            truth[step] = run.full_state()
            shared = fleet.run([0, 1], begin_saving, root, f"s{step}")
            assert set(shared.values()) == {every > 0 and step % every == 0}, "the buddy's copy of that step is the checkpoint's, too"
        assert set(fleet.run([0, 1], busy).values()) == {True}
        run.train(9)  # several copies are made meanwhile, and each needs the buffers
        votes = fleet.run([0, 1], finish, 2)
        for index, step in enumerate((2, 3)):
            told = [votes[w][index] for w in (0, 1)]
            assert [v.error for v in told] == [None, None] and {v.step for v in told} == {step} and {v.stall_s for v in told} == {0.5}
            parts = [checkpoint.Vote.from_json(v.vote) for v in told if v.vote is not None]
            checkpoint.commit(root, parts, step=step, epoch=1, attempt=f"s{step}", world=2, meta={})
            opened = checkpoint.open(root)
            stored = {(n, k): opened.read(n, k).numpy() for n, t in opened.tensors.items() for k in t.kinds}
            assert same_bits(stored, truth[step])
            assert opened.aux(0)["step"] == step
        assert checkpoint.verify(root).ok
        # The copies are still intact.
        before = run.full_state()
        run.end()
        run.resume([0, 1], [1, 0])
        assert same_bits(before, run.full_state())


def test_damage_found_on_read_back_is_reported(text: str, tmp_path: Path) -> None:
    with running(tiny(text), 1) as (fleet, run):
        run.train(1)
        voted, damaged = fleet.run([0], save_with_a_flipped_bit, str(tmp_path))[0]
        assert isinstance(voted, SavedShard) and voted.vote is not None
        assert isinstance(damaged, Damaged) and (damaged.ticket, damaged.attempt, damaged.step) == (Ticket(1, 1), "flipped", 1)
        assert "block" in damaged.problem and ".safetensors" in damaged.problem


def test_abandoned_save_gets_no_vote_and_leaves_no_object(text: str, tmp_path: Path) -> None:
    with running(tiny(text), 1) as (fleet, run):
        run.train(1)
        for step in (1, 2):
            fleet.run([0], begin_saving, str(tmp_path), f"s{step}")
        assert fleet.run([0], give_up)[0] == []
        assert not list(tmp_path.rglob("*.safetensors"))
        fleet.run([0], begin_saving, str(tmp_path), "s3")
        assert len(fleet.run([0], finish, 1)[0]) == 1, "it takes the next one as ever"


def test_failed_copy_costs_the_checkpoint_and_not_the_training() -> None:
    def stage(_: Any) -> None:
        raise MemoryError("no room for 3 GiB")

    config = SimpleNamespace(
        train=SimpleNamespace(steps=100, eval_every=0), data=SimpleNamespace(eval_samples=0), checkpoint=SimpleNamespace(every=5)
    )
    never = SimpleNamespace(is_due=lambda step: False)
    resources: Any = SimpleNamespace(config=config, snapshots=SimpleNamespace(stage=stage), heartbeat=None, writer=None, completer=never)
    trainer: Any = SimpleNamespace(rank=1, grid=RankGrid(1, 2), generation=3)
    record: Any = SimpleNamespace(step=10, flags=0)
    state = WorkerState("w1")
    order = Join(Ticket(3, 1), Seat("host", 1, "prefix", 1, 2), Origin.FRESH, "run-g3")
    assert Membership(order, resources, state).between_steps(trainer, record) == {}
    ((_, word),) = state.report(0, None, 0.0, tuple).items
    assert isinstance(word, SavedShard)
    assert (word.attempt, word.step, word.epoch, word.rank, word.world, word.vote) == ("run-g3-s10", 10, 3, 1, 2, None)
    assert word.error is not None and "could not be copied" in word.error and "no room for 3 GiB" in word.error
