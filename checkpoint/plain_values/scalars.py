"""Scalars, tuples and one-element tensors as JSON, and back."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from ..format.object_layout import dtype_name, dtype_of


def encode(what: str, value: Any) -> Any:
    """Return a scalar, tuple or one-element tensor as JSON: floats exactly (shortest round trip), non-finite ones as text."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise ValueError(f"{what} is a tensor of shape {tuple(value.shape)}; only tensors of one element can stand there")
        local = value.full_tensor() if hasattr(value, "full_tensor") else value
        number = encode(what, local.item())
        for _ in range(value.dim()):
            number = [number]
        return {"dtype": dtype_name(value.dtype), "value": number}
    if isinstance(value, (np.bool_, np.integer, np.floating)):  # as Python's own types, which are equal
        value = float(value) if isinstance(value, np.floating) else value.item()
    if type(value) is float and not math.isfinite(value):
        return {"float": repr(value)}
    if type(value) in (list, tuple):
        return [encode(what, item) for item in value]
    if value is None or type(value) in (str, bool, int, float):  # a value of a subclass would load as its base type
        return value
    raise ValueError(f"{what} is a {type(value).__name__}, which JSON can't hold; give numbers, texts, lists or tensors of one element")


def decode(value: Any, like: Any = None) -> Any:
    """Restore a value from ``value``, the JSON that :func:`encode` has made of it, in the type of ``like``: a tuple stays a tuple, a tensor
    stays on its device."""
    if isinstance(value, dict):
        if "float" in value:
            return float(value["float"])
        number = decode(value["value"])
        device = like.device if isinstance(like, torch.Tensor) else "cpu"
        return torch.tensor(number, dtype=dtype_of(value["dtype"]), device=device)
    if isinstance(value, list):
        likes = like if isinstance(like, list | tuple) and len(like) == len(value) else [None] * len(value)
        items = [decode(item, one) for item, one in zip(value, likes, strict=True)]
        return tuple(items) if isinstance(like, tuple) or like is None else items
    if isinstance(like, torch.Tensor) and isinstance(value, (int, float)):
        return torch.tensor(value, dtype=like.dtype, device=like.device)
    return value
