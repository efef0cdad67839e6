"""The part of a tensor that this rank holds: plain tensors, DTensors and RaggedDTensors.

Ragged shards are recognised by duck typing, through ``local_boxes()`` and ``to_local()``. Nothing here communicates. A part is a list of
flat intervals, only one for nearly every layout. If a mesh dimension shards columns, the intervals count the tensor tile by tile.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from typing import Any, Protocol, runtime_checkable

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard
from torch.nn.parameter import is_lazy

from vescale_ray.compat.tensor import StridedShard, compute_local_shape_and_global_offset
from vescale_ray.geometry import Box, intervals

from ..format.tiling import ROWS, Tiling, rows_of


@runtime_checkable
class Ragged(Protocol):
    """The interface of a RaggedDTensor that this package needs."""

    @property
    def shape(self) -> torch.Size: ...

    def local_boxes(self) -> Sequence[Box]: ...

    def to_local(self) -> torch.Tensor: ...


@dataclass(frozen=True, eq=False)
class LocalPart:
    """The part of a tensor of ``shape`` that this rank holds as ``local`` (the tensor's own storage).

    Attributes:
        intervals: flat element ranges ``[start, end)``, none empty, in the order of ``local``.
        replicas, replica: number of ranks with the same part, and this rank's number among them.
        among: names of the process groups of these ranks; empty for all saving ranks.
        apart: whether the tensor's mesh has fewer ranks than save. The others may hold the same tensor (not tensor-parallel, under FSDP) or
            know nothing of it (other pipeline stages); a tensor cannot tell which.
        tiling: order in which elements are counted, the same on every rank of the mesh.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    intervals: Sequence[tuple[int, int]]
    local: torch.Tensor = field(repr=False)
    replicas: int
    replica: int
    among: tuple[str, ...] = ()
    apart: bool = False
    tiling: Tiling = ROWS

    @property
    def bytes(self) -> int:
        """Bytes of the whole tensor; the same on every rank."""
        return math.prod(self.shape) * self.dtype.itemsize

    def flat(self) -> torch.Tensor:
        """Return the elements as a flat tensor. It shares the memory of ``local`` if :attr:`shared` is true."""
        return self.local.resolve_conj().resolve_neg().contiguous().view(-1)

    def pieces(self, flat: torch.Tensor) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yield start, end and elements of each interval; the elements are a view of ``flat``."""
        return _pieces(self.intervals, flat)

    def rows(self, flat: torch.Tensor) -> Iterator[tuple[int, int, torch.Tensor]]:
        """As :meth:`pieces`, in row-order intervals."""
        return _pieces(rows_of(self.shape, self.tiling, self.intervals), flat)

    @property
    def shared(self) -> bool:
        """True if writing into :meth:`flat` writes into the tensor."""
        return self.local.is_contiguous() and not self.local.is_conj() and not self.local.is_neg()


def _pieces(held: Iterable[tuple[int, int]], flat: torch.Tensor) -> Iterator[tuple[int, int, torch.Tensor]]:
    position = 0
    for start, end in held:
        yield start, end, flat[position : position + end - start]
        position += end - start


def local_part(name: str, tensor: torch.Tensor, world: int, rank: int) -> LocalPart:
    """Return this rank's part of ``tensor``. A plain tensor counts as replicated over all ``world`` ranks.

    Raises:
        ValueError: a pending reduction, a placement other than Shard (plain or strided) and Replicate, no data, a mesh whose ranks do not
            ascend, or a tensor that :func:`check_dense` refuses. The message has the remedy.
    """
    check_dense(name, tensor)
    _check_mesh(name, getattr(tensor, "device_mesh", None))
    with torch.no_grad():
        if hasattr(tensor, "local_boxes"):
            part = _ragged(name, tensor, world)
        elif isinstance(tensor, DTensor):
            part = _dtensor(name, tensor, world)
        else:
            numel = tensor.numel()
            part = LocalPart(tuple(tensor.shape), tensor.dtype, _one(0, numel), tensor.detach(), world, rank)
    if part.local.is_meta:
        raise ValueError(f"tensor {name!r} is on the meta device, it has no storage; call to_empty(device=...) on the module first")
    held = sum(end - start for start, end in part.intervals)
    if part.local.numel() != held:
        raise ValueError(f"tensor {name!r}: the local part has {part.local.numel()} elements, its intervals {held}")
    return part


def check_dense(name: str, tensor: torch.Tensor) -> None:
    """Raises ValueError, with the remedy, for a tensor that is not a dense box of elements."""
    if is_lazy(tensor):
        raise ValueError(f"tensor {name!r} is a lazy module's, which has no shape yet: call the module once first")
    if tensor.is_nested:
        raise ValueError(f"tensor {name!r} is a nested tensor; only dense ones can be stored: give its values() and offsets() as two")
    if tensor.layout != torch.strided:
        raise ValueError(f"tensor {name!r} has layout {tensor.layout}; only dense tensors can be stored: call to_dense() first")
    if tensor.is_quantized:
        raise ValueError(f"tensor {name!r} is of the quantized type {tensor.dtype}, whose scales are not stored: call dequantize() first")


def _check_mesh(name: str, mesh: Any) -> None:
    """Check that a rank's place in the mesh equals its place in each dimension's process group, which torch sorts in ascending order. FSDP2
    shards by the latter, DTensor places by the former. If they differ, the elements that a rank holds are unknown."""
    at = mesh.get_coordinate() if mesh is not None else None
    for dim, place in enumerate(at or ()):
        if place != mesh.get_local_rank(dim):
            raise ValueError(
                f"tensor {name!r} is on {mesh}, where this rank is number {place} of dimension {dim}, but number "
                f"{mesh.get_local_rank(dim)} of that dimension's process group: its elements are unknown; make the mesh with "
                "ranks that ascend in each dimension"
            )


def check_target(name: str, tensor: torch.Tensor) -> None:
    """Raises ValueError for a tensor that cannot be loaded into."""
    check_dense(name, tensor)
    if any(n > 1 and not stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise ValueError(f"tensor {name!r} is expanded: several elements share memory, so it cannot be loaded into; clone() it first")


def _one(start: int, end: int) -> Sequence[tuple[int, int]]:
    return [(start, end)] if end > start else []


def _ragged(name: str, tensor: Any, world: int) -> LocalPart:
    assert isinstance(tensor, Ragged)
    placements = tuple(getattr(tensor, "placements", ()))
    if any(p.is_partial() for p in placements):
        raise ValueError(f"tensor {name!r} has placements {placements}: a reduction is pending; redistribute it before saving or loading")
    mesh = getattr(tensor, "device_mesh", None)
    replicas, replica, among = (1, 0, ()) if mesh is None else _replica(mesh, placements)
    local = tensor.to_local().detach()
    apart = mesh is not None and mesh.size() < world
    shape = tuple(tensor.shape)
    tiling, held = _held(shape, mesh, placements, tensor.local_boxes())
    return LocalPart(shape, local.dtype, held, local, replicas, replica, among, apart, tiling)


def _held(shape: tuple[int, ...], mesh: Any, placements: Sequence[Placement], boxes: Sequence[Box]) -> tuple[Tiling, list[tuple[int, int]]]:
    """Return the order in which a tensor of these placements is stored, and this rank's intervals of it."""
    tiling = _tiling(shape, mesh, placements)
    held = tiling.held(shape, boxes)
    assert held is not None, f"{boxes} of {shape} under {placements} are not within tiles"
    return tiling, held


def _tiling(shape: tuple[int, ...], mesh: Any, placements: Sequence[Placement]) -> Tiling:
    """Return the tiling: each mesh dimension that shards an inner dimension cuts it, one after the other, as in torch.

    If a strided placement interleaves cuts of later mesh dimensions, no rank's part would be a tile, so the order is by rows.
    """
    parts: dict[int, list[int]] = {}
    for mesh_dim, placement in enumerate(placements):
        if not isinstance(placement, (Shard, StridedShard)) or not (dim := placement.dim % len(shape)):
            continue
        if type(placement) is not Shard:
            return ROWS
        count = mesh.size(mesh_dim)
        parts[dim] = [part for size in parts.get(dim, [shape[dim]]) for part in _chunks(size, count)]
    return Tiling.of(shape, parts)


def _chunks(size: int, count: int) -> list[int]:
    """Return sizes of ``torch.chunk``'s parts, without empty ones."""
    each = max(1, -(-size // count))
    return [min(each, size - start) for start in range(0, size, each)]


def _dtensor(name: str, tensor: DTensor, world: int) -> LocalPart:
    placements = tuple(tensor.placements)
    if any(type(p) not in (Shard, StridedShard) and not isinstance(p, Replicate) for p in placements):
        raise ValueError(
            f"tensor {name!r} has placements {placements}: only Shard and Replicate say which elements a rank holds; redistribute it to "
            "Shard(0) on one mesh dimension, with Replicate on the others, before saving or loading"
        )
    mesh, shape = tensor.device_mesh, tuple(tensor.shape)
    local = tensor.to_local().detach()
    if mesh.get_coordinate() is None:  # this rank is not in the tensor's mesh
        return LocalPart(shape, local.dtype, [], local.new_empty(0), 1, 0, apart=True)
    if any(isinstance(p, StridedShard) for p in placements):
        tiling, held = ROWS, _strided(shape, mesh, placements)
    else:
        sizes, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
        tiling, held = _held(shape, mesh, placements, [(tuple(offsets), tuple(sizes))] if math.prod(sizes) else [])
    return LocalPart(shape, local.dtype, held, local, *_replica(mesh, placements), mesh.size() < world, tiling)


def _strided(shape: tuple[int, ...], mesh: Any, placements: tuple[Placement, ...]) -> list[tuple[int, int]]:
    """Return the intervals if a mesh dimension cuts pieces of later ones (FSDP2 over tensor parallelism).

    Each of ``split_factor`` pieces is sharded by itself, and a rank's parts of them are joined. torch tells only where the first begins.
    """
    held = [torch.arange(n) for n in shape]
    for mesh_dim, placement in enumerate(placements):
        if isinstance(placement, (Shard, StridedShard)):
            pieces = held[placement.dim].chunk(int(getattr(placement, "split_factor", 1)))
            count, mine = mesh.size(mesh_dim), mesh.get_local_rank(mesh_dim)
            held[placement.dim] = torch.cat([part for piece in pieces for part in piece.chunk(count)[mine : mine + 1]] or [torch.arange(0)])
    boxes = [(tuple(o for o, _ in box), tuple(n for _, n in box)) for box in product(*map(_runs, held))]
    return sorted(intervals(shape, boxes))  # all dimensions' indices ascend, so this is the local tensor's order


def _runs(indices: torch.Tensor) -> list[tuple[int, int]]:
    """(first, length) of each run of consecutive indices among ascending ones."""
    breaks = (torch.nonzero(indices.diff() != 1).view(-1) + 1).tolist()
    edges = [0, *breaks, len(indices)]
    return [(int(indices[a]), b - a) for a, b in pairwise(edges) if b > a]


def _replica(mesh: Any, placements: tuple[Placement, ...]) -> tuple[int, int, tuple[str, ...]]:
    """Return the number of ranks with the same part, this rank's number among them, and the names of their groups."""
    replicas, replica = 1, 0
    among: tuple[str, ...] = ()
    for dim, placement in enumerate(placements):
        if isinstance(placement, Replicate):
            replicas *= mesh.size(dim)
            replica = replica * mesh.size(dim) + mesh.get_local_rank(dim)
            among += (mesh.get_group(dim).group_name,)
    return replicas, replica, among


def owners(parts: list[LocalPart]) -> list[bool]:
    """Return, for each part, whether this rank writes it.

    One of the ranks that hold a tensor writes it. Each of the replicas gets about the same number of bytes, and a contiguous run of
    tensors. Every rank computes the same split by itself, separately for each set of replicas, since it may not know other ranks' tensors.
    """
    totals: dict[tuple[int, tuple[str, ...]], int] = {}
    for part in parts:
        holders = part.replicas, part.among
        totals[holders] = totals.get(holders, 0) + part.bytes
    position = dict.fromkeys(totals, 0)
    decided = []
    for part in parts:
        holders = part.replicas, part.among
        total = max(1, totals[holders])
        middle = position[holders] + part.bytes // 2
        decided.append(min(part.replicas - 1, middle * part.replicas // total) == part.replica)
        position[holders] += part.bytes
    return decided
