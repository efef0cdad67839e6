"""A run on a real Ray cluster whose workers share the experts of each layer (expert parallelism)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.controller.cues import Cue, cues, played
from tests.controller.runs import carry_out, tiny, worst_difference
from tests.workers.test_balance_loss import SIZES, alone
from vescale_ray.config import RunConfig
from vescale_ray.models.moe import build
from vescale_ray.workers.building.initial_values import seed_of

pytestmark = [pytest.mark.usefixtures("ray_here"), pytest.mark.timeout(500)]
BEFORE, LOST, STEPS = 6, 12, 20


@pytest.mark.slow
@pytest.mark.fault("W1")
def test_shared_experts_resume_a_plain_run_and_lose_a_worker(tmp_path: Path) -> None:
    """Two workers gather all experts, and two share them in a second run. One of these dies, and the other goes on with all of them."""
    model = {"model_factory": "tests.controller.cues:experts", "model_args": SIZES, "data_eval_samples": 0, "train_lr": 0.01}
    options = {"elastic_workers": 2, "checkpoint_every": 10, "train_schedule": "constant", **model}

    def config(steps: int, shared: int) -> RunConfig:
        return tiny(tmp_path, "experts", train_expert_parallel=shared, train_steps=steps, **options)

    first = carry_out(config(BEFORE, 1))
    assert first.result.state == "DONE", first.result
    # Two workers need three rounds for six slots. The worker dies in the first forward of the step after LOST.
    with cues(Cue("kill", forward=3 * (LOST - BEFORE) + 1, rank=1)):
        finished = carry_out(config(STEPS, 2))
        assert played() == 1
    assert finished.result.state == "DONE" and not finished.left_behind, finished.result
    (lost,) = finished.of("rescaled")
    assert [lost[key] for key in ("from", "to", "reason", "source")] == [2, 1, "failure", "peer"] and lost["steps_replayed"] <= 1
    assert finished.accounting().exact
    assert worst_difference(finished.losses, of_one_process(config(STEPS, 1))) < 1e-4


def of_one_process(config: RunConfig) -> dict[int, float]:
    """Losses of the run in this process alone, with torch's optimizer and the experts in one place."""
    model: Any = build(**SIZES)
    start = {}
    for name, parameter in model.named_parameters():
        full = torch.empty(parameter.shape)
        model.init_parameter(name, full, torch.Generator().manual_seed(seed_of(config.run.seed, name)))
        start[name, "param"] = full.numpy()
    losses, _ = alone(config, model, start, SIZES["router_aux_loss_coef"], config.train.steps)
    return dict(enumerate(losses, 1))
