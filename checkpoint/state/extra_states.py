"""Extra states of modules, which ``get_extra_state()`` returns. A tensor is stored as other tensors are, any other value as a plain one.

The plain value is an entry of its own, under DCP's name for it: ``model.layers.0._extra_state``. A load takes an extra state as the
checkpoint has it, since the module's own one may still be ``None``, or a tensor of another shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from vescale_ray.state_loading.new_states import canonical

from ..errors import CheckpointMismatch, first_few
from ..plain_values.plain_entries import plain_value
from .flat_state import EXTRA, FlatState, Saved, TensorChoice, is_extra
from .name_tables import entry_of, matches


def extra_key(name: str, models: Iterable[str]) -> str:
    """Return the entry that holds the extra state ``name`` as a plain value."""
    entry = entry_of(name, models)
    return f"{entry}.{name.removeprefix(f'{entry}/')}"


def choose_extra_states(where: str, flat: FlatState, holder: Saved, choice: TensorChoice) -> None:
    """Replace the extra states in ``flat`` by what ``holder`` has of them: tensors to read into, or values.

    Args:
        where: description of ``holder``, for the message.

    Raises:
        CheckpointMismatch: an extra state is on one side only, or its value is malformed.
    """
    kept = {**holder.meta.get("state", {}), **holder.meta.get("values", {})}
    models = holder.meta.get("models", ["model"])
    here, flat.extra = flat.extra, {}
    found, filled, lacking = set[str](), set[int](), list[str]()
    for name in [*here, *(name for name, kind in flat.tensors if kind == "param" and is_extra(name))]:
        source = choice.stored(name, flat, holder)
        key = extra_key(source, models)
        found.add(key)
        if not choice.takes(name, flat):
            continue
        if key in kept:
            flat.tensors.pop((name, "param"), None)
            flat.extra[name] = plain_value(where, holder, key)
        elif source in holder.tensors:
            _fit(name, flat, holder.tensors[source].shape, holder.tensors[source].kinds["param"], filled)
        elif name in here and not matches(name, choice.allow_missing):
            lacking.append(repr(name))
    others = {key: inner for key in kept if (inner := _name_of(key, flat.models)) is not None and key not in found}
    left = [repr(key) for key, name in others.items() if choice.takes_stored(name) and not matches(name, choice.allow_unexpected)]
    if lacking or left:
        said = [f"it lacks {first_few(lacking)}"] * bool(lacking) + [f"it also has {first_few(left)}"] * bool(left)
        raise CheckpointMismatch(f"{where} is of another model: {'; '.join(said)}")


def _fit(name: str, flat: FlatState, shape: tuple[int, ...], dtype: torch.dtype, filled: set[int]) -> None:
    """Give the extra state a tensor of the stored shape and dtype, unless it is sharded. ``filled``: ids of other modules' extra states."""
    live = flat.tensors.get((name, "param"))
    if live is None or (not hasattr(live, "device_mesh") and ((live.shape, live.dtype) != (shape, dtype) or id(live) in filled)):
        live = flat.tensors[name, "param"] = torch.empty(shape, dtype=dtype, device=None if live is None else live.device)
    filled.add(id(live))


def _name_of(key: str, entries: Iterable[str]) -> str | None:
    """Return the name of the extra state in the plain entry ``key``, if it is one of ``entries``."""
    entry = max((entry for entry in entries if is_extra(key) and key.startswith(f"{entry}.")), key=len, default=None)
    inner = key.removeprefix(f"{entry}.")
    return None if entry is None else inner if entry == "model" else f"{entry}/{inner}"


def set_extra_states(key: str, model: nn.Module | Mapping[str, Any], flat: FlatState, choice: TensorChoice) -> None:
    """Give each module, or dict of tensors, the extra states that were read. A module may not hold the tensor that it returned.

    Raises:
        CheckpointMismatch: a module refuses its state.
    """
    for path, holder in _holders(model):
        name = ("" if key == "model" else f"{key}/") + canonical(path)
        tensor = flat.tensors.get((flat.aliases.get(name, name), "param"))
        if name not in flat.extra and (tensor is None or not choice.takes(name, flat)):
            continue
        state = flat.extra.get(name, tensor)
        if not isinstance(holder, nn.Module):
            holder[path] = state
            continue
        try:
            holder.set_extra_state(state)
        except Exception as error:  # the caller's class may raise any type to refuse a state
            raise CheckpointMismatch(
                f"{type(holder).__name__}.set_extra_state of {name!r} failed on what the checkpoint has of it: "
                f"{type(error).__name__}: {error}; tensors were loaded before"
            ) from error


def _holders(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the modules or dicts that take extra states, each with the name of its state."""
    if not isinstance(model, nn.Module):
        yield from [(path, model) for path in model if is_extra(path)]
        return
    for path, module in model.named_modules(remove_duplicate=False):
        if type(module).set_extra_state is not nn.Module.set_extra_state:
            yield f"{path}.{EXTRA}" if path else EXTRA, module
