"""Who is ended because it is still in a generation that is over: it is hung, and everyone else waits for it.

Who answers and waits for a rank that is gone is no culprit. Mostly it is out as soon as its connections are cut (`workers/lines.py`) and
its waits for messages given up (`vescale_ray/waits.py`); in a large collective of gloo's own it may wait for that one's bound. So it is
ended early only where that costs nothing that is not had again at once: what it holds is elsewhere, too, and another worker takes its
place.

Where nobody is out yet, and all that answer compute, none of them is seen to hang: they do what takes long. Then the collectives' bound
counts, too: to end all of them would be the end of what they hold. When the first is out the others have their time from then on.
"""

from __future__ import annotations

from collections.abc import Sequence

from vescale_ray.config import ElasticSection
from vescale_ray.controller import policy
from vescale_ray.controller.crew import Crew
from vescale_ray.controller.hang import FIRST_S
from vescale_ray.controller.keeper import Keeper
from vescale_ray.controller.protocol import Bounds
from vescale_ray.controller.run_log import RunLog
from vescale_ray.workers.messages import Phase

FORM_S = 15.0
"""Bound of forming a group, on the workers (``groups.FORM_SECONDS``)."""


class Laggards:
    """Tells who is late. Used from the conductor's thread alone."""

    def __init__(self, elastic: ElasticSection, bounds: Bounds, crew: Crew, log: RunLog, keeper: Keeper) -> None:
        self._elastic, self._bounds = elastic, bounds
        self._crew, self._log, self._keeper = crew, log, keeper
        self._together = 0.0
        """Until so long after the first sign all computed."""

    def late(self, since: float, inside: Sequence[str], out: Sequence[str], outside: Sequence[str]) -> dict[str, str]:
        """Whom to end now, each with the reason.

        Args:
            since: seconds since the first sign that the generation is over.
            inside: members (and leavers) that are still in it.
            out: members that have left it and live.
            outside: warm workers that are in no generation.
        """
        silent = self._crew.silent(self._bounds.park / 2)
        together = not out and not any(self._waits(w) for w in inside if w not in silent and not self._crew.doomed(w))
        if since < self._together:
            self._together = 0.0  # another generation
        if together:
            self._together = since
        found: dict[str, str] = {}
        waiting: dict[str, float] = {}
        for worker in inside:
            report = self._crew.report(worker)
            if self._crew.doomed(worker):
                continue
            phase = str(report.phase) if report is not None else "unheard of"
            answers = report is not None and worker not in silent
            waits = answers and self._waits(worker)
            copies = report is not None and report.unhurried and answers
            bound = self._bound(phase, waits or copies or (answers and together), worker in silent)
            if answers and not (waits or copies or together):
                bound += self._together
            if since > bound:
                found[worker] = f"still {phase} {bound:.1f} s after {'the others had left' if out else 'its generation was over'}"
                if phase == Phase.SAVING:
                    found[worker] = f"it still writes a checkpoint after {bound:g} s"
            elif waits and since > (early := self._bound(phase, False, False)):
                waiting[worker] = early
        if waiting and self._dispensable(out, outside):
            for worker, early in waiting.items():
                found[worker] = f"waits for a rank that is gone, {early:.1f} s after the others had left; another takes its place"
        return found

    def _waits(self, worker: str) -> bool:
        report = self._crew.report(worker)
        return report is not None and report.waiting

    def _bound(self, phase: str, waits: bool, silent: bool) -> float:
        if phase == Phase.SAVING:
            return self._bounds.save
        # Whoever forms a group does not tell by that why it answers nothing.
        form_s = FIRST_S / 2 if silent else FORM_S
        steps, collective_s = self._log.stats.steps, self._elastic.collective_timeout_s
        return policy.laggard_bound(
            phase, waits, self._bounds.park, form_s, steps.last_seconds, collective_s, steps.longest
        )

    def _dispensable(self, out: Sequence[str], outside: Sequence[str]) -> bool:
        """Whether those that are out lose nothing by going on alone: all of the newest step is with them, they are enough, and there will
        be as many as before."""
        comes = bool(outside) or self._elastic.replace_lost or self._elastic.grow
        if not comes or len(out) < self._elastic.min_workers:
            return False
        return self._keeper.held_step(out) >= self._log.stats.step
