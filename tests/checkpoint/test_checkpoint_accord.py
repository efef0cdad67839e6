"""How ranks agree on a save, and that the store does not fill up with what they have said."""

from __future__ import annotations

import json
from dataclasses import asdict

import torch.distributed as dist

from vescale_ray.checkpoint.accord import Accord, Word
from vescale_ray.checkpoint.polling import pause_after


def pair():
    """Rank 0's and rank 1's accord of one store, as the process group would give them."""
    store, made = dist.HashStore(), []
    for rank in (0, 1):
        accord = Accord(None, rank, 1)
        accord.world, accord._store = 2, store
        made.append(accord)
    return store, *made


def say(store, key, word):
    store.set(f"{key}/r1", json.dumps(asdict(word)))


def named():
    return "attempt", 1


def test_verdicts_go_when_every_rank_has_come_to_the_next_save():
    store, leader, other = pair()
    first, second, third = (leader.key(step) for step in (5, 6, 7))
    say(store, first, Word())
    assert leader.agree(first, Word(), named, 5.0).fate == "go"
    assert other.agree(first, Word(), named, 5.0).fate == "go", "rank 1's word was there, now it hears the verdict"
    other.tell(second, Word(busy=True))
    assert leader.agree(second, Word(), named, 5.0).fate == "busy"
    assert not store.check([f"{first}/verdict"]) and store.check([f"{second}/verdict"])
    say(store, third, Word())
    assert leader.agree(third, Word(), named, 5.0).fate == "go"
    assert not store.check([f"{second}/verdict"]) and store.check([f"{third}/verdict"])
    assert not any(store.check([f"{key}/r1"]) for key in (second, third))


def test_an_unfit_rank_or_one_that_is_missing_stops_the_save_of_all():
    store, leader, other = pair()
    key = leader.key(5)
    say(store, key, Word(problem="weights on two devices"))
    verdict = leader.agree(key, Word(), named, 5.0)
    assert (verdict.fate, verdict.text) == ("unfit", "rank 1: weights on two devices")
    assert other.agree(key, Word(), named, 5.0) == verdict
    missing = leader.agree(leader.key(6), Word(), named, 0.05)
    assert missing.fate == "failed" and "ranks [1] of 2 did not come to this save within 0.05 s" in missing.text


def test_an_answer_is_heard_at_most_a_twentieth_late():
    now = asked = 0.0
    while now < 100.0:
        now += pause_after(now)
        asked += 1
        assert pause_after(now) <= max(0.001, 0.05 * now) and pause_after(now) <= 0.25
    assert asked < 700, "the store has others to answer"
