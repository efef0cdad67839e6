"""fully_shard: apply sharding to a module."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp._fully_shard._fsdp_api import DataParallelMeshDims
from torch.distributed.tensor import DTensor, Shard

from vescale_ray.fsdp.group import Group, Retain, plan_groups
from vescale_ray.fsdp.hooked import HookedGroup, has_gather_hooks
from vescale_ray.fsdp.linear import adopt_linear
from vescale_ray.fsdp.module import FSDPModule, sharded_class
from vescale_ray.fsdp.parameters import Owner, Parallel, Source, Subgroup
from vescale_ray.fsdp.phases import Phase, PhaseError
from vescale_ray.fsdp.pipelining import leave_state
from vescale_ray.fsdp.schedule import Lanes, unit_of
from vescale_ray.fsdp.sharding import Sharding, flattened, plan_sharding
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
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    block_policy: BlockPolicy | None = None,
    allow_gaps: bool | Callable[[str, nn.Parameter], bool] = False,
    sharding: Sharding | None = None,
) -> Any:
    """Shard a module's parameters, gradients and optimizer states over the data-parallel ranks, in place.

    Every argument of ``torch.distributed.fsdp.fully_shard`` with the same meaning. Apply it bottom-up: each call makes one
    *unit* of the parameters that no earlier call took; a unit's parameters of one dtype and one ``requires_grad`` are one
    *group*: one buffer, one all-gather, one reduce-scatter. (Several groups by length of block, where one would pad more than 3 %
    and 1 MiB and several do with less.) Build the optimizer afterwards.

    Parameters that are DTensors already (tensor or expert parallelism on another dimension of the same mesh) stay so for the
    module's forward; data parallelism shares out what each rank has of them.

    Args:
        module: a module, or a list of modules that form one unit.
        mesh: 1-D (shard), or 2-D with named dimensions (replicate, shard) for HSDP; default: all ranks, 1-D.
        reshard_after_forward: free the parameters after forward and gather them again in backward; None: yes, except for the
            root. An int that divides the shard size: between forward and backward each rank keeps that fraction of the
            parameters, and backward gathers them within groups of so many neighbours (the GPUs of one host).
        shard_placement_fn: ``parameter -> Shard(dim) | None``: a plain ``Shard`` placement for that parameter, as with FSDP2, with
            its copies before and after collectives; None: cut by the planner.
        mp_policy: compute, reduction and output dtypes.
        offload_policy: ``CPUOffloadPolicy`` keeps the shards, and so the optimizer, in host memory.
        ignored_params: neither sharded, moved nor reduced.
        dp_mesh_dims: names of the data-parallel dimensions of ``mesh``, which then is the whole mesh; every parameter must be a
            DTensor on it, with Replicate on these dimensions.
        block_policy: ``(name, parameter) -> Block | None``: the piece of the parameter that no shard boundary cuts; None: no
            requirement. ``name`` is the parameter's name inside the module.
        allow_gaps: whether stacks of matrices ``[.., n, m]`` (fused experts) may be gathered with a constant gap behind each
            matrix, where that saves padding: True, or ``(name, parameter) -> bool``. Such a parameter is then a strided view in
            forward (each matrix contiguous), which ``bmm``, indexing and grouped products take, and ``view(-1)`` does not. Its
            block need not divide ``n``. Sharded, it is as any other. :func:`explain` shows the gaps.
        sharding: which dimensions of ``mesh`` (of any number, named) parameters, gradients and optimizer states are sharded over:
            DDP, ZeRO-1, 2, 3, HSDP with or without a sharded optimizer; None: all over the last one.

    Returns:
        The same object(s); their class is now a subclass of :class:`FSDPModule` and of what it was.

    Raises:
        ValueError: naming the argument or parameter that does not fit.
        NotImplementedError: for an argument that vescale_ray does not support.
    """
    modules = _modules(module)
    whole_mesh = None
    if dp_mesh_dims is not None:
        whole_mesh, mesh = mesh, _data_mesh(mesh, dp_mesh_dims)
    mesh = mesh if mesh is not None else _default_mesh()
    axes = None
    if sharding is not None:
        if dp_mesh_dims is not None or (reshard_after_forward is not None and not isinstance(reshard_after_forward, bool)):
            raise ValueError("sharding says where everything is sharded: leave out dp_mesh_dims and an int for reshard_after_forward")
        axes = plan_sharding(sharding, mesh)
        mesh = axes.mesh
    if mesh.ndim not in (1, 2):
        raise ValueError(f"fully_shard needs a mesh of 1 or 2 dimensions, not {mesh.ndim}: {mesh}")
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise ValueError("a 2-D mesh needs mesh_dim_names, as ('replicate', 'shard')")
    reshard, neighbours = _reshard_after_forward(reshard_after_forward, mesh.size(mesh.ndim - 1))
    retain = Retain.NOTHING
    if axes is not None:
        neighbours = axes.neighbours
        retain = Retain.ALL if axes.keep else Retain.PART if neighbours is not None else Retain.NOTHING
    device = _device_of(mesh)
    ignored = ignored_params or set()

    managed = _managed_modules(modules)
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
                entry = owners.setdefault(param, (fqn, []))[1]
                if all(ref() is not one or attr != attribute for ref, attr in entry):
                    entry.append((weakref.ref(one), attribute))
    for param, (fqn, _) in owners.items():
        _check_parameter(fqn, param)
    parallel = {param: _parallel(fqn, param, mesh, whole_mesh, dp_mesh_dims) for param, (fqn, _) in owners.items()}
    on_meta = [fqn for param, (fqn, _) in owners.items() if param.is_meta]
    if on_meta and len(on_meta) < len(owners):
        real = next(fqn for param, (fqn, _) in owners.items() if not param.is_meta)
        raise ValueError(f"parameter {on_meta[0]!r} is on the meta device but {real!r} is not: a unit is built on one or the other")
    _move_buffers(managed, device)

    by_kind: dict[tuple[torch.dtype, bool, bool], list[Source]] = {}
    for param, (fqn, where) in owners.items():
        block = block_policy(fqn, param) if block_policy is not None else None
        gaps = param.dim() >= 3 and bool(allow_gaps(fqn, param) if callable(allow_gaps) else allow_gaps)
        shard_dim = _shard_dim(fqn, param, shard_placement_fn, block, parallel[param])
        hooked = _has_hooks(fqn, param, block, shard_dim)
        source = Source(fqn, param, tuple(where), block, parallel[param], gaps, 0 if hooked else shard_dim, hooked)
        by_kind.setdefault((param.dtype, param.requires_grad, hooked), []).append(source)
    name = type(modules[0]).__name__
    groups = [
        (HookedGroup if members[0].hooked else Group)(name, members, division, mesh, mp_policy, offload_policy, device)
        for sources in by_kind.values()
        for members, division in plan_groups(sources, mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1), mp_policy)
    ]
    for param in owners:
        # The original is out of the model now. Whoever still holds it (an optimizer, a module tied to it) can be told so.
        param.__dict__["_vescale_replaced"] = True

    for group in groups:
        group.retain = retain
    if neighbours is not None:
        for group in groups:
            if not group.division.copies:
                group.subgroup = Subgroup(mesh, neighbours, device)

    unit = Unit(modules, groups, mp_policy, reshard, device)
    unit.hold_gradients = axes is None or axes.hold
    for one in modules:
        one.__dict__["_vescale_unit"] = unit
        leave_state(one, unit)
        one.__class__ = sharded_class(type(one))  # type: ignore[arg-type]
    for one in managed:
        adopt_linear(one)
        one._is_fsdp_managed_module = True  # type: ignore[assignment]  # what torch.compile looks for
        one._fsdp_use_orig_params = True  # type: ignore[assignment]
    _hook_state_dict(unit, groups)
    return module


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Make ``module.method_name`` gather and reshard like ``forward``. Nothing if the module is not sharded.

    Raises:
        ValueError: there is no such method.
    """
    if not isinstance(module, FSDPModule):
        return
    if not hasattr(module, method_name):
        raise ValueError(f"{type(module).__name__} has no method {method_name!r}")
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
    """Let several roots (the stages of a pipeline) use the same side streams and buffers. Call it before their first forward.

    Raises:
        ValueError: a module is not sharded, or has run already.
    """
    units = []
    for module in modules:
        unit = unit_of(module) if isinstance(module, nn.Module) else None
        if unit is None:
            raise ValueError(f"share_comm_ctx needs modules that fully_shard was applied to, not {type(module).__name__}")
        if unit.schedule is not None:
            raise ValueError(f"unit {unit.name!r} has run already: call share_comm_ctx before the first forward")
        units.append(unit)
    if units:
        lanes = units[0].lanes or Lanes(units[0].device)
        for unit in units:
            unit.lanes = lanes


def _modules(module: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    modules = [module] if isinstance(module, nn.Module) else list(module)
    if not modules:
        raise ValueError("fully_shard got an empty list of modules")
    for one in modules:
        if not isinstance(one, nn.Module):
            raise ValueError(f"fully_shard needs modules, not {type(one).__name__}")
        if isinstance(one, nn.ModuleList | nn.ModuleDict) and type(one).forward is nn.Module.forward:
            raise ValueError(f"fully_shard can't hook a {type(one).__name__}, which has no forward: apply it to the modules in it")
        if unit_of(one) is not None:
            raise ValueError(f"fully_shard was applied to this {type(one).__name__} already")
    inside = {id(sub) for one in modules for sub in one.modules() if sub is not one}
    return [one for one in modules if id(one) not in inside]


def _managed_modules(roots: list[nn.Module]) -> set[nn.Module]:
    """The modules below ``roots``, without those that are units of their own and what is below these."""
    found: set[nn.Module] = set()
    stack = list(roots)
    while stack:
        one = stack.pop()
        if one in found:
            continue
        found.add(one)
        stack.extend(child for child in one.children() if unit_of(child) is None)
    return found


def _check_parameter(fqn: str, param: nn.Parameter) -> None:
    if param.__dict__.get("_vescale_replaced"):
        raise ValueError(
            f"parameter {fqn!r} is tied to one that an earlier fully_shard call took: put both modules into one unit, "
            f"as fully_shard([module_a, module_b]), or leave both to the root"
        )


def _has_hooks(fqn: str, param: nn.Parameter, block: Block | None, shard_dim: int | None) -> bool:
    """Whether the parameter's tensor class says what is gathered.

    Raises:
        ValueError: it has one hook only; a block; a dimension other than the first.
        NotImplementedError: it is a DTensor.
    """
    if not has_gather_hooks(param._local_tensor if isinstance(param, DTensor) else param):
        return False
    if isinstance(param, DTensor):
        raise NotImplementedError(f"{fqn!r} is a DTensor of tensors with all-gather hooks: quantize it after it was sharded")
    if block is not None or shard_dim not in (None, 0):
        raise ValueError(f"{fqn!r} has all-gather hooks of its own, and is sharded along dimension 0: no block, no other dimension")
    return True


def _shard_dim(
    fqn: str,
    param: nn.Parameter,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None,
    block: Block | None,
    parallel: Parallel | None,
) -> int | None:
    """The dimension along which the user wants the parameter to be sharded.

    Raises:
        ValueError: something else than a ``Shard`` or None; a block as well.
        NotImplementedError: of a DTensor.
    """
    placement = shard_placement_fn(param) if shard_placement_fn is not None else None
    if placement is None:
        return None
    if type(placement) is not Shard:
        raise ValueError(f"shard_placement_fn gave {placement!r} for {fqn!r}: it must return Shard(dim) or None")
    if block is not None:
        raise ValueError(f"{fqn!r} has {placement} from shard_placement_fn and {block} from block_policy: give it one of them")
    if parallel is not None:
        raise NotImplementedError(f"shard_placement_fn gave {placement} for {fqn!r}, which is a DTensor already: return None for it")
    return placement.dim


def _data_mesh(mesh: DeviceMesh | None, dims: DataParallelMeshDims) -> DeviceMesh:
    """The data-parallel part of a whole mesh: (shard,) or (replicate, shard)."""
    if mesh is None or mesh.mesh_dim_names is None:
        raise ValueError("dp_mesh_dims needs the whole mesh, with named dimensions, as mesh")
    for name in (*dims.shard_names, *dims.replicate_names):
        if name not in mesh.mesh_dim_names:
            raise ValueError(f"dp_mesh_dims names {name!r}, but the mesh has only {', '.join(mesh.mesh_dim_names)}")
    if not dims.shard_names:
        raise NotImplementedError("dp_mesh_dims without a dimension to shard over is plain data parallelism: use DDP or torch's replicate")
    shard = flattened(mesh, dims.shard_names)
    return DeviceMesh._concatenate([flattened(mesh, dims.replicate_names), shard]) if dims.replicate_names else shard


def _parallel(
    fqn: str, param: nn.Parameter, data_mesh: DeviceMesh, whole: DeviceMesh | None, dims: DataParallelMeshDims | None
) -> Parallel | None:
    """What is known of a parameter that is a DTensor already.

    Raises:
        ValueError: it is on a mesh that does not fit, or cut so that ranks have parts of different shapes.
    """
    if not isinstance(param, DTensor):
        if dims is not None:
            raise ValueError(f"with dp_mesh_dims every parameter must be a DTensor on the whole mesh, but {fqn!r} is a plain tensor")
        return None
    mesh, placements = param.device_mesh, param.placements
    data_dims: frozenset[int] = frozenset()
    model_mesh: DeviceMesh | None = mesh
    if dims is not None:
        if mesh != whole:
            raise ValueError(f"parameter {fqn!r} is on another mesh than the one given with dp_mesh_dims: {mesh}")
        names = mesh.mesh_dim_names or ()
        data_dims = frozenset(names.index(name) for name in (*dims.shard_names, *dims.replicate_names))
        left = tuple(name for i, name in enumerate(names) if i not in data_dims)
        model_mesh = mesh[left] if left else None
    else:
        try:
            DeviceMesh._concatenate([data_mesh, mesh])
        except (RuntimeError, AssertionError, TypeError) as error:
            raise ValueError(
                f"parameter {fqn!r} is a DTensor on {mesh}, which does not go with the data-parallel mesh {data_mesh}: take both from "
                f"one mesh, as init_device_mesh(.., mesh_dim_names=('dp', 'tp'))['dp'] and ['tp']"
            ) from error
    shape = list(param.shape)
    for i, placement in enumerate(placements):
        if i in data_dims and not placement.is_replicate():
            raise ValueError(f"parameter {fqn!r} has {placement} on a data-parallel dimension of its mesh: Replicate is needed there")
        if type(placement) is Shard:
            dim = placement.dim % len(shape)
            if shape[dim] % mesh.size(i):
                raise ValueError(
                    f"parameter {fqn!r} of shape {tuple(param.shape)} can't be cut evenly by {placement} over {mesh.size(i)} ranks: "
                    f"choose a size of dimension {dim} that they divide"
                )
            shape[dim] //= mesh.size(i)
        elif not placement.is_replicate():
            raise ValueError(f"parameter {fqn!r} has placement {placement}: only Shard and Replicate go with fully_shard")
    return Parallel(param._spec, data_dims, model_mesh)


def _reshard_after_forward(value: bool | int | None, shard_size: int) -> tuple[bool | None, int | None]:
    """Whether to reshard after forward, and to how many ranks if not to all."""
    if value is None or isinstance(value, bool):
        return value, None
    if not isinstance(value, int):
        raise ValueError(f"reshard_after_forward must be a bool, an int or None, not {value!r}")
    if value < 1 or value > shard_size or shard_size % value:
        raise ValueError(f"reshard_after_forward is {value}: as an int it must divide the shard size {shard_size}")
    return value != 1, value if 1 < value < shard_size else None


def _default_mesh() -> DeviceMesh:
    """All ranks, on the accelerator if there is one. As torch, initialises the default process group from the environment if need be."""
    if not dist.is_initialized():
        dist.init_process_group()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return init_device_mesh(accelerator.type if accelerator is not None else "cpu", (dist.get_world_size(),))


def _device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


def _move_buffers(managed: set[nn.Module], device: torch.device) -> None:
    for module in managed:
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device and not buffer.is_meta:
                module._buffers[name] = buffer.to(device)


def _hook_state_dict(unit: Unit, groups: list[Group]) -> None:
    """Saving and loading see the sharded parameters; after loading these are one buffer again."""
    unit_ref = weakref.ref(unit)
    holders = {id(m): m for group in groups for param in group.params for ref, _ in param.owners if (m := ref()) is not None}

    def to_sharded(what: str) -> None:
        owner = unit_ref()
        if owner is None:
            return
        if owner.phase is not Phase.RESTING:
            raise PhaseError(f"unit {owner.name!r} is in phase {owner.phase.value}: its state can't be {what} in the middle of a step")
        owner.reshard()

    def before_save(*_: Any) -> None:
        to_sharded("saved")

    def before_load(*_: Any) -> None:
        to_sharded("loaded")

    def after_load(*_: Any) -> None:
        owner = unit_ref()
        if owner is not None:
            for group in owner.groups:
                group.adopt()
                group.refresh()

    for holder in holders.values():
        holder.register_state_dict_pre_hook(before_save)
        holder.register_load_state_dict_pre_hook(before_load)
        holder.register_load_state_dict_post_hook(after_load)
