"""Structure-aware planning: where every tensor of a group lies in the global buffer ([veScale-FSDP], section on planning).

The global buffer has ``num_shards`` equal parts of ``shard_numel`` elements. Tensors lie in it one after another, each
contiguous, padding only between them or at the end, and no shard boundary cuts a block:

    tensors  |--- q_proj ---|--- o_proj ---| |-------- up_proj --------|..|
    ranks    |      0      |      1      |      2      |      3      |       boundaries at multiples of shard_numel

The rule behind all of it: a boundary ``kS`` inside a tensor at offset ``o`` with blocks of ``g`` elements needs
``(kS - o) mod g == 0``. One boundary only fixes the offset; two or more also force ``S mod g == 0``. So only tensors that
span two boundaries constrain the shard size, and there is never a common multiple over all tensors.

For one order of the tensors :func:`plan_layout` finds the exact smallest shard size; over several orders it stops when the
order-free lower bound is met. The result is a pure function of its inputs: the same on every rank and in every process.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

from vescale_ray.geometry import Block, Shape, row_numel

START_BYTES = 64
"""Every tensor starts at a multiple of this (a cache line), so that kernels take their vector path and element cuts fall where
fused optimizers give the same bits as on the whole tensor (cuts at multiples of 16 FP32 elements)."""

ROW_PADDING_LIMIT = 0.001
"""A tensor without a block requirement is cut at whole rows if that makes the shard at most this fraction larger."""

_FIRST_CHUNK, _LAST_CHUNK = 64, 65536


@dataclass(frozen=True)
class TensorSpec:
    """What the planner has to know of one tensor.

    Attributes:
        block: the piece that may not be cut; None: no requirement, the planner cuts at rows or at aligned elements.
        dtype: the narrowest dtype that the tensor is communicated in; it turns bytes of alignment into elements.
    """

    name: str
    shape: Shape
    block: Block | None = None
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(n) for n in self.shape))
        if any(n < 0 for n in self.shape):
            raise ValueError(f"tensor {self.name!r} has a negative size in its shape {self.shape}")

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """A proven layout of one group's tensors: see the module's drawing. Sizes and offsets are in elements.

    Validates itself on construction, independently of how it was found; raises ValueError naming what is wrong.
    """

    specs: tuple[TensorSpec, ...]
    num_shards: int
    shard_numel: int
    """Elements of each rank's part."""
    offsets: dict[str, int] = field(hash=False)
    """Where each tensor starts in the global buffer."""
    granularity: dict[str, int] = field(hash=False)
    """Elements of each tensor's block, as planned: a shard boundary is a multiple of it from the tensor's start."""
    lower_bound: int
    """No layout of these tensors, in any order, has a smaller shard."""

    def __post_init__(self) -> None:
        end, last = 0, ""
        for spec in sorted(self.specs, key=lambda s: (self.offsets[s.name], s.numel)):
            start, block, size = self.offsets[spec.name], self.granularity[spec.name], self.shard_numel
            if start < end and spec.numel:
                raise ValueError(f"tensors {last!r} and {spec.name!r} overlap at element {start}")
            first = (start // size + 1) * size if size else start
            if spec.numel and first < start + spec.numel:
                if (first - start) % block:
                    raise ValueError(f"the shard boundary at {first} cuts a block of {block} elements of {spec.name!r} at {start}")
                if first + size < start + spec.numel and size % block:
                    raise ValueError(f"{spec.name!r} spans several shards, but its block of {block} does not divide the shard of {size}")
            if spec.numel:
                end, last = start + spec.numel, spec.name
        if end > self.numel:
            raise ValueError(f"tensor {last!r} ends at element {end} of a buffer of {self.numel}")
        if self.lower_bound > self.shard_numel:
            raise ValueError(f"a shard of {self.shard_numel} elements is below the lower bound {self.lower_bound}")

    @property
    def numel(self) -> int:
        """Elements of the global buffer, padding included."""
        return self.num_shards * self.shard_numel

    @cached_property
    def order(self) -> tuple[str, ...]:
        """Names by position in the buffer."""
        return tuple(s.name for s in sorted(self.specs, key=lambda s: (self.offsets[s.name], s.numel)))

    @cached_property
    def _by_name(self) -> dict[str, TensorSpec]:
        return {s.name: s for s in self.specs}

    @property
    def tensor_numel(self) -> int:
        """Elements of all tensors, without padding."""
        return sum(s.numel for s in self.specs)

    @property
    def padding_ratio(self) -> float:
        """Padding as a fraction of the tensors' elements; 0 for a group without elements."""
        return (self.numel - self.tensor_numel) / self.tensor_numel if self.tensor_numel else 0.0

    @property
    def optimal(self) -> bool:
        """True only if the shard size meets the proven lower bound."""
        return self.shard_numel == self.lower_bound

    def local_range(self, name: str, rank: int) -> tuple[int, int]:
        """The tensor's flat elements ``[start, end)`` that ``rank`` holds; ``start == end`` if none."""
        offset, numel = self.offsets[name], self._by_name[name].numel
        low, high = rank * self.shard_numel, (rank + 1) * self.shard_numel
        start = min(max(low - offset, 0), numel)
        return start, min(max(high - offset, start), numel)

    def shard_offset(self, name: str, rank: int) -> int:
        """Where, in ``rank``'s part, its range of the tensor begins; 0 if the rank holds none of it."""
        start, end = self.local_range(name, rank)
        return self.offsets[name] + start - rank * self.shard_numel if end > start else 0

    def dims(self, name: str) -> tuple[int, ...]:
        """The shortest prefix of dimensions (at least one) whose units no shard boundary cuts, for ``RaggedShard(dims, ..)``."""
        spec = self._by_name[name]
        cuts = {cut for r in self._ranks_of(name) for cut in self.local_range(name, r)}
        for k in range(1, len(spec.shape) + 1):
            inner = math.prod(spec.shape[k:])
            if inner == 0 or all(cut % inner == 0 for cut in cuts):
                return tuple(range(k))
        return tuple(range(len(spec.shape)))

    def units(self, name: str) -> tuple[int, ...]:
        """Relative units of every rank, gcd-reduced, for ``RaggedShard(dims(name), units)``."""
        spec = self._by_name[name]
        if spec.numel == 0:
            return (1, *(0 for _ in range(self.num_shards - 1)))
        counts = [0] * self.num_shards
        for rank in self._ranks_of(name):
            start, end = self.local_range(name, rank)
            counts[rank] = end - start
        divisor = math.gcd(*counts)
        return tuple(c // divisor for c in counts)

    def _ranks_of(self, name: str) -> range:
        """The ranks that hold a part of the tensor."""
        offset, numel = self.offsets[name], self._by_name[name].numel
        if not numel or not self.shard_numel:
            return range(0)
        return range(offset // self.shard_numel, (offset + numel - 1) // self.shard_numel + 1)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over everything that decides who holds what; equal on all ranks or the plan is not the same."""
        tensors = [
            [s.name, list(s.shape), str(s.block), str(s.dtype), self.offsets[s.name], self.granularity[s.name]]
            for s in sorted(self.specs, key=lambda s: s.name)
        ]
        return hashlib.sha256(json.dumps([self.num_shards, self.shard_numel, tensors]).encode()).hexdigest()


def plan_layout(specs: Sequence[TensorSpec], num_shards: int, *, align: int = 128, order: str = "auto") -> Layout:
    """Plan the smallest equal shards that cut no block.

    Args:
        specs: the tensors of one group.
        num_shards: ranks that share the buffer.
        align: bytes; every rank's part is a multiple of this in the narrowest dtype of ``specs`` (a multiple of 64).
        order: ``"given"`` keeps the order of ``specs`` (exact smallest shard for it); ``"auto"`` also tries by size and by
            block, prefers the given order, and stops when the lower bound is met.

    Cost: O(n) per candidate size, vectorised over candidates; independent of ``num_shards``.

    Raises:
        ValueError: no ranks, duplicate names, an impossible alignment, an unknown order, a block that does not fit.
    """
    specs = tuple(specs)
    if num_shards < 1:
        raise ValueError(f"num_shards is {num_shards}: a layout needs at least one rank")
    if order not in ("auto", "given"):
        raise ValueError(f"order {order!r} is unknown: use 'auto' or 'given'")
    if align < START_BYTES or align % START_BYTES:
        raise ValueError(f"align is {align} bytes: use a multiple of {START_BYTES}")
    names = [s.name for s in specs]
    if len(set(names)) < len(names):
        raise ValueError(f"tensor {next(n for n in names if names.count(n) > 1)!r} is listed twice")

    element_cuts = [(s.block or Block.element()).numel(s.shape) for s in specs]
    best = _plan(specs, element_cuts, num_shards, align, order)
    if any(s.block is None for s in specs):
        row_cuts = [s.block.numel(s.shape) if s.block else max(1, min(row_numel(s.shape), s.numel)) for s in specs]
        by_rows = _plan(specs, row_cuts, num_shards, align, order) if row_cuts != element_cuts else best
        if by_rows.shard_numel <= best.shard_numel * (1 + ROW_PADDING_LIMIT):
            # The bound for "no requirement" is that of element cuts: rows are our choice, not the caller's.
            return Layout(specs, num_shards, by_rows.shard_numel, by_rows.offsets, by_rows.granularity, best.lower_bound)
    return best


def _plan(specs: tuple[TensorSpec, ...], cuts: list[int], num_shards: int, align: int, order: str) -> Layout:
    itemsize = min((s.dtype.itemsize for s in specs), default=1)
    quantum, start = align // itemsize, START_BYTES // itemsize
    sizes = np.array([s.numel for s in specs], dtype=np.int64)
    # A tensor starts at a multiple of `start` and so does every boundary: a cut at a multiple of g from it is one of lcm(g, start).
    blocks = np.array([math.lcm(cut, start) for cut in cuts], dtype=np.int64)
    granularity = {s.name: cut for s, cut in zip(specs, cuts, strict=True)}
    if not sizes.sum():
        return Layout(specs, num_shards, 0, {s.name: 0 for s in specs}, granularity, 0)

    orders = [np.arange(len(specs))]
    if order == "auto":
        orders.append(np.lexsort((np.arange(len(specs)), -sizes)))
        orders.append(np.lexsort((np.arange(len(specs)), -sizes, -blocks)))
    bound = 0
    for candidates in _candidates(sizes, blocks, num_shards, quantum, start):
        if not bound and candidates.size:
            bound = int(candidates[0])
        ends = [_place(sizes[o], blocks[o], candidates, start)[1] for o in orders]
        fits = np.stack(ends) <= candidates * num_shards
        hit = fits.any(axis=0)
        if hit.any():
            at = int(hit.argmax())
            chosen = orders[int(fits[:, at].argmax())]
            starts, _ = _place(sizes[chosen], blocks[chosen], candidates[at : at + 1], start)
            offsets = {specs[i].name: int(p) for i, p in zip(chosen, starts[:, 0], strict=True)}
            return Layout(specs, num_shards, int(candidates[at]), offsets, granularity, bound)
    raise AssertionError("unreachable: a shard as large as all tensors together holds them")


def _candidates(sizes: np.ndarray, blocks: np.ndarray, num_shards: int, quantum: int, start: int) -> Iterator[np.ndarray]:
    """Every shard size that no order rules out, ascending, in chunks; the first is the lower bound.

    A single tensor of ``e`` elements can be placed at all iff ``e <= S``, or ``S mod g == 0``, or ``e <= 2S - S mod g`` (it spans
    one boundary). A tensor with ``e > 2S`` spans two wherever it lies: while that holds only multiples of its block come up.
    """
    padded = int((-(-sizes // start) * start).sum())
    size = -(-padded // (num_shards * quantum)) * quantum
    largest = -(-padded // quantum) * quantum  # everything in the first shard
    chunk = _FIRST_CHUNK
    while size <= largest:
        forced = sizes > 2 * size
        step = quantum
        for block in np.unique(blocks[forced]):
            step = math.lcm(step, int(block))
        # The set of forced tensors shrinks when 2S reaches the smallest of them.
        stop = min(largest, (int(sizes[forced].min()) - 1) // 2) if forced.any() else largest
        first = -(-size // step) * step
        if first <= stop:
            count = min(chunk, (stop - first) // step + 1)
            found = first + step * np.arange(count, dtype=np.int64)
            rest = found[:, None] % blocks[None, :]
            possible = ((sizes <= found[:, None]) | (rest == 0) | (sizes <= 2 * found[:, None] - rest)).all(axis=1)
            if possible.any():
                yield found[possible]
            size = int(found[-1]) + quantum
            chunk = min(chunk * 4, _LAST_CHUNK)
        else:
            size = stop // quantum * quantum + quantum


def _place(sizes: np.ndarray, blocks: np.ndarray, shards: np.ndarray, start: int) -> tuple[np.ndarray, np.ndarray]:
    """Earliest placement of the tensors in this order for every shard size: their offsets ``[n, k]`` and the end ``[k]``.

    Earliest is best: what can follow an earlier end includes all that can follow a later one. A size in ``shards`` must let every
    single tensor be placed (see :func:`_candidates`).
    """
    position = np.zeros_like(shards)
    offsets = np.zeros((len(sizes), len(shards)), dtype=np.int64)
    for i, (numel, block) in enumerate(zip(sizes.tolist(), blocks.tolist(), strict=True)):
        if not numel:
            offsets[i] = position
            continue
        at = -(-position // start) * start
        boundary = (at // shards + 1) * shards
        crosses = at + numel > boundary
        # Cross the next boundary at a block's edge: move right by the rest. If that takes a second boundary, too, and the block does
        # not divide the shard, only a start just behind the boundary is left: S mod g after it, so that the one after is at an edge.
        shifted = at + (boundary - at) % block
        rest = shards % block
        twice = (shifted + numel > boundary + shards) & (rest != 0)
        at = np.where(crosses, np.where(twice, boundary + rest, shifted), at)
        offsets[i] = at
        position = at + numel
    return offsets, -(-position // start) * start
