"""The executor of the control loop: performs the actions of transitions, and collects what they observe.

It owns the parts of a running controller. Transitions see none of them.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from vescale_ray.config import RunConfig
from vescale_ray.controller import actions
from vescale_ray.controller.actions import Action, Question
from vescale_ray.controller.bounded_io import begun
from vescale_ray.controller.checkpointing.cadence import Cadence
from vescale_ray.controller.checkpointing.committer import Committer
from vescale_ray.controller.checkpointing.coordinator import CheckpointCoordinator, Unanswered
from vescale_ray.controller.commands import Commands
from vescale_ray.controller.failures.budget import Budget
from vescale_ray.controller.failures.connectivity import TRY_S, Connectivity, Probe
from vescale_ray.controller.failures.evidence import Evidence
from vescale_ray.controller.failures.failure_detector import FailureDetector
from vescale_ray.controller.failures.hang_report import end_hung
from vescale_ray.controller.observations import Observations
from vescale_ray.controller.protocol import Event, RunSpec, World, check_transition
from vescale_ray.controller.scaling.nodes import Nodes
from vescale_ray.controller.scaling.scaling import Scaling
from vescale_ray.controller.state.durable_state import LaunchedGeneration
from vescale_ray.controller.state.generation_log import GenerationLog
from vescale_ray.controller.state.publisher import Observed, Publisher
from vescale_ray.controller.state.run_lifecycle import budget_of, enter
from vescale_ray.controller.state.run_log import RunLog
from vescale_ray.controller.state.state_store import StateWriter
from vescale_ray.controller.transitions.launch import orders_of
from vescale_ray.controller.worker_group.ray_answers import Reaching
from vescale_ray.controller.worker_group.worker_group import WorkerGroup
from vescale_ray.workers.resharding.shard_layouts import Layouts

AHEAD = 4
"""Layouts are planned for up to this many workers more or fewer than there are."""


class Executor:
    """The parts of one controller. Performs actions on them, and collects their news.

    Args:
        spec: the driver's order.
        publisher: receives the figures of each round.
        durable: the state that an earlier controller process left, and that the next one gets.
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
        self.spec, self.config, self.worker_group, self.log = spec, config, worker_group, log
        self.publisher, self.committer, self.durable = publisher, committer, durable
        self.generation = GenerationLog(log, config, spec.bytes_per_token)
        if durable.state.generation is not None:
            self.generation.adopt(durable.state.generation.world())
        self.spend(budget_of(config, durable.state, log.stats.step))
        # If the budget was spent before this process began, progress in it does not refill the budget for the next one.
        self.given_up = self.budget.verdict if self.budget.controllers else None
        self.commands = Commands(spec, config, worker_group, log, durable)
        if self.given_up is not None:
            self.commands.end("it is given up", durable=False)
        self.nodes, self.layouts = Nodes(config.resources_per_worker if config.watches_room else None), Layouts(config.max_workers)
        self.evidence, self.connectivity = Evidence(), Connectivity(config.elastic)
        cadence = Cadence(config.checkpoint, time.monotonic(), max(0.0, time.time() - log.stats.started))
        self.detector = FailureDetector(config, spec.bounds, self.connectivity)
        self.scaling = Scaling(spec, config, self.connectivity, cadence, self.layouts)
        about = (worker_group, log, self.generation, committer, durable, spec.bounds.save, cadence, spec.oldest)
        self.coordinator = CheckpointCoordinator(config.checkpoint_root, spec.run_id, *about)
        self._probes: dict[Probe, Reaching] = {}

    def begin(self) -> None:
        """Start the threads and requests that run beside the control loop."""
        begun(import_heavy)
        self.nodes.start()
        if self.durable.state.generation is None:
            self.worker_group.prepare_store()

    def close(self) -> None:
        """End the threads and requests that run beside the control loop."""
        self.commands.close()
        self.layouts.close()

    # ------------------------------------------------------------------------------------------------------- observations

    def observations(self, now: float, answers: dict[Question, Any]) -> Observations:
        """Return the world as a transition sees it, at the time ``now``."""
        return Observations(
            now=now,
            clock=self.worker_group.clock(),
            workers=self.worker_group,
            stats=self.log.stats,
            durable=self.durable.state,
            budget=self.budget,
            stop=self.commands.stop,
            given_up=self.given_up,
            world=self.generation.world,
            filled=self.generation.all_filled,
            inherited=self.detector.inherited,
            losses=self.detector.losses,
            draining=self.nodes.draining,
            avoided=self.nodes.avoided,
            free=self.nodes.free,
            saving=self.committer.busy,
            answers=answers,
        )

    def figures(self) -> Observed:
        """Return the observations that the publisher sees."""
        leaving = self.observations(0.0, {}).leaving(self.log.stats.members)
        return Observed(
            target=self.commands.target,
            budget=self.budget,
            spares=self.scaling.spares,
            places_wanted=self.scaling.places_wanted,
            draining=len(leaving),
            saves_pending=self.committer.pending,
            figures=self.generation.workers.figures(),
            newest=self.generation.newest,
        )

    def collect(self) -> None:
        """Record checkpoints and connection probes that have ended since the last round."""
        self.coordinator.collect()
        for probe, asked in tuple(self._probes.items()):
            if (answers := asked.unreached()) is not None:
                del self._probes[probe]
                self.connectivity.answered(probe, answers)

    def spend(self, budget: Budget) -> None:
        """Replace the failure budget. The next write of the durable state keeps it."""
        self.budget = budget
        self.durable.note(
            highest_step=budget.high,
            crashes=budget.crashes,
            node_losses=budget.nodes,
            controller_restarts=budget.controllers,
            failures={str(cause): count for cause, count in budget.total.items()},
        )

    def progressed(self, step: int) -> None:
        """Note that ``step`` is complete. This ends the streaks of failures, unless the run is given up."""
        progressed = self.budget.progressed(step)
        self.spend(replace(self.budget, high=progressed.high) if self.given_up else progressed)

    def plan_ahead(self, world: World) -> None:
        """Plan the layouts that the run may need next: of the target, and after the loss or gain of a few workers. If their outline is
        unknown, ask the members for it."""
        size, grid = world.size, self.config.grid
        if self.layouts.told:
            near = (size + step * sign for step in range(1, AHEAD + 1) for sign in (-1, 1) if size + step * sign > 0)
            self.layouts.ahead(grid(workers).shards for workers in (size, self.commands.target, *near))
        else:
            self.worker_group.ask_outline(world.members)

    # ------------------------------------------------------------------------------------------------------------ actions

    def perform(self, actions: Iterable[Action]) -> dict[Question, Any]:
        """Perform the actions, and return the answers to the questions among them. A question without an answer is asked again in the next
        round."""
        answers: dict[Question, Any] = {}
        for action in actions:
            if not isinstance(action, Question):
                self._do(action)
                continue
            try:
                answers[action] = self.answer(action)
            except Unanswered:
                pass
        return answers

    def answer(self, question: Question) -> Any:
        """Return the answer to a question. Raises ``Unanswered`` if there is none yet."""
        match question:
            case actions.AskStarved(workers):
                excused = self.worker_group.starved(workers)
                for worker, seconds in excused.items():
                    self.detector.hangs.starved(worker, seconds)
                return {**dict.fromkeys(workers, 0.0), **excused}
            case actions.SaveParked(workers, only_newer):
                return self.coordinator.save(workers, only_newer=only_newer)
            case actions.FindCheckpoint(None):
                return self.coordinator.newest()
            case actions.FindCheckpoint(tuple() as holders):
                try:
                    return self.coordinator.newer(holders)
                except OSError as problem:
                    return problem
            case actions.WriteEvidence():
                return self.evidence.write(self.worker_group, self.log)

    def _do(self, action: Action) -> None:
        workers, stats = self.worker_group, self.log.stats
        match action:
            case actions.Hire(avoid):
                workers.hire(avoid)
            case actions.RequestPlaces(None):
                workers.cancel_requests()
            case actions.RequestPlaces(int() as count, avoid):
                workers.request_places(count, avoid)
            case actions.Dismiss(worker, tell):
                info = workers.info(worker)
                workers.dismiss(worker)
                if tell:
                    self.log.record("worker_left", worker=worker, pid=info.pid if info else None)
            case actions.End(reasons, None):
                workers.kill(reasons)
            case actions.End(hung, World() as world, cut):
                self.evidence.hung(end_hung(workers, self.log, world, hung, cut))
            case actions.Fence(fenced, ticket):
                workers.fence(fenced, ticket)
            case actions.Ask(world, flags, then):
                if workers.ask(world.members, world.ticket, flags):
                    self.scaling.taken(action)
                    self.perform(then)
            case Probe(tries):
                self._probes[action] = workers.ask_reachability(tries, TRY_S)
            case actions.Launch():
                self._launch(action)
            case actions.TakeOver(world):
                if world is not None:
                    self.detector.adopt(world, stats.steps.last_seconds, stats.steps.paces)
                    # Each worker sends its last vote again. Attempts of older generations were given up.
                    self.committer.fence(world.ticket.generation)
                workers.adopt(stats.workers)
            case Event(name, about):
                self.log.record(name, **about)
            case actions.Enter(state):
                if state is not stats.state:
                    enter(self.log, self.publisher, check_transition(stats.state, state))
            case actions.BeginRescale(reason, before):
                self.generation.begin_rescale(reason, before)
            case actions.EndRescale():
                self.generation.end_rescale(time.time(), self.commands.target)
            case actions.Note(fields, write):
                self.durable.update(**fields) if write else self.durable.note(**fields)
            case actions.Spend(budget):
                self.spend(budget)
            case actions.Conclude(world, ending, failed, damaged):
                self.coordinator.abandon()
                if failed:
                    self.evidence.failed(world, ending, self.log)
                if damaged is not None:
                    self.coordinator.mark_damaged(damaged)
            case actions.ExcludeNode(node):
                self.nodes.exclude(node)
            case _:
                raise AssertionError(f"no such action: {action}")

    def _launch(self, launch: actions.Launch) -> None:
        began, world, workers = time.monotonic(), launch.world, self.worker_group
        self.coordinator.abandon("the next generation began before it was written")
        self.committer.fence(world.ticket.generation)
        self.detector.hangs.begin(world.ticket, world.size)
        self.durable.note(last_number=world.ticket.generation, generation=LaunchedGeneration.of(world))
        self.durable.write()
        orders = orders_of(world, launch.givers, workers.store(), self.spec.run_id, evaluate=launch.evaluate)
        self.generation.open(world, {"fence": launch.fence_s, "plan": time.monotonic() - began}, launch.numbered_by)
        refused = workers.order(orders)
        workers.kill({worker: f"killed: {problem}" for worker, problem in refused.items() if workers.alive(worker)})


def import_heavy() -> None:
    """Import modules that a recovery needs and that take seconds, while no worker waits. An import error is raised again, and reported,
    where the module is needed."""
    for module in ("checkpoint", "workers.resharding.memory_snapshots", "workers.trainer"):
        importlib.import_module(f"vescale_ray.{module}")
