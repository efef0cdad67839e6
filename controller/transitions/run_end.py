"""The end of a run: the last checkpoint, and the outcome. Transitions of the control loop."""

from __future__ import annotations

import time
from dataclasses import replace

from vescale_ray.controller import states
from vescale_ray.controller.checkpointing.coordinator import Unanswered
from vescale_ray.controller.failures.budget import Cause
from vescale_ray.controller.parts import ControllerParts
from vescale_ray.controller.protocol import Ending, Outcome, RunState
from vescale_ray.controller.states import Goal, State


class RunEnd:
    """Ends the run, or lets training resume from an earlier state if the last one is lost."""

    def __init__(self, parts: ControllerParts) -> None:
        self._parts = parts

    def complete(self, ended: Ending) -> states.Checkpointing:
        self._parts.generation.end_rescale(time.time(), self._parts.commands.target)
        self._parts.lifecycle.enter(RunState.CHECKPOINTING)
        return states.Checkpointing(ended, Goal.LAST, ended.living)

    def halt(self, ended: Ending) -> states.Checkpointing:
        self._parts.lifecycle.enter(RunState.STOPPING)
        return states.Checkpointing(ended, Goal.STOP, (*ended.living, *self._parts.scaling.leavers))

    def give_up(self, ended: Ending, error: str, refused: bool = False) -> State:
        """Begin to end a run that has failed. The survivors' state is saved if it is newer than the newest checkpoint, unless the input was
        ``refused``."""
        holders = (*ended.living, *self._parts.scaling.leavers)
        return self._with_evidence(error, refused) if refused else states.Checkpointing(ended, Goal.FAILURE, holders, error)

    def _with_evidence(self, error: str, refused: bool) -> states.Concluding:
        found = None if refused else self._parts.detector.evidence.write(self._parts.worker_group, self._parts.log)
        error += f"; tracebacks and stacks of all workers: {found}" if found else ""
        return states.Concluding(error=error, refused=refused, hint=True)

    def checkpointing(self, state: states.Checkpointing) -> State:
        try:
            result = self._parts.coordinator.save(state.workers, only_newer=state.goal is Goal.FAILURE)
        except Unanswered:
            return state
        match state.goal:
            case Goal.DRAIN:
                assert state.then is not None
                return state.then
            case Goal.FAILURE:
                return self._with_evidence(state.error, refused=False)
            case Goal.STOP:
                if result is not None and result.kept is None:
                    return states.Concluding(
                        error=f"stopped at step {self._parts.log.stats.step}, but its checkpoint failed: {result.error}"
                    )
                return states.Concluding(result)
        ended, kept, steps = state.ended, result.kept if result is not None else None, self._parts.config.train.steps
        if kept is not None and kept.step == steps:
            self._parts.lifecycle.enter(RunState.DONE)
            self._parts.log.record("run_finished", checkpoint=kept.path)
            return states.Finished(Outcome("DONE", self._parts.log.stats.step, checkpoint=kept.path))
        still = self._parts.still_living(ended)
        lost = set(ended.living) - set(still.living)
        if result is not None and kept is None and not lost:
            newest = self._parts.log.stats.checkpoints.path or "none"
            error = (
                f"all {self._parts.log.stats.step} steps are done, but the last checkpoint failed: {result.error}; the newest is {newest}"
            )
            return states.Concluding(error=error)
        # The state is lost with a worker, and training goes back.
        if lost:  # otherwise the loss was counted before
            causes = {one.cause for one in self._parts.detector.losses(lost).values()}
            self._parts.account.spend(
                self._parts.account.budget.failed(causes or {Cause.KILLED}, ["workers were lost after the last step"])
            )
            self._parts.want_those_left(len(ended.living), still.living)
        self._parts.generation.begin_rescale("failure", len(ended.living))
        return states.Recovering(replace(still, finished=False))

    def concluding(self, state: states.Concluding) -> State:
        try:
            kept = self._parts.coordinator.newest()
        except Unanswered:
            return state
        result, path = state.result, kept.path if kept is not None else None
        if state.error is not None:
            hint = f"; it can be resumed from step {kept.step} ({kept.path})" if kept is not None and state.hint else ""
            self._parts.log.record("run_failed", error=state.error + hint)
            self._parts.lifecycle.enter(RunState.FAILED)
            return states.Finished(Outcome("FAILED", self._parts.log.stats.step, state.error + hint, path, state.refused))
        step = result.step if result is not None else kept.step if kept is not None else 0
        self._parts.lifecycle.enter(RunState.DONE)
        self._parts.log.record("run_stopped", reason=self._parts.commands.stop, resume=path, resume_step=step)
        return states.Finished(Outcome("STOPPED", step, checkpoint=path))
