"""The controller's clocks: a clock that stands still while its owner does not read it, and times that outlive a process.

A process can measure how long another one is silent only while it listens itself. A controller that was stopped (its machine was suspended,
or it waited for a call) later finds answers that it has not read. By a wall clock, every worker would have been silent all that time.
"""

from __future__ import annotations

import time
from collections.abc import Callable

GAP_S = 0.6
"""Longest time that counts between two reads. The control loop reads the clock several times as often."""


class AwakeClock:
    """A clock for one thread. ``clock()`` is the seconds since it was made, of which at most ``gap_s`` count between two reads."""

    def __init__(self, now: Callable[[], float] = time.monotonic, gap_s: float = GAP_S) -> None:
        self._now, self._gap_s = now, gap_s
        self._seen, self._passed = now(), 0.0

    def __call__(self) -> float:
        now = self._now()
        self._passed += min(now - self._seen, self._gap_s)
        self._seen = now
        return self._passed
