"""Make commits and find them.

Only ``commits/`` below the root counts: a checkpoint exists if its commit object does. The commit object is created last, exclusively and
atomically, and never changes. Commits are ordered by (epoch, step), so that a late commit by a stale worker of an older epoch can never
become the newest.
"""

from __future__ import annotations

import errno
import logging
import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from vescale_ray.geometry import Extent, FlatSpace, merge_adjacent
from vescale_ray.lasting import REMEDY, goes_with

from .bridges.other_formats import instead
from .errors import STAGES, CheckpointCorrupt, CommitExists, CommitRefused, NoCheckpoint, SaveFailed
from .faults import fault_point
from .format.commit_names import commit_name, parse_commit_name
from .format.copies import Held, contradiction, each_once
from .format.manifest import Extents, Manifest, TensorEntry, TensorGroup
from .format.manifest_codec import MAX_BYTES, decode, encode, unseal
from .format.manifest_fields import ManifestError
from .format.object_layout import PlacedPiece, dtype_of, group_tensors, merge_orders, tensor_kinds
from .format.shard import Vote
from .format.strict_json import check_meta
from .format.tiling import ROWS, Tiling
from .stores.opening import store_of
from .stores.store import KeyExists, KeyMissing, ObjectStore, Root, out_of_reach

_log = logging.getLogger(__name__)
_told: set[str] = set()
"""Roots already named in a warning, so that each is named once."""


@dataclass(frozen=True)
class Commit:
    """One commit object. ``problem`` says why it cannot be loaded; later fields are then 0 or empty if unknown. If ``unread``, the read
    itself failed, and may succeed later."""

    name: str
    path: str
    epoch: int
    step: int
    problem: str | None = None
    sha256: str = ""
    attempt: str = ""
    world: int = 0
    bytes: int = 0
    created: str = ""
    unread: bool = False

    @property
    def key(self) -> str:
        return f"commits/{self.name}.json"


def commit(
    root: Root,
    votes: Sequence[Vote],
    *,
    step: int,
    epoch: int,
    attempt: str,
    world: int,
    meta: Mapping[str, Any],
    aliases: Mapping[str, str] | None = None,
) -> Commit:
    """Create the commit of a checkpoint, after checking the votes of all ranks against each other and the store.

    A second commit of the same attempt returns the existing commit, so that a lost answer can be retried.

    Args:
        votes: one vote of each rank, in any order.
        meta: global state that JSON can hold, such as the configuration, the stream position and optimizer scalars.
        aliases: ``{other name: stored name}`` of tied tensors, which are stored once.

    Raises:
        CommitRefused: votes are missing, belong to another attempt, do not tile a tensor exactly, or hold copies that differ; objects are
            missing or have another size; or a newer (epoch, step) is committed already.
        CommitExists: another attempt committed this (epoch, step).
        SaveFailed: the storage failed. On any error, earlier commits are untouched.
    """
    check_meta(meta)
    store = store_of(root)
    if (reason := goes_with(store.describe())) is not None and store.describe() not in _told:
        _told.add(store.describe())
        _log.warning("checkpoints in %s will be lost: it lies in %s; %s, or a URL", store.describe(), reason, REMEDY)
    votes = _in_one_order(votes)
    manifest = _assemble(votes, step, epoch, attempt, world, meta, aliases or {})
    raw = _encoded(manifest)
    key = f"commits/{manifest.name}.json"
    fault_point("commit.begun")
    try:
        missing = _missing(store, manifest)
        if missing:
            raise CommitRefused(f"attempt {attempt}: {missing}")
        unlike = contradiction(store, votes)
        if unlike:
            raise CommitRefused(unlike)
        newest = newest_order(store)
        if newest is not None and newest > (epoch, step) and store.size(key) is None:
            raise CommitRefused(
                f"epoch {epoch}, step {step} is older than the commit {commit_name(*newest)} in {store.describe()} and would never be "
                "loaded; a run that went back to an earlier step continues in a higher epoch"
            )
        fault_point("commit.validated")
        try:
            store.put(key, raw)
        except KeyExists:
            theirs, digest = _present(store, manifest.name)
            if theirs.attempt != attempt:
                raise CommitExists(f"{store.describe(key)} was committed by another attempt ({theirs.attempt})") from None
            return _whole(store, theirs, digest)
    except ManifestError as error:
        raise CommitExists(f"{store.describe(key)} is there already, and damaged: {error}; delete it, or save in a higher epoch") from None
    except OSError as error:
        raise SaveFailed(f"could not commit {store.describe(key)}: {error.strerror or error}; earlier checkpoints are untouched") from error
    # Do not read it back: the commit is durable, and a failed read would report an existing checkpoint as lost.
    return _whole(store, manifest, unseal(raw)[1])


def ls(root: Root) -> list[Commit]:
    """Return every commit, oldest first; damaged ones have a ``problem``. Reads manifests and sizes, but no data."""
    store = store_of(root)
    return [_read(store, name) for _, name in sorted(_listed(store))]


def latest(root: Root) -> Commit | None:
    """Return the newest intact commit: sealed, of a known format, with every object present in full size.

    Damaged newer commits are skipped with a warning in the log. Data is verified when it is read.

    Raises:
        OSError: the storage or a newer commit is out of reach (no permission, for example), so the newest commit is unknown.
    """
    return next(newest_first(root), None)


def newest_first(root: Root) -> Iterator[Commit]:
    """Intact commits, newest first, with a warning for each damaged one. Raises OSError as :func:`latest`."""
    store = store_of(root)
    for _, name in sorted(_listed(store), reverse=True):
        found = _read(store, name, strict=True)
        if found.problem is None:
            yield found
        else:
            _log.warning("checkpoint %s is skipped: %s", found.path, found.problem)


def find(root: Root, name: str | Commit | None) -> Commit:
    """Return the commit named ``name``, or the newest intact one for ``None``.

    Raises:
        NoCheckpoint: the commit does not exist. CheckpointCorrupt: it is damaged. OSError: it is out of reach.
    """
    store = store_of(root)
    if name is None:
        found = latest(store)
        if found is None:
            damaged = [c.name for c in ls(store)]
            detail = f"all its commits are damaged: {', '.join(damaged)}" if damaged else instead(store.describe())
            raise NoCheckpoint(f"no checkpoint in {store.describe()}: {detail}")
        return found
    text = name.name if isinstance(name, Commit) else name
    if not isinstance(text, str) or parse_commit_name(text) is None or store.size(f"commits/{text}.json") is None:
        names = ", ".join(c for _, c in sorted(_listed(store))[-3:]) or "none"
        raise NoCheckpoint(f"no checkpoint {text!r} in {store.describe()}; newest there: {names}")
    found = _read(store, text, strict=True)
    if found.problem is not None:
        raise CheckpointCorrupt(found.key, None, (), found.problem)
    return found


def newest_order(store: ObjectStore) -> tuple[int, int] | None:
    """(epoch, step) of the newest commit, from the object names alone."""
    return max((order for order, _ in _listed(store)), default=None)


def read_manifest(store: ObjectStore, name: str) -> tuple[Manifest, str]:
    """Return the manifest of a commit and its digest. Raises ManifestError or KeyMissing."""
    key = f"commits/{name}.json"
    size = store.size(key)
    if size is not None and size > MAX_BYTES:
        raise ManifestError(f"its {size} bytes are more than a manifest can have ({MAX_BYTES})")
    manifest, digest = decode(store.get(key))
    if manifest.name != name:
        raise ManifestError(f"it is the manifest of {manifest.name} under another name")
    return manifest, digest


def unreachable(path: str, error: OSError) -> OSError:
    """Return the error of a load that cannot reach an object of its checkpoint."""
    return OSError(
        error.errno or errno.EIO,
        f"{path} is out of reach: {error.strerror or error}; it may be intact, so no older checkpoint is loaded instead",
    )


def _listed(store: ObjectStore) -> list[tuple[tuple[int, int], str]]:
    found = []
    for entry in store.list("commits/"):
        name = entry.key.removeprefix("commits/").removesuffix(".json")
        order = parse_commit_name(name)
        if order is not None and entry.key == f"commits/{name}.json":
            found.append((order, name))
    return found


def _read(store: ObjectStore, name: str, *, strict: bool = False) -> Commit:
    """Read one commit object. ``strict``: a commit out of reach raises OSError, so that no older one is loaded in its place."""
    epoch, step = parse_commit_name(name) or (0, 0)
    path = store.describe(f"commits/{name}.json")
    try:
        manifest, digest = read_manifest(store, name)
        problem = _missing(store, manifest)
    except (ManifestError, KeyMissing) as error:
        return Commit(name, path, epoch, step, f"its manifest is unusable: {error}")
    except OSError as error:
        if strict and out_of_reach(error):
            raise unreachable(path, error) from error
        return Commit(name, path, epoch, step, f"it can't be read: {error.strerror or error}", unread=True)
    return replace(_whole(store, manifest, digest), problem=problem)


def _present(store: ObjectStore, name: str) -> tuple[Manifest, str]:
    """Return the existing commit object of this name. If it was deleted again already, raises CommitExists too."""
    try:
        return read_manifest(store, name)
    except KeyMissing:
        raise CommitExists(f"{store.describe(f'commits/{name}.json')} was committed by another attempt, and deleted since") from None


def _whole(store: ObjectStore, manifest: Manifest, digest: str) -> Commit:
    path = store.describe(f"commits/{manifest.name}.json")
    m = manifest
    return Commit(m.name, path, m.epoch, m.step, None, digest, m.attempt, m.world, m.bytes, m.created)


def _missing(store: ObjectStore, manifest: Manifest) -> str | None:
    # One listing replaces a request per object. Objects that it lacks are requested one by one, in case the listing is outdated or failed.
    try:
        listed = {entry.key: entry.bytes for entry in store.list(f"data/{manifest.attempt}/")}
    except OSError:
        listed = {}
    for stored in manifest.stored:
        size = listed.get(stored.key)
        if size != stored.bytes:
            size = store.size(stored.key)
        if size is None:
            return f"object {stored.key} is missing"
        if size != stored.bytes:
            return f"object {stored.key} has {size} bytes instead of {stored.bytes}"
    return None


def _in_one_order(votes: Sequence[Vote]) -> list[Vote]:
    """Convert tensors whose ranks or kinds use different element orders to row order, which splits their pieces into more pieces."""
    orders: dict[str, set[Tiling]] = defaultdict(set)
    for vote in votes:
        for p in vote.pieces:
            if p.end > p.start:
                orders[p.name].add(p.tiling)
    mixed = {name for name, found in orders.items() if len(found) > 1}
    return [replace(vote, pieces=tuple(_by_rows(vote, mixed))) for vote in votes] if mixed else list(votes)


def _by_rows(vote: Vote, mixed: Collection[str]) -> Iterator[PlacedPiece]:
    for p in vote.pieces:
        if p.name not in mixed or not p.tiling.cuts or p.start == p.end:
            yield p
            continue
        runs = (column.tolist() for column in p.tiling.by_rows(p.shape, p.start, p.end))
        for first, length, at in zip(*runs, strict=True):
            # The digest covers the whole piece, so copies are compared by their bytes instead.
            offset, digest = p.offset + at * dtype_of(p.dtype).itemsize, f"rank {vote.rank}" if p.copied else ""
            yield replace(p, start=first, end=first + length, offset=offset, digest=digest, tiling=ROWS)


def _assemble(
    votes: Sequence[Vote], step: int, epoch: int, attempt: str, world: int, meta: Mapping[str, Any], aliases: Mapping[str, str]
) -> Manifest:
    ranks = sorted(v.rank for v in votes)
    if ranks != list(range(world)):
        absent = sorted(set(range(world)) - set(ranks))
        raise CommitRefused(f"{len(votes)} votes for {world} ranks" + (f"; no vote from ranks {absent}" if absent else f": {ranks}"))
    by_rank = sorted(votes, key=lambda v: v.rank)
    for vote in by_rank:
        if (vote.attempt, vote.epoch, vote.step) != (attempt, epoch, step):
            raise CommitRefused(
                f"rank {vote.rank} voted for attempt {vote.attempt}, epoch {vote.epoch}, step {vote.step}; "
                f"this is attempt {attempt}, epoch {epoch}, step {step}"
            )
    try:
        kinds = tensor_kinds((p.name, p.kind, p.dtype, p.shape) for v in by_rank for p in v.pieces)
    except ValueError as error:
        raise CommitRefused(f"the ranks contradict each other: {error}") from None
    order = merge_orders(list(dict.fromkeys(p.name for p in v.pieces)) for v in by_rank)
    grouped = group_tensors({name: kinds[name] for name in order})
    shapes = {p.name: p.shape for v in by_rank for p in v.pieces}
    tilings = {p.name: p.tiling for v in by_rank for p in v.pieces if p.end > p.start}
    held: dict[tuple[str, str], list[Held]] = defaultdict(list)
    copies: dict[tuple[str, str], list[Held]] = defaultdict(list)
    for vote in by_rank:
        for p in vote.pieces:
            if p.end > p.start:
                (copies if p.copied else held)[p.name, p.kind].append((p.start, p.end, vote.rank, p.offset))
    for (name, kind), pieces in copies.items():
        held[name, kind] += each_once(pieces, dtype_of(kinds[name][kind]).itemsize)
    tensors: dict[str, TensorEntry] = {}
    groups: list[TensorGroup] = []
    for group_id, (group_kinds, names) in enumerate(grouped):
        space = FlatSpace([(name, math.prod(shapes[name])) for name in names])
        for name in names:
            tensors[name] = TensorEntry(name, shapes[name], group_id, space.base(name), tilings.get(name, ROWS))
            for kind, _ in group_kinds:
                _check_cover(name, kind, held[name, kind], space.numel_of(name))
        columns = tuple(_extents(space, names, kind, dtype_of(dtype), held, world) for kind, dtype in group_kinds)
        groups.append(TensorGroup(group_id, space.numel, columns))
    ordered = tuple(tensors[name] for _, names in grouped for name in names)
    return Manifest(
        step=step,
        epoch=epoch,
        attempt=attempt,
        world=world,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        writer=f"vescale-ray, torch {torch.__version__}",
        tensors=ordered,
        aliases=dict(aliases),
        groups=tuple(groups),
        objects=tuple(v.object for v in by_rank),
        aux=tuple(v.aux for v in by_rank if v.aux is not None),
        meta=dict(meta),
    )


def _encoded(manifest: Manifest) -> bytes:
    """Return the commit object, checked to be readable. Otherwise a user would find an unreadable checkpoint only when it is needed."""
    raw = encode(manifest)
    if len(raw) > MAX_BYTES:
        intervals = sum(len(e.start) for g in manifest.groups for e in g.kinds)
        raise CommitRefused(
            f"its manifest would have {len(raw)} bytes, more than a reader takes ({MAX_BYTES}): keep large values as tensors or as aux, "
            f"or save from fewer ranks (it names {intervals} intervals of {len(manifest.tensors)} tensors)"
        )
    try:
        decode(raw)
    except ManifestError as error:
        raise CommitRefused(f"the votes make no valid checkpoint: {error}") from None
    return raw


def _check_cover(name: str, kind: str, pieces: list[tuple[int, int, int, int]], numel: int) -> None:
    """Check that every element is written exactly once. Otherwise a load would keep old values, or pick one of two."""
    edges = sorted(pieces)
    what = f"{kind!r} of tensor {name!r}"
    remedy = "" if kind == "param" else "; let all ranks take the same optimizer steps, so that they have states of the same parameters"
    position = 0
    for start, end, rank, _ in edges:
        if start > position:
            raise CommitRefused(f"{what}: no rank wrote elements [{position}, {start}){remedy}")
        if start < position:
            other = next(r for (_, e, r, _), (s, *_rest) in pairwise(edges) if e > s)
            raise CommitRefused(f"{what}: elements from {start} on were written twice, by ranks {other} and {rank}")
        position = end
    if position < numel:
        if kind == "param" and not position:  # each rank expected another to write it: of a plain tensor on all ranks, one rank writes all
            remedy = f"; a plain tensor must exist on every rank that saves, with equal values ({STAGES})"
        raise CommitRefused(f"{what}: no rank wrote elements [{position}, {numel}){remedy}")


def _extents(
    space: FlatSpace,
    names: Sequence[str],
    kind: str,
    dtype: torch.dtype,
    held: Mapping[tuple[str, str], list[tuple[int, int, int, int]]],
    world: int,
) -> Extents:
    """Return the pieces as intervals of the group's index space. Pieces that are adjacent in that space and in the object are merged."""
    size = dtype.itemsize
    of_rank: list[list[Extent]] = [[] for _ in range(world)]
    for name in names:
        base = space.base(name)
        for start, end, rank, offset in held[name, kind]:
            of_rank[rank].append(Extent(base + start, base + end, offset // size))
    rows = sorted((e.start, e.end, rank, e.offset * size) for rank, extents in enumerate(of_rank) for e in merge_adjacent(extents))
    columns = np.array(rows, dtype=np.int64).reshape(-1, 4)
    return Extents(kind, dtype, columns[:, 0], columns[:, 1], columns[:, 2], columns[:, 3])
