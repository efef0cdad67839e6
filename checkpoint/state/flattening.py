"""Flatten a training script's state, for a save or for a load."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from ..plain_values.plain import data_name, pack
from .extra_states import choose_extra_states, extra_key
from .flat_state import FlatState, Saved, TensorChoice, flatten_models, is_stateful, is_tensors
from .matching import Pair
from .name_tables import entry_of
from .optimizer_state import Created, add_targets, check_groups, create_states, flatten_optimizer, kind_of


def flatten(state: Mapping[str, Any]) -> FlatState:
    """Flatten a state for saving.

    Raises:
        ValueError: a value cannot be stored; the message names it and the remedy.
    """
    flat = flatten_models(state)
    for key, value in state.items():
        if isinstance(value, torch.optim.Optimizer):
            flat.optimizers[key] = flatten_optimizer(key, value, flat)
    # Tensors come in this order: first the models', then each optimizer's.
    plain = {key: value for key, value in state.items() if not is_tensors(key, value) and not isinstance(value, torch.optim.Optimizer)}
    extra = {extra_key(name, flat.models): value for name, value in flat.extra.items()}
    if same := extra.keys() & state.keys():
        raise ValueError(f"state entry {min(same)!r} has the name under which the extra state of a module is stored: rename it")
    for key, value in (*plain.items(), *extra.items()):
        packed = flat.values[key] = pack(f"state.{key}", value.state_dict() if is_stateful(value) else value)
        if packed.data and any(data_name(key) == name for name in (*flat.aliases, *(name for name, _ in flat.tensors))):
            raise ValueError(f"tensor {data_name(key)!r} has the name under which the bytes of entry {key!r} are stored: rename one")
    return flat


def flatten_targets(where: str, state: Mapping[str, Any], checkpoint: Saved, choice: TensorChoice, created: Created) -> FlatState:
    """Flatten a state for loading. Optimizer states that only the checkpoint has are created, and listed in ``created``.

    Raises:
        CheckpointMismatch: the parameter groups of an optimizer, or the extra states of modules, differ.
    """
    flat = flatten_models(state)
    choose_extra_states(where, flat, checkpoint, choice)
    optimizers = checkpoint.meta.get("optimizers", {})
    for key, value in state.items():
        if isinstance(value, torch.optim.Optimizer):
            saved = optimizers[key]
            check_groups(key, value, saved, flat, checkpoint, choice)
            create_states(key, value, saved, flat, checkpoint, choice, created)
            add_targets(key, value, saved, flat, checkpoint, choice)
    return flat


def stored_pairs(state: Mapping[str, Any], checkpoint: Saved) -> set[Pair]:
    """Return the stored (name, kind) pairs that belong to the entries of ``state``, for which a strict load must find a place."""
    meta = checkpoint.meta
    models = meta.get("models", ["model"])
    wanted = {key for key, value in state.items() if is_tensors(key, value)}
    kinds = {
        kind_of(key, state_key)
        for key, value in state.items()
        if isinstance(value, torch.optim.Optimizer)
        for state_key in (*meta["optimizers"][key]["kinds"], *meta["optimizers"][key].get("nested", ()))
    }
    pairs = set()
    for name, tensor in checkpoint.tensors.items():
        entry = entry_of(name, models)
        for kind in tensor.kinds:
            if (kind == "param" and entry in wanted) or kind in kinds or (kind == "state" and _ends_in(name, kinds)):
                pairs.add((name, kind))
    return pairs


def _ends_in(name: str, kinds: Collection[str]) -> bool:
    """Return whether ``name`` is that of a parameter, a slash and one of ``kinds``, which may have slashes, too."""
    return any(name[at + 1 :] in kinds for at, char in enumerate(name) if char == "/")
