"""Handling of parameters in all optimizers: take this rank's part, and refuse parameters that training would not change."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module

from vescale_ray.dtensor.redistribution import arrived
from vescale_ray.fsdp.layouts.group_parameter import REPLACED, gathered_of


def local_of(tensor: Tensor) -> Tensor:
    """Return this rank's part, without autograd; shares memory."""
    return arrived(tensor._local_tensor).detach() if isinstance(tensor, DTensor) else tensor.detach()


def sharded_of(parameter: Any) -> Any:
    """Return the sharded parameter of a gathered one; any other tensor is returned unchanged."""
    param = gathered_of(parameter)
    return parameter if param is None else param.sharded


def in_order(what: str, params: Any) -> Any:
    """Return ``params``, after a check that its order is the same on all ranks.

    Raises:
        TypeError: ``params`` is a model, a text, a set, or not iterable.
    """
    if isinstance(params, str | Module) or not isinstance(params, Iterable):
        raise TypeError(f"{what} got a {type(params).__name__.removeprefix('FSDP')}: give a list of parameters, such as model.parameters()")
    if isinstance(params, Set):
        raise TypeError(f"{what} got a set, whose order differs by rank: give a list of parameters, such as model.parameters()")
    return params


def parameter_list(what: str, params: Any) -> list[Tensor]:
    """Return ``params`` as a list.

    Raises:
        TypeError: ``params`` holds something other than parameters: a model, names, pairs of names and parameters.
    """
    if isinstance(params, Tensor):
        return [params]
    found = list(params if isinstance(params, Set) else in_order(what, params))
    for one in found:
        if not isinstance(one, Tensor):
            raise TypeError(f"{what} got a list with a {type(one).__name__}: give parameters only, such as model.parameters()")
    return found


def take_sharded(param_group: dict[str, Any], others: Sequence[Mapping[str, Any]]) -> None:
    """Make ``param_group["params"]`` a list, with gathered parameters replaced by their sharded ones.

    Parameters that ``fully_shard`` has replaced are refused, because training them has no effect.

    Args:
        others: the optimizer's other groups.

    Raises:
        TypeError: the group has no parameters, or a set of them.
        ValueError: some parameters are such originals; the message gives their number. A parameter is there twice.
    """
    if "params" not in param_group:
        raise TypeError(f"a param group has no 'params', only {', '.join(map(repr, param_group))}: give its parameters under that key")
    params = param_group["params"]
    params = [params] if isinstance(params, Tensor) else list(in_order("a param group", params))
    tensors = [p[1] if isinstance(p, tuple) else p for p in params]
    stale = sum(bool(getattr(p, REPLACED, False)) for p in tensors)
    if stale:
        raise ValueError(
            f"{stale} of {len(tensors)} parameters are not in the model any more, since fully_shard replaced them by sharded ones: "
            f"build the optimizer after fully_shard, from model.parameters()"
        )
    param_group["params"] = [(p[0], sharded_of(p[1]), *p[2:]) if isinstance(p, tuple) else sharded_of(p) for p in params]
    seen = {id(p): f"param group {index}" for index, group in enumerate(others) for p in group["params"]}
    for position, one in enumerate(param_group["params"]):
        name, param = one[:2] if isinstance(one, tuple) else (f"parameter {position}", one)
        if id(param) in seen and isinstance(param, Tensor):
            raise ValueError(
                f"{name} of param group {len(others)}, of shape {tuple(param.shape)}, is in {seen[id(param)]}, too, so each step would "
                f"change it twice: give it once"
            )
        seen[id(param)] = "the same group"


def named_of(group: Mapping[str, Any], index: int) -> Iterator[tuple[str, Tensor]]:
    """Return pairs of name and parameter of a group; without names, the name is ``#<group>.<position>``."""
    names = group.get("param_names") or [f"#{index}.{position}" for position in range(len(group["params"]))]
    return zip(names, group["params"], strict=True)


def check_betas(betas: Any) -> None:
    """Raise ValueError unless ``betas`` are two numbers in [0, 1)."""
    if not isinstance(betas, Sequence) or len(betas) != 2 or not all(isinstance(b, int | float | Tensor) and 0.0 <= b < 1.0 for b in betas):
        raise ValueError(f"betas = {betas}: give two numbers in [0, 1)")


_OTHERS = ("maximize", "amsgrad", "differentiable", "capturable")


def check_number(group: Mapping[str, Any], key: str, *, most: float = math.inf, whole: bool = False) -> None:
    """Raise ValueError unless ``group[key]`` is a finite number (also as a tensor of one element) from 0 to ``most``."""
    value = group[key]
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(f"{key} is a tensor of {value.numel()} elements: give one number")
    try:
        number = math.nan if isinstance(value, str) else float(value)  # rejects "1e-3", which YAML reads as text
    except (TypeError, ValueError):
        number = math.nan
    if not 0.0 <= number < math.inf or number > most or (whole and number != int(number)):
        wanted = "a whole number" if whole else "a number"
        raise ValueError(f"{key} = {value!r}: give {wanted} {'of at least 0' if most == math.inf else f'from 0 to {most:g}'}")


def refuse_switches(group: Mapping[str, Any], optimizer: str) -> None:
    """Raise ValueError for switches of torch's optimizers that ``optimizer`` would silently ignore."""
    given = next((key for key in _OTHERS if group.get(key)), None)
    if given is not None:
        remedy = "negate the loss" if given == "maximize" else "leave it out"
        raise ValueError(f"a param group has {given} = {group[given]!r}, which {optimizer} does not do: {remedy}, or use torch.optim.AdamW")
