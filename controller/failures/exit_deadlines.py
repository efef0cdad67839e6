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

from collections.abc import Mapping
from dataclasses import dataclass

from vescale_ray.config import ElasticSection
from vescale_ray.controller.failures.hang import FIRST_S
from vescale_ray.controller.protocol import Bounds
from vescale_ray.workers.messages import WorkerPhase, WorkerReport

FORM_S = 15.0
"""Timeout of forming a group on the workers, in seconds (``process_groups.FORM_SECONDS``)."""
RARE_STEP = 1.5
"""Multiple of the longest recent step: a step that does rare extra work may be under way when a worker is lost."""


@dataclass(frozen=True)
class WorkerView:
    """A worker in the generation: its last report, if any; whether it has owed an answer for ``silence_s``; whether it was ended
    already."""

    report: WorkerReport | None
    silent: bool = False
    doomed: bool = False

    @property
    def waits(self) -> bool:
        return self.report is not None and self.report.waiting and not self.silent


@dataclass(frozen=True)
class Surroundings:
    """The rest of the run.

    Attributes:
        out: number of living members that have left the generation.
        complete: whether these members hold the newest step together.
        spares: number of warm workers outside the generation.
        last_s, longest_s: seconds of the last step, and of the longest recent one.
    """

    out: int
    complete: bool
    spares: int
    last_s: float | None
    longest_s: float


class ExitDeadlines:
    """Decides which workers are late. Values in, decision out."""

    def __init__(self, elastic: ElasticSection, bounds: Bounds) -> None:
        self._elastic, self._bounds = elastic, bounds
        self._together = 0.0
        """Seconds from the first sign to the last time at which all members computed."""

    @property
    def silence_s(self) -> float:
        """Seconds without an answer after which a worker counts as silent."""
        return self._bounds.park / 2

    def late(self, since: float, inside: Mapping[str, WorkerView], rest: Surroundings) -> dict[str, str]:
        """The workers to end now, each with the reason.

        Args:
            since: seconds since the first sign that the generation is over.
            inside: members and leavers that are still in it.
            rest: the rest of the run.
        """
        together = not rest.out and not any(view.waits for view in inside.values() if not view.doomed)
        if since < self._together:
            self._together = 0.0  # another generation
        if together:
            self._together = since
        found: dict[str, str] = {}
        waiting: dict[str, float] = {}
        for worker, view in inside.items():
            if view.doomed:
                continue
            phase = str(view.report.phase) if view.report is not None else "unheard of"
            answers = view.report is not None and not view.silent
            patient = answers and (view.waits or together or (view.report is not None and view.report.unhurried))
            bound = self._bound(phase, patient, view.silent, rest) + (self._together if answers and not patient else 0.0)
            if since > bound:
                found[worker] = f"still {phase} {bound:.1f} s after {'the others had left' if rest.out else 'its generation was over'}"
                if phase == WorkerPhase.SAVING:
                    found[worker] = f"it still writes a checkpoint after {bound:g} s"
            elif view.waits and since > (early := self._bound(phase, False, False, rest)):
                waiting[worker] = early
        if waiting and self._dispensable(rest):
            for worker, early in waiting.items():
                found[worker] = f"waits for a rank that is gone, {early:.1f} s after the others had left; another takes its place"
        return found

    def _bound(self, phase: str, waits: bool, silent: bool, rest: Surroundings) -> float:
        """Seconds from the first sign that the generation is over until a worker that is still in it is ended.

        A rank that computes notices the end in its next collective, at most one step later. A rank that forms a group waits for absent
        ranks until the timeout of forming, and may also build the model; neither is a reason for silence. If a rank answers and ``waits``,
        its collective ends by itself after its timeout; the rest of the time is for leaving the group.
        """
        if phase == WorkerPhase.SAVING:
            return self._bounds.save
        bound = max(self._bounds.park, 3.0 * (rest.last_s or 0.0), RARE_STEP * rest.longest_s)
        own = max(bound, FIRST_S if silent else 2.0 * FORM_S) if phase in (WorkerPhase.FORMING, WorkerPhase.GIVING) else bound
        return max(own, self._elastic.collective_timeout_s + bound) if waits else own

    def _dispensable(self, rest: Surroundings) -> bool:
        """Return whether nothing is lost if the survivors go on alone: they hold the newest step, they are enough, and replacements
        come."""
        comes = rest.spares > 0 or self._elastic.replace_lost or self._elastic.grow
        return comes and rest.out >= self._elastic.min_workers and rest.complete
