"""Keys that a run does not use begin it with a warning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.controller.runs import tiny
from vescale_ray.config import parse_config
from vescale_ray.controller.driver import preflight
from vescale_ray.controller.driver.without_effect import _UNUSED, without_effect


@pytest.mark.parametrize(
    "given, used, told",
    [
        ({"train.min_lr_ratio": 0.5}, {"train.schedule": "wsd"}, "train.min_lr_ratio = 0.5 has no effect: train.schedule = constant keeps"),
        ({"train.decay_type": "sqrt"}, {"train.schedule": "wsd"}, "train.decay_type = sqrt has no effect: it is the form of the final"),
        ({"train.matrix_lr": 0.02}, {"train.optimizer": "muon"}, "train.matrix_lr = 0.02 has no effect: train.optimizer steps all"),
        ({"train.keep_cast": True}, {"train.param_dtype": "bfloat16"}, "train.keep_cast = true has no effect: it keeps what workers cast"),
        ({"train.eval_every": 5}, {"data.heldout": 0.1}, "train.eval_every = 5 has no effect: there is nothing to evaluate; raise"),
        (
            {"checkpoint.keep_metric": "heldout_loss"},
            {"checkpoint.keep_best": 1, "data.heldout": 0.1},
            "checkpoint.keep_metric = heldout_loss has no effect: checkpoint.keep_best = 0 keeps none by it",
        ),
        (
            {"checkpoint.keep_mode": "max", "checkpoint.keep_best": 1},
            {"checkpoint.keep_mode": "min"},
            "checkpoint.keep_mode = max keeps the checkpoints with the largest loss; set it to min",
        ),
        (
            {"model.hf": "m", "data.seq_len": 128},
            {"data.corpus": "stdlib"},
            "data.corpus is not given, so the model is trained on the source text of Python's",
        ),
        ({"model.hf": "m", "data.corpus": "stdlib"}, {"data.seq_len": 128}, "data.seq_len is not given, so a sample has 128 tokens"),
        ({"elastic.grow_gap_s": 9.0}, {"elastic.grow": True}, "elastic.grow_gap_s = 9.0 has no effect: it is for elastic.grow = true"),
        ({"ray.gpus_per_worker": 8.0}, {"ray.gpus_per_worker": 1.0}, "ray.gpus_per_worker = 8: a worker computes on one GPU; set it to 1"),
    ],
)
def test_a_value_without_effect_is_told(given: dict[str, Any], used: dict[str, Any], told: str) -> None:
    def warned(keys: dict[str, Any]) -> list[str]:
        tree: dict[str, dict[str, Any]] = {"train": {"schedule": "constant"}, "data": {"heldout": 0.0}}
        for key, value in keys.items():
            section, _, name = key.partition(".")
            tree.setdefault(section, {})[name] = value
        return list(without_effect(parse_config(tree)))

    (line,) = warned(given)
    assert line.startswith(told)
    assert warned({**given, **used}) == [] == warned({})


def test_sizes_beside_a_factory_are_told() -> None:
    config = parse_config({"model": {"factory": "a:b", "dim": 64}})
    assert list(without_effect(config)) == ["model.dim = 64: model.factory, with model.args, describes the model; leave it out"]


def test_keys_of_the_table_exist() -> None:
    config: Any = parse_config({})
    for key in _UNUSED:
        section, _, name = key.partition(".")
        assert name in type(getattr(config, section)).model_fields


def test_weights_without_fp8_products_are_told(tmp_path: Path) -> None:
    sizes = {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "experts": 4, "top_k": 2, "ffn": 48, "vocab": 256}
    experts = {"model_factory": "vescale_ray.models.moe:build", "model_args": sizes}

    def warned(**changes: Any) -> list[str]:
        config = tiny(tmp_path, "r", train_quantize="fp8 16x16", **changes)
        return [line for line in preflight.foresee(config).warnings if "quantize" in line]

    (line,) = warned(**experts, train_quantize_products=True)
    assert line.startswith("train.quantize_products = true: layers.0.ffn.experts.gate_up_proj and 3 more weights multiply in")
    assert warned(**experts) == [] == warned(train_quantize_products=True)
