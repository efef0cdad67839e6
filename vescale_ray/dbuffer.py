"""DBuffer: a group's tensors in one flat buffer, each tensor a slice of it ([veScale-FSDP], Distributed Buffer).

    Layout            |-- wq --|-- wk --|pad|------- w1 -------|-- w2 --|pad|      num_shards * shard_numel elements
    full buffer       all elements, on every rank (gathered parameters, or gradients before reduction)
    rank r's shard    elements [r * shard_numel, (r + 1) * shard_numel)

Collectives read and write the flat memory itself, without copies. Casting, zeroing, scaling and adding are one kernel for all
tensors. A DBuffer owns no process group and no stream; :mod:`vescale_ray.fsdp` runs the collectives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import lru_cache

import torch

from vescale_ray.planner import Layout
from vescale_ray.planner.placement.layout import KeptElements


class DBuffer:
    """One flat tensor, viewed as the tensors of ``layout``.

    Args:
        layout: position of every tensor.
        flat: 1-D contiguous tensor of ``layout.numel`` elements (``rank`` is None) or ``layout.shard_numel`` elements.
        rank: rank of this shard; None for a full buffer.

    Raises:
        ValueError: the shape of ``flat`` does not match the layout, or ``rank`` does not exist.
    """

    __slots__ = ("_shapes", "flat", "layout", "rank")

    def __init__(self, layout: Layout, flat: torch.Tensor, *, rank: int | None) -> None:
        if rank is not None and not 0 <= rank < layout.num_shards:
            raise ValueError(f"there is no rank {rank} in a layout with {layout.num_shards} shards")
        expected = layout.numel if rank is None else layout.shard_numel
        if flat.dim() != 1 or flat.numel() != expected or not flat.is_contiguous():
            raise ValueError(f"a flat, contiguous tensor of {expected} elements is needed, not one of shape {tuple(flat.shape)}")
        self.layout, self.flat, self.rank = layout, flat, rank
        self._shapes = {spec.name: spec.shape for spec in layout.specs}

    @classmethod
    def empty(cls, layout: Layout, *, rank: int | None, dtype: torch.dtype, device: torch.device | str) -> DBuffer:
        """Create a buffer of uninitialised memory with zeroed padding; ``device`` may be "meta"."""
        buffer = cls(layout, torch.empty(layout.numel if rank is None else layout.shard_numel, dtype=dtype, device=device), rank=rank)
        if buffer.flat.device.type != "meta":
            buffer.zero_padding()
        return buffer

    @property
    def dtype(self) -> torch.dtype:
        return self.flat.dtype

    @property
    def device(self) -> torch.device:
        return self.flat.device

    @property
    def nbytes(self) -> int:
        return self.flat.numel() * self.flat.element_size()

    def range(self, name: str) -> tuple[int, int]:
        """Return the elements ``[start, end)`` of ``flat`` that belong to tensor ``name``; empty if this shard has none of it."""
        if self.rank is None:
            start = self.layout.offsets[name]
            return start, start + math.prod(self.layout.stored_shape(name))
        low, high = self.layout.local_range(name, self.rank)
        start = self.layout.shard_offset(name, self.rank)
        return start, start + high - low

    def tensor(self, name: str) -> torch.Tensor:
        """Return the tensor as a view.

        In a full buffer it has its own shape (strided if it is stored with gaps). In a shard it is 1-D: this rank's elements, gaps
        included.
        """
        if self.rank is None:
            return self.layout.view(self.flat, name)
        start, end = self.range(name)
        return self.flat[start:end]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor by name, in the layout's order."""
        for name in self.layout.order:
            yield name, self.tensor(name)

    def shard(self, rank: int) -> DBuffer:
        """Return rank ``rank``'s part of a full buffer, as a view."""
        if self.rank is not None:
            raise ValueError(f"this is already the shard of rank {self.rank}")
        start = rank * self.layout.shard_numel
        return DBuffer(self.layout, self.flat[start : start + self.layout.shard_numel], rank=rank)

    def load(self, name: str, full: torch.Tensor) -> None:
        """Copy tensor ``name`` from its full value; a shard copies this rank's range. Casts and moves devices."""
        if tuple(full.shape) != self._shapes[name]:
            raise ValueError(f"{name!r} has shape {self._shapes[name]}, not {tuple(full.shape)}")
        start, end = self.range(name)
        stored = self.layout.stored_shape(name)
        if stored != self._shapes[name]:
            padded = full.new_zeros(stored)
            padded.narrow(-2, 0, full.shape[-2]).copy_(full)
            full = padded
        if end > start:
            low = 0 if self.rank is None else self.layout.local_range(name, self.rank)[0]
            self.flat[start:end].copy_(full.reshape(-1)[low : low + end - start])

    # Each operator below is one kernel for any number of tensors.

    def zero_(self) -> DBuffer:
        self.flat.zero_()
        return self

    def scale_(self, factor: float) -> DBuffer:
        self.flat.mul_(factor)
        return self

    def add_(self, other: DBuffer) -> DBuffer:
        self._same_place(other)
        self.flat.add_(other.flat)
        return self

    def copy_(self, other: DBuffer) -> DBuffer:
        """Copy, with a cast if the dtypes differ."""
        self._same_place(other)
        self.flat.copy_(other.flat)
        return self

    def cast(self, dtype: torch.dtype) -> DBuffer:
        """Return a copy in another dtype."""
        return DBuffer(self.layout, self.flat.to(dtype, copy=True), rank=self.rank)

    def zero_padding(self) -> None:
        """Zero the elements outside all tensors. Collectives carry padding along, so it must never hold NaN or stale values."""
        for start, end in gaps(self.layout, self.rank):
            self.flat[start:end].zero_()

    def _same_place(self, other: DBuffer) -> None:
        if self.rank != other.rank or self.layout.fingerprint != other.layout.fingerprint:
            raise ValueError("the two buffers have different layouts or belong to different ranks")

    def __repr__(self) -> str:
        where = "full" if self.rank is None else f"shard {self.rank} of {self.layout.num_shards}"
        return f"DBuffer({where}, {len(self.layout.specs)} tensors, {self.flat.numel()} x {self.dtype}, {self.device})"


class KeptShard:
    """A rank's elements of a group between steps: each tensor contiguous, in one flat buffer.

    Usually this is the same memory as the rank's part of the buffer (``kept.in_place``). If gaps lie between elements of a tensor
    there (several experts stored with ``stored_rows``), it is a buffer without these gaps. :meth:`spread` and :meth:`collect` then
    copy between the two, with one kernel for each tensor or matrix.

    Args:
        kept: result of :meth:`vescale_ray.planner.Layout.kept`.
        flat: 1-D, contiguous, of ``kept.numel`` elements.

    Raises:
        ValueError: ``flat`` has another shape.
    """

    __slots__ = ("flat", "kept")

    def __init__(self, kept: KeptElements, flat: torch.Tensor) -> None:
        if flat.dim() != 1 or flat.numel() != kept.numel or not flat.is_contiguous():
            raise ValueError(f"a flat, contiguous tensor of {kept.numel} elements is needed, not one of shape {tuple(flat.shape)}")
        self.kept, self.flat = kept, flat

    @classmethod
    def empty(
        cls, kept: KeptElements, part: Callable[[torch.dtype, torch.device], torch.Tensor], *, dtype: torch.dtype, device: torch.device
    ) -> KeptShard:
        """Create uninitialised memory with zeros outside the tensors; ``device`` may be "meta". ``part`` creates a part of the buffer."""
        return cls(kept, part(dtype, device) if kept.in_place else torch.zeros(kept.numel, dtype=dtype, device=device))

    def tensor(self, name: str) -> torch.Tensor:
        """Return this rank's elements of the tensor: a 1-D view."""
        start = self.kept.offsets[name]
        return self.flat[start : start + self.kept.lengths[name]]

    def spread(self, part: torch.Tensor, *, non_blocking: bool = False) -> None:
        """Copy the shard into ``part``, this rank's part of a buffer, with a cast. If the shard leaves out gaps of ``part``, they stay
        unchanged."""
        if self.kept.in_place:
            part.copy_(self.flat, non_blocking=non_blocking)
        for mine, there in self._pairs(part):
            there.copy_(mine, non_blocking=non_blocking)

    def collect(self, part: torch.Tensor) -> None:
        """Copy the shard from ``part``, this rank's part of a buffer of the same layout, with a cast."""
        if self.kept.in_place:
            self.flat.copy_(part)
        for mine, there in self._pairs(part):
            mine.copy_(there)

    def _pairs(self, part: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        if self.kept.in_place:
            return
        for name, pieces in self.kept.pieces.items():
            at = self.kept.offsets[name]
            for start, end in pieces:
                yield self.flat[at : at + end - start], part[start:end]
                at += end - start


@lru_cache(maxsize=4096)
def gaps(layout: Layout, rank: int | None) -> tuple[tuple[int, int], ...]:
    """Return the padding of the full buffer or of one shard, as element ranges of it."""
    holes: list[tuple[int, int]] = []
    specs = {spec.name: spec for spec in layout.specs}
    end = 0
    for name in layout.order:
        start, spec = layout.offsets[name], specs[name]
        if start > end:
            holes.append((end, start))
        end = max(end, start + spec.numel)
        if spec.stored_rows is not None and spec.stored_rows > spec.shape[-2]:
            used, stride = spec.shape[-2] * spec.shape[-1], spec.stored_rows * spec.shape[-1]
            holes += [(at + used, at + stride) for at in range(start, start + spec.numel, stride)]
    if layout.numel > end:
        holes.append((end, layout.numel))
    if rank is None:
        return tuple(holes)
    low, high = rank * layout.shard_numel, (rank + 1) * layout.shard_numel
    return tuple((max(s, low) - low, min(e, high) - low) for s, e in holes if s < high and e > low)
