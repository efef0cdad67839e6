"""Processes that end, are interrupted or are killed during a save."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
import time
from typing import Any

import pytest
import torch

from tests.checkpoint.async_saves import Slow, within
from tests.checkpoint.checkpoint_support import Script, bits, in_subprocess
from vescale_ray import checkpoint as ckpt
from vescale_ray.checkpoint.saving import saver as saver_module
from vescale_ray.checkpoint.saving import writer as writer_module
from vescale_ray.checkpoint.saving.writer import SaveWriter


@pytest.fixture
def interruptible():
    """Restore SIGINT's default handler. A shell starts background jobs with SIGINT ignored, and Python keeps that setting."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_ends_a_sync_save_at_once_and_commits_nothing(root, interruptible):
    store = Slow(root)

    def press() -> None:
        store.began.acquire()
        os.kill(os.getpid(), signal.SIGINT)
        threading.Timer(0.5, store.gate.set).start()

    threading.Thread(target=press).start()
    with pytest.raises(KeyboardInterrupt):
        within(4, lambda: ckpt.save({"model": {"w": torch.ones(3 << 20)}}, store, 1))
    assert not ckpt.ls(root) and not list(root.rglob("*.safetensors"))


@pytest.mark.fault("K6")
def test_ctrl_c_at_any_line_of_the_handoff_leaves_a_usable_saver():
    """Interrupt at each line of ``SaveWriter.put`` and of its callees, including the start of the thread."""
    within = {SaveWriter.put.__code__, SaveWriter._move.__code__, threading.Thread.start.__code__}
    state = {"model": {"w": torch.ones(5)}}
    before, lines = set(threading.enumerate()), 0
    for line in itertools.count(1):
        seen: set[tuple[Any, int]] = set()

        def trace(frame: Any, event: str, value: Any, line: int = line, seen: set[tuple[Any, int]] = seen) -> Any:
            code, now = frame.f_code, len(seen)
            if event == "line":
                # Each line counts once: on its second visit a ``with`` block is being left, and Python checks for no signals there.
                seen.add((code, frame.f_lineno))
                if now < line == len(seen):
                    raise KeyboardInterrupt
            return trace if code in within else None

        saver = ckpt.Saver(ckpt.MemoryStore())
        sys.settrace(trace)
        try:
            saver.async_save(state, 1)
        except KeyboardInterrupt:
            lines += 1
        finally:
            sys.settrace(None)
        began = time.monotonic()
        saver.wait(5)
        assert saver.async_save(state, 2).wait(5).step == 2
        saver.close(5)
        assert time.monotonic() - began < 5, f"line {line}"
        if len(seen) < line:
            break
    assert lines >= 12
    for thread in set(threading.enumerate()) - before:
        if thread.ident is not None:  # otherwise the start of the thread was interrupted
            thread.join(10)
            assert not thread.is_alive()


class Late(ckpt.PosixStore):
    def put_stream(self, key, chunks, size):
        threading.Event().wait(0.5)
        super().put_stream(key, chunks, size)


KEPT: list[ckpt.Saver] = []
"""Savers that are alive when a script's process ends."""


def saves_and_ends(root: str, how: str) -> None:
    saver_module.EXIT_S, writer_module.ABORT_S = 2.0, 0.3
    store = ckpt.PosixStore(root) if how == "hang" else Late(root)
    if how == "hang":
        saver_module.EXIT_S = 0.5
        os.pwrite = lambda *_: threading.Event().wait()  # type: ignore[assignment, misc, return-value]
    saver, state = ckpt.Saver(store), {"model": {"w": torch.ones(20 << 20, dtype=torch.uint8)}}
    KEPT.append(saver)
    saver.async_save(state, 1)
    print(time.monotonic(), flush=True)
    if how == "raise":
        raise KeyError("mine")
    if how == "hang":  # a data loader's worker, forked meanwhile, neither waits for its parent's save nor saves
        child = os.fork()
        if child == 0:
            try:
                saver.async_save(state, 2)
            except ValueError as error:
                os.write(1, str(error).encode())
            sys.exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7, "it waited, or was killed"


@pytest.mark.parametrize(("how", "code"), [("raise", 1), ("hang", 0)])
def test_interpreter_exits_in_bounded_time_with_a_save_in_flight(root, tmp_path, how, code):
    """At exit, a save that is nearly done is finished and a hung save is given up; neither leaves a torn checkpoint."""
    ended, output, errors = Script(tmp_path, saves_and_ends, str(root), how).ended(240)
    assert ended == code, errors
    assert time.monotonic() - float(output.split()[0]) < 120, "without the bound it would take until the time limit above"
    assert "KeyError" in errors if how == "raise" else "Traceback" not in errors
    if how == "hang":
        assert ckpt.latest(root) is None and "given up" in errors
        assert "this saver was made before this process was forked" in output
    else:
        assert ckpt.latest(root).step == 1 and ckpt.verify(root).ok  # type: ignore[union-attr]


POINTS = [
    ("stage.copied", 1),
    ("shard.planned", 1),
    ("data.created", 1),
    ("data.chunk#0", 1),
    ("data.chunk#1", 1),
    ("data.written", 1),
    ("data.synced", 1),
    ("data.published", 1),
    ("aux.written", 1),
    ("commit.validated", 1),
    ("commit.tmp_synced", 1),
    ("commit.linked", 2),
    ("commit.published", 2),
]


OFTEN = {"stage.copied", "data.chunk#1", "commit.tmp_synced", "commit.linked"}


@pytest.mark.parametrize(("point", "survivor"), [pytest.param(*one, marks=[] if one[0] in OFTEN else [pytest.mark.slow]) for one in POINTS])
def test_kill_during_an_async_save_loses_no_earlier_commit(root, point, survivor):
    assert in_subprocess(save_two, str(root), point) == -9, f"nothing was killed at {point}"
    found = ckpt.latest(root)
    assert found is not None and found.step == survivor
    assert bits(ckpt.open(root).read("w")) == bits(big(survivor))
    report = ckpt.gc(root, ckpt.Retention(keep_last=1), grace=ckpt.NO_GRACE)
    assert report.kept == (found.name,) and [p.name for p in (root / "data").iterdir()] == [found.attempt]
    assert bits(ckpt.open(root).read("w")) == bits(big(survivor))


def big(seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (20 << 20,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def save_two(root: str, point: str) -> None:
    torch.set_num_threads(1)
    saver = ckpt.Saver(root)
    w = big(1)
    saver.async_save({"model": {"w": w}}, 1).wait(30)
    os.environ[ckpt.FAULT_ENV] = point
    w.copy_(big(2))
    handle = saver.async_save({"model": {"w": w}}, 2)
    w.zero_()
    handle.wait(30)
