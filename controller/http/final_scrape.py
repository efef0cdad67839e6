"""The wait of an ended run for one more scrape. Without it, a run that was stopped and one whose head is lost look alike."""

from __future__ import annotations

import math
from collections.abc import Mapping

FINAL_SCRAPE_S = 30.0
"""Longest wait for a scrape after the run is over."""
RESERVE_S = 15.0
"""Part of a stopped job's time that is reserved for cleaning up."""
GRACE = "RAY_JOB_STOP_WAIT_TIME_S"
"""In a job's environment: seconds from its SIGTERM to its SIGKILL."""


def patience_s(signals: int, since: float | None, now: float, environ: Mapping[str, str]) -> float:
    """Return the seconds for which a run that is over may still wait.

    After Ctrl-C at a terminal, there is no wait. A stopped job may use its grace, less :data:`RESERVE_S`, if the environment states it
    (:data:`GRACE`). Ray's default of 3 s is too short.

    Args:
        signals: number of signals that the driver has got; ``since``: when the first came; ``now``: both by ``time.monotonic()``.
    """
    if not signals or since is None:
        return FINAL_SCRAPE_S
    try:
        grace = float(environ.get(GRACE, ""))
    except ValueError:
        return 0.0
    if signals > 1 or not math.isfinite(grace):
        return 0.0
    return min(FINAL_SCRAPE_S, max(0.0, grace - RESERVE_S - (now - since)))
