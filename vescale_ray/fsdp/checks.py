"""Checks before a forward: are the model's parameters those that its units manage, and can they be used?"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY
from torch.distributed.tensor import DTensor

from vescale_ray.fsdp.parameters import GATHERED_OF, REPLACED, GroupParam
from vescale_ray.fsdp.phases import Residency

if TYPE_CHECKING:
    from vescale_ray.fsdp.group import Group
    from vescale_ray.fsdp.unit import Unit

_NAMES = "_vescale_parameter_names"


def remember_parameters(managed: Iterable[nn.Module], ignored: Collection[nn.Parameter]) -> None:
    """Note which parameters the modules have now, and which of these a unit manages. The others are ignored, as the user asked."""
    for module in managed:
        module.__dict__[_NAMES] = {name: param not in ignored for name, param in module._parameters.items() if param is not None}


def is_managed(module: nn.Module, name: str) -> bool:
    """Whether a unit manages the parameter that ``module`` holds under this name."""
    return bool(module.__dict__.get(_NAMES, {}).get(name))


def check_parameters(units: Sequence[Unit], root: nn.Module) -> list[nn.Module]:
    """Check that the parameters of ``root`` are those that the units manage, and those that were ignored.

    Cost: one pass over the modules, 0.3 us each.

    Args:
        units: those that share the root's schedule.
        root: the module whose forward starts.

    Returns:
        Modules below ``root`` that ``fully_shard`` was applied to after the first forward.

    Raises:
        ValueError: a parameter was replaced, removed or added after ``fully_shard``. The unit would use the old one, or each rank would
            train the new one alone.
    """
    for unit in units:
        for group in unit.groups:
            gathered = group.residency is Residency.UNSHARDED
            for param in group.params:
                expected = param.unsharded if gathered else param.sharded
                for ref, attribute in param.owners:
                    module = ref()
                    if module is not None and module._parameters.get(attribute) is not expected:
                        raise ValueError(_describe(param, module._parameters.get(attribute)))
    late, stack, seen = [], [root], set()
    while stack:
        module = stack.pop()
        if module in seen or "replicate" in module.__dict__.get(REGISTRY_KEY, ()):
            continue
        seen.add(module)
        unit = module.__dict__.get("_vescale_unit")
        if unit is not None and unit.schedule is None:
            late.append(module)
        if module._parameters:
            names = module.__dict__.get(_NAMES, ())
            for name, added in module._parameters.items():
                if added is not None and added.requires_grad and name not in names:
                    where = next((fqn for fqn, one in root.named_modules() if one is module), "")
                    raise ValueError(
                        f"parameter {f'{where}.{name}' if where else name!r} was added to the model after fully_shard, so each rank would "
                        f"train it alone: add it before fully_shard, or apply fully_shard to the {type(module).__name__} that holds it"
                    )
        stack.extend(module._modules.values())  # type: ignore[arg-type]
    return late


def _describe(param: GroupParam, installed: nn.Parameter | None) -> str:
    if installed is None:
        return (
            f"parameter {param.fqn!r} was removed from its module after fully_shard, which still manages it: remove it before fully_shard"
        )
    return (
        f"parameter {param.fqn!r} was replaced in its module after fully_shard, which still manages the old one: write into it (copy_() "
        f"without gradients, or load_state_dict), or replace it before fully_shard and build the optimizer afterwards"
    )


def check_replaced(units: Sequence[Unit]) -> None:
    """Check that no plain tensor was put in the place of a sharded parameter before the first forward.

    Raises:
        ValueError: one was. An optimizer that is built from it would train nothing.
    """
    for group in (group for unit in units for group in unit.groups):
        for param in group.params:
            if param.owners[0][0]() is None:
                continue
            installed = param.installed()
            ours = param.unsharded if group.residency is Residency.UNSHARDED else param.sharded
            if installed is not ours and param.tied is None and not isinstance(installed, DTensor):
                raise ValueError(_describe(param, installed))


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Check that ``optimizer`` holds sharded parameters where there are any.

    Raises:
        RuntimeError: it holds a gathered parameter, or one that a sharded one has replaced. Its steps would be lost.
    """
    for group in optimizer.param_groups:
        for held in group["params"]:
            marks = held.__dict__
            param = marks[GATHERED_OF]() if GATHERED_OF in marks else None
            if param is not None:
                raise RuntimeError(
                    f"{type(optimizer).__name__} holds the gathered parameter {param.fqn!r}, so its step would be lost: build the "
                    f"optimizer after reshard() on the module, or after backward"
                )
            if REPLACED in marks:
                raise RuntimeError(
                    f"{type(optimizer).__name__} holds a parameter of shape {tuple(held.shape)} that a sharded one has replaced, so its "
                    f"step would be lost: build the optimizer after fully_shard, from model.parameters()"
                )


def name_parameters(group: Group, fqns: dict[int, str]) -> None:
    for param in group.params:
        module, attribute = param.owners[0][0](), param.owners[0][1]
        prefix = fqns.get(id(module), "")
        param.fqn = f"{prefix}.{attribute}" if prefix else attribute


def check_tied(units: list[Unit]) -> None:
    """Modules that share a parameter have to be of one unit, and share it when that is made: it has one place in one buffer.

    Tied afterwards, it can have several if each rank has the same part of all of them, as with plain ``Shard`` placements.
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
                    f"them into one unit, as fully_shard([module_a, module_b]), or leave both to the root"
                )
            home = homes[id(installed)]
            if home is not param and not group.lodge(param, home):
                raise ValueError(
                    f"Parameter {param.fqn!r} is shared with a parameter already managed by another FSDP group: it was tied to "
                    f"{home.fqn!r} after fully_shard. Tie the modules first, then put them into one unit, as fully_shard([module_a, "
                    f"module_b])"
                )


def check_materialized(units: list[Unit]) -> None:
    for unit in units:
        on_meta = [param.fqn for group in unit.groups for param in group.params if param.sharded.is_meta]
        if on_meta:
            raise RuntimeError(
                f"FSDP parameters should be materialized from meta device before training, but the following were still on meta device: "
                f"{on_meta}; call module.to_empty(device=...) and set their values before the first forward"
            )


def check_hooks(units: list[Unit]) -> None:
    """All-gather hooks decide how a parameter is sharded, and can't come later."""
    for unit in units:
        for param in (param for group in unit.groups for param in group.params if not group.hooked):
            if hasattr(param.local, "fsdp_pre_all_gather"):
                raise RuntimeError(
                    f"parameter {param.fqn!r} got all-gather hooks after fully_shard: give it a tensor class with fsdp_pre_all_gather and "
                    f"fsdp_post_all_gather before"
                )
