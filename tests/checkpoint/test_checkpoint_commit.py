"""Commits: the votes that make a checkpoint, races, the order of commits, and the objects that a collection may delete."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.checkpoint_support import random_bits
from tests.checkpoint.faulty_store import Fault, FaultyStore
from vescale_ray import checkpoint as ckpt
from vescale_ray.checkpoint import commits
from vescale_ray.checkpoint.format import manifest_codec
from vescale_ray.checkpoint.format.digest import RangeDigests, digest_of

W = random_bits((30, 4), torch.float32, 1)


def piece(start, end, *, name="w", kind="param", shape=(30, 4), data=None):
    flat = (W if data is None else data).reshape(-1)
    return ckpt.ShardPiece(name, kind, start, end, shape, flat.dtype, flat[start:end])


def vote(root, rank, pieces, *, attempt="a", step=1, epoch=0):
    return ckpt.write_shard(root, attempt, rank, pieces, step=step, epoch=epoch)


def commit(root, votes, *, world=2, attempt="a", step=1, epoch=0, **more):
    return ckpt.commit(root, votes, step=step, epoch=epoch, attempt=attempt, world=world, meta={}, **more)


def whole(root, step, epoch=0, keepable=True):
    """Commit a complete one-rank checkpoint of ``w``."""
    attempt = f"at-e{epoch}-s{step}"
    made = commit(
        root, [vote(root, 0, [piece(0, 120)], attempt=attempt, step=step, epoch=epoch)], world=1, attempt=attempt, step=step, epoch=epoch
    )
    assert keepable or made
    return made


def collect(root, keep, grace=ckpt.NO_GRACE):
    return ckpt.gc(root, ckpt.Retention(keep_last=keep), grace=grace)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([[piece(0, 50)], [piece(60, 120)]], r"'param' of tensor 'w': no rank wrote elements \[50, 60\)"),
        ([[piece(0, 50)], [piece(50, 119)]], r"no rank wrote elements \[119, 120\)"),
        ([[piece(1, 50)], [piece(50, 120)]], r"no rank wrote elements \[0, 1\)"),
        ([[piece(0, 61)], [piece(60, 120)]], "elements from 60 on were written twice, by ranks 0 and 1"),
        ([[piece(0, 120)], [piece(0, 120)]], "elements from 0 on were written twice, by ranks 0 and 1"),
        ([[piece(0, 0)], [piece(120, 120)]], r"no rank wrote elements \[0, 120\)"),
        ([[piece(0, 60)], [piece(60, 120, shape=(120,))]], r"shapes \(30, 4\) and \(120,\)"),
        ([[piece(0, 60)], [piece(60, 120, data=W.double())]], "float32 and as float64"),
    ],
)
def test_votes_that_do_not_tile_every_tensor_are_refused(root, parts, words):
    earlier = whole(root, 0)
    votes = [vote(root, rank, pieces) for rank, pieces in enumerate(parts)]
    with pytest.raises(ckpt.CommitRefused, match=words):
        commit(root, votes)
    assert ckpt.latest(root) == earlier


def test_overlapping_copies_are_listed_once_and_must_be_equal(root):
    def copy(start, end, data=None):
        return replace(piece(start, end, data=data), copied=True)

    parts = [[copy(0, 70)], [copy(50, 100), copy(110, 120)], [copy(0, 120)], [copy(20, 30), copy(90, 120)]]
    votes = [vote(root, rank, pieces) for rank, pieces in enumerate(parts)]
    assert commit(root, votes, world=4).problem is None
    (extents,) = ckpt.open(root).manifest.groups[0].kinds
    assert torch.equal(ckpt.open(root).read("w"), W) and (extents.end - extents.start).sum() == 120
    assert ckpt.verify(root).ok
    other = W.clone()
    other[15, 0] += W.norm()  # element 60
    for name, parts, words in (
        ("d", [[copy(0, 120)], [copy(0, 120, other)]], r"'w': ranks 0 and 1 both hold elements \[0, 120\), and they differ"),
        ("e", [[copy(0, 70)], [copy(50, 120, other)]], r"ranks 0 and 1 both hold elements \[50, 70\), and they differ"),
        ("f", [[copy(0, 120)], [copy(30, 61, other)]], r"ranks 0 and 1 both hold elements \[30, 61\), and they differ"),
        ("b", [[copy(0, 60)], [piece(0, 120)]], "written twice"),
        ("c", [[copy(0, 60)], [copy(61, 120)]], r"\[60, 61\)"),
    ):
        votes = [vote(root, rank, pieces, attempt=name, step=2) for rank, pieces in enumerate(parts)]
        with pytest.raises(ckpt.CommitRefused, match=words):
            commit(root, votes, attempt=name, step=2)


def test_only_copies_differing_by_rounding_commit_with_a_warning(root, caplog):
    """A rounding difference in one norm weight must not cost a month of tensor-parallel training its checkpoints."""

    def votes(name, step, *copies):
        parts = [replace(piece(0, 120, data=data), copied=True) for data in copies]
        return [vote(root, rank, [part], attempt=name, step=step) for rank, part in enumerate(parts)]

    gain = torch.randn(W.shape, generator=torch.Generator().manual_seed(5))
    near = gain.clone()
    near.view(torch.int32)[15, 0] ^= 1
    far = gain * 1.02
    holes, others = gain.clone(), gain.clone()
    holes[3, 0] = others[3, 0] = torch.nan
    others[3, 1] += 1e-4
    for step, (one, other) in enumerate([(gain, near), (gain, gain * 1.005), (holes, others), (gain, gain)], 1):
        caplog.clear()
        made = commit(root, votes(f"a{step}", step, one, other), attempt=f"a{step}", step=step, world=2)
        assert made.problem is None and torch.equal(ckpt.open(root, made).read("w").nan_to_num(7.0), one.nan_to_num(7.0))
        assert ("'w' the most" in caplog.text) == (one is not other)
    huge, ids = gain.double() * 1e300, torch.arange(120) + 10**6
    kept = torch.ones(120, dtype=torch.bool)
    different = [
        *((gain, far), (gain, holes), (torch.zeros_like(gain), near), (gain, -gain)),
        (holes, holes.nan_to_num(0.5)),
        *((huge, -huge), (huge * 1e-307 * 1e-200, huge * 2e-307 * 1e-200)),  # their squares overflow or underflow
        *((ids, ids.where(ids > ids[0], 7)), (ids, ids.where(ids > ids[0], ids[0] + 1)), (kept, kept ^ (ids == ids[0]))),
    ]
    for number, (one, other) in enumerate(different):
        with pytest.raises(ckpt.CommitRefused, match="ranks 0 and 1 both hold"):
            commit(root, votes(f"b{number}", 9, one, other), attempt=f"b{number}", step=9, world=2)
    short = FaultyStore(ckpt.PosixStore(root), [Fault("read", "short", key="data/*")])
    with pytest.raises(ckpt.SaveFailed, match="the copies of 'w' can only be read in part"):
        commit(short, votes("c", 9, gain, near), attempt="c", step=9, world=2)


def test_digests_of_ranges_of_a_stream_are_those_of_the_bytes():
    rng = random.Random(4)
    data = rng.randbytes(5000)
    for _ in range(50):
        edges = sorted(rng.sample(range(5001), 12))
        ranges = {key: (edges[2 * key], edges[2 * key + 1]) for key in rng.sample(range(6), rng.randint(0, 6))}
        digests, at = RangeDigests(ranges), 0
        while at < len(data):
            count = rng.choice((1, 17, 400, 3000))
            digests.feed(memoryview(data)[at : at + count], at)
            at += count
        assert digests.found == {key: digest_of(data[start:end]) for key, (start, end) in ranges.items()}


@pytest.mark.fault("K35")
def test_commit_refuses_a_manifest_that_readers_would_reject(root, monkeypatch):
    """If such a commit were made, all saves would succeed, but the next load would skip the checkpoint for an older one."""
    earlier = whole(root, 0)
    votes = [vote(root, 0, [piece(0, 120)])]
    for module in (commits, manifest_codec):
        monkeypatch.setattr(module, "MAX_BYTES", 3000)
    with pytest.raises(
        ckpt.CommitRefused, match=r"its manifest would have \d+ bytes, more than a reader takes \(3000\): .* names 1 intervals"
    ):
        ckpt.commit(root, votes, step=1, epoch=0, attempt="a", world=1, meta={"long": "x" * 3000})
    monkeypatch.setattr(manifest_codec, "FORMAT", "rcp/9")
    with pytest.raises(ckpt.CommitRefused, match="the votes make no valid checkpoint: format 'rcp/9'"):
        commit(root, votes, world=1)
    monkeypatch.undo()
    assert ckpt.latest(root) == earlier
    assert commit(root, votes, world=1).problem is None


def test_commit_refuses_missing_votes_and_other_attempts_votes(root):
    a, b = vote(root, 0, [piece(0, 60)]), vote(root, 1, [piece(60, 120)])
    with pytest.raises(ckpt.CommitRefused, match=r"1 votes for 2 ranks; no vote from ranks \[1\]"):
        commit(root, [a])
    with pytest.raises(ckpt.CommitRefused, match="3 votes for 2 ranks"):
        commit(root, [a, b, b])
    for other in (replace(b, attempt="z"), replace(b, step=2), replace(b, epoch=1)):
        with pytest.raises(ckpt.CommitRefused, match="rank 1 voted for attempt"):
            commit(root, [a, other])
    assert ckpt.latest(root) is None
    assert commit(root, [b, a]).name == "e0000-s000000000001"  # votes may come in any order


def test_commit_is_refused_if_an_object_is_missing_or_resized(root):
    votes = [vote(root, 0, [piece(0, 60)]), vote(root, 1, [piece(60, 120)])]
    victim = root / votes[1].object.key
    os.truncate(victim, 4096)
    with pytest.raises(ckpt.CommitRefused, match=r"r00001.safetensors has 4096 bytes instead of 8192"):
        commit(root, votes)
    victim.unlink()
    with pytest.raises(ckpt.CommitRefused, match=r"r00001.safetensors is missing"):
        commit(root, votes)
    assert ckpt.latest(root) is None


def test_a_rank_cannot_write_twice_in_one_attempt(root):
    vote(root, 0, [piece(0, 120)])
    before = next(root.glob("data/a/*")).read_bytes()
    with pytest.raises(ckpt.SaveFailed, match="use a new attempt"):
        vote(root, 0, [piece(0, 120, data=-W)])
    assert next(root.glob("data/a/*")).read_bytes() == before


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: piece(0, 120, shape=(3, 4)), r"range \[0, 120\) is not inside a tensor of shape \(3, 4\)"),
        (lambda: ckpt.ShardPiece("w", "param", 0, 120, (30, 4), torch.float32, W), "give a flat tensor of 120 elements"),
        (lambda: ckpt.ShardPiece("w", "param", 0, 120, (30, 4), torch.float16, W.reshape(-1)), "data is torch.float32"),
        (lambda: ckpt.ShardPiece("w", "param", 0, 4, (4,), torch.float32, torch.empty(4, device="meta")), "call to_empty"),
        (lambda: ckpt.ShardPiece("", "param", 0, 4, (4,), torch.float32, torch.zeros(4)), "must not be empty"),
    ],
)
def test_inconsistent_shard_piece_raises_at_construction(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_bad_arguments_are_refused_before_anything_is_written(root):
    cases: list[tuple[dict[str, Any], str]] = [
        ({"attempt": "../x"}, "not an identifier"),
        ({"step": -1}, "step is -1"),
        ({"epoch": -1}, "epoch is -1"),
    ]
    for arguments, words in cases:
        with pytest.raises(ValueError, match=words):
            vote(root, 0, [piece(0, 120)], **arguments)
    with pytest.raises(ValueError, match="block_bytes is 1000"):
        ckpt.write_shard(root, "a", 0, [], step=0, epoch=0, block_bytes=1000)
    with pytest.raises(ValueError, match=r"aux.a\[1\] is a Tensor"):
        ckpt.write_shard(root, "a", 0, [], step=0, epoch=0, aux={"a": [1, torch.zeros(1)]})
    assert not list(root.iterdir())
    done = vote(root, 0, [piece(0, 120)])
    with pytest.raises(ValueError, match=r"meta.loss is nan"):
        ckpt.commit(root, [done], step=1, epoch=0, attempt="a", world=1, meta={"loss": float("nan")})
    assert ckpt.latest(root) is None


def test_repeated_commit_of_one_attempt_returns_the_same_commit(root):
    votes = [vote(root, 0, [piece(0, 120)])]
    first = commit(root, votes, world=1)
    assert commit(root, votes, world=1) == first
    whole(root, 7)
    assert commit(root, votes, world=1) == first  # even though a newer commit exists by now


def test_commits_are_ordered_by_number_not_by_text(root):
    whole(root, 5, epoch=9999)
    last = whole(root, 1, epoch=10000)
    assert last.name == "e10000-s000000000001" and ckpt.latest(root) == last


def test_only_whole_commits_count_towards_those_kept(root):
    made = [whole(root, step) for step in range(1, 6)]
    next((root / "data" / made[4].attempt).iterdir()).unlink()
    os.truncate(next((root / "data" / made[3].attempt).iterdir()), 10)
    Path(made[2].path).write_text("torn")
    report = collect(root, 1)
    assert made[1].name in report.kept and report.deleted == (made[0].name,)
    assert ckpt.latest(root) == made[1]
    # The torn commit's data can't be told from an orphan, so nothing is swept until the commit is gone.
    assert (root / "data" / made[2].attempt).exists() and any("abandoned attempts" in p for p in report.problems)
    last = whole(root, 9)
    report = collect(root, 1)
    assert report.kept == (last.name,) and len(report.deleted) == 4
    assert [p.name for p in (root / "data").iterdir()] == [last.attempt]


def test_when_nothing_is_whole_nothing_is_deleted(root):
    made = [whole(root, step) for step in (1, 2)]
    for c in made:
        Path(c.path).write_text("torn")
    before = sorted(root.rglob("*"))
    assert collect(root, 1).deleted == ()
    assert sorted(root.rglob("*")) == before


def test_failed_deletion_is_reported_and_the_rest_goes_on(root, monkeypatch):
    made = [whole(root, step) for step in range(1, 5)]
    real = Path.unlink

    def unlink(self, *args, **kwargs):
        if self.name == f"{made[0].name}.json":
            raise PermissionError(13, "Permission denied", str(self))
        real(self, *args, **kwargs)

    monkeypatch.setattr(Path, "unlink", unlink)
    report = collect(root, 2)
    assert report.deleted == (made[1].name,) and len(report.problems) == 1 and "Permission denied" in report.problems[0]
    assert (root / "data" / made[0].attempt).exists()


def test_tied_tensors_are_stored_once_and_read_under_each_name(root):
    made = commit(root, [vote(root, 0, [piece(0, 120)])], world=1, aliases={"head.weight": "w"})
    checkpoint = ckpt.open(root, made)
    assert list(checkpoint.tensors) == ["w"] and checkpoint.aliases == {"head.weight": "w"}
    assert torch.equal(checkpoint.read("head.weight").view(torch.int32), W.view(torch.int32))
    checkpoint.require({("head.weight", "param"): ((30, 4), torch.float32)})
    with pytest.raises(ckpt.CommitRefused, match="alias 'x' of 'nothing'"):
        commit(root, [vote(root, 0, [piece(0, 120)], attempt="b", step=2)], world=1, attempt="b", step=2, aliases={"x": "nothing"})


def test_open_of_a_missing_commit_names_the_newest_one(root):
    with pytest.raises(ckpt.NoCheckpoint, match="it has no commits"):
        ckpt.open(root)
    whole(root, 3)
    for name in ("e0000-s000000000004", "../x", "latest"):
        with pytest.raises(ckpt.NoCheckpoint, match="newest there: e0000-s000000000003"):
            ckpt.open(root, name)


def test_votes_survive_json(root):
    before = vote(root, 0, [piece(0, 100), piece(100, 120), piece(0, 0, name="e", shape=(0, 3), data=torch.zeros(0))])
    after = ckpt.Vote.from_json(before.to_json())
    assert after.to_json() == before.to_json() and after.pieces == before.pieces
    made = commit(root, [after], world=1)
    assert ckpt.open(root, made).tensors["e"].shape == (0, 3)
