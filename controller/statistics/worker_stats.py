"""Statistics by rank, as the workers report them with each step: waiting, memory, utilisation.

They are observations of one controller process, for monitoring alone, and no event holds them. Counters are kept by rank: if a rank
leaves and comes back, its counters go on. They are shown for all ranks of the current generation, and other values only for ranks that have
reported in it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from vescale_ray.workers.messages import Usage


class WorkerStats:
    """Statistics by rank. Used from the controller's thread; the returned values never change afterwards."""

    def __init__(self) -> None:
        self._members: dict[str, int] = {}
        self._usage: dict[int, Usage] = {}
        self._seconds: dict[int, float] = {}
        self._heard: dict[int, float] = {}
        self._memory: dict[int, int] = {}
        self._waited: defaultdict[str, defaultdict[int, float]] = defaultdict(lambda: defaultdict(float))
        self._waiting: defaultdict[str, float] = defaultdict(float)
        """Sums over the ranks of the seconds waited in the newest reported step, by cause; ``_stepping``: of the steps' seconds."""
        self._stepping = 0.0
        self._read: dict[str, int] = {}
        """Bytes of data that each worker had read at its last report."""
        self._read_bytes = 0
        self._largest: dict[str, int] | None = None
        """Last result of :meth:`largest_memory`; None once a rank's memory has changed."""
        self._figures: dict[str, Any] = {}
        self._due = 0.0

    def opened(self, members: tuple[str, ...]) -> None:
        """Begin a generation with these workers, in rank order. Earlier figures are dropped: the memory was that of another layout."""
        self._members = {worker: rank for rank, worker in enumerate(members)}
        self._usage, self._seconds, self._heard, self._memory = {}, {}, {}, {}
        self._waiting.clear()
        self._stepping, self._largest = 0.0, None
        self._due = 0.0

    def heard(self, worker: str, now: float, memory: int) -> None:
        """Note the time of a worker's answer, and ``memory``, the resident bytes of its process."""
        rank = self._members.get(worker)
        if rank is not None:
            self._heard[rank], self._memory[rank] = now, memory

    def moved(self, worker: str, seconds: float) -> None:
        """Add the ``seconds`` that a worker's part in a move of shards to a new generation took."""
        rank = self._members.get(worker)
        if rank is not None:
            self._waited["reshard"][rank] += seconds

    def stepped(self, worker: str, seconds: float, usage: Usage) -> None:
        """Add a worker's step in the current generation, which took ``seconds``."""
        rank = self._members.get(worker)
        if rank is None:
            return
        before = self._usage.get(rank)
        if before is None or before.memory != usage.memory:
            self._largest = None
        for op, waited in before.waited.items() if before is not None else ():
            self._waiting[op] -= waited
        self._stepping += seconds - self._seconds.get(rank, 0.0)
        self._usage[rank], self._seconds[rank] = usage, seconds
        if usage.loading:
            self._read_bytes += usage.loading["read_bytes"] - self._read.get(worker, 0)
            self._read[worker] = usage.loading["read_bytes"]
        for op, waited in usage.waited.items():
            self._waited[op][rank] += waited
            self._waiting[op] += waited

    def utilisation(self, tokens_per_second: float | None) -> float | None:
        """Return the share of the devices' peak operations that the model used; None if it is not known of every rank."""
        told = [self._usage.get(rank) for rank in range(len(self._members))]
        peaks = [usage.peak_flops for usage in told if usage is not None and usage.peak_flops]
        if not tokens_per_second or not told or len(peaks) < len(told):
            return None
        flops = max(usage.token_flops for usage in told if usage is not None)
        return tokens_per_second * flops / sum(peaks) if flops else None

    def mean_waited(self) -> dict[str, float]:
        """Return the mean over the ranks of the seconds waited in the newest reported step, by cause."""
        return {op: round(max(0.0, seconds) / len(self._usage), 6) for op, seconds in self._waiting.items()}

    def mean_seconds(self) -> float | None:
        """Return the mean seconds of the steps that :meth:`mean_waited` covers; None if no rank has reported.

        When the first rank reports a step, the values of the other ranks are still those of the step before."""
        return round(self._stepping / len(self._seconds), 6) if self._seconds else None

    def largest_memory(self) -> dict[str, int]:
        """Return the bytes by kind of the rank with the most memory."""
        if self._largest is None:
            by_kind = self._by_kind({rank: usage.memory for rank, usage in self._usage.items()})
            self._largest = {kind: max(values.values()) for kind, values in by_kind.items()}
        return self._largest

    def figures(self) -> dict[str, Any]:
        """Return the fields of the snapshot. They take 5 ms at 1,024 ranks, so they are made anew for at most a fiftieth of the time."""
        began = time.monotonic()
        if began >= self._due:
            self._figures = self._made()
            ended = time.monotonic()
            self._due = ended + 50 * (ended - began)
        return self._figures

    def _made(self) -> dict[str, Any]:
        ranks = sorted(self._usage)
        waited = {op: {rank: by[rank] for rank in range(len(self._members)) if rank in by} for op, by in self._waited.items()}
        return {
            "waited": {op: by for op, by in sorted(waited.items()) if by},
            "memory_kinds": self._by_kind({rank: self._usage[rank].memory for rank in ranks}),
            "device_memory": self._by_kind({rank: self._usage[rank].device_memory for rank in ranks}),
            "alloc_retries": {rank: self._usage[rank].alloc_retries for rank in ranks if self._usage[rank].device_memory},
            "rank_step_seconds": {rank: self._seconds[rank] for rank in ranks},
            **self._data(),
            "heard": {rank: self._heard[rank] for rank in sorted(self._heard)},
            "memory": {rank: self._memory[rank] for rank in sorted(self._memory)},
        }

    def loading(self) -> dict[str, int]:
        """Return the figures of the reading of data: the fewest tokens that wait on a rank, all bytes, and the most that a rank skips.

        Data that is held in memory has none."""
        told = [usage.loading for usage in self._usage.values() if usage.loading]
        if not told:
            return {}
        skipped = {name: max(one[name] for one in told) for name in ("skipped_files", "skipped_records")}
        return {"waiting_tokens": min(one["waiting_tokens"] for one in told), "read_bytes": self._read_bytes, **skipped}

    def _data(self) -> dict[str, Any]:
        told = self.loading()
        return {
            "data_waiting_tokens": told.get("waiting_tokens"),
            "data_read_bytes": self._read_bytes,
            "data_skipped": {kind: told.get(f"skipped_{kind}", 0) for kind in ("files", "records")},
        }

    @staticmethod
    def _by_kind(by_rank: Mapping[int, Mapping[str, int]]) -> dict[str, dict[int, int]]:
        kinds = dict.fromkeys(kind for by in by_rank.values() for kind in by)
        return {kind: {rank: by[kind] for rank, by in by_rank.items() if kind in by} for kind in kinds}
