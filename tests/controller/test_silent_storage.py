"""A run folder or checkpoint storage that hangs, is slow or is full: nothing waits for it, and lines are written once."""

from __future__ import annotations

import errno
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.controller.recorded import Recorded, answered, generation, recorded, saved, stepped
from tests.controller.runs import tiny, until
from tests.controller.test_durable_state import Keeper, begun_again
from vescale_ray import checkpoint
from vescale_ray.controller import controller
from vescale_ray.controller.bounded_io import BoundedIO
from vescale_ray.controller.checkpointing import coordinator
from vescale_ray.controller.checkpointing.committer import SaveResult
from vescale_ray.controller.driver import driver
from vescale_ray.controller.failures.budget import Budget, Limits
from vescale_ray.controller.policy import CommittedCheckpoint
from vescale_ray.controller.protocol import Bounds, StateSource
from vescale_ray.controller.state.durable_state import DurableState
from vescale_ray.controller.state.publisher import Observed
from vescale_ray.controller.state.state_store import StateStore, read_state
from vescale_ray.controller.statistics.checkpoint_stats import CheckpointStats
from vescale_ray.runfolder import RunFolder
from vescale_ray.workers.messages import Origin


class Hung:
    """A disk that does not answer: a write blocks until :meth:`back`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tell_s: float = 0.0) -> None:
        self._back = threading.Event()
        monkeypatch.setattr("vescale_ray.controller.bounded_io.PATIENCE_S", 0.4)
        monkeypatch.setattr("vescale_ray.controller.state.journal.TELL_S", tell_s)
        for owner, name in ((RunFolder, "_append"), (RunFolder, "_replace")):
            monkeypatch.setattr(owner, name, self._stands_still(getattr(owner, name)))

    def _stands_still(self, write: Callable[..., None]) -> Callable[..., None]:
        def stand(*about: Any, **how: Any) -> None:
            assert self._back.wait(30)
            write(*about, **how)

        return stand

    def back(self) -> None:
        self._back.set()


@pytest.mark.fault("S3")
def test_hung_disk_blocks_nothing_and_lines_are_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the loop blocks while the run folder's server is gone, hung and dead workers go unnoticed."""
    disk, config = Hung(monkeypatch), tiny(tmp_path, "hung")
    run = Recorded(config)
    first = generation(1, 0, "a", origin=Origin.FRESH)
    began = time.monotonic()
    run.open(first)
    assert all(run.stepped(stepped(first, i, 1.0 + i)) for i in range(50))
    run.write_record()
    assert run.log.journal.report(run.folder.write_hang, "generation-1", "where all stood") is None
    assert time.monotonic() - began < 1.5 and run.stats.step == 50
    (warning,) = run.log.journal.warnings
    assert "can't be written (the disk does not answer); training goes on, lines wait in memory" in warning
    disk.back()
    until(lambda: bool(run.write_record() or run.folder.read_state()), 10, "the disk")
    run.log.journal.flush(5.0)
    assert run.stepped(stepped(first, 50, 60.0))
    assert [line["step"] for line in run.folder.read_all_metrics()] == list(range(1, 52))
    assert [line["step"] for line in run.folder.each_samples()] == list(range(51))
    assert [event["event"] for event in run.folder.read_events()] == ["generation", "warning"]


def test_slow_disk_causes_no_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy shared disk takes seconds for a line. Users can do nothing about that, so a warning would be noise."""
    disk, config = Hung(monkeypatch, tell_s=30.0), tiny(tmp_path, "slow")
    run = Recorded(config)
    first = generation(1, 0, "a", origin=Origin.FRESH)
    run.open(first)
    assert run.stepped(stepped(first, 0, 1.0))
    assert run.folder.read_all_metrics() == []
    disk.back()
    run.log.journal.flush(10.0)
    assert run.stepped(stepped(first, 1, 2.0)) and run.log.journal.warnings == ()
    assert [line["step"] for line in run.folder.read_all_metrics()] == [1, 2]


def test_late_write_is_not_repeated_after_another_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a line of samples is there twice, its samples count as used twice."""
    monkeypatch.setattr("vescale_ray.controller.bounded_io.PATIENCE_S", 0.3)
    bounded_io, back, done = BoundedIO(), threading.Event(), []

    def line() -> str:
        done.append("line")
        assert back.wait(30)
        return "written"

    for _ in range(3):
        with pytest.raises(OSError, match="does not answer"):
            bounded_io.do(line)
    with pytest.raises(TimeoutError):
        bounded_io.do(lambda: done.append("not begun"))
    back.set()
    until(lambda: bounded_io._late is not None and bounded_io._late[0].done(), 10, "the disk")
    bounded_io.do(lambda: done.append("report"))
    assert bounded_io.do(line) == "written" and done == ["line", "report"]
    with pytest.raises(ZeroDivisionError):
        bounded_io.do(lambda: 1 // 0)


def test_late_line_is_not_repeated_after_other_late_writes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The disk is back, but slow. The reports of a hang are written next, and their results are not asked for."""
    monkeypatch.setattr("vescale_ray.controller.bounded_io.PATIENCE_S", 0.1)
    bounded_io, done = BoundedIO(), []

    def line() -> None:
        done.append("line")
        assert back.wait(30)

    def report(number: int) -> None:
        assert back.wait(30)
        done.append(f"report {number}")

    writes: list[Callable[[], None]] = [line, *(partial(report, number) for number in range(4))]
    for write in writes:
        back = threading.Event()
        with pytest.raises(TimeoutError):
            bounded_io.do(write)
        back.set()
        until(lambda: bounded_io._late is not None and bounded_io._late[0].done(), 10, "the disk")
    bounded_io.do(line)
    assert done == ["line", *(f"report {number}" for number in range(4))]


def test_a_process_ends_though_a_disk_does_not_answer() -> None:
    """At its end, the interpreter would wait for the threads of a pool, in this case for ever."""
    program = (
        "import threading, vescale_ray.controller.bounded_io as bounded_io\n"
        "bounded_io.PATIENCE_S = 0.3\n"
        "try:\n    bounded_io.BoundedIO().do(threading.Event().wait)\n"
        "except TimeoutError:\n    print('goes on')\n"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, check=True).stdout == b"goes on\n"


@pytest.mark.parametrize("comes_back", [False, True])
@pytest.mark.fault("S3")
def test_run_with_hung_disk_shuts_down_and_writes_its_end_later(comes_back: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shutdown that waits for the disk would end no worker and take no signal."""
    monkeypatch.setattr("vescale_ray.controller.bounded_io.PATIENCE_S", 0.3)
    monkeypatch.setattr(driver, "LAST_WORDS_S", 30.0 if comes_back else 0.3)
    back, ended, config = threading.Event(), [], tiny(tmp_path, "hung")
    folder = RunFolder(config.run_folder).create()
    monkeypatch.setattr(folder, "clear_discovery", lambda: back.wait(60))
    about: Any = SimpleNamespace(config=config)
    attempt = driver._Attempt(about, folder, (), Bounds(), driver._Signals(), None, ())

    def end() -> list[int]:
        ended.append("cluster")
        if comes_back:
            back.set()
        return []

    attempt._cluster = SimpleNamespace(close=end)  # type: ignore[assignment]
    monkeypatch.setattr(attempt, "_end_actors", lambda: ended.append("actors"))
    attempt.close()
    assert ended == ["actors", "cluster"]
    assert (folder.read_state() or {}).get("state") == ("FAILED" if comes_back else None)
    back.set()


@pytest.mark.fault("S6")
def test_silent_storage_counts_as_out_of_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the run's thread waits for silent storage, the run can be neither given up nor stopped. A minute would be too long: the request
    of `vescale-ray stop` times out before."""
    back = threading.Event()
    newest = CommittedCheckpoint("commit-4", "/runs/checkpoints/commit-4", 30)
    monkeypatch.setattr(coordinator, "newest_kept", lambda *_: newest if back.wait(60) else None)
    monkeypatch.setattr(coordinator, "STORAGE_S", 1.5)
    monkeypatch.setattr("vescale_ray.controller.bounded_io.PATIENCE_S", 0.3)
    known = CheckpointStats(20, "/runs/checkpoints/commit-3")
    log: Any = SimpleNamespace(stats=SimpleNamespace(checkpoints=known))
    nobody: Any = SimpleNamespace(alive=lambda worker: False)
    nothing: Any = None
    keeps = coordinator.CheckpointCoordinator(str(tmp_path), "r1", nobody, log, nothing, nothing, nothing, 1.0, nothing)
    rounds: list[float] = []
    assert answered(keeps.newest, lambda: rounds.append(time.monotonic())) == CommittedCheckpoint(
        "commit-3", "/runs/checkpoints/commit-3", 20
    )
    assert len(rounds) > 10, "the loop goes on meanwhile"
    monkeypatch.setattr(coordinator, "STORAGE_S", 0.8)
    with pytest.raises(OSError, match="does not answer"):
        answered(lambda: keeps.newer(["a"]))
    threading.Timer(0.3, back.set).start()
    monkeypatch.setattr(coordinator, "STORAGE_S", 60.0)
    known.path = "/stale/commit-1"
    assert answered(keeps.newest) == newest, "what it says late is heard"


@pytest.mark.fault("S3", "S7")
def test_state_is_kept_though_the_disk_hangs_or_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a new controller would give out the same generation number again."""

    def newest() -> int:
        state = StateStore(tmp_path, keeper).newest()
        return state.last_number if state is not None else 0

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    disk, keeper = Hung(monkeypatch), Keeper(monkeypatch)
    store, began = StateStore(tmp_path, keeper), time.monotonic()
    for number in (8, 9):
        store.write(DurableState("r1", number))
        assert newest() == number
    assert time.monotonic() - began < 20 and read_state(tmp_path) is None
    disk.back()
    monkeypatch.setattr(RunFolder, "_replace", full)
    store.write(DurableState("r1", 10))
    assert newest() == 10


def test_restarted_controller_does_not_wait_for_silent_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This is safe, since votes that come again make the same commit."""
    back = threading.Event()
    monkeypatch.setattr(checkpoint, "latest", lambda _: back.wait(60))
    monkeypatch.setattr(controller, "LATEST_S", 0.3)
    monkeypatch.setattr("vescale_ray.controller.bounded_io.PATIENCE_S", 0.3)
    began = time.monotonic()
    assert controller._committed_attempt("r1", str(tmp_path)) is None and time.monotonic() - began < 30
    back.set()


@pytest.mark.fault("S4")
def test_run_log_read_error_is_retried_without_double_counting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If another file can't be read after the state was, the run must not fail: its workers would be ended, and their steps lost."""
    run = recorded(tmp_path).started()
    first = generation(1, 0, "a", "b", origin=Origin.FRESH)
    run.open(first)
    for i in range(3):
        run.stepped(stepped(first, i, time.time() + i))
    run.log.record("worker_lost", worker="b", reason="its process died", kind="died", pid=None)
    saved(run, SaveResult("x", 2, 1, 0.3, error="no space"))
    run.generation.begin_rescale("failure", 2)
    run.open(second := generation(2, 2, "a"))
    run.stepped(stepped(second, 2, time.time() + 5))
    whole = RunFolder.each_metrics

    def cut(folder: RunFolder, offset: int) -> Any:
        yield next(whole(folder, offset))
        raise OSError(errno.EIO, "Input/output error")

    again = Recorded(run.config)
    with monkeypatch.context() as flaky, pytest.raises(OSError, match="Input/output"):
        flaky.setattr(RunFolder, "each_metrics", cut)
        again.log.replay()
    again.log.replay()
    assert again.stats == run.stats

    start, _ = begun_again(tmp_path, monkeypatch, conducts=True)
    taken: list[Any] = []

    def take(*what: Any) -> Any:
        taken.append(what)
        if len(taken) == 1:
            raise OSError(errno.EIO, "Input/output error")
        return Observed(2, Budget(Limits(3, 20, 20)))

    monkeypatch.setattr(controller, "take_up", take)
    monkeypatch.setattr(controller, "WorkerGroup", lambda *_, **__: 1 // 0)
    controlled = start()
    until(lambda: controlled.status()["outcome"] is not None, 10, "the end")
    assert len(taken) == 2 and controlled.status()["outcome"]["error"].startswith("ZeroDivisionError"), "and so it came past its books"
    controlled.close()


@pytest.mark.parametrize("orphaned", [False, True])
@pytest.mark.fault("S3")
def test_ended_run_does_not_wait_for_its_state_on_a_hung_disk(orphaned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the driver is left by then. It must not block, deaf to signals."""
    config, back = tiny(tmp_path, "over"), threading.Event()
    ready = SimpleNamespace(config=config, source=StateSource(Origin.FRESH, 0), oldest=0)
    result = driver.RunResult("FAILED", 7, 10, "the reason", None, RunFolder(config.run_folder).create().path)
    attempt = SimpleNamespace(run=lambda: result, close=lambda: None, orphaned=orphaned, run_id="r1")
    monkeypatch.setattr(driver, "check", lambda *_: ready)
    monkeypatch.setattr(driver, "_Attempt", lambda *_: attempt)
    monkeypatch.setattr(driver, "_was_to_stop", lambda _: back.wait(60))
    monkeypatch.setattr(driver, "LAST_WORDS_S", 0.3)
    monkeypatch.setattr("vescale_ray.controller.bounded_io.PATIENCE_S", 0.3)
    began = time.monotonic()
    error = driver.run(config).error
    back.set()
    assert time.monotonic() - began < 30
    assert error == "the reason" + orphaned * f"; and it can't begin anew: {config.run_folder} does not answer"
