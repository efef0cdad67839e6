"""Planning of one unit of a model, and levers against padding if one tensor has too few blocks for the group.

Take ``N`` ranks and blocks of ``g`` elements. A tensor that spans several ranks gives each a whole number of blocks, so the shard
is a multiple of ``g``. Padding is a few percent at 30 blocks per rank, and 20 % or more below five. Four levers reduce it and
leave every block whole:

- **several layers per unit** (``layers``): twice the layers are twice the blocks; costs memory for the gathered parameters;
- **several buffers** (``buffers="per block"``): one per row length, between which tensors move. Tensors whose blocks differ no longer
  force a common multiple on one shard. It costs no more calls, since the engine runs a unit's collectives as one;
- **strided experts** (``strided=True``): a constant gap behind each expert ``[n, m]`` of a stack ``[E, n, m]``. Experts then fall on
  shard boundaries, and a shorter last block stays in its expert. The parameter becomes a strided view, which the model must tolerate.
  The planner decides tensor by tensor;
- a smaller group (HSDP) or smaller blocks: :mod:`vescale_ray.planner.advice` suggests them.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch

from vescale_ray.geometry import Block
from vescale_ray.planner.models.shapes import ParamShape, UnitShape
from vescale_ray.planner.placement.buffers import bound_with_gaps, per_block, with_gaps
from vescale_ray.planner.placement.layout import Layout, TensorSpec
from vescale_ray.planner.placement.search import plan_layout

GOAL = 0.03
"""Padding above which a lever is worth its cost, as a fraction of the parameters."""

CODED_GOAL = 0.01
""":data:`GOAL` for tensors that are gathered as FP8 codes. It is lower, since the purpose of FP8 is to send less."""
CODES = torch.float8_e4m3fn

Buffers = Literal["one", "per block"]


@dataclass(frozen=True)
class Blocks:
    """Rule that gives tensors a block requirement.

    Attributes:
        rows: rows of a block; None: no tensor has a requirement; 0: a whole matrix (each expert is one), as Muon needs it.
        elements: elements of a block in memory order, as in 8-bit Adam; a block is then the fewest rows whose elements are a multiple
            of this.
        on: all matrices (embeddings included), or experts only. Norms, biases and other vectors never have a requirement.
    """

    rows: int | None = None
    on: Literal["matrices", "experts"] = "matrices"
    elements: int | None = None

    def __post_init__(self) -> None:
        if self.rows is not None and self.rows < 0:
            raise ValueError(f"blocks of {self.rows} rows: give at least 1, or 0 for whole matrices")
        if self.elements is not None and (self.elements < 1 or self.rows is not None):
            raise ValueError(f"blocks of {self.elements} elements and of {self.rows} rows: give one of them, at least 1 element")

    @property
    def any(self) -> bool:
        """True if this rule sets a requirement."""
        return self.rows is not None or self.elements is not None

    def applies(self, param: ParamShape) -> bool:
        return self.any and (param.kind == "expert" or (self.on == "matrices" and param.kind != "vector"))

    def rows_of(self, param: ParamShape) -> int:
        """Return the rows of a block of a parameter that has the requirement; at least 1."""
        shape = param.shape
        height = shape[-2] if len(shape) >= 2 else shape[0] if shape else 1
        if self.elements is not None:
            width = shape[-1] if len(shape) >= 2 else 1
            return min(max(1, height), self.elements // math.gcd(self.elements, width)) if width else 1
        return max(1, self.rows or height)

    def __str__(self) -> str:
        if not self.any:
            return "no requirement"
        size = f"{self.elements} elements" if self.elements is not None else "whole matrices" if self.rows == 0 else f"{self.rows} rows"
        return size + (", experts only" if self.on == "experts" else "")


@dataclass(frozen=True)
class Lever:
    """A way to lay out a unit; the default is the plain one."""

    layers: int = 1
    buffers: Buffers = "one"
    strided: bool = False

    def __str__(self) -> str:
        parts = [f"{self.layers} layers per unit"] if self.layers > 1 else []
        parts += ["several buffers"] if self.buffers == "per block" else []
        parts += ["strided experts"] if self.strided else []
        return ", ".join(parts) or "plain"


@dataclass(frozen=True)
class UnitPlan:
    """A unit's buffers, whose collectives run as one call.

    Attributes:
        buffers: layouts over the same ranks. Tensors have their names in the unit; with several layers, the prefix ``0.``, ``1.``, ..
            names the layer.
        bound: proven lower bound on the sum of the shards, over all layouts of these tensors, with or without gaps, in one buffer or
            several.
        across: stacks whose experts' rows are not a multiple of the block, so that blocks run from one expert into the next.
    """

    name: str
    lever: Lever
    buffers: tuple[Layout, ...]
    bound: int
    across: tuple[str, ...] = ()

    @property
    def shard_numel(self) -> int:
        """Number of elements of each rank's parts of all buffers."""
        return sum(b.shard_numel for b in self.buffers)

    @property
    def numel(self) -> int:
        return sum(b.numel for b in self.buffers)

    @property
    def tensor_numel(self) -> int:
        return sum(b.tensor_numel for b in self.buffers)

    @property
    def padding_ratio(self) -> float:
        return (self.numel - self.tensor_numel) / self.tensor_numel if self.tensor_numel else 0.0

    @property
    def strided(self) -> dict[str, int]:
        """Gap in rows behind each expert, for the tensors that have one."""
        return {s.name: s.stored_rows - s.shape[-2] for b in self.buffers for s in b.specs if s.stored_rows is not None}

    @property
    def notes(self) -> tuple[str, ...]:
        runs = tuple(f"{name}: its experts' rows are not a multiple of the block, which runs into the next expert" for name in self.across)
        gaps = tuple(f"{name}: a gap of {rows} rows behind each expert" for name, rows in sorted(self.strided.items()) if rows)
        return (*(note for b in self.buffers for note in b.notes if note.split(":")[0] not in self.strided), *runs, *gaps)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of all layouts; the ranks compare it to check that they have the same plan."""
        return hashlib.sha256("".join(b.fingerprint for b in self.buffers).encode()).hexdigest()


def plan_unit(
    unit: UnitShape,
    num_shards: int,
    blocks: Blocks = Blocks(),
    *,
    dtype: torch.dtype = torch.bfloat16,
    lever: Lever = Lever(),
) -> UnitPlan:
    """Plan one unit of ``lever.layers`` layers over ``num_shards`` ranks.

    Args:
        dtype: the narrowest dtype that the parameters are communicated in.

    Raises:
        ValueError: the unit has no layers, or an error of :func:`vescale_ray.planner.plan_layout`.
    """
    if lever.layers < 1:
        raise ValueError(f"a unit of {lever.layers} layers: give at least 1")
    specs, across = _specs(unit, blocks, dtype, lever)
    if lever.buffers == "per block":
        buffers = per_block(tuple(specs), num_shards, None if lever.strided else frozenset())
        return UnitPlan(unit.name, lever, buffers, _evenly(specs, num_shards), across)
    if not lever.strided:
        layout = plan_layout(specs, num_shards)
        return UnitPlan(unit.name, lever, (layout,), layout.lower_bound, across)
    layout = plan_layout(with_gaps(specs, num_shards), num_shards)
    return UnitPlan(unit.name, lever, (layout,), bound_with_gaps(specs, num_shards), across)


def plan_coded(unit: UnitShape, num_shards: int, blocks: Blocks, tile: Block, layers: int = 1) -> UnitPlan:
    """Plan ``layers`` layers of parameters that are gathered as FP8 codes, as the engine does.

    Args:
        blocks: the optimizer's requirement, which holds besides the tiles.

    Raises:
        ValueError: as :func:`plan_unit`.
    """
    specs, cut = [], []
    for layer, param in itertools.product(range(layers), unit.params):
        cut.append(Block.rows(blocks.rows_of(param) if blocks.applies(param) else 1))
        block = cut[-1].joined(tile) if blocks.applies(param) else tile
        specs.append(TensorSpec(f"{layer}.{param.name}" if layers > 1 else param.name, param.shape, block, CODES))
    buffers = Bundle(tuple(specs), goal=CODED_GOAL, cut=tuple(cut)).layouts(num_shards)
    return UnitPlan(unit.name, Lever(layers), buffers, buffers[0].lower_bound if len(buffers) == 1 else _evenly(specs, num_shards))


def plan_buffers(
    specs: Sequence[TensorSpec],
    num_shards: int,
    *,
    goal: float = GOAL,
    padding_bytes: int = 1 << 20,
    allow_gaps: Collection[str] = (),
) -> tuple[Layout, ...]:
    """Plan one buffer; if it pads more than a few percent, return the plan with the least padding.

    The alternatives are gaps behind the matrices of stacks in ``allow_gaps``, several buffers, or both. Of plans with equal padding, the
    simplest wins.

    Args:
        goal: ratio of padding to tensors up to which one buffer is kept.
        padding_bytes: padding in bytes up to which one buffer is kept; a further collective costs more than that.
        allow_gaps: names of stacks ``[.., n, m]`` that may be stored with a gap behind each matrix.

    Raises:
        ValueError: as :func:`vescale_ray.planner.plan_layout`.
    """
    specs = list(specs)
    one = plan_layout(specs, num_shards)
    itemsize = min((s.dtype.itemsize for s in specs), default=1)
    if one.padding_ratio <= goal or (one.numel - one.tensor_numel) * itemsize <= padding_bytes or num_shards == 1:
        return (one,)
    plans: list[tuple[Layout, ...]] = [(one,)]
    stored = [specs] if any(s.name in allow_gaps for s in specs) else []
    whole = [_room_for_blocks(s) if s.name in allow_gaps else s for s in specs]  # the last block of each matrix is stored in full
    if whole != specs:
        stored.append(whole)
    plans += [(plan_layout(with_gaps(some, num_shards, allow_gaps), num_shards),) for some in stored]
    plans.append(per_block(tuple(specs), num_shards))
    plans += [per_block(tuple(some), num_shards, frozenset(allow_gaps)) for some in stored]
    return min(plans, key=lambda layouts: sum(layout.shard_numel for layout in layouts))


@dataclass(frozen=True)
class Bundle:
    """Tensors that are planned together, in their given order; a plan for any number of ranks depends on nothing else.

    Attributes:
        gaps: names of stacks that may be stored with gaps (``allow_gaps`` of :func:`plan_buffers`).
        goal: as in :func:`plan_buffers`.
        cut: for tensors that are gathered as FP8 codes, the blocks that shards must keep whole if their tiles are cut. Tiles are cut if
            whole ones take more padding than ``goal``, and cut ones take less. Empty: ``specs`` decide.
    """

    specs: tuple[TensorSpec, ...]
    gaps: frozenset[str] = frozenset()
    goal: float = GOAL
    cut: tuple[Block, ...] = ()

    def layouts(self, num_shards: int) -> tuple[Layout, ...]:
        """Return the buffers' layouts for ``num_shards`` ranks.

        Raises:
            ValueError: as :func:`plan_buffers`.
        """
        if not self.specs:
            return ()
        layouts = plan_buffers(self.specs, num_shards, goal=self.goal, allow_gaps=self.gaps)
        numel = sum(one.tensor_numel for one in layouts)
        if not self.cut or sum(one.numel for one in layouts) - numel <= self.goal * numel:
            return layouts
        specs = [replace(spec, block=block) for spec, block in zip(self.specs, self.cut, strict=True)]
        return min(layouts, plan_buffers(specs, num_shards, goal=self.goal), key=lambda some: sum(one.shard_numel for one in some))


def _room_for_blocks(spec: TensorSpec) -> TensorSpec:
    """Pad each matrix of a stack to whole blocks."""
    rows = spec.block.row_count if spec.block is not None and spec.block.kind in ("rows", "tile") else 1
    if len(spec.shape) < 3 or rows >= spec.shape[-2] or not spec.shape[-2] % rows:
        return spec
    return replace(spec, stored_rows=-(-spec.shape[-2] // rows) * rows)


def _specs(unit: UnitShape, blocks: Blocks, dtype: torch.dtype, lever: Lever) -> tuple[list[TensorSpec], tuple[str, ...]]:
    specs, across = [], []
    for layer, param in itertools.product(range(lever.layers), unit.params):
        name = f"{layer}.{param.name}" if lever.layers > 1 else param.name
        if not blocks.applies(param):
            specs.append(TensorSpec(name, param.shape, None, dtype))
            continue
        shape = param.shape
        stack = len(shape) >= 3
        rows = blocks.rows_of(param)
        block = Block.rows(rows) if shape else Block.tensor()
        if stack and rows < shape[-2] and shape[-2] % rows and not lever.strided:
            shape = (math.prod(shape[:-1]), shape[-1])
            across.append(name)
        spec = TensorSpec(name, shape, block, dtype)
        specs.append(_room_for_blocks(spec) if lever.strided else spec)
    return specs, tuple(across)


def _evenly(specs: Sequence[TensorSpec], num_shards: int) -> int:
    return -(-sum(math.prod(s.shape) for s in specs) // num_shards)
