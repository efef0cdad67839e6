"""Folders of transformers' models: what is refused, the layout in files, and exports that from_pretrained loads."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.data.sources import train_tokenizer
from tests.models import hf_folders
from tests.models.adapter_runs import write_adapter_run
from vescale_ray import checkpoint
from vescale_ray.checkpoint.huggingface_layout import file_layout, persistent_buffers, read_buffers
from vescale_ray.cli import main
from vescale_ray.config import ConfigError, parse_config
from vescale_ray.controller.driver import preflight, training
from vescale_ray.errors import BadInput
from vescale_ray.models import hf
from vescale_ray.models.unit_selection import select_units
from vescale_ray.workers.building.model_building import build_model

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")


def configured(folder: Path, home: Path, **changes: Any) -> Any:
    tokens = home / "tokens.npy"
    if not tokens.exists():
        hf_folders.write_tokens(tokens)
    tree: dict[str, Any] = {
        "run": {"dir": str(home / "runs"), "name": "r"},
        "model": {"hf": str(folder)},
        "data": {"corpus": str(tokens), "seq_len": 16, "eval_samples": 0, "heldout": 0.0},
        "train": {"slots": 2, "slot_batch": 2, "lr": 1e-4},
        "elastic": {"workers": 2},
        "metrics": {"port": 0},
    }
    for key, value in changes.items():
        section, _, name = key.partition("_")
        tree[section][name] = value
    return parse_config(tree)


def refused(folder: Path, home: Path, **changes: Any) -> str:
    with pytest.raises(BadInput) as caught:
        preflight.foresee(configured(folder, home, **changes))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("kind", "dtype"), [*((kind, torch.float32) for kind in hf_folders.ARCHITECTURES), ("qwen3_moe", torch.bfloat16)])
def test_unchanged_weights_survive_import_and_export(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    folder = hf_folders.write(tmp_path / "model", kind, dtype)
    opened = hf.open_folder(folder)
    built = hf.build(opened)
    layout = file_layout(built)
    held: dict[str, torch.Tensor] = {name: torch.empty(p.shape) for name, p in built.named_parameters()}
    held |= {name: torch.empty(b.shape) for name, b in persistent_buffers(built).items()}
    checkpoint.import_hf(folder, held, layout=layout, cast=True)
    checkpoint.save({"model": {n: held[n] for n, _ in built.named_parameters()}}, tmp_path / "saved", 1)
    assert main(["ckpt", "export-hf", str(tmp_path / "saved"), str(tmp_path / "out"), "--model", str(folder)]) == 0
    before = {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}
    after = {k: v for file in (tmp_path / "out").glob("*.safetensors") for k, v in load_file(file).items()}
    assert before.keys() == after.keys()
    assert all(before[k].dtype == after[k].dtype == dtype and torch.equal(before[k], after[k]) for k in before)
    one, other = (transformers.AutoModelForCausalLM.from_pretrained(place).eval() for place in (folder, tmp_path / "out"))
    tokens = torch.arange(16)[None]
    assert torch.equal(one(tokens).logits, other(tokens).logits) and one.dtype == other.dtype == dtype


def test_blocks_of_a_model_become_units() -> None:
    with torch.device("meta"):
        model = hf_folders.build("qwen3_moe")
        blocks = nn.ModuleList([nn.Linear(2, 2), nn.ReLU()])
        nested = nn.ModuleDict({"a": nn.Sequential(nn.Linear(2, 2)), "h": blocks})
    names = {module: name for name, module in model.named_modules()}
    assert [names[unit] for unit in select_units(model, "auto")] == ["model.layers.0", "model.layers.1"]
    assert select_units(nested, "auto") == [blocks[0]]
    with pytest.raises(ValueError, match="model.units = auto: Linear has no list of modules; name its blocks"):
        select_units(nn.Linear(2, 2), "auto")


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return hf_folders.write(tmp_path / "model", "llama")


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_folders_without_a_trainable_model_are_refused(tmp_path: Path, llama: Path) -> None:
    assert refused(tmp_path / "none", tmp_path) == (
        f"model.hf = {tmp_path / 'none'}: no such folder; give a folder that save_pretrained wrote, or a downloaded snapshot of a model"
    )
    (tmp_path / "empty").mkdir()
    assert "has no config.json" in refused(tmp_path / "empty", tmp_path)
    edit(llama, model_type="no-such")
    assert refused(llama, tmp_path) == (
        f"model.hf = {llama}: transformers {transformers.__version__} knows no model_type = no-such; correct its config.json, or update "
        "transformers"
    )
    edit(llama, model_type="vit")
    assert "vit is not a causal language model of transformers" in refused(llama, tmp_path)
    edit(llama, model_type="llama", quantization_config={"quant_method": "mxfp4"})
    assert "quant_method 'mxfp4' can't be read" in refused(llama, tmp_path)
    (llama / "config.json").write_text("{")
    assert "config.json can't be read" in refused(llama, tmp_path)
    (llama / "config.json").write_text("[]")
    assert "names no model_type" in refused(llama, tmp_path)


def test_weights_that_do_not_fit_the_configuration_are_refused(tmp_path: Path, llama: Path) -> None:
    preflight.foresee(configured(llama, tmp_path))
    first = sorted(llama.glob("*.safetensors"))[0]
    tensors = load_file(first)
    name = next(iter(tensors))
    save_file({**tensors, name: tensors[name][:-1].contiguous()}, first, {"format": "pt"})
    assert f"{name!r} has shape" in refused(llama, tmp_path) and "the model's has" in refused(llama, tmp_path)
    first.unlink()
    assert "can't be opened: No such file" in refused(llama, tmp_path)
    shutil.rmtree(llama)
    hf_folders.write(llama, "llama", shard="1GB")
    edit(llama, num_hidden_layers=3)
    assert "lacks 9 of the model's 30 tensors: model.layers.2" in refused(llama, tmp_path)
    edit(llama, num_hidden_layers=1)
    assert "has 9 tensors that the model lacks: model.layers.1" in refused(llama, tmp_path)
    edit(llama, num_hidden_layers=2)
    wrapped = {f"module.{name}": one for name, one in load_file(llama / "model.safetensors").items()}
    save_file(wrapped, llama / "model.safetensors", {"format": "pt"})
    said = refused(llama, tmp_path)
    assert "lacks 21 of the model's 21 tensors: model.embed_tokens.weight, " in said and " and has module.lm_head.weight, " in said
    (llama / "model.safetensors").rename(llama / "pytorch_model.bin")
    assert "pytorch_model.bin is not a safetensors file" in refused(llama, tmp_path)
    (llama / "pytorch_model.bin").rename(llama / "Llama-Q4_K_M.gguf")
    assert "Llama-Q4_K_M.gguf is not a safetensors file" in refused(llama, tmp_path)
    assert "config.json: is a file; give a folder" in refused(llama / "config.json", tmp_path)


def test_a_start_from_random_weights_is_told(tmp_path: Path, llama: Path) -> None:
    assert "random weights" not in training._starting(preflight.check(configured(llama, tmp_path)))
    for file in llama.glob("*.safetensors*"):
        file.unlink()
    assert training._starting(preflight.check(configured(llama, tmp_path))).endswith(f", from random weights, since {llama} has none")


def test_data_that_does_not_fit_the_model_is_refused(tmp_path: Path, llama: Path) -> None:
    assert "data.vocab = 161: model.hf" in refused(llama, tmp_path, data_vocab=161)
    assert "takes 128 tokens at most" in refused(llama, tmp_path, data_seq_len=129)
    assert "'h.*' matches no module; the model has model, lm_head" in refused(llama, tmp_path, model_units=["h.*"])
    train_tokenizer(llama / "tokenizer.json", ["shard worker ring"] * 10)
    (llama / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    text = tmp_path / "text.txt"
    text.write_text("shard worker ring\n" * 500)
    said = refused(llama, tmp_path, data_corpus=str(text))
    assert "its ids need 271 rows, the embeddings of model.hf" in said and "160; use the tokenizer" in said
    for file in llama.glob("*.safetensors*"):
        file.unlink()
    edit(llama, vocab_size=300)
    found = preflight.foresee(configured(llama, tmp_path, data_corpus=str(text))).config
    assert found.data.tokenizer == str(llama / "tokenizer.json") and found.data.vocab == 300
    assert preflight.foresee(found).config == found
    train_tokenizer(tmp_path / "other.json", ["rescale buddy epoch"] * 10)
    said = refused(llama, tmp_path, data_corpus=str(text), data_tokenizer=str(tmp_path / "other.json"))
    assert "its tokens are not those of the model's" in said


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"hf": "x", "factory": "a:b"}, "model.hf = x with model.factory = a:b: leave one of the two out"),
        ({"args": {"dim": 3}}, "model.args = {'dim': 3} without model.factory"),
        ({"units": []}, "model.units = []: give auto, or a list of patterns"),
        ({"lora": {"rank": 4}}, "model.lora without model.hf: adapters need the weights of a folder; set model.hf"),
        ({"hf": "x", "lora": {"rank": 0}}, "model.lora.rank = 0: give at least 1"),
        ({"hf": "x", "lora": {"ranks": 4}}, "unknown key model.lora.ranks: did you mean model.lora.rank?"),
        ({"hf": "x", "lora": {"targets": []}}, "model.lora.targets = []: give all-linear, or a list of names of layers"),
        ({"hf": "x", "lora": 4}, "model.lora = 4: give keys and values in braces"),
        ({"loss": "nothing"}, "model.loss = nothing: give module and function as pkg.mod:fn"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(model: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({"model": model})
    assert said in str(caught.value)


def test_a_run_keeps_what_an_export_needs(tmp_path: Path) -> None:
    folder = hf_folders.write(tmp_path / "model", "deepseek_v3")
    config = preflight.check(configured(folder, tmp_path)).config
    kept = config.run_folder / "model"
    shutil.rmtree(folder)
    opened = hf.open_folder(kept)
    built = hf.build(opened)
    buffers = read_buffers(kept, file_layout(built), persistent_buffers(built))
    assert list(buffers) == ["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert 0 < next(iter(buffers.values())).max() < 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_adapters_are_exported_alone_and_merged(tmp_path: Path, dtype: torch.dtype) -> None:
    """peft loads the exported adapter; the merged weights give the logits of peft's merge."""
    folder = hf_folders.write(tmp_path / "model", "qwen3", dtype)
    config = preflight.check(configured(folder, tmp_path, model_lora={"rank": 4, "targets": ["q_proj", "down_proj"]})).config
    assert {p.dtype for n, p in build_model(config).named_parameters() if ".lora_" not in n} == {dtype}
    write_adapter_run(config)
    run, alone, merged = str(config.run_folder), tmp_path / "alone", tmp_path / "merged"
    assert main(["ckpt", "export-hf", run, str(alone)]) == 0
    assert main(["ckpt", "export-hf", run, str(merged), "--merge", "--dtype", "fp32"]) == 0
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    from peft import PeftModel

    tokens = torch.arange(16)[None]
    before = base(tokens).logits
    expected = PeftModel.from_pretrained(base, alone).merge_and_unload().eval()(tokens).logits
    found = transformers.AutoModelForCausalLM.from_pretrained(merged).eval()(tokens).logits
    assert not torch.allclose(before, expected, atol=1e-2)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert main(["ckpt", "export-hf", run, str(alone)]) == 2, "the folder is not empty"


def test_adapters_without_weights_are_refused(tmp_path: Path, llama: Path) -> None:
    for file in llama.glob("*.safetensors*"):
        file.unlink()
    assert "the folder holds no safetensors weights" in refused(llama, tmp_path, model_lora={})
