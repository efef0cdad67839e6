"""Ranks agree on a save through the store, and their messages do not fill the store."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.checkpoint.checkpoint_support import DTYPES, random_bits
from tests.ranks import on_processes
from vescale_ray import checkpoint as ckpt
from vescale_ray.checkpoint.api import prepare
from vescale_ray.checkpoint.errors import SaveFailed
from vescale_ray.checkpoint.saving.accord import Accord, RankStatus, Verdict
from vescale_ray.checkpoint.saving.polling import pause_after


def pair(store=None):
    """Accords of ranks 0 and 1 over one store, as the process group makes them."""
    store, made = store or dist.HashStore(), []
    for rank in (0, 1):
        accord = Accord(None, rank, 1, "root")
        accord.world, accord._store, accord._shared = 2, store, store
        made.append(accord)
    return store, *made


def say(store, key, status):
    store.set(f"{key}/r1", status.to_json())


def named():
    return "attempt", 1


def test_verdict_is_deleted_once_all_ranks_reach_the_next_save():
    store, leader, other = pair()
    first, second, third = (leader.key(step) for step in (5, 6, 7))
    say(store, first, RankStatus())
    assert leader.agree(first, RankStatus(), named, 5.0).fate == "go"
    assert other.agree(first, RankStatus(), named, 5.0).fate == "go", "rank 1's status was there, now it hears the verdict"
    other.tell(second, RankStatus(busy=True))
    assert leader.agree(second, RankStatus(), named, 5.0).fate == "busy"
    assert not store.check([f"{first}/verdict"]) and store.check([f"{second}/verdict"])
    say(store, third, RankStatus())
    assert leader.agree(third, RankStatus(), named, 5.0).fate == "go"
    assert not store.check([f"{second}/verdict"]) and store.check([f"{third}/verdict"])
    assert not any(store.check([f"{key}/r1"]) for key in (second, third))


@pytest.mark.fault("K25")
def test_rank_that_missed_a_save_joins_the_next_and_no_key_stays():
    store = dist.HashStore()
    for _ in range(2):  # the second pair: another saver, or a process group made anew over the same store
        _, leader, other = pair(store)
        say(store, other.key(5), RankStatus())
        assert leader.agree(leader.key(5), RankStatus(), named, 5.0).fate == "go", (
            "statuses of an older saver's save of this step are not taken"
        )
        assert leader.agree(leader.key(6), RankStatus(), named, 0.05).fate == "failed", "rank 1 has missed it"
        leader.tell(leader.key(7), RankStatus(busy=True))
        say(store, other.key(7), RankStatus())
        for _ in range(2):  # the same step may be saved again
            key, same = leader.key(8), other.key(8)
            assert key == same and not store.check([f"{key}/verdict"]), "no verdict of before is heard as that of now"
            say(store, same, RankStatus())
            assert leader.agree(key, RankStatus(), named, 5.0).fate == "go"
    before = store.num_keys()
    for step in range(100, 150):
        say(store, other.key(step), RankStatus())
        leader.agree(leader.key(step), RankStatus(busy=step % 3 == 0), named, 5.0)
    leader.forget()
    assert store.num_keys() < before, "what was said on a save goes, of skipped ones too"


@pytest.mark.fault("K25")
def test_rank_leaving_before_the_save_begins_notifies_the_others():
    store, leader, other = pair()

    def interrupted() -> bool:
        raise KeyboardInterrupt

    key = leader.key(5)
    with pytest.raises(KeyboardInterrupt):
        other.agree(key, RankStatus(), named, 5.0, interrupted)
    assert leader.agree(key, RankStatus(), named, 5.0) == Verdict("failed", text="rank 1: interrupted by KeyboardInterrupt")
    key = leader.key(6)
    with pytest.raises(KeyboardInterrupt):
        leader.agree(key, RankStatus(), named, 5.0, interrupted)
    assert other.agree(key, RankStatus(), named, 5.0) == Verdict("failed", text="rank 0: interrupted by KeyboardInterrupt")
    key = leader.key(7)
    with pytest.raises(SaveFailed, match="rank 0 did not begin this save within 0.1 s"):
        other.agree(key, RankStatus(), named, 0.05)
    assert "rank 1: timed out waiting" in leader.agree(key, RankStatus(), named, 5.0).text, "nothing is written for a rank that has gone"
    key = leader.key(8)
    say(store, key, RankStatus())
    assert "could not be looked up: no bucket" in leader.agree(key, RankStatus(), fails, 5.0).text
    assert other.agree(key, RankStatus(), named, 5.0).fate == "failed"


def fails():
    raise ValueError("no bucket")


def test_unfit_or_missing_rank_fails_the_save_on_every_rank():
    store, leader, other = pair()
    key = leader.key(5)
    say(store, key, RankStatus(problem="weights on two devices"))
    verdict = leader.agree(key, RankStatus(), named, 5.0)
    assert (verdict.fate, verdict.text) == ("unfit", "rank 1: weights on two devices")
    assert other.agree(key, RankStatus(), named, 5.0) == verdict
    missing = leader.agree(leader.key(6), RankStatus(), named, 0.05)
    assert missing.fate == "failed" and "ranks [1] of 2 did not come to this save within 0.05 s" in missing.text


def test_polling_delays_an_answer_by_at_most_five_percent():
    now = asked = 0.0
    while now < 100.0:
        now += pause_after(now)
        asked += 1
        assert pause_after(now) <= max(0.001, 0.05 * now) and pause_after(now) <= 0.25
    assert asked < 700, "the store has others to answer"


def test_plain_tensors_differing_between_ranks_cause_one_warning(caplog):
    """The tensors are, for example, different experts under equal names. Only one rank's tensor is stored for each name."""

    def status(rank, **own):
        # torch does not copy single elements of uint4.
        same = {f"same.{dtype}": random_bits((40, 3), dtype, 7) for dtype in (*DTYPES, torch.uint4, torch.float4_e2m1fn_x2)}
        state = {"model": {**same, "none": torch.ones(0), "0-d": torch.tensor(1.5), "columns": torch.ones(4, 6).t(), **own}}
        return prepare(state, 5, 2, rank, None, None, None).status

    _, leader, other = pair()
    said = "1 plain tensors differ between ranks (for example 'expert', on ranks 0 and 1)"
    cases = [
        (status(0), status(1), None),
        (status(0, expert=torch.ones(1000)), status(1, expert=torch.zeros(1000)), said),
        (status(0, expert=torch.ones(1000)), status(1, expert=torch.zeros(1000)), None),
        (status(0, a=torch.ones(2)), status(1, b=torch.zeros(2)), None),
    ]
    for step, (mine, theirs, told) in enumerate(cases):
        caplog.clear()
        say(other._store, leader.key(step), theirs)
        assert leader.agree(f"{step}.1", mine, named, 5.0).fate == "go", "it may be meant: running statistics"
        assert [record.message.startswith(told) for record in caplog.records] == ([True] if told else []), caplog.text
    assert len(theirs.to_json()) < 1000, "no name is told to the others"


@on_processes(2)
def test_ranks_may_give_a_states_tensors_in_any_order(rank: int, world: int) -> None:
    """The order decided which rank writes a copy, so that two ranks wrote the same one, and none another."""
    with tempfile.TemporaryDirectory() as mine:
        place: list[Any] = [mine]
        dist.broadcast_object_list(place)
        tensors = {f"w{i}": torch.full((40 - 5 * i,), float(i)) for i in range(6)}
        entries: dict[str, Any] = {"model": tensors, "ema": {name: tensor + 10 for name, tensor in tensors.items()}}
        if rank == 1:
            entries = {key: dict(reversed(entries[key].items())) for key in reversed(entries)}
        ckpt.save(entries, place[0], 1)
        loaded = {key: {name: torch.zeros_like(tensor) for name, tensor in given.items()} for key, given in entries.items()}
        ckpt.load(loaded, place[0])
        assert all(torch.equal(loaded[key][name], tensor) for key, given in entries.items() for name, tensor in given.items())
        dist.barrier()
