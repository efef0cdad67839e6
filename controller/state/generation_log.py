"""The newest generation as its members report it, and the events that follow from their reports."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict

from vescale_ray.config import RunConfig
from vescale_ray.controller.protocol import World
from vescale_ray.controller.state.run_log import RunLog
from vescale_ray.controller.statistics.step_stats import line_of
from vescale_ray.controller.statistics.worker_stats import WorkerStats
from vescale_ray.data.loss_units import bits_per_byte, perplexity
from vescale_ray.workers.messages import Evaluated, Filled, Origin, Stepped, StepRecord, WorkerInfo


class GenerationLog:
    """Records each fact about a generation once, though every member reports it. Used from the controller's thread.

    Attributes:
        world: the generation; None before the first.
        workers: statistics that the members have reported of themselves.
        newest: record of its newest step.
    """

    def __init__(self, log: RunLog, config: RunConfig, bytes_per_token: float | None = None) -> None:
        self._log, self._tokens_per_step, self._bytes_per_token = log, config.tokens_per_step, bytes_per_token
        self.world: World | None = None
        self.workers = WorkerStats()
        self.newest: StepRecord | None = None
        self._filled: dict[str, Filled] = {}
        self._unfilled: set[str] = set()
        self._next: tuple[str, int] | None = None
        """Reason and size of a rescale that was requested during another one. It begins with the first step after that one."""

    def open(self, world: World, phases: Mapping[str, float], numbered_by: str) -> None:
        """Record that a generation is about to form. Its state is that of ``world.source.step``.

        Args:
            phases: seconds that the rescale has spent on the way here.
            numbered_by: what its ranks were numbered by (``run_stats.RunStats``).
        """
        self.adopt(world)
        about = {"workers": list(world.members), "source": str(world.source.origin), "attempt": world.ticket.attempt}
        more = {"phases": dict(phases), "numbered_by": numbered_by}
        self._log.record("generation", generation=world.ticket.generation, step=world.source.step, **about, **more)

    def adopt(self, world: World) -> None:
        """Go on with a generation that was recorded before."""
        self.world, self.newest, self._filled, self._next = world, None, {}, None
        self._unfilled = set(world.members)
        self.workers.opened(world.members)

    @property
    def all_filled(self) -> bool:
        """True if every member of the generation has its state."""
        return self.world is not None and not self._unfilled

    def worker_started(self, info: WorkerInfo) -> None:
        """Record the start of a worker that is ready for orders, once."""
        if info.worker not in self._log.stats.workers:
            self._log.record("worker_started", **asdict(info))

    def filled(self, worker: str, item: Filled) -> None:
        """Record that a member has its state, and from where it came."""
        world = self.world
        if world is None or item.ticket != world.ticket:
            return
        news = worker not in self._filled
        if not news and not item.phases:
            return  # a restarted controller infers less than the worker may have reported
        self._filled[worker] = item
        self._unfilled.discard(worker)
        if news and item.origin is Origin.MEMORY:
            self.workers.moved(worker, item.phases.get("sync", 0.0))
        known = self._log.stats.checkpoints.loaded_by == world.ticket.generation
        if not (news and item.origin is Origin.CHECKPOINT and self.all_filled) or known:
            return
        if told := [one for one in self._filled.values() if one.phases]:
            seconds = max(one.phases.get("sync", 0.0) for one in told)
            about = {"bytes": sum(one.read_bytes for one in told), "generation": world.ticket.generation}
            self._log.record("checkpoint_loaded", seconds=seconds, **about, commit=world.source.commit)

    def stepped(self, worker: str, item: Stepped) -> bool:
        """Record a step that a member has done, if it is new, and return whether it was.

        A member reports its steps in order. If steps are missing, an earlier controller had received them and was killed before it wrote
        them.
        """
        record, world, stats = item.record, self.world, self._log.stats
        if world is None or item.ticket != world.ticket:
            return False
        self.workers.stepped(worker, record.seconds, item.usage)
        if record.step <= stats.step:
            return False
        # Training goes on when the last member does. In a generation's first step, the others wait for it.
        seconds = record.seconds if stats.has_stepped else record.seconds - record.alone_seconds
        if stats.rescale is not None and stats.rescale.generation < world.ticket.generation:
            self.end_rescale(item.ended - seconds)
        self.newest = record
        following, self._next = self._next, None
        if following is not None:
            self._start_rescale(*following, step=record.step)
        line = line_of(item, seconds, self._tokens_per_step, self._bytes_per_token, self.workers)
        if record.index in stats.evaluations:
            line["evaluation"] = stats.evaluations[record.index]
        self._log.record_step(line, record)
        return True

    def evaluated(self, item: Evaluated) -> None:
        """Record the losses of an evaluation, once for each step."""
        if item.step not in self._log.stats.evaluations and self.world is not None and item.ticket == self.world.ticket:
            figures = {
                "loss": item.loss,
                "perplexity": perplexity(item.loss),
                "bpb": bits_per_byte(item.loss, self._bytes_per_token),
                "samples": item.samples,
            }
            sets = {
                name: {"loss": loss, "perplexity": perplexity(loss), "bpb": bpb, "samples": samples}
                for name, (loss, samples, bpb) in item.sets.items()
            }
            self._log.record("evaluation", **figures, **({"sets": sets} if sets else {}), step=item.step)

    def begin_rescale(self, reason: str, before: int) -> None:
        """Record the first sign of a rescale. If a rescale under way fails, it stays the same one, and its reason becomes the failure."""
        stats = self._log.stats
        if stats.rescale is None:
            self._start_rescale(reason, before, step=stats.step)
        elif reason != "failure" and self.world is not None and stats.rescale.generation < self.world.ticket.generation:
            self._next = reason, before

    def _start_rescale(self, reason: str, before: int, step: int) -> None:
        ended = self._log.stats.ended(step) if reason == "failure" else None
        detect = time.time() - ended if ended is not None else 0.0
        self._log.record("rescale_started", reason=reason, **{"from": before}, step=step, phases={"detect": max(0.0, detect)})

    def end_rescale(self, resumed: float, target: int = 0) -> None:
        """Record the end of the rescale: training has gone on at ``resumed``. If the generation is still the one before the rescale, the
        run ended first. Then the rescale, to ``target`` workers, is abandoned.

        The pause counts from the end of the step that training went back to, so that it includes replayed steps. If that time is unknown,
        as for a fresh state, the pause counts from the end of the last completed step.
        """
        stats, world = self._log.stats, self.world
        rescale = stats.rescale
        if rescale is None or world is None:
            return
        if rescale.generation == world.ticket.generation:
            self._log.record("rescale_abandoned", **{"from": rescale.before, "to": target, "error": "the run was over before it"})
            return
        before = (stats.ended(world.source.step), stats.steps.last.get("time"), rescale.noticed)
        ended = next(float(end) for end in before if end is not None)
        about = rescale.outcome(world, self._filled.values(), max(0.0, resumed - ended))
        if about["moved_bytes"]:
            about["numbered_by"] = stats.numbered_by
        self._log.record("rescaled", **about)
