"""``vescale-ray init``: the job files that it writes, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.models import hf_folders
from vescale_ray.cli import main
from vescale_ray.config import load_config
from vescale_ray.config.sections import ShardingSettings
from vescale_ray.controller.driver import preflight
from vescale_ray.planner.models.architectures import PUBLISHED
from vescale_ray.workers.building import job_plan

pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert main(["init", *args]) == 2
    return capsys.readouterr().err.strip()


def qwen(folder: Path) -> str:
    """A folder with the configuration of Qwen3 8B, without weights."""
    folder.mkdir()
    sizes = PUBLISHED["qwen3-8b"][1]
    (folder / "config.json").write_text(json.dumps({**sizes, "max_position_embeddings": 40960}))
    return str(folder)


def test_a_run_with_the_defaults_passes_all_checks(here: Path) -> None:
    assert main(["init", "first"]) == 0
    config = load_config(here / "first.yaml")
    assert (config.run.name, config.elastic.workers, config.train.slots, config.train.device) == ("first", 2, 4, "cpu")
    preflight.foresee(config)


def test_a_model_and_its_data_are_taken_up(here: Path) -> None:
    hf_folders.write(here / "my model", "qwen3")
    tokens = hf_folders.write_tokens(here / "a: b.npy")
    assert main(["init", "tuned", "--hf", "my model", "--data", tokens, "--seq-len", "16", "--workers", "3", "--lora"]) == 0
    config = load_config(here / "tuned.yaml")
    assert (config.model.hf, config.data.corpus, config.data.seq_len, config.elastic.workers) == ("my model", tokens, 16, 3)
    assert config.model.lora is not None and config.model.lora.rank == 16
    preflight.foresee(config)


def test_a_model_without_data_is_told(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = "--data is not given, so the file trains on the source text of Python's standard library; set data.corpus in it"
    assert main(["init", "tuned", "--hf", str(hf_folders.write(here / "model", "llama"))]) == 0
    assert capsys.readouterr().err.splitlines()[-1] == f"vescale-ray: warning: {told}"
    assert main(["init", "first"]) == 0 and not capsys.readouterr().err


def test_the_memory_of_the_plan_is_told_or_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = qwen(here / "Qwen3-8B")
    assert main(["init", "big", "--hf", folder, "--data", "a.jsonl", "--data", "b.jsonl", "--gpus", "8", "--out", "job.yaml"]) == 0
    told = capsys.readouterr().err.splitlines()
    tail = "no such file or folder; give paths that every worker can read"
    assert told == [f"vescale-ray: warning: data.corpus = {name}: {tail}" for name in ("a.jsonl", "b.jsonl")]
    text = (here / "job.yaml").read_text()
    assert re.match(r"# Train Qwen3-8B, on 8 GPUs\. A step takes about \d\d\.\d of 80 GiB of each h100, by `vescale-ray plan`\.\n", text)
    config = load_config(here / "job.yaml")
    assert (config.train.param_dtype, config.ray.gpus_per_worker, config.data.corpus) == ("bfloat16", 1, ["a.jsonl", "b.jsonl"])
    assert config.train.sharding is None
    said = refused(capsys, "small", "--hf", folder, "--gpus", "1")
    assert said.startswith("vescale-ray: --gpus 1: a step takes ") and "give more GPUs, or train adapters with --lora" in said
    assert not (here / "small.yaml").exists()


def test_the_shard_group_is_the_one_that_the_plan_chooses(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, asked, real = qwen(here / "Qwen3-8B"), list[Any](), job_plan.choose_sharding

    def choose(*about: Any, groups: Any, **more: Any) -> Any:
        asked.append(groups)
        return real(*about, groups=(8,), **more)

    monkeypatch.setattr(job_plan, "choose_sharding", choose)
    assert main(["init", "wide", "--hf", folder, "--gpus", "64"]) == 0
    assert asked == [None], "any group"
    assert load_config(here / "wide.yaml").train.sharding == ShardingSettings(shard_group=8)
    assert "    # 8 replicas of 8 GPUs, which the plan expects to be the fastest\n" in (here / "wide.yaml").read_text()


def test_mistakes_are_refused_before_a_file_is_written(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "there.yaml").write_text("x")
    assert "there.yaml: exists already; give --force, or another --out" in refused(capsys, "there")
    assert "--hf = none: no such folder" in refused(capsys, "a", "--hf", "none")
    assert "--lora: adapters need the weights of a model; give --hf" in refused(capsys, "a", "--lora")
    folder = qwen(here / "q")
    assert "q holds no safetensors weights, and adapters train on a frozen base" in refused(capsys, "a", "--hf", folder, "--lora")
    assert "--hardware rtx: give one of a100, h100" in refused(capsys, "a", "--gpus", "8", "--hardware", "rtx")
    assert "--workers 8 with --gpus 4: each GPU has one worker" in refused(capsys, "a", "--gpus", "4", "--workers", "8")
    assert "takes 40960 tokens at most" in refused(capsys, "a", "--hf", folder, "--seq-len", "50000")
    assert "run.name = a/b: give letters" in refused(capsys, "a/b", "--out", "c.yaml")
    assert "can't be written" in refused(capsys, "a", "--out", "no/such/folder.yaml")
    assert sorted(path.name for path in here.glob("*.yaml")) == ["there.yaml"]
    assert main(["init", "there", "--force"]) == 0


def test_workers_share_the_experts_of_a_mixture(here: Path) -> None:
    hf_folders.write(here / "model", "qwen3_moe")
    tokens = hf_folders.write_tokens(here / "a.npy")
    assert main(["init", "shared", "--hf", "model", "--data", tokens, "--seq-len", "16", "--gpus", "4", "--expert-parallel", "2"]) == 0
    assert (here / "shared.yaml").read_text().startswith("# Train model, on 4 GPUs. A step takes about ")
    config = load_config(here / "shared.yaml")
    assert (config.train.expert_parallel, config.elastic.workers, config.grid(4).experts) == (2, 4, 2)
    preflight.foresee(load_config(here / "shared.yaml", ["train.device=cpu"]))


def test_experts_that_cannot_be_shared_are_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dense, mixture = (str(hf_folders.write(here / kind, kind)) for kind in ("qwen3", "qwen3_moe"))
    capsys.readouterr()
    for arguments, says in (
        (["2"], "--expert-parallel 2: the small Llama has no experts; give --hf with a mixture of experts, or leave it out"),
        (["2", "--hf", dense], "--expert-parallel 2: Qwen3ForCausalLM has no fused experts"),
        (["3", "--hf", mixture, "--workers", "6"], "the 3 workers do not divide its experts; use a number that does"),
        (["4", "--hf", mixture, "--workers", "6"], "6 workers are not a multiple of it; give 4 or another multiple as --workers or --gpus"),
        (["4", "--hf", mixture], "2 workers are not a multiple of it; give 4 or another multiple as --workers or --gpus"),
    ):
        said = refused(capsys, "a", "--expert-parallel", *arguments)
        assert says in said and said.count("\n") == 0
    assert not list(here.glob("*.yaml"))


def test_a_short_model_gets_samples_of_its_own_length(here: Path) -> None:
    folder = hf_folders.write(here / "model", "llama")
    assert main(["init", "short", "--hf", str(folder), "--data", hf_folders.write_tokens(here / "a.npy"), "--gpus", "2"]) == 0
    assert load_config(here / "short.yaml").data.seq_len == 128


def test_a_name_that_is_none_is_refused_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("x" * 300, "a\nb"):
        assert "run.name = " in (said := refused(capsys, name)) and "63 at most" in said and "\n" not in said
