"""Hangs that coincide with something else: a command, a recovery, a loss, a controller that was stopped itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.controller.hanging import work_more
from tests.controller.runs import Finished, carry_out, parents, print_figures, tiny
from tests.controller.test_fault_matrix import controller_process
from tests.controller.test_runs_on_ray import nothing_left, pid_of
from vescale_ray.cli import client
from vescale_ray.controller.worker_group.starvation import SLOWEST_S
from vescale_ray.runfolder import RunFolder

pytestmark = [pytest.mark.usefixtures("ray_here"), pytest.mark.slow, pytest.mark.timeout(300)]
MODEL = {"model_factory": "tests.controller.hanging:model", "model_units": ["body"]}
COLLECTIVE_S = 25


class Play:
    """A run with acts, one after another. An act follows when the one before has had its effect and 25 more steps are done."""

    def __init__(self, home: Path, workers: int, **changes: Any) -> None:
        fixed = {"train_steps": 1_000_000, "checkpoint_every": 0, "elastic_collective_timeout_s": COLLECTIVE_S, "data_eval_samples": 0}
        self.config = tiny(home, "play", elastic_workers=workers, **{**fixed, **MODEL, **changes})
        self.folder = RunFolder(self.config.run_folder)
        self.acts: list[Any] = []
        self.worlds: list[int] = []
        self.began: list[float] = []
        self._from = 0

    def act(self, world: int, what: Any) -> None:
        """Do ``what`` (given the process ids by rank) once the world has ``world`` workers."""
        self.acts.append(what)
        self.worlds.append(world)

    def watch(self, status: Mapping[str, Any]) -> None:
        done = len(self.began)
        awaited = self.worlds[done] if done < len(self.acts) else status["world"]
        if status["state"] != "RUNNING" or status["step"] < self._from + 25 or status["world"] != awaited:
            return
        if done == len(self.acts):
            client.request(self.folder, "stop", {})
            return
        pids = [pid_of(self.config, status, rank) for rank in range(status["world"])]
        self.began.append(time.time())
        self._from = status["step"]
        self.acts[done](pids)

    def finished(self) -> Finished:
        finished = carry_out(self.config, watch=self.watch)
        print_figures("play", finished.of("rescaled"))
        assert finished.result.state == "STOPPED" and finished.accounting().exact, finished.result
        nothing_left(finished)
        return finished


def stand_still(seconds: float) -> None:
    """Stop the controller's process alone for ``seconds``."""
    pid = controller_process()
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    os.kill(pid, signal.SIGCONT)


@pytest.mark.fault("C2")
def test_stopped_controller_blames_no_worker_for_its_own_pause(tmp_path: Path) -> None:
    play = Play(tmp_path, 3, elastic_collective_timeout_s=3)
    for _ in range(3):
        play.act(3, lambda pids: stand_still(8.0))
    finished = play.finished()
    assert not finished.of("worker_lost", "hang", "generation_failed") and len(finished.generations()) == 1


def test_overloaded_machine_ends_only_the_hung_worker(tmp_path: Path) -> None:
    """Four busy processes per core are started, and each step takes several times as long as any before."""
    play = Play(tmp_path, 3)
    rivals: list[subprocess.Popen[bytes]] = []
    rival = "while True: pass"  # with the same priority as the run's workers
    steps: list[int] = []
    times: dict[str, float] = {}

    def watch(status: Mapping[str, Any]) -> None:
        if "crowded" in times and "asked" not in times and time.time() - times["crowded"] > 90.0:
            times["asked"] = time.time()
            client.request(play.folder, "stop", {})
        if status["state"] != "RUNNING" or status["step"] < (steps[-1] if steps else 0) + 12:
            return
        if not steps:
            work_more(pid_of(play.config, status, 1), 0.25)  # two slots in a step
            steps.append(status["step"])
        elif not rivals:
            for _ in range(4 * (os.cpu_count() or 1)):
                rivals.append(subprocess.Popen([sys.executable, "-c", rival]))
            steps.append(status["step"] - 12)
            times["crowded"] = time.time()
        elif "stopped" not in times:
            if time.time() - times["crowded"] > 20.0 and status["world"] == 3:
                os.kill(pid_of(play.config, status, 2), signal.SIGSTOP)
                times["stopped"] = time.time()
        elif status["world"] == 2 and "asked" not in times:
            times["asked"] = time.time()
            client.request(play.folder, "stop", {})

    try:
        finished = carry_out(play.config, watch=watch)
    finally:
        for process in rivals:
            process.kill()
            process.wait()
    longest = max(line["step_seconds"] for line in finished.folder.read_metrics())
    (lost,) = finished.of("worker_lost")
    late = lost["time"] - times["stopped"]
    print(f"\nlongest step {longest:.1f} s; ended {late:.1f} s after it was stopped", end="")
    assert longest > 1.5, "the machine was not overloaded"
    assert lost["cause"] == "hang"
    assert 0 < late < 2 * longest + SLOWEST_S + 3.0
    assert len(finished.of("hang")) == 1 and finished.accounting().exact and finished.result.state == "STOPPED"
    nothing_left(finished)


def test_hung_lone_worker_is_found_within_2_5_s_and_replaced(tmp_path: Path) -> None:
    play = Play(tmp_path, 1, elastic_replace_lost=True, checkpoint_every=20)
    play.act(1, lambda pids: os.kill(pids[0], signal.SIGSTOP))
    finished = play.finished()
    (lost,) = finished.of("worker_lost")
    print(f"\nended {lost['time'] - play.began[0]:.2f} s after it was stopped", end="")
    assert lost["time"] - play.began[0] < 2.5 and lost["cause"] == "hang"
    (event,) = finished.of("rescaled")
    assert (event["from"], event["to"], event["source"]) == (1, 1, "checkpoint") and event["steps_replayed"] <= 21


def control_store() -> int:
    """Process id of the control store of this process' Ray."""
    for pid, parent in parents().items():
        if parent == os.getpid() and b"gcs_server" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]:
            return pid
    raise AssertionError("there is none")


@pytest.mark.fault("C4")
def test_recovery_needs_no_control_store_but_a_replacement_does(tmp_path: Path) -> None:
    """The control store stands still for 15 s. The return of a worker's place waits for it, and so does a new place."""
    play = Play(tmp_path, 3, elastic_replace_lost=True)
    store, stopped, back = control_store(), [], []

    def loses_one(pids: list[int]) -> None:
        os.kill(store, signal.SIGSTOP)
        stopped.append(time.time())
        os.kill(pids[1], signal.SIGKILL)

    def watch(status: Mapping[str, Any]) -> None:
        if stopped and not back and time.time() - stopped[0] > 15.0:
            os.kill(store, signal.SIGCONT)
            back.append(time.time())
        if not stopped or (back and "grow/replacement" in status["rescales"]):
            play.watch(status)

    play.act(3, loses_one)
    try:
        finished = carry_out(play.config, watch=watch)
    finally:
        os.kill(store, signal.SIGCONT)
    print_figures("control store", finished.of("rescaled"))
    assert finished.result.state == "STOPPED" and finished.accounting().exact, finished.result
    shrunk, grown = finished.of("rescaled")
    assert (shrunk["from"], shrunk["to"], shrunk["source"]) == (3, 2, "peer") and shrunk["steps_replayed"] <= 1
    assert shrunk["time"] - stopped[0] < 8.0 and shrunk["time"] < back[0] < grown["time"]
    assert (grown["from"], grown["to"]) == (2, 3)
    nothing_left(finished)
