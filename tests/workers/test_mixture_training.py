"""A run on a mixture, through rescales: each position's sample once, and the losses of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.sources import write_jsonl
from tests.workers.fleet import Fleet
from tests.workers.tiny import Run, plain_run, text_of, tiny, write_text
from vescale_ray.config import RunConfig
from vescale_ray.data.mixture import Mixture


@pytest.fixture
def sources(tmp_path: Path) -> list[dict[str, Any]]:
    """A text, and a small source of 8 samples in JSON lines."""
    lines = write_jsonl(tmp_path / "small.jsonl", [f"line {number} of few" for number in range(10)])
    return [{"corpus": write_text(tmp_path), "weight": 0.6}, {"corpus": str(lines), "weight": 0.4}]


def mixed(sources: list[dict[str, Any]], **changes: Any) -> RunConfig:
    return tiny(None, data_mixture=sources, **changes)


def test_a_mixture_is_trained_once_through_rescales(sources: list[dict[str, Any]]) -> None:
    config, worlds = mixed(sources), (2, 1, 2)
    made = text_of(config)
    assert isinstance(made, Mixture)
    with Fleet(max(worlds)) as fleet:
        run = Run(fleet, config)
        run.fresh([0, 1])
        start = run.full_state()
        for transition, world in enumerate(worlds):
            if transition:
                survivors = run.members
                run.end()
                run.resume(survivors, list(range(world)))
            run.train(3 * (transition + 1))
        run.end()
    used = [i for index in range(9) for i in run.records[index].ids]
    assert used == made.order(config.run.seed).ids(0, 90).tolist(), "a sample is lost, repeated or out of order"
    small = [i for i in used if i >= made.sources[0].num_samples]
    size = made.sources[1].num_samples
    assert len(small) == 36 > 3 * size and {small.count(i) for i in small} <= {36 // size, 36 // size + 1}
    losses, _, _ = plain_run(config, start, 9)
    np.testing.assert_allclose(run.losses(), losses, rtol=1e-4)
