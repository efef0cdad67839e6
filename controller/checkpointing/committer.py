"""Checkpoints under way: collect the workers' votes, and commit a checkpoint once all its votes are there. Training goes on meanwhile.

Workers write their objects during training and vote. Only the controller commits: with one writer, two generations can't commit against
each other. If a vote is missing when its generation has failed, or when the next one begins, it will not come. The attempt is then given
up, and its objects are collected as garbage later. The ranks of a library save vote through the store instead
(``checkpoint/saving/voting.py``). ``checkpoint.commit`` checks and commits the votes of both; ``upkeep.collection`` cleans up.

Only the controller's thread uses a :class:`Committer`, which has two threads of its own. One commits. The other deletes old checkpoints
once the workers have read the new one back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from vescale_ray.controller.policy import CommittedCheckpoint
from vescale_ray.workers.messages import SavedShard

if TYPE_CHECKING:
    from vescale_ray.checkpoint import Commit, Retention
    from vescale_ray.config import RunConfig


@dataclass(frozen=True)
class SaveResult:
    """Result of a checkpoint, which was committed, or failed with ``error``.

    Attributes:
        seconds: from the first worker's copy to the commit.
        stall_s: seconds that training waited for the slowest copy; 0 if the workers were parked.
        stages: seconds by stage: ``snapshot`` is ``stall_s``, ``upload`` lasts until the slowest worker had written, ``commit`` begins with
            the last vote.
    """

    attempt: str
    step: int
    epoch: int
    seconds: float
    kept: CommittedCheckpoint | None = None
    bytes: int = 0
    error: str | None = None
    stall_s: float = 0.0
    stages: Mapping[str, float] = field(default_factory=dict)


@dataclass
class _Ballot:
    step: int
    epoch: int
    world: int
    heard: float
    """Arrival of the last vote or failure. The commit begins with the last vote."""
    seconds: float = 0.0
    """Seconds until the slowest rank had written."""
    stall_s: float = 0.0
    votes: dict[int, str] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    commit: Future[SaveResult] | None = None

    def take(self, item: SavedShard) -> None:
        """Take a worker's vote, or its failure."""
        self.heard = time.monotonic()
        self.seconds, self.stall_s = max(self.seconds, item.seconds), max(self.stall_s, item.stall_s)
        if item.vote is not None:
            self.votes[item.rank] = item.vote
        else:
            self.errors[item.rank] = item.error or "unknown"

    def begin(self, commit: Future[SaveResult]) -> None:
        """Note that the commit has begun. ``commit``: the future of its result."""
        self.commit = commit


class Committer:
    """Collects votes and commits.

    Args:
        root: folder of the checkpoints.
        retention: returns which checkpoints to keep; called after a commit. (Its class imports torch, which takes seconds.)
        meta: returns the record of a checkpoint of a step, for JSON. Called in the controller's thread.
        done: for a restarted controller, the newest attempt that is committed already, if any. The workers may send its votes again. All
            votes wait until this attempt is known.
        bound_s: longest wait, in seconds, for the next vote and for the commit. A store that hangs must be reported, not waited for.
    """

    def __init__(
        self,
        root: str,
        retention: Callable[[], Retention],
        meta: Callable[[int], Mapping[str, Any]],
        done: Future[str | None] | None = None,
        bound_s: float = 600.0,
    ) -> None:
        self._bound_s = bound_s
        self._root, self._retention, self._meta = root, retention, meta
        self._open: dict[str, _Ballot] = {}
        self._closed: set[str] = set()
        self._done = done
        self._early: list[SavedShard] = []
        self._least = 0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="vescale-commit")
        self._tenders = ThreadPoolExecutor(1, thread_name_prefix="vescale-retention")
        self._tended: Future[None] | None = None
        self._newest: str | None = None
        self._closing = threading.Event()

    @property
    def busy(self) -> bool:
        """True if any attempt waits for votes or its commit."""
        self._know()
        return bool(self._open or self._early)

    @property
    def pending(self) -> int:
        """Attempts that wait for votes or their commit."""
        return len(self._open)

    def take(self, item: SavedShard) -> None:
        """Take a worker's vote, or its failure."""
        if not self._know():
            self._early.append(item)
            return
        if item.attempt in self._closed or (item.epoch < self._least and item.attempt not in self._open):
            return
        attempt = self._open.setdefault(item.attempt, _Ballot(item.step, item.epoch, item.world, 0.0))
        attempt.take(item)
        if len(attempt.votes) == attempt.world and attempt.commit is None:
            attempt.begin(self._pool.submit(self._commit, item.attempt, attempt, self._meta(attempt.step)))

    def results(self) -> list[SaveResult]:
        """Return the attempts that have ended since the last call: committed or failed."""
        self._know()
        ended: list[SaveResult] = []
        for name, attempt in list(self._open.items()):
            if name not in self._open:
                continue
            if attempt.commit is not None and attempt.commit.done():
                ended.append(self._close(name, attempt.commit.result()))
                # Workers vote in order. So votes that an earlier attempt still lacks were lost with a controller, and will not come.
                for other, earlier in list(self._open.items()):
                    if earlier.commit is None and (earlier.epoch, earlier.step) < (attempt.epoch, attempt.step):
                        ended.append(self._close(other, self._failed(other, earlier, "a later one was complete before it")))
            elif attempt.errors and len(attempt.errors) + len(attempt.votes) >= attempt.world:
                rank, error = sorted(attempt.errors.items())[0]
                # Every rank has been heard, so no rank still writes to this attempt, and it will not be committed. A full disk must not
                # keep its pieces.
                self._tended = self._tenders.submit(self._discard, name)
                ended.append(self._close(name, self._failed(name, attempt, f"rank {rank}: {error}")))
            elif time.monotonic() - attempt.heard > self._bound_s:
                absent = sorted(set(range(attempt.world)) - attempt.votes.keys() - attempt.errors.keys())
                what = f"no vote from ranks {absent}" if absent else f"no answer to its commit from {self._root}"
                ended.append(self._close(name, self._failed(name, attempt, f"{what} for {self._bound_s:g} s: given up")))
        return ended

    def abandon(self, reason: str) -> list[SaveResult]:
        """Give up the attempts that still lack votes, because no worker is left to give them."""
        self._know()
        return [
            self._close(name, self._failed(name, attempt, reason)) for name, attempt in list(self._open.items()) if attempt.commit is None
        ]

    def fence(self, epoch: int) -> None:
        """Begin no new attempt of an epoch before ``epoch``. A vote that was under way when its generation ended is ignored."""
        self._least = epoch

    def committing(self, attempt: str) -> bool:
        """Return whether all votes of an attempt are there, and its commit is under way."""
        self._know()
        found = self._open.get(attempt)
        return found is not None and found.commit is not None

    def close(self, patience_s: float = 10.0) -> None:
        """Begin no more commits; a commit under way may still end. Old checkpoints are deleted now, without a further wait for the workers.
        ``patience_s``: longest wait for that deletion, in seconds."""
        self._closing.set()
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._tended is not None:
            wait([self._tended], patience_s)
        self._tenders.shutdown(wait=False, cancel_futures=True)

    def _know(self) -> bool:
        """Return whether it is known which attempt was committed before. Once it is, take the votes that arrived earlier."""
        if self._done is None:
            return True
        if not self._done.done():
            return False
        if self._done.exception() is None and (attempt := self._done.result()) is not None:
            self._closed.add(attempt)
        self._done = None
        early, self._early = self._early, []
        for item in early:
            self.take(item)
        return True

    def _close(self, name: str, result: SaveResult) -> SaveResult:
        self._open.pop(name, None)
        self._closed.add(name)
        return result

    @staticmethod
    def _failed(name: str, attempt: _Ballot, error: str) -> SaveResult:
        return SaveResult(name, attempt.step, attempt.epoch, attempt.seconds + time.monotonic() - attempt.heard, error=error)

    def _commit(self, name: str, attempt: _Ballot, meta: Mapping[str, Any]) -> SaveResult:
        """Commit an attempt, in the commit thread."""
        from vescale_ray import checkpoint

        try:
            votes = [checkpoint.Vote.from_json(text) for text in attempt.votes.values()]
            made = checkpoint.commit(
                self._root,
                votes,
                step=attempt.step,
                epoch=attempt.epoch,
                attempt=name,
                world=attempt.world,
                meta=meta,
            )
            committed = time.monotonic() - attempt.heard
        except Exception as error:
            return self._failed(name, attempt, f"{type(error).__name__}: {error}")
        self._newest = made.name
        if not self._closing.is_set():
            self._tended = self._tenders.submit(self._tend, made, max(5.0, 2 * (attempt.seconds + committed)))
        kept = CommittedCheckpoint(made.name, made.path, made.step)
        stages = {"snapshot": attempt.stall_s, "upload": attempt.seconds, "commit": committed}
        return SaveResult(
            name, attempt.step, attempt.epoch, attempt.seconds + committed, kept, made.bytes, stall_s=attempt.stall_s, stages=stages
        )

    def _tend(self, made: Commit, patience_s: float) -> None:
        """Delete old checkpoints, in the second thread, once the workers have read ``made`` back. A newer checkpoint ends this wait, and
        starts its own deletion."""
        from vescale_ray.checkpoint.upkeep.collection import tend

        tend(self._root, self._retention(), made, patience_s, lambda: self._closing.is_set() or self._newest != made.name)

    def _discard(self, attempt: str) -> None:
        from vescale_ray.checkpoint.upkeep.collection import discard

        discard(self._root, attempt, "checkpoint")


def retention_of(config: RunConfig) -> Retention:
    """Return the retention that ``checkpoint.keep_*`` configure."""
    from vescale_ray.checkpoint import Retention

    c = config.checkpoint
    return Retention(c.keep_last, c.keep_every, c.keep_best, c.keep_metric, c.keep_mode, c.keep_verified)


def newest_kept(root: str, bad: frozenset[str] = frozenset(), oldest: int = 0, made: int | None = None) -> CommittedCheckpoint | None:
    """Return the newest whole checkpoint whose name is not in ``bad``, of generation ``oldest`` or later; None when there is none.

    Args:
        made: step of a checkpoint that must exist, whole or damaged.

    Raises:
        OSError: the storage, or a newer checkpoint, is out of reach, so that the newest is unknown. Or there is no checkpoint although one
            must exist.
    """
    from vescale_ray.checkpoint.commits import ls, newest_first

    found = takewhile(lambda one: one.epoch >= oldest, newest_first(root))
    newest = next((CommittedCheckpoint(one.name, one.path, one.step) for one in found if one.name not in bad), None)
    if newest is None and made is not None and not any(one.epoch >= oldest for one in ls(root)):
        raise FileNotFoundError(f"{root} has no checkpoint any more, though there was one of step {made}: is it mounted?")
    return newest
