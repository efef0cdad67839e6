"""Commands from outside and scheduled actions, and the wishes that follow from them.

Commands arrive in the HTTP server's threads and from the driver. The controller's thread carries them out between two rounds of the control
loop, so that only this queue is shared.
"""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from vescale_ray.config import RunConfig
from vescale_ray.controller import policy
from vescale_ray.controller.protocol import RequestRefused, RunSpec
from vescale_ray.controller.state.durable_state import StateWriter
from vescale_ray.controller.state.run_log import RunLog
from vescale_ray.controller.worker_group.worker_group import WorkerGroup

ANSWER_S = 8.0
"""A command is answered by then, whatever the controller is at: a client (``client.request``) listens a little longer."""
DONE_S = 1.0
"""It takes milliseconds once the loop has come to it."""


@dataclass
class _Command:
    action: str
    body: dict[str, Any]
    answer: queue.Queue[Any] = field(default_factory=queue.Queue)
    over: bool = False
    """The loop has come to it, or whoever gave it waits no more. Whatever is first: the door's lock guards it."""


class Commands:
    """The commands of a run, and what is wanted of it.

    Args:
        durable: the fields ``stop_reason``, ``target``, ``requested``, ``reason`` and ``actions_done`` of this state are kept here.

    Attributes:
        stop: why the run is to end; None: it is not.
    """

    def __init__(self, spec: RunSpec, config: RunConfig, worker_group: WorkerGroup, log: RunLog, durable: StateWriter) -> None:
        self._spec, self._config, self._worker_group, self._log, self._durable = spec, config, worker_group, log, durable
        self._commands: queue.Queue[_Command] = queue.Queue()
        self._door = threading.Lock()
        self._over_at: int | None = None
        """Completed steps of a run that is over."""
        self.stop = durable.state.stop_reason
        durable.note(target=durable.state.target or config.elastic.workers)

    @property
    def target(self) -> int:
        """Workers that are wanted."""
        return self._durable.state.target

    @property
    def reason(self) -> str:
        """Why :attr:`target` differs from the number of workers."""
        return self._durable.state.reason

    @property
    def ceiling(self) -> int:
        """Most workers that a run which grows by itself (``elastic.grow``) goes for."""
        return self._durable.state.requested or self._config.max_workers

    def command(self, action: str, body: dict[str, Any], wait_s: float = ANSWER_S) -> dict[str, Any]:
        """Carry a command to the loop and its answer back; from any thread.

        Raises:
            RequestRefused: it can't be done, or the loop did not come to it within ``wait_s``: then it never is.
        """
        given = _Command(action, body)
        with self._door:
            if self._over_at is None:
                self._commands.put(given)
            else:
                given.answer.put(_too_late(action, self._over_at))
        try:
            value = given.answer.get(timeout=wait_s)
        except queue.Empty:
            if not self._over(given):
                raise RequestRefused(f"the controller did not come to {action} within {wait_s:.1f} s, and will not; try again") from None
            try:
                value = given.answer.get(timeout=DONE_S)
            except queue.Empty:
                raise RequestRefused(f"the controller is at {action}, and takes long; `vescale-ray status` tells what came of it") from None
        if isinstance(value, Exception):
            raise value
        return dict(value)

    def heed(self) -> None:
        """Carry out what has come in, and the scheduled actions whose step has come."""
        for given in self._come_in():
            try:
                given.answer.put(self._do(given.action, given.body))
            except RequestRefused as refusal:
                given.answer.put(refusal)
        self._act()

    def close(self) -> None:
        """The loop is over, and nobody will heed: what has come in since, and what still comes, is answered at once."""
        with self._door:
            self._over_at = at = self._log.stats.step
        for given in self._come_in():
            given.answer.put(_too_late(given.action, at))

    def _come_in(self) -> Iterator[_Command]:
        while True:
            try:
                given = self._commands.get_nowait()
            except queue.Empty:
                return
            if not self._over(given):
                yield given

    def _over(self, given: _Command) -> bool:
        """Whether it was, and from now on it is."""
        with self._door:
            was, given.over = given.over, True
            return was

    def want(self, workers: int, reason: str) -> None:
        """Go for another number of workers."""
        self._durable.update(target=workers, reason=reason)

    def explain(self, reason: str) -> None:
        """The number of workers that is wanted differs from what there is for another reason now."""
        self._durable.note(reason=reason)

    def end(self, reason: str, *, durable: bool = True) -> None:
        """Stop the run; the first reason stays. Unless ``durable``, a restarted controller does not know of it."""
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
            )
            self._durable.note(requested=workers)
            self.want(workers, "manual")
            and_later = f"; the run grows by itself up to {workers}" if config.elastic.grow else ""
            return {"ok": True, "workers": workers, "message": f"going to {workers} workers{and_later}"}
        raise RequestRefused(f"unknown command {action}: there are stop and rescale")

    def _act(self) -> None:
        """Scheduled actions, each once its step is completed and the one before has had its effect."""
        while (done := self._durable.state.actions_done) < len(self._spec.schedule):
            action = self._spec.schedule[done]
            stats = self._log.stats
            if not stats.members or stats.step < action.step or stats.rescale is not None:
                return
            # Noted first: a controller that dies of what it does must not do it again.
            self._durable.update(actions_done=done + 1)
            self._log.record("scheduled_action", action=action.action, value=action.value, at=action.step)
            try:
                if action.action in ("kill", "pause"):
                    self._worker_group.signal(stats.members[action.value], signal.SIGKILL if action.action == "kill" else signal.SIGSTOP)
                else:
                    self._do(action.action, {"workers": action.value, "reason": "schedule"})
            except (RequestRefused, IndexError, KeyError) as error:
                self._log.record("scheduled_action_failed", action=action.action, error=str(error))


def _too_late(action: str, step: int) -> dict[str, Any] | RequestRefused:
    if action == "stop":
        return {"ok": True, "message": f"the run is over, at step {step}"}
    return RequestRefused(f"the run is over, at step {step}: {action} comes too late")
