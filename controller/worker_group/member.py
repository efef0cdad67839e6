"""A worker as the controller knows it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from vescale_ray.controller.failures.budget import Cause
from vescale_ray.workers.messages import WorkerInfo, WorkerReport


@dataclass
class Member:
    """One worker. ``report`` is its last; ``seen`` the last item that was taken from it."""

    worker: str
    handle: Any
    hired: float
    info: WorkerInfo | None = None
    avoid: frozenset[str] = frozenset()
    """Nodes that it does not come up on."""
    report: WorkerReport | None = None
    seen: int = -1
    hello: Any = None
    lifeline: Any = None
    outline: Any = None
    outline_next: float = 0.0
    """It did not know the outline: not asked again before."""
    poll: Any = None
    poll_sent: float = 0.0
    owes: bool = False
    """An answer to a poll, since ``owes_since`` by the worker group's clock. A poll that did not reach it and is sent again changes
    nothing."""
    owes_since: float = 0.0
    heard: float = field(default_factory=time.monotonic)
    """When it last answered."""
    starved_s: float = 0.0
    """For so long since then it could not, as its machine tells: it got no processor."""
    late_s: float = 0.0
    """Seconds by which its last answer was late; lateness of earlier answers decays with time."""
    ordered: float = 0.0
    """When it was last given an order; ``told``: when it was asked for its last report."""
    told: float = 0.0
    next_poll: float = 0.0
    verdict: str | None = None
    """Why we are killing it, since ``sentenced``."""
    cause: Cause = Cause.KILLED
    sentenced: float = 0.0
    gone: bool = False
    """It had ended before it was killed: why is Ray's to say."""

    def pending(self) -> list[Any]:
        return [ref for ref in (self.hello, self.lifeline, self.outline, self.poll) if ref is not None]
