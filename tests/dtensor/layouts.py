"""Random ragged layouts for the property tests, and their oracle: the whole tensor, cut by hand."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.testing._internal.common_distributed
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from vescale_ray.dtensor import RaggedDTensor
from vescale_ray.dtensor.placement import RaggedShard


@dataclass(frozen=True)
class Case:
    """A tensor and each rank's number of units, with zeros, empty tensors, one element and 0 dimensions among the cases."""

    shape: tuple[int, ...]
    dims: int
    counts: tuple[int, ...]

    @property
    def world(self) -> int:
        return len(self.counts)

    @property
    def placement(self) -> RaggedShard:
        counts = self.counts if any(self.counts) else (1, *self.counts[1:])  # without any units rank 0 "holds" them
        return RaggedShard(tuple(range(self.dims)), counts)

    def part(self, full: torch.Tensor, rank: int) -> torch.Tensor:
        """The oracle: the part of the whole tensor that ``rank`` holds."""
        unit = math.prod(self.shape[self.dims :])
        start = sum(self.counts[:rank]) * unit
        return full.reshape(-1)[start : start + self.counts[rank] * unit].reshape(self.counts[rank], *self.shape[self.dims :])


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, ...]:
    return tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 4, 5, 6, 7]), max_size=3)))


@st.composite
def cuts(draw: st.DrawFn, shape: tuple[int, ...], world: int) -> Case:
    dims = draw(st.integers(0, len(shape)))
    units = math.prod(shape[:dims])
    points = sorted(draw(st.lists(st.integers(0, units), min_size=world - 1, max_size=world - 1)))
    return Case(shape, dims, tuple(b - a for a, b in zip([0, *points], [*points, units], strict=True)))


@st.composite
def cases(draw: st.DrawFn, world: int | None = None) -> Case:
    return draw(cuts(draw(shapes()), world or draw(st.integers(1, 8))))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Case, Case]:
    """Two layouts of one tensor on the same ranks."""
    shape, world = draw(shapes()), draw(st.integers(1, 8))
    return draw(cuts(shape, world)), draw(cuts(shape, world))


def values(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """The same distinct values on every rank."""
    generator = torch.Generator().manual_seed(seed)
    numel = math.prod(shape)
    order = torch.randperm(numel, generator=generator) - numel // 2
    return (order % 2 == 0 if dtype is torch.bool else order.to(dtype)).reshape(shape)


def ragged(case: Case, full: torch.Tensor, mesh: DeviceMesh, rank: int) -> RaggedDTensor:
    """Wrap this rank's part, without communication."""
    return RaggedDTensor.from_local(case.part(full, rank).clone(), mesh, [case.placement], shape=case.shape)


def one_dim_mesh(world: int) -> DeviceMesh:
    return init_device_mesh("cpu", (world,))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor as a plain one, from any tensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def hsdp(case: Case) -> tuple[Placement, Placement]:
    return Replicate(), case.placement
