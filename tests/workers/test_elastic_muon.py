"""A run with Muon through rescales, a death within a step, and a checkpoint: states move with their parameters."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.workers.fleet import Fleet
from tests.workers.test_elastic import goes_on_from_a_checkpoint_and_after_a_death, rescaled
from tests.workers.tiny import Run, tiny, write_text


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.mark.slow
def test_muon_momentum_survives_rescales_death_and_checkpoint(text: str, tmp_path: Path) -> None:
    config = tiny(text, train_optimizer="muon")
    root = str(tmp_path / "checkpoints")
    with Fleet(3) as fleet:
        run = Run(fleet, config)
        run.fresh([0, 1, 2])
        undisturbed = [record.loss for record in run.train(7)]
        run.end()
    with Fleet(3) as fleet:
        run = Run(fleet, config)
        run.fresh([0, 1])
        before = rescaled(run, (2, [0, 1], [0, 1, 2]), (4, [0, 1, 2], [0]), (5, [0], [0, 1]))
        muons = {name for name, kind in before if kind == "momentum_buffer"}
        adamws = {name for name, kind in before if kind == "exp_avg"}
        assert muons and adamws and not muons & adamws, "every parameter has one optimizer"
        assert all(before[name, "momentum_buffer"].any() for name in muons)
        goes_on_from_a_checkpoint_and_after_a_death(run, before, root)
        np.testing.assert_allclose(run.losses(), undisturbed, rtol=2e-3)
