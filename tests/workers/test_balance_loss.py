"""Training of experts in a job: the load-balancing loss is the mean over the global batch, weighted by the model's coefficient."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.models import hf_folders
from tests.workers.tiny import FullState, running, text_of, tiny
from vescale_ray.config import RunConfig
from vescale_ray.lr_schedule import lr_at
from vescale_ray.models.moe import build
from vescale_ray.workers.steps.batch_losses import BatchLosses

os.environ["HF_HUB_OFFLINE"] = "1"
SIZES = {"dim": 16, "layers": 2, "heads": 2, "kv_heads": 1, "experts": 4, "top_k": 2, "ffn": 12, "head_dim": 8, "router_aux_loss_coef": 0.5}
STEPS = 4


def alone(config: RunConfig, model: Any, start: FullState, coefficient: float, steps: int = STEPS) -> tuple[list[float], FullState]:
    """Train one whole model with torch's optimizer, slot by slot. Returns the losses without load balancing, and the parameters."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(start[name, "param"]))
    train, dataset = config.train, text_of(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=train.lr, betas=train.betas, eps=train.eps, weight_decay=train.weight_decay)
    order, losses = dataset.order(config.run.seed), []
    for step in range(steps):
        total = 0.0
        for slot in range(train.slots):
            tokens, targets = dataset.batch(order.ids((step * train.slots + slot) * train.slot_batch, train.slot_batch))
            output = model(tokens)
            loss = F.cross_entropy(output.logits.flatten(0, 1), targets.flatten())
            total += loss.item() / train.slots
            ((loss + coefficient * output.aux_loss) / train.slots).backward()
        nn.utils.clip_grad_norm_(model.parameters(), train.grad_clip)
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step, train)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, {(name, "param"): p.detach().numpy() for name, p in model.named_parameters()}


def check(config: RunConfig, model: Any, coefficient: float, world: int) -> None:
    """Train on ``world`` workers, of which one leaves in the middle."""
    with running(config, world) as (_, run):
        losses, parameters = alone(config, model, run.full_state(), coefficient)
        run.train(STEPS // 2, rescale=True)
        run.end()
        run.resume(run.members, run.members[:-1])
        run.train(STEPS)
        np.testing.assert_allclose(run.losses(), losses, rtol=1e-5)
        after = run.full_state()
        for key, value in parameters.items():
            np.testing.assert_allclose(after[key], value, rtol=1e-4, atol=1e-5, err_msg=key[0])
        run.end()


def test_our_experts_train_on_workers_as_in_one_process(text: str) -> None:
    config = tiny(text, model_factory="vescale_ray.models.moe:build", model_args=SIZES, train_lr=0.01)
    check(config, build(**SIZES), 0.5, 3)


@pytest.mark.parametrize("how", ["none", pytest.param("full", marks=pytest.mark.slow), pytest.param("selective", marks=pytest.mark.slow)])
def test_a_transformers_model_adds_the_loss_of_its_config(tmp_path: Path, how: str) -> None:
    pytest.importorskip("transformers")
    from transformers import AutoModelForCausalLM

    folder = hf_folders.write(tmp_path / "model", "qwen3_moe", output_router_logits=True, router_aux_loss_coef=0.5)
    assert json.loads((folder / "config.json").read_text())["output_router_logits"]
    tokens = hf_folders.write_tokens(tmp_path / "tokens.npy")
    data: dict[str, Any] = {"data_vocab": hf_folders.VOCAB, "data_heldout": 0.0, "data_eval_samples": 0}
    config = tiny(tokens, model_hf=str(folder), train_activation_checkpointing=how, **data)
    check(config, AutoModelForCausalLM.from_pretrained(folder), 0.5, 2)


def test_the_weight_has_one_of_two_names_in_transformers(tmp_path: Path, text: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_key_value_heads": 1, "kv_channels": 8, "intermediate_size": 16}
    shape = transformers.JetMoeConfig(**sizes, vocab_size=256, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True)
    shape.aux_loss_coef = 0.5
    model = transformers.JetMoeForCausalLM(shape)
    config, tokens = tiny(text), torch.arange(32).view(2, 16)
    nll, trained = BatchLosses(config, model, text_of(config), torch.device("cpu"))(tokens, tokens)
    torch.testing.assert_close(trained - nll, 0.5 * 32 * model(tokens).aux_loss)
