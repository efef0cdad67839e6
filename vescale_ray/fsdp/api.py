"""``fully_shard``, ``register_fsdp_forward_method`` and ``share_comm_ctx``."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Shard

from vescale_ray import gloo
from vescale_ray.compat.fsdp import DataParallelMeshDims, FSDPMeshInfo, ShardPlacementResult
from vescale_ray.dtensor.spec import enclose
from vescale_ray.errors import BadArgument
from vescale_ray.fsdp.arguments import (
    check_block,
    check_dims,
    check_flag,
    check_functions,
    check_mesh,
    check_modules,
    check_parameter,
    check_policies,
    check_type,
    device_of,
    has_hooks,
    ignored_of,
    managed_modules,
    resharding,
    unit_modules,
)
from vescale_ray.fsdp.arrivals import listen
from vescale_ray.fsdp.checks import remember_parameters
from vescale_ray.fsdp.group import ParameterGroup
from vescale_ray.fsdp.grouping import plan_groups
from vescale_ray.fsdp.hooked import HookedGroup
from vescale_ray.fsdp.lanes import Lanes
from vescale_ray.fsdp.marks import watch_modules
from vescale_ray.fsdp.mixed_precision import policy_of
from vescale_ray.fsdp.module import FSDPModule, sharded_class
from vescale_ray.fsdp.parameters import REPLACED, OriginalParameter, Owner, Parallel, local_of
from vescale_ray.fsdp.phases import Phase, PhaseError, Retain
from vescale_ray.fsdp.schedule import Schedule, unit_of
from vescale_ray.fsdp.sharding import Sharding, default_mesh, flattened, plan_sharding
from vescale_ray.fsdp.torch_state import leave_state, state_of
from vescale_ray.fsdp.unit import Unit
from vescale_ray.geometry import Block

BlockPolicy = Callable[[str, nn.Parameter], Block | None]


def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 (frozen; torch's own default)
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008
    ignored_params: Iterable[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    block_policy: BlockPolicy | None = None,
    allow_gaps: bool | Callable[[str, nn.Parameter], bool] = False,
    sharding: Sharding | None = None,
    to_empty: bool = False,
) -> Any:
    """Shard a module's parameters, gradients and optimizer states over the data-parallel ranks, in place.

    Every argument of ``torch.distributed.fsdp.fully_shard`` keeps its meaning. Apply it bottom-up, and build the optimizer afterwards.
    Each call makes one *unit* of the parameters that no earlier call took. Parameters of a unit with one dtype and one ``requires_grad``
    form one *group*: one buffer, one all-gather, one reduce-scatter. If one group needs more than 3 % and 1 MiB of padding, and several
    need less, the unit splits it by length of block.

    A parameter that is a DTensor already (tensor or expert parallelism on another dimension of the same mesh) stays one in the module's
    forward; data parallelism shards each rank's local part of it.

    Args:
        module: a module, or a list of modules that form one unit.
        mesh: 1-D (shard), or 2-D with named dimensions (replicate, shard) for HSDP; default: all ranks, 1-D.
        reshard_after_forward: whether to free the parameters after forward and gather them again in backward; None: yes, except for the
            root. If it is an int that divides the shard size, each rank keeps that fraction between forward and backward. Backward
            then gathers the parameters within groups of that many neighbours (the GPUs of one host).
        shard_placement_fn: ``parameter -> Shard(dim) | ShardPlacementResult | None``. ``Shard`` gives that parameter a plain placement, as
            in FSDP2, with FSDP2's copies around collectives; None leaves the cut to the planner. A ``ShardPlacementResult`` may name
            another mesh than ``mesh`` for that parameter (experts). DTensors that are cut unevenly already get ``Shard(0)``.
        mp_policy: compute, reduction and output dtypes.
        offload_policy: ``CPUOffloadPolicy`` keeps the shards, and so the optimizer, in host memory.
        ignored_params: parameters that are not sharded, moved or reduced.
        dp_mesh_dims: names of the data-parallel dimensions of ``mesh``, which is then the whole mesh; every parameter must be a
            DTensor on it, with Replicate on these dimensions.
        block_policy: ``(name, parameter) -> Block | None``: the piece of the parameter that no shard boundary may cut; None: any cut.
            ``name`` is the parameter's name inside the module.
        allow_gaps: whether stacks of matrices ``[.., n, m]`` (fused experts) may be gathered with a constant gap behind each matrix, if
            that saves padding: True, or ``(name, parameter) -> bool``. Such a parameter is a strided view in forward, with contiguous
            matrices: ``bmm``, indexing and grouped products work, ``view(-1)`` does not. Its block need not divide ``n``. Its sharded form
            is like any other. :func:`explain` shows the gaps.
        sharding: mesh dimensions over which parameters, gradients and optimizer states are sharded, of a named mesh of any size:
            DDP, ZeRO-1, 2, 3, HSDP with or without a sharded optimizer; None: all of them over the last dimension.
        to_empty: whether to give parameters on the meta device storage without values, like ``module.to_empty(..)``, but without making
            each parameter twice. Buffers, and parameters with all-gather hooks, are left alone.

    Returns:
        The same object(s); their class is now a subclass of :class:`FSDPModule` and of the original class.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument or a parameter does not fit; the message names it.
        NotImplementedError: vescale_ray does not support an argument.

    A call that raises leaves the module as it was.
    """
    modules = unit_modules(module)
    if mesh is not None:
        check_mesh(mesh)
    check_policies(mp_policy, offload_policy)
    check_functions(shard_placement_fn, block_policy, allow_gaps)
    check_dims(sharding, dp_mesh_dims, reshard_after_forward)
    ignored, to_empty = ignored_of(ignored_params), check_flag("to_empty", to_empty)
    whole_mesh = None
    if dp_mesh_dims is not None:
        whole_mesh, mesh = mesh, _data_mesh(mesh, dp_mesh_dims)
    mesh = mesh if mesh is not None else default_mesh()
    axes = None
    if sharding is not None:
        axes = plan_sharding(sharding, mesh)
        mesh = axes.mesh
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}: give one or two of its dimensions, as mesh['dp'], or say with "
            f"sharding=Sharding.zero3('dp') which of them shard"
        )
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise BadArgument("Please init the 2D mesh for HSDP with mesh_dim_names specified, as ('replicate', 'shard')")
    default = DataParallelRanks(mesh, whole_mesh, dp_mesh_dims)
    device = device_of(mesh)
    if device.type == "cpu" or type(offload_policy) is not OffloadPolicy:  # shards in host memory
        gloo.warn_of_threads(mesh.get_all_groups())

    managed = managed_modules(modules)
    owners: dict[nn.Parameter, tuple[str, list[Owner]]] = {}
    for position, root in enumerate(modules):
        prefix = f"{position}." if len(modules) > 1 else ""
        for name, one in root.named_modules(remove_duplicate=False):
            if one not in managed:
                continue
            for attribute, param in one._parameters.items():
                if param is None or param in ignored:
                    continue
                fqn = f"{prefix}{name}.{attribute}" if name else f"{prefix}{attribute}"
                check_parameter(fqn, one, attribute, param)
                entry = owners.setdefault(param, (fqn, []))[1]
                if all(ref() is not one or attr != attribute for ref, attr in entry):
                    entry.append((weakref.ref(one), attribute))
    placed = {param: _placed(fqn, param, shard_placement_fn, default) for param, (fqn, _) in owners.items()}
    datas = {id(data): data for data in (default, *(data for _, data in placed.values()))}
    ranks_of = {key: _ranks(data.mesh) for key, data in datas.items()}
    meshes = {ranks_of[key]: data.mesh for key, data in datas.items()}
    if axes is not None and len(meshes) > 1:
        raise ValueError("shard_placement_fn gave a mesh other than the one that sharding uses: leave out one of them")
    reshards = {key: resharding(reshard_after_forward, _shard_position(one)[1]) for key, one in meshes.items()}
    retain = Retain.NOTHING
    if axes is not None:
        reshards = {key: (reshard, axes.neighbours) for key, (reshard, _) in reshards.items()}
        retain = Retain.ALL if axes.keep else Retain.PART if axes.neighbours is not None else Retain.NOTHING
    parallel = {param: _parallel(fqn, param, placed[param][1]) for param, (fqn, _) in owners.items()}
    on_meta = [fqn for param, (fqn, _) in owners.items() if param.is_meta]
    if on_meta and len(on_meta) < len(owners):
        real = next(fqn for param, (fqn, _) in owners.items() if not param.is_meta)
        raise ValueError(
            f"parameter {on_meta[0]!r} is on the meta device but {real!r} is not: materialize the first, or "
            f"build all of the module on the meta device"
        )

    by_kind: dict[tuple[MixedPrecisionPolicy, torch.dtype, bool, bool, Ranks], list[OriginalParameter]] = {}
    for param, (fqn, where) in owners.items():
        block = block_policy(fqn, param) if block_policy is not None else None
        check_block(fqn, block)
        gaps = param.dim() >= 3 and bool(allow_gaps(fqn, param) if callable(allow_gaps) else allow_gaps)
        shard_dim, data = placed[param]
        kept_apart = parallel[param]
        if kept_apart is not None and not kept_apart.even and shard_dim is None:
            shard_dim = 0
        if block is not None and shard_dim is not None:
            why = "shard_placement_fn" if kept_apart is None or kept_apart.even else "its uneven tensor parallelism"
            raise ValueError(f"{fqn!r} has Shard({shard_dim}) from {why} and {block} from block_policy: give it one of them")
        hooked, tied = has_hooks(fqn, param, block, shard_dim), bool(param.__dict__.get(REPLACED))
        source = OriginalParameter(fqn, param, tuple(where), block, parallel[param], gaps, 0 if hooked else shard_dim, hooked, tied)
        kind = (policy_of(fqn, param, mp_policy), param.dtype, param.requires_grad, hooked, ranks_of[id(data)])
        by_kind.setdefault(kind, []).append(source)
    planned = [
        (key, policy, members, division)
        for (policy, _, _, _, key), sources in by_kind.items()
        for members, division in plan_groups(sources, *_shard_position(meshes[key]), policy)
    ]
    groups = [
        (HookedGroup if members[0].hooked else ParameterGroup)(
            type(modules[0]).__name__,
            members,
            division,
            meshes[key],
            policy,
            offload_policy,
            device,
            retain=retain,
            neighbours=reshards[key][1],
            to_empty=to_empty,
        )
        for key, policy, members, division in planned
    ]
    classes = [sharded_class(type(one)) for one in modules]  # type: ignore[arg-type]

    # All checks have passed and all memory is allocated: from here on the model changes.
    _move_buffers(managed, device)
    for group in groups:
        group.install()
    for param in owners:
        # The model no longer uses the original. The mark lets optimizers and tied modules that still hold it raise a clear error.
        param.__dict__[REPLACED] = True

    unit = Unit(modules, groups, mp_policy, reshards[_ranks(mesh)][0], device, Schedule.start)
    listen(unit)
    unit.hold_gradients = axes is None or axes.hold
    for one, sharded in zip(modules, classes, strict=True):
        one.__dict__["_vescale_unit"] = unit
        leave_state(one, unit)
        one.__class__ = sharded  # type: ignore[assignment]
    watch_modules(unit, managed)
    remember_parameters(managed, ignored)
    for one in managed:
        one._is_fsdp_managed_module = True  # type: ignore[assignment]  # torch.compile looks for this
        one._fsdp_use_orig_params = True  # type: ignore[assignment]
    _hook_state_dict(unit, groups)
    return module


fully_shard.state = state_of  # type: ignore[attr-defined]  # torch's fully_shard has this attribute, too


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Make ``module.method_name`` gather and reshard like ``forward``. Does nothing if the module is not sharded.

    Raises:
        ValueError: the module has no such method.
    """
    check_type("module", module, nn.Module, "the model itself")
    check_type("method_name", method_name, str, "'encode'")
    if not isinstance(module, FSDPModule):
        return
    if isinstance(getattr(module, method_name, None), nn.Module) or not callable(getattr(module, method_name, None)):
        raise ValueError(f"{type(module).__name__.removeprefix('FSDP')} does not have a method {method_name!r}: give the name of one")
    original = getattr(module, method_name)

    @functools.wraps(original)
    def wrapped(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        unit = unit_of(self)
        assert unit is not None
        args, kwargs = unit.pre_forward(self, args, kwargs)
        try:
            output = original(*args, **kwargs)
        except BaseException:
            unit._abandon_forward()
            raise
        return unit.post_forward(self, args, output)

    setattr(module, method_name, wrapped.__get__(module, type(module)))  # type: ignore[attr-defined]


def share_comm_ctx(modules: list[Any]) -> None:
    """Let several roots (the stages of a pipeline) use the same side streams and buffer pool. Call it between steps.

    Raises:
        ValueError: a module is not sharded.
        PhaseError: a forward or backward of one of them is under way.
    """
    check_modules("share_comm_ctx", modules)
    units = []
    for module in modules:
        unit = unit_of(module) if isinstance(module, nn.Module) else None
        if unit is None:
            raise ValueError(f"Expects list of FSDPModules but got {type(module).__name__}: apply fully_shard to it before share_comm_ctx")
        if unit.phase is not Phase.RESTING or (unit.schedule is not None and unit.schedule.running):
            raise PhaseError(f"unit {unit.name!r} is in the middle of a step: call share_comm_ctx before or after it")
        units.append(unit)
    if units:
        lanes = units[0].lanes or Lanes(units[0].device)
        for unit in units:
            unit.lanes = lanes
            if unit.schedule is not None:
                unit.schedule.share(lanes)


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


def _placed(
    fqn: str, param: nn.Parameter, shard_placement_fn: Callable[[nn.Parameter], Any] | None, default: DataParallelRanks
) -> tuple[int | None, DataParallelRanks]:
    """The dimension along which ``shard_placement_fn`` shards the parameter, and its data-parallel ranks.

    Raises:
        ValueError: the result is not a ``Shard``, ``ShardPlacementResult`` or None; its mesh is not (shard,) or (replicate, shard).
    """
    placement = shard_placement_fn(param) if shard_placement_fn is not None else None
    data = default
    if isinstance(placement, ShardPlacementResult):
        data, placement = _data_of(fqn, placement.mesh_info, default), placement.placement
    if placement is not None and type(placement) is not Shard:
        raise ValueError(
            f"Invalid shard_placement_fn result: {placement!r} for {fqn!r}; it must return Shard(dim), a ShardPlacementResult with a "
            f"Shard, or None"
        )
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
    return default if _ranks(mesh) == _ranks(default.mesh) else DataParallelRanks(mesh, info.spmd_mesh, info.dp_mesh_dims)


Ranks = tuple[int, ...]


def _ranks(mesh: DeviceMesh) -> Ranks:
    """Identity of the mesh's process groups. Parameters on meshes with the same groups can share a buffer."""
    return tuple(id(mesh.get_group(dim)) for dim in range(mesh.ndim))


def _shard_position(mesh: DeviceMesh) -> tuple[int, int]:
    """This rank's position among the ranks that shard a parameter, and their number."""
    return mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1)


def _data_mesh(mesh: DeviceMesh | None, dims: DataParallelMeshDims) -> DeviceMesh:
    """The data-parallel part of a whole mesh: (shard,) or (replicate, shard)."""
    if mesh is None or mesh.mesh_dim_names is None:
        raise ValueError("mesh must have mesh_dim_names when dp_mesh_dims is provided: it is the whole mesh, with named dimensions")
    for name in (*dims.shard_names, *dims.replicate_names):
        if name not in mesh.mesh_dim_names:
            raise ValueError(
                f"Mesh dim name {name!r} (of dp_mesh_dims) not found in mesh.mesh_dim_names {mesh.mesh_dim_names}: name one of these"
            )
    if not dims.shard_names:
        replicas = flattened(mesh, dims.replicate_names)
        return replicas._unflatten(0, (replicas.size(), 1), ("replicate", "shard"))
    shard = flattened(mesh, dims.shard_names)
    return DeviceMesh._concatenate([flattened(mesh, dims.replicate_names), shard]) if dims.replicate_names else shard


def _parallel(fqn: str, param: nn.Parameter, data: DataParallelRanks) -> Parallel | None:
    """The tensor or expert parallelism of a parameter that is a DTensor already; None for a plain parameter.

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
            raise ValueError(
                f"parameter {fqn!r} is a DTensor on {mesh}, which does not go with the data-parallel mesh {data_mesh}: give its "
                f"full_tensor(), or, for tensor parallelism, take both from one mesh, as init_device_mesh(.., "
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
    return Parallel(param._spec, data_dims, model_mesh, even)


def _move_buffers(managed: set[nn.Module], device: torch.device) -> None:
    for module in managed:
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device and not buffer.is_meta:
                module._buffers[name] = buffer.to(device)


def _hook_state_dict(unit: Unit, groups: list[ParameterGroup]) -> None:
    """Register hooks that save and load the sharded parameters, and rebuild the master shard after loading."""
    unit_ref = weakref.ref(unit)
    holders = {id(m): m for group in groups for param in group.params for ref, _ in param.owners if (m := ref()) is not None}

    def to_sharded(what: str) -> Unit | None:
        owner = unit_ref()
        if owner is None:
            return None
        if owner.phase is not Phase.RESTING:
            raise PhaseError(
                f"unit {owner.name!r} is in phase {owner.phase.value}: its state can't be {what} in the middle of a step: do it between "
                f"steps; after an exception, call reset_iter_state() on the root"
            )
        owner.reshard()
        return owner

    def before_save(*_: Any) -> None:
        to_sharded("saved")

    def after_save(module: nn.Module, saved: dict[str, Any], prefix: str, *_: Any) -> None:
        # detach() of a DTensor whose local part is a view of a buffer reports storage at that part's offset: make it anew.
        for name in module._parameters:
            value = saved.get(prefix + name)
            if type(value) is DTensor and value.storage_offset():
                saved[prefix + name] = enclose(DTensor, local_of(value), value._spec)

    def before_load(*_: Any) -> None:
        owner = to_sharded("loaded")
        if owner is not None and owner.schedule is not None and owner.schedule.running:
            raise PhaseError(
                f"a forward or backward around unit {owner.name!r} is under way: its state can't be loaded in the middle of a step: do "
                f"it between steps; after an exception, call reset_iter_state() on the root"
            )

    def after_load(*_: Any) -> None:
        owner = unit_ref()
        if owner is not None:
            owner.loads += 1
            for group in owner.groups:
                group.adopt()
                group.refresh()

    for holder in holders.values():
        holder.register_state_dict_pre_hook(before_save)
        holder.register_state_dict_post_hook(after_save)
        holder.register_load_state_dict_pre_hook(before_load)
        holder.register_load_state_dict_post_hook(after_load)
