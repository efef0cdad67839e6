"""Saving and loading a training script's state under torchrun (or alone), whatever the number of ranks then and now.

The ranks agree on an attempt (one small broadcast), each writes its object, and votes through a file; rank 0 commits. No
collective is open while anything is written, so that no watchdog can strike, and a rank that fails tells the others at once.
"""

from __future__ import annotations

import json
import logging
import pickle
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from .commits import Commit, commit
from .errors import CheckpointError, SaveFailed
from .faults import fault_point
from .layout import ShardPiece
from .manifest import check_attempt, check_meta, parse_commit_name
from .retention import gc
from .rng import capture_rng
from .shard import Vote, new_attempt, write_shard
from .state import Flat, State, flatten
from .store import KeyMissing, ObjectStore, Root, store_of
from .tensors import local_part, owners

_log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class SaveHandle:
    """A save. It is complete when :func:`save` returns; ``wait`` is there so that callers need not change when it is not."""

    commit: Commit

    def wait(self) -> Commit:
        return self.commit


def save(
    state: State,
    root: Root,
    step: int,
    *,
    epoch: int | None = None,
    meta: Mapping[str, Any] | None = None,
    aux: Mapping[str, Any] | None = None,
    keep: int | None = None,
    timeout_s: float = 600.0,
    group: dist.ProcessGroup | None = None,
) -> SaveHandle:
    """Save a state; every rank calls it at the same step. Returns on each rank once the checkpoint is committed.

    Args:
        state: ``{"model": module or {fqn: tensor}, "optimizer": torch optimizer, ..}``; other entries: see ``state.py``.
        root: the checkpoint folder, the same on all ranks (shared between hosts).
        step: completed steps.
        epoch: the incarnation of the run. By default the newest commit's, one higher if ``step`` is not beyond it (the run
            went back): the new checkpoint is always the newest.
        meta: JSON-able, the same on all ranks; rank 0's is stored. aux: JSON-able, this rank's own. The random generators are
            stored in any case.
        keep: delete all but the newest ``keep`` checkpoints after this one is committed.
        timeout_s: how long to wait for the other ranks' votes, and for the commit.
        group: the ranks that save together; default: all. Without a process group this process saves alone.

    Raises:
        ValueError: a state that can't be stored; on every rank, before anything is written.
        SaveFailed: no commit was made (a rank failed, died, or storage refused); earlier checkpoints are untouched.
    """
    rank, world = ranks_of(group)
    store = store_of(root)

    def prepare() -> tuple[Flat, list[ShardPiece]]:
        if step < 0:
            raise ValueError(f"step is {step}; give the number of completed steps")
        check_meta(meta or {})
        check_meta(aux or {}, "aux")
        flat = flatten(state)
        return flat, _pieces(flat, world, rank)

    flat, pieces = together(prepare, group)
    attempt, chosen = from_first(lambda: (new_attempt(), next_epoch(newest_order(store), epoch, step)), group)
    full_aux = {"rng": capture_rng(), "user": dict(aux or {})}
    failure: Exception | None = None
    try:
        word = {"vote": write_shard(store, attempt, rank, pieces, aux=full_aux, step=step, epoch=chosen).to_json()}
    except Exception as error:
        # Whatever it is, the other ranks must hear of it rather than wait.
        failure = error
        word = {"error": str(error)}
    if rank == 0:
        made = _lead(store, attempt, world, chosen, step, flat, meta, word, timeout_s)
        if keep is not None:
            report = gc(store, keep)
            for problem in report.problems:
                _log.warning("checkpoint retention: %s", problem)
        return SaveHandle(made)
    _tell(store, attempt, f"r{rank:05d}", word)
    fault_point("vote.written", rank)
    if failure:
        raise failure
    outcome = _await(store, attempt, "outcome", time.monotonic() + 2 * timeout_s)
    if outcome is None:
        raise SaveFailed(f"step {step}: rank 0 reported no commit within {2 * timeout_s:.0f} s; earlier checkpoints are untouched")
    if "error" in outcome:
        raise SaveFailed(outcome["error"])
    return SaveHandle(Commit(**outcome["commit"]))


def _pieces(flat: Flat, world: int, rank: int) -> list[ShardPiece]:
    parts = {pair: local_part(pair[0], tensor, world, rank) for pair, tensor in flat.tensors.items()}
    writes = owners(list(parts.values()))
    pieces = []
    for ((name, kind), part), mine in zip(parts.items(), writes, strict=True):
        if mine and part.intervals:
            pieces += [ShardPiece(name, kind, start, end, part.shape, part.dtype, data) for start, end, data in part.pieces(part.flat())]
        else:  # also what another replica writes is named, empty: so that every rank lists every tensor in the same order
            pieces.append(ShardPiece(name, kind, 0, 0, part.shape, part.dtype, torch.empty(0, dtype=part.dtype)))
    return pieces


def newest_order(store: ObjectStore) -> tuple[int, int] | None:
    """(epoch, step) of the newest commit, from the names alone."""
    names = (entry.key.removeprefix("commits/").removesuffix(".json") for entry in store.list("commits/"))
    return max(filter(None, map(parse_commit_name, names)), default=None)


def next_epoch(newest: tuple[int, int] | None, epoch: int | None, step: int) -> int:
    """The epoch of a save of ``step``: the one given, or the least that makes it the newest."""
    if epoch is not None:
        return epoch
    if newest is None:
        return 0
    return newest[0] if step > newest[1] else newest[0] + 1


def _lead(
    store: ObjectStore,
    attempt: str,
    world: int,
    epoch: int,
    step: int,
    flat: Flat,
    meta: Mapping[str, Any] | None,
    own: Mapping[str, Any],
    timeout_s: float,
) -> Commit:
    """Rank 0: collect the votes, commit, tell the others."""
    deadline = time.monotonic() + timeout_s
    votes: list[Vote] = []
    try:
        for rank in range(world):
            raw = own if rank == 0 else _await(store, attempt, f"r{rank:05d}", deadline)
            if raw is None:
                raise SaveFailed(
                    f"step {step}: no vote from rank {rank} of {world} within {timeout_s:.0f} s; earlier checkpoints are untouched"
                )
            if "error" in raw:
                raise SaveFailed(raw["error"])
            votes.append(Vote.from_json(raw["vote"]))
        document = {"models": flat.models, "state": flat.values, "optimizers": flat.optimizers, "meta": dict(meta or {})}
        made = commit(store, votes, step=step, epoch=epoch, attempt=attempt, world=world, meta=document, aliases=flat.aliases)
    except CheckpointError as error:
        if world > 1:
            _tell(store, attempt, "outcome", {"error": str(error)})
        raise
    if world > 1:
        _tell(store, attempt, "outcome", {"commit": vars(made)})
    return made


def _tell(store: ObjectStore, attempt: str, name: str, value: Mapping[str, Any]) -> None:
    """Publish a message of this attempt; a store that refuses even this leaves the others to their timeout."""
    try:
        store.put(f"attempts/{check_attempt(attempt)}/{name}.json", json.dumps(value).encode())
    except OSError as error:
        _log.error("could not publish %s of save attempt %s: %s", name, attempt, error)


def _await(store: ObjectStore, attempt: str, name: str, deadline: float) -> Mapping[str, Any] | None:
    """Another rank's message; ``None`` if it has not come by ``deadline`` (of ``time.monotonic``)."""
    pause = 0.002
    while True:
        try:
            found: Mapping[str, Any] = json.loads(store.get(f"attempts/{attempt}/{name}.json"))
            return found
        except KeyMissing:
            if time.monotonic() >= deadline:
                return None
        time.sleep(pause)
        pause = min(0.25, pause * 1.5)


def ranks_of(group: dist.ProcessGroup | None) -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(group), dist.get_world_size(group)
    return 0, 1


def from_first(make: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """Rank 0's result on every rank; its error too."""
    rank, world = ranks_of(group)
    if world == 1:
        return make()
    box: list[Any] = [None]
    if rank == 0:
        try:
            box = [(True, make())]
        except Exception as error:
            box = [(False, _portable(error))]
    dist.broadcast_object_list(box, group=group, group_src=0)
    ok, value = box[0]
    if not ok:
        raise value
    return value  # type: ignore[no-any-return]


def together(work: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """Run ``work`` on every rank; if any rank raises, every rank raises the first rank's error that did."""
    rank, world = ranks_of(group)
    if world == 1:
        return work()
    mine: Exception | None = None
    result: T | None = None
    try:
        result = work()
    except Exception as error:
        mine = error
    errors: list[Exception | None] = [None] * world
    dist.all_gather_object(errors, _portable(mine), group=group)
    first = next((e for e in errors if e is not None), None)
    if mine is not None:
        # One sort of error on all ranks, so that all take the same way on.
        raise mine if first is None or type(mine) is type(first) else first from mine
    if first is not None:
        raise first
    return result  # type: ignore[return-value]


def _portable(error: Exception | None) -> Exception | None:
    """The error itself if it survives pickling, else its text: a collective must not fail on one rank alone."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
