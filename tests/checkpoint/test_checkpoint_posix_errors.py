"""Errors of a file system during a save, and foreign files in the root."""

from __future__ import annotations

import errno
import os
import resource
import signal
from pathlib import Path

import pytest
import torch

from tests.checkpoint.checkpoint_support import assert_equals, in_subprocess, random_bits, random_layout, save_in_process
from tests.checkpoint.stores import collect
from vescale_ray import checkpoint as ckpt
from vescale_ray.checkpoint.stores.store import UNDER_WAY, KeyMissing

BIG = {("w", "param"): random_bits((3 << 20,), torch.uint8, 1), ("v", "param"): random_bits((70001,), torch.float32, 2)}


SMALL = {("w", "param"): random_bits((40_000,), torch.uint8, 1)}


def save_with_a_limit(root, limit):
    """Save under the file size limit. Exit code 0 means that the save failed as it should."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        save_in_process(root, SMALL, random_layout(SMALL, 1, seed=2), step=2)
    except ckpt.SaveFailed as error:
        os._exit(0 if "File too large" in str(error) and "\n" not in str(error) else 3)
    os._exit(4)


@pytest.mark.parametrize("limit", [0, 4096, 20_000])
@pytest.mark.fault("K7")
def test_file_size_limit_fails_a_save_and_keeps_the_last_commit(tmp_path, limit):
    """The kernel's own limit, RLIMIT_FSIZE, refuses the write at several bytes of the data, aux or commit object."""
    save_in_process(tmp_path, SMALL, random_layout(SMALL, 1, seed=1), step=1)
    assert in_subprocess(save_with_a_limit, tmp_path, limit) == 0
    assert ckpt.latest(tmp_path).step == 1 and len(list(tmp_path.glob("data/*/*.safetensors"))) == 1
    assert_equals(tmp_path, SMALL)


@pytest.mark.parametrize(
    ("code", "where"), [("EACCES", "data"), ("EROFS", "commits"), ("EMFILE", "data"), ("EMFILE", "commits"), ("EDQUOT", "data")]
)
def test_file_creation_error_fails_the_save_in_one_line(tmp_path, monkeypatch, code, where):
    save_in_process(tmp_path, SMALL, random_layout(SMALL, 1, seed=1), step=1)
    real = os.open

    def refused(path, flags, *args, **kwargs):
        if flags & os.O_CREAT and f"/{where}/" in str(path):
            raise OSError(getattr(errno, code), os.strerror(getattr(errno, code)), str(path))
        return real(path, flags, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refused)
        with pytest.raises(ckpt.SaveFailed, match=os.strerror(getattr(errno, code))) as caught:
            save_in_process(tmp_path, SMALL, random_layout(SMALL, 1, seed=2), step=2)
        assert "\n" not in str(caught.value) and "earlier checkpoints are untouched" in str(caught.value)
        assert ckpt.latest(tmp_path).step == 1 and ckpt.verify(tmp_path).ok
        assert_equals(tmp_path, SMALL)


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite", "close", "fsync"])
@pytest.mark.fault("K7")
def test_an_error_while_writing_leaves_no_file_of_that_name(tmp_path, monkeypatch, call):
    real = getattr(os, call)
    strikes = []

    def broken(fd, *args):
        if os.readlink(f"/proc/self/fd/{fd}").endswith(".safetensors"):
            strikes.append(fd)
            if call == "close":
                real(fd)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, *args)

    monkeypatch.setattr(os, call, broken)
    with pytest.raises(ckpt.SaveFailed, match="Input/output error"):
        save_in_process(tmp_path, SMALL, random_layout(SMALL, 1, seed=2))
    monkeypatch.undo()
    most = {"pwrite": UNDER_WAY, "close": UNDER_WAY + 1}.get(call, 1)
    assert 1 <= len(strikes) <= most, "an fsync that failed must not be repeated"
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.fault("K10")
def test_signals_during_a_save_do_no_harm(tmp_path):
    """A timer of the training script or a profiler can interrupt any system call with EINTR."""
    hits = []
    previous = signal.signal(signal.SIGALRM, lambda *_: hits.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        save_in_process(tmp_path, BIG, random_layout(BIG, 2, seed=1), block_bytes=1 << 20, chunk_bytes=1 << 20)
        assert_equals(tmp_path, BIG)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, previous)
    assert hits


@pytest.mark.fault("K9")
def test_commit_link_with_a_lost_nfs_answer_is_known_as_ours(tmp_path, monkeypatch):
    real = os.link

    def link(source, target):
        real(source, target)
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))

    monkeypatch.setattr(os, "link", link)
    made = save_in_process(tmp_path, SMALL, random_layout(SMALL, 1, seed=1))
    assert ckpt.latest(tmp_path) == made


def test_missing_hard_links_fail_a_commit_with_the_remedy(tmp_path, monkeypatch):
    def link(source, target):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(ckpt.SaveFailed, match="has no hard links.*use another, or an object store"):
        save_in_process(tmp_path, SMALL, random_layout(SMALL, 1, seed=1))
    assert [p.name for p in tmp_path.glob("commits/*")] == []


@pytest.mark.fault("K8")
def test_unsynced_commit_fails_and_succeeds_when_repeated(tmp_path, monkeypatch):
    """The commit may or may not last until the folder is synced. Committing the attempt again gives the same commit in both cases."""
    vote = ckpt.write_shard(tmp_path, "a", 0, [], step=1, epoch=0)
    real = os.fsync

    def fsync(fd):
        if os.readlink(f"/proc/self/fd/{fd}").endswith("/commits"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(ckpt.SaveFailed, match="Input/output error"):
            ckpt.commit(tmp_path, [vote], step=1, epoch=0, attempt="a", world=1, meta={})
        with pytest.raises(ckpt.SaveFailed, match="Input/output error"):  # the object exists, but may not survive a crash
            ckpt.commit(tmp_path, [vote], step=1, epoch=0, attempt="a", world=1, meta={})
    made = ckpt.commit(tmp_path, [vote], step=1, epoch=0, attempt="a", world=1, meta={})
    assert ckpt.latest(tmp_path) == made and [p.name for p in tmp_path.glob("commits/*")] == [f"{made.name}.json"]


@pytest.mark.fault("K32")
def test_foreign_files_in_the_root_are_kept_and_ignored(tmp_path):
    save_in_process(tmp_path, SMALL, random_layout(SMALL, 1, seed=1), step=1)
    names = ["commits/read me.txt", "data/my notes", ".DS_Store", "data/.DS_Store", "data/x~/a b", "commits/e0000-s000000000009.json.part"]
    for name in names:
        path = Path(tmp_path, name)
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    made = save_in_process(tmp_path, SMALL, random_layout(SMALL, 1, seed=1), step=2)
    assert collect(tmp_path, 1, grace_s=-1.0).problems == () and ckpt.ls(tmp_path) == [made]
    assert all(Path(tmp_path, name).read_text() == "mine" for name in names)


@pytest.mark.timeout(60)
@pytest.mark.fault("K32")
def test_pipes_devices_and_dangling_links_are_not_objects(tmp_path):
    made = save_in_process(tmp_path, SMALL, random_layout(SMALL, 1, seed=1), step=1)
    newer = save_in_process(tmp_path, SMALL, random_layout(SMALL, 1, seed=1), step=2)
    os.mkfifo(tmp_path / "commits/e0000-s000000000009.json")
    os.symlink("/dev/zero", tmp_path / "commits/e0000-s000000000008.json")
    os.symlink("x", tmp_path / "commits/x")
    victim = next((tmp_path / "data" / newer.attempt).glob("*.safetensors"))
    victim.unlink()
    os.mkfifo(victim)
    store = ckpt.PosixStore(tmp_path)
    assert [c.name for c in ckpt.ls(store)] == [made.name, newer.name] and ckpt.latest(store) == made
    assert ckpt.verify(store, newer).problems[0].reason == "it is missing"
    with pytest.raises(KeyMissing):
        store.get("commits/e0000-s000000000009.json")
    with pytest.raises(ckpt.CommitExists):
        save_in_process(tmp_path, SMALL, random_layout(SMALL, 1, seed=1), step=9)
