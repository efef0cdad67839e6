"""Which checkpoints stay: the rules, each against a hand-made list; pins, graces, damaged ones, failing stores."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch

from tests.checkpoint.checkpoint_support import memory_folder, random_bits
from vescale_ray import checkpoint as ckpt
from vescale_ray.checkpoint import retention

W = random_bits((30, 4), torch.float32, 1)


@pytest.fixture
def root():
    with memory_folder() as folder:
        yield folder


def make(root, step, epoch=0, **metrics):
    attempt = f"at-e{epoch}-s{step}"
    piece = ckpt.ShardPiece("w", "param", 0, 120, (30, 4), torch.float32, W.reshape(-1))
    vote = ckpt.write_shard(root, attempt, 0, [piece], step=step, epoch=epoch)
    return ckpt.commit(root, [vote], step=step, epoch=epoch, attempt=attempt, world=1, meta={"metrics": metrics})


def steps(names):
    return [int(name.partition("-s")[2]) for name in names]


def test_every_rule_keeps_its_own_and_says_so(root):
    loss = {10: 5.0, 20: 1.0, 30: 4.0, 40: 2.0, 50: 3.0, 60: 9.0, 70: 2.0}
    for step, value in loss.items():
        make(root, step, loss=value)
    report = ckpt.gc(root, ckpt.Retention(keep_last=1, keep_every=30, keep_best=2, metric="loss"), dry_run=True)
    # Best two: 20 (1.0), then 70, the newer of the two with 2.0. One for each 30 steps: 10 (0..29), 30, 60.
    expected = {10: ("every",), 20: ("best",), 30: ("every",), 60: ("every",), 70: ("last", "best")}
    assert {int(name.partition("-s")[2]): why for name, why in report.why.items()} == expected
    assert steps(report.deleted) == [40, 50] and len(ckpt.ls(root)) == 7, "a dry run changes nothing"
    real = ckpt.gc(root, ckpt.Retention(keep_last=1, keep_every=30, keep_best=2, metric="loss"), grace=ckpt.NO_GRACE)
    assert (real.kept, real.deleted, real.why) == (report.kept, report.deleted, report.why)
    assert steps(c.name for c in ckpt.ls(root)) == [10, 20, 30, 60, 70]
    assert len(list((root / "data").iterdir())) == 5
    best = ckpt.gc(root, ckpt.Retention(keep_last=1, keep_best=1, metric="loss", mode="max"), dry_run=True)
    assert steps(best.kept) == [60, 70]


def test_what_is_kept_does_not_depend_on_how_often_is_collected(root):
    """Collected after each save, or once at the end: the same checkpoints are left."""
    with memory_folder() as other:
        rule = ckpt.Retention(keep_last=2, keep_every=25, keep_best=2, metric="loss")
        rng = random.Random(3)
        for step in range(7, 200, 9):
            value = rng.random()
            for where in (root, other):
                make(where, step, loss=value)
            ckpt.gc(root, rule, grace=ckpt.NO_GRACE)
        ckpt.gc(other, rule, grace=ckpt.NO_GRACE)
        assert [c.name for c in ckpt.ls(root)] == [c.name for c in ckpt.ls(other)]


def test_checkpoints_without_the_metric_are_never_the_best(root):
    make(root, 1)
    make(root, 2, other=0.0)
    make(root, 3, loss=7.0)
    make(root, 4)
    report = ckpt.gc(root, ckpt.Retention(keep_last=1, keep_best=3, metric="loss"), dry_run=True)
    assert steps(report.kept) == [3, 4]


def test_a_pin_keeps_a_checkpoint_until_the_last_is_taken_away(root):
    made = [make(root, step) for step in range(1, 6)]
    ckpt.pin(root, made[1], "paper")
    ckpt.pin(root, made[1].name, "eval")
    ckpt.pin(root, made[1].name, "eval")
    rule = ckpt.Retention(keep_last=1)
    assert ckpt.pins(root) == {made[1].name: ("eval", "paper")}
    report = ckpt.gc(root, rule, grace=ckpt.NO_GRACE)
    assert steps(report.kept) == [2, 5] and report.why[made[1].name] == ("pinned",)
    assert ckpt.unpin(root, made[1], "paper") and not ckpt.unpin(root, made[1], "paper")
    assert steps(ckpt.gc(root, rule, grace=ckpt.NO_GRACE).kept) == [2, 5]
    ckpt.unpin(root, made[1], "eval")
    assert steps(ckpt.gc(root, rule, grace=ckpt.NO_GRACE).kept) == [5]
    for commit, name, error, words in [
        (made[0], "late", ckpt.NoCheckpoint, "no checkpoint e0000-s000000000001"),
        (made[4], "../x", ValueError, "can't be a pin's name"),
        ("../x", "a", ValueError, "is no name of a checkpoint"),
    ]:
        with pytest.raises(error, match=words):
            ckpt.pin(root, commit, name)
    assert ckpt.pins(root) == {}


def test_a_reader_has_a_grace_between_the_commits_end_and_its_datas(root):
    make(root, 1)
    reader = ckpt.open(root)
    make(root, 2)
    report = ckpt.gc(root, ckpt.Retention(keep_last=1))
    assert steps(report.deleted) == [1] and report.waiting == ("at-e0-s1",) and report.freed_bytes == 0
    assert torch.equal(reader.read("w").view(torch.int32), W.view(torch.int32))
    # Nobody knows of the commit any more; that its data is an orphan stands in the store, with the time.
    assert ckpt.gc(root, ckpt.Retention(keep_last=1)).waiting == ("at-e0-s1",)
    mark = root / "attempts/at-e0-s1/orphan.json"
    os.utime(mark, (mark.stat().st_mtime - 61,) * 2)
    report = ckpt.gc(root, ckpt.Retention(keep_last=1))
    assert report.swept == ("at-e0-s1",) and report.freed_bytes > 4096
    assert [p.name for p in (root / "data").iterdir()] == ["at-e0-s2"] and not list((root / "attempts").rglob("*.json"))


def test_an_attempt_of_the_current_epoch_has_a_day_and_one_of_an_older_epoch_an_hour(root):
    make(root, 5, epoch=3)
    for epoch in (2, 3, 4):
        piece = ckpt.ShardPiece("w", "param", 0, 120, (30, 4), torch.float32, W.reshape(-1))
        ckpt.write_shard(root, f"open-{epoch}", 0, [piece], step=9, epoch=epoch)
    rule, grace = ckpt.Retention(keep_last=1), ckpt.Grace(readers=0.0)

    def age(seconds):
        for path in root.glob("data/open-*/*"):
            os.utime(path, (path.stat().st_mtime - seconds,) * 2)

    assert ckpt.gc(root, rule, grace=grace).swept == ()
    age(3700)
    assert ckpt.gc(root, rule, grace=grace).swept == ("open-2",)
    age(24 * 3600)
    assert ckpt.gc(root, rule, grace=grace).swept == ("open-3", "open-4")


def test_a_checkpoint_whose_data_is_damaged_does_not_count_when_data_is_verified(root, monkeypatch):
    made = [make(root, step) for step in range(1, 5)]
    victim = next((root / "data" / made[3].attempt).glob("*.safetensors"))
    raw = bytearray(victim.read_bytes())
    raw[5000] ^= 1
    victim.write_bytes(raw)
    by_size = ckpt.gc(root, ckpt.Retention(keep_last=1), dry_run=True)
    assert steps(by_size.kept) == [4], "sizes alone don't show it"
    rule = ckpt.Retention(keep_last=1, verify=True)
    report = ckpt.gc(root, rule, grace=ckpt.NO_GRACE)
    assert steps(report.kept) == [3, 4] and report.why[made[3].name] == ("newer",)
    assert any("is damaged and does not count" in p and made[3].name in p for p in report.problems)
    # Each is read once: what was found right is noted.
    noted = {p.name for p in (root / "verified").iterdir()}
    assert noted == {f"{made[2].name}.json"}, "notes of what is gone go too"
    reads = []
    real = retention.verify
    monkeypatch.setattr(retention, "verify", lambda store, commit: reads.append(commit.step) or real(store, commit))
    for _ in range(2):
        ckpt.gc(root, rule, grace=ckpt.NO_GRACE)
    assert reads == [4, 4], "only the damaged one is looked at again: it may have been the reading that failed"
    make(root, 9)
    assert steps(ckpt.gc(root, rule, grace=ckpt.NO_GRACE).kept) == [9] and reads == [4, 4, 4, 9]


def test_a_store_that_refuses_to_delete_never_stops_a_collection(root, monkeypatch):
    for step in range(1, 6):
        make(root, step)

    def refuse(self, key):
        raise PermissionError(13, "Permission denied", key)

    monkeypatch.setattr(ckpt.PosixStore, "delete", refuse)
    report = ckpt.gc(root, ckpt.Retention(keep_last=1), grace=ckpt.NO_GRACE)
    assert report.deleted == () and len(report.problems) == 4 and set(report.why.values()) == {("undeletable",), ("last",)}
    monkeypatch.undo()
    assert len(ckpt.ls(root)) == 5


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"keep_last": 0}, "keep_last is 0"),
        ({"keep_every": -1}, "keep_every is -1"),
        ({"keep_best": 2}, "keep_best is 2 without a metric"),
        ({"keep_best": 2, "metric": "loss", "mode": "low"}, "mode is 'low'"),
    ],
)
def test_a_retention_that_can_not_be_is_one_clear_line(arguments, words):
    with pytest.raises(ValueError, match=words):
        ckpt.Retention(**arguments)


def test_unfinished_uploads_and_temporary_files_are_tidied_through_the_store(root):
    make(root, 1)
    tidied = []

    class Store(ckpt.PosixStore):
        def tidy(self, prefix: str, older_than_s: float) -> int:
            tidied.append((prefix, older_than_s))
            return super().tidy(prefix, older_than_s)

    leftover = Path(root, "commits", ".tmp-abc")
    leftover.write_text("x")
    ckpt.gc(Store(root), ckpt.Retention(), grace=ckpt.NO_GRACE)
    assert ("data/", 0.0) in tidied and ("commits/", 0.0) in tidied and not leftover.exists()
