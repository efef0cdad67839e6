"""A run on Ray trains a model of transformers on a Parquet file of token ids, through a kill and growth, and is exported."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.controller.runs import carry_out, tiny, worst_difference
from tests.controller.test_short_runs_on_ray import write_tokens
from tests.models import hf_folders
from tests.workers.test_hf_models import plain_losses
from vescale_ray import checkpoint
from vescale_ray.cli import main
from vescale_ray.controller.driver.driver import ScheduledAction as Act

VOCAB, STEPS = 160, 24
pytest.importorskip("transformers")


@pytest.mark.slow
@pytest.mark.usefixtures("ray_here")
@pytest.mark.timeout(240)
def test_a_hugging_face_run_outlives_changes_and_is_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three workers, two, one of which is killed: each sample is used once, and from_pretrained loads what one process would have."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    corpus = write_tokens(tmp_path, VOCAB)
    folder = hf_folders.write(tmp_path / "model", "qwen3_moe")
    data = {
        "data_corpus": corpus,
        "data_column": "input_ids",
        "data_vocab": VOCAB,
        "data_shuffle_blocks": 2,
        "data_eval_samples": 20,
        "data_eval": {"same": {"corpus": corpus}},
        "checkpoint_keep_best": 1,
        "checkpoint_keep_metric": "same_loss",
    }
    config = tiny(tmp_path, "hf", train_steps=STEPS, model_hf=str(folder), **data)
    finished = carry_out(config, Act(8, "rescale", 2), Act(16, "kill", 1))
    assert (finished.result.state, finished.result.step) == ("DONE", STEPS), finished.result
    assert [(e["from"], e["to"]) for e in finished.of("rescaled")] == [(3, 2), (2, 1)]
    assert finished.accounting().exact
    losses, model = plain_losses(folder, config, STEPS)
    assert worst_difference(finished.losses, dict(enumerate(losses, 1))) < 1e-4
    assert losses[-1] < losses[0]
    first, last = (event["sets"]["same"] for event in finished.of("evaluation"))
    assert last["loss"] < first["loss"] and last["samples"] == 20 and last["bpb"] is None
    newest = checkpoint.ls(config.checkpoint_root)[-1]
    assert checkpoint.open(config.checkpoint_root, newest).meta["metrics"]["same_loss"] == last["loss"]
    out = tmp_path / "out"
    assert main(["ckpt", "export-hf", str(config.run_folder), str(out)]) == 0
    from transformers import AutoModelForCausalLM

    tokens = torch.arange(VOCAB)[None, :100]
    exported = AutoModelForCausalLM.from_pretrained(out).eval()
    torch.testing.assert_close(exported(tokens).logits, model.eval()(tokens).logits, rtol=1e-3, atol=1e-3)
