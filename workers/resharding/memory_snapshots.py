"""In-memory copies of the training state. :mod:`vescale_ray.workers.resharding.held_state` chooses the state to resume from.

Every ``every`` steps, each rank copies its shards into a buffer (*take*) and sends the same bytes to its *buddy*. Both happen in a thread
while the next step computes. *settle* waits for the rest. It runs before that step's last collective, and so before the optimizer
overwrites the source. If rank ``r`` dies, its shards of that step are with its buddy, and everyone else's are at home. If enough other
ranks exist, the buddy is on another node, so that a whole node may be lost. If a rank and its buddy are lost together, a shard is lost, and
only the newest checkpoint helps.

The buffer has the layout of a checkpoint's object, and its block checksums. Therefore a checkpoint of a copied step is written from the
copy itself. Checksums find a copy that was damaged in transit or in memory before it is used; the copy before it is used instead.

Two steps are kept, for this reason. A rank that finishes the exchange of step ``s`` does not know that the others have. If one dies during
the exchange, step ``s`` is incomplete. So the copy of ``s`` goes only when ``s + 2k`` is taken. By then every rank has finished its
exchange of ``s + k``, since the last collective of the following step comes after it (``Trainer.step`` calls :meth:`Snapshots.settle`
before that collective). The same holds across generations: an older generation's copies are dropped once the new one's first copy is
complete everywhere. So at any moment, any set of survivors that lost no rank together with its buddy can restore some step.

| event | resumed state |
|---|---|
| planned stop (all ranks at a boundary) | that boundary; the live shards are *parked*, without a copy |
| a rank dies in a step | the last copied step; the copy before it if the rank dies before it sends its bytes |
| a rank dies while a new generation is formed or filled | the same as before, since the old copies are kept |
| a copy is damaged | the copy before it |
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from vescale_ray import gloo
from vescale_ray.checkpoint.format.digest import BLOCK_BYTES, block_sums, view_of
from vescale_ray.checkpoint.format.object_layout import ObjectLayout, lay_out
from vescale_ray.checkpoint.format.staging import LayoutMemo, Slab, SlabPool, copy_pieces, written
from vescale_ray.checkpoint.format.tiling import ROWS, Tiling
from vescale_ray.communication import abortable_waits
from vescale_ray.workers.network.process_groups import all_gather_bytes, describe
from vescale_ray.workers.resharding.held_state import HeldState
from vescale_ray.workers.resharding.shards import Piece, Shards, Span, Strip, dtype_of, export_shards, stored_pieces, strips_of

if TYPE_CHECKING:
    from vescale_ray.checkpoint import ShardPiece
    from vescale_ray.workers.trainer import Trainer

_log = logging.getLogger(__name__)


def buddies(nodes: Sequence[str]) -> list[int]:
    """For each rank, the rank that gets its copy. Every rank gets one copy, and not its own if there is another rank.

    As many ranks as possible have their buddy on another node: all, unless one node has more than half of the ranks. Ranks are lined up by
    node, the fullest first. Each rank's buddy stands as many places further as the fullest node has ranks.
    """
    world = len(nodes)
    by_node: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        by_node.setdefault(node, []).append(rank)
    # Stable: nodes of one size stay in the order of their first rank. With a single node, each rank's buddy is its neighbour.
    groups = sorted(by_node.values(), key=len, reverse=True)
    line = [rank for group in groups for rank in group]
    shift = len(groups[0]) % world or 1
    found = [0] * world
    for place, rank in enumerate(line):
        found[rank] = line[(place + shift) % world]
    return found


@dataclass(frozen=True)
class Staged:
    """A copy of one rank's shards of one step, laid out as a checkpoint's object. The receiver releases ``slab`` once.

    Attributes:
        shared: whether it is the copy that the buddy also got, so that no further copy was made.
    """

    generation: int
    world: int
    rank: int
    step: int
    scalars: Mapping[str, Any]
    slab: Slab
    shared: bool


class Snapshots:
    """Copies that one worker process holds for itself and for another rank, across generations.

    The training thread drives it. Another thread may call :meth:`held`, but the result is final only once the group is dissolved.

    Args:
        every: steps between copies; 0 makes none (planned stops still park the live shards).
        pin: keep the buffers in page-locked memory, for shards on a GPU.
        node: id of this process's node; the same text on every process of the node.

    Memory: two steps, each with the rank's own shards and another rank's, in host memory. Buffers of the generation before are reused if
    they are large enough. One more buffer is needed while a checkpoint is written from a copy that would otherwise be overwritten.
    """

    def __init__(self, every: int, *, pin: bool = False, node: str = "") -> None:
        if every < 0:
            raise ValueError(f"elastic.snapshot_every = {every}: give at least 0")
        self._every = every
        self._node = node
        self._pool = SlabPool(pinned=pin)
        self._layouts = LayoutMemo()
        self._current: _Generation | None = None
        self._before: list[_Generation] = []
        """Earlier generations whose copies are kept until the current one's are complete on every rank."""
        self._kept_parked: list[Shards] = []
        self._parked: Shards | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers: copies of this rank's shards and of another's, and checkpoint buffers."""
        return self._pool.nbytes

    def held(self) -> list[HeldState]:
        """Complete copies in this process, ordered by step and generation."""
        by_state: dict[tuple[int, int, int], set[int]] = {}
        for part in self._generations():
            for rank, step in part.complete():
                by_state.setdefault((step, part.generation, part.world), set()).add(rank)
        for shards in self._all_parked():
            by_state.setdefault((shards.step, shards.generation, shards.world), set()).add(shards.rank)
        return [HeldState(generation, world, step, tuple(sorted(ranks))) for (step, generation, world), ranks in sorted(by_state.items())]

    def shards(self, generation: int, step: int) -> list[Shards]:
        """The held shards of that state, by old rank; empty on a joiner. Copies are verified first, and damaged ones are left out."""
        found: dict[int, Shards] = {}
        for part in self._generations():
            if part.generation == generation:
                part.verify(step)
                found.update({shards.rank: shards for shards in part.shards(step)})
        found.update({s.rank: s for s in self._all_parked() if (s.generation, s.step) == (generation, step)})
        return [found[rank] for rank in sorted(found)]

    def word(self, trainer: Trainer) -> bytes:
        """This rank's message to all ranks before :meth:`begin`: its node, and its shards without their values."""
        # One line for the node, one for the strips: all nodes are needed at once, but only one rank's strips, later.
        return b"\n".join(json.dumps(said).encode() for said in (self._node, strips_of(export_shards(trainer).pieces)))

    def begin(self, trainer: Trainer, source: int | None = None, words: Sequence[bytes] | None = None) -> None:
        """Take the first copy of a new generation whose trainer is filled. Collective, unless ``words`` is given.

        The state that this generation started from is kept, with copies of earlier steps, until :meth:`after_step` has shown that every
        rank has finished its first copy. Live shards that were parked have no copy. The last generation's copies are kept
        too. Copies of earlier, failed generations are dropped, since repeated failures would fill the memory.

        Args:
            source: generation that held the state in memory; None if the state came from elsewhere.
            words: messages of all ranks, if they came with another exchange, such as the move of shards; None exchanges them here.
        """
        if words is not None and len(words) != trainer.world:
            raise ValueError(f"{len(words)} words of {trainer.world} ranks: give one word per rank, in rank order")
        step = trainer.completed
        parked = self._all_parked()
        before = self._generations()
        self._kept_parked, self._parked, self._current = [s for s in parked if s.step == step], None, None
        steps = {part.generation: [step for _, step in part.complete()] for part in before}
        self._before = [
            part
            for part in before
            if any(one < step for one in steps[part.generation])
            or (step in steps[part.generation] and (part.generation == source or part is before[-1]))
        ]
        for part in before:
            part.pending = []
            if part not in self._before:
                part.release()
        if self._every:
            if words is None:
                words = all_gather_bytes(self.word(trainer)) if trainer.world > 1 else [self.word(trainer)]
            self._current = _Generation(trainer, self._pool, words)
            self._current.take(trainer)

    def copied(self) -> None:
        """Wait for this rank's own part of the last copy, and for no other rank. With large shards and fresh memory it may take longer than
        a step."""
        if self._current is not None:
            self._current.made()

    def settle(self) -> None:
        """Wait for the last copy and its exchange. Pass it to every ``Trainer.step``.

        Raises:
            MemoryError, ..: the copy could not be made.
            RuntimeError: the process group failed: another rank is gone or hung.
        """
        if self._current is not None:
            self._current.settle()

    def after_step(self, trainer: Trainer, *, rescale: bool = False) -> bool:
        """Call after each whole step: drop superseded copies, and copy if one is due. Returns whether it copied.

        ``rescale``: all ranks stop here to move their shards. A copy would delay the move by as long as the move itself takes, so none
        begins. If a rank is lost on the way, the copies of the step before replace it, at the cost of that step.
        """
        if self._current is not None and self._current.pending:
            raise AssertionError("Trainer.step got no Snapshots.settle, so the last copy may be incomplete: pass it")
        # A collective has passed since all ranks finished their exchange.
        self._drop_older()
        if rescale and self._current is not None:
            self._current.keep_newest()  # the live shards replace the older copy
            return False
        if self._current is None or trainer.completed % self._every:
            return False
        self._current.take(trainer)
        return True

    def stage(self, trainer: Trainer) -> Staged:
        """The live shards, copied for a checkpoint. If this step's copy exists it is shared; otherwise the shards go to a separate
        buffer."""
        current = self._current
        slab = current.copy_of(trainer.completed) if current is not None else None
        shared = slab is not None
        live = export_shards(trainer)
        if slab is None:
            pieces = stored_pieces(live)
            layout = self._layouts.of(pieces)
            slab = self._pool.take(layout.bytes)
            copy_pieces(layout, pieces, slab.lay(layout)).wait()
        return Staged(live.generation, live.world, live.rank, live.step, live.scalars, slab, shared)

    def park(self, trainer: Trainer) -> None:
        """Hold the live shards themselves, without a copy, at a boundary that all ranks agreed on.

        Do not call it after a failure, since a failed step may have left them half written.
        """
        self.settle()
        live = export_shards(trainer)
        part = self._current
        if part is not None:
            part.verify(live.step)
        if part is None or (live.rank, live.step) not in part.complete():
            self._parked = live

    def let_go(self) -> None:
        """Abandon what is left of an exchange, since it holds the process group, which is about to be dissolved. Takes milliseconds after
        :meth:`copied`."""
        if self._current is not None:
            self._current.let_go()

    def verify(self) -> None:
        """Compare every copy with its checksums and drop the damaged ones. Call it after a failure, before copies are used."""
        for part in self._generations():
            part.verify()

    def clear(self) -> None:
        """Release everything held."""
        self._drop_older()
        if self._current is not None:
            self._current.release()
        self._current, self._parked = None, None
        self._pool.clear()

    def _drop_older(self) -> None:
        for part in self._before:
            part.release()
        self._before, self._kept_parked = [], []

    def _generations(self) -> list[_Generation]:
        return [*self._before, *([self._current] if self._current else [])]

    def _all_parked(self) -> list[Shards]:
        return [*self._kept_parked, *([self._parked] if self._parked else [])]


_EXCHANGE, _SUMS = 7001, 7002
"""Tags of the two messages of an exchange. The step that computes meanwhile may send messages of its own."""


class _Generation:
    """The two copies of one generation on one rank."""

    def __init__(self, trainer: Trainer, pool: SlabPool, words: Sequence[bytes]) -> None:
        self.generation, self.world, self.rank = trainer.generation, trainer.world, trainer.rank
        self._pool = pool
        nodes, strips = zip(*(word.split(b"\n") for word in words), strict=True)
        to = buddies([json.loads(node) for node in nodes])
        self._buddy = to[self.rank]
        self._ward = to.index(self.rank)
        self._strips = strips[self.rank], strips[self._ward]
        self._planned: tuple[_Planned, _Planned] | None = None
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
            self._slots.append(_Slot(_Copy(), _Copy()))
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
        """Copy the shards, in the copy thread. The first copy's layout and fresh memory also cost time here, not in the pause of a rescale.
        ``pieces`` keeps the tensors alive while they are read."""
        own = exchange.slot.own
        if self._planned is None:
            mine, theirs = ([Strip.from_json(row) for row in json.loads(strips)] for strips in self._strips)
            self._planned = _Planned(mine), _Planned(theirs if self.world > 1 else [])
        own.make_room(self._pool, self._planned[0])
        copy_pieces(own.layout, pieces, own.room.lay(own.layout), after=after).wait()
        own.step = exchange.step

    def _send(self, exchange: _Exchange) -> np.ndarray:
        """Send the copy, then its checksums once they are known, and post receives of the ward's. The ward is the rank whose copy this one
        keeps."""
        own, theirs = exchange.slot.own, exchange.slot.theirs
        assert own.copied is not None
        own.copied.result()  # already done; raises if the copy failed
        if self.world == 1:
            return own.count()
        assert self._planned is not None
        theirs.make_room(self._pool, self._planned[1])
        exchange.sums = torch.empty(theirs.blocks, dtype=torch.int64)
        if theirs.data.numel():
            exchange.receives = [
                _post(dist.irecv, theirs.data, self._ward, _EXCHANGE),
                _post(dist.irecv, exchange.sums, self._ward, _SUMS),
            ]
        exchange.awaited = True
        if own.data.numel():
            exchange.sends = [_post(dist.isend, own.data, self._buddy, _EXCHANGE)]
        sums = own.count()
        exchange.own_sums = torch.from_numpy(sums)
        if sums.size:
            exchange.sends.append(_post(dist.isend, exchange.own_sums, self._buddy, _SUMS))
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
            if self.world > 1:
                exchange.received()
        self.pending = []

    def let_go(self) -> None:
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
        """The buffer of this rank's own copy of ``step``, retained for the caller; None if there is none. Waits for a copy in progress."""
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
        """Rank and step of each complete copy."""
        return [(rank, step) for rank, _, copy in self._copies() if (step := copy.step) is not None]

    def shards(self, step: int) -> list[Shards]:
        """The copies of ``step``."""
        copies = [(rank, slot, copy) for rank, slot, copy in self._copies() if copy.step == step]
        return [Shards(self.generation, self.world, rank, step, copy.pieces(), slot.scalars) for rank, slot, copy in copies]

    def _copies(self) -> list[tuple[int, _Slot, _Copy]]:
        own = [(self.rank, slot, slot.own) for slot in self._slots]
        return own if self.world == 1 else [*own, *((self._ward, slot, slot.theirs) for slot in self._slots)]

    def verify(self, step: int | None = None) -> None:
        """Compare the copies (of ``step``) not yet verified with their checksums, and drop the damaged ones."""
        for rank, _, copy in self._copies():
            if copy.step is not None and (step is None or copy.step == step) and not copy.verified:
                bad = copy.damaged()
                if bad:
                    _log.error(
                        "the copy of rank %d's shards of step %d in this worker's memory is damaged (%d of %d blocks) and will not be used",
                        rank,
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


class _Planned:
    """Spans of a rank's shards, and their places in a copy."""

    def __init__(self, strips: Sequence[Strip]) -> None:
        self.spans = [span for strip in strips for span in strip.spans]
        self.layout = lay_out([_described(span) for span in self.spans])


class _Copy:
    """One rank's shards of one step. ``step`` is None until they are copied, and if they are damaged."""

    def __init__(self) -> None:
        self._planned: _Planned | None = None
        self.slab: Slab | None = None
        self.step: int | None = None
        self.copied: Future[None] | None = None
        self.sums: Future[np.ndarray] | np.ndarray | None = None
        self.verified = False

    def make_room(self, pool: SlabPool, planned: _Planned) -> None:
        """Ensure that there is a buffer to copy to, which no checkpoint uses."""
        self._planned = planned
        if self.slab is not None and self.slab.shared:  # a checkpoint is still being written from it
            self.slab.release()
            self.slab = None
        if self.slab is None:
            self.slab = pool.take(self.layout.bytes)
            self.slab.lay(self.layout)

    @property
    def layout(self) -> ObjectLayout:
        assert self._planned is not None
        return self._planned.layout

    @property
    def room(self) -> Slab:
        assert self.slab is not None
        return self.slab

    @property
    def data(self) -> Tensor:
        """The object without its header, which a checkpoint fills in."""
        return self.room.buffer[self.layout.header_bytes : self.layout.bytes]

    @property
    def blocks(self) -> int:
        return -(-(self.layout.bytes - self.layout.header_bytes) // BLOCK_BYTES)

    def count(self) -> np.ndarray:
        return np.array(block_sums(view_of(self.data), BLOCK_BYTES), dtype="<u8").view(np.int64)

    def expected(self) -> np.ndarray:
        if isinstance(self.sums, Future):
            self.sums = self.sums.result()
        assert self.sums is not None
        return self.sums

    def damaged(self) -> int:
        """Number of blocks whose checksum differs."""
        return int(np.count_nonzero(self.count() != self.expected()))

    def over(self) -> None:
        """Wait until the thread no longer uses the buffer, whether it succeeded or not."""
        if isinstance(self.sums, Future):
            self.sums.exception()

    def forget(self) -> None:
        self.over()
        self.step, self.copied, self.sums, self.verified = None, None, None, False

    def pieces(self) -> tuple[Piece, ...]:
        """Views, in the order of the rank's spans."""
        assert self._planned is not None
        spans = self._planned.spans
        found: dict[int, Piece] = {}
        for place, index in zip(self.layout.placed, self.layout.order, strict=True):
            span = spans[index]
            data = self.room.buffer[place.offset : place.offset + span.nbytes].view(dtype_of(span.dtype))
            found[index] = Piece(span.name, span.kind, span.shape, span.start, span.end, data)
        return tuple(found[index] for index in range(len(spans)))


@dataclass
class _Exchange:
    """One copy on its way to the buddy, and another rank's on its way here."""

    slot: _Slot
    step: int
    sums: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    sends: list[Any] = field(default_factory=list)
    receives: list[Any] = field(default_factory=list)
    awaited: bool = False
    """Whether all receives are posted. ``receives`` stays empty if the ward owns nothing."""
    own_sums: Tensor | None = None
    since: int = field(default_factory=abortable_waits.mark)

    def received(self) -> None:
        self.slot.theirs.sums = self.sums.numpy()
        self.slot.theirs.step = self.step


@dataclass
class _Slot:
    own: _Copy
    theirs: _Copy
    scalars: Mapping[str, Any] = field(default_factory=dict)

    def release(self) -> None:
        for copy in (self.own, self.theirs):
            copy.forget()
            if copy.slab is not None:
                copy.slab.release()


def _step_of(slot: _Slot) -> int:
    return -1 if slot.own.step is None else slot.own.step


class _Described(NamedTuple):
    name: str
    kind: str
    start: int
    end: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    copied: bool = False
    tiling: Tiling = ROWS


def _post(start: Callable[..., Any], tensor: torch.Tensor, peer: int, tag: int) -> Any:
    with gloo.unrecorded():
        work = start(tensor, peer, tag=tag)
    assert work is not None, "this process is not in the group"
    return work


def _described(span: Span) -> _Described:
    return _Described(span.name, span.kind, span.start, span.end, span.shape, dtype_of(span.dtype))
