"""advise: the simplest lever that brings a unit's padding below a goal, and remedies if no lever does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from vescale_ray.planner.models.shapes import UnitShape
from vescale_ray.planner.unit_plan import GOAL, Blocks, Lever, UnitPlan, plan_unit

TENSORS = 2500
"""Largest number of tensors in a unit that is tried; a larger unit would take seconds to plan."""


@dataclass(frozen=True)
class Advice:
    """Advice on a unit's padding at one group size.

    Attributes:
        best: the plan with the simplest lever below the goal; if there is none, the plan with the least padding.
        remedies: if no lever reaches the goal, one line for each change that does: a smaller group (HSDP), larger units, smaller
            blocks.
    """

    best: UnitPlan
    remedies: tuple[str, ...] = ()

    @property
    def reached(self) -> bool:
        return self.best.padding_ratio < GOAL


def advise(
    unit: UnitShape,
    num_shards: int,
    blocks: Blocks,
    *,
    dtype: torch.dtype = torch.bfloat16,
    most_layers: int = 4,
    strided: bool = True,
) -> Advice:
    """Try the levers, the cheapest first, until the padding is below :data:`GOAL`; if none is enough, look for remedies.

    Args:
        most_layers: largest number of layers per unit that are tried; gathered parameters take memory in proportion.
        strided: the model tolerates experts that are strided views.

    Cost: up to 16 plans of the unit, and as many for each remedy that is tried.
    """

    def reach(ranks: int, rule: Blocks, layers: range) -> Advice:
        return _first(unit, ranks, rule, dtype, layers, strided)

    found = reach(num_shards, blocks, range(1, most_layers + 1))
    if found.reached:
        return found
    remedies = []
    for group in _halves(num_shards):
        smaller = reach(group, blocks, range(1, most_layers + 1))
        if smaller.reached:
            copies = -(-num_shards // group)
            remedies.append(f"HSDP: shard over {group} ranks, replicate {copies} times: {_result(smaller)}")
            break
    larger = reach(num_shards, blocks, range(most_layers + 1, unit.count + 1))
    if larger.reached:
        size = larger.best.numel * dtype.itemsize / 2**30
        remedies.append(f"larger units: {_result(larger)}, {size:.0f} GiB gathered")
    for rows in _halves(blocks.rows or 0):
        finer = reach(num_shards, replace(blocks, rows=rows), range(1, most_layers + 1))
        if finer.reached:
            remedies.append(f"smaller blocks: {rows} rows: {_result(finer)}")
            break
    return replace(found, remedies=tuple(remedies))


def _first(unit: UnitShape, num_shards: int, blocks: Blocks, dtype: torch.dtype, layers: range, strided: bool) -> Advice:
    """Return the plan of the first lever whose padding is below the goal; if there is none, the plan with the least padding."""
    best: UnitPlan | None = None
    for lever in _levers(unit, blocks, layers, strided):
        plan = plan_unit(unit, num_shards, blocks, dtype=dtype, lever=lever)
        if best is None or plan.padding_ratio < best.padding_ratio:
            best = plan
        if plan.padding_ratio < GOAL:
            break
    if best is None:
        best = plan_unit(unit, num_shards, blocks, dtype=dtype)
    return Advice(best)


def _levers(unit: UnitShape, blocks: Blocks, layers: range, strided: bool) -> Iterator[Lever]:
    """Yield the levers, from those that cost nothing to those that cost memory."""
    stacked = any(len(p.shape) >= 3 and blocks.applies(p) for p in unit.params)
    for count in layers:
        if count > 1 and (count > unit.count or count * len(unit.params) > TENSORS or (count > 4 and unit.count % count)):
            continue
        yield Lever(count)
        yield Lever(count, "per block")
        if strided and stacked:
            yield Lever(count, "one", True)
            yield Lever(count, "per block", True)


def _halves(number: int) -> Iterator[int]:
    while number > 1:
        number //= 2
        yield number


def _result(advice: Advice) -> str:
    return f"{advice.best.padding_ratio:.1%} ({advice.best.lever})"
