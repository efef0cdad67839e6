"""Duplicate elements: several ranks hold and write the same elements without knowing it. For example, with tensor parallelism under FSDP, a
tensor that is not tensor-parallel has a mesh that says nothing of the other mesh dimensions.

The commit names each such element once, as the lowest rank's. Digests, which each rank makes of its pieces as it writes them, check that
duplicates are equal. Otherwise, of two tensors with one name (of pipeline stages or experts), one would be lost silently. Copies that
drifted apart by rounding get a warning; the checkpoint stays valid.
"""

from __future__ import annotations

import errno
import logging
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
import xxhash

from ..errors import STAGES
from ..stores.store import ObjectStore
from .digest import as_bytes, view_of
from .object_layout import PlacedPiece, dtype_of
from .shard import Vote

Held = tuple[int, int, int, int]
"""Start, end, rank, and byte offset in the rank's object: a range of elements of one tensor kind."""
DRIFT = 0.01
"""Largest relative difference (Euclidean norm) of two copies of one tensor. Two different tensors of one name differ by more."""
SAMPLE = 16
_READ_BYTES = 1 << 20
_log = logging.getLogger(__name__)


def sampled(flats: Sequence[torch.Tensor]) -> str:
    """Return, for each flat tensor, eight hexadecimal digits of a hash of :data:`SAMPLE` evenly spaced elements.

    Different tensors differ in nearly all of these elements. The cost is one copy from each device."""
    # Select by bytes: torch cannot copy single elements of some dtypes (uint4, ..).
    rows = [as_bytes(flat.detach()).view(-1, flat.dtype.itemsize) for flat in flats]
    taken = [raw[:: max(1, len(raw) // SAMPLE)][:SAMPLE].reshape(-1) for raw in rows]
    found = [""] * len(taken)
    for device in {one.device for one in taken}:
        mine = [index for index, one in enumerate(taken) if one.device == device]
        raw = view_of(torch.cat([taken[index] for index in mine]).cpu())
        position = 0
        for index in mine:
            size = taken[index].numel()
            found[index] = f"{xxhash.xxh3_64_intdigest(raw[position : position + size]) & 0xFFFFFFFF:08x}"
            position += size
    return "".join(found)


def each_once(pieces: Iterable[Held], itemsize: int) -> list[Held]:
    """Return each element once, from pieces that may overlap. Duplicates stay unused in their objects."""
    taken: list[Held] = []
    position = 0
    for start, end, rank, offset in sorted(pieces, key=lambda piece: (piece[0], -piece[1], piece[2])):
        first = max(start, position)
        if first < end:
            taken.append((first, end, rank, offset + (first - start) * itemsize))
            position = end
    return taken


def contradiction(store: ObjectStore, votes: Sequence[Vote]) -> str | None:
    """Return a sentence on the first tensor whose copies differ between ranks; None if there is none.

    Copies of the same interval are compared by their digests. If these differ, or the intervals differ, the common elements are read. Drift
    (:data:`DRIFT`) is logged.

    Raises:
        OSError: a copy cannot be read.
    """
    copies: dict[tuple[str, str], list[tuple[PlacedPiece, Vote]]] = defaultdict(list)
    for vote in sorted(votes, key=lambda v: v.rank):
        for piece in vote.pieces:
            if piece.copied and piece.end > piece.start:
                copies[piece.name, piece.kind].append((piece, vote))
    drifted: dict[str, float] = {}
    for (name, kind), held in copies.items():
        held.sort(key=lambda one: (one[0].start, one[0].end, one[1].rank))
        distinct: list[tuple[PlacedPiece, Vote]] = []
        for piece, vote in held:
            same = bool(distinct) and (distinct[-1][0].start, distinct[-1][0].end) == (piece.start, piece.end)
            if not same:
                distinct.append((piece, vote))
            elif distinct[-1][0].digest != piece.digest:
                apart = _apart(store, *distinct[-1], piece, vote, piece.end)
                if apart > DRIFT:
                    return _differ(name, kind, piece.start, piece.end, distinct[-1][1], vote)
                drifted[name] = max(apart, drifted.get(name, 0.0))
        for index, (piece, vote) in enumerate(distinct):
            for other, theirs in distinct[index + 1 :]:
                if other.start >= piece.end:
                    break
                end = min(piece.end, other.end)
                apart = _apart(store, piece, vote, other, theirs, end)
                if apart > DRIFT:
                    return _differ(name, kind, other.start, end, vote, theirs)
                if apart:
                    drifted[name] = max(apart, drifted.get(name, 0.0))
    if drifted:
        worst = max(drifted, key=lambda name: drifted[name])
        text = "copies of %d tensors have drifted apart between ranks, %r the most, by %.1g of its norm; the lowest rank's are saved"
        _log.warning(text, len(drifted), worst, drifted[worst])
    return None


def _differ(name: str, kind: str, start: int, end: int, one: Vote, other: Vote) -> str:
    return (
        f"{kind!r} of tensor {name!r}: ranks {one.rank} and {other.rank} both hold elements [{start}, {end}), and they differ: "
        f"give different tensors different names ({STAGES}), or make copies of one tensor equal (broadcast)"
    )


def _apart(store: ObjectStore, piece: PlacedPiece, vote: Vote, other: PlacedPiece, theirs: Vote, end: int) -> float:
    """Relative difference of two pieces on their common elements, which begin where ``other`` (the later piece) begins: the norm of the
    difference over the larger norm.

    It is 0 if all bytes are equal. It is infinite if only one is NaN or Inf, or if a dtype without rounding (counters, indices, masks)
    differs. Raises OSError if the elements cannot be read.
    """
    dtype = dtype_of(piece.dtype)
    size = (end - other.start) * dtype.itemsize
    left, right = (memoryview(bytearray(min(size, _READ_BYTES))) for _ in range(2))
    difference, largest, equal, alike = 0.0, [0.0, 0.0], True, True
    with store.open_read(vote.object.key) as first, store.open_read(theirs.object.key) as second:
        for position in range(0, size, _READ_BYTES):
            count = min(_READ_BYTES, size - position)
            ours = first.read_into(piece.offset + (other.start - piece.start) * dtype.itemsize + position, left[:count])
            others = second.read_into(other.offset + position, right[:count])
            if (ours, others) != (count, count):
                raise OSError(errno.EIO, f"the copies of {piece.name!r} can only be read in part")
            same = left[:count] == right[:count]
            if not _rounded(dtype):
                if not same:
                    return math.inf
                continue
            equal = equal and same
            a, b = (_numbers(view[:count], dtype) for view in (left, right))
            odd = ~(a.isfinite() & b.isfinite())
            if not torch.allclose(a[odd], b[odd], 0.0, 0.0, equal_nan=True):
                return math.inf
            a, b = a[~odd], b[~odd]
            alike = alike and torch.equal(a, b)
            difference += float((a - b).square().sum())
            largest = [largest[0] + float(a.square().sum()), largest[1] + float(b.square().sum())]
    if alike:
        return 0.0 if equal else math.ulp(1.0)  # zeros of two signs, or NaNs of two kinds
    # Squares of values near the ends of float64's range become 0 or infinite, and are useless.
    return math.sqrt(difference / max(largest)) if 0.0 < max(largest) < math.inf and difference < math.inf else math.inf


def _rounded(dtype: torch.dtype) -> bool:
    """Return whether copies of ``dtype`` may differ by rounding; codes of 8-bit optimizer states may."""
    return dtype.is_floating_point or dtype.is_complex or dtype in (torch.uint8, torch.int8)


def _numbers(view: memoryview, dtype: torch.dtype) -> torch.Tensor:
    raw = torch.frombuffer(view, dtype=torch.uint8).view(dtype)
    return torch.view_as_real(raw).reshape(-1).double() if dtype.is_complex else raw.double()
