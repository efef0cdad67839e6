"""Events of a run and of its controller processes: start, restart, states, outcome."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from vescale_ray.config import RunConfig
from vescale_ray.controller.failures.budget import Budget, Cause, Limits
from vescale_ray.controller.protocol import FINAL, Outcome, RunState, StateSource
from vescale_ray.controller.state.durable_state import DurableState
from vescale_ray.controller.state.generation_log import GenerationLog
from vescale_ray.controller.state.publisher import Observed, Publisher
from vescale_ray.controller.state.run_log import RunLog
from vescale_ray.controller.statistics.run_stats import evaluated_sets
from vescale_ray.controller.worker_group.worker_news import SupervisorLost
from vescale_ray.errors import one_line
from vescale_ray.runfolder import RunFolder
from vescale_ray.workers.messages import Origin

_log = logging.getLogger(__name__)


def enter(log: RunLog, publisher: Publisher, state: RunState) -> None:
    """Record that the run is in another state, and write run.json at once."""
    log.record("state", before=str(log.stats.state), state=str(state))
    if state in FINAL:
        log.record("goodput", **log.stats.goodput.to_json())
    publisher.publish()
    publisher.write_record(now=True)


def budget_of(config: RunConfig, state: DurableState, step: int) -> Budget:
    """Return the rest of the run's failure budget. The end of the earlier controller counts as a failure.

    ``step`` is the last completed step. The state may be older, because a step alone does not write it.
    """
    used = {Cause(cause): count for cause, count in state.failures.items()}
    streaks = (state.crashes, state.node_losses, state.controller_restarts)
    budget = Budget(Limits.of(config.elastic), *streaks, used, state.highest_step).progressed(step)
    return budget.failed([Cause.CONTROLLER], []) if state.epoch > 1 else budget


def take_up(log: RunLog, config: RunConfig, state: DurableState, pid: int) -> Observed:
    """Restore the statistics of an earlier controller process. Returns the observations to publish first.

    Raises:
        OSError: the run's folder can't be read; the caller may try again.
    """
    log.replay()
    begin(log, config, state, pid)
    launched, stats = state.generation, log.stats
    if launched is not None and launched.number != stats.generation:
        # The controller was killed between its durable state and this event.
        GenerationLog(log, config).open(launched.world(), {}, stats.numbered_by)
    shown = RunState.PENDING if launched is None else RunState.RESCALING
    log.record("controller_restarted", epoch=state.epoch, state=str(shown), trained=stats.has_stepped)
    return Observed(state.target, budget_of(config, state, 0 if launched is None else stats.step))


def begin(log: RunLog, config: RunConfig, state: DurableState, pid: int) -> None:
    """Record that this start of the run has begun, if no controller process has done so."""
    if not log.stats.begun:
        log.record("run_started", run_id=log.run_id, workers=state.target, steps=config.train.steps, pid=pid)


def outcome_of(conduct: Callable[[], Outcome], log: RunLog, publisher: Publisher) -> Outcome:
    """Return the outcome of ``conduct``. If it raises an error, the run has failed, with the error in one line and the traceback in the
    log."""
    try:
        return conduct()
    except Exception as error:
        _log.exception("the run failed")
        text = f"{type(error).__name__}: {one_line(error)}"
        log.record("run_failed", error=text)
        enter(log, publisher, RunState.FAILED)
        return Outcome("FAILED", log.stats.step, text, log.stats.checkpoints.path, orphaned=isinstance(error, SupervisorLost))


def evaluated_before(folder: RunFolder, source: StateSource) -> dict[int, dict[str, Mapping[str, Any]]]:
    """Return the evaluations of earlier starts by step and set, up to the checkpoint from which this start continues."""
    if source.origin is not Origin.CHECKPOINT:
        return {}
    found = (event for event in folder.read_events() if event["event"] == "evaluation")
    return {int(event["step"]): evaluated_sets(event) for event in found if int(event["step"]) <= source.step}
