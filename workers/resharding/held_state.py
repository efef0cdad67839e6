"""Shards that workers hold in memory, and the choice of the state to resume from. Pure values, without torch, so that a restarted
controller decides before it imports torch. :mod:`vescale_ray.workers.resharding.memory_snapshots` makes the copies."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class HeldState:
    """Shards of one generation at one step, complete in one worker's memory. It can be pickled, or stored as JSON (``asdict``).

    Attributes:
        world: number of shards that the state is cut in. With replicas (HSDP) these are fewer than the generation's workers.
        ranks: numbers of the shards: ranks within a shard group.
    """

    generation: int
    world: int
    step: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Resume:
    """The state to resume from: after ``step`` steps, as ``generation`` held it in ``world`` shards.

    Attributes:
        suppliers: for each shard, the worker that gives it.
    """

    generation: int
    world: int
    step: int
    suppliers: Mapping[int, str]

    @property
    def workers(self) -> tuple[str, ...]:
        """Workers that must take part in the move."""
        return tuple(sorted(set(self.suppliers.values())))


def choose_resume(held: Mapping[str, Iterable[HeldState]], prefer: Collection[str] = ()) -> Resume | None:
    """Return the newest step of which the living workers together hold every shard; None if only a checkpoint can help.

    Args:
        held: per living worker, the report of :meth:`vescale_ray.workers.resharding.memory_snapshots.Snapshots.held` after its last group
            was dissolved.
        prefer: workers of the next generation. They supply all they can, so that few leavers are needed. Of two states at one step, the one
            that needs fewer other workers wins, then the later generation.
    """
    prefer = frozenset(prefer)
    holders: dict[tuple[int, int, int], dict[int, list[str]]] = {}
    for worker in sorted(held):
        for held_state in held[worker]:
            ranks = holders.setdefault((held_state.step, held_state.generation, held_state.world), {})
            for rank in held_state.ranks:
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
