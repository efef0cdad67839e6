"""What is wanted of the run: commands from outside and scheduled actions, as the conductor's loop takes them in.

Commands arrive in the HTTP server's threads and from the driver; they are carried out by the conductor's thread alone, between two
rounds of its loop, so that nothing but this queue is shared.
"""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from vescale_ray.config import RunConfig
from vescale_ray.controller import policy
from vescale_ray.controller.crew import Crew
from vescale_ray.controller.ledger import Ledger
from vescale_ray.controller.memo import Memo
from vescale_ray.controller.protocol import RequestRefused, RunSpec

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


class Desk:
    """Wishes, and how far they are known.

    Args:
        memo: what an earlier life of the controller left.
        changed: called in the conductor's thread when something here must be written down.

    Attributes:
        stop: why the run is to be stopped; None: it is not.
        target: workers wanted.
        asked: what the last rescale asked for; 0: none has come.
        reason: why the number differs from what there is: ``manual``, ``replacement``, ``drain`` or ``growth``.
        actions: scheduled actions that were done.
    """

    def __init__(self, spec: RunSpec, config: RunConfig, crew: Crew, ledger: Ledger, memo: Memo, changed: Callable[[], None]) -> None:
        self._spec, self._config, self._crew, self._ledger, self._changed = spec, config, crew, ledger, changed
        self._commands: queue.Queue[_Command] = queue.Queue()
        self._door = threading.Lock()
        self._closed = False
        self.stop: str | None = memo.stop
        self.target = memo.target or config.elastic.workers
        self.asked = memo.asked
        self.reason = memo.reason
        self.actions = memo.actions
        ledger.target = self.target

    @property
    def ceiling(self) -> int:
        """Most workers that a run which grows by itself (``elastic.grow``) goes for."""
        return self.asked or self._config.max_workers

    def command(self, action: str, body: dict[str, Any], wait_s: float = ANSWER_S) -> dict[str, Any]:
        """Carry a command to the loop and its answer back; from any thread.

        Raises:
            RequestRefused: it can't be done, or the loop did not come to it within ``wait_s``: then it never is.
        """
        given = _Command(action, body)
        with self._door:
            if not self._closed:
                self._commands.put(given)
            else:
                given.answer.put(self._too_late(action))
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
            self._closed = True
        for given in self._come_in():
            given.answer.put(self._too_late(given.action))

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
        self.target = self._ledger.target = workers
        self.reason = reason
        self._changed()

    def _too_late(self, action: str) -> dict[str, Any] | RequestRefused:
        if action == "stop":
            return {"ok": True, "message": f"the run is over, at step {self._ledger.step}"}
        return RequestRefused(f"the run is over, at step {self._ledger.step}: {action} comes too late")

    def _do(self, action: str, body: dict[str, Any]) -> dict[str, Any]:
        if action == "stop":
            self.stop = self.stop or str(body.get("reason") or "asked to")
            self._changed()
            return {"ok": True, "message": f"stopping at the next step boundary after step {self._ledger.step}"}
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
            self.asked = workers
            self.want(workers, "manual")
            and_later = f"; the run grows by itself up to {workers}" if config.elastic.grow else ""
            return {"ok": True, "workers": workers, "message": f"going to {workers} workers{and_later}"}
        raise RequestRefused(f"unknown command {action}: there are stop and rescale")

    def _act(self) -> None:
        """Scheduled actions, each once its step is completed and the one before has had its effect."""
        while self.actions < len(self._spec.schedule):
            action = self._spec.schedule[self.actions]
            world = self._ledger.world
            if world is None or self._ledger.step < action.step or self._ledger.shift is not None:
                return
            # Noted first: a controller that dies of what it does must not do it again.
            self.actions += 1
            self._changed()
            self._ledger.event("scheduled_action", action=action.action, value=action.value, at=action.step)
            try:
                if action.action in ("kill", "pause"):
                    worker = world.members[action.value]
                    self._crew.signal(worker, signal.SIGKILL if action.action == "kill" else signal.SIGSTOP)
                else:
                    self._do(action.action, {"workers": action.value, "reason": "schedule"})
            except (RequestRefused, IndexError, KeyError) as error:
                self._ledger.event("scheduled_action_failed", action=action.action, error=str(error))
