"""End hung workers, and report the position of every worker of the generation. Ended workers could not be asked later."""

from __future__ import annotations

from collections.abc import Mapping

from vescale_ray.controller.failures.budget import Cause
from vescale_ray.controller.failures.connectivity import CutOff
from vescale_ray.controller.protocol import World
from vescale_ray.controller.state.run_log import RunLog
from vescale_ray.controller.worker_group.worker_group import WorkerGroup
from vescale_ray.workers.monitoring.heartbeat import IN

STACKS_S = 0.2
"""Seconds to wait for the stacks of the hung workers before they are ended, and then for those of the others."""
HEARD_S = 0.5
"""If a worker has owed an answer for longer than this (seconds), the position in its last report is out of date. Its stacks show the
present one."""


def end_hung(worker_group: WorkerGroup, log: RunLog, world: World, hung: Mapping[str, str], cut: CutOff | None = None) -> str | None:
    """Kill the workers ``hung`` (each with the reason), write a report to the run's folder, and record an event.

    Args:
        cut: the broken connections, if the workers are cut off rather than hung.

    Returns:
        The report's path; None if it could not be written.
    """
    ranks = {worker: rank for rank, worker in enumerate(world.members)}
    reports = {worker: worker_group.report(worker) for worker in {**ranks, **hung}}
    given = {worker: round(worker_group.given(worker), 3) for worker in hung}
    silent = worker_group.silent(HEARD_S)
    places = {worker: report.where or "an unknown place" for worker, report in reports.items() if report is not None}
    at = {worker: f"{place} when it last answered" if worker in silent else place for worker, place in places.items()}
    stacks = worker_group.stacks(hung, STACKS_S)
    worker_group.kill({worker: f"killed: {why}" for worker, why in hung.items()}, Cause.HANG if cut is None else Cause.NODE)
    stacks |= worker_group.stacks([worker for worker in reports if worker not in hung], STACKS_S)
    lines = []
    for worker, report in reports.items():
        where = f"{report.phase}, {report.completed} steps, at {at[worker]}" if report else "unheard of"
        first = stacks.get(worker, "").partition("\n")[0]
        where += f", in {first.removeprefix(IN)}" if first.startswith(IN) else ""
        mark = f" <- {hung[worker]}" if worker in hung else ""
        mark += f" (after {given[worker]:.1f} s more, since its machine was late)" if given.get(worker, 0.0) >= 0.05 else ""
        lines.append(f"rank {ranks.get(worker, '-')} {worker}: {where}{mark}")
    text = "\n".join(lines) + "\n\n" + "\n\n".join(f"---- {worker}\n{stack}" for worker, stack in stacks.items()) + "\n"
    path = log.journal.report(log.folder.write_hang, f"generation-{world.ticket.generation}-step-{log.stats.step}", text)
    about = {"workers": dict(hung), "ranks": {w: ranks.get(w) for w in hung}, "where": at, "report": path}
    if cut is None:
        log.record("hang", **about, given_s=given)
    else:
        log.record("cut_off", **about, unreached={node: list(others) for node, others in cut.unreached.items()})
    return path
