"""Comparisons of plain values, and values that a test damages."""

from __future__ import annotations

import json
from collections import deque
from typing import Any

import numpy as np
import torch

from tests.checkpoint.checkpoint_support import bits
from tests.checkpoint.test_checkpoint_safety import sealed
from vescale_ray import checkpoint as ckpt


def digest(value: Any) -> str:
    """Digest of a value with its type and dtype."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{tuple(value.shape)}{bits(value)!r}"
    if isinstance(value, (np.ndarray, np.generic)):
        return f"{type(value).__name__}{value.dtype.str}{value.shape}{value.tobytes()!r}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key!r}:{digest(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return type(value).__name__ + "(" + ",".join(map(digest, value)) + ")"
    return f"{type(value).__name__} {value!r}"


def same(left: Any, right: Any) -> bool:
    """True if two values are equal bit for bit, with the same types and dtypes."""
    if isinstance(left, dict):
        return (
            type(left) is type(right)
            and len(left) == len(right)
            and all(same(one, other) and same(left[one], right[other]) for one, other in zip(left, right, strict=True))
        )
    if isinstance(left, (list, tuple, deque)):
        return (
            type(left) is type(right)
            and getattr(left, "maxlen", 0) == getattr(right, "maxlen", 0)
            and len(left) == len(right)
            and all(map(same, left, right))
        )
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and (left.dtype, left.shape) == (right.dtype, right.shape) and digest(left) == digest(right)
    if isinstance(left, (np.ndarray, np.generic)):
        return type(left) is type(right) and digest(left) == digest(right)
    return type(left) is type(right) and repr(left) == repr(right)


def _sgd(**hyper: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0].update(hyper)
    return model, optimizer


def forged(values: dict[str, Any]) -> ckpt.MemoryStore:
    """A checkpoint with the given plain values and a valid seal."""
    store = ckpt.MemoryStore()
    made = ckpt.save({"model": {"w": torch.ones(2)}, "x": {"a": np.arange(100)}}, store, 1).wait()
    raw, when = store.objects[made.key]
    document = json.loads(raw[:-65])
    document["meta"] = {**document["meta"], **values}
    store.objects[made.key] = (sealed(document), when)
    return store


class Module(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(2))
