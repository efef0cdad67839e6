"""The writer of asynchronous saves: one thread, which agrees with the other ranks, writes from the copies, votes and commits."""

from __future__ import annotations

import dataclasses
import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from ..api import Prepared, look_after, next_epoch
from ..commits import Commit, newest_order
from ..errors import SaveAborted, SaveFailed, SaveSkipped
from ..format.shard import Vote, new_attempt, write_staged
from ..format.staging import Slab, SlabPool
from ..stores.store import ObjectStore
from ..upkeep.retention import Retention
from .accord import Accord, RankStatus
from .bounded import DAEMONS
from .handle import SaveHandle
from .voting import Attempt, conclude

_log = logging.getLogger(__name__)

ABORT_S = 5.0
"""Seconds that an aborted save may take to notice; it checks before each chunk that it writes."""


@dataclasses.dataclass(eq=False)
class SaveJob:
    """A save as its writer sees it. Without ``prepared``, this rank takes no part, and ``status`` says why."""

    step: int
    epoch: int | None
    accord: Accord
    key: str
    status: RankStatus
    handle: SaveHandle
    timeout_s: float
    prepared: Prepared | None = None
    aux: bytes = b""
    slab: Slab | None = None
    began: float = 0.0
    vote: Vote | None = None


class SaveWriter:
    """One thread, its queue and its buffers. It has no reference to the saver, so that a dropped saver can be freed."""

    def __init__(self, store: ObjectStore, retention: Retention | None) -> None:
        self._store, self._retention = store, retention
        self._pools: dict[bool, SlabPool] = {}
        self._calls: queue.SimpleQueue[bool] = queue.SimpleQueue()
        """Wakes the thread, which processes ``_current``. ``False`` means the last time."""
        self._change = threading.Condition()
        self._handles: list[SaveHandle] = []
        self._current: list[SaveJob] = []
        """Saves being written and staged. One ``append`` to this list enters a job, so no interrupt can split it."""
        self._tending: SaveHandle | None = None
        self._aborted: set[int] = set()
        self._thread: threading.Thread | None = None
        self._committed: tuple[int, int] | None = None
        """The newest known commit."""
        self._tried: set[tuple[int, int]] = set()
        """Epochs and steps of this saver's attempts. One whose answer was lost may be committed."""

    @property
    def in_flight(self) -> int:
        with self._change:
            return self._saves()

    def _saves(self) -> int:
        return sum(job.prepared is not None for job in self._current)

    def _slabs(self) -> int:
        return sum(job.slab is not None for job in self._current)

    def busy(self, most: int) -> bool:
        with self._change:
            return self._saves() >= 2 or self._slabs() >= most

    def wait_for_room(self, most: int, timeout_s: float) -> None:
        with self._change:
            self._change.wait_for(lambda: self._saves() < 2 and self._slabs() < most, timeout_s)

    def take(self, nbytes: int, *, pinned: bool) -> Slab:
        pool = self._pools.setdefault(pinned, SlabPool(pinned=pinned))
        return pool.take(nbytes)

    def put(self, job: SaveJob) -> None:
        with self._change:
            self._current.append(job)
            self._handles = [h for h in self._handles if not h.done() or h.trouble()]
            self._handles += [job.handle] if job.prepared is not None else []
            self._move()

    def _move(self) -> None:
        """Ensure that the thread works on the queue; call it with the lock held. Waiting callers call it too, since an interrupt (Ctrl-C)
        may come just after a job was entered, or while the thread was being started."""
        if self._thread is None or self._thread.ident is None:
            # Daemon, so that a hung store does not keep the process from exiting; _close_all waits for it within bounds.
            self._thread = threading.Thread(target=self._live, name=f"{DAEMONS}writer", daemon=True)
            self._thread.start()
        self._calls.put(True)

    def idle(self, timeout_s: float, *, tended: bool = False) -> bool:
        with self._change:
            if self._current:
                self._move()
            return self._change.wait_for(lambda: not self._current and not (tended and self._tending), timeout_s)

    def abort(self, reason: str) -> None:
        with self._change:
            jobs = list(self._current)
            self._aborted |= {id(job.handle) for job in jobs}
            if self._tending is not None:
                self._aborted.add(id(self._tending))
        if not self.idle(ABORT_S, tended=True):
            _log.error("a checkpoint's store hangs; its calls are abandoned, and saves without a commit are given up")
        for job in jobs:
            job.handle.end(SaveAborted(f"step {job.step}: given up, {reason}; earlier checkpoints are untouched"))

    def trouble(self, bound_s: float = math.inf, but: SaveHandle | None = None) -> str | None:
        """Return the first failure that was not reported yet, except that of ``but``. A save that is unfinished after ``bound_s`` seconds
        is given up."""
        with self._change:
            now = time.perf_counter()
            for job in self._current:
                if job.prepared is not None and now - job.began > bound_s and not job.handle.done():
                    self._aborted.add(id(job.handle))
                    text = f"step {job.step}: not written after {now - job.began:.0f} s, given up: {self._store.describe()} does not answer"
                    job.handle.end(SaveAborted(f"{text}; earlier checkpoints are untouched"))
            return next((said for handle in self._handles if handle is not but and (said := handle.trouble()) is not None), None)

    def surface(self, but: SaveHandle | None = None) -> None:
        """Mark all failures so far as reported, except that of ``but``."""
        with self._change:
            for handle in self._handles:
                if handle is not but and handle.trouble() is not None:
                    handle.surfaced = True

    def retire(self) -> None:
        """End the thread after the last job, and free the memory."""
        self._calls.put(False)
        for pool in self._pools.values():
            pool.clear()

    def _live(self) -> None:
        with self._change:
            if self._thread is not threading.current_thread():
                return  # the start of this thread was interrupted, so another one runs
        more = True
        while more:
            more = self._calls.get()
            while (job := self._first()) is not None:
                self._do(job)
                del job
        for pool in self._pools.values():
            pool.clear()

    def _first(self) -> SaveJob | None:
        with self._change:
            return self._current[0] if self._current else None

    def _do(self, job: SaveJob) -> None:
        outcome: Any = None
        try:
            outcome = self._work(job)
        except BaseException as error:
            outcome = error
        tend = self._retention is not None and isinstance(outcome, Commit) and job.vote is not None
        if isinstance(outcome, BaseException) and not isinstance(outcome, SaveSkipped | SaveAborted):
            _log.error("a checkpoint failed: %s", outcome)
        with self._change:
            self._current.remove(job)
            self._tending = job.handle if tend else None
            if isinstance(outcome, Commit):
                self._committed = max(self._committed or (0, 0), (outcome.epoch, outcome.step))
            if job.prepared is not None:
                job.handle.persist_s = time.perf_counter() - job.began
            if isinstance(outcome, SaveSkipped):
                job.handle.skip(str(outcome))
            elif outcome is not None:
                job.handle.end(outcome)
            self._change.notify_all()
        if tend:
            self._tend(job, outcome)
        with self._change:
            self._tending = None
            self._aborted.discard(id(job.handle))
            self._change.notify_all()

    def _tend(self, job: SaveJob, made: Commit) -> None:
        assert self._retention is not None and job.vote is not None
        look_after(self._store, self._retention, made, job.vote, lambda: id(job.handle) in self._aborted)

    def _work(self, job: SaveJob) -> Commit | None:
        def cancelled() -> bool:
            return id(job.handle) in self._aborted

        if job.prepared is None:
            job.accord.tell(job.key, job.status)
            return None
        try:
            if cancelled():
                job.accord.tell(job.key, RankStatus(left="given up before it began"))
                raise SaveAborted(f"step {job.step}: this save was given up before it began; earlier checkpoints are untouched")
            if job.status.problem is None and job.status.left is None:
                try:
                    job.handle.wait_staged()
                except Exception as error:
                    job.status = RankStatus(problem=f"the state could not be copied: {error}")
            trouble = job.status.problem or job.status.left
            if trouble is not None:
                job.accord.tell(job.key, job.status)
                raise SaveFailed(f"step {job.step}: {trouble}; earlier checkpoints are untouched")
            verdict = job.accord.agree(job.key, job.status, lambda: self._name(job), job.timeout_s, cancelled)
            if verdict.fate == "busy":
                if job.accord.rank == 0:
                    _log.warning("the checkpoint of step %d is skipped: %s", job.step, verdict.text)
                raise SaveSkipped(f"the checkpoint of step {job.step} is skipped: {verdict.text}")
            if verdict.fate != "go":
                raise SaveFailed(f"step {job.step}: {verdict.text}; earlier checkpoints are untouched")
            prepared, rank, epoch = job.prepared, job.accord.rank, verdict.epoch
            this = Attempt(verdict.attempt, job.step, epoch, job.accord.world, rank, prepared.document, prepared.aliases, job.timeout_s)
            written = self._write(job, this, cancelled)
        finally:
            # This rank's bytes are on disk or never will be, so the buffer is free before the others have voted.
            if job.slab is not None:
                with self._change:
                    job.slab.release()
                    job.slab = None
                    self._change.notify_all()
        return conclude(self._store, this, written, cancelled)

    def _write(self, job: SaveJob, this: Attempt, cancelled: Callable[[], bool]) -> Vote | Exception:
        assert job.slab is not None
        try:
            job.vote = write_staged(
                self._store,
                job.slab,
                this.name,
                this.rank,
                aux=job.aux,
                step=this.step,
                epoch=this.epoch,
                cancelled=cancelled,
                world=this.world,
            )
        except Exception as error:
            return error
        if cancelled():
            return SaveAborted(f"step {this.step}: this save was given up; earlier checkpoints are untouched")
        return job.vote

    def _name(self, job: SaveJob) -> tuple[str, int]:
        """Return the name and the epoch of a new attempt, on rank 0."""
        listed = newest_order(self._store)
        if listed is not None and self._committed is not None and listed > self._committed and listed not in self._tried:
            _log.warning(
                "%s: epoch %d, step %d was committed here by another writer; give each run a folder of its own",
                self._store.describe(),
                *listed,
            )
        self._committed = max((order for order in (listed, self._committed) if order is not None), default=None)
        epoch = next_epoch(self._committed, job.epoch, job.step)
        self._tried.add((epoch, job.step))
        return new_attempt(), epoch
