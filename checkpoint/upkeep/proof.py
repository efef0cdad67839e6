"""Read back written objects before older checkpoints are deleted for them.

A commit says what should be stored; only a read shows that it can be read. Each rank reads its own object back as soon as it has voted,
past the page cache if the disk allows it. If the object is right, the rank writes a note:

    verified/<attempt>/r00003-<root of the object's sums>-<digest of its aux object, or "none">.json

The name holds all information. So one listing shows which checkpoints are verified, and a note cannot vouch for other bytes. Garbage
collection itself reads the objects without a note.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping
from contextlib import closing

import torch

from ..errors import SaveAborted
from ..format.digest import CHUNK_BYTES, block_sums, digest_of, one_ahead, view_of
from ..format.manifest import AuxEntry, Manifest, ObjectEntry
from ..format.pages import aligned_buffer, transfer_buffers
from ..stores.store import ALIGNMENT, KeyExists, KeyMissing, ObjectStore

_log = logging.getLogger(__name__)

Noted = Mapping[str, set[str]]
"""For each attempt at a save, the store's keys of its notes: one for each object that was read back and found right."""


def noted(store: ObjectStore, attempt: str = "") -> dict[str, set[str]]:
    """Return the keys of the notes in the store by attempt, for all attempts or for one."""
    found: dict[str, set[str]] = {}
    for entry in store.list(f"verified/{attempt}/" if attempt else "verified/"):
        parts = entry.key.split("/")
        if len(parts) == 3:
            found.setdefault(parts[1], set()).add(entry.key)
    return found


def lacking(manifest: Manifest, notes: set[str]) -> list[tuple[ObjectEntry, AuxEntry | None]]:
    """Return the objects that no note says are right, each with its rank's aux object."""
    aux = {entry.rank: entry for entry in manifest.aux}
    pairs = [(entry, aux.get(entry.rank)) for entry in manifest.objects]
    return [pair for pair in pairs if note_key(*pair) not in notes]


def note_key(entry: ObjectEntry, aux: AuxEntry | None) -> str:
    attempt = entry.key.split("/")[1]
    return f"verified/{attempt}/r{entry.rank:05d}-{entry.root}-{aux.xxh3_128 if aux else 'none'}.json"


def prove(
    store: ObjectStore,
    entry: ObjectEntry,
    aux: AuxEntry | None,
    cancelled: Callable[[], bool] = lambda: False,
    *,
    note: bool = True,
    progress: Callable[[int], None] = lambda count: None,
) -> str | None:
    """Read back one rank's object and its aux object. Write a note if they are right, or return the problem. ``progress`` gets bytes.

    Raises:
        OSError: the object cannot be read now, which says nothing about it. SaveAborted: cancelled.
    """
    problem = _damage(store, entry, cancelled, progress) or (_aux_damage(store, aux) if aux else None)
    if problem is None and note:
        try:
            store.put(note_key(entry, aux), b"{}\n")
        except KeyExists:
            pass
        except OSError as error:  # the object is still right; it will be read again
            _log.warning("%s was read back, but that could not be noted: %s", store.describe(entry.key), error.strerror or error)
    return problem


def _damage(store: ObjectStore, entry: ObjectEntry, cancelled: Callable[[], bool], progress: Callable[[int], None]) -> str | None:
    size = store.size(entry.key)
    if size is None:
        return f"{entry.key} is missing"
    if size != entry.bytes:
        return f"{entry.key} has {size} bytes instead of {entry.bytes}"
    per_chunk = max(1, CHUNK_BYTES // entry.block_bytes)
    chunk = per_chunk * entry.block_bytes
    offsets = range(0, entry.bytes, chunk)
    padded = -(-min(chunk, entry.bytes) // ALIGNMENT) * ALIGNMENT
    buffers = transfer_buffers(len(offsets[:2]), padded, entry.bytes)

    def pieces() -> Generator[tuple[int, torch.Tensor, int]]:
        with store.open_read(entry.key) as reader:
            reader.expect([(offset, min(chunk, -(-(entry.bytes - offset) // ALIGNMENT) * ALIGNMENT)) for offset in offsets])
            for k, offset in enumerate(offsets):
                if cancelled():
                    raise SaveAborted("reading back was given up")
                count = min(chunk, entry.bytes - offset)
                got = reader.read_into(offset, view_of(buffers[k % 2][: -(-count // ALIGNMENT) * ALIGNMENT]))
                yield k * per_chunk, buffers[k % 2][:count], got

    try:
        with closing(one_ahead(pieces())) as source:
            for first, buffer, got in source:
                if got < buffer.numel():
                    return f"{entry.key} ends at byte {first * entry.block_bytes + got} of {entry.bytes}"
                for number, found in enumerate(block_sums(view_of(buffer), entry.block_bytes), first):
                    if found != int(entry.sums[number]) and not _right_now(store, entry, number):
                        return f"{entry.key}, block {number} was read back with another checksum"
                progress(buffer.numel())
    except KeyMissing:
        return f"{entry.key} is missing"
    return None


def _right_now(store: ObjectStore, entry: ObjectEntry, number: int) -> bool:
    """Return whether a block that differed is right in a second read; the transfer may have failed."""
    offset = number * entry.block_bytes
    count = min(entry.block_bytes, entry.bytes - offset)
    view = view_of(aligned_buffer(-(-count // ALIGNMENT) * ALIGNMENT))
    with store.open_read(entry.key) as reader:
        return reader.read_into(offset, view) >= count and block_sums(view[:count], entry.block_bytes) == [int(entry.sums[number])]


def _aux_damage(store: ObjectStore, aux: AuxEntry) -> str | None:
    try:
        raw = store.get(aux.key)
    except KeyMissing:
        return f"{aux.key} is missing"
    return None if len(raw) == aux.bytes and digest_of(raw) == aux.xxh3_128 else f"{aux.key} was read back with another checksum"
