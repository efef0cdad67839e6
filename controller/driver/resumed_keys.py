"""The table of what a resume does with a changed key of ``data``, ``model`` or ``train``: refuse it, warn, or take it.

Keys of other sections do not change what is computed, except ``run.seed``, which is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from vescale_ray.config.mistakes import shown

if TYPE_CHECKING:
    from vescale_ray.config import RunConfig

REFUSED: Mapping[str, frozenset[str]] = {
    "data": frozenset(
        {
            *("corpus", "mixture", "format", "column", "dtype", "tokenizer", "end_token", "vocab", "seq_len", "heldout"),
            "shuffle_blocks",
        }
    ),
    "model": frozenset({"kind", "dim", "layers", "ffn", "tie", "lora.rank", "lora.targets"}),
    "train": frozenset({"slots", "slot_batch", "optimizer"}),
}
"""Keys whose change is refused if it changes a sample, the global batch, or the name, shape or states of a parameter."""
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
FREE: Mapping[str, frozenset[str]] = {
    "data": frozenset({"eval", "eval_samples", "readahead_mb"}),
    "model": frozenset({"hf", "units"}),
    "train": frozenset(
        {
            *("reduce_staging_mb", "zero_stage", "reshard_after_forward", "sharding", "expert_parallel", "offload"),
            *("activation_checkpointing", "compile", "threads", "device"),
            *("eval_every", "completions", "early_stop", "profile"),
        }
    ),
}
"""Keys that may change without a word. Of ``model.hf``, ``config.json`` is compared, and with adapters the weights."""
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
