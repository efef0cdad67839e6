"""A toy model sharded over threads or processes, gradients that depend on name and step alone, and whole states."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from vescale_ray.dtensor import RaggedDTensor, distribute_tensor
from vescale_ray.fsdp import fully_shard

Shapes = Mapping[str, tuple[int, ...]]
State = dict[str, np.ndarray]


class Weights(nn.Module):
    """Parameters by name (``.`` becomes ``_``), equal on every rank. The module computes nothing."""

    def __init__(self, shapes: Shapes, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(noise(shape, name, 0).to(dtype)))


def noise(shape: tuple[int, ...], name: str, step: int) -> Tensor:
    """Standard normal numbers from name and step alone. (Python's hash() differs between processes.)"""
    seed = int.from_bytes(hashlib.md5(f"{name}/{step}".encode()).digest()[:6], "big")
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def sharded(shapes: Shapes, world: int, policy: Any = None, dtype: torch.dtype = torch.float32, mesh: DeviceMesh | None = None) -> Weights:
    """The weights after ``fully_shard``; plain weights if ``world`` is 0."""
    model = Weights(shapes, dtype)
    if world:
        fully_shard(model, mesh=mesh or init_device_mesh("cpu", (world,)), block_policy=policy)
    return model


def give_gradients(model: nn.Module, step: int, make: Callable[[tuple[int, ...], str, int], Tensor] = noise) -> None:
    """Set ``make(shape, name, step)`` as gradients, cut like the parameters."""
    for name, param in model.named_parameters():
        full = make(tuple(param.shape), name, step).to(param.dtype)
        if isinstance(param, DTensor):
            full = distribute_tensor(full, param.device_mesh, param.placements, src_data_rank=None)
        param.grad = full


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        give_gradients(model, step)
        optimizer.step()
        optimizer.zero_grad()


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()


def bits(tensor: Tensor) -> np.ndarray:
    """A copy as numpy array; bfloat16 as its 16-bit words."""
    full = whole(tensor).clone()
    return (full.view(torch.int16) if full.dtype == torch.bfloat16 else full).numpy()


def full_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """Every parameter and every state as a whole, named like ``w`` and ``w/exp_avg_code``. Collective."""
    found: State = {}
    for name, param in model.named_parameters():
        found[name] = bits(param)
        for kind, value in optimizer.state[param].items():
            found[f"{name}/{kind}"] = bits(value)
    return found


def same(a: State, b: State) -> list[str]:
    """Names whose values are not equal bit for bit."""
    return [n for n in a.keys() | b.keys() if n not in a or n not in b or a[n].tobytes() != b[n].tobytes()]


def straddles(model: nn.Module) -> set[str]:
    """Parameters of which this rank holds a part, but not all."""
    found = set()
    for name, param in model.named_parameters():
        if isinstance(param, RaggedDTensor):
            start, end = param.local_interval()
            if 0 < end - start < math.prod(param.shape):
                found.add(name)
    return found
