"""The policy that finds workers that hang, from the reports of all workers of a generation. ``failure_detector`` acts on it.

A rank that stops (a deadlock, a stopped process, code that never releases the interpreter) stops all others within a step, because they
wait for it in a collective. So a generation hangs if none of its workers has made a heartbeat for some time. The worker to end is the one
that does not wait: it is silent, or answers from a place that is no collective, while another waits. If all wait, or all compute, the bound
of the collectives counts instead. A worker in an activity that may take longer than any step (copies of shards, compilation) is not accused
unless it is silent.

A worker that trains alone is hung as soon as one in company, silent or not, if another takes its place. If none does, ending it ends the
run, so it has the collectives' bound.

The duration of a step may be unknown, or a group may form (a model is built, a checkpoint is read). Then a worker that waits for no other
and makes no heartbeat for :data:`LONGEST` times the collectives' bound is hung, because nothing else would ever end it. A worker in an
activity that may take longer than any step has twice as long.

The time in question is the longest of the last few steps, times a factor; there are many heartbeats in a step. Time in which a thread could
have run while others had the processors does not count, because on an overloaded machine all are slow and none hangs. Time in which the
controller itself did not run does not count either; afterwards it listens for a moment before it accuses a worker. Its earlier measurements
stay. If each such gap reset them, one gap a minute would hide every hang with a bound of minutes.

A worker that was ended for standing still may only have been slow, and so may the next one that repeats the step. It is given twice as
long, then four times, until the step is done. The duration of that step is remembered for longer, as of an activity of some steps only (for
example roots of a preconditioner). So no such mistake is repeated for ever.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from vescale_ray.workers.messages import Ticket, WorkerPhase, WorkerReport

LEAST_S = 1.2
"""Shortest time without a beat that counts, however fast the steps are: with it, a hung worker is out within 2 s."""
FACTOR = 1.8
"""Of the longest of the last steps. 1.8 and what ending takes are below 3."""
STEPS, FIRST = 2, 3.0
"""The first steps of a generation compile, allocate and fill caches: they are given so many times more, and :data:`FIRST_S` at least."""
FIRST_S = 5.0
LONGEST = 10
"""Times the bound of the collectives: so long nothing takes that makes no beat. What takes longer (parameters that are filled, a checkpoint
that is read) beats with every piece."""
RECENT = 8
"""Steps; not what the ranks tell of them, which of many ranks would be of one."""
PERIOD, AGAIN = 128, 1.1
"""A step that was taken for a hang counts for so many steps, times this: what only every hundredth does takes about as long each time. So
does the third longest of them: what has come three times comes again, and what has come once or twice was perhaps a disturbance."""
OWN_GAP_S = 0.6
"""The controller itself was held up for longer than this: nothing can be said about others, until it has listened for :data:`LEAST_S`."""


@dataclass
class _Seen:
    beats: int = -1
    changed: float = 0.0
    answered: float = 0.0
    report: WorkerReport | None = None
    starved_s: float = 0.0
    """As its report had it when its beats last changed."""
    since_s: float = 0.0
    """For so long it got no processor since that report, as others tell."""

    def changes(self, now: float) -> None:
        self.changed, self.starved_s = now, self.report.starved_s if self.report is not None else 0.0

    def still(self, now: float) -> float:
        """Seconds without a beat in which it had a processor, or wanted none."""
        starved_s = self.report.starved_s - self.starved_s if self.report is not None else 0.0
        return now - self.changed - max(0.0, starved_s) - self.since_s

    def silent(self, now: float) -> float:
        """Such seconds without an answer."""
        return now - self.answered - self.since_s


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
    _rare: dict[int, float] = field(default_factory=dict)
    """Of steps in which somebody stood still for so long that it was ended, among the last :data:`PERIOD`."""
    _period: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=PERIOD))
    """Of the last steps, also of generations before this one, but for the first of each: how many there were, and what it took."""
    _counted: int = 0
    """The step of the last of them, if it was of this generation."""
    _size: int = 0
    _earlier: float = 0.0
    _accused: int = 0
    """The step that was under way when somebody was last found to stand still; ``_blamed``: in which generation."""
    _blamed: Ticket | None = None
    _stood: bool = False
    """Somebody did in that step, and was not silent."""
    _patience: int = 1
    """Times the bound, until that step is done."""
    _stepped: int = 0
    _first: int | None = None
    """The generation's first step, as far as this was told of any."""
    _settled: bool = False
    _seen: dict[str, _Seen] = field(default_factory=dict)
    _asked: float | None = None
    _listens: float = -math.inf
    """Until then nobody is accused: the controller was held up."""

    def begin(self, ticket: Ticket, size: int) -> None:
        """Another generation, of so many workers. Of the steps before it only the longest counts, and only until it has some of its own;
        and what steps of as many workers or more took again and again."""
        self._earlier = max(self._steps.values(), default=self._earlier)
        self._steps.clear()
        self._ticket, self._stepped, self._settled, self._seen, self._asked = ticket, 0, False, {}, None
        self._first, self._counted, self._size = None, 0, size

    def expect(self, seconds: float, recent: Iterable[tuple[int, float]] = ()) -> None:
        """Take the duration of a step, and of ``recent`` ones by number of workers, that an earlier life of the controller has seen."""
        self._earlier = seconds
        self._period.extend(recent)

    def stepped(self, ticket: Ticket, step: int, seconds: float, alone: float = 0.0) -> None:
        """A worker has completed this step in ``seconds``, of which it waited ``alone`` for the last worker to begin.

        This wait is part of a step, except of a generation's first, in which workers wait for others to get their state.
        """
        if ticket != self._ticket:
            return
        self._first = step if self._first is None else self._first
        if step == self._first:
            seconds -= alone
        elif step > self._counted:
            self._period.append((self._size, seconds))
            self._counted = step
        elif step == self._counted and self._period:
            self._period[-1] = self._size, max(self._period[-1][1], seconds)
        self._stepped += 1
        self._steps[step] = max(seconds, self._steps.get(step, 0.0))
        if len(self._steps) > RECENT:
            del self._steps[min(self._steps)]
        if step == self._accused and self._stood:
            self._rare[step] = max(seconds, self._rare.get(step, 0.0))
        self._rare = {one: took for one, took in self._rare.items() if step < one + PERIOD}
        if step >= self._accused:
            self._patience = 1

    def heard(self, report: WorkerReport, now: float) -> None:
        """A worker has answered."""
        if report.ticket != self._ticket:
            return
        seen = self._seen.setdefault(report.worker, _Seen())
        # Done with what may take longer than any step, it makes its next beat in a moment: it has not stood still since the one before.
        done = seen.report is not None and seen.report.unhurried and not report.unhurried
        changed = report.beats != seen.beats or done
        seen.beats, seen.answered, seen.report, seen.since_s = report.beats, now, report, 0.0
        if changed:
            seen.changes(now)

    def starved(self, worker: str, seconds: float) -> None:
        """A worker could not answer for these additional seconds since its last report, because it had no processor."""
        if worker in self._seen:
            self._seen[worker].since_s += seconds

    @property
    def bound_s(self) -> float:
        """Seconds without a beat after which a generation hangs; before any step was ever seen, :attr:`longest_s`."""
        if self.fixed is not None:
            return self.fixed or math.inf
        if self._settled:
            alike = sorted(seconds for size, seconds in self._period if size >= self._size)
            again = alike[-3] if len(alike) > 2 else 0.0
            longest = max(FACTOR * max(self._steps.values()), AGAIN * max(again, max(self._rare.values(), default=0.0)))
            return self._patience * max(LEAST_S, longest)
        known = max(self._steps.values(), default=0.0) or self._earlier
        return self._patience * (self.forming_s if known else self.longest_s)

    @property
    def longest_s(self) -> float:
        """Seconds without a beat after which whoever waits for nobody hangs, whatever it does."""
        return math.inf if self.fixed == 0 else max(self.fixed or 0.0, LONGEST * self.patience_s)

    @property
    def forming_s(self) -> float:
        """Seconds without an answer after which a worker hangs that is to form a generation with others; also before any step was seen."""
        if self.fixed is not None:
            return self.fixed or math.inf
        return max(FIRST_S, FIRST * FACTOR * (max(self._steps.values(), default=0.0) or self._earlier))

    def verdict(self, members: Collection[str], now: float) -> Mapping[str, str]:
        """The workers that hang, each with the reason. Report those that are ended for it to :meth:`ended`."""
        asked, self._asked = self._asked, now
        if asked is not None and now - asked > OWN_GAP_S:
            for seen in self._seen.values():
                seen.changed, seen.answered = min(now, seen.changed + now - asked), min(now, seen.answered + now - asked)
            self._listens = now + LEAST_S
        if now < self._listens:
            return {}
        self._settled = self._stepped >= STEPS * len(members)
        if any(worker not in self._seen for worker in members):
            return {}
        everyone = {worker: self._seen[worker] for worker in members}
        quiet = min(seen.still(now) for seen in everyone.values())
        if quiet < self.bound_s:
            return {}
        reports = {worker: seen.report for worker, seen in everyone.items()}
        if any(report is None or report.phase not in (WorkerPhase.TRAINING, WorkerPhase.FORMING) for report in reports.values()):
            return {}
        forming = {w for w, report in reports.items() if report is not None and report.phase is WorkerPhase.FORMING}
        if forming:
            still = {w: everyone[w].still(now) for w in forming}
            stuck = {w: report for w, report in reports.items() if w in forming and report is not None and not report.waiting}
            return {
                w: f"it stands at {report.where or 'an unknown place'} for {still[w]:.1f} s, while its group forms"
                for w, report in stuck.items()
                if still[w] >= self._patience * self.longest_s
            }
        silent = {w: seen.silent(now) for w, seen in everyone.items() if seen.silent(now) >= self.bound_s}
        alone = self.replaced and len(members) == 1
        if len(silent) == len(reports) and not alone:
            return {}
        hung = {w: f"it has answered nothing for {seconds:.1f} s" for w, seconds in silent.items()}
        awaited = ", and the others wait for it"
        if alone or quiet >= max(self.patience_s * min(2, len(members)), self.bound_s):
            awaited = ""
        elif not any(report is not None and report.waiting for w, report in reports.items() if w not in silent):
            return hung
        endless = quiet >= 2 * self._patience * self.longest_s
        for worker, report in reports.items():
            if worker not in hung and report is not None and not report.waiting and (endless or not report.unhurried):
                hung[worker] = f"it stands at {report.where or 'an unknown place'} for {everyone[worker].still(now):.1f} s{awaited}"
        return hung

    def stalled(self, members: Collection[str], now: float) -> bool:
        """Whether nobody gets on, in a group or as it forms, though all answer: it may be the network between them. Ask it after
        :meth:`verdict` has named nobody. On an accelerator, too, where nobody is seen to wait.

        Nobody is accused by that, and to ask whether they reach each other costs nothing. So long steps wait no longer than for a third of
        the collectives' bound: after that the collective fails.
        """
        if now < self._listens or self.fixed == 0 or any(worker not in self._seen for worker in members):
            return False
        everyone = [self._seen[worker] for worker in members]
        reports = [seen.report for seen in everyone]
        if any(report is None or report.phase not in (WorkerPhase.TRAINING, WorkerPhase.FORMING) for report in reports):
            return False
        forms = any(report is not None and report.phase is WorkerPhase.FORMING for report in reports)
        bound = FIRST_S if forms else min(self.bound_s, self.forming_s, max(LEAST_S, self.patience_s / 3))
        return min(seen.still(now) for seen in everyone) >= bound

    def ended(self, hung: Collection[str]) -> None:
        """They are ended: who repeats their step is given more time."""
        if self._blamed != self._ticket:
            self._blamed = self._ticket
            under_way = 1 + max(seen.report.completed for seen in self._seen.values() if seen.report is not None)
            self._accused = max(under_way, self._accused if self._patience > 1 else 0)
            self._stood = any(self._seen[worker].silent(self._asked or 0.0) < self.bound_s for worker in hung)
            self._patience *= 2
