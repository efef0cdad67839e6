"""Find the newest checkpoint, and write checkpoints of the state that parked workers hold.

The checkpoints after the last step, after a stop, and of a failing run are made in the same way: from the newest state that the living
workers hold together. Each shard is written by its owner, or by a worker that has its copy. So the loss of a worker meanwhile costs
nothing while a copy is left.

No method waits. If an answer takes time, a method raises :class:`Unanswered`, and the control loop calls it again in the next round.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from vescale_ray.controller import policy
from vescale_ray.controller.bounded_io import BoundedIO
from vescale_ray.controller.checkpointing.cadence import Cadence
from vescale_ray.controller.checkpointing.committer import Committer, SaveResult, newest_kept
from vescale_ray.controller.checkpointing.parked import Held, held, held_step, writes
from vescale_ray.controller.state.generation_log import GenerationLog
from vescale_ray.controller.state.run_log import RunLog
from vescale_ray.controller.state.state_store import StateWriter
from vescale_ray.controller.statistics.checkpoint_stats import saved_event
from vescale_ray.controller.worker_group.worker_group import WorkerGroup
from vescale_ray.workers.messages import Save
from vescale_ray.workers.resharding.held_state import Resume, choose_resume

_log = logging.getLogger(__name__)

TRIES = 3
STORAGE_S = 60.0
"""Timeout of a question to the storage, in seconds. A file system whose server is gone never answers."""


class Unanswered(Exception):
    """The answer is not known yet. The same call in a later round returns it."""


@dataclass(frozen=True)
class _Saving:
    """A checkpoint of parked workers that is under way.

    Attributes:
        only_newer: as in :meth:`CheckpointCoordinator.save`.
        attempt: id of the ordered attempt, if any. ``writers`` write it, until ``until`` at the latest.
        settle_until: latest time to wait for the writers of a failed attempt. They can neither write again nor join before they are done.
    """

    workers: tuple[str, ...]
    only_newer: bool
    tries: int = 0
    attempt: str | None = None
    writers: tuple[str, ...] = ()
    until: float = 0.0
    settle_until: float | None = None
    problem: str = "the workers died while they wrote it"


@dataclass
class _Lookup:
    """A request to the storage, and the values on which its answer depends."""

    about: tuple[Any, ...]
    ask: Any
    until: float = field(default_factory=lambda: time.monotonic() + STORAGE_S)


class CheckpointCoordinator:
    """Finds checkpoints, and writes states to new ones.

    Args:
        root: folder of the checkpoints.
        run_id: id of this start of the run, part of the ids of checkpoints.
        durable: gives the numbers that serve as epochs of checkpoints.
        save_s: longest time for a checkpoint, in seconds.
        cadence: receives the result of each checkpoint.
        oldest: generation of the oldest checkpoint to go back to.
    """

    def __init__(
        self,
        root: str,
        run_id: str,
        worker_group: WorkerGroup,
        log: RunLog,
        generation: GenerationLog,
        committer: Committer,
        durable: StateWriter,
        save_s: float,
        cadence: Cadence,
        oldest: int = 0,
    ) -> None:
        self._cadence = cadence
        self._root, self._run_id, self._save_s, self._oldest = root, run_id, save_s, oldest
        self._worker_group, self._log, self._generation, self._committer = worker_group, log, generation, committer
        self._durable = durable
        self._bounded_io = BoundedIO()
        self._lookup: _Lookup | None = None
        self._saving: _Saving | None = None
        self._bad: frozenset[str] = frozenset()
        self._results: dict[str, SaveResult] = {}
        self._damaged: set[str] = set()
        self._last: SaveResult | None = None
        """Result of the last checkpoint that was committed."""

    def mark_damaged(self, commit: str) -> None:
        """Note that a checkpoint is damaged, so that an older one is used."""
        self._bad |= {commit}

    def damaged(self, attempt: str) -> None:
        """Note that a worker's part of an attempt can't be read back. If the attempt was committed, an older checkpoint is used."""
        self._damaged.add(attempt)
        result = self._results.get(attempt)
        if result is not None and result.kept is not None:
            self.mark_damaged(result.kept.name)

    def newest(self) -> policy.CommittedCheckpoint | None:
        """Return the newest checkpoint that is not known to be damaged; the newest recorded one if the storage fails.

        Raises:
            Unanswered: the storage has not answered yet.
        """
        try:
            return self._ask_storage()
        except OSError as error:
            _log.warning("the newest checkpoint in %s could not be found: %s", self._root, error)
        path, step = self._log.stats.checkpoints.path, self._log.stats.checkpoints.step
        return policy.CommittedCheckpoint(path.rpartition("/")[2], path, step) if path is not None and step is not None else None

    def newer(self, holders: Iterable[str]) -> policy.CommittedCheckpoint | None:
        """Return the newest checkpoint, if it may be newer than the state of ``holders`` (parked workers, leavers included).

        Otherwise return None without a request to the storage, which may be slow or out of reach.

        Raises:
            Unanswered: the storage has not answered yet.
            OSError: no state is held, and the storage is out of reach, or shows none of the checkpoints that must exist (for example
                because it is not mounted). A fresh start would be wrong.
        """
        step = held_step(self._worker_group, holders)
        if step >= (self._log.stats.checkpoints.step or 0):
            self._lookup = None  # the next lookup must not take this answer, which will be old
            return None
        try:
            return self._ask_storage()
        except OSError as error:
            if step < 0:
                raise
            _log.warning("%s is out of reach: going on from step %d in memory: %s", self._root, step, error)
            return None

    def _ask_storage(self) -> policy.CommittedCheckpoint | None:
        """Return the newest checkpoint.

        Raises:
            Unanswered: the storage has not answered yet.
            OSError: it is out of reach, or has not answered for :data:`STORAGE_S`.
        """
        about = (self._bad, self._log.stats.checkpoints.step)
        lookup, self._lookup = self._lookup, None
        if lookup is None or lookup.about != about:
            lookup = _Lookup(about, partial(newest_kept, self._root, self._bad, self._oldest, self._log.stats.checkpoints.step))
        try:
            found: policy.CommittedCheckpoint | None = self._bounded_io.do(lookup.ask)
        except TimeoutError:
            if time.monotonic() >= lookup.until:
                raise
            self._lookup = lookup
            raise Unanswered from None
        return found

    def collect(self) -> None:
        """Record checkpoints that were committed or have failed."""
        for result in self._committer.results():
            self._note(result)

    def abandon(self, reason: str = "a worker was lost before it had written its part") -> None:
        """Give up checkpoints of a generation that is over: the votes that they lack will not come."""
        for result in self._committer.abandon(reason):
            self._note(result)

    def save(self, workers: Sequence[str], *, only_newer: bool = False) -> SaveResult | None:
        """Make a checkpoint of the newest state that the parked ``workers`` hold together. Call it in each round until it returns.

        Returns None if they hold no state, or if a checkpoint is newer than theirs (possible if copies are not made every step). An older
        state that is committed later would pass for the newest. With ``only_newer``, also returns None if the newest checkpoint is of the
        same step.

        If a worker dies meanwhile, the checkpoint goes on as long as the others have copies of its shards.

        Raises:
            Unanswered: the checkpoint is under way.
        """
        self._saving = self._saving or _Saving(tuple(workers), only_newer)
        result = self._advance(self._saving)
        self._saving = None
        return result

    def _advance(self, saving: _Saving) -> SaveResult | None:
        while saving.tries < TRIES:
            if saving.attempt is None and saving.settle_until is None:
                states = held(self._worker_group, saving.workers)
                resume = choose_resume(states)
                if resume is None or self._is_superseded(resume, only_newer=saving.only_newer):
                    return None
                last = self._last
                if last is not None and last.step == resume.step and last.epoch >= resume.generation:
                    return last
                self._saving = saving = replace(saving, **self._order(resume, states))
            if saving.settle_until is None:
                assert saving.attempt is not None
                if not self._decided(saving.attempt, saving.writers) and time.monotonic() < saving.until:
                    raise Unanswered
                if saving.attempt in self._results:
                    return self._results[saving.attempt]
                if all(self._worker_group.alive(w) for w in saving.writers):  # the storage hangs, so another try would fail as well
                    problem = f"it was not written within {self._save_s:g} s (checkpoint.last_timeout_s)"
                    self.abandon(problem)
                    return SaveResult("", self._log.stats.step, 0, 0.0, error=problem)
                self.abandon()
                self._saving = saving = replace(saving, settle_until=time.monotonic() + self._save_s)
            if writes(self._worker_group, saving.workers) and time.monotonic() < (saving.settle_until or 0.0):
                raise Unanswered
            self._saving = saving = replace(saving, tries=saving.tries + 1, attempt=None, settle_until=None)
        return SaveResult("", self._log.stats.step, 0, 0.0, error=saving.problem)

    def _is_superseded(self, resume: Resume, *, only_newer: bool) -> bool:
        """Return whether a checkpoint is newer than this state. With ``only_newer``, one of the same step counts, too.

        Raises:
            Unanswered: the storage has not answered yet.
        """
        if not only_newer and resume.step >= (self._log.stats.checkpoints.step or 0):
            return False
        kept = self.newest()
        step = kept.step if kept is not None else 0
        return resume.step <= step if only_newer else resume.step < step

    def _order(self, resume: Resume, states: Held) -> dict[str, Any]:
        """Order an attempt to write this state. Returns the fields of :class:`_Saving` that describe the attempt."""
        holders: dict[int, list[str]] = {}
        for worker, held_states in states.items():
            for held_state in held_states:
                if (held_state.generation, held_state.step) == (resume.generation, resume.step):
                    for rank in held_state.ranks:
                        holders.setdefault(rank, []).append(worker)
        owners = policy.owners_of(self._generation.world, resume)
        plan = policy.spread_saving(holders, [of[shard % len(of)] for shard, of in enumerate(owners)])
        epoch = self._durable.take_number()
        attempt = f"{self._run_id}-h{epoch}-s{resume.step}"
        tickets = {w: report.ticket for w in plan if (report := self._worker_group.report(w)) is not None}
        refused = self._worker_group.order({w: Save(tickets[w], resume, ranks, attempt, epoch) for w, ranks in plan.items()})
        now = time.monotonic()
        if refused:
            self.abandon()
            return {"problem": next(iter(refused.values())), "settle_until": now + self._save_s}
        return {"attempt": attempt, "writers": tuple(plan), "until": now + self._save_s}

    def _decided(self, attempt: str, writers: Sequence[str]) -> bool:
        if attempt in self._results:
            return True
        return not all(self._worker_group.alive(w) for w in writers) and not self._committer.committing(attempt)

    def _note(self, result: SaveResult) -> None:
        self._results[result.attempt] = result
        if result.attempt in self._damaged and result.kept is not None:
            self.mark_damaged(result.kept.name)
        self._cadence.saved(result)
        self._last = result if result.kept is not None else self._last
        name, about = saved_event(result, self._log.stats.ended(result.step))
        self._log.record(name, **about)
