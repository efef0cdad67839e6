"""Find slow ranks and assign slots by speed: pure arithmetic on numbers that every rank gets in the step's exchange.

A *straggler* is a rank that takes longer for a slot than the others, step after step. All ranks wait for it: collectives within a step keep
them in lockstep, so a round of slots takes as long as its slowest rank.

The module compares each rank's own time for a slot, without its waits for others. So neither uneven slot counts nor the waits of the other
ranks distort it. Each time is relative to the median rank *of the same step*, so that a slowdown of all ranks cancels out. The median over
a window of steps counts, so that one odd step does not matter.

All ranks get the same numbers and compute the same results, bit for bit. Therefore they agree on a new slot assignment without further
communication.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

SLOW = 1.4
"""A rank is slow if its slot time is this multiple of the median rank's in at least :data:`OFTEN` of the window's steps."""
OFTEN = 0.75
WELL = 1.2
"""A slow rank has recovered once the median of its relative slot time is below this."""
LEAST_STEPS, LEAST_S, MOST_STEPS = 12, 2.0, 128
"""The window: at least this many steps and this many seconds, but at most ``MOST_STEPS``. A process that takes a processor for one second
does not make a straggler."""
FIRST = 2
"""Leading steps of a generation that are ignored: they compile, allocate and fill caches."""
GAIN = 0.1
"""Smallest relative gain in step time for which slots are reassigned."""
PATIENCE, LONGEST = 2, 64
"""Windows between two reassignments. The number doubles with each one, up to a factor of ``LONGEST``. If ranks take turns at being slow,
slots move less and less often."""


def even(slots: int, world: int) -> tuple[int, ...]:
    """Return the number of slots of each rank if all ranks are equally fast. The numbers differ by at most one."""
    return tuple(slots // world + (rank < slots % world) for rank in range(world))


def deal(shares: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the slots of each rank, where rank ``r`` gets ``shares[r]`` of them.

    Round ``t`` takes the next slots in rank order, one for each rank with more than ``t`` slots. A sum round by round and rank by rank
    therefore adds up slot by slot.
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
    """Return the number of slots of each rank that makes the step shortest. Each rank has at least one, so that its speed stays known.

    A round of the ``j`` fastest ranks takes as long as the ``j``-th of them, and does ``j`` slots. To do all slots in the least time is a
    covering knapsack, solved exactly in O(slots * world).

    Args:
        per_slot: seconds of each rank for a slot.
        per_round: overhead of a round, in seconds.
    """
    world = len(per_slot)
    order = sorted(range(world), key=lambda rank: (per_slot[rank], rank))
    cost = np.array([per_slot[rank] + per_round for rank in order])
    left = slots - world  # slots after the first round, in which every rank has one
    best = np.zeros(left + 1)
    fastest = np.zeros(left + 1, dtype=np.int64)
    for count in range(1, left + 1):
        most = min(world, count)
        # Among equal costs, take the fewest rounds: the last minimum.
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
    """Return the seconds that a step's slots take. In each round, every rank with slots left computes one; the slowest of them ends the
    round."""
    return math.fsum(max(p for p, share in zip(per_slot, shares, strict=True) if share > turn) + per_round for turn in range(max(shares)))


@dataclass(frozen=True)
class View:
    """Known speed of the ranks.

    Attributes:
        factors: per rank, its slot time relative to the median rank's; empty until a window is full.
        since: per rank, the step (0-based index) since which it is slow, or -1.
        shares: per rank, its slots in the next step.
    """

    factors: tuple[float, ...]
    since: tuple[int, ...]
    shares: tuple[int, ...]


class Pace:
    """Watches the ranks of one generation.

    Args:
        slots, world: slots of the run, and ranks of this generation.
        relieve: whether to assign slots by speed.
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
        """Record a step and return the new view. It takes a few microseconds, and about 50 more each time a quarter of a window is new.

        Args:
            per_slot: each rank's own seconds for a slot; a value of 0 or less means that it was not measured.
            loop, whole: seconds of the slowest rank, for the slots and for the whole step.
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
        """Return the number of steps in the window; 0 if there are not enough steps yet."""
        times = self._times[max(0, self._filled - MOST_STEPS) : self._filled][::-1]
        long = int(np.searchsorted(np.cumsum(times), LEAST_S)) + 1
        window = min(max(long, LEAST_STEPS), MOST_STEPS)
        return window if window <= self._filled else 0

    def _judge(self, index: int, window: int) -> None:
        rows = self._rows[self._filled - window : self._filled]
        # The median rank; of an even number the faster middle one, so that the slower of two ranks stands out.
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
            self._filled, self._look = 0, LEAST_STEPS  # steps with another assignment are not comparable
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
        # Time in the slots beyond the ranks' own is communication, once per round.
        loop, whole = float(np.median(self._loops[last])), float(np.median(self._times[last]))
        per_round = max(0.0, loop - seconds(now, per_slot, 0.0)) / max(now)
        rest = max(0.0, whole - loop)
        wanted = spread(self._slots, per_slot, per_round) if max(since) >= 0 else fair
        before, after = (seconds(shares, per_slot, per_round) + rest for shares in (now, wanted))
        return wanted if after <= (1.0 - GAIN) * before else now
