"""Tensors in the arguments and results of operators.

An operator's schema knows lists and tuples, and no other containers. Torch's pytree functions know every registered class, and take five
to ten times as long per tensor as these. The difference shows when ``clip_grad_norm_`` stacks hundreds of norms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor


def each(function: Callable[[Any], Any], value: Any) -> Any:
    """Return ``function(value)``. For a list or a tuple, return a list or a tuple of the results for its items."""
    if not isinstance(value, _NESTED):
        return function(value)
    results = [each(function, v) if isinstance(v, _NESTED) else function(v) for v in value]
    return results if isinstance(value, list) else tuple(results)


def each_argument(function: Callable[[Any], Any], args: Iterable[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a call, with ``function`` applied to each value and to each item of lists."""
    return [each(function, v) for v in args], {name: each(function, v) for name, v in kwargs.items()}


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """Return all tensors among ``values`` and in their lists, in order."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, _NESTED):
            found += tensors_in(value)
    return found


def tensor_arguments(args: Iterable[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return all tensors among the arguments of a call, in order."""
    return tensors_in((*args, *kwargs.values()))


_NESTED = (list, tuple)
