"""The keys of ``data``, ``model`` and ``train`` whose change on a resume gives a warning. Other changed keys are refused if they change a
sample, the global batch, or the name, shape or states of a parameter, and accepted otherwise; the tests have the complete table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from vescale_ray.config.mistakes import shown

if TYPE_CHECKING:
    from vescale_ray.config import RunConfig

TOLD: Mapping[str, tuple[str, ...]] = {
    "data": ("document_mask",),
    "model": ("heads", "kv_heads", "rope_theta", "factory", "args", "loss", "lora.alpha", "lora.dropout"),
    "train": (
        *("steps", "optimizer_options", "lr", "matrix_lr", "warmup_steps", "schedule", "decay_steps", "decay_type", "min_lr_ratio"),
        *("weight_decay", "no_decay", "betas", "eps", "grad_clip"),
        *("param_dtype", "quantize", "quantize_keep", "quantize_products", "reduce_dtype"),
    ),
}
"""Keys that change the computation, though the saved state fits: their change gives a warning."""
_SIZES = ("heads", "kv_heads", "rope_theta")
"""Keys of ``model.kind``."""


def changed_keys(saved: Mapping[str, Any], config: RunConfig) -> Iterator[tuple[str, str, str, str]]:
    """Yield for each key of :data:`TOLD` that has changed: its name, the saved value, the new one, and what follows.

    Args:
        saved: the configuration in a checkpoint. Keys that its version did not know are left out.
    """
    given = config.model_dump(mode="json")
    for section, keys in TOLD.items():
        follows = "the steps to come use the latter" if section == "train" else "its weights were trained with the former"
        for key in keys:
            before, now = _at(saved, section, *key.split(".")), _at(given, section, *key.split("."))
            if before and now and before != now and not _unread(key, config):
                yield f"{section}.{key}", shown(*before), shown(*now), follows


def _unread(key: str, config: RunConfig) -> bool:
    """Return whether the run does not use the key."""
    if key == "steps":
        return config.train.schedule == "constant"
    return key in _SIZES and (config.model.hf or config.model.factory) is not None


def _at(tree: Any, *path: str) -> list[Any]:
    """The value at a path, in a list; empty if there is none."""
    for part in path:
        if not isinstance(tree, Mapping) or part not in tree:
            return []
        tree = tree[part]
    return [tree]
