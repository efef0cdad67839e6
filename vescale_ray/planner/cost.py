"""Cost of a sharding: memory on each rank by kind. :mod:`vescale_ray.planner.step_time` has bytes sent and time.

The memory of the engine's own tensors is exact: a test compares it with running ranks. The note at the head of
``vescale_ray/fsdp/__init__.py`` lists these tensors. Activations are an estimate from the formula below.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Literal

import torch

from vescale_ray.errors import BadInput
from vescale_ray.geometry import Block, ExpertShares
from vescale_ray.planner.codes import Codes
from vescale_ray.planner.models.shapes import ModelShapes, UnitShape
from vescale_ray.planner.step_buffers import (
    HOST_MAPPED_BYTES,
    Travel,
    arrival_dtype,
    check_staging,
    device_buffers,
    exchange_bytes,
    host_buffers,
)
from vescale_ray.planner.unit_plan import Blocks, Lever, UnitPlan, plan_coded, plan_unit

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
        reduce_dtype: dtype of the sums of gradients, and of the reduce-scatter that makes them.
        fp8_gradients: ranks send each other gradients in FP8, which are summed in FP32 (``train.reduce_dtype: fp8``).
        master_dtype: dtype of trained parameters and of gradients in their shards.
        frozen_dtype: dtype of frozen parameters in their shards.
        scale_bytes: bytes of a tile's scale: 4, or 1 for a power of two.
        recompute: backward recomputes the activations of a layer; only the layer's input is kept.
        blocks: the block requirement; None: the one that the optimizer and the dtype need.
        staging: bytes of each of the two buffers in which a reduction casts gradients; None: the engine's default.
        strided: the model tolerates experts that are strided views.
        most_layers: largest number of layers per unit.
        reserve: fraction of the device's memory that is left free (context, fragmentation, communication library).
        keep_cast: each rank keeps its shard in ``compute_dtype`` between all-gathers (``keep_cast`` of ``fully_shard``).
        expert_parallel: neighbouring ranks that share the experts of a layer (``train.expert_parallel``). Experts are then units of their
            own, inside those of their layers, so that a unit has one layer.
    """

    optimizer: Optimizer = "adamw"
    tokens: int = 8192
    compute_dtype: torch.dtype = torch.bfloat16
    master_dtype: torch.dtype = torch.float32
    frozen_dtype: torch.dtype = torch.float32
    reduce_dtype: torch.dtype = torch.float32
    fp8_gradients: bool = False
    recompute: bool = True
    blocks: Blocks | None = None
    staging: int | None = None
    strided: bool = False
    most_layers: int = 4
    reserve: float = 0.1
    quantize: Block | None = None
    scale_bytes: int = 4
    keep_cast: bool = False
    expert_parallel: int = 1

    def __post_init__(self) -> None:
        if self.compute_dtype.itemsize == 1:
            raise BadInput(f"compute_dtype {self.compute_dtype}: give torch.bfloat16, and quantize=Block.tile(128, 128) for FP8 gathers")
        if self.quantize is not None and self.quantize.kind != "tile":
            raise BadInput(f"quantize {self.quantize}: give a tile, such as Block.tile(128, 128)")
        if self.optimizer not in OPTIMIZERS:
            raise BadInput(f"optimizer {self.optimizer!r} is unknown: use one of {', '.join(OPTIMIZERS)}")
        if self.tokens < 1:
            raise BadInput(f"{self.tokens} tokens per device: give at least 1")
        if self.staging is not None:
            check_staging(self.staging, 1)
        if self.expert_parallel < 1:
            raise BadInput(f"expert parallelism over {self.expert_parallel} ranks: give at least 1")

    def shard_dtype(self, *, trainable: bool) -> torch.dtype:
        """Return the dtype of parameters in their shards."""
        return self.master_dtype if trainable else self.frozen_dtype

    @property
    def layers(self) -> int:
        """Maximum number of layers per unit in the plan."""
        return self.most_layers if self.expert_parallel == 1 else 1

    @property
    def codes(self) -> Codes | None:
        """Format of the FP8 codes that all-gathers send; None if they send none."""
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

    ``resident``: the unit stays gathered from its forward to its backward, as the engine does with the root. ``unit``: the unit's tensors.
    If ranks share its experts, these are the tensors of one part.
    """

    plan: UnitPlan
    unit: UnitShape
    count: int
    resident: bool
    trainable: bool
    coded: Codes | None = None
    """Format in which the unit is gathered; None: the compute dtype."""
    shares: ExpertShares = ExpertShares(1)
    """Division of the unit among all ranks of the shard group. It has several parts if it holds experts that ranks share."""
    inside: bool = False
    """True if the unit is inside the one before it, and computes while that is gathered."""

    @property
    def group(self) -> int:
        """Number of ranks over which the unit is sharded."""
        return self.shares.holders

    @property
    def all_experts_numel(self) -> int:
        """Number of elements of the unit's tensors, over all parts of shared experts."""
        return self.plan.tensor_numel * self.shares.parts

    @cached_property
    def _coded_bytes(self) -> tuple[int, ...]:
        return () if self.coded is None else tuple(self.coded.part_bytes(layout) for layout in self.plan.buffers)

    @property
    def scale_bytes(self) -> int:
        """Bytes of scales, padding included, that a rank sends beside its codes; 0 for a unit that is gathered in the compute dtype."""
        return sum(self._coded_bytes) - self.plan.shard_numel if self.coded is not None else 0

    def cast_bytes(self, policy: Policy) -> int:
        """Return the bytes of the cast of a rank's shard that the all-gather sends; 0 if it sends the shard itself or FP8 codes."""
        cast = self.coded is None and policy.compute_dtype != policy.shard_dtype(trainable=self.trainable)
        return sum(self.part_bytes(policy.compute_dtype)) if cast else 0

    def part_bytes(self, compute: torch.dtype) -> tuple[int, ...]:
        """Return the bytes that a rank sends in an all-gather of each buffer."""
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
        total = sum(u.all_experts_numel * u.count for u in self.units)
        return sum(u.plan.numel * u.shares.parts * u.count for u in self.units) / total - 1 if total else 0.0

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
    expert_parallel: int = 1,
) -> ModelPlan:
    """Plan every unit over ``group`` ranks, ``lever.layers`` layers at a time; the remaining layers form a smaller unit.

    Frozen and trainable parameters of a unit form separate groups, and so do those that are gathered as FP8 ``codes``, as in the engine.
    With ``expert_parallel``, experts are units of their own, in equal parts over that many ranks.

    Raises:
        BadInput: the model has no stacks of experts, or ``expert_parallel`` does not divide them, or the group.
    """
    if expert_parallel > 1:
        check_experts(model, group, expert_parallel)
    units: list[PlannedUnit] = []
    for unit, shares, inside in _with_shared_experts(model, ExpertShares(group, expert_parallel)):
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
                    plan = plan_coded(part, shares.holders, blocks, codes.tile, size)
                else:
                    plan = plan_unit(part, shares.holders, blocks, dtype=dtype, lever=replace(lever, layers=size))
                units.append(PlannedUnit(plan, part, count, unit.resident, trainable, codes if coded else None, shares, inside))
    return ModelPlan(model, group, blocks, lever, tuple(units))


def check_experts(model: ModelShapes, ranks: int, parts: int) -> None:
    """Raise BadInput if ``parts`` of ``ranks`` ranks cannot share the experts of ``model``."""
    what = f"expert parallelism over {parts} ranks"
    experts = [p for u in model.units for p in u.params if p.kind == "expert" or p.stack]
    if not experts:
        raise BadInput(f"{what}: {model.name} has no experts; leave it out")
    for p in experts:
        if not p.stack:
            raise BadInput(f"{what}: the experts of {model.name} are not stacks ({p.name}); plan fused experts")
        if p.shape[0] % parts:
            raise BadInput(f"{what}: it does not divide the {p.shape[0]} experts of a layer ({p.name}); use a number that does")
    if ranks % parts:
        raise BadInput(f"{what}: {ranks} ranks are not a multiple of {parts}; use {ranks // parts * parts or parts} or another multiple")


def _with_shared_experts(model: ModelShapes, shares: ExpertShares) -> Iterator[tuple[UnitShape, ExpertShares, bool]]:
    """Yield the units, each with its division among the ranks, and whether it is inside the unit before it. If ranks share experts, the
    stacks of each layer are a unit of their own."""
    whole = ExpertShares(shares.ranks)
    for unit in model.units:
        stacks = tuple(p for p in unit.params if p.stack) if shares.parts > 1 else ()
        rest = replace(unit, params=tuple(p for p in unit.params if p not in stacks))
        if rest.params:
            yield rest, whole, False
        if stacks:
            part = tuple(replace(p, shape=shares.shape_of_part(p.shape)) for p in stacks)
            yield replace(unit, name=f"{unit.name}: experts", params=part, resident=False), shares, bool(rest.params) and not unit.resident


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank at the peak of a step, by kind. ``codes`` and ``casts``: FP8 codes and scales of the rank's shards, and the shards
    in the compute dtype, if they are kept between steps."""

    master: int
    codes: int
    casts: int
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
    buffers = [(u, layout, layout.kept(u.shares.position_of(rank))) for u in plan.units for layout in u.plan.buffers]
    kept = sum(k.numel * u.count * policy.shard_dtype(trainable=u.trainable).itemsize for u, _, k in buffers)
    trained = sum(k.numel * u.count for u, _, k in buffers if u.trainable)
    gathered, gradients = _buffers(plan, policy, backend, rank)
    casts = sum(u.cast_bytes(policy) * u.count for u in plan.units if policy.keep_cast and u.group > 1)
    return Memory(
        master=kept,
        codes=sum(sum(u.part_bytes(policy.compute_dtype)) * u.count for u in plan.units if u.coded is not None),
        casts=casts,
        gathered=gathered,
        gradients=trained * policy.master_dtype.itemsize,
        gradient_buffers=gradients,
        optimizer=_optimizer_bytes(plan, policy, rank),
        activations=activation_bytes(plan.model, policy),
    )


def layers_of(plan: ModelPlan) -> list[list[list[PlannedUnit]]]:
    """Return the units in order of use, each with those inside it. A unit is the list of its groups, which are gathered in one call, and
    reduced in one call."""
    units: dict[tuple[str, int, bool], list[PlannedUnit]] = {}
    for u in plan.units:
        units.setdefault((u.plan.name, u.plan.lever.layers, u.resident), []).append(u)
    layers: list[list[list[PlannedUnit]]] = []
    for groups in units.values():
        if groups[0].inside:
            layers[-1].append(groups)
        else:
            layers.append([groups])
    return layers


def _buffers(plan: ModelPlan, policy: Policy, backend: str, rank: int) -> tuple[int, int]:
    """Return the peak bytes of gathered parameters and of gradient buffers."""

    def travels(groups: Sequence[PlannedUnit]) -> list[Travel]:
        cast, wide = policy.compute_dtype.itemsize, policy.reduce_dtype.itemsize
        arrives = arrival_dtype(policy.compute_dtype, policy.reduce_dtype).itemsize
        found = []
        for unit, layout in ((u, layout) for u in groups for layout in u.plan.buffers):
            alone, kept = unit.group == 1, layout.kept(unit.shares.position_of(rank))
            uncast = policy.compute_dtype == policy.shard_dtype(trainable=unit.trainable)
            # A single rank needs no buffers: it writes gradients into its shard and, without a cast, computes with views of the shard.
            if alone and uncast and unit.coded is None and kept.in_place:
                continue
            gathered = layout.numel * cast
            # On gloo, a shard without cast or gaps lives in the gathered buffer, unless that buffer is small.
            home = uncast and unit.coded is None and gathered >= HOST_MAPPED_BYTES and kept.in_place
            trained = layout.numel * (unit.trainable and not alone)
            widened = trained * wide * (arrives != wide and not policy.fp8_gradients)
            exchange = exchange_bytes(layout.shard_numel, unit.group) if trained and policy.fp8_gradients else 0
            stays = layout.shard_numel * cast * home
            received = 0 if alone or unit.coded is None else unit.coded.part_bytes(layout) * unit.group
            found.append(Travel(gathered, trained * arrives, stays, widened, policy.staging, unit.group, received, exchange))
        return found

    # At most three units of one plan.
    passing = ([layer] * min(layer[0][0].count, 3) for layer in layers_of(plan) if not layer[0][0].resident)
    units = [groups for same in passing for layer in same for groups in layer]
    root = [u for u in plan.units if u.resident]
    buffers = host_buffers if backend == "gloo" else device_buffers
    return buffers([travels(groups) for groups in units], travels(root), [groups[0].inside for groups in units])


def _optimizer_bytes(plan: ModelPlan, policy: Policy, rank: int) -> int:
    """Return the bytes of optimizer state for the elements that the rank holds; padding has none."""
    total = 0.0
    for u in plan.units:
        if not u.trainable:
            continue
        kinds = {p.name: p.kind for p in u.unit.params}
        for layout in u.plan.buffers:
            for spec in layout.specs:
                start, end = layout.tensor_range(spec.name, u.shares.position_of(rank))
                name = spec.name.split(".", 1)[1] if u.plan.lever.layers > 1 else spec.name
                total += (end - start) * u.count * _state_bytes(policy.optimizer, kinds[name])
    return round(total)


def _state_bytes(optimizer: Optimizer, kind: str) -> float:
    """Return the bytes of state per parameter: FP32, or for 8-bit Adam two bytes plus two FP32 scales per block of 1024."""
    if optimizer == "sgd":
        return 4.0  # with momentum
    if optimizer == "muon" and kind in ("matrix", "expert"):
        return 4.0
    if optimizer == "adamw8bit" and kind in ("matrix", "expert"):
        return 2.0 + 8.0 / 1024
    return 8.0


def activation_bytes(model: ModelShapes, policy: Policy) -> int:
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
