"""A run with Muon through rescales, a death in the middle of a step, and a checkpoint: states move with their parameters."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.workers.fleet import Fleet
from tests.workers.test_elastic import _save
from tests.workers.tiny import Run, same_bits, tiny, write_text


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_text(tmp_path_factory.mktemp("text"))


def test_momentum_follows_its_matrix_through_rescales_a_death_and_a_checkpoint(text: str, tmp_path: Path) -> None:
    config = tiny(text, train_optimizer="muon")
    root = str(tmp_path / "checkpoints")
    with Fleet(3) as fleet:
        run = Run(fleet, config)
        run.fresh([0, 1, 2])
        undisturbed = [record.loss for record in run.train(8)]
        run.end()
    with Fleet(3) as fleet:
        run = Run(fleet, config)
        run.fresh([0, 1])
        for until, survivors, members in ((2, [0, 1], [0, 1, 2]), (4, [0, 1, 2], [0]), (5, [0], [0, 1])):
            run.train(until)
            before = run.full_state()
            run.end()
            report = run.resume(survivors, members)
            assert same_bits(before, run.full_state()) and report.moved_bytes == report.lower_bound
        muons = {name for name, kind in before if kind == "momentum_buffer"}
        adamws = {name for name, kind in before if kind == "exp_avg"}
        assert muons and adamws and not muons & adamws, "every parameter has one optimizer"
        assert all(before[name, "momentum_buffer"].any() for name in muons)
        _save(run, root)
        run.train(6)
        after = run.full_state()
        run.end()
        assert run.from_checkpoint([0, 1], root) == 5
        run.train(6)
        assert same_bits(after, run.full_state()), "the step after loading is not the one that was not interrupted"
        run.end()
        assert run.from_checkpoint([0, 1, 2], root) == 5
        assert same_bits(before, run.full_state())
        survivors, _, _ = run.train_with_a_death(8, victim=1, step=6, delay=0.0)
        run.resume(survivors, survivors)
        run.train(8)
        np.testing.assert_allclose(run.losses(), undisturbed, rtol=2e-3)
