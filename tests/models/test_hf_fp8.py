"""Folders with FP8 weights and one scale per block, as DeepSeek-V3's: import, export, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models import hf_folders
from tests.models.adapter_runs import write_adapter_run
from tests.models.test_hf import configured, edit, refused
from vescale_ray import Fp8Block, checkpoint
from vescale_ray.checkpoint.bridges import fp8_files
from vescale_ray.checkpoint.bridges.pieces import FileLayout
from vescale_ray.checkpoint.huggingface import HfSource, weights_source
from vescale_ray.checkpoint.huggingface_layout import file_layout
from vescale_ray.cli import main
from vescale_ray.controller.driver import preflight
from vescale_ray.models import hf, lora
from vescale_ray.quantization import fp8
from vescale_ray.runfolder import RunFolder
from vescale_ray.workers.building.initial_values import layout_of
from vescale_ray.workers.building.model_building import build_model

transformers = pytest.importorskip("transformers")
TOKENS = torch.arange(16)[None]
WIDE: dict[str, Any] = {"hidden_size": 200, "intermediate_size": 300, "head_dim": 50}
"""Sides of 128 + 72 and 2 * 128 + 44 elements."""
TENSORS = dict[str, torch.Tensor]


def tensors_of(folder: Path) -> TENSORS:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def master_of(layout: FileLayout, seed: int = 0) -> TENSORS:
    """FP32 weights that BF16 and FP8 round."""
    torch.manual_seed(seed)
    return {name: torch.randn(shape) * shape[-1] ** -0.5 for name, shape in layout.shapes.items()}


def oracle(stored: TENSORS, name: str, side: int = 128) -> torch.Tensor:
    """The values of a file's tensor, by FP64 products."""
    if name + "_scale_inv" not in stored:
        return stored[name].float()
    codes, scales = stored[name].to(torch.float64), stored[name + "_scale_inv"].to(torch.float64)
    spread = scales.repeat_interleave(side, -2).repeat_interleave(side, -1)
    return (codes * spread[..., : codes.shape[-2], : codes.shape[-1]]).float()


def exported(model: Path, held: TENSORS, home: Path, *options: str) -> Path:
    trained = {name: held[name] for name, _ in hf.build(hf.open_folder(model)).named_parameters()}  # a commit has no buffers
    checkpoint.save({"model": trained}, home / "saved", 1)
    assert main(["ckpt", "export-hf", str(home / "saved"), str(home / "out"), "--model", str(model), "--fp8", *options]) == 0
    return home / "out"


def imported(folder: Path) -> TENSORS:
    layout = file_layout(hf.build(hf.open_folder(folder)))
    held = {name: torch.empty(shape) for name, shape in layout.shapes.items()}
    checkpoint.import_hf(folder, held, layout=layout, cast=True)
    return held


def piece_of(held: TENSORS, layout: FileLayout, name: str) -> torch.Tensor:
    piece = layout.pieces[name]
    return held[piece.name].flatten()[piece.start : piece.start + piece.numel].view(piece.shape)


@pytest.mark.parametrize(
    ("kind", "sizes", "kept"),
    [
        ("llama", WIDE, ["lm_head", "model.embed_tokens"]),
        ("qwen3_moe", {"moe_intermediate_size": 150}, ["lm_head", "model.embed_tokens", *(f"model.layers.{i}.mlp.gate" for i in (0, 1))]),
        ("deepseek_v3", {}, ["lm_head", "model.embed_tokens", "model.layers.1.mlp.gate"]),
    ],
    ids=["tails", "experts", "deepseek"],
)
def test_fp8_weights_survive_export_and_import(tmp_path: Path, kind: str, sizes: dict[str, Any], kept: list[str]) -> None:
    folder = hf_folders.write(tmp_path / "model", kind, **sizes)
    layout = file_layout(hf.build(hf.open_folder(folder)))
    held = master_of(layout)
    stored = tensors_of(exported(folder, held, tmp_path, "--dtype", "fp32"))
    coded = {name for name, value in stored.items() if value.dtype == torch.float8_e4m3fn}
    assert stored.keys() == {*layout.pieces, *(name + "_scale_inv" for name in coded)}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["modules_to_not_convert"] == kept and config["dtype"] == "float32"
    assert config["quantization_config"]["weight_block_size"] == [128, 128]
    matrices = {name for name, piece in layout.pieces.items() if len(piece.shape) == 2}
    assert coded == {name for name in matrices if name.removesuffix(".weight") not in kept}
    back = imported(tmp_path / "out")
    for name in layout.pieces:
        if "e_score_correction_bias" in name:
            continue
        before, after = piece_of(held, layout, name), piece_of(back, layout, name)
        assert torch.equal(after, oracle(stored, name)), name
        assert torch.equal(after, fp8.dequantize(*fp8.quantize(before)) if name in coded else before), name
    again = tensors_of(exported(tmp_path / "out", back, tmp_path / "2", "--dtype", "fp32"))
    assert all(torch.equal(stored[name].view(torch.uint8), again[name].view(torch.uint8)) for name in stored | again)


@pytest.mark.parametrize("kind", ["qwen3", "gpt_oss", "deepseek_v3"])
def test_transformers_reads_exported_fp8_weights(tmp_path: Path, kind: str) -> None:
    """Its dequantization divides sides evenly, so they have one block or whole ones: 32 and 256 elements. The head of qwen3 is tied."""
    folder = hf_folders.write(tmp_path / "model", kind, intermediate_size=256)
    opened = hf.open_folder(folder)
    held = master_of(file_layout(hf.build(opened)))
    out = exported(folder, held, tmp_path, "--dtype", "fp32")
    found = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    expected = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    expected.load_state_dict(imported(out), strict=False)
    assert torch.equal(found(TOKENS).logits, expected(TOKENS).logits)
    expected.load_state_dict(held, strict=False)
    assert not torch.equal(found(TOKENS).logits, expected(TOKENS).logits)


def test_an_export_names_experts_without_an_fp8_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = hf_folders.write(tmp_path / "model", "gpt_oss")
    out = exported(folder, master_of(file_layout(hf.build(hf.open_folder(folder)))), tmp_path)
    said = capsys.readouterr().err
    assert "not in FP8: model.layers.0.mlp.experts.down_proj, model.layers.0.mlp.experts.gate_up_proj" in said
    assert len([line for line in said.splitlines() if "FP8" in line]) == 1
    assert {n for n, t in tensors_of(out).items() if t.dtype == torch.float8_e4m3fn} == {
        f"model.layers.{i}.self_attn.{x}_proj.weight" for i in (0, 1) for x in "qkvo"
    }
    kept = json.loads((out / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    assert "model.layers.1.mlp.experts" in kept and "model.layers.1.mlp.router" in kept


def test_the_job_file_chooses_the_fp8_tensors(tmp_path: Path) -> None:
    folder = hf_folders.write(tmp_path / "model", "qwen3_moe")
    keys = {"train_quantize": "fp8 16x16 power_of_two", "train_quantize_keep": ["*.down_proj", "*.q_proj.weight", "*.gate.weight"]}
    config = preflight.check(configured(folder, tmp_path, **keys)).config
    RunFolder(config.run_folder).write_config(config.to_yaml())
    RunFolder(config.run_folder).write_state({"run": "r", "state": "DONE", "step": 1, "steps": 1})
    held = master_of(file_layout(build_model(config)))
    checkpoint.save({"model": held}, config.checkpoint_root, 1)
    assert main(["ckpt", "export-hf", str(config.run_folder), str(tmp_path / "out"), "--fp8"]) == 0
    stored = tensors_of(tmp_path / "out")
    coded = {name for name, value in stored.items() if value.dtype == torch.float8_e4m3fn}
    # Experts with one matrix in BF16 have no FP8 layout.
    assert coded == {f"model.layers.{i}.self_attn.{x}_proj.weight" for i in (0, 1) for x in "kvo"}
    name = "model.layers.1.self_attn.o_proj.weight"
    assert torch.equal(imported(tmp_path / "out")[name], oracle(stored, name, 16))
    assert torch.equal(
        oracle(stored, name, 16), fp8.dequantize(*(form := Fp8Block(16, 16, "power_of_two"), fp8.quantize(held[name], form))[1], form)
    )


def test_adapters_are_merged_before_weights_are_quantized(tmp_path: Path) -> None:
    """The base may be in FP8 itself."""
    plain = hf_folders.write(tmp_path / "plain", "llama", torch.bfloat16)
    folder = exported(plain, master_of(file_layout(hf.build(hf.open_folder(plain)))), tmp_path / "base")
    config = preflight.check(configured(folder, tmp_path, model_lora={"rank": 4, "targets": ["q_proj"]})).config
    model, held = build_model(config), write_adapter_run(config)
    held |= {name: torch.empty(p.shape, dtype=p.dtype) for name, p in model.named_parameters() if name not in held}
    checkpoint.import_hf(folder, held, layout=layout_of(config, model), exclude=lora.PARAMETERS, cast=True)
    assert main(["ckpt", "export-hf", str(config.run_folder), str(tmp_path / "out"), "--fp8", "--merge"]) == 0
    layer = "model.layers.1.self_attn.q_proj"
    prefix = next(name for name in held if "lora_A" in name and "layers.1" in name).partition(".lora_A")[0]
    base, down, up = (held[f"{prefix}.{x}.weight"].float() for x in ("base_layer", "lora_A.default", "lora_B.default"))
    assert config.model.lora is not None
    merged = base + config.model.lora.alpha / 4 * up @ down
    torch.testing.assert_close(imported(tmp_path / "out")[f"{layer}.weight"], fp8.dequantize(*fp8.quantize(merged)), rtol=1e-6, atol=0)


def coded_folder(home: Path) -> Path:
    folder = hf_folders.write(home / "plain", "llama", **WIDE)
    return exported(folder, master_of(file_layout(hf.build(hf.open_folder(folder)))), home)


def changed(folder: Path, changes: TENSORS, without: str = "") -> None:
    tensors = {name: value for name, value in tensors_of(folder).items() if name != without}
    save_file({**tensors, **changes}, folder / "model.safetensors", {"format": "pt"})
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)


NAME = "model.layers.1.mlp.up_proj.weight"


def test_faulty_scales_are_refused_before_a_worker_starts(tmp_path: Path) -> None:
    folder = coded_folder(tmp_path)
    preflight.foresee(configured(folder, tmp_path))
    stored = tensors_of(folder)
    scales = NAME + "_scale_inv"
    assert list(stored[scales].shape) == [3, 2]
    changed(folder, {}, without=scales)
    assert f"scales of 1 FP8 tensors are missing: {scales}" in refused(folder, tmp_path)
    changed(folder, {scales: stored[scales][:2].contiguous()})
    assert f"{scales!r} has shape [2, 2] and dtype torch.float32; {NAME!r} of shape [300, 200] in blocks of 128x128 needs [3, 2]" in (
        refused(folder, tmp_path)
    )
    changed(folder, {scales: stored[scales].to(torch.int32)})
    assert "has shape [3, 2] and dtype torch.int32" in refused(folder, tmp_path)
    for bad in (float("inf"), float("nan")):
        changed(folder, {scales: stored[scales].index_put((torch.tensor(2), torch.tensor(1)), torch.tensor(bad))})
        assert f"1 scales of {scales!r} are Inf or NaN" in refused(folder, tmp_path)
    changed(folder, {scales: stored[scales], NAME: stored[NAME].to(torch.bfloat16)})
    assert f"has 1 tensors that the model lacks: {scales}" in refused(folder, tmp_path)


def test_a_code_of_nan_is_named_while_weights_are_read(tmp_path: Path) -> None:
    folder = coded_folder(tmp_path)
    codes = tensors_of(folder)[NAME]
    codes.view(torch.uint8)[299, 199] = 0x7F
    changed(folder, {NAME: codes})
    with pytest.raises(checkpoint.ForeignFileError, match=f"'{NAME}' holds Inf or NaN"):
        imported(folder)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quant_method 'gptq' can't be read, only fp8 with weight_block_size; save the model in bf"),
        ({"quant_method": "awq"}, "quant_method 'awq' can't be read"),
        ({"quant_method": "mxfp4"}, "quant_method 'mxfp4' can't be read"),
        ({"quant_method": "fp8"}, "has no weight_block_size; only fp8 weights with one scale per block can be read"),
        ({"quant_method": "fp8", "weight_block_size": None}, "has no weight_block_size"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "weight_block_size [128, 0] is not two positive numbers"),
        ({"quant_method": "fp8", "weight_block_size": "128"}, "weight_block_size '128' is not two positive numbers"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "expert_dtype": "fp4"}, "experts in 'fp4' can't be read"),
        ("fp8", "quantization_config: 'fp8' can't be read"),
    ],
)
def test_other_quantized_formats_are_refused(tmp_path: Path, given: Any, said: str) -> None:
    folder = hf_folders.write(tmp_path / "model", "llama")
    edit(folder, quantization_config=given)
    assert f"model.hf = {folder}: quantization_config: " in refused(folder, tmp_path) and said in refused(folder, tmp_path)
    with pytest.raises(checkpoint.ForeignFileError, match="quantization_config"):
        checkpoint.import_hf(folder, tmp_path / "root")


def test_a_quantization_config_of_null_means_none(tmp_path: Path) -> None:
    folder = hf_folders.write(tmp_path / "model", "llama")
    edit(folder, quantization_config=None)
    preflight.foresee(configured(folder, tmp_path))
    stored = tensors_of(folder)
    assert torch.equal(imported(folder)[NAME], stored[NAME].float())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--names", "llama"], "--fp8: config.json must describe the scales; export a model of model.hf without --names, or give --model"),
        ([], "--fp8: config.json must describe the scales"),
    ],
)
def test_an_fp8_export_needs_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], said: str) -> None:
    checkpoint.save({"model": {"norm.weight": torch.ones(2)}}, tmp_path / "saved", 1)
    assert main(["ckpt", "export-hf", str(tmp_path / "saved"), str(tmp_path / "out"), "--fp8", *options]) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_weights_with_inf_or_nan_are_not_exported_in_fp8(tmp_path: Path) -> None:
    checkpoint.save({"model": {"a": torch.tensor([[1.0, float("inf")]]), "b": torch.ones(3)}}, tmp_path / "saved", 1)
    for name, said in (("a", "'a' holds Inf or NaN"), ("b", r"'b' of shape \[3\] and dtype float32 has no FP8 layout")):
        with pytest.raises(checkpoint.CheckpointMismatch, match=said):
            checkpoint.export_hf(tmp_path / "saved", None, tmp_path / "out", quantize={name: Fp8Block()}.get)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dtype", fp8_files.SCALE_DTYPES, ids=str)
def test_any_range_of_an_fp8_tensor_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Stacks, too, and scales of other dtypes, in ranges that begin and end anywhere."""
    torch.manual_seed(0)
    monkeypatch.setattr(fp8_files, "CHUNK_NUMEL", 97)
    codes, scales = torch.randn(3, 10, 13).to(torch.float8_e4m3fn), (torch.rand(3, 3, 4) + 0.5).to(dtype)
    save_file({"x": codes, "x_scale_inv": scales, "y": torch.arange(5)}, tmp_path / "model.safetensors")
    block = {"quant_method": "fp8", "weight_block_size": [4, 4]}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": block}))
    source = weights_source(tmp_path)
    assert set(source.tensors) == {"x", "y"} and source.tensors["x"].kinds["param"] == torch.float32
    expected = oracle({"x": codes, "x_scale_inv": scales}, "x", 4).flatten()
    for start in range(0, 390, 7):
        for end in (start + 1, min(390, start + 12), min(390, start + 200), 390):
            out = torch.empty(end - start)
            source.read_into("x", "param", start, out)
            assert torch.equal(out, expected[start:end]), (start, end)
    commit = checkpoint.import_hf(tmp_path, tmp_path / "root", object_bytes=500)
    assert isinstance(commit, checkpoint.Commit)
    assert torch.equal(checkpoint.open(tmp_path / "root").to_state_dict()["x"].flatten(), expected)
    assert HfSource(tmp_path).tensors["x"].kinds["param"] == torch.float8_e4m3fn, "without dequantization"
