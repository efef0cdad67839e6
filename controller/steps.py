"""Steps that were done: the line of each, and what is counted of them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from vescale_ray.controller.figures import Histogram
from vescale_ray.controller.hang import PERIOD
from vescale_ray.controller.tally import Tally
from vescale_ray.data.units import bits_per_byte
from vescale_ray.workers.messages import Stepped

KEPT = 20_000
"""Of the newest steps, at least, it is known when they ended and what their loss was."""
SO_FAR, EACH, LEAST = "so_far", 256, 2048
"""Each so many steps a line tells what was counted until then, itself included: whoever counts anew begins there, with so many lines to
come at the least, of which it has to know each. All of a month with a thousand ranks are 24 GB."""
HEALTH = ("nonfinite", "clipped", "skipped")
"""Steps that are counted: with a loss or a gradient that is no number, with a gradient that was clipped, that the optimizer left out."""


def line_of(item: Stepped, seconds: float, tokens_per_step: int, tally: Tally) -> dict[str, Any]:
    """What metrics.jsonl holds of a step: of the member that was the first to tell of it, and ``tally`` of all.

    Args:
        seconds: how long it took; what the member had waited before is no part of its phases, either.
    """
    record = item.record
    speed = record.tokens / seconds if seconds > 0 else None
    phases = {**item.usage.phases, **{name: item.between[name] for name in ("checkpoint",) if name in item.between}}
    waited = record.seconds - seconds
    for name in ("comm", "forward_backward"):  # the second, where it is a device that waits
        if name in phases:
            phases[name], waited = max(0.0, phases[name] - waited), max(0.0, waited - phases[name])
    return {
        "step": record.step,
        "loss": record.loss,
        "bpb": bits_per_byte(record.loss),
        "tokens": record.step * tokens_per_step,
        "tokens_per_second": speed,
        "model_flops_utilization": tally.utilisation(speed),
        "world": record.world,
        "generation": record.generation,
        "lr": record.lr,
        "grad_norm": record.grad_norm,
        "clipped": record.clipped,
        "skipped": record.skipped,
        "step_seconds": seconds,
        "between_seconds": dict(item.between),
        "time": item.ended,
        "phase_seconds": {name: round(seconds, 6) for name, seconds in phases.items()},
        "waited_seconds": tally.mean_waited(),
        "waited_of_seconds": tally.mean_seconds(),
        "memory": dict(enumerate(record.memory)),
        "memory_kinds": tally.largest_memory(),
    }


class Steps:
    """Fed with the lines of steps: now, and again after a restart of the controller.

    Attributes:
        executed: steps ever done, replayed ones included.
        highest: the most steps that were complete at a time.
        ended: of the newest steps, when; seconds since the epoch.
        longest: seconds that the longest of the last :data:`~vescale_ray.controller.hang.PERIOD` took; 0.0 before any.
    """

    def __init__(self) -> None:
        self.executed = self.highest = 0
        self.ended: dict[int, float] = {}
        self._losses: dict[int, float] = {}
        self._seconds = Histogram()
        self._recent: deque[tuple[int, float]] = deque(maxlen=PERIOD)
        self._phases: dict[str, float] = {}
        self._health = dict.fromkeys(HEALTH, 0)

    def count(self, line: Mapping[str, Any]) -> None:
        """One more."""
        self._note(line)
        self.executed += 1
        self.highest = max(self.highest, int(line["step"]))
        self._seconds = self._seconds.observe(float(line.get("step_seconds") or 0.0))
        bad = [line.get(key) for key in ("loss", "grad_norm")]
        self._health["nonfinite"] += any(value is None or not math.isfinite(value) for value in bad)
        self._health["clipped"] += bool(line.get("clipped"))
        self._health["skipped"] += bool(line.get("skipped"))
        for phase, seconds in (line.get("phase_seconds") or {}).items():
            self._phases[phase] = self._phases.get(phase, 0.0) + float(seconds)

    def so_far(self) -> dict[str, Any]:
        """All that was counted."""
        return {
            "executed": self.executed,
            "highest": self.highest,
            "seconds": {"counts": self._seconds.counts, "sum": self._seconds.sum},
            "phases": self._phases,
            "health": self._health,
        }

    def go_on(self, line: Mapping[str, Any]) -> None:
        """From a line on that has :data:`SO_FAR`.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: it is not what was written there; nothing is changed.
        """
        told = line[SO_FAR]
        seconds = Histogram(tuple(int(count) for count in told["seconds"]["counts"]), float(told["seconds"]["sum"]))
        if len(seconds.counts) != len(Histogram().counts):
            raise ValueError("it was counted in other buckets")
        phases = {str(phase): float(spent) for phase, spent in told["phases"].items()}
        health = {name: int(told["health"][name]) for name in HEALTH}
        self.executed, self.highest = int(told["executed"]), int(told["highest"])
        self._seconds, self._phases, self._health = seconds, phases, health
        self._note(line)

    def _note(self, line: Mapping[str, Any]) -> None:
        """What is known of the newest steps alone."""
        step = int(line["step"])
        self._recent.append((int(line.get("world") or 0), float(line.get("step_seconds") or 0.0)))
        self.ended[step] = float(line["time"])
        if line.get("loss") is not None:
            self._losses[step] = float(line["loss"])
        for kept in (self.ended, self._losses):
            if len(kept) > 2 * KEPT:
                for old in sorted(kept)[:KEPT]:
                    del kept[old]

    @property
    def longest(self) -> float:
        return max((seconds for _, seconds in self._recent), default=0.0)

    @property
    def recent(self) -> tuple[tuple[int, float], ...]:
        """Workers and seconds of the last :data:`~vescale_ray.controller.hang.PERIOD` steps."""
        return tuple(self._recent)

    def loss(self, step: int) -> float | None:
        """Of the newest steps."""
        return self._losses.get(step)

    def figures(self) -> dict[str, Any]:
        """In the words of the snapshot."""
        return {
            "steps_executed": self.executed,
            "step_seconds": self._seconds,
            "phase_seconds": dict(self._phases),
            **{f"{name}_steps": count for name, count in self._health.items()},
        }
