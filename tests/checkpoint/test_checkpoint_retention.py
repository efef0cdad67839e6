"""Retention rules, each against a hand-made list, with pins, grace periods, damaged checkpoints and failing stores."""

from __future__ import annotations

import math
import os
import random
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.checkpoint.checkpoint_support import damage, memory_folder, random_bits
from tests.checkpoint.faulty_store import Fault, FaultyStore
from vescale_ray import checkpoint as ckpt
from vescale_ray.checkpoint import commits
from vescale_ray.checkpoint.upkeep import collection, proof

W = random_bits((30, 4), torch.float32, 1)


def make(root, step, epoch=0, **metrics):
    attempt = f"at-e{epoch}-s{step}"
    piece = ckpt.ShardPiece("w", "param", 0, 120, (30, 4), torch.float32, W.reshape(-1))
    vote = ckpt.write_shard(root, attempt, 0, [piece], step=step, epoch=epoch)
    return ckpt.commit(root, [vote], step=step, epoch=epoch, attempt=attempt, world=1, meta={"metrics": metrics})


def steps(names):
    return [int(name.partition("-s")[2]) for name in names]


def test_collection_keeps_and_explains_the_choice_of_every_rule(root):
    loss = {10: 5.0, 20: 1.0, 30: 4.0, 40: 2.0, 50: 3.0, 60: 9.0, 70: 2.0}
    for step, value in loss.items():
        make(root, step, loss=value)
    report = ckpt.gc(root, ckpt.Retention(keep_last=1, keep_every=30, keep_best=2, metric="loss"), dry_run=True)
    # Best two: 20 (1.0), then 70, the newer of the two with 2.0. One for each 30 steps: 10 (0..29), 30, 60.
    expected = {10: ("every",), 20: ("best",), 30: ("every",), 60: ("every",), 70: ("last", "best")}
    assert {int(name.partition("-s")[2]): why for name, why in report.why.items()} == expected
    assert steps(report.deleted) == [40, 50] and len(found := ckpt.ls(root)) == 7, "a dry run changes nothing"
    real = ckpt.gc(root, ckpt.Retention(keep_last=1, keep_every=30, keep_best=2, metric="loss"), grace=ckpt.NO_GRACE)
    assert (real.kept, real.deleted, real.why) == (report.kept, report.deleted, report.why)
    assert steps(c.name for c in ckpt.ls(root)) == [10, 20, 30, 60, 70]
    assert sorted(p.name for p in (root / "data").iterdir()) == sorted(c.attempt for c in found if c.name in real.kept)
    assert real.freed_bytes == sum(c.bytes for c in found if c.name in real.deleted)
    best = ckpt.gc(root, ckpt.Retention(keep_last=1, keep_best=1, metric="loss", mode="max"), dry_run=True)
    assert steps(best.kept) == [60, 70]


def test_kept_set_is_independent_of_collection_frequency(root):
    """Collecting after each save and collecting once at the end leave the same checkpoints."""
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


@pytest.mark.parametrize("when", ["listed", "read"])
def test_collection_tolerates_concurrently_deleted_checkpoints(root, when, monkeypatch):
    for step in range(1, 6):
        make(root, step, loss=float(step))
    module, real, gone = (commits if when == "listed" else collection), commits.read_manifest, []

    def late(store, name):
        if name in ("e0000-s000000000002", "e0000-s000000000004") and name not in gone:
            gone.append(name)
            store.delete(f"commits/{name}.json")
        return real(store, name)

    monkeypatch.setattr(module, "read_manifest", late)
    report = ckpt.gc(root, ckpt.Retention(keep_last=1, keep_best=1, metric="loss"))
    assert len(gone) == 2 and report.problems == ()
    assert (steps(report.kept), steps(report.deleted)) == ([1, 5], [3])
    assert steps(c.name for c in ckpt.ls(root)) == [1, 5]


def test_checkpoints_without_the_metric_are_never_the_best(root):
    make(root, 1)
    make(root, 2, other=0.0)
    make(root, 3, loss=7.0)
    make(root, 4)
    report = ckpt.gc(root, ckpt.Retention(keep_last=1, keep_best=3, metric="loss"), dry_run=True)
    assert steps(report.kept) == [3, 4]


def test_checkpoint_stays_until_its_last_pin_is_removed(root):
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
        ("../x", "a", ValueError, "is not a name of a checkpoint"),
    ]:
        with pytest.raises(error, match=words):
            ckpt.pin(root, commit, name)
    assert ckpt.pins(root) == {}


def test_reader_grace_delays_data_deletion_after_the_commits(root):
    make(root, 1)
    reader = ckpt.open(root)
    make(root, 2)
    report = ckpt.gc(root, ckpt.Retention(keep_last=1))
    assert steps(report.deleted) == [1] and report.waiting == ("at-e0-s1",) and report.freed_bytes == 0
    assert torch.equal(reader.read("w").view(torch.int32), W.view(torch.int32))
    # The commit is gone. The store itself records that its data is an orphan, with the time.
    assert ckpt.gc(root, ckpt.Retention(keep_last=1)).waiting == ("at-e0-s1",)
    mark = root / "attempts/at-e0-s1/orphan.json"
    os.utime(mark, (mark.stat().st_mtime - 61,) * 2)
    report = ckpt.gc(root, ckpt.Retention(keep_last=1))
    assert report.swept == ("at-e0-s1",) and report.freed_bytes > 4096
    assert [p.name for p in (root / "data").iterdir()] == ["at-e0-s2"] and not list((root / "attempts").rglob("*.json"))


def test_orphan_grace_is_a_day_and_an_hour_for_older_epochs(root):
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


class Reads(ckpt.PosixStore):
    """A store that records the attempts whose data is read, and refuses keys that contain ``refused``."""

    def __init__(self, root):
        super().__init__(root)
        self.opened, self.refused = [], ""

    def open_read(self, key):
        if self.refused and self.refused in key:
            raise OSError(5, "Input/output error", key)
        self.opened.append(key.split("/")[1])
        return super().open_read(key)

    def get(self, key):
        if self.refused and self.refused in key:
            raise OSError(5, "Input/output error", key)
        return super().get(key)


@pytest.mark.fault("K23")
def test_only_verified_checkpoints_count_towards_retention(root):
    made = [make(root, step) for step in range(1, 5)]
    damage(root, made[3])
    by_size = ckpt.gc(root, ckpt.Retention(keep_last=1, verify=False), dry_run=True)
    assert steps(by_size.kept) == [4], "sizes alone don't show it"
    rule, store = ckpt.Retention(keep_last=1), Reads(root)
    report = ckpt.gc(store, rule, grace=ckpt.NO_GRACE)
    assert steps(report.kept) == [3, 4] and report.why[made[3].name] == ("newer",)
    assert any("is damaged and does not count" in p and made[3].name in p and "block 0" in p for p in report.problems)
    assert store.opened == ["at-e0-s4", "at-e0-s4", "at-e0-s3"], "newest first, a bad block once more, and none that goes in any case"
    # Each checkpoint is read once, because a sound result is noted.
    assert [p.parent.name for p in (root / "verified").rglob("*.json")] == [made[2].attempt], "notes of what is gone go too"
    for _ in range(2):
        ckpt.gc(store, rule, grace=ckpt.NO_GRACE)
    assert store.opened[3:] == ["at-e0-s4"] * 4, "only the damaged one is looked at again"
    # The collection does not read a young checkpoint, which its writers read back. It counts once they have reported.
    young = make(root, 9)
    assert steps(ckpt.gc(store, rule, grace=ckpt.NO_GRACE, young=young).kept) == [3, 4, 9]
    next_one = make(root, 12)  # the same holds for the next one, if the collection comes late
    assert steps(ckpt.gc(store, rule, grace=ckpt.NO_GRACE, young=young).kept) == [3, 4, 9, 12]
    assert store.opened[7:] == ["at-e0-s4"] * 4
    assert steps(ckpt.gc(store, rule, grace=ckpt.NO_GRACE, young=next_one).kept) == [9, 12] and store.opened[11:] == ["at-e0-s9"]
    assert steps(ckpt.gc(store, rule, grace=ckpt.NO_GRACE).kept) == [12] and store.opened[12:] == ["at-e0-s12"]


@pytest.mark.parametrize(("action", "times", "counts"), [("flip", 1, True), ("flip", None, False), ("short", None, False)])
def test_bad_block_is_reread_before_it_counts_as_damaged(root, action, times, counts):
    """If a file shrinks between the look at its size and the read, the buffer may already hold the right bytes."""
    made = make(root, 1)
    zeros = Fault("read", action, at=4096 + 5 if action == "flip" else 4096, times=times)
    store = FaultyStore(ckpt.PosixStore(root), [zeros])
    entry = ckpt.open(root).manifest.objects[0]
    found = proof.prove(store, entry, None)
    assert (found is None) is counts and store.fired
    if action == "short":
        assert found == f"data/{made.attempt}/r00000.safetensors ends at byte 4096 of {made.bytes}"
        path = root / "data" / made.attempt / "r00000.safetensors"
        path.write_bytes(path.read_bytes() + b"more")
        assert f"has {made.bytes + 4} bytes instead of {made.bytes}" in str(proof.prove(ckpt.PosixStore(root), entry, None))


def test_verification_note_is_valid_for_its_exact_bytes_only(root):
    first, second = make(root, 1), make(root, 2)
    ckpt.gc(root, ckpt.Retention(keep_last=1, keep_every=1), grace=ckpt.NO_GRACE)
    (note,) = (root / "verified" / second.attempt).iterdir()
    note.rename(note.with_name(f"r00000-{'0' * 32}-none.json"))
    damage(root, second)
    assert steps(ckpt.gc(root, ckpt.Retention(keep_last=1), grace=ckpt.NO_GRACE).kept) == [1, 2] and first.step == 1


def test_verification_covers_aux_and_its_note_names_both_objects(root):
    made = ckpt.save({"model": {"w": W}}, root, 1).commit
    manifest = ckpt.open(root).manifest
    entry, aux = manifest.objects[0], manifest.aux[0]
    assert proof.prove(ckpt.PosixStore(root), entry, aux) is None
    others = [(entry, replace(aux, xxh3_128="0" * 32)), (entry, None), (replace(entry, root="0" * 32), aux), (replace(entry, rank=1), aux)]
    assert len({proof.note_key(*pair) for pair in [(entry, aux), *others]}) == 5
    path = root / aux.key
    raw = path.read_bytes()
    path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    assert "aux.json was read back with another checksum" in str(proof.prove(ckpt.PosixStore(root), entry, aux))
    path.unlink()
    assert "aux.json is missing" in str(proof.prove(ckpt.PosixStore(root), entry, aux)) and made.step == 1


def test_every_rank_reads_back_its_own_object_after_the_commit(root):
    store = Reads(root)
    with ckpt.Saver(store, retention=ckpt.Retention(keep_last=2)) as saver:
        for step in range(1, 5):
            saver.async_save({"model": {"w": W}}, step).wait(10)
    ckpt.save({"model": {"w": W}}, store, 5, retention=ckpt.Retention(keep_last=2))
    commits = ckpt.ls(root)
    assert steps(c.name for c in commits) == [4, 5], "each was verified before an older one went for it"
    assert {p.parent.name for p in (root / "verified").rglob("r00000-*.json")} >= {c.attempt for c in commits}


@pytest.mark.fault("K22")
def test_collection_keeps_a_temporarily_unreadable_commit(root):
    """A momentary failure of the store must not delete the best checkpoint, nor one that ``keep_every`` keeps."""
    rule = ckpt.Retention(keep_last=1, keep_every=100, keep_best=1, metric="loss")
    made = [make(root, step, loss=float(step == 150) - step / 1e6) for step in (100, 150, 199, 250)]
    store = Reads(root)
    for refused in (made[0].key, made[3].key, f"data/{made[0].attempt}"):
        store.refused = refused
        report = ckpt.gc(store, rule, grace=ckpt.NO_GRACE, dry_run=True)
        victim = next(c for c in made if refused in (c.key, f"data/{c.attempt}"))
        assert victim.name in report.kept and "unread" in report.why[victim.name] and any(victim.name in p for p in report.problems)
    store.refused = ""
    assert steps(ckpt.gc(store, rule, grace=ckpt.NO_GRACE).kept) == [100, 250]


@pytest.mark.parametrize("failing", ["put", "open_read"])
def test_failed_notes_or_readback_warn_and_collection_goes_on(root, failing, caplog):
    key = "verified/*" if failing == "put" else "data/*"
    store = FaultyStore(ckpt.PosixStore(root), [Fault(failing, "error", key=key, times=None)])
    with ckpt.Saver(store, retention=ckpt.Retention(keep_last=1)) as saver:
        for step in (1, 2, 3):
            saver.async_save({"model": {"w": W}}, step).wait(10)
    # Without notes, rank 0 would repeat its ranks' reading for ever. It leaves the newest to them and reads only the one before it.
    expected, words = ([2, 3], "could not be noted") if failing == "put" else ([1, 2, 3], "could not be read back")
    assert steps(c.name for c in ckpt.ls(root)) == expected and words in caplog.text


def test_data_of_a_commit_missing_from_a_listing_is_no_orphan(root):
    """A listing may be days behind, or older than the commit. The commit is requested by name before its data is deleted."""
    made = [make(root, step) for step in (1, 2, 3)]
    behind = FaultyStore(ckpt.PosixStore(root), [Fault("list", "stale", key=made[1].key, times=None)])
    for _ in range(3):
        report = ckpt.gc(behind, ckpt.Retention(keep_last=2), grace=ckpt.NO_GRACE)
        assert report.swept == ()
    assert ckpt.verify(root, made[1]).ok and steps(ckpt.gc(root, ckpt.Retention(keep_last=2)).kept) == [1, 2, 3][1:]


def test_data_stays_while_its_commit_is_unreadable(root):
    made = [make(root, step) for step in (1, 2, 3)]
    faults = [Fault("list", "stale", key=made[1].key, times=None), Fault("get", "error", key=made[1].key, times=None)]
    report = ckpt.gc(FaultyStore(ckpt.PosixStore(root), faults), ckpt.Retention(keep_last=2), grace=ckpt.NO_GRACE)
    assert report.swept == () and any(f"whether {made[1].name} is its commit can't be read" in problem for problem in report.problems)
    assert ckpt.verify(root, made[1]).ok


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("mode", ["min", "max"])
def test_nan_metric_is_never_the_best(mode, value):
    commits = [ckpt.Commit(f"c{n}", "", 0, n) for n in range(3)]
    rule = ckpt.Retention(keep_last=1, keep_best=1, metric="loss", mode=mode)
    assert rule.kept(commits, {"c0": value, "c1": 1.0, "c2": value}) == {"c1": ("best",), "c2": ("last",)}


def test_a_metric_too_large_for_a_float_stops_no_collection(root):
    """JSON integers have no upper limit. One commit with such a number would stop every later collection."""
    made = [make(root, 1, loss=10**400), make(root, 2, loss=2.0), make(root, 3, loss=-(10**400)), make(root, 4)]
    report = ckpt.gc(root, ckpt.Retention(keep_last=1, keep_best=1, metric="loss"), grace=ckpt.NO_GRACE)
    assert report.why == {made[1].name: ("best",), made[3].name: ("last",)} and not report.problems


def test_pin_made_during_a_collection_keeps_its_checkpoint(root):
    made = [make(root, step) for step in (1, 2, 3)]
    ckpt.pin(root, made[0], "reader")
    before = FaultyStore(ckpt.PosixStore(root), [Fault("list", "stale", key="pins/*", times=1)])
    assert steps(ckpt.gc(before, ckpt.Retention(keep_last=1), grace=ckpt.NO_GRACE).kept) == [1, 3] and len(before.fired) == 1
    assert ckpt.verify(root, made[0]).ok


def test_pinning_a_vanishing_checkpoint_raises_and_leaves_no_pin(root):
    made = make(root, 1)
    going = FaultyStore(ckpt.PosixStore(root), [Fault("size", "missing", key=made.key, after=1)])
    with pytest.raises(ckpt.NoCheckpoint, match="was deleted by a collection while it was being pinned"):
        ckpt.pin(going, made, "reader")
    assert not ckpt.pins(root)


def test_collection_waits_until_ranks_verified_the_new_commit(root, caplog):
    make(root, 1)
    made = make(root, 2)
    entry = ckpt.open(root).manifest.objects[0]
    threading.Timer(0.3, lambda: proof.prove(ckpt.PosixStore(root), entry, None)).start()
    collection.tend(root, ckpt.Retention(keep_last=1), made, 10.0)
    assert steps(c.name for c in ckpt.ls(root)) == [2] and not caplog.records


def test_collection_reports_refused_deletions_and_goes_on(root, monkeypatch):
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
def test_invalid_retention_raises_a_clear_error(arguments, words):
    with pytest.raises(ValueError, match=words):
        ckpt.Retention(**arguments)


def test_collection_tidies_temporary_files_through_the_store(root):
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
