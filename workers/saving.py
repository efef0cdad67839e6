"""Write a worker's objects of checkpoints: staged ones during training, and held ones at the controller's order.

One thread per worker process writes the staged ones, for all its generations. Training stages a copy in memory, or reuses the copy sent
to the buddy. This thread writes it and votes. At most one checkpoint is being written and one is staged; all ranks together skip further
ones (``messages.BUSY``). When a generation fails or the next one begins, unfinished writes are abandoned, since the controller no longer
counts their votes. When the thread is idle, it reads voted objects back and records those that are right. Only then does the controller
delete older checkpoints.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vescale_ray.workers.messages import Damaged, Save, SavedShard, Ticket
from vescale_ray.workers.network.process_groups import describe
from vescale_ray.workers.resharding.shards import Shards, stored_pieces

if TYPE_CHECKING:
    from vescale_ray.checkpoint import Vote
    from vescale_ray.workers.resharding.memory_snapshots import Snapshots, Staged

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
        publish: receives the vote or the reason of a failure, and later a report of damage. Any thread calls it.
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
        """True if no further checkpoint can be staged."""
        with self._lock:
            return len(self._jobs) >= MOST

    @property
    def writing(self) -> bool:
        """True if any checkpoint is still being written."""
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

    def save_held(self, order: Save, ticket: Ticket, worker: str, snapshots: Snapshots) -> None:
        """Write the shards that the order names from those that ``worker`` holds, in the calling thread. Training continues even if a write
        fails.

        Args:
            ticket: the worker's last generation, which the votes name.
        """
        resume, held, damage = order.resume, dict[int, Shards](), None
        try:
            held = {shards.rank: shards for shards in snapshots.shards(resume.generation, resume.step)}
        except Exception as error:  # for example no memory for the checksums: this loses the checkpoint, but not the worker
            damage = describe(error)
        for rank in order.ranks:
            vote, seconds = None, 0.0
            if rank in held:
                began, problem = time.monotonic(), None
                try:
                    vote = write_checkpoint_shard(held[rank], self._root, order.attempt, epoch=order.epoch)
                except Exception as error:
                    problem = describe(error)
                seconds = time.monotonic() - began
            elif damage is not None:
                problem = f"worker {worker} cannot verify its copy of rank {rank}: {damage}"
            else:
                problem = f"worker {worker} holds no shard of rank {rank} at step {resume.step}"
            text = None if vote is None else vote.to_json()
            self._publish(SavedShard(ticket, order.attempt, resume.step, order.epoch, rank, resume.world, text, problem, seconds))
            if vote is not None:
                self._wrote(vote, ticket, resume.step)

    def _wrote(self, vote: Vote, ticket: Ticket, step: int) -> None:
        """Queue an object that was voted for, to be read back."""
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
        from vescale_ray.checkpoint.stores.opening import store_of
        from vescale_ray.checkpoint.upkeep.proof import prove

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
            self._wrote(vote, job.ticket, staged.step)


def write_checkpoint_shard(shards: Shards, root: Any, attempt: str, *, epoch: int | None = None) -> Vote:
    """Write this rank's object of a checkpoint and return its vote. Not a collective: the controller commits all votes.

    Args:
        shards: live shards (:func:`vescale_ray.workers.resharding.shards.export_shards`) or a held copy; they must not change until this
            returns.
        root: checkpoint folder, or a store.
        attempt: ``checkpoint.new_attempt()``, the same on all ranks of this save.
        epoch: number that orders and fences writers; the generation by default.

    Raises:
        SaveFailed: the storage failed; earlier checkpoints are untouched.
    """
    from vescale_ray.checkpoint import write_shard

    aux = stored_aux(shards.rank, shards.scalars)
    epoch = shards.generation if epoch is None else epoch
    return write_shard(root, attempt, shards.rank, stored_pieces(shards), aux=aux, step=shards.step, epoch=epoch, world=shards.world)


def stored_aux(rank: int, scalars: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a rank's auxiliary object of a checkpoint. The scalars are the same on all ranks, so only rank 0 writes them."""
    return dict(scalars) if rank == 0 else None
