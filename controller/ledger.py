"""What the run has done: counted in memory for the metrics, written to the run's folder for everyone else.

The lines in the folder are also what a restarted controller learns the past from (:meth:`Ledger.restore`). A disk that is
full or gone, or does not answer, never stops the training nor the watching of it: lines wait in memory until they can be written, and one
warning is given.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING, Any

from vescale_ray import __version__
from vescale_ray.config import RunConfig
from vescale_ray.controller.budget import Budget
from vescale_ray.controller.figures import STAGES, Histogram, RunSnapshot
from vescale_ray.controller.goodput import Goodput, Loss
from vescale_ray.controller.protocol import RunState, Source, World
from vescale_ray.controller.saves import SaveResult
from vescale_ray.controller.scribe import Scribe
from vescale_ray.controller.tally import Tally
from vescale_ray.data.units import bits_per_byte
from vescale_ray.runfolder import RunFolder
from vescale_ray.workers.messages import Evaluated, Filled, Origin, Stepped, WorkerInfo

if TYPE_CHECKING:
    from vescale_ray.checkpoint import Interval
    from vescale_ray.workers.trainer import StepRecord

_log = logging.getLogger(__name__)

MOST_WAITING = 100_000
"""Lines that wait in memory for a disk that can be written again; beyond it the oldest are lost."""
STATE_GAP_S = 1.0
"""Between two writings of run.json while nothing but the step changes."""
KEPT_TIMES = 20_000
HEALTH = ("nonfinite", "clipped", "skipped")
"""Steps that are counted: with a loss or a gradient that is no number, with a gradient that was clipped, that the optimizer left out."""
HEARD_S = 0.5
"""Within it news of the workers are heard."""


@dataclass
class Shift:
    """A change of the world under way: from its first sign to the first step after it. JSON-able.

    Attributes:
        reason: ``failure``, ``manual``, ``replacement``, ``drain``, ``straggler``.
        before: workers that trained before.
        generation: theirs; the change is over with the first step of a later one.
        step: completed steps before it.
        noticed: seconds since the epoch.
        phases: seconds spent in each: detect, fence, plan, form, build, sync.
    """

    reason: str
    before: int
    generation: int
    step: int
    noticed: float
    phases: dict[str, float] = field(default_factory=dict)

    def spend(self, phase: str, seconds: float) -> None:
        self.phases[phase] = self.phases.get(phase, 0.0) + max(0.0, seconds)


class Ledger:
    """The books of a run. Used from the conductor's thread; :attr:`snapshot` may be read from any.

    Args:
        epoch: how often the controller was started; 1 for the first time.
    """

    def __init__(self, folder: RunFolder, config: RunConfig, run_id: str, driver_pid: int, epoch: int) -> None:
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
        self.warnings: tuple[str, ...] = ()
        """What went wrong without ending the run, each once."""
        self._unwritable = False
        self.evaluated: set[int] = set()
        self._about_workers: dict[str, Mapping[str, str]] = {}
        self.known: dict[str, WorkerInfo] = {}
        """Every worker that was ever warm."""
        self.stragglers: dict[str, dict[str, Any]] = {}
        """Workers that are slow now: ``rank``, ``factor``, ``since_step``, ``node``."""
        self.last_save: SaveResult | None = None
        self._config, self._run_id, self._pid, self._epoch = config, run_id, driver_pid, epoch
        self._about = {"model": config.model.factory or config.model.kind, **versions()}
        self._started = time.time()
        self.goodput = Goodput.beginning(self._started)
        self._waiting: deque[Callable[[], None]] = deque()
        self._scribe = Scribe()
        self._filled: dict[str, Filled] = {}
        self._ended: dict[int, float] = {}
        self._losses: dict[int, float] = {}
        self._heldout: dict[int, float] = {}
        self._line: Mapping[str, Any] = {}
        self._record: StepRecord | None = None
        self._state_written = 0.0
        self._executed = 0
        self._sampled: tuple[int, int] | None = None
        self._done = 0
        self._replayed = 0
        self._step_seconds = Histogram()
        self._rescales: dict[tuple[str, str], int] = {}
        self._rescale_seconds = Histogram()
        self._phases: dict[str, float] = {}
        self._failures: dict[str, int] = {}
        self._tally = Tally()
        self._phase_seconds: dict[str, float] = {}
        self._health = dict.fromkeys(HEALTH, 0)
        self.draining = self.pending = self.unprotected = 0
        """Members on nodes that are about to go; checkpoints under way; ranks without a copy on another node."""
        self._loads = Histogram()
        self._read_bytes = self._load_failures = self._load_of = 0
        self._checkpoint: Mapping[str, Any] = {}
        self._interval: dict[str, Any] = {}
        self._checkpoint_bytes = 0
        self._checkpoint_failures = 0
        self._stages = dict.fromkeys(STAGES, Histogram())
        self.snapshot: RunSnapshot
        self.publish({})

    # ------------------------------------------------------------------------------------------------------- what happens

    def event(self, name: str, **about: Any) -> None:
        """Write an event, with the generation and step that it belongs to."""
        record = {**self._stamp(name), **about}
        self._write(lambda: self.folder.append_event(record))

    def _stamp(self, name: str) -> dict[str, Any]:
        generation = self.world.ticket.generation if self.world else 0
        return {"time": time.time(), "event": name, "generation": generation, "step": self.step}

    def begin_from(self, source: Source, done: int) -> None:
        """The run starts from here: the newest checkpoint until there is another. Not of this start's making: it has no time.

        ``done``: steps up to this one were done before, by an earlier start; they count as replayed when they are done again.
        """
        self._done = done
        if source.origin is Origin.CHECKPOINT:
            self._checkpoint = {"path": source.path, "step": source.step}

    def started(self) -> None:
        """The run begins, or (``epoch`` > 1) its controller does, again."""
        if self._epoch == 1:
            self.event("run_started", run_id=self._run_id, workers=self.target, steps=self._config.train.steps, pid=self._pid)
        else:
            self.event("controller_restarted", epoch=self._epoch)

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
        self._filled, self._record = {}, None
        self._tally.opened(world.members)

    def begin_shift(self, reason: str, before: int) -> Shift:
        """The first sign of a change. One that fails on its way is still the same change, now of the worse reason."""
        if self.shift is None:
            now = time.time()
            self.shift = Shift(reason, before, self.world.ticket.generation if self.world else 0, self.step, now)
            self.shift.spend("detect", now - self._ended.get(self.step, now) if reason == "failure" else 0.0)
            self.event("rescale_started", reason=reason, **{"from": before})
        elif reason == "failure":
            self.shift.reason = reason
        if reason == "failure":
            # A change that was asked for begins where the step under way ends: see stepped.
            self.goodput.open(Loss.FAILURE)
        return self.shift

    def waits(self, waiting: bool) -> None:
        """There are too few workers to go on with; or (``False``) not any more."""
        failed = self.shift is None or self.shift.reason == "failure"
        self.goodput.turn(Loss.WAITING if waiting else Loss.FAILURE if failed else Loss.RESCALE, time.time())

    def filled(self, worker: str, item: Filled) -> None:
        """A member has its state."""
        if self.world is None or item.ticket != self.world.ticket:
            return
        news = worker not in self._filled
        self._filled[worker] = item
        if news and item.origin is Origin.MEMORY:
            self._tally.moved(worker, item.phases.get("sync", 0.0))
        # What a restarted controller takes for granted of those that train (no phases) tells nothing of the load.
        told = [one for one in self._filled.values() if one.phases]
        if news and item.origin is Origin.CHECKPOINT and self.all_filled and told and self._load_of != self.world.ticket.generation:
            seconds = max(one.phases.get("sync", 0.0) for one in told)
            about = {"seconds": seconds, "bytes": sum(one.read_bytes for one in told), "generation": self.world.ticket.generation}
            self._loaded(about)
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
        if self.shift is not None and self.shift.generation < world.ticket.generation:
            self.end_shift(item.ended - record.seconds)
        self.step, self._record = record.step, record
        self.goodput.step(item.ended, record.seconds, again=self._was_done(record.step), between=item.between)
        if self.shift is not None:
            self.goodput.open(Loss.FAILURE if self.shift.reason == "failure" else Loss.RESCALE)
        self._ended[record.step] = item.ended
        self._losses[record.step] = record.loss
        if len(self._losses) > 2 * KEPT_TIMES:
            for old in sorted(self._losses)[:KEPT_TIMES]:
                del self._losses[old]
        if len(self._ended) > 2 * KEPT_TIMES:
            for old in sorted(self._ended)[:KEPT_TIMES]:
                del self._ended[old]
        speed = record.tokens / record.seconds if record.seconds > 0 else None
        phases = {**item.usage.phases, **{name: item.between[name] for name in ("checkpoint",) if name in item.between}}
        phases = {name: round(seconds, 6) for name, seconds in phases.items()}
        line = {
            "step": record.step,
            "loss": record.loss,
            "bpb": bits_per_byte(record.loss),
            "tokens": record.step * self._config.tokens_per_step,
            "tokens_per_second": speed,
            "model_flops_utilization": self._tally.utilisation(speed),
            "world": record.world,
            "generation": record.generation,
            "lr": record.lr,
            "grad_norm": record.grad_norm,
            "clipped": record.clipped,
            "skipped": record.skipped,
            "step_seconds": record.seconds,
            "between_seconds": dict(item.between),
            "time": item.ended,
            "phase_seconds": phases,
            "waited_seconds": self._tally.mean_waited(),
            "waited_of_seconds": self._tally.mean_seconds(),
            "memory": dict(enumerate(record.memory)),
            "memory_kinds": self._tally.largest_memory(),
        }
        self._line = line
        self._executed += 1
        self._account(line)
        self._step_seconds = self._step_seconds.observe(record.seconds)
        if self._sampled != (record.generation, record.index):
            self._write(lambda: self.folder.append_samples(record.index, record.generation, record.ids))
        self._write(lambda: self.folder.append_metrics(line))
        return True

    def _was_done(self, step: int) -> bool:
        """Whether the step that has just been done had been done before; counts it, where no rescale of this start does."""
        if step in self._ended:
            return True
        self._replayed += step <= self._done
        return step <= self._done

    def _account(self, line: Mapping[str, Any]) -> None:
        """Count what a step's line tells: now, and again after a restart of the controller."""
        bad = [line.get(key) for key in ("loss", "grad_norm")]
        self._health["nonfinite"] += any(value is None or not math.isfinite(value) for value in bad)
        self._health["clipped"] += bool(line.get("clipped"))
        self._health["skipped"] += bool(line.get("skipped"))
        for phase, seconds in (line.get("phase_seconds") or {}).items():
            self._phase_seconds[phase] = self._phase_seconds.get(phase, 0.0) + float(seconds)

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
        for phase in ("form", "build", "sync"):
            # The members work side by side: the slowest counts.
            shift.spend(phase, max((item.phases.get(phase, 0.0) for item in self._filled.values()), default=0.0))
        pause = max(0.0, resumed - self._ended.get(world.source.step, shift.noticed))
        direction = "shrink" if world.size < shift.before else "grow" if world.size > shift.before else "replace"
        one = next(iter(self._filled.values()), None)
        replayed = max(0, shift.step - world.source.step)
        about = {
            "from": shift.before,
            "to": world.size,
            "direction": direction,
            "reason": shift.reason,
            "source": "peer" if world.source.copies else str(world.source.origin),
            "pause_seconds": pause,
            "phases": shift.phases,
            "steps_replayed": replayed,
            "moved_bytes": one.moved_bytes if one else 0,
            "lower_bound_bytes": one.lower_bound if one else 0,
            "attempt": world.ticket.attempt,
        }
        self._count_rescale(about)
        self.event("rescaled", **about)

    def evaluation(self, item: Evaluated) -> None:
        """A held-out loss, once per step."""
        if item.step not in self.evaluated and self.world is not None and item.ticket == self.world.ticket:
            self.evaluated.add(item.step)
            self._heldout[item.step] = item.loss
            self.event("evaluation", loss=item.loss, bpb=bits_per_byte(item.loss), samples=item.samples, step=item.step)

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

    def saved(self, result: SaveResult) -> None:
        """A checkpoint has ended, well or not."""
        if result.kept is None:
            self._checkpoint_failures += 1
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
        self._kept({**about, "time": time.time()})
        self.event("checkpoint_saved", **about)

    def load_failed(self, commit: str | None, error: str) -> None:
        """A generation could not take up the checkpoint that it was to start from."""
        self._load_failures += 1
        self.event("checkpoint_load_failed", commit=commit, error=error)

    def hang(self, name: str, text: str) -> str | None:
        """Keep the report of a hang; where it is."""
        try:
            return str(self._scribe.do(lambda: self.folder.write_hang(name, text)))
        except OSError as error:
            self._warn(error)
            return None

    def gave_up(self, text: str) -> str | None:
        """Keep what is known of the failures that ended the run; where it is."""
        try:
            return str(self._scribe.do(lambda: self.folder.write_failure(f"step-{self.step}-{self._run_id}", text)))
        except OSError as error:
            self._warn(error)
            return None

    def interval_changed(self, interval: Interval) -> None:
        """``checkpoint.every: auto`` has come to another interval."""
        about = {"seconds": interval.seconds, "by": interval.by, "mtbf_hours": interval.mtbf_s / 3600}
        self._interval = {**about, "stall_seconds": interval.stall_s, "persist_seconds": interval.persist_s, "text": str(interval)}
        self.event("checkpoint_interval", **self._interval)

    @property
    def age_s(self) -> float:
        """Seconds since this start of the run, whichever life of the controller it is."""
        return max(0.0, time.time() - self._started)

    @property
    def failures(self) -> int:
        """Workers that were lost."""
        return sum(self._failures.values())

    def metrics_of(self, step: int) -> dict[str, float]:
        """What is known of the state after ``step`` steps, for its checkpoint: ``loss``, ``heldout_loss`` (of the newest evaluation that
        is not later). Figures that are not finite are left out. Called from the thread that commits."""
        heldout = max((s for s in list(self._heldout) if s <= step), default=None)
        found = {"loss": self._losses.get(step), "heldout_loss": None if heldout is None else self._heldout[heldout]}
        return {name: value for name, value in found.items() if value is not None and math.isfinite(value)}

    @property
    def step_seconds(self) -> float | None:
        """Of the last step."""
        seconds = self._line.get("step_seconds")
        return None if seconds is None else float(seconds)

    @property
    def checkpoint_step(self) -> int | None:
        """Of the newest checkpoint that this start of the run has made, or began from."""
        step = self._checkpoint.get("step")
        return None if step is None else int(step)

    @property
    def checkpoint_path(self) -> str | None:
        path = self._checkpoint.get("path")
        return None if path is None else str(path)

    # ------------------------------------------------------------------------------------------------------------ for others

    def publish(self, workers: Mapping[int, tuple[WorkerInfo | None, int]]) -> None:
        """Make a new snapshot; ``workers``: by rank, who it is and its resident bytes."""
        world, line, elastic = self.world, self._line, self._config.elastic
        if not self.all_filled or self.state in (RunState.CHECKPOINTING, RunState.DONE, RunState.FAILED):
            # That the workers have their state is heard of a moment late: the step that they have begun is not to be taken for lost.
            self.goodput.advance(time.time() - HEARD_S)
        self.snapshot = RunSnapshot(
            run=self._config.run.name,
            state=str(self.state),
            step=self.step,
            steps=self._config.train.steps,
            steps_executed=self._executed,
            tokens=self._executed * self._config.tokens_per_step,
            loss=line.get("loss"),
            bpb=line.get("bpb"),
            tokens_per_second=line.get("tokens_per_second"),
            flops_utilization=line.get("model_flops_utilization"),
            phase_seconds=dict(self._phase_seconds),
            nonfinite_steps=self._health["nonfinite"],
            clipped_steps=self._health["clipped"],
            skipped_steps=self._health["skipped"],
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
            step_seconds=self._step_seconds,
            rescales=dict(self._rescales),
            rescale_seconds=self._rescale_seconds,
            rescale_phase_seconds=dict(self._phases),
            replayed_steps=self._replayed,
            worker_failures=dict(self._failures),
            failures=self._used,
            failures_in_a_row=self._in_a_row,
            memory={rank: memory for rank, (_, memory) in workers.items()},
            **self._paces(),
            **self._tally.figures(),
            workers={rank: self._who(info) for rank, (info, _) in workers.items() if info},
            checkpoint_step=self._checkpoint.get("step"),
            checkpoint_time=self._checkpoint.get("time"),
            checkpoint_path=self._checkpoint.get("path"),
            checkpoint_bytes=self._checkpoint_bytes,
            checkpoint_failures=self._checkpoint_failures,
            checkpoint_read_bytes=self._read_bytes,
            checkpoint_load_failures=self._load_failures,
            checkpoint_stages=dict(self._stages),
            checkpoint_loads=self._loads,
            checkpoints_pending=self.pending,
            checkpoint_stall=self._checkpoint.get("stall_seconds"),
            checkpoint_interval=self._interval.get("seconds"),
            checkpoint_interval_text=self._interval.get("text"),
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
        self._catch_up()
        record = self.record()
        try:
            self._scribe.do(lambda: self.folder.write_state(record))
        except OSError as error:
            self._warn(error)

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
            "checkpoint": self._checkpoint.get("path"),
            "pid": self._pid,
        }

    # --------------------------------------------------------------------------------------------------------------- the past

    def restore(self, world: World | None) -> None:
        """After a restart: take up the books from the folder's lines, and the generation that is going on."""
        events = self.folder.read_events()
        starts = [i for i, e in enumerate(events) if e["event"] == "run_started" and e.get("run_id") == self._run_id]
        if starts:
            self._started = float(events[starts[-1]]["time"])
        for event in events[starts[-1] :] if starts else []:
            match event["event"]:
                case "rescaled":
                    self._count_rescale(event)
                case "worker_started":
                    self.known[str(event["worker"])] = WorkerInfo(**{one.name: event[one.name] for one in fields(WorkerInfo)})
                case "worker_lost":
                    kind = str(event.get("kind"))
                    self._failures[kind] = self._failures.get(kind, 0) + 1
                case "checkpoint_saved":
                    self._kept(event)
                case "checkpoint_loaded":
                    self._loaded(event)
                case "checkpoint_load_failed":
                    self._load_failures += 1
                case "checkpoint_failed":
                    self._checkpoint_failures += 1
                case "straggler":
                    self.stragglers[str(event["worker"])] = {key: event[key] for key in ("rank", "factor", "since_step", "node")}
                case "straggler_over":
                    self.stragglers.pop(str(event["worker"]), None)
                case "checkpoint_interval":
                    self._interval = event
                case "evaluation":
                    self.evaluated.add(int(event["step"]))
                    if event.get("loss") is not None:
                        self._heldout[int(event["step"])] = float(event["loss"])
        last = self.folder.last_samples()
        # Of a step whose metrics had not been written when the controller was killed: it will be told again.
        self._sampled = (int(last["generation"]), int(last["step"])) if last else None
        self._restore_goodput()
        newest: Mapping[str, Any] | None = None
        for line in self.folder.each_metrics():
            if float(line.get("time") or 0.0) < self._started:
                continue
            newest = line
            self._executed += 1
            between = {str(cause): float(seconds) for cause, seconds in (line.get("between_seconds") or {}).items()}
            again = self._was_done(int(line["step"]))
            self.goodput.step(float(line["time"]), float(line.get("step_seconds") or 0.0), again=again, between=between)
            self._step_seconds = self._step_seconds.observe(float(line.get("step_seconds") or 0.0))
            self._ended[int(line["step"])] = float(line["time"])
            self._account(line)
            if line.get("loss") is not None:
                self._losses[int(line["step"])] = float(line["loss"])
        if world is not None:
            self.opened(world)
            if newest is not None and newest["generation"] == world.ticket.generation:
                self._line, self.step = newest, int(newest["step"])

    def _restore_goodput(self) -> None:
        """The accounts as run.json has them: what came after is in the lines."""
        try:
            told = Goodput.from_json((self.folder.read_state() or {})["goodput"])
        except (OSError, KeyError, TypeError, ValueError, AttributeError):
            told = None  # written by nobody yet, or damaged: the time before counts as lost to the start, the steps as they were
        self.goodput = told if told is not None and abs(told.since - self._started) < 60 else Goodput.beginning(self._started)

    def _kept(self, about: Mapping[str, Any]) -> None:
        """A checkpoint was committed: now, or before a restart of the controller."""
        self._checkpoint = about
        self._checkpoint_bytes += int(about.get("bytes") or 0)
        for stage, seconds in (about.get("stages") or {}).items():
            self._stages[stage] = self._stages[stage].observe(float(seconds))

    def _loaded(self, about: Mapping[str, Any]) -> None:
        """A generation has read its checkpoint; likewise."""
        self._loads = self._loads.observe(float(about["seconds"]))
        self._read_bytes += int(about["bytes"])
        self._load_of = int(about["generation"])

    def _count_rescale(self, about: Mapping[str, Any]) -> None:
        key = (str(about["direction"]), str(about["reason"]))
        self._rescales[key] = self._rescales.get(key, 0) + 1
        self._rescale_seconds = self._rescale_seconds.observe(float(about["pause_seconds"]))
        for phase, seconds in about["phases"].items():
            self._phases[phase] = self._phases.get(phase, 0.0) + float(seconds)
        self._replayed += int(about["steps_replayed"])

    # --------------------------------------------------------------------------------------------------------------- writing

    def _write(self, append: Callable[[], None]) -> None:
        self._waiting.append(append)
        self._catch_up()

    def flush(self, wait_s: float) -> None:
        """Have what still waits written, if the disk answers within that time."""
        deadline = time.monotonic() + wait_s
        while self._waiting and (left := deadline - time.monotonic()) > 0:
            self._catch_up(left)
            time.sleep(0.01)

    def _catch_up(self, wait_s: float | None = None) -> None:
        while self._waiting:
            try:
                self._scribe.do(self._waiting[0], wait_s)
            except OSError as error:
                self._warn(error)
                if len(self._waiting) > MOST_WAITING:
                    self._waiting.popleft()
                return
            self._waiting.popleft()

    def warn(self, text: str) -> None:
        """Tell of something that does not stop the training: in the log, in run.json, as an event."""
        _log.warning("%s", text)
        self.warnings = (*self.warnings, text)
        self.event("warning", text=text)

    def _warn(self, error: OSError) -> None:
        if not self._unwritable:
            self._unwritable = True
            text = f"{self.folder.path}: can't be written ({error.strerror or error}); training goes on, lines wait in memory"
            self.warnings = (*self.warnings, text)
            # Behind what waits already: whoever reads the lines later sees when it began.
            record = {**self._stamp("warning"), "text": text}
            self._waiting.append(lambda: self.folder.append_event(record))
            _log.warning("%s", text)


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
