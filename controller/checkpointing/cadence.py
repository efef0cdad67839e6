"""Decide when the next checkpoint is due with ``checkpoint.every: auto``, from the cost of the last ones and the rate of failures.

The controller decides. One rank carries the request into the next step's exchange, so that all ranks save at the same boundary.
"""

from __future__ import annotations

import logging
import statistics
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vescale_ray.checkpoint import Interval
    from vescale_ray.config import CheckpointSection
    from vescale_ray.controller.checkpointing.committer import SaveResult

_log = logging.getLogger(__name__)

REMEMBERED = 5
"""Number of checkpoints whose median costs count, so that one busy disk does not change the interval."""
NEWS = 0.1
"""Smallest relative change of the interval that is reported."""


class Cadence:
    """The interval between checkpoints, and whether the next one is due. Times are in seconds of one clock.

    Args:
        section: ``checkpoint`` of the configuration.
        now: present time. The next checkpoint is due one interval later.
        age_s: seconds since the run began. A restarted controller knows the failures of all that time.
    """

    def __init__(self, section: CheckpointSection, now: float, age_s: float = 0.0) -> None:
        self._section = section
        self.auto = section.every == "auto"
        self.interval: Interval | None = None
        self._began, self._last = now - age_s, now
        self._stalls: deque[float] = deque(maxlen=REMEMBERED)
        self._persists: deque[float] = deque(maxlen=REMEMBERED)
        self._told: Interval | None = None

    def saved(self, result: SaveResult) -> None:
        """Take the result of a checkpoint that was made during training. A failed checkpoint tells nothing about the cost."""
        if result.kept is not None and result.stall_s > 0:
            self._stalls.append(result.stall_s)
            self._persists.append(result.seconds)

    def news(self, now: float, failures: int) -> Interval | None:
        """Recompute the interval. Returns it if it differs from the last one reported, or if another bound decides it; otherwise None."""
        if not self.auto or not self._stalls:
            return None
        # Imported only after a checkpoint has ended in this process. A restarted controller imports torch in another thread, and any import
        # of torch modules blocks for seconds meanwhile.
        from vescale_ray.checkpoint import choose_interval, expected_mtbf

        c = self._section
        mtbf = expected_mtbf(failures, max(0.0, now - self._began), c.mtbf_hours * 3600)
        stall, persist = statistics.median(self._stalls), statistics.median(self._persists)
        self.interval = choose_interval(stall, persist, mtbf, least_s=c.auto_min_s, most_s=c.auto_max_s)
        told = self._told
        if told is not None and told.by == self.interval.by and abs(self.interval.seconds - told.seconds) <= NEWS * told.seconds:
            return None
        self._told = self.interval
        _log.info("checkpoint interval: %s", self.interval)
        return self.interval

    def due(self, now: float, busy: bool) -> bool:
        """Return whether a checkpoint should begin. The first one comes after the shortest interval allowed, to measure the cost."""
        if not self.auto or busy:
            return False
        return now - self._last >= (self.interval.seconds if self.interval is not None else self._section.auto_min_s)

    def begun(self, now: float) -> None:
        """Note that a checkpoint was asked for, or is made for another reason."""
        self._last = now
