"""An optimizer's state as tensors of its parameters, and JSON: its parameter groups, numbers, and states that belong to no parameter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from vescale_ray.dtensor.beside import zeros_beside
from vescale_ray.state_loading.new_states import OF_SCHEDULERS

from ..errors import CheckpointMismatch
from ..plain_values.scalars import decode
from .flat_state import FlatState, Saved, TensorChoice
from .name_tables import matches
from .nested_state import as_json, fold, is_folded, is_nested, is_replicated, leaves, unfold

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
    """Return whether a state is a number, not a tensor. Beside a sharded parameter, a plain tensor of one element is a number."""
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        return False
    plain = not hasattr(value, "device_mesh")
    if value.dim() == 0:
        return param.dim() > 0 or (plain and hasattr(param, "device_mesh")) or state_key == "step"
    return plain and (hasattr(param, "device_mesh") or value.shape != param.shape)


def _tensors(param: torch.Tensor, state_key: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of one state that are stored as such, by their paths: the state itself, or those in it."""
    if is_nested(value) or isinstance(value, torch.Tensor):
        for path, tensor in leaves(state_key, value):
            if not _is_scalar(param, path.rpartition("/")[2], tensor):
                yield path, tensor


def _add(key: str, name: str, param: torch.Tensor, path: str, value: torch.Tensor, flat: FlatState) -> None:
    apart = value.shape != param.shape
    if apart and hasattr(param, "device_mesh") and not hasattr(value, "device_mesh"):
        raise ValueError(
            f"state {path!r} of {name!r} in optimizer {key!r} is a plain tensor of shape {tuple(value.shape)} beside "
            f"a sharded parameter of shape {tuple(param.shape)}: which part this rank holds is unknown; "
            "make it a DTensor or RaggedDTensor"
        )
    flat.add_state(name, kind_of(key, path), value, apart=apart)


def flatten_optimizer(key: str, optimizer: torch.optim.Optimizer, flat: FlatState) -> dict[str, Any]:
    """Add every state tensor of an optimizer, parameter by parameter. Returns the JSON of the rest."""
    scalars: dict[str, dict[str, Any]] = {}
    kinds: dict[str, None] = {}
    nested: dict[str, None] = {}
    replicated = []
    for name, param in _params(key, optimizer, flat):
        for state_key, value in optimizer.state.get(param, {}).items():
            found = dict(_tensors(param, state_key, value))
            for path, tensor in found.items():
                _add(key, name, param, path, tensor, flat)
                replicated += [f"{name}/{path}"] if is_replicated(param, tensor) else []
            what = f"state {state_key!r} of {name!r}"
            if is_nested(value):
                nested.update(dict.fromkeys(found))
                scalars.setdefault(state_key, {})[name] = fold(what, state_key, value, {id(tensor): path for path, tensor in found.items()})
            elif found:
                kinds[state_key] = None
            else:
                scalars.setdefault(state_key, {})[name] = as_json(what, state_key, value)
    groups = []
    for group in optimizer.param_groups:
        members = [_param_name(key, i, p, flat) for i, p in enumerate(group["params"])]
        given = {k: value for k, value in group.items() if k not in ("params", "param_names")}
        hyper = {k: as_json(f"hyperparameter {k!r} of optimizer {key!r}", k, value) for k, value in given.items()}
        groups.append({"params": members, "hyper": hyper})
    about = {"type": type(optimizer).__name__, "groups": groups, "kinds": list(kinds), "scalars": scalars}
    others = {"nested": list(nested), "replicated": replicated, "shared": _shared(key, optimizer)}
    return {**about, **{field: value for field, value in others.items() if value}}


def _shared(key: str, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the states whose keys are no parameters, which torch stores, too."""
    shared: dict[str, Any] = {}
    states: Mapping[Any, Any] = optimizer.state
    for state_key, value in states.items():
        if not isinstance(state_key, torch.Tensor):
            if not isinstance(state_key, str):
                raise ValueError(f"optimizer {key!r} has a state under the key {state_key!r}, neither a parameter nor a text: use a text")
            what = f"state {state_key!r} of optimizer {key!r}"
            shared[state_key] = as_json(what, state_key, value)
    return shared


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
    remedy = "build it with the groups that were saved, or load without it"
    if len(here) != len(there):
        raise CheckpointMismatch(f"optimizer {key!r} has {len(here)} parameter groups, {len(there)} in the checkpoint; {remedy}")
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
            raise CheckpointMismatch(f"parameter group {index} of optimizer {key!r} differs from the checkpoint's in {shown}; {remedy}")


def _check_sort(key: str, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Check that the optimizer is the saved one, or one with the same hyperparameters (Adam and AdamW). Another optimizer's states would be
    mistaken for this one's, or be ignored, without any error.

    If the optimizer's class name is the same, one set of hyperparameters may contain the other, since torch versions and schedulers add
    some.
    """
    sort = saved.get("type")
    same = sort is None or any(cls.__name__ == sort for cls in type(optimizer).__mro__)
    for group, stored in zip(optimizer.param_groups, saved["groups"], strict=False):
        ours, theirs = set(group) - {"params", "param_names"} - OF_SCHEDULERS, set(stored["hyper"]) - OF_SCHEDULERS
        if ours != theirs and not (same and (ours <= theirs or theirs <= ours)):
            odd = ", ".join(sorted(ours ^ theirs)[:4])
            raise CheckpointMismatch(
                f"optimizer {key!r} is {type(optimizer).__name__}, the checkpoint's is {sort or 'another'}: they differ in the "
                f"hyperparameters {odd}; make the same one, or load without it"
            )


def _hyper_of(
    key: str, index: int, names: list[str], saved: Mapping[str, Any], flat: FlatState, checkpoint: Saved, choice: TensorChoice
) -> Mapping[str, Any] | None:
    """Return the stored hyperparameters shared by all parameters of one group; ``None`` if none is stored."""
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
    for name, param in _params(key, optimizer, flat):
        if not choice.takes(name, flat):
            continue
        source = _stored(name, flat, checkpoint, choice)
        for state_key in saved["kinds"]:
            form = _form(param, kind_of(key, state_key), source, checkpoint)
            if form is None or state_key in optimizer.state.get(param, {}):
                continue
            optimizer.state[param][state_key] = _zeros(param, state_key, form, source, saved)
            created.append((optimizer, param, state_key))


def _form(param: torch.Tensor, kind: str, source: str, checkpoint: Saved) -> tuple[tuple[int, ...], torch.dtype] | None:
    """Return the shape and dtype that the state ``kind`` of ``param`` gets in a load. ``source``: the parameter's stored name. ``None``:
    the checkpoint lacks the state.

    If parameter and state are stored in one dtype, the state gets the dtype of ``param``, because torch's optimizers need equal dtypes.
    """
    stored = checkpoint.tensors
    own = stored[source].kinds if source in stored else {}
    if kind in own:
        return tuple(param.shape), param.dtype if own[kind] == own.get("param") else own[kind]
    apart = stored.get(f"{source}/{kind}")
    if apart is None:
        return None
    return apart.shape, param.dtype if apart.kinds["state"] == own.get("param") else apart.kinds["state"]


def _zeros(
    param: torch.Tensor, path: str, form: tuple[tuple[int, ...], torch.dtype], source: str, saved: Mapping[str, Any]
) -> torch.Tensor:
    with torch.no_grad():
        return zeros_beside(param, *form, replicated=f"{source}/{path}" in saved.get("replicated", ()))


def add_targets(
    key: str, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], flat: FlatState, checkpoint: Saved, choice: TensorChoice
) -> None:
    """Add the tensors of an optimizer that a load reads. The checkpoint decides which states are tensors. Its nested states replace those
    of the optimizer."""
    empty = stateless(key, optimizer, saved, flat, checkpoint, choice)
    scalars: dict[str, dict[str, Any]] = {}
    for state_key, by_name in saved["scalars"].items():
        for name, value in by_name.items():
            scalars.setdefault(checkpoint.aliases.get(name, name), {})[state_key] = value
    for name, param in _params(key, optimizer, flat):
        source = _stored(name, flat, checkpoint, choice)
        live = {} if name in empty else optimizer.state.get(param, {})
        stored = scalars.get(source, {}) if choice.takes(name, flat) else {}
        for state_key, value in live.items():
            if state_key in stored:
                continue
            kept = isinstance(value, torch.Tensor) and _form(param, kind_of(key, state_key), source, checkpoint) is not None
            for path, tensor in [(state_key, value)] if kept else _tensors(param, state_key, value):
                _add(key, name, param, path, tensor, flat)
        for state_key, value in stored.items():
            if is_folded(value):
                ours = dict(leaves(state_key, live.get(state_key)))
                take = partial(_nested_target, key, name, param, source, saved, flat, checkpoint, ours)
                flat.nested[key, name, state_key] = unfold(value, cache(take))


def _nested_target(
    key: str,
    name: str,
    param: torch.Tensor,
    source: str,
    saved: Mapping[str, Any],
    flat: FlatState,
    checkpoint: Saved,
    live: Mapping[str, torch.Tensor],
    path: str,
) -> torch.Tensor:
    """Return the tensor to read a nested state's tensor ``path`` into: the live one if it fits, or a new one."""
    form = _form(param, kind_of(key, path), source, checkpoint)
    if form is None:
        raise CheckpointMismatch(f"optimizer {key!r} has no tensor {path!r} of {name!r} in the checkpoint, but names it")
    ours = live.get(path)
    if ours is None or (ours.shape, ours.dtype) != form or isinstance(ours, DTensor) != isinstance(param, DTensor):
        ours = _zeros(param, path, form, source, saved)
    _add(key, name, param, path, ours, flat)
    return ours


def stateless(
    key: str, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], flat: FlatState, checkpoint: Saved, choice: TensorChoice
) -> set[str]:
    """Return the names of the parameters without state in the checkpoint, for example because it was saved before the first step. The load
    removes their states, as torch does. It is empty for combined optimizers, which must have all states: a missing one is an error."""
    if hasattr(optimizer, "optimizers"):
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
    params: dict[str, list[torch.Tensor]] = {}  # several if parameters were tied when they were saved
    for param in (p for group in optimizer.param_groups for p in group["params"]):
        name = flat.names[id(param)]
        if choice.takes(name, flat):
            params.setdefault(_stored(name, flat, checkpoint, choice), []).append(param)
    empty = stateless(key, optimizer, saved, flat, checkpoint, choice)
    for state_key in [k for k in optimizer.state if flat.names.get(id(k)) in empty or not isinstance(k, torch.Tensor)]:
        del optimizer.state[state_key]
    for state_key, value in saved.get("shared", {}).items():
        optimizer.state[state_key] = unfold(value)
    for state_key, by_name in saved["scalars"].items():
        for name, value in by_name.items():
            for found in params.get(checkpoint.aliases.get(name, name), ()):
                at, held = (key, flat.names[id(found)], state_key), optimizer.state[found].get(state_key)
                optimizer.state[found][state_key] = flat.nested[at] if is_folded(value) else decode(value, held)
    for index, group in enumerate(optimizer.param_groups):
        if saved.get("by_parameter"):
            hyper = _hyper_of(key, index, [flat.names[id(p)] for p in group["params"]], saved, flat, checkpoint, choice) or {}
        else:
            hyper = saved["groups"][index]["hyper"]
        for name, value in hyper.items():
            group[name] = unfold(value, like=group.get(name))
    for group in optimizer.param_groups:
        for param in group["params"] if group.get("fused") or group.get("capturable") else ():
            step = optimizer.state[param].get("step") if param in optimizer.state else None
            if isinstance(step, torch.Tensor) and step.device != param.device:  # fused and capturable kernels read the step on the device
                optimizer.state[param]["step"] = step.to(param.device)
    adopt = getattr(optimizer, "adopt_states", None)  # for an optimizer whose states are views or copies of others
    if adopt is not None:
        adopt()
