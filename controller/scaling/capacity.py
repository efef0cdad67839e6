"""Room for more workers: how many places are free, on which nodes, and for how long without a break. Values and arithmetic only.

A place that was free a moment ago may be another job's by now, and a node that has just come may go again. So a place counts only if every
observation over some time has found it free. The times are kept per node, so that two nodes that appear in turn never make one steady
place.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

STALE_S = 5.0
"""If an observation is older than this (seconds), it is not used: Ray's control store does not answer."""


@dataclass(frozen=True)
class Free:
    """The free places for workers by node, and all usable ``nodes``, at the time ``at`` (monotonic, before Ray was asked)."""

    at: float
    places: Mapping[str, int]
    nodes: frozenset[str]


def places(free: Mapping[str, Mapping[str, float]], each: Mapping[str, float], avoid: Collection[str] = ()) -> dict[str, int]:
    """Return the number of workers that fit in the ``free`` resources of each node, without nodes to ``avoid``. ``each``: resources of one
    worker, all above 0."""
    found = {}
    for node, has in free.items():
        if node not in avoid:
            # The margin is below Ray's unit of resources, a ten-thousandth.
            count = min(int((has.get(name, 0.0) + 1e-6) // amount) for name, amount in each.items())
            if count > 0:
                found[node] = count
    return found


@dataclass
class FreePlaces:
    """The free places over time.

    Attributes:
        after_s: seconds after which a free place is steady.
    """

    after_s: float
    _seen: float | None = None
    _nodes: dict[str, float] = field(default_factory=dict)
    _since: dict[str, list[float]] = field(default_factory=dict)

    def look(self, at: float, free: Mapping[str, int], nodes: Collection[str]) -> None:
        """Take an observation of the time ``at``: free places by node, and all usable ``nodes``. Observations come in order of time.

        If more than :data:`STALE_S` passed since the last observation, nothing is known of the time between, and all places begin anew.
        """
        first = self._seen is None
        if self._seen is not None:
            if at <= self._seen:
                return
            if at - self._seen > STALE_S:
                self._since = {}
        # Nodes of the first observation were there before the run, so they count as steady at once.
        self._nodes = {node: self._nodes.get(node, at - self.after_s if first else at) for node in nodes}
        self._since = {
            node: [*self._since.get(node, [])[:count], *[at] * (count - len(self._since.get(node, [])))] for node, count in free.items()
        }
        self._seen = at

    def steady(self, now: float) -> int:
        """Return places that were free for ``after_s`` without a break, until now."""
        ages = self._ages(now)
        return sum(age >= self.after_s for age in ages)

    def ripe(self, now: float) -> int:
        """As :meth:`steady`, but 0 while more places are about to become steady. A node's places are not all seen at once, but should be
        taken together. It waits for them for at most another ``after_s``."""
        ages = self._ages(now)
        if not ages or (min(ages) < self.after_s and max(ages) < 2 * self.after_s):
            return 0
        return self.steady(now)

    def _ages(self, now: float) -> list[float]:
        if self._seen is None or now - self._seen > STALE_S:
            return []
        return [self._seen - since for found in self._since.values() for since in found]

    def now(self, now: float, after: float = 0.0) -> int:
        """Return places that are free now, however briefly, on nodes that have been usable for ``after_s``. Only an observation later than
        ``after`` counts."""
        if self._seen is None or now - self._seen > STALE_S or self._seen <= after:
            return 0
        return sum(len(found) for node, found in self._since.items() if self._seen - self._nodes.get(node, self._seen) >= self.after_s)
