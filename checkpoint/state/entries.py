"""Compare a state's entries with a checkpoint's, and set the checkpoint's values in the state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..errors import CheckpointMismatch
from ..plain_values.plain_entries import plain_value
from .extra_states import set_extra_states
from .flat_state import FlatState, Saved, State, TensorChoice, is_stateful, is_tensors
from .name_tables import entry_of, matches
from .optimizer_state import restore_optimizer

_TENSORS, _OPTIMIZER, _PLAIN = "tensors", "an optimizer", "a plain value"
_REMEDY = {
    _TENSORS: "give a module or a dict of tensors to load into, or None, which becomes a dict of them",
    _OPTIMIZER: "give the optimizer itself",
    _PLAIN: "give None, which becomes the value",
}


def check_entries(where: str, state: Mapping[str, Any], holder: Saved, flat: FlatState, choice: TensorChoice) -> None:
    """Check that ``holder`` has every entry of the state, and as the same sort: tensors, an optimizer or a plain value.

    Args:
        where: description of ``holder``, for the message.
        flat: the tensors of ``state``.

    Raises:
        CheckpointMismatch: an entry is missing or of another sort. The message says what ``holder`` has, and the remedy.
    """
    there = _sorts(holder.meta)
    for key, value in state.items():
        here = _TENSORS if is_tensors(key, value) else _OPTIMIZER if isinstance(value, torch.optim.Optimizer) else _PLAIN
        found = there.get(key)
        if found == here or (found == _TENSORS and here == _PLAIN) or (here == _PLAIN and not found and matches(key, choice.allow_missing)):
            continue
        if here == _TENSORS and _tensors_elsewhere(key, holder, flat, choice):
            continue
        if found is not None:
            raise CheckpointMismatch(f"{where} has {key!r} as {found}, the state has {here} there; {_REMEDY[found]}")
        listed = ", ".join(f"{name!r} ({sort})" for name, sort in sorted(there.items())) or "none"
        raise CheckpointMismatch(f"{where} has no state {key!r}; it has {listed}")


def _sorts(meta: Mapping[str, Any]) -> dict[str, str]:
    values, optimizers = (*meta.get("state", {}), *meta.get("values", {})), meta.get("optimizers", {})
    return {
        **dict.fromkeys(meta.get("models", ["model"]), _TENSORS),
        **dict.fromkeys(values, _PLAIN),
        **dict.fromkeys(optimizers if isinstance(optimizers, Mapping) else (), _OPTIMIZER),  # unchecked if the state has no optimizer
    }


def _tensors_elsewhere(key: str, holder: Saved, flat: FlatState, choice: TensorChoice) -> bool:
    """Return whether some tensors of the entry are stored under other names, or all of them may be lacking."""
    names = [name for name, _ in flat.tensors if entry_of(name, flat.models) == key and choice.takes(name, flat)]
    stored = (choice.stored(name, flat, holder) for name in names)
    return any(name in holder.tensors or name in holder.aliases for name in stored) or all(
        matches(name, choice.allow_missing) for name in names
    )


def plain_values(where: str, state: Mapping[str, Any], holder: Saved) -> dict[str, Any]:
    """Return the values that ``holder`` has for the entries of ``state`` that are neither tensors nor optimizers.

    Raises:
        CheckpointMismatch: a value is malformed. CheckpointCorrupt: its bytes are damaged.
    """
    there = _sorts(holder.meta)
    return {
        key: plain_value(where, holder, key)
        for key, value in state.items()
        if key in there and not is_tensors(key, value) and not isinstance(value, torch.optim.Optimizer)
    }


def restore_values(state: State, values: Mapping[str, Any], holder: Saved, flat: FlatState, choice: TensorChoice) -> None:
    """Set all values that are not tensors: hyperparameters and scalars of optimizers, and ``values`` in stateful objects and in ``state``
    itself."""
    for key, value in list(state.items()):
        if is_tensors(key, value):
            set_extra_states(key, value, flat, choice)
        elif isinstance(value, torch.optim.Optimizer):
            restore_optimizer(key, value, holder.meta["optimizers"][key], flat, holder, choice)
        elif key not in values:
            continue
        elif is_stateful(value):
            try:
                value.load_state_dict(values[key])
            except Exception as error:  # the caller's class may raise any type to refuse a state
                raise CheckpointMismatch(
                    f"{type(value).__name__}.load_state_dict of the entry {key!r} failed on what the checkpoint has of it: "
                    f"{type(error).__name__}: {error}; tensors were loaded before"
                ) from error
        else:
            state[key] = values[key]
