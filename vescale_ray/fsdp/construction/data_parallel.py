"""The data-parallel ranks of a unit's parameters, and the tensor or expert parallelism that parameters have already."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import OffloadPolicy
from torch.distributed.tensor import DTensor, Shard

from vescale_ray import gloo
from vescale_ray.compat.fsdp import DataParallelMeshDims, FSDPMeshInfo, ShardPlacementResult
from vescale_ray.errors import BadArgument, noted
from vescale_ray.fsdp.construction.arguments import Arguments
from vescale_ray.fsdp.layouts.group_parameter import SUMMED_OVER, Parallel
from vescale_ray.fsdp.layouts.sharding import ShardingPlan, data_parallel_part, default_mesh, plan_sharding


@dataclass(frozen=True)
class DataParallelRanks:
    """The data-parallel ranks of a parameter.

    Attributes:
        mesh: (shard,) or (replicate, shard).
        whole: the whole mesh of parameters that are DTensors, including tensor or expert parallel dimensions; None: unknown.
        dims: names of the data-parallel dimensions of ``whole``.
    """

    mesh: DeviceMesh
    whole: DeviceMesh | None = None
    dims: DataParallelMeshDims | None = None


def data_parallel_ranks(given: Arguments) -> tuple[DataParallelRanks, ShardingPlan]:
    """Return the data-parallel ranks of a unit, and its sharding over them. All ranks together may create process groups.

    Raises:
        ValueError: the mesh lacks a dimension or names, or has too many dimensions; ``reshard_after_forward`` does not divide it.
    """
    dims = given.dp_mesh_dims
    mesh = given.mesh if dims is None else _data_parallel_mesh(given.mesh, dims)
    axes = plan_sharding(given.sharding, mesh if mesh is not None else default_mesh())
    mesh = axes.mesh
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}: give one or two of its dimensions, such as mesh['dp'], or say with "
            f"sharding=Sharding.zero3('dp') which of them shard"
        )
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise BadArgument("Please init the 2D mesh for HSDP with mesh_dim_names specified, such as ('replicate', 'shard')")
    given.resharding(mesh)
    if mesh.device_type == "cpu" or type(given.offload_policy) is not OffloadPolicy:  # the shards are in host memory, so gloo moves them
        gloo.warn_of_threads(mesh.get_all_groups())
    return DataParallelRanks(mesh, given.mesh if dims is not None else None, dims), axes


def placed(fqn: str, param: nn.Parameter, given: Arguments, default: DataParallelRanks) -> tuple[int | None, DataParallelRanks]:
    """Return the dimension along which ``shard_placement_fn`` shards the parameter, and its data-parallel ranks.

    Raises:
        ValueError: the result is not a ``Shard``, ``ShardPlacementResult`` or None; its mesh is not (shard,) or (replicate, shard), or not
            that of ``sharding``.
    """
    placement, data = None, default
    if given.shard_placement_fn is not None:
        with noted(f"shard_placement_fn raised this for parameter {fqn!r}; fully_shard changed nothing"):
            placement = given.shard_placement_fn(param)
    if isinstance(placement, ShardPlacementResult):
        data, placement = _data_of(fqn, placement.mesh_info, default), placement.placement
    if placement is not None and type(placement) is not Shard:
        raise ValueError(
            f"Invalid shard_placement_fn result: {placement!r} for {fqn!r}; it must return Shard(dim), a ShardPlacementResult with a "
            f"Shard, or None"
        )
    if given.sharding is not None and data is not default:
        raise ValueError("shard_placement_fn gave a mesh other than the one that sharding uses: leave out one of them")
    return None if placement is None else placement.dim, data


def _data_of(fqn: str, info: FSDPMeshInfo, default: DataParallelRanks) -> DataParallelRanks:
    mesh = info.mesh
    expected = (mesh.ndim - 1, 0 if mesh.ndim == 2 else None)
    if mesh.ndim not in (1, 2) or (info.shard_mesh_dim, info.replicate_mesh_dim) != expected:
        raise ValueError(
            f"shard_placement_fn gave {mesh} with shard_mesh_dim={info.shard_mesh_dim}, replicate_mesh_dim={info.replicate_mesh_dim} for "
            f"{fqn!r}: the mesh must be (shard,) or (replicate, shard)"
        )
    if mesh.device_type != default.mesh.device_type:
        raise ValueError(f"shard_placement_fn gave {mesh} for {fqn!r}, but the unit is on {default.mesh.device_type}: give one there")
    return default if group_ids(mesh) == group_ids(default.mesh) else DataParallelRanks(mesh, info.spmd_mesh, info.dp_mesh_dims)


def group_ids(mesh: DeviceMesh) -> tuple[int, ...]:
    """Return the identity of the mesh's process groups. Parameters on meshes with the same groups can share a buffer."""
    return tuple(id(mesh.get_group(dim)) for dim in range(mesh.ndim))


def _data_parallel_mesh(mesh: DeviceMesh | None, dims: DataParallelMeshDims) -> DeviceMesh:
    """Return the data-parallel part of a whole mesh: (shard,) or (replicate, shard)."""
    if mesh is None or mesh.mesh_dim_names is None:
        raise ValueError("mesh must have mesh_dim_names when dp_mesh_dims is provided: it is the whole mesh, with named dimensions")
    for name in (*dims.shard_names, *dims.replicate_names):
        if name not in mesh.mesh_dim_names:
            raise ValueError(
                f"Mesh dim name {name!r} (of dp_mesh_dims) not found in mesh.mesh_dim_names {mesh.mesh_dim_names}: name one of these"
            )
    return data_parallel_part(mesh, dims.replicate_names, dims.shard_names)


def parallel_of(fqn: str, param: nn.Parameter, data: DataParallelRanks) -> Parallel | None:
    """Return the tensor or expert parallelism of a parameter that is a DTensor already; None for a plain parameter.

    Raises:
        ValueError: its mesh does not fit, or it has other placements than Shard and Replicate.
    """
    data_mesh, whole, dims = data.mesh, data.whole, data.dims
    if not isinstance(param, DTensor):
        if dims is not None:
            raise ValueError(
                f"with dp_mesh_dims all parameters must be DTensors on the whole mesh, but {fqn!r} is a plain tensor: distribute "
                f"it with Replicate() on the data-parallel dimensions, or give these as mesh, without dp_mesh_dims"
            )
        return None
    mesh, placements = param.device_mesh, param.placements
    data_dims: frozenset[int] = frozenset()
    model_mesh: DeviceMesh | None = mesh
    if dims is not None:
        if mesh != whole:
            raise ValueError(f"with dp_mesh_dims parameters must be on the same mesh that fully_shard gets, but {fqn!r} is on {mesh}")
        names = mesh.mesh_dim_names or ()
        data_dims = frozenset(names.index(name) for name in (*dims.shard_names, *dims.replicate_names))
        left = tuple(name for i, name in enumerate(names) if i not in data_dims)
        model_mesh = mesh[left] if left else None
    else:
        try:
            DeviceMesh._concatenate([data_mesh, mesh])
        except (RuntimeError, AssertionError, TypeError) as error:
            if hasattr(param, SUMMED_OVER):
                raise ValueError(
                    f"parameter {fqn!r} belongs to experts that are distributed over {mesh}: apply fully_shard to the module of experts "
                    f"first, over the other dimension of that mesh, such as mesh['dp']"
                ) from error
            raise ValueError(
                f"parameter {fqn!r} is a DTensor on {mesh}, which does not go with the data-parallel mesh {data_mesh}: give its "
                f"full_tensor(), or, for tensor parallelism, take both from one mesh: init_device_mesh(.., "
                f"mesh_dim_names=('dp', 'tp'))['dp'] and ['tp']"
            ) from error
    shape, even = list(param.shape), True
    for i, placement in enumerate(placements):
        if i in data_dims and not placement.is_replicate():
            raise ValueError(
                f"Expected Replicate() on data-parallel dimension {i} of the mesh of parameter {fqn!r}, but got {placement}: distribute it "
                f"with Replicate there"
            )
        if type(placement) is Shard:
            dim = placement.dim % len(shape)
            even = even and not shape[dim] % mesh.size(i)
            shape[dim] //= mesh.size(i)
        elif not placement.is_replicate():
            raise ValueError(
                f"parameter {fqn!r} has placement {placement}: only Shard and Replicate go with fully_shard; redistribute it first"
            )
    return Parallel(param._spec, data_dims, model_mesh, even, getattr(param, SUMMED_OVER, 1))
