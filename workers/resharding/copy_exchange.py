"""The copies that one rank holds in one generation, and the exchange that makes them: one message to its buddy, one from its source.

The source is the rank whose copies this one keeps. A thread copies and sends while the next step computes. If replicas on other nodes hold
the same shards (HSDP), nothing is sent: each rank's own copy is the copy of its replicas' shards.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from vescale_ray import gloo
from vescale_ray.checkpoint.format.staging import Slab, SlabPool, copy_pieces, written
from vescale_ray.communication import abortable_waits
from vescale_ray.workers.network.process_groups import describe
from vescale_ray.workers.resharding.buddies import buddies, replicas_suffice
from vescale_ray.workers.resharding.memory_copy import CopyPlan, MemoryCopy
from vescale_ray.workers.resharding.shards import Shards, Strip, export_shards, stored_pieces

if TYPE_CHECKING:
    from vescale_ray.checkpoint import ShardPiece
    from vescale_ray.workers.trainer import Trainer

_log = logging.getLogger(__name__)

SHARDS_TAG, SUMS_TAG = 7001, 7002
"""Tags of the two messages of an exchange. The step that computes meanwhile may send messages of its own."""


class GenerationCopies:
    """The two copies of one generation on one rank."""

    def __init__(self, trainer: Trainer, pool: SlabPool, words: Sequence[bytes]) -> None:
        grid, rank = trainer.grid, trainer.rank
        self.generation, self.world, self.shard = trainer.generation, grid.shards, grid.shard_of(rank)
        self._pool = pool
        lines, strips = zip(*(word.split(b"\n") for word in words), strict=True)
        nodes = [json.loads(line) for line in lines]
        self._exchanges = grid.size > 1 and not replicas_suffice(nodes, grid)
        """True if the rank sends its copy to a buddy, and keeps its source's."""
        to = buddies(nodes)
        self._buddy = to[rank]
        self._source = to.index(rank)
        self._source_shard = grid.shard_of(self._source)
        self._strips = strips[rank], strips[self._source]
        self._planned: tuple[CopyPlan, CopyPlan] | None = None
        self._slots: list[_Slot] = []
        """At most two. The second one is made for the second copy, when the buffers of the generation before are free. If it were made in
        the pause of a rescale, its memory would be fresh and slow."""
        self.pending: list[_Exchange] = []
        """The exchange in progress; it holds the process group."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="snapshot")

    def take(self, trainer: Trainer) -> None:
        """Begin to copy the live shards into the older slot, and then to exchange it: one message out, one in.

        The live shards must not change before :meth:`settle` returns.
        """
        if len(self._slots) < 2:
            self._slots.append(_Slot(MemoryCopy(), MemoryCopy()))
        slot = min(self._slots, key=_step_of)
        slot.own.forget()
        slot.theirs.forget()
        live = export_shards(trainer)
        slot.scalars = live.scalars
        exchange = _Exchange(slot, live.step)
        self.pending = [exchange]
        pieces = stored_pieces(live)
        slot.own.copied = self._thread.submit(self._copy, exchange, pieces, written(pieces))
        slot.own.sums = self._thread.submit(self._send, exchange)

    def _copy(self, exchange: _Exchange, pieces: Sequence[ShardPiece], after: Any) -> None:
        """Copy the shards, in the copy thread. For the first copy, the thread also plans the layout and allocates the buffer, so that a
        rescale does not wait for these. ``pieces`` keeps the tensors alive while they are read."""
        own = exchange.slot.own
        if self._planned is None:
            mine, theirs = ([Strip.from_json(row) for row in json.loads(strips)] for strips in self._strips)
            self._planned = CopyPlan(mine), CopyPlan(theirs if self._exchanges else [])
        own.make_room(self._pool, self._planned[0])
        copy_pieces(own.layout, pieces, own.room.lay(own.layout), after=after).wait()
        own.step = exchange.step

    def _send(self, exchange: _Exchange) -> np.ndarray:
        """Send the copy, then its checksums once they are known, and post receives of the source's. The source is the rank whose copy this
        one keeps."""
        own, theirs = exchange.slot.own, exchange.slot.theirs
        assert own.copied is not None
        own.copied.result()  # already done; raises if the copy failed
        if not self._exchanges:
            return own.count()
        assert self._planned is not None
        theirs.make_room(self._pool, self._planned[1])
        exchange.sums = torch.empty(theirs.blocks, dtype=torch.int64)
        if theirs.data.numel():
            exchange.receives = [
                _post(dist.irecv, theirs.data, self._source, SHARDS_TAG),
                _post(dist.irecv, exchange.sums, self._source, SUMS_TAG),
            ]
        exchange.awaited = True
        if own.data.numel():
            exchange.sends = [_post(dist.isend, own.data, self._buddy, SHARDS_TAG)]
        sums = own.count()
        exchange.own_sums = torch.from_numpy(sums)
        if sums.size:
            exchange.sends.append(_post(dist.isend, exchange.own_sums, self._buddy, SUMS_TAG))
        return sums

    def made(self) -> None:
        for exchange in self.pending:
            exchange.slot.own.over()

    def settle(self) -> None:
        for exchange in self.pending:
            exchange.slot.own.expected()  # bounded: it waits for copied memory and posted messages, not for other ranks
            limit = abortable_waits.bound(dist.group.WORLD)
            for work in (*exchange.sends, *exchange.receives):
                abortable_waits.wait(work, exchange.since, limit)
            if self._exchanges:
                exchange.received()
        self.pending = []

    def abandon(self) -> None:
        """Abandon the exchange: keep the complete copies, and release the process group."""
        for exchange in self.pending:
            own = exchange.slot.own
            try:
                own.expected()
            except Exception as error:
                describe(error)  # Either the group failed during a send, and the checksums are computed again, or nothing was copied.
                own.copied, own.sums = None, self._thread.submit(own.count) if own.step is not None else None
            try:
                # False: the wait was given up.
                came = [work.wait(timedelta(milliseconds=5)) is not False for work in exchange.receives]
            except Exception as error:
                describe(error)
            else:
                if exchange.awaited and all(came):
                    exchange.received()
        self.pending = []

    def copy_of(self, step: int) -> Slab | None:
        """Return the buffer of this rank's own copy of ``step``, retained for the caller; None if there is none. Waits for a copy in
        progress."""
        for exchange in self.pending:
            if exchange.step == step and exchange.slot.own.copied is not None:
                exchange.slot.own.copied.result()
        return next((slot.own.room.retain() for slot in self._slots if slot.own.step == step), None)

    def keep_newest(self) -> None:
        """Release the buffers of the older copy. Call it only when every rank is known to have the newer one."""
        by_age = sorted(self._slots, key=_step_of)
        self._slots = by_age[-1:]
        for slot in by_age[:-1]:
            slot.release()

    def complete(self) -> list[tuple[int, int]]:
        """Shard and step of each complete copy."""
        return [(shard, step) for shard, _, copy in self._copies() if (step := copy.step) is not None]

    def shards(self, step: int) -> list[Shards]:
        """Return the copies of ``step``."""
        copies = [one for one in self._copies() if one[2].step == step]
        return [Shards(self.generation, self.world, shard, step, copy.pieces(), slot.scalars) for shard, slot, copy in copies]

    def _copies(self) -> list[tuple[int, _Slot, MemoryCopy]]:
        own = [(self.shard, slot, slot.own) for slot in self._slots]
        return [*own, *((self._source_shard, slot, slot.theirs) for slot in self._slots)] if self._exchanges else own

    def verify(self, step: int | None = None) -> None:
        """Compare the copies (of ``step``) not yet verified with their checksums, and drop the damaged ones."""
        for shard, _, copy in self._copies():
            if copy.step is not None and (step is None or copy.step == step) and not copy.verified:
                bad = copy.damaged()
                if bad:
                    _log.error(
                        "the copy of shard %d of step %d in this worker's memory is damaged (%d of %d blocks) and will not be used",
                        shard,
                        copy.step,
                        bad,
                        copy.blocks,
                    )
                    copy.step = None
                copy.verified = True

    def release(self) -> None:
        """Release the buffers."""
        self.pending = []
        self._thread.shutdown(wait=False)
        for slot in self._slots:
            slot.release()
        self._slots = []


@dataclass
class _Exchange:
    """One copy on its way to the buddy, and another rank's on its way here."""

    slot: _Slot
    step: int
    sums: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    sends: list[Any] = field(default_factory=list)
    receives: list[Any] = field(default_factory=list)
    awaited: bool = False
    """True if all receives are posted. ``receives`` stays empty if the source owns nothing."""
    own_sums: Tensor | None = None
    since: int = field(default_factory=abortable_waits.mark)

    def received(self) -> None:
        self.slot.theirs.sums = self.sums.numpy()
        self.slot.theirs.step = self.step


@dataclass
class _Slot:
    own: MemoryCopy
    theirs: MemoryCopy
    scalars: Mapping[str, Any] = field(default_factory=dict)

    def release(self) -> None:
        for copy in (self.own, self.theirs):
            copy.forget()
            if copy.slab is not None:
                copy.slab.release()


def _step_of(slot: _Slot) -> int:
    return -1 if slot.own.step is None else slot.own.step


def _post(start: Callable[..., Any], tensor: torch.Tensor, peer: int, tag: int) -> Any:
    with gloo.unrecorded():
        work = start(tensor, peer, tag=tag)
    assert work is not None, "this process is not in the group"
    return work
