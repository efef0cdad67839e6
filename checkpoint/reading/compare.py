"""Compare two checkpoints by names, shapes, dtypes and values, element by element, in bounded memory.

If both lay out a tensor kind alike, blocks with equal checksums are equal and are not read. All other data is read and compared in pieces.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..arguments import of_type
from ..errors import CheckpointMismatch
from ..format.digest import as_bytes
from ..format.manifest import Extents, Manifest, TensorEntry, TensorGroup
from ..format.object_layout import dtype_name
from ..format.tiling import ROWS
from ..state.matching import Pair
from ..state.name_tables import Globs, chosen, globs
from .read_plan import Range
from .reader import Checkpoint

_PIECE = 1 << 20
"""Number of elements compared at a time; their difference in float64 takes up to 24 MiB."""


@dataclass(frozen=True)
class Difference:
    """Difference of one tensor kind.

    Attributes:
        differing, numel: number of elements that differ, and of all elements.
        largest: largest |a - b|, exact in float64; NaN if one side is NaN; None for bools, complex numbers and sub-byte dtypes.
    """

    name: str
    kind: str
    differing: int
    numel: int
    largest: float | None


@dataclass(frozen=True)
class CheckpointDiff:
    """Difference of two checkpoints.

    Attributes:
        added, removed: pairs in B alone, and in A alone.
        reshaped: pairs with another shape or dtype, and each side's as text.
        changed: pairs with other values. ``same``: number of pairs that are bitwise equal.
        bytes_read: bytes read from both.
    """

    added: tuple[Pair, ...]
    removed: tuple[Pair, ...]
    reshaped: tuple[tuple[Pair, str, str], ...]
    changed: tuple[Difference, ...]
    same: int
    bytes_read: int

    @property
    def equal(self) -> bool:
        return not (self.added or self.removed or self.reshaped or self.changed)


def diff(
    a: Checkpoint,
    b: Checkpoint,
    *,
    include: Globs = "*",
    exclude: Globs = (),
    progress: Callable[[int], None] | None = None,
) -> CheckpointDiff:
    """Compare every tensor of two checkpoints whose name the globs choose. Takes about 64 MiB of memory.

    Elements differ if their bits do: 0.0 and -0.0 differ, NaNs with equal bits do not.

    Args:
        progress: called with the number of bytes of one side compared since the last call.

    Raises:
        CheckpointMismatch: the globs choose nothing in either, since comparing nothing must not count as equality.
        CheckpointCorrupt: a block that had to be read is damaged.
    """
    for what, one in (("a", a), ("b", b)):
        of_type(what, one, Checkpoint, "give what checkpoint.open(root) returns")
    left, right = _pairs(a, include, exclude), _pairs(b, include, exclude)
    if not (left or right) and (a.tensors or b.tensors):
        raise CheckpointMismatch(
            f"neither {a.commit.path} nor {b.commit.path} has a tensor that fits {', '.join(globs(include)) or 'no glob'}"
            + (f" without {', '.join(globs(exclude))}" if exclude else "")
        )
    reshaped: list[tuple[Pair, str, str]] = []
    changed: list[Difference] = []
    same = read = 0
    for pair in left:
        if pair not in right:
            continue
        if left[pair] != right[pair]:
            reshaped.append((pair, _words(*left[pair]), _words(*right[pair])))
            continue
        found, cost = _compare(a, b, pair, progress)
        read += cost
        if found is None:
            same += 1
        else:
            changed.append(found)
    added = tuple(pair for pair in right if pair not in left)
    return CheckpointDiff(added, tuple(pair for pair in left if pair not in right), tuple(reshaped), tuple(changed), same, read)


def _pairs(checkpoint: Checkpoint, include: Globs, exclude: Globs) -> dict[Pair, tuple[tuple[int, ...], torch.dtype]]:
    wanted, unwanted = globs(include), globs(exclude)
    return {
        (name, kind): (tensor.shape, dtype)
        for name, tensor in checkpoint.tensors.items()
        if chosen(name, wanted, unwanted)
        for kind, dtype in tensor.kinds.items()
    }


def _words(shape: Sequence[int], dtype: torch.dtype) -> str:
    return f"{dtype_name(dtype)} {list(shape)}"


def _compare(a: Checkpoint, b: Checkpoint, pair: Pair, progress: Callable[[int], None] | None) -> tuple[Difference | None, int]:
    name, kind = pair
    tensor = a.tensors[name]
    dtype, numel = tensor.kinds[kind], math.prod(tensor.shape)
    # Compare elements in an order common to both. In row order, a piece of a tiled tensor touches many tiles.
    orders = {side.manifest.by_name[name].tiling for side in (a, b)}
    order = orders.pop() if len(orders) == 1 else ROWS
    alike = _alike(a, b, pair)
    differing, read = 0, 0
    gaps: list[float | None] = []
    for start in range(0, numel, _PIECE):
        end = min(numel, start + _PIECE)
        size = (end - start) * dtype.itemsize
        if alike is None or not alike(start, end):
            one, other = (torch.empty(end - start, dtype=dtype) for _ in range(2))
            for side, out in ((a, one), (b, other)):
                read += side.read_ranges([Range(name, kind, start, end, out, order)]).planned
            unequal = _unequal(one, other)
            count = int(unequal.sum())
            if count:
                differing += count
                try:
                    gaps.append(_distance(one[unequal], other[unequal]))
                except (NotImplementedError, TypeError):  # dtypes that torch cannot compute with (uint4, float4, ..)
                    gaps.append(None)
        if progress is not None:
            progress(size)
    if not differing:
        return None, read
    known = [gap for gap in gaps if gap is not None]
    # max() would lose a NaN that is not first.
    largest = next((gap for gap in known if math.isnan(gap)), max(known)) if known else None
    return Difference(name, kind, differing, numel, largest), read


def _unequal(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return a mask of the elements whose bits differ."""
    width = one.dtype.itemsize
    if width in (1, 2, 4, 8):
        raw = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width]
        return as_bytes(one).view(raw) != as_bytes(other).view(raw)
    return (as_bytes(one).view(-1, width) != as_bytes(other).view(-1, width)).any(1)


def _distance(one: torch.Tensor, other: torch.Tensor) -> float | None:
    if one.is_complex() or one.dtype == torch.bool:
        return None
    if not one.dtype.is_floating_point:
        # Subtract modulo 2**64, in the direction that is positive. This is exact; an int64 difference could overflow.
        x, y = one.numpy(), other.numpy()
        wide = np.uint64 if x.dtype == np.uint64 else np.int64
        x, y = x.astype(wide), y.astype(wide)
        ahead, behind = x.view(np.uint64) - y.view(np.uint64), y.view(np.uint64) - x.view(np.uint64)
        return float(np.where(x > y, ahead, behind).max())
    gap = (one.double() - other.double()).abs()
    return float("nan") if bool(gap.isnan().any()) else float(gap.max())


def _alike(a: Checkpoint, b: Checkpoint, pair: Pair) -> Callable[[int, int], bool] | None:
    """Return a function that says whether all blocks with elements ``[start, end)`` have equal checksums on both sides; ``None`` if the
    layouts differ."""
    one, other = _place(a.manifest, pair), _place(b.manifest, pair)
    columns = ("start", "end", "object", "offset")
    if one is None or other is None:
        return None
    (entry, group, extents), (entry_b, group_b, extents_b) = one, other
    if (entry.base, group.numel, entry.tiling) != (entry_b.base, group_b.numel, entry_b.tiling):
        return None
    if not all(np.array_equal(getattr(extents, column), getattr(extents_b, column)) for column in columns):
        return None
    sizes = [(o.block_bytes, len(o.sums)) for o in a.manifest.objects]
    if sizes != [(o.block_bytes, len(o.sums)) for o in b.manifest.objects]:
        return None

    def equal(start: int, end: int) -> bool:
        """Compare the blocks of elements in stored order."""
        low = int(np.searchsorted(extents.end, entry.base + start, side="right"))
        high = int(np.searchsorted(extents.start, entry.base + end, side="left"))
        for i in range(low, high):
            first = max(entry.base + start, int(extents.start[i])) - int(extents.start[i])
            last = min(entry.base + end, int(extents.end[i])) - int(extents.start[i])
            index, width = int(extents.object[i]), extents.dtype.itemsize
            block = sizes[index][0]
            begin, stop = (int(extents.offset[i]) + first * width) // block, -(-(int(extents.offset[i]) + last * width) // block)
            if not np.array_equal(a.manifest.objects[index].sums[begin:stop], b.manifest.objects[index].sums[begin:stop]):
                return False
        return True

    return equal


def _place(manifest: Manifest, pair: Pair) -> tuple[TensorEntry, TensorGroup, Extents] | None:
    entry = manifest.by_name[pair[0]]
    group = manifest.groups[entry.group]
    extents = group.extents(pair[1])
    return None if extents is None else (entry, group, extents)
