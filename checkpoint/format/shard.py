"""One rank's part of a save: write its pieces as one object, and vote.

It uses no collective and knows nothing of the other ranks. The object's key is unique to (attempt, rank), so data that a commit refers to
is never touched. A rank that dies here leaves only an orphan for :func:`~vescale_ray.checkpoint.gc`.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ..arguments import whole
from ..errors import SaveAborted, SaveFailed
from ..faults import fault_point
from ..stores.opening import store_of
from ..stores.store import ALIGNMENT, UNDER_WAY, KeyExists, ObjectStore, Root
from .commit_names import check_attempt
from .digest import BLOCK_BYTES, RangeDigests, block_bytes_for, block_sums, digest_of, root_of, view_of
from .manifest import AuxEntry, ObjectEntry
from .object_layout import ObjectPlan, PlacedPiece, ShardPiece, dtype_of, plan_object
from .pages import transfer_buffers
from .staging import Slab
from .strict_json import check_meta
from .tiling import Tiling

CHUNK_BYTES = 2 << 20
"""Bytes copied, hashed and written at a time. Measured: two processes save 1 GiB to a local disk (2 cores, 9 interleaved rounds). In chunks
of 1, 2 and 4 MiB, three in progress, they are 0.76, 0.81 and 0.78 times as fast as a raw write in requests of 16 MiB."""

STAGED_CHUNK_BYTES = 4 << 20
""":data:`CHUNK_BYTES` for staged memory, where chunks take no extra memory: 0.76, 0.85 and 0.88 times as fast."""


@dataclass(frozen=True, eq=False)
class Vote:
    """A rank's statement that its object is durable, with each piece's place in the object. A vote is small, and is sent to the process
    that commits."""

    attempt: str
    rank: int
    step: int
    epoch: int
    object: ObjectEntry
    aux: AuxEntry | None
    pieces: tuple[PlacedPiece, ...]

    def to_json(self) -> str:
        return json.dumps(
            {
                "attempt": self.attempt,
                "rank": self.rank,
                "step": self.step,
                "epoch": self.epoch,
                "object": self.object.to_json(),
                "aux": self.aux.to_json() if self.aux else None,
                "pieces": [
                    [p.name, p.kind, p.dtype, p.shape, p.tiling.to_json(), p.start, p.end, p.offset, *([p.digest] if p.copied else [])]
                    for p in self.pieces
                ],
            },
            separators=(",", ":"),
        )

    @classmethod
    def from_json(cls, text: str | bytes | Mapping[str, Any]) -> Vote:
        raw = text if isinstance(text, Mapping) else json.loads(text)
        return cls(
            raw["attempt"],
            raw["rank"],
            raw["step"],
            raw["epoch"],
            ObjectEntry.from_json(raw["object"]),
            AuxEntry.from_json(raw["aux"]) if raw["aux"] else None,
            tuple(_piece(*p) for p in raw["pieces"]),
        )


def _piece(name: str, kind: str, dtype: str, shape: list[int], tiles: Any, start: int, end: int, offset: int, *digest: str) -> PlacedPiece:
    return PlacedPiece(name, kind, dtype, tuple(shape), start, end, offset, bool(digest), "".join(digest), Tiling.from_json(tiles))


def new_attempt() -> str:
    """Return a fresh identifier for one attempt to save one step; all ranks of the attempt share it."""
    return uuid.uuid4().hex


def write_shard(
    root: Root,
    attempt: str,
    rank: int,
    pieces: Sequence[ShardPiece],
    *,
    aux: Mapping[str, Any] | None = None,
    step: int,
    epoch: int,
    cancelled: Callable[[], bool] = lambda: False,
    world: int | None = None,
    block_bytes: int | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> Vote:
    """Write this rank's pieces as one object; returns once it is durable.

    Takes four chunks of memory (8 MiB) besides the tensors. The pieces must not change meanwhile.

    Args:
        root: checkpoint folder, or a store.
        attempt: :func:`new_attempt`, the same on all ranks of this save.
        pieces: pieces in the model's order, empty ones included, so that every rank names every tensor.
        aux: state of this rank alone that JSON can hold, such as random generators.
        step, epoch: number of completed steps, and incarnation of the run (its generation). Together they order commits.
        cancelled: returns whether to stop; called before each chunk.
        world: number of ranks that write such an object. It determines the block size: small objects of few ranks get small blocks.
        block_bytes: bytes under one checksum, a multiple of 4096; by default chosen by ``world``, or 1 MiB if that is None.
        chunk_bytes: bytes written at a time, rounded to whole blocks.

    Raises:
        ValueError: pieces contradict each other, or JSON cannot hold a value. Raised before anything is written.
        SaveFailed: the storage failed (full, read-only, broken). Nothing is committed; earlier commits are untouched.
        SaveAborted: cancelled; nothing of the object is left.
    """
    _check(attempt, rank, step, epoch, block_bytes)
    check_meta(aux or {}, "aux")
    plan = plan_object(pieces, _about(attempt, rank, step, epoch))
    block_bytes = block_bytes or _block_bytes(plan.bytes, world)
    pinned = any(p.data.is_cuda for p in pieces)
    sums: list[int] = []
    digests = _digests(plan.pieces)
    store = store_of(root)
    chunks = _copied(plan, sums, digests, block_bytes, max(block_bytes, chunk_bytes // block_bytes * block_bytes), pinned, cancelled)
    raw = None if aux is None else encode_aux(aux)
    return _write(store, chunks, plan.bytes, plan.pieces, sums, digests, attempt, rank, raw, step, epoch, block_bytes)


def write_staged(
    store: ObjectStore,
    slab: Slab,
    attempt: str,
    rank: int,
    *,
    aux: bytes | None,
    step: int,
    epoch: int,
    cancelled: Callable[[], bool] = lambda: False,
    world: int | None = None,
    block_bytes: int | None = None,
    chunk_bytes: int = STAGED_CHUNK_BYTES,
) -> Vote:
    """As :func:`write_shard`, for an object staged in memory; it is written from there without a copy.

    Args:
        slab: slab with the pieces in place; its header is written here. It must not change meanwhile.
        aux: result of :func:`encode_aux` at the time of staging.
        cancelled: returns whether to stop; called before each chunk.

    Raises:
        SaveAborted: cancelled; nothing of the object is left.
    """
    _check(attempt, rank, step, epoch, block_bytes)
    layout = slab.layout
    assert layout is not None, "nothing is staged in the slab"
    block_bytes = block_bytes or _block_bytes(layout.bytes, world)
    view = slab.buffer[: layout.bytes]
    head = layout.header(_about(attempt, rank, step, epoch))
    view[: len(head)].copy_(torch.frombuffer(bytearray(head), dtype=torch.uint8))
    sums: list[int] = []
    digests = _digests(layout.placed)
    chunks = _in_place(view_of(view), sums, digests, block_bytes, max(block_bytes, chunk_bytes // block_bytes * block_bytes), cancelled)
    return _write(store, chunks, layout.bytes, layout.placed, sums, digests, attempt, rank, aux, step, epoch, block_bytes)


def encode_aux(aux: Mapping[str, Any]) -> bytes:
    """Return a rank's own values as stored JSON; later changes of ``aux`` do not affect it."""
    return json.dumps(aux, separators=(",", ":"), allow_nan=False).encode()


def _block_bytes(nbytes: int, world: int | None) -> int:
    return BLOCK_BYTES if world is None else block_bytes_for(nbytes, world)


def _check(attempt: str, rank: int, step: int, epoch: int, block_bytes: int | None) -> None:
    check_attempt(attempt)
    for what, value in (("rank", rank), ("step", step), ("epoch", epoch)):
        whole(what, value, remedy="give a number from 0 on")
    if block_bytes is not None and (block_bytes <= 0 or block_bytes % ALIGNMENT):
        raise ValueError(f"block_bytes is {block_bytes}; give a multiple of {ALIGNMENT}")


def _about(attempt: str, rank: int, step: int, epoch: int) -> dict[str, str]:
    return {"attempt": attempt, "rank": str(rank), "step": str(step), "epoch": str(epoch)}


def _write(
    store: ObjectStore,
    chunks: Generator[memoryview],
    size: int,
    pieces: tuple[PlacedPiece, ...],
    sums: list[int],
    digests: RangeDigests,
    attempt: str,
    rank: int,
    aux: bytes | None,
    step: int,
    epoch: int,
    block_bytes: int,
) -> Vote:
    """Store the object of ``chunks``, whose creation fills ``sums`` and ``digests``, and the aux object."""
    key = f"data/{attempt}/r{rank:05d}.safetensors"
    aux_entry: AuxEntry | None = None
    fault_point("shard.planned")
    try:
        try:
            store.put_stream(key, chunks, size)
        finally:
            with suppress(ValueError):  # a second Ctrl-C leaves a thread behind that is making a chunk
                chunks.close()
        if aux is not None:
            aux_entry = AuxEntry(f"data/{attempt}/r{rank:05d}.aux.json", rank, len(aux), digest_of(aux))
            store.put(aux_entry.key, aux)
            fault_point("aux.written")
    except KeyExists as error:
        raise SaveFailed(
            f"{store.describe(key)} exists already: rank {rank} has written attempt {attempt} before; use a new attempt"
        ) from error
    except OSError as error:
        reason = error.strerror or error
        raise SaveFailed(f"rank {rank} could not write {store.describe(key)}: {reason}; earlier checkpoints are untouched") from error
    words = np.array(sums, dtype="<u8")
    if digests.found:
        pieces = tuple(replace(p, digest=digests.found.get(index, "")) for index, p in enumerate(pieces))
    return Vote(attempt, rank, step, epoch, ObjectEntry(key, rank, size, block_bytes, words, root_of(words)), aux_entry, pieces)


def _digests(pieces: Sequence[PlacedPiece]) -> RangeDigests:
    """Digests of the pieces that other ranks may also hold."""
    return RangeDigests(
        {
            index: (p.offset, p.offset + (p.end - p.start) * dtype_of(p.dtype).itemsize)
            for index, p in enumerate(pieces)
            if p.copied and p.end > p.start
        }
    )


def _copied(
    plan: ObjectPlan,
    sums: list[int],
    digests: RangeDigests,
    block_bytes: int,
    chunk_bytes: int,
    pinned: bool,
    cancelled: Callable[[], bool],
) -> Generator[memoryview]:
    """Return the object in chunks. Each is hashed in the buffer that is then written, so the checksums cover exactly the written bytes."""
    offsets = range(0, plan.bytes, chunk_bytes)
    # Pin here: pinning in a store's new thread would open a context on GPU 0 on every rank.
    buffers = transfer_buffers(len(offsets[:UNDER_WAY]), min(chunk_bytes, plan.bytes), plan.bytes, pinned=pinned)

    def filled() -> Generator[memoryview]:
        for index, offset in enumerate(offsets):
            _go_on(cancelled)
            buffer = buffers[index % UNDER_WAY][: min(chunk_bytes, plan.bytes - offset)]
            plan.fill(buffer, offset)
            view = view_of(buffer)
            sums.extend(block_sums(view, block_bytes))
            digests.feed(view, offset)
            yield view

    return filled()


def _in_place(
    whole: memoryview, sums: list[int], digests: RangeDigests, block_bytes: int, chunk_bytes: int, cancelled: Callable[[], bool]
) -> Generator[memoryview]:
    """Yield the object in chunks of the memory in which it is staged, each hashed."""
    for offset in range(0, len(whole), chunk_bytes):
        _go_on(cancelled)
        view = whole[offset : offset + chunk_bytes]
        sums.extend(block_sums(view, block_bytes))
        digests.feed(view, offset)
        yield view


def _go_on(cancelled: Callable[[], bool]) -> None:
    if cancelled():
        raise SaveAborted("this save was given up before all was written; earlier checkpoints are untouched")
