"""Figures of a sharded module: the time that this rank has waited for collectives, and the memory of its buffers."""

from __future__ import annotations

from vescale_ray.fsdp.surface.lookup import sharded_unit


class Figures:
    """The part of ``FSDPModule`` with figures of waiting time and memory."""

    @property
    def waited_s(self) -> float:
        """Seconds for which this rank's thread has waited for collectives of this module's root so far. A wait means that a collective was
        not overlapped or that another rank was late. 0 before the first forward, and on an accelerator, where a stream waits."""
        return sum(self.waited_by_collective.values())

    @property
    def waited_by_collective(self) -> dict[str, float]:
        """Seconds as in :attr:`waited_s`, by collective: ``all_gather`` (of parameters) and ``reduce_scatter`` (of gradients)."""
        schedule = sharded_unit(self).schedule
        lanes = None if schedule is None else schedule.lanes
        return {
            "all_gather": 0.0 if lanes is None else lanes.gather.waited_s,
            "reduce_scatter": 0.0 if lanes is None else lanes.reduce.waited_s,
        }

    @property
    def peak_buffer_bytes(self) -> int:
        """Peak bytes of gathered parameters and gradient buffers on this rank, for this module's root."""
        lanes = sharded_unit(self).lanes
        return 0 if lanes is None else lanes.pool.peak_bytes
