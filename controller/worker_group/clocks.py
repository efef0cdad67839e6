"""Time as the controller counts it: a clock that stands still while its owner does not look at it, and moments that outlive a process.

Only a process that listened can tell how long another one has been silent. A controller that was stopped itself (its machine was suspended,
or it waited for a call) later finds old questions, and answers that it has not read yet. By a wall clock, every worker would have been
silent for all of that time.
"""

from __future__ import annotations

import time
from collections.abc import Callable

GAP_S = 0.6
"""Most that passes between two looks: the controller's loop looks several times as often."""


def to_epoch(moment: float, now: float) -> float:
    """A moment of a clock that shows ``now``, in seconds since the epoch: what such a clock shows is worth nothing on another machine."""
    return time.time() + moment - now


def ago(moment: float, now: float) -> float:
    """The reverse of :func:`to_epoch` for what has been: no later than ``now``, though machines' clocks differ."""
    return now - max(0.0, time.time() - moment)


class AwakeClock:
    """``clock()``: seconds since it was made, at most ``gap_s`` of them for each look. For one thread's use."""

    def __init__(self, now: Callable[[], float] = time.monotonic, gap_s: float = GAP_S) -> None:
        self._now, self._gap_s = now, gap_s
        self._seen, self._passed = now(), 0.0

    def __call__(self) -> float:
        now = self._now()
        self._passed += min(now - self._seen, self._gap_s)
        self._seen = now
        return self._passed
