"""Room for more workers: how many places are free, on which nodes, and for how long without a break. Values and arithmetic only.

A place that was free a moment ago may be another job's by now, and a node that has just come may go again. So what counts is a place
that was seen free in every look for some time. That is kept per node: two nodes that appear in turn are never one steady place.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

STALE_S = 5.0
"""A look that is older says nothing: Ray's control store does not answer."""


@dataclass(frozen=True)
class Free:
    """The free places for workers by node, and all ``nodes`` that stay, at the time ``at`` (monotonic, before Ray was asked)."""

    at: float
    places: Mapping[str, int]
    nodes: frozenset[str]


def places(free: Mapping[str, Mapping[str, float]], each: Mapping[str, float], avoid: Collection[str] = ()) -> dict[str, int]:
    """Workers that the ``free`` resources of each node hold, nodes to ``avoid`` left out; ``each``: what one worker takes, none of it 0."""
    found = {}
    for node, has in free.items():
        if node not in avoid:
            # Ray counts in ten-thousandths.
            count = min(int((has.get(name, 0.0) + 1e-6) // amount) for name, amount in each.items())
            if count > 0:
                found[node] = count
    return found


@dataclass
class FreePlaces:
    """The free places over time.

    Attributes:
        after_s: a place is steady after so long.
    """

    after_s: float
    _seen: float | None = None
    _nodes: dict[str, float] = field(default_factory=dict)
    _since: dict[str, list[float]] = field(default_factory=dict)

    def look(self, at: float, free: Mapping[str, int], nodes: Collection[str]) -> None:
        """Take an observation of the time ``at``: places that are free, among ``nodes`` (all that stay). Observations come in order of
        time.

        A look that comes long after the one before says nothing of the time between: all begins anew.
        """
        first = self._seen is None
        if self._seen is not None:
            if at <= self._seen:
                return
            if at - self._seen > STALE_S:
                self._since = {}
        # Nodes of the very first look were there before the run: they need not prove themselves.
        self._nodes = {node: self._nodes.get(node, at - self.after_s if first else at) for node in nodes}
        self._since = {
            node: [*self._since.get(node, [])[:count], *[at] * (count - len(self._since.get(node, [])))] for node, count in free.items()
        }
        self._seen = at

    def steady(self, now: float) -> int:
        """Places that were free for ``after_s`` without a break, until now."""
        ages = self._ages(now)
        return sum(age >= self.after_s for age in ages)

    def ripe(self, now: float) -> int:
        """As :meth:`steady`, but none while more are about to become so: a node's places are not all seen at once, and should be taken at
        once. At most as long again is waited for them."""
        ages = self._ages(now)
        if not ages or (min(ages) < self.after_s and max(ages) < 2 * self.after_s):
            return 0
        return self.steady(now)

    def _ages(self, now: float) -> list[float]:
        if self._seen is None or now - self._seen > STALE_S:
            return []
        return [self._seen - since for found in self._since.values() for since in found]

    def now(self, now: float, after: float = 0.0) -> int:
        """Places that are free now, however long, on nodes that are there for ``after_s``; seen later than ``after``."""
        if self._seen is None or now - self._seen > STALE_S or self._seen <= after:
            return 0
        return sum(len(found) for node, found in self._since.items() if self._seen - self._nodes.get(node, self._seen) >= self.after_s)
