"""Reading any range of any tensor, whatever layout and however many ranks wrote it; every byte is verified first.

Needs no process group and no model. A read is planned as interval arithmetic on the manifest's columns: requested ranges
become byte ranges of objects, those that touch the same or neighbouring checksum blocks become one, and whole blocks are
read, checked, and only then copied to their destinations: a destination never holds a byte that was not verified.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.autograd.graph import increment_version

from .commits import Commit, find, read_manifest
from .digest import CHUNK_BYTES, aligned_buffer, as_bytes, block_sums, copy_bytes, digest_of, one_ahead, view_of
from .errors import CheckpointCorrupt, CheckpointMismatch
from .layout import dtype_name
from .manifest import Extents, Manifest, ManifestError, TensorEntry
from .store import ALIGNMENT, KeyMissing, ObjectStore, RangeReader, Root, store_of

Range = tuple[str, str, int, int, torch.Tensor]
"""(name, kind, start, end, out): elements ``[start, end)`` of a tensor go to the flat tensor ``out``."""


@dataclass(frozen=True)
class StoredTensor:
    """What the checkpoint has of one tensor."""

    shape: tuple[int, ...]
    kinds: Mapping[str, torch.dtype]


@dataclass(frozen=True, slots=True)
class Segment:
    """Whole blocks ``[offset, offset + bytes)`` of one object, and where parts of them go: (from, request, to, bytes)."""

    object: int
    offset: int
    bytes: int
    copies: tuple[tuple[int, int, int, int], ...]


@dataclass(frozen=True)
class ReadPlan:
    """Bytes asked for; bytes that will be read (at most 2 blocks more per run); contiguous byte runs asked for; the reads."""

    needed: int
    planned: int
    runs: int
    segments: tuple[Segment, ...]


class Checkpoint:
    """One commit, opened for reading. Holds no file open; safe to share between threads."""

    def __init__(self, store: ObjectStore, commit: Commit, manifest: Manifest) -> None:
        self._store = store
        self.commit = commit
        self.manifest = manifest
        self.step = manifest.step
        self.epoch = manifest.epoch
        self.world = manifest.world
        self.meta = dict(manifest.meta)
        self.aliases = dict(manifest.aliases)

    def __repr__(self) -> str:
        return f"Checkpoint({self.commit.path!r}, {len(self.tensors)} tensors, {self.manifest.bytes} bytes)"

    @cached_property
    def tensors(self) -> dict[str, StoredTensor]:
        """By name, in the order saved (by groups). Aliases of tied tensors are not listed; see ``aliases``."""
        kinds = [{e.kind: e.dtype for e in g.kinds} for g in self.manifest.groups]
        return {t.fqn: StoredTensor(t.shape, kinds[t.group]) for t in self.manifest.tensors}

    def aux(self, rank: int) -> Any:
        """What rank ``rank`` of the saving world gave as ``aux``; ``None`` if it gave nothing.

        Raises:
            CheckpointCorrupt: the object is missing or damaged.
        """
        for entry in self.manifest.aux:
            if entry.rank == rank:
                try:
                    raw = self._store.get(entry.key)
                except OSError as error:
                    raise CheckpointCorrupt(entry.key, None, ("aux",), _unreadable(error)) from error
                if len(raw) != entry.bytes or digest_of(raw) != entry.xxh3_128:
                    raise CheckpointCorrupt(entry.key, None, ("aux",), "its checksum differs")
                return json.loads(raw)
        return None

    def read(self, name: str, kind: str = "param", *, device: torch.device | str = "cpu") -> torch.Tensor:
        """A whole tensor, verified."""
        entry, extents = self._find(name, kind)
        flat = torch.empty(entry.numel, dtype=extents.dtype, device=device)
        self.read_ranges([(name, kind, 0, entry.numel, flat)])
        return flat.view(entry.shape)

    def read_ranges(self, ranges: Sequence[Range]) -> ReadPlan:
        """Fill every ``out`` (flat, contiguous, of the stored dtype; CPU or GPU), verified; returns what was read.

        Takes 8 MiB of memory beside the destinations.

        Raises:
            CheckpointMismatch: no such tensor, kind or range, or ``out`` has another dtype or size; before anything is read.
            CheckpointCorrupt: naming object, block and tensors. Destinations may be partly filled, with verified data only.
        """
        plan = self.plan(ranges)
        outs = [as_bytes(out.detach()) for *_, out in ranges]
        pinned = any(out.is_cuda for out in outs)
        try:
            with closing(verified(self._store, self.manifest, plan.segments, pinned=pinned)) as blocks:
                for segment, buffer in blocks:
                    for source, request, target, size in segment.copies:
                        copy_bytes(outs[request][target : target + size], buffer[source : source + size])
        finally:
            # Torch has not seen the bytes change: whoever keeps something made from a tensor must learn that it is out of date.
            increment_version([out for *_, out in ranges if not out.is_inference()])
        return plan

    def plan(self, ranges: Sequence[Range]) -> ReadPlan:
        """What :meth:`read_ranges` would read. Cost: O(log extents) for each range, and O(runs log runs)."""
        runs: list[tuple[int, int, int, int, int]] = []  # object, first byte, bytes, request, byte of its out
        for request, (name, kind, start, end, out) in enumerate(ranges):
            entry, extents = self._find(name, kind)
            _check_range(name, kind, start, end, out, entry, extents)
            runs += _runs(extents, entry.base + start, entry.base + end, request)
        runs.sort()
        needed = sum(run[2] for run in runs)
        breaks = [b[0] != a[0] or b[1] > a[1] + a[2] for a, b in pairwise(runs)]
        planned = 0
        segments: list[Segment] = []
        first = 0
        while first < len(runs):
            index, start, size, _, _ = runs[first]
            stored = self.manifest.objects[index]
            block = stored.block_bytes
            low, high = start // block * block, -(-(start + size) // block) * block
            last = first + 1
            # Neighbouring blocks cost nothing between them: one read.
            while last < len(runs) and runs[last][0] == index and runs[last][1] // block * block <= high:
                high = max(high, -(-(runs[last][1] + runs[last][2]) // block) * block)
                last += 1
            high = min(high, stored.bytes)
            segments += _segments(index, low, high, max(block, CHUNK_BYTES // block * block), runs[first:last])
            planned += high - low
            first = last
        return ReadPlan(needed, planned, sum(breaks) + bool(runs), tuple(segments))

    def require(
        self, wanted: Mapping[tuple[str, str], tuple[Sequence[int], torch.dtype]], among: Iterable[tuple[str, str]] | None = None
    ) -> None:
        """Check that the checkpoint has exactly the wanted (name, kind) pairs, with these shapes and dtypes.

        Args:
            wanted: ``{(name, kind): (shape, dtype)}`` of the whole model (or optimizer).
            among: the stored pairs that may not be left over; by default all of the kinds that ``wanted`` mentions.

        Raises:
            CheckpointMismatch: one line naming the first differences of each sort.
        """
        stored = {(name, kind) for name, tensor in self.tensors.items() for kind in tensor.kinds}
        kinds = {kind for _, kind in wanted}
        resolved = {(self.aliases.get(name, name), kind) for name, kind in wanted}
        scope = set(among) if among is not None else {pair for pair in stored if pair[1] in kinds}
        missing = [pair for pair in wanted if (self.aliases.get(pair[0], pair[0]), pair[1]) not in stored]
        unexpected = sorted((scope & stored) - resolved)
        wrong = []
        for (name, kind), (shape, dtype) in wanted.items():
            tensor = self.tensors.get(self.aliases.get(name, name))
            if tensor is None or kind not in tensor.kinds:
                continue
            if tuple(shape) != tensor.shape:
                wrong.append(f"{_label(name, kind)} has shape {tensor.shape}, wanted {tuple(shape)}")
            elif dtype != tensor.kinds[kind]:
                wrong.append(f"{_label(name, kind)} is {dtype_name(tensor.kinds[kind])}, wanted {dtype_name(dtype)}")
        if not (missing or unexpected or wrong):
            return
        parts = []
        if missing:
            parts.append("it lacks " + _some([_label(*pair) for pair in missing]))
        if unexpected:
            parts.append("it also has " + _some([_label(*pair) for pair in unexpected]))
        if wrong:
            parts.append(_some(wrong))
        raise CheckpointMismatch(f"checkpoint {self.commit.path} is of another model: {'; '.join(parts)}")

    def _find(self, name: str, kind: str) -> tuple[TensorEntry, Extents]:
        entry = self.manifest.by_name.get(self.aliases.get(name, name))
        if entry is None:
            raise CheckpointMismatch(f"checkpoint {self.commit.path} has no tensor {name!r}; it has {_some(list(self.manifest.by_name))}")
        extents = self.manifest.groups[entry.group].extents(kind)
        if extents is None:
            kinds = ", ".join(e.kind for e in self.manifest.groups[entry.group].kinds)
            raise CheckpointMismatch(f"checkpoint {self.commit.path} has no {kind!r} of tensor {name!r}; it has {kinds}")
        return entry, extents


def open_checkpoint(root: Root, commit: str | Commit | None = None) -> Checkpoint:
    """Open one commit for reading; by default the newest whole one.

    Raises:
        NoCheckpoint: there is none (of that name). CheckpointCorrupt: the named one is damaged.
    """
    store = store_of(root)
    found = find(store, commit)
    try:
        manifest, _ = read_manifest(store, found.name)
    except (ManifestError, OSError) as error:
        raise CheckpointCorrupt(found.key, None, (), str(error)) from error
    return Checkpoint(store, found, manifest)


def verified(
    store: ObjectStore, manifest: Manifest, segments: Sequence[Segment], *, pinned: bool = False
) -> Generator[tuple[Segment, torch.Tensor]]:
    """Read segments, one ahead in a thread, and yield each with its checked bytes (uint8, valid until the next).

    A block that differs is read once more, for the case that the transfer and not the storage failed.

    Raises:
        CheckpointCorrupt: naming the object, the first bad block and the tensors in it.
    """
    size = max((_padded(s.bytes) for s in segments), default=0)
    buffers = [aligned_buffer(size, pinned=pinned) for _ in segments[:2]]

    def read() -> Generator[tuple[Segment, torch.Tensor]]:
        with ExitStack() as opened:
            current: tuple[int, RangeReader] | None = None
            for index, segment in enumerate(segments):
                key = manifest.objects[segment.object].key
                try:
                    if current is None or current[0] != segment.object:
                        opened.close()
                        current = segment.object, opened.enter_context(store.open_read(key))
                    buffer = buffers[index % 2][: segment.bytes]
                    # Whole pages are asked for: a direct read has to, and the object ends with one.
                    count = current[1].read_into(segment.offset, view_of(buffers[index % 2][: _padded(segment.bytes)]))
                except OSError as error:
                    raise CheckpointCorrupt(key, None, (), _unreadable(error)) from error
                if count < segment.bytes:
                    found = segment.offset + count
                    raise CheckpointCorrupt(
                        key, None, (), f"it ends at byte {found} of {manifest.objects[segment.object].bytes}: truncated"
                    )
                yield segment, buffer

    source = one_ahead(read()) if len(segments) > 1 else read()
    with closing(source):
        for segment, buffer in source:
            if bad_blocks(manifest, segment, buffer):
                _read_again(store, manifest, segment, buffer)
                bad = bad_blocks(manifest, segment, buffer)
                if bad:
                    raise corrupt_block(manifest, segment.object, bad[0])
            yield segment, buffer


def bad_blocks(manifest: Manifest, segment: Segment, buffer: torch.Tensor) -> list[int]:
    """Numbers of the object's blocks in ``buffer`` whose checksum differs."""
    stored = manifest.objects[segment.object]
    first = segment.offset // stored.block_bytes
    found = np.array(block_sums(view_of(buffer), stored.block_bytes), dtype="<u8")
    return [first + int(i) for i in np.flatnonzero(found != stored.sums[first : first + len(found)])]


def corrupt_block(manifest: Manifest, object_index: int, block: int) -> CheckpointCorrupt:
    stored = manifest.objects[object_index]
    start, end = block * stored.block_bytes, min((block + 1) * stored.block_bytes, stored.bytes)
    return CheckpointCorrupt(stored.key, block, manifest.owners(object_index, start, end), f"bytes {start} to {end} have another checksum")


def _read_again(store: ObjectStore, manifest: Manifest, segment: Segment, buffer: torch.Tensor) -> None:
    key = manifest.objects[segment.object].key
    try:
        with store.open_read(key) as reader:
            reader.read_into(segment.offset, view_of(buffer))
    except OSError as error:
        raise CheckpointCorrupt(key, None, (), _unreadable(error)) from error


def _runs(extents: Extents, start: int, end: int, request: int) -> Iterator[tuple[int, int, int, int, int]]:
    """The byte ranges that hold elements ``[start, end)`` of the group: the extents tile it, so two binary searches find them."""
    if start == end:
        return
    size = extents.dtype.itemsize
    low = int(np.searchsorted(extents.end, start, side="right"))
    high = int(np.searchsorted(extents.start, end, side="left"))
    for i in range(low, high):
        begin = int(extents.start[i])
        first, last = max(start, begin), min(end, int(extents.end[i]))
        byte = int(extents.offset[i]) + (first - begin) * size
        yield int(extents.object[i]), byte, (last - first) * size, request, (first - start) * size


def _segments(index: int, low: int, high: int, chunk: int, runs: Sequence[tuple[int, int, int, int, int]]) -> list[Segment]:
    copies: list[list[tuple[int, int, int, int]]] = [[] for _ in range(low, high, chunk)]
    for _, start, size, request, target in runs:
        for k in range((start - low) // chunk, (start + size - 1 - low) // chunk + 1):
            base = low + k * chunk
            first, last = max(start, base), min(start + size, base + chunk)
            copies[k].append((first - base, request, target + first - start, last - first))
    return [Segment(index, low + k * chunk, min(chunk, high - low - k * chunk), tuple(parts)) for k, parts in enumerate(copies)]


def _check_range(name: str, kind: str, start: int, end: int, out: torch.Tensor, entry: TensorEntry, extents: Extents) -> None:
    if not 0 <= start <= end <= entry.numel:
        raise CheckpointMismatch(f"{_label(name, kind)} has {entry.numel} elements in the checkpoint; [{start}, {end}) was asked for")
    if out.dtype != extents.dtype:
        raise CheckpointMismatch(f"{_label(name, kind)} is {dtype_name(extents.dtype)} in the checkpoint, {dtype_name(out.dtype)} wanted")
    if out.dim() != 1 or out.numel() != end - start or not out.is_contiguous():
        raise CheckpointMismatch(
            f"{_label(name, kind)}: a destination of shape {tuple(out.shape)} for {end - start} elements; give it flat"
        )


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _unreadable(error: OSError) -> str:
    if isinstance(error, KeyMissing):
        return "it is missing (deleted, or collected since)"
    return f"it can't be read: {error.strerror or error}"


def _label(name: str, kind: str) -> str:
    return repr(name) if kind == "param" else f"{kind} of {name!r}"


def _some(items: Sequence[str], limit: int = 3) -> str:
    shown = ", ".join(items[:limit])
    return shown if len(items) <= limit else f"{shown} and {len(items) - limit} more"
