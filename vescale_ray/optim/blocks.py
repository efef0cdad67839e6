"""States with one entry per block of a tensor, sharded like the tensor. :mod:`vescale_ray.block_grid` defines the blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from vescale_ray.block_grid import BlockSpec, Grid, block_text
from vescale_ray.dtensor.placement import RaggedShard
from vescale_ray.dtensor.ragged_dtensor import RaggedDTensor
from vescale_ray.dtensor.spec import chunk, make_spec, section, section_shapes, sharding_of
from vescale_ray.geometry import Shape
from vescale_ray.optim.parameters import local_of


@dataclass(frozen=True)
class Cut:
    """Division of a tensor over ranks.

    Attributes:
        spans: elements ``[start, end)`` of the section on each rank of the cutting dimension; one span for a plain tensor.
        rank: index of this rank's span.
        section: shape of the divided part: the whole tensor, or the part that tensor or expert parallelism leaves to this rank.
        like: the DTensor itself; None for a plain tensor.
        dim: the mesh dimension that cuts; None if none does.
    """

    spans: tuple[tuple[int, int], ...]
    rank: int
    section: Shape
    like: DTensor | None
    dim: int | None

    @property
    def span(self) -> tuple[int, int]:
        return self.spans[self.rank]


def cut_of(param: Tensor) -> Cut:
    """Return the tensor's division; raises ValueError for a DTensor whose parts are not intervals of its elements."""
    shape = tuple(int(n) for n in param.shape)
    whole = ((0, math.prod(shape)),)
    if not isinstance(param, DTensor):
        return Cut(whole, 0, shape, None, None)
    if isinstance(param, RaggedDTensor):
        sharding = sharding_of(param._spec)
        spans = sharding.placement.intervals(sharding.section)
        return Cut(spans, sharding.rank, tuple(sharding.section), param, sharding.mesh_dim)
    cutting = [i for i, p in enumerate(param.placements) if not p.is_replicate()]
    if not cutting:
        return Cut(whole, 0, shape, param, None)
    placement = param.placements[cutting[0]]
    if len(cutting) > 1 or type(placement) is not Shard or placement.dim != 0:
        raise ValueError(
            f"{param.placements} give a rank no single interval of elements: shard it with vescale_ray.fully_shard and this optimizer's "
            f"block_policy, without a shard_placement_fn, or give the parameter to AdamW"
        )
    ranks, inner = param.device_mesh.size(cutting[0]), math.prod(shape[1:])
    rows = [chunk(shape[0], ranks, rank) for rank in range(ranks)]
    spans = tuple((start * inner, end * inner) for start, end in rows)
    return Cut(spans, param.device_mesh.get_local_rank(cutting[0]), shape, param, cutting[0])


def section_grid(param: Tensor, cut: Cut, block: BlockSpec) -> Grid:
    """Return the blocks of this rank's section; they are also blocks of the whole tensor.

    Raises:
        ValueError: a shard boundary, or a cut by tensor parallelism, runs through a block. All ranks raise the same error.
    """
    whole = Grid.of(param.shape, block)
    grid = Grid.of(cut.section, block)
    for start, _ in cut.spans:
        if start < math.prod(cut.section) and not grid.allows_cut(start):
            raise ValueError(
                f"a shard boundary lies at element {start}, inside a block ({block_text(block)}, runs of {grid.band_numel} elements)"
            )
    if isinstance(cut.like, RaggedDTensor) and any(type(p) is Shard for p in cut.like.placements):
        _check_parallel(cut.like, whole)
    return grid


def _check_parallel(param: RaggedDTensor, whole: Grid) -> None:
    """Raise ValueError unless tensor or expert parallelism cuts between blocks on every rank, and divides the states alike."""
    mesh_shape, shape = tuple(param.device_mesh.mesh.shape), tuple(int(n) for n in param.shape)
    others = tuple(Replicate() if isinstance(p, RaggedShard) else p for p in param.placements)
    steps = (1,) * len(whole.lead) + (whole.band_rows, whole.block_cols)
    flat = isinstance(whole.block, int) and not whole.per_row  # blocks run across rows
    for coordinate in product(*(range(n) for n in mesh_shape)):
        offsets, sizes = section(mesh_shape, others, shape, coordinate)
        if sizes == shape:
            continue
        fits = len(shape) <= 3 and not (flat and sizes[len(whole.lead) :] != shape[len(whole.lead) :])
        ends = [o + n for o, n in zip(offsets, sizes, strict=True)]
        fits = fits and all(
            edge % step == 0 or edge == size for o, e, step, size in zip(offsets, ends, steps, shape, strict=True) for edge in (o, e)
        )
        if fits:
            expected = tuple(-(-e // s) - o // s for o, e, s in zip(offsets, ends, steps, strict=True))
            if flat:  # whole matrices, with all of their bands
                expected = (*expected[: len(whole.lead)], *whole.state_shape[len(whole.lead) :])
            fits = section(mesh_shape, others, whole.state_shape, coordinate)[1] == expected
        if not fits:
            raise ValueError(f"placements {param.placements} cut it into {sizes} at {offsets}, which is not between blocks of {steps}")


def block_state(param: Tensor, cut: Cut, grid: Grid, tail: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return zeros with one entry of shape ``tail`` per block, ``(*lead, bands, columns, *tail)``, each on the block's rank.

    If the parameter is a DTensor, the result is a DTensor on its mesh. ``grid`` is that of the section (:func:`section_grid`).
    """
    tail = tuple(tail)
    local = local_of(param)
    if cut.like is None or cut.dim is None:
        zeros = torch.zeros((*grid.state_shape, *tail), dtype=dtype, device=local.device)
        if cut.like is None:
            return zeros
        return DTensor.from_local(zeros, cut.like.device_mesh, cut.like.placements, run_check=False)
    counts = [grid.band_of(end) - grid.band_of(start) for start, end in cut.spans]
    ragged = RaggedShard(tuple(range(grid.band_dims)), counts)
    if isinstance(cut.like, RaggedDTensor) and len(section_shapes(cut.like)) > 1:
        mine = sharding_of(cut.like._spec).placement
        if ragged.local_units != mine.local_units:
            raise ValueError(f"{mine} cuts the parts that other mesh dimensions leave unevenly: some have a smaller last block")
    placements: list[Placement] = [ragged if i == cut.dim else p for i, p in enumerate(cut.like.placements)]
    shape = (*Grid.of(param.shape, grid.block).state_shape, *tail)
    spec = make_spec(cut.like.device_mesh, placements, shape, dtype)
    return RaggedDTensor.from_spec(torch.zeros(sharding_of(spec).local_shape, dtype=dtype, device=local.device), spec)


def like_state(param: Tensor, dtype: torch.dtype) -> Tensor:
    """Return zeros of the parameter's shape and placement in ``dtype``, without gradient."""
    if isinstance(param, RaggedDTensor):
        return RaggedDTensor.from_spec(torch.zeros_like(local_of(param), dtype=dtype), param._spec)
    return torch.zeros_like(param, dtype=dtype, requires_grad=False, memory_format=torch.contiguous_format)
