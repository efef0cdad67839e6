"""A run on Ray trains on a Parquet file of token ids, through the loss of a worker."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.controller.runs import carry_out, tiny, worst_difference
from tests.workers.tiny import plain_run
from vescale_ray.config import RunConfig
from vescale_ray.controller.driver.driver import ScheduledAction as Act
from vescale_ray.models.llama import Llama, LlamaConfig
from vescale_ray.workers.trainer import seed_of

VOCAB, STEPS = 300, 30


def write_tokens(path: Path) -> None:
    """Write 3.2 million tokens in three blocks; most tokens are their predecessor plus one."""
    rng = np.random.default_rng(0)
    rows = ((rng.integers(0, VOCAB, (3200, 1)) + np.arange(1000) + (rng.random((3200, 1000)) < 0.1)) % VOCAB).astype(np.int32)
    column = pa.ListArray.from_arrays(np.arange(0, rows.size + 1, 1000, dtype=np.int32), rows.reshape(-1))
    pq.write_table(pa.table({"input_ids": column}), path, row_group_size=500)


def initial(config: RunConfig) -> dict[tuple[str, str], np.ndarray]:
    """The parameters that every run with this configuration starts from."""
    m = config.model
    model = Llama(LlamaConfig(m.dim, m.layers, m.heads, m.kv_heads, m.ffn, VOCAB, config.data.seq_len))
    found = {}
    for name, parameter in model.named_parameters():
        full = torch.empty_like(parameter.detach())
        model.init_parameter(name, full, torch.Generator().manual_seed(seed_of(config.run.seed, name)))
        found[name, "param"] = full.numpy()
    return found


@pytest.mark.usefixtures("ray_here")
@pytest.mark.timeout(240)
def test_a_run_on_parquet_uses_each_sample_once_through_a_kill(tmp_path: Path) -> None:
    write_tokens(tmp_path / "tokens.parquet")
    data = {"data_corpus": str(tmp_path / "*.parquet"), "data_column": "input_ids", "data_vocab": VOCAB, "data_shuffle_blocks": 2}
    config = tiny(tmp_path, "parquet", elastic_workers=2, train_steps=STEPS, data_eval_samples=20, **data)
    finished = carry_out(config, Act(12, "kill", 1))
    assert (finished.result.state, finished.result.step) == ("DONE", STEPS), finished.result
    assert [(e["from"], e["to"]) for e in finished.of("rescaled")] == [(2, 1)]
    assert finished.accounting().exact
    losses, _, heldout = plain_run(config, initial(config), STEPS)
    assert worst_difference(finished.losses, dict(enumerate(losses, 1))) < 1e-4
    assert finished.of("evaluation")[-1]["loss"] == pytest.approx(heldout, rel=1e-4)
    assert losses[-1] < losses[0]
