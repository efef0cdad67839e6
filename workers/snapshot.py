"""Copies of the training state in the workers' memory, and the decision where to resume from them.

Every ``every`` steps each rank copies its shards into a buffer of its own and sends the same bytes to its *buddy*, the next rank.
When rank ``r`` dies, its shards of that step are with rank ``r + 1``, everyone else's are at home. Deaths of neighbours at
the same time lose a shard; then the newest checkpoint is the way back.

When may a copy be overwritten? A rank that has finished the exchange of step ``s + k`` does not know that the others
have; one that dies in the middle of it leaves step ``s + k`` incomplete. So two steps are kept: the copy of ``s`` goes only when
``s + 2k`` is taken, after at least one whole training step whose collectives nobody passes before everyone has
finished the exchange of ``s + k``. The same holds from one generation to the next: what an older generation held is
dropped when the new one's first copy is known to be complete everywhere. So at any moment some step is covered by any set of
survivors that lost no two neighbours.

| event | resumes at |
|---|---|
| planned stop (all ranks at a boundary) | that boundary: the live shards are *parked*, nothing is copied |
| a rank dies in a step | the last copied step: with ``every = 1`` no completed step is lost |
| a rank dies during the exchange | that step if its buddy has got the bytes, else the copy before |
| a rank dies while a new generation is formed or filled | as before it: the old holdings are still there |
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from vescale_ray.workers.groups import all_gather_bytes
from vescale_ray.workers.shards import Packing, Shards, Span, export_shards

if TYPE_CHECKING:
    from vescale_ray.workers.trainer import Trainer


@dataclass(frozen=True)
class Holding:
    """Shards of ``ranks`` of one generation at one step, complete in one worker's memory. Picklable and JSON-able (``asdict``)."""

    generation: int
    world: int
    step: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Resume:
    """Where to go on: the state after ``step`` steps as ``generation`` (of ``world`` ranks) held it.

    Attributes:
        suppliers: for each old rank the worker that gives its shards.
    """

    generation: int
    world: int
    step: int
    suppliers: Mapping[int, str]

    @property
    def workers(self) -> tuple[str, ...]:
        """Workers that must take part in the move."""
        return tuple(sorted(set(self.suppliers.values())))


def choose_resume(held: Mapping[str, Iterable[Holding]], prefer: Collection[str] = ()) -> Resume | None:
    """The newest step of which the living workers together hold every old rank's shards; None: go to the checkpoint.

    Args:
        held: per living worker, what :meth:`Snapshots.held` reported after its last group was dissolved. The dead are left out.
        prefer: workers of the next generation. They supply whatever they can, so that leavers are needed only for the rest; and
            of two states at the same step, the one that needs fewer others is taken, then the later generation's.
    """
    holders: dict[tuple[int, int, int], dict[int, list[str]]] = {}
    for worker in sorted(held):
        for holding in held[worker]:
            ranks = holders.setdefault((holding.step, holding.generation, holding.world), {})
            for rank in holding.ranks:
                ranks.setdefault(rank, []).append(worker)
    best: tuple[tuple[int, int, int], Resume] | None = None
    for (step, generation, world), ranks in holders.items():
        if any(rank not in ranks for rank in range(world)):
            continue
        suppliers = {rank: next((w for w in ranks[rank] if w in prefer), ranks[rank][0]) for rank in range(world)}
        outsiders = len({w for w in suppliers.values() if w not in prefer}) if prefer else 0
        order = (step, -outsiders, generation)
        if best is None or order > best[0]:
            best = (order, Resume(generation, world, step, suppliers))
    return best[1] if best else None


class Snapshots:
    """What one worker process holds for itself and for its predecessor, across generations.

    Driven by the thread that trains; :meth:`held` may be called from another one, but is only final once the group is dissolved.

    Args:
        every: steps between copies; 0 makes none (planned stops still park the live shards).
        pin: keep the buffers in page-locked memory, for shards that live on a GPU.

    Memory: two steps, each the rank's own shards and its predecessor's; host memory, allocated once a generation.
    """

    def __init__(self, every: int, *, pin: bool = False) -> None:
        if every < 0:
            raise ValueError(f"elastic.snapshot_every = {every}: give at least 0")
        self._every = every
        self._pin = pin
        self._current: _Generation | None = None
        self._older: list[Shards] = []
        """Of earlier generations, until the current one is known to be safe everywhere."""
        self._parked: Shards | None = None

    def held(self) -> list[Holding]:
        """What is complete in this process, ordered by step and generation."""
        by_state: dict[tuple[int, int, int], set[int]] = {}
        for shards in self._all():
            by_state.setdefault((shards.step, shards.generation, shards.world), set()).add(shards.rank)
        return [Holding(generation, world, step, tuple(sorted(ranks))) for (step, generation, world), ranks in sorted(by_state.items())]

    def shards(self, generation: int, step: int) -> list[Shards]:
        """The held shards of that state, by old rank; empty on a worker that has none (a joiner)."""
        found = {shards.rank: shards for shards in self._all() if shards.generation == generation and shards.step == step}
        return [found[rank] for rank in sorted(found)]

    def begin(self, trainer: Trainer) -> None:
        """Collective, once the new generation's trainer is filled: agree on layouts and take the first copy.

        Of older generations only the state that this one started from stays, until :meth:`after_step` has proved that
        every rank has got past its first copy.
        """
        self._older = [shards for shards in self._all() if shards.step == trainer.completed]
        self._parked = None
        self._current = None
        if self._every:
            generation = _Generation(trainer, pin=self._pin)
            self._current = generation
            generation.take(trainer)

    def after_step(self, trainer: Trainer) -> bool:
        """After each whole step: drop what is safely superseded, and copy if it is time. Returns whether it copied."""
        # The step's collectives have passed since the last exchange, so every rank has finished that one.
        self._older = []
        if self._current is None or trainer.completed % self._every:
            return False
        self._current.take(trainer)
        return True

    def park(self, trainer: Trainer) -> None:
        """At a boundary that all ranks agreed on: hold the live shards themselves, without a copy.

        Not after a failure: a failed step may have left them half written.
        """
        live = export_shards(trainer)
        if not any(s.rank == live.rank for s in self.shards(live.generation, live.step)):
            self._parked = live

    def clear(self) -> None:
        """Let go of everything held."""
        self._current, self._older, self._parked = None, [], None

    def _all(self) -> list[Shards]:
        current = self._current.complete() if self._current else []
        return [*self._older, *current, *([self._parked] if self._parked else [])]


class _Generation:
    """The two slots of one generation on one rank."""

    def __init__(self, trainer: Trainer, *, pin: bool) -> None:
        self.generation, self.world, self.rank = trainer.generation, trainer.world, trainer.rank
        own = [piece.span for piece in export_shards(trainer).pieces]
        self._buddy = (self.rank + 1) % self.world
        self._predecessor = (self.rank - 1) % self.world
        layouts = all_gather_bytes(json.dumps(own).encode()) if self.world > 1 else []
        theirs = [Span.from_json(row) for row in json.loads(layouts[self._predecessor])] if layouts else []
        self._own_packing, self._their_packing = Packing(own), Packing(theirs)
        self._slots = [_Slot(self._own_packing.nbytes, self._their_packing.nbytes, pin) for _ in range(2)]

    def take(self, trainer: Trainer) -> None:
        """Copy the live shards into the older slot and exchange it with the neighbours: one message out, one in."""
        live = export_shards(trainer)
        if any(slot.own_step == live.step for slot in self._slots):
            return
        slot = min(self._slots, key=lambda s: -1 if s.own_step is None else s.own_step)
        slot.own_step = slot.their_step = None
        for view, piece in zip(self._own_packing.views(slot.own), live.pieces, strict=True):
            view.copy_(piece.data)
        slot.scalars = live.scalars
        slot.own_step = live.step
        if self.world > 1:
            sends = [dist.P2POp(dist.isend, slot.own, self._buddy)] if slot.own.numel() else []
            receives = [dist.P2POp(dist.irecv, slot.theirs, self._predecessor)] if slot.theirs.numel() else []
            for work in dist.batch_isend_irecv(sends + receives) if sends or receives else []:
                work.wait()
            slot.their_step = live.step

    def complete(self) -> list[Shards]:
        found = []
        for slot in self._slots:
            for step, rank, packing, buffer in (
                (slot.own_step, self.rank, self._own_packing, slot.own),
                (slot.their_step, self._predecessor, self._their_packing, slot.theirs),
            ):
                if step is not None:
                    found.append(Shards(self.generation, self.world, rank, step, packing.pieces(buffer), slot.scalars))
        return found


class _Slot:
    """One step's copy: this rank's bytes and its predecessor's. ``None`` steps: being written, or never."""

    def __init__(self, own_bytes: int, their_bytes: int, pin: bool) -> None:
        self.own: Tensor = torch.empty(own_bytes, dtype=torch.uint8, pin_memory=pin)
        self.theirs: Tensor = torch.empty(their_bytes, dtype=torch.uint8, pin_memory=pin)
        self.own_step: int | None = None
        self.their_step: int | None = None
        self.scalars: Mapping[str, Any] = {}
