"""The assignment of buddies: which rank keeps the in-memory copies of which other rank."""

from __future__ import annotations

from collections.abc import Sequence


def buddies(nodes: Sequence[str]) -> list[int]:
    """For each rank, the rank that gets its copy. Every rank gets one copy, and not its own if there is another rank.

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
