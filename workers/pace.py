"""Who is slow, and who should do how many slots: pure arithmetic on what every rank hears in the step's exchange.

A *straggler* is a rank that takes longer for a slot than the others do, step after step. All wait for it: the collectives within a step
keep the ranks in lockstep, so that a round of slots takes as long as its slowest rank.

What is compared is each rank's own time for a slot, without the time in which it waited for others; so neither an uneven number of slots
nor the waiting of the others, which look as slow as the straggler, matters. It is set in relation to the usual rank *of the same step*, so
that what slows all of them down changes nothing. And the median over a window of steps counts, so that one odd step does not either.

All ranks hear the same numbers and compute the same from them, bit for bit. So they agree on another spread of the slots without a word.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]

SLOW = 1.4
"""A rank is slow that takes so many times as long as the usual one in :data:`OFTEN` of the window's steps."""
OFTEN = 0.75
WELL = 1.2
"""It no longer is when it takes less than this in the median."""
LEAST_STEPS, LEAST_S, MOST_STEPS = 12, 2.0, 128
"""The window: so many steps, and more of them until they have taken so many seconds, at most so many. A neighbour that takes a processor
for a second makes no straggler."""
FIRST = 2
"""Steps of a generation that don't count: they compile, allocate and fill caches."""
GAIN = 0.1
"""Slots are spread anew only if that is expected to shorten the step by this part."""
PATIENCE, LONGEST = 2, 64
"""Windows between two new spreads, doubled with each up to so many: whoever is slow in turns moves slots less and less often."""


def even(slots: int, world: int) -> tuple[int, ...]:
    """How many slots each rank has when all are alike: as many, or one fewer."""
    return tuple(slots // world + (rank < slots % world) for rank in range(world))


def deal(shares: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The slots of each rank that is to have ``shares[rank]`` of them. Round t has the next slots in the order of the ranks, one for each
    rank that has more than t: whoever adds up round by round and rank by rank adds up slot by slot.

    >>> deal((1, 3, 2))
    ((0,), (1, 3, 5), (2, 4))
    """
    found: list[list[int]] = [[] for _ in shares]
    slot = 0
    for turn in range(max(shares)):
        for rank, share in enumerate(shares):
            if share > turn:
                found[rank].append(slot)
                slot += 1
    return tuple(map(tuple, found))


def spread(slots: int, per_slot: Sequence[float], per_round: float) -> tuple[int, ...]:
    """How many slots each rank should have for the step to be shortest; every rank has one at least, so that its speed stays known.

    A round in which the j fastest take part takes as long as the j-th of them, and does j slots: to do all slots in the least time is a
    covering knapsack, solved exactly in O(slots * world).

    Args:
        per_slot: seconds of each rank for a slot.
        per_round: seconds that a round takes besides.
    """
    world = len(per_slot)
    order = sorted(range(world), key=lambda rank: (per_slot[rank], rank))
    cost = np.array([per_slot[rank] + per_round for rank in order])
    left = slots - world  # after the round in which all take part
    best = np.zeros(left + 1)
    fastest = np.zeros(left + 1, dtype=np.int64)
    for count in range(1, left + 1):
        most = min(world, count)
        # The fewest rounds among equals: the last minimum.
        options = best[count - 1 :: -1][:most] + cost[:most]
        pick = most - 1 - int(np.argmin(options[::-1]))
        best[count], fastest[count] = options[pick], pick + 1
    shares = [1] * world
    while left:
        for place in range(int(fastest[left])):
            shares[order[place]] += 1
        left -= int(fastest[left])
    return tuple(shares)


def seconds(shares: Sequence[int], per_slot: Sequence[float], per_round: float) -> float:
    """How long the slots of a step take: each round as long as the slowest rank in it."""
    return math.fsum(max(p for p, share in zip(per_slot, shares, strict=True) if share > turn) + per_round for turn in range(max(shares)))


@dataclass(frozen=True)
class View:
    """What is known of the ranks' speed.

    Attributes:
        factors: of each rank, how many times as long as the usual one it takes for a slot; empty until a window is full.
        since: of each rank, the step (0-based index) since which it is slow, or -1.
        shares: slots of each rank in the next step.
    """

    factors: tuple[float, ...]
    since: tuple[int, ...]
    shares: tuple[int, ...]


class Pace:
    """Watches the ranks of one generation.

    Args:
        slots, world: of the run, and of this generation.
        relieve: spread the slots by speed.
    """

    def __init__(self, slots: int, world: int, *, relieve: bool) -> None:
        self._slots, self._world, self._relieve = slots, world, relieve
        self._steps = 0
        self._rows = np.empty((2 * MOST_STEPS, world))
        self._loops = np.empty(2 * MOST_STEPS)
        self._times = np.empty(2 * MOST_STEPS)
        self._filled = 0
        self._look = LEAST_STEPS
        self._changes = 0
        self._changed = 0
        self.view = View((), (-1,) * world, even(slots, world))

    def stepped(self, index: int, per_slot: Sequence[float], loop: float, whole: float) -> View:
        """A step was done. A few microseconds; some 50 more whenever a quarter of a window is new.

        Args:
            per_slot: each rank's own seconds for a slot; what is not above 0 was not measured.
            loop, whole: seconds of the longest rank, in the slots and in all.
        """
        self._steps += 1
        if self._steps <= FIRST or not all(0.0 < seconds < math.inf for seconds in per_slot):
            return self.view
        if self._filled == len(self._rows):
            for rows in (self._rows, self._loops, self._times):
                rows[:MOST_STEPS] = rows[MOST_STEPS:]
            self._filled = MOST_STEPS
            self._look -= MOST_STEPS
        self._rows[self._filled], self._loops[self._filled], self._times[self._filled] = per_slot, loop, whole
        self._filled += 1
        if self._filled >= self._look:
            window = self._window()
            self._look = self._filled + max(1, window // 4)
            if window:
                self._judge(index, window)
        return self.view

    def _window(self) -> int:
        """Steps that count now; 0 if there are not enough."""
        times = self._times[max(0, self._filled - MOST_STEPS) : self._filled][::-1]
        long = int(np.searchsorted(np.cumsum(times), LEAST_S)) + 1
        window = min(max(long, LEAST_STEPS), MOST_STEPS)
        return window if window <= self._filled else 0

    def _judge(self, index: int, window: int) -> None:
        rows = self._rows[self._filled - window : self._filled]
        # The usual rank is the middle one; of an even number the faster of the two, so that of two ranks the slower can be told.
        usual = np.partition(rows, (self._world - 1) // 2, axis=1)[:, (self._world - 1) // 2]
        ordered = np.sort(rows / usual[:, None], axis=0)
        factors = ordered[window // 2]
        often = ordered[window - math.ceil(OFTEN * window)] >= SLOW
        since = list(self.view.since)
        for rank in np.flatnonzero(often | (np.array(since) >= 0)).tolist():
            if since[rank] < 0:
                since[rank] = index - window + 1 + int(np.argmax(rows[:, rank] >= SLOW * usual))
            elif factors[rank] < WELL:
                since[rank] = -1
        shares = self._shares(window, tuple(since)) if self._relieve else self.view.shares
        if shares != self.view.shares:
            self._changes += 1
            self._changed = self._steps
            self._filled, self._look = 0, LEAST_STEPS  # what follows is another kind of step
        self.view = View(tuple(factors.tolist()), tuple(since), shares)

    def _shares(self, window: int, since: tuple[int, ...]) -> tuple[int, ...]:
        now = self.view.shares
        fair = even(self._slots, self._world)
        if max(since) < 0 and now == fair:
            return now
        if self._changes and self._steps - self._changed < window * min(PATIENCE * 2 ** (self._changes - 1), LONGEST):
            return now
        last = slice(self._filled - window, self._filled)
        per_slot = [float(one) for one in np.median(self._rows[last], axis=0)]
        # What the slots took beyond their ranks' own time is communication, once for every round.
        loop, whole = float(np.median(self._loops[last])), float(np.median(self._times[last]))
        per_round = max(0.0, loop - seconds(now, per_slot, 0.0)) / max(now)
        rest = max(0.0, whole - loop)
        wanted = spread(self._slots, per_slot, per_round) if max(since) >= 0 else fair
        before, after = (seconds(shares, per_slot, per_round) + rest for shares in (now, wanted))
        return wanted if after <= (1.0 - GAIN) * before else now
