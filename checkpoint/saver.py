"""Saving beside the training: the state is copied, training goes on, a thread writes, votes and commits.

    training thread   | take apart, agree, copy |  next steps ..                                  | take apart, ..
    writer thread     |                         |  write from the copy, vote, commit, retention   |

The copy is the only wait. The writer needs little of the processor (bytes go from the copy to the disk without another one) and
uses no collective, so that it can't meet those of the training. At most one save is being written and one more is staged.
"""

from __future__ import annotations

import atexit
import dataclasses
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist

from .api import Prepared, collect, newest_order, next_epoch, prepare, ranks_of
from .commits import Commit
from .errors import SaveAborted, SaveFailed
from .faults import fault_point
from .handle import SaveHandle
from .retention import Retention
from .shard import Vote, encode_aux, new_attempt, write_staged
from .staging import Copying, LayoutMemo, Slab, SlabPool, copy_pieces
from .state import State
from .store import ObjectStore, Root, store_of
from .voting import Attempt, conclude

_log = logging.getLogger(__name__)

EXIT_S = 60.0
"""How long the end of the interpreter, or of a ``with`` block that failed, waits for a save under way before it gives it up."""
ABORT_S = 5.0
"""How long a save that was given up may take to notice: it looks before each chunk that it writes."""


@dataclasses.dataclass
class _Job:
    attempt: Attempt
    aux: bytes
    handle: SaveHandle
    slab: Slab | None
    copy: Callable[[], None]
    """Begins to fill the slab, where that was left to the writer's thread."""
    began: float


class Saver:
    """Saves one run's states, asynchronously, into one root. Every rank makes one and calls it at the same steps.

        with Saver("checkpoints", retention=Retention(keep_last=3)) as saver:
            for step in range(steps):
                train()
                if (step + 1) % every == 0:
                    saver.async_save({"model": model, "optimizer": optimizer}, step + 1)

    Memory: one buffer of the size of this rank's part, made at the first save (or :meth:`prepare`) and used again; a second one
    only if a save is asked for while the one before is still being written. Besides 8 MiB at most.

    An error of a save is raised by its handle's ``wait``, or else by the next :meth:`async_save`, on all ranks, and by :meth:`close`.

    Args:
        root: the checkpoint folder, the same on all ranks (shared between hosts), or a store.
        retention: applied by rank 0 after each commit.
        when_busy: what a request does that finds one save being written and another one staged: ``"skip"`` it, with a warning, so
            that a slow disk makes checkpoints rarer and never holds up training; or ``"wait"`` until there is room.
        double_buffer: ``False``: never take a second buffer; a save that is asked for while the one before is being written counts as
            busy.
        timeout_s: how long a save waits for the other ranks' votes, and a request for room.
        group: the ranks that save together; default: all. It is used for one small exchange in each :meth:`async_save`, never by
            the writer.
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
        self.store: ObjectStore = store_of(root)
        self.timeout_s = timeout_s
        self._when_busy = when_busy
        self._group = group
        self._most = 2 if double_buffer else 1
        self._layouts = LayoutMemo()
        self._asked_store = False
        self._closed = False
        self._writer = _Writer(self.store, retention)
        self._finalizer = weakref.finalize(self, self._writer.retire)
        self._finalizer.atexit = False
        _OPEN.add(self)

    def prepare(self, state: State) -> None:
        """Make the buffer now rather than at the first save, whose wait is then as short as the others'."""
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
        """Begin to save a state; every rank calls it at the same step. The arguments are those of :func:`save`.

        Args:
            wait_staged: return once the state is copied and may change. ``False``: copy it in the background; call the handle's
                ``wait_staged()`` before anything in it changes (before the optimizer's next step).

        Raises:
            ValueError: a state that can't be stored; on every rank, before anything is written.
            SaveFailed: an earlier save has failed and nobody was told yet; nothing was begun now. The next call goes on as usual.
        """
        if self._closed:
            raise ValueError("this saver is closed; make a new one")
        began = time.perf_counter()
        rank, world = ranks_of(self._group)
        if self._when_busy == "wait":
            self._writer.wait_for_room(self._most, self.timeout_s)
        prepared: Prepared | None = None
        problem: Exception | None = None
        try:
            prepared = prepare(state, step, world, rank, meta, metrics, aux)
            layout = self._layouts.of(prepared.pieces)
            if rank == 0 and epoch is None and not self._asked_store:
                self._writer.committed, self._asked_store = newest_order(self.store), True
        except Exception as error:
            problem = error
        trouble = self._writer.trouble()
        busy = self._writer.busy(self._most)
        chosen = next_epoch(self._writer.newest(), epoch, step)
        words = self._exchange(rank, world, (_text(problem), trouble, busy, new_attempt(), chosen))
        if problem is not None:
            raise problem
        bad = next(((r, w[0]) for r, w in enumerate(words) if w[0] is not None), None)
        if bad is not None:
            raise ValueError(f"rank {bad[0]}: {bad[1]}")
        self._surface(words)
        handle = SaveHandle(step, 3 * self.timeout_s + EXIT_S)
        if any(w[2] for w in words):
            late = [r for r, w in enumerate(words) if w[2]]
            text = f"the checkpoint of step {step} is skipped: ranks {late} are still writing the ones before"
            if rank == 0:
                _log.warning("%s; save less often, or have a faster store", text)
            return handle.skip(text)
        name, agreed = words[0][3], words[0][4]
        assert prepared is not None
        this = Attempt(name, step, agreed, world, rank, prepared.document, prepared.aliases, self.timeout_s)
        self._begin(this, prepared, layout, handle, began, wait_staged)
        return handle

    def save(self, state: State, step: int, **options: Any) -> SaveHandle:
        """As :meth:`async_save`, and wait for the commit."""
        handle = self.async_save(state, step, **options)
        handle.wait()
        return handle

    @property
    def in_flight(self) -> int:
        """Saves that are staged or being written: 0 to 2."""
        return self._writer.in_flight

    def wait(self, timeout_s: float | None = None) -> None:
        """Until nothing is under way. Raises the first error that nobody was told of yet; TimeoutError."""
        if not self._writer.idle(self.timeout_s * 3 if timeout_s is None else timeout_s):
            raise TimeoutError(f"a checkpoint was not committed within {timeout_s or 3 * self.timeout_s:g} s; it is still being written")
        trouble = self._writer.trouble()
        if trouble is not None:
            self._writer.surface()
            raise SaveFailed(trouble[1])

    def abort(self, reason: str) -> None:
        """Give up what is under way: this rank votes no more, so that nothing is committed unless all votes were in already. For a world
        that is over. Takes at most :data:`ABORT_S`; a write that hangs is left behind, and this saver can only be closed then."""
        self._writer.abort(reason)

    def close(self, timeout_s: float | None = None) -> None:
        """Wait for what is under way (give it up after ``timeout_s``; default: the timeouts of a save), and free the memory. Once.

        Raises:
            SaveFailed: a save failed, or was given up now, and nobody was told yet.
        """
        if self._closed:
            return
        self._closed = True
        _OPEN.discard(self)
        if not self._writer.idle(3 * self.timeout_s if timeout_s is None else timeout_s):
            self._writer.abort("its saver was closed before it was written")
        trouble = self._writer.trouble()
        self._writer.surface()
        self._finalizer()
        if trouble is not None:
            raise SaveFailed(trouble[1])

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if kind is None:
            self.close()
            return
        # What was staged before the error is a good state: keep it, but don't let a dead rank hold up the error.
        try:
            self.close(EXIT_S)
        except SaveFailed as failure:
            _log.error("%s", failure)

    def _exchange(self, rank: int, world: int, word: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        if world == 1:
            return [word]
        words: list[Any] = [None] * world
        dist.all_gather_object(words, word, group=self._group)
        return words

    def _surface(self, words: list[tuple[Any, ...]]) -> None:
        """Raise an earlier save's failure on every rank, also where it is not known yet, once."""
        failed = next((w[1] for w in words if w[1] is not None), None)
        if failed is None:
            return
        self._writer.surface()
        self._writer.told.add(failed[0])
        raise SaveFailed(failed[1])

    def _begin(
        self, this: Attempt, prepared: Prepared, layout: Any, handle: SaveHandle, began: float, wait_staged: bool
    ) -> None:
        writer, pieces = self._writer, prepared.pieces

        slab: Slab | None = None
        job = _Job(this, encode_aux(prepared.aux), handle, None, lambda: None, 0.0)
        try:
            job.slab = slab = writer.take(layout.bytes, pinned=any(p.data.is_cuda for p in pieces))
            target = slab.lay(layout)

            def copy() -> None:
                copying = copy_pieces(layout, pieces, target)
                handle.finish_copy = lambda: _copied(copying, pieces, handle)

            if wait_staged or slab.pinned or writer.in_flight:
                copy()  # from a GPU it only begins here; beside another save the writer's thread would come to it too late
                if wait_staged:
                    handle.wait_staged()
            else:
                job.copy = copy
        except Exception as error:  # out of memory: the other ranks must hear of it rather than wait
            job.copy = _raiser(error)
        job.began = time.perf_counter()
        handle.stall_s = job.began - began
        writer.put(job)


def _copied(copying: Copying, pieces: list[Any], handle: SaveHandle) -> None:
    copying.wait()
    fault_point("stage.copied")
    pieces.clear()
    handle.staged()


class _Writer:
    """One thread, its queue and its buffers. It holds no reference to the saver, so that one that is dropped can go."""

    def __init__(self, store: ObjectStore, retention: Retention | None) -> None:
        self._store, self._retention = store, retention
        self._pools: dict[bool, SlabPool] = {}
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._change = threading.Condition()
        self._handles: list[tuple[str, SaveHandle]] = []
        self._current: list[_Job] = []
        self._slabs = 0
        self._aborted: set[int] = set()
        self._thread: threading.Thread | None = None
        self.committed: tuple[int, int] | None = None
        """The newest commit that is known of."""
        self.told: set[str] = set()
        """Attempts whose failure this rank raised before its own writer knew of it."""

    @property
    def in_flight(self) -> int:
        with self._change:
            return len(self._current)

    def newest(self) -> tuple[int, int] | None:
        """(epoch, step) of the newest save that is committed or under way."""
        with self._change:
            orders = [(job.attempt.epoch, job.attempt.step) for job in self._current]
            return max([*orders, *([self.committed] if self.committed else [])], default=None)

    def busy(self, most: int) -> bool:
        with self._change:
            return len(self._current) >= 2 or self._slabs >= most

    def wait_for_room(self, most: int, timeout_s: float) -> None:
        with self._change:
            self._change.wait_for(lambda: len(self._current) < 2 and self._slabs < most, timeout_s)

    def take(self, nbytes: int, *, pinned: bool) -> Slab:
        pool = self._pools.setdefault(pinned, SlabPool(pinned=pinned))
        return pool.take(nbytes)

    def put(self, job: _Job) -> None:
        with self._change:
            self._current.append(job)
            self._slabs += job.slab is not None
            self._handles = [h for h in self._handles if not h[1].done() or h[1].trouble()] + [(job.attempt.name, job.handle)]
            if self._thread is None:
                # Daemon: a store that hangs must not keep the process from ending; _close_all waits for it within bounds.
                self._thread = threading.Thread(target=self._live, name="checkpoint-writer", daemon=True)
                self._thread.start()
        self._queue.put(job)

    def idle(self, timeout_s: float) -> bool:
        with self._change:
            return self._change.wait_for(lambda: not self._current, timeout_s)

    def abort(self, reason: str) -> None:
        with self._change:
            jobs = list(self._current)
            self._aborted |= {id(job) for job in jobs}
        if jobs and not self.idle(ABORT_S):
            _log.error("a checkpoint's write hangs; it is left behind and can't be committed any more")
        for job in jobs:
            job.handle.end(SaveAborted(f"step {job.attempt.step}: given up, {reason}; earlier checkpoints are untouched"))

    def trouble(self) -> tuple[str, str] | None:
        """(attempt, text) of the first failure that nobody was told of."""
        with self._change:
            for name, handle in self._handles:
                text = handle.trouble()
                if text is not None and name not in self.told:
                    return name, text
        return None

    def surface(self) -> None:
        """Whatever has failed until now has been told."""
        with self._change:
            for _, handle in self._handles:
                if handle.trouble() is not None:
                    handle.surfaced = True

    def retire(self) -> None:
        """After the last job the thread ends, and the memory goes."""
        self._queue.put(None)
        for pool in self._pools.values():
            pool.clear()

    def _live(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                outcome: Any = self._work(job)
            except BaseException as error:
                outcome = error
            with self._change:
                self._current.remove(job)
                self._aborted.discard(id(job))
                if isinstance(outcome, Commit):
                    self.committed = max(self.committed or (0, 0), (outcome.epoch, outcome.step))
                job.handle.persist_s = time.perf_counter() - job.began
                job.handle.end(outcome)
                self._change.notify_all()
            if self._retention is not None and job.attempt.rank == 0 and not isinstance(outcome, BaseException):
                collect(self._store, self._retention)
            del job, outcome
        for pool in self._pools.values():
            pool.clear()

    def _work(self, job: _Job) -> Any:
        def cancelled() -> bool:
            return id(job) in self._aborted

        written: Vote | Exception
        this = job.attempt
        try:
            job.copy()
            job.handle.wait_staged()
            assert job.slab is not None
            written = write_staged(
                self._store, job.slab, this.name, this.rank, aux=job.aux, step=this.step, epoch=this.epoch, cancelled=cancelled
            )
            if cancelled():
                written = SaveAborted(f"step {this.step}: this save was given up; earlier checkpoints are untouched")
        except Exception as error:
            written = error
        finally:
            # The rank's bytes are on disk, or will never be: the buffer is free before the others have voted.
            if job.slab is not None:
                with self._change:
                    job.slab.release()
                    job.slab = None
                    self._slabs -= 1
                    self._change.notify_all()
        return conclude(self._store, this, written, cancelled)


_OPEN: weakref.WeakSet[Saver] = weakref.WeakSet()
"""Savers to close when the interpreter ends; that is one event of the whole process."""


def _close_all() -> None:
    deadline = time.monotonic() + EXIT_S
    for saver in list(_OPEN):
        try:
            saver.close(max(0.0, deadline - time.monotonic()))
        except SaveFailed as error:
            _log.error("%s", error)


# Before the interpreter stops the executors of concurrent.futures, which writing (and clients of object stores) need: plain atexit
# comes after that. The name is private, but it is what concurrent.futures itself uses.
getattr(threading, "_register_atexit", atexit.register)(_close_all)


def _text(error: Exception | None) -> str | None:
    return None if error is None else str(error) or type(error).__name__


def _raiser(error: Exception) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


def _on_gpu(state: State) -> bool:
    for value in state.values():
        tensors = value.parameters() if isinstance(value, torch.nn.Module) else value.values() if isinstance(value, Mapping) else ()
        if any(isinstance(t, torch.Tensor) and t.is_cuda for t in tensors):
            return True
    return False
