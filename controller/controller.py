"""The controller actor: starts a run's thread and HTTP server, and takes up the run after a restart.

Ray restarts the process when it dies (``max_restarts=-1``) and calls the constructor again with the same arguments. The controller then
reads the run's state from the durable state and the lines in the run's folder. The supervisor owns the workers, which train on meanwhile.

The run's thread owns all data of the run. Other threads (HTTP, Ray's calls) read the publisher's snapshot, which is immutable, and put
commands into the command queue.
"""

from __future__ import annotations

import logging
import pickle
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import wait as wait_for
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from vescale_ray.config import RunConfig, parse_config
from vescale_ray.controller.bounded_io import BoundedIO, begun
from vescale_ray.controller.checkpointing.committer import Committer, retention_of
from vescale_ray.controller.commands import ANSWER_S
from vescale_ray.controller.control_loop import ControlLoop
from vescale_ray.controller.executor import Executor
from vescale_ray.controller.failures.budget import Budget, Limits
from vescale_ray.controller.http.metrics import MetricsServer, PortInUse
from vescale_ray.controller.protocol import NAMESPACE, Bounds, Outcome, RequestRefused, RunSpec
from vescale_ray.controller.state.durable_state import DurableState
from vescale_ray.controller.state.loggers import Loggers
from vescale_ray.controller.state.publisher import Observed, Publisher
from vescale_ray.controller.state.run_lifecycle import begin, evaluated_before, outcome_of, take_up
from vescale_ray.controller.state.run_log import RunLog
from vescale_ray.controller.state.state_store import StateStore, StateWriter, read_state
from vescale_ray.controller.worker_group.worker_group import WorkerGroup
from vescale_ray.controller.worker_group.worker_news import SupervisorLost
from vescale_ray.runfolder import RunFolder

_log = logging.getLogger(__name__)

FLUSH_S = 5.0
"""Longest wait, at the end of the run, for a disk that accepts no writes."""
LOGGERS_S = 30.0
"""Longest wait, at the end of the run, for TensorBoard's files and W&B."""
LATEST_S = 10.0
"""Longest wait of a restarted controller for the checkpoints' storage."""
BEGIN_S = 5.0
"""Longest wait of a command for a controller that has just been started."""
FOLDER_S = 5.0
"""Longest wait of the constructor for the run's folder. Meanwhile the actor answers no calls."""
TELL_S = 20.0
"""If the folder could not be read for this long, the controller gives a warning."""
ASK_GAP_S = 2.0
"""Pause between two reads of a folder that gives errors."""

_T = TypeVar("_T")


class Controller:
    """Conducts a run from its construction on, in a thread of its own.

    Args:
        pickled: the :class:`RunSpec`, the driver's order. Ray keeps plain bytes with the actor, but other values in an object
            store, which may be empty after a restart.
        supervisor_name: name of the run's supervisor in :data:`NAMESPACE`; a name for the same reason.
    """

    def __init__(self, pickled: bytes, supervisor_name: str) -> None:
        self._spec: RunSpec = pickle.loads(pickled)
        try:
            supervisor = ray.get_actor(supervisor_name, NAMESPACE)
        except ValueError:
            raise SupervisorLost("the supervisor actor is gone, and the workers that it owned") from None
        self._outcome: Outcome | None = None
        self._server: MetricsServer | None = None
        self._loop: ControlLoop | None = None
        self._known, self._begun = threading.Event(), threading.Event()
        self._notices: list[str] = []
        """Warnings from before the log was up to date."""
        self._since, self._told = time.monotonic(), ""
        # If the folder's server is gone, reading may block forever. ``status`` must report that, and the workers train on meanwhile.
        self._up = begun(lambda: self._come_up(supervisor))
        if wait_for([self._up], FOLDER_S).done:
            self._up.result()

    def _come_up(self, supervisor: Any) -> None:
        """Read the run's state, start the HTTP server and start the run's thread."""
        spec = self._spec
        config = parse_config(spec.config)
        folder = RunFolder(spec.folder)
        with suppress(OSError):
            folder.clear_leftovers()  # of a controller that was killed
        store = StateStore(spec.folder, supervisor)
        earlier = state = None
        with suppress(OSError):
            earlier = read_state(spec.folder)
        # The supervisor of a new run is still starting and has no state, so it is not asked. (The call to Ray is last: it takes long.)
        if (earlier is not None and earlier.run_id == spec.run_id) or ray.get_runtime_context().was_current_actor_reconstructed:
            state = _when_told(store.newest)
        again = state is not None
        if state is None:
            # Numbers that an earlier start of the run has used are not used again.
            first = max(spec.first_generation - 1, earlier.last_number if earlier else 0)
            known = (earlier.highest_step, earlier.steps_before) if earlier else (0,)
            done = 0 if config.checkpoint.resume == "never" else max(folder.last_step(), *known)
            state = DurableState(spec.run_id, first, target=config.elastic.workers, steps_before=done)
        state = replace(state, epoch=state.epoch + 1)
        loggers = Loggers(config, Path(spec.folder), spec.run_id, state.steps_before)
        before = evaluated_before(folder, spec.source) if config.train.early_stop is not None else {}
        self._log = RunLog(folder, spec.run_id, config.train.steps, spec.source, state.steps_before, loggers, before)
        seen = Observed(state.target, Budget(Limits.of(config.elastic)))
        session = ray.get_runtime_context().get_session_name()
        self._publisher = Publisher(self._log, config, spec.driver_pid, state.epoch, seen, session)
        self._server = self._serve(config.metrics.host, state.port, config.metrics.port)
        state = replace(state, port=self._server.port)
        store.write(state)
        # The URL of a server on all interfaces has this node's address. A server on the loopback is reached only there.
        url = self._server.url(ray.util.get_node_ip_address() if config.metrics.host in ("0.0.0.0", "::") else None)
        self._publisher.serve_at(url)

        def announce() -> None:
            folder.write_control(url, spec.token)
            folder.write_discovery(url)

        try:
            BoundedIO().do(announce)
        except OSError as error:
            _log.warning("control.json or the service discovery could not be written: %s", error)
        if not again:
            begin(self._log, config, state, spec.driver_pid)
            self._known.set()
        what = (supervisor, config, store, state, again)
        self._thread = threading.Thread(target=self._run_loop, args=what, name="vescale-control-loop", daemon=True)
        self._thread.start()

    def status(self) -> dict[str, Any]:
        """Return the state of the run: the snapshot as plain values, ``outcome`` once the run is over, and ``processes``: (process id,
        start time, node) of every worker that was ever warm. Until the run's folder has been read, ``waits`` is True and there is no
        snapshot."""
        if not self._known.is_set():
            problem = self._up.exception() if self._up.done() else None
            if problem is not None and ray.get_runtime_context().was_current_actor_reconstructed:
                raise problem
            if problem is not None:  # the constructor would have raised it, but ended before it occurred
                text = f"the controller can't start: {type(problem).__name__}: {' '.join(str(problem).split())}"
                return {"outcome": asdict(Outcome("FAILED", 0, text, refused=True)), "warnings": ()}
            return {"outcome": None, "waits": True, "warnings": self._waiting()}
        outcome = self._outcome  # read first: if there is an outcome, the snapshot read after it is the last one
        snapshot = self._publisher.snapshot
        return {
            **snapshot.to_json(),
            "processes": snapshot.processes,
            "url": snapshot.control_url,
            "warnings": snapshot.warnings,
            "record": snapshot.record,
            "outcome": asdict(outcome) if outcome else None,
        }

    def command(self, action: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """``stop`` or ``rescale``, as over HTTP.

        Raises:
            RequestRefused: with one line.
        """
        return self._take(action, dict(body))

    def final_scrape(self) -> tuple[float, int]:
        """Return, after the run, the seconds until every regular client should have scraped once more (0: there is none), and 1 if all
        have, else 0."""
        return self._server.scrapes.final_scrape(time.monotonic()) if self._server is not None else (0.0, 0)

    def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()

    def _waiting(self) -> tuple[str, ...]:
        """Return a warning if the run's folder has been unreadable for long, else nothing."""
        if time.monotonic() - self._since < TELL_S:
            return ()
        if not self._told:
            self._told = (
                f"{self._spec.folder}: could not be read by the controller, which was just started; until it is, the workers train on, "
                f"but no controller watches them and no checkpoint is completed"
            )
            _log.warning("%s", self._told)
        return (self._told,)

    def _run_loop(self, supervisor: Any, config: RunConfig, store: StateStore, state: DurableState, again: bool) -> None:
        """Run the control loop, in the run's thread.

        Another thread looks up the newest checkpoint, because that imports torch, which takes seconds. Meanwhile a restarted controller
        watches the workers and takes commands."""
        spec, log, publisher = self._spec, self._log, self._publisher
        committer: Committer | None = None

        def conduct() -> Outcome:
            nonlocal committer
            if again:
                try:
                    publisher.publish(_when_told(lambda: take_up(log, config, state, spec.driver_pid)))
                finally:
                    self._known.set()
            for text in (*self._notices, self._told):
                if text:
                    log.journal.warn(text)
            done = begun(lambda: _committed_attempt(spec.run_id, config.checkpoint_root)) if again else None
            committer = Committer(
                config.checkpoint_root, lambda: retention_of(config), self._meta, done, max(Bounds.save, spec.bounds.save)
            )
            worker_group = WorkerGroup(
                supervisor, spec.bounds.call, state.epoch, vacate=config.elastic.standby > 0 and config.elastic.replace_lost
            )
            self._loop = ControlLoop(Executor(spec, config, worker_group, log, publisher, committer, StateWriter(state, store)))
            self._begun.set()
            return self._loop.run()

        outcome = outcome_of(conduct, log, publisher)
        if committer is not None:
            committer.close()
        log.close(LOGGERS_S, FLUSH_S)
        publisher.publish(replace(publisher.seen, over=True))  # one more scrape sees how the run ended
        self._outcome = outcome

    def _take(self, action: str, body: dict[str, Any]) -> dict[str, Any]:
        began = time.monotonic()
        if not self._begun.wait(BEGIN_S):
            raise RequestRefused(f"the controller has just been started and takes no commands yet; try {action} again")
        assert self._loop is not None
        return self._loop.commands.command(action, body, began + ANSWER_S - time.monotonic())

    def _serve(self, host: str, remembered: int, wanted: int) -> MetricsServer:
        """Start the HTTP server, if possible on the port that the run had before the restart, so that clients find it there.

        If another process has the port, the server takes any free port, with a warning.
        """

        def listen(port: int) -> MetricsServer:
            return MetricsServer(host, port, lambda: self._publisher.snapshot, self._take, self._spec.token, self._known)

        if remembered and not wanted:
            try:
                return listen(remembered)
            except PortInUse:
                pass
        try:
            return listen(wanted)
        except PortInUse:
            server = listen(0)
            self._notices.append(
                f"metrics.port = {wanted}: in use on {host}; metrics and commands are served on port {server.port} instead"
            )
            return server

    def _meta(self, step: int) -> dict[str, Any]:
        """Return the data that is recorded with a checkpoint."""
        return {
            "run": self._spec.config["run"]["name"],
            "run_id": self._spec.run_id,
            "config": dict(self._spec.config),
            "stream": dict(self._spec.stream),
            "metrics": self._log.stats.metrics_of(step),
        }


def _when_told(question: Callable[[], _T]) -> _T:
    """Repeat ``question`` until the supervisor or the folder has answered. Otherwise a controller would take its run for a new one."""
    told = False
    while True:
        try:
            return question()
        except OSError as error:
            if not told:
                told = True
                _log.warning("the earlier controller's state can't be read, and is asked for again: %s", error)
        time.sleep(ASK_GAP_S)


def _committed_attempt(run_id: str, root: str) -> str | None:
    """Return the newest attempt that this run has committed, for a restarted controller. None also if the store does not answer: repeated
    votes for that attempt then make the same commit."""
    from vescale_ray import checkpoint

    try:
        newest = BoundedIO().do(lambda: checkpoint.latest(root), LATEST_S)
    except Exception as error:
        _log.warning("%s can't be listed: %s", root, error)
        return None
    return newest.attempt if newest is not None and newest.attempt.startswith(run_id) else None


def actor_of(spec: RunSpec, supervisor_name: str, node: str) -> Any:
    """Start a run's controller on ``node``, where the run's folder is, and return its handle."""
    return (
        ray.remote(Controller)
        .options(
            name=controller_name(spec.run_id),
            namespace=NAMESPACE,
            num_cpus=0,
            max_restarts=-1,
            max_task_retries=0,
            max_concurrency=8,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        )
        .remote(pickle.dumps(spec), supervisor_name)
    )


def controller_name(run_id: str) -> str:
    """Return the name of the run's controller in Ray, in :data:`NAMESPACE`."""
    return f"controller:{run_id}"
