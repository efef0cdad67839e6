"""A run that grows by itself, asks Ray's autoscaler for more, and keeps spares: what the steering does with the room that there is.

The room comes first to spares, then to members. It must have been there for ``elastic.grow_after_s`` (:mod:`~vescale_ray.controller.room`),
and a growth begins when the one before is over, ``elastic.grow_gap_s`` after it began; each in a row that came to nothing doubles that. All
places that are steady by then are taken at once: one rescale, not one for each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from vescale_ray.config import RunConfig
from vescale_ray.controller import policy
from vescale_ray.controller.clocks import ago, to_epoch
from vescale_ray.controller.crew import Crew
from vescale_ray.controller.desk import Desk
from vescale_ray.controller.nodes import Nodes
from vescale_ray.controller.room import Room
from vescale_ray.controller.run_log import RunLog

SETTLE_S = 1.0
"""Ray takes a moment to count a place as taken: what was seen free within this time after a hiring may be that place."""
WISH_AHEAD_S = 120.0
"""A place is wished for so long before the run could grow into it: a node takes a minute or two to come."""
PLACE_S = 10.0
"""A place that was free and is not had after so long is somebody else's: no longer waited for."""
SPARE_GAP_S, LONGEST_SPARE_GAP_S = 5.0, 600.0


class Growth:
    """Used from the conductor's thread alone.

    Args:
        past: ``note`` of an earlier life of the controller; empty: there is none.
        changed: called when there is another ``note``, which must be written down.

    Attributes:
        note: when the last growth began (seconds since the epoch), what it goes for, how many came to nothing. JSON-able.
    """

    def __init__(
        self,
        config: RunConfig,
        crew: Crew,
        log: RunLog,
        desk: Desk,
        nodes: Nodes,
        past: Mapping[str, Any],
        changed: Callable[[], None],
    ) -> None:
        self._elastic, self._steps, self._watches = config.elastic, config.train.steps, config.watches_room
        self._crew, self._log, self._desk, self._nodes = crew, log, desk, nodes
        self._room = Room(config.elastic.grow_after_s)
        begun = past.get("begun")
        self._begun = None if begun is None else ago(begun, time.monotonic())
        self._aim: int | None = past.get("aim")
        self._failed: int = past.get("failed", 0)
        self.note, self._changed = past, changed
        self._hired = 0.0
        self._told: tuple[float | None, int] | None = None

    def tend(self, world: int, ready: int, warming: int, avoid: Collection[str]) -> None:
        """Look at the room, and want more workers if there has been some for long enough. ``ready`` and ``warming``: beside the ``world``
        members."""
        if not self._watches:
            return
        now = time.monotonic()
        more = self._desk.ceiling - self._desk.target
        wait = policy.growth_wait(self._begun, now, self._elastic.grow_gap_s, self._failed)
        worth = policy.worth_growing(self._steps - self._log.stats.step, self._log.stats.steps.last_seconds, self._warm_seconds())
        # A place that nobody takes keeps others from it, and costs.
        wishes = self._elastic.demand if worth and wait <= WISH_AHEAD_S else 0
        self._crew.wish(min(wishes, max(0, more)), avoid)
        self._look(avoid)
        if not self._elastic.grow or self._desk.target > world:
            return
        if self._aim is not None:
            # A joiner that takes its first generation down with it lowers the target: that growth came to nothing, too.
            self.ended(complete=world >= self._aim)
        room = self._room.ripe(now) - max(0, self._elastic.spares - ready - warming)
        workers = min(more, room)
        if workers <= 0 or warming:
            return
        if wait > 0:
            if self._told != (self._begun, self._failed):
                self._told = (self._begun, self._failed)
                why = f"{self._failed} growths in a row came to nothing" if self._failed else "elastic.grow_gap_s has not passed"
                self._log.record("growth_waits", workers=workers, seconds=wait, why=why)
            return
        if not worth:
            return
        self._begun, self._aim = now, self._desk.target + workers
        self._noted()
        self._log.record("growth", **{"from": world, "to": self._aim, "room": room})
        self._desk.want(self._aim, "growth")

    def ended(self, *, complete: bool) -> None:
        """The growth that was begun, if any, has ended: with the workers that were wanted, or without."""
        if self._aim is not None:
            self._aim = None
            self._failed = 0 if complete else self._failed + 1
            self._noted()

    def _noted(self) -> None:
        begun = None if self._begun is None else to_epoch(self._begun, time.monotonic())
        self.note = {"begun": begun, "aim": self._aim, "failed": self._failed}
        self._changed()

    def hired(self) -> None:
        """A worker takes a place now."""
        self._hired = time.monotonic()

    def spare_places(self, failures: int) -> int:
        """Places that a spare could have now; none for a time that doubles with each of the last ``failures`` to get one warm."""
        now = time.monotonic()
        if failures and now < self._hired + min(SPARE_GAP_S * 2.0 ** min(failures, 30), LONGEST_SPARE_GAP_S):
            return 0
        return self._room.now(now, self._hired + SETTLE_S)

    def misplaced(self) -> list[str]:
        """Workers that were hired since room was seen for them, and have no place all the same."""
        return [w for w in self._crew.warming() if w in self._crew.places.unplaced and self._crew.age(w) > PLACE_S]

    def _look(self, avoid: Collection[str]) -> None:
        free = self._nodes.free
        if free is None:
            return
        places = dict(free.places)
        for node in self._crew.places.wishes:
            if node is not None and node not in avoid:
                places[node] = places.get(node, 0) + 1
        self._room.look(free.at, places, free.nodes)

    def _warm_seconds(self) -> float:
        return max((info.warm_seconds for info in self._log.stats.workers.values()), default=0.0)
