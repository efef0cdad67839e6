"""Optimizer states of zeros, sharded as their parameter if their shape allows it."""

from __future__ import annotations

import math
from contextlib import suppress

import torch
from torch.distributed.tensor import DTensor, Replicate

from vescale_ray.dtensor.ragged_dtensor import RaggedDTensor
from vescale_ray.dtensor.spec import sharding_of


def zeros_beside(param: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, *, replicated: bool) -> torch.Tensor:
    """Make a state of ``param``. If the parameter is sharded, so is a state with as many elements; any other state is replicated."""
    if not isinstance(param, DTensor):
        return torch.zeros_like(param, dtype=dtype, requires_grad=False) if shape == param.shape else param.new_zeros(shape, dtype=dtype)
    if not replicated and shape == param.shape:
        return torch.zeros_like(param, dtype=dtype, requires_grad=False)
    if not replicated and math.prod(shape) == param.numel():
        viewed = _reshaped(param, shape, dtype)
        if viewed is not None:
            return viewed
    whole = torch.zeros(shape, dtype=dtype, device=param.device)
    return DTensor.from_local(whole, param.device_mesh, [Replicate()] * param.device_mesh.ndim, run_check=False)


def _reshaped(param: DTensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
    if isinstance(param, RaggedDTensor):
        layout = sharding_of(param._spec).reshaped(shape)
        if layout is None:
            return None
        return RaggedDTensor.from_spec(torch.zeros(layout.local_shape, dtype=dtype, device=param.device), layout.spec(dtype))
    with suppress(RuntimeError):  # torch can't view rows that are cut unevenly
        return torch.zeros_like(param, dtype=dtype, requires_grad=False).view(shape)
    return None
