"""Statistics of a run, reduced from the lines of events.jsonl and metrics.jsonl.

The reducer runs live, and again when a restarted controller replays the lines. It therefore reads nothing but the lines: no clock, no
file, no worker. ``publisher.Observed`` passes all other values (heartbeats, memory, spares) to the snapshot.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from vescale_ray.controller.protocol import FINAL, RunState
from vescale_ray.controller.statistics.checkpoint_stats import CheckpointStats
from vescale_ray.controller.statistics.goodput import Goodput, Loss
from vescale_ray.controller.statistics.rescales import Rescale, RescaleStats
from vescale_ray.controller.statistics.step_stats import SO_FAR, StepStats
from vescale_ray.workers.messages import WorkerInfo

Line = Mapping[str, Any]
"""An event or the metrics of a step, as the run's folder holds it."""
_RESTING = (RunState.CHECKPOINTING, RunState.STOPPING, RunState.DONE, RunState.FAILED)


@dataclass
class RunStats:
    """Statistics of one start of a run. :meth:`apply` is the only way in which they change; ``on_NAME`` takes an event of that name.

    Attributes:
        last_step: steps of the whole run.
        started: when this start of the run began, in seconds since the epoch; ``begun``: whether ``run_started`` was seen.
        goodput: where the time went.
        steps: executed steps; its ``before`` counts the steps that an earlier start of the run had completed.
        checkpoints: checkpoints of this start; its newest is at first the checkpoint that the run began from.
        state: state of the run.
        generation, members: number of the newest generation, and its workers in rank order.
        numbered_by: what the ranks of the newest generation were numbered by: ``layouts`` or ``equal intervals``.
        step: completed steps; a rollback lowers it.
        rescale: the rescale under way, None if there is none; ``rescales``: completed rescales.
        waiting: whether the run waits for workers or for storage.
        evaluations: by step, the figures of each evaluated set by name, ``heldout`` among them; None for what was not finite.
        workers: every worker that was ever warm, by name.
        stragglers: workers that are slow now: ``rank``, ``factor``, ``since_step``, ``node``.
        spread: generation in which slots were last spread anew, and the slots of each rank.
        failures: lost workers by kind; ``lost``: lost workers that had been warm.
        nonfinite_weights: generations that ended because a weight that is gathered in FP8 held Inf or NaN.
        error: why the run has failed.
        sequence: sequence number of the newest line.
    """

    last_step: int
    started: float
    goodput: Goodput
    steps: StepStats = field(default_factory=StepStats)
    checkpoints: CheckpointStats = field(default_factory=CheckpointStats)
    begun: bool = False
    state: RunState = RunState.PENDING
    generation: int = 0
    members: tuple[str, ...] = ()
    numbered_by: str = "layouts"
    step: int = 0
    rescale: Rescale | None = None
    rescales: RescaleStats = field(default_factory=RescaleStats)
    waiting: bool = False
    evaluations: dict[int, dict[str, Mapping[str, Any]]] = field(default_factory=dict)
    workers: dict[str, WorkerInfo] = field(default_factory=dict)
    stragglers: dict[str, dict[str, Any]] = field(default_factory=dict)
    spread: tuple[int, tuple[int, ...]] = (0, ())
    failures: dict[str, int] = field(default_factory=dict)
    lost: int = 0
    nonfinite_weights: int = 0
    error: str | None = None
    sequence: int = 0

    def apply(self, line: Line) -> None:
        """Count one line; a line without ``event`` is the metrics of a step."""
        if line.get("lost_until") is not None:
            self.goodput.advance(float(line["lost_until"]))  # time that was published as lost stays lost
        name = line.get("event")
        for part in (self, self.checkpoints, self.rescales):
            handle = getattr(part, "on_step" if name is None else f"on_{name}", None)
            if handle is not None:
                handle(line)
        self.sequence = max(self.sequence, int(line.get("seq") or 0))

    @property
    def has_stepped(self) -> bool:
        """True if the newest generation has completed a step."""
        return self.generation > 0 and self.steps.last.get("generation") == self.generation

    @property
    def newest_evaluation(self) -> Mapping[str, Mapping[str, Any]]:
        """Figures of the last step that was evaluated, by set."""
        return self.evaluations[max(self.evaluations)] if self.evaluations else {}

    def ended(self, step: int) -> float | None:
        """Return the time at which ``step`` steps were complete: known of recent steps and of checkpoints."""
        found = self.steps.ended(step)
        return self.checkpoints.ended.get(step) if found is None else found

    def metrics_of(self, step: int) -> dict[str, float]:
        """Return the metrics to record in the checkpoint of ``step``: ``loss``, and the loss of each evaluation set, such as
        ``heldout_loss``.

        The evaluation is the newest one up to ``step``. Values that are not finite are left out."""
        evaluated = self.evaluations.get(max((one for one in self.evaluations if one <= step), default=-1), {})
        found = {"loss": self.steps.loss(step), **{f"{name}_loss": figures["loss"] for name, figures in evaluated.items()}}
        return {name: value for name, value in found.items() if value is not None and math.isfinite(value)}

    def goodput_at(self, now: float) -> Goodput:
        """Return the accounts of the run's time. They include the time until ``now`` only if certainly no step is under way."""
        accounts = replace(self.goodput, lost=dict(self.goodput.lost))
        # A generation that has completed a step is in a step until the next one forms. Before its first step, RUNNING means that its
        # members have their state.
        forms = not self.has_stepped and self.state is not RunState.RUNNING
        if self.waiting or forms or self.state in _RESTING:
            accounts.advance(now)
        return accounts

    def totals(self) -> dict[str, Any]:
        """Return the totals of the metric lines so far. A replay may begin at a line that holds them as :data:`~.step_stats.SO_FAR`."""
        return {**self.steps.so_far(), "goodput": self.goodput.to_json()}

    def on_step(self, line: Line) -> None:
        if not self._resume(line):
            between = {str(cause): float(seconds) for cause, seconds in (line.get("between_seconds") or {}).items()}
            again = self.steps.count(line)
            if self.rescale is not None and self.goodput.cause is Loss.RESCALE and self.rescale.generation == self.generation:
                self.goodput.train()  # until the rescale ends this generation, it trains on
            self.goodput.step(float(line["time"]), float(line.get("step_seconds") or 0.0), again=again, between=between)
            if self.rescale is not None:
                self.goodput.open(self._change)
        self.step = int(line["step"])

    def _resume(self, line: Line) -> bool:
        """Replace the totals by those that a metrics line carries. Return False, and change nothing, if the line has none that can be
        read."""
        try:
            goodput = Goodput.from_json(line[SO_FAR]["goodput"])
            self.steps.resume(line)
        except (KeyError, TypeError, ValueError, AttributeError):
            return False  # another version wrote it, or it is damaged: count from here on
        self.goodput = goodput
        return True

    def on_run_started(self, event: Line) -> None:
        self.begun, self.started = True, float(event["time"])
        self.goodput = Goodput.beginning(self.started)

    def on_controller_restarted(self, event: Line) -> None:
        self.state = RunState(event["state"])
        if event["trained"]:
            # Workers that train on may not have heard of the rescale: the controller asks again.
            self.rescale = None

    def on_state(self, event: Line) -> None:
        before, self.state = self.state, RunState(event["state"])
        self.waiting = self.waiting and self.state not in _RESTING
        trains = self.goodput.cause is None
        if self.state is RunState.CHECKPOINTING or (self.state is RunState.STOPPING and not trains):
            self.goodput.open(Loss.CHECKPOINT)
        elif self.state in FINAL:
            if before is RunState.STOPPING and trains:
                self.goodput.open(Loss.CHECKPOINT)  # a stopped run makes a checkpoint after its last step
            self.goodput.turn(Loss.SHUTDOWN, float(event["time"]))

    def on_run_failed(self, event: Line) -> None:
        self.error = str(event["error"])

    def on_waiting(self, event: Line) -> None:
        if self.goodput.cause is None:
            self.goodput.open(self._change)
        self.waiting = bool(event["waiting"])
        self.goodput.turn(Loss.WAITING if self.waiting else self._change, float(event["time"]))

    def on_evaluation(self, event: Line) -> None:
        step = int(event["step"])
        self.evaluations[step] = evaluated_sets(event)
        if step >= self.last_step and self.goodput.cause is None:
            # No step follows, whose line would say what this time was spent on.
            self.goodput.open(Loss.EVALUATION)
            self.goodput.turn(Loss.CHECKPOINT, float(event["time"]))

    def on_generation(self, event: Line) -> None:
        if self.rescale is not None:
            rescale = self.rescale.spent(event.get("phases") or {})
            self.rescale = replace(rescale, step=max(rescale.step, self.step))
        if self.goodput.cause is None and self.rescale is not None:
            self.goodput.open(self._change)  # workers that form a generation are in no step
        elif self.waiting:
            self.goodput.turn(self._change, float(event["time"]))
        self.waiting = False
        self.generation, self.step = int(event["generation"]), int(event["step"])
        self.members = tuple(event["workers"])
        self.numbered_by = str(event.get("numbered_by") or self.numbered_by)

    def on_generation_failed(self, event: Line) -> None:
        self.nonfinite_weights += bool(event.get("nonfinite_weights"))
        if self.rescale is not None and self.state is not RunState.STOPPING:
            self.rescale = replace(self.rescale, reason="failure")
            self.goodput.open(Loss.FAILURE)

    def on_rescale_started(self, event: Line) -> None:
        self.rescale = Rescale.of(event)
        if self.rescale.reason == "failure":
            self.goodput.open(Loss.FAILURE)

    def on_rescaled(self, event: Line) -> None:
        self.rescale = None

    def on_rescale_abandoned(self, event: Line) -> None:
        if self.rescale is not None and self.rescale.generation == event["generation"]:
            self.rescale = None

    def on_worker_started(self, event: Line) -> None:
        about = {one.name: event[one.name] for one in fields(WorkerInfo) if one.name in event}
        self.workers[str(event["worker"])] = WorkerInfo(**about)

    def on_worker_lost(self, event: Line) -> None:
        kind = str(event.get("kind"))
        self.failures[kind] = self.failures.get(kind, 0) + 1
        self.lost += event.get("pid") is not None

    def on_straggler(self, event: Line) -> None:
        self.stragglers[str(event["worker"])] = {key: event[key] for key in ("rank", "factor", "since_step", "node")}

    def on_straggler_over(self, event: Line) -> None:
        self.stragglers.pop(str(event["worker"]), None)

    def on_slots_spread(self, event: Line) -> None:
        self.spread = (int(event["generation"]), tuple(event["slots"].values()))

    @property
    def _change(self) -> Loss:
        """Return the cause to which time between two generations is lost."""
        return Loss.FAILURE if self.rescale is None or self.rescale.reason == "failure" else Loss.RESCALE


def evaluated_sets(event: Line) -> dict[str, Mapping[str, Any]]:
    """Return the figures of an ``evaluation`` by set, ``heldout`` among them if there are held-out samples."""
    heldout = {name: event.get(name) for name in ("loss", "perplexity", "bpb", "samples")}
    return {**({"heldout": heldout} if event.get("samples") else {}), **(event.get("sets") or {})}
