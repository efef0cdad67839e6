"""Folders, adapters and resumes of transformers' models that would train or export something else than meant."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.data.chats import CHATML, write_folder, write_rows
from tests.models import hf_folders
from tests.models.adapter_runs import write_adapter_run
from tests.models.test_hf import configured, edit, refused
from vescale_ray import checkpoint
from vescale_ray.checkpoint import huggingface_export
from vescale_ray.cli import main
from vescale_ray.config import RunConfig, parse_config
from vescale_ray.controller.driver import preflight
from vescale_ray.errors import BadInput
from vescale_ray.workers.building.initial_values import fill, load_base
from vescale_ray.workers.building.model_building import build_model

transformers = pytest.importorskip("transformers")
TOKENS = torch.arange(16)[None]


def adapted(home: Path, kind: str, **keys: Any) -> RunConfig:
    """A run of one step that trained adapters of a new model."""
    config = preflight.check(configured(hf_folders.write(home / "model", kind), home, model_lora={"rank": 2, **keys})).config
    write_adapter_run(config)
    return config


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (["q_proj", "v_porj"], "v_porj is not a layer; the model's linear layers are down_proj, gate_proj"),
        (["embed_tokens"], "embed_tokens is of type Embedding; the model's linear layers are"),
    ],
)
def test_each_target_of_adapters_is_a_linear_layer(tmp_path: Path, targets: list[str], said: str) -> None:
    folder = hf_folders.write(tmp_path / "model", "llama")
    assert f"model.lora.targets = {targets}: {said}" in refused(folder, tmp_path, model_lora={"targets": targets})


def test_a_layer_that_peft_takes_for_experts_is_refused(tmp_path: Path) -> None:
    folder = hf_folders.write(tmp_path / "model", "deepseek_v3")
    said = refused(folder, tmp_path, model_lora={"targets": ["o_proj", "down_proj"]})
    assert said.endswith("peft takes down_proj for the fused experts of DeepseekV3ForCausalLM, which get no adapters; leave it out")


@pytest.mark.parametrize("targets", ["all-linear", ["c_attn"]])
def test_transposed_layers_get_no_adapters(tmp_path: Path, targets: Any) -> None:
    config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=160, n_positions=128)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    said = refused(tmp_path / "model", tmp_path, model_lora={"targets": targets})
    assert ("c_attn is of type Conv1D" if targets == ["c_attn"] else "the model has no linear layer but its head") in said


ADAPTED = {
    "qwen3_moe": {"q", "k", "v", "o"},
    "deepseek_v3": {"q_a", "q_b", "kv_b", "o"},
    "qwen2": {"q", "k", "v", "o", "gate", "up", "down"},
}


@pytest.mark.parametrize("kind", ADAPTED)
def test_adapters_of_all_linear_layers_are_those_that_peft_loads(tmp_path: Path, kind: str) -> None:
    """peft's own all-linear also takes the fused experts, which are no layers. The layers of Qwen2 have biases."""
    from peft import PeftModel

    config = adapted(tmp_path, kind, targets="all-linear")
    run, alone, merged = str(config.run_folder), str(tmp_path / "alone"), str(tmp_path / "merged")
    assert main(["ckpt", "export-hf", run, alone]) == 0 and main(["ckpt", "export-hf", run, merged, "--merge"]) == 0
    names = load_file(Path(alone) / "adapter_model.safetensors")
    assert {name.split(".")[-3] for name in names} - {"kv_a_proj_with_mqa"} == {f"{name}_proj" for name in ADAPTED[kind]}
    base = transformers.AutoModelForCausalLM.from_pretrained(config.model.hf)
    before = base(TOKENS).logits
    expected = PeftModel.from_pretrained(base, alone).eval()(TOKENS).logits
    found = transformers.AutoModelForCausalLM.from_pretrained(merged).eval()(TOKENS).logits
    assert not torch.allclose(before, expected, atol=1e-2)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_an_adapter_of_a_tied_head_is_not_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(adapted(tmp_path, "qwen3", targets=["lm_head", "q_proj"]).run_folder)
    assert main(["ckpt", "export-hf", run, str(tmp_path / "merged"), "--merge"]) == 2
    assert "--merge: lm_head shares its weight with another layer, which has no adapter; export the" in capsys.readouterr().err
    assert main(["ckpt", "export-hf", run, str(tmp_path / "alone")]) == 0


def test_an_export_without_the_copied_description_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = adapted(tmp_path, "llama", targets=["q_proj"])
    shutil.rmtree(config.run_folder / "model")
    assert main(["ckpt", "export-hf", str(config.run_folder), str(tmp_path / "out"), "--merge"]) == 2
    assert "has no config.json, which the run had copied from model.hf; name the model's folder with --model" in capsys.readouterr().err
    assert main(["ckpt", "export-hf", str(config.run_folder), str(tmp_path / "out"), "--merge", "--model", str(config.model.hf)]) == 0


def test_settings_that_change_the_function_are_told_on_resume(tmp_path: Path) -> None:
    config = adapted(tmp_path, "llama", targets=["q_proj"], alpha=4)
    folder = Path(str(config.model.hf))
    same, other = ({"rank": 2, "targets": ["q_proj"], "alpha": alpha} for alpha in (4, 400))
    assert not preflight.check(configured(folder, tmp_path, model_lora=same)).warnings
    (said,) = preflight.check(configured(folder, tmp_path, model_lora=other)).warnings
    assert said.endswith("was saved with model.lora.alpha = 4.0, now it is 400.0: its weights were trained with the former")
    edit(folder, rms_norm_eps=0.5, dtype="bfloat16")
    (said,) = preflight.check(configured(folder, tmp_path, model_lora=same)).warnings
    assert f"{folder}/config.json: rms_norm_eps = " in said and "now it is 0.5" in said


def test_adapters_of_other_weights_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Checkpoints hold the adapters alone, so that a resume and a merge need the weights that they were trained on."""
    config = adapted(tmp_path, "llama", targets=["q_proj"])
    folder, run, keys = Path(str(config.model.hf)), str(config.run_folder), {"rank": 2, "targets": ["q_proj"]}
    other, model = tmp_path / "other", transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.model.layers[1].mlp.up_proj.weight.data += 0.01
    model.save_pretrained(other)
    with pytest.raises(BadInput, match=f"model.hf = {other}: its weights are not those with which the adapters of .* were trained; name"):
        preflight.check(configured(other, tmp_path, model_lora=keys))
    assert main(["ckpt", "export-hf", run, str(tmp_path / "out"), "--merge", "--model", str(other)]) == 2
    assert f"--model = {other}: " in (said := capsys.readouterr().err) and "was trained on other weights; name the folder of the" in said
    shutil.move(folder, tmp_path / "moved")
    assert main(["ckpt", "export-hf", run, str(tmp_path / "out"), "--merge"]) == 2
    assert "--merge: model.hf = " in (said := capsys.readouterr().err) and "no such folder; name the folder of the base with" in said
    assert not (tmp_path / "out").exists()
    assert main(["ckpt", "export-hf", run, str(tmp_path / "out"), "--merge", "--model", str(tmp_path / "moved")]) == 0


def test_adapters_are_exported_without_their_runs_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As from an object store. The checkpoint tells of the run; a merge needs the folder of the base."""
    config = adapted(tmp_path, "qwen3", targets=["q_proj"])
    kept = shutil.copytree(config.checkpoint_root, tmp_path / "kept")
    outs = {}
    for path, base in ((config.run_folder, []), (kept, ["--model", str(config.model.hf)])):
        for options in ([], ["--merge", *base]):
            out = tmp_path / f"{path.name}{len(options)}"
            assert main(["ckpt", "export-hf", str(path), str(out), "--dtype", "bf16", *options]) == 0
            outs[path, bool(options)] = load_file(next(out.glob("*.safetensors")))
    with pytest.raises(BadInput, match=f"model.hf = {tmp_path}/kept0: holds an adapter of peft alone; merge it into its base"):
        preflight.check(configured(tmp_path / "kept0", tmp_path))
    for merged in (False, True):
        first, second = (outs[path, merged] for path in (config.run_folder, kept))
        assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
        assert {value.dtype for value in first.values()} == {torch.bfloat16}
    for given, words in (
        (["--merge"], f"--merge: {kept} is not its run's folder; name the folder of the base with --model"),
        (["--include", "*q_proj*"], "--include: an adapter, or the weights with it, is exported whole; leave it out"),
        (["--merge", "--key", "ema", "--model", str(config.model.hf)], "--key: an adapter, or the weights with it, is exported whole"),
    ):
        capsys.readouterr()
        assert main(["ckpt", "export-hf", str(kept), str(tmp_path / "more"), *given]) == 2
        assert words in capsys.readouterr().err


def test_damaged_checkpoint_of_adapters_is_left_to_the_workers(tmp_path: Path) -> None:
    """They go on from the one before. Without adapters, the start does not read what is damaged here."""
    config = adapted(tmp_path, "llama", targets=["q_proj"])
    scalars = next(Path(config.checkpoint_root).rglob("*.aux.json"))
    scalars.write_bytes(scalars.read_bytes()[:-3] + b"...")
    keys = {"rank": 2, "targets": ["q_proj"]}
    found = preflight.check(configured(Path(str(config.model.hf)), tmp_path, model_lora=keys))
    assert found.source.step == 1


def test_base_that_goes_away_in_a_run_is_told(tmp_path: Path) -> None:
    config = adapted(tmp_path, "llama", targets=["q_proj"])
    model = build_model(config)
    for file in Path(str(config.model.hf)).glob("*.safetensors*"):
        file.unlink()
    with pytest.raises(BadInput, match=f"model.hf = {config.model.hf}: its safetensors weights are gone, and adapters need them; restore"):
        load_base(config, model, None, lambda: None)


@pytest.mark.parametrize("adapters", [None, {"rank": 2}], ids=["full", "adapters"])
def test_weights_that_are_not_finite_are_named(tmp_path: Path, adapters: dict[str, Any] | None) -> None:
    folder, name = hf_folders.write(tmp_path / "model", "llama", shard="1GB"), "model.layers.1.mlp.up_proj.weight"
    weights = load_file(folder / "model.safetensors")
    weights[name][3, 5] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = configured(folder, tmp_path, model_lora=adapters)
    model = build_model(config).to_empty(device="cpu")
    with pytest.raises(BadInput, match=f"model.hf = {folder}: .*layers.1.mlp.up_proj.* holds Inf or NaN; download the folder again"):
        if adapters:
            load_base(config, model, None, lambda: None)
        else:
            fill(config, model, lambda: build_model(config), lambda: None)


def test_weights_of_other_programs_beside_the_model_are_not_read(tmp_path: Path) -> None:
    folder = hf_folders.write(tmp_path / "model", "mistral", shard="1GB")
    save_file({"layers.0.attention.wq.weight": torch.ones(2)}, folder / "consolidated.safetensors")
    preflight.foresee(configured(folder, tmp_path))
    shutil.copy(folder / "model.safetensors", folder / "model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(load_file(folder / "model.safetensors"), "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    said = refused(folder, tmp_path)
    assert "model.safetensors.index.json does not name model.safetensors, which lies beside it; remove the one that is old" in said


def test_quantized_weights_and_code_in_the_folder_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = hf_folders.write(tmp_path / "model", "llama", shard="1GB")
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "lm_head.weight": tensors["lm_head.weight"].to(torch.int8)}, folder / "model.safetensors", {"format": "pt"})
    assert "'lm_head.weight' holds integers (torch.int8): quantized weights can't be trained" in refused(folder, tmp_path)
    edit(folder, model_type="other", auto_map={"AutoConfig": "code.Config"})
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))  # transformers would ask whether to run the code
    assert "other needs the code in its folder (auto_map); build it in a model.factory" in refused(folder, tmp_path)


def test_text_as_bytes_is_refused_for_weights_of_other_tokens(tmp_path: Path) -> None:
    folder, text = hf_folders.write(tmp_path / "model", "llama", vocab_size=300), tmp_path / "a.txt"
    text.write_text("a line of text\n" * 500)
    said = refused(folder, tmp_path, data_corpus=str(text))
    assert f"model.hf = {folder}: has no tokenizer.json, so text would be bytes" in said and "set data.tokenizer" in said
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    assert preflight.foresee(configured(folder, tmp_path, data_corpus=str(text))).config.data.vocab == 300, "trained from the start"


@pytest.mark.parametrize("loss", ["no_such_module:loss", "math:no_such_function"])
def test_a_loss_that_can_not_be_imported_is_refused(loss: str, tmp_path: Path) -> None:
    folder = hf_folders.write(tmp_path / "model", "llama")
    said = refused(folder, tmp_path, model_loss=loss)
    assert said.startswith(f"model.loss = {loss}: ") and said.endswith("; give an importable pkg.mod:function")


@pytest.mark.parametrize("given", ["losses_here:summed", "losses_here.py:summed"])
def test_a_module_of_this_folder_gets_its_remedy(given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = hf_folders.write(tmp_path / "model", "llama")
    (tmp_path / "losses_here.py").write_text("summed = None\n")
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one])
    monkeypatch.chdir(tmp_path)
    remedy = "write losses_here:summed, and set the variable PYTHONPATH=. for losses_here.py in this folder"
    assert refused(folder, tmp_path, model_loss=given).endswith(f"No module named 'losses_here'; {remedy}")


def test_an_export_is_of_the_model_that_it_describes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved, folders = str(tmp_path / "saved"), {kind: hf_folders.write(tmp_path / kind, kind) for kind in ("llama", "qwen2", "mistral")}
    edit(folders["mistral"], intermediate_size=64)
    model = transformers.AutoModelForCausalLM.from_pretrained(folders["llama"])
    checkpoint.save({"model": dict(model.named_parameters())}, saved, 1)
    for kind, said in (
        ("qwen2", "it has no model.layers.0.self_attn.q_proj.bias"),
        ("mistral", "it has model.layers.0.mlp.gate_proj.weight of shape (48, 32), the model of (64, 32)"),
    ):
        assert main(["ckpt", "export-hf", saved, str(tmp_path / "out"), "--model", str(folders[kind])]) == 2
        told = capsys.readouterr().err
        assert f"--model = {folders[kind]}: " in told and f"is of another model: {said}; name the folder of its model with --model" in told
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("{}")
    assert main(["ckpt", "export-hf", saved, str(tmp_path / "out"), "--model", str(folders["llama"])]) == 2
    assert "out holds config.json: give a folder without model files" in capsys.readouterr().err
    assert (tmp_path / "out" / "config.json").read_text() == "{}"
    (tmp_path / "out" / "config.json").unlink()
    assert main(["ckpt", "export-hf", saved, str(tmp_path / "out"), "--model", str(folders["llama"])]) == 0


def test_a_full_disk_is_named_with_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, saved, out = hf_folders.write(tmp_path / "model", "llama"), str(tmp_path / "saved"), tmp_path / "out"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    checkpoint.save({"model": dict(model.named_parameters())}, saved, 1)

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(huggingface_export.os, "write", full)
    assert main(["ckpt", "export-hf", saved, str(out), "--model", str(folder)]) == 1
    assert f"vescale-ray: {out}/model.safetensors: No space left on device" in capsys.readouterr().err and not out.exists()


def test_tokens_that_the_model_lacks_are_refused(tmp_path: Path) -> None:
    folder, tokens = hf_folders.write(tmp_path / "model", "llama"), np.zeros(5_000_000, np.uint16)
    tokens[-10] = 5000
    np.save(tmp_path / "other.npy", tokens)
    mixture = [{"corpus": hf_folders.write_tokens(tmp_path / "tokens.npy")}, {"corpus": str(tmp_path / "other.npy")}]
    for keys in ({"data_corpus": str(tmp_path / "other.npy")}, {"data_corpus": None, "data_mixture": mixture}):
        said = refused(folder, tmp_path, **keys)
        assert "other.npy: token 4999990: token 5000 is not below the vocabulary's size, 160; use tokens of the model's" in said


def test_sizes_that_the_folder_replaces_are_told(tmp_path: Path) -> None:
    folder = hf_folders.write(tmp_path / "model", "llama")
    told = preflight.foresee(configured(folder, tmp_path, model_layers=9, model_tie=True)).warnings
    assert told == tuple(f"model.{key}: config.json of model.hf describes the model; leave it out" for key in ("layers = 9", "tie = True"))
    assert not preflight.foresee(configured(folder, tmp_path, model_layers=4)).warnings


def test_keys_without_effect_are_told(tmp_path: Path) -> None:
    folder, chats = hf_folders.write(tmp_path / "model", "llama", vocab_size=320), tmp_path / "chats.jsonl"
    write_folder(tmp_path / "tokens", CHATML)
    write_rows(chats, [{"prompt": "is it so", "completion": "yes it is"}] * 40)
    keys = {"data_corpus": str(chats), "data_format": "chat", "data_tokenizer": str(tmp_path / "tokens" / "tokenizer.json")}
    told = preflight.foresee(configured(folder, tmp_path, **keys, data_column="dialog", train_warmup_steps=9, train_steps=8)).warnings
    assert told == (
        "data.column = dialog: rows of data.format = chat have columns of their own; leave it out",
        "train.warmup_steps = 9 with train.steps = 8: the learning rate does not reach train.lr; lower train.warmup_steps",
    )
    assert not preflight.foresee(configured(folder, tmp_path, **keys, train_warmup_steps=8, train_steps=8)).warnings


def test_defaults_that_do_not_suit_fine_tuning_are_told(tmp_path: Path) -> None:
    folder, tokens = hf_folders.write(tmp_path / "model", "llama"), hf_folders.write_tokens(tmp_path / "tokens.npy")

    def told(**more: Any) -> tuple[str, ...]:
        data = {"corpus": tokens, "heldout": 0.0, **more.pop("data", {})}
        tree = {"run": {"dir": str(tmp_path)}, "data": data, "train": more.pop("train", {}), "model": {"hf": str(folder), **more}}
        return preflight.foresee(parse_config(tree)).warnings

    length = "data.seq_len is not given, so a sample has 128 tokens; give the length that the model is to learn"
    rate = "train.lr is not given: 0.001 suits training from random weights; give one for fine-tuning all weights, for example 1e-5"
    assert told() == (length, rate)
    assert told(data={"seq_len": 128}, train={"lr": 1e-3}) == ()
    assert told(lora={}) == (length,)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    assert told() == (length,)
