"""``data.document_mask``: attention and positions do not cross documents."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models import hf_folders
from tests.workers.fleet import Fleet
from tests.workers.tiny import Run, text_of, tiny
from vescale_ray.config import ConfigError, RunConfig
from vescale_ray.controller.driver import preflight
from vescale_ray.errors import BadInput
from vescale_ray.lr_schedule import lr_at
from vescale_ray.models import hf, probes
from vescale_ray.models.llama import Llama, LlamaConfig
from vescale_ray.workers.steps.slot_batches import positions_in

os.environ["HF_HUB_OFFLINE"] = "1"
pytest.importorskip("transformers")
END = 1


def documents(tokens: Tensor) -> list[Tensor]:
    """The documents of one row, each with its end token."""
    cuts = (tokens == END).nonzero().flatten() + 1
    return [part for part in tokens.tensor_split(cuts) if len(part)]


def alone(model: Any, tokens: Tensor) -> Tensor:
    """The logits of each row, with each document by itself."""

    def logits(one: Tensor) -> Tensor:
        output = model(one[None])
        return output[0] if isinstance(output, Tensor) else output.logits[0]

    return torch.stack([torch.cat([logits(part) for part in documents(row)]) for row in tokens])


def test_positions_restart_behind_each_end_token() -> None:
    tokens = torch.tensor([[5, 6, END, 7, END, END, 8, 9], [END, 5, 5, 5, 5, 5, 5, END]])
    assert positions_in(tokens, END).tolist() == [[0, 1, 2, 0, 1, 0, 0, 1], [0, 0, 1, 2, 3, 4, 5, 6]]


IGNORING = ("gpt_oss",)


@pytest.mark.parametrize("kind", list(hf_folders.ARCHITECTURES))
def test_architectures_that_ignore_the_positions_are_known(tmp_path: Path, kind: str) -> None:
    model = hf.build(hf.open_folder(hf_folders.write(tmp_path, kind)))
    assert probes.masks_documents(model, probes.try_forward(model, positions=True)) is (kind not in IGNORING)


@pytest.mark.parametrize("kind", ["ours", *(kind for kind in hf_folders.ARCHITECTURES if kind not in IGNORING)])
def test_packed_documents_compute_as_each_alone(kind: str) -> None:
    torch.manual_seed(0)
    tokens = torch.randint(2, 160, (3, 40))
    tokens[torch.rand(3, 40) < 0.15] = END
    tokens[0, 5:8] = END
    if kind == "ours":
        model: Any = Llama(LlamaConfig(32, 2, 4, 2, 48, vocab=160, max_seq=64))
    else:
        model = hf_folders.build(kind)
        model.config.use_cache = False  # as hf.build does; with a cache, transformers does not look at the positions
    model.eval()
    with torch.no_grad():
        output = model(tokens, position_ids=positions_in(tokens, END))
        packed = output if isinstance(output, Tensor) else output.logits
        torch.testing.assert_close(packed, alone(model, tokens), rtol=1e-4, atol=1e-4)
        crossed = model(tokens)
    assert not torch.allclose(packed, crossed if isinstance(crossed, Tensor) else crossed.logits, atol=1e-2)


def write(path: Path) -> str:
    """Token ids of documents of about ten tokens."""
    rng = np.random.default_rng(0)
    tokens = np.load(hf_folders.write_tokens(path))
    tokens[rng.random(len(tokens)) < 0.1] = END
    np.save(path, tokens)
    return str(path)


def configured(folder: Path, tokens: str, **changes: Any) -> RunConfig:
    data = {"data_seq_len": 24, "data_vocab": hf_folders.VOCAB, "data_heldout": 0.0, "data_eval_samples": 0, "data_end_token": str(END)}
    return tiny(tokens, model_hf=str(folder), data_document_mask=True, **{**data, **changes})


def test_two_workers_train_as_each_document_alone(tmp_path: Path) -> None:
    folder = hf_folders.write(tmp_path / "model", "qwen3")
    config = configured(folder, write(tmp_path / "tokens.npy"))
    with Fleet(2) as fleet:
        run = Run(fleet, config)
        run.fresh([0, 1])
        run.train(4)
        run.end()
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    train, dataset = config.train, text_of(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=train.lr, betas=train.betas, eps=train.eps, weight_decay=train.weight_decay)
    order, losses = dataset.order(config.run.seed), []
    for step in range(4):
        tokens, targets = dataset.batch(order.ids(step * config.global_batch, config.global_batch))
        loss = F.cross_entropy(alone(model, tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), train.grad_clip)
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step, train)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    np.testing.assert_allclose(run.losses(), losses, rtol=1e-4)


def test_a_mask_without_ends_or_positions_is_refused(tmp_path: Path) -> None:
    folder, tokens = hf_folders.write(tmp_path / "model", "llama"), write(tmp_path / "tokens.npy")
    more = {"run_dir": str(tmp_path), "metrics_port": 0}
    preflight.foresee(configured(folder, tokens, **more))
    with pytest.raises(BadInput, match=r"data.document_mask = true: the end of a document is not known, .*; set data.end_token"):
        preflight.foresee(configured(folder, tokens, data_end_token=None, **more))
    with pytest.raises(BadInput, match=r"is token 2 in data.eval.other, but token 1 in the training data; set data.eval.other.end_token"):
        preflight.foresee(configured(folder, tokens, data_eval={"other": {"corpus": tokens, "end_token": "2"}}, **more))
    with pytest.raises(BadInput, match=r"data.document_mask = true: DropoutModel.forward takes no position_ids"):
        preflight.foresee(
            tiny("stdlib", model_factory="tests.workers.tiny_models:DropoutModel", model_units=["body"], data_document_mask=True, **more)
        )
    other = hf_folders.write(tmp_path / "other", "gpt_oss")
    with pytest.raises(BadInput, match=r"document_mask = true: the layers of transformers' GptOssForCausalLM do not keep documents apart"):
        preflight.foresee(configured(other, tokens, **more))
    with pytest.raises(ConfigError, match=r"data.document_mask = true with data.format = chat"):
        configured(folder, tokens, data_format="chat")
    with pytest.raises(ConfigError, match=r"data.document_mask = true with data.format = chat"):
        configured(folder, tokens, data_eval={"talk": {"corpus": "a.jsonl", "format": "chat"}})
