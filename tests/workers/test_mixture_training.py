"""A run on a mixture, through rescales: each position's sample once, and the losses of one process."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.nn.functional as F

from tests.data.sources import write_jsonl, write_parquet
from tests.data.test_damaged import damage_page
from tests.workers.fleet import Fleet, State
from tests.workers.tiny import FullState, Run, evaluate, plain_run, text_of, tiny, write_text
from vescale_ray.config import RunConfig
from vescale_ray.data.dataset_loading import load_eval_sets
from vescale_ray.data.loading_figures import take_errors
from vescale_ray.data.mixture import Mixture
from vescale_ray.data.text.chat import IGNORED
from vescale_ray.models.llama import Llama, LlamaConfig


@pytest.fixture
def sources(tmp_path: Path) -> list[dict[str, Any]]:
    """A text, and a small source of 8 samples in JSON lines."""
    lines = write_jsonl(tmp_path / "small.jsonl", [f"line {number} of few" for number in range(10)])
    return [{"corpus": write_text(tmp_path), "weight": 0.6}, {"corpus": str(lines), "weight": 0.4}]


def evaluate_sets(state: State) -> dict[str, tuple[float, int, float | None]]:
    trainer = state["trainer"]
    trainer.eval_sets = load_eval_sets(trainer.config.data, trainer.dataset)
    return trainer.evaluate_sets()


def check_losses(config: RunConfig, state: FullState, told: dict[int, dict[str, tuple[float, int, float | None]]]) -> None:
    """Compare the losses of all ranks on the set ``few`` with those of one unsharded model."""
    m, (few,) = config.model, load_eval_sets(config.data, text_of(config)).values()
    model = Llama(LlamaConfig(m.dim, m.layers, m.heads, m.kv_heads, m.ffn, 256, config.data.seq_len))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(state[name, "param"]))
        count = min(config.data.eval_samples, few.num_samples)
        tokens, targets = few.batch([i * few.num_samples // count for i in range(count)])
        expected = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).item()
    answers = [answer["few"] for answer in told.values()]
    assert len(answers) == 2 and answers[0] == answers[1]
    loss, samples, bpb = answers[0]
    assert samples == count and loss == pytest.approx(expected, rel=1e-5) and bpb == pytest.approx(loss / math.log(2))


def mixed(sources: list[dict[str, Any]], **changes: Any) -> RunConfig:
    return tiny(None, data_mixture=sources, data_eval={"few": {"corpus": sources[1]["corpus"]}}, **changes)


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
        state, told = run.full_state(), fleet.run(run.members, evaluate_sets)
        run.end()
    check_losses(config, state, told)
    used = [i for index in range(9) for i in run.records[index].ids]
    assert used == made.order(config.run.seed).ids(0, 90).tolist(), "a sample is lost, repeated or out of order"
    small = [i for i in used if i >= made.sources[0].num_samples]
    size = made.sources[1].num_samples
    assert len(small) == 36 > 3 * size and {small.count(i) for i in small} <= {36 // size, 36 // size + 1}
    losses, _, _ = plain_run(config, start, 9)
    np.testing.assert_allclose(run.losses(), losses, rtol=1e-4)


def loading_of(state: State) -> dict[str, int]:
    return dict(state["trainer"].usage.loading)


def with_damaged_rows(tmp_path: Path, group: int) -> RunConfig:
    """Return a run on three row groups, one of them damaged."""
    rows = np.random.default_rng(0).integers(0, 256, (90, 40)).tolist()
    path = write_parquet(tmp_path / "a.parquet", pa.array(rows, pa.list_(pa.int32())), 30, compression="zstd")
    damage_page(path, group)
    return tiny(str(path), data_damaged="skip", data_vocab=256)


def test_damaged_rows_are_no_targets_at_any_world_size(tmp_path: Path) -> None:
    """The loss of a step is the mean over the other targets of its global batch, on two workers and on three."""
    config = with_damaged_rows(tmp_path, 1)
    with Fleet(3) as fleet:
        run = Run(fleet, config)
        run.fresh([0, 1])
        start = run.full_state()
        run.train(3)
        run.end()
        run.resume([0, 1], [0, 1, 2])
        run.train(6)
        loading = fleet.run(run.members, loading_of)
        run.end()
    made = text_of(config)
    masked = [int((made.batch(run.records[index].ids)[1] == IGNORED).sum()) for index in range(6)]
    assert len(set(masked)) > 2 and 0 < max(masked) < config.tokens_per_step and len(take_errors(made)) == 1
    losses, _, _ = plain_run(config, start, 6)
    np.testing.assert_allclose(run.losses(), losses, rtol=1e-4)
    assert all((told["skipped_files"], told["skipped_records"]) == (0, 30) for told in loading.values())
    assert all(told["waiting_tokens"] == 3600 and told["read_bytes"] == 7200 for told in loading.values())


def test_held_out_samples_without_targets_have_no_loss(tmp_path: Path) -> None:
    config = with_damaged_rows(tmp_path, 2)
    with Fleet(2) as fleet:
        run = Run(fleet, config)
        run.fresh([0, 1])
        told = fleet.run(run.members, evaluate)
        run.end()
    assert all(math.isnan(loss) and samples == 13 for loss, samples in told.values())
