"""An unknown key gets the known one that is probably meant, or the keys beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.test_config import refusal
from vescale_ray.config import ConfigError, load_config, sections
from vescale_ray.config.peers import ABSENT, OURS


@pytest.mark.parametrize(
    ("typo", "right"),
    [
        ("train.setps=1", "train.steps"),
        ("trian.steps=1", "train.steps"),
        ("steps=1", "train.steps"),
        ("train.workers=1", "elastic.workers"),
        ("elastic.worker=1", "elastic.workers"),
        ("model.n_layers=1", "model.layers"),
        ("data.sequence_len=1", "data.seq_len"),
        ("metric.port=1", "metrics.port"),
        ("train.LR=1", "train.lr"),
        ("train.loss=1", "model.loss"),
        ("optimizer.lr=1", "train.lr"),
        ("lora.rank=1", "model.lora.rank"),
    ],
)
def test_mistyped_key_gets_the_nearest_right_one(typo: str, right: str, tmp_path: Path) -> None:
    assert refusal(typo) == f"unknown key {typo.partition('=')[0]}: did you mean {right}?"
    key = typo.partition("=")[0].split(".")
    if len(key) == 2:
        path = tmp_path / "run.yaml"
        path.write_text(f"{key[0]}:\n  {key[1]}: 1\n")
        with pytest.raises(ConfigError, match=f"did you mean {right}"):
            load_config(path)


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("train.learning_rate", "train.lr"),
        ("train.batch_size", "train.slot_batch"),
        ("per_device_train_batch_size", "train.slot_batch"),
        ("train.gradient_accumulation_steps", "train.slots (sequences of a step are train.slots * train.slot_batch)"),
        ("num_train_epochs", "train.steps (`vescale-ray data inspect` tells the epochs)"),
        ("training.max_norm", "train.grad_clip"),
        ("optimizer.name", "train.optimizer"),
        ("model.name", "model.hf"),
        ("model.type", "model.kind"),
        ("train.min_lr", "train.min_lr_ratio (a fraction of train.lr)"),
        ("train.warmup_ratio", "train.warmup_steps (a number of steps)"),
        ("checkpoint.keep", "checkpoint.keep_last"),
        ("data.split", "data.corpus (the files of one split)"),
        ("train.label_smoothing", "model.loss"),
        ("ray.num_gpus", "ray.gpus_per_worker"),
        ("base_model", "model.hf"),
        ("lora_r", "model.lora.rank"),
        ("checkpoint.interval", "checkpoint.every"),
        ("data.max_seq_length", "data.seq_len"),
    ],
)
def test_key_of_another_trainer_gets_ours(name: str, ours: str) -> None:
    assert refusal(f"{name}=1") == f"unknown key {name}: did you mean {ours}?"


@pytest.mark.parametrize("key", ["data.eval.w.corpus", "data.mixture.0.weight", "train.optimizer_options.nesterov"])
def test_part_of_a_value_gets_the_key_that_holds_it(key: str) -> None:
    holder = ".".join(key.split(".")[:2])
    assert refusal(f"{key}=1").startswith(f"unknown key {key}: give the whole value of {holder}, a list in brackets")


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("train.tensor_parallel", "there is no tensor, pipeline or context parallelism; train.sharding and train.expert_parallel "),
        ("model.load_in_4bit", "the base of adapters is not quantized; leave it out"),
        ("data.num_workers", "background threads read the data; leave it out"),
    ],
)
def test_key_without_a_counterpart_gets_a_reason(key: str, told: str) -> None:
    assert refusal(f"{key}=1").startswith(f"unknown key {key}: {told}")


def test_keys_of_other_trainers_are_none_of_ours() -> None:
    known = {f"{name}.{key}" for name, section in sections() for key in section.model_fields}
    assert not ABSENT.keys() & {*known, *OURS}
    for name, ours in OURS.items():
        key = ours.partition(" ")[0].partition("=")[0]
        assert name not in known and (key in known or key.rpartition(".")[0] in known), name


def test_key_without_a_near_match_gets_the_known_keys() -> None:
    assert refusal("zzz=1") == "unknown key zzz: the sections are run, model, data, train, elastic, checkpoint, ray, metrics"
    assert refusal("checkpoint.export=1").startswith("unknown key checkpoint.export: checkpoint has dir, every, ")
    assert refusal("model.size=7b").startswith("unknown key model.size: model has kind, dim, "), "not model.tie"
    assert refusal("ray.zzz=1") == "unknown key ray.zzz: ray has address, num_cpus, object_store_mb, cpus_per_worker, gpus_per_worker"
    assert "train is a section" in refusal("train=3")
