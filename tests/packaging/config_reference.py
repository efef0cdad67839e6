"""The page docs/reference/configuration.md, made from the sections' models."""

from __future__ import annotations

from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from pydantic.fields import FieldInfo

from vescale_ray.config.mistakes import number
from vescale_ray.config.reading import nested, sections


def describe_type(field: FieldInfo) -> str:
    """Return the type of a key in the documentation's words: ``whole number >= 1``, ``adamw | sgd``, .."""
    annotation: Any = field.annotation
    words: dict[Any, str] = {int: "whole number", float: "number", bool: "true or false", str: "text"}
    optional = type(None) in get_args(annotation)
    several = [words.get(arg, "list") for arg in get_args(annotation) if arg is not type(None)]
    if isinstance(annotation, UnionType) and len(several) > 1:
        return " or ".join(several) + (", or null" if optional else "")
    if optional:
        annotation = next(arg for arg in get_args(annotation) if arg is not type(None))
    bounds = [*field.metadata]
    if get_args(annotation) and getattr(annotation, "__metadata__", None):
        bounds += [m for extra in annotation.__metadata__ for m in (extra.metadata if isinstance(extra, FieldInfo) else [extra])]
        annotation = get_args(annotation)[0]
    origin = getattr(annotation, "__origin__", None)
    if origin is Union:
        value = next(arg for arg in get_args(annotation) if get_origin(arg) is not Literal)
        return f"{words[value]} >= 0, or auto" if value in words else "list, or auto"
    text = words.get(annotation) or (
        " | ".join(map(str, get_args(annotation)))
        if origin is Literal
        else "keys and values"
        if origin is dict or isinstance(annotation, type)
        else "list"
    )
    for symbol, name in ((">=", "ge"), (">", "gt"), ("<=", "le"), ("<", "lt")):
        text += "".join(f" {symbol} {number(getattr(bound, name))}" for bound in bounds if getattr(bound, name, None) is not None)
    return f"{text}, or null" if optional else text


def reference() -> str:
    """Return docs/reference/configuration.md: every key with its type, default and meaning, from the sections."""
    lines = [
        "# Configuration",
        "",
        "One YAML file describes a run. Missing keys have the defaults below. The command line changes single keys:",
        "",
        "    vescale-ray train run.yaml train.steps=500 elastic.workers=2",
        "",
        "The value after `=` is YAML. An unknown key is an error that names the nearest known one. A value out of bounds is an error, too.",
        "Both end with exit code 2 before anything starts. The run's folder keeps the resolved form as `config.yaml`.",
        "",
        "`python -m tests.packaging.config_reference > docs/reference/configuration.md` generates this page; "
        "a test compares it with the code.",
    ]
    for name, section in sections():
        lines += [
            "",
            f"## {name}",
            "",
            " ".join((section.__doc__ or "").split()),
            "",
            "| key | type | default | meaning |",
            "|---|---|---|---|",
        ]
        for key, field in section.model_fields.items():
            lines.append(_row(f"{name}.{key}", field))
            if (inner := nested(field)) is not None:
                lines += [_row(f"{name}.{key}.{more}", about) for more, about in inner.model_fields.items()]
    lines += [
        "",
        "## Constraints between keys",
        "",
        "- `elastic.min_workers <= elastic.workers <= elastic.max_workers <= train.slots`",
        "- `elastic.standby <= elastic.max_workers`",
        "- `elastic.demand` needs `elastic.grow`",
        "- `elastic.grow` and `elastic.spares` need `ray.cpus_per_worker` or `ray.gpus_per_worker` above 0",
        "- `elastic.deterministic` excludes `fused` and `normuon` in `train.optimizer_options`",
        "- `model.heads` divides `model.dim` into heads of an even size; `model.kv_heads` divides `model.heads`",
        "- `train.sharding.shard_group` divides `elastic.workers`, `elastic.max_workers`, and `elastic.min_workers` unless that is smaller",
        "- `train.sharding` excludes `elastic.deterministic`",
        "- `train.expert_parallel` divides `train.sharding.shard_group`; without it, the numbers of workers above",
        "- `train.expert_parallel` above 1 excludes `elastic.deterministic`, and `train.compile` with "
        "`train.activation_checkpointing = selective`",
        "- `train.offload = cpu` excludes `train.device = cpu`",
        "- `train.decay_steps` needs `train.schedule = wsd`; `train.warmup_steps + train.decay_steps <= train.steps`",
        "- `train.early_stop` needs `train.eval_every` and `data.eval_samples` above 0, and `data.heldout`, too, for `heldout_loss`",
        "- `checkpoint.keep_best` by another metric than `loss` needs `data.eval_samples`, and `data.heldout`, too, for `heldout_loss`",
        "- `train.profile` ends with the run's last step at the latest; its ranks are below `elastic.max_workers`",
        "- `train.device = cuda` needs `ray.gpus_per_worker` above 0; a value above 1 must be whole, as Ray requires",
    ]
    return "\n".join(lines) + "\n"


def _row(key: str, field: FieldInfo) -> str:
    kind = "keys and values, or null" if nested(field) is not None else describe_type(field).replace("|", "\\|")
    default = "must be given"
    if not field.is_required():
        default = f"`{yaml.safe_dump(_as_yaml(field.default), default_flow_style=True).strip().removesuffix('...').strip()}`"
    return f"| `{key}` | {kind} | {default} | {field.description} |"


def _as_yaml(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


if __name__ == "__main__":
    print(reference(), end="")
