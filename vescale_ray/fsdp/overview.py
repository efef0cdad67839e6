"""explain(module): where every parameter lives, what a step moves and holds."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn

from vescale_ray.fsdp.group import Group
from vescale_ray.fsdp.schedule import unit_of

_RESHARD = {
    True: "reshards after forward",
    False: "stays gathered until backward",
    None: "reshards after forward unless it is the root",
}


@dataclass(frozen=True)
class ParameterReport:
    """One parameter. ``ranges[r]`` are its flat elements ``[start, end)`` that rank ``r`` holds; ``gap`` elements lie behind each of
    its matrices in the buffer."""

    name: str
    shape: tuple[int, ...]
    offset: int
    block: str
    ranges: tuple[tuple[int, int], ...]
    gap: int = 0


@dataclass(frozen=True)
class GroupReport:
    """One group: a buffer, its all-gather and its reduce-scatter."""

    name: str
    dtype: str
    compute_dtype: str
    reduce_dtype: str
    trainable: bool
    ranks: int
    replicas: int
    shard_numel: int
    shard_bytes: int
    """What this rank sends in an all-gather."""
    gathered_bytes: int
    padding_ratio: float
    optimal: bool
    fingerprint: str
    parameters: tuple[ParameterReport, ...]


@dataclass(frozen=True)
class UnitReport:
    """One ``fully_shard`` call."""

    name: str
    reshard_after_forward: bool | None
    subgroup_size: int | None
    """After forward the parameters are kept by so many neighbours together, if not by all ranks of the shard group."""
    groups: tuple[GroupReport, ...]


@dataclass(frozen=True)
class Report:
    """Print it. Units are in the order of ``named_modules``."""

    units: tuple[UnitReport, ...]

    @property
    def parameter_count(self) -> int:
        return sum(max((end for _, end in p.ranges), default=0) for u in self.units for g in u.groups for p in g.parameters)

    @property
    def shard_bytes(self) -> int:
        """Of the master weights on one rank."""
        return sum(g.shard_numel * _itemsize(g.dtype) for u in self.units for g in u.groups)

    def __str__(self) -> str:
        lines = [f"{len(self.units)} units, {self.parameter_count:,} parameters, {_size(self.shard_bytes)} of them on each rank"]
        for unit in self.units:
            kept = f", to groups of {unit.subgroup_size} ranks" if unit.subgroup_size else ""
            lines.append(f"unit {unit.name}: {_RESHARD[unit.reshard_after_forward]}{kept}")
            for g in unit.groups:
                dtypes = g.dtype
                if not g.dtype == g.compute_dtype == g.reduce_dtype:
                    dtypes = f"{g.dtype} -> {g.compute_dtype}, reduced in {g.reduce_dtype}"
                ranks = f"{g.ranks} ranks" + (f" x {g.replicas} replicas" if g.replicas > 1 else "")
                lines.append(
                    f"  group of {len(g.parameters)} {'' if g.trainable else 'frozen '}parameters, {dtypes}: "
                    f"{ranks} x {_size(g.shard_bytes)} = {_size(g.gathered_bytes)} gathered, "
                    f"{g.padding_ratio:.2%} padding{' (least possible)' if g.optimal else ''}"
                )
                for p in g.parameters:
                    held = "  ".join(f"{r}:[{a},{b})" for r, (a, b) in enumerate(p.ranges) if b > a)
                    shown = held if len(held) < 90 else held[:87] + "..."
                    gap = f"a gap of {p.gap} elements behind each matrix  " if p.gap else ""
                    lines.append(f"    {p.offset:>10}  {p.name}  {list(p.shape)}  {p.block}  {gap}{shown}")
        return "\n".join(lines)


def explain(module: nn.Module) -> Report:
    """Report how ``module`` is sharded: units, groups, bytes, padding, order in the buffer, and which rank holds what.

    Raises:
        ValueError: no ``fully_shard`` was applied to the module or below it.
    """
    units, seen = [], set()
    for name, one in module.named_modules():
        unit = unit_of(one)
        if unit is not None and id(unit) not in seen:
            seen.add(id(unit))
            subgroup = next((g.subgroup.size for g in unit.groups if g.subgroup is not None), None)
            units.append(UnitReport(name or "(root)", unit.reshard_after_forward, subgroup, tuple(_group(g) for g in unit.groups)))
    if not units:
        raise ValueError(f"{type(module).__name__} is not sharded: apply fully_shard first")
    return Report(tuple(units))


def _group(group: Group) -> GroupReport:
    layout = group.layout
    specs = {spec.name: spec for spec in layout.specs}
    parameters = tuple(
        ParameterReport(
            name,
            specs[name].shape,
            layout.offsets[name],
            str(specs[name].block) if specs[name].block else f"cut at {layout.granularity[name]}",
            tuple(layout.tensor_range(name, rank) for rank in range(layout.num_shards)),
            math.prod(layout.stored_shape(name)[-2:]) - math.prod(specs[name].shape[-2:]),
        )
        for name in layout.order
    )
    return GroupReport(
        name=group.name,
        dtype=_short(group.orig_dtype),
        compute_dtype=_short(group.compute_dtype),
        reduce_dtype=_short(group.reduce_dtype),
        trainable=group.grads.trainable_count > 0,
        ranks=group.place.world,
        replicas=group.place.replicas,
        shard_numel=layout.shard_numel,
        shard_bytes=layout.shard_numel * group.compute_dtype.itemsize,
        gathered_bytes=group.unsharded_bytes,
        padding_ratio=layout.padding_ratio,
        optimal=layout.optimal,
        fingerprint=layout.fingerprint,
        parameters=parameters,
    )


def _short(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _itemsize(dtype: str) -> int:
    import torch

    return int(getattr(torch, dtype).itemsize)


def _size(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")
