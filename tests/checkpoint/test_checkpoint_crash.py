"""A crash or a failing disk at any point of a save or a collection leaves the earlier checkpoint as it was."""

from __future__ import annotations

import errno
import importlib
import os
import shutil
from pathlib import Path

import pytest

from tests.checkpoint.checkpoint_support import (
    adam_like,
    assert_equals,
    in_subprocess,
    memory_folder,
    random_layout,
    save_in_process,
)
from vescale_ray import checkpoint as ckpt

BEFORE, AFTER = adam_like(seed=1), adam_like(seed=2)
# Points at which the new commit is visible. At commit.linked the object has its name; only the folder's sync is left.
VISIBLE = ("commit.linked", "commit.published", "gc.commit_deleted", "gc.object_deleted", "gc.swept")
ELSEWHERE = ("vote.written", "stage.copied")
"""Points that only the high-level saves pass; see test_checkpoint_torchrun.py and test_checkpoint_async.py."""


@pytest.fixture(scope="module")
def template():
    """A folder with two committed steps, and the debris of an attempt that died long ago."""
    with memory_folder() as root:
        save_in_process(root, BEFORE, random_layout(BEFORE, 2, seed=1), step=10)
        save_in_process(root, BEFORE, random_layout(BEFORE, 3, seed=2), step=20)
        ckpt.write_shard(root, "dead", 0, [], step=15, epoch=0)
        yield root


@pytest.fixture
def root(template):
    with memory_folder() as folder:
        shutil.copytree(template, folder / "ckpt")
        yield folder / "ckpt"


def save_then_collect(root: str, fault: str) -> None:
    os.environ[ckpt.FAULT_ENV] = fault
    save_in_process(root, AFTER, random_layout(AFTER, 2, seed=3), step=30)
    ckpt.gc(root, ckpt.Retention(keep_last=1), grace=ckpt.NO_GRACE)


def points() -> list[str]:
    several = {"data.chunk": (0, 1, 3), "gc.object_deleted": (0, 1, 3), "gc.swept": (0, 1)}
    return [f"{name}#{index}" for name in ckpt.FAULT_POINTS if name not in ELSEWHERE for index in several.get(name, (0,))]


@pytest.mark.parametrize("point", points())
@pytest.mark.fault("S1", "K1")
def test_kill_at_any_point_keeps_a_loadable_commit_and_no_debris(root, point):
    assert in_subprocess(save_then_collect, str(root), point) == -9, f"nothing was killed at {point}"
    done = point.split("#")[0] in VISIBLE
    found = ckpt.latest(root)
    assert found is not None and found.step == (30 if done else 20)
    assert_equals(root, AFTER if done else BEFORE)
    assert all(c.problem is None for c in ckpt.ls(root))
    report = ckpt.gc(root, ckpt.Retention(keep_last=1), grace=ckpt.NO_GRACE)
    assert report.kept == (found.name,) and not report.problems
    assert sorted(p.name for p in root.glob("data/*")) == [found.attempt]
    assert [p.name for p in (root / "commits").iterdir()] == [f"{found.name}.json"]
    assert_equals(root, AFTER if done else BEFORE)


@pytest.mark.parametrize(
    ("point", "code"),
    [
        *((point, "ENOSPC") for point in ("data.created", "data.chunk#1", "data.written", "commit.tmp_written", "commit.tmp_synced")),
        *(("data.chunk#1", code) for code in ("EIO", "EROFS", "EDQUOT")),
    ],
)
def test_failing_disk_makes_no_commit_and_raises_one_clear_line(root, monkeypatch, point, code):
    monkeypatch.setenv(ckpt.FAULT_ENV, f"{point}={code}")
    with pytest.raises(ckpt.SaveFailed) as caught:
        save_in_process(root, AFTER, random_layout(AFTER, 2, seed=3), step=30)
    message = str(caught.value)
    assert os.strerror(getattr(errno, code)) in message and "earlier checkpoints are untouched" in message and "\n" not in message
    assert str(root) in message
    monkeypatch.delenv(ckpt.FAULT_ENV)
    found = ckpt.latest(root)
    assert found is not None and found.step == 20
    assert_equals(root, BEFORE)
    if point.startswith("data"):
        assert not list(root.glob("data/*/r00000.safetensors.*")) and not any(p.stat().st_size == 0 for p in root.rglob("*.safetensors"))


def test_a_folder_that_cannot_be_synced_makes_no_commit(root, monkeypatch):
    """The error is injected, because chmod does not restrict root. The third fsync is the first one of a folder."""
    real, calls = os.fsync, []

    def fsync(fd):
        calls.append(fd)
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(ckpt.SaveFailed, match="Input/output error"):
        save_in_process(root, AFTER, random_layout(AFTER, 2, seed=3), step=30)
    monkeypatch.undo()
    assert calls and ckpt.latest(root).step == 20  # type: ignore[union-attr]


def test_invalid_root_raises_a_clear_error_and_creates_nothing(tmp_path):
    Path(tmp_path, "file").write_text("x")
    with pytest.raises(ckpt.SaveFailed, match="a file is where the checkpoint's folder should be"):
        save_in_process(tmp_path / "file", AFTER, random_layout(AFTER, 1, seed=3))
    with pytest.raises(ckpt.NoCheckpoint, match="no checkpoint in .*nowhere"):
        ckpt.open(tmp_path / "nowhere")
    assert not Path(tmp_path, "nowhere").exists(), "looking must not create the folder"
    with pytest.raises(ValueError, match="nonsense"):
        ckpt.latest("nonsense://bucket/x")


def test_every_point_of_the_list_is_passed_in_the_listed_order(root, monkeypatch):
    """The kill test walks this list. A listed point that no save passes would be tested vacuously."""
    passed: list[str] = []
    for part in ("stores.posix", "format.shard", "commits", "upkeep.collection"):
        module = importlib.import_module(f"vescale_ray.checkpoint.{part}")
        monkeypatch.setattr(module, "fault_point", lambda name, index=0: passed.append(name))
    save_in_process(root, AFTER, random_layout(AFTER, 1, seed=3), step=30)
    ckpt.gc(root, ckpt.Retention(keep_last=1), grace=ckpt.NO_GRACE)
    first = list(dict.fromkeys(passed))
    assert first == [p for p in ckpt.FAULT_POINTS if p not in ELSEWHERE]
    monkeypatch.undo()
    monkeypatch.setenv(ckpt.FAULT_ENV, "nonsense")
    with pytest.raises(ValueError, match="names no fault point"):
        ckpt.fault_point("data.chunk")
