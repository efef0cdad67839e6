"""Read a whole checkpoint to find damage. Reports each bad block and its tensors."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass

import torch

from ..commits import Commit, find, ls, read_manifest
from ..errors import CheckpointCorrupt, first_few
from ..format.digest import CHUNK_BYTES, digest_of, one_ahead, view_of
from ..format.manifest import Manifest, ObjectEntry
from ..format.manifest_fields import ManifestError
from ..format.pages import transfer_buffers
from ..reading.read_plan import Segment
from ..reading.reader import bad_blocks, corrupt_block
from ..stores.opening import store_of
from ..stores.store import ALIGNMENT, KeyMissing, ObjectStore, Root


@dataclass(frozen=True)
class Problem:
    """One piece of damage.

    Attributes:
        object: the object's key.
        block: number of the block; None for the whole object.
        tensors: contents of the damaged bytes.
        reason: description of the damage.
    """

    object: str
    block: int | None
    tensors: tuple[str, ...]
    reason: str

    @property
    def tensor(self) -> str | None:
        return first_few(self.tensors) or None

    def __str__(self) -> str:
        return str(CheckpointCorrupt(self.object, self.block, self.tensors, self.reason)).removeprefix("checkpoint is damaged: ")


@dataclass(frozen=True)
class VerifyReport:
    """The result of reading every byte of one checkpoint."""

    commit: str
    problems: tuple[Problem, ...]
    objects: int
    blocks: int
    bytes: int
    seconds: float

    @property
    def ok(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        if self.ok:
            return (
                f"{self.commit}: all {self.blocks} blocks of {self.objects} objects verified ({self.bytes} bytes in {self.seconds:.2f} s)"
            )
        return "\n".join(f"{self.commit}: {problem}" for problem in self.problems)


def verify(root: Root, commit: str | Commit | None = None) -> VerifyReport:
    """Read and check every byte of a checkpoint, by default of the newest commit, intact or damaged. Changes nothing.

    Raises:
        NoCheckpoint: there is none (of that name).
    """
    store = store_of(root)
    began = time.monotonic()
    name = _name(store, commit)
    key = f"commits/{name}.json"
    try:
        manifest, _ = read_manifest(store, name)
    except (ManifestError, OSError) as error:
        reason = str(error) if isinstance(error, ManifestError) else f"it can't be read: {error}"
        return VerifyReport(name, (Problem(key, None, ("manifest",), reason),), 0, 0, 0, time.monotonic() - began)
    problems: list[Problem] = []
    blocks = checked = 0
    for index, stored in enumerate(manifest.objects):
        found, read = _check_object(store, manifest, index, stored)
        problems += found
        blocks += len(stored.sums)
        checked += read
    for aux in manifest.aux:
        try:
            raw = store.get(aux.key)
        except OSError as error:
            problems.append(Problem(aux.key, None, ("aux",), _reason(error)))
            continue
        checked += len(raw)
        if len(raw) != aux.bytes or digest_of(raw) != aux.xxh3_128:
            problems.append(Problem(aux.key, None, ("aux",), f"its {len(raw)} bytes have another checksum (written: {aux.bytes} bytes)"))
    objects = len(manifest.objects) + len(manifest.aux)
    return VerifyReport(name, tuple(problems), objects, blocks, checked, time.monotonic() - began)


def _name(store: ObjectStore, commit: str | Commit | None) -> str:
    if isinstance(commit, Commit):
        return commit.name
    names = [c.name for c in ls(store)]
    if commit is None and names:
        return names[-1]
    if commit in names:
        return str(commit)
    return find(store, commit).name  # raises an error with the names that exist


def _check_object(store: ObjectStore, manifest: Manifest, index: int, stored: ObjectEntry) -> tuple[list[Problem], int]:
    """Return every bad block of one object. Unlike a load, a scrub continues after the first."""
    chunk = max(stored.block_bytes, CHUNK_BYTES // stored.block_bytes * stored.block_bytes)
    try:
        size = store.size(stored.key)
        if size is None:
            raise KeyMissing(stored.key)
    except OSError as error:
        return [Problem(stored.key, None, manifest.owners(index, 0, stored.bytes), _reason(error))], 0
    problems: list[Problem] = []
    if size != stored.bytes:
        what = "truncated" if size < stored.bytes else "something was appended"
        lost = manifest.owners(index, size, stored.bytes) if size < stored.bytes else ()
        problems.append(Problem(stored.key, None, lost, f"it has {size} bytes instead of {stored.bytes}: {what}"))
    readable = min(size, stored.bytes)
    offsets = range(0, readable, chunk)
    buffers = transfer_buffers(len(offsets[:2]), -(-min(chunk, readable) // ALIGNMENT) * ALIGNMENT, readable)

    def segments() -> Generator[tuple[Segment, torch.Tensor, OSError | None]]:
        with store.open_read(stored.key) as reader:
            reader.expect([(offset, min(chunk, -(-(readable - offset) // ALIGNMENT) * ALIGNMENT)) for offset in offsets])
            for k, offset in enumerate(offsets):
                segment = Segment(index, offset, min(chunk, readable - offset))
                padded = -(-segment.bytes // ALIGNMENT) * ALIGNMENT
                failure: OSError | None = None
                try:
                    reader.read_into(offset, view_of(buffers[k % 2][:padded]))
                except OSError as error:
                    failure = error
                yield segment, buffers[k % 2][: segment.bytes], failure

    checked = 0
    try:
        with closing(one_ahead(segments())) as source:
            for segment, buffer, failure in source:
                if failure is not None:
                    held = manifest.owners(index, segment.offset, segment.offset + segment.bytes)
                    problems.append(Problem(stored.key, segment.offset // stored.block_bytes, held, _reason(failure)))
                    continue
                checked += segment.bytes
                for block in bad_blocks(manifest, segment, view_of(buffer)):
                    bad = corrupt_block(manifest, index, block)
                    problems.append(Problem(bad.object, bad.block, bad.tensors, bad.reason))
    except OSError as error:
        problems.append(Problem(stored.key, None, (), _reason(error)))
    return problems, checked


def _reason(error: OSError) -> str:
    return "it is missing" if isinstance(error, KeyMissing) else f"it can't be read: {error.strerror or error}"
