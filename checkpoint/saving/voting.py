"""Voting: the ranks of a save under torchrun agree on one commit through small objects in the store, without a collective.

    rank 1..n-1                        rank 0
    attempts/<attempt>/r00001.json --> collects votes up to the first failure
                                       commit
    <-- attempts/<attempt>/outcome.json

No watchdog can abort the job during a write, and any thread can vote. A failing rank tells the others at once. If a save fails before its
commit was tried, each rank deletes its objects, so that failed saves do not fill the disk. Once the commit was tried, nothing is deleted
here, since the commit may exist even if the answer was an error.
"""

from __future__ import annotations

import errno
import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..commits import Commit, commit
from ..errors import CheckpointError, CommitExists, CommitRefused, SaveAborted, SaveFailed
from ..faults import fault_point
from ..format.commit_names import check_attempt
from ..format.shard import Vote
from ..stores.store import KeyMissing, ObjectStore
from ..upkeep.collection import discard
from .polling import pause_after

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Attempt:
    """One attempt to save one step, as every rank knows it. ``document`` and ``aliases`` go into the manifest (rank 0's)."""

    name: str
    step: int
    epoch: int
    world: int
    rank: int
    document: Mapping[str, Any]
    aliases: Mapping[str, str]
    timeout_s: float


def conclude(store: ObjectStore, attempt: Attempt, written: Vote | Exception, cancelled: Callable[[], bool] = lambda: False) -> Commit:
    """Tell the other ranks how this rank's write ended, and reach the same outcome as they do.

    Raises:
        SaveFailed: there is no commit; raised on every rank that hears of it. SaveAborted: cancelled while it waited.
    """
    if attempt.rank == 0:
        return _lead(store, attempt, written, cancelled)
    word = {"error": str(written)} if isinstance(written, Exception) else {"vote": written.to_json()}
    _tell(store, attempt.name, f"r{attempt.rank:05d}", word)
    fault_point("vote.written", attempt.rank)
    if isinstance(written, Exception):
        _discard(store, attempt, heard=False)
        raise written
    patience = 2 * attempt.timeout_s
    try:
        outcome = _await(store, attempt.name, "outcome", time.monotonic() + patience, cancelled)
    except OSError as error:
        raise SaveFailed(
            f"step {attempt.step}: rank 0's message about the commit could not be read within {patience:.0f} s: {error.strerror or error}; "
            "earlier checkpoints are untouched"
        ) from error
    if outcome is None:
        raise SaveFailed(_silent(store, f"step {attempt.step}: rank 0 reported no commit within {patience:.0f} s"))
    if "error" in outcome:
        if outcome.get("dead"):
            _discard(store, attempt)
        raise SaveFailed(outcome["error"])
    return Commit(**outcome["commit"])


def _lead(store: ObjectStore, attempt: Attempt, written: Vote | Exception, cancelled: Callable[[], bool]) -> Commit:
    """Collect the votes, commit, and tell the others, on rank 0."""
    deadline = time.monotonic() + attempt.timeout_s
    world, step = attempt.world, attempt.step
    dead = True
    try:
        if isinstance(written, Exception):
            raise written
        votes = [written]
        for rank in range(1, world):
            raw = _await(store, attempt.name, f"r{rank:05d}", deadline, cancelled)
            if raw is None:
                raise SaveFailed(_silent(store, f"step {step}: no vote from rank {rank} of {world} within {attempt.timeout_s:.0f} s"))
            if "error" in raw:
                raise SaveFailed(raw["error"])
            votes.append(Vote.from_json(raw["vote"]))
        if cancelled():
            raise SaveAborted(f"step {step}: this save was given up before its commit; earlier checkpoints are untouched")
        dead = False
        made = commit(
            store,
            votes,
            step=step,
            epoch=attempt.epoch,
            attempt=attempt.name,
            world=world,
            meta=attempt.document,
            aliases=attempt.aliases,
        )
    except Exception as error:
        # The other ranks must hear of any error rather than wait. A commit refused before anything of it was written is as dead as one
        # without its votes.
        dead = dead or isinstance(error, CommitRefused) and not isinstance(error, CommitExists)
        if world > 1:
            _tell(store, attempt.name, "outcome", {"error": str(error), "dead": dead})
        if dead:
            _discard(store, attempt)
        if error is written or isinstance(error, CheckpointError):
            raise
        raise SaveFailed(f"step {step}: {type(error).__name__}: {error}; earlier checkpoints are untouched") from error
    if world > 1:
        _tell(store, attempt.name, "outcome", {"commit": vars(made)})
    return made


def _silent(store: ObjectStore, what: str) -> str:
    """Return the error ``what`` about a rank without a message in the store, with the store's place and the remedy."""
    return f"{what} in {store.describe()}; if the rank lives, give a folder or URL that all ranks share; earlier checkpoints are untouched"


def _discard(store: ObjectStore, attempt: Attempt, *, heard: bool = True) -> None:
    """Delete the objects of this rank for an attempt that can no longer be committed (its vote only if rank 0 has read it)."""
    name, rank = attempt.name, f"r{attempt.rank:05d}"
    keys = [f"data/{name}/{rank}.safetensors", f"data/{name}/{rank}.aux.json"]
    keys += [f"attempts/{name}/{rank}.json"] if attempt.rank and heard else []
    discard(store, name, f"save of step {attempt.step}", keys)


def _tell(store: ObjectStore, attempt: str, name: str, value: Mapping[str, Any]) -> None:
    """Publish a message of this attempt. If the store refuses even this, the other ranks wait until their timeout."""
    try:
        store.put(f"attempts/{check_attempt(attempt)}/{name}.json", json.dumps(value).encode())
    except OSError as error:
        _log.error("could not publish %s of save attempt %s: %s", name, attempt, error)


def _await(store: ObjectStore, attempt: str, name: str, deadline: float, cancelled: Callable[[], bool]) -> Mapping[str, Any] | None:
    """Another rank's message; ``None`` if it has not come by ``deadline`` (of ``time.monotonic``)."""
    began = time.monotonic()
    late: OSError | None
    while True:
        try:
            found: Mapping[str, Any] = json.loads(store.get(f"attempts/{attempt}/{name}.json"))
            return found
        except KeyMissing:
            late = None
        except OSError as error:  # a store that fails once may answer the next time
            late = error
        except ValueError:  # half a message, from a store whose objects are visible before they are complete
            late = OSError(errno.EIO, f"attempts/{attempt}/{name}.json is not JSON")
        if time.monotonic() >= deadline:
            if late is not None:
                raise late
            return None
        if cancelled():
            raise SaveAborted(f"this save was given up while it waited for {name}; earlier checkpoints are untouched")
        time.sleep(pause_after(time.monotonic() - began))
