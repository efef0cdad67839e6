"""How often to ask for what another rank will say: seldom enough for the store, often enough that a save is not longer for it."""

from __future__ import annotations


def pause_after(waited_s: float) -> float:
    """Seconds until the next question, after ``waited_s``: a twentieth, so that the answer is heard at most 5 % late; 1 to 250 ms."""
    return min(0.25, max(0.001, 0.05 * waited_s))
