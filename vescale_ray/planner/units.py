"""Planning of one unit of a model, and levers against padding if one tensor has too few blocks for the group.

Take ``N`` ranks and blocks of ``g`` elements. A tensor that spans several ranks gives each a whole number of blocks, so the shard
is a multiple of ``g``. Padding is a few percent at 30 blocks per rank, and 20 % or more below five. Four levers reduce it and
leave every block whole:

- **several layers per unit** (``layers``): twice the layers are twice the blocks; costs memory for the gathered parameters;
- **one buffer per row length** (``buffers="per block"``): tensors whose blocks differ no longer force a common multiple on one shard;
  costs no more calls, since the engine runs a unit's collectives as one;
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
from vescale_ray.planner.bounds import lower_bound
from vescale_ray.planner.layout import START_BYTES, Layout, TensorSpec
from vescale_ray.planner.place import PlacementProblem
from vescale_ray.planner.search import plan_layout
from vescale_ray.planner.shapes import ParamShape, UnitShape

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
        """Whether this rule sets a requirement."""
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
        parts += ["one buffer per row length"] if self.buffers == "per block" else []
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
        """Elements of each rank's parts of all buffers."""
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
    align: int = 128,
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
        buffers = _per_block(specs, num_shards, align, None if lever.strided else ())
        return UnitPlan(unit.name, lever, buffers, _evenly(specs, num_shards), across)
    if not lever.strided:
        layout = plan_layout(specs, num_shards, align=align)
        return UnitPlan(unit.name, lever, (layout,), layout.lower_bound, across)
    layout = plan_layout(_strided(specs, num_shards, align), num_shards, align=align)
    return UnitPlan(unit.name, lever, (layout,), _bound_with_gaps(specs, num_shards, align), across)


def plan_buffers(
    specs: Sequence[TensorSpec],
    num_shards: int,
    *,
    align: int = 128,
    padding_limit: float = 0.03,
    padding_bytes: int = 1 << 20,
    allow_gaps: Collection[str] = (),
) -> tuple[Layout, ...]:
    """Plan one buffer; if it pads more than a few percent, return the plan with the least padding.

    The alternatives are gaps behind the matrices of stacks in ``allow_gaps``, one buffer for each length of block, or both. Of plans
    with equal padding, the simplest wins.

    Args:
        padding_limit: ratio of padding to tensors up to which one buffer is kept.
        padding_bytes: padding in bytes up to which one buffer is kept; a further collective costs more than that.
        allow_gaps: names of stacks ``[.., n, m]`` that may be stored with a gap behind each matrix. Their block need not divide
            ``n``: the last block of each matrix is stored in full.

    Raises:
        ValueError: as :func:`vescale_ray.planner.plan_layout`.
    """
    specs = [_room_for_blocks(s) if s.name in allow_gaps else s for s in specs]
    one = plan_layout(specs, num_shards, align=align)
    itemsize = min((s.dtype.itemsize for s in specs), default=1)
    if one.padding_ratio <= padding_limit or (one.numel - one.tensor_numel) * itemsize <= padding_bytes or num_shards == 1:
        return (one,)
    plans: list[tuple[Layout, ...]] = [(one,)]
    if any(s.name in allow_gaps for s in specs):
        plans.append((plan_layout(_strided(specs, num_shards, align, allow_gaps), num_shards, align=align),))
    plans.append(_per_block(specs, num_shards, align))
    if len(plans) > 2:
        plans.append(_per_block(specs, num_shards, align, allow_gaps))
    return min(plans, key=lambda layouts: sum(layout.shard_numel for layout in layouts))


@dataclass(frozen=True)
class Bundle:
    """Tensors that are planned together, in their given order; a plan for any number of ranks depends on nothing else.

    Attributes:
        gaps: names of stacks that may be stored with gaps (``allow_gaps`` of :func:`plan_buffers`).
    """

    specs: tuple[TensorSpec, ...]
    gaps: frozenset[str] = frozenset()

    def layouts(self, num_shards: int) -> tuple[Layout, ...]:
        """Return the buffers' layouts for ``num_shards`` ranks.

        Raises:
            ValueError: as :func:`plan_buffers`.
        """
        if not self.specs:
            return ()
        if num_shards > 1:
            return plan_buffers(self.specs, num_shards, allow_gaps=self.gaps)
        # One rank cuts nothing, so a shorter last block needs no extra room.
        return plan_buffers([replace(s, block=None) if s.name in self.gaps else s for s in self.specs], 1)


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


def _bound_with_gaps(specs: Sequence[TensorSpec], num_shards: int, align: int) -> int:
    """Return the bound with each matrix of a stack as a separate tensor, which allows any gaps between matrices."""
    sizes: list[int] = []
    cuts: list[int] = []
    for spec in specs:
        matrix, count = spec, 1
        if len(spec.shape) >= 3 and spec.block is not None:
            matrix, count = TensorSpec(spec.name, spec.shape[-2:], spec.block, spec.dtype), math.prod(spec.shape[:-2])
        sizes += [matrix.numel] * count
        cuts += [matrix.granularity] * count
    itemsize = min(s.dtype.itemsize for s in specs)
    problem = PlacementProblem.of(sizes, cuts, num_shards, align // itemsize, START_BYTES // itemsize)
    return lower_bound(problem) if problem.total else 0


def _evenly(specs: Sequence[TensorSpec], num_shards: int) -> int:
    return -(-sum(math.prod(s.shape) for s in specs) // num_shards)


def _strided(specs: Sequence[TensorSpec], num_shards: int, align: int, only: Collection[str] | None = None) -> list[TensorSpec]:
    """Choose the stored rows of each stack's experts; the smallest shard wins.

    A stack keeps its rows, or a whole number of experts fills a rank, or one expert fills a whole number of ranks.

    ``only``: names of the stacks that may have gaps; None: all.
    """
    specs = list(specs)
    stacks = [
        i
        for i, s in enumerate(specs)
        if len(s.shape) >= 3 and s.block is not None and s.block.kind != "tensor" and s.numel and (only is None or s.name in only)
    ]
    if not stacks or num_shards == 1:
        return specs
    bound = _bound_with_gaps(specs, num_shards, align)
    quantum = align // min(s.dtype.itemsize for s in specs)
    plain = list(specs)
    best = plan_layout(plain, num_shards, align=align)
    best_specs = plain
    for modes in itertools.product(("as it is", "experts per rank", "ranks per expert"), repeat=len(_alike(specs, stacks))):
        if all(mode == "as it is" for mode in modes):
            continue
        by_kind = dict(zip(_alike(specs, stacks), modes, strict=True))
        step = quantum
        counts: dict[int, int] = {}
        for i in stacks:
            spec = specs[i]
            matrix, row = spec.shape[-2] * spec.shape[-1], spec.shape[-1]
            mode = by_kind[spec.shape, spec.block]
            if mode == "experts per rank":
                counts[i] = max(1, bound // matrix)
                step = math.lcm(step, counts[i] * row)
            elif mode == "ranks per expert":
                counts[i] = -(-matrix // max(bound, 1))
                step = math.lcm(step, plain[i].granularity)
            elif plain[i].numel > 2 * bound:
                step = math.lcm(step, plain[i].granularity)
        first = -(-bound // step)
        for shard in (step * k for k in range(first, first + 4)):
            if shard >= best.shard_numel:
                break
            attempt = list(plain)
            for i, count in counts.items():
                spec = specs[i]
                mode = by_kind[spec.shape, spec.block]
                stored = shard // count if mode == "experts per rank" else shard * count
                rows, rest = divmod(stored, spec.shape[-1])
                if rest or rows < spec.shape[-2]:
                    break
                block = Block.rows(rows) if mode == "experts per rank" else spec.block
                if block is not None and mode != "experts per rank" and rows % block.row_count:
                    break
                attempt[i] = replace(spec, stored_rows=rows if rows > spec.shape[-2] else None, block=block)
            else:
                layout = plan_layout(attempt, num_shards, align=align)
                if layout.shard_numel < best.shard_numel:
                    best, best_specs = layout, attempt
    return best_specs


def _alike(specs: Sequence[TensorSpec], stacks: Sequence[int]) -> list[tuple[tuple[int, ...], Block | None]]:
    return list(dict.fromkeys((specs[i].shape, specs[i].block) for i in stacks))


def _per_block(specs: Sequence[TensorSpec], num_shards: int, align: int, gaps: Collection[str] | None = ()) -> tuple[Layout, ...]:
    """Plan one buffer for each length of block.

    Tensors without a requirement fill the padding of these buffers; the rest gets another buffer.

    ``gaps``: names of the stacks that may have gaps; None: all.
    """
    quantum = align // min(s.dtype.itemsize for s in specs)
    groups: dict[int, list[TensorSpec]] = {}
    free: list[TensorSpec] = []
    for spec in specs:
        if spec.granularity > 1 and spec.numel:
            groups.setdefault(spec.granularity, []).append(spec)
        else:
            free.append(spec)
    if gaps is None or gaps:
        groups = {g: _strided(members, num_shards, align, gaps) for g, members in groups.items()}
    layouts = [plan_layout(groups[g], num_shards, align=align) for g in sorted(groups, reverse=True)]
    left: list[TensorSpec] = []
    for spec in sorted(free, key=lambda s: (-s.numel, s.name)):
        for k in sorted(range(len(layouts)), key=lambda k: (layouts[k].tensor_numel - layouts[k].numel, k)):
            if layouts[k].numel - layouts[k].tensor_numel < spec.numel:
                left.append(spec)
                break
            filled = plan_layout([*layouts[k].specs, spec], num_shards, align=align)
            if filled.shard_numel == layouts[k].shard_numel:
                layouts[k] = filled
                break
        else:
            left.append(spec)
    if left:
        own = plan_layout(left, num_shards, align=align)
        if layouts and own.tensor_numel < num_shards * quantum:
            # This is too little for a separate collective.
            layouts[-1] = plan_layout([*layouts[-1].specs, *left], num_shards, align=align)
        else:
            layouts.append(own)
    return tuple(layouts)
