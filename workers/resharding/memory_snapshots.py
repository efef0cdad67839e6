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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vescale_ray.checkpoint.format.staging import LayoutMemo, Slab, SlabPool, copy_pieces
from vescale_ray.workers.network.process_groups import all_gather_bytes
from vescale_ray.workers.resharding.copy_exchange import GenerationCopies
from vescale_ray.workers.resharding.held_state import HeldState
from vescale_ray.workers.resharding.shards import Shards, export_shards, stored_pieces, strips_of

if TYPE_CHECKING:
    from vescale_ray.workers.trainer import Trainer


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
        self._current: GenerationCopies | None = None
        self._before: list[GenerationCopies] = []
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
        """Return the held shards of that state, by old rank; empty on a joiner. Copies are verified first, and damaged ones are left
        out."""
        found: dict[int, Shards] = {}
        for part in self._generations():
            if part.generation == generation:
                part.verify(step)
                found.update({shards.rank: shards for shards in part.shards(step)})
        found.update({s.rank: s for s in self._all_parked() if (s.generation, s.step) == (generation, step)})
        return [found[rank] for rank in sorted(found)]

    def word(self, trainer: Trainer) -> bytes:
        """Return this rank's message to all ranks before :meth:`begin`: its node, and its shards without their values."""
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
            raise ValueError(f"{len(words)} messages of {trainer.world} ranks: give one message per rank, in rank order")
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
            self._current = GenerationCopies(trainer, self._pool, words)
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
        """Return the live shards, copied for a checkpoint. If this step's copy exists it is shared; otherwise the shards go to a separate
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

    def abandon(self) -> None:
        """Abandon the rest of an exchange, since it holds the process group, which is about to be dissolved. Takes milliseconds after
        :meth:`copied`."""
        if self._current is not None:
            self._current.abandon()

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

    def _generations(self) -> list[GenerationCopies]:
        return [*self._before, *([self._current] if self._current else [])]

    def _all_parked(self) -> list[Shards]:
        return [*self._kept_parked, *([self._parked] if self._parked else [])]
