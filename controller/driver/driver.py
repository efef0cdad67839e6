"""``run(config)``: a whole run, from checks to cleanup. The process that calls it, the driver, owns everything that the run starts.

The first SIGINT or SIGTERM stops the run after a checkpoint; the second stops it at once. However the run ends, no actor, placement
group or process of it is left: this module cleans up, or a watchdog does if this process is killed (``local_ray``).
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from vescale_ray.config import RunConfig
from vescale_ray.config.given import STREAM
from vescale_ray.controller.bounded_io import BoundedIO
from vescale_ray.controller.driver.local_ray import Cluster
from vescale_ray.controller.driver.preflight import Foreseen, Preflight, check
from vescale_ray.controller.http.final_scrape import FINAL_SCRAPE_S, patience_s
from vescale_ray.controller.protocol import NAMESPACE, Bounds, Outcome, RunRefused, RunSpec, ScheduledAction
from vescale_ray.controller.statistics.goodput import Goodput
from vescale_ray.controller.worker_group.clocks import AwakeClock
from vescale_ray.errors import BadInput
from vescale_ray.runfolder import RunFolder
from vescale_ray.workers.messages import Origin

if TYPE_CHECKING:
    from vescale_ray.controller.state.durable_state import DurableState

POLL_S = 0.2
CALL_S = 5.0
CONTROLLER_GONE_S = 120.0
"""If the controller has not answered for this long, it counts as gone. A restart takes less time."""
STOP_S = 60.0
"""Longest time from a signal to the end of the run, without its checkpoint, which has its own bound. Then the run is ended."""
AGAIN_S = 2.0
"""Pause between two tries to begin the run anew while its storage does not answer."""
CLEAN_S = 5.0
LAST_WORDS_S = 30.0
"""Longest wait for the run's folder after the run has ended."""


@dataclass(frozen=True)
class RunResult:
    """The end of a run.

    Attributes:
        state: ``DONE``, ``STOPPED`` (before its last step, on request) or ``FAILED``.
        step: completed steps. A resumed run starts from them after ``STOPPED``.
        error: why it failed, one line.
        checkpoint: path of the newest checkpoint.
        interrupted: stopped by a signal: exit code 130.
        warnings: problems that did not end the run.
    """

    state: str
    step: int
    steps: int
    error: str | None
    checkpoint: str | None
    folder: Path
    interrupted: bool = False
    warnings: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """0 done or stopped as asked, 1 failed, 130 interrupted."""
        return 130 if self.interrupted else 1 if self.state == "FAILED" else 0


Progress = Callable[[Mapping[str, Any]], None]


def run(
    config: RunConfig,
    *,
    on_progress: Progress | None = None,
    schedule: Sequence[ScheduledAction] = (),
    bounds: Bounds | None = None,
    on_ready: Callable[[Preflight], None] | None = None,
    foreseen: Foreseen | None = None,
) -> RunResult:
    """Train as ``config`` says, and return when nothing of the run is left.

    Args:
        on_progress: called from this thread a few times a second with the controller's status.
        schedule: actions on the run, in the order of steps.
        bounds: time limits, for tests.
        on_ready: called with their findings once all checks before Ray's start have passed.
        foreseen: result of ``preflight.foresee`` for ``config``, if there is one already.

    Raises:
        BadInput: the input can't be used; one line, exit code 2. Raised before Ray is started where possible.
        KeyboardInterrupt: a second signal came. Everything is still cleaned up.
    """
    ready = check(config, foreseen)
    config = ready.config
    folder = RunFolder(config.run_folder)
    if not folder.config_path.is_file():
        folder.write_config(config.to_yaml())
    if ready.source.step >= config.train.steps:
        return _nothing_to_do(config, folder, ready)
    if on_ready is not None:
        on_ready(ready)
    warnings: list[str] = []
    farthest, in_a_row, asked = ready.source.step, 0, 0
    limits = bounds or Bounds.of(config)
    with _Signals() as signals:
        while True:
            _write_state(folder, {"run": config.run.name, "state": "PENDING", "step": ready.source.step, "steps": config.train.steps})
            attempt = _Attempt(ready, folder, tuple(schedule), limits, signals, on_progress, warnings)
            try:
                result = attempt.run()
            finally:
                attempt.close()
            # The workers ended with the supervisor (the machine's or Ray's memory monitor may have killed it). The run begins anew by
            # itself, as a user would resume it, unless it fails repeatedly without progress.
            in_a_row = 1 if result.step > farthest else in_a_row + 1
            farthest = max(farthest, result.step)
            if not attempt.orphaned or signals.count > 0 or in_a_row > config.elastic.max_recoveries_without_progress:
                return result
            try:
                if BoundedIO().do(lambda: _was_to_stop(folder), LAST_WORDS_S):
                    return result
            except TimeoutError:
                return replace(result, error=f"{result.error}; and it can't begin anew: {folder.path} does not answer")
            _write_state(folder, {"run": config.run.name, "state": "PENDING", "step": result.step, "steps": config.train.steps})
            try:
                ready = _checked_again(config, ready.oldest, limits.storage, signals)
            except (BadInput, OSError) as problem:
                return replace(result, error=f"{result.error}; and it can't begin anew: {problem}")
            if ready.source.origin is Origin.FRESH and result.checkpoint is not None:
                missing = f"{result.checkpoint} and those before it can't be resumed from: are they mounted? see `vescale-ray ckpt ls`"
                return replace(result, error=f"{result.error}; and it can't begin anew: {missing}")
            if ready.source.step >= config.train.steps:
                return _nothing_to_do(config, folder, ready)
            asked = _asked_for(folder, attempt.run_id) or asked
            last = [ScheduledAction(0, "rescale", asked)] if asked else []  # keeps the number of workers last asked for
            schedule = [*last, *(action for action in schedule if action.step > result.step)]
            warnings.append(f"{result.error}, at step {result.step}; the run was begun anew from step {ready.source.step}")


def _checked_again(config: RunConfig, oldest: int, patience_s: float, signals: _Signals) -> Preflight:
    """Repeat the checks for a run that begins anew by itself. If the storage has failed with the supervisor, wait for it, at most
    ``patience_s`` seconds and only until a signal stops the run.

    Raises:
        BadInput, OSError: as :func:`check`.
    """
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return check(config, oldest=oldest)
        except (BadInput, OSError) as problem:
            passes = isinstance(problem, OSError) or isinstance(problem.__context__, OSError)
            if not passes or signals.count or time.monotonic() > deadline:
                raise
        time.sleep(AGAIN_S)


class _Signals:
    """Counts SIGINT and SIGTERM while it is entered; the second raises KeyboardInterrupt. Outside of the main thread it counts none."""

    def __init__(self) -> None:
        self.count = 0
        self.name = ""
        self.since: float | None = None
        """Time of the first signal, by ``time.monotonic()``."""
        self._before: dict[int, Any] = {}
        self._held = False

    def __enter__(self) -> _Signals:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Only count further signals, so that they do not interrupt the cleanup."""
        self._held = True
        try:
            yield
        finally:
            self._held = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self.name = signal.Signals(number).name
        self.since = self.since or time.monotonic()
        if self.count > 1 and not self._held:
            raise KeyboardInterrupt


class _Lost(Exception):
    """The controller is gone and will not return; the message is one line."""


class _Attempt:
    """One start of a run: starts its processes, follows them, and takes them down."""

    def __init__(
        self,
        ready: Preflight,
        folder: RunFolder,
        schedule: tuple[ScheduledAction, ...],
        bounds: Bounds,
        signals: _Signals,
        tell: Progress | None,
        warnings: Sequence[str],
    ) -> None:
        self._ready, self._folder, self._schedule, self._bounds = ready, folder, schedule, bounds
        self._signals, self._tell = signals, tell
        self.run_id = uuid.uuid4().hex[:8]
        self._cluster: Cluster | None = None
        self._supervisor: Any = None
        self._controller: Any = None
        self._status: dict[str, Any] = {}
        self._result: RunResult | None = None
        self._warnings = list(warnings)
        self.orphaned = False
        """True if it has failed because its supervisor was lost."""

    def run(self) -> RunResult:
        """Start everything and follow it to its end."""
        config = self._ready.config
        self._cluster = cluster = Cluster(config)
        from vescale_ray.controller import controller
        from vescale_ray.controller.worker_group import supervisor

        tree = config.model_dump(mode="json")
        known = {**tree, STREAM: dict(self._ready.stream)}
        self._supervisor = supervisor.actor_of(known, self.run_id, cluster.node, NAMESPACE, config.given.pickled)
        spec = RunSpec(
            run_id=self.run_id,
            config=tree,
            folder=str(config.run_folder),
            token=secrets.token_urlsafe(24),
            source=self._ready.source,
            first_generation=self._ready.first_generation,
            oldest=self._ready.oldest,
            capacity=cluster.capacity,
            driver_pid=os.getpid(),
            stream=self._ready.stream,
            bytes_per_token=self._ready.bytes_per_token,
            schedule=self._schedule,
            bounds=self._bounds,
        )
        self._controller = controller.actor_of(spec, supervisor.supervisor_name(self.run_id), cluster.node)
        outcome = self._follow()
        self.orphaned = outcome.orphaned
        if outcome.refused and outcome.step <= self._ready.source.step:  # after a step, the run has failed instead
            raise RunRefused(outcome.error or "the run was refused")
        if outcome.state == "FAILED" and outcome.checkpoint is None:  # the checkpoint that the run began from still exists
            source = self._ready.source
            outcome = replace(outcome, step=max(outcome.step, source.step), checkpoint=source.path)
        self._result = RunResult(
            outcome.state,
            outcome.step,
            config.train.steps,
            outcome.error,
            outcome.checkpoint,
            self._folder.path,
            interrupted=self._signals.count > 0 and outcome.state == "STOPPED",
            warnings=tuple(self._warnings),
        )
        if not self.orphaned:
            with suppress(_Lost, KeyboardInterrupt):  # a second signal ends the wait, and the result stays
                self._final_scrape()
        return self._result

    def _final_scrape(self) -> None:
        """Keep the metrics server up for one final scrape. Otherwise a run that is done and one whose head is lost look alike, and a failed
        run raises no alert. The workers end first, so that accelerators do not wait for a scrape. Clients that have stopped scraping are
        not waited for. After a signal, only a job with enough time left waits
        (:func:`~vescale_ray.controller.http.final_scrape.patience_s`)."""

        def patience() -> float:
            return patience_s(self._signals.count, self._signals.since, time.monotonic(), os.environ)

        told = self._call("final_scrape")
        if not told or not told[0] or not patience():
            return
        deadline = time.monotonic() + min(told[0], FINAL_SCRAPE_S)
        self._supervisor.close.remote()
        while patience() and time.monotonic() < deadline:
            now = self._call("final_scrape")
            if now is None or now[1] > told[1]:
                return
            time.sleep(POLL_S)

    def _follow(self) -> Outcome:
        """Watch the controller until the run is over, and pass signals on to it."""
        told = 0.0
        # If the driver itself stood still (Ctrl-Z, a frozen container), it asks more than once before the controller counts as gone.
        clock = AwakeClock(time.monotonic, CALL_S + POLL_S)
        last_answer = clock()
        stop_since: float | None = None
        unread_since: float | None = None
        while True:
            try:
                status = self._call("status")
            except _Lost as lost:
                return replace(self._lost(str(lost)), orphaned=True)
            now, awake = time.monotonic(), clock()
            if status is not None:
                last_answer = awake
                self._status = {**self._status, **status}
                self._warnings += [text for text in status.get("warnings", ()) if text not in self._warnings]
                if status["outcome"] is not None:
                    return Outcome(**status["outcome"])
                unread_since = (unread_since or now) if status.get("waits") else None
                if unread_since is not None:
                    if now - unread_since > (bound := self._bounds.storage):
                        return self._lost(f"{self._folder.path}: the controller was started again, and could not read it for {bound:g} s")
                elif self._tell is not None:
                    self._tell(status)
            elif awake - last_answer > CONTROLLER_GONE_S:
                return self._lost(f"the controller has not answered for {CONTROLLER_GONE_S:g} s")
            if self._signals.count and now - told > 2.0:
                # Repeated until the run ends, because the controller may just have been restarted.
                told, stop_since = now, stop_since or now
                with suppress(_Lost):  # the next status call finds this out
                    self._call("command", "stop", {"reason": self._signals.name})
            if stop_since is not None and now - stop_since > (bound := STOP_S + self._bounds.save):
                return self._lost(f"it did not stop within {bound:g} s after {self._signals.name}")
            time.sleep(POLL_S)

    def _lost(self, error: str) -> Outcome:
        return Outcome("FAILED", int(self._status.get("step") or 0), error, self._status.get("checkpoint_path"))

    def _call(self, method: str, *args: Any) -> Any:
        """Call the controller, and return its answer; None if it does not answer."""
        import ray

        try:
            return ray.get(getattr(self._controller, method).remote(*args), timeout=CALL_S)
        except ray.exceptions.ActorDiedError as error:
            if "creation task" in str(error) or "__init__" in str(error):
                cause = str(getattr(error, "cause", None) or error).strip().splitlines()[-1]
                if self._status or "SupervisorLost" in str(error):  # the user's input is not the cause
                    raise _Lost(f"the controller can't start: {cause}") from None
                raise RunRefused(f"the controller can't start: {cause}") from None
            return None
        except (ray.exceptions.RayError, TimeoutError):
            return None

    def close(self) -> None:
        """Take everything down, in any state, and write how the run ended. A disk that does not answer can't block this."""
        error, bounded_io = sys.exc_info()[1], BoundedIO()
        with self._signals.deferred():
            with suppress(OSError):
                bounded_io.do(
                    self._folder.clear_discovery
                )  # first: otherwise Prometheus would see a run that ends in good order as a target that is down
            try:
                self._end_actors()
            finally:
                left = self._cluster.close() if self._cluster is not None else []
            if left:
                print(f"vescale-ray: processes {left} could not be ended", file=sys.stderr)
            with suppress(OSError):  # a full disk, or one that does not answer; the result says how it ended
                bounded_io.do(lambda: self._write_end(error), LAST_WORDS_S)

    def _end_actors(self) -> None:
        if self._cluster is None:
            return
        import ray

        from vescale_ray.controller.worker_group import agent, supervisor
        from vescale_ray.workers.monitoring.process import born

        if not ray.is_initialized():
            return
        actors = [actor for actor in (self._controller, self._supervisor) if actor is not None]
        closing = [actor.close.remote() for actor in actors]
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=CLEAN_S)
        for actor in actors:
            ray.kill(actor, no_restart=True)
        if self._supervisor is not None and not _succeeded(closing[-1]):
            supervisor.give_places_back(str(self._ready.config.run.name), self.run_id)
        # A killed process may not be gone yet, but readers of the final state rely on that. On other nodes Ray ends it within 5 s.
        here = [(pid, since) for pid, since, node in self._status.get("processes", ()) if node == self._cluster.node]
        deadline = time.monotonic() + CLEAN_S
        while here and time.monotonic() < deadline:
            here = [(pid, since) for pid, since in here if born(pid) == since]
            time.sleep(0.02)
        for pid, since in here:
            agent.send_signal(pid, since, signal.SIGKILL)

    def _write_end(self, error: BaseException | None) -> None:
        """Write the final state, after all processes of the run have ended."""
        self._folder.clear_control()
        self._folder.clear_leftovers()
        record = dict(self._status.get("record") or self._folder.read_state() or {})
        if self._result is not None:
            record.update(state=self._result.state, error=self._result.error, checkpoint=self._result.checkpoint)
            record["step"] = self._result.step
        elif isinstance(error, KeyboardInterrupt):
            record.update(state="STOPPED", error="interrupted a second time: no last checkpoint")
        else:
            record.update(state="FAILED", error=str(error) if error else "unknown")
        finished = time.time()
        if record.get("goodput"):
            accounts = Goodput.from_json(record["goodput"])
            accounts.close(finished)
            record["goodput"] = accounts.to_json()
        record.update(finished=finished, control_url=None, metrics_url=None, run=self._ready.config.run.name)
        self._folder.write_state(record)


def _succeeded(ref: Any) -> bool:
    """Return whether a call has been answered without an error."""
    import ray

    try:
        ray.get(ref, timeout=0)
    except ray.exceptions.RayError:
        return False
    return True


def _nothing_to_do(config: RunConfig, folder: RunFolder, ready: Preflight) -> RunResult:
    """Return the result of a run whose steps were all completed before."""
    source = ready.source
    record = {"run": config.run.name, "state": "DONE", "step": source.step, "steps": config.train.steps, "checkpoint": source.path}
    _write_state(folder, {**(folder.read_state() or {}), **record})
    return RunResult("DONE", source.step, config.train.steps, None, source.path, folder.path)


def _was_to_stop(folder: RunFolder) -> bool:
    """Return whether a stop of the run was requested, according to its last durable state."""
    state = _durable_state(folder)
    return state is not None and state.stop_reason is not None


def _asked_for(folder: RunFolder, run_id: str) -> int:
    """Return the number of workers that the last rescale command of this start asked for; 0 if there was none."""
    state = _durable_state(folder)
    return state.requested if state is not None and state.run_id == run_id else 0


def _durable_state(folder: RunFolder) -> DurableState | None:
    """Return the last controller's durable state, if the folder has it and it can be read."""
    from vescale_ray.controller.state.state_store import read_state

    try:
        return read_state(folder.path)
    except OSError:
        return None


def _write_state(folder: RunFolder, record: Mapping[str, Any]) -> None:
    try:
        folder.write_state(record)
    except OSError:
        pass  # the controller warns


__all__ = ["Bounds", "RunRefused", "RunResult", "ScheduledAction", "run"]
