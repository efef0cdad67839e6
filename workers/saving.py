"""Writing a staged checkpoint beside the training: one thread of the worker's process, for one generation after another.

Training stages (a copy in memory, or the copy that the buddy was given), this thread writes and votes. At most one is written and one
is staged; more are skipped, by all ranks together (``trainer.BUSY``). When a generation fails, or the next one begins, what is still
being written is given up: the controller counts no vote of it any more. What was voted for is read back when nothing is to be written, and
noted if it is right: only then the controller deletes older checkpoints for it.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vescale_ray.workers.groups import describe
from vescale_ray.workers.messages import Damaged, Saved, Ticket

if TYPE_CHECKING:
    from vescale_ray.checkpoint import Vote
    from vescale_ray.workers.snapshot import Staged

_log = logging.getLogger(__name__)

MOST = 2
"""Checkpoints of this process under way: one written, one staged."""


_Voted = tuple["Vote", Ticket, int]
"""With the generation and step that it is of."""


@dataclass
class _Job:
    staged: Staged
    ticket: Ticket
    attempt: str
    began: float
    stall_s: float
    cancelled: bool = False


class Writer:
    """Writes staged shards and publishes the votes.

    Args:
        root: folder of the checkpoints, or a store.
        publish: takes the vote, or the reason why there is none, and later the news that it is damaged; called from this object's thread.
        read_back: read each object back after its vote, when nothing is to be written.
    """

    def __init__(self, root: Any, publish: Callable[[Saved | Damaged], None], *, read_back: bool) -> None:
        self._root, self._publish, self._read_back = root, publish, read_back
        self._lock = threading.Lock()
        self._jobs: list[_Job] = []
        self._queue: queue.SimpleQueue[_Job | _Voted] = queue.SimpleQueue()
        # Daemon: storage that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._live, name="vescale-checkpoint", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether there is no room for another one."""
        with self._lock:
            return len(self._jobs) >= MOST

    @property
    def writing(self) -> bool:
        """Whether there is any that is not voted for yet."""
        with self._lock:
            return any(not job.cancelled for job in self._jobs)

    def submit(self, staged: Staged, ticket: Ticket, attempt: str, stall_s: float) -> None:
        """Write it, when those before are written. ``stall_s``: how long training waited for the copy."""
        job = _Job(staged, ticket, attempt, time.monotonic(), stall_s)
        with self._lock:
            self._jobs.append(job)
        self._queue.put(job)

    def abandon(self) -> None:
        """Give up all that is not voted for: after this returns, nothing of it is published. Does not wait for the storage."""
        with self._lock:
            for job in self._jobs:
                job.cancelled = True

    def wrote(self, vote: Vote, ticket: Ticket, step: int) -> None:
        """Read back, in time, what another thread has written and voted for."""
        if self._read_back:
            self._queue.put((vote, ticket, step))

    def _live(self) -> None:
        voted: deque[_Voted] = deque()
        while True:
            if voted and self._queue.empty():
                self._prove(*voted.popleft())
                continue
            item = self._queue.get()
            if isinstance(item, _Job):
                self._write(item)
            else:
                voted.append(item)

    def _prove(self, vote: Vote, ticket: Ticket, step: int) -> None:
        from vescale_ray.checkpoint.proof import prove
        from vescale_ray.checkpoint.store import store_of

        try:
            problem = prove(store_of(self._root), vote.object, vote.aux)
        except Exception as error:  # it says nothing about the object: the controller reads it when it needs to know
            _log.warning("%s could not be read back: %s", vote.object.key, describe(error))
        else:
            if problem is not None:
                self._publish(Damaged(ticket, vote.object.key.split("/")[1], step, problem))

    def _write(self, job: _Job) -> None:
        from vescale_ray.checkpoint.shard import encode_aux, write_staged
        from vescale_ray.checkpoint.store import store_of
        from vescale_ray.workers.reshard import stored_aux

        staged = job.staged
        vote: Vote | None = None
        problem = None
        try:
            aux = stored_aux(staged.rank, staged.scalars)
            vote = write_staged(
                store_of(self._root),
                staged.slab,
                job.attempt,
                staged.rank,
                aux=None if aux is None else encode_aux(aux),
                step=staged.step,
                epoch=staged.generation,
                cancelled=lambda: job.cancelled,
                world=staged.world,
            )
        except Exception as error:
            problem = describe(error)
        staged.slab.release()
        with self._lock:
            self._jobs.remove(job)
            if not job.cancelled:
                self._publish(
                    Saved(
                        job.ticket,
                        job.attempt,
                        staged.step,
                        staged.generation,
                        staged.rank,
                        staged.world,
                        None if vote is None else vote.to_json(),
                        problem,
                        time.monotonic() - job.began,
                        job.stall_s,
                    )
                )
        if vote is not None and not job.cancelled:
            self.wrote(vote, job.ticket, staged.step)
