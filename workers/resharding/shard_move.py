"""The move of shards between memories with which a generation begins: a member's part, and all that a leaver does.

The training thread alone runs this code. It does not import Ray.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vescale_ray.workers.messages import Give, Join, WorkerPhase
from vescale_ray.workers.network import process_groups
from vescale_ray.workers.network.process_groups import Closing
from vescale_ray.workers.resharding.reshard import execute
from vescale_ray.workers.worker_fault import fault_of

if TYPE_CHECKING:
    from vescale_ray.workers.resharding.memory_snapshots import Snapshots
    from vescale_ray.workers.resharding.reshard import ReshardReport
    from vescale_ray.workers.trainer import Trainer
    from vescale_ray.workers.worker_state import WorkerState

LEAVER_SECONDS = 600.0
"""Longest wait, in seconds, of a leaver for the others, who first form the new generation and build their trainers. A fence ends it early.
A member that has built its trainer waits for the others only as long as in any collective."""

FILL_SECONDS = 3600.0
"""Longest wait, in seconds, of a rank that has its values (read, moved or initialised) for the other ranks. A fence ends it early. If a
rank sends no heartbeat for long, the controller ends it."""


def move(
    order: Join | Give, trainer: Trainer | None, snapshots: Snapshots, state: WorkerState, timeout_s: float
) -> tuple[ReshardReport, Closing | None]:
    """Take part in the move of shards, as a member (with a trainer) or as a leaver. A leaver returns once every rank is done.

    Args:
        timeout_s: time limit of every collective, in seconds.

    Returns:
        The report of the move. If a member used a transfer group, also the barrier that it keeps until every rank is done.

    Raises:
        ReshardError, TransferCorrupt, GroupFailed: as :func:`vescale_ray.workers.resharding.reshard.execute`.
    """
    assert order.resume is not None
    held = snapshots.shards(order.resume.generation, order.resume.step)
    seat = order.transfer
    word = b"" if trainer is None else snapshots.word(trainer)
    if seat is None:
        return execute(held, trainer, word=word), None
    with state.connecting(order.ticket) as connections:
        group = process_groups.open_transfer(
            seat.store_host,
            seat.store_port,
            seat.prefix,
            seat.rank,
            seat.world,
            timeout_s,
            meet_timeout_s=LEAVER_SECONDS if trainer is None else timeout_s,
            closed=lambda: state.is_fenced(order.ticket),
            lines=connections,
        )
    report = execute(held, trainer, group, word=word)
    closing = Closing(group, connections, FILL_SECONDS)
    if trainer is None:
        closing.wait()
        return report, None
    return report, closing  # this rank's shards have arrived and are verified, so it does not wait for the others


def give(order: Give, snapshots: Snapshots, state: WorkerState, timeout_s: float) -> None:
    """Give the shards that the order names, as a leaver. Never raises: ``state`` gets the reason of a failure."""
    state.enter(order.ticket, WorkerPhase.GIVING)
    fault = None
    try:
        move(order, None, snapshots, state, timeout_s)
    except BaseException as error:
        fault = fault_of(error)
    process_groups.dissolve()
    state.settle(WorkerPhase.PARKED, fault)
