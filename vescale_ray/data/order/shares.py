"""Shares of a mixture's sources: which source each position takes its sample from, and which of that source's samples.

The weights become whole numbers ``w`` with the sum ``W``, the period. Of the first ``p`` positions, source ``i`` gets ``p * w[i] / W``
rounded up or down, for every ``p``. Such a sequence exists for all weights (R. Tijdeman, "The chairman assignment problem", 1980). It
results from scheduling: sample ``j`` of a source may take no position before ``floor(j * W / w)``, and must take one before
``ceil((j + 1) * W / w)``. Each position takes the sample whose deadline is nearest::

    weights 0.5, 0.3, 0.2     w = 5, 3, 2     W = 10
    position                  0 1 2 3 4 5 6 7 8 9
    source                    0 1 0 2 0 1 0 1 0 2     then again from the start, with each source's next samples
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from vescale_ray.data.order.stream import Ids
from vescale_ray.errors import BadInput

LONGEST = 100_000
"""Maximum number of positions of a period. Weights with a larger common denominator are rounded to this part of their sum."""


class Shares:
    """Assigns positions to sources in proportion to ``weights``, by a table of one period.

    Args:
        weights: weight of each source, at least 0; they need not sum to 1.

    Attributes:
        counts: number of positions of each source in a period.
        period: number of positions in a period.

    Raises:
        BadInput: a weight is 0 or negligible beside the others, or not finite.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self.counts = _whole(weights)
        self.period = int(self.counts.sum())
        self._sources = _schedule(self.counts.tolist())
        self._slots = [np.flatnonzero(self._sources == source) for source in range(len(weights))]
        """Positions of each source in a period."""

    def sources(self, start: int, count: int) -> npt.NDArray[np.intp]:
        """Return the source of each position ``[start, start + count)``."""
        return self._sources[np.arange(start % self.period, start % self.period + count) % self.period]

    def taken(self, position: int) -> list[int]:
        """Return how many samples each source has given before ``position``."""
        periods, rest = divmod(position, self.period)
        return [periods * count + int(np.searchsorted(slots, rest)) for count, slots in zip(self.counts.tolist(), self._slots, strict=True)]


def _whole(weights: Sequence[float]) -> Ids:
    """Return whole numbers in the proportion of the weights. They are exact unless their sum would exceed :data:`LONGEST`."""
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or not sum(weights) > 0:
        raise BadInput(f"weights {', '.join(map(str, weights))}: give finite numbers, at least 0, and one above 0")
    exact = [Fraction(repr(float(weight))) for weight in weights]
    parts = [one / sum(exact) for one in exact]
    scale = min(LONGEST, math.lcm(*(part.denominator for part in parts)))
    counts = [math.floor(part * scale) for part in parts]
    by_rest = sorted(range(len(parts)), key=lambda i: counts[i] - parts[i] * scale)
    for i in by_rest[: scale - sum(counts)]:
        counts[i] += 1
    if 0 in counts:
        least = weights[counts.index(0)]
        raise BadInput(f"weight {least:g} is less than {1 / LONGEST:f} of the sum of weights; raise it, or leave that source out")
    return np.array(counts, dtype=np.int64)


def _schedule(counts: Sequence[int]) -> npt.NDArray[np.intp]:
    """Return the source of each position of a period. Each position takes, of the samples that may come, the one with the nearest
    deadline."""
    period = sum(counts)
    schedule = np.empty(period, dtype=np.intp)
    waiting = [(0, source, 0) for source in range(len(counts))]
    ready: list[tuple[int, int, int]] = []
    for position in range(period):
        while waiting and waiting[0][0] <= position:
            _, source, sample = heapq.heappop(waiting)
            heapq.heappush(ready, (-(-(sample + 1) * period // counts[source]), source, sample))
        _, source, sample = heapq.heappop(ready)
        schedule[position] = source
        if sample + 1 < counts[source]:
            heapq.heappush(waiting, ((sample + 1) * period // counts[source], source, sample + 1))
    return schedule
