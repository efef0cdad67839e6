"""choose_sharding: pick the shard group, replicas, layers per unit and buffers, and say why the others lose."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vescale_ray.errors import BadInput
from vescale_ray.planner.advice import advise
from vescale_ray.planner.cost import Memory, ModelPlan, Policy, check_experts, plan_model, predict_memory
from vescale_ray.planner.hardware import HARDWARE, Hardware
from vescale_ray.planner.models.model_shapes import model_shapes
from vescale_ray.planner.models.shapes import ModelShapes
from vescale_ray.planner.step_buffers import check_staging
from vescale_ray.planner.step_time import Time, predict_time
from vescale_ray.planner.unit_plan import GOAL, Blocks, Lever

if TYPE_CHECKING:
    from torch import nn

SAME = 0.02
"""Options whose step times differ by less than this fraction count as equally fast; the one with less memory wins."""
PAYS = 0.005
"""Fraction of a step's time from which it pays to keep the casts of shards."""


@dataclass(frozen=True)
class Option:
    """One way to shard the model."""

    group: int
    replicas: int
    blocks: Blocks
    lever: Lever
    plan: ModelPlan
    memory: Memory
    time: Time
    usual_blocks: Blocks
    """The policy's default requirement; the option's name leaves it out."""
    reason: str
    """Reason for the rejection or the choice."""

    @property
    def padding_ratio(self) -> float:
        return self.plan.padding_ratio

    def __str__(self) -> str:
        ranks = f"{self.group} ranks" + (f" x {self.replicas} replicas" if self.replicas > 1 else "")
        rule = "" if self.blocks == self.usual_blocks else f", blocks: {self.blocks}"
        return ranks + rule + ("" if str(self.lever) == "plain" else f", {self.lever}")


@dataclass(frozen=True)
class Choice:
    """The result of :func:`choose_sharding`.

    Attributes:
        best: the fastest option that fits; None if none does.
        options: all options, the best first; those that fit by step time, then those that do not by memory.
        notes: further facts: blocks larger than tensors, experts' rows that no block divides, remedies if nothing fits.
    """

    model: ModelShapes
    devices: int
    hardware: Hardware
    policy: Policy
    best: Option | None
    options: tuple[Option, ...]
    notes: tuple[str, ...]


def choose_sharding(
    model: str | Path | dict[str, Any] | ModelShapes | nn.Module,
    num_devices: int,
    hardware: str | Hardware = "h100",
    policy: Policy = Policy(),  # noqa: B008 (frozen)
    *,
    groups: Sequence[int] | None = None,
    levers: Sequence[Lever] | None = None,
) -> Choice:
    """Pick the shard group size, HSDP replication, layers per unit and buffers by cost, and say why the others lose.

    Every option is planned in full: padding, memory and bytes come from real layouts. Times are estimates
    (:mod:`vescale_ray.planner.step_time`).

    Args:
        model: a model as for :func:`vescale_ray.planner.models.model_shapes.model_shapes`, or its result.
        num_devices: total number of devices; the group sizes tried are its divisors, from one node (or fewer devices) on.
        hardware: a name of :data:`vescale_ray.planner.hardware.HARDWARE`, or a description.
        policy: how the model is trained.
        groups: the group sizes to try; by default at most about a dozen.
        levers: the ways to lay out units that are tried; by default all that fit the policy.

    Raises:
        BadInput: there are no devices, the hardware is unknown, a group does not divide the devices, the largest group's chunks do
            not fit the staging buffers, or the ranks cannot share the model's experts; one line.
    """
    shapes = model if isinstance(model, ModelShapes) else model_shapes(model)
    if num_devices < 1:
        raise BadInput(f"{num_devices} devices: give at least 1")
    if isinstance(hardware, str):
        if hardware not in HARDWARE:
            raise BadInput(f"hardware {hardware!r} is unknown: use one of {', '.join(HARDWARE)}")
        hardware = HARDWARE[hardware]
    for group in groups or ():
        if group < 1 or num_devices % group:
            raise BadInput(f"a shard group of {group} does not divide {num_devices} devices: use a divisor")
    if policy.expert_parallel > 1:
        for ranks in groups or (num_devices,):
            check_experts(shapes, ranks, policy.expert_parallel)
    sizes = sorted(groups) if groups else _group_sizes(num_devices, hardware.node, policy.expert_parallel)
    if policy.staging is not None:
        check_staging(policy.staging, sizes[-1])

    options = []
    for blocks, group in itertools.product(policy.block_options, sizes):
        stacked = any(len(p.shape) >= 3 and blocks.applies(p) for u in shapes.units for p in u.params)
        for lever in levers or _levers(policy, shapes, stacked=stacked, constrained=blocks.any):
            dtype, shared = policy.compute_dtype, policy.expert_parallel
            plan = plan_model(shapes, group, blocks, lever, dtype=dtype, codes=policy.codes, expert_parallel=shared)
            memory = predict_memory(plan, policy)
            time = predict_time(plan, policy, hardware, num_devices // group)
            options.append(Option(group, num_devices // group, blocks, lever, plan, memory, time, policy.block_options[0], ""))
    return _judge(shapes, num_devices, hardware, policy, options)


def _group_sizes(devices: int, node: int, multiple: int = 1) -> list[int]:
    """Return the sizes of shard groups to try: divisors of ``devices`` that fill at least one node, and multiples of ``multiple``.

    If there are more than 12, about 12 stay: powers of two, and large fractions of the devices.
    """
    divisors = [d for d in range(1, min(devices, 1 << 20) + 1) if devices % d == d % multiple == 0]
    large = [d for d in divisors if d >= min(node, devices)]
    if len(large) > 12:
        power = [d for d in large if d & (d - 1) == 0 or devices // d in (1, 2, 3, 4)]
        large = power[-12:] if len(power) >= 4 else large[:: -(-len(large) // 12)] + [devices]
    return sorted(set(large))


def _levers(policy: Policy, shapes: ModelShapes, *, stacked: bool, constrained: bool) -> list[Lever]:
    levers = []
    most = max((u.count for u in shapes.units), default=1)
    crowded = max((len(u.params) for u in shapes.units if u.count > 1), default=1)
    for layers in (1, 2, 4):
        if layers > min(policy.layers, most) or (layers > 1 and crowded * layers > 2000):
            continue
        levers.append(Lever(layers))
        if constrained:
            levers.append(Lever(layers, "per block"))
            if stacked and policy.strided:
                levers += [Lever(layers, "one", True), Lever(layers, "per block", True)]
    return levers


def _judge(shapes: ModelShapes, devices: int, hardware: Hardware, policy: Policy, options: list[Option]) -> Choice:
    room = round(hardware.memory * (1 - policy.reserve))
    fitting = [o for o in options if o.memory.total <= room]
    best: Option | None = None
    if fitting:
        fastest = min(o.time.step for o in fitting)
        alike = [o for o in fitting if o.time.step <= fastest * (1 + SAME)]
        # Among equally fast options, prefer the simplest lever that keeps padding low, then the least memory.
        best = min(alike, key=lambda o: (o.padding_ratio >= GOAL, *_complexity(o.lever), o.memory.total))
    judged = [replace(o, reason=_reason(o, best, room, alone=len(fitting) == 1)) for o in options]
    chosen = next((o for o in judged if best is not None and (o.group, o.lever, o.blocks) == (best.group, best.lever, best.blocks)), None)
    over = [o for o in judged if o.memory.total > room]
    judged = sorted((o for o in judged if o.memory.total <= room), key=lambda o: (o is not chosen, o.time.step, o.group, str(o.lever)))
    judged += sorted(over, key=lambda o: (o.memory.total, o.group, str(o.lever)))
    notes = (*_notes(chosen, judged, room, policy), *_casts(chosen, room, policy, hardware))
    return Choice(shapes, devices, hardware, policy, chosen, tuple(judged), notes)


def _reason(option: Option, best: Option | None, room: int, *, alone: bool) -> str:
    if option is best:
        return "the only one that fits" if alone else "the fastest that fits (within 2 %), the simplest of these"
    if option.memory.total > room or best is None:
        return f"needs {_gib(option.memory.total)} of {_gib(room)}: mostly {_largest(option.memory)}"
    slower = option.time.step / best.time.step - 1
    if option.padding_ratio >= GOAL > best.padding_ratio:
        return f"{option.padding_ratio:.1%} padding, {slower:+.1%} time"
    if slower > SAME:
        return f"{slower:+.1%} time: more for {_cause(option.time, best.time)}"
    if _complexity(option.lever) > _complexity(best.lever):
        return f"no faster ({slower:+.1%}), and more complicated"
    return f"no faster ({slower:+.1%}), and {_gib(option.memory.total)} of memory against {_gib(best.memory.total)}"


def _complexity(lever: Lever) -> tuple[int, bool, bool]:
    return lever.layers, lever.buffers != "one", lever.strided


def _notes(best: Option | None, options: list[Option], room: int, policy: Policy) -> tuple[str, ...]:
    if best is None:
        others = "tensor or expert parallelism" if policy.expert_parallel == 1 else "tensor parallelism"
        least = min(options, key=lambda o: o.memory.total)
        missing = least.memory.total - room
        kinds = least.memory.by_kind()
        if max(kinds, key=lambda kind: kinds[kind]) == "gradient_buffers" and policy.reduce_dtype.itemsize > 2:
            first = "gradients reduced in BF16, smaller units"
        else:
            first = "fewer tokens per device" if policy.recompute else "recompute activations"
        return (
            f"nothing fits: the least is {_gib(least.memory.total)} with {least}, {_gib(missing)} too much, mostly "
            f"{_largest(least.memory)}; {first}, more devices, {others}, or an optimizer with smaller states",
        )
    notes = [note for unit in best.plan.units for note in unit.plan.notes]
    for unit in best.plan.units:
        small = unit.plan.shard_numel * unit.count < 0.05 * best.plan.shard_numel
        if unit.coded is not None or unit.plan.padding_ratio < GOAL or small:
            continue
        advice = advise(
            unit.unit, unit.group, best.blocks, dtype=policy.compute_dtype, most_layers=policy.layers, strided=policy.strided
        )
        ways = advice.remedies or (f"{advice.best.padding_ratio:.1%} with {advice.best.lever}",)
        notes.append(f"{unit.plan.name}: {unit.plan.padding_ratio:.1%} of padding; {'; or '.join(ways)}")
    return tuple(dict.fromkeys(notes))


def _casts(best: Option | None, room: int, policy: Policy, hardware: Hardware) -> Iterator[str]:
    """Yield a note if keeping the casts of shards pays, or does not though the policy asks for it."""
    if best is None or best.group == 1:
        return
    other = replace(policy, keep_cast=not policy.keep_cast)
    memory, time = predict_memory(best.plan, other), predict_time(best.plan, other, hardware, best.replicas)
    faster, larger = (best.time.step - time.step) / best.time.step, memory.total - best.memory.total
    if not policy.keep_cast and faster >= PAYS and memory.total <= room:
        yield f"keep_cast takes {faster:.1%} of a step's time away, for {_gib(larger)} of casts that are kept"
    if policy.keep_cast and -faster < PAYS:
        yield f"keep_cast saves only {max(0.0, -faster):.1%} of a step's time, and takes {_gib(-larger)}: leave it out if memory is short"


def _largest(memory: Memory) -> str:
    kind, size = max(memory.by_kind().items(), key=lambda item: item[1])
    return f"{kind.replace('_', ' ')} ({_gib(size)})"


def _cause(time: Time, best: Time) -> str:
    """Name the part of the step that grew most over the best option."""
    grown = {
        "gathering parameters": time.gather - best.gather,
        "reducing gradients": time.reduce - best.reduce,
        "summing gradients over the replicas": time.replicate - best.replicate,
        "exchanging rows of experts": time.exchange - best.exchange,
        "the optimizer's update": time.update - best.update,
    }
    return max(grown, key=lambda part: grown[part])


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
