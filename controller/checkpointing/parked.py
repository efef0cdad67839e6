"""The states that parked workers hold, and the choice of the next members and ranks by them: functions of the workers' reports."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from vescale_ray.controller.observations import WorkersView
from vescale_ray.workers.messages import WorkerPhase
from vescale_ray.workers.resharding.held_state import HeldState, Resume, choose_resume
from vescale_ray.workers.resharding.shard_layouts import Layouts

Held = Mapping[str, Sequence[HeldState]]
"""The states that each worker holds."""


def held(workers: WorkersView, holders: Iterable[str]) -> Held:
    """The states that each living worker of ``holders`` holds, if it has left its generation."""
    reports = {w: workers.report(w) for w in holders if workers.alive(w)}
    return {w: report.held for w, report in reports.items() if report is not None and report.out}


def held_step(workers: WorkersView, holders: Iterable[str]) -> int:
    """The step of the newest state that the ``holders`` hold together; -1 if none."""
    resume = choose_resume(held(workers, holders))
    return -1 if resume is None else resume.step


def writes(workers: WorkersView, holders: Iterable[str]) -> bool:
    """Return whether one of ``holders`` writes an ordered checkpoint, or may do so because its report is out of date."""
    reports = {w: workers.report(w) for w in holders}
    return any(one is not None and (one.phase is WorkerPhase.SAVING or workers.stale(w)) for w, one in reports.items())


def seated(members: Sequence[str], resume: Resume | None, states: Held, layouts: Layouts) -> tuple[tuple[str, ...], str]:
    """``members`` in the order of their ranks, so that the fewest bytes move from the state ``resume``; and the basis of that order. If the
    layouts are not known yet, it is equal intervals, and another order might have moved fewer bytes."""
    from vescale_ray.workers.resharding.rank_assignment import seated

    if resume is None:
        return tuple(members), "layouts"
    overlap = layouts.overlap(resume.world, len(members))
    return seated(members, _parts(resume, states), overlap), "layouts" if layouts.exact else "equal intervals"


def staying(
    candidates: Sequence[str], count: int, resume: Resume | None, states: Held, workers: WorkersView, layouts: Layouts
) -> tuple[str, ...]:
    """The ``count`` of ``candidates`` that stay, so that the fewest bytes move from ``resume``. Among equal choices, copies lie on
    other nodes, and whole nodes become free."""
    from vescale_ray.workers.resharding.rank_assignment import staying

    if resume is None:
        return tuple(candidates[:count])
    there: dict[str, list[str]] = {}
    for worker in (*workers.ready(), *workers.warming()):
        info = workers.info(worker)
        there.setdefault(info.node if info is not None else "", []).append(worker)
    overlap = layouts.overlap(resume.world, count)
    return tuple(staying(candidates, _parts(resume, states), overlap, list(there.values())))


def _parts(resume: Resume, states: Held) -> dict[str, list[int]]:
    """For each worker, the ranks of the state ``resume`` whose shards it has."""
    state = (resume.generation, resume.step, resume.world)
    return {
        worker: [rank for one in of if (one.generation, one.step, one.world) == state for rank in one.ranks]
        for worker, of in states.items()
    }
