"""The recorder of a run: stamps events and steps, applies them to the statistics, and writes them to the run's folder."""

from __future__ import annotations

import time
from collections.abc import Mapping
from heapq import merge
from typing import Any

from vescale_ray.controller.protocol import StateSource
from vescale_ray.controller.state.journal import Journal
from vescale_ray.controller.state.loggers import Loggers
from vescale_ray.controller.statistics.checkpoint_stats import CheckpointStats
from vescale_ray.controller.statistics.goodput import Goodput
from vescale_ray.controller.statistics.run_stats import Line, RunStats
from vescale_ray.controller.statistics.step_stats import EACH, LEAST, SO_FAR, StepStats
from vescale_ray.runfolder import RunFolder, plain
from vescale_ray.workers.messages import Origin, StepRecord


class RunLog:
    """Records events and steps from the controller's thread. Each line has a sequence number (``seq``), by which a replay orders the lines
    of both files.

    Args:
        run_id: this start of the run; earlier starts have lines in the same files.
        last_step: steps of the whole run.
        source: source of the state that this start begins from.
        steps_before: steps that an earlier start had completed.
        loggers: also receive the figures.
        evaluated_before: evaluations of earlier starts by step and set, up to the step from which this one goes on.

    Attributes:
        stats: statistics of all lines; :meth:`replay` replaces them.
        journal: writes the lines, run.json, and warnings.
    """

    def __init__(
        self,
        folder: RunFolder,
        run_id: str,
        last_step: int,
        source: StateSource,
        steps_before: int = 0,
        loggers: Loggers | None = None,
        evaluated_before: Mapping[int, Mapping[str, Mapping[str, Any]]] | None = None,
    ) -> None:
        self.evaluated_before = evaluated_before or {}
        self.folder, self.run_id, self._loggers = folder, run_id, loggers
        self._last_step, self._source, self._before, self._now = last_step, source, steps_before, time.time()
        self.stats = self._fresh()
        self.journal = Journal(folder, self._applied)
        self._sampled: tuple[int, int] | None = None
        """Generation and index of the newest step whose samples were written."""
        self._told_until = 0.0

    def _fresh(self) -> RunStats:
        begins = self._source if self._source.origin is Origin.CHECKPOINT else None
        checkpoints = CheckpointStats(begins.step, begins.path) if begins is not None else CheckpointStats()
        return RunStats(self._last_step, self._now, Goodput.beginning(self._now), StepStats(self._before), checkpoints)

    def record(self, name: str, **about: Any) -> None:
        """Record an event, with the generation and step that it belongs to."""
        self.journal.event(name, about)

    def _applied(self, name: str, about: Mapping[str, Any]) -> Line:
        stats = self.stats
        stamp = {"time": time.time(), "event": name, "generation": stats.generation, "step": stats.step}
        event: Line = plain({**stamp, **about, **self._follows()})
        stats.apply(event)
        if self._loggers is not None and name == "evaluation":
            self._loggers.evaluation(event)
        if self._loggers is not None and name == "completions":
            self._loggers.completions(event)
        return event

    def _follows(self) -> dict[str, Any]:
        """Return the next line's sequence number, and the end of the time published as lost, if that is later than the last line's."""
        late = {"lost_until": self._told_until} if self._told_until > self.stats.goodput.until else {}
        return {**late, "seq": self.stats.sequence + 1}

    def record_step(self, line: Mapping[str, Any], record: StepRecord) -> None:
        """Record the line of a completed step, and the samples that it has consumed."""
        stats = self.stats
        if self._sampled != (record.generation, record.index):
            self.journal.samples(record.index, record.generation, record.ids)
        made: dict[str, Any] = plain({**line, "run_id": self.run_id, **self._follows()})
        again = record.step <= stats.steps.highest
        stats.apply(made)
        if stats.steps.executed % EACH == 0:
            made[SO_FAR] = stats.totals()  # totals that include this line: a replay may begin with it
        self.journal.metrics(made)
        if self._loggers is not None:
            if not again:
                self._loggers.step(made)
            self._warn_of_loggers(self._loggers)

    def close(self, loggers_s: float, flush_s: float) -> None:
        """Write all queued records.

        Args:
            loggers_s: longest wait for the loggers; ``flush_s``: for the disk.
        """
        if self._loggers is not None:
            self._loggers.close(loggers_s)
            self._warn_of_loggers(self._loggers)
        self.journal.flush(flush_s)

    def _warn_of_loggers(self, loggers: Loggers) -> None:
        for problem in loggers.problems():
            self.journal.warn(problem)

    def tell_goodput(self, now: float) -> Goodput:
        """Return the accounts until ``now``, to be published. No account falls afterwards: time that was published as lost stays lost."""
        accounts = self.stats.goodput_at(max(now, self._told_until))
        self._told_until = max(self._told_until, accounts.until)
        return accounts

    def replay(self) -> None:
        """Reduce the lines that earlier controller processes have written. Reads the metrics from the newest usable totals on.

        Raises:
            OSError: the folder can't be read. Nothing has changed, and it can be tried again.
        """
        stats, events = self._fresh(), self.folder.read_events()
        starts = [i for i, e in enumerate(events) if e["event"] == "run_started" and e.get("run_id") == self.run_id]
        offset = self.folder.marked_metrics(SO_FAR, LEAST)
        steps = (line for line in self.folder.each_metrics(offset) if line.get("run_id") == self.run_id)
        for line in merge(events[starts[-1] :] if starts else [], steps, key=lambda line: int(line.get("seq") or 0)):
            stats.apply(line)
        last = self.folder.last_samples()
        # If the metrics of that step were not written, the workers report it again.
        self._sampled = (int(last["generation"]), int(last["step"])) if last else None
        self.stats, self._told_until = stats, 0.0
