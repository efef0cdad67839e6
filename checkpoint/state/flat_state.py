"""A training script's state as tensors with names and kinds, plus JSON.

    entry of the state                          stored as
    "model": module or {fqn: tensor}            tensors `fqn`, kind "param" (parameters, persistent buffers, extra states)
    other key: module or {fqn: tensor}          tensors `key/fqn`, kind "param"
    extra state that is no tensor               a plain value `model.fqn` or `key.fqn` (``extra_states.py``)
    torch optimizer                             kinds `exp_avg`, .. of its parameters' tensors; states of one element, numbers,
                                                hyperparameters and the structure of nested states (``nested_state.py``)
                                                as JSON under meta["optimizers"][key]
    anything with state_dict()/load_state_dict  a plain value (schedulers, data loaders)
    any other: a plain value (``plain.py``)     JSON under meta["state"][key], or meta["values"][key] and tensor `state.key`, kind "plain"

Names are the module's own, independent of wrappers (activation checkpointing, torch.compile), so that a checkpoint does not depend on a
run's setup. Tied tensors are stored once, with a list of aliases.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from vescale_ray.state_loading.new_states import canonical

from ..plain_values.plain import Packed
from .matching import Pair, StoredTensor
from .name_tables import NameTable, chosen, entry_of

EXTRA = "_extra_state"
"""Torch's name, in a state dict, for the result of a module's ``get_extra_state()``."""
State = MutableMapping[str, Any]


@dataclass(eq=False)
class FlatState:
    """A flattened state: tensors by (name, kind), in order; aliases; the JSON part of the manifest's meta."""

    tensors: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    models: list[str] = field(default_factory=list)
    optimizers: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Packed] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    """Name of each parameter by its id; ``tensors`` keeps the parameters alive."""
    owners: dict[str, Pair] = field(default_factory=dict)
    """(parameter's name, kind) of each tensor of kind "state", by its name."""
    nested: dict[tuple[str, str, str], Any] = field(default_factory=dict)
    """Nested states of optimizers, by (entry, parameter's name, state key). Only a load fills it; it then reads their tensors."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Extra states of modules that are no tensors, by name. In a load, the checkpoint's."""

    def add(self, name: str, kind: str, tensor: torch.Tensor) -> None:
        if (name, kind) in self.tensors:
            raise ValueError(f"{kind!r} of tensor {name!r} is in the state twice")
        self.tensors[name, kind] = tensor

    def add_state(self, name: str, kind: str, tensor: torch.Tensor, *, apart: bool) -> None:
        """Add an optimizer state of the parameter called ``name``. ``apart``: store it as a separate tensor, since its shape differs from
        the parameter's."""
        if apart:
            self.owners[f"{name}/{kind}"] = name, kind
        self.add(*((f"{name}/{kind}", "state") if apart else (name, kind)), tensor)


class Holder(Protocol):
    """A source of tensors for a load: our checkpoint, or another program's files."""

    @property
    def tensors(self) -> Mapping[str, StoredTensor]: ...

    @property
    def aliases(self) -> Mapping[str, str]: ...


class Saved(Holder, Protocol):
    """A holder that also has the state besides tensors, as :func:`~vescale_ray.checkpoint.save` stores it in ``meta``."""

    @property
    def meta(self) -> Mapping[str, Any]: ...

    def read(self, name: str, kind: str) -> torch.Tensor: ...


@dataclass(frozen=True)
class TensorChoice:
    """Which tensors a load takes, which ones the model or the checkpoint may lack, and under which names they are stored."""

    include: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = ()
    allow_missing: tuple[str, ...] = ()
    allow_unexpected: tuple[str, ...] = ()
    table: NameTable = field(default_factory=NameTable)

    def takes(self, name: str, flat: FlatState) -> bool:
        """Return whether to load the tensor called ``name`` in the model. A tied tensor is loaded if any of its names is chosen."""
        return any(chosen(one, self.include, self.exclude) for one in self._names(name, flat))

    def takes_pair(self, pair: Pair, flat: FlatState) -> bool:
        return self.takes(flat.owners.get(pair[0], pair)[0] if pair[1] == "state" else pair[0], flat)

    def takes_stored(self, name: str) -> bool:
        return chosen(name, self.include, self.exclude)

    def source(self, pair: Pair, flat: FlatState, holder: Holder) -> Pair:
        """Return the stored pair of the model's pair; for a tied tensor, of its first name that the checkpoint has."""
        name, kind = pair
        if kind == "state" and name in flat.owners:
            owner, state_kind = flat.owners[name]
            return f"{self.stored(owner, flat, holder)}/{state_kind}", kind
        return self.stored(name, flat, holder), kind

    def stored(self, name: str, flat: FlatState, holder: Holder) -> str:
        names = [self.table(one) for one in self._names(name, flat)]
        return next((one for one in names if one in holder.tensors or one in holder.aliases), names[0])

    @staticmethod
    def _names(name: str, flat: FlatState) -> list[str]:
        return [name, *(alias for alias, target in flat.aliases.items() if target == name)]


def flatten_models(state: Mapping[str, Any]) -> FlatState:
    """Return the tensors of a state's modules and dicts of tensors, by name."""
    flat, owner = FlatState(), dict[str, str]()
    for key, value in state.items():
        if not is_tensors(key, value):
            continue
        flat.models.append(key)
        prefix = "" if key == "model" else f"{key}/"
        items = value.state_dict(keep_vars=True) if isinstance(value, nn.Module) else value
        for raw_name, tensor in items.items():
            if not isinstance(raw_name, str):
                raise ValueError(f"state entry {key!r} holds a tensor under the key {raw_name!r}; give texts")
            name = prefix + canonical(raw_name)
            owner[name] = key
            if not isinstance(tensor, torch.Tensor):
                if not is_extra(raw_name):
                    raise ValueError(
                        f"{name!r} of state entry {key!r} is a {type(tensor).__name__}, not a tensor; give it as a separate entry"
                    )
                flat.extra[name] = tensor
                continue
            if id(tensor) in flat.names and not is_extra(raw_name):  # modules may return one tensor, and get others
                flat.aliases[name] = flat.names[id(tensor)]
                continue
            flat.names[id(tensor)] = name
            flat.add(name, "param", tensor)
    for name, key in owner.items():
        found = entry_of(name, flat.models)
        if found != key:
            raise ValueError(f"tensor {name!r} of state entry {key!r} would be mistaken for one of entry {found!r}: rename one of them")
    return flat


def is_tensors(key: str, value: Any) -> bool:
    """Return whether an entry is stored tensor by tensor: a module, or a dict of only tensors. Tensors among other values are plain values,
    of which only rank 0's are stored; models do not look like that."""
    if not isinstance(value, Mapping):
        return isinstance(value, nn.Module)
    tensors = [isinstance(one, torch.Tensor) for one in value.values()]
    return any(tensors) and (key == "model" or (all(tensors) and all(isinstance(name, str) for name in value)))


def is_extra(name: str) -> bool:
    """Return whether a name in a state dict is that of a module's extra state."""
    return name.rpartition(".")[2] == EXTRA


def is_stateful(value: Any) -> bool:
    return not isinstance(value, type) and all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))
