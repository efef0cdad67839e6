"""The ranks of a save reach one outcome through the store, and no rank deletes an object that a commit may need."""

from __future__ import annotations

import errno
import json
import threading
import time
from typing import Any

import pytest
import torch

from tests.checkpoint.faulty_store import Fault, FaultyStore
from vescale_ray import checkpoint as ckpt
from vescale_ray.checkpoint.errors import CommitExists, SaveAborted, SaveFailed
from vescale_ray.checkpoint.saving.voting import Attempt, conclude
from vescale_ray.checkpoint.upkeep.collection import discard

W = torch.arange(10.0)
HALVES = ((0, 4), (4, 10))
THEIRS = "commits/e0000-s000000000005.json"


def rank_of(rank: int, world: int = 2, timeout_s: float = 5.0) -> Attempt:
    return Attempt("mine", 5, 0, world, rank, {}, {}, timeout_s)


def written(store: Any, rank: int, world: int = 2, attempt: str = "mine") -> ckpt.Vote:
    start, end = HALVES[rank] if world == 2 else (0, 10)
    piece = ckpt.ShardPiece("w", "param", start, end, (10,), torch.float32, W[start:end])
    return ckpt.write_shard(store, attempt, rank, [piece], aux={"rank": rank}, step=5, epoch=0)


def data(store: Any, rank: int | None = None) -> list[str]:
    return [entry.key for entry in store.list(f"data/mine/{'' if rank is None else f'r{rank:05d}'}")]


def say(store: Any, name: str, value: dict[str, Any]) -> None:
    store.put(f"attempts/mine/{name}.json", json.dumps(value).encode())


def both(store: Any, words: list[Any], *, timeout_s: float = 5.0) -> list[Any]:
    """Results or errors of ``conclude`` on ranks 0 and 1, each in its own thread."""
    ends: list[Any] = [None, None]

    def run(rank: int) -> None:
        try:
            ends[rank] = conclude(store, rank_of(rank, timeout_s=timeout_s), words[rank])
        except Exception as error:
            ends[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return ends


def test_both_ranks_return_one_commit_and_it_loads():
    store = ckpt.MemoryStore()
    first, second = both(store, [written(store, 0), written(store, 1)])
    assert first == second == ckpt.latest(store)
    assert torch.equal(ckpt.open(store).read("w"), W)


@pytest.mark.parametrize("action", ["lost", "error"])
@pytest.mark.fault("K15")
def test_lost_commit_answer_makes_no_rank_delete_its_data(action):
    inner = ckpt.MemoryStore()
    store = FaultyStore(inner, [Fault("put", action, "commits/*", times=None)])
    ends = both(store, [written(store, 0), written(store, 1)])
    assert all(type(end) is SaveFailed and "could not commit" in str(end) for end in ends)
    assert len(data(inner, 0)) == len(data(inner, 1)) == 2, "it can't be told from here whether the commit is there"
    if action == "lost":
        assert ckpt.verify(inner).ok and torch.equal(ckpt.open(inner).read("w"), W)


@pytest.mark.parametrize("what", ["another's", "damaged"])
def test_existing_commit_fails_the_save_and_deletes_nothing(what):
    store = ckpt.MemoryStore()
    if what == "another's":
        ckpt.commit(store, [written(store, 0, 1, "theirs")], step=5, epoch=0, attempt="theirs", world=1, meta={})
    else:  # perhaps our own commit, half stored: its repair would need the data
        store.put(THEIRS, b"{")
    before = store.get(THEIRS)
    ends = both(store, [written(store, 0), written(store, 1)])
    # Rank 1 has the error as text.
    assert type(ends[0]) is CommitExists and type(ends[1]) is SaveFailed and str(ends[0]) == str(ends[1])
    assert store.get(THEIRS) == before and len(data(store, 0)) == len(data(store, 1)) == 2


@pytest.mark.parametrize("failing", [0, 1])
def test_write_error_of_one_rank_makes_all_raise_it_and_clean_up(failing):
    store = ckpt.MemoryStore()
    words: list[Any] = [written(store, rank) for rank in (0, 1)]
    words[failing] = OSError(errno.ENOSPC, "disk full on one host")
    ends = both(store, words)
    assert all(isinstance(end, Exception) and "disk full on one host" in str(end) for end in ends)
    assert not data(store) and not store.list("commits/")


def test_failed_cleanup_is_logged_and_hides_no_error(caplog):
    inner = ckpt.MemoryStore()
    store = FaultyStore(inner, [Fault("delete", "error", "*.safetensors"), Fault("list", "error", "data/*")])
    written(store, 0, 1)
    with pytest.raises(OSError, match="disk full"):
        conclude(store, rank_of(0, 1), OSError(errno.ENOSPC, "disk full"))
    assert data(inner) == ["data/mine/r00000.safetensors"], "one refusal keeps no other object"
    discard(store, "mine", "checkpoint")
    kept = "the data of a failed {} stays until a garbage collection: [Errno 5] Input/output error"
    assert [record.message.split(": '")[0] for record in caplog.records] == [kept.format("save of step 5"), kept.format("checkpoint")]
    discard(store, "mine", "checkpoint")
    assert not data(inner) and len(caplog.records) == 2


def test_all_ranks_delete_data_of_votes_that_make_no_checkpoint():
    store = ckpt.MemoryStore()
    twice = written(store, 1)
    store.delete("data/mine/r00001.safetensors")
    ends = both(store, [written(store, 0), twice])
    assert isinstance(ends[0], ckpt.CommitRefused) and "r00001.safetensors is missing" in str(ends[1])
    assert not data(store) and not store.list("commits/")


@pytest.mark.parametrize("world", [1, 2])
def test_save_aborted_after_all_votes_is_not_committed(world):
    store = ckpt.MemoryStore()
    votes = [written(store, rank, world) for rank in range(world)]
    if world == 2:
        say(store, "r00001", {"vote": votes[1].to_json()})
    with pytest.raises(SaveAborted, match="given up before its commit"):
        conclude(store, rank_of(0, world), votes[0], lambda: True)
    assert not store.list("commits/") and not data(store, 0)
    if world == 2:
        assert json.loads(store.get("attempts/mine/outcome.json"))["dead"], "so that rank 1 clears up as well"


@pytest.mark.fault("K15")
def test_follower_waits_twice_the_timeout_and_keeps_its_data():
    store = ckpt.MemoryStore()
    vote = written(store, 1)
    began = time.monotonic()
    with pytest.raises(SaveFailed, match="rank 0 reported no commit"):
        conclude(store, rank_of(1, timeout_s=0.1), vote)
    assert 0.2 <= time.monotonic() - began < 5 and len(data(store, 1)) == 2, "rank 0 may have committed all the same"
    assert store.get("attempts/mine/r00001.json"), "and has its vote"


def test_rank_0_reports_a_missing_vote_after_the_timeout():
    store = ckpt.MemoryStore()
    vote = written(store, 0)
    began = time.monotonic()
    with pytest.raises(SaveFailed, match="no vote from rank 1 of 2"):
        conclude(store, rank_of(0, timeout_s=0.1), vote)
    assert 0.1 <= time.monotonic() - began < 5 and not data(store, 0)
    with pytest.raises(SaveFailed, match="no vote from rank 1 of 2"):
        conclude(store, rank_of(1), written(store, 1))
    assert not data(store), "whoever comes late clears up, too"


@pytest.mark.parametrize("rank", [0, 1])
def test_voting_retries_transient_but_not_lasting_read_errors(rank):
    inner = ckpt.MemoryStore()
    votes = [written(inner, 0), written(inner, 1)]
    if rank == 0:
        say(inner, "r00001", {"vote": votes[1].to_json()})
    else:
        made = ckpt.commit(inner, votes, step=5, epoch=0, attempt="mine", world=2, meta={})
        say(inner, "outcome", {"commit": vars(made)})
    hard = FaultyStore(inner, [Fault("get", "error", "attempts/*", times=None)])
    with pytest.raises(SaveFailed, match="Input/output error"):
        conclude(hard, rank_of(rank, timeout_s=0.05), votes[rank])
    if rank == 1:
        assert len(data(inner, 1)) == 2 and ckpt.verify(inner).ok
        for action in ("error", "short"):  # "short" gives half a message, as from a store that lists objects before they are complete
            inner.delete("attempts/mine/r00001.json")
            soft = FaultyStore(inner, [Fault("get", action, "attempts/*", times=2)])
            assert conclude(soft, rank_of(1), votes[1]) == ckpt.latest(inner) and len(soft.fired) == 2


@pytest.mark.parametrize("rank", [0, 1])
def test_aborted_save_stops_waiting_for_other_ranks_at_once(rank):
    store = ckpt.MemoryStore()
    began = time.monotonic()
    with pytest.raises(SaveAborted, match="given up while it waited for"):
        conclude(store, rank_of(rank, timeout_s=30.0), written(store, rank), lambda: True)
    assert time.monotonic() - began < 5
    assert len(data(store, rank)) == (0 if rank == 0 else 2), "rank 0 has this rank's vote, and may commit"
