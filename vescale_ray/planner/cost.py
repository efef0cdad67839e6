"""Cost of a sharding: memory on each rank by kind, bytes sent and time of a step.

The memory of the engine's own tensors is exact: a test compares it with running ranks. The note at the head of
``vescale_ray/fsdp/__init__.py`` lists these tensors. Activations and times are estimates from the formulas below.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Literal

import torch

from vescale_ray.errors import BadInput
from vescale_ray.geometry import Block
from vescale_ray.planner.codes import Codes
from vescale_ray.planner.hardware import Hardware, collective_time
from vescale_ray.planner.models.shapes import ModelShapes, UnitShape
from vescale_ray.planner.step_buffers import (
    HOST_MAPPED_BYTES,
    Travel,
    arrival_dtype,
    check_staging,
    device_buffers,
    host_buffers,
    reduction_calls,
)
from vescale_ray.planner.units import Blocks, Lever, UnitPlan, plan_coded, plan_unit

Optimizer = Literal["adamw", "adamw8bit", "muon", "sgd"]
OPTIMIZERS: tuple[Optimizer, ...] = ("adamw", "adamw8bit", "muon", "sgd")


@dataclass(frozen=True)
class Policy:
    """The training setup of a model.

    Attributes:
        tokens: tokens per device and micro-batch.
        compute_dtype: dtype in which parameters are computed with, and gathered unless ``quantize`` says otherwise.
        quantize: tile of the FP8 codes as which matrices and experts are gathered (``train.quantize``); None: none are. Embeddings, head,
            vectors and routers are gathered in ``compute_dtype``.
        scale_bytes: bytes of a tile's scale: 4, or 1 for a power of two.
        recompute: backward recomputes the activations of a layer; only the layer's input is kept.
        blocks: the block requirement; None: the one that the optimizer and the dtype need.
        staging: bytes of each of the two buffers in which a reduction casts gradients; None: the engine's default.
        strided: the model tolerates experts that are strided views.
        most_layers: the most layers per unit.
        reserve: fraction of the device's memory that is left free (context, fragmentation, communication library).
    """

    optimizer: Optimizer = "adamw"
    tokens: int = 8192
    compute_dtype: torch.dtype = torch.bfloat16
    master_dtype: torch.dtype = torch.float32
    reduce_dtype: torch.dtype = torch.float32
    recompute: bool = True
    blocks: Blocks | None = None
    staging: int | None = None
    strided: bool = False
    most_layers: int = 4
    reserve: float = 0.1
    quantize: Block | None = None
    scale_bytes: int = 4

    def __post_init__(self) -> None:
        if self.compute_dtype.itemsize == 1:
            raise BadInput(f"compute_dtype {self.compute_dtype}: give torch.bfloat16, and quantize=Block.tile(128, 128) for FP8 gathers")
        if self.quantize is not None and self.quantize.kind != "tile":
            raise BadInput(f"quantize {self.quantize}: give a tile, as Block.tile(128, 128)")
        if self.optimizer not in OPTIMIZERS:
            raise BadInput(f"optimizer {self.optimizer!r} is unknown: use one of {', '.join(OPTIMIZERS)}")
        if self.tokens < 1:
            raise BadInput(f"{self.tokens} tokens per device: give at least 1")
        if self.staging is not None:
            check_staging(self.staging, 1)

    @property
    def codes(self) -> Codes | None:
        """Format of FP8 gathers."""
        return None if self.quantize is None else Codes(self.quantize, self.scale_bytes)

    @property
    def block_options(self) -> tuple[Blocks, ...]:
        """The given block requirement, or those that the optimizer allows, the default first."""
        if self.blocks is not None:
            return (self.blocks,)
        if self.optimizer == "adamw8bit":
            # 8-bit Adam's default block of 1024 elements in memory order, or bands of 32 rows.
            return (Blocks(elements=1024), Blocks(32))
        # Muon needs whole matrices: the update sends them to one rank, or the layout keeps each on one rank.
        return (Blocks(), Blocks(0)) if self.optimizer == "muon" else (Blocks(),)


@dataclass(frozen=True)
class PlannedUnit:
    """``count`` consecutive units with the same plan.

    ``resident``: the unit stays gathered from its forward to its backward, as the engine does with the root.
    """

    plan: UnitPlan
    unit: UnitShape
    count: int
    resident: bool
    trainable: bool
    coded: Codes | None = None
    """Format in which the unit is gathered; None: the compute dtype."""

    @cached_property
    def _coded_bytes(self) -> tuple[int, ...]:
        return () if self.coded is None else tuple(self.coded.part_bytes(layout) for layout in self.plan.buffers)

    def part_bytes(self, compute: torch.dtype) -> tuple[int, ...]:
        """Bytes that a rank sends in an all-gather of each buffer."""
        return self._coded_bytes or tuple(layout.shard_numel * compute.itemsize for layout in self.plan.buffers)


@dataclass(frozen=True)
class ModelPlan:
    """All units of a model, planned over one shard group."""

    model: ModelShapes
    group: int
    blocks: Blocks
    lever: Lever
    units: tuple[PlannedUnit, ...]

    @property
    def padding_ratio(self) -> float:
        """Padding of the whole model as a fraction of its parameters."""
        total = sum(u.plan.tensor_numel * u.count for u in self.units)
        return sum((u.plan.numel - u.plan.tensor_numel) * u.count for u in self.units) / total if total else 0.0

    @property
    def shard_numel(self) -> int:
        return sum(u.plan.shard_numel * u.count for u in self.units)


def plan_model(
    model: ModelShapes,
    group: int,
    blocks: Blocks = Blocks(),  # noqa: B008 (frozen)
    lever: Lever = Lever(),  # noqa: B008
    *,
    dtype: torch.dtype = torch.bfloat16,
    codes: Codes | None = None,
) -> ModelPlan:
    """Plan every unit over ``group`` ranks, ``lever.layers`` layers at a time; the remaining layers form a smaller unit.

    Frozen and trainable parameters of a unit form separate groups, and so do those that are gathered as FP8 ``codes``, as in the engine.
    """
    units: list[PlannedUnit] = []
    for unit in model.units:
        for trainable, coded in itertools.product((True, False), (True, False)):
            params = tuple(p for p in unit.params if p.trainable == trainable and (codes is not None and p.quantizable) == coded)
            if not params:
                continue
            part = replace(unit, params=params)
            layers = min(lever.layers, unit.count)
            for size, count in ((layers, unit.count // layers), (unit.count % layers, 1)):
                if not size or not count:
                    continue
                if coded and codes is not None:
                    plan = plan_coded(part, group, blocks, codes.tile, size)
                else:
                    plan = plan_unit(part, group, blocks, dtype=dtype, lever=replace(lever, layers=size))
                units.append(PlannedUnit(plan, part, count, unit.resident, trainable, codes if coded else None))
    return ModelPlan(model, group, blocks, lever, tuple(units))


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank at the peak of a step, by kind. ``codes``: FP8 codes and scales of the rank's shards, kept between steps."""

    master: int
    codes: int
    gathered: int
    gradients: int
    gradient_buffers: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        return sum(getattr(self, f.name) for f in fields(self))

    def by_kind(self) -> dict[str, int]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


def predict_memory(plan: ModelPlan, policy: Policy, *, backend: str = "nccl", rank: int = 0) -> Memory:
    """Predict the memory of ``rank`` at the peak of a step.

    Args:
        backend: ``"gloo"`` for ranks on the CPU, whose buffer pool differs (:mod:`vescale_ray.planner.step_buffers`).
    """
    master = policy.master_dtype.itemsize
    buffers = [(u, layout, layout.kept(rank)) for u in plan.units for layout in u.plan.buffers]
    kept = sum(k.numel * u.count for u, _, k in buffers)
    trained = sum(k.numel * u.count for u, _, k in buffers if u.trainable)
    gathered, gradients = _buffers(plan, policy, backend, rank)
    return Memory(
        master=kept * master,
        codes=sum(sum(u.part_bytes(policy.compute_dtype)) * u.count for u in plan.units if u.coded is not None),
        gathered=gathered,
        gradients=trained * master,
        gradient_buffers=gradients,
        optimizer=_optimizer_bytes(plan, policy, rank),
        activations=activation_bytes(plan.model, policy, plan.lever.layers),
    )


def _together(plan: ModelPlan) -> list[list[PlannedUnit]]:
    """Return the groups of each unit in order of use. They are gathered in one call, and reduced in one call."""
    units: dict[tuple[str, int, bool], list[PlannedUnit]] = {}
    for u in plan.units:
        units.setdefault((u.plan.name, u.plan.lever.layers, u.resident), []).append(u)
    return list(units.values())


def _units(plan: ModelPlan) -> tuple[list[list[PlannedUnit]], list[PlannedUnit]]:
    """Return the groups of each unit in order of use (at most three units of one plan), and the groups of the root."""
    passing = [groups for groups in _together(plan) if not groups[0].resident]
    in_order = [groups for groups in passing for _ in range(min(groups[0].count, 3))]
    return in_order, [u for u in plan.units if u.resident]


def _buffers(plan: ModelPlan, policy: Policy, backend: str, rank: int) -> tuple[int, int]:
    """Return the peak bytes of gathered parameters and of gradient buffers."""

    def travels(groups: Sequence[PlannedUnit]) -> list[Travel]:
        cast, wide = policy.compute_dtype.itemsize, policy.reduce_dtype.itemsize
        arrives = arrival_dtype(policy.compute_dtype, policy.reduce_dtype).itemsize
        uncast = policy.compute_dtype == policy.master_dtype
        alone = plan.group == 1  # gradients are then written into their shard, and parameters that are not cast are views of it
        found = []
        for unit, layout in ((u, layout) for u in groups for layout in u.plan.buffers):
            if alone and uncast and unit.coded is None and layout.kept(rank).in_place:
                continue
            gathered = layout.numel * cast
            # On gloo, a shard without cast or gaps lives in the gathered buffer, unless that buffer is small.
            home = uncast and unit.coded is None and gathered >= HOST_MAPPED_BYTES and layout.kept(rank).in_place
            trained = layout.numel * (unit.trainable and not alone)
            widened = trained * wide * (arrives != wide)
            found.append(Travel(gathered, trained * arrives, layout.shard_numel * cast * home, widened, policy.staging))
        return found

    units, root = _units(plan)
    if backend == "gloo":
        gathered, gradients = host_buffers([travels(groups) for groups in units], travels(root), plan.group)
    else:
        gathered, gradients = device_buffers([travels(groups) for groups in units], travels(root))
    # Codes are received apart, until the unit waits for them and before the next unit is gathered.
    received = max(sum(sum(u.part_bytes(policy.compute_dtype)) for u in groups if u.coded is not None) for groups in [*units, root])
    return gathered + received * plan.group * (plan.group > 1), gradients


def _optimizer_bytes(plan: ModelPlan, policy: Policy, rank: int) -> int:
    """Bytes of optimizer state for the elements that the rank holds; padding has none."""
    total = 0.0
    for u in plan.units:
        if not u.trainable:
            continue
        kinds = {p.name: p.kind for p in u.unit.params}
        for layout in u.plan.buffers:
            for spec in layout.specs:
                start, end = layout.tensor_range(spec.name, rank)
                name = spec.name.split(".", 1)[1] if u.plan.lever.layers > 1 else spec.name
                total += (end - start) * u.count * _state_bytes(policy.optimizer, kinds[name])
    return round(total)


def _state_bytes(optimizer: Optimizer, kind: str) -> float:
    """Bytes of state per parameter: FP32, or for 8-bit Adam two bytes plus two FP32 scales per block of 1024."""
    if optimizer == "sgd":
        return 4.0  # with momentum
    if optimizer == "muon" and kind in ("matrix", "expert"):
        return 4.0
    if optimizer == "adamw8bit" and kind in ("matrix", "expert"):
        return 2.0 + 8.0 / 1024
    return 8.0


def activation_bytes(model: ModelShapes, policy: Policy, layers_per_unit: int = 1) -> int:
    """Estimate the bytes of activations on one rank.

    Without recomputation each layer keeps 34 bytes per token and hidden element (Korthikanti et al., arXiv 2205.05198, section 4.1,
    with attention that keeps no matrix of scores). This is scaled by the layer's active parameters over the 12 hidden^2 of a dense
    layer. With recomputation, each layer keeps 2 bytes for its input, and one layer is kept in full. Logits in BF16 and FP32 are added.
    """
    if not model.hidden or not model.layers:
        return 0
    per_layer = max(model.active - 2 * model.vocab * model.hidden, 0) / model.layers
    widening = max(0.5, per_layer / (12 * model.hidden**2))
    full = 34 * policy.tokens * model.hidden * widening
    kept = 2 * policy.tokens * model.hidden * model.layers + full if policy.recompute else full * model.layers
    return round(kept + 6 * policy.tokens * model.vocab)


@dataclass(frozen=True)
class Time:
    """Seconds of a step on one rank, and the bytes that the rank sends."""

    compute: float
    gather: float
    reduce: float
    replicate: float
    """All-reduce of gradient shards over the replicas (HSDP)."""
    update: float
    """The optimizer step: reads and writes of memory. Muon communicates, too, unless the layout keeps each matrix on one rank."""
    exposed: float
    """Communication that no computation hides."""
    sent: int

    @property
    def step(self) -> float:
        return self.compute + self.exposed + self.update


def _has_experts(unit: UnitShape) -> bool:
    return any(p.kind == "expert" for p in unit.params)


def predict_time(plan: ModelPlan, policy: Policy, hardware: Hardware, replicas: int = 1) -> Time:
    """Estimate the time of a step of one micro-batch.

    A matrix product costs 2 operations per active parameter and token in forward, 4 in backward, and 2 more if it is recomputed. A
    unit's part is its share of the active parameters; the embedding is a lookup and costs nothing. Parameters are gathered for forward
    and again for backward, while the unit before computes. Gradients are reduced while the next unit of the backward computes. A
    unit's communication that its computation does not hide is exposed. The first gather and the last reduction are exposed, too.
    """
    compute = gather = reduce = replicate = exposed = 0.0
    sent = 0
    idle = plan.model.numel - plan.model.active
    experts = max(1, sum(u.plan.tensor_numel * u.count for u in plan.units if _has_experts(u.unit)))
    rate = hardware.flops * hardware.efficiency
    wide, stride = policy.reduce_dtype.itemsize, min(plan.group, hardware.node)
    first = last = None
    for index, groups in enumerate(_together(plan)):
        count, resident, trained = groups[0].count, groups[0].resident, [u for u in groups if u.trainable]
        lookup = not index and all(p.kind == "embedding" for u in groups for p in u.unit.params)
        forward = backward = 0.0
        for u in groups:
            own = u.plan.tensor_numel - (round(idle * u.plan.tensor_numel / experts) if _has_experts(u.unit) else 0)
            product = 0.0 if lookup else 2 * own * policy.tokens / rate
            forward += product
            backward += (2 if u.trainable else 1) * product + (product if policy.recompute else 0.0)
        part = sum(sum(u.part_bytes(policy.compute_dtype)) for u in groups)
        gathers = collective_time(part * plan.group, plan.group, hardware, rank_bytes=part)
        sent += count * (1 if resident else 2) * part * (plan.group - 1)
        reductions = across = 0.0
        if trained:
            part = sum(u.plan.shard_numel for u in trained) * wide
            calls = reduction_calls(part * plan.group, policy.compute_dtype, policy.reduce_dtype, policy.staging)
            reductions = calls * collective_time(part * plan.group / calls, plan.group, hardware, rank_bytes=part)
            buffers = [b for u in trained for b in u.plan.buffers]
            across = sum(2 * collective_time(b.shard_numel * wide, replicas, hardware, stride=stride) for b in buffers)
            sent += count * (part * (plan.group - 1) + 2 * part * (replicas - 1) // replicas)
        again = 0.0 if resident else gathers
        compute += count * (forward + backward)
        gather += count * (gathers + again)
        reduce += count * reductions
        replicate += count * across
        exposed += count * (max(0.0, gathers - forward) + max(0.0, again + reductions + across - backward))
        first = gathers if first is None else first
        last = last if last is not None else reductions + across
    exposed = min(exposed + (first or 0.0) + (last or 0.0), gather + reduce + replicate)
    # The update reads and writes master, gradients and states once.
    memory = predict_memory(plan, policy)
    update = 2 * (memory.master + memory.optimizer + memory.gradients // 2) / hardware.memory_bandwidth
    if policy.optimizer == "muon" and plan.blocks.rows != 0:
        # One exchange sends momentum to the matrix's root rank and another returns the update, both in BF16.
        matrices = sum(u.unit.numel * u.plan.lever.layers * u.count for u in plan.units if any(p.kind == "matrix" for p in u.unit.params))
        part = 2 * matrices // plan.group * (plan.group - 1) // plan.group
        update += 2 * collective_time(part * plan.group, plan.group, hardware) / max(1, min(plan.group, hardware.node))
        sent += 2 * part
    return Time(compute, gather, reduce, replicate, update, exposed, sent)
