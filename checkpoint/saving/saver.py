"""Asynchronous saves: the state is copied, training goes on, and a thread writes, votes and commits.

    training thread   | flatten, copy    |  next steps ..                                                   | flatten, ..
    writer thread     |                  |  agree, write from the copy, vote, commit, read back, retention  |

Training waits only for the copy. No collective is used: the ranks agree and vote through stores (``accord.py``, ``voting.py``), from the
writer's thread. That thread needs little processor time, since bytes go from the copy to the disk without another copy. At most one save is
being written and one more is staged.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist

from ..api import prepare, ranks_of, status_of
from ..arguments import of_type, order, seconds
from ..errors import SaveFailed
from ..faults import fault_point
from ..format.object_layout import ObjectLayout
from ..format.shard import encode_aux
from ..format.staging import Copying, LayoutMemo, copy_pieces
from ..state.flat_state import State
from ..stores.opening import store_of
from ..stores.store import ObjectStore, Root
from ..upkeep.retention import Retention
from .accord import Accord, RankStatus
from .handle import SaveHandle
from .writer import SaveJob, SaveWriter

_log = logging.getLogger(__name__)

EXIT_S = 60.0
"""Seconds that interpreter exit, or a failed ``with`` block, waits for a save in progress before it gives the save up."""


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
        self._writer = SaveWriter(self.store, retention)
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
        job = SaveJob(step, epoch, self._accord, self._accord.key(step), RankStatus(), handle, self.timeout_s)
        try:
            job.step, job.epoch = order(step, epoch)
            handle.step = job.step
            job.prepared = prepare(state, job.step, world, rank, meta, metrics, aux)
            job.status = job.prepared.status
            layout = self._layouts.of(job.prepared.pieces)
        except BaseException as error:
            job.prepared, job.status = None, status_of(error)
            self._writer.put(job)
            raise
        if self._writer.busy(self._most):
            text = f"the checkpoint of step {step} is skipped: ranks [{rank}] are still writing earlier checkpoints"
            _log.warning("%s; save less often, or use a faster store", text)
            job.prepared, job.status = None, RankStatus(busy=True)
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
        votes were in already. Takes at most :data:`~.writer.ABORT_S`. A hung write is left behind; this saver can then only be closed."""
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

    def _begin(self, job: SaveJob, layout: ObjectLayout, began: float, wait_staged: bool) -> None:
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
            job.status = RankStatus(problem=f"the state could not be copied: {error}")
        except BaseException as error:
            job.status = status_of(error)
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
