"""The end of a run: the last checkpoint, and the outcome. Transitions of the control loop."""

from __future__ import annotations

from dataclasses import replace

from vescale_ray.config import RunConfig
from vescale_ray.controller import actions, states
from vescale_ray.controller.actions import Action
from vescale_ray.controller.failures.budget import Cause
from vescale_ray.controller.observations import Observations
from vescale_ray.controller.protocol import Ending, Event, Outcome, RunState
from vescale_ray.controller.states import Goal, Step


class RunEnd:
    """Ends the run, or lets training resume from an earlier state if the last one is lost."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config

    def complete(self, ended: Ending, seen: Observations) -> Step:
        do = [actions.RequestPlaces(None), actions.EndRescale(), actions.Enter(RunState.CHECKPOINTING)]
        return states.Checkpointing(ended, Goal.LAST, ended.living), do

    def halt(self, ended: Ending, seen: Observations) -> Step:
        return states.Checkpointing(ended, Goal.STOP, seen.holders(ended)), [actions.RequestPlaces(None), actions.Enter(RunState.STOPPING)]

    def give_up(self, ended: Ending, error: str, seen: Observations, refused: bool = False, save: bool = True) -> Step:
        """Begin to end a run that has failed.

        If the survivors' state is newer than the newest checkpoint, it is saved, unless it is of no use (``save=False``). ``refused``: the
        user's input caused the failure."""
        if not save:
            return states.Concluding(error=error, hint=True), [actions.RequestPlaces(None)]
        return states.Checkpointing(ended, Goal.FAILURE, seen.holders(ended), error, refused), [actions.RequestPlaces(None)]

    def checkpointing(self, state: states.Checkpointing, seen: Observations) -> Step:
        save = actions.SaveParked(state.workers, only_newer=state.goal is Goal.FAILURE)
        if save not in seen.answers:
            return state, [save]
        result = seen.answers[save]
        match state.goal:
            case Goal.DRAIN:
                assert state.then is not None
                return state.then, []
            case Goal.FAILURE if state.refused:
                return states.Concluding(error=state.error, refused=True, hint=True), []
            case Goal.FAILURE:
                if actions.WriteEvidence() not in seen.answers:
                    return state, [actions.WriteEvidence()]
                found = seen.answers[actions.WriteEvidence()]
                error = f"{state.error}; tracebacks and stacks of all workers: {found}" if found else state.error
                return states.Concluding(error=error, hint=True), []
            case Goal.STOP:
                if result is not None and result.kept is None:
                    error = f"stopped at step {seen.stats.step}, but its checkpoint failed: {result.error}"
                    return states.Concluding(error=error), []
                return states.Concluding(result), []
        ended, kept, steps = state.ended, result.kept if result is not None else None, seen.stats.step
        if kept is not None and kept.step == self._config.train.steps:
            over = states.Finished(Outcome("DONE", steps, checkpoint=kept.path))
            return over, [actions.Enter(RunState.DONE), Event("run_finished", {"checkpoint": kept.path})]
        still = seen.still_living(ended)
        lost = set(ended.living) - set(still.living)
        if result is not None and kept is None and not lost:
            newest = seen.stats.checkpoints.path or "none"
            error = f"all {steps} steps are done, but the last checkpoint failed: {result.error}; the newest is {newest}"
            return states.Concluding(error=error), []
        # The state is lost with a worker, and training goes back.
        do: list[Action] = []
        if lost:  # otherwise the loss was counted before
            causes = {seen.losses[w].cause for w in lost if w in seen.losses}
            do.append(actions.Spend(seen.budget.failed(causes or {Cause.KILLED}, ["workers were lost after the last step"])))
            do.append(want_those_left(seen, self._config, len(ended.living), still.living))
        return states.Recovering(replace(still, finished=False)), [*do, actions.BeginRescale("failure", len(ended.living))]

    def concluding(self, state: states.Concluding, seen: Observations) -> Step:
        if actions.FindCheckpoint() not in seen.answers:
            return state, [actions.FindCheckpoint()]
        kept, result = seen.answers[actions.FindCheckpoint()], state.result
        path = kept.path if kept is not None else None
        if state.error is not None:
            hint = f"; it can be resumed from step {kept.step} ({kept.path})" if kept is not None and state.hint else ""
            failed = states.Finished(Outcome("FAILED", seen.stats.step, state.error + hint, path, state.refused))
            return failed, [Event("run_failed", {"error": state.error + hint}), actions.Enter(RunState.FAILED)]
        step = result.step if result is not None else kept.step if kept is not None else 0
        stopped = Event("run_stopped", {"reason": seen.stop, "resume": path, "resume_step": step})
        return states.Finished(Outcome("STOPPED", step, checkpoint=path)), [actions.Enter(RunState.DONE), stopped]


def want_those_left(seen: Observations, config: RunConfig, before: int, living: tuple[str, ...]) -> actions.Note:
    """Lower the number of workers wanted to those left after a loss, unless lost workers are replaced."""
    durable, elastic, workers = seen.durable, config.elastic, seen.workers
    fields = {"target": durable.target, "reason": durable.reason}
    if not elastic.replace_lost:
        draining = seen.leaving(seen.leavers)
        back = [w for w in seen.leavers if workers.alive(w) and w not in draining]
        left = len(living) + len(back) + len(seen.outside(living)) + workers.hiring
        fields["target"] = max(elastic.min_workers, config.whole(min(durable.target, left)))
    if durable.target == before or elastic.replace_lost:
        fields["reason"] = "replacement"
    return actions.Note(fields, write=not elastic.replace_lost)
