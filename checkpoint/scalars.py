"""Scalars, tuples, tensors of one element and plain values as JSON, and back."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from .layout import dtype_name, dtype_of


def encode(what: str, value: Any) -> Any:
    """A scalar, tuple or tensor of one element as JSON: floats exactly (shortest round trip), non-finite ones as text."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise ValueError(f"{what} is a tensor of shape {tuple(value.shape)}; only tensors of one element can stand there")
        local = value.full_tensor() if hasattr(value, "full_tensor") else value
        number = encode(what, local.item())
        for _ in range(value.dim()):
            number = [number]
        return {"dtype": dtype_name(value.dtype), "value": number}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    if isinstance(value, (list, tuple)):
        return [encode(what, item) for item in value]
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    raise ValueError(f"{what} is a {type(value).__name__}, which JSON can't hold")


def decode(value: Any, like: Any = None) -> Any:
    """Back from :func:`encode`, as the type that stands there now: a tuple stays a tuple, a tensor on its device."""
    if isinstance(value, dict):
        if "float" in value:
            return float(value["float"])
        number = decode(value["value"])
        device = like.device if isinstance(like, torch.Tensor) else "cpu"
        return torch.tensor(number, dtype=dtype_of(value["dtype"]), device=device)
    if isinstance(value, list):
        items = [decode(item) for item in value]
        return tuple(items) if isinstance(like, tuple) or like is None else items
    if isinstance(like, torch.Tensor) and isinstance(value, (int, float)):
        return torch.tensor(value, dtype=like.dtype, device=like.device)
    return value


_MOST_DEEP = 100
"""Lists and dicts within each other: taking them back takes some calls for each."""

_TAGS = ("float", "items", "counter", "tensor")


def pack(what: str, value: Any, depth: int = 0) -> Any:
    """A plain value (numbers, texts, lists, dicts; the state of a scheduler) as JSON. What JSON lacks has a tag: an infinity
    ``{"float": "inf"}``, a dict whose keys are no texts ``{"items": [[key, value], ..]}``, a Counter ``{"counter": [[key, count], ..]}``,
    a tensor of one element (a scheduler's learning rates, where the optimizer's are tensors) ``{"tensor": {"dtype": .., "value": ..}}``. A
    tuple becomes a list.

    Raises:
        ValueError: what can't be stored, by its path.
    """
    if depth > _MOST_DEEP:
        raise ValueError(f"{what[:80]}.. is nested more than {_MOST_DEEP} deep, or holds itself; give flatter values")
    if isinstance(value, Mapping):
        pairs = [[_key(what, key), pack(f"{what}.{key}", item, depth + 1)] for key, item in value.items()]
        if isinstance(value, Counter):
            return {"counter": pairs}
        if any(not isinstance(key, str) for key, _ in pairs) or (len(pairs) == 1 and pairs[0][0] in _TAGS):
            return {"items": pairs}
        return dict(pairs)
    if isinstance(value, torch.Tensor):
        return {"tensor": encode(what, value)}
    if isinstance(value, (list, tuple)):
        return [pack(f"{what}[{index}]", item, depth + 1) for index, item in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(float(value))}
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    raise ValueError(f"{what} is a {type(value).__name__}, which JSON can't hold; give numbers, strings, lists and dicts")


def unpack(value: Any) -> Any:
    """Back from :func:`pack`. Raises ValueError, TypeError: it is malformed."""
    if isinstance(value, list):
        return [unpack(item) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value)) if len(value) == 1 else ""
    if tag == "float":
        return float(value[tag])
    if tag == "tensor":
        return decode(value[tag])
    if tag in ("items", "counter"):
        pairs = {key: unpack(item) for key, item in value[tag]}
        return Counter(pairs) if tag == "counter" else pairs
    return {key: unpack(item) for key, item in value.items()}


def _key(what: str, key: Any) -> Any:
    if key is None or isinstance(key, (str, bool, int)) or (isinstance(key, float) and math.isfinite(key)):
        return key
    raise ValueError(f"{what} has the key {key!r}; give texts or numbers")
