"""A training script's state as tensors with names and kinds, plus JSON.

    entry of the state                          stored as
    "model": module or {fqn: tensor}            tensors `fqn`, kind "param" (parameters and persistent buffers)
    other key: module or {fqn: tensor}          tensors `key/fqn`, kind "param"
    torch optimizer                             kinds `exp_avg`, .. of its parameters' tensors; 0-d states, numbers and
                                                hyperparameters as JSON under meta["optimizers"][key]
    anything with state_dict()/load_state_dict  a plain value (schedulers, data loaders)
    any other: a plain value (``plain.py``)     JSON under meta["state"][key], or meta["values"][key] and tensor `state.key`, kind "plain"

Names are the module's own, independent of wrappers (activation checkpointing, torch.compile), so that a checkpoint does not depend on a
run's setup. Tied tensors are stored once, with a list of aliases.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from ..errors import CheckpointMismatch
from .matching import Pair, StoredTensor
from .names import NameTable, canonical, chosen, entry_of, matches
from .plain import Packed, data_name, pack
from .scalars import decode, encode

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

    def add(self, name: str, kind: str, tensor: torch.Tensor) -> None:
        if (name, kind) in self.tensors:
            raise ValueError(f"{kind!r} of tensor {name!r} is in the state twice")
        self.tensors[name, kind] = tensor


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
    """The tensors of a state that a load takes, what either side may lack, and their stored names."""

    include: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = ()
    allow_missing: tuple[str, ...] = ()
    allow_unexpected: tuple[str, ...] = ()
    table: NameTable = field(default_factory=NameTable)

    def takes(self, name: str, flat: FlatState) -> bool:
        """Whether to load the tensor called ``name`` in the model. A tied tensor is loaded if any of its names is chosen."""
        return any(chosen(one, self.include, self.exclude) for one in self._names(name, flat))

    def takes_pair(self, pair: Pair, flat: FlatState) -> bool:
        return self.takes(pair[0].rpartition("/")[0] if pair[1] == "state" else pair[0], flat)

    def takes_stored(self, name: str) -> bool:
        return chosen(name, self.include, self.exclude)

    def source(self, pair: Pair, flat: FlatState, holder: Holder) -> Pair:
        """The stored pair of the model's pair; for a tied tensor, of its first name that the checkpoint has."""
        name, kind = pair
        if kind == "state":
            name, _, state_key = name.rpartition("/")
            return f"{self.stored(name, flat, holder)}/{state_key}", kind
        return self.stored(name, flat, holder), kind

    def stored(self, name: str, flat: FlatState, holder: Holder) -> str:
        names = [self.table(one) for one in self._names(name, flat)]
        return next((one for one in names if one in holder.tensors or one in holder.aliases), names[0])

    @staticmethod
    def _names(name: str, flat: FlatState) -> list[str]:
        return [name, *(alias for alias, target in flat.aliases.items() if target == name)]


def flatten(state: Mapping[str, Any]) -> FlatState:
    """Flatten a state for saving.

    Raises:
        ValueError: a value cannot be stored; the message names it and the remedy.
    """
    flat = flatten_models(state)
    for key, value in state.items():
        if isinstance(value, torch.optim.Optimizer):
            flat.optimizers[key] = _flatten_optimizer(key, value, flat)
    # Tensors come in this order: first the models', then each optimizer's.
    for key, value in state.items():
        if not is_tensors(key, value) and not isinstance(value, torch.optim.Optimizer):
            packed = flat.values[key] = pack(f"state.{key}", value.state_dict() if is_stateful(value) else value)
            if packed.data and any(data_name(key) == name for name in (*flat.aliases, *(name for name, _ in flat.tensors))):
                raise ValueError(f"tensor {data_name(key)!r} has the name under which the bytes of entry {key!r} are stored: rename one")
    return flat


Created = list[tuple[torch.optim.Optimizer, torch.Tensor, str]]
"""Optimizer states that were created for reading: (optimizer, parameter, state key)."""


@contextmanager
def created_states() -> Iterator[Created]:
    """Remove the states created within the block if it fails, since an optimizer with states but no step could not go on."""
    created: Created = []
    try:
        yield created
    except BaseException:
        for optimizer, param, state_key in created:
            del optimizer.state[param][state_key]
            if not optimizer.state[param]:
                del optimizer.state[param]
        raise


def flatten_targets(state: Mapping[str, Any], checkpoint: Saved, choice: TensorChoice, created: Created) -> FlatState:
    """Flatten a state for loading. Optimizer states that only the checkpoint has are created, and listed in ``created``.

    Raises:
        CheckpointMismatch: the parameter groups of an optimizer differ.
    """
    flat = flatten_models(state)
    optimizers = checkpoint.meta.get("optimizers", {})
    for key, value in state.items():
        if isinstance(value, torch.optim.Optimizer):
            saved = optimizers[key]
            _check_groups(key, value, saved, flat, checkpoint, choice)
            _create_states(key, value, saved, flat, checkpoint, choice, created)
            _optimizer_tensors(key, value, flat)
    return flat


def stored_pairs(state: Mapping[str, Any], checkpoint: Saved) -> set[Pair]:
    """The stored (name, kind) pairs that belong to the entries of ``state``, for which a strict load must find a place."""
    meta = checkpoint.meta
    models = meta.get("models", ["model"])
    wanted = {key for key, value in state.items() if is_tensors(key, value)}
    kinds = {
        _kind(key, state_key)
        for key, value in state.items()
        if isinstance(value, torch.optim.Optimizer)
        for state_key in meta["optimizers"][key]["kinds"]
    }
    pairs = set()
    for name, tensor in checkpoint.tensors.items():
        entry = entry_of(name, models)
        for kind in tensor.kinds:
            if (kind == "param" and entry in wanted) or kind in kinds or (kind == "state" and name.rpartition("/")[2] in kinds):
                pairs.add((name, kind))
    return pairs


def flatten_models(state: Mapping[str, Any]) -> FlatState:
    """The tensors of a state's modules and dicts of tensors, by name."""
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
            if not isinstance(tensor, torch.Tensor):
                how = "have get_extra_state() return a tensor" if raw_name.endswith(EXTRA) else "give it as a separate entry"
                raise ValueError(f"{name!r} of state entry {key!r} is a {type(tensor).__name__}, no tensor; {how}")
            owner[name] = key
            if id(tensor) in flat.names:
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
    """Whether an entry is stored tensor by tensor: a module, or a dict of only tensors. Tensors among other values are plain values, of
    which only rank 0's are stored; models do not look like that."""
    if not isinstance(value, Mapping):
        return isinstance(value, nn.Module)
    tensors = [isinstance(one, torch.Tensor) for one in value.values()]
    return any(tensors) and (key == "model" or (all(tensors) and all(isinstance(name, str) for name in value)))


def is_stateful(value: Any) -> bool:
    return not isinstance(value, type) and all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))


def _kind(key: str, state_key: str) -> str:
    return state_key if key == "optimizer" else f"{key}.{state_key}"


def _param_name(key: str, index: int, param: torch.Tensor, flat: FlatState) -> str:
    name = flat.names.get(id(param))
    if name is None:
        raise ValueError(
            f"parameter {index} of optimizer {key!r} (shape {tuple(param.shape)}) belongs to no module in the state; "
            "put the module it optimizes beside it: {'model': module, 'optimizer': optimizer}"
        )
    return name


def _params(key: str, optimizer: torch.optim.Optimizer, flat: FlatState) -> Iterable[tuple[str, torch.Tensor]]:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for index, param in enumerate(params):
        yield _param_name(key, index, param, flat), param


def _is_scalar(param: torch.Tensor, state_key: str, value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0 and (param.dim() > 0 or state_key == "step")


def _optimizer_tensors(key: str, optimizer: torch.optim.Optimizer, flat: FlatState) -> None:
    """Add every state tensor of an optimizer, parameter by parameter."""
    for name, param in _params(key, optimizer, flat):
        for state_key, value in optimizer.state.get(param, {}).items():
            if not isinstance(value, torch.Tensor) or _is_scalar(param, state_key, value):
                continue
            if value.shape == param.shape:
                flat.add(name, _kind(key, state_key), value)
            elif hasattr(value, "device_mesh") or not hasattr(param, "device_mesh"):
                flat.add(f"{name}/{_kind(key, state_key)}", "state", value)
            else:
                raise ValueError(
                    f"state {state_key!r} of {name!r} in optimizer {key!r} is a plain tensor of shape {tuple(value.shape)} beside "
                    f"a sharded parameter of shape {tuple(param.shape)}: which part this rank holds is unknown; "
                    "make it a DTensor or RaggedDTensor"
                )


def _flatten_optimizer(key: str, optimizer: torch.optim.Optimizer, flat: FlatState) -> dict[str, Any]:
    _optimizer_tensors(key, optimizer, flat)
    scalars: dict[str, dict[str, Any]] = {}
    kinds: dict[str, None] = {}
    for name, param in _params(key, optimizer, flat):
        for state_key, value in optimizer.state.get(param, {}).items():
            if isinstance(value, torch.Tensor) and not _is_scalar(param, state_key, value):
                kinds[state_key] = None
            else:
                scalars.setdefault(state_key, {})[name] = encode(f"state {state_key!r} of {name!r}", value)
    groups = []
    for group in optimizer.param_groups:
        members = [_param_name(key, i, p, flat) for i, p in enumerate(group["params"])]
        hyper = {k: encode(f"hyperparameter {k!r} of optimizer {key!r}", v) for k, v in group.items() if k not in ("params", "param_names")}
        groups.append({"params": members, "hyper": hyper})
    return {"type": type(optimizer).__name__, "groups": groups, "kinds": list(kinds), "scalars": scalars}


def _check_groups(
    key: str, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], flat: FlatState, checkpoint: Saved, choice: TensorChoice
) -> None:
    _check_sort(key, optimizer, saved)
    here = [[_param_name(key, i, p, flat) for i, p in enumerate(g["params"])] for g in optimizer.param_groups]
    there = [list(g["params"]) for g in saved["groups"]]
    if saved.get("by_parameter"):
        # The groups were not recorded, only each parameter's hyperparameters. So any grouping is valid if a group's members agree in these.
        for index, names in enumerate(here):
            _hyper_of(key, index, names, saved, flat, checkpoint, choice)
        here, there = [sum(here, [])], [sum(there, [])]
    if len(here) != len(there):
        raise CheckpointMismatch(f"optimizer {key!r} has {len(here)} parameter groups, {len(there)} in the checkpoint")
    for index, (ours, theirs) in enumerate(zip(here, there, strict=True)):
        wanted = {_stored(name, flat, checkpoint, choice): name for name in ours}
        found = {checkpoint.aliases.get(n, n) for n in theirs}
        odd = [
            name
            for stored, name in wanted.items()
            if stored not in found and choice.takes(name, flat) and not matches(name, choice.allow_missing)
        ]
        odd += [n for n in found if n not in wanted and choice.takes_stored(n) and not matches(n, choice.allow_unexpected)]
        if odd:
            shown = ", ".join(name if name.isprintable() else repr(name) for name in sorted(odd)[:3])
            raise CheckpointMismatch(f"parameter group {index} of optimizer {key!r} differs from the checkpoint's in {shown}")


_OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}


def _check_sort(key: str, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Check that the optimizer is the saved one, or one with the same hyperparameters (Adam and AdamW). Another optimizer's states would be
    mistaken for this one's, or be ignored, without any error.

    If the optimizer's class name is the same, one set of hyperparameters may contain the other, since torch versions and schedulers add
    some.
    """
    sort = saved.get("type")
    same = sort is None or any(cls.__name__ == sort for cls in type(optimizer).__mro__)
    for group, stored in zip(optimizer.param_groups, saved["groups"], strict=False):
        ours, theirs = set(group) - {"params", "param_names"} - _OF_SCHEDULERS, set(stored["hyper"]) - _OF_SCHEDULERS
        if ours != theirs and not (same and (ours <= theirs or theirs <= ours)):
            odd = ", ".join(sorted(ours ^ theirs)[:4])
            raise CheckpointMismatch(
                f"optimizer {key!r} is {type(optimizer).__name__}, the checkpoint's is {sort or 'another'}: they differ in the "
                f"hyperparameters {odd}; make the same one, or load without it"
            )


def _hyper_of(
    key: str, index: int, names: list[str], saved: Mapping[str, Any], flat: FlatState, checkpoint: Saved, choice: TensorChoice
) -> Mapping[str, Any] | None:
    """The stored hyperparameters shared by all parameters of one group; ``None`` if none is stored."""
    by_name = {checkpoint.aliases.get(n, n): group["hyper"] for group in saved["groups"] for n in group["params"]}
    found = [by_name[stored] for stored in (_stored(name, flat, checkpoint, choice) for name in names) if stored in by_name]
    if any(hyper != found[0] for hyper in found):
        raise CheckpointMismatch(
            f"the parameters of group {index} of optimizer {key!r} have different hyperparameters in the checkpoint: use the groups "
            "with which it was saved"
        )
    return found[0] if found else None


def _stored(name: str, flat: FlatState, checkpoint: Saved, choice: TensorChoice) -> str:
    stored = choice.stored(name, flat, checkpoint)
    return checkpoint.aliases.get(stored, stored)


def _create_states(
    key: str,
    optimizer: torch.optim.Optimizer,
    saved: Mapping[str, Any],
    flat: FlatState,
    checkpoint: Saved,
    choice: TensorChoice,
    created: Created,
) -> None:
    """Create states that would only exist after the first step, so that a load does not need a step."""
    stored = checkpoint.tensors
    for name, param in _params(key, optimizer, flat):
        if not choice.takes(name, flat):
            continue
        source = _stored(name, flat, checkpoint, choice)
        for state_key in saved["kinds"]:
            kind = _kind(key, state_key)
            if state_key in optimizer.state.get(param, {}):
                continue
            with torch.no_grad():
                if source in stored and kind in stored[source].kinds:
                    made = torch.zeros_like(param, dtype=stored[source].kinds[kind], requires_grad=False)
                elif f"{source}/{kind}" in stored:
                    other = stored[f"{source}/{kind}"]
                    made = param.new_zeros(other.shape, dtype=other.kinds["state"])  # replicated if the parameter is a DTensor
                else:
                    continue
            optimizer.state[param][state_key] = made
            created.append((optimizer, param, state_key))


def restore_optimizer(
    key: str, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], flat: FlatState, checkpoint: Saved, choice: TensorChoice
) -> None:
    params: dict[str, torch.Tensor] = {}
    for param in (p for group in optimizer.param_groups for p in group["params"]):
        name = flat.names[id(param)]
        if choice.takes(name, flat):
            params[_stored(name, flat, checkpoint, choice)] = param
    for state_key, by_name in saved["scalars"].items():
        for name, value in by_name.items():
            found = params.get(checkpoint.aliases.get(name, name))
            if found is not None:
                optimizer.state[found][state_key] = decode(value, optimizer.state[found].get(state_key))
    for index, group in enumerate(optimizer.param_groups):
        if saved.get("by_parameter"):
            hyper = _hyper_of(key, index, [flat.names[id(p)] for p in group["params"]], saved, flat, checkpoint, choice) or {}
        else:
            hyper = saved["groups"][index]["hyper"]
        for name, value in hyper.items():
            group[name] = decode(value, group.get(name))
    adopt = getattr(optimizer, "adopt_states", None)  # for an optimizer whose states are views or copies of others
    if adopt is not None:
        adopt()
