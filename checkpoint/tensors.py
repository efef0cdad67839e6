"""What part of a tensor this rank holds, for every sort of tensor: plain, DTensor, RaggedDTensor.

A tensor is read through duck typing: whatever has ``local_interval()`` and ``to_local()`` is a ragged shard. Nothing here
communicates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard


@runtime_checkable
class Ragged(Protocol):
    """What this package needs of a RaggedDTensor."""

    @property
    def shape(self) -> torch.Size: ...

    def local_interval(self) -> tuple[int, int]: ...

    def to_local(self) -> torch.Tensor: ...


@dataclass(frozen=True, eq=False)
class LocalPart:
    """Flat elements ``[start, end)`` of a tensor of ``shape``, held by this rank as ``local`` (the tensor's own storage).

    ``replicas`` ranks hold the same interval, this one being number ``replica`` of them.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    end: int
    local: torch.Tensor = field(repr=False)
    replicas: int
    replica: int

    @property
    def bytes(self) -> int:
        """Of the whole tensor: the same number on every rank."""
        return math.prod(self.shape) * self.dtype.itemsize

    def flat(self) -> torch.Tensor:
        """The elements as a flat tensor; shared with ``local`` where that is contiguous."""
        return self.local.contiguous().view(-1)

    @property
    def shared(self) -> bool:
        """Whether writing into :meth:`flat` writes into the tensor."""
        return self.local.is_contiguous()


def local_part(name: str, tensor: torch.Tensor, world: int, rank: int) -> LocalPart:
    """This rank's part of ``tensor``. A plain tensor counts as replicated over all ``world`` ranks.

    Raises:
        ValueError: a placement whose local part is no interval of the flat tensor, or no data: with the remedy.
    """
    if tensor.layout != torch.strided:
        raise ValueError(f"tensor {name!r} has layout {tensor.layout}; only dense tensors can be stored: call to_dense() first")
    with torch.no_grad():
        if hasattr(tensor, "local_interval"):
            part = _ragged(name, tensor)
        elif isinstance(tensor, DTensor):
            part = _dtensor(name, tensor)
        else:
            numel = tensor.numel()
            part = LocalPart(tuple(tensor.shape), tensor.dtype, 0, numel, tensor.detach(), world, rank)
    if part.local.is_meta:
        raise ValueError(f"tensor {name!r} is on the meta device, it has no storage; call to_empty(device=...) on the module first")
    if part.local.numel() != part.end - part.start:
        raise ValueError(f"tensor {name!r}: the local part has {part.local.numel()} elements, its interval [{part.start}, {part.end})")
    return part


def _ragged(name: str, tensor: Any) -> LocalPart:
    assert isinstance(tensor, Ragged)
    placements = tuple(getattr(tensor, "placements", ()))
    if any(p.is_partial() for p in placements):
        raise ValueError(f"tensor {name!r} has placements {placements}: a reduction is pending; redistribute it before saving or loading")
    try:
        start, end = tensor.local_interval()
    except ValueError as error:
        raise ValueError(
            f"tensor {name!r}: {error}; shard it by Shard(0) there, or save and load it with torch.distributed.checkpoint"
        ) from None
    replicas, replica = 1, 0
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is not None:
        replicas, replica = _replica(mesh, placements)
    local = tensor.to_local().detach()
    return LocalPart(tuple(tensor.shape), local.dtype, start, end, local, replicas, replica)


def _dtensor(name: str, tensor: DTensor) -> LocalPart:
    remedy = "redistribute it to one Shard(0), with Replicate on the other mesh dimensions, before saving or loading"
    sharded = [(dim, p) for dim, p in enumerate(tensor.placements) if not isinstance(p, Replicate)]
    if len(sharded) > 1 or any(type(p) is not Shard for _, p in sharded):
        raise ValueError(f"tensor {name!r} has placements {tensor.placements}, whose local part is no interval of it; {remedy}")
    mesh = tensor.device_mesh
    local = tensor.to_local().detach()
    shape = tuple(tensor.shape)
    replicas, replica = _replica(mesh, tuple(tensor.placements))
    if not sharded:
        return LocalPart(shape, local.dtype, 0, math.prod(shape), local, replicas, replica)
    mesh_dim, placement = sharded[0]
    assert isinstance(placement, Shard)
    # Sharding a later dimension still gives an interval if all dimensions before it have one element.
    if math.prod(shape[: placement.dim]) != 1:
        raise ValueError(
            f"tensor {name!r} of shape {shape} has placements {tensor.placements}, whose local part is no interval of it; {remedy}"
        )
    coordinate = mesh.get_local_rank(mesh_dim)
    rows = shape[placement.dim]
    inner = math.prod(shape[placement.dim + 1 :])
    per_rank = -(-rows // mesh.size(mesh_dim))  # torch.chunk: equal parts rounded up, the last ones shorter or empty
    first = min(rows, coordinate * per_rank)
    last = min(rows, first + per_rank)
    return LocalPart(shape, local.dtype, first * inner, last * inner, local, replicas, replica)


def _replica(mesh: Any, placements: tuple[Placement, ...]) -> tuple[int, int]:
    """How many ranks hold the same part, and which of them this one is."""
    replicas, replica = 1, 0
    for dim, placement in enumerate(placements):
        if isinstance(placement, Replicate):
            replicas *= mesh.size(dim)
            replica = replica * mesh.size(dim) + mesh.get_local_rank(dim)
    return replicas, replica


def owners(parts: list[LocalPart]) -> list[bool]:
    """Whether this rank writes its part, for each: of tensors held by several ranks, one writes, so that each rank of the
    replicas gets about the same bytes and a contiguous run of tensors. Every rank comes to the same split by itself."""
    totals: dict[int, int] = {}
    for part in parts:
        totals[part.replicas] = totals.get(part.replicas, 0) + part.bytes
    position = dict.fromkeys(totals, 0)
    decided = []
    for part in parts:
        total = max(1, totals[part.replicas])
        middle = position[part.replicas] + part.bytes // 2
        decided.append(min(part.replicas - 1, middle * part.replicas // total) == part.replica)
        position[part.replicas] += part.bytes
    return decided
