"""The policy that decides how long a worker may stay in a generation that is over, before the controller ends it.

A rank that answers and waits for a lost rank is not at fault. It usually leaves as soon as its connections are cut
(`workers/network/connections.py`) and its waits for messages are given up (`vescale_ray/communication/abortable_waits.py`). Inside a large
gloo collective it may have to wait for that collective's timeout. The controller ends such a rank early only if nothing is lost by it: its
state also exists elsewhere, and another worker takes its place.

If no rank has left and all ranks that answer compute, no rank is known to hang. They run something slow, and ending all of them would lose
their state. So they get the collectives' timeout in addition. When the first rank leaves, the others get their normal time from that
moment.
"""

from __future__ import annotations

from collections.abc import Collection

from vescale_ray.config import ElasticSection
from vescale_ray.controller.failures.hang import FIRST_S
from vescale_ray.controller.observations import Observations
from vescale_ray.controller.protocol import Bounds, World
from vescale_ray.controller.statistics.step_stats import StepStats
from vescale_ray.workers.messages import WorkerPhase

FORM_S = 15.0
"""Timeout of forming a group on the workers, in seconds (``process_groups.FORM_SECONDS``)."""
RARE_STEP = 1.5
"""Multiple of the longest recent step: a step that does rare extra work may be under way when a worker is lost."""


class ExitDeadlines:
    """Decides, from values alone, which workers are late."""

    def __init__(self, elastic: ElasticSection, bounds: Bounds) -> None:
        self._elastic, self._bounds = elastic, bounds
        self._together = 0.0
        """Seconds from the first sign to the last time at which all members computed."""

    def late(self, world: World, since: float, inside: Collection[str], out: int, seen: Observations, *, complete: bool) -> dict[str, str]:
        """Return the workers to end now, each with the reason.

        Args:
            since: seconds since the first sign that the generation is over.
            inside: members and leavers that are still in it; ``out``: number of living members that have left it.
            complete: whether these members hold the newest step together.
        """
        workers, steps = seen.workers, seen.stats.steps
        silent = workers.silent(self._bounds.park / 2)
        reports = {w: workers.report(w) for w in inside if not workers.ending(w)}
        waits = {w for w, report in reports.items() if report is not None and report.waiting and w not in silent}
        together = not out and not waits
        if since < self._together:
            self._together = 0.0  # another generation
        if together:
            self._together = since
        found: dict[str, str] = {}
        waiting: dict[str, float] = {}
        for worker, report in reports.items():
            phase = str(report.phase) if report is not None else "unheard of"
            answers = report is not None and worker not in silent
            patient = report is not None and answers and (worker in waits or together or report.in_long_work)
            bound = self._bound(phase, patient, worker in silent, steps) + (self._together if answers and not patient else 0.0)
            if since > bound:
                found[worker] = f"still {phase} {bound:.1f} s after {'the others had left' if out else 'its generation was over'}"
                if phase == WorkerPhase.SAVING:
                    found[worker] = f"it still writes a checkpoint after {bound:g} s"
            elif worker in waits and since > (early := self._bound(phase, False, False, steps)):
                waiting[worker] = early
        # Nothing is lost if the survivors go on alone: they hold the newest step, they are enough, and replacements come.
        elastic, ready = self._elastic, frozenset(workers.ready())
        if waiting and complete and out >= elastic.min_workers:
            if elastic.replace_lost or elastic.grow or any(w in ready for w in seen.outside(world.members)):
                for worker, early in waiting.items():
                    found[worker] = f"waits for a rank that is gone, {early:.1f} s after the others had left; another takes its place"
        return found

    def _bound(self, phase: str, waits: bool, silent: bool, steps: StepStats) -> float:
        """Return the seconds from the first sign that the generation is over until a worker that is still in it is ended.

        A rank that computes notices the end in its next collective, at most one step later. A rank that forms a group waits for absent
        ranks until the timeout of forming, and may also build the model; neither is a reason for silence. If a rank answers and ``waits``,
        its collective ends by itself after its timeout; the rest of the time is for leaving the group.
        """
        if phase == WorkerPhase.SAVING:
            return self._bounds.save
        bound = max(self._bounds.park, 3.0 * (steps.last_seconds or 0.0), RARE_STEP * steps.longest)
        own = max(bound, FIRST_S if silent else 2.0 * FORM_S) if phase in (WorkerPhase.FORMING, WorkerPhase.GIVING) else bound
        return max(own, self._elastic.collective_timeout_s + bound) if waits else own
