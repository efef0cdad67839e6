"""The numbering of a new generation: no other would move fewer bytes. The oracle tries all of them."""

from __future__ import annotations

import itertools
import random
import time

import numpy as np
import pytest

from vescale_ray.workers import seating
from vescale_ray.workers.seating import assign, even, kept


def seated(members, held, before):
    return seating.seated(members, held, even(before, len(members)))


def total(order, held, before):
    """What stays where it is, of before * len(order)."""
    return int(np.trace(kept(order, held, even(before, len(order)))))


def best(members, held, before):
    return max(total(order, held, before) for order in itertools.permutations(members))


@pytest.mark.parametrize("copies", [False, True], ids=["own parts", "with copies"])
def test_for_every_change_from_1_to_8_workers_no_numbering_keeps_more(copies):
    for before, after in itertools.product(range(1, 9), range(1, 8)):
        old = [f"w{rank}" for rank in range(before)]
        held = {w: (rank, (rank - 1) % before) if copies else (rank,) for rank, w in enumerate(old)}
        members = [*old[:after], *(f"j{i}" for i in range(after - before))]
        order = seated(members, held, before)
        assert sorted(order) == sorted(members)
        if after < 7 or before == 3:
            assert total(order, held, before) == best(members, held, before), (before, after)


def test_also_where_any_are_lost_and_copies_lie_anywhere():
    rng = random.Random(5)
    for _ in range(150):
        before, after = rng.randint(1, 7), rng.randint(1, 6)
        old = [f"w{rank}" for rank in range(before)]
        held = {w: (rank, rng.randrange(before)) for rank, w in enumerate(old)}
        members = rng.sample([*old, *(f"j{i}" for i in range(6))], after)
        assert total(seated(members, held, before), held, before) == best(members, held, before)


def test_a_joiner_takes_the_place_that_the_others_can_best_do_without():
    held = {"a": (0,), "b": (1,), "c": (2,)}
    assert seated(["a", "b", "c", "new"], held, 3) == ("a", "b", "new", "c")
    assert seated(["a", "b", "new"], {"a": (0,), "b": (1,)}, 2) == ("a", "new", "b")


def test_order_is_kept_where_it_costs_nothing():
    held = {w: (rank, (rank - 1) % 4) for rank, w in enumerate("abcd")}  # each has its neighbour's copy: a turn by one would be as good
    assert seated("abcd", held, 4) == tuple("abcd")
    assert seated("abcd", {}, 4) == tuple("abcd")
    assert seated("abcd", dict.fromkeys("abcd", range(4)), 4) == tuple("abcd")
    assert seated("a", {"a": (0, 1)}, 2) == ("a",) and seated((), {}, 3) == ()


def test_assignments_are_the_best_of_all():
    rng = np.random.default_rng(1)
    for size in range(1, 7):
        for _ in range(20):
            cost = rng.integers(-20, 20, (size, size))
            found = assign(cost)
            assert sorted(found) == list(range(size))
            least = min(sum(cost[i, p[i]] for i in range(size)) for p in itertools.permutations(range(size)))
            assert sum(cost[i, found[i]] for i in range(size)) == least


def test_a_thousand_workers_take_no_time_that_a_recovery_would_notice():
    old = [f"w{rank}" for rank in range(1000)]
    held = {w: (rank, (rank - 8) % 1000) for rank, w in enumerate(old)}
    members = [w for w in old if w != "w400"]
    began = time.process_time()
    order = seated(members, held, 1000)
    assert time.process_time() - began < 3.0
    assert total(order, held, 1000) >= total(members, held, 1000)
