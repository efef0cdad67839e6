"""Arithmetic of the control loop's decisions: pure functions of values.

:func:`next_members` says who forms a generation, and :func:`choose_source` from which state it starts. While it runs, :func:`staffing` says
whether workers must be hired or a new generation is due.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from vescale_ray.config.rank_grid import RankGrid
from vescale_ray.controller.protocol import RequestRefused, StateSource, World
from vescale_ray.workers.messages import Origin
from vescale_ray.workers.resharding.held_state import HeldState, Resume, choose_resume


def next_members(
    living: Sequence[str],
    ready: Sequence[str],
    target: int,
    leaving: Collection[str] = (),
    whole: Callable[[int], int] = int,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the members and leavers of the next generation. Members that stay keep their old order, and joiners come last; ranks are
    assigned later (:mod:`vescale_ray.workers.resharding.rank_assignment`). Leavers are the ``leaving`` workers and the last ones beyond
    ``target``.

    Args:
        whole: returns how many of a number of workers can train together (:meth:`vescale_ray.config.RunConfig.whole`).
    """
    staying = tuple(w for w in living if w not in leaving)[:target]
    joiners = tuple(w for w in ready if w not in leaving)[: target - len(staying)]
    members = (*staying, *joiners)
    members = members[: whole(len(members))]
    stays = frozenset(members)
    return members, tuple(w for w in living if w not in stays)


# ----------------------------------------------------------------------------------------------------------------- staffing


@dataclass(frozen=True)
class Staffing:
    """Changes of staff while a generation runs.

    Attributes:
        hire: workers to hire.
        spares: further spares to hire, as far as places are free.
        dismiss: newest workers outside the generation to dismiss.
        regroup: ask the generation to stop at the next boundary, so that another one forms.
    """

    hire: int = 0
    spares: int = 0
    dismiss: int = 0
    regroup: bool = False


def staffing(world: int, ready: int, warming: int, target: int, spares: int = 0) -> Staffing:
    """Decide whether to hire or to regroup, with ``world`` members and ``target`` workers wanted. ``ready``, ``warming``: numbers of warm
    workers and of starting workers outside the generation. ``spares`` workers are to stay outside.

    One regrouping brings in all hired workers, so training goes on until the last of them is warm. A spare joins if a member is missing,
    and another spare is hired in its place.
    """
    missing = max(0, target - world)
    beside = ready + warming
    return Staffing(
        hire=max(0, missing - beside),
        spares=max(0, missing + spares - max(missing, beside)),
        dismiss=max(0, beside - missing - spares),
        regroup=target < world or 0 < missing <= ready,
    )


LONGEST_GAP_S = 3600.0


def growth_wait(begun: float | None, now: float, gap_s: float, failed: int) -> float:
    """Return the seconds until the next growth may begin; the last began at ``begun``. Each of the ``failed`` attempts since the last
    success doubles the gap ``gap_s``, counted as at least 1 s, up to :data:`LONGEST_GAP_S`."""
    if begun is None:
        return 0.0
    gap = gap_s if not failed else max(gap_s, min(max(gap_s, 1.0) * 2.0 ** min(failed, 30), LONGEST_GAP_S))
    return max(0.0, begun + gap - now)


def worth_growing(steps_left: int, step_s: float | None, warm_s: float) -> bool:
    """Return whether hiring a worker now pays off: it is warm before half of the remaining steps are done."""
    return step_s is None or steps_left * step_s > 2.0 * warm_s


def check_rescale(
    workers: object,
    *,
    fewest: int,
    most: int,
    slots: int,
    capacity: int | None,
    whole: Callable[[int], int] = int,
    key: str = "train.sharding.shard_group",
) -> int:
    """Return ``workers``, the number requested, if the run can have it. ``whole``: as for :func:`next_members`; ``key`` determines it.

    Raises:
        RequestRefused: one line with the number, the bound and its key.
    """
    if not isinstance(workers, int) or isinstance(workers, bool):
        raise RequestRefused(f"workers = {workers!r}: give a whole number")
    if workers < 1:
        raise RequestRefused(f"workers = {workers}: give at least 1, or stop the run")
    if workers > slots:
        raise RequestRefused(f"workers = {workers} is more than train.slots = {slots}: a worker without a slot has nothing to train on")
    if workers > most:
        raise RequestRefused(f"workers = {workers} is more than elastic.max_workers = {most}")
    if workers < fewest:
        raise RequestRefused(f"workers = {workers} is fewer than elastic.min_workers = {fewest}")
    if (fits := whole(workers)) != workers:
        raise RequestRefused(f"workers = {workers} is not a multiple of {key}: give {fits}, or the next multiple")
    if capacity is not None and workers > capacity:
        raise RequestRefused(f"workers = {workers}: this cluster has room for {capacity} (ray.num_cpus, ray.cpus_per_worker)")
    return workers


def best_evaluation(losses: Sequence[tuple[int, float | None]], min_delta: float) -> int:
    """Return the index of the best evaluation: the last one that was better than all before by more than ``min_delta``.

    Args:
        losses: step and loss of each evaluation; None stands for a loss that is not finite.
    """
    best = 0
    for index, (_, loss) in enumerate(losses):
        before = losses[best][1]
        if loss is not None and (before is None or loss < before - min_delta):
            best = index
    return best


# ------------------------------------------------------------------------------------------------------------------- source


@dataclass(frozen=True)
class CommittedCheckpoint:
    """A committed checkpoint: its name, path and step."""

    name: str
    path: str
    step: int


def choose_source(
    held: Mapping[str, Sequence[HeldState]], members: Collection[str], newest: CommittedCheckpoint | None, before: World | None = None
) -> StateSource:
    """Return the source of the next generation's state: the newest state that exists. At the same step, memory comes before a checkpoint.

    Args:
        held: by living worker, leavers included, the states that it holds now that its group is destroyed.
        members: members of the next generation.
        before: the generation that has ended.
        newest: newest checkpoint that is not known to be damaged.
    """
    resume = choose_resume(held, prefer=members)
    if resume is not None and (newest is None or resume.step >= newest.step):
        owners = owners_of(before, resume)
        alive = [[owner in held for owner in of] for of in owners]
        lender: Literal["peer", "replica"] | None = None
        if not owners or not all(all(of) for of in alive):
            lender = "replica" if owners and all(any(of) for of in alive) else "peer"
        return StateSource(Origin.MEMORY, resume.step, resume=resume, lender=lender)
    if newest is not None:
        return StateSource(Origin.CHECKPOINT, newest.step, commit=newest.name, path=newest.path)
    # There is no checkpoint, and a shard is lost: training begins anew.
    return StateSource(Origin.FRESH, 0)


def owners_of(world: World | None, resume: Resume) -> list[tuple[str, ...]]:
    """Return, for each shard of the state ``resume``, the workers that trained with it, one in each replica.

    The result is empty if ``world`` is another generation."""
    if world is None or world.ticket.generation != resume.generation or world.size < resume.world:
        return []
    grid = RankGrid(world.size // resume.world, resume.world)
    return [tuple(world.members[rank] for rank in grid.replicas_of(shard)) for shard in range(grid.shards)]


def spread_saving(holders: Mapping[int, Sequence[str]], owners: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Return the shards that each worker writes to a checkpoint. Each worker writes its own. The worker with the least to write also writes
    the copy of a lost worker's shard.

    Args:
        holders: by shard, the workers that hold it.
        owners: by shard, the worker that is to write it.
    """
    ranks_of: dict[str, list[int]] = {}
    orphans = []
    for rank, workers in sorted(holders.items()):
        if rank < len(owners) and owners[rank] in workers:
            ranks_of.setdefault(owners[rank], []).append(rank)
        else:
            orphans.append(rank)
    for rank in orphans:
        worker = min(holders[rank], key=lambda w: (len(ranks_of.get(w, ())), w))
        ranks_of.setdefault(worker, []).append(rank)
    return {worker: tuple(sorted(ranks)) for worker, ranks in ranks_of.items()}
