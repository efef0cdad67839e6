"""Placement of copies: a pure function of the ranks' nodes."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vescale_ray.controller.policy import unprotected
from vescale_ray.workers.resharding.buddies import buddies


@given(st.lists(st.sampled_from("abcde"), min_size=1, max_size=24))
def test_each_rank_has_one_buddy_on_another_node_where_possible(nodes: list[str]) -> None:
    to = buddies(nodes)
    world, fullest = len(nodes), max(Counter(nodes).values())
    assert sorted(to) == list(range(world))
    assert world == 1 or all(buddy != rank for rank, buddy in enumerate(to))
    apart = sum(nodes[rank] != nodes[buddy] for rank, buddy in enumerate(to))
    # Ranks of the fullest node can exchange copies with the other nodes' ranks only.
    assert apart == min(world, 2 * (world - fullest))
    assert unprotected(nodes, copies=True) == world - apart and unprotected(nodes, copies=False) == world, "so it is told"


@pytest.mark.parametrize("lost", ["a", "b", "c"])
def test_a_node_may_be_lost_with_all_its_ranks(lost: str) -> None:
    nodes = ["a", "a", "a", "b", "b", "b", "c", "c", "c"]
    to = buddies(nodes)
    assert all(nodes[to[rank]] != lost for rank, node in enumerate(nodes) if node == lost)


def test_on_one_node_the_buddy_is_the_next_rank() -> None:
    assert buddies(["n"] * 4) == [1, 2, 3, 0]
