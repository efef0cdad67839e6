"""Texts that YAML reads as something else get the remedy, and keys within keys the nearest known one."""

from __future__ import annotations

import pytest

from vescale_ray.config import ConfigError
from vescale_ray.config.reading import read_config


@pytest.mark.parametrize(
    "text, words",
    [
        ("data: {corpus: *.parquet}", "line 1: not valid YAML: .*; put a text that begins with . in quotes"),
        ("train:\n  no_decay: [*norm]", "line 2: not valid YAML: found undefined alias.*; put a text that begins with . in quotes"),
        ("train:\n\tsteps: 5", r"line 2: not valid YAML: found character '\\t' that cannot start any token; indent with spaces"),
        ("data: {corpus: @home/a.txt}", "cannot start any token; put the text in quotes"),
        ("[train]\nsteps = 5", "line 2: not valid YAML: .*; write sections of keys, for example `train: {steps: 100}`"),
        ("run: {name: 2026-01-01}", "run.name = 2026-01-01: give a text, in quotes"),
        ("run: {name: [a]}", r"run.name = \['a'\]: give a text$"),
        ("model: {lora: {lora_alpha: 8}}", r"unknown key model.lora.lora_alpha: did you mean model.lora.alpha\?"),
        ("model: {lora: {r: 8}}", r"unknown key model.lora.r: did you mean model.lora.rank\?"),
        ("model: {lora: {bias: none}}", "unknown key model.lora.bias: model.lora has rank, alpha, dropout, targets"),
        ("train: {profile: {step: 1, rank: 0}}", r"unknown key train.profile.rank: did you mean train.profile.ranks\?"),
    ],
)
def test_a_trap_gets_its_remedy(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_config(text, "run.yaml")


def test_several_wrong_keys_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        read_config("base_model: a\nlearning_rate: 1.0\ntrain: {stps: 5, lr: 1.0}\nnum_epochs: 3\nlora_r: 8\nzzz: 1", "run.yaml")
    assert str(caught.value) == (
        "unknown key base_model: did you mean model.hf?; unknown key learning_rate: did you mean train.lr?; unknown key train.stps: did "
        "you mean train.steps?; unknown key num_epochs: did you mean train.steps (`vescale-ray data inspect` tells the epochs)?; and 2 more"
    )


def test_merged_mappings_are_read() -> None:
    sets = "{a: &a {corpus: a.parquet, column: ids}, b: {<<: *a, corpus: b.parquet}}"
    found = read_config(f"data: {{eval: {sets}}}", "run.yaml").data.eval
    assert [(one.corpus, one.column) for one in found.values()] == [("a.parquet", "ids"), ("b.parquet", "ids")]
