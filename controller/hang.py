"""Who hangs, told from the reports of all workers of a generation. Values and arithmetic only; the conductor acts on it.

A rank that stops (a deadlock, a stopped process, code that never gives the interpreter back) stops all others within a step: they
wait for it in a collective. So a generation hangs when none of its workers has made a beat for some time; and the one to end is the
one that does not wait: it is silent, or answers from somewhere that is no collective, while another waits. Where everyone waits, or
everyone computes, nobody is accused so soon: the bound of the collectives counts. Who is at what may take longer than any step (copies of
shards, compilation) is not accused either, unless it is silent.

Of a worker that is alone nobody else tells anything: by itself it is hung as soon as in company, silent or not, if another takes its place.
Where none does, ending it ends the run: it has the collectives' bound.

How long is some time? The longest step of the last few, times a factor; beats come many times a step. A controller that
was itself not running for a while can't tell, and starts to measure anew.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from vescale_ray.workers.messages import Phase, Report, Ticket

LEAST_S = 1.2
"""Shortest time without a beat that counts, however fast the steps are: with it, a hung worker is out within 2 s."""
FACTOR = 1.8
"""Of the longest of the last steps. 1.8 and what ending takes are below 3."""
STEPS, FIRST = 2, 3.0
"""The first steps of a generation compile, allocate and fill caches: they are given so many times more, and :data:`FIRST_S` at least."""
FIRST_S = 5.0
RECENT = 8
"""Steps; not what the ranks tell of them, which of many ranks would be of one."""
OWN_GAP_S = 0.6
"""The controller itself was held up for longer than this: nothing can be said about others."""


@dataclass
class _Seen:
    beats: int = -1
    changed: float = 0.0
    answered: float = 0.0
    report: Report | None = None


@dataclass
class HangWatch:
    """Watches one generation after another.

    Attributes:
        fixed: seconds without a beat that count, instead of those found from the steps; 0: nobody is ever accused.
        patience_s: after so long without a beat (or the bound, if that is longer) a worker that is alone is hung. After twice as long all
            are that compute, though nobody is seen to wait for them: before a file system that does not answer, for example. Twice,
            since it is the bound of the collectives: where some wait after all (on an accelerator that is not seen), they end first.
        replaced: another worker takes the place of one that was alone.
    """

    fixed: float | None = None
    patience_s: float = math.inf
    replaced: bool = False
    _ticket: Ticket | None = None
    _steps: dict[int, float] = field(default_factory=dict)
    """The longest that any rank has told of each of the last steps."""
    _earlier: float = 0.0
    _stepped: int = 0
    _settled: bool = False
    _seen: dict[str, _Seen] = field(default_factory=dict)
    _asked: float | None = None

    def begin(self, ticket: Ticket) -> None:
        """Another generation. Of the steps before it only the longest counts, and only until it has some of its own."""
        self._earlier = max(self._steps.values(), default=self._earlier)
        self._steps.clear()
        self._ticket, self._stepped, self._settled, self._seen, self._asked = ticket, 0, False, {}, None

    def stepped(self, ticket: Ticket, step: int, seconds: float) -> None:
        """Some worker has completed this step, in so many seconds."""
        if ticket == self._ticket:
            self._stepped += 1
            self._steps[step] = max(seconds, self._steps.get(step, 0.0))
            if len(self._steps) > RECENT:
                del self._steps[min(self._steps)]

    def heard(self, report: Report, now: float) -> None:
        """A worker has answered."""
        if report.ticket != self._ticket:
            return
        seen = self._seen.setdefault(report.worker, _Seen())
        # Done with what may take longer than any step, it makes its next beat in a moment: it has not stood still since the one before.
        done = seen.report is not None and seen.report.unhurried and not report.unhurried
        if report.beats != seen.beats or done:
            seen.beats, seen.changed = report.beats, now
        seen.answered, seen.report = now, report

    @property
    def bound_s(self) -> float:
        """Seconds without a beat after which a generation hangs; infinite before any step was ever seen."""
        if self.fixed is not None:
            return self.fixed or math.inf
        if self._settled:
            return max(LEAST_S, FACTOR * max(self._steps.values()))
        return self.forming_s if max(self._steps.values(), default=0.0) or self._earlier else math.inf

    @property
    def forming_s(self) -> float:
        """Seconds without an answer after which a worker hangs that is to form a generation with others; also before any step was seen."""
        if self.fixed is not None:
            return self.fixed or math.inf
        return max(FIRST_S, FIRST * FACTOR * (max(self._steps.values(), default=0.0) or self._earlier))

    def verdict(self, members: Collection[str], now: float) -> Mapping[str, str]:
        """Who hangs, with the reason; nobody, mostly."""
        asked, self._asked = self._asked, now
        if asked is not None and now - asked > OWN_GAP_S:
            for seen in self._seen.values():
                seen.changed = seen.answered = now
            return {}
        self._settled = self._stepped >= STEPS * len(members)
        if any(worker not in self._seen for worker in members):
            return {}
        everyone = {worker: self._seen[worker] for worker in members}
        quiet = now - max(seen.changed for seen in everyone.values())
        if quiet < self.bound_s:
            return {}
        reports = {worker: seen.report for worker, seen in everyone.items()}
        if any(report is None or report.phase is not Phase.TRAINING for report in reports.values()):
            return {}
        silent = {w: now - seen.answered for w, seen in everyone.items() if now - seen.answered >= self.bound_s}
        alone = self.replaced and len(members) == 1
        if len(silent) == len(reports) and not alone:
            return {}
        hung = {w: f"it has answered nothing for {seconds:.1f} s" for w, seconds in silent.items()}
        awaited = ", and the others wait for it"
        if alone or quiet >= max(self.patience_s * min(2, len(members)), self.bound_s):
            awaited = ""
        elif not any(report is not None and report.waiting for w, report in reports.items() if w not in silent):
            return hung
        for worker, report in reports.items():
            if worker not in hung and report is not None and not report.waiting and not report.unhurried:
                hung[worker] = f"it stands at {report.where or 'an unknown place'} for {quiet:.1f} s{awaited}"
        return hung
