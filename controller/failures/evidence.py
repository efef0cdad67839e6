"""The evidence that a failed run leaves.

It contains, for each of the last failures, the fate of each worker with its traceback, and the paths of hang reports. It also contains the
present stacks of the living workers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from vescale_ray.controller.protocol import Ending, World
from vescale_ray.controller.state.run_log import RunLog
from vescale_ray.controller.worker_group.worker_group import WorkerGroup

KEPT = 4
STACKS_S = 1.0


@dataclass(frozen=True)
class _Failure:
    world: World
    step: int
    ending: Ending
    nodes: Mapping[str, str]
    hangs: tuple[str, ...]


class Evidence:
    """Collects the evidence. Only the controller's thread uses it. A restarted controller begins with none."""

    def __init__(self) -> None:
        self._failures: deque[_Failure] = deque(maxlen=KEPT)
        self._hangs: list[str] = []

    def hung(self, report: str | None) -> None:
        """Note that hung workers of the generation were ended. ``report``: path of their hang report."""
        self._hangs += [report] if report else []

    def failed(self, world: World, ending: Ending, log: RunLog) -> None:
        """Record a failed generation."""
        nodes = {w: f"{info.node} process {info.pid}" for w in world.members if (info := log.stats.workers.get(w)) is not None}
        self._failures.append(_Failure(world, log.stats.step, ending, nodes, tuple(self._hangs)))
        self._hangs = []

    def write(self, worker_group: WorkerGroup, log: RunLog) -> str | None:
        """Write all evidence to the run's folder and return its path; None if there is none, or if the folder can't be written."""
        if not self._failures:
            return None
        living = (*worker_group.ready(), *worker_group.warming())
        stacks = worker_group.stacks(living, STACKS_S)
        parts = [_describe(failure) for failure in reversed(self._failures)]
        parts += [f"==== now\n\n---- {worker}\n{stack}" for worker, stack in stacks.items()]
        return log.journal.report(log.folder.write_failure, f"step-{log.stats.step}-{log.run_id}", "\n\n".join(parts) + "\n")


def _describe(failure: _Failure) -> str:
    world, ending = failure.world, failure.ending
    lines = [f"==== generation {world.ticket}, {world.size} workers, failed after step {failure.step}"]
    lines += [f"where all stood: {path}" for path in failure.hangs]
    for rank, worker in enumerate(world.members):
        fault = ending.faults.get(worker)
        what = ending.lost.get(worker) or (fault.text if fault else "left in order")
        lines += ["", f"---- rank {rank}, worker {worker} on node {failure.nodes.get(worker, 'unknown')}", what]
        if worker in ending.lost:
            lines[-1] = f"lost ({ending.causes.get(worker, 'unknown')}): {what}"
        lines += [fault.trace.rstrip()] if fault and fault.trace else []
    return "\n".join(lines)
