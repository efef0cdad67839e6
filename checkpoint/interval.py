"""Choose the checkpoint interval: the cost of checkpoints against the work that a failure loses.

Let a checkpoint every ``T`` seconds cost ``C`` seconds of training each, with a failure every ``M`` seconds on average. The share of lost
time is about ``C / T`` for saving, plus ``(T / 2 + P + R) / M`` for repeated work. The latter is half an interval, the work during the last
checkpoint's write (``P``), and the restart (``R``). ``P`` and ``R`` don't depend on ``T``. The minimum is at ``T = sqrt(2 C M)`` (Young
1974). Daly 2006 (equation 37, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation Computer
Systems 22) adds the terms that matter if ``C`` is not small against ``M``:

    T = sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + C / 2M / 9) - C      if C < 2M, otherwise T = M

``C`` is the *stall* of an asynchronous save, not its whole duration.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

PRIOR_FAILURES = 1.0
"""Weight of the prior: as much as this many failures over ``prior_mtbf_s`` of running."""


def daly_interval(cost_s: float, mtbf_s: float) -> float:
    """Best number of seconds of training between checkpoints that cost ``cost_s`` each, with a failure every ``mtbf_s`` on average."""
    if not (0 <= cost_s < math.inf and mtbf_s > 0):
        raise ValueError(f"cost_s is {cost_s}, mtbf_s is {mtbf_s}; give a cost of at least 0 and a positive time between failures")
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2 * mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


def expected_mtbf(failures: int, observed_s: float, prior_mtbf_s: float) -> float:
    """Mean time between failures. As time goes on, observations outweigh the prior.

    Failures form a Poisson process, whose rate has a gamma distribution with prior mean ``1 / prior_mtbf_s``. The posterior mean rate after
    ``failures`` in ``observed_s`` is ``(1 + failures) / (prior_mtbf_s + observed_s)``.
    """
    if not (failures >= 0 and 0 <= observed_s < math.inf and 0 < prior_mtbf_s < math.inf):
        raise ValueError(f"{failures} failures in {observed_s} s, prior {prior_mtbf_s} s; give numbers from 0 on, and a positive prior")
    return (prior_mtbf_s * PRIOR_FAILURES + observed_s) / (PRIOR_FAILURES + failures)


@dataclass(frozen=True)
class Interval:
    """A chosen interval: ``seconds`` between the starts of checkpoints, and its inputs. ``by``: the formula, or the bound that applies."""

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
    """:func:`daly_interval` within its bounds: at least ``least_s`` and the time to write a checkpoint; at most ``most_s``, unless writing
    takes longer."""
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
