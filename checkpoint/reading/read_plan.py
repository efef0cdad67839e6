"""Plan reads: which bytes of which objects hold the requested ranges, and where they go. Integers only, in numpy columns.

Requested ranges become byte ranges of objects. Ranges that touch the same or neighbouring checksum blocks are merged, and whole blocks are
read. If a tensor is requested in another order than it is stored in, it has as many parts as rows. So no step here handles parts one at a
time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from ..format.manifest import Extents, Manifest, ObjectEntry, TensorEntry
from ..format.tiling import ROWS, Tiling, between, runs_between

GAP_BYTES = 1 << 20
"""A gap between requested blocks is read too if it has at most this many bytes, and at most a 20th of the bytes requested around it. A
request costs as much time as 0.1 MB of a local disk, or 1 to 5 MB of an object store."""

MOST_PARTS = 1 << 17
"""Maximum number of parts planned at a time. A part takes 200 bytes of memory during planning, an isolated one 450. So a plan takes at most
60 MB for columns of any width."""


_FEW = 4
"""Minimum number of copies in a segment for which evenly spaced copies are searched, to be planned as one."""


class Range(NamedTuple):
    """A request for elements ``[start, end)`` of one tensor kind, to go to the flat tensor ``out``. ``tiling``: the order in which they are
    counted."""

    name: str
    kind: str
    start: int
    end: int
    out: torch.Tensor
    tiling: Tiling = ROWS


class ReadBlock(NamedTuple):
    """``times`` parts of ``bytes`` each, from byte ``source + i * source_step`` of a segment to byte ``target + i * target_step`` of a
    destination."""

    request: int
    source: int
    target: int
    bytes: int
    times: int
    source_step: int
    target_step: int


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Whole blocks ``[offset, offset + bytes)`` of one object, and the destinations of their parts: rows of (from, request, to, bytes),
    int64."""

    object: int
    offset: int
    bytes: int
    copies: np.ndarray = field(default_factory=lambda: np.zeros((0, 4), np.int64), repr=False)

    def blocks(self) -> Iterator[ReadBlock]:
        """Yield the copies, with evenly spaced ones merged."""
        copies = self.copies
        count = len(copies)
        if count < _FEW:
            for source, request, target, size in copies.tolist():
                yield ReadBlock(request, source, target, size, 1, size, size)
            return
        steps = np.diff(copies, axis=0)
        # A copy continues the previous one if request and size are equal and it lies after it in source and target.
        goes_on = (steps[:, 1] == 0) & (steps[:, 3] == 0) & (steps[:, 0] >= 0) & (steps[:, 2] >= copies[1:, 3])
        changes = (steps[1:, [0, 2]] != steps[:-1, [0, 2]]).any(1) | ~goes_on[1:] | ~goes_on[:-1]
        stops = iter((*(np.flatnonzero(changes) + 1).tolist(), count - 1))
        on, rows = goes_on.tolist(), copies.tolist()
        first = 0
        while first < count:
            source, request, target, size = rows[first]
            # Step i lies between copies i and i + 1. Equal steps from ``first`` on reach up to copy ``last``.
            last = first
            if first < count - 1 and on[first]:
                last = next((stop for stop in stops if stop > first), count - 1)
            following = rows[first + 1] if last > first else (source + size, 0, target + size)
            yield ReadBlock(request, source, target, size, last - first + 1, following[0] - source, following[2] - target)
            first = last + 1


@dataclass(frozen=True)
class ReadPlan:
    """A plan of the reads that fill the requested ranges.

    Attributes:
        needed: bytes requested.
        planned: bytes that will be read: at most 2 blocks more per run, and a 20th more for gaps.
        runs: contiguous byte runs requested.
        segments: requests to the storage.
    """

    needed: int
    planned: int
    runs: int
    segments: tuple[Segment, ...] = field(repr=False)

    @property
    def requests(self) -> int:
        return len(self.segments)

    @staticmethod
    def whole(plans: Sequence[ReadPlan]) -> ReadPlan:
        """Several plans as one, for reports. It omits the destinations of parts, which take most of the memory."""
        segments = tuple(Segment(s.object, s.offset, s.bytes) for plan in plans for s in plan.segments)
        return ReadPlan(sum(p.needed for p in plans), sum(p.planned for p in plans), sum(p.runs for p in plans), segments)


Wanted = tuple[Range, TensorEntry, Extents]


def batches(wanted: Sequence[Wanted]) -> Iterator[list[Wanted]]:
    """Yield the same requests, in order, in lists of at most about :data:`MOST_PARTS` parts; larger requests are cut."""
    batch: list[Wanted] = []
    total = 0
    for asked, entry, extents in wanted:
        start = asked.start
        while start < asked.end:
            end = asked.end
            count = _parts(asked, entry, extents, start, end)
            if count > MOST_PARTS:
                fits = bisect_right(range(start + 1, end), MOST_PARTS, key=partial(_parts, asked, entry, extents, start))
                end = start + max(1, fits)
                count = _parts(asked, entry, extents, start, end)
            if batch and total + count > MOST_PARTS:
                yield batch
                batch, total = [], 0
            whole = (start, end) == (asked.start, asked.end)
            piece = asked if whole else asked._replace(start=start, end=end, out=asked.out[start - asked.start : end - asked.start])
            batch.append((piece, entry, extents))
            total += count
            start = end
    if batch:
        yield batch


def _parts(asked: Range, entry: TensorEntry, extents: Extents, start: int, end: int) -> int:
    """Return an estimate of the number of parts of elements ``[start, end)`` of a range. It never decreases with ``end``."""
    if asked.tiling != entry.tiling:
        return runs_between(entry.shape, asked.tiling, entry.tiling, start, end)
    low, high = _met(extents, entry.base + start, entry.base + end)
    return high - low


def plan_reads(manifest: Manifest, wanted: Sequence[Wanted], request_bytes: int, budget_bytes: int) -> ReadPlan:
    """Plan the reads for these ranges of these tensors. Raises ValueError for a budget of less than one block."""
    found: list[tuple[int, int, int, int, int]] = []
    columns: list[np.ndarray] = []
    for number, (asked, entry, extents) in enumerate(wanted):
        if asked.start == asked.end:
            continue
        if asked.tiling == entry.tiling:
            found += _interval(extents, entry.base + asked.start, entry.base + asked.end, number)
        else:
            runs = between(entry.shape, asked.tiling, entry.tiling, asked.start, asked.end)
            columns.append(_intervals(extents, entry.base + runs[0], *runs[1:], number))
    rows = np.concatenate([np.array(found, np.int64).reshape(-1, 5), *columns])
    rows = rows[np.lexsort((rows[:, 3], rows[:, 2], rows[:, 1], rows[:, 0]))]
    planned = 0
    segments: list[Segment] = []
    solid = _solid(rows)
    sums = np.concatenate((np.zeros(1, np.int64), rows[:, 2].cumsum()))
    first = 0
    while first < len(solid):
        index, start, end, low_row, high_row = solid[first]
        stored = manifest.objects[index]
        block = stored.block_bytes
        if budget_bytes < block:
            raise ValueError(f"budget_bytes is {budget_bytes}, less than a block of the checkpoint: give at least {block}")
        low, high = start // block * block, -(-end // block) * block
        wanted_bytes, gaps = int(sums[high_row] - sums[low_row]), 0
        last = first + 1
        # Read neighbouring blocks, which have no gap, in one request; small gaps cost almost nothing either.
        while last < len(solid) and solid[last][0] == index:
            _, start, end, from_row, to_row = solid[last]
            more = int(sums[to_row] - sums[from_row])
            gap = max(0, start // block * block - high)
            if gap and (gap > GAP_BYTES or 20 * (gaps + gap) > wanted_bytes + more):
                break
            gaps, wanted_bytes = gaps + gap, wanted_bytes + more
            high = max(high, -(-end // block) * block)
            high_row = to_row
            last += 1
        high = min(high, stored.bytes)
        # Use at least two streams, so that one is checked and copied while another is read.
        chunk = min(request_bytes, budget_bytes // 2 if budget_bytes >= 2 * block else block)
        segments += _segments(stored, index, low, high, max(block, chunk // block * block), rows[low_row:high_row])
        planned += high - low
        first = last
    return ReadPlan(int(sums[-1]), planned, len(solid), tuple(segments))


def _met(extents: Extents, start: int, end: int) -> tuple[int, int]:
    """Return the first row of the extents that overlaps elements ``[start, end)`` of the group, and the row after the last."""
    return int(np.searchsorted(extents.end, start, side="right")), int(np.searchsorted(extents.start, end, side="left"))


def _interval(extents: Extents, start: int, end: int, request: int) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield (object, first byte, bytes, request, byte of its out) for each part of elements ``[start, end)`` of the group. Two binary
    searches find the parts, because the extents tile the group."""
    size = extents.dtype.itemsize
    for i in range(*_met(extents, start, end)):
        begin = int(extents.start[i])
        first, last = max(start, begin), min(end, int(extents.end[i]))
        byte = int(extents.offset[i]) + (first - begin) * size
        yield int(extents.object[i]), byte, (last - first) * size, request, (first - start) * size


def _intervals(extents: Extents, start: np.ndarray, length: np.ndarray, at: np.ndarray, request: int) -> np.ndarray:
    """Return the rows of :func:`_interval` for many intervals at once. ``at``: number of the request's elements before each interval."""
    size = extents.dtype.itemsize
    end = start + length
    low = np.searchsorted(extents.end, start, side="right")
    counts = np.searchsorted(extents.start, end, side="left") - low
    of = np.repeat(np.arange(len(start)), counts)
    i = low[of] + np.arange(len(of)) - np.repeat(counts.cumsum() - counts, counts)
    first, last = np.maximum(start[of], extents.start[i]), np.minimum(end[of], extents.end[i])
    byte = extents.offset[i] + (first - extents.start[i]) * size
    target = (at[of] + first - start[of]) * size
    return np.stack((extents.object[i], byte, (last - first) * size, np.full_like(i, request), target), axis=1)


def _solid(rows: np.ndarray) -> list[tuple[int, int, int, int, int]]:
    """Merge sorted rows that touch or overlap: (object, first byte, end, first row, row after the last)."""
    if not len(rows):
        return []
    found = []
    ends = rows[:, 1] + rows[:, 2]
    changes = [0, *(np.flatnonzero(np.diff(rows[:, 0])) + 1).tolist(), len(rows)]
    for low, high in pairwise(changes):
        index = int(rows[low, 0])
        reach = np.maximum.accumulate(ends[low:high])  # not each row's own end, since an earlier row may contain it
        edges = [0, *(np.flatnonzero(rows[low + 1 : high, 1] > reach[:-1]) + 1).tolist(), high - low]
        firsts, lasts = rows[low + np.array(edges[:-1]), 1].tolist(), reach[np.array(edges[1:]) - 1].tolist()
        found += [(index, a, b, low + i, low + j) for a, b, i, j in zip(firsts, lasts, edges[:-1], edges[1:], strict=True)]
    return found


def _segments(stored: ObjectEntry, index: int, low: int, high: int, chunk: int, rows: np.ndarray) -> list[Segment]:
    """Return the object's bytes ``[low, high)`` as requests of ``chunk`` bytes, each with its parts of ``rows``."""
    start, end = rows[:, 1], rows[:, 1] + rows[:, 2]
    first_of = (start - low) // chunk
    counts = (end - 1 - low) // chunk - first_of + 1
    if bool((counts != 1).any()):
        of = np.repeat(np.arange(len(rows)), counts)
        number = first_of[of] + np.arange(len(of)) - np.repeat(counts.cumsum() - counts, counts)
    else:
        of, number = np.arange(len(rows)), first_of
    ranked = np.argsort(number, kind="stable")
    of, number = of[ranked], number[ranked]
    base = low + number * chunk
    begin, stop = np.maximum(start[of], base), np.minimum(end[of], base + chunk)
    copies = np.stack((begin - base, rows[of, 3], rows[of, 4] + begin - start[of], stop - begin), axis=1)
    edges = np.searchsorted(number, np.arange(-(-(high - low) // chunk) + 1)).tolist()
    return [
        Segment(index, low + k * chunk, min(chunk, high - low - k * chunk), copies[a:b])
        for k, (a, b) in enumerate(zip(edges[:-1], edges[1:], strict=True))
    ]
