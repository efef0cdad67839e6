"""The worker group's record of a worker."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from vescale_ray.controller.failures.budget import Cause
from vescale_ray.workers.messages import WorkerInfo, WorkerReport


@dataclass
class Member:
    """The record of one worker. ``report`` is its last report; ``seen`` the number of the last item taken from it."""

    worker: str
    handle: Any
    hired: float
    info: WorkerInfo | None = None
    avoid: frozenset[str] = frozenset()
    """Nodes on which it does not start."""
    report: WorkerReport | None = None
    seen: int = -1
    hello: Any = None
    lifeline: Any = None
    outline: Any = None
    outline_next: float = 0.0
    """Earliest time for the next question about the outline, after it did not know the outline."""
    poll: Any = None
    poll_sent: float = 0.0
    owes: bool = False
    """Whether it owes an answer to a poll, since ``owes_since`` by the worker group's clock. A poll that fails and is sent again changes
    neither."""
    owes_since: float = 0.0
    heard: float = field(default_factory=time.monotonic)
    """When it last answered."""
    starved_s: float = 0.0
    """Seconds since then in which its machine was too busy for it to answer (:meth:`WorkerGroup.starved`)."""
    late_s: float = 0.0
    """Seconds by which its last answer was late; lateness of earlier answers decays with time."""
    ordered: float = 0.0
    """When it was last given an order; ``told``: when it was asked for its last report."""
    told: float = 0.0
    next_poll: float = 0.0
    verdict: str | None = None
    """Why the controller is ending it, since ``sentenced``; None if it is not."""
    cause: Cause = Cause.KILLED
    sentenced: float = 0.0
    gone: bool = False
    """Whether its process ended before the controller killed it. Ray then gives the reason."""

    def pending(self) -> list[Any]:
        return [ref for ref in (self.hello, self.lifeline, self.outline, self.poll) if ref is not None]
