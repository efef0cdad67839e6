"""Changes of the world: one under way, and those that were completed, counted."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from vescale_ray.controller.figures import Histogram
from vescale_ray.controller.protocol import World
from vescale_ray.workers.messages import Filled


@dataclass
class Shift:
    """A change of the world under way: from its first sign to the first step after it. JSON-able.

    Attributes:
        reason: ``failure``, ``manual``, ``replacement``, ``drain``, ``straggler``.
        before: workers that trained before.
        generation: theirs; the change is over with the first step of a later one.
        step: completed steps before it.
        noticed: seconds since the epoch.
        phases: seconds spent in each: detect, fence, plan, form, build, sync.
    """

    reason: str
    before: int
    generation: int
    step: int
    noticed: float
    phases: dict[str, float] = field(default_factory=dict)

    def spend(self, phase: str, seconds: float) -> None:
        self.phases[phase] = self.phases.get(phase, 0.0) + max(0.0, seconds)

    def story(self, world: World, filled: Collection[Filled], pause: float) -> dict[str, Any]:
        """The event of its end.

        Args:
            world: that trains now.
            filled: what its members have told of taking up their state.
            pause: seconds without training.
        """
        for phase in ("form", "build", "sync"):
            # The members work side by side: the slowest counts.
            self.spend(phase, max((item.phases.get(phase, 0.0) for item in filled), default=0.0))
        one = next(iter(filled), None)
        return {
            "from": self.before,
            "to": world.size,
            "direction": "shrink" if world.size < self.before else "grow" if world.size > self.before else "replace",
            "reason": self.reason,
            "source": "peer" if world.source.copies else str(world.source.origin),
            "pause_seconds": pause,
            "phases": self.phases,
            "steps_replayed": max(0, self.step - world.source.step),
            "moved_bytes": one.moved_bytes if one else 0,
            "lower_bound_bytes": one.lower_bound if one else 0,
            "attempt": world.ticket.attempt,
        }


class Shifts:
    """Those that were completed."""

    def __init__(self) -> None:
        self._rescales: dict[tuple[str, str], int] = {}
        self._seconds = Histogram()
        self._phases: dict[str, float] = {}
        self.replayed = 0
        """Steps that were done again after one of them."""

    def count(self, about: Mapping[str, Any]) -> None:
        """One more, told of as :meth:`Shift.story` does: now, or before a restart of the controller."""
        key = (str(about["direction"]), str(about["reason"]))
        self._rescales[key] = self._rescales.get(key, 0) + 1
        self._seconds = self._seconds.observe(float(about["pause_seconds"]))
        for phase, seconds in about["phases"].items():
            self._phases[phase] = self._phases.get(phase, 0.0) + float(seconds)
        self.replayed += int(about["steps_replayed"])

    def figures(self, replayed: int) -> dict[str, Any]:
        """In the words of the snapshot; with so many steps that were ``replayed`` besides."""
        return {
            "rescales": dict(self._rescales),
            "rescale_seconds": self._seconds,
            "rescale_phase_seconds": dict(self._phases),
            "replayed_steps": self.replayed + replayed,
        }
