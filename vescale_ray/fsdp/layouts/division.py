"""Division of a group's unsharded buffer into the parts of its ranks.

By default the buffer is cut at the layout's boundaries (:class:`Cuts`): each part is a piece of the buffer, and the all-gather writes
directly to the place of the parameters. Parameters with a plain ``Shard`` placement (``shard_placement_fn``) are divided one by one
(:class:`Chunks`): a part holds this rank's chunk of each of them, and gathered chunks are copied to the parameters, as in FSDP2.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.distributed.tensor import Placement, Shard

from vescale_ray.dbuffer import DBuffer
from vescale_ray.dtensor.placement import RaggedShard
from vescale_ray.errors import BadArgument
from vescale_ray.planner import START_BYTES, Bundle, Layout
from vescale_ray.planner.placement.layout import KeptElements


class Division(Protocol):
    """Interface: how a group's buffer is divided among its ranks. ``rank`` is this rank."""

    layout: Layout
    """Layout of the unsharded buffer."""
    kept: KeptElements
    """Places of this rank's elements in its shard."""
    part_numel: int
    """Number of elements of each rank's part of the all-gather."""
    copies: bool
    """True if parts are copied into and out of the unsharded buffer."""

    def placement(self, name: str) -> Placement: ...
    def local_shape(self, name: str) -> tuple[int, ...]: ...
    def own(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Return this rank's elements of the whole tensor ``value``, of ``local_shape``."""
        ...

    def empty_part(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a new part of this rank, with zeros between the tensors."""
        ...

    def join(self, parts: torch.Tensor, flat: torch.Tensor) -> None:
        """Copy the ranks' parts, in rank order, into the unsharded buffer."""
        ...

    def split(self, flat: torch.Tensor, parts: torch.Tensor) -> None:
        """Copy the unsharded gradients into the ranks' parts; padding becomes zero."""
        ...

    def describe(self) -> tuple[str, ...]:
        """Return lines of text that determine which rank holds what."""
        ...

    def ranges(self, name: str) -> tuple[tuple[int, int], ...]:
        """Return the flat elements ``[start, end)`` of each rank. If the tensor is divided along an inner dimension, the ranges only tell
        the number of elements, rank after rank."""
        ...


class Cuts:
    """Division at the layout's boundaries between shards. ``bundle`` is the plan of all buffers, of which ``layout`` is one."""

    copies = False

    def __init__(self, layout: Layout, rank: int, bundle: Bundle) -> None:
        self.layout, self.rank, self.bundle = layout, rank, bundle
        self.kept = layout.kept(rank)
        self.part_numel = layout.shard_numel
        self._shapes = {spec.name: spec.shape for spec in layout.specs}
        self._placements: dict[str, RaggedShard] = {}

    def placement(self, name: str) -> RaggedShard:
        known = self._placements.get(name)
        if known is None:
            known = self._placements[name] = RaggedShard.of_intervals(self._shapes[name], self.layout.counts(name))
        return known

    def local_shape(self, name: str) -> tuple[int, ...]:
        return self.placement(name).local_shape(self._shapes[name], self.rank)

    def own(self, name: str, value: torch.Tensor) -> torch.Tensor:
        start, end = self.layout.tensor_range(name, self.rank)
        return value.reshape(-1)[start:end].view(self.local_shape(name))

    def empty_part(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return DBuffer.empty(self.layout, rank=self.rank, dtype=dtype, device=device).flat

    def join(self, parts: torch.Tensor, flat: torch.Tensor) -> None:
        raise AssertionError("parts are gathered where they are read")

    def split(self, flat: torch.Tensor, parts: torch.Tensor) -> None:
        raise AssertionError("gradients are where they are reduced")

    def describe(self) -> tuple[str, ...]:
        return self.layout.description

    def ranges(self, name: str) -> tuple[tuple[int, int], ...]:
        return tuple(self.layout.tensor_range(name, rank) for rank in range(self.layout.num_shards))


@dataclass(frozen=True)
class _Chunked:
    """A tensor that is divided along ``dim`` into chunks of ``size``, the last ones shorter or empty, like ``torch.chunk``."""

    shape: tuple[int, ...]
    dim: int
    size: int
    offset: int
    """Offset of the chunk in each part."""

    def chunk_shape(self, rank: int) -> tuple[int, ...]:
        length = max(0, min(self.size, self.shape[self.dim] - rank * self.size))
        return (*self.shape[: self.dim], length, *self.shape[self.dim + 1 :])


class Chunks:
    """Division of every tensor along one of its dimensions, like a ``Shard`` placement. Only dimension 0 may be uneven.

    Args:
        layout: the layout of the unsharded buffer, for one rank.
        dims: the dimension of each tensor.

    Raises:
        BadArgument: a tensor has no such dimension.
        NotImplementedError: the ranks can't divide a dimension other than 0 evenly (as in FSDP2).
    """

    copies = True

    def __init__(self, layout: Layout, dims: Mapping[str, int], rank: int, world: int) -> None:
        self.layout, self.rank, self.world = layout, rank, world
        self._tensors: dict[str, _Chunked] = {}
        itemsize = min(s.dtype.itemsize for s in layout.specs)
        quantum, end = max(1, START_BYTES // itemsize), 0
        for spec in layout.specs:
            dim = dims[spec.name]
            if not -len(spec.shape) <= dim < len(spec.shape):
                raise BadArgument(
                    f"Shard dim {dim} is invalid for {len(spec.shape)}D tensor {spec.name!r} of shape {spec.shape}, for which "
                    f"shard_placement_fn gave it"
                    + (
                        f": give one from 0 to {len(spec.shape) - 1}, or return None"
                        if spec.shape
                        else f". Change {spec.name} to a 1D tensor with numel equal to 1, or return None"
                    )
                )
            dim %= len(spec.shape)
            if dim and spec.shape[dim] % world:
                raise NotImplementedError(
                    f"FSDP does not support uneven sharding on dim {dim}: shard_placement_fn gave it for {spec.name!r} of shape "
                    f"{spec.shape}, which {world} ranks do not divide; only dimension 0 may be uneven: return Shard(0), or None"
                )
            one = _Chunked(spec.shape, dim, -(-spec.shape[dim] // world), end)
            self._tensors[spec.name] = one
            end += -(-math.prod(one.chunk_shape(0)) // quantum) * quantum
        part = max(1, 128 // itemsize)
        self.part_numel = -(-end // part) * part
        lengths = {name: math.prod(one.chunk_shape(rank)) for name, one in self._tensors.items()}
        offsets = {name: one.offset for name, one in self._tensors.items()}
        pieces: dict[str, tuple[tuple[int, int], ...]] = {n: ((offsets[n], offsets[n] + k),) if k else () for n, k in lengths.items()}
        self.kept = KeptElements(offsets, lengths, pieces, self.part_numel, True)

    def placement(self, name: str) -> Shard:
        return Shard(self._tensors[name].dim)

    def local_shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].chunk_shape(self.rank)

    def own(self, name: str, value: torch.Tensor) -> torch.Tensor:
        return self._chunk(name, value, self.rank)

    def empty_part(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros(self.part_numel, dtype=dtype, device=device)

    def join(self, parts: torch.Tensor, flat: torch.Tensor) -> None:
        for whole, part in self._pairs(parts, flat):
            whole.copy_(part)

    def split(self, flat: torch.Tensor, parts: torch.Tensor) -> None:
        parts.zero_()
        for whole, part in self._pairs(parts, flat):
            part.copy_(whole)

    def describe(self) -> tuple[str, ...]:
        return (f"{self.world} parts of {self.part_numel}", *(f"{n}: {list(t.shape)} Shard({t.dim})" for n, t in self._tensors.items()))

    def ranges(self, name: str) -> tuple[tuple[int, int], ...]:
        one = self._tensors[name]
        counts = [math.prod(one.chunk_shape(rank)) for rank in range(self.world)]
        starts = [sum(counts[:rank]) for rank in range(self.world)]
        return tuple((a, a + n) for a, n in zip(starts, counts, strict=True))

    def _chunk(self, name: str, value: torch.Tensor, rank: int) -> torch.Tensor:
        one = self._tensors[name]
        length = one.chunk_shape(rank)[one.dim]
        return value.narrow(one.dim, min(rank * one.size, one.shape[one.dim]), length)

    def _pairs(self, parts: torch.Tensor, flat: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield pairs of every chunk in the unsharded buffer and its place in its rank's part."""
        by_rank: Sequence[torch.Tensor] = parts.view(self.world, self.part_numel).unbind()
        for name, one in self._tensors.items():
            whole = self.layout.view(flat, name)
            for rank, part in enumerate(by_rank):
                shape = one.chunk_shape(rank)
                if math.prod(shape):
                    yield self._chunk(name, whole, rank), part[one.offset : one.offset + math.prod(shape)].view(shape)
