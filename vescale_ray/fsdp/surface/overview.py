"""``explain(module)``: the place of every parameter, and the bytes that a step moves and holds."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn

from vescale_ray.fsdp.communication.low_precision import LowPrecisionReduceScatter
from vescale_ray.fsdp.construction.arguments import check_type
from vescale_ray.fsdp.groups.group import ParameterGroup
from vescale_ray.fsdp.layouts.phases import Retain
from vescale_ray.fsdp.layouts.wire import CodeWire
from vescale_ray.fsdp.units.module_path import described
from vescale_ray.fsdp.units.schedule import unit_of
from vescale_ray.fsdp.units.unit import Unit
from vescale_ray.planner.step_buffers import Travel, device_buffers, exchange_bytes, host_buffers

_RESHARD = {
    True: "reshards after forward",
    False: "stays gathered until backward",
    None: "reshards after forward unless it is the root",
}


@dataclass(frozen=True)
class ParameterReport:
    """Report on one parameter. Rank ``r`` holds the flat elements ``[start, end)`` of ``ranges[r]``. In the buffer, ``gap`` elements follow
    each of its matrices. ``form`` is the FP8 format that the all-gather sends, or empty."""

    name: str
    shape: tuple[int, ...]
    offset: int
    block: str
    ranges: tuple[tuple[int, int], ...]
    gap: int = 0
    form: str = ""


@dataclass(frozen=True)
class GroupReport:
    """Report on one group: a buffer, its all-gather and its reduce-scatter."""

    name: str
    dtype: str
    compute_dtype: str
    reduce_dtype: str
    trainable: bool
    ranks: int
    replicas: int
    shard_numel: int
    shard_bytes: int
    """Bytes that this rank sends in an all-gather."""
    scale_bytes: int
    """Bytes among them that are scales of FP8 tiles; 0 for a group that is gathered in the compute dtype."""
    gathered_bytes: int
    padding_ratio: float
    optimal: bool
    fingerprint: str
    parameters: tuple[ParameterReport, ...]
    notes: tuple[str, ...]
    """One line for each block that is larger than its tensor."""


@dataclass(frozen=True)
class UnitReport:
    """Report on one unit, which one ``fully_shard`` call made."""

    name: str
    reshard_after_forward: bool | None
    subgroup_size: int | None
    """Number of neighbours that keep the parameters between forward and backward; None: no subgroup."""
    groups: tuple[GroupReport, ...]


@dataclass(frozen=True)
class Explanation:
    """The result of :func:`explain`; print it. Units are in the order of ``named_modules``."""

    units: tuple[UnitReport, ...]
    memory: dict[str, int]
    """Bytes of this rank at the peak of a step, by kind: ``master``, ``codes`` and ``casts`` (kept between steps), ``gathered``,
    ``gradients`` (shards), ``gradient_buffers``, ``optimizer``. The prediction assumes that units run in this order, and leaves out
    activations."""

    @property
    def parameter_count(self) -> int:
        return sum(max((end for _, end in p.ranges), default=0) for u in self.units for g in u.groups for p in g.parameters)

    @property
    def shard_bytes(self) -> int:
        """Bytes of the master weights on one rank."""
        return sum(g.shard_numel * _itemsize(g.dtype) for u in self.units for g in u.groups)

    def __str__(self) -> str:
        lines = [f"{len(self.units)} units, {self.parameter_count:,} parameters, {_size(self.shard_bytes)} of them on each rank"]
        kinds = ", ".join(f"{_size(nbytes)} {kind.replace('_', ' ')}" for kind, nbytes in self.memory.items() if nbytes)
        lines.append(f"at the peak of a step {_size(sum(self.memory.values()))} and activations: {kinds}")
        for unit in self.units:
            kept = f", to groups of {unit.subgroup_size} ranks" if unit.subgroup_size else ""
            lines.append(f"unit {unit.name}: {_RESHARD[unit.reshard_after_forward]}{kept}")
            for g in unit.groups:
                dtypes = g.dtype
                if not g.dtype == g.compute_dtype == g.reduce_dtype:
                    dtypes = f"{g.dtype} -> {g.compute_dtype}, reduced in {g.reduce_dtype}"
                ranks = f"{g.ranks} ranks" + (f" x {g.replicas} replicas" if g.replicas > 1 else "")
                sent = f"{ranks} x {_size(g.shard_bytes)} = {_size(g.gathered_bytes)} gathered"
                if any(p.form for p in g.parameters):
                    codes = f"{_size(g.shard_bytes - g.scale_bytes)} codes and {_size(g.scale_bytes)} scales"
                    sent = f"{ranks} x ({codes}) dequantized to {_size(g.gathered_bytes)}"
                lines.append(
                    f"  group of {len(g.parameters)} {'' if g.trainable else 'frozen '}parameters, {dtypes}: "
                    f"{sent}, {g.padding_ratio:.2%} padding{' (least possible)' if g.optimal else ''}"
                )
                for p in g.parameters:
                    held = "  ".join(f"{r}:[{a},{b})" for r, (a, b) in enumerate(p.ranges) if b > a)
                    shown = held if len(held) < 90 else held[:87] + "..."
                    gap = f"a gap of {p.gap} elements behind each matrix  " if p.gap else ""
                    form = f"{p.form}  " if p.form else ""
                    lines.append(f"    {p.offset:>10}  {p.name}  {list(p.shape)}  {p.block}  {form}{gap}{shown}")
                lines += [f"    {note}" for note in g.notes]
        return "\n".join(lines)


def explain(module: nn.Module, *, state_bytes: float | None = None) -> Explanation:
    """Report how ``module`` is sharded: units, groups, bytes, padding, order in the buffer, each rank's elements, and a step's memory.

    Args:
        state_bytes: bytes of optimizer state per trainable element; None: two states in the parameter's dtype, as in AdamW.

    Raises:
        TypeError: ``module`` is not a module.
        ValueError: neither the module nor a module below it was given to ``fully_shard``.
    """
    check_type("module", module, nn.Module, "the model itself")
    units, seen, own = [], set(), []
    for name, one in module.named_modules():
        unit = unit_of(one)
        if unit is not None and id(unit) not in seen:
            seen.add(id(unit))
            own.append(unit)
            subgroup = next((g.subgroup.size for g in unit.groups if g.subgroup is not None), None)
            units.append(UnitReport(name or "(root)", unit.options.reshard_after_forward, subgroup, tuple(_group(g) for g in unit.groups)))
    if not units:
        raise ValueError(f"{described(module)} is not sharded: apply fully_shard first")
    return Explanation(tuple(units), _memory(own, unit_of(module), state_bytes))


def held_bytes(module: nn.Module) -> dict[str, int]:
    """Return the bytes of this rank by kind. Their sum is the peak memory of the steps so far, without activations and optimizer states.

    ``parameters``: elements of the shards. ``gradients``: elements of their shards, which exist from backward to
    the optimizer's step. ``padding``: the rest of these shards. ``codes``, ``casts``: FP8 codes and scales of the shards, and casts of the
    shards (``keep_cast``), kept between steps.
    ``buffers``: peak bytes of gathered parameters and gradient buffers since the first step.
    """
    found = dict.fromkeys(("parameters", "gradients", "padding", "codes", "casts", "buffers"), 0)
    pools: dict[int, int] = {}
    units = {id(unit): unit for unit in map(unit_of, module.modules()) if unit is not None}
    for unit in units.values():
        if unit.lanes is not None:
            pools[id(unit.lanes.pool)] = unit.lanes.pool.peak_bytes
        for group in unit.groups:
            own, kept, item = sum(p.local.numel() for p in group.params), group.division.kept, group.orig_dtype.itemsize
            trained = group.grads.trainable_count > 0
            found["parameters"] += own * item
            found["gradients"] += own * item * trained
            found["codes"] += _code_bytes(group)
            found["casts"] += _cast_bytes(group)
            found["padding"] += (kept.numel - own) * item * (1 + trained)
    return {**found, "buffers": sum(pools.values())}


def _memory(units: list[Unit], root: Unit | None, state_bytes: float | None) -> dict[str, int]:
    groups = [group for unit in units for group in unit.groups]

    def travel(group: ParameterGroup) -> Travel:
        reduced = group.grads.trainable_count and not group.grads.in_place
        start, end = group.gathered.stays
        arrives, wide = group.grads.buffer_dtype, group.reduce_dtype
        cast, sent = group.layout.numel * wide.itemsize if reduced and arrives != wide else 0, group.grads.buffer_bytes if reduced else 0
        received = group.gathered.parts_bytes if group.gathered.wire.apart else 0
        exchange, custom, world = 0, group.grads.custom_scatter, group.place.world
        if reduced and isinstance(custom, LowPrecisionReduceScatter):
            cast, exchange = 0, exchange_bytes(group.division.part_numel, world, custom.wire)
        return Travel(group.gathered.nbytes, sent, end - start, cast, group.grads.staging, world, received, exchange)

    def travels(unit: Unit) -> list[Travel]:
        return [travel(group) for group in unit.groups if not group.in_place]

    def stays(unit: Unit) -> bool:
        if any(group.retain is Retain.ALL for group in unit.groups):
            return True
        return unit is root if unit.options.reshard_after_forward is None else not unit.options.reshard_after_forward

    passing = [unit for unit in units if not stays(unit)]
    staying = [travel for unit in units if stays(unit) for travel in travels(unit)]
    inside = [{id(module) for one in _modules(unit) for module in one.modules()} for unit in passing]
    depths = [sum(id(_modules(unit)[0]) in modules for modules in inside) - 1 for unit in passing]
    buffers = host_buffers if groups and groups[0].place.device.type == "cpu" else device_buffers
    gathered, gradients = buffers([travels(unit) for unit in passing], staying, depths)
    trained = [g for g in groups if g.grads.trainable_count]
    return {
        "master": sum(g.division.kept.numel * g.orig_dtype.itemsize for g in groups if not g.offload),
        "codes": sum(_code_bytes(g) for g in groups if not g.offload),
        "casts": sum(_cast_bytes(g) for g in groups),
        "gathered": gathered,
        "gradients": sum(g.division.kept.numel * g.orig_dtype.itemsize for g in trained if not g.offload),
        "gradient_buffers": gradients,
        "optimizer": round(
            sum(
                p.local.numel() * (2.0 * g.orig_dtype.itemsize if state_bytes is None else state_bytes)
                for g in trained
                for p in g.params
                if p.sharded.requires_grad and p.home is None and not g.offload
            )
        ),
    }


def _modules(unit: Unit) -> list[nn.Module]:
    return [module for ref in unit.modules if (module := ref()) is not None]


def _code_bytes(group: ParameterGroup) -> int:
    """Return the bytes of the codes and scales that this rank keeps between steps."""
    wire = group.gathered.wire
    return wire.parts.part_bytes if isinstance(wire, CodeWire) else 0


def _cast_bytes(group: ParameterGroup) -> int:
    """Return the bytes of the cast of its shard that this rank keeps between steps."""
    wire = group.gathered.wire
    return wire.part_bytes(group.compute_dtype) if wire.keeps_cast and group.casts else 0


def _group(group: ParameterGroup) -> GroupReport:
    layout = group.layout
    specs, wire = {spec.name: spec for spec in layout.specs}, group.gathered.wire
    parts = wire.parts if isinstance(wire, CodeWire) else None
    parameters = tuple(
        ParameterReport(
            name,
            specs[name].shape,
            layout.offsets[name],
            str(group.division.placement(name))
            if group.division.copies
            else str(specs[name].block)
            if specs[name].block
            else f"cut at {layout.granularity[name]}",
            group.division.ranges(name),
            math.prod(layout.stored_shape(name)[-2:]) - math.prod(specs[name].shape[-2:]),
            str(parts.forms[name]) if parts is not None else "",
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
        shard_numel=group.division.part_numel,
        shard_bytes=wire.part_bytes(group.compute_dtype),
        scale_bytes=parts.scale_bytes if parts is not None else 0,
        gathered_bytes=group.gathered.nbytes,
        padding_ratio=layout.padding_ratio,
        optimal=layout.optimal,
        fingerprint=layout.fingerprint,
        parameters=parameters,
        notes=tuple(dict.fromkeys((*layout.notes, *(parts.notes if parts is not None else ())))),
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
