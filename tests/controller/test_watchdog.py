"""The watchdog of a run's processes, and the driver when storage, the supervisor or the controller is gone."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.controller.runs import tiny
from vescale_ray.controller.driver import driver, watchdog
from vescale_ray.controller.protocol import Bounds, StateSource
from vescale_ray.controller.state.durable_state import DurableState
from vescale_ray.runfolder import RunFolder
from vescale_ray.workers.messages import Origin


def test_a_run_that_was_to_stop_is_not_begun_anew_by_itself(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert not driver._was_to_stop(folder)
    for stop in (None, "asked to"):
        folder.write_durable_state(DurableState("r1", 7, stop_reason=stop).to_json())
        assert driver._was_to_stop(folder) is (stop is not None)


@pytest.mark.parametrize("comes_back", [False, True])
@pytest.mark.fault("S4")
def test_driver_awaits_unreadable_run_log_for_the_storage_bound(comes_back: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, seen = RunFolder(tiny(tmp_path, "unread").run_folder).create(), []
    about: Any = None
    bounds = Bounds(storage=30.0 if comes_back else 0.3)
    attempt = driver._Attempt(about, folder, (), bounds, driver._Signals(), lambda status: seen.append(status["step"]), ())
    full = {"outcome": None, "step": 40, "checkpoint_path": "/c/commit-3", "processes": [(1, 2.0, "n")], "warnings": ()}
    done = {**full, "outcome": {"state": "DONE", "step": 60}}
    unread = {"outcome": None, "waits": True, "warnings": ("it can't be read",)}
    answers = iter([full, None, *[unread] * (5 if comes_back else 1000), None, done])
    monkeypatch.setattr(driver, "POLL_S", 0.01)
    monkeypatch.setattr(driver, "CONTROLLER_GONE_S", 5.0)
    monkeypatch.setattr(attempt, "_call", lambda *_: next(answers))
    outcome = attempt._follow()
    assert attempt._status["processes"] == full["processes"] and attempt._warnings == ["it can't be read"] and seen == [40]
    if comes_back:
        assert outcome.state == "DONE"
    else:
        assert (outcome.state, outcome.step, outcome.checkpoint) == ("FAILED", 40, "/c/commit-3")
        assert outcome.error == f"{folder.path}: the controller was started again, and could not read it for 0.3 s"


@pytest.mark.parametrize("kept", [None, "/runs/c/commits/e4-s40.json"])
def test_supervisor_loss_with_hidden_checkpoints_ends_the_run(kept: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny(tmp_path, "mislaid")
    ready = SimpleNamespace(config=config, source=StateSource(Origin.FRESH, 0), oldest=0)
    folder, lives = RunFolder(config.run_folder).create(), iter([True, False])
    result = driver.RunResult("FAILED", 47, 60, "the reason", kept, folder.path)
    monkeypatch.setattr(driver, "check", lambda *_, **__: ready)
    monkeypatch.setattr(driver, "_asked_for", lambda *_: 0)
    monkeypatch.setattr(
        driver, "_Attempt", lambda *_: SimpleNamespace(run=lambda: result, close=lambda: None, orphaned=next(lives), run_id="r1")
    )
    error = driver.run(config).error
    if kept is None:
        assert error == "the reason" and next(lives, None) is None, "it was begun anew, once"
    else:
        assert error is not None and next(lives) is False
        assert error.startswith(f"the reason; and it can't begin anew: {kept} and those before it can't be resumed from: are they mounted?")


@pytest.mark.parametrize("ends", ["comes back", "stays away", "signal", "bad input"])
def test_supervisor_loss_awaits_storage_before_the_new_start(ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the storage's server is lost with the head's network, a single try would leave the run FAILED."""
    config, now, asked = tiny(tmp_path, "away"), [0.0], list[float]()
    signals: Any = SimpleNamespace(count=0)
    ready: Any = object()
    monkeypatch.setattr(driver.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(driver.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))

    def check(config: Any, oldest: int) -> Any:
        asked.append(now[0])
        if ends == "comes back" and now[0] >= 60.0:
            return ready
        signals.count = int(ends == "signal" and now[0] >= 20.0)
        if len(asked) % 2:
            raise OSError(errno.EIO, "no answer")
        try:
            raise OSError(errno.EIO, "no answer")
        except OSError:
            raise driver.RunRefused("can't be written (no answer)") from None

    def refuse(config: Any, oldest: int) -> Any:
        asked.append(now[0])
        raise driver.RunRefused("another text")

    monkeypatch.setattr(driver, "check", refuse if ends == "bad input" else check)
    if ends == "comes back":
        assert driver._checked_again(config, 0, 600.0, signals) is ready
    else:
        with pytest.raises((OSError, driver.RunRefused)):
            driver._checked_again(config, 0, 600.0, signals)
    last = {"comes back": 60.0, "stays away": 600.0, "signal": 20.0, "bad input": 0.0}[ends]
    assert last <= asked[-1] <= last + 2 * driver.AGAIN_S


SLEEPER = "import sys, time; {}; print('up', flush=True); time.sleep(60)"


def sleeper(code: str, **more: str) -> subprocess.Popen[str]:
    environ = {**os.environ, **more}
    process = subprocess.Popen([sys.executable, "-c", SLEEPER.format(code)], env=environ, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    return process


def test_watchdog_ends_only_marked_processes_and_folder_writers(tmp_path: Path) -> None:
    folder = str(tmp_path)
    (tmp_path / "log").write_text("")
    marked = sleeper("pass", **{watchdog.MARK: folder})
    writer = sleeper(f"f = open({folder + '/log'!r}, 'a')")
    reader = sleeper(f"f = open({folder + '/log'!r})")
    other = sleeper("pass", **{watchdog.MARK: folder + "x"})
    try:
        assert set(watchdog.processes_of(folder)) == {marked.pid, writer.pid}
        assert watchdog.processes_of(folder, spare=(writer.pid,)) == [marked.pid]
        assert watchdog.end_all(folder) == []
        assert marked.wait(5) == writer.wait(5) == -9
        assert reader.poll() is None and other.poll() is None
    finally:
        for process in (marked, writer, reader, other):
            process.kill()
            process.communicate()


@pytest.mark.parametrize("word", [b"done", b""])
@pytest.mark.fault("E4")
def test_watchdog_acts_if_its_pipe_ends_without_the_done_word(tmp_path: Path, word: bytes) -> None:
    folder = tmp_path / "cluster"
    folder.mkdir()
    marked = sleeper("pass", **{watchdog.MARK: str(folder)})
    try:
        dog = subprocess.Popen([sys.executable, "-I", "-S", watchdog.__file__, str(folder)], stdin=subprocess.PIPE)
        dog.communicate(word, timeout=20)
        assert dog.returncode == 0
        assert (marked.poll() is None, folder.exists()) == ((True, True) if word else (False, False))
    finally:
        marked.kill()
        marked.communicate()


@pytest.mark.parametrize("gone", [False, True])
def test_frozen_driver_asks_again_before_it_fails_the_run(gone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a container was frozen for two minutes, its first question is not answered in time. That must not fail the run."""
    now, asked = [1000.0], list[float]()
    about: Any = SimpleNamespace(config=tiny(tmp_path, "still"), source=StateSource(Origin.FRESH, 0), oldest=0)
    attempt = driver._Attempt(about, RunFolder(tmp_path), (), Bounds(), driver._Signals(), None, ())
    monkeypatch.setattr(driver.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(driver.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    ended = {"outcome": {"state": "DONE", "step": 3}}

    def call(method: str, *what: Any) -> Any:
        asked.append(now[0])
        now[0] += 200.0 if len(asked) == 2 else driver.CALL_S if gone else 0.1
        return None if len(asked) in (2, 3) or gone else ended if len(asked) > 4 else {"outcome": None}

    monkeypatch.setattr(attempt, "_call", call)
    outcome = attempt._follow()
    assert (outcome.state == "FAILED") is gone
    assert not gone or (f"not answered for {driver.CONTROLLER_GONE_S:g} s" in str(outcome.error) and 20 < len(asked) < 30)


def test_signal_during_the_teardown_of_a_lost_start_is_kept() -> None:
    """If the signal were ignored, the run would begin anew. No signal may interrupt the teardown."""
    with driver._Signals() as signals:
        with signals.deferred():
            for _ in range(3):
                signal.raise_signal(signal.SIGTERM)
        assert signals.count == 3 and signals.name == "SIGTERM"
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
