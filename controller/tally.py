"""What the workers tell of themselves with each step, by rank: waiting, memory, utilisation. Only for those who watch.

Counters are kept by rank for the life of the controller, so that a rank that leaves and comes back goes on where it was. They are told of
the ranks of the current generation, everything else of those that have been heard in it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from vescale_ray.workers.messages import Usage


class Tally:
    """Used from the conductor's thread; what it gives out is not changed afterwards."""

    def __init__(self) -> None:
        self._members: dict[str, int] = {}
        self._usage: dict[int, Usage] = {}
        self._seconds: dict[int, float] = {}
        self._heard: dict[int, float] = {}
        self._waited: defaultdict[str, defaultdict[int, float]] = defaultdict(lambda: defaultdict(float))
        self._figures: dict[str, Any] = {}
        self._due = 0.0

    def opened(self, members: tuple[str, ...]) -> None:
        """A generation with these workers, in rank order, begins: what was told of memory is of another layout."""
        self._members = {worker: rank for rank, worker in enumerate(members)}
        self._usage, self._seconds, self._heard = {}, {}, {}
        self._due = 0.0

    def heard(self, worker: str, now: float) -> None:
        rank = self._members.get(worker)
        if rank is not None:
            self._heard[rank] = now

    def moved(self, worker: str, seconds: float) -> None:
        """Its part in the move of shards to a new generation took so long."""
        rank = self._members.get(worker)
        if rank is not None:
            self._waited["reshard"][rank] += seconds

    def stepped(self, worker: str, seconds: float, usage: Usage) -> None:
        """It has done a step of the current generation in ``seconds``."""
        rank = self._members.get(worker)
        if rank is None:
            return
        self._usage[rank], self._seconds[rank] = usage, seconds
        for op, waited in usage.waited.items():
            self._waited[op][rank] += waited

    def utilisation(self, tokens_per_second: float | None) -> float | None:
        """The part of what all devices could do that the model's operations were; None where it isn't known of every rank."""
        told = [self._usage.get(rank) for rank in range(len(self._members))]
        peaks = [usage.peak_flops for usage in told if usage is not None and usage.peak_flops]
        if not tokens_per_second or not told or len(peaks) < len(told):
            return None
        flops = max(usage.token_flops for usage in told if usage is not None)
        return tokens_per_second * flops / sum(peaks) if flops else None

    def mean_waited(self) -> dict[str, float]:
        """Seconds that a rank has waited in the newest step that it has told of, by what for: the mean over the ranks."""
        found: defaultdict[str, float] = defaultdict(float)
        for usage in self._usage.values():
            for op, waited in usage.waited.items():
                found[op] += waited / len(self._usage)
        return {op: round(seconds, 6) for op, seconds in found.items()}

    def mean_seconds(self) -> float | None:
        """Seconds of the steps that :meth:`mean_waited` is of: the rank that tells first of a step is beside others that have told of the
        one before. None where nobody has told."""
        return round(sum(self._seconds.values()) / len(self._seconds), 6) if self._seconds else None

    def largest_memory(self) -> dict[str, int]:
        """Bytes by kind, of the rank that has the most of it."""
        found: dict[str, int] = {}
        for usage in self._usage.values():
            for kind, nbytes in usage.memory.items():
                found[kind] = max(nbytes, found.get(kind, 0))
        return found

    def figures(self) -> dict[str, Any]:
        """In the words of the snapshot. Made anew so seldom that it takes a fiftieth of the time at most: 5 ms at 1,024 ranks."""
        began = time.monotonic()
        if began >= self._due:
            self._figures = self._made()
            ended = time.monotonic()
            self._due = ended + 50 * (ended - began)
        return self._figures

    def _made(self) -> dict[str, Any]:
        ranks = sorted(self._usage)
        waited = {op: {rank: by[rank] for rank in sorted(self._members.values()) if rank in by} for op, by in self._waited.items()}
        return {
            "waited": {op: by for op, by in sorted(waited.items()) if by},
            "memory_kinds": self._by_kind({rank: self._usage[rank].memory for rank in ranks}),
            "device_memory": self._by_kind({rank: self._usage[rank].device_memory for rank in ranks}),
            "alloc_retries": {rank: self._usage[rank].alloc_retries for rank in ranks if self._usage[rank].device_memory},
            "rank_step_seconds": {rank: self._seconds[rank] for rank in ranks},
            "heard": {rank: self._heard[rank] for rank in sorted(self._heard)},
        }

    @staticmethod
    def _by_kind(by_rank: Mapping[int, Mapping[str, int]]) -> dict[str, dict[int, int]]:
        found: dict[str, dict[int, int]] = {}
        for rank, kinds in by_rank.items():
            for kind, nbytes in kinds.items():
                found.setdefault(kind, {})[rank] = nbytes
        return found
