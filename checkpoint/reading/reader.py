"""Read any range of any tensor of any saved layout. Every byte is verified first.

Reading needs no process group and no model. A read is planned as interval arithmetic on the manifest's columns (``read_plan.py``). Whole
blocks are read, checked, and only then copied, so a destination never holds an unverified byte.
"""

from __future__ import annotations

import ctypes
import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import increment_version

from ..arguments import device_of, nbytes, of_type
from ..commits import Commit, find, read_manifest, unreachable
from ..errors import CheckpointCorrupt, CheckpointMismatch, first_few
from ..format.digest import as_bytes, block_sums, copy_bytes, digest_of, view_of
from ..format.manifest import Extents, Manifest, TensorEntry
from ..format.manifest_fields import ManifestError
from ..format.object_layout import dtype_name
from ..format.pages import transfer_buffers
from ..plain_values.plain_entries import entry_names
from ..state.matching import Pair, StoredTensor, castable, label, match
from ..state.name_tables import Globs, chosen, globs, nearest
from ..state.saved_meta import check_saved_meta
from ..stores.opening import store_of
from ..stores.store import ALIGNMENT, KeyMissing, ObjectStore, RangeReader, Root, out_of_reach
from .read_plan import Range, ReadBlock, ReadPlan, Segment, Wanted, batches, plan_reads

Asked = Range | tuple[str, str, int, int, torch.Tensor]
"""(name, kind, start, end, out) in row order, or a :class:`Range`."""

BUDGET_BYTES = 16 << 20
"""Default memory of a read besides its destinations, in bytes: one buffer of :attr:`~.store.ObjectStore.request_bytes` per stream.

One process, 256 MiB verified, interleaved in one run on 2 busy cores: 0.82 GB/s (median) with 1 stream, 0.86 with 2, 1.10 with 4, 1.07 with
8. The CPU time was the same for each.
"""

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

STREAMS = 8
"""Maximum number of streams of one read, for any budget. With requests of 1 MiB they use half of the default budget."""


class Checkpoint:
    """One commit, opened for reading. It holds no file open, and threads may share it."""

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
        """Stored tensors by name, in the order saved (by groups). Aliases of tied tensors are in ``aliases``."""
        kinds = [{e.kind: e.dtype for e in g.kinds} for g in self.manifest.groups]
        return {t.fqn: StoredTensor(t.shape, kinds[t.group]) for t in self.manifest.tensors}

    def aux(self, rank: int) -> Any:
        """Return the ``aux`` that rank ``rank`` of the saving world gave; ``None`` if it gave none.

        Raises:
            CheckpointCorrupt: the object is missing or damaged.
        """
        for entry in self.manifest.aux:
            if entry.rank == rank:
                try:
                    raw = self._store.get(entry.key)
                except OSError as error:
                    raise _unreadable(self._store, entry.key, error, ("aux",)) from error
                if len(raw) != entry.bytes or digest_of(raw) != entry.xxh3_128:
                    raise CheckpointCorrupt(entry.key, None, ("aux",), "its checksum differs")
                try:
                    return json.loads(raw)
                except (ValueError, RecursionError) as error:
                    raise CheckpointCorrupt(entry.key, None, ("aux",), f"it is not JSON: {error}") from None
        return None

    def names(self, key: str = "model") -> dict[str, str]:
        """Return ``{name within the entry: stored name}`` of one entry of the saved state, aliases of tied tensors included."""
        check_saved_meta(f"checkpoint {self.commit.path}", self.meta, optimizers=False)
        return entry_names(self, key)

    def read(self, name: str, kind: str = "param", *, device: torch.device | str = "cpu", budget_bytes: int = BUDGET_BYTES) -> torch.Tensor:
        """Return a whole tensor, verified."""
        entry, extents = self._find(name, kind)
        return self.read_range(name, 0, entry.numel, kind, device=device, budget_bytes=budget_bytes).view(entry.shape)

    def read_range(
        self,
        name: str,
        start: int,
        end: int,
        kind: str = "param",
        *,
        device: torch.device | str = "cpu",
        budget_bytes: int = BUDGET_BYTES,
    ) -> torch.Tensor:
        """Return elements ``[start, end)`` of a tensor, flat (row-major), verified."""
        entry, extents = self._find(name, kind)
        _check_bounds(name, kind, start, end, entry)
        flat = torch.empty(end - start, dtype=extents.dtype, device=device)
        self.read_ranges([(name, kind, start, end, flat)], budget_bytes=budget_bytes)
        return flat

    def to_state_dict(
        self,
        *,
        key: str = "model",
        device: torch.device | str = "cpu",
        include: Globs = "*",
        exclude: Globs = (),
        dtype: torch.dtype | None = None,
        budget_bytes: int = BUDGET_BYTES,
    ) -> dict[str, torch.Tensor]:
        """Return the weights as plain tensors by name, for ``load_state_dict``. Needs no process group. Tied names share one tensor.

        Args:
            key: entry of the saved state (``"ema"``, ..).
            include, exclude: globs of names within the entry.
            dtype: dtype to which floating-point tensors are cast.
            budget_bytes: memory to use besides the tensors, in bytes.

        Raises:
            CheckpointMismatch: no name matches the globs. CheckpointCorrupt: see :meth:`read_ranges`.
        """
        wanted, unwanted, place = globs(include), globs(exclude), device_of(device)
        if dtype is not None:
            of_type("dtype", dtype, torch.dtype, "give a dtype of torch, such as torch.bfloat16")
        names = {name: stored for name, stored in self.names(key).items() if chosen(name, wanted, unwanted)}
        if not names:
            there = first_few(list(self.names(key))) or f"nothing under {key!r}"
            raise CheckpointMismatch(f"checkpoint {self.commit.path} has no tensor that fits {', '.join(wanted)}; it has {there}")
        read: dict[str, torch.Tensor] = {}
        for stored in names.values():
            tensor = self.tensors[stored]
            kept = tensor.kinds["param"]
            to = dtype if dtype is not None and kept.is_floating_point else kept
            if stored not in read:
                read[stored] = torch.empty(tensor.shape, dtype=to, device=place)
        self.read_ranges(
            [(name, "param", 0, t.numel(), t.view(-1)) for name, t in read.items()], cast=dtype is not None, budget_bytes=budget_bytes
        )
        return {name: read[stored] for name, stored in names.items()}

    def read_ranges(
        self,
        ranges: Sequence[Asked],
        *,
        cast: bool = False,
        budget_bytes: int = BUDGET_BYTES,
        progress: Callable[[], None] = lambda: None,
    ) -> ReadPlan:
        """Fill every ``out`` (flat, contiguous, of the stored dtype; CPU or GPU) with verified data. Returns the plan, without the copies.

        Args:
            cast: whether ``out`` may have another floating-point or another integer dtype, to which values are converted.
            budget_bytes: memory besides the destinations, in bytes: one buffer for each of at most 8 streams. Reading columns of a tensor
                stored by rows, or the reverse, takes up to 60 MB more for the plan.
            progress: called for each verified piece (of some megabytes), by any of the reading threads.

        Raises:
            CheckpointMismatch: a tensor, kind or range does not exist, or ``out`` has another dtype or size. Raised before anything is
                read.
            CheckpointCorrupt: names object, block and tensors. Destinations may be partly filled, with verified data only.
            OSError: the storage is out of reach (no permission, for example). Destinations may be partly filled too.
            ValueError: the budget is less than one block.
        """
        wanted = self._wanted(ranges, cast, budget_bytes)
        for asked, *_ in wanted:
            if asked.out.is_meta or asked.out.is_conj() or asked.out.is_neg():
                what = "is on the meta device" if asked.out.is_meta else "is a conjugated or negated view"
                raise CheckpointMismatch(f"{label(asked.name, asked.kind)}: its destination {what}; give memory of its own")
        done = []
        for batch in batches(wanted):
            plan = plan_reads(self.manifest, batch, self._store.request_bytes, budget_bytes)
            self._carry_out(plan, batch, budget_bytes, progress)
            done.append(ReadPlan.whole([plan]))
        return ReadPlan.whole(done)

    def _carry_out(self, plan: ReadPlan, wanted: Sequence[Wanted], budget_bytes: int, progress: Callable[[], None]) -> None:
        # Equal dtypes copy bytes. Other dtypes copy elements, which never straddle buffers, since blocks are multiples of 4096 and extents
        # are aligned.
        outs = [_Out.of(asked.out.detach(), extents.dtype) for asked, _, extents in wanted]

        def deliver(segment: Segment, buffer: _Buffer) -> None:
            for block in segment.blocks():
                out = outs[block.request]
                if out.address and block.times == 1:
                    ctypes.memmove(out.address + block.target, buffer.address + block.source, block.bytes)
                else:
                    _put(buffer.tensor[: segment.bytes], out.tensor, out.stored, block)
            progress()

        size = max((s.bytes for s in plan.segments), default=0)
        streams = min(len(plan.segments), STREAMS, budget_bytes // max(1, _padded(size))) or 1
        device = next((out.tensor.device for out in outs if out.tensor.is_cuda), None)
        try:
            _fetch(self._store, self.manifest, plan.segments, deliver, streams, device)
        finally:
            # Torch did not see the bytes change. The version tells holders of derived data that it is outdated.
            increment_version([asked.out for asked, *_ in wanted if not asked.out.is_inference()])

    def plan(self, ranges: Sequence[Asked], *, cast: bool = False, budget_bytes: int = BUDGET_BYTES) -> ReadPlan:
        """Plan the reads of :meth:`read_ranges` without reading.

        The time grows with the number of ranges, and with the number ``n`` of contiguous pieces to read as ``n log n``.
        """
        return plan_reads(self.manifest, self._wanted(ranges, cast, budget_bytes), self._store.request_bytes, budget_bytes)

    def _wanted(self, ranges: Sequence[Asked], cast: bool, budget_bytes: int) -> list[Wanted]:
        nbytes("budget_bytes", budget_bytes)
        wanted = []
        for asked in (Range(*one) for one in ranges):
            entry, extents = self._find(asked.name, asked.kind)
            _check_range(asked, entry, extents, cast)
            wanted.append((asked, entry, extents))
        return wanted

    def require(self, wanted: Mapping[Pair, tuple[Sequence[int], torch.dtype]], among: Iterable[Pair] | None = None) -> dict[Pair, Pair]:
        """Check that the checkpoint has exactly the wanted (name, kind) pairs, with these shapes and dtypes.

        Args:
            wanted: ``{(name, kind): (shape, dtype)}`` of the whole model (or optimizer).
            among: stored pairs that must not be left over; by default all of the kinds that ``wanted`` mentions.

        Returns:
            ``{wanted pair: stored pair}``. They differ if the wanted name is an alias of a tied tensor.

        Raises:
            CheckpointMismatch: one line with the first differences of each kind.
        """
        return match(f"checkpoint {self.commit.path}", self.tensors, self.aliases, wanted, among)

    def _find(self, name: str, kind: str) -> tuple[TensorEntry, Extents]:
        entry = self.manifest.by_name.get(self.aliases.get(name, name))
        if entry is None:
            there = list(self.manifest.by_name)
            raise CheckpointMismatch(f"{self.commit.path} has no tensor {name!r}{nearest(name, there)}; it has {first_few(there)}")
        extents = self.manifest.groups[entry.group].extents(kind)
        if extents is None:
            kinds = ", ".join(e.kind for e in self.manifest.groups[entry.group].kinds)
            raise CheckpointMismatch(f"checkpoint {self.commit.path} has no {kind!r} of tensor {name!r}; it has {kinds}")
        return entry, extents


def open_checkpoint(root: Root, commit: str | Commit | None = None) -> Checkpoint:
    """Open one commit for reading; by default the newest intact one.

    Raises:
        NoCheckpoint: there is none (of that name). CheckpointCorrupt: the named one is damaged.
    """
    store = store_of(root)
    found = find(store, commit)
    try:
        manifest, _ = read_manifest(store, found.name)
    except ManifestError as error:
        raise CheckpointCorrupt(found.key, None, (), str(error)) from error
    except OSError as error:
        raise _unreadable(store, found.key, error) from error
    return Checkpoint(store, found, manifest)


class _Out(NamedTuple):
    """A destination. ``address`` is its address if bytes can be copied there directly, or 0."""

    tensor: torch.Tensor
    stored: torch.dtype
    address: int

    @classmethod
    def of(cls, tensor: torch.Tensor, stored: torch.dtype) -> _Out:
        return cls(tensor, stored, tensor.data_ptr() if tensor.dtype == stored and tensor.device.type == "cpu" else 0)


class _Buffer(NamedTuple):
    """One stream's buffer. Pieces are cut from ``view`` and copied by ``address``, not by torch calls. Each torch call releases the
    interpreter lock; with eight streams, another takes it and a thread must be woken. A few such calls per piece cost a third of a load's
    processor time."""

    tensor: torch.Tensor
    view: memoryview
    address: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Buffer:
        return cls(tensor, view_of(tensor), tensor.data_ptr())


def _fetch(
    store: ObjectStore,
    manifest: Manifest,
    segments: Sequence[Segment],
    deliver: Callable[[Segment, _Buffer], None],
    streams: int,
    device: torch.device | None = None,
) -> None:
    """Read segments in ``streams`` threads and pass each to ``deliver``, with the buffer that begins with its checked bytes.

    Reading, hashing and copying all release the interpreter lock, so that one stream's disk time overlaps another's hashing. Several
    threads call ``deliver`` at once, for different segments.

    Args:
        device: GPU that the segments go to; the buffers are then pinned.

    Raises:
        CheckpointCorrupt: of the first bad segment, naming the object, the block and the tensors in it.
    """
    size = max((_padded(s.bytes) for s in segments), default=0)
    turns = iter(range(len(segments)))
    lock, stop = threading.Lock(), threading.Event()
    errors: dict[int, BaseException] = {}

    # Pin here: pinning in a new thread would open a context on GPU 0 on every rank.
    buffers = [_Buffer.of(b) for b in transfer_buffers(streams, size, sum(s.bytes for s in segments), pinned=device is not None)]

    def work(buffer: _Buffer) -> None:
        if device is not None:
            torch.cuda.set_device(device)
        with ExitStack() as opened:
            current: tuple[int, RangeReader] | None = None
            while not stop.is_set():
                with lock:
                    index = next(turns, None)
                if index is None:
                    return
                segment = segments[index]
                try:
                    if current is None or current[0] != segment.object:
                        opened.close()
                        current = segment.object, _opened(store, manifest, segment, opened)
                    _check(store, manifest, segment, current[1], buffer.view)
                    deliver(segment, buffer)
                except BaseException as error:
                    errors[index] = error
                    stop.set()
                    return

    if streams == 1:
        work(buffers[0])
    else:
        with ThreadPoolExecutor(streams, thread_name_prefix="checkpoint-read") as pool:
            try:
                for future in [pool.submit(work, buffer) for buffer in buffers]:
                    future.result()
            finally:
                stop.set()  # an interrupt of this thread ends the others after their segment
    if errors:
        raise errors[min(errors)]


def _opened(store: ObjectStore, manifest: Manifest, segment: Segment, stack: ExitStack) -> RangeReader:
    key = manifest.objects[segment.object].key
    try:
        return stack.enter_context(store.open_read(key))
    except OSError as error:
        raise _unreadable(store, key, error) from error


def _check(store: ObjectStore, manifest: Manifest, segment: Segment, reader: RangeReader, whole: memoryview) -> None:
    """Read the segment's bytes to the beginning of ``whole``. A block that differs is read once more, since the transfer rather than the
    storage may have failed."""
    key = manifest.objects[segment.object].key
    buffer = whole[: segment.bytes]
    try:
        # Request whole pages, as direct reads require; the object ends with a whole page.
        count = reader.read_into(segment.offset, whole[: _padded(segment.bytes)])
    except OSError as error:
        raise _unreadable(store, key, error) from error
    if count < segment.bytes:
        found = segment.offset + count
        raise CheckpointCorrupt(key, None, (), f"it ends at byte {found} of {manifest.objects[segment.object].bytes}: truncated")
    if bad_blocks(manifest, segment, buffer):
        _read_again(store, manifest, segment, buffer)
        bad = bad_blocks(manifest, segment, buffer)
        if bad:
            raise corrupt_block(manifest, segment.object, bad[0])


def _put(buffer: torch.Tensor, out: torch.Tensor, dtype: torch.dtype, block: ReadBlock) -> None:
    """Copy a block's parts from the uint8 ``buffer``, which holds elements of ``dtype``, to ``out``: bit for bit if the dtypes are equal,
    otherwise converted."""
    _, source, target, size, times, source_step, target_step = block
    if out.dtype == dtype:
        if times == 1:
            copy_bytes(as_bytes(out)[target : target + size], buffer[source : source + size])
            return
        word = _WORDS[min(8, dtype.itemsize)]  # as many raw bytes as fit into an element, without a value
        left = as_bytes(out).view(word)
    else:
        word, left = dtype, out
    width = word.itemsize
    right = buffer[: buffer.numel() // width * width].view(word)
    shape = times, size // width
    there = left.as_strided(shape, (target_step // width, 1), left.storage_offset() + target // width)
    there.copy_(right.as_strided(shape, (source_step // width, 1), right.storage_offset() + source // width))


def bad_blocks(manifest: Manifest, segment: Segment, buffer: memoryview) -> list[int]:
    """Return the numbers of the object's blocks in ``buffer`` whose checksum differs."""
    stored = manifest.objects[segment.object]
    first = segment.offset // stored.block_bytes
    found = block_sums(buffer, stored.block_bytes)
    right = stored.sums[first : first + len(found)].tolist()
    return [] if found == right else [first + i for i, both in enumerate(zip(found, right, strict=True)) if both[0] != both[1]]


def corrupt_block(manifest: Manifest, object_index: int, block: int) -> CheckpointCorrupt:
    stored = manifest.objects[object_index]
    start, end = block * stored.block_bytes, min((block + 1) * stored.block_bytes, stored.bytes)
    return CheckpointCorrupt(stored.key, block, manifest.owners(object_index, start, end), f"bytes {start} to {end} have another checksum")


def _read_again(store: ObjectStore, manifest: Manifest, segment: Segment, buffer: memoryview) -> None:
    key = manifest.objects[segment.object].key
    try:
        with store.open_read(key) as reader:
            reader.read_into(segment.offset, buffer)
    except OSError as error:
        raise _unreadable(store, key, error) from error


def _check_bounds(name: str, kind: str, start: int, end: int, entry: TensorEntry) -> None:
    if not 0 <= start <= end <= entry.numel:
        raise CheckpointMismatch(f"{label(name, kind)} has {entry.numel} elements in the checkpoint; [{start}, {end}) was requested")


def _check_range(asked: Range, entry: TensorEntry, extents: Extents, cast: bool) -> None:
    name, kind, start, end, out, tiling = asked
    _check_bounds(name, kind, start, end, entry)
    if problem := tiling.problem(entry.shape):
        raise CheckpointMismatch(f"{label(name, kind)} was requested in {problem}")
    if out.dtype != extents.dtype and not (cast and castable(extents.dtype, out.dtype)):
        raise CheckpointMismatch(f"{label(name, kind)} is {dtype_name(extents.dtype)} in the checkpoint, {dtype_name(out.dtype)} wanted")
    if out.dim() != 1 or out.numel() != end - start or not out.is_contiguous():
        raise CheckpointMismatch(f"{label(name, kind)}: a destination of shape {tuple(out.shape)} for {end - start} elements; give it flat")


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _unreadable(store: ObjectStore, key: str, error: OSError, tensors: tuple[str, ...] = ()) -> Exception:
    """Return the error of a failed read: the object is damaged, or only out of reach."""
    if isinstance(error, KeyMissing):
        return CheckpointCorrupt(key, None, tensors, "it is missing (deleted, or collected since)")
    if out_of_reach(error):
        return unreachable(store.describe(key), error)
    return CheckpointCorrupt(key, None, tensors, f"it can't be read: {error.strerror or error}")
