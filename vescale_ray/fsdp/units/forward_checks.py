"""Checks before a forward: the model's parameters are those that its units manage, and they can be used."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from vescale_ray.compat.core import global_optimizer_pre_hooks
from vescale_ray.compat.fsdp import REGISTRY_KEY
from vescale_ray.dtensor.operations.schema import SHARDED_OF, parameter_name, plain_is_whole
from vescale_ray.fsdp.layouts.group_parameter import REPLACED, GroupParam, gathered_of, local_of
from vescale_ray.fsdp.layouts.phases import Residency
from vescale_ray.fsdp.layouts.shared_memory import sharded_in
from vescale_ray.fsdp.layouts.wire import CodeWire

if TYPE_CHECKING:
    from vescale_ray.fsdp.groups.group import ParameterGroup
    from vescale_ray.fsdp.units.unit import Unit

_NAMES = "_vescale_parameter_names"


def is_replicated(module: nn.Module) -> bool:
    """True if torch's ``replicate`` was applied to this module itself; its parameters must not be sharded then."""
    return "replicate" in module.__dict__.get(REGISTRY_KEY, ())


def remember_parameters(managed: Iterable[nn.Module], ignored: Collection[nn.Parameter]) -> None:
    """Record the parameters of the modules, and whether a unit manages each one. A unit manages all but the ``ignored`` ones."""
    for module in managed:
        module.__dict__[_NAMES] = {name: param not in ignored for name, param in module._parameters.items() if param is not None}


def check_ignored(roots: Iterable[nn.Module], ignored: Collection[nn.Parameter]) -> None:
    """Warn about ignored parameters that an earlier call has sharded already."""
    sharded = {
        id(param): f"{path}.{name}" if path else name
        for root in roots
        for path, module in (root.named_modules() if ignored else ())
        for name, param in module._parameters.items()
        if is_managed(module, name)
    }
    for param in ignored:
        if id(param) in sharded or REPLACED in param.__dict__:
            warnings.warn(
                f"ignored_params holds {_told(param, sharded.get(id(param)))}, which an earlier fully_shard has sharded already: give it "
                f"to that call, too",
                UserWarning,
                stacklevel=3,
            )


def check_all_ignored(units: Sequence[Unit], root: nn.Module) -> None:
    """Warn about ignored parameters that are not in the model, and were not when ``fully_shard`` was called."""
    held = {id(param) for param in root.parameters()}
    held.update(id(param) for unit in units for param, inside in unit.options.ignored.items() if inside)
    for unit in units:
        ignored, unit.options.ignored = unit.options.ignored, {}
        for param in ignored:
            if id(param) not in held and REPLACED not in param.__dict__:
                warnings.warn(
                    f"ignored_params of unit {unit.name!r} holds {_told(param)}, which is not in the model: give parameters that the "
                    f"model has when fully_shard is called",
                    UserWarning,
                    stacklevel=2,
                )


def _told(param: nn.Parameter, name: str | None = None) -> str:
    return f"parameter {name!r}" if name else f"a parameter of shape {tuple(param.shape)} and {param.dtype}"


def is_managed(module: nn.Module, name: str) -> bool:
    """True if a unit manages the parameter that ``module`` holds under this name."""
    return bool(module.__dict__.get(_NAMES, {}).get(name))


def check_parameters(units: Sequence[Unit], root: nn.Module) -> list[nn.Module]:
    """Check that the parameters of ``root`` are those that the units manage, and those that were ignored.

    Cost: one pass over the modules, 0.3 us each.

    Args:
        units: the units that share the root's schedule.
        root: the module whose forward starts.

    Returns:
        Modules below ``root`` that ``fully_shard`` was applied to after the first forward.

    Raises:
        ValueError: a parameter was replaced, removed or added after ``fully_shard``. The unit would use the old one, or each rank would
            train the new one alone.
    """
    for unit in units:
        check_managed(unit)
    late, stack, seen = [], [root], set()
    while stack:
        module = stack.pop()
        attributes = module.__dict__
        if id(module) in seen or (REGISTRY_KEY in attributes and is_replicated(module)):
            continue
        seen.add(id(module))
        own: Unit | None = attributes.get("_vescale_unit")
        if own is not None and own.schedule is None:
            late.append(module)
        names = attributes.get(_NAMES, ())
        for name, added in attributes["_parameters"].items():
            if name not in names and added is not None and added.requires_grad:
                where = next((f"{fqn}." for fqn, one in root.named_modules() if one is module and fqn), "")
                alone = own is None and not names and type(module).forward is not nn.Module.forward  # a list of parameters has none
                holder = f"the {type(module).__name__} that holds it" if alone else "a module of its own whose forward uses it"
                how = (
                    f"added to the model after fully_shard, so each rank would train it alone: add it before fully_shard, or apply "
                    f"fully_shard to {holder}"
                )
                originals = f"{where}parametrizations.{name}."
                if any(param.fqn.startswith(originals) for unit in units for group in unit.groups for param in group.params):
                    how = "made of its parametrization after fully_shard, which still manages the originals: remove parametrizations before"
                raise ValueError(f"parameter {where + name!r} was {how}")
        children = attributes["_modules"]
        if children:
            stack.extend(child for child in children.values() if child is not None)
    return late


def check_managed(unit: Unit) -> None:
    """Check that the modules hold the parameters that ``unit`` manages. Adopt values that were assigned to ``.data``.

    Raises:
        ValueError: a parameter was replaced, removed, or cast without the others of its group; or a value assigned to ``.data`` is lost.
    """
    for group in unit.groups:
        gathered, moved = group.residency is Residency.UNSHARDED, False
        for param in group.params:
            sharded = param.sharded
            expected = param.unsharded if gathered else sharded
            moved = moved or param.moved
            for held, attribute in param.slots:
                if held.get(attribute) is not expected:
                    raise ValueError(_describe(param, held.get(attribute)))
            if param.lost_data():
                raise ValueError(
                    f"a tensor was assigned to .data of parameter {param.fqn!r}, but torch's DTensor keeps its old values: write them with "
                    f"parameter.data.copy_(value), or shard it without shard_placement_fn and plain_shards"
                )
        if moved and not gathered:
            group.adopt()  # param.data = value has replaced the local tensor
            check_alike(group)


def check_alike(group: ParameterGroup) -> None:
    """Check that ``group`` has adopted its parameters, which it can't if they have several dtypes or devices.

    Raises:
        ValueError: some of them were cast or moved after ``fully_shard``, and others were not.
    """
    if group.residency is not Residency.SHARDED:
        return
    for param in group.params:
        now = param.sharded
        if local_of(now) is not param.kept and (now.dtype, now.device) != (param.kept.dtype, param.kept.device):
            raise ValueError(
                f"parameter {param.fqn!r} was changed from {param.kept.dtype} on {param.kept.device} to {now.dtype} on {now.device} after "
                f"fully_shard, and other parameters of unit {group.fqn or 'the root'!r} were not: change all parameters of the unit, or "
                f"change this one before fully_shard"
            )


def _describe(param: GroupParam, installed: nn.Parameter | None) -> str:
    if installed is None:
        return (
            f"parameter {param.fqn!r} was removed from its module after fully_shard, which still manages it: remove it, or parametrize or "
            f"prune it, before fully_shard"
        )
    return (
        f"parameter {param.fqn!r} was replaced in its module after fully_shard, which still manages the old one: write into it (copy_() "
        f"without gradients, or load_state_dict), or replace it before fully_shard and build the optimizer afterwards; functional_call, "
        f"which replaces parameters for a forward, is not supported"
    )


def check_replaced(units: Sequence[Unit]) -> None:
    """Check that the places of sharded parameters hold sharded parameters at the first forward.

    Raises:
        ValueError: a plain tensor is there, so an optimizer built from it would train nothing; or a tensor that is no parameter is there,
            which ``functional_call`` puts there for one forward.
    """
    for group in (group for unit in units for group in unit.groups):
        for param in group.params:
            if param.owners[0][0]() is None:
                continue
            installed = param.installed()
            ours = param.unsharded if group.residency is Residency.UNSHARDED else param.sharded
            if installed is ours or param.tied is not None:
                continue
            if not isinstance(installed, DTensor) or not isinstance(installed, nn.Parameter):
                raise ValueError(_describe(param, installed))


def check_optimizer(optimizer: torch.optim.Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Check that ``optimizer``, which is about to step, holds sharded parameters if there are any. Cost: 0.2 us per parameter.

    Args:
        args: the optimizer, and the arguments of its step. A closure, or a hook of the optimizer's, may yet change the gradients.

    Raises:
        RuntimeError: it holds a gathered parameter, or one that a sharded parameter has replaced. Its steps would be lost.
        ValueError: it is one of torch's, which would stop at a sharded parameter whose gradient is a plain tensor, after it had changed
            others.
    """
    if torch.compiler.is_compiling():
        return
    last = not (optimizer._optimizer_step_pre_hooks or any(one is not None for one in (*args[1:], *kwargs.values())))
    looks = last and type(optimizer).__module__.startswith("torch.optim") and not plain_is_whole()
    for group in optimizer.param_groups:
        for held in group.get("params", ()):
            if looks and SHARDED_OF in held.__dict__ and not isinstance(gradient := held.grad, DTensor) and gradient is not None:
                _refuse_plain(held, gradient)
            param = gathered_of(held)
            if param is not None:
                raise RuntimeError(
                    f"{type(optimizer).__name__} holds the gathered parameter {param.fqn!r}, so its step would be lost: build the "
                    f"optimizer after reshard() on the module, or after backward"
                )
            if REPLACED in held.__dict__:
                raise RuntimeError(
                    f"{type(optimizer).__name__} holds the original of parameter {held.__dict__[REPLACED]!r} of shape {tuple(held.shape)}, "
                    f"which a sharded one has replaced, so its step would be lost: build the optimizer after fully_shard and "
                    f"load_state_dict(assign=True), from model.parameters()"
                )


def _refuse_plain(held: torch.Tensor, gradient: torch.Tensor) -> None:
    """Raise ValueError if the gradient of a sharded parameter is a plain tensor with dimensions."""
    if gradient.ndim:
        raise ValueError(
            f"the gradient of parameter {parameter_name(held)!r} is a plain tensor of shape {tuple(gradient.shape)}, but the parameter is "
            f"sharded: set it to vescale_ray.distribute_tensor(gradient, parameter.device_mesh, parameter.placements)"
        )


def name_parameters(group: ParameterGroup, fqns: dict[int, str]) -> None:
    """Give the group's parameters their full names. ``fqns``: the modules' names, by ``id``."""
    for param in group.params:
        module, attribute = param.owners[0][0](), param.owners[0][1]
        if module is not None:  # if it has left the model, the parameter keeps the name it had
            prefix = fqns.get(id(module), "")
            param.fqn = f"{prefix}.{attribute}" if prefix else attribute
    if isinstance(group.gathered.wire, CodeWire):
        group.gathered.wire.fqns = {param.name: param.fqn for param in group.params}


def check_tied(units: list[Unit]) -> None:
    """Check that modules that share a parameter are in one unit: the parameter has one place in one buffer.

    Parameters tied after sharding may be in several units if each rank has the same part of all of them, as with plain ``Shard``.
    """
    homes: dict[int, GroupParam] = {}
    for group in (group for unit in units for group in unit.groups):
        for param in group.params:
            installed = param.installed()
            if installed is not None and (installed is param.sharded or id(installed) not in homes):
                homes[id(installed)] = param
    for group in (group for unit in units for group in unit.groups):
        for param in group.params:
            installed = param.installed()
            if installed is None:
                continue
            if param.tied is not None and installed is param.tied:
                raise ValueError(
                    f"Parameter {param.fqn!r} is shared with a parameter already managed by another FSDP group: the modules are tied. Put "
                    f"all that hold it into one unit with fully_shard([module_a, module_b]), or leave all of them to the root"
                )
            home = homes[id(installed)]
            if home is not param and (group.hooked or not param.tie_to(home)):
                raise ValueError(
                    f"Parameter {param.fqn!r} is shared with a parameter already managed by another FSDP group: it was tied to "
                    f"{home.fqn!r} after fully_shard. Tie the modules first, then put them into one unit with fully_shard([module_a, "
                    f"module_b])"
                )
    check_memory([param for unit in units for group in unit.groups for param in group.params])


def check_memory(params: Sequence[GroupParam]) -> None:
    """Check that no two parameters of a model shared memory before ``fully_shard``, unless both are frozen or were replaced since."""
    mine = {id(param): param for param in params}
    for param in params:
        for other in (mine.get(id(ref())) for ref in param.sharers):
            if other is None or param.installed() is other.installed() or not (param.sharded.requires_grad or other.sharded.requires_grad):
                continue
            raise ValueError(
                f"parameters {other.fqn!r} and {param.fqn!r} shared memory before fully_shard, which gives each its own shards: tie them "
                f"as one parameter of one unit (head.weight = embedding.weight), or give one its own memory (weight.data.clone())"
            )


def warn_of_shared_buffers(units: Sequence[Unit], module: nn.Module) -> None:
    """Warn of buffers below ``module`` that shared memory with a trained parameter before ``fully_shard``: they no longer follow it."""
    mine = {id(param): param for unit in units for group in unit.groups for param in group.params}
    for name, buffer in module.named_buffers():
        for param in filter(None, (mine.get(id(ref())) for ref in sharded_in(buffer))):
            if param.sharded.requires_grad:
                warnings.warn(
                    f"buffer {name!r} shared memory with parameter {param.fqn!r} before fully_shard, and keeps the values of that time: "
                    f"compute with the parameter instead, or give the buffer its own memory (.clone()) if that is meant",
                    stacklevel=2,
                )


def adopt_parameters(units: Sequence[Unit]) -> None:
    """Make the parameters that the modules hold before the first gather those of the units.

    Raises:
        RuntimeError: some of them are on the meta device.
        ValueError: some of a group were cast or moved, and others were not.
    """
    for unit in units:
        for group in unit.groups:
            group.adopt()
    for unit in units:
        on_meta = [param.fqn for group in unit.groups for param in group.params if param.sharded.is_meta]
        if on_meta:
            raise RuntimeError(
                f"FSDP parameters should be materialized from meta device before training, but the following were still on meta device: "
                f"{on_meta}; call module.to_empty(device=...) and set their values before the first forward"
            )
        for group in unit.groups:
            check_alike(group)


def check_hooks(units: list[Unit]) -> None:
    """Check that no parameter got all-gather hooks after sharding: they decide how it is sharded."""
    for unit in units:
        for param in (param for group in unit.groups for param in group.params if not group.hooked):
            if hasattr(param.local, "fsdp_pre_all_gather"):
                raise RuntimeError(
                    f"parameter {param.fqn!r} got all-gather hooks after fully_shard: give it a tensor class with fsdp_pre_all_gather and "
                    f"fsdp_post_all_gather before"
                )


def refuse_tracing(unit: Unit) -> None:
    """Raise RuntimeError if torch records this forward for ``torch.export`` or ``torch.jit.trace``, which can't record collectives."""
    if torch.compiler.is_exporting() or torch.jit.is_tracing():
        raise whole_model_needed("torch.export" if torch.compiler.is_exporting() else "torch.jit.trace", unit.name)


def whole_model_needed(what: str, name: str) -> RuntimeError:
    """Return the error of a tool that records a model's forward, which would leave out the collectives of a sharded one."""
    return RuntimeError(
        f"{what} of a sharded model ({name!r}): load its whole state dict (vescale_ray.state_dict.get_model_state_dict with "
        f"full_state_dict=True) into the plain model, and {what.rpartition('.')[2]} that"
    )


global_optimizer_pre_hooks[-2] = check_optimizer
