"""The assignment of buddies: which rank keeps the in-memory copies of which other rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vescale_ray.config.rank_grid import RankGrid


def buddies(nodes: Sequence[str]) -> list[int]:
    """Return, for each rank, the rank that gets its copy. Every rank gets one copy, and never its own if there are several ranks.

    As many ranks as possible have their buddy on another node: all, unless one node has more than half of the ranks. Ranks are lined up by
    node, the fullest first. Each rank's buddy stands as many places further as the fullest node has ranks.
    """
    world = len(nodes)
    by_node: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        by_node.setdefault(node, []).append(rank)
    # Stable: nodes of one size stay in the order of their first rank. With a single node, each rank's buddy is its neighbour.
    groups = sorted(by_node.values(), key=len, reverse=True)
    line = [rank for group in groups for rank in group]
    shift = len(groups[0]) % world or 1
    found = [0] * world
    for place, rank in enumerate(line):
        found[rank] = line[(place + shift) % world]
    return found


def replicas_suffice(nodes: Sequence[str], grid: RankGrid) -> bool:
    """Return whether the replicas of each shard are as safe as copies at buddies: they lie on several nodes, if there are several."""
    if grid.replicas == 1:
        return False
    least = min(2, len(set(nodes)))
    return all(len({nodes[rank] for rank in grid.replicas_of(shard)}) >= least for shard in range(grid.shards))


def unprotected(nodes: Sequence[str], grid: RankGrid, *, copies: bool) -> int:
    """Return the number of ranks, on these nodes, whose shards are in no other node's memory at a step's end. ``copies``: whether copies
    are made."""
    if not copies:
        return len(nodes)
    if replicas_suffice(nodes, grid):
        return len(nodes) if len(set(nodes)) == 1 else 0
    return max(0, 2 * max(Counter(nodes).values(), default=0) - len(nodes))
