"""What workers hold of a state in memory, and the decision where to resume from it: pure values, no torch, so that a controller that was
just restarted decides before torch is imported. How they come to hold it: :mod:`vescale_ray.workers.snapshot`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass


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
        held: per living worker, what :meth:`vescale_ray.workers.snapshot.Snapshots.held` reported after its last group was dissolved. The
            dead are left out.
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
