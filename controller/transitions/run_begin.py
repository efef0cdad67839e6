"""The beginning of a run, or of a restarted controller's part of it. Transitions of the control loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vescale_ray.config import RunConfig
from vescale_ray.controller import actions, states
from vescale_ray.controller.actions import Action
from vescale_ray.controller.checkpointing.parked import by_node
from vescale_ray.controller.observations import Observations
from vescale_ray.controller.protocol import Ending, RunSpec, RunState
from vescale_ray.controller.scaling.scaling import Scaling, want
from vescale_ray.controller.states import Step
from vescale_ray.controller.transitions.generation import Generations, has_state
from vescale_ray.controller.transitions.run_end import RunEnd

ADOPT_S = 3.0
"""A restarted controller goes on after this many seconds with the workers that have answered."""
OUTLINE_S = 0.5
"""It then waits this many seconds for the outline of the layouts."""
LAST_LIVES = 3
"""Number of controllers that try to save the workers' state once the run is given up. Later ones end the run at once."""


class RunBegin:
    """Hires the first workers, or takes over those of an earlier process of the controller."""

    def __init__(self, spec: RunSpec, config: RunConfig, scaling: Scaling, generations: Generations, end: RunEnd) -> None:
        self._spec, self._config, self._scaling, self._generations, self._end = spec, config, scaling, generations, end

    def starting(self, state: states.Starting, seen: Observations) -> Step:
        kept = actions.Note({}, write=True)  # a restart of the controller is counted, also for later ones
        launched, budget = seen.durable.generation, seen.budget
        # The fault that ended earlier controllers may end this one, too. So only the first few try to stop the workers in order.
        last = launched is None or budget.controllers > budget.limits.controllers + LAST_LIVES
        if seen.given_up is not None and last:
            following, do = self._end.give_up(Ending(()), seen.given_up, seen)
            return following, [kept, *do]
        if launched is not None:
            # Its workers have trained on.
            assert seen.world is not None
            return states.Adopting(seen.world, seen.now + ADOPT_S), [kept, actions.TakeOver(seen.world)]
        do = [kept, actions.Enter(RunState.STARTING), *([actions.TakeOver(None)] if seen.durable.epoch > 1 else [])]
        return states.Gathering(seen.now + self._spec.bounds.start), do

    def gathering(self, state: states.Gathering, seen: Observations) -> Step:
        workers, bounds, fewest = seen.workers, self._spec.bounds, self._config.elastic.min_workers
        if seen.stop:
            return self._end.halt(Ending(()), seen)
        ready, wanted, failures = workers.ready(), seen.durable.target, self._scaling.hire_failures  # the target may be changed meanwhile
        if len(ready) >= wanted:
            return self._launch(ready[:wanted], seen)
        if len(failures) > self._config.elastic.max_recoveries_without_progress:
            return states.Concluding(error=f"workers do not start: {failures[-1]}"), []
        if seen.now > state.deadline:
            if len(ready) < fewest:
                need = self._config.ray
                error = (
                    f"{len(ready)} of {wanted} workers were up after {bounds.start:g} s, elastic.min_workers = {fewest}: has the "
                    f"cluster {wanted} times {need.cpus_per_worker:g} CPUs and {need.gpus_per_worker:g} GPUs free?"
                )
                return states.Concluding(error=error), []
            late = [actions.Dismiss(worker, tell=False) for worker in workers.warming()]
            members = ready[: self._config.whole(len(ready))]
            following, do = self._launch(members, seen)
            return following, [*late, want(len(members), "manual"), *do]
        return state, [actions.Hire()] * (wanted - len(ready) - len(workers.warming()) - workers.hiring)

    def _launch(self, members: Sequence[str], seen: Observations) -> Step:
        ranked = by_node(members, self._config.grid(len(members)), seen.workers)
        return self._generations.launch(ranked, (), self._spec.source, seen)

    def adopting(self, state: states.Adopting, seen: Observations) -> Step:
        workers, world, now = seen.workers, state.world, seen.now
        if state.outline_until is None:
            if now < state.until and any(workers.alive(w) and workers.report(w) is None for w in world.members):
                return state, []
            state = replace(state, outline_until=now + OUTLINE_S)
        assert state.outline_until is not None
        # A recovery may come next, and its ranks are numbered by the layouts, too.
        if workers.asking_outline and now < state.outline_until:
            return state, []
        do: list[Action] = []
        party = (*world.members, *seen.leavers)
        reports = [workers.report(w) for w in party]
        if any(report is not None and report.ticket < world.ticket for report in reports):
            do.append(actions.Fence(party, world.ticket))
        filled = all(report is not None and report.ticket == world.ticket and has_state(report) for report in reports[: world.size])
        if seen.stats.has_stepped or filled:
            # The move is over for all members. A leaver that is gone was dismissed, and is not missing.
            do.append(actions.Note({"leavers": tuple(w for w in seen.leavers if workers.alive(w))}))
        return states.Running(world), do
