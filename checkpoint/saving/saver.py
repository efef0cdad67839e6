"""Asynchronous saves: the state is copied, training goes on, and a thread writes, votes and commits.

    training thread   | flatten, copy    |  next steps ..                                                   | flatten, ..
    writer thread     |                  |  agree, write from the copy, vote, commit, read back, retention  |

Training waits only for the copy. No collective is used: the ranks agree and vote through stores (``accord.py``, ``voting.py``), from the
writer's thread. That thread needs little processor time, since bytes go from the copy to the disk without another copy. At most one save is
being written and one more is staged.
"""

from __future__ import annotations

import atexit
import dataclasses
import logging
import math
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist

from ..api import Prepared, look_after, newest_order, next_epoch, prepare, ranks_of, word_of
from ..arguments import of_type, order, seconds
from ..commits import Commit
from ..errors import SaveAborted, SaveFailed, SaveSkipped
from ..faults import fault_point
from ..format.object_layout import ObjectLayout
from ..format.shard import Vote, encode_aux, new_attempt, write_staged
from ..format.staging import Copying, LayoutMemo, Slab, SlabPool, copy_pieces
from ..retention import Retention
from ..state.flat_state import State
from ..stores.opening import store_of
from ..stores.store import ObjectStore, Root
from .accord import Accord, Word
from .bounded import DAEMONS
from .handle import SaveHandle
from .voting import Attempt, conclude

_log = logging.getLogger(__name__)

EXIT_S = 60.0
"""Seconds that interpreter exit, or a failed ``with`` block, waits for a save in progress before it gives the save up."""
ABORT_S = 5.0
"""Seconds that an aborted save may take to notice; it checks before each chunk that it writes."""


@dataclasses.dataclass(eq=False)
class _Job:
    """A save as its writer sees it. Without ``prepared``, this rank takes no part, and ``word`` says why."""

    step: int
    epoch: int | None
    accord: Accord
    key: str
    word: Word
    handle: SaveHandle
    timeout_s: float
    prepared: Prepared | None = None
    aux: bytes = b""
    slab: Slab | None = None
    began: float = 0.0
    vote: Vote | None = None


class Saver:
    """Saves the states of one run, asynchronously, into one root. Every rank makes a saver and calls it at the same steps.

        with Saver("checkpoints", retention=Retention(keep_last=3)) as saver:
            for step in range(steps):
                train()
                if (step + 1) % every == 0:
                    saver.async_save({"model": model, "optimizer": optimizer}, step + 1)

    Memory: one buffer of the size of this rank's part, made at the first save (or :meth:`prepare`) and reused. A second one is made only if
    a save is requested while the previous one is still being written. Other memory is at most 8 MiB.

    A save's error is raised by its handle's ``wait``, or else by the next :meth:`async_save` or :meth:`close`, on each rank as soon as it
    knows.

    Args:
        root: checkpoint folder, the same on all ranks (shared between hosts), or a store.
        retention: rules that rank 0 applies after each commit, once all ranks have read back what they wrote.
        when_busy: action if one save is being written and another is staged. ``"skip"`` skips the request with a warning, so that a slow
            disk makes checkpoints rarer but never delays training. ``"wait"`` waits until there is room.
        double_buffer: whether a second buffer may be used. If ``False``, a save that is requested while the previous one is being written
            counts as busy.
        timeout_s: seconds that a save waits for the other ranks and for their votes, and that a request waits for room.
        group: ranks that save together; all by default. Only its key-value store is used, no collective. If a program recreates the default
            group, perhaps with other ranks, it can keep its saver.
    """

    def __init__(
        self,
        root: Root,
        *,
        retention: Retention | None = None,
        when_busy: Literal["skip", "wait"] = "skip",
        double_buffer: bool = True,
        timeout_s: float = 600.0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if when_busy not in ("skip", "wait"):
            raise ValueError(f"when_busy is {when_busy!r}; give 'skip' or 'wait'")
        seconds("timeout_s", timeout_s)
        if retention is not None:
            of_type("retention", retention, Retention, "give Retention(keep_last=2), for example, or none")
        self.store: ObjectStore = store_of(root)
        self.timeout_s = timeout_s
        self._root = root
        self._process = os.getpid()
        self._when_busy = when_busy
        self._group = group
        self._most = 2 if double_buffer else 1
        self._layouts = LayoutMemo()
        self._accord: Accord | None = None
        self._closed = False
        self._writer = _Writer(self.store, retention)
        self._finalizer = weakref.finalize(self, self._writer.retire)
        self._finalizer.atexit = False
        _OPEN.add(self)

    def prepare(self, state: State) -> None:
        """Allocate the buffer now, so that the first save takes no longer than later ones."""
        rank, world = ranks_of(self._group)
        layout = self._layouts.of(prepare(state, 0, world, rank, None, None, None).pieces)
        slab = self._writer.take(layout.bytes, pinned=_on_gpu(state))
        slab.lay(layout)
        slab.release()

    def async_save(
        self,
        state: State,
        step: int,
        *,
        epoch: int | None = None,
        meta: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
        aux: Mapping[str, Any] | None = None,
        wait_staged: bool = True,
    ) -> SaveHandle:
        """Begin to save a state. Every rank calls it at the same step. The arguments are those of :func:`save`.

        Args:
            wait_staged: whether to return only once the state is copied and may change. ``False`` copies in the background; call the
                handle's ``wait_staged()`` before anything in the state changes (before the optimizer's next step). With plain tensors on a
                GPU and several ranks it still waits for the GPU's work so far, to compare a sample of them.

        Raises:
            ValueError: this rank's state cannot be stored. No rank writes anything; the other ranks' handles end with SaveFailed.
            SaveFailed: an earlier save failed, and its error was not reported yet. This save is copied and goes on, so that ranks that hear
                of the failure at different times still save together. For the same reason the handler must not use a collective.
        """
        if self._closed:
            raise ValueError("this saver is closed; make a new one")
        if self._process != os.getpid():
            raise ValueError("this saver was made before this process was forked, so its thread is in the parent; make a new one here")
        began = time.perf_counter()
        rank, world = ranks_of(self._group)
        if self._accord is None or not self._accord.serves(self._group, rank, world):
            if self._accord is not None and not dist.is_initialized():
                raise ValueError(f"the process group of {self._accord.world} ranks that this saver used was destroyed; make a new one")
            self._accord = Accord(self._group, rank, world, self._root)
        if self._when_busy == "wait":
            self._writer.wait_for_room(self._most, self.timeout_s)
        bound_s = 3 * self.timeout_s + EXIT_S
        handle = SaveHandle(step, bound_s)
        job = _Job(step, epoch, self._accord, self._accord.key(step), Word(), handle, self.timeout_s)
        try:
            job.step, job.epoch = order(step, epoch)
            handle.step = job.step
            job.prepared = prepare(state, job.step, world, rank, meta, metrics, aux)
            job.word = job.prepared.word
            layout = self._layouts.of(job.prepared.pieces)
        except BaseException as error:
            job.prepared, job.word = None, word_of(error)
            self._writer.put(job)
            raise
        if self._writer.busy(self._most):
            text = f"the checkpoint of step {step} is skipped: ranks [{rank}] are still writing earlier checkpoints"
            _log.warning("%s; save less often, or use a faster store", text)
            job.prepared, job.word = None, Word(busy=True)
            handle.skip(text)
            self._writer.put(job)
        else:
            self._begin(job, layout, began, wait_staged)
        # Only earlier saves' errors: this save's own error belongs to its handle.
        trouble = self._writer.trouble(bound_s, but=handle)
        if trouble is not None:
            handle.wait_staged()  # the caller gets the error instead of a handle to wait with
            self._writer.surface(but=handle)
            raise SaveFailed(trouble)
        return handle

    def save(self, state: State, step: int, **options: Any) -> SaveHandle:
        """As :meth:`async_save`, and wait for the commit."""
        handle = self.async_save(state, step, **options)
        handle.wait()
        return handle

    @property
    def in_flight(self) -> int:
        """Number of saves that are staged or being written: 0 to 2."""
        return self._writer.in_flight

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until no save is in progress. Raises the first error that was not reported yet, or TimeoutError."""
        patience = self.timeout_s * 3 if timeout_s is None else timeout_s
        if not self._writer.idle(patience):
            raise TimeoutError(f"a checkpoint was not committed within {patience:g} s; it is still being written")
        trouble = self._writer.trouble()
        if trouble is not None:
            self._writer.surface()
            raise SaveFailed(trouble)

    def abort(self, reason: str) -> None:
        """Give up all saves in progress, for a group of ranks that has ended. This rank votes no more, so nothing is committed unless all
        votes were in already. Takes at most :data:`ABORT_S`. A hung write is left behind; this saver can then only be closed."""
        self._writer.abort(reason)

    def close(self, timeout_s: float | None = None) -> None:
        """Wait for all saves in progress, with reading back and retention, and free the memory. After ``timeout_s`` (default: a save's
        timeouts) they are given up. Further calls do nothing.

        Raises:
            SaveFailed: a save failed or was given up now, and its error was not reported yet.
        """
        if self._closed:
            return
        self._closed = True
        _OPEN.discard(self)
        if self._process != os.getpid():
            return  # a forked child, such as a data loader's worker; the thread and the save belong to its parent
        if not self._writer.idle(3 * self.timeout_s if timeout_s is None else timeout_s, tended=True):
            self._writer.abort("its saver was closed before it was written")
        trouble = self._writer.trouble()
        self._writer.surface()
        self._finalizer()
        if trouble is not None:
            raise SaveFailed(trouble)

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if kind is None:
            self.close()
            return
        # The state staged before the error is good: keep it, but do not let a dead rank delay the error.
        try:
            self.close(EXIT_S)
        except SaveFailed as failure:
            _log.error("%s", failure)

    def _begin(self, job: _Job, layout: ObjectLayout, began: float, wait_staged: bool) -> None:
        writer, handle, prepared = self._writer, job.handle, job.prepared
        assert prepared is not None
        pieces, job.aux = prepared.pieces, encode_aux(prepared.aux)
        try:
            job.slab = slab = writer.take(layout.bytes, pinned=any(p.data.is_cuda for p in pieces))
            target = slab.lay(layout)

            def copy() -> Callable[[], None]:
                copying = copy_pieces(layout, pieces, target)
                return lambda: _copied(copying, pieces, handle)

            handle.copy_with(copy)
            if wait_staged:
                handle.wait_staged()
            elif slab.pinned or writer.in_flight:
                handle.begin_copy()  # starts a GPU copy; the writer's thread, busy with another save, would start it too late
        except Exception as error:  # out of memory: the other ranks must hear of it rather than wait
            job.word = Word(problem=f"the state could not be copied: {error}")
        except BaseException as error:
            job.word = word_of(error)
            writer.put(job)
            raise
        job.began = time.perf_counter()
        handle.stall_s = job.began - began
        writer.put(job)


def _copied(copying: Copying, pieces: list[Any], handle: SaveHandle) -> None:
    copying.wait()
    fault_point("stage.copied")
    pieces.clear()
    handle.staged()


class _Writer:
    """One thread, its queue and its buffers. It has no reference to the saver, so that a dropped saver can be freed."""

    def __init__(self, store: ObjectStore, retention: Retention | None) -> None:
        self._store, self._retention = store, retention
        self._pools: dict[bool, SlabPool] = {}
        self._calls: queue.SimpleQueue[bool] = queue.SimpleQueue()
        """Wakes the thread, which processes ``_current``. ``False`` means the last time."""
        self._change = threading.Condition()
        self._handles: list[SaveHandle] = []
        self._current: list[_Job] = []
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

    def put(self, job: _Job) -> None:
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
        """The first failure that was not reported yet, except that of ``but``. A save that is unfinished after ``bound_s`` seconds is given
        up."""
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
                return  # its start was interrupted, and another thread was started instead
        more = True
        while more:
            more = self._calls.get()
            while (job := self._first()) is not None:
                self._do(job)
                del job
        for pool in self._pools.values():
            pool.clear()

    def _first(self) -> _Job | None:
        with self._change:
            return self._current[0] if self._current else None

    def _do(self, job: _Job) -> None:
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

    def _tend(self, job: _Job, made: Commit) -> None:
        assert self._retention is not None and job.vote is not None
        look_after(self._store, self._retention, made, job.vote, lambda: id(job.handle) in self._aborted)

    def _work(self, job: _Job) -> Commit | None:
        def cancelled() -> bool:
            return id(job.handle) in self._aborted

        if job.prepared is None:
            job.accord.tell(job.key, job.word)
            return None
        try:
            if cancelled():
                job.accord.tell(job.key, Word(left="given up before it began"))
                raise SaveAborted(f"step {job.step}: this save was given up before it began; earlier checkpoints are untouched")
            if job.word.problem is None and job.word.left is None:
                try:
                    job.handle.wait_staged()
                except Exception as error:
                    job.word = Word(problem=f"the state could not be copied: {error}")
            trouble = job.word.problem or job.word.left
            if trouble is not None:
                job.accord.tell(job.key, job.word)
                raise SaveFailed(f"step {job.step}: {trouble}; earlier checkpoints are untouched")
            verdict = job.accord.agree(job.key, job.word, lambda: self._name(job), job.timeout_s, cancelled)
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

    def _write(self, job: _Job, this: Attempt, cancelled: Callable[[], bool]) -> Vote | Exception:
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

    def _name(self, job: _Job) -> tuple[str, int]:
        """Name and epoch of a new attempt, on rank 0."""
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


_OPEN: weakref.WeakSet[Saver] = weakref.WeakSet()
"""Savers to close when the interpreter exits, which happens once per process."""


def _close_all() -> None:
    deadline = time.monotonic() + EXIT_S
    for saver in list(_OPEN):
        try:
            saver.close(max(0.0, deadline - time.monotonic()))
        except SaveFailed as error:
            _log.error("%s", error)


# Run before the interpreter stops the executors of concurrent.futures, which writes (and object store clients) need; plain atexit runs
# after that. The name is private, but concurrent.futures itself uses it.
getattr(threading, "_register_atexit", atexit.register)(_close_all)


def _on_gpu(state: State) -> bool:
    for value in state.values():
        tensors = value.parameters() if isinstance(value, torch.nn.Module) else value.values() if isinstance(value, Mapping) else ()
        if any(isinstance(t, torch.Tensor) and t.is_cuda for t in tensors):
            return True
    return False
