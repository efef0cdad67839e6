"""Conversion of the operands of an operation on ragged tensors to matching local tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from vescale_ray.dtensor.derived import GatheredView
from vescale_ray.dtensor.operations.schema import plain_is_whole, plain_meets, refuse_leaf
from vescale_ray.dtensor.redistribution import move
from vescale_ray.dtensor.spec import LocalSharding, replicated, sharding_of


def operand(cls: type[DTensor], value: Any, sharding: LocalSharding, op: str) -> Any:
    """Return ``value`` as an operand of an element-wise operation on local tensors of ``sharding``, and non-tensors unchanged.

    Raises:
        ValueError: it is a plain tensor with dimensions, which may be the whole tensor or this rank's part; or it is on another mesh, or
            of a shape that can't be broadcast to the layout's.
    """
    if not isinstance(value, Tensor):
        return value
    if not isinstance(value, DTensor):
        if value.ndim == 0:
            refuse_leaf(op, value, sharding.describe())
            return value if sharding.shape else value.view(1)
        if plain_is_whole():
            return spread(_broadcast(value, sharding, op), sharding)
        raise plain_meets(op, value, sharding.describe())
    if isinstance(value, GatheredView):
        value.check(op)
    if value.device_mesh != sharding.mesh:
        raise ValueError(
            f"{op}: operands on different meshes, {value.device_mesh} and {sharding.mesh}: "
            "move one with full_tensor() and distribute_tensor()"
        )
    if isinstance(value, cls):
        mine = sharding_of(value._spec)
        if mine.same_layout(sharding):
            return value._local_tensor
    if value.shape == sharding.shape:
        local, _ = move(value._local_tensor, value._spec, sharding.placements)
        return local.contiguous()
    full, _ = move(value._local_tensor, value._spec, replicated(sharding.mesh))
    return spread(_broadcast(full, sharding, op), sharding)


def broadcasts(shape: Sequence[int], into: Sequence[int]) -> bool:
    """Return True if a tensor of ``shape`` can be broadcast to the shape ``into``."""
    return len(shape) <= len(into) and all(a in (1, b) for a, b in zip(reversed(shape), reversed(into), strict=False))


def _broadcast(full: Tensor, sharding: LocalSharding, op: str) -> Tensor:
    if not broadcasts(full.shape, sharding.shape):
        raise ValueError(
            f"{op}: a tensor of shape {tuple(full.shape)} can't be broadcast to {sharding.describe()}: give one of the same shape"
        )
    return full


def spread(full: Tensor, sharding: LocalSharding) -> Tensor:
    """Cut a tensor that broadcasts to ``sharding.shape``, so that it broadcasts to the local shape."""
    if full.ndim == 0:
        return full if sharding.shape else full.view(1)
    merged = len(sharding.placement.dims)
    inner, section = len(sharding.shape) - merged, tuple(sharding.section)
    for dim in range(full.ndim):  # cut out this rank's section
        at = dim + len(section) - full.ndim
        if full.shape[dim] != 1 and section[at] != full.shape[dim]:
            full = full.narrow(dim, sharding.offsets[at], section[at])
    lead, trail = full.shape[: max(full.ndim - inner, 0)], full.shape[max(full.ndim - inner, 0) :]
    if all(n == 1 for n in lead):
        # Keep at least one dimension: a tensor with dimensions takes part in type promotion, one without does not.
        return full.reshape(trail or (1,))
    rows = full.expand(*section[:merged], *trail).reshape(sharding.placement.units_of(section), *trail)
    return rows[sharding.first_unit : sharding.first_unit + sharding.local_shape[0]]


def gathered(cls: type[DTensor], value: Any) -> Any:
    """Return a ragged tensor as torch's DTensor with Replicate everywhere, by one collective, and other values unchanged."""
    if not isinstance(value, cls):
        return value
    full, spec = move(value._local_tensor, value._spec, replicated(value.device_mesh))
    return DTensor(full, spec, requires_grad=False)
