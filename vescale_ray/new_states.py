"""States that an optimizer does not have yet: torch makes them by a step, and a full state dict may have more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from vescale_ray.dtensor.beside import zeros_beside
from vescale_ray.full_state import FullTensor

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
        if _is_new(optimizer):
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


def _is_new(optimizer: torch.optim.Optimizer) -> bool:
    return all(isinstance(state, Mapping) and not state for state in optimizer.state.values())


@contextmanager
def uncounted(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """After the block, set the step counters of optimizers that had no states before it back to 0.

    torch's getter makes the states by a step, which counts. AdamW's first update would then be a quarter too small.
    """
    new = [optimizer for optimizer in optimizers if _is_new(optimizer)]
    yield
    for state in (state for optimizer in new for state in optimizer.state.values() if isinstance(state, dict)):
        step = state.get("step")
        if isinstance(step, Tensor):
            step.zero_()
        elif isinstance(step, int | float):
            state["step"] = type(step)(0)


@contextmanager
def with_frozen(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], given: Mapping[str, Any]) -> Iterator[None]:
    """Let torch's setter load the states that ``given`` has of frozen parameters. It passes by parameters that require no gradient."""
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(canonical(name))
    keys = [str(key) for key in given["state"]] if "state" in given else [str(key).removeprefix("state.") for key in given]

    def has_states(param: Tensor) -> bool:
        return any(key == name or key.startswith(f"{name}.") for name in names.get(id(param), ()) for key in keys)

    params = [param for optimizer in optimizers for group in optimizer.param_groups for param in group["params"]]
    frozen = [param for param in params if not param.requires_grad and param.is_floating_point() and has_states(param)]
    for param in frozen:
        param.requires_grad_(True)
    try:
        yield
    finally:
        for param in frozen:
            param.requires_grad_(False)


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
    """True if both are tensors with dimensions, or without, or neither. Some optimizers begin with a number and go on with a tensor."""
    if isinstance(here, Tensor) != isinstance(entry, FullTensor):
        return False
    return bool(getattr(here, "shape", ())) == bool(getattr(entry, "shape", ()))


def _state_beside(param: Tensor, entry: FullTensor) -> Tensor:
    """A state for ``entry``. Numbers stay plain tensors on the CPU, as torch's optimizers keep them."""
    if entry.shape == () and param.ndim:
        return torch.zeros((), dtype=entry.dtype)
    with torch.no_grad():
        return zeros_beside(param, entry.shape, entry.dtype, replicated=False)
