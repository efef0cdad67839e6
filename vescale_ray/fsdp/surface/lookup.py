"""Lookup of modules' units, and the check that a unit may be changed now."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, cast

from torch import nn

from vescale_ray.fsdp.construction.arguments import check_modules
from vescale_ray.fsdp.layouts.phases import Phase, PhaseError
from vescale_ray.fsdp.units.module_path import described
from vescale_ray.fsdp.units.schedule import unit_of
from vescale_ray.fsdp.units.unit import Unit


def sharded_unit(module: Any) -> Unit:
    unit = unit_of(module)
    if unit is None:
        raise AssertionError(f"{described(module)} has lost its sharding state: was it copied?")
    return unit


def units_below(module: Any, recurse: bool) -> Iterator[Unit]:
    seen: set[int] = set()
    for one in cast(nn.Module, module).modules() if recurse else [module]:
        unit = unit_of(one)
        if unit is not None and id(unit) not in seen:
            seen.add(id(unit))
            yield unit


def take_in_gradients(unit: Unit) -> None:
    """Accumulate gradients that were assigned to ``.grad`` (zero-bubble pipelines compute weight gradients separately)."""
    for group in unit.groups:
        for index, param in enumerate(group.params):
            if param.unsharded is not None and param.unsharded.grad is not None:
                group.grads.accumulate(index)


def prefetched(method: str, modules: Any) -> list[weakref.ref[Unit]]:
    """Return the units of ``modules``, which the method ``method`` was given.

    Raises:
        TypeError: ``modules`` is not a list.
        ValueError: a module is not sharded.
    """
    check_modules(method, modules)
    units = []
    for module in modules:
        unit = unit_of(module) if isinstance(module, nn.Module) else None
        if unit is None:
            raise ValueError(f"Expects FSDPModule but got {described(module)}: only what fully_shard was applied to can be prefetched")
        units.append(unit)
    return [weakref.ref(unit) for unit in units]


def resting_unit(module: Any, what: str) -> Unit:
    unit = sharded_unit(module)
    check_resting(unit, what)
    return unit


def check_resting(unit: Unit, what: str) -> None:
    if unit.phase is not Phase.RESTING:
        raise PhaseError(f"unit {unit.name!r} is in phase {unit.phase.value}: set its {what} between steps")
