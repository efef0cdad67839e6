"""The control loop: the only loop of a run's controller.

Each round observes (:meth:`ControlLoop.observe`), and then follows the transitions between states (``states``)::

    Gathering -> Running -> Recovering -> Locating -> Running -> ..
    Recovering -> Waiting -> Recovering              too few workers
    Recovering -> Checkpointing -> Concluding -> Finished
    Adopting -> Running                              a restarted controller
    Running -> Partitioned -> Recovering             a collective failed, but all members live
    Locating -> AwaitingStorage -> Recovering        only checkpoints have the state, and the storage is out of reach

A transition (``transitions``) takes the state and the observations, and returns the next state and actions. It changes nothing itself and
waits for nothing: a state that waits for something stays until a later round. The executor performs the actions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from vescale_ray.controller import states
from vescale_ray.controller.actions import Question
from vescale_ray.controller.commands import Commands
from vescale_ray.controller.executor import Executor
from vescale_ray.controller.observations import Observations
from vescale_ray.controller.protocol import Outcome
from vescale_ray.controller.states import State, Step
from vescale_ray.controller.transitions.generation import Generations
from vescale_ray.controller.transitions.recovery import Recovery
from vescale_ray.controller.transitions.run_begin import RunBegin
from vescale_ray.controller.transitions.run_end import RunEnd
from vescale_ray.controller.worker_group.worker_news import Heard, Lost, Ready, Told
from vescale_ray.workers.messages import (
    Damaged,
    Evaluated,
    Filled,
    Happened,
    Noticed,
    Outlined,
    SavedShard,
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

    Attributes:
        state: the present state.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        spec, config, scaling, end = executor.spec, executor.config, executor.scaling, RunEnd(executor.config)
        generations = Generations(spec, config, executor.detector, scaling)
        begin = RunBegin(spec, config, scaling, generations, end)
        recovery = Recovery(spec, config, scaling, executor.layouts, generations, end)
        self.state: State = states.Starting()
        self._transitions: Mapping[type, Callable[[Any, Observations], Step]] = {
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
        return self._executor.commands

    def run(self) -> Outcome:
        """Run the loop to the end of the run. Raises ``SupervisorLost``; any other error is a bug."""
        try:
            self.follow()
            self._executor.begin()
            while not isinstance(self.state, states.Finished):
                self.step()
            return self.state.outcome
        finally:
            self._executor.close()

    def step(self) -> None:
        """Run one round, of at most :data:`TICK_S` seconds unless a call takes longer."""
        self.observe()
        self.follow()

    def transition(self, state: State, seen: Observations) -> Step:
        """Return the state that follows ``state``, and the actions on the way. Changes nothing but what the policies remember."""
        return self._transitions[type(state)](state, seen)

    def follow(self) -> None:
        """Follow transitions until a state stays. A state that waits for news stays at least until the next round. Once a question has an
        answer, the transition that has asked it is repeated."""
        now, answers = time.monotonic(), dict[Question, Any]()
        while True:
            before = self.state
            self.state, actions = self.transition(before, self._executor.observations(now, answers))
            found = self._executor.perform(actions)
            if type(self.state) is not type(before):
                if not isinstance(self.state, _IMMEDIATE):
                    return
                now, answers = time.monotonic(), {}
            elif found:
                answers = {**answers, **found}
            else:
                return

    # ------------------------------------------------------------------------------------------------------- observations

    def observe(self) -> None:
        """Receive the workers' news, record it, and carry out commands."""
        to = self._executor
        for one in to.worker_group.pump(TICK_S):
            match one:
                case Ready(info):
                    to.generation.worker_started(info)
                    to.scaling.forget_hires()
                case Heard(report):
                    to.detector.hangs.heard(report, time.monotonic())
                    self._note_report(report)
                case Told(Outlined(outline)):
                    to.layouts.take(outline)
                case Lost():
                    self._lose(one)
        to.perform([to.detector.silent(to.worker_group)])
        to.collect()
        to.commands.carry_out()
        if isinstance(self.state, states.Adopting) or (isinstance(self.state, states.Running) and to.generation.all_filled):
            to.plan_ahead(self.state.world)
        to.publisher.publish(to.figures())
        to.publisher.write_record()

    def _lose(self, loss: Lost) -> None:
        to, world = self._executor, self._executor.generation.world
        loss = to.detector.lost(loss, to.nodes.draining)
        info, reason = loss.info, loss.reason
        kind, at = "killed" if "killed:" in reason else "died", {"pid": info and info.pid, "node": info and info.node}
        to.log.record("worker_lost", worker=loss.worker, reason=reason, kind=kind, cause=str(loss.cause), **at)
        joined = loss.worker in to.durable.state.leavers or (world is not None and loss.worker in world.members)
        to.scaling.lost(loss.worker, reason, warm=info is not None, joined=joined)

    def _note_report(self, report: WorkerReport) -> None:
        to, generation = self._executor, self._executor.generation
        generation.workers.heard(report.worker, time.time(), report.memory)
        for _, item in report.items:
            match item:
                case Stepped():
                    record = item.record
                    to.detector.hangs.stepped(item.ticket, record.step, record.seconds, record.alone_seconds)
                    if generation.stepped(report.worker, item):
                        to.progressed(record.step)
                        to.perform(to.scaling.stepped(record, to.log.stats))
                case Filled():
                    generation.filled(report.worker, item)
                case Evaluated():
                    generation.evaluated(item)
                case SavedShard():
                    to.committer.take(item)
                case Damaged():
                    to.coordinator.damaged(item.attempt)
                    about = {"attempt": item.attempt, "step": item.step, "worker": report.worker, "problem": item.problem}
                    to.log.record("checkpoint_damaged", **about)
                case Noticed():
                    if item.text not in to.log.journal.warnings:
                        to.log.journal.warn(item.text)
                case Happened():
                    to.log.record(item.event, **item.about)
        world = generation.world
        if (
            world is not None
            and report.ticket == world.ticket == to.detector.inherited
            and report.phase in (WorkerPhase.TRAINING, WorkerPhase.SAVING)
        ):
            # The member has its state. It may have reported that to the previous controller.
            generation.filled(report.worker, Filled(world.ticket, world.source.step, world.source.origin, {}))
