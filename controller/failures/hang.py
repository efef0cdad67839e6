"""The policy that finds hung workers in the reports of all workers of a generation. ``failure_detector`` acts on it.

A rank that stops (a deadlock, a stopped process, code that never releases the interpreter) stops all others within a step, because they
wait for it in a collective. So a generation hangs if none of its workers has made a heartbeat for some time. The worker to end is the one
that does not wait: it is silent, or it answers from outside a collective while another waits. If all wait, or all compute, the collectives'
timeout counts instead. A worker in an activity that may take longer than any step (copies of shards, compilation) is not accused
unless it is silent.

If another worker can take its place, a worker that trains alone gets the same time as one of several, silent or not. If none can, ending it
would end the run, so it gets the collectives' timeout.

While the duration of a step is unknown, or a group forms (a model is built, a checkpoint is read), the bound is :data:`LONGEST` times the
collectives' timeout. A worker that waits for no other and makes no heartbeat for that time is hung, because nothing else would ever end it.
A worker in an activity that may take longer than any step gets twice that time.

Otherwise the bound is a multiple of the longest of the last few steps; a step has many heartbeats. Time in which a thread was runnable but
had no processor does not count, because on an overloaded machine all workers are slow and none hangs. Time in which the controller itself
did not run does not count either. After such a gap the controller listens for :data:`LEAST_S` before it accuses a worker. Its earlier
measurements stay: if each gap reset them, one gap a minute would hide every hang with a bound of minutes.

A worker that was ended as hung may only have been slow, and so may the one that repeats the step. So the bound doubles each time until the
step is done. The duration of that step is remembered for :data:`PERIOD` steps, because it may come from work that only some steps do (for
example roots of a preconditioner). So the mistake is not repeated for ever.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from vescale_ray.workers.messages import Ticket, WorkerPhase, WorkerReport

LEAST_S = 1.2
"""Smallest bound, in seconds without a heartbeat, however fast the steps are. With it, a hung worker is ended within 2 s."""
FACTOR = 1.8
"""The bound as a multiple of the longest of the last steps. With 1.8, a hung worker is found and ended within 3 times that step."""
STEPS, FIRST = 2, 3.0
"""Number of first steps of a generation, and the factor by which their bound is longer (it is at least :data:`FIRST_S` seconds). These
steps compile, allocate and fill caches."""
FIRST_S = 5.0
LONGEST = 10
"""Multiple of the collectives' timeout that no activity without heartbeats takes. Longer activities (filling parameters, reading a
checkpoint) make a heartbeat with every piece."""
RECENT = 8
"""Number of last steps that count. It counts steps rather than reports, because with many ranks the last reports would all be of one
step."""
PERIOD, AGAIN = 128, 1.1
"""Number of steps for which the duration of a step mistaken for a hang counts, and its factor.

Work of every hundredth step takes about as long each time. The third longest of these steps counts in the same way: a duration that came
three times will come again, but one that came once or twice was perhaps a disturbance."""
OWN_GAP_S = 0.6
"""If the controller itself was held up for longer than this (seconds), it accuses no worker until it has listened for :data:`LEAST_S`."""


@dataclass
class _Seen:
    beats: int = -1
    changed: float = 0.0
    answered: float = 0.0
    report: WorkerReport | None = None
    starved_s: float = 0.0
    """``starved_s`` of its report when its beats last changed."""
    since_s: float = 0.0
    """Seconds since the last report in which the worker had no processor (``worker_group/starvation.py``)."""

    def take(self, report: WorkerReport, now: float) -> None:
        """Take a report. A worker that has just finished an activity longer than any step has not stood still. It makes its next beat
        soon."""
        done = self.report is not None and self.report.in_long_work and not report.in_long_work
        changed = report.beats != self.beats or done
        self.beats, self.answered, self.report, self.since_s = report.beats, now, report, 0.0
        if changed:
            self.changes(now)

    def starve(self, seconds: float) -> None:
        """Add seconds in which the worker had no processor."""
        self.since_s += seconds

    def shift(self, now: float, seconds: float) -> None:
        """Do not count ``seconds`` in which the controller was held up."""
        self.changed, self.answered = min(now, self.changed + seconds), min(now, self.answered + seconds)

    def changes(self, now: float) -> None:
        self.changed, self.starved_s = now, self.report.starved_s if self.report is not None else 0.0

    def still(self, now: float) -> float:
        """Return the seconds without a heartbeat, except those in which the worker was runnable but had no processor."""
        starved_s = self.report.starved_s - self.starved_s if self.report is not None else 0.0
        return now - self.changed - max(0.0, starved_s) - self.since_s

    def silent(self, now: float) -> float:
        """Return the seconds without an answer, except those in which the worker had no processor."""
        return now - self.answered - self.since_s


@dataclass
class HangWatch:
    """Watches the workers of one generation after another for hangs.

    Attributes:
        fixed: bound in seconds, instead of the bound found from the steps; 0: no worker is ever accused.
        patience_s: timeout of the collectives, in seconds. Unless it is ``replaced``, a worker that trains alone is hung after this time
            without a heartbeat, or after the bound if that is longer. If several workers compute and none is seen to wait (all may wait for
            a file system, for example), they are hung after twice this time. Some may wait in a collective after all, since that is not
            visible on an accelerator; its timeout must come first.
        replaced: whether another worker takes the place of one that trained alone.
        slow_steps: numbers of the steps in which a worker may be silent for longer than other steps take. Their bound is ``patience_s``.
    """

    fixed: float | None = None
    patience_s: float = math.inf
    replaced: bool = False
    slow_steps: range = range(0)
    _ticket: Ticket | None = None
    _steps: dict[int, float] = field(default_factory=dict)
    """Longest duration that any rank has reported, for each of the last steps."""
    _rare: dict[int, float] = field(default_factory=dict)
    """Durations of those of the last :data:`PERIOD` steps in which a worker was ended as hung although it answered."""
    _period: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=PERIOD))
    """Number of workers and seconds of each of the last steps, earlier generations included, without the first step of each generation."""
    _counted: int = 0
    """Step of the last entry of ``_period``; 0 if that is of an earlier generation."""
    _size: int = 0
    _earlier: float = 0.0
    _accused: int = 0
    """The step that was under way when a worker was last found hung; ``_blamed``: the generation."""
    _blamed: Ticket | None = None
    _stood: bool = False
    """True if a worker that was found hung in that step still answered."""
    _patience: int = 1
    """Factor of the bound until that step is done."""
    _stepped: int = 0
    _first: int | None = None
    """The first step that was reported in this generation."""
    _settled: bool = False
    _seen: dict[str, _Seen] = field(default_factory=dict)
    _asked: float | None = None
    _listens: float = -math.inf
    """Time before which no worker is accused, because the controller was held up."""

    def begin(self, ticket: Ticket, size: int) -> None:
        """Begin to watch another generation, of ``size`` workers.

        The longest recent step of the last generation counts until this one has steps of its own. Durations that came repeatedly with as
        many workers or more count as well.
        """
        self._earlier = max(self._steps.values(), default=self._earlier)
        self._steps.clear()
        self._ticket, self._stepped, self._settled, self._seen, self._asked = ticket, 0, False, {}, None
        self._first, self._counted, self._size = None, 0, size

    def expect(self, seconds: float, recent: Iterable[tuple[int, float]] = ()) -> None:
        """Take step durations that an earlier process of the controller has seen: of the last step, and of ``recent`` steps with their
        number of workers."""
        self._earlier = seconds
        self._period.extend(recent)

    def stepped(self, ticket: Ticket, step: int, seconds: float, alone: float = 0.0) -> None:
        """Take a step that a worker completed in ``seconds``. For ``alone`` of these seconds it waited for the last worker to begin.

        The wait counts as part of the step, except in a generation's first step, where workers wait for others to get their state.
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
        """Take a worker's report."""
        if report.ticket != self._ticket:
            return
        self._seen.setdefault(report.worker, _Seen()).take(report, now)

    def starved(self, worker: str, seconds: float) -> None:
        """Note that a worker could not answer for ``seconds`` more since its last report, because it had no processor."""
        if worker in self._seen:
            self._seen[worker].starve(seconds)

    @property
    def bound_s(self) -> float:
        """Seconds without a heartbeat after which a generation hangs; :attr:`longest_s` before any step was seen."""
        return max(self._usual_s, self.patience_s) if self.slow_steps and self._under_way in self.slow_steps else self._usual_s

    @property
    def _under_way(self) -> int:
        """Number of the step that is under way; 0 if no worker has reported."""
        return max((1 + seen.report.completed for seen in self._seen.values() if seen.report is not None), default=0)

    @property
    def _usual_s(self) -> float:
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
        """Seconds without a heartbeat after which a worker that waits for no other is hung, in any activity."""
        return math.inf if self.fixed == 0 else max(self.fixed or 0.0, LONGEST * self.patience_s)

    @property
    def forming_s(self) -> float:
        """Seconds without an answer after which a worker that forms a generation is hung. This bound holds even before any step was
        seen."""
        if self.fixed is not None:
            return self.fixed or math.inf
        return max(FIRST_S, FIRST * FACTOR * (max(self._steps.values(), default=0.0) or self._earlier))

    def verdict(self, members: Collection[str], now: float) -> Mapping[str, str]:
        """Return the hung workers, each with the reason. Report those that are ended to :meth:`ended`."""
        asked, self._asked = self._asked, now
        if asked is not None and now - asked > OWN_GAP_S:
            for seen in self._seen.values():
                seen.shift(now, now - asked)
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
            if worker not in hung and report is not None and not report.waiting and (endless or not report.in_long_work):
                hung[worker] = f"it stands at {report.where or 'an unknown place'} for {everyone[worker].still(now):.1f} s{awaited}"
        return hung

    def stalled(self, members: Collection[str], now: float) -> bool:
        """Return whether no member makes progress, in training or while the group forms, so that the network between them may be broken.

        Call it after :meth:`verdict` has found no hung worker. It also holds on an accelerator, where no wait is visible. It accuses no
        worker, and the probes that follow cost nothing. However long the steps are, it waits for at most a third of the collectives'
        timeout, after which the collective would fail.
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
        """Note that these workers are ended. The workers that repeat their step get twice the time."""
        if self._blamed != self._ticket:
            self._blamed = self._ticket
            self._accused = max(self._under_way, self._accused if self._patience > 1 else 0)
            self._stood = any(self._seen[worker].silent(self._asked or 0.0) < self.bound_s for worker in hung)
            self._patience *= 2
