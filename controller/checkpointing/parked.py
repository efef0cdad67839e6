"""The states that parked workers hold, and the choice of the next members and ranks by them: functions of the workers' reports."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from vescale_ray.config.rank_grid import RankGrid
from vescale_ray.controller.observations import WorkersView
from vescale_ray.workers.messages import WorkerPhase
from vescale_ray.workers.resharding.held_state import HeldState, Resume, choose_resume
from vescale_ray.workers.resharding.shard_layouts import Layouts

Held = Mapping[str, Sequence[HeldState]]
"""The states that each worker holds."""


def held(workers: WorkersView, holders: Iterable[str]) -> Held:
    """Return the states that each living worker of ``holders`` holds, if the worker has left its generation."""
    reports = {w: workers.report(w) for w in holders if workers.alive(w)}
    return {w: report.held for w, report in reports.items() if report is not None and report.out}


def held_step(workers: WorkersView, holders: Iterable[str]) -> int:
    """Return the step of the newest state that the ``holders`` hold together; -1 if there is none."""
    resume = choose_resume(held(workers, holders))
    return -1 if resume is None else resume.step


def writes(workers: WorkersView, holders: Iterable[str]) -> bool:
    """Return whether one of ``holders`` writes an ordered checkpoint, or may do so because its report is out of date."""
    reports = {w: workers.report(w) for w in holders}
    return any(one is not None and (one.phase is WorkerPhase.SAVING or workers.stale(w)) for w, one in reports.items())


def by_node(members: Sequence[str], grid: RankGrid, workers: WorkersView) -> tuple[str, ...]:
    """Return ``members`` in the order of their ranks, for members that hold no state.

    With replicas, or with ranks that share experts, workers of one node are next to each other."""
    if grid.replicas == grid.experts == 1:
        return tuple(members)
    nodes = list(_nodes(members, workers).values())
    return tuple(sorted(members, key=lambda w: next(place for place, there in enumerate(nodes) if w in there)))


def assign_ranks(
    members: Sequence[str], resume: Resume | None, states: Held, workers: WorkersView, layouts: Layouts, grid: RankGrid
) -> tuple[tuple[str, ...], str]:
    """Return ``members`` in the order of their ranks in ``grid``, and the basis of that order.

    The order moves the fewest bytes from the state ``resume``. If the layouts are not known yet, the basis is equal intervals, and another
    order might have moved fewer bytes."""
    from vescale_ray.workers.resharding.rank_assignment import assign_ranks, in_rows, replicated

    if resume is None:
        return by_node(members, grid, workers), "layouts"
    overlap = replicated(layouts.overlap(resume.world, grid.shards), grid.replicas)
    ranked = in_rows(assign_ranks(members, _parts(resume, states), overlap), grid, list(_nodes(members, workers).values()))
    return ranked, "layouts" if layouts.exact else "equal intervals"


def staying(
    candidates: Sequence[str], grid: RankGrid, resume: Resume | None, states: Held, workers: WorkersView, layouts: Layouts
) -> tuple[str, ...]:
    """Return the ``candidates`` that stay, as many as ``grid`` has ranks, so that the fewest bytes move from ``resume``.

    Among equal choices, copies lie on other nodes, and whole nodes become free."""
    from vescale_ray.workers.resharding.rank_assignment import replicated, staying

    if resume is None:
        return tuple(candidates[: grid.size])
    overlap = replicated(layouts.overlap(resume.world, grid.shards), grid.replicas)
    nodes = _nodes((*workers.ready(), *workers.warming()), workers)
    return tuple(staying(candidates, _parts(resume, states), overlap, list(nodes.values())))


def _nodes(some: Iterable[str], workers: WorkersView) -> dict[str, list[str]]:
    """Return the workers of ``some``, by node."""
    there: dict[str, list[str]] = {}
    for worker in some:
        info = workers.info(worker)
        there.setdefault(info.node if info is not None else "", []).append(worker)
    return there


def _parts(resume: Resume, states: Held) -> dict[str, list[int]]:
    """Return, for each worker, the shards of the state ``resume`` that it has."""
    state = (resume.generation, resume.step, resume.world)
    return {
        worker: [rank for one in of if (one.generation, one.step, one.world) == state for rank in one.ranks]
        for worker, of in states.items()
    }
