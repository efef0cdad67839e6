"""A run as its controller records it, without workers: the log, the newest generation and the publisher, also after a restart."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.controller.runs import tiny
from vescale_ray.config import RunConfig
from vescale_ray.controller.checkpointing.committer import SaveResult
from vescale_ray.controller.checkpointing.coordinator import Unanswered
from vescale_ray.controller.failures.budget import Budget, Limits
from vescale_ray.controller.protocol import RunState, StateSource, World
from vescale_ray.controller.state.durable_state import DurableState, LaunchedGeneration
from vescale_ray.controller.state.generation_log import GenerationLog
from vescale_ray.controller.state.loggers import Loggers
from vescale_ray.controller.state.publisher import Observed, Publisher
from vescale_ray.controller.state.run_lifecycle import begin, enter, evaluated_before, take_up
from vescale_ray.controller.state.run_log import RunLog
from vescale_ray.controller.state.snapshot import Snapshot
from vescale_ray.controller.statistics.checkpoint_stats import saved_event
from vescale_ray.controller.statistics.run_stats import RunStats
from vescale_ray.runfolder import RunFolder
from vescale_ray.workers.messages import Origin, Stepped, StepRecord, Ticket

FRESH = StateSource(Origin.FRESH, 0)


class Recorded:
    """The records of one life of a controller. The first member reports each step."""

    def __init__(self, config: RunConfig, run_id: str = "r1", source: StateSource = FRESH, steps_before: int = 0, epoch: int = 1) -> None:
        self.config, self.about = config, (run_id, source, steps_before, epoch)
        self.folder = RunFolder(config.run_folder).create()
        loggers = Loggers(config, self.folder.path, run_id, steps_before)
        before = evaluated_before(self.folder, source)
        self.log = RunLog(self.folder, run_id, config.train.steps, source, steps_before, loggers, before)
        self.generation = GenerationLog(self.log, config, bytes_per_token=1.0)
        self.seen = Observed(config.elastic.workers, Budget(Limits.of(config.elastic)))
        self.publisher = Publisher(self.log, config, 1, epoch, self.seen)

    @property
    def stats(self) -> RunStats:
        return self.log.stats

    @property
    def snapshot(self) -> Snapshot:
        """The snapshot as of now."""
        self.generation.workers._due = 0.0
        self.publisher.publish(Observed(self.seen.target, self.seen.budget, figures=self.generation.workers.figures(), newest=self.newest))
        return self.publisher.snapshot

    @property
    def newest(self) -> Any:
        return self.generation.newest

    def state_of(self, world: World | None) -> DurableState:
        run_id, _, steps_before, epoch = self.about
        launched = None if world is None else LaunchedGeneration.of(world)
        return DurableState(run_id, 99, launched, target=self.config.elastic.workers, steps_before=steps_before, epoch=epoch)

    def started(self) -> Recorded:
        begin(self.log, self.config, self.state_of(None), 1)
        return self

    def open(self, world: World, numbered_by: str = "layouts") -> None:
        self.generation.open(world, {}, numbered_by)

    def stepped(self, item: Stepped) -> bool:
        world = self.generation.world
        return self.generation.stepped(world.members[0] if world else "?", item)

    def enter(self, state: RunState) -> None:
        enter(self.log, self.publisher, state)

    def write_record(self) -> None:
        self.publisher.publish()
        self.publisher.write_record(now=True)

    def restarted(self, world: World | None) -> Recorded:
        """The next life of the controller, which adopts ``world``."""
        run_id, source, steps_before, epoch = self.about
        again = Recorded(self.config, run_id, source, steps_before, epoch + 1)
        take_up(again.log, again.config, again.state_of(world), 1)
        if world is not None:
            again.generation.adopt(world)
        return again


def recorded(folder: Path, name: str = "books", **about: Any) -> Recorded:
    return Recorded(tiny(folder, name), **about)


def stepped(world: World, index: int, ended: float, seconds: float = 0.5, alone: float = 0.0) -> Stepped:
    ids = tuple(range(index * 12, index * 12 + 12))
    generation = world.ticket.generation
    about = (world.size, generation, (1, 2))
    record = StepRecord(index, 2.0 - index / 100, 192, ids, 1.0, 1e-3, seconds, 0, *about, alone_seconds=alone)
    return Stepped(world.ticket, record, ended)


def generation(number: int, step: int, *members: str, origin: Origin = Origin.MEMORY, lender: Any = None) -> World:
    return World(Ticket(number, 1), members, StateSource(origin, step, lender=lender))


def saved(run: Recorded, result: SaveResult) -> None:
    name, about = saved_event(result, run.stats.ended(result.step))
    run.log.record(name, **about)


def answered(ask: Callable[[], Any], each_round: Callable[[], None] = lambda: None) -> Any:
    """The answer to a question that is asked again in each round of a loop."""
    while True:
        try:
            return ask()
        except Unanswered:
            each_round()
            time.sleep(0.02)
