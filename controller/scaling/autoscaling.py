"""The policy for a run that grows by itself, keeps spares, and asks Ray's autoscaler for places (*requests*).

Free places go to spares first, then to members. They must have been free for ``elastic.grow_after_s`` seconds
(:mod:`~vescale_ray.controller.scaling.capacity`). A growth begins once the last one is over and ``elastic.grow_gap_s`` seconds have passed
since the last one began; each failed growth in a row doubles the gap. One growth takes all places that are steady by then, so that it costs
one rescale.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from vescale_ray.config import ElasticSection
from vescale_ray.controller import policy
from vescale_ray.controller.protocol import Event
from vescale_ray.controller.scaling.capacity import Free, FreePlaces

SETTLE_S = 1.0
"""Seconds after a hiring in which no place counts as free, because Ray takes a moment to count a place as taken."""
REQUEST_AHEAD_S = 120.0
"""The run asks for a place this many seconds before it may grow, because a node takes a minute or two to start."""
PLACE_S = 10.0
"""If a worker has no place after this many seconds, though one was free, another job has taken it and the run stops waiting."""
SPARE_GAP_S, LONGEST_SPARE_GAP_S = 5.0, 600.0


@dataclass(frozen=True)
class RunProgress:
    """Present progress and size of the run.

    Attributes:
        world: number of members.
        ready, warming: numbers of warm and of starting workers outside the generation.
        target: number of workers wanted.
        ceiling: number of workers that the run may grow to.
        step_s: seconds of the last step.
        warm_s: seconds until a hired worker is warm.
    """

    world: int
    ready: int
    warming: int
    target: int
    ceiling: int
    steps_left: int
    step_s: float | None
    warm_s: float


class Autoscaling:
    """Decides when the run grows, and which places to ask for. ``now`` is in seconds of a monotonic clock.

    ``whole`` returns how many of a number of workers can train together (:meth:`vescale_ray.config.RunConfig.whole`).
    """

    def __init__(self, elastic: ElasticSection, whole: Callable[[int], int] = int) -> None:
        self._elastic, self._capacity, self._whole = elastic, FreePlaces(elastic.grow_after_s), whole
        self._begun: float | None = None
        """Start of the last growth."""
        self._aim: int | None = None
        """Number of workers after the growth under way."""
        self._failed = 0
        """Number of growths in a row that failed."""
        self._hired = 0.0
        self._told: tuple[float | None, int] | None = None

    def places_to_request(self, run: RunProgress, now: float) -> int:
        """Return the number of places to ask for. A place that stays unused costs money and keeps other jobs from it."""
        wanted = self._elastic.demand if _worth(run) and self._wait(now) <= REQUEST_AHEAD_S else 0
        return min(wanted, max(0, run.ceiling - run.target))

    def look(self, free: Free | None, requests: Collection[str | None], avoid: Collection[str]) -> None:
        """Note the ``free`` places, and the nodes of the ``requests`` that were granted."""
        if free is not None:
            places = dict(free.places)
            for node in requests:
                if node is not None and node not in avoid:
                    places[node] = places.get(node, 0) + 1
            self._capacity.look(free.at, places, free.nodes)

    def grow(self, run: RunProgress, now: float) -> tuple[int | None, list[Event]]:
        """Return the number of workers to grow to, or None, and the events to record.

        The run grows once places have been free for long enough.
        """
        if not self._elastic.grow or run.target > run.world:
            return None, []
        # If a joiner brings down its first generation, the target is lowered. That growth has failed, too.
        self.ended(complete=self._aim is not None and run.world >= self._aim)
        capacity = self._capacity.ripe(now) - max(0, self._elastic.spares - run.ready - run.warming)
        workers = self._whole(run.target + min(run.ceiling - run.target, capacity)) - run.target
        if workers <= 0 or run.warming:
            return None, []
        if (wait := self._wait(now)) > 0:
            told, self._told = self._told, (self._begun, self._failed)
            why = f"{self._failed} growths in a row failed" if self._failed else "elastic.grow_gap_s has not passed"
            return None, [] if told == self._told else [Event("growth_waits", {"workers": workers, "seconds": wait, "why": why})]
        if not _worth(run):
            return None, []
        self._begun, self._aim = now, run.target + workers
        return self._aim, [Event("growth", {"from": run.world, "to": self._aim, "room": capacity})]

    def ended(self, *, complete: bool) -> None:
        """Note the end of the growth under way, if any. ``complete``: whether the run has the workers that were wanted."""
        if self._aim is not None:
            self._aim = None
            self._failed = 0 if complete else self._failed + 1

    def hired(self, now: float) -> None:
        """Note that a worker takes a place now."""
        self._hired = now

    def spare_places(self, failures: int, now: float) -> int:
        """Return the number of places that spares could have now. After ``failures`` to get a spare warm, it is 0 for a time that doubles
        with each failure."""
        if failures and now < self._hired + min(SPARE_GAP_S * 2.0 ** min(failures, 30), LONGEST_SPARE_GAP_S):
            return 0
        return self._capacity.now(now, self._hired + SETTLE_S)

    def _wait(self, now: float) -> float:
        return policy.growth_wait(self._begun, now, self._elastic.grow_gap_s, self._failed)


def _worth(run: RunProgress) -> bool:
    return policy.worth_growing(run.steps_left, run.step_s, run.warm_s)
