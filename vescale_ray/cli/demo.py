"""The demo: a run that loses a worker to SIGKILL after a third of its steps, and grows back after two thirds.

The run is an ordinary one with a schedule of actions. The kill is a real signal to a real process, and the growth is the same request
that ``vescale-ray rescale`` makes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib.resources import as_file, files
from typing import TYPE_CHECKING

from vescale_ray.config import ConfigError, RunConfig, load_config
from vescale_ray.reporting.report import Summary
from vescale_ray.runfolder import Record

if TYPE_CHECKING:
    from vescale_ray.controller.protocol import ScheduledAction


def demo_config(overrides: Sequence[str] = ()) -> RunConfig:
    """Load configs/demo.yaml with ``overrides``; unless they name the run, its name contains the time, so that each demo starts afresh.

    Raises:
        ConfigError: an override can't be used, or the demo could not show a shrink and a growth.
    """
    named = any(text.partition("=")[0].strip() == "run.name" for text in overrides)
    fresh = [] if named else [f"run.name=demo-{time.strftime('%Y%m%d-%H%M%S')}"]
    with as_file(files("vescale_ray.configs") / "demo.yaml") as path:
        config = load_config(path, [*fresh, *overrides])
    if config.elastic.workers <= max(1, config.elastic.min_workers):
        raise ConfigError(
            f"elastic.workers = {config.elastic.workers} with elastic.min_workers = {config.elastic.min_workers}: "
            "the demo needs a worker to lose; raise the one or lower the other"
        )
    if config.train.steps < 6:
        raise ConfigError(f"train.steps = {config.train.steps}: the demo needs at least 6, to lose a worker and grow back in between")
    return config


def demo_schedule(config: RunConfig) -> tuple[ScheduledAction, ...]:
    """Schedule a SIGKILL for the last rank after a third of the steps, and all workers again after two thirds."""
    from vescale_ray.controller.protocol import ScheduledAction

    third = config.train.steps // 3
    return (
        ScheduledAction(step=third, action="kill", value=config.elastic.workers - 1),
        ScheduledAction(step=2 * third, action="rescale", value=config.elastic.workers),
    )


def shortcomings(summary: Summary, events: Sequence[Record]) -> list[str]:
    """Return one line for each shortcoming of a demo's run; empty if there is none."""
    found = []
    changes = [event["direction"] for event in events if event["event"] == "rescaled"]
    if changes != ["shrink", "grow"]:
        found.append(f"the run should shrink once and then grow once, but did: {', '.join(changes) or 'neither'}")
    if summary.accounting is None or not summary.accounting.exact:
        found.append("samples were lost or repeated")
    if summary.checkpoint is None or summary.checkpoint_problems:
        found.append("there is no sound checkpoint")
    if len(summary.heldout) > 1 and summary.heldout[-1][1] >= summary.heldout[0][1]:
        found.append("the held-out loss did not fall")
    return found
