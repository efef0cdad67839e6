"""An optimizer's state as tensors of its parameters, and JSON: its parameter groups, numbers, and states that belong to no parameter."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from ..errors import CheckpointMismatch
from .flat_state import FlatState, Saved, TensorChoice
from .names import matches
from .scalars import decode, encode

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


def kind_of(key: str, state_key: str) -> str:
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
    plain = hasattr(param, "device_mesh") and not hasattr(value, "device_mesh")
    return isinstance(value, torch.Tensor) and value.dim() == 0 and (param.dim() > 0 or plain or state_key == "step")


def add_optimizer_tensors(key: str, optimizer: torch.optim.Optimizer, flat: FlatState, without: Collection[str] = ()) -> None:
    """Add every state tensor of an optimizer, parameter by parameter, except for the parameters ``without``."""
    for name, param in _params(key, optimizer, flat):
        for state_key, value in ({} if name in without else optimizer.state.get(param, {})).items():
            if not isinstance(value, torch.Tensor) or _is_scalar(param, state_key, value):
                continue
            if value.shape == param.shape:
                flat.add(name, kind_of(key, state_key), value)
            elif hasattr(value, "device_mesh") or not hasattr(param, "device_mesh"):
                flat.add(f"{name}/{kind_of(key, state_key)}", "state", value)
            else:
                raise ValueError(
                    f"state {state_key!r} of {name!r} in optimizer {key!r} is a plain tensor of shape {tuple(value.shape)} beside "
                    f"a sharded parameter of shape {tuple(param.shape)}: which part this rank holds is unknown; "
                    "make it a DTensor or RaggedDTensor"
                )


def flatten_optimizer(key: str, optimizer: torch.optim.Optimizer, flat: FlatState) -> dict[str, Any]:
    add_optimizer_tensors(key, optimizer, flat)
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
    shared: dict[str, Any] = {}
    states: Mapping[Any, Any] = optimizer.state  # torch also stores states whose keys are no parameters
    for state_key, value in states.items():
        if not isinstance(state_key, torch.Tensor):
            if not isinstance(state_key, str):
                raise ValueError(f"optimizer {key!r} has a state under the key {state_key!r}, neither a parameter nor a text: use a text")
            shared[state_key] = encode(f"state {state_key!r} of optimizer {key!r}", value)
    about = {"type": type(optimizer).__name__, "groups": groups, "kinds": list(kinds), "scalars": scalars}
    return {**about, **({"shared": shared} if shared else {})}


def check_groups(
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


def create_states(
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
            kind = kind_of(key, state_key)
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


def stateless(
    key: str, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], flat: FlatState, checkpoint: Saved, choice: TensorChoice
) -> set[str]:
    """Names of the parameters that have no state in the checkpoint, for example since it was saved before the first step. Their states go,
    as in torch. Optimizers with states from the start keep all, and so miss them."""
    if hasattr(optimizer, "adopt_states"):
        return set()
    scalars = {checkpoint.aliases.get(name, name) for by_name in saved["scalars"].values() for name in by_name}
    kinds = [kind_of(key, state_key) for state_key in saved["kinds"]]
    found = set()
    for name, _ in _params(key, optimizer, flat):
        source = _stored(name, flat, checkpoint, choice)
        tensor = checkpoint.tensors.get(source)
        held = tensor is not None and any(kind in tensor.kinds or f"{source}/{kind}" in checkpoint.tensors for kind in kinds)
        if tensor is not None and not held and source not in scalars and choice.takes(name, flat):
            found.add(name)
    return found


def restore_optimizer(
    key: str, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], flat: FlatState, checkpoint: Saved, choice: TensorChoice
) -> None:
    params: dict[str, torch.Tensor] = {}
    for param in (p for group in optimizer.param_groups for p in group["params"]):
        name = flat.names[id(param)]
        if choice.takes(name, flat):
            params[_stored(name, flat, checkpoint, choice)] = param
    empty = stateless(key, optimizer, saved, flat, checkpoint, choice)
    for state_key in [k for k in optimizer.state if flat.names.get(id(k)) in empty or not isinstance(k, torch.Tensor)]:
        del optimizer.state[state_key]
    for state_key, value in saved.get("shared", {}).items():
        optimizer.state[state_key] = decode(value)
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
