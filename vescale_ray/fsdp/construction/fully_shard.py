"""``fully_shard``, ``register_fsdp_forward_method`` and ``share_comm_ctx``."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from vescale_ray.compat.fsdp import DataParallelMeshDims
from vescale_ray.fsdp.buffers.lanes import Lanes
from vescale_ray.fsdp.construction.arguments import (
    Arguments,
    BlockPolicy,
    QuantizePolicy,
    check_flag,
    check_modules,
    check_type,
    device_of,
    ignored_of,
    managed_modules,
    unit_modules,
)
from vescale_ray.fsdp.construction.collect import collect
from vescale_ray.fsdp.construction.data_parallel import data_parallel_ranks
from vescale_ray.fsdp.construction.grouping import plan_groups
from vescale_ray.fsdp.groups.group import ParameterGroup
from vescale_ray.fsdp.groups.hooked import HookedGroup
from vescale_ray.fsdp.layouts.group_parameter import REPLACED, GroupParam, GroupPlan, OriginalParameter
from vescale_ray.fsdp.layouts.phases import Phase, PhaseError
from vescale_ray.fsdp.layouts.sharding import Sharding, ShardingPlan
from vescale_ray.fsdp.surface.module import FSDPModule, sharded_class
from vescale_ray.fsdp.surface.state_dict_hooks import watch_state_dicts
from vescale_ray.fsdp.surface.torch_state import leave_state, state_of
from vescale_ray.fsdp.units.arrivals import listen
from vescale_ray.fsdp.units.forward_checks import check_ignored, name_parameters, remember_parameters
from vescale_ray.fsdp.units.marks import watch_modules
from vescale_ray.fsdp.units.module_path import described
from vescale_ray.fsdp.units.schedule import Schedule, unit_of
from vescale_ray.fsdp.units.unit import Unit
from vescale_ray.fsdp.units.unit_options import UnitOptions


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
    quantize_policy: QuantizePolicy | None = None,
    allow_gaps: bool | Callable[[str, nn.Parameter], bool] = False,
    sharding: Sharding | None = None,
    keep_cast: bool = False,
    to_empty: bool = False,
) -> Any:
    """Shard a module's parameters, gradients and optimizer states over the data-parallel ranks, in place.

    Every argument of ``torch.distributed.fsdp.fully_shard`` keeps its meaning. Apply it bottom-up, and build the optimizer afterwards.
    Each call makes one *unit* of the parameters that no earlier call took. Parameters of a unit with one dtype and one ``requires_grad``
    form one *group* with one buffer. If one buffer needs more than 3 % and 1 MiB of padding, and several need less, the unit splits the
    group. The unit's groups are gathered in one call, and reduced in one.

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
        quantize_policy: ``(name, parameter) -> Fp8Block | None``: the FP8 format that the all-gather sends; None: the compute dtype.
            Each rank quantizes its shard once per optimizer step, and sends codes and scales. They are dequantized into the unit's
            buffer, so forward and backward compute in the compute dtype, and gradients ignore the rounding. No shard boundary cuts a
            tile; a block that ``block_policy`` gives stays whole, too.
        allow_gaps: whether stacks of matrices ``[.., n, m]`` (fused experts) may be gathered with a constant gap behind each matrix, if
            that saves padding: True, or ``(name, parameter) -> bool``. Such a parameter is a strided view in forward, with contiguous
            matrices: ``bmm``, indexing and grouped products work, ``view(-1)`` does not. Its sharded form is like
            any other. :func:`explain` shows the gaps.
        sharding: mesh dimensions over which parameters, gradients and optimizer states are sharded, of a named mesh of any size:
            DDP, ZeRO-1, 2, 3, HSDP with or without a sharded optimizer; None: all of them over the last dimension.
        keep_cast: whether each rank keeps the copy of its shard that the all-gather sends: in the compute dtype, and on the device if the
            shard is offloaded. It is then made once per optimizer step and not once per all-gather. No effect where all-gathers send the
            shard itself or FP8 codes, with ZeRO-1 and 2, or with one rank.
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
    roots, ignored = unit_modules(module), ignored_of(ignored_params)
    check_ignored(roots, ignored)
    given = Arguments(
        mesh=mesh,
        reshard_after_forward=reshard_after_forward,
        shard_placement_fn=shard_placement_fn,
        mp_policy=mp_policy,
        offload_policy=offload_policy,
        ignored_params=ignored,
        dp_mesh_dims=dp_mesh_dims,
        block_policy=block_policy,
        quantize_policy=quantize_policy,
        allow_gaps=allow_gaps,
        sharding=sharding,
        keep_cast=check_flag("keep_cast", keep_cast),
        to_empty=check_flag("to_empty", to_empty),
    )
    ranks, axes = data_parallel_ranks(given)
    managed = managed_modules(roots)
    parameters = collect(roots, managed, given, ranks)
    plans = plan_groups(parameters, given, axes)
    _build(roots, managed, plans, given, axes)
    return module


def _warn_of_gradients(sources: Sequence[OriginalParameter]) -> None:
    names = [source.name for source in sources if _has_gradient(source.param)]
    if names:
        more = f" and {len(names) - 4} more" if names[4:] else ""
        warnings.warn(
            f"parameters {', '.join(names[:4])}{more} have gradients, which fully_shard drops: call fully_shard before the first backward, "
            f"or zero_grad() if they are of no use",
            UserWarning,
            stacklevel=4,
        )


def _has_gradient(param: nn.Parameter) -> bool:
    grad = param.grad
    return grad is not None and not grad.is_meta and (grad.layout is not torch.strided or bool((grad != 0).any()))


def _build(
    roots: Sequence[nn.Module], managed: Collection[nn.Module], plans: Sequence[GroupPlan], given: Arguments, axes: ShardingPlan
) -> None:
    """Build the groups of ``plans`` and the unit, and put them into the modules."""
    device, name = device_of(axes.mesh), type(roots[0]).__name__
    groups = [
        (HookedGroup if plan.sources[0].hooked else ParameterGroup)(name, plan, given.offload_policy, device, to_empty=given.to_empty)
        for plan in plans
    ]
    classes = [sharded_class(type(root)) for root in roots]  # type: ignore[arg-type]

    # All checks have passed and all memory is allocated: from here on the model changes.
    _move_buffers(managed, device)
    for group in groups:
        group.install()
    sources = [source for plan in plans for source in plan.sources]
    _warn_of_gradients(sources)
    params = {param.name: param for group in groups for param in group.params}
    for source in sources:
        # The model no longer uses the original. The mark lets optimizers and tied modules that still hold it raise a clear error.
        source.param.__dict__[REPLACED] = source.name
        if source.param.requires_grad:
            sharded = weakref.ref(params[source.name])
            source.param.register_post_accumulate_grad_hook(functools.partial(_refuse_gradient, sharded, source.name))

    inside = {id(param) for root in roots for param in root.parameters()}
    ignored = {param: id(param) in inside for param in given.ignored_params}
    options = UnitOptions(given.resharding(axes.mesh)[0], hold_gradients=axes.hold, ignored=ignored)
    unit = Unit(roots, groups, given.mp_policy, options, device, Schedule.start)
    listen(unit)
    for root, cls in zip(roots, classes, strict=True):
        root.__dict__["_vescale_unit"] = unit
        leave_state(root, unit)
        root.__class__ = cls  # type: ignore[assignment]
    watch_modules(unit, managed)
    remember_parameters(managed, given.ignored_params)
    for one in managed:
        one._is_fsdp_managed_module = True  # type: ignore[assignment]  # torch.compile looks for this
        one._fsdp_use_orig_params = True  # type: ignore[assignment]
    watch_state_dicts(unit)
    if len(roots) == 1:
        _name_parameters_below(roots[0])


def _name_parameters_below(root: nn.Module) -> None:
    """Give parameters of units below ``root`` their names in ``root``, for errors before its first forward. So far they have those in
    their unit."""
    fqns = {id(module): fqn for fqn, module in root.named_modules()}
    for unit in {unit for module in root.modules() if (unit := unit_of(module)) is not None and unit.schedule is None}:
        for group in unit.groups:
            name_parameters(group, fqns)


def _refuse_gradient(sharded: weakref.ref[GroupParam], name: str, _param: torch.Tensor) -> None:
    param = sharded()
    raise RuntimeError(
        f"the original of parameter {name if param is None else param.fqn!r} got a gradient, but fully_shard has replaced it: a list, a "
        f"closure or another model still holds it, with values that never change. Read the parameter from its module, or fill the list "
        f"after fully_shard"
    )


def _move_buffers(managed: Collection[nn.Module], device: torch.device) -> None:
    for module in managed:
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device and not buffer.is_meta:
                module._buffers[name] = buffer.to(device)


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
        raise ValueError(f"{described(module)} does not have a method {method_name!r}: give the name of one")
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
            raise ValueError(f"Expects list of FSDPModules but got {described(module)}: apply fully_shard to it before share_comm_ctx")
        if unit.phase is not Phase.RESTING or (unit.schedule is not None and unit.schedule.running):
            raise PhaseError(f"unit {unit.name!r} is in the middle of a step: call share_comm_ctx before or after it")
        units.append(unit)
    if units:
        lanes = units[0].lanes or Lanes(units[0].device)
        for unit in units:
            unit.lanes = lanes
            if unit.schedule is not None:
                unit.schedule.share(lanes)
