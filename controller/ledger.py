"""What the run has done: counted in memory for the metrics, written to the run's folder (``journal``) for everyone else.

The lines in the folder are also what a restarted controller learns the past from (:meth:`Ledger.restore`). Steps are counted in ``steps``,
changes of the world in ``shifts``, checkpoints in ``kept``; what the workers tell of themselves is in ``tally``, where the time went in
``goodput``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, fields
from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING, Any

from vescale_ray import __version__
from vescale_ray.config import RunConfig
from vescale_ray.controller.budget import Budget
from vescale_ray.controller.figures import RunSnapshot
from vescale_ray.controller.goodput import Goodput, Loss
from vescale_ray.controller.journal import Journal
from vescale_ray.controller.kept import Kept
from vescale_ray.controller.protocol import RunState, Source, World
from vescale_ray.controller.saves import SaveResult
from vescale_ray.controller.shifts import Shift, Shifts
from vescale_ray.controller.steps import EACH, LEAST, SO_FAR, Steps, line_of
from vescale_ray.controller.tally import Tally
from vescale_ray.data.units import bits_per_byte
from vescale_ray.runfolder import RunFolder
from vescale_ray.workers.messages import Evaluated, Filled, Origin, Stepped, WorkerInfo

if TYPE_CHECKING:
    from vescale_ray.checkpoint import Interval
    from vescale_ray.workers.messages import StepRecord

STATE_GAP_S = 1.0
"""Between two writings of run.json while nothing but the step changes."""
HEARD_S = 0.5
"""Within it news of the workers are heard."""


class Ledger:
    """The books of a run. Used from the conductor's thread; :attr:`snapshot` may be read from any.

    Args:
        epoch: how often the controller was started; 1 for the first time.
        ray_session: name of the Ray that it is on, as Ray's own metrics have it; empty: not known.
    """

    def __init__(self, folder: RunFolder, config: RunConfig, run_id: str, driver_pid: int, epoch: int, ray_session: str = "") -> None:
        self.folder = folder
        self.state = RunState.PENDING
        self.world: World | None = None
        self.target = config.elastic.workers
        self.shift: Shift | None = None
        self.step = 0
        self._spares = self._wishes = 0
        self._used: Mapping[str, int] = {}
        self._in_a_row: Mapping[str, int] = {}
        self.control_url: str | None = None
        self.error: str | None = None
        self.evaluated: set[int] = set()
        self._about_workers: dict[str, Mapping[str, str]] = {}
        self.known: dict[str, WorkerInfo] = {}
        """Every worker that was ever warm."""
        self.stragglers: dict[str, dict[str, Any]] = {}
        """Workers that are slow now: ``rank``, ``factor``, ``since_step``, ``node``."""
        self.spread: tuple[int, tuple[int, ...]] = (0, ())
        """The generation in which slots were last spread anew, and those of each rank."""
        self.last_save: SaveResult | None = None
        self._config, self._run_id, self._pid, self._epoch = config, run_id, driver_pid, epoch
        self._about = {"model": config.model.factory or config.model.kind, **versions()}
        if ray_session:
            self._about["ray_session"] = ray_session
        self._started = time.time()
        self.goodput = Goodput.beginning(self._started)
        self._journal = Journal(folder, self._stamp)
        self._shifts, self._kept = Shifts(), Kept()
        self._asked: tuple[str, int] | None = None
        """A change that was asked for while the one before it lacked its first step: it begins with that."""
        self._waiting = False
        self._filled: dict[str, Filled] = {}
        self._steps = Steps()
        self._heldout: dict[int, float] = {}
        self._line: Mapping[str, Any] = {}
        self._record: StepRecord | None = None
        self._state_written = 0.0
        self._sampled: tuple[int, int] | None = None
        self._done = self._done_again = 0
        """Steps that an earlier start of the run had done; and how many of them were done again."""
        self._failures: dict[str, int] = {}
        self._lost = 0
        self.numbered_by = "layouts"
        """What the newest generation's ranks were numbered by: its planned layouts, or where these were not known yet equal intervals, so
        that another numbering might have moved less."""
        self._tally = Tally()
        self.draining = self.unprotected = 0
        """Members on nodes that are about to go; ranks without a copy on another node."""
        self.snapshot: RunSnapshot
        self.publish({})

    # ------------------------------------------------------------------------------------------------------- what happens

    def event(self, name: str, **about: Any) -> None:
        """Write an event, with the generation and step that it belongs to."""
        self._journal.event(name, about)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What went wrong without ending the run, each once."""
        return self._journal.warnings

    def warn(self, text: str) -> None:
        """Tell of something that does not stop the training: in the log, in run.json, as an event."""
        self._journal.warn(text)

    def _stamp(self, name: str) -> dict[str, Any]:
        generation = self.world.ticket.generation if self.world else 0
        return {"time": time.time(), "event": name, "generation": generation, "step": self.step}

    def begin_from(self, source: Source, done: int) -> None:
        """The run starts from here: the newest checkpoint until there is another. Not of this start's making: it has no time.

        ``done``: steps up to this one were done before, by an earlier start; they count as replayed when they are done again.
        """
        self._done = done
        if source.origin is Origin.CHECKPOINT:
            self._kept.began_from(source.path, source.step)

    def started(self) -> None:
        """The run begins, or (``epoch`` > 1) its controller does, again."""
        if self._epoch == 1:
            self.event("run_started", run_id=self._run_id, workers=self.target, steps=self._config.train.steps, pid=self._pid)
        else:
            self.event("controller_restarted", epoch=self._epoch, step=None)  # that stands in the books, which are yet to be read

    def moved(self, after: RunState) -> None:
        """The run is in another state."""
        before, self.state = self.state, after
        self.event("state", before=str(before), state=str(after))
        if after is RunState.CHECKPOINTING:
            self.goodput.open(Loss.CHECKPOINT)
        elif after in (RunState.DONE, RunState.FAILED):
            self.goodput.turn(Loss.SHUTDOWN, time.time())
            self.event("goodput", **self.goodput.to_json())
        self.write_state(now=True)

    def opened(self, world: World) -> None:
        """A generation is about to form; its state is that of ``world.source.step``."""
        if self.shift is not None:
            self.shift.step = max(self.shift.step, self.step)
        self.world, self.step = world, world.source.step
        self._filled, self._record, self._asked = {}, None, None
        self._tally.opened(world.members)

    def begin_shift(self, reason: str, before: int) -> Shift:
        """The first sign of a change. One that fails on its way is still the same change, now of the worse reason."""
        if self.shift is None:
            now = time.time()
            self.shift = Shift(reason, before, self.world.ticket.generation if self.world else 0, self.step, now)
            self.shift.spend("detect", now - self._steps.ended.get(self.step, now) if reason == "failure" else 0.0)
            self.event("rescale_started", reason=reason, **{"from": before})
        elif reason == "failure":
            self.shift.reason = reason
        elif self.world is not None and self.shift.generation < self.world.ticket.generation:
            self._asked = reason, before
        if reason == "failure":
            # A change that was asked for begins where the step under way ends: see stepped.
            self.goodput.open(Loss.FAILURE)
        return self.shift

    def waits(self, waiting: bool) -> None:
        """There are too few workers to go on with; or (``False``) not any more."""
        failed = self.shift is None or self.shift.reason == "failure"
        self._waiting = waiting
        self.goodput.turn(Loss.WAITING if waiting else Loss.FAILURE if failed else Loss.RESCALE, time.time())

    def filled(self, worker: str, item: Filled) -> None:
        """A member has its state."""
        if self.world is None or item.ticket != self.world.ticket:
            return
        news = worker not in self._filled
        if not news and not item.phases:
            return  # what a restarted controller takes for granted says less than what it may have heard already
        self._filled[worker] = item
        if news and item.origin is Origin.MEMORY:
            self._tally.moved(worker, item.phases.get("sync", 0.0))
        # What a restarted controller takes for granted of those that train (no phases) tells nothing of the load.
        told = [one for one in self._filled.values() if one.phases]
        if news and item.origin is Origin.CHECKPOINT and self.all_filled and told and self._kept.loaded_by != self.world.ticket.generation:
            seconds = max(one.phases.get("sync", 0.0) for one in told)
            about = {"seconds": seconds, "bytes": sum(one.read_bytes for one in told), "generation": self.world.ticket.generation}
            self._kept.loaded(about)
            self.event("checkpoint_loaded", **about, commit=self.world.source.commit)

    def heard(self, worker: str) -> None:
        """It has answered."""
        self._tally.heard(worker, time.time())

    def used(self, worker: str, item: Stepped) -> None:
        """What a step took of this worker; each member tells its own."""
        if self.world is not None and item.ticket == self.world.ticket:
            self._tally.stepped(worker, item.record.seconds, item.usage)

    @property
    def all_filled(self) -> bool:
        """Whether every member of the generation has its state."""
        return self.world is not None and all(worker in self._filled for worker in self.world.members)

    @property
    def has_stepped(self) -> bool:
        """Whether the generation has completed a step."""
        return self.world is not None and self._line.get("generation") == self.world.ticket.generation

    def stepped(self, item: Stepped) -> bool:
        """Account for a step, once: every member tells of it. Whether it was news.

        A member tells of one after another. So where steps are missing, a controller that was killed had heard of them, and could not write
        them down."""
        record, world = item.record, self.world
        if world is None or item.ticket != world.ticket or record.step <= self.step:
            return False
        # Training does not go on before the last of them does: in a generation's first step the others wait for it.
        seconds = record.seconds if self.has_stepped else record.seconds - record.alone_seconds
        if self.shift is not None and self.shift.generation < world.ticket.generation:
            self.end_shift(item.ended - seconds)
        self.step, self._record = record.step, record
        if self._asked is not None:
            self.begin_shift(*self._asked)
            self._asked = None
        self.goodput.step(item.ended, seconds, again=self._was_done(record.step), between=item.between)
        if self.shift is not None:
            self.goodput.open(Loss.FAILURE if self.shift.reason == "failure" else Loss.RESCALE)
        self._line = line = line_of(item, seconds, self._config.tokens_per_step, self._tally)
        self._steps.count(line)
        if self._steps.executed % EACH == 0:
            line = {**line, SO_FAR: {**self._steps.so_far(), "replayed": self._done_again, "goodput": self.goodput.to_json()}}
        if self._sampled != (record.generation, record.index):
            self._journal.samples(record.index, record.generation, record.ids)
        self._journal.metrics(line)
        return True

    def _was_done(self, step: int) -> bool:
        """Whether the step that has just been done had been done before; counts it, where no rescale of this start does."""
        if step <= self._steps.highest:
            return True
        self._done_again += step <= self._done
        return step <= self._done

    def end_shift(self, resumed: float) -> None:
        """Training goes on since ``resumed``: the change is complete.

        The pause counts from the moment in which the step that was gone back to had ended, so that replayed steps are part of it.
        """
        shift, world = self.shift, self.world
        if shift is None or world is None:
            return
        self.shift = None
        if shift.generation == world.ticket.generation:
            return self.event("rescale_abandoned", **{"from": shift.before, "to": self.target, "error": "the run was over before it"})
        pause = max(0.0, resumed - self._steps.ended.get(world.source.step, shift.noticed))
        about = shift.story(world, self._filled.values(), pause)
        if about["moved_bytes"]:
            about["numbered_by"] = self.numbered_by
        self._shifts.count(about)
        self.event("rescaled", **about)

    def evaluation(self, item: Evaluated) -> None:
        """A held-out loss, once per step."""
        if item.step not in self.evaluated and self.world is not None and item.ticket == self.world.ticket:
            self.evaluated.add(item.step)
            self._heldout[item.step] = item.loss
            self.event("evaluation", loss=item.loss, bpb=bits_per_byte(item.loss), samples=item.samples, step=item.step)
            if item.step >= self._config.train.steps and self.goodput.cause is None:
                # No step comes after it that would tell what the time before it went into.
                self.goodput.open(Loss.EVALUATION)
                self.goodput.turn(Loss.CHECKPOINT, time.time())

    def worker_started(self, info: WorkerInfo) -> None:
        if info.worker not in self.known:
            self.known[info.worker] = info
            self.event("worker_started", **asdict(info))

    def beside(self, *, spares: int, wishes: int) -> None:
        """Warm workers beside those that train or are to join; places that are asked of Ray's autoscaler."""
        self._spares, self._wishes = max(0, spares), wishes

    def budget(self, budget: Budget) -> None:
        """What was used up of the run's budget."""
        self._used = {str(cause): count for cause, count in budget.total.items()}
        self._in_a_row = {"crash": budget.crashes, "node": budget.nodes, "controller": budget.controllers}

    def worker_left(self, worker: str, info: WorkerInfo | None) -> None:
        self.event("worker_left", worker=worker, pid=info.pid if info else None)

    def worker_lost(self, worker: str, info: WorkerInfo | None, reason: str, cause: str) -> None:
        kind = "killed" if "killed:" in reason else "died"
        self._failures[kind] = self._failures.get(kind, 0) + 1
        self._lost += info is not None
        at = {"pid": info.pid, "node": info.node} if info else {"pid": None, "node": None}
        self.event("worker_lost", worker=worker, reason=reason, kind=kind, cause=cause, **at)

    def straggler(self, worker: str, rank: int, factor: float, since_step: int) -> None:
        """A worker takes ``factor`` times as long for a slot as the others; told of once."""
        info = self.known.get(worker)
        about = {"rank": rank, "factor": factor, "since_step": since_step, "node": info.node if info else None}
        if worker not in self.stragglers:
            self.event("straggler", worker=worker, **about)
        self.stragglers[worker] = about

    def straggler_over(self, worker: str, reason: str) -> None:
        """It is not slow any more, or gone."""
        self.event("straggler_over", worker=worker, reason=reason, since_step=self.stragglers.pop(worker)["since_step"])

    def slots_spread(self, slots: Mapping[str, int]) -> None:
        """The members do so many slots each from now on."""
        self.spread = (self.world.ticket.generation if self.world else 0, tuple(slots.values()))
        self.event("slots_spread", slots=slots)

    def saved(self, result: SaveResult) -> None:
        """A checkpoint has ended, well or not."""
        if result.kept is None:
            self._kept.failures += 1
            self.event("checkpoint_failed", error=result.error, step=result.step)
            return
        self.last_save = result
        about = {
            "path": result.kept.path,
            "seconds": result.seconds,
            "stall_seconds": result.stall_s,
            "stages": dict(result.stages),
            "bytes": result.bytes,
            "step": result.step,
        }
        self._kept.saved({**about, "time": time.time()})
        self.event("checkpoint_saved", **about)

    def load_failed(self, commit: str | None, error: str) -> None:
        """A generation could not take up the checkpoint that it was to start from."""
        self._kept.load_failures += 1
        self.event("checkpoint_load_failed", commit=commit, error=error)

    def hang(self, name: str, text: str) -> str | None:
        """Keep the report of a hang; where it is."""
        return self._journal.report(self.folder.write_hang, name, text)

    def flush(self, wait_s: float) -> None:
        """Have what still waits written, if the disk answers within that time."""
        self._journal.flush(wait_s)

    def gave_up(self, text: str) -> str | None:
        """Keep what is known of the failures that ended the run; where it is."""
        return self._journal.report(self.folder.write_failure, f"step-{self.step}-{self._run_id}", text)

    def interval_changed(self, interval: Interval) -> None:
        """``checkpoint.every: auto`` has come to another interval."""
        about: dict[str, Any] = {"seconds": interval.seconds, "by": interval.by, "mtbf_hours": interval.mtbf_s / 3600}
        about |= {"stall_seconds": interval.stall_s, "persist_seconds": interval.persist_s, "text": str(interval)}
        self._kept.interval = about
        self.event("checkpoint_interval", **about)

    @property
    def age_s(self) -> float:
        """Seconds since this start of the run, whichever life of the controller it is."""
        return max(0.0, time.time() - self._started)

    @property
    def failures(self) -> int:
        """Workers that were lost; those that never came up are none."""
        return self._lost

    def metrics_of(self, step: int) -> dict[str, float]:
        """What is known of the state after ``step`` steps, for its checkpoint: ``loss``, ``heldout_loss`` (of the newest evaluation that
        is not later). Figures that are not finite are left out. Called from the thread that commits."""
        heldout = max((s for s in list(self._heldout) if s <= step), default=None)
        found = {"loss": self._steps.loss(step), "heldout_loss": None if heldout is None else self._heldout[heldout]}
        return {name: value for name, value in found.items() if value is not None and math.isfinite(value)}

    @property
    def step_seconds(self) -> float | None:
        """Of the last step."""
        seconds = self._line.get("step_seconds")
        return None if seconds is None else float(seconds)

    @property
    def recent_steps(self) -> Sequence[tuple[int, float]]:
        """Of the last hundred or so: how many workers there were, and what the step took."""
        return self._steps.recent

    @property
    def longest_step_seconds(self) -> float:
        """Of the last hundred or so: some do what others don't (roots of a preconditioner, say)."""
        return self._steps.longest

    @property
    def checkpoint_step(self) -> int | None:
        """Of the newest checkpoint that this start of the run has made, or began from."""
        return self._kept.step

    @property
    def checkpoint_path(self) -> str | None:
        return self._kept.path

    def saving(self, pending: int) -> None:
        """So many checkpoints are under way."""
        self._kept.pending = pending

    # ------------------------------------------------------------------------------------------------------------ for others

    def publish(self, workers: Mapping[int, tuple[WorkerInfo | None, int]]) -> None:
        """Make a new snapshot; ``workers``: by rank, who it is and its resident bytes."""
        world, line, elastic = self.world, self._line, self._config.elastic
        if self._waiting or not self.all_filled or self.state in (RunState.CHECKPOINTING, RunState.DONE, RunState.FAILED):
            # That the workers have their state is heard of a moment late: the step that they have begun is not to be taken for lost.
            self.goodput.advance(time.time() - HEARD_S)
        self.snapshot = RunSnapshot(
            run=self._config.run.name,
            state=str(self.state),
            step=self.step,
            steps=self._config.train.steps,
            tokens=self._steps.executed * self._config.tokens_per_step,
            loss=line.get("loss"),
            bpb=line.get("bpb"),
            tokens_per_second=line.get("tokens_per_second"),
            flops_utilization=line.get("model_flops_utilization"),
            draining=self.draining,
            unprotected=self.unprotected,
            grad_norm=line.get("grad_norm"),
            learning_rate=line.get("lr"),
            world=world.size if world else 0,
            world_target=self.target,
            world_min=elastic.min_workers,
            world_max=self._config.max_workers,
            spares=self._spares,
            spares_target=elastic.spares,
            places_wanted=self._wishes,
            generation=world.ticket.generation if world else 0,
            started=self._started,
            productive_seconds=self.goodput.productive,
            lost_seconds=dict(self.goodput.lost),
            last_step_time=line.get("time"),
            **self._steps.figures(),
            **self._shifts.figures(self._done_again),
            worker_failures=dict(self._failures),
            failures=self._used,
            failures_in_a_row=self._in_a_row,
            memory={rank: memory for rank, (_, memory) in workers.items()},
            **self._paces(),
            **self._tally.figures(),
            workers={rank: self._who(info) for rank, (info, _) in workers.items() if info},
            **self._kept.figures(),
            error=self.error,
            info={"run_id": self._run_id, "controller_epoch": str(self._epoch), **self._about},
        )

    def _who(self, info: WorkerInfo) -> Mapping[str, str]:
        """What tells a worker from the others; the same object each time, which makes it cheap to see that nothing has changed."""
        if info.worker not in self._about_workers:
            self._about_workers[info.worker] = {"worker": info.worker, "node": info.node, "pod": info.pod, "device": info.device}
        return self._about_workers[info.worker]

    def _paces(self) -> dict[str, Any]:
        """How fast the ranks of this generation are, in the words of the snapshot."""
        record = self._record
        view = record.pace if record is not None else None
        if record is None or view is None:
            return {"stragglers": dict(self.stragglers)}
        return {
            "slot_seconds": {rank: seconds for rank, seconds in enumerate(record.slot_seconds) if seconds > 0},
            "slowness": dict(enumerate(view.factors)),
            "slots": dict(enumerate(view.shares)),
            "stragglers": dict(self.stragglers),
        }

    def write_state(self, *, now: bool = False) -> None:
        """Write run.json, if it is time or ``now``. Final states are the driver's to write, when nothing is left of the run."""
        if not now and time.monotonic() - self._state_written < STATE_GAP_S:
            return
        self._state_written = time.monotonic()
        self._journal.state(self.record())

    def record(self) -> dict[str, Any]:
        """What run.json holds."""
        state = RunState.STOPPING if self.state in (RunState.DONE, RunState.FAILED) else self.state
        return {
            "run": self._config.run.name,
            "state": str(state),
            "step": self.step,
            "steps": self._config.train.steps,
            "world": self.world.size if self.world else 0,
            "generation": self.world.ticket.generation if self.world else 0,
            "control_url": self.control_url,
            "metrics_url": f"{self.control_url}/metrics" if self.control_url else None,
            "started": self._started,
            "finished": None,
            "goodput": self.goodput.to_json(),
            "error": self.error,
            "warning": "; ".join(self.warnings) or None,
            "checkpoint": self._kept.path,
            "pid": self._pid,
        }

    # --------------------------------------------------------------------------------------------------------------- the past

    def restore(self, world: World | None) -> None:
        """After a restart: take up the books from the folder's lines, and the generation that is going on.

        Raises:
            OSError: the folder does not tell all of them. It can be asked again: nothing was counted.
        """
        counts = deepcopy((self._shifts, self._kept, self._steps, self._failures, self._lost, self._done_again))
        try:
            self._take_up(world)
        except OSError:
            self._shifts, self._kept, self._steps, self._failures, self._lost, self._done_again = counts
            raise

    def _take_up(self, world: World | None) -> None:
        events = self.folder.read_events()
        starts = [i for i, e in enumerate(events) if e["event"] == "run_started" and e.get("run_id") == self._run_id]
        if starts:
            self._started = float(events[starts[-1]]["time"])
        for event in events[starts[-1] :] if starts else []:
            match event["event"]:
                case "rescaled":
                    self._shifts.count(event)
                case "worker_started":
                    about = {one.name: event[one.name] for one in fields(WorkerInfo) if one.name in event}
                    self.known[str(event["worker"])] = WorkerInfo(**about)
                case "worker_lost":
                    kind = str(event.get("kind"))
                    self._failures[kind] = self._failures.get(kind, 0) + 1
                    self._lost += event.get("pid") is not None
                case "checkpoint_saved":
                    self._kept.saved(event)
                case "checkpoint_loaded":
                    self._kept.loaded(event)
                case "checkpoint_load_failed":
                    self._kept.load_failures += 1
                case "checkpoint_failed":
                    self._kept.failures += 1
                case "straggler":
                    self.stragglers[str(event["worker"])] = {key: event[key] for key in ("rank", "factor", "since_step", "node")}
                case "straggler_over":
                    self.stragglers.pop(str(event["worker"]), None)
                case "slots_spread":
                    self.spread = (int(event["generation"]), tuple(event["slots"].values()))
                case "checkpoint_interval":
                    self._kept.interval = event
                case "evaluation":
                    self.evaluated.add(int(event["step"]))
                    if event.get("loss") is not None:
                        self._heldout[int(event["step"])] = float(event["loss"])
        last = self.folder.last_samples()
        # Of a step whose metrics had not been written when the controller was killed: it will be told again.
        self._sampled = (int(last["generation"]), int(last["step"])) if last else None
        self._restore_goodput()
        newest: Mapping[str, Any] | None = None
        for line in self.folder.each_metrics(self.folder.marked_metrics(SO_FAR, LEAST)):
            if float(line.get("time") or 0.0) < self._started:
                continue
            newest, begins = line, newest is None
            if begins and SO_FAR in line and self._goes_on(line):
                continue
            between = {str(cause): float(seconds) for cause, seconds in (line.get("between_seconds") or {}).items()}
            again = self._was_done(int(line["step"]))
            self.goodput.step(float(line["time"]), float(line.get("step_seconds") or 0.0), again=again, between=between)
            self._steps.count(line)
        if world is not None:
            self.opened(world)
            if newest is not None and newest["generation"] == world.ticket.generation:
                self._line, self.step = newest, int(newest["step"])

    def _goes_on(self, line: Mapping[str, Any]) -> bool:
        """From what this line tells of all before it, if it does."""
        try:
            goodput, again = Goodput.from_json(line[SO_FAR]["goodput"]), int(line[SO_FAR]["replayed"])
            self._steps.go_on(line)
        except (KeyError, TypeError, ValueError, AttributeError):
            return False  # written by another version, or damaged: counted from here on
        self._done_again = again
        if self.goodput.until < goodput.until:
            self.goodput = goodput
        return True

    def _restore_goodput(self) -> None:
        """The accounts as run.json has them: what came after is in the lines."""
        try:
            told = Goodput.from_json((self.folder.read_state() or {})["goodput"])
        except (OSError, KeyError, TypeError, ValueError, AttributeError):
            told = None  # written by nobody yet, or damaged: the time before counts as lost to the start, the steps as they were
        self.goodput = told if told is not None and abs(told.since - self._started) < 60 else Goodput.beginning(self._started)


@cache
def versions() -> dict[str, str]:
    """Of what a run's result may depend on. Without importing torch, which takes seconds."""
    found = {"version": __version__}
    for name in ("torch", "ray"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "unknown"
    return found
