"""Select the modules of a model that become units."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from typing import Literal

from torch import nn


def select_units(model: nn.Module, patterns: Sequence[str] | Literal["auto"]) -> list[nn.Module]:
    """Return the modules whose dotted name matches a pattern part by part, children first. ``layers.*`` matches ``layers.0``, not
    ``layers.0.ffn``.

    ``auto`` stands for the blocks of the outermost lists of modules (``nn.ModuleList``, or an ``nn.ModuleDict`` of one class).

    Raises:
        ValueError: a pattern, which the message names, matches nothing; the model has no list of modules; or two units share a parameter.
    """
    units = _selected(model, patterns)
    # Children come first in the list, and the innermost unit of a module counts.
    unit_of = {id(inner): unit for unit in reversed(units) for inner in unit.modules()}
    held: dict[int, tuple[nn.Module | None, str]] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                here = (unit_of.get(id(module)), f"{path}.{name}")
                there = held.setdefault(id(parameter), here)
                if there[0] is not here[0]:
                    remedy = "choose model.units so that one unit, or none, has both"
                    raise ValueError(f"model.units: {there[1]} and {here[1]} are one parameter in two units; {remedy}")
    return units


def _selected(model: nn.Module, patterns: Sequence[str] | Literal["auto"]) -> list[nn.Module]:
    if patterns == "auto":
        blocks = list(_blocks(model))
        if not blocks:
            there = ", ".join(name for name, _ in model.named_children())
            raise ValueError(
                f"model.units = auto: {type(model).__name__} has no list of modules; name its blocks, among its modules {there}"
            )
        return blocks
    named = [(name.split("."), module) for name, module in model.named_modules() if name]
    found: dict[int, tuple[int, nn.Module]] = {}
    for pattern in patterns:
        parts = pattern.split(".")
        hits = [(n, m) for n, m in named if len(n) == len(parts) and all(map(fnmatch.fnmatchcase, n, parts))]
        if not hits:
            raise ValueError(f"model.units: {pattern!r} matches no module; the model has {', '.join(n for n, _ in model.named_children())}")
        found.update((id(module), (len(name), module)) for name, module in hits)
    return [module for _, module in sorted(found.values(), key=lambda item: -item[0])]


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if _is_list(child):
            yield from (block for block in child.children() if any(True for _ in block.parameters()))
        else:
            yield from _blocks(child)


def _is_list(module: nn.Module) -> bool:
    children = list(module.children())
    if isinstance(module, nn.ModuleDict):
        return len(children) > 1 and len({type(child) for child in children}) == 1
    return isinstance(module, nn.ModuleList) and bool(children)
