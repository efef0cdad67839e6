"""Placement of copies: a pure function of the ranks' nodes."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vescale_ray.config.rank_grid import RankGrid
from vescale_ray.workers.resharding.buddies import buddies, replicas_suffice, unprotected


@given(st.lists(st.sampled_from("abcde"), min_size=1, max_size=24))
def test_each_rank_has_one_buddy_on_another_node_where_possible(nodes: list[str]) -> None:
    to = buddies(nodes)
    world, fullest = len(nodes), max(Counter(nodes).values())
    assert sorted(to) == list(range(world))
    assert world == 1 or all(buddy != rank for rank, buddy in enumerate(to))
    apart = sum(nodes[rank] != nodes[buddy] for rank, buddy in enumerate(to))
    # Ranks of the fullest node can exchange copies with the other nodes' ranks only.
    assert apart == min(world, 2 * (world - fullest))
    alone = RankGrid(1, world)
    assert unprotected(nodes, alone, copies=True) == world - apart and unprotected(nodes, alone, copies=False) == world, "so it is told"


@given(st.integers(2, 4).flatmap(lambda replicas: st.tuples(st.just(replicas), st.lists(st.sampled_from("abc"), min_size=4, max_size=4))))
def test_replicas_on_several_nodes_need_no_copies(about: tuple[int, list[str]]) -> None:
    replicas, first = about
    grid = RankGrid(replicas, len(first))
    # A row whose ranks are on other nodes than the first one's makes every shard safe.
    apart = [*first, *("d" for _ in range(grid.size - len(first)))]
    assert replicas_suffice(apart, grid) and unprotected(apart, grid, copies=True) == 0
    assert unprotected(apart, grid, copies=False) == grid.size
    together = first * replicas
    one = len(set(first)) == 1
    assert replicas_suffice(together, grid) == one, "with one node, the replicas are as safe as copies on that node"
    fullest = max(Counter(together).values())
    assert unprotected(together, grid, copies=True) == (grid.size if one else max(0, 2 * fullest - grid.size)), "then copies are exchanged"
    assert not replicas_suffice(first, RankGrid(1, 4))


@pytest.mark.parametrize("lost", ["a", "b", "c"])
def test_a_node_may_be_lost_with_all_its_ranks(lost: str) -> None:
    nodes = ["a", "a", "a", "b", "b", "b", "c", "c", "c"]
    to = buddies(nodes)
    assert all(nodes[to[rank]] != lost for rank, node in enumerate(nodes) if node == lost)


def test_on_one_node_the_buddy_is_the_next_rank() -> None:
    assert buddies(["n"] * 4) == [1, 2, 3, 0]
