"""The position of a training thread, as another thread reports it, or another process if no thread can answer."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import ranks
from tests.packaging.sources import PRODUCT, module_of
from tests.ranks import on_threads, run_gloo
from vescale_ray.communication import abortable_waits, point_to_point
from vescale_ray.fsdp import fully_shard
from vescale_ray.workers.monitoring.heartbeat import (
    RECORDER,
    Heartbeat,
    Where,
    offer_stacks,
    stacks,
    starved_s,
    state_of,
    take_stacks,
    where,
)


def while_it_runs(function, look_s: float = 0.0, seen_file: Path | None = None, named: list[str] | None = None) -> Where:
    """This thread's position during ``function()``, at its first wait for other ranks or after ``look_s`` seconds.

    At that moment ``seen_file`` is created, and the collective is appended to ``named``.
    """
    heartbeat, seen = Heartbeat(), []

    def look():
        deadline = time.monotonic() + look_s
        while not (at := heartbeat.where()).waiting and time.monotonic() < deadline:
            time.sleep(0.02)
        seen.append(at)
        if named is not None:
            named.append(heartbeat.collective())
        if seen_file is not None:
            seen_file.touch()

    looker = threading.Thread(target=look)
    looker.start()
    function()
    looker.join()
    return seen[0]


def in_collectives(rank, world, folder):
    """Positions of both ranks in each kind of wait of a step. Rank 0 waits for rank 1, which waits for a file."""
    model = fully_shard(torch.nn.Linear(8, 8))
    group = dist.distributed_c10d._get_default_group()
    small = torch.ones(4)
    loss = None

    def forward():
        nonlocal loss
        loss = model(torch.ones(2, 8)).sum()

    model(torch.ones(2, 8)).sum().backward()  # in the first step the ranks also compare their plans
    ways = {
        "all_gather": lambda: dist.all_gather([small.clone() for _ in range(world)], small),
        "barrier": lambda: dist.barrier(),
        "work": lambda: dist.all_reduce(small, async_op=True).wait(),
        "back end": lambda: group.allreduce([small]).wait(),
        "forward": forward,
        "backward": lambda: loss.backward(),
    }
    seen = {}
    named: list[str] = []
    for name, way in ways.items():
        file = Path(folder) / name
        if rank == 0:
            seen[name] = while_it_runs(way, 20.0, file, named)
            continue

        def late(file=file):
            while not file.exists():
                time.sleep(0.02)

        seen[name] = while_it_runs(late, named=named)
        way()
    return seen, dict(zip(ways, named, strict=True))


def test_waiting_thread_names_its_collective_and_awaited_none(tmp_path, monkeypatch):
    for name, value in RECORDER.items():
        monkeypatch.setenv(name, value)  # a worker sets these before it imports torch
    (waiting, named), (awaited, nothing) = run_gloo(2, in_collectives, str(tmp_path))
    assert re.fullmatch(r"gloo:all_?gather of Float\[4\], number \d+ of group 0 default_pg", named["all_gather"]), named
    assert re.fullmatch(r"gloo:barrier of .*, number \d+ of group 0 default_pg", named["barrier"]), named
    assert re.fullmatch(r"gloo:all_?reduce of Float\[4\], number \d+ of group 0 default_pg", named["work"]), named
    assert named["back end"].startswith("gloo:all")
    # The elements have 288 bytes. A rank's part is a multiple of 128 bytes, and the smallest that holds half of them has 256.
    assert named["forward"] == "all-gather of the root .., 512 bytes, 2 ranks", named
    assert named["backward"] == "reduce-scatter of weight .., 512 bytes, 2 ranks", named
    assert set(nothing.values()) == {""}, "it waits for a file"
    assert {name: at.waiting for name, at in waiting.items()} == dict.fromkeys(waiting, True), waiting
    assert {name: at.waiting for name, at in awaited.items()} == dict.fromkeys(awaited, False), awaited
    assert all("late (test_heartbeat.py" in at.text or "while_it_runs (" in at.text for at in awaited.values())
    assert waiting["backward"].text.startswith("wait (fsdp/groups/reduction.py:"), waiting["backward"]


def test_thread_waiting_on_its_own_lock_does_not_wait_for_ranks():
    lock = threading.Event()
    at = while_it_runs(lambda: lock.wait(1.0), 0.5)
    assert not at.waiting and at.text.startswith("wait (threading.py:")


def test_beats_are_counted_and_stacks_name_the_threads():
    heartbeat = Heartbeat()
    for _ in range(3):
        heartbeat.beat()
    assert heartbeat.beats == 3 and Heartbeat().beats == 0
    text = stacks()
    assert "Thread MainThread" in text and "test_beats_are_counted" in text
    frame = sys._getframe()
    assert where(frame).text.startswith("test_beats_are_counted_and_stacks_name_the_threads (test_heartbeat.py:")


UNITS = 3


@on_threads(2)
def test_thread_beats_in_every_unit_without_explicit_beats(rank, world):
    layers = [torch.nn.Linear(8, 8) for _ in range(UNITS)]
    model = fully_shard(torch.nn.Sequential(*(fully_shard(layer) for layer in layers)))
    model(torch.ones(2, 8)).sum().backward()
    heartbeat = Heartbeat()
    loss = model(torch.ones(2, 8)).sum()
    forward = heartbeat.beats
    loss.backward()
    assert forward >= UNITS and heartbeat.beats - forward >= UNITS


def test_starved_time_is_zero_without_kernel_statistics():
    assert starved_s(1 << 30, 1) == 0.0, "there is no such process, and so no such file"


# A kernel without CONFIG_SCHED_INFO, or a sandbox, has no such file. The test above covers that case.
@pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="this kernel tells nobody how long a thread waits for a processor")
def test_starved_time_counts_processor_contention_and_not_sleep():
    """A thread that never sleeps either runs on a processor or waits for one. Every kernel gets this sum right."""
    heartbeat = Heartbeat()
    others = "import os, sys, time; os.sched_setaffinity(0, {int(sys.argv[1])}); end = time.time() + 20\nwhile time.time() < end: pass"
    all_of_them = os.sched_getaffinity(0)
    one = min(all_of_them)
    rivals = [subprocess.Popen([sys.executable, "-c", others, str(one)]) for _ in range(3)]
    try:
        os.sched_setaffinity(0, {one})
        time.sleep(0.5)
        starved, began, cpu = heartbeat.starved_s(), time.perf_counter(), time.thread_time()
        while time.thread_time() - cpu < 0.3:
            pass
        starved, took, cpu = heartbeat.starved_s() - starved, time.perf_counter() - began, time.thread_time() - cpu
        before = heartbeat.starved_s()
        time.sleep(0.5)
        slept = heartbeat.starved_s() - before
    finally:
        os.sched_setaffinity(0, all_of_them)
        for rival in rivals:
            rival.kill()
            rival.wait()
    assert took > 2 * cpu and starved == pytest.approx(took - cpu, rel=0.1, abs=0.05)
    assert slept < 0.25


def test_thread_reports_compiling_only_while_it_compiles():
    """The back end is slow, like inductor."""
    seen = []

    def slow(module, example):
        deadline = time.monotonic() + 10
        while not seen and time.monotonic() < deadline:
            time.sleep(0.02)
        return lambda x: (time.sleep(0.5), module(x))[1]

    heartbeat = Heartbeat()
    compiled = torch.compile(lambda x: x * 2, backend=slow)
    looker = threading.Thread(target=lambda: (time.sleep(0.2), _until(lambda: heartbeat.where().compiling), seen.append(heartbeat.where())))
    looker.start()
    compiled(torch.ones(3))
    looker.join()
    assert seen[0].compiling and not seen[0].waiting
    assert not while_it_runs(lambda: compiled(torch.ones(3)), 0.2).compiling
    with heartbeat.long_work():
        assert heartbeat.in_long_work
    assert not heartbeat.in_long_work


def _until(condition):
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)


def test_frame_without_a_line_number_still_has_a_place():
    code = SimpleNamespace(co_filename="/x/model.py", co_name="forward")
    frame: Any = SimpleNamespace(f_code=code, f_lineno=None, f_back=None)
    at = where(frame)
    assert at == Where("forward (model.py:?)", False)


def holds_the_lock(pipe):
    pipe.send((os.getpid(), offer_stacks()))
    pipe.recv()
    pipe.send("now")
    while True:  # a signal ends a sleep
        ctypes.PyDLL(None).sleep(30)


def test_stacks_come_from_a_gil_holder_and_not_a_stopped_process():
    context = ranks._context()
    here, there = context.Pipe()
    process = context.Process(target=holds_the_lock, args=(there,), daemon=True)
    process.start()
    try:
        pid, descriptor = here.recv()
        assert descriptor >= 0
        here.send("go")
        assert here.recv() == "now"
        time.sleep(0.2)
        for _ in range(2):  # each time a new stack, not the text written before
            text = take_stacks(pid, descriptor, 5.0)
            assert text.count("holds_the_lock") == 1, text
        os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        assert take_stacks(pid, descriptor, 5.0) == "(none: process state T (stopped))"
        assert time.monotonic() - began < 1.0, "nothing can come of it: it need not be waited for"
    finally:
        process.kill()
        process.join()
    assert state_of(pid) == "" and "No such" in take_stacks(pid, descriptor, 0.3)
    assert take_stacks(os.getpid(), -1, 1.0) == "(this system cannot share the stacks with other processes)"


def test_a_wait_counts_at_every_line_of_it() -> None:
    """Messages are awaited one after another. Under load, a look at the thread often comes between two of them."""
    for module in (abortable_waits, point_to_point):
        found: dict[str, Any] = {}
        exec(compile("import sys\nfound['frame'] = sys._getframe()", str(module.__file__), "exec"), {"found": found})
        assert where(found["frame"]).waiting and not where(sys._getframe()).waiting


LOOKS = """
import gc, sys, threading, time
from vescale_ray.workers.monitoring.heartbeat import frames

class Cycle:
    def __init__(self):
        self.me = self
    def __del__(self):
        time.sleep(0.002)  # lets other threads run, as the destructor of a tensor does

def start():
    while time.monotonic() < end:
        threading.Thread(target=int).start()

end = time.monotonic() + 2
threading.Thread(target=start).start()
gc.set_threshold(1)
while time.monotonic() < end:
    Cycle()
    assert threading.get_ident() in frames()
assert gc.isenabled()
"""


def test_looks_at_threads_do_not_block_those_that_start():
    subprocess.run([sys.executable, "-c", LOOKS], check=True, timeout=100)


def test_only_frames_reads_the_frames_of_all_threads():
    """``sys._current_frames`` may hang before CPython 3.11.9."""
    users = [path for path in PRODUCT if "sys._current_frames()" in path.read_text(encoding="utf-8")]
    assert [module_of(path) for path in users] == ["vescale_ray.workers.monitoring.heartbeat"]
