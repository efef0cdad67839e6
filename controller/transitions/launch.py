"""The orders that form a generation."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from vescale_ray.config import RunConfig
from vescale_ray.controller.protocol import RunSpec, World
from vescale_ray.workers.messages import Give, Join, Order, Seat


def givers_of(world: World) -> list[str]:
    """Return the workers outside the generation that hold a part of its state."""
    resume, members = world.source.resume, frozenset(world.members)
    return [w for w in resume.workers if w not in members] if resume is not None else []


def orders_of(world: World, givers: Sequence[str], store: tuple[str, int], run_id: str, *, evaluate: bool) -> dict[str, Order]:
    """Return the orders for the members, and for the ``givers`` that give them shards.

    Args:
        store: host and port of the generation's store.
        evaluate: whether the members evaluate before their first step.
    """
    source = world.source
    prefix = f"{run_id}/{world.ticket}"
    party = (*world.members, *givers)
    orders: dict[str, Order] = {}
    for rank, worker in enumerate(party):
        transfer = Seat(*store, f"{prefix}/move", rank, len(party)) if givers else None
        if rank >= world.size:
            assert transfer is not None
            orders[worker] = Give(world.ticket, transfer, source.resume)
            continue
        orders[worker] = Join(
            ticket=world.ticket,
            seat=Seat(*store, prefix, rank, world.size),
            origin=source.origin,
            save_prefix=f"{run_id}-g{world.ticket.generation}",
            transfer=transfer,
            commit=source.commit,
            resume=source.resume,
            evaluate=evaluate,
        )
    return orders


def evaluation_due(step: int, config: RunConfig, spec: RunSpec, evaluated: Collection[int]) -> bool:
    """Return whether to evaluate the state of ``step`` before the next step.

    This is so at the first step, and if the losses of the evaluation were lost with a worker.

    Args:
        evaluated: steps whose losses are known. If the run began from a checkpoint, those of that step were computed before the checkpoint
        was written.
    """
    every, first = config.train.eval_every, spec.source.step
    due = step in (0, config.train.steps) or (every > 0 and step % every == 0 and step > first)
    return due and config.data.eval_samples > 0 and step not in evaluated
