"""Mapping from parameters to the matrices that an optimizer sees, and to the ranks that hold their elements.

A parameter [.., m, n] is a stack of matrices: experts ``[E, m, n]`` are E of them. A fused matrix consists of *row blocks*: the
query, key and value rows of a fused projection, or the heads. Each matrix is one run of consecutive elements in row-major memory,
and so is each rank's part. Everything here is therefore intervals::

    elements of a parameter    |------ matrix 0 ------|------ matrix 1 ------|------ matrix 2 ------|
    held by                    |-- rank 0 --|---------- rank 1 ----------|-- rank 3 --|--- rank 4 --|        (rank 2: nothing)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from vescale_ray.dtensor.ragged_dtensor import RaggedDTensor
from vescale_ray.dtensor.spec import chunk, sharding_of
from vescale_ray.optim.parameters import local_of

RowBlocks = int | Sequence[int] | None
"""Rows of each block: one number (for heads), or all numbers in order (for query, key and value); None: the matrix is not fused."""


@dataclass(frozen=True)
class Holding:
    """Division of a parameter over the ranks that share it.

    Attributes:
        shape: shape of the shared tensor: the parameter, or its section if expert parallelism shards it first.
        intervals: flat elements of it on each rank of ``group``.
        rank: this rank's index in ``group``.
        group: process group of the sharing ranks; None: this rank holds everything.
        replica, replicas, replicate_group: HSDP: this replica's index, the number of replicas, and the ranks that hold the same part.
    """

    shape: tuple[int, ...]
    intervals: tuple[tuple[int, int], ...]
    rank: int
    group: dist.ProcessGroup | None
    replica: int = 0
    replicas: int = 1
    replicate_group: dist.ProcessGroup | None = None

    @property
    def domain(self) -> tuple[str, str]:
        """Key of the parameters that are exchanged together."""
        names = [group.group_name if group is not None else "" for group in (self.group, self.replicate_group)]
        return names[0], names[1]


def holding(param: Tensor, name: str) -> Holding:
    """Return the division of a plain tensor, a RaggedDTensor, or torch's DTensor under ``Shard(0)`` on one mesh dimension (FSDP2).

    Raises:
        ValueError: no single group of ranks can put its matrices together; the message gives the remedy.
    """
    if not isinstance(param, DTensor):
        return Holding(tuple(param.shape), ((0, param.numel()),), 0, None)
    mesh, placements, shape = param.device_mesh, param.placements, tuple(param.shape)
    shown = f"{name} of shape {shape} with placements [{', '.join(map(str, placements))}]"
    if any(p.is_partial() for p in placements):
        raise ValueError(f"{shown} has a reduction pending: redistribute it first")
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(f"{shown} lies on {mesh}, which this process is not part of: build its optimizer on the ranks of the mesh only")
    shards = [i for i, p in enumerate(placements) if not p.is_replicate()]
    ragged = isinstance(param, RaggedDTensor)
    if not ragged and any(type(placements[i]) is not Shard for i in shards):
        raise ValueError(
            f"{shown}: only matrices that RaggedShard or Shard cut can be put together; train it with AdamW (build_optimizer: matrices of "
            f"this kind can be routed by name), or shard it over the data-parallel mesh only, without tensor parallelism"
        )
    # The ranks of dimension ``across`` put matrices together: the ragged one, else the last that cuts rows or experts.
    across = sharding_of(param._spec).mesh_dim if ragged else next((i for i in reversed(shards) if _dim(placements[i]) == 0), None)
    inner = [i for i in shards if i != across and _dim(placements[i]) >= len(shape) - 2]
    if across is None and shards:
        raise ValueError(
            f"{shown}: its matrices are cut along dimension {_dim(placements[shards[0]])}, so that no rank holds whole rows; shard "
            f"dimension 0 (without a shard_placement_fn, fully_shard does), or train it with AdamW (build_optimizer: matrices of this "
            f"kind can be routed by name)"
        )
    if inner:
        raise ValueError(
            f"{shown}: its matrices are also cut by another mesh dimension (tensor parallelism), so that no group of data-parallel ranks "
            f"has all of one; train it with AdamW (build_optimizer: matrices of this kind can be routed by name), or shard it over the "
            f"data-parallel mesh only. Expert parallelism, which shards the first of three dimensions, is supported"
        )
    if ragged:
        sharding = sharding_of(param._spec)
        shape, intervals = tuple(sharding.section), tuple(sharding.placement.intervals(sharding.section))
    elif across is not None:
        if len(shards) > 1:
            raise ValueError(f"{shown}: of torch's own DTensors only those with one Shard(0) are supported; use vescale_ray.fully_shard")
        inside, world = math.prod(shape[1:]), mesh.size(across)
        cuts = [chunk(shape[0], world, r) for r in range(world)]
        intervals = tuple((a * inside, b * inside) for a, b in cuts)
    else:
        return Holding(shape, ((0, math.prod(shape)),), 0, None)
    assert across is not None
    replicas = [i for i, p in enumerate(placements) if p.is_replicate() and mesh.size(i) > 1]
    one = replicas[0] if len(replicas) == 1 else None
    return Holding(
        shape,
        intervals,
        int(coordinate[across]),
        mesh.get_group(across),
        *((int(coordinate[one]), mesh.size(one), mesh.get_group(one)) if one is not None else ()),
    )


def _dim(placement: object) -> int:
    dim = getattr(placement, "dim", 0) if type(placement) is Shard else 0
    return int(dim)


@dataclass(frozen=True)
class MatrixSpan:
    """One matrix: elements ``[start, start + rows * cols)`` of its parameter (or of the section that its ranks share)."""

    start: int
    rows: int
    cols: int

    @property
    def numel(self) -> int:
        return self.rows * self.cols

    def cuts(self, intervals: Sequence[tuple[int, int]]) -> dict[int, tuple[int, int]]:
        """Return the matrix's elements on each rank, in rank order; ranks without any are left out."""
        end = self.start + self.numel
        found = {r: (max(a, self.start) - self.start, min(b, end) - self.start) for r, (a, b) in enumerate(intervals)}
        return {r: (a, b) for r, (a, b) in found.items() if a < b}


def matrices(shape: Sequence[int], row_blocks: RowBlocks, name: str) -> tuple[MatrixSpan, ...]:
    """Return the matrices of a parameter of ``shape``, in memory order.

    Raises:
        ValueError: the shape has not 2 or 3 dimensions, or the row blocks don't fill the rows.
    """
    if len(shape) not in (2, 3):
        raise ValueError(
            f"Muon only supports 2D parameters, and stacks of them, whereas {name} has shape {tuple(shape)}: give it to AdamW "
            f"(build_optimizer does), or view it as a matrix"
        )
    rows, cols = int(shape[-2]), int(shape[-1])
    sizes = _row_blocks(rows, row_blocks, name)
    spans, start = [], 0
    for _ in range(math.prod(shape[:-2])):
        for size in sizes:
            if size and cols:
                spans.append(MatrixSpan(start, size, cols))
            start += size * cols
    return tuple(spans)


def _row_blocks(rows: int, given: RowBlocks, name: str) -> list[int]:
    if given is None:
        return [rows]
    if isinstance(given, int):
        if isinstance(given, bool) or given < 1 or rows % given:
            raise ValueError(f"row_blocks = {given} does not divide the {rows} rows of {name}: give the rows of one head, or all blocks")
        return [given] * (rows // given)
    if sum(given) != rows or any(size < 1 for size in given):
        raise ValueError(f"row_blocks = {tuple(given)} are {sum(given)} rows, but {name} has {rows}: give the rows of each block in order")
    return list(given)


def flat_local(tensor: Tensor) -> Tensor:
    """Return this rank's elements as a flat view that shares memory; of a DTensor, its local part."""
    local = local_of(tensor)
    if not local.is_contiguous():
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} is not contiguous: optimizers of blocks need row-major memory")
    return local.view(-1)


def flat_values(tensor: Tensor) -> Tensor:
    """Return this rank's elements, flat and read-only: a copy if they are not contiguous (plain gradients may be transposed)."""
    return local_of(tensor).reshape(-1)


def check_gradient(param: Tensor, name: str) -> None:
    """Raise RuntimeError or ValueError if the gradient of ``param`` is sparse or is placed unlike the parameter."""
    grad = param.grad
    assert grad is not None
    if grad.is_sparse:
        raise RuntimeError(f"Muon does not support sparse gradients; {name} has one")
    if isinstance(param, DTensor) and (not isinstance(grad, DTensor) or grad.placements != param.placements):
        held = f"placements {list(grad.placements)}" if isinstance(grad, DTensor) else "no placements"
        raise ValueError(
            f"{name} has placements {list(param.placements)}, its gradient {held}: redistribute the gradient to the parameter's"
        )


def held_numel(cuts: Mapping[int, tuple[int, int]]) -> dict[int, int]:
    """Return the number of elements on each rank."""
    return {rank: end - begin for rank, (begin, end) in cuts.items()}


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to compute in: FP32 at least. (BF16 arithmetic rounds differently at vector tails, and so depends on the cut.)"""
    return torch.promote_types(dtype, torch.float32)
