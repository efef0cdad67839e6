"""Polling interval for another rank's answer: long enough for the store, short enough not to delay a save."""

from __future__ import annotations


def pause_after(waited_s: float) -> float:
    """Return the seconds until the next poll after ``waited_s``: 5% of it, within 1 to 250 ms, so that the answer is noticed at most 5%
    late."""
    return min(0.25, max(0.001, 0.05 * waited_s))
