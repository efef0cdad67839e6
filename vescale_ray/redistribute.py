"""Moving a ragged tensor between placements: one collective each, carrying no more elements than must move.

| from -> to                    | collective                                               | elements a rank receives           |
|-------------------------------|----------------------------------------------------------|------------------------------------|
| Ragged -> Replicate           | all-gather (padded to the largest part; see ``gather``)   | numel - own (+ padding)            |
| Replicate -> Ragged           | none: a slice                                            | 0                                  |
| Partial(sum, avg) -> Ragged   | reduce-scatter (padded likewise)                         | own                                |
| Ragged -> other Ragged        | one uneven all-to-all, planned by ``geometry.routes``    | new part minus what it had already |
| Ragged <-> Shard(d)           | one uneven all-to-all, planned by ``geometry.boxes``     | the same                           |

Everything else (another mesh dimension changes too, Partial with another reduction) goes through Replicate and torch's own
redistribution. gloo has no collectives over uneven lists, hence the padding. Nothing here knows autograd: see ``dtensor.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._redistribute import redistribute_local_tensor

from vescale_ray.compat import all_gather_single, reduce_scatter_single
from vescale_ray.dtensor_spec import Sharding, contiguous_stride, ragged_mesh_dim, replicated, sharding_of
from vescale_ray.geometry import Extent, Route, Shape, boxes, routes
from vescale_ray.placement import RaggedShard

Interval = tuple[int, int]

# What every backend moves as it is. The rest (bool, float8, int16, complex, ..) travels as bytes: gloo rejects them.
_MOVABLE = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8})

_PADDING_LIMIT = 2
"""Gather and reduce-scatter pad to the largest part as long as that at most doubles the traffic."""


def gather(local: torch.Tensor, sharding: Sharding) -> torch.Tensor:
    """The whole tensor, ``sharding.shape``, fresh memory. Collective over the ragged mesh dimension.

    Even parts: one all-gather without copies. A single owner: one broadcast. Uneven parts: an all-gather padded to the
    largest, or, where that would more than double the traffic, one uneven all-to-all.
    """
    shape, numel, world = sharding.shape, sharding.numel, sharding.world
    if local.is_meta:
        return local.new_empty(shape)
    flat = _flat(local)
    if world == 1:
        return flat.clone().view(shape)
    counts = _counts(sharding)
    largest, group = max(counts), sharding.mesh.get_group(sharding.mesh_dim)
    if numel == 0:
        return local.new_empty(shape)
    if flat.dtype not in _MOVABLE:
        size = flat.dtype.itemsize
        out = _gather_flat(flat.view(torch.uint8), [c * size for c in counts], largest * size, group)
        return out.view(local.dtype).view(shape)
    return _gather_flat(flat, counts, largest, group).view(shape)


def _gather_flat(flat: torch.Tensor, counts: list[int], largest: int, group: dist.ProcessGroup) -> torch.Tensor:
    world, numel = len(counts), sum(counts)
    out = flat.new_empty(numel)
    if largest == numel:
        owner = counts.index(numel)
        if flat.numel():
            out.copy_(flat)
        dist.broadcast(out, src=dist.get_global_rank(group, owner), group=group)
    elif largest * world == numel:
        all_gather_single(out, flat, group=group)
    elif largest * world <= _PADDING_LIMIT * numel:
        mine = flat.new_zeros(largest)
        mine[: flat.numel()] = flat
        padded = flat.new_empty(world * largest)
        all_gather_single(padded, mine, group=group)
        torch.cat([padded[r * largest : r * largest + n] for r, n in enumerate(counts)], out=out)
    else:
        dist.all_to_all_single(out, flat.repeat(world), counts, [flat.numel()] * world, group=group)
    return out


def take(full: torch.Tensor, sharding: Sharding) -> torch.Tensor:
    """This rank's part of the whole tensor, fresh memory; no communication."""
    return view_of(full, sharding).clone()


def view_of(full: torch.Tensor, sharding: Sharding) -> torch.Tensor:
    """This rank's part of the whole tensor as a view (of a copy, if ``full`` is not contiguous)."""
    if full.shape != sharding.shape:
        raise ValueError(f"{sharding.describe()} can't take its part of a tensor of shape {tuple(full.shape)}")
    return _flat(full)[sharding.start : sharding.end].view(sharding.local_shape)


def reduce_scatter(full: torch.Tensor, sharding: Sharding, op: str) -> torch.Tensor:
    """This rank's part of the sum (``"sum"``) or mean (``"avg"``) over the ranks' ``full`` tensors. One reduce-scatter.

    The mean is a sum divided by the ranks: gloo has no AVG. Very uneven parts go through one all-to-all and are summed here.
    """
    world, numel = sharding.world, sharding.numel
    flat = _flat(full)
    if full.is_meta or numel == 0 or world == 1:
        return flat[sharding.start : sharding.end].clone().view(sharding.local_shape)
    counts, group = _counts(sharding), sharding.mesh.get_group(sharding.mesh_dim)
    largest, mine = max(counts), counts[sharding.rank]
    if largest * world <= _PADDING_LIMIT * numel:
        out = flat.new_empty(largest)
        if largest * world != numel:
            padded = flat.new_zeros(world * largest)
            for r, (start, end) in enumerate(sharding.placement.intervals(sharding.shape)):
                padded[r * largest : r * largest + end - start] = flat[start:end]
            flat = padded
        reduce_scatter_single(out, flat, op=dist.ReduceOp.SUM, group=group)
        out = out[:mine] if largest != mine else out
    else:
        parts = flat.new_empty(world * mine)
        dist.all_to_all_single(parts, flat, [mine] * world, counts, group=group)
        out = parts.view(world, mine).sum(0)
    if op == "avg":
        out = out.div_(world)
    return out.view(sharding.local_shape)


def exchange(local: torch.Tensor, source: Sharding, target: Sharding) -> torch.Tensor:
    """From one ragged layout of a tensor to another on the same mesh dimension: only elements whose owner changes travel.

    If no rank's elements change owner (the layouts differ in dims only) there is no collective at all.
    """
    if local.is_meta:
        return local.new_empty(target.local_shape)
    plan = _plan(source.placement.intervals(source.shape), target.placement.intervals(target.shape))
    me, flat = source.rank, _flat(local)
    out = flat.new_empty(target.end - target.start)
    sends = sorted((r for r in plan if r.src == me and r.dst != me), key=lambda r: r.dst)
    receives = sorted((r for r in plan if r.dst == me and r.src != me), key=lambda r: r.src)
    for route in plan:
        if route.src == route.dst == me:
            out[route.dst_offset : route.dst_offset + route.length] = flat[route.src_offset : route.src_offset + route.length]
    if any(r.src != r.dst for r in plan):
        given, wanted = [0] * source.world, [0] * source.world
        for route in sends:
            given[route.dst] += route.length
        for route in receives:
            wanted[route.src] += route.length
        got = _all_to_all([flat[r.src_offset : r.src_offset + r.length] for r in sends], given, wanted, flat, source)
        for route, piece in zip(receives, got.split([r.length for r in receives]), strict=True):
            out[route.dst_offset : route.dst_offset + route.length] = piece
    return out.view(target.local_shape)


@lru_cache(maxsize=4096)
def _plan(source: tuple[Interval, ...], target: tuple[Interval, ...]) -> tuple[Route, ...]:
    return tuple(routes([[Extent(s, e, 0)] for s, e in source], [[Extent(s, e, 0)] for s, e in target]))


def to_shard(local: torch.Tensor, source: Sharding, dim: int) -> torch.Tensor:
    """From ragged to ``Shard(dim)`` (torch.chunk's parts) on the same mesh dimension; one all-to-all."""
    shape, world, me = source.shape, source.world, source.rank
    low, high = _chunk(shape[dim], world, me)
    out = local.new_empty((*shape[:dim], high - low, *shape[dim + 1 :]))
    if local.is_meta:
        return out
    flat = _flat(local)
    intervals = source.placement.intervals(shape)
    pieces, given, wanted = [], [0] * world, [0] * world
    for rank in range(world):
        for piece in _pieces(shape, intervals[me], dim, *_chunk(shape[dim], world, rank)):
            view = piece.in_flat(flat)
            if rank == me:
                piece.in_slab(out, dim, low).copy_(view)
            else:
                pieces.append(view.reshape(-1))
                given[rank] += piece.numel
    landing = [(rank, p) for rank in range(world) if rank != me for p in _pieces(shape, intervals[rank], dim, low, high)]
    for rank, piece in landing:
        wanted[rank] += piece.numel
    got = _all_to_all(pieces, given, wanted, flat, source)
    for (_, piece), segment in zip(landing, got.split([p.numel for _, p in landing]), strict=True):
        piece.in_slab(out, dim, low).copy_(segment.view(piece.sizes))
    return out


def from_shard(local: torch.Tensor, target: Sharding, dim: int) -> torch.Tensor:
    """From ``Shard(dim)`` to ragged on the same mesh dimension; one all-to-all: :func:`to_shard` backwards."""
    shape, world, me = target.shape, target.world, target.rank
    low, high = _chunk(shape[dim], world, me)
    out = local.new_empty(target.local_shape)
    if local.is_meta:
        return out
    local, flat_out = local.detach(), out.view(-1)
    intervals = target.placement.intervals(shape)
    pieces, given, wanted = [], [0] * world, [0] * world
    for rank in range(world):
        for piece in _pieces(shape, intervals[rank], dim, low, high):
            view = piece.in_slab(local, dim, low)
            if rank == me:
                piece.in_flat(flat_out).copy_(view)
            else:
                pieces.append(view.reshape(-1))
                given[rank] += piece.numel
    landing = [
        (rank, p) for rank in range(world) if rank != me for p in _pieces(shape, intervals[me], dim, *_chunk(shape[dim], world, rank))
    ]
    for rank, piece in landing:
        wanted[rank] += piece.numel
    got = _all_to_all(pieces, given, wanted, local, target)
    for (_, piece), segment in zip(landing, got.split([p.numel for _, p in landing]), strict=True):
        piece.in_flat(flat_out).copy_(segment.view(piece.sizes))
    return out


class _Piece:
    """A box of the tensor that one ragged part and one Shard(dim) part have in common."""

    __slots__ = ("box_offset", "box_sizes", "dim", "numel", "offsets", "sizes", "skip")

    def __init__(self, box_offset: int, box_sizes: Shape, offsets: Shape, dim: int, skip: int, length: int) -> None:
        self.box_offset, self.box_sizes, self.dim, self.skip = box_offset, box_sizes, dim, skip
        self.offsets = tuple(o + skip if i == dim else o for i, o in enumerate(offsets))
        self.sizes = tuple(length if i == dim else s for i, s in enumerate(box_sizes))
        self.numel = math.prod(self.sizes)

    def in_flat(self, flat: torch.Tensor) -> torch.Tensor:
        """This piece of a ragged part given as its flat elements."""
        box = flat[self.box_offset : self.box_offset + math.prod(self.box_sizes)].view(self.box_sizes)
        return box.narrow(self.dim, self.skip, self.sizes[self.dim])

    def in_slab(self, slab: torch.Tensor, dim: int, low: int) -> torch.Tensor:
        """This piece of a Shard(dim) part that starts at index ``low`` of the dimension."""
        index = tuple(
            slice(o - low, o - low + s) if i == dim else slice(o, o + s)
            for i, (o, s) in enumerate(zip(self.offsets, self.sizes, strict=True))
        )
        return slab[index]


def _pieces(shape: Sequence[int], interval: Interval, dim: int, low: int, high: int) -> Iterator[_Piece]:
    position = 0
    for offsets, sizes in boxes(tuple(shape), *interval):
        start, end = max(low, offsets[dim]), min(high, offsets[dim] + sizes[dim])
        if start < end:
            yield _Piece(position, sizes, offsets, dim, start - offsets[dim], end - start)
        position += math.prod(sizes)


def _chunk(size: int, world: int, rank: int) -> Interval:
    """torch.chunk's part of a dimension: equal parts of ceil(size / world), the last ones short or empty."""
    step = -(-size // world)
    return min(rank * step, size), min((rank + 1) * step, size)


def _all_to_all(pieces: list[torch.Tensor], given: list[int], wanted: list[int], like: torch.Tensor, sharding: Sharding) -> torch.Tensor:
    """Send the concatenated pieces, ``given[r]`` elements to rank r; receive ``wanted[r]`` from rank r, in rank order."""
    group = sharding.mesh.get_group(sharding.mesh_dim)
    # One piece may be a strided view (a column), which backends refuse.
    outgoing = torch.cat(pieces) if len(pieces) > 1 else pieces[0].contiguous() if pieces else like.new_empty(0)
    incoming = like.new_empty(sum(wanted))
    if like.dtype in _MOVABLE:
        dist.all_to_all_single(incoming, outgoing, wanted, given, group=group)
    else:
        size = like.dtype.itemsize
        raw_out, raw_in = outgoing.view(torch.uint8), incoming.view(torch.uint8)
        dist.all_to_all_single(raw_in, raw_out, [n * size for n in wanted], [n * size for n in given], group=group)
    return incoming


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Its elements in row-major order, contiguous (``reshape(-1)`` of one column would be a strided view)."""
    return tensor.detach().contiguous().view(-1)


def _counts(sharding: Sharding) -> list[int]:
    return [end - start for start, end in sharding.placement.intervals(sharding.shape)]


# -- any placements to any placements ------------------------------------------------------------------------------------


def plain_spec(mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], dtype: torch.dtype) -> DTensorSpec:
    """A spec for torch's own DTensor, row-major."""
    return DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(torch.Size(shape), contiguous_stride(shape), dtype))


def move(local: torch.Tensor, source: DTensorSpec, placements: Sequence[Placement]) -> tuple[torch.Tensor, DTensorSpec]:
    """The local tensor and spec under ``placements`` of the tensor that is ``local`` under ``source`` (either may be ragged).

    Raises:
        ValueError: placements that no tensor of ours or torch's can have, or a Partial target.
    """
    placements = tuple(placements)
    if placements == source.placements:
        return local, source
    assert source.tensor_meta is not None
    shape, dtype, mesh = source.tensor_meta.shape, source.tensor_meta.dtype, source.mesh
    pending = next((p for p, q in zip(placements, source.placements, strict=False) if p.is_partial() and p != q), None)
    if pending is not None:
        raise ValueError(f"can't redistribute to {pending}: a pending reduction is the result of an operation, not a target")
    if ragged_mesh_dim(source.placements) is not None:
        return _from_ragged(local, sharding_of(source), placements, dtype)
    if ragged_mesh_dim(placements) is None:
        target = plain_spec(mesh, placements, shape, dtype)
        if all(p.is_replicate() for p in placements) and all(p.is_replicate() or p.is_partial() for p in source.placements):
            return _reduce(local, source), target
        return redistribute_local_tensor(local, source, target), target
    return _to_ragged(local, source, Sharding(mesh, placements, shape))


def _reduce(local: torch.Tensor, source: DTensorSpec) -> torch.Tensor:
    """Partial to Replicate, without torch's planner: its caches keep the mesh, and so its process groups, for good."""
    for dim, placement in enumerate(source.placements):
        if isinstance(placement, Partial) and source.mesh.size(dim) > 1:
            local = placement._reduce_value(local, source.mesh, dim)
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def _from_ragged(
    local: torch.Tensor, source: Sharding, placements: tuple[Placement, ...], dtype: torch.dtype
) -> tuple[torch.Tensor, DTensorSpec]:
    mesh, shape, dim = source.mesh, source.shape, source.mesh_dim
    if len(placements) != mesh.ndim:
        raise ValueError(f"{len(placements)} placements for a mesh of {mesh.ndim} dimensions")
    goal = placements[dim]
    ragged = ragged_mesh_dim(placements) is not None
    if ragged:
        destination = Sharding(mesh, placements, shape)  # also: check before anything is sent
    if all(p == q for i, (p, q) in enumerate(zip(placements, source.placements, strict=True)) if i != dim):
        if isinstance(goal, RaggedShard):
            return exchange(local, source, destination), destination.spec(dtype)
        if type(goal) is Shard:
            d = goal.dim + len(shape) if goal.dim < 0 else goal.dim
            if not 0 <= d < len(shape):
                raise ValueError(f"{goal} of a tensor of shape {tuple(shape)}: there is no dimension {goal.dim}")
            target = plain_spec(mesh, [Shard(d) if i == dim else p for i, p in enumerate(placements)], shape, dtype)
            return to_shard(local, source, d), target
    full, spec = gather(local, source), plain_spec(mesh, replicated(mesh), shape, dtype)
    if ragged:
        return take(full, destination), destination.spec(dtype)
    if placements == spec.placements:
        return full, spec
    target = plain_spec(mesh, placements, shape, dtype)
    return redistribute_local_tensor(full, spec, target), target


def _to_ragged(local: torch.Tensor, source: DTensorSpec, target: Sharding) -> tuple[torch.Tensor, DTensorSpec]:
    assert source.tensor_meta is not None
    mesh, shape, dim, dtype = source.mesh, target.shape, target.mesh_dim, source.tensor_meta.dtype
    here = source.placements[dim]
    direct = here.is_replicate() or type(here) is Shard or (type(here) is Partial and here.reduce_op in ("sum", "avg"))
    # First bring the other mesh dimensions to where they must be (and this one to Replicate if there is no direct way).
    between = [p if i != dim else here if direct else Replicate() for i, p in enumerate(target.placements)]
    if tuple(between) != source.placements:
        spec = plain_spec(mesh, between, shape, dtype)
        local, source, here = redistribute_local_tensor(local, source, spec), spec, between[dim]
    if isinstance(here, Shard):
        return from_shard(local, target, here.dim), target.spec(dtype)
    if isinstance(here, Partial):
        return reduce_scatter(local, target, here.reduce_op), target.spec(dtype)
    return take(local, target), target.spec(dtype)


def move_tensor(tensor: DTensor, placements: Sequence[Placement]) -> tuple[torch.Tensor, DTensorSpec]:
    """:func:`move` of a DTensor, ours or torch's."""
    return move(tensor._local_tensor, tensor._spec, placements)
