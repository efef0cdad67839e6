"""Models of transformers on several workers: weights from files, training through deaths and rescales, initial values, fine-tuning."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.data.chats import said, write_folder, write_rows
from tests.models import hf_folders
from tests.ranks import RankFailed
from tests.resident import peak_growth
from tests.workers.fleet import Fleet, State
from tests.workers.tiny import Run, as_numpy, evaluate, forget, form, leave, same_bits, text_of, tiny
from vescale_ray import checkpoint
from vescale_ray.cli import main
from vescale_ray.config import RunConfig
from vescale_ray.lr_schedule import lr_at
from vescale_ray.workers.network import process_groups
from vescale_ray.workers.resharding.shards import export_shards
from vescale_ray.workers.saving import write_checkpoint_shard

os.environ["HF_HUB_OFFLINE"] = "1"
pytest.importorskip("transformers")


def configured(folder: Path, tokens: str, **changes: Any) -> RunConfig:
    data = {"data_seq_len": hf_folders.SEQ_LEN, "data_vocab": hf_folders.VOCAB, "data_heldout": 0.0, "data_eval_samples": 0}
    return tiny(tokens, model_hf=str(folder), **{"train_lr": 1e-3, **data, **changes})


def plain_losses(folder: Path, config: RunConfig, steps: int) -> tuple[list[float], Any]:
    """Losses of the folder's model in one process by transformers and torch alone, over the same batches; and the trained model."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return train_plainly(model, config, steps), model


def train_plainly(model: Any, config: RunConfig, steps: int) -> list[float]:
    train, dataset = config.train, text_of(config)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=train.lr, betas=train.betas, eps=train.eps, weight_decay=train.weight_decay)
    order, batch, losses = dataset.order(config.run.seed), config.global_batch, []
    for step in range(steps):
        tokens, targets = dataset.batch(order.ids(step * batch, batch))
        loss = F.cross_entropy(model(tokens).logits.flatten(0, 1), targets.flatten())
        loss.backward()
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        nn.utils.clip_grad_norm_(parameters, train.grad_clip)
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step, train)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    """Workers for all tests, since each imports transformers."""
    with Fleet(3) as workers:
        yield workers


def train_through(run: Run, changes: Mapping[int, list[int]], steps: int, kept: Path | None = None) -> dict[tuple[str, str], np.ndarray]:
    """Train to the end, with other members after each step of ``changes``, and return the state, also as a checkpoint in ``kept``."""
    for step, members in changes.items():
        run.train(step, rescale=True)
        before = run.members
        run.end()
        run.resume(before, members)
    run.train(steps)
    state = run.full_state()
    if kept is not None:
        save(run, kept)
    run.end()
    run.fleet.run([0, 1, 2], forget)
    return state


def save(run: Run, kept: Path) -> None:
    """Save a checkpoint of the current generation."""
    votes = [checkpoint.Vote.from_json(text) for text in run.fleet.run(run.members, save_shard, str(kept), "a1").values()]
    checkpoint.commit(kept, votes, step=len(run.losses()), epoch=run.generation, attempt="a1", world=len(run.members), meta={})


@pytest.mark.parametrize("kind", list(hf_folders.ARCHITECTURES))
def test_architectures_train_as_in_one_process_through_rescales(tmp_path: Path, fleet: Fleet, kind: str) -> None:
    """Two workers, one of which is replaced, three, and two: losses and weights are those of transformers in one process.

    What ``ckpt export-hf`` writes has the logits of the sharded values."""
    folder = hf_folders.write(tmp_path / "model", kind)
    config = configured(folder, hf_folders.write_tokens(tmp_path / "tokens.npy"))
    run = Run(fleet, config)
    run.fresh([0, 1])
    first = run.full_state()
    state = train_through(run, {1: [2, 0], 2: [2, 0, 1], 3: [1, 2]}, 4, tmp_path / "kept")
    losses, model = plain_losses(folder, config, 4)
    from transformers import AutoModelForCausalLM

    start = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, parameter in start.named_parameters():
        assert np.array_equal(first[name, "param"], parameter.detach().numpy()), f"{name} is not as in the files"
    np.testing.assert_allclose(run.losses(), losses, rtol=1e-4)
    assert len(set(losses)) == 4
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(state[name, "param"], parameter.detach().numpy(), atol=2e-5, err_msg=name)
    assert main(["ckpt", "export-hf", str(tmp_path / "kept"), str(tmp_path / "out"), "--model", str(folder)]) == 0
    for name, parameter in start.named_parameters():
        parameter.data = torch.from_numpy(state[name, "param"])
    exported, tokens = AutoModelForCausalLM.from_pretrained(tmp_path / "out"), torch.arange(100)[None]
    torch.testing.assert_close(exported(tokens).logits, start(tokens).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["qwen3", "deepseek_v3"])
def test_random_weights_are_equal_at_every_world_size(tmp_path: Path, fleet: Fleet, kind: str) -> None:
    """A folder without weights gets transformers' initialization: its spread, equal bits on one worker and on three."""
    folder = hf_folders.write(tmp_path / "model", kind, hidden_size=64)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    states = []
    for members in ([0], [2, 1, 0]):
        run = Run(fleet, configured(folder, hf_folders.write_tokens(tmp_path / "tokens.npy")))
        run.fresh(members)
        states.append({key: value for key, value in run.full_state().items() if key[1] == "param"})
        run.train(1)
        run.end()
        fleet.run(members, forget)
    assert same_bits(*states)
    for (name, _), values in states[0].items():
        if name.endswith("norm.weight"):
            assert (values == 1).all(), name
        elif "layernorm" not in name:
            assert values.std() == pytest.approx(0.02, rel=0.2) and abs(values.mean()) < 0.01, name
    assert not np.array_equal(
        states[0]["model.layers.0.self_attn.o_proj.weight", "param"], states[0]["model.layers.1.self_attn.o_proj.weight", "param"]
    )


def _load_late(state: State, late: bool, config: RunConfig, port: int, prefix: str, rank: int, world: int) -> float:
    """Load, on a late rank with a pause longer than the timeout of a collective. Return the seconds that it took."""
    form(state, config, port, prefix, rank, world, 1, filled=False)
    pauses = [1.5 * config.elastic.collective_timeout_s] if late else []
    state["trainer"].beat = lambda: time.sleep(pauses.pop() if pauses else 0)
    began = time.monotonic()
    state["trainer"].initialize()
    took = time.monotonic() - began
    process_groups.barrier(60.0)
    leave(state, park=False)
    return took


@pytest.mark.parametrize("lora", [None, {"rank": 4, "targets": ["q_proj"]}], ids=["full", "LoRA"])
def test_rank_that_reads_weights_slowly_is_not_lost(tmp_path: Path, fleet: Fleet, lora: dict[str, Any] | None) -> None:
    folder, tokens = hf_folders.write(tmp_path / "model", "llama"), hf_folders.write_tokens(tmp_path / "tokens.npy")
    config = configured(folder, tokens, elastic_collective_timeout_s=2.0, model_lora=lora)
    prefix = fleet.prefix()
    took = fleet.run_each({w: (w == 1, config, fleet.port, prefix, w, 2) for w in (0, 1)}, _load_late)
    assert took[1] >= 3.0


def _peak_of_loading(state: State, config: RunConfig, port: int, prefix: str, rank: int, world: int) -> int:
    """Growth of this process's peak memory in bytes while it loads into shards that have memory already."""
    form(state, config, port, prefix, rank, world, 1, filled=False)
    trainer = state["trainer"]
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.fill_(1.0)  # gives each page of the shards memory
    grown = peak_growth(trainer.initialize)
    leave(state, park=False)
    return grown


@pytest.mark.slow
def test_loading_takes_little_more_memory_than_the_shard(tmp_path: Path) -> None:
    """1 GB of BF16 weights on two ranks: beside its shard a rank takes less than 256 MiB."""
    folder = hf_folders.write(
        tmp_path / "model",
        "llama",
        torch.bfloat16,
        shard="200MB",
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=28,
        vocab_size=32000,
        num_attention_heads=16,
        num_key_value_heads=16,
        head_dim=64,
    )
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert size > 1e9
    config = configured(folder, hf_folders.write_tokens(tmp_path / "tokens.npy"), data_vocab=32000)
    with Fleet(2) as fleet:
        prefix = fleet.prefix()
        peaks = fleet.run_each({w: (config, fleet.port, prefix, w, 2) for w in (0, 1)}, _peak_of_loading)
    for grown in peaks.values():
        assert grown < 256 << 20, f"{grown / 2**20:.0f} MiB"


def base_parts(state: State) -> list[tuple[str, int, np.ndarray]]:
    """Name, first element and values of this rank's part of each frozen parameter."""
    named = [(name, parameter) for name, parameter in state["trainer"].model.named_parameters() if ".lora_" not in name]
    return [(name, parameter.local_interval()[0], as_numpy(parameter.to_local().detach().flatten())) for name, parameter in named]


def save_shard(state: State, root: str, attempt: str) -> str:
    return str(write_checkpoint_shard(export_shards(state["trainer"]), root, attempt).to_json())


def peft_losses(folder: Path, config: RunConfig, adapters: dict[str, np.ndarray], steps: int) -> tuple[list[float], Any]:
    """Losses by peft in one process, from the initial values ``adapters``; and the trained model."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    keys = config.model.lora
    assert keys is not None
    base: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    chosen = LoraConfig(r=keys.rank, lora_alpha=int(keys.alpha), target_modules=keys.targets, task_type="CAUSAL_LM")
    model: Any = get_peft_model(base, chosen)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.from_numpy(adapters[name.removeprefix("base_model.model.")]))
    return train_plainly(model, config, steps), model


def check_base(parts: Mapping[int, list[tuple[str, int, np.ndarray]]], model: Any, dtype: torch.dtype) -> None:
    """The ranks together hold the whole base of ``model``, bit for bit."""
    named = {name: p.detach().flatten().to(dtype) for name, p in model.get_base_model().named_parameters() if ".lora_" not in name}
    sizes = dict.fromkeys(named, 0)
    for name, start, part in itertools.chain.from_iterable(parts.values()):
        assert np.array_equal(part, as_numpy(named[name][start : start + len(part)])), name
        sizes[name] += len(part)
    assert sizes == {name: value.numel() for name, value in named.items()}


@pytest.mark.parametrize(("kind", "dtype"), [("llama", torch.bfloat16), ("qwen3_moe", torch.float32)])
def test_adapters_train_as_with_peft_alone(tmp_path: Path, fleet: Fleet, kind: str, dtype: torch.dtype) -> None:
    """The base computes in train.param_dtype, whatever the dtype of its files. Each generation reads it from them."""
    folder = hf_folders.write(tmp_path / "model", kind, dtype)
    tokens = hf_folders.write_tokens(tmp_path / "tokens.npy")
    config = configured(folder, tokens, model_lora={"rank": 4, "alpha": 8, "targets": ["q_proj", "v_proj"]}, train_lr=0.02)
    run = Run(fleet, config)
    run.fresh([0, 1])
    first = {name: value for (name, kind), value in run.full_state().items() if kind == "param"}
    run.train(3, rescale=True)
    run.end()
    run.resume([0, 1], [1, 2, 0])
    run.train(6)
    state, base = run.full_state(), fleet.run(run.members, base_parts)
    run.end()
    fleet.run([0, 1, 2], forget)
    assert {name for name, _ in state} == set(first) and all(".lora_" in name for name in first)
    losses, model = peft_losses(folder, config, first, 6)
    np.testing.assert_allclose(run.losses(), losses, rtol=1e-4)
    assert losses[-1] < losses[0]
    check_base(base, model, dtype)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            ours = state[name.removeprefix("base_model.model."), "param"]
            np.testing.assert_allclose(ours, parameter.detach().numpy(), atol=2e-5, err_msg=name)
    assert all(not value.any() for name, value in first.items() if name.endswith("lora_B.default.weight"))


def test_checkpoints_of_adapters_hold_no_base(tmp_path: Path, fleet: Fleet) -> None:
    """A resume reads the base from the files, which must hold the weights that the adapters were trained on."""
    folder, kept = hf_folders.write(tmp_path / "model", "llama"), tmp_path / "kept"
    tokens = hf_folders.write_tokens(tmp_path / "tokens.npy")
    config = configured(folder, tokens, model_lora={"rank": 4, "alpha": 8, "targets": ["q_proj"]}, train_lr=0.02)
    run = Run(fleet, config)
    run.fresh([0, 1])
    first = {name: value for (name, kind), value in run.full_state().items() if kind == "param"}
    run.train(3)
    save(run, kept)
    run.end()
    fleet.run([0, 1], forget)
    assert set(checkpoint.open(kept).tensors) == set(first)
    assert run.from_checkpoint([1, 2, 0], str(kept)) == 3
    run.train(6)
    base = fleet.run(run.members, base_parts)
    run.end()
    losses, model = peft_losses(folder, config, first, 6)
    np.testing.assert_allclose(run.losses(), losses, rtol=1e-4)
    check_base(base, model, torch.float32)
    model.get_base_model().model.layers[1].mlp.up_proj.weight.data += 0.01
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    model.unload().save_pretrained(folder)
    with pytest.raises(RankFailed, match="its weights are not those with which the adapters of the state were trained"):
        run.from_checkpoint([1, 2, 0], str(kept))
    run.end()
    fleet.run([0, 1, 2], forget)


def test_parameters_that_text_does_not_reach_stay_as_they_are(tmp_path: Path, fleet: Fleet) -> None:
    """Gemma 3 with images, of which the blocks for images are units, too."""
    folder = hf_folders.write(tmp_path / "model", "gemma3", **hf_folders.IMAGES)
    run = Run(fleet, configured(folder, hf_folders.write_tokens(tmp_path / "tokens.npy")))
    run.fresh([0, 1])
    before = run.full_state()
    after = train_through(run, {3: [1, 2, 0]}, 5)
    losses, _ = plain_losses(folder, run.config, 5)
    np.testing.assert_allclose(run.losses(), losses, rtol=1e-4)
    frozen = {key for key in before if ".vision_tower." in key[0] or ".multi_modal_projector." in key[0]}
    assert len(frozen) == 50 and {kind for _, kind in frozen} == {"param"}
    assert all((before[key].tobytes() == after[key].tobytes()) is (key in frozen) for key in before if key[1] == "param")


CHAT_VOCAB = 304


def chat_config(tmp_path: Path, question: str, **changes: object) -> RunConfig:
    """A tiny model, and conversations whose answers have very different lengths."""
    folder = hf_folders.write(tmp_path / "model", "qwen3", vocab_size=CHAT_VOCAB)
    write_folder(folder)
    talks = [said(f"user: {question} {n}", "assistant: " + "yes " * (1 + n % 7), f"user: {n}", "assistant: no") for n in range(60)]
    rows = write_rows(tmp_path / "rows.jsonl", ({"messages": talk} for talk in talks))
    keys = {"data_format": "chat", "data_tokenizer": str(folder / "tokenizer.json"), "data_vocab": CHAT_VOCAB, "data_heldout": 0.2}
    return configured(folder, rows, **{**keys, "data_eval_samples": 13, **changes})


@pytest.mark.parametrize("deterministic", [False, True])
def test_losses_on_answers_are_those_of_one_process(tmp_path: Path, fleet: Fleet, deterministic: bool) -> None:
    """Two workers, then three: each step's loss is the mean over the answers of the global batch, and so are the gradients."""
    config = chat_config(tmp_path, "why", elastic_deterministic=deterministic)
    run = Run(fleet, config)
    run.fresh([0, 1])
    run.train(2, rescale=True)
    before = run.members
    run.end()
    run.resume(before, [0, 1, 2])
    run.train(4)
    state, told = run.full_state(), fleet.run(run.members, evaluate)
    run.end()
    fleet.run([0, 1, 2], forget)
    data = text_of(config)
    ids = [i for index in range(4) for i in run.records[index].ids]
    assert ids == data.order(config.run.seed).ids(0, 40).tolist()
    counts = [int((data.batch(run.records[index].ids)[1] != -100).sum()) for index in range(4)]
    assert len(set(counts)) > 2 and max(counts) < config.tokens_per_step / 2
    losses, model = plain_losses(Path(str(config.model.hf)), config, 4)
    np.testing.assert_allclose(run.losses(), losses, rtol=1e-4)
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(state[name, "param"], parameter.detach().numpy(), atol=2e-5, err_msg=name)
    inputs, targets = data.heldout_batch([i * data.heldout_samples // 13 for i in range(13)])
    with torch.no_grad():
        heldout = F.cross_entropy(model(inputs).logits.flatten(0, 1), targets.flatten()).item()
    assert told[0] == told[1] == told[2] and told[0] == (pytest.approx(heldout, rel=1e-4), 13)


def test_a_batch_without_answers_has_no_loss(tmp_path: Path, fleet: Fleet) -> None:
    """Questions much longer than a batch: some steps have nothing to learn, and leave the model as it is."""
    config = chat_config(tmp_path, "why " * 60, train_slots=2, train_slot_batch=1, train_weight_decay=0.0, data_heldout=0.9)
    run = Run(fleet, config)
    run.fresh([0, 1])
    before = run.full_state()
    run.train(1)
    after, told = run.full_state(), fleet.run(run.members, evaluate)
    run.end()
    fleet.run([0, 1], forget)
    assert not (text_of(config).batch(run.records[0].ids)[1] != -100).any()
    assert run.records[0].loss == run.records[0].grad_norm == 0.0 and run.records[0].tokens == config.tokens_per_step
    assert all(np.array_equal(before[name, "param"], after[name, "param"]) for name, kind in after if kind == "param")
    assert np.isfinite(told[0][0])


def test_selective_checkpointing_of_changed_results_is_refused(tmp_path: Path, fleet: Fleet) -> None:
    """The experts of GPT-OSS add their bias to a matrix product in place."""
    folder = hf_folders.write(tmp_path / "model", "gpt_oss")
    config = configured(folder, hf_folders.write_tokens(tmp_path / "tokens.npy"), train_activation_checkpointing="selective")
    run = Run(fleet, config)
    run.fresh([0])
    with pytest.raises(RankFailed, match="BadInput: train.activation_checkpointing = selective: .* use full or none"):
        run.train(1)
    fleet.run([0], leave, False)
    fleet.run([0], forget)
