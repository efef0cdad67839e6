"""The beginning of a run, or of a restarted controller's part of it. Transitions of the control loop."""

from __future__ import annotations

import importlib
import time
from dataclasses import replace

from vescale_ray.controller import states
from vescale_ray.controller.bounded_io import begun
from vescale_ray.controller.parts import ControllerParts
from vescale_ray.controller.protocol import Ending, RunState
from vescale_ray.controller.states import State
from vescale_ray.controller.transitions.generation import Generations, has_state
from vescale_ray.controller.transitions.run_end import RunEnd

ADOPT_S = 3.0
"""A restarted controller goes on after this many seconds with the workers that have answered."""
OUTLINE_S = 0.5
"""It then waits this many seconds for the outline of the layouts."""
LAST_LIVES = 3
"""Number of controllers that try to save the workers' state once the run is given up. Later ones end the run at once."""


class RunBegin:
    """Hires the first workers, or takes over those of an earlier life of the controller."""

    def __init__(self, parts: ControllerParts, generations: Generations, end: RunEnd) -> None:
        self._parts, self._generations, self._end = parts, generations, end

    def starting(self, state: states.Starting) -> State:
        self._parts.durable.update()  # a restart of the controller is counted, also for later ones
        begun(import_heavy)
        self._parts.scaling.nodes.start()
        launched = self._parts.durable.state.generation
        if self._parts.account.budget.controllers and (spent := self._parts.account.budget.verdict) is not None:
            self._parts.account.give_up(spent)
            # The fault that ended earlier controllers may end this one, too. So only the first few try to stop the workers in order.
            if launched is None or self._parts.account.budget.controllers > self._parts.account.budget.limits.controllers + LAST_LIVES:
                return self._end.give_up(Ending(()), spent)
            self._parts.commands.end("it is given up", durable=False)
        if launched is not None:
            return self.adopt()
        self._parts.lifecycle.enter(RunState.STARTING)
        if self._parts.durable.state.epoch > 1:
            self._parts.worker_group.adopt(self._parts.log.stats.workers)
        self._parts.worker_group.prepare_store()
        return states.Gathering(time.monotonic() + self._parts.spec.bounds.start)

    def gathering(self, state: states.Gathering) -> State:
        worker_group, bounds, fewest = self._parts.worker_group, self._parts.spec.bounds, self._parts.config.elastic.min_workers
        if self._parts.commands.stop:
            return self._end.halt(Ending(()))
        ready, wanted, failures = (
            worker_group.ready(),
            self._parts.commands.target,
            self._parts.scaling.hire_failures,
        )  # the target may be changed meanwhile
        if len(ready) >= wanted:
            return self._generations.launch(ready[:wanted], (), self._parts.spec.source)
        if len(failures) > self._parts.config.elastic.max_recoveries_without_progress:
            return states.Concluding(error=f"workers do not start: {failures[-1]}")
        if time.monotonic() > state.deadline:
            if len(ready) < fewest:
                need = self._parts.config.ray
                return states.Concluding(
                    error=f"{len(ready)} of {wanted} workers were up after {bounds.start:g} s, elastic.min_workers = {fewest}: has the "
                    f"cluster {wanted} times {need.cpus_per_worker:g} CPUs and {need.gpus_per_worker:g} GPUs free?"
                )
            for worker in worker_group.warming():
                worker_group.dismiss(worker)
            self._parts.commands.want(len(ready), "manual")
            return self._generations.launch(ready, (), self._parts.spec.source)
        for _ in range(wanted - len(ready) - len(worker_group.warming()) - worker_group.hiring):
            worker_group.hire()
        return state

    def adopt(self) -> states.Adopting:
        """Take over the generation that an earlier life of the controller launched. Its workers have trained on."""
        world = self._parts.generation.world
        assert world is not None
        self._parts.detector.adopt(world)
        # Each worker sends its last vote again. Attempts of older generations were given up.
        self._parts.committer.fence(world.ticket.generation)
        self._parts.worker_group.adopt(self._parts.log.stats.workers)
        return states.Adopting(world, time.monotonic() + ADOPT_S)

    def adopting(self, state: states.Adopting) -> State:
        worker_group, world, now = self._parts.worker_group, state.world, time.monotonic()
        # A recovery may come next, and its ranks are numbered by the layouts, too.
        self._parts.plan_ahead(world)
        if state.outline_until is None:
            if now < state.until and any(worker_group.alive(w) and worker_group.report(w) is None for w in world.members):
                return state
            state = replace(state, outline_until=now + OUTLINE_S)
        assert state.outline_until is not None
        if worker_group.asking_outline and now < state.outline_until:
            return state
        party = (*world.members, *self._parts.scaling.leavers)
        reports = [worker_group.report(w) for w in party]
        if any(report is not None and report.ticket < world.ticket for report in reports):
            worker_group.fence(party, world.ticket)
        filled = all(report is not None and report.ticket == world.ticket and has_state(report) for report in reports[: world.size])
        if self._parts.log.stats.has_stepped or filled:
            # The move is over for all members. A leaver that is gone was dismissed, and is not missing.
            self._parts.scaling.keep(w for w in self._parts.scaling.leavers if worker_group.alive(w))
        return states.Running(world)


def import_heavy() -> None:
    """Import modules that a recovery needs and that take seconds, while no worker waits. An import error is raised again, and reported,
    where the module is needed."""
    for module in ("checkpoint", "workers.resharding.memory_snapshots", "workers.trainer"):
        importlib.import_module(f"vescale_ray.{module}")
