"""TensorSpec and Layout: the planner's input and result. Both are frozen, and a Layout validates itself when it is built."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

from vescale_ray.geometry import Block, Shape, row_numel

START_BYTES = 64
"""Alignment of every tensor's start, in bytes (a cache line). Kernels then take their vector path. Shard cuts of elements fall at
multiples of 16 FP32 elements, where fused optimizers give the same bits as on the whole tensor."""
PART_BYTES = 128
"""Each rank's part of a buffer is a multiple of this many bytes in the narrowest dtype."""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor, as the planner needs to know it.

    Attributes:
        block: the piece that may not be cut; None: no requirement, so the planner cuts at rows or at aligned elements.
        dtype: the narrowest dtype that the tensor is communicated in; it turns bytes of alignment into elements.
        stored_rows: rows that each matrix of a stack ``[.., n, m]`` is stored with; the first ``n`` are in use. The parameter is then
            a strided view: each matrix is contiguous, with a constant gap of ``(stored_rows - n) * m`` elements behind it. None: no
            gap. Use it only for a consumer that accepts strided parameters.
    """

    name: str
    shape: Shape
    block: Block | None = None
    dtype: torch.dtype = torch.float32
    stored_rows: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(n) for n in self.shape))
        if any(n < 0 for n in self.shape):
            raise ValueError(f"tensor {self.name!r} has a negative size in its shape {self.shape}")
        if self.stored_rows is not None and (len(self.shape) < 3 or self.stored_rows < self.shape[-2]):
            raise ValueError(
                f"tensor {self.name!r} of shape {self.shape} can't be stored with {self.stored_rows} rows per matrix: "
                f"that needs a stack [.., n, m] and at least its n rows"
            )

    @property
    def stored_shape(self) -> Shape:
        """Shape in the buffer: ``shape`` with the rows of each matrix padded to ``stored_rows``."""
        if self.stored_rows is None:
            return self.shape
        return (*self.shape[:-2], self.stored_rows, self.shape[-1])

    @property
    def numel(self) -> int:
        """Number of elements in the buffer, gaps included."""
        return math.prod(self.stored_shape)

    @property
    def matrix_numel(self) -> tuple[int, int]:
        """Number of elements of one matrix of a stack, and of the distance between the starts of two in the buffer."""
        return self.shape[-2] * self.shape[-1], self.stored_shape[-2] * self.shape[-1]

    def unstored(self, position: int) -> int:
        """Return how many of the tensor's own elements lie before stored element ``position``."""
        if self.stored_rows is None or not self.numel:
            return position
        used, stride = self.matrix_numel
        return position // stride * used + min(position % stride, used)

    @property
    def granularity(self) -> int:
        """Number of elements of the block that the caller asks for; 1 without a requirement."""
        return (self.block or Block.element()).numel(self.stored_shape)

    @property
    def period(self) -> int:
        """Number of elements after which the possible cuts repeat: one matrix if its last block is shorter, else :attr:`granularity`."""
        return (self.block or Block.element()).period(self.stored_shape)

    @property
    def row_granularity(self) -> int:
        """Number of elements of one row. A tensor without a block requirement is cut at rows if that costs no padding."""
        return max(1, min(row_numel(self.stored_shape), self.numel))

    @property
    def note(self) -> str | None:
        """A warning if the block is larger than the tensor (or than each matrix of a stack); else None."""
        if self.block is None or self.block.kind not in ("rows", "tile") or not self.numel or not self.shape:
            return None
        rows = self.stored_shape[-2] if len(self.shape) >= 2 else self.shape[0]
        if self.block.row_count <= rows:
            return None
        what = "matrix" if len(self.shape) >= 3 else "tensor"
        return f"{self.name}: {self.block} is larger than the {what} of {rows} rows: one block"


@dataclass(frozen=True)
class KeptElements:
    """Positions of a rank's elements in the flat buffer of ``numel`` elements that it keeps between steps; each tensor is contiguous."""

    offsets: dict[str, int]
    lengths: dict[str, int]
    pieces: dict[str, tuple[tuple[int, int], ...]]
    """Positions of the same elements in the rank's part of the communicated buffer: ``(start, end)`` pairs in order."""
    numel: int
    in_place: bool
    """True if the kept buffer and the communicated part are the same memory."""


@dataclass(frozen=True)
class Layout:
    """A proven layout of one group's tensors; the package's docstring has a drawing. Sizes and offsets are in elements.

    The constructor validates the layout, independently of the search, and raises ValueError with the tensor at fault.
    """

    specs: tuple[TensorSpec, ...]
    num_shards: int
    shard_numel: int
    """Number of elements of each rank's part."""
    offsets: dict[str, int] = field(hash=False)
    """Start of each tensor in the global buffer."""
    granularity: dict[str, int] = field(hash=False)
    """Number of elements of each tensor's block, as planned. A shard boundary lies at a multiple of it from the start of the tensor, or of
    one of its matrices if they end in a shorter block."""
    lower_bound: int
    """Proven bound: no layout of these tensors, in any order, has a smaller shard."""

    def __post_init__(self) -> None:
        end, last = 0, ""
        for spec in sorted(self.specs, key=lambda s: (self.offsets[s.name], s.numel)):
            start, block, size = self.offsets[spec.name], self.granularity[spec.name], self.shard_numel
            if start < end and spec.numel:
                raise ValueError(f"tensors {last!r} and {spec.name!r} overlap at element {start}")
            first = (start // size + 1) * size if size else start
            if spec.numel and first < start + spec.numel:
                period = block if spec.block is None else spec.period
                inside = np.arange(first - start, spec.numel, size) if size % period else np.array([first - start])
                cut = inside[inside % period % block != 0]
                if len(cut):
                    raise ValueError(f"the shard boundary at {start + cut[0]} cuts a block of {block} elements of {spec.name!r} at {start}")
            if spec.numel:
                end, last = start + spec.numel, spec.name
        if end > self.numel:
            raise ValueError(f"tensor {last!r} ends at element {end} of a buffer of {self.numel}")
        if self.lower_bound > self.shard_numel:
            raise ValueError(f"a shard of {self.shard_numel} elements is below the lower bound {self.lower_bound}")

    @property
    def numel(self) -> int:
        """Number of elements of the global buffer, padding included."""
        return self.num_shards * self.shard_numel

    @cached_property
    def order(self) -> tuple[str, ...]:
        """Names of the tensors by position in the buffer."""
        return tuple(s.name for s in sorted(self.specs, key=lambda s: (self.offsets[s.name], s.numel)))

    @cached_property
    def _by_name(self) -> dict[str, TensorSpec]:
        return {s.name: s for s in self.specs}

    @property
    def tensor_numel(self) -> int:
        """Number of elements of all tensors, without padding and without the gaps of ``stored_rows``."""
        return sum(math.prod(s.shape) for s in self.specs)

    @property
    def padding_ratio(self) -> float:
        """Padding as a fraction of the tensors' elements; 0 for a group without elements."""
        return (self.numel - self.tensor_numel) / self.tensor_numel if self.tensor_numel else 0.0

    @property
    def optimal(self) -> bool:
        """True only if the shard size meets the proven lower bound."""
        return self.shard_numel == self.lower_bound

    @property
    def gap(self) -> float:
        """Distance of the shard size from the proven bound, as a fraction of the bound; 0 if the layout is optimal."""
        return (self.shard_numel - self.lower_bound) / self.lower_bound if self.lower_bound else 0.0

    @property
    def notes(self) -> tuple[str, ...]:
        """One line for each block that is larger than its tensor."""
        return tuple(note for spec in self.specs if (note := spec.note) is not None)

    def cut(self, name: str) -> str:
        """Name the places where shard boundaries may cut the tensor: its block, or the planner's choice if it has no requirement."""
        spec = self._by_name[name]
        if spec.block is not None:
            return str(spec.block)
        return "rows" if 1 < self.granularity[name] or spec.row_granularity == 1 else "aligned elements"

    def stored_shape(self, name: str) -> Shape:
        """Return the tensor's shape in the buffer, gaps included."""
        return self._by_name[name].stored_shape

    def view(self, flat: torch.Tensor, name: str) -> torch.Tensor:
        """Return the whole tensor as a view of the full buffer ``flat`` [numel]: contiguous, or strided with a gap behind each matrix."""
        spec, start = self._by_name[name], self.offsets[name]
        stored = flat[start : start + spec.numel].view(spec.stored_shape)
        return stored if spec.stored_rows is None else stored.narrow(-2, 0, spec.shape[-2])

    def local_range(self, name: str, rank: int) -> tuple[int, int]:
        """Return the stored elements ``[start, end)`` of the flat tensor that ``rank`` holds, gaps counted; ``start == end`` if none."""
        offset, numel = self.offsets[name], self._by_name[name].numel
        low, high = rank * self.shard_numel, (rank + 1) * self.shard_numel
        start = min(max(low - offset, 0), numel)
        return start, min(max(high - offset, start), numel)

    def shard_offset(self, name: str, rank: int) -> int:
        """Return the start of the tensor's range in ``rank``'s part; 0 if the rank holds none of it."""
        start, end = self.local_range(name, rank)
        return self.offsets[name] + start - rank * self.shard_numel if end > start else 0

    def tensor_range(self, name: str, rank: int) -> tuple[int, int]:
        """Return the elements ``[start, end)`` of the flat tensor that ``rank`` holds, gaps not counted; ``start == end`` if none."""
        start, end = self.local_range(name, rank)
        spec = self._by_name[name]
        return spec.unstored(start), spec.unstored(end)

    def pieces(self, name: str, rank: int) -> tuple[tuple[int, int], ...]:
        """Return the positions of the tensor's elements in ``rank``'s part, as ``(start, end)`` in the tensor's order.

        There is one piece, or one for each matrix of a stack that is stored with gaps.
        """
        spec, (start, end) = self._by_name[name], self.local_range(name, rank)
        base = self.shard_offset(name, rank) - start
        if end == start or spec.stored_rows is None:
            return ((base + start, base + end),) if end > start else ()
        used, stride = spec.matrix_numel
        ends = ((max(start, at), min(end, at + used)) for at in range(start // stride * stride, end, stride))
        return tuple((base + low, base + high) for low, high in ends if high > low)

    def kept(self, rank: int) -> KeptElements:
        """Return the buffer that ``rank`` keeps between steps: its part, or a copy without gaps if some lie between a tensor's
        elements."""
        pieces = {name: self.pieces(name, rank) for name in self.order}
        lengths = {name: sum(end - start for start, end in held) for name, held in pieces.items()}
        if all(len(held) <= 1 for held in pieces.values()):
            return KeptElements({name: held[0][0] if held else 0 for name, held in pieces.items()}, lengths, pieces, self.shard_numel, True)
        quantum = max(1, START_BYTES // min(s.dtype.itemsize for s in self.specs))
        offsets, end = {}, 0
        for name in self.order:
            offsets[name] = end
            end += -(-lengths[name] // quantum) * quantum
        return KeptElements(offsets, lengths, pieces, end, False)

    def dims(self, name: str) -> tuple[int, ...]:
        """Return the shortest prefix of dimensions (at least one) whose units no shard boundary cuts, for ``RaggedShard(dims, ..)``."""
        spec = self._by_name[name]
        cuts = {cut for r in self.ranks_of(name) for cut in self.tensor_range(name, r)}
        for k in range(1, len(spec.shape) + 1):
            inner = math.prod(spec.shape[k:])
            if inner == 0 or all(cut % inner == 0 for cut in cuts):
                return tuple(range(k))
        return tuple(range(len(spec.shape)))

    def units(self, name: str) -> tuple[int, ...]:
        """Return the relative units of every rank, gcd-reduced, for ``RaggedShard(dims(name), units)``."""
        counts = self.counts(name)
        divisor = math.gcd(*counts)
        return tuple(c // divisor for c in counts) if divisor else (1, *(0 for _ in counts[1:]))

    def counts(self, name: str) -> list[int]:
        """Return the number of the tensor's elements on each rank."""
        counts = [0] * self.num_shards
        for rank in self.ranks_of(name):
            start, end = self.tensor_range(name, rank)
            counts[rank] = end - start
        return counts

    def ranks_of(self, name: str) -> range:
        """Return the ranks that hold a part of the tensor."""
        offset, numel = self.offsets[name], self._by_name[name].numel
        if not numel or not self.shard_numel:
            return range(0)
        return range(offset // self.shard_numel, (offset + numel - 1) // self.shard_numel + 1)

    @cached_property
    def description(self) -> tuple[str, ...]:
        """The layout as text, a line for each tensor; two ranks compare it to find where they differ."""
        head = f"{self.num_shards} shards of {self.shard_numel} elements"
        lines = (
            f"{s.name}: {list(s.stored_shape)} {s.block} {s.dtype} at {self.offsets[s.name]}, cut at {self.granularity[s.name]}"
            for s in sorted(self.specs, key=lambda s: s.name)
        )
        return head, *lines

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of :attr:`description`; the ranks compare it to check that they have the same plan."""
        return hashlib.sha256(json.dumps(self.description).encode()).hexdigest()
