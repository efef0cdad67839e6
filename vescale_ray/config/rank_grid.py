"""Shard groups, replicas (HSDP) and expert parallelism: the arrangement of a number of workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vescale_ray.geometry import ExpertShares

if TYPE_CHECKING:
    from vescale_ray.config.sections import ShardingSettings


@dataclass(frozen=True)
class RankGrid:
    """Ranks of a generation in ``replicas`` rows of ``shards`` ranks. Rank r holds shard ``r % shards`` of the state.

    Attributes:
        experts: number of neighbouring ranks of a row that share the experts of a layer; it divides ``shards``. 1: each rank computes all.
    """

    replicas: int
    shards: int
    experts: int = 1

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


def grid_of(sharding: ShardingSettings | None, experts: int, workers: int) -> RankGrid:
    """Return the grid of at most ``workers`` ranks. If they are too few for a shard group, or to share the experts, they form one smaller
    group.

    Args:
        experts: ``train.expert_parallel``. The grid uses this number if there are enough workers. A smaller group uses the largest number
            that divides both ``experts`` and the group's size.
    """
    if sharding is not None and workers >= sharding.shard_group:
        replicas, shards = workers // sharding.shard_group, sharding.shard_group
    else:
        replicas, shards = 1, workers if sharding is not None or workers < experts else workers // experts * experts
    return RankGrid(replicas, shards, ExpertShares.of(shards, experts).parts)
