"""Outputs of a unit that share memory with its gathered parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from vescale_ray.fsdp.groups.group import ParameterGroup
from vescale_ray.fsdp.units.tree import map_tensors


def with_own_memory(output: Any, groups: Sequence[ParameterGroup]) -> Any:
    """Return ``output`` with copies of the tensors that lie in the groups' gathered memory, which the end of the forward frees.

    A module may return a parameter or a view of one: learned queries, prompts, positions. Cost: 1 us per group and tensor.
    """
    params = [param for group in groups for param in (group.params if group.hooked else group.params[:1])]
    gathered = {_storage(param.unsharded) for param in params if param.unsharded is not None} - {None}
    return map_tensors(lambda tensor: tensor.clone() if _storage(tensor) in gathered else tensor, output)


def _storage(tensor: torch.Tensor) -> int | None:
    """Return an identifier of the tensor's storage; None for sparse tensors and others that have none."""
    try:
        return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()._cdata
    except RuntimeError:
        return None
