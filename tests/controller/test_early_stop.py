"""``train.early_stop``: the run stops once the held-out loss no longer falls, also across restarts and resumes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.controller.recorded import Recorded
from tests.controller.runs import tiny
from vescale_ray.config import RunConfig
from vescale_ray.controller.commands import Commands
from vescale_ray.controller.protocol import StateSource
from vescale_ray.controller.state.durable_state import DurableState
from vescale_ray.controller.state.state_store import StateWriter
from vescale_ray.workers.messages import Origin

NAN = float("nan")


def commands_of(run: Recorded) -> Commands:
    spec: Any = SimpleNamespace(schedule=(), capacity=None)
    store: Any = SimpleNamespace(write=lambda state: state)
    return Commands(spec, run.config, SimpleNamespace(), run.log, StateWriter(DurableState("r1", 0), store))  # type: ignore[arg-type]


def stopped_after(run: Recorded, losses: dict[int, float]) -> tuple[int | None, str | None]:
    """The step whose evaluation stops the run, and the reason."""
    commands = commands_of(run)
    commands.carry_out()
    for step, loss in losses.items():
        if commands.stop is None:
            run.log.record("evaluation", loss=loss, bpb=loss, samples=13, step=step)
            commands.carry_out()
            commands.carry_out()
            if commands.stop is not None:
                return step, commands.stop
    return None, commands.stop


def early(folder: Path, **rule: Any) -> RunConfig:
    return tiny(folder, "r", train_eval_every=10, train_early_stop=rule)


@pytest.mark.parametrize(
    ("rule", "losses", "step"),
    [
        ({"patience": 2}, [5.0, 4.0, 4.5, 3.9, 3.9, 4.0, 3.0], 50),
        ({"patience": 1}, [5.0, 4.0, 3.0, 3.0], 30),
        ({"patience": 3}, [5.0, 4.0, 4.1, 4.1], None),
        ({"patience": 2, "min_delta": 0.5}, [5.0, 4.6, 4.4, 4.2, 3.95, 3.94], 40),
        ({"patience": 2}, [5.0, NAN, NAN, 1.0], 20),
        ({"patience": 2}, [NAN, 5.0, NAN, 4.0, 3.0], None),
    ],
)
def test_run_stops_after_evaluations_without_improvement(
    tmp_path: Path, rule: dict[str, Any], losses: list[float], step: int | None
) -> None:
    run = Recorded(early(tmp_path, **rule))
    found, reason = stopped_after(run, {10 * index: loss for index, loss in enumerate(losses)})
    assert found == step
    if step == 50:
        assert reason == "early stop: no heldout_loss of the last 2 evaluations is better than that of step 30 (3.9000)"


def test_early_stop_goes_by_the_loss_of_a_named_set(tmp_path: Path) -> None:
    text = tmp_path / "wiki.txt"
    text.write_text("evaluated " * 100)
    rule = {"patience": 2, "metric": "wiki_loss"}
    config = tiny(tmp_path, "r", train_eval_every=10, train_early_stop=rule, data_eval={"wiki": {"corpus": str(text)}}, data_heldout=0.0)
    run = Recorded(config)
    commands = commands_of(run)
    for step, loss in enumerate([3.0, 2.0, 2.5, 2.1]):
        assert commands.stop is None
        run.log.record("evaluation", loss=NAN, samples=0, sets={"wiki": {"loss": loss, "samples": 4}}, step=10 * step)
        commands.carry_out()
    assert commands.stop == "early stop: no wiki_loss of the last 2 evaluations is better than that of step 10 (2.0000)"


def test_restarted_controller_counts_all_evaluations(tmp_path: Path) -> None:
    """It also judges the one after which the controller before it was killed."""
    run = Recorded(early(tmp_path, patience=2)).started()
    assert stopped_after(run, {0: 5.0, 10: 4.0, 20: 4.1}) == (None, None)
    run.log.record("evaluation", loss=4.2, bpb=1.0, samples=13, step=30)
    again = commands_of(run.restarted(None))
    again.carry_out()
    assert again.stop is not None and "better than that of step 10 (4.0000)" in again.stop


def test_resumed_run_counts_evaluations_before_its_checkpoint(tmp_path: Path) -> None:
    """Evaluations after the checkpoint are repeated. A run that has stopped early trains until the next one."""
    config = early(tmp_path, patience=2)
    assert stopped_after(Recorded(config), {0: 5.0, 10: 4.0, 20: 4.1, 30: 4.2})[0] == 30
    resumed = Recorded(config, "r2", StateSource(Origin.CHECKPOINT, 20), steps_before=30)
    assert stopped_after(resumed, {30: 4.05})[0] == 30
    better = Recorded(config, "r3", StateSource(Origin.CHECKPOINT, 20), steps_before=30)
    assert stopped_after(better, {30: 3.9, 40: 3.8})[0] is None
    anew = Recorded(config, "r4")
    assert stopped_after(anew, {0: 9.0, 10: 8.0, 20: 7.0})[0] is None
