"""Shard groups and replicas (HSDP): the arrangement of a number of workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vescale_ray.config.sections import ShardingSettings


@dataclass(frozen=True)
class RankGrid:
    """Ranks of a generation in ``replicas`` rows of ``shards`` ranks. Rank r holds shard ``r % shards`` of the state."""

    replicas: int
    shards: int

    @property
    def size(self) -> int:
        return self.replicas * self.shards

    def shard_of(self, rank: int) -> int:
        """Return the shard that ``rank`` holds."""
        return rank % self.shards

    def replicas_of(self, shard: int) -> range:
        """Return the ranks that hold ``shard``."""
        return range(shard, self.size, self.shards)

    def writer_of(self, shard: int) -> int:
        """Return the rank that writes ``shard`` to checkpoints. The replicas take turns, so that the ranks write equal amounts."""
        return self.replicas_of(shard)[shard % self.replicas]


def grid_of(sharding: ShardingSettings | None, workers: int) -> RankGrid:
    """Return the grid of at most ``workers`` ranks: whole replicas, or one smaller shard group if there are too few workers for one."""
    if sharding is None or workers < sharding.shard_group:
        return RankGrid(1, workers)
    return RankGrid(workers // sharding.shard_group, sharding.shard_group)
