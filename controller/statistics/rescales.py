"""Rescales: the one under way, and the statistics of those that were completed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from vescale_ray.controller.protocol import World
from vescale_ray.controller.state.snapshot import Histogram
from vescale_ray.workers.messages import Filled


@dataclass(frozen=True)
class Rescale:
    """A rescale under way: from its first sign to the first step after it.

    Attributes:
        reason: one of ``snapshot.REASONS``.
        before: workers that trained before.
        generation: their generation; the rescale ends with the first step of a later one.
        step: completed steps before it.
        noticed: when it began, in seconds since the epoch.
        phases: seconds spent in each of ``snapshot.RESCALE_PHASES`` so far.
    """

    reason: str
    before: int
    generation: int
    step: int
    noticed: float
    phases: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, event: Mapping[str, Any]) -> Rescale:
        """Return the rescale that a ``rescale_started`` event begins."""
        about = (str(event["reason"]), int(event["from"]), int(event["generation"]), int(event["step"]), float(event["time"]))
        return cls(*about).spent(event.get("phases") or {})

    def spent(self, phases: Mapping[str, float]) -> Rescale:
        """Return a copy of this rescale, with seconds added to some phases."""
        total = {phase: self.phases.get(phase, 0.0) + max(0.0, float(seconds)) for phase, seconds in phases.items()}
        return replace(self, phases={**self.phases, **total})

    def outcome(self, world: World, filled: Collection[Filled], pause: float) -> dict[str, Any]:
        """Return the fields of the ``rescaled`` event.

        Args:
            world: the generation that trains now.
            filled: its members' reports of taking up their state. They do so in parallel, so the slowest counts.
            pause: seconds without training.
        """
        members = {phase: max((item.phases.get(phase, 0.0) for item in filled), default=0.0) for phase in ("form", "build", "sync")}
        one = next(iter(filled), None)
        return {
            "from": self.before,
            "to": world.size,
            "direction": "shrink" if world.size < self.before else "grow" if world.size > self.before else "replace",
            "reason": self.reason,
            "source": world.source.lender or str(world.source.origin),
            "pause_seconds": pause,
            "phases": self.spent(members).phases,
            "steps_replayed": max(0, self.step - world.source.step),
            "moved_bytes": one.moved_bytes if one else 0,
            "lower_bound_bytes": one.lower_bound if one else 0,
            "attempt": world.ticket.attempt,
        }


@dataclass
class RescaleStats:
    """Completed rescales: count by (direction, reason), pauses, seconds by phase, and steps that were done again after them."""

    counts: dict[tuple[str, str], int] = field(default_factory=dict)
    pauses: Histogram = Histogram()
    phases: dict[str, float] = field(default_factory=dict)
    replayed: int = 0

    def on_rescaled(self, event: Mapping[str, Any]) -> None:
        key = (str(event["direction"]), str(event["reason"]))
        self.counts[key] = self.counts.get(key, 0) + 1
        self.pauses = self.pauses.observe(float(event["pause_seconds"]))
        for phase, seconds in event["phases"].items():
            self.phases[phase] = self.phases.get(phase, 0.0) + float(seconds)
        self.replayed += int(event["steps_replayed"])

    def figures(self) -> dict[str, Any]:
        """Return the fields of the snapshot."""
        return {"rescales": dict(self.counts), "rescale_seconds": self.pauses, "rescale_phase_seconds": dict(self.phases)}
