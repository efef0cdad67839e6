"""Processes that end, are killed or fork while they use S3, and their memory."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest
import torch

from tests.checkpoint.checkpoint_support import (
    Script,
    assert_equals,
    in_subprocess,
    peak_growths,
)
from tests.checkpoint.s3_saves import AFTER, BEFORE, TOP, save_after
from tests.checkpoint.stores import collect
from tests.checkpoint.test_checkpoint_stores import chunks
from vescale_ray import checkpoint as ckpt


def killed_on_s3(url: str, point: str) -> None:
    os.environ[ckpt.FAULT_ENV] = point
    os.environ.update(AWS_ACCESS_KEY_ID="a", AWS_SECRET_ACCESS_KEY="b", AWS_ENDPOINT_URL_S3=url, AWS_REGION="us-east-1")
    store = ckpt.S3Store("s3://bucket/runs/one", ckpt.S3Options(part_bytes=5 << 20))
    save_after(store)
    collect(store, 1, grace_s=-5.0)


S3_POINTS = [
    "shard.planned", "data.created", "data.chunk#0", "data.chunk#1", "data.chunk#2", "data.written", "data.published", "aux.written",
    "commit.begun", "commit.validated", "commit.tmp_synced", "commit.linked", "gc.commit_deleted", "gc.object_deleted#1", "gc.swept",
]  # fmt: skip


QUICK_POINTS = {"data.chunk#1", "commit.validated", "gc.commit_deleted"}  # an open upload, no commit, and a commit


@pytest.mark.parametrize("point", [p if p in QUICK_POINTS else pytest.param(p, marks=pytest.mark.slow) for p in S3_POINTS])
@pytest.mark.fault("K2")
def test_kill_during_an_s3_save_leaves_a_loadable_commit(store, fake, point):
    ckpt.write_shard(store, "dead", 0, [], step=15, epoch=0)
    assert in_subprocess(killed_on_s3, fake.url, point, timeout=60) == -9, f"nothing was killed at {point}"
    done = point.split("#")[0] in ("commit.linked", "gc.commit_deleted", "gc.object_deleted", "gc.swept")
    found = ckpt.latest(store)
    assert found is not None and found.step == (20 if done else 10)
    assert_equals(store, AFTER if done else BEFORE)
    if point in ("data.created", "data.chunk#1", "data.written"):
        assert len(fake.uploads) == 1, "a killed process can't abort"
    report = collect(store, 1, grace_s=-5.0)
    assert report.kept == (found.name,) and not report.problems and not fake.uploads
    assert {k.split("/")[3] for k in fake.objects if k.startswith(f"{TOP}data/")} == {found.attempt}
    assert_equals(store, AFTER if done else BEFORE)


def store_at(url: str, timeout_s: float = 2.0) -> ckpt.S3Store:
    os.environ.update(AWS_ACCESS_KEY_ID="a", AWS_SECRET_ACCESS_KEY="b", AWS_ENDPOINT_URL=url, AWS_DEFAULT_REGION="us-east-1")
    return ckpt.S3Store("s3://bucket/runs/one", ckpt.S3Options(part_bytes=5 << 20, timeout_s=timeout_s, retry_s=2.0, pause_s=0.05))


KEPT: list[object] = []
"""Objects that are alive when a script's process ends."""


def uploads(url: str) -> None:
    # The signal has to come before the first hung request times out.
    store_at(url, timeout_s=8.0).put_stream("data/x/r", chunks(50 << 20), 50 << 20)


@pytest.mark.slow
@pytest.mark.fault("K5")
def test_ctrl_c_aborts_a_running_upload_and_ends_the_process(fake, tmp_path):
    fake.fail("PART", "hang", seconds=20.0, after=1, times=99)
    script = Script(tmp_path, uploads, fake.url)
    deadline = time.monotonic() + 40
    while fake.requests("PART") < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert script.process.pid is not None
    os.kill(script.process.pid, signal.SIGINT)
    code, _, errors = script.ended(120)
    assert "KeyboardInterrupt" in errors and code not in (0, None)
    assert not fake.uploads and not fake.objects


def reads_and_forks(url: str) -> None:
    store = store_at(url)
    store.put_stream("data/x/r", chunks(6 << 20), 6 << 20)
    KEPT.append(opened := store.open_read("data/x/r"))
    reader = opened.__enter__()
    reader.expect([(0, 1 << 20), (1 << 20, 1 << 20)])
    child = os.fork()
    if child == 0:
        ok = store.size("data/x/r") == 6 << 20 and len(store.get("data/x/r")) == 6 << 20
        store.put_stream("data/child/r", chunks(6 << 20), 6 << 20)
        sys.exit(0 if ok else 3)
    assert store.size("data/x/r") == 6 << 20
    _, status = os.waitpid(child, 0)
    assert store.size("data/x/r") == 6 << 20
    print(status, reader.read_into(0, memoryview(bytearray(4096))), flush=True)


def test_process_exits_with_an_open_reader_and_a_forked_child(fake, tmp_path):
    """The event loop's thread does not survive a fork, and a child that ends must not close its parent's connections."""
    code, output, errors = Script(tmp_path, reads_and_forks, fake.url).ended(240)
    assert output.split() == ["0", "4096"] and code == 0, errors
    assert "Unclosed" not in errors, errors
    assert f"{TOP}data/child/r" in fake.objects
    assert fake.requests("HEAD") == 6, "the parent's connection was lost, and it asked again"


def saves_in_the_background(url: str) -> None:
    from vescale_ray.checkpoint.saving import saver, writer

    saver.EXIT_S, writer.ABORT_S = 0.5, 0.1
    store = store_at(url)
    KEPT.append(running := ckpt.Saver(store))
    running.async_save({"model": {"w": torch.ones(50 << 20, dtype=torch.uint8)}}, 1)
    while not store._uploads:
        time.sleep(0.05)
    time.sleep(1)


@pytest.mark.slow
def test_process_exits_soon_with_an_upload_in_the_background(fake, tmp_path):
    """An asynchronous save is running as the script returns.

    No exit handler waits longer than the time limits of requests. The save's thread, which outlives them, does not crash the interpreter.
    """
    fake.fail("PART", "hang", seconds=60.0, after=1, times=99)
    code, _, errors = Script(tmp_path, saves_in_the_background, fake.url).ended(45)
    assert code == 0 and "given up" in errors and fake.requests("PART") and not fake.objects, errors


def transfer(url, size):
    os.environ.update(AWS_ACCESS_KEY_ID="a", AWS_SECRET_ACCESS_KEY="b", AWS_ENDPOINT_URL_S3=url, AWS_REGION="us-east-1")
    store = ckpt.S3Store("s3://bucket/runs/one", ckpt.S3Options(part_bytes=5 << 20, range_bytes=1 << 20, parallel=3))
    store.put_stream("data/warm/r", iter([memoryview(bytes(1 << 20))] * 6), 6 << 20)
    chunk, view = memoryview(bytes(1 << 20)), memoryview(bytearray(1 << 20))
    yield
    store.put_stream("data/x/r", iter([chunk] * (size >> 20)), size)
    yield
    with store.open_read("data/x/r") as reader:
        reader.expect([(offset, 1 << 20) for offset in range(0, size, 1 << 20)])
        for offset in range(0, size, 1 << 20):
            reader.read_into(offset, view)
    yield


def test_a_transfer_takes_the_memory_of_the_parts_in_flight(fake):
    """Transfer 80 MiB up and down in parts of 5 MiB, 3 at a time. The peak grows by those parts, the sockets and some slack."""
    assert max(peak_growths(transfer, fake.url, 80 << 20)) < 48 << 20
