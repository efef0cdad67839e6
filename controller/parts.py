"""The parts of a running controller, which the control loop's transitions share."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from vescale_ray.config import RunConfig
from vescale_ray.controller.checkpointing.cadence import Cadence
from vescale_ray.controller.checkpointing.committer import Committer
from vescale_ray.controller.checkpointing.coordinator import CheckpointCoordinator
from vescale_ray.controller.commands import Commands
from vescale_ray.controller.failures.budget import Budget
from vescale_ray.controller.failures.failure_detector import FailureDetector
from vescale_ray.controller.protocol import Ending, RunSpec, World
from vescale_ray.controller.scaling.scaling import Scaling
from vescale_ray.controller.state.durable_state import StateWriter
from vescale_ray.controller.state.generation_log import GenerationLog
from vescale_ray.controller.state.publisher import Publisher
from vescale_ray.controller.state.run_lifecycle import Lifecycle, budget_of
from vescale_ray.controller.state.run_log import RunLog
from vescale_ray.controller.worker_group.worker_group import WorkerGroup

AHEAD = 4
"""Layouts are planned for up to this many workers more or fewer than there are."""


class BudgetAccount:
    """The failure budget of a run, which its durable state keeps.

    Attributes:
        budget: the present budget.
        given_up: why the run is given up; None if it is not. The budget was spent before this controller process began. Progress in this
            process does not refill the budget for the next one.
    """

    def __init__(self, budget: Budget, durable: StateWriter) -> None:
        self.budget, self._durable = budget, durable
        self.given_up: str | None = None
        self.spend(budget)

    def spend(self, budget: Budget) -> None:
        """Replace the budget. The next write of the durable state keeps it."""
        self.budget = budget
        self._durable.note(
            highest_step=budget.high,
            crashes=budget.crashes,
            node_losses=budget.nodes,
            controller_restarts=budget.controllers,
            failures={str(cause): count for cause, count in budget.total.items()},
        )

    def progressed(self, step: int) -> None:
        """A step was completed, which ends the streaks of failures unless the run is given up."""
        progressed = self.budget.progressed(step)
        self.spend(replace(self.budget, high=progressed.high) if self.given_up else progressed)

    def give_up(self, reason: str) -> None:
        self.given_up = reason


class ControllerParts:
    """The parts of one controller. The control loop makes them once.

    Args:
        spec: the driver's order.
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
        self.spec, self.config, self.worker_group, self.log, self.committer, self.durable = (
            spec,
            config,
            worker_group,
            log,
            committer,
            durable,
        )
        self.generation = GenerationLog(log, config)
        if durable.state.generation is not None:
            self.generation.adopt(durable.state.generation.world())
        self.lifecycle = Lifecycle(log, publisher)
        self.account = BudgetAccount(budget_of(config, durable.state, log.stats.step), durable)
        self.commands = Commands(spec, config, worker_group, log, durable)
        cadence = Cadence(config.checkpoint, time.monotonic(), max(0.0, time.time() - log.stats.started))
        self.coordinator = CheckpointCoordinator(
            config.checkpoint_root,
            spec.run_id,
            worker_group,
            log,
            self.generation,
            committer,
            durable,
            spec.bounds.save,
            cadence,
            config.max_workers,
            spec.oldest,
        )
        self.scaling = Scaling(
            spec,
            config,
            worker_group,
            log,
            self.generation,
            committer,
            self.commands,
            cadence,
            durable,
            self.lifecycle,
            self.coordinator.layouts,
        )
        self.detector = FailureDetector(config, spec.bounds, worker_group, log, self.scaling)

    def still_living(self, ended: Ending) -> Ending:
        """The ending without the members that have died since. Parked workers may die, too."""
        return replace(ended, living=tuple(w for w in ended.living if self.worker_group.alive(w)))

    def want_those_left(self, before: int, living: Sequence[str]) -> None:
        """Lower the number of workers wanted to those left after a loss, unless lost workers are replaced."""
        commands, elastic, scaling = self.commands, self.config.elastic, self.scaling
        fully = commands.target == before
        if not elastic.replace_lost:
            draining = scaling.leaving(scaling.leavers)
            back = [w for w in scaling.leavers if self.worker_group.alive(w) and w not in draining]
            left = len(living) + len(back) + len(scaling.outside(living)) + self.worker_group.hiring
            commands.want(max(elastic.min_workers, min(commands.target, left)), commands.reason)
        if fully or elastic.replace_lost:
            commands.explain("replacement")

    def plan_ahead(self, world: World) -> None:
        """Plan the layouts that may come next while the workers train. If their outline is unknown, ask the members for it."""
        layouts = self.coordinator.layouts
        if layouts.told:
            layouts.ahead(worlds_ahead(world.size, self.commands.target))
        else:
            self.worker_group.ask_outline(world.members)


def worlds_ahead(size: int, target: int) -> tuple[int, ...]:
    """The world sizes that may come next, the likely ones first: the target, then a few workers lost or joined."""
    return (size, target, *(size + step * sign for step in range(1, AHEAD + 1) for sign in (-1, 1)))
