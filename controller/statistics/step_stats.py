"""Executed steps: the line that metrics.jsonl holds of each, and their statistics."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from vescale_ray.controller.failures.hang import PERIOD
from vescale_ray.controller.state.snapshot import Histogram
from vescale_ray.controller.statistics.worker_stats import WorkerStats
from vescale_ray.data.loss_units import bits_per_byte
from vescale_ray.workers.messages import Stepped

SO_FAR, EACH, LEAST = "so_far", 256, 2048
"""Every ``EACH`` steps, a line carries the totals so far, as ``SO_FAR``. A replay begins at such a line, and reads at least the newest
``LEAST`` lines, which it needs one by one. All lines of a month with 1,000 ranks would be 24 GB."""
HEALTH = ("nonfinite", "clipped", "skipped")
"""Counted steps: with a loss or a gradient that is not finite, with a clipped gradient, without an optimizer step."""

NEWEST = {
    **{name: name for name in ("loss", "bpb", "tokens_per_second", "grad_norm")},
    "flops_utilization": "model_flops_utilization",
    "learning_rate": "lr",
    "last_step_time": "time",
}
"""Fields of the snapshot from the newest line, and their names there."""


def line_of(item: Stepped, seconds: float, tokens_per_step: int, bytes_per_token: float | None, workers: WorkerStats) -> dict[str, Any]:
    """Return the line of a step, from the report of the first member and the statistics of all ``workers``.

    Args:
        seconds: duration of the step, without the member's wait for others before it. The line's phases leave that wait out, too.
    """
    record = item.record
    speed = record.tokens / seconds if seconds > 0 else None
    phases = {**item.usage.phases, **{name: item.between[name] for name in ("checkpoint",) if name in item.between}}
    waited = record.seconds - seconds
    for name in ("comm", "forward_backward"):  # on an accelerator the wait is in forward_backward
        if name in phases:
            phases[name], waited = max(0.0, phases[name] - waited), max(0.0, waited - phases[name])
    return {
        "step": record.step,
        "loss": record.loss,
        **({"bpb": bits_per_byte(record.loss, bytes_per_token)} if bytes_per_token else {}),
        "tokens": record.step * tokens_per_step,
        "tokens_per_second": speed,
        "model_flops_utilization": workers.utilisation(speed),
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
        "waited_seconds": workers.mean_waited(),
        "waited_of_seconds": workers.mean_seconds(),
        "memory": dict(enumerate(record.memory)),
        "memory_kinds": workers.largest_memory(),
        **({"data": told} if (told := workers.loading()) else {}),
    }


@dataclass
class StepStats:
    """Statistics of the executed steps.

    Attributes:
        before: steps that an earlier start of the run had completed.
        executed: steps ever executed, replayed ones included.
        highest: largest number of steps that were complete at a time.
        replayed: steps of ``before`` that were done again.
        last: the line of the newest step, without its mappings, such as values by rank.
        recent: step, end time, loss, workers and seconds of each of the newest :data:`LEAST` lines.
    """

    before: int = 0
    executed: int = 0
    highest: int = 0
    replayed: int = 0
    seconds: Histogram = Histogram()
    phases: dict[str, float] = field(default_factory=dict)
    health: dict[str, int] = field(default_factory=lambda: dict.fromkeys(HEALTH, 0))
    last: dict[str, Any] = field(default_factory=dict)
    recent: deque[tuple[int, float, float | None, int, float]] = field(default_factory=lambda: deque(maxlen=LEAST))

    def count(self, line: Mapping[str, Any]) -> bool:
        """Count the line of a step, and return whether the step had been done before."""
        step, bad = int(line["step"]), [line.get(key) for key in ("loss", "grad_norm")]
        known = step <= self.highest
        again = known or step <= self.before
        self.replayed += again and not known
        self.executed += 1
        self.highest = max(self.highest, step)
        self.seconds = self.seconds.observe(float(line.get("step_seconds") or 0.0))
        self.health["nonfinite"] += any(value is None or not math.isfinite(value) for value in bad)
        self.health["clipped"] += bool(line.get("clipped"))
        self.health["skipped"] += bool(line.get("skipped"))
        for phase, seconds in (line.get("phase_seconds") or {}).items():
            self.phases[phase] = self.phases.get(phase, 0.0) + float(seconds)
        self._remember(line)
        return again

    def so_far(self) -> dict[str, Any]:
        """Return the totals as values that JSON can hold."""
        return {
            "executed": self.executed,
            "highest": self.highest,
            "replayed": self.replayed,
            "seconds": {"counts": list(self.seconds.counts), "sum": self.seconds.sum},
            "phases": dict(self.phases),
            "health": dict(self.health),
        }

    def resume(self, line: Mapping[str, Any]) -> None:
        """Take the totals that a line carries, itself included.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: the totals are of another form; nothing is changed.
        """
        told = line[SO_FAR]
        seconds = Histogram(tuple(int(count) for count in told["seconds"]["counts"]), float(told["seconds"]["sum"]))
        if len(seconds.counts) != len(Histogram().counts):
            raise ValueError("the totals have other buckets")
        phases = {str(phase): float(spent) for phase, spent in told["phases"].items()}
        health = {name: int(told["health"][name]) for name in HEALTH}
        self.executed, self.highest, self.replayed = (int(told[name]) for name in ("executed", "highest", "replayed"))
        self.seconds, self.phases, self.health = seconds, phases, health
        self._remember(line)

    def _remember(self, line: Mapping[str, Any]) -> None:
        loss, seconds = line.get("loss"), float(line.get("step_seconds") or 0.0)
        told = (None if loss is None else float(loss), int(line.get("world") or 0), seconds)
        self.recent.append((int(line["step"]), float(line["time"]), *told))
        self.last = {key: value for key, value in line.items() if not isinstance(value, Mapping)}

    def ended(self, step: int) -> float | None:
        """Return the time at which ``step`` steps were complete; None if that is not one of the recent steps."""
        return next((ended for one, ended, *_ in reversed(self.recent) if one == step), None)

    def _newest(self, key: str) -> Any:
        """Return a figure of the newest line. A line holds null for a figure that is not finite."""
        value = self.last.get(key)
        return math.nan if value is None and key in ("loss", "bpb", "grad_norm") and key in self.last else value

    def loss(self, step: int) -> float | None:
        """Return the loss of a recent step."""
        return next((loss for one, _, loss, *_ in reversed(self.recent) if one == step), None)

    @property
    def last_seconds(self) -> float | None:
        """Seconds of the newest step."""
        seconds = self.last.get("step_seconds")
        return None if seconds is None else float(seconds)

    @property
    def paces(self) -> tuple[tuple[int, float], ...]:
        """Workers and seconds of the last :data:`~vescale_ray.controller.failures.hang.PERIOD` steps."""
        newest = islice(reversed(self.recent), PERIOD)
        return tuple((world, seconds) for *_, world, seconds in newest)[::-1]

    @property
    def longest(self) -> float:
        """Seconds of the longest step in :attr:`paces`. Some steps do extra work (roots of a preconditioner, say). 0.0 before any."""
        return max((seconds for _, seconds in self.paces), default=0.0)

    def figures(self) -> dict[str, Any]:
        """Return the fields of the snapshot."""
        return {
            "steps_executed": self.executed,
            "step_seconds": self.seconds,
            "phase_seconds": dict(self.phases),
            **{f"{name}_steps": count for name, count in self.health.items()},
            **{name: self._newest(key) for name, key in NEWEST.items()},
        }
