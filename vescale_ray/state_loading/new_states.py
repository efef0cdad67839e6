"""States that an optimizer does not have yet: torch makes them by a step, and a full state dict may have more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from vescale_ray.dtensor.beside import zeros_beside
from vescale_ray.state_loading.full_state import FullTensor

OF_SCHEDULERS = frozenset({"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"})
"""Hyperparameters that learning rate schedulers add to an optimizer's."""
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")


def canonical(name: str) -> str:
    """Return a parameter's name without the parts that wrappers (activation checkpointing, torch.compile) insert."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


@contextmanager
def undisturbed(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """Keep parameters and gradients while torch makes the states of new optimizers by a step with zero gradients and learning rate.

    Not every optimizer leaves the parameters alone in such a step. An optimizer whose states are all empty is a new one, too.
    """
    params = [param for optimizer in optimizers for group in optimizer.param_groups for param in group["params"]]
    gradients = [param.grad for param in params]
    for optimizer in optimizers:
        if is_new(optimizer):
            optimizer.state.clear()
    stepped = [p for optimizer in optimizers if not optimizer.state for group in optimizer.param_groups for p in group["params"]]
    local = [param.to_local() if isinstance(param, DTensor) else param for param in map(Tensor.detach, stepped) if not param.is_meta]
    before = [part.clone() for part in local]
    for param in params:
        param.grad = None
    try:
        yield
    finally:
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient
        for part, values in zip(local, before, strict=True):
            if not torch.equal(part, values):
                part.copy_(values)


def is_new(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether no parameter has states. A program that looks one up leaves an empty dict."""
    return all(isinstance(state, Mapping) and not state for state in optimizer.state.values())


@contextmanager
def unstepped(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """Give the states that torch makes by a step of a new optimizer the values that they have before a first step.

    torch's getter leaves those after the step: counters of 1, momentum with weight decay in it, and a learning rate of zero in ASGD's and
    Rprop's states. The updates that follow would then differ from those of a run without the getter.
    """
    new = [optimizer for optimizer in optimizers if is_new(optimizer)]
    before = [(group, dict(group)) for optimizer in new for group in optimizer.param_groups]
    for group, values in before:
        if isinstance(values.get("weight_decay"), int | float):
            group["weight_decay"] = 0.0
    try:
        yield
    finally:
        for group, values in before:
            group |= {"step": 0} if "step" in group.keys() - values.keys() else {}  # some optimizers count steps in the param group
            group |= values
    with torch.no_grad():
        for optimizer in new:
            for group in optimizer.param_groups:
                lr = float(group.get("lr", 0.0))
                first = {"step": 0, "mu_product": 1, "eta": lr, "step_size": lr}
                for state in (optimizer.state.get(param) for param in group["params"]):
                    if isinstance(state, dict):
                        _reset(state, first)


def _reset(state: dict[str, Any], first: Mapping[str, float]) -> None:
    for key in first.keys() & state.keys():
        if isinstance(state[key], Tensor):
            state[key].fill_(first[key])
        elif isinstance(state[key], int | float):
            state[key] = type(state[key])(first[key])


def adopt(mine: Mapping[str, Any], flat: dict[str, Any], optimizers: Sequence[torch.optim.Optimizer], items: dict[str, Any]) -> None:
    """Add states and hyperparameters of known parameters that a full state dict has and ``mine`` and ``flat`` lack.

    Some optimizers make a state, or a hyperparameter, only in a step with gradients. Hyperparameters of schedulers that the state dict
    lacks are added to ``items``, so that they stay.

    Args:
        mine: the optimizers' state dict by parameter name.
        flat: the same in torch's flat form.
        items: the full state dict in torch's flat form, with a :class:`FullTensor` in place of each tensor.
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    named: dict[str, Tensor] = {}
    hyper: dict[str, list[str]] = {}
    for path in items:
        if path.startswith("param_groups."):
            name, _, key = path.removeprefix("param_groups.").rpartition(".")
            hyper.setdefault(name, []).append(key)
    for described, group in zip(mine["param_groups"], groups, strict=True):
        named.update(zip(described["params"], group["params"], strict=True))
        prefixes = [f"param_groups.{name}." for name in described["params"]]
        for key in [key for name in described["params"][:1] for key in hyper.get(name, ())]:
            described.setdefault(key)
            for prefix in prefixes:
                flat.setdefault(prefix + key)
        for key in OF_SCHEDULERS & group.keys():
            for prefix in prefixes:
                items.setdefault(prefix + key, group[key])
    for path, entry in items.items():
        name, _, key = path.removeprefix("state.").rpartition(".")
        if path.startswith("state.") and name in named and not (path in flat and _alike(flat[path], entry)):
            flat[path] = _state_beside(named[name], entry) if isinstance(entry, FullTensor) else entry
            mine["state"].setdefault(name, {})[key] = flat[path]


def _alike(here: Any, entry: Any) -> bool:
    """Return True if both are tensors with dimensions, both are tensors without, or neither is a tensor.

    Some optimizers start with a number and later hold a tensor."""
    if isinstance(here, Tensor) != isinstance(entry, FullTensor):
        return False
    return bool(getattr(here, "shape", ())) == bool(getattr(entry, "shape", ()))


def _state_beside(param: Tensor, entry: FullTensor) -> Tensor:
    """Return a state for ``entry``. Numbers stay plain tensors on the CPU, as torch's optimizers keep them."""
    if entry.shape == () and param.ndim:
        return torch.zeros((), dtype=entry.dtype)
    with torch.no_grad():
        return zeros_beside(param, entry.shape, entry.dtype, replicated=False)
