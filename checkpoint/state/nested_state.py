"""Nested states of optimizers: dicts, lists, tuples and deques with tensors in them, such as a history or the factors of a preconditioner.

The structure is stored as a plain value is (``plain.py``). A tensor in it is stored as any other state, under its path: the state key and
the keys within, joined by slashes ("old_dirs/0"). ``{"$state": path}`` stands in its place.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..plain_values.plain import EntryBytes, pack, unpack
from ..plain_values.scalars import decode, encode

_FOLDED = "nested"


def is_nested(value: Any) -> bool:
    return isinstance(value, (Mapping, list, tuple, deque))


def leaves(path: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the tensors in a nested value by their paths, each tensor once."""
    seen: set[int] = set()

    def walk(path: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
        if isinstance(value, torch.Tensor):
            if id(value) not in seen:
                seen.add(id(value))
                yield path, value
        elif is_nested(value) and id(value) not in within:
            within.add(id(value))  # a value that holds itself is refused where it is packed
            for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
                yield from walk(f"{path}/{key}", item)
            within.discard(id(value))

    within: set[int] = set()
    return walk(path, value)


def fold(what: str, name: str, value: Any, paths: Mapping[int, str]) -> dict[str, Any]:
    """Return a nested value as JSON.

    Args:
        what, name: description and name of the value, for messages.
        paths: path of each tensor that is stored apart, by its id. Others are in the JSON, and have one element.

    Raises:
        ValueError: a value cannot be stored.
    """

    def tensor(inner: str, found: torch.Tensor) -> dict[str, Any]:
        return {"$state": paths[id(found)]} if id(found) in paths else {"tensor": encode(inner, found)}

    try:
        return {_FOLDED: pack(name, value, inline=math.inf, tensor=tensor).json}
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None


def as_json(what: str, name: str, value: Any) -> Any:
    """Return as JSON a value of an optimizer that is not stored as a tensor: by ``encode`` if possible, else as a plain value.

    Raises:
        ValueError: it cannot be stored.
    """
    try:
        return encode(what, value)
    except ValueError:
        if isinstance(value, torch.Tensor):
            raise
        return fold(what, name, value, {})


def is_folded(value: Any) -> bool:
    return isinstance(value, dict) and _FOLDED in value


def unfold(value: Any, tensor: Callable[[Any], Any] | None = None, like: Any = None) -> Any:
    """Restore a value from ``value``, the JSON that :func:`fold` or ``encode`` has made of it.

    Args:
        tensor: function from the path of a tensor to the tensor.
        like: the value that the result replaces, for :func:`decode`.
    """
    return unpack(value[_FOLDED], EntryBytes(states=tensor)) if is_folded(value) else decode(value, like)


def is_replicated(param: torch.Tensor, state: torch.Tensor) -> bool:
    """Return whether every rank holds a whole state with as many elements as its sharded parameter. The shape alone does not show it."""
    if not isinstance(param, DTensor) or not isinstance(state, DTensor) or state.numel() != param.numel():
        return False
    return all(p.is_replicate() for p in state.placements) and not all(p.is_replicate() for p in param.placements)
