"""A run that goes back: the older checkpoint is the newest again, its data stays for as long, and nothing else changes."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

from vescale_ray import checkpoint
from vescale_ray.checkpoint import (
    NO_GRACE,
    Commit,
    CommitRefused,
    MemoryStore,
    NoCheckpoint,
    ObjectStore,
    PosixStore,
    Retention,
    SaveFailed,
)
from vescale_ray.checkpoint.stores import posix


def save(store: ObjectStore, step: int, epoch: int) -> Commit:
    attempt = f"run-g{epoch}-s{step}"
    data = torch.full((8,), float(step))
    piece = checkpoint.ShardPiece("w", "param", 0, 8, (8,), torch.float32, data)
    vote = checkpoint.write_shard(store, attempt, 0, [piece], aux={"step": step}, step=step, epoch=epoch)
    return checkpoint.commit(store, [vote], step=step, epoch=epoch, attempt=attempt, world=1, meta={"at": step})


@pytest.fixture(params=["memory", "posix"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    return MemoryStore() if request.param == "memory" else PosixStore(tmp_path / "c")


def values(store: ObjectStore) -> list[float]:
    return sorted(set(checkpoint.open(store).read("w").tolist()))


@pytest.mark.fault("S9")
def test_rollback_makes_an_old_commit_newest_and_keeps_the_rest(store: ObjectStore) -> None:
    made = [save(store, step, 3) for step in (10, 20, 30)]
    before = {entry.key: store.get(entry.key) for entry in store.list("")}
    back = checkpoint.roll_back(store, made[0].name)
    assert checkpoint.latest(store) == back and (back.step, back.epoch, back.attempt) == (10, 4, made[0].attempt)
    opened = checkpoint.open(store)
    assert values(store) == [10.0] and opened.aux(0) == {"step": 10}
    assert opened.meta == {"at": 10, "rolled_back": {"from": made[2].name, "to": made[0].name}}
    assert not checkpoint.verify(store).problems
    after = {entry.key: store.get(entry.key) for entry in store.list("")}
    assert {key: after[key] for key in before} == before and set(after) - set(before) == {f"commits/{back.name}.json"}


def test_rollback_refuses_later_saves_of_the_old_epoch(store: ObjectStore) -> None:
    first, _ = save(store, 10, 3), save(store, 20, 3)
    checkpoint.roll_back(store, first.name)
    with pytest.raises(CommitRefused, match="a run that went back to an earlier step continues in a higher epoch"):
        save(store, 30, 3)
    later = save(store, 11, 5)
    assert checkpoint.latest(store) == later and values(store) == [11.0]


def test_rolled_back_data_outlives_the_original_commit(store: ObjectStore) -> None:
    made = [save(store, step, 3) for step in (10, 20, 30)]
    checkpoint.roll_back(store, made[0].name)
    report = checkpoint.gc(store, Retention(keep_last=1, verify=False), grace=NO_GRACE)
    assert set(report.deleted) == {one.name for one in made} and values(store) == [10.0]
    save(store, 11, 5)
    save(store, 12, 5)
    checkpoint.gc(store, Retention(keep_last=1, verify=False), grace=NO_GRACE)
    assert values(store) == [12.0] and not store.list(f"data/{made[0].attempt}/"), "and goes with the last one that refers to it"


def test_unsynced_rollback_reports_that_its_commit_may_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = PosixStore(tmp_path / "c")
    first, _ = save(store, 10, 3), save(store, 20, 3)

    def failing(folder: Path) -> None:
        raise OSError(errno.EIO, "Input/output error", str(folder))

    with monkeypatch.context() as patch, pytest.raises(SaveFailed, match="`vescale-ray ckpt ls` shows whether it was made"):
        patch.setattr(posix, "sync_folder", failing)
        checkpoint.roll_back(store, first.name)
    assert checkpoint.latest(store).step == 10  # type: ignore[union-attr]
    assert [one.step for one in checkpoint.ls(store)] == [10, 20, 10] and not checkpoint.verify(store).problems


def test_rollback_refuses_the_newest_and_a_missing_checkpoint(store: ObjectStore) -> None:
    made = [save(store, step, 3) for step in (10, 20)]
    with pytest.raises(CommitRefused, match="is the newest checkpoint"):
        checkpoint.roll_back(store, made[1].name)
    with pytest.raises(NoCheckpoint, match="no checkpoint 'e0003-s000000000015'"):
        checkpoint.roll_back(store, "e0003-s000000000015")
    assert len(checkpoint.ls(store)) == 2
