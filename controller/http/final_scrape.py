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
    """Seconds for which a run that is over may still wait.

    Nobody at a terminal waits for a scrape after Ctrl-C. A job that is stopped is in nobody's way as long as its grace lasts, if that is
    told; Ray's own 3 s are too short.

    Args:
        signals: that the driver has got; ``since``: when the first came, ``now``: both of ``time.monotonic()``.
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
