"""How often to save: what checkpoints cost against what a failure loses.

With a checkpoint every ``T`` seconds of training, each costing ``C`` seconds of it, and a failure every ``M`` seconds on average, the share
of time that is lost is about ``C / T`` (saving) plus ``(T / 2 + P + R) / M`` (done again: half an interval, and what was done while the
last checkpoint was still being written, ``P``; and the restart, ``R``). ``P`` and ``R`` don't depend on ``T``. The least is at
``T = sqrt(2 C M)`` (Young 1974); Daly 2006 (equation 37, "A higher order estimate of the optimum checkpoint interval for restart
dumps", Future Generation Computer Systems 22) adds what that leaves out when ``C`` is not small against ``M``:

    T = sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + C / 2M / 9) - C      where C < 2M, else T = M

``C`` is the *stall* of an asynchronous save, not its whole duration.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

PRIOR_FAILURES = 1.0
"""What the prior weighs: as much as this many failures seen over ``prior_mtbf_s`` of running."""


def daly_interval(cost_s: float, mtbf_s: float) -> float:
    """The best seconds of training between checkpoints that cost ``cost_s`` each, with a failure every ``mtbf_s`` on average."""
    if not (0 <= cost_s < math.inf and mtbf_s > 0):
        raise ValueError(f"cost_s is {cost_s}, mtbf_s is {mtbf_s}; give a cost of at least 0 and a positive time between failures")
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2 * mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


def expected_mtbf(failures: int, observed_s: float, prior_mtbf_s: float) -> float:
    """Mean time between failures: the prior, outweighed by what is observed as time goes on.

    The failures come as a Poisson process; its rate has a gamma distribution, at first with mean ``1 / prior_mtbf_s``. Then the mean
    rate after ``failures`` in ``observed_s`` is ``(1 + failures) / (prior_mtbf_s + observed_s)``.
    """
    if not (failures >= 0 and 0 <= observed_s < math.inf and 0 < prior_mtbf_s < math.inf):
        raise ValueError(f"{failures} failures in {observed_s} s, prior {prior_mtbf_s} s; give numbers from 0 on, and a positive prior")
    return (prior_mtbf_s * PRIOR_FAILURES + observed_s) / (PRIOR_FAILURES + failures)


@dataclass(frozen=True)
class Interval:
    """A choice: ``seconds`` between the beginnings of checkpoints, and what it came from. ``by``: the formula, or the bound it is at."""

    seconds: float
    by: Literal["formula", "least", "most", "persist"]
    stall_s: float
    persist_s: float
    mtbf_s: float

    def __str__(self) -> str:
        why = {
            "formula": "",
            "least": ", held at its least",
            "most": ", held at its most",
            "persist": ", held at the time that writing one takes",
        }[self.by]
        return (
            f"{self.seconds:.0f} s{why} (a checkpoint holds up training for {self.stall_s:.3g} s and is written in {self.persist_s:.3g} s; "
            f"a failure every {self.mtbf_s / 3600:.3g} h)"
        )


def choose_interval(stall_s: float, persist_s: float, mtbf_s: float, *, least_s: float, most_s: float) -> Interval:
    """:func:`daly_interval` within its bounds: at least ``least_s``, and as long as a checkpoint takes to be written; at most
    ``most_s``, unless writing takes longer."""
    if not (0 <= least_s <= most_s and 0 <= persist_s < math.inf):
        raise ValueError(f"least_s is {least_s}, most_s {most_s}, persist_s {persist_s}; give seconds from 0 on, least_s up to most_s")
    seconds = daly_interval(stall_s, mtbf_s) + stall_s
    by: Literal["formula", "least", "most", "persist"] = "formula"
    if seconds < least_s:
        seconds, by = least_s, "least"
    if seconds > most_s:
        seconds, by = most_s, "most"
    if seconds < persist_s:
        seconds, by = persist_s, "persist"
    return Interval(seconds, by, stall_s, persist_s, mtbf_s)
