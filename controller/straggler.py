"""Workers that are slower than the others: told of when they become so and when they no longer are, and replaced if that is wanted.

Who is slow is told by the workers themselves, each of which comes to the same from the times that all exchange in every step
(:mod:`vescale_ray.workers.pace`); there, too, slots move away from them with ``elastic.straggler: relieve``. Here the controller keeps the
books of it. With ``replace`` it has another worker become warm first, so that the change costs no more than any planned one. It does so
once at a time, and waits longer after each: on a node that is slow the next worker may be as slow.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vescale_ray.controller.clocks import ago, to_epoch
from vescale_ray.controller.run_log import RunLog
from vescale_ray.workers.pace import even

if TYPE_CHECKING:
    from vescale_ray.config import RunConfig
    from vescale_ray.workers.messages import StepRecord

PAUSE_S = 60.0
"""After a replacement, or one that could not be, before the next; twice as long each time."""


@dataclass(frozen=True)
class _Swap:
    """A worker for which another one is awaited, since when, and how many hired workers had failed by then."""

    worker: str
    began: float
    failures: int


class Stragglers:
    """Of one run. Used from the conductor's thread alone.

    Args:
        capacity: most workers that the cluster can place; None: unknown.
        start_s: a hired worker is warm within that, or does not come.
        past: ``note`` of an earlier life of the controller; empty: there is none.
        changed: called when there is another ``note``, which must be written down.
        clock: seconds that never go back.

    Attributes:
        note: in whose place another worker is awaited and since when, when the pause after the last one is over (seconds since the epoch),
            how many there were. JSON-able.
    """

    def __init__(
        self,
        config: RunConfig,
        log: RunLog,
        capacity: int | None,
        start_s: float,
        past: Mapping[str, Any],
        changed: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._replaces = config.elastic.straggler == "replace"
        self._slots = config.train.slots
        self._log, self._capacity, self._start_s, self._clock = log, capacity, start_s, clock
        now, worker = clock(), past.get("worker")
        # Of hired workers that failed, a controller that starts has seen none.
        self._swap = None if worker is None else _Swap(worker, ago(past["began"], now), 0)
        self._tries: int = past.get("tries", 0)
        self._not_before = now + min(past["until"] - time.time(), PAUSE_S * 2**self._tries) if past else now
        self._kept: dict[str, str] = {}
        self._factors: dict[str, float] = {}
        """Of the newest step, by worker."""
        self.note, self._changed = past, changed

    def stepped(self, record: StepRecord, members: Sequence[str]) -> None:
        """These members have completed a step: record who has become slow in it, who no longer is, and who does other slots."""
        stats, view = self._log.stats, record.pace
        if view is None:
            return
        for worker in [w for w in stats.stragglers if w not in members]:
            replaced = self._swap is not None and worker == self._swap.worker
            self._over(worker, "it was replaced" if replaced else "it has left")
            if replaced:
                self._rest()
        generation, spread = stats.spread
        if view.shares != (spread if generation == record.generation else even(self._slots, len(members))):
            self._log.record("slots_spread", slots=dict(zip(members, view.shares, strict=True)))
        if not view.factors:
            return  # nothing is known yet in this generation: what was known before stays
        self._factors = dict(zip(members, view.factors, strict=True))
        for rank, (worker, factor, since) in enumerate(zip(members, view.factors, view.since, strict=True)):
            if since >= 0 and worker not in stats.stragglers:
                info = stats.workers.get(worker)
                about = {"rank": rank, "factor": factor, "since_step": since + 1, "node": info.node if info else None}
                self._log.record("straggler", worker=worker, **about)
            elif since < 0 and worker in stats.stragglers:
                self._over(worker, f"it takes {factor:.2f} times as long as the others")
                self._kept.pop(worker, None)
                if self._swap is not None and worker == self._swap.worker:
                    self._swap = None
                    self._noted()

    def _over(self, worker: str, reason: str) -> None:
        """The worker is not slow any more, or gone."""
        self._log.record("straggler_over", worker=worker, reason=reason, since_step=self._log.stats.stragglers[worker]["since_step"])

    def unwanted(self, members: Collection[str], target: int, there: int, failures: int) -> frozenset[str]:
        """Those of ``members`` in whose place another worker is to come: one, or none.

        Args:
            target: workers wanted. Fewer than there are need nobody in their place.
            there: workers that the run has, in the generation and beside it.
            failures: hired workers that have never become warm so far.
        """
        slow = {w: s for w, s in self._log.stats.stragglers.items() if w in members}
        if not self._replaces or not slow or target < len(members):
            return frozenset()
        now = self._clock()
        if self._swap is not None and self._swap.worker not in self._log.stats.stragglers:
            self._rest()  # it was replaced, and the controller before this one had told so, and died
        if self._swap is None:
            if now < self._not_before:
                return frozenset()
            worker = max(slow, key=lambda w: (self._factors.get(w, slow[w]["factor"]), w))
            if self._capacity is not None and len(members) == there >= self._capacity:
                self._keep(worker, f"the cluster has room for {self._capacity} workers, and none more (ray.num_cpus, ray.cpus_per_worker)")
                return frozenset()
            self._swap = _Swap(worker, now, failures)
            self._noted()
        swap = self._swap
        if failures > swap.failures:
            self._keep(swap.worker, "the worker that was to come in its place did not start")
        elif now - swap.began > self._start_s:
            self._keep(swap.worker, f"no worker was warm in its place after {self._start_s:g} s")
        return frozenset() if self._swap is None else frozenset({swap.worker}) & frozenset(members)

    def leaving(self, living: Sequence[str], ready: Sequence[str], target: int) -> frozenset[str]:
        """Who is to leave now that a generation has ended: whoever is unwanted, if there are enough without it."""
        swap = self._swap
        enough = len(living) - 1 + len(ready) >= target
        return frozenset({swap.worker}) if swap is not None and swap.worker in living and enough else frozenset()

    def _keep(self, worker: str, reason: str) -> None:
        if self._kept.get(worker) != reason:
            self._kept[worker] = reason
            self._log.record("straggler_kept", worker=worker, reason=reason)
        self._rest()

    def _rest(self) -> None:
        self._swap = None
        self._not_before = self._clock() + PAUSE_S * 2**self._tries
        self._tries = min(self._tries + 1, 10)
        self._noted()

    def _noted(self) -> None:
        now, swap = self._clock(), self._swap
        awaited = {} if swap is None else {"worker": swap.worker, "began": to_epoch(swap.began, now)}
        self.note = {**awaited, "until": to_epoch(self._not_before, now), "tries": self._tries}
        self._changed()
