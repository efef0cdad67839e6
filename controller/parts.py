"""The parts of a running controller, which the control loop's transitions share."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from vescale_ray.config import RunConfig
from vescale_ray.controller.budget import Budget
from vescale_ray.controller.cadence import Cadence
from vescale_ray.controller.crew import Crew
from vescale_ray.controller.desk import Desk
from vescale_ray.controller.durable_state import StateWriter
from vescale_ray.controller.failure_detector import FailureDetector
from vescale_ray.controller.generation_log import GenerationLog
from vescale_ray.controller.keeper import Keeper
from vescale_ray.controller.protocol import Ending, RunSpec, World
from vescale_ray.controller.publisher import Publisher
from vescale_ray.controller.run_lifecycle import Lifecycle, budget_of
from vescale_ray.controller.run_log import RunLog
from vescale_ray.controller.saves import Saves
from vescale_ray.controller.steering import Steering

AHEAD = 4
"""Layouts are planned for up to this many workers more or fewer than there are."""


class BudgetAccount:
    """The failure budget of a run, which its durable state keeps.

    Attributes:
        budget: the present one.
        given_up: why the run is given up; None: it is not. The budget was spent before this life of the controller began. What happens in
            this life does not let the next one go on.
    """

    def __init__(self, budget: Budget, durable: StateWriter) -> None:
        self.budget, self._durable = budget, durable
        self.given_up: str | None = None
        self.spend(budget)

    def spend(self, budget: Budget) -> None:
        """Go on with this budget. The next write of the durable state keeps it."""
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


class Parts:
    """Made once, by the control loop.

    Args:
        spec: what the driver wants.
        durable: what an earlier life of the controller left, and what the next one gets.
    """

    def __init__(
        self, spec: RunSpec, config: RunConfig, crew: Crew, log: RunLog, publisher: Publisher, saves: Saves, durable: StateWriter
    ) -> None:
        self.spec, self.config, self.crew, self.log, self.saves, self.durable = spec, config, crew, log, saves, durable
        self.generation = GenerationLog(log, config)
        if durable.state.generation is not None:
            self.generation.adopt(durable.state.generation.world())
        self.lifecycle = Lifecycle(log, publisher)
        self.account = BudgetAccount(budget_of(config, durable.state, log.stats.step), durable)
        self.desk = Desk(spec, config, crew, log, durable)
        cadence = Cadence(config.checkpoint, time.monotonic(), max(0.0, time.time() - log.stats.started))
        self.keeper = Keeper(
            config.checkpoint_root,
            spec.run_id,
            crew,
            log,
            self.generation,
            saves,
            durable,
            spec.bounds.save,
            cadence,
            config.max_workers,
            spec.oldest,
        )
        self.steering = Steering(
            spec, config, crew, log, self.generation, saves, self.desk, cadence, durable, self.lifecycle, self.keeper.layouts
        )
        self.detector = FailureDetector(config, spec.bounds, crew, log, self.steering)

    def still_living(self, ended: Ending) -> Ending:
        """The ending as it is now: parked workers may die as well."""
        return replace(ended, living=tuple(w for w in ended.living if self.crew.alive(w)))

    def want_those_left(self, before: int, living: Sequence[str]) -> None:
        """Members were lost: the run goes on with those that are left, unless lost workers are replaced."""
        desk, elastic, steering = self.desk, self.config.elastic, self.steering
        fully = desk.target == before
        if not elastic.replace_lost:
            draining = steering.leaving(steering.leavers)
            back = [w for w in steering.leavers if self.crew.alive(w) and w not in draining]
            left = len(living) + len(back) + len(steering.outside(living)) + self.crew.hiring
            desk.want(max(elastic.min_workers, min(desk.target, left)), desk.reason)
        if fully or elastic.replace_lost:
            desk.explain("replacement")

    def plan_ahead(self, world: World) -> None:
        """Have the layouts that may come next planned while the workers train. Any member can tell the outline that they follow from."""
        layouts = self.keeper.layouts
        if layouts.told:
            layouts.ahead(worlds_ahead(world.size, self.desk.target))
        else:
            self.crew.ask_outline(world.members)


def worlds_ahead(size: int, target: int) -> tuple[int, ...]:
    """The world sizes that may come next, the likely ones first: the target, then a few workers lost or joined."""
    return (size, target, *(size + step * sign for step in range(1, AHEAD + 1) for sign in (-1, 1)))
