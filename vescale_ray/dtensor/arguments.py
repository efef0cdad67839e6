"""Arguments of the functions that make ragged tensors, checked before any communication."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from vescale_ray.compat.tensor import DTensorSpec
from vescale_ray.dtensor.placement import RaggedShard
from vescale_ray.dtensor.spec import check_placements, make_spec, ragged_mesh_dim, sharding_of


def placement_list(placements: Any) -> tuple[Placement, ...]:
    """Return ``placements`` as a tuple.

    Raises:
        TypeError: it is no sequence of placements.
    """
    if isinstance(placements, Iterable):
        listed = tuple(placements)
        if all(isinstance(p, Placement) for p in listed):
            return listed
    raise TypeError(f"placements are {placements!r}: give a list with one placement for each mesh dimension, such as [Shard(0)]")


def whole_shape(local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> torch.Size:
    """Return the shape of the whole tensor, computed from this rank's part ``local`` if it can be; otherwise all ranks raise ValueError."""
    dim = ragged_mesh_dim(placements)
    if dim is None or len(placements) != mesh.ndim:
        check_placements(mesh, placements, tuple(local.shape))  # raises
    ragged = cast(RaggedShard, placements[cast(int, dim)])
    others = [p for i, p in enumerate(placements) if i != dim]
    units, ranks = ragged.local_units, mesh.size(dim)
    if ragged.dims != (0,) or not local.dim() or len(units) != ranks or not all(units) or any(p.is_shard() for p in others):
        raise ValueError(
            f"from_local of a local tensor {tuple(local.shape)} with placements {list(placements)}: give shape=, the shape of the "
            "whole tensor, which this part does not tell"
        )
    return torch.Size((local.shape[0] * sum(units) // units[mesh.get_local_rank(dim)], *local.shape[1:]))


def checked_spec(
    local_tensor: Tensor, device_mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], stride: Sequence[int] | None
) -> DTensorSpec:
    """Return the spec for :meth:`RaggedDTensor.from_local`. Raises ValueError if an argument fails that method's checks."""
    if isinstance(local_tensor, DTensor):
        raise ValueError(f"local_tensor is a {type(local_tensor).__name__}: give the plain local part")
    spec = make_spec(device_mesh, placements, shape, local_tensor.dtype)
    sharding = sharding_of(spec)
    if tuple(local_tensor.shape) != sharding.local_shape:
        raise ValueError(
            f"local tensor has shape {tuple(local_tensor.shape)}, but rank {sharding.rank} of {sharding.describe()} "
            f"holds {sharding.local_shape}"
        )
    if not local_tensor.is_contiguous():
        raise ValueError(f"local tensor {tuple(local_tensor.shape)} has strides {local_tensor.stride()}: it must be contiguous")
    if stride is not None and tuple(stride) != sharding.stride and sharding.numel > 1:
        raise ValueError(f"stride is {tuple(stride)}: a ragged tensor of shape {tuple(shape)} is row-major, {sharding.stride}")
    return spec


def compare_with_others(mesh: DeviceMesh, mine: tuple[Any, ...], fault: ValueError | None) -> None:
    """Raise on every rank of the mesh if one rank has a fault, the last of ``mine``, or if the ranks have different values.

    One small gather per mesh dimension."""
    me = tuple(mesh.get_coordinate() or ())
    known: dict[tuple[int, ...], Any] = {me: mine}
    for dim in range(mesh.ndim):
        if mesh.size(dim) > 1:
            parts: list[Any] = [None] * mesh.size(dim)
            dist.all_gather_object(parts, known, group=mesh.get_group(dim))
            known = {place: said for part in parts for place, said in part.items()}
    if fault is not None:
        raise fault
    first = min(known)
    for place in sorted(known):
        if known[place][-1] is not None:
            raise ValueError(f"the rank at {place} of the mesh: {known[place][-1]}")
        if known[place] != known[first]:
            given, other = known[place][:-1], known[first][:-1]
            raise ValueError(f"the rank at {place} of the mesh gave {given}, that at {first} gave {other}: give the same")


def check_saved_part(mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> None:
    """Check that an unpickled part of a tensor belongs to this rank. A pickled mesh has the coordinate of the rank that saved it.

    Raises:
        ValueError: another rank saved the part, or one of another number of ranks. Loaded values would be those of another part.
    """
    saved = mesh.get_coordinate()
    cut = [dim for dim, placement in enumerate(placements) if not placement.is_replicate()]
    if saved is None or not cut or not dist.is_initialized():
        return
    rank, sizes = dist.get_rank(), {}
    here = (mesh.mesh == rank).nonzero().tolist()
    for dim in cut:
        with suppress(RuntimeError):  # without the process group only the values of this rank's part are usable
            sizes[dim] = mesh.get_group(dim).size()
    if here and all(here[0][dim] == saved[dim] and sizes.get(dim, mesh.size(dim)) == mesh.size(dim) for dim in cut):
        return
    raise ValueError(
        f"this is the part that rank {int(mesh.mesh[tuple(saved)])} on {mesh} had of a tensor of shape {tuple(shape)}, and it is loaded on "
        f"rank {rank} of {dist.get_world_size()}: load each rank's own file on as many ranks (a process without a process group loads "
        "any), or save whole tensors (get_model_state_dict of vescale_ray.state_dict with full_state_dict=True), or with "
        "torch.distributed.checkpoint"
    )
