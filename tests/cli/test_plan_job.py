"""``vescale-ray plan RUN.yaml``: the memory of a job file's run, and what is refused. ``tests/workers/test_job_memory.py`` compares with
workers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from vescale_ray.cli import main
from vescale_ray.config import load_config
from vescale_ray.planner.hardware import HARDWARE
from vescale_ray.planner.models.architectures import PUBLISHED
from vescale_ray.workers.building.job_plan import choose_for_job
from vescale_ray.workers.building.model_building import build_model

CONFIGS = Path(__file__).parents[2] / "vescale_ray" / "configs"

JOB = """
model: {dim: 64, layers: 3, heads: 4, kv_heads: 2, ffn: 128}
data: {seq_len: 32}
train: {slot_batch: 2, param_dtype: bfloat16}
elastic: {workers: 4}
"""


@pytest.fixture(autouse=True)
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(JOB)
    return tmp_path / "run.yaml"


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["plan", "run.yaml", *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_job_file_sets_the_workers_and_their_memory(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numel = sum(parameter.numel() for parameter in build_model(load_config(job)).parameters())
    for words, workers, of_state in (((), 4, 8), (("train.optimizer=sgd",), 4, 4), (("--devices", "2"), 2, 8)):
        found = planned(capsys, *words)
        (option,) = found["options"]
        assert (found["devices"], option["shard_group"], found["parameters"]) == (workers, workers, numel)
        memory = option["memory_bytes"]
        assert abs(memory["master"] - 4 * numel / workers) < 0.01 * memory["master"]
        assert abs(memory["optimizer"] - of_state * numel / workers) < 0.01 * memory["optimizer"]


def test_a_job_with_replicas_is_planned_with_its_shard_group(capsys: pytest.CaptureFixture[str]) -> None:
    (option,) = planned(capsys, "train.sharding={shard_group: 2}", "--devices", "8")["options"]
    assert (option["shard_group"], option["replicas"]) == (2, 4)


def test_gradients_in_fp8_send_fewer_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    (wide,), (narrow,) = (planned(capsys, f"train.reduce_dtype={dtype}")["options"] for dtype in ("float32", "fp8"))
    saved = wide["sent_bytes"] - narrow["sent_bytes"]
    gradients = 3 * wide["memory_bytes"]["master"]  # what a rank sends to three others in FP32
    assert 0.70 * gradients < saved < 0.75 * gradients


def test_the_demo_and_the_adapters_of_gpt_oss_have_their_memory(tmp_path: Path) -> None:
    """The other job files of the package name a published model, which ``tests/config/test_config.py`` plans."""
    folder = tmp_path / "gpt-oss"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**PUBLISHED["gpt-oss-20b"][1], "dtype": "bfloat16"}))
    save_file({}, folder / "model.safetensors")  # the plan reads no weights
    demo = load_config(CONFIGS / "demo.yaml")
    adapters = load_config(CONFIGS / "gpt_oss_20b_lora.yaml", [f"model.hf={folder}"])
    for config, most in ((demo, 1), (adapters, 80)):
        for workers in {config.elastic.workers, config.elastic.min_workers}:
            best = choose_for_job(config, workers, HARDWARE["h100"]).best
            assert best is not None and best.memory.total < most * 2**30


def test_weights_that_keep_their_dtype_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("train.quantize=fp8 16x16", "train.quantize_keep=['layers.1.*', '*.down_proj.weight']")
    names = [name for name, p in build_model(load_config("run.yaml")).named_parameters() if name.startswith("layers.") and p.dim() == 2]
    coded = [name for name in names if not name.startswith("layers.1.") and not name.endswith(".down_proj.weight")]
    codes = [planned(capsys, *words[:count])["options"][0]["memory_bytes"]["codes"] for count in (1, 2)]
    assert 0 < len(coded) < len(names) and codes[1] < codes[0]
    numel = {name: p.numel() for name, p in build_model(load_config("run.yaml")).named_parameters()}
    for found, those in zip(codes, (names, coded), strict=True):
        assert found == pytest.approx(sum(numel[name] for name in those) / 4, rel=0.05), "one byte each, and scales"


def test_too_little_memory_is_told_with_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "run.yaml", "--memory", "1MiB"]) == 1
    assert "nothing fits: the least is" in capsys.readouterr().out


def test_settings_that_only_bound_the_memory_are_noted(capsys: pytest.CaptureFixture[str]) -> None:
    (note,) = planned(capsys, "train.activation_checkpointing=selective")["notes"]
    assert note.startswith("train.activation_checkpointing = selective is counted as none")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "nothing to plan: give --model and --devices, or a job file"),
        (["none.yaml"], "none.yaml: no such file"),
        (["run.yaml", "--optimizer", "muon"], "--optimizer with a job file: the file sets it; give KEY=VALUE after run.yaml"),
        (["run.yaml", "--expert-parallel", "1"], "--expert-parallel with a job file: the file sets it"),
        (["run.yaml", "train.optimizer=soap"], "train.optimizer = soap: the plan can't count its memory; give train.optimizer=adamw"),
        (["run.yaml", "train.zero_stage=2"], "train.zero_stage = 2: the plan can't count its memory; give train.zero_stage=3"),
        (["run.yaml", "train.reshard_after_forward=false"], "give train.reshard_after_forward=true to plan a run that has it"),
        (
            ["run.yaml", "train.sharding={shard_group: 2}", "--devices", "3"],
            "3 devices with train.sharding.shard_group = 2: the run would use 2; give a multiple of 2",
        ),
        (["run.yaml", "--devices", "0"], "0 devices: give at least 1"),
        (["run.yaml", "model.factory=no.such:model"], "model.factory = no.such:model: No module named 'no'"),
        (["run.yaml", "--hardware", "h1000"], "hardware 'h1000' is unknown: did you mean h100?"),
    ],
)
def test_mistakes_are_one_line(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 2
    said = capsys.readouterr().err.strip()
    assert says in said and "\n" not in said
