"""Commands from outside, scheduled actions, and the target state that follows from them.

Commands arrive in the HTTP server's threads and from the driver. The controller's thread carries them out in the rounds of the control
loop, so the threads share only the command queue.
"""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from vescale_ray.config import RunConfig
from vescale_ray.controller import policy
from vescale_ray.controller.protocol import RequestRefused, RunSpec
from vescale_ray.controller.state.run_log import RunLog
from vescale_ray.controller.state.state_store import StateWriter
from vescale_ray.controller.worker_group.worker_group import WorkerGroup

ANSWER_S = 8.0
"""Longest wait for the loop to begin a command. A client (``client.request``) waits a little longer for the answer."""
DONE_S = 1.0
"""Longest wait for a command that the loop has begun. It takes milliseconds."""


@dataclass(frozen=True)
class _Command:
    action: str
    body: dict[str, Any]
    answer: Future[dict[str, Any]] = field(default_factory=Future)
    """Its sender cancels it if the loop has not begun it in time."""


class Commands:
    """The commands of a run, and the target state that they have set.

    Args:
        durable: this class maintains its fields ``stop_reason``, ``target``, ``requested``, ``reason`` and ``actions_done``.

    Attributes:
        stop: why the run is to end; None if it is not to end.
    """

    def __init__(self, spec: RunSpec, config: RunConfig, worker_group: WorkerGroup, log: RunLog, durable: StateWriter) -> None:
        self._spec, self._config, self._worker_group, self._log, self._durable = spec, config, worker_group, log, durable
        self._commands: queue.Queue[_Command] = queue.Queue()
        self._lock = threading.Lock()
        self._judged = len(log.evaluated_before)
        """Evaluations that have been judged for ``train.early_stop``."""
        self._over_at: int | None = None
        """Completed steps when the run ended; None before."""
        self.stop = durable.state.stop_reason
        durable.note(target=durable.state.target or config.elastic.workers)

    @property
    def target(self) -> int:
        """Number of workers wanted."""
        return self._durable.state.target

    def command(self, action: str, body: dict[str, Any], wait_s: float = ANSWER_S) -> dict[str, Any]:
        """Have the control loop carry out a command, and return its answer. Any thread may call this.

        Raises:
            RequestRefused: the command can't be carried out, takes long, or was not begun within ``wait_s`` and never will be.
        """
        given = _Command(action, body)
        with self._lock:
            if self._over_at is not None:
                return _too_late(action, self._over_at)
            self._commands.put(given)
        try:
            return given.answer.result(wait_s)
        except TimeoutError:
            if given.answer.cancel():
                raise RequestRefused(f"the controller did not begin {action} within {wait_s:.1f} s, and dropped it; try again") from None
        try:
            return given.answer.result(DONE_S)
        except TimeoutError:
            raise RequestRefused(f"the controller is still busy with {action}; `vescale-ray status` shows its result") from None

    def carry_out(self) -> None:
        """Carry out the commands that have arrived, the scheduled actions that are due, and an early stop."""
        self._answer_all(lambda given: self._do(given.action, given.body))
        self._act()
        self._stop_early()

    def close(self) -> None:
        """Close the queue, because the control loop has ended. Pending and later commands get an answer at once."""
        with self._lock:
            self._over_at = at = self._log.stats.step
        self._answer_all(lambda given: _too_late(given.action, at))

    def _answer_all(self, answer: Callable[[_Command], dict[str, Any]]) -> None:
        """Answer the commands in the queue whose senders are still waiting."""
        while True:
            try:
                given = self._commands.get_nowait()
            except queue.Empty:
                return
            if given.answer.set_running_or_notify_cancel():
                try:
                    given.answer.set_result(answer(given))
                except RequestRefused as refusal:
                    given.answer.set_exception(refusal)

    def want(self, workers: int, reason: str) -> None:
        """Change the number of workers wanted."""
        self._durable.update(target=workers, reason=reason)

    def end(self, reason: str, *, durable: bool = True) -> None:
        """Stop the run. The first reason stays. Unless ``durable``, a restarted controller does not know of the stop."""
        self.stop = self.stop or reason
        if durable:
            self._durable.note(stop_reason=self.stop)

    def _do(self, action: str, body: dict[str, Any]) -> dict[str, Any]:
        if action == "stop":
            self.end(str(body.get("reason") or "asked to"))
            self._durable.update()
            return {"ok": True, "message": f"stopping at the next step boundary after step {self._log.stats.step}"}
        if action == "rescale":
            if self.stop:
                raise RequestRefused("the run is stopping")
            config = self._config
            workers = policy.check_rescale(
                body.get("workers"),
                fewest=config.elastic.min_workers,
                most=config.max_workers,
                slots=config.train.slots,
                capacity=self._spec.capacity,
                whole=config.whole,
                key=config.step_of_workers[0],
            )
            self._durable.note(requested=workers)
            self.want(workers, "manual")
            and_later = f"; the run grows by itself up to {workers}" if config.elastic.grow else ""
            return {"ok": True, "workers": workers, "message": f"going to {workers} workers{and_later}"}
        raise RequestRefused(f"unknown command {action}: give stop or rescale")

    def _act(self) -> None:
        """Carry out each scheduled action once its step is completed and the action before has taken effect."""
        while (done := self._durable.state.actions_done) < len(self._spec.schedule):
            action = self._spec.schedule[done]
            stats = self._log.stats
            if not stats.members or stats.step < action.step or stats.rescale is not None:
                return
            # Noted first: if the action kills this controller, the next one must not repeat it.
            self._durable.update(actions_done=done + 1)
            self._log.record("scheduled_action", action=action.action, value=action.value, at=action.step)
            try:
                if action.action in ("kill", "pause"):
                    self._worker_group.signal(stats.members[action.value], signal.SIGKILL if action.action == "kill" else signal.SIGSTOP)
                else:
                    self._do(action.action, {"workers": action.value, "reason": "schedule"})
            except (RequestRefused, IndexError, KeyError) as error:
                self._log.record("scheduled_action_failed", action=action.action, error=str(error))

    def _stop_early(self) -> None:
        """Stop the run if the newest evaluation is the last that ``train.early_stop`` allows without an improvement."""
        rule, known = self._config.train.early_stop, {**self._log.evaluated_before, **self._log.stats.evaluations}
        if rule is None or len(known) <= self._judged:
            return
        self._judged = len(known)
        name = rule.metric.removesuffix("_loss")
        losses = [(step, known[step][name].get("loss")) for step in sorted(known) if name in known[step]]
        best = policy.best_evaluation(losses, rule.min_delta)
        worse = len(losses) - 1 - best
        if worse >= rule.patience and not self.stop and self._log.stats.step < self._config.train.steps:
            step, loss = losses[best]
            than = "finite" if loss is None else f"better than that of step {step} ({loss:.4f})"
            self._do("stop", {"reason": f"early stop: no {rule.metric} of the last {worse} evaluations is {than}"})


def _too_late(action: str, step: int) -> dict[str, Any]:
    if action == "stop":
        return {"ok": True, "message": f"the run is over, at step {step}"}
    raise RequestRefused(f"the run is over, at step {step}: {action} comes too late")
