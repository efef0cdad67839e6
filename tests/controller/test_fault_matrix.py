"""Every fault at every moment of a run leaves each bit as in an undisturbed run.

The moments: the building of the first generation, its first step (before any copy), the next building, the last step, and the last
checkpoint. One run meets all moments of a fault, one after another.
"""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.controller.cues import CONTROLLER, Cue, cues, played
from tests.controller.hanging import FOR_S
from tests.controller.runs import Finished, carry_out, parents, tiny, until
from tests.controller.test_runs_on_ray import nothing_left
from vescale_ray import checkpoint
from vescale_ray.cli import client
from vescale_ray.config import RunConfig
from vescale_ray.controller.driver.driver import ScheduledAction as Act
from vescale_ray.controller.state.state_store import NAME
from vescale_ray.runfolder import FINAL_STATES, RunFolder

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_here"), pytest.mark.timeout(300)]
STEPS, SLOTS = 12, 6


def config_of(folder: Path, name: str, **changes: Any) -> RunConfig:
    fixed = {
        "model_factory": "tests.controller.cues:model",
        "model_units": ["body"],
        "train_steps": STEPS,
        "train_slots": SLOTS,
        "data_eval_samples": 0,
        "checkpoint_every": 0,
        "elastic_deterministic": True,
        "elastic_collective_timeout_s": 6,
        "elastic_max_recoveries_without_progress": 8,
    }
    return tiny(folder, name, **{**fixed, **changes})


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("matrix")


@pytest.fixture(scope="module")
def calm(home: Path, ray_here: None) -> Finished:
    return carry_out(config_of(home, "calm", elastic_workers=1))


ENDS = ("kill", "stop", "sleep", "controller and worker")
"""Faults after which the process is gone. After the others it takes part in the next generation."""
NOT_IN_A_SAVE = ("raise", "collective", "sleep")
"""Faults that are not tried in the last checkpoint. A failed write fails the checkpoint (test_checkpoint_faults), and ``Bounds.save``
limits one that takes for ever."""


@pytest.mark.parametrize("way", ["kill", "raise", "collective", "stop", "sleep", "controller and worker"])
@pytest.mark.fault("W1", "W2", "W3", "W7", "W10", "C3")
def test_fault_of_any_kind_at_any_moment_changes_no_bit(way: str, home: Path, calm: Finished) -> None:
    moments = ["start", "first", "rebuild", "last", *(["save"] if way not in NOT_IN_A_SAVE else [])]
    # One of 6 workers is gone after each of the first three moments. For the last step 3 are left, with two slots each.
    per_step = SLOTS // 3 if way in ENDS else 1
    parts = {
        "start": Cue(way, 1, 0),
        "first": Cue(way, 2, 1),
        "rebuild": Cue(way, 3, 0),
        "last": Cue(way, 4, per_step * STEPS),
        "save": Cue(way, save=True),
    }
    began = time.monotonic()
    # A worker that hangs as its model is filled in is ended after ten times this limit, before it wakes.
    bound = {"elastic_collective_timeout_s": FOR_S / 20} if way == "sleep" else {}
    with cues(*(parts[moment] for moment in moments)):
        finished = carry_out(config_of(home, way.replace(" ", "-"), elastic_workers=6, **bound))
        assert played() == len(moments), finished.events
    print(f"\n{way}: {time.monotonic() - began:.0f} s, worlds {[len(g) for g in finished.generations()]}", end="")
    assert finished.result.state == "DONE", finished.result
    is_the_same(finished, calm)
    failed = finished.of("generation_failed")
    assert len(failed) >= 4, "each moment is a generation's end"
    assert bool(finished.of("worker_lost")) == (way in ENDS)
    if way == "controller and worker":
        assert finished.of("controller_restarted")
    nothing_left(finished)


MANY = {"train_slots": 12, "checkpoint_every": 5}
"""Settings with which 6 workers have two slots each, and 4 have three. A state without copies is restored from step 10."""


@pytest.fixture(scope="module")
def calm_of_many(home: Path, ray_here: None) -> Finished:
    return carry_out(config_of(home, "calm-of-many", elastic_workers=1, **MANY))


def is_the_same(finished: Finished, calm: Finished) -> None:
    """Check that every loss and every bit of the last checkpoint are those of ``calm``."""
    assert finished.losses == calm.losses
    assert finished.accounting().exact
    roots = [run.config.checkpoint_root for run in (finished, calm)]
    ours, theirs = (checkpoint.open(root) for root in roots)
    assert ours.commit.step == STEPS and checkpoint.verify(roots[0]).ok
    assert checkpoint.diff(ours, theirs).equal, "the weights or the optimizer's state differ in a bit"


@pytest.mark.fault("W6", "W10")
def test_two_kills_at_once_in_first_and_last_step_cost_no_bit(home: Path, calm_of_many: Finished) -> None:
    """The two that die in the last step are neighbours: a shard and its copy are both gone."""
    first = [Cue("kill", 1, 1, rank=rank, together=2) for rank in (1, 4)]
    last = [Cue("kill", 2, 3 * STEPS, rank=rank, together=2) for rank in (1, 2)]  # 4 workers are left, with three slots each
    with cues(*first, *last):
        finished = carry_out(config_of(home, "two", elastic_workers=6, **MANY))
        assert played() == 4, finished.events
    assert finished.result.state == "DONE", finished.result
    assert [len(members) for members in finished.generations()] == [6, 4, 2], "each time both were lost in one failure"
    begun, ended = finished.of("rescaled")
    assert (begun["from"], begun["to"], begun["step"], begun["steps_replayed"]) == (6, 4, 0, 0)
    assert (ended["from"], ended["to"], ended["source"]) == (4, 2, "checkpoint") and ended["steps_replayed"] <= STEPS - 10
    is_the_same(finished, calm_of_many)
    nothing_left(finished)


@pytest.mark.fault("W8")
def test_death_in_a_shrink_keeps_the_leaver_and_its_state(home: Path, calm: Finished) -> None:
    with cues(Cue("kill", build=2, forward=0, rank=0)):
        config = config_of(home, "shrink", elastic_workers=4, elastic_min_workers=3)
        finished = carry_out(config, Act(4, "rescale", 3))
        assert played() == 1
    assert finished.result.state == "DONE", finished.result
    first, second, third = map(set, finished.generations())
    assert len(first) == 4 and len(second) == 3 and third - second == first - second
    (change,) = finished.of("rescaled")
    assert change["source"] in ("memory", "peer") and change["steps_replayed"] <= 2
    is_the_same(finished, calm)


def processes(title: bytes) -> list[int]:
    """Processes of this process' Ray cluster whose title begins with ``title``."""
    parent = parents()
    found = []
    for pid in [pid for pid, its in parent.items() if parent.get(its) == os.getpid()]:
        try:
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(title):
                found.append(pid)
        except OSError:
            continue
    return found


def controller_process() -> int | None:
    return next(iter(processes(CONTROLLER)), None)


def answers(run: RunFolder, epoch: int) -> int | None:
    """The controller's epoch, if a controller after ``epoch`` answers."""
    try:
        now = int(client.request(run, "status", timeout_s=1.0)["info"]["controller_epoch"])
    except (client.RunNotAlive, client.CommandRefused):
        return None
    return now if now > epoch else None


class Sideline:
    """Does something to a run in a thread, and then stops the run. An error in the thread fails the test."""

    def __init__(self, config: RunConfig, what: Callable[[RunFolder], None]) -> None:
        self.folder, self._what = RunFolder(config.run_folder), what
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Sideline:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(30)
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            until(lambda: len(self.folder.read_metrics()) >= 5, 120, "step 5")
            self._what(self.folder)
        except BaseException as error:
            self.error = error
        finally:
            try:
                # A controller that was just killed refuses commands for some seconds. With a single try, the run would never end.
                until(self._is_stopped, 60, "the end of the run")
            except BaseException as error:
                self.error = self.error or error

    def _is_stopped(self) -> bool:
        state = self.folder.read_state()
        if state is not None and state["state"] in FINAL_STATES:
            return True
        with suppress(client.RunNotAlive, client.CommandRefused):
            client.request(self.folder, "stop", {})
        return False


KILLS = 20


@pytest.mark.timeout(600)
@pytest.mark.fault("C1")
def test_twenty_controller_kills_stop_no_worker_and_heal_in_5_s(home: Path) -> None:
    config = config_of(home, "twenty", elastic_workers=3, train_steps=1_000_000, model_factory="tests.controller.hanging:model")
    took: list[float] = []
    watched: list[float] = []

    def torment(run: RunFolder) -> None:
        epoch = 1
        for kill in range(KILLS):
            began = time.monotonic()
            os.kill(wait_for(lambda: controller_process(), "a controller"), signal.SIGKILL)
            if kill % 5 == 4:  # kill the next one, too, while it starts
                gone = time.monotonic()
                while time.monotonic() < gone + 10 and (pid := controller_process()) is None:
                    time.sleep(0.02)
                began = time.monotonic()
                if pid is not None:
                    os.kill(pid, signal.SIGKILL)
            epoch = wait_for(lambda least=epoch: answers(run, least), "an answer")  # type: ignore[misc]
            took.append(time.monotonic() - began)
            reached = len(run.read_metrics())
            until(lambda least=reached: len(run.read_metrics()) > least, 30, "a step that the new controller writes down")  # type: ignore[misc]
            until(lambda: client.request(run, "status")["state"] == "RUNNING", 30, "a controller that watches")
            watched.append(time.monotonic() - began)

    with Sideline(config, torment):
        finished = carry_out(config)
    took.sort()
    watched.sort()
    print(f"\nanswers again after {took[len(took) // 2]:.2f} s (median), {took[-1]:.2f} s at most; watches", end="")
    print(f" the workers after {watched[len(watched) // 2]:.2f} s, {watched[-1]:.2f} s at most", end="")
    assert finished.result.state == "STOPPED", finished.result
    assert len(finished.of("controller_restarted")) >= KILLS
    assert len(finished.generations()) == 1 and len(finished.pids) == 3 and not finished.of("worker_lost", "generation_failed")
    accounting = finished.accounting()
    assert accounting.exact and accounting.replayed_steps == 0
    assert took[len(took) // 2] < 5.0 and watched[len(watched) // 2] < 6.0
    nothing_left(finished)


@pytest.mark.fault("S7")
def test_controller_killed_with_a_full_disk_loses_no_state(home: Path) -> None:
    """The controller can't write down a generation, a rescale and lines of steps. (No other process is limited in writing.)"""
    model = {"model_factory": "tests.controller.hanging:model"}
    config = config_of(home, "full", elastic_workers=3, train_steps=1_000_000, **model)
    seen: dict[str, int] = {}

    def torment(run: RunFolder) -> None:
        def now() -> dict[str, Any]:
            try:
                return client.request(run, "status", timeout_s=2.0)
            except (client.RunNotAlive, client.CommandRefused):
                return {}

        first = wait_for(lambda: controller_process(), "a controller")
        resource.prlimit(first, resource.RLIMIT_FSIZE, (0, 0))
        client.request(run, "rescale", {"workers": 2})
        seen["lines"] = len(run.read_metrics())
        until(lambda: (now().get("world"), now().get("state")) == (2, "RUNNING"), 30, "a rescale")
        seen["step"] = now()["step"]
        until(lambda: now().get("step", 0) >= seen["step"] + 10, 30, "ten steps more")
        assert len(run.read_metrics()) <= seen["lines"] + 3
        (run.path / NAME).unlink()  # as if there had never been room for it
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: answers(run, 1), "an answer")
        until(lambda: now().get("step", 0) >= seen["step"] + 30, 30, "steps that the new controller hears of")
        client.request(run, "rescale", {"workers": 3})
        until(lambda: (now().get("world"), now().get("state")) == (3, "RUNNING"), 30, "another rescale")

    with Sideline(config, torment):
        finished = carry_out(config)
    assert finished.result.state == "STOPPED", finished.result
    assert not finished.of("worker_lost", "generation_failed")
    assert [(e["from"], e["to"]) for e in finished.of("rescaled")][-1:] == [(2, 3)]
    newest = checkpoint.latest(config.checkpoint_root)
    assert newest is not None and newest.step == finished.result.step > seen["step"] + 30
    nothing_left(finished)


def wait_for(value: Callable[[], int | None], what: str, seconds: float = 60.0) -> int:
    """Wait for the first value that is not None, and return it."""
    found: list[int] = []

    def there() -> bool:
        one = value()
        if one is not None:
            found.append(one)
        return bool(found)

    until(there, seconds, what)
    return found[0]


@pytest.mark.parametrize("besides", ["", "the controller"])
@pytest.mark.fault("C5")
def test_supervisor_kill_restarts_the_run_from_its_checkpoint(besides: str, home: Path) -> None:
    """A machine's memory monitor may kill any process. A client that waits for the run need not notice."""
    model = {"model_factory": "tests.controller.hanging:model"}
    config = config_of(home, f"orphan{len(besides)}", elastic_workers=2, train_steps=1_000_000, checkpoint_every=10, **model)
    seen: dict[str, float] = {}

    def strike(run: RunFolder) -> None:
        until(lambda: any(e["event"] == "checkpoint_saved" for e in run.read_events()), 60, "a checkpoint")
        if not besides:
            client.request(run, "rescale", {"workers": 1})
            until(lambda: run.read_metrics()[-1]["world"] == 1, 60, "a worker less")
        victims = processes(b"ray::Supervisor") + (processes(CONTROLLER) if besides else [])
        seen["step"], seen["killed"] = len(run.read_metrics()), time.time()
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        until(lambda: len([e for e in run.read_events() if e["event"] == "run_started"]) == 2, 60, "another beginning")
        until(lambda: len(run.read_metrics()) > seen["step"] + 20, 60, "steps beyond those before")
        until(lambda: run.read_metrics()[-1]["world"] == (2 if besides else 1), 60, "what was asked for is still wanted")
        seen["on"] = time.time()

    with Sideline(config, strike):
        finished = carry_out(config)
    print(f"\nbeyond the step before {seen['on'] - seen['killed']:.1f} s after the supervisor{besides and ' and '}{besides} died", end="")
    assert finished.result.state == "STOPPED" and finished.result.exit_code == 0, finished.result
    (warning,) = finished.result.warnings
    assert "begun anew from step" in warning and ("supervisor" in warning or "controller" in warning)
    assert finished.accounting().exact
    nothing_left(finished)


@pytest.mark.fault("C5")
def test_repeated_supervisor_kills_end_a_run_that_can_resume(home: Path) -> None:
    model = {"model_factory": "tests.controller.hanging:model", "elastic_max_recoveries_without_progress": 1}
    config = config_of(home, "supervisor", elastic_workers=2, train_steps=100_000, checkpoint_every=10, **model)
    ended: list[float] = []

    def strike(run: RunFolder) -> None:
        until(lambda: any(e["event"] == "checkpoint_saved" for e in run.read_events()), 60, "a checkpoint")
        killed: list[int] = []
        for _ in range(2):
            killed.append(wait_for(lambda: next((p for p in processes(b"ray::Supervisor") if p not in killed), None), "a supervisor"))
            ended.append(time.time())
            os.kill(killed[-1], signal.SIGKILL)

    with Sideline(config, strike):
        finished = carry_out(config)
    assert finished.result.state == "FAILED" and "supervisor" in str(finished.result.error), finished.result
    assert finished.of("run_failed")[0]["time"] - ended[0] < 15
    nothing_left(finished)
    newest = checkpoint.latest(config.checkpoint_root)
    assert newest is not None and finished.result.checkpoint == newest.path
    resumed = carry_out(config, Act(newest.step + 15, "stop"))
    assert resumed.result.state == "STOPPED" and resumed.accounting().exact
    nothing_left(resumed)
