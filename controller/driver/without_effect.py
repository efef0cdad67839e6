"""Warnings of settings that a run does not use, or that probably do not have the intended effect."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from vescale_ray.config import RunConfig
from vescale_ray.config.mistakes import shown

_UNUSED: dict[str, tuple[Callable[[RunConfig], bool], str]] = {
    "train.min_lr_ratio": (lambda c: c.train.schedule == "constant", "train.schedule = constant keeps train.lr"),
    "train.decay_type": (lambda c: c.train.schedule != "wsd", "it is the form of the final decay of train.schedule = wsd"),
    "train.matrix_lr": (lambda c: c.train.optimizer in ("adamw", "sgd"), "train.optimizer steps all parameters with train.lr"),
    "train.eps": (lambda c: c.train.optimizer == "sgd", "train.optimizer = sgd has none"),
    "train.keep_cast": (
        lambda c: c.train.zero_stage < 3 or (c.train.param_dtype, c.train.offload, c.model.lora) == ("float32", "none", None),
        "it keeps what workers cast for each all-gather, and this run makes no casts, or one per step",
    ),
    "train.eval_every": (
        lambda c: not c.data.eval_samples or not (c.data.heldout or c.data.eval),
        "there is nothing to evaluate; raise data.heldout and data.eval_samples, or give sets in data.eval",
    ),
    "checkpoint.keep_metric": (lambda c: not c.checkpoint.keep_best, "checkpoint.keep_best = 0 keeps none by it; raise that"),
    "checkpoint.keep_mode": (lambda c: not c.checkpoint.keep_best, "checkpoint.keep_best = 0 keeps none by it; raise that"),
    "checkpoint.mtbf_hours": (lambda c: c.checkpoint.every != "auto", "it is for checkpoint.every = auto"),
    "checkpoint.auto_min_s": (lambda c: c.checkpoint.every != "auto", "it is for checkpoint.every = auto"),
    "checkpoint.auto_max_s": (lambda c: c.checkpoint.every != "auto", "it is for checkpoint.every = auto"),
    "elastic.grow_after_s": (lambda c: not c.elastic.grow, "it is for elastic.grow = true"),
    "elastic.grow_gap_s": (lambda c: not c.elastic.grow, "it is for elastic.grow = true"),
}
"""For each key: when a value other than the default is not used, and why."""


def without_effect(config: RunConfig) -> Iterator[str]:
    """Yield a warning for each value that the run does not use, or that is probably not meant."""
    describes = "config.json of model.hf" if config.model.hf is not None else "model.factory, with model.args,"
    for key in config.model.unused:
        yield f"model.{key} = {getattr(config.model, key)}: {describes} describes the model; leave it out"
    for key, (unused, why) in _UNUSED.items():
        section, _, name = key.partition(".")
        keys: Any = getattr(config, section)
        value = getattr(keys, name)
        if value != type(keys).model_fields[name].default and unused(config):
            yield f"{key} = {shown(value)} has no effect: {why}"
    yield from _columns_of_chats(config)
    yield from _not_meant(config)
    train = config.train
    if train.warmup_steps > train.steps:
        yield (
            f"train.warmup_steps = {train.warmup_steps} with train.steps = {train.steps}: the learning rate does not reach train.lr; lower "
            "train.warmup_steps"
        )
    if config.ray.gpus_per_worker > 1:
        yield (
            f"ray.gpus_per_worker = {config.ray.gpus_per_worker:g}: a worker computes on one GPU; set it to 1, and elastic.workers to the "
            "number of GPUs"
        )


def _not_meant(config: RunConfig) -> Iterator[str]:
    kept = config.checkpoint
    if kept.keep_best and kept.keep_mode == "max":
        yield f"checkpoint.keep_mode = max keeps the checkpoints with the largest {kept.keep_metric}; set it to min"
    if config.model.hf is not None and "corpus" not in config.data.model_fields_set:
        yield "data.corpus is not given, so the model is trained on the source text of Python's standard library; give your data"
    if config.model.hf is not None and "seq_len" not in config.data.model_fields_set:
        yield f"data.seq_len is not given, so a sample has {config.data.seq_len} tokens; give the length that the model is to learn"


def _columns_of_chats(config: RunConfig) -> Iterator[str]:
    data = config.data
    sources: dict[str, Any] = {f"data.mixture.{number}": one for number, one in enumerate(data.mixture or ())}
    sources |= {f"data.eval.{name}": one for name, one in data.eval.items()}
    if all((one.format or data.format) == "chat" for one in sources.values()):
        sources["data"] = data
    for where, source in sources.items():
        if (source.format or data.format) == "chat" and source.column not in (None, "text"):
            yield f"{where}.column = {source.column}: rows of data.format = chat have columns of their own; leave it out"
