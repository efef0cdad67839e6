"""The control loop: the only loop of a run's controller.

Each round observes (:meth:`ControlLoop.observe`), and then follows the transitions between states (``states``)::

    Gathering -> Running -> Recovering -> Locating -> Running -> ..
    Recovering -> Waiting -> Recovering              too few workers
    Recovering -> Checkpointing -> Concluding -> Finished
    Adopting -> Running                              a restarted controller
    Running -> Partitioned -> Recovering             a collective failed, but all members live
    Locating -> AwaitingStorage -> Recovering        only checkpoints have the state, and the storage is out of reach

No transition blocks: a state that waits for something stays until a later round. So the loop handles commands, losses and checkpoints alike
in every state. ``policy.after_generation`` decides what follows a generation. ``scaling`` hires and dismisses workers while one runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from vescale_ray.config import RunConfig
from vescale_ray.controller import states
from vescale_ray.controller.checkpointing.committer import Committer
from vescale_ray.controller.commands import Commands
from vescale_ray.controller.parts import ControllerParts
from vescale_ray.controller.protocol import Outcome, RunSpec
from vescale_ray.controller.state.durable_state import StateWriter
from vescale_ray.controller.state.publisher import Observed, Publisher
from vescale_ray.controller.state.run_log import RunLog
from vescale_ray.controller.states import State
from vescale_ray.controller.transitions.generation import Generations
from vescale_ray.controller.transitions.recovery import Recovery
from vescale_ray.controller.transitions.run_begin import RunBegin
from vescale_ray.controller.transitions.run_end import RunEnd
from vescale_ray.controller.worker_group.worker_group import WorkerGroup
from vescale_ray.controller.worker_group.worker_news import Heard, Lost, Ready, Told
from vescale_ray.workers.messages import (
    Damaged,
    Evaluated,
    Filled,
    Noticed,
    Outlined,
    SavedShard,
    Skipped,
    Stepped,
    WorkerPhase,
    WorkerReport,
)

TICK_S = 0.1
"""Longest wait for news in one round."""
_IMMEDIATE = (
    states.Gathering,
    states.Partitioned,
    states.Recovering,
    states.Locating,
    states.Checkpointing,
    states.Concluding,
)
"""States whose first transition needs no news."""


class ControlLoop:
    """One run, in one thread. Other threads hand commands to :attr:`commands`.

    Args:
        spec: the driver's order.
        durable: the state that an earlier controller process left, and that the next one gets.
        publisher: receives the observations of each round.

    Attributes:
        state: the present state.
    """

    def __init__(
        self,
        spec: RunSpec,
        config: RunConfig,
        worker_group: WorkerGroup,
        log: RunLog,
        publisher: Publisher,
        committer: Committer,
        durable: StateWriter,
    ) -> None:
        self._publisher = publisher
        self._parts = parts = ControllerParts(spec, config, worker_group, log, publisher, committer, durable)
        end, generations = RunEnd(parts), Generations(parts)
        begin, recovery = RunBegin(parts, generations, end), Recovery(parts, generations, end)
        self.state: State = states.Starting()
        self._transitions: Mapping[type, Callable[[Any], State]] = {
            states.Starting: begin.starting,
            states.Gathering: begin.gathering,
            states.Adopting: begin.adopting,
            states.Running: generations.running,
            states.Partitioned: generations.partitioned,
            states.Recovering: recovery.recovering,
            states.Locating: recovery.locating,
            states.AwaitingStorage: recovery.awaiting_storage,
            states.Waiting: recovery.waiting,
            states.Checkpointing: end.checkpointing,
            states.Concluding: end.concluding,
        }

    @property
    def commands(self) -> Commands:
        return self._parts.commands

    def run(self) -> Outcome:
        """Run the loop to the end of the run. Raises ``SupervisorLost``; any other error is a bug."""
        try:
            self._follow()
            while not isinstance(self.state, states.Finished):
                self.step()
            return self.state.outcome
        finally:
            self._parts.commands.close()
            self._parts.coordinator.layouts.close()

    def step(self) -> None:
        """Run one round, of at most :data:`TICK_S` seconds unless a call takes longer."""
        self.observe()
        self._follow()

    def _follow(self) -> None:
        """Follow transitions until a state stays. A state that waits for news stays at least until the next round."""
        while True:
            before, self.state = self.state, self._transitions[type(self.state)](self.state)
            if type(self.state) is type(before) or not isinstance(self.state, _IMMEDIATE):
                return

    # ------------------------------------------------------------------------------------------------------- observations

    def observe(self) -> None:
        """Receive the workers' news, record it, and carry out commands."""
        for one in self._parts.worker_group.pump(TICK_S):
            match one:
                case Ready(info):
                    self._parts.generation.worker_started(info)
                    self._parts.scaling.hire_failures.clear()
                case Heard(report):
                    self._parts.detector.heard(report)
                    self._hear(report)
                case Told(Outlined(outline)):
                    self._parts.coordinator.layouts.take(outline)
                case Lost():
                    self._lose(one)
        self._parts.detector.end_mute()
        self._parts.coordinator.collect()
        self._parts.commands.heed()
        self._publisher.publish(self._observed())
        self._publisher.write_record()

    def _lose(self, loss: Lost) -> None:
        loss, world = self._parts.detector.lost(loss), self._parts.generation.world
        info, reason = loss.info, loss.reason
        kind, at = "killed" if "killed:" in reason else "died", {"pid": info and info.pid, "node": info and info.node}
        self._parts.log.record("worker_lost", worker=loss.worker, reason=reason, kind=kind, cause=str(loss.cause), **at)
        member = world is not None and loss.worker in world.members
        self._parts.scaling.lost(loss.worker, reason, warm=info is not None, member=member)

    def _hear(self, report: WorkerReport) -> None:
        generation = self._parts.generation
        generation.workers.heard(report.worker, time.time(), report.memory)
        for _, item in report.items:
            match item:
                case Stepped():
                    self._parts.detector.stepped(item)
                    if generation.stepped(report.worker, item):
                        self._parts.account.progressed(item.record.step)
                        self._parts.scaling.stepped(item.record)
                case Filled():
                    generation.filled(report.worker, item)
                case Evaluated():
                    generation.evaluated(item)
                case SavedShard():
                    self._parts.committer.heed(item)
                case Damaged():
                    self._parts.coordinator.damaged(item.attempt)
                    about = {"attempt": item.attempt, "step": item.step, "worker": report.worker, "problem": item.problem}
                    self._parts.log.record("checkpoint_damaged", **about)
                case Noticed():
                    if item.text not in self._parts.log.journal.warnings:
                        self._parts.log.journal.warn(item.text)
                case Skipped():
                    self._parts.log.record("checkpoint_skipped", step=item.step, reason="some rank still writes the ones before")
        world = generation.world
        if (
            world is not None
            and report.ticket == world.ticket == self._parts.detector.inherited
            and report.phase in (WorkerPhase.TRAINING, WorkerPhase.SAVING)
        ):
            # The member has its state. It may have reported that to the previous controller.
            generation.filled(report.worker, Filled(world.ticket, world.source.step, world.source.origin, {}))

    def _observed(self) -> Observed:
        """The observations of this round, without the run's statistics."""
        return Observed(
            target=self._parts.commands.target,
            budget=self._parts.account.budget,
            spares=self._parts.scaling.spares,
            places_wanted=self._parts.scaling.places_wanted,
            draining=len(self._parts.scaling.leaving(self._parts.log.stats.members)),
            saves_pending=self._parts.committer.pending,
            figures=self._parts.generation.workers.figures(),
            newest=self._parts.generation.newest,
        )
