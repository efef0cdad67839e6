"""The worker group's record of a worker, and the calls to it that are under way."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from vescale_ray.controller.failures.budget import Cause
from vescale_ray.controller.worker_group.worker_news import Heard, News, Ready, Told
from vescale_ray.workers.messages import WorkerInfo, WorkerReport

POLL_WAIT_S = 0.5
"""A worker with nothing to tell answers after this long."""
POLL_GAP_S = 0.05
"""Pause between two polls of a worker. At most 20 polls a second, so that fast steps do not keep the controller busy."""
HELLO_WAIT_S = 5.0
LATE_HALF_S = 3.0
"""Half-life of a worker's lateness."""
DEATH_S = 1.0
"""A worker that was killed counts as dead after this long, whether Ray has said so or not."""
GONE_S = 3.0
"""A worker whose process had already ended counts as dead after this long. Ray may still report that its node was lost."""


@dataclass
class Member:
    """The record of one worker. Only its methods change it.

    Attributes:
        avoid: nodes on which it does not start.
        standby: it was a standby when it was hired.
        report: its last report.
        seen: number of the last item taken from it.
        outline_next: earliest time for the next question about the outline, after it did not know the outline.
        owes: whether it owes an answer to a poll, since ``owes_since`` by the worker group's clock. A poll that fails and is sent again
            changes neither.
        heard: when it last answered.
        starved_s: seconds since then in which its machine was too busy for it to answer (:meth:`WorkerGroup.starved`).
        late_s: seconds by which its last answer was late; lateness of earlier answers decays with time.
        ordered: when it was last given an order.
        told: when it was asked for its last report.
        verdict: why the controller is ending it, since ``ended_at``; None if it is not.
        gone: whether its process ended before the controller killed it. Ray then gives the reason.
    """

    worker: str
    handle: Any
    hired: float
    info: WorkerInfo | None = None
    avoid: frozenset[str] = frozenset()
    standby: bool = False
    report: WorkerReport | None = None
    seen: int = -1
    hello: Any = None
    lifeline: Any = None
    outline: Any = None
    outline_next: float = 0.0
    poll: Any = None
    poll_sent: float = 0.0
    owes: bool = False
    owes_since: float = 0.0
    heard: float = field(default_factory=time.monotonic)
    starved_s: float = 0.0
    late_s: float = 0.0
    ordered: float = 0.0
    told: float = 0.0
    next_poll: float = 0.0
    verdict: str | None = None
    cause: Cause = Cause.KILLED
    ended_at: float = 0.0
    gone: bool = False

    # ----------------------------------------------------------------------------------------------------------- calls

    def pending(self) -> list[Any]:
        """Return the calls under way."""
        return [ref for ref in (self.hello, self.lifeline, self.outline, self.poll) if ref is not None]

    def start(self, epoch: int) -> None:
        """Take the lifeline, and wait for the worker to become warm unless it is."""
        self.lifeline = self.handle.lifeline.remote(epoch)
        if self.info is None:
            self.hello = self.handle.hello.remote(HELLO_WAIT_S)

    @property
    def waits_for_poll(self) -> bool:
        """True if a poll is to be sent, at ``next_poll``."""
        return self.info is not None and self.poll is None and self.verdict is None

    def send_poll(self, now: float, awake: float) -> None:
        """Ask the worker for news. ``now``: the monotonic time; ``awake``: the time of the worker group's :class:`AwakeClock`."""
        known = (self.report.phase, self.report.ticket) if self.report else None
        self.poll, self.poll_sent = self.handle.poll.remote(self.seen, known, POLL_WAIT_S), now
        if not self.owes:
            self.owes, self.owes_since = True, awake

    def ask_outline(self) -> None:
        """Ask for the outline of the layouts."""
        self.outline = self.handle.outlined.remote()

    def give_order(self, now: float) -> None:
        """Record that the worker was given an order."""
        self.ordered = now

    # --------------------------------------------------------------------------------------------------------- answers

    def receive(self, ref: Any, value: Any) -> list[News]:
        """Take the answer to the call ``ref``, and return the news in it."""
        now = time.monotonic()
        if ref == self.hello:
            if value is None:
                self.hello = self.handle.hello.remote(HELLO_WAIT_S)
                return []
            self.hello, self.info, self.heard = None, value, now
            return [Ready(value)]
        if ref == self.poll:
            self.poll, self.next_poll, self.report, self.told = None, now + POLL_GAP_S, value, self.poll_sent
            self.late_s = max(now - self.poll_sent - POLL_WAIT_S, self.lateness(now))
            self.owes, self.heard, self.starved_s = False, now, 0.0
            if value.items:
                self.seen = max(self.seen, value.items[-1][0])
            self.seen = max(self.seen, 0)
            return [Heard(value)]
        if ref == self.outline:
            self.outline = None
            if value is None:
                self.outline_next = now + POLL_WAIT_S
            return [Told(value)]
        self.lifeline = None  # a newer controller has taken it
        return []

    def renew(self, ref: Any, epoch: int) -> None:
        """Ask again, after the network has lost the call ``ref``."""
        if ref == self.hello:
            self.hello = self.handle.hello.remote(HELLO_WAIT_S)
        elif ref == self.poll:
            self.poll, self.next_poll = None, time.monotonic() + POLL_GAP_S
        elif ref == self.outline:
            self.outline = None
        else:
            self.lifeline = self.handle.lifeline.remote(epoch)

    def lateness(self, now: float) -> float:
        """Return the seconds by which the worker's answers were late. Earlier answers count less."""
        return self.late_s * 0.5 ** ((now - self.heard) / LATE_HALF_S)

    def excuse(self, seconds: float) -> float:
        """Excuse ``seconds`` of silence since the worker's last answer. Returns how many of them were not excused before."""
        more = max(0.0, seconds - self.starved_s)
        self.starved_s += more
        return more

    # ------------------------------------------------------------------------------------------------------------- end

    def mark_ended(self, verdict: str, cause: Cause) -> None:
        """Record that the controller ends the worker."""
        self.verdict, self.cause, self.ended_at = verdict, cause, time.monotonic()

    def was_gone(self) -> None:
        """Record that the process had ended before it was killed."""
        self.gone = True

    def leave(self, verdict: str) -> None:
        """Count the worker as lost with its node, at once."""
        self.verdict, self.cause, self.gone, self.ended_at = verdict, Cause.NODE, False, time.monotonic() - DEATH_S - 1.0

    def overdue(self, now: float) -> bool:
        """Return whether the worker counts as dead without Ray's word."""
        return self.verdict is not None and now - self.ended_at > (GONE_S if self.gone else DEATH_S)
