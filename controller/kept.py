"""What is counted of checkpoints: those that were written, read, and that failed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vescale_ray.controller.figures import STAGES, Histogram


class Kept:
    """Fed with the events that are written of checkpoints: now, and again after a restart of the controller.

    Attributes:
        pending: checkpoints under way.
        failures, load_failures: that could not be written or committed; generations that could not read theirs.
        loaded_by: the generation that was the last to read one.
        interval: what ``checkpoint.every: auto`` has chosen, and from what.
    """

    def __init__(self) -> None:
        self.pending = self.failures = self.load_failures = self.loaded_by = 0
        self.interval: Mapping[str, Any] = {}
        self._newest: Mapping[str, Any] = {}
        self._bytes = self._read_bytes = 0
        self._stages = dict.fromkeys(STAGES, Histogram())
        self._loads = Histogram()

    def began_from(self, path: str | None, step: int) -> None:
        """The newest until there is another. Not of this start's making: it has no time."""
        self._newest = {"path": path, "step": step}

    def saved(self, about: Mapping[str, Any]) -> None:
        """One was committed: ``path``, ``step``, ``time``, ``bytes``, ``stall_seconds``, and seconds by ``stages``."""
        self._newest = about
        self._bytes += int(about.get("bytes") or 0)
        for stage, seconds in (about.get("stages") or {}).items():
            self._stages[stage] = self._stages[stage].observe(float(seconds))

    def loaded(self, about: Mapping[str, Any]) -> None:
        """A generation has read one: ``seconds``, ``bytes``, ``generation``."""
        self._loads = self._loads.observe(float(about["seconds"]))
        self._read_bytes += int(about["bytes"])
        self.loaded_by = int(about["generation"])

    @property
    def step(self) -> int | None:
        """Of the newest that this start of the run has made, or began from."""
        step = self._newest.get("step")
        return None if step is None else int(step)

    @property
    def path(self) -> str | None:
        path = self._newest.get("path")
        return None if path is None else str(path)

    def figures(self) -> dict[str, Any]:
        """In the words of the snapshot."""
        return {
            "checkpoint_step": self._newest.get("step"),
            "checkpoint_time": self._newest.get("time"),
            "checkpoint_path": self._newest.get("path"),
            "checkpoint_bytes": self._bytes,
            "checkpoint_failures": self.failures,
            "checkpoint_read_bytes": self._read_bytes,
            "checkpoint_load_failures": self.load_failures,
            "checkpoint_stages": dict(self._stages),
            "checkpoint_loads": self._loads,
            "checkpoints_pending": self.pending,
            "checkpoint_stall": self._newest.get("stall_seconds"),
            "checkpoint_interval": self.interval.get("seconds"),
            "checkpoint_interval_text": self.interval.get("text"),
        }
