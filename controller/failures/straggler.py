"""The policy for stragglers: when to report a slow worker, and when another worker replaces it.

The workers themselves find the slow ones. Each computes the same result from the times that all exchange in every step
(:mod:`vescale_ray.workers.monitoring.pace`). With ``elastic.straggler: relieve`` they also move slots away from slow workers. This policy
turns their results into events. With ``replace`` it replaces a slow worker once another one is warm, so that the change costs no more than
any planned one. It replaces one worker at a time. The pause after each replacement doubles, because the next worker on a slow node may be
as slow.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vescale_ray.controller.protocol import Event
from vescale_ray.workers.monitoring.pace import even

if TYPE_CHECKING:
    from vescale_ray.config import RunConfig
    from vescale_ray.controller.statistics.run_stats import RunStats
    from vescale_ray.workers.messages import StepRecord

PAUSE_S = 60.0
"""Seconds from a replacement, successful or not, to the next one. The pause doubles each time."""

Slow = Mapping[str, Mapping[str, Any]]
"""The workers that are reported as slow now, as in ``RunStats.stragglers``."""


@dataclass(frozen=True)
class _Swap:
    """A worker that is being replaced, when that began, and how many hired workers had failed by then."""

    worker: str
    began: float
    failures: int


class Stragglers:
    """Decides which slow workers to report and which one to replace. ``now`` is in seconds of a monotonic clock.

    Args:
        capacity: largest number of workers that the cluster can place; None: unknown.
        start_s: seconds after which a hired worker that is not warm is no longer expected.
    """

    def __init__(self, config: RunConfig, capacity: int | None, start_s: float) -> None:
        self._replaces = config.elastic.straggler == "replace"
        self._slots = config.train.slots
        self._capacity, self._start_s = capacity, start_s
        self._swap: _Swap | None = None
        self._tries = 0
        """Number of replacements."""
        self._not_before = 0.0
        """End of the pause after the last replacement."""
        self._kept: dict[str, str] = {}
        self._factors: dict[str, float] = {}
        """Slowness by worker in the newest step."""

    def stepped(self, record: StepRecord, stats: RunStats, now: float) -> list[Event]:
        """Return the events of a step that the members have completed: workers that became slow or recovered, and a new spread of the
        slots."""
        events, slow, members = list[Event](), stats.stragglers, stats.members
        if (view := record.pace) is None:
            return events
        for worker in [w for w in slow if w not in members]:
            replaced = self._swap is not None and worker == self._swap.worker
            events.append(_over(worker, slow, "it was replaced" if replaced else "it has left"))
            if replaced:
                self._rest(now)
        if view.shares != (stats.spread[1] if stats.spread[0] == record.generation else even(self._slots, len(members))):
            events.append(Event("slots_spread", {"slots": dict(zip(members, view.shares, strict=True))}))
        if not view.factors:
            return events  # no result yet in this generation, so earlier results stay
        self._factors = dict(zip(members, view.factors, strict=True))
        for rank, (worker, factor, since) in enumerate(zip(members, view.factors, view.since, strict=True)):
            if since >= 0 and worker not in slow:
                node = stats.workers[worker].node if worker in stats.workers else None
                about = {"rank": rank, "factor": factor, "since_step": since + 1, "node": node}
                events.append(Event("straggler", {"worker": worker, **about}))
            elif since < 0 and worker in slow:
                events.append(_over(worker, slow, f"it takes {factor:.2f} times as long as the others"))
                self._kept.pop(worker, None)
                if self._swap is not None and worker == self._swap.worker:
                    self._swap = None
        return events

    def unwanted(
        self, members: Collection[str], target: int, there: int, failures: int, slow: Slow, now: float
    ) -> tuple[frozenset[str], list[Event]]:
        """Return the member that another worker is to replace, if any, and events.

        Args:
            target: number of workers wanted. If it is below the number of members, no worker is replaced.
            there: number of the run's workers, inside and outside the generation.
            failures: number of hired workers so far that never became warm.
        """
        ours = {worker: about for worker, about in slow.items() if worker in members}
        if not self._replaces or not ours or target < len(members):
            return frozenset(), []
        if self._swap is None:
            if now < self._not_before:
                return frozenset(), []
            worker = max(ours, key=lambda w: (self._factors.get(w, ours[w]["factor"]), w))
            if self._capacity is not None and len(members) == there >= self._capacity:
                room = f"the cluster has room for {self._capacity} workers, and none more (ray.num_cpus, ray.cpus_per_worker)"
                return frozenset(), self._keep(worker, room, now)
            self._swap = _Swap(worker, now, failures)
        worker = self._swap.worker
        if failures > self._swap.failures:
            return frozenset(), self._keep(worker, "the worker that was to come in its place did not start", now)
        if now - self._swap.began > self._start_s:
            return frozenset(), self._keep(worker, f"no worker was warm in its place after {self._start_s:g} s", now)
        return frozenset({worker}) & frozenset(members), []

    def leaving(self, living: Sequence[str], ready: Sequence[str], target: int) -> frozenset[str]:
        """Return the worker that leaves at the end of a generation: the one that is being replaced, if enough workers are left without
        it."""
        swap = self._swap
        enough = len(living) - 1 + len(ready) >= target
        return frozenset({swap.worker}) if swap is not None and swap.worker in living and enough else frozenset()

    def _keep(self, worker: str, reason: str, now: float) -> list[Event]:
        told = self._kept.get(worker) == reason
        self._kept[worker] = reason
        self._rest(now)
        return [] if told else [Event("straggler_kept", {"worker": worker, "reason": reason})]

    def _rest(self, now: float) -> None:
        self._swap = None
        self._not_before = now + PAUSE_S * 2**self._tries
        self._tries = min(self._tries + 1, 10)


def _over(worker: str, slow: Slow, reason: str) -> Event:
    """Return the event that a worker is no longer slow, or has left."""
    return Event("straggler_over", {"worker": worker, "reason": reason, "since_step": slow[worker]["since_step"]})
