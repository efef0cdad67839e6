"""Estimate of the time of a step on one rank, and the bytes that the rank sends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from vescale_ray.planner.cost import ModelPlan, PlannedUnit, Policy, layers_of, predict_memory
from vescale_ray.planner.hardware import Hardware, collective_time, exchange_time
from vescale_ray.planner.step_buffers import reduction_calls, wire_bytes


@dataclass(frozen=True)
class Time:
    """Seconds of a step on one rank, and the bytes that the rank sends."""

    compute: float
    gather: float
    reduce: float
    replicate: float
    """All-reduce of gradient shards over the replicas (HSDP)."""
    exchange: float
    """All-to-alls of the rows of experts that ranks share."""
    update: float
    """The optimizer step: reads and writes of memory. Muon communicates, too, unless the layout keeps each matrix on one rank."""
    exposed: float
    """Communication that no computation hides."""
    sent: int

    @property
    def step(self) -> float:
        return self.compute + self.exposed + self.update


@dataclass(frozen=True)
class _UnitTime:
    """Seconds of one unit in a step, by kind, and the bytes that a rank sends. ``again``: the all-gather in backward."""

    forward: float
    backward: float
    gather: float
    again: float
    reduce: float
    replicate: float
    sent: int


def predict_time(plan: ModelPlan, policy: Policy, hardware: Hardware, replicas: int = 1) -> Time:
    """Estimate the time of a step of one micro-batch.

    A matrix product costs 2 operations per active parameter and token in forward, 4 in backward, and 2 more if it is recomputed. A
    unit's part is its share of the active parameters; the embedding is a lookup and costs nothing. Parameters are gathered for forward
    and again for backward, while the unit before computes; each time the rank casts its shard first. Gradients are reduced while the next
    unit of the backward computes. A unit's communication that its computation does not hide is exposed. The first gather and the last
    reduction are exposed, too.

    If ranks share experts, a layer sends the rows of its tokens to them and back, in forward, in its recomputation, and in backward.
    Nothing hides that, nor the experts' all-gather in backward, which starts when backward reaches them.
    """
    compute = gather = reduce = replicate = exchange = exposed = ends = 0.0
    sent = 0
    for index, layer in enumerate(layers_of(plan)):
        count = layer[0][0].count
        outer, *inner = costs = [_unit_time(groups, plan, policy, hardware, replicas, is_first=not index) for groups in layer]
        late = sum(c.again for c in inner)
        gathers, reductions = sum(c.gather for c in costs), sum(c.reduce + c.replicate for c in costs)
        forward, backward = sum(c.forward for c in costs), sum(c.backward for c in costs)
        rows, rows_sent = _exchange(layer[-1][0], plan, policy, hardware)
        compute += count * (forward + backward)
        gather += count * (gathers + outer.again + late)
        reduce += count * sum(c.reduce for c in costs)
        replicate += count * sum(c.replicate for c in costs)
        exchange += count * rows
        exposed += count * (max(0.0, gathers - forward) + max(0.0, outer.again + reductions - backward) + late)
        sent += count * (sum(c.sent for c in costs) + rows_sent)
        ends = ends if index else gathers + reductions
    exposed = min(exposed + ends, gather + reduce + replicate) + exchange
    # The update reads and writes master, gradients and states once.
    memory = predict_memory(plan, policy)
    update = 2 * (memory.master + memory.optimizer + memory.gradients // 2) / hardware.memory_bandwidth
    if policy.optimizer == "muon" and plan.blocks.rows != 0:
        matrices_time, matrices_sent = _muon(plan, hardware)
        update += matrices_time
        sent += matrices_sent
    return Time(compute, gather, reduce, replicate, exchange, update, exposed, sent)


def _unit_time(
    groups: Sequence[PlannedUnit], plan: ModelPlan, policy: Policy, hardware: Hardware, replicas: int, *, is_first: bool
) -> _UnitTime:
    """Return the times of a unit. ``is_first``: the unit is the model's first one. If it holds only embeddings, it computes no products."""
    trained, ranks, stride = [u for u in groups if u.trainable], groups[0].group, groups[0].shares.parts
    idle = plan.model.numel - plan.model.active
    experts = max(1, sum(u.all_experts_numel * u.count for u in plan.units if _has_experts(u)))
    lookup = is_first and all(p.kind == "embedding" for u in groups for p in u.unit.params)
    forward = backward = 0.0
    for u in groups:
        own = u.all_experts_numel - (round(idle * u.all_experts_numel / experts) if _has_experts(u) else 0)
        product = 0.0 if lookup else 2 * own * policy.tokens / (hardware.flops * hardware.efficiency)
        forward += product
        backward += (2 if u.trainable else 1) * product + (product if policy.recompute else 0.0)
    part = sum(sum(u.part_bytes(policy.compute_dtype)) for u in groups)
    gather = collective_time(part * ranks, ranks, hardware, rank_bytes=part, stride=stride)
    cast = sum(_cast_time(u, policy, hardware) for u in groups)
    again = 0.0 if groups[0].resident else gather + cast * (not policy.keep_cast)
    gather += cast
    sent = (1 if groups[0].resident else 2) * part * (ranks - 1)
    reduce = across = 0.0
    if trained:
        wide, shards = policy.reduce_dtype.itemsize, [u.plan.shard_numel for u in trained]
        if policy.fp8_gradients:
            part = sum(wire_bytes(numel) for numel in shards)
            reduce = exchange_time(part * ranks, ranks, replace(hardware, node=max(1, hardware.node // stride)))
        else:
            part = sum(shards) * wide
            calls = reduction_calls(part * ranks, policy.compute_dtype, policy.reduce_dtype, policy.staging)
            reduce = calls * collective_time(part * ranks / calls, ranks, hardware, rank_bytes=part, stride=stride)
        apart = min(plan.group, hardware.node)
        buffers = [b for u in trained for b in u.plan.buffers]
        across = sum(2 * collective_time(b.shard_numel * wide, replicas, hardware, stride=apart) for b in buffers)
        sent += part * (ranks - 1) + 2 * sum(shards) * wide * (replicas - 1) // replicas
    return _UnitTime(forward, backward, gather, again, reduce, across, sent)


def _cast_time(unit: PlannedUnit, policy: Policy, hardware: Hardware) -> float:
    """Return the seconds in which a rank reads its shard and writes the cast that an all-gather sends."""
    written = unit.cast_bytes(policy)
    read = unit.plan.shard_numel * policy.shard_dtype(trainable=unit.trainable).itemsize
    return (read + written) / hardware.memory_bandwidth if written else 0.0


def _has_experts(unit: PlannedUnit) -> bool:
    return any(p.kind == "expert" for p in unit.unit.params)


def _exchange(unit: PlannedUnit, plan: ModelPlan, policy: Policy, hardware: Hardware) -> tuple[float, int]:
    """Return the seconds and the sent bytes of a layer's all-to-alls, if every expert computes equally many rows."""
    parts = unit.shares.parts
    rows = policy.tokens * plan.model.top_k * plan.model.hidden * policy.compute_dtype.itemsize
    calls = 6 if policy.recompute else 4
    return calls * exchange_time(rows, parts, hardware), calls * rows * (parts - 1) // parts


def _muon(plan: ModelPlan, hardware: Hardware) -> tuple[float, int]:
    """Return the seconds and the sent bytes of Muon's exchanges: one sends momentum to the matrix's root rank and another returns the
    update, both in BF16."""
    numels: Counter[int] = Counter()
    for u in plan.units:
        if any(p.kind in ("matrix", "expert") for p in u.unit.params):
            numels[u.group] += u.unit.numel * u.plan.lever.layers * u.count
    seconds, sent = 0.0, 0
    for ranks, numel in numels.items():
        part = 2 * numel // ranks * (ranks - 1) // ranks
        seconds += 2 * collective_time(part * ranks, ranks, hardware) / max(1, min(ranks, hardware.node))
        sent += 2 * part
    return seconds, sent
