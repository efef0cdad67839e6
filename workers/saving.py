"""Write staged checkpoints during training, in one thread per worker process, for all its generations.

Training stages a copy in memory, or reuses the copy sent to the buddy. This thread writes it and votes. At most one checkpoint is being
written and one is staged; all ranks together skip further ones (``trainer.BUSY``). When a generation fails or the next one begins,
unfinished writes are abandoned, since the controller no longer counts their votes. When the thread is idle, it reads voted objects back and
records those that are right. Only then does the controller delete older checkpoints.
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

from vescale_ray.workers.messages import Damaged, SavedShard, Ticket
from vescale_ray.workers.network.process_groups import describe

if TYPE_CHECKING:
    from vescale_ray.checkpoint import Vote
    from vescale_ray.workers.resharding.memory_snapshots import Staged

_log = logging.getLogger(__name__)

MOST = 2
"""Largest number of checkpoints that this process saves at once: one is written while another is staged."""


_Voted = tuple["Vote", Ticket, int]
"""A vote with its generation's ticket and its step."""


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
        root: checkpoint folder, or a store.
        publish: receives the vote or the reason of a failure, and later a report of damage. This object's thread calls it.
        read_back: whether to read each object back after its vote, when nothing is to be written.
    """

    def __init__(self, root: Any, publish: Callable[[SavedShard | Damaged], None], *, read_back: bool) -> None:
        self._root, self._publish, self._read_back = root, publish, read_back
        self._lock = threading.Lock()
        self._jobs: list[_Job] = []
        self._queue: queue.SimpleQueue[_Job | _Voted] = queue.SimpleQueue()
        # Daemon, so that hung storage does not keep the process from exiting.
        self._thread = threading.Thread(target=self._live, name="vescale-checkpoint", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether no further checkpoint can be staged."""
        with self._lock:
            return len(self._jobs) >= MOST

    @property
    def writing(self) -> bool:
        """Whether any checkpoint is still being written."""
        with self._lock:
            return any(not job.cancelled for job in self._jobs)

    def submit(self, staged: Staged, ticket: Ticket, attempt: str, stall_s: float) -> None:
        """Queue ``staged`` to be written after the earlier ones. ``stall_s``: seconds that training waited for the copy."""
        job = _Job(staged, ticket, attempt, time.monotonic(), stall_s)
        with self._lock:
            self._jobs.append(job)
        self._queue.put(job)

    def abandon(self) -> None:
        """Abandon all checkpoints without a vote; none of them is published after this returns. Does not wait for the storage."""
        with self._lock:
            for job in self._jobs:
                job.cancelled = True

    def wrote(self, vote: Vote, ticket: Ticket, step: int) -> None:
        """Queue an object that another thread has written and voted for, to be read back."""
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
        from vescale_ray.checkpoint.saving.proof import prove
        from vescale_ray.checkpoint.stores.opening import store_of

        try:
            problem = prove(store_of(self._root), vote.object, vote.aux)
        except Exception as error:  # this says nothing about the object; the controller reads it when it needs to know
            _log.warning("%s could not be read back: %s", vote.object.key, describe(error))
        else:
            if problem is not None:
                self._publish(Damaged(ticket, vote.object.key.split("/")[1], step, problem))

    def _write(self, job: _Job) -> None:
        from vescale_ray.checkpoint.format.shard import encode_aux, write_staged
        from vescale_ray.checkpoint.stores.opening import store_of
        from vescale_ray.workers.resharding.reshard import stored_aux

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
                    SavedShard(
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
