"""Compare a state's entries with a checkpoint's, read the checkpoint's plain values, and set them in the state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..errors import CheckpointMismatch
from ..format.digest import view_of
from .flat_state import EXTRA, FlatState, Saved, State, TensorChoice, is_stateful, is_tensors
from .name_tables import canonical, entry_of, matches
from .optimizer_state import restore_optimizer
from .plain import KIND, EntryBytes, data_name, unpack

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
    """Whether some tensors of the entry are stored under other names, or all of them may be lacking."""
    names = [name for name, _ in flat.tensors if entry_of(name, flat.models) == key and choice.takes(name, flat)]
    stored = (choice.stored(name, flat, holder) for name in names)
    return any(name in holder.tensors or name in holder.aliases for name in stored) or all(
        matches(name, choice.allow_missing) for name in names
    )


def plain_values(where: str, state: Mapping[str, Any], holder: Saved) -> dict[str, Any]:
    """The values that ``holder`` has for the entries of ``state`` that are neither tensors nor optimizers.

    Raises:
        CheckpointMismatch: a value is malformed. CheckpointCorrupt: its bytes are damaged.
    """
    there = _sorts(holder.meta)
    return {
        key: plain_value(where, holder, key)
        for key, value in state.items()
        if key in there and not is_tensors(key, value) and not isinstance(value, torch.optim.Optimizer)
    }


def plain_value(where: str, holder: Saved, key: str) -> Any:
    """A new copy of one entry's value. An entry of tensors becomes a dict of whole tensors on the CPU."""
    meta, name = holder.meta, data_name(key)
    if key not in meta.get("values", {}) and key not in meta.get("state", {}):
        return {name: holder.read(stored, "param") for name, stored in entry_names(holder, key).items()}
    try:
        if key not in meta.get("values", {}):
            return unpack(meta["state"][key])
        kinds = holder.tensors[name].kinds if name in holder.tensors else {}
        if kinds.get(KIND, torch.uint8) != torch.uint8:
            raise ValueError(f"tensor {name!r} does not hold bytes")
        return unpack(meta["values"][key], EntryBytes(view_of(holder.read(name, KIND).view(-1)) if KIND in kinds else b""))
    except ValueError as error:
        raise CheckpointMismatch(f"{where}: meta.values.{key} can't be taken back: {error}") from error


def entry_names(holder: Saved, key: str) -> dict[str, str]:
    """``{name within the entry: stored name}`` of an entry of tensors, aliases of tied tensors included."""
    models = holder.meta.get("models", ["model"])
    found = {}
    for name, stored in [*((n, n) for n in holder.tensors), *holder.aliases.items()]:
        if entry_of(name, models) == key and "param" in holder.tensors[stored].kinds:
            found[name if key == "model" else name.removeprefix(f"{key}/")] = stored
    return found


class PlainValues(Mapping[str, Any]):
    """The plain entries of a checkpoint by name, and the entries of tensors named in ``asked``. Each access reads the value anew."""

    def __init__(self, where: str, holder: Saved, asked: Iterable[str] = ()) -> None:
        self._where, self._holder, self._asked = where, holder, tuple(asked)

    def __getitem__(self, key: str) -> Any:
        if key not in self._keys():
            raise KeyError(key)
        return plain_value(self._where, self._holder, key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys())

    def __len__(self) -> int:
        return len(self._keys())

    def __repr__(self) -> str:
        return f"PlainValues({', '.join(self._keys())})"

    def _keys(self) -> dict[str, None]:
        return dict.fromkeys([*self._holder.meta.get("state", {}), *self._holder.meta.get("values", {}), *self._asked])


def restore_values(state: State, values: Mapping[str, Any], holder: Saved, flat: FlatState, choice: TensorChoice) -> None:
    """Set all values but tensors: hyperparameters and scalars of optimizers; ``values`` in stateful objects and in ``state`` itself."""
    for key, value in list(state.items()):
        if isinstance(value, nn.Module):
            _set_extra_states(key, value, flat, choice)
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


def _set_extra_states(key: str, model: nn.Module, flat: FlatState, choice: TensorChoice) -> None:
    """Give each module its extra state. The load filled a tensor that ``get_extra_state()`` made, and the module may not hold that
    tensor."""
    prefix = "" if key == "model" else f"{key}/"
    for path, module in model.named_modules():
        name = prefix + canonical(f"{path}.{EXTRA}" if path else EXTRA)
        tensor = flat.tensors.get((flat.aliases.get(name, name), "param"))
        if tensor is not None and choice.takes(name, flat) and type(module).set_extra_state is not nn.Module.set_extra_state:
            module.set_extra_state(tensor)
