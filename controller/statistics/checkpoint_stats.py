"""Statistics of checkpoints: committed, read, and failed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vescale_ray.controller.checkpointing.committer import SaveResult
from vescale_ray.controller.state.snapshot import STAGES, Histogram

FIGURES = "step time path bytes read_bytes failures load_failures loads stall interval interval_text".split()
"""Statistics with a field in the snapshot, which is named ``checkpoint_`` and this."""
REMEMBERED = 1024
"""Newest checkpoints whose steps' end times are kept. A run goes back to one of the newest."""


def saved_event(result: SaveResult, ended: float | None) -> tuple[str, dict[str, Any]]:
    """Return the name and fields of the event of a checkpoint that was committed or has failed; ``ended``: when its step was complete."""
    if result.kept is None:
        return "checkpoint_failed", {"error": result.error, "step": result.step}
    spent = {"seconds": result.seconds, "stall_seconds": result.stall_s, "stages": dict(result.stages)}
    return "checkpoint_saved", {"path": result.kept.path, **spent, "bytes": result.bytes, "step": result.step, "step_ended": ended}


@dataclass
class CheckpointStats:
    """Checkpoints of this start of the run.

    Attributes:
        step, path: step and path of the newest committed checkpoint; at first, of the checkpoint that the run began from.
        time, seconds, stall: commit time of the newest, its duration, and the time for which training waited for it. None if this
            start of the run has committed none.
        failures, load_failures: attempts that were not committed; generations that could not read their checkpoint.
        loaded_by: newest generation that has read one.
        interval, interval_text: seconds chosen by ``checkpoint.every: auto``, as a number and as a text with the reason.
        bytes, read_bytes: bytes ever committed and read.
        ended: end time of the step of each of the newest checkpoints, by step.
    """

    step: int | None = None
    path: str | None = None
    time: float | None = None
    seconds: float | None = None
    stall: float | None = None
    failures: int = 0
    load_failures: int = 0
    loaded_by: int = 0
    interval: float | None = None
    interval_text: str | None = None
    bytes: int = 0
    read_bytes: int = 0
    ended: dict[int, float] = field(default_factory=dict)
    stages: dict[str, Histogram] = field(default_factory=lambda: dict.fromkeys(STAGES, Histogram()))
    loads: Histogram = Histogram()

    def on_checkpoint_saved(self, event: Mapping[str, Any]) -> None:
        self.step, self.path, self.time = int(event["step"]), str(event["path"]), float(event["time"])
        self.seconds, self.stall = float(event["seconds"]), float(event["stall_seconds"])
        self.bytes += int(event["bytes"])
        for stage, seconds in event["stages"].items():
            self.stages[stage] = self.stages[stage].observe(float(seconds))
        if event.get("step_ended") is not None:
            self.ended[self.step] = float(event["step_ended"])
            if len(self.ended) > REMEMBERED:
                del self.ended[next(iter(self.ended))]

    def on_checkpoint_loaded(self, event: Mapping[str, Any]) -> None:
        self.loads = self.loads.observe(float(event["seconds"]))
        self.read_bytes += int(event["bytes"])
        self.loaded_by = int(event["generation"])

    def on_checkpoint_failed(self, event: Mapping[str, Any]) -> None:
        self.failures += 1

    def on_checkpoint_load_failed(self, event: Mapping[str, Any]) -> None:
        self.load_failures += 1

    def on_checkpoint_interval(self, event: Mapping[str, Any]) -> None:
        self.interval, self.interval_text = float(event["seconds"]), str(event["text"])

    def figures(self) -> dict[str, Any]:
        """Return the fields about checkpoints of the run's :class:`~vescale_ray.controller.state.snapshot.Snapshot`, by name."""
        found = {f"checkpoint_{name}": getattr(self, name) for name in FIGURES}
        return {**found, "checkpoint_stages": dict(self.stages)}
