"""Write a manifest as a commit object, and read it back: seal, JSON, and the checks of every number against the others.

A manifest is checked before anything in it is trusted. So a damaged or malicious one can neither direct a read outside its objects nor make
the reader allocate more than they hold.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from .commit_names import ATTEMPT
from .manifest import AuxEntry, Extents, Manifest, ObjectEntry, TensorEntry, TensorGroup
from .manifest_fields import LIMIT, ManifestError, column_of, count_of, expect, information_of, integer, list_of, text_of
from .object_layout import FORMAT, dtype_name, dtype_of
from .strict_json import strict_json
from .tiling import ROWS, Tiling

TILED = "rcp/2"
"""Format of a manifest with tensors stored tile by tile; all others have ``rcp/1``."""
_MAX_DIMS = 64  # torch's limit of dimensions
MAX_BYTES = 256 << 20
"""Largest manifest, in bytes: 40 times that of an 8B model on 1024 ranks. Parsing the JSON takes about ten times as much memory."""


def seal(body: bytes) -> bytes:
    """Return ``body``, a newline, the SHA-256 of both in hexadecimal, a newline."""
    body += b"\n"
    return body + hashlib.sha256(body).hexdigest().encode() + b"\n"


def unseal(raw: bytes) -> tuple[bytes, str]:
    """Check the seal and return (body, sha256). Raises ManifestError."""
    body, last = raw[:-65], raw[-65:]
    digest = hashlib.sha256(body).hexdigest()
    if last != digest.encode() + b"\n" or not body.endswith(b"\n"):
        raise ManifestError(f"its {len(raw)} bytes do not have the SHA-256 in the last line: torn or damaged")
    return body[:-1], digest


def encode(manifest: Manifest) -> bytes:
    document = {
        "format": TILED if any(t.tiling.cuts for t in manifest.tensors) else FORMAT,
        "step": manifest.step,
        "epoch": manifest.epoch,
        "attempt": manifest.attempt,
        "world": manifest.world,
        "created": manifest.created,
        "writer": manifest.writer,
        "tensors": [
            {
                "fqn": t.fqn,
                "shape": list(t.shape),
                "dtype": dtype_name(manifest.groups[t.group].kinds[0].dtype),
                "group": t.group,
                "base": t.base,
                "numel": t.numel,
                **({"tiles": t.tiling.to_json()} if t.tiling.cuts else {}),
            }
            for t in manifest.tensors
        ],
        "aliases": dict(manifest.aliases),
        "groups": [
            {
                "id": g.id,
                "numel": g.numel,
                "kinds": [
                    {
                        "kind": e.kind,
                        "dtype": dtype_name(e.dtype),
                        "start": e.start.tolist(),
                        "end": e.end.tolist(),
                        "object": e.object.tolist(),
                        "offset": e.offset.tolist(),
                    }
                    for e in g.kinds
                ],
            }
            for g in manifest.groups
        ],
        "objects": [o.to_json() for o in manifest.objects],
        "aux": [a.to_json() for a in manifest.aux],
        "meta": dict(manifest.meta),
    }
    return seal(json.dumps(document, separators=(",", ":"), allow_nan=False).encode())


def decode(raw: bytes) -> tuple[Manifest, str]:
    """Parse and check a commit object: ``(manifest, sha256 of its body)``.

    Raises:
        ManifestError: the object is torn, damaged, of an unknown format, or contradicts itself.
    """
    body, digest = unseal(raw)
    try:
        document = strict_json(body)
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"not JSON: {error}") from None
    expect(isinstance(document, dict), "no JSON object")
    stated = document.get("format")
    known = re.fullmatch(r"(rcp/[12])(\.\d+)?", stated) if isinstance(stated, str) else None
    expect(known is not None, f"format {stated!r} is not {FORMAT!r} or {TILED!r}")
    tiled = known is not None and known[1] == TILED
    try:
        manifest = Manifest(
            step=count_of(document, "step"),
            epoch=count_of(document, "epoch"),
            attempt=text_of(document, "attempt"),
            world=count_of(document, "world"),
            created=information_of(document, "created"),
            writer=information_of(document, "writer"),
            tensors=tuple(_tensor(raw_tensor, tiled) for raw_tensor in list_of(document, "tensors")),
            aliases=cast(dict[str, str], document.get("aliases", {})),
            groups=tuple(_group(raw_group) for raw_group in list_of(document, "groups")),
            objects=tuple(ObjectEntry.from_json(o) for o in list_of(document, "objects")),
            aux=tuple(AuxEntry.from_json(a) for a in list_of(document, "aux")),
            meta=cast(dict[str, Any], document.get("meta", {})),
        )
    except ManifestError:
        raise
    except (TypeError, AttributeError, KeyError, ValueError, OverflowError) as error:
        raise ManifestError(f"malformed: {error}") from None
    validate(manifest)
    return manifest, digest


def validate(manifest: Manifest) -> None:
    """Check every number of a manifest against every other.

    Raises:
        ManifestError: names the first contradiction.
    """
    expect(ATTEMPT.fullmatch(manifest.attempt) is not None, f"attempt {manifest.attempt!r} is not an identifier")
    expect(isinstance(manifest.aliases, dict) and isinstance(manifest.meta, dict), "aliases and meta must be JSON objects")
    expect(
        [o.rank for o in manifest.objects] == list(range(len(manifest.objects))) and len(manifest.objects) == manifest.world,
        f"world {manifest.world} without one object per rank in order",
    )
    expect(len({o.key for o in manifest.objects}) == manifest.world, "an object is listed twice")
    for stored in manifest.stored:
        expect(stored.key.split("/")[1] == manifest.attempt, f"{stored.key} is not of attempt {manifest.attempt}")
    expect([g.id for g in manifest.groups] == list(range(len(manifest.groups))), "group ids are not 0, 1, 2, ..")
    position = [0] * len(manifest.groups)
    names: set[str] = set()
    for t in manifest.tensors:
        expect(t.fqn not in names, f"tensor {t.fqn!r} is listed twice")
        names.add(t.fqn)
        expect(t.group < len(position), f"tensor {t.fqn!r} is of group {t.group}, which does not exist")
        expect(t.base == position[t.group], f"tensor {t.fqn!r} starts at element {t.base} of group {t.group}, expected {position[t.group]}")
        position[t.group] += t.numel
    for alias, target in manifest.aliases.items():
        stands = isinstance(target, str) and target in names and alias not in names
        expect(stands, f"alias {alias!r} of {target!r} does not stand for a stored tensor")
    for g in manifest.groups:
        expect(bool(g.kinds) and len({e.kind for e in g.kinds}) == len(g.kinds), f"group {g.id} names no kind, or one twice")
        expect(g.numel == position[g.id], f"group {g.id} has {g.numel} elements, its tensors {position[g.id]}")
        for e in g.kinds:
            _check_tiling(e, g.numel, f"{e.kind!r} of group {g.id}")
    _check_bytes(manifest)


def _check_tiling(e: Extents, numel: int, what: str) -> None:
    count = len(e.start)
    expect(len(e.end) == len(e.object) == len(e.offset) == count, f"{what}: extent columns of different lengths")
    expect(count > 0 or numel == 0, f"{what}: no extents for {numel} elements")
    if not count:
        return
    tiles = int(e.start[0]) == 0 and int(e.end[-1]) == numel and bool((e.start[1:] == e.end[:-1]).all()) and bool((e.end > e.start).all())
    expect(tiles, f"{what}: the extents do not tile its {numel} elements exactly")


def _check_bytes(manifest: Manifest) -> None:
    """Check that every extent lies inside its object and is aligned to its dtype, and that no two share a byte. Otherwise a small file
    could claim a huge tensor."""
    columns = [(e.object, e.offset, (e.end - e.start), e.dtype.itemsize) for g in manifest.groups for e in g.kinds if len(e.start)]
    if not columns:
        return
    sizes = np.array([o.bytes for o in manifest.objects], dtype=np.int64)
    for objects, offsets, lengths, itemsize in columns:
        expect(bool(((objects >= 0) & (objects < len(sizes))).all()), "an extent names an object that does not exist")
        # Divide rather than multiply, since a product could overflow int64.
        room = (sizes[objects] - offsets) // itemsize
        expect(bool(((offsets >= 0) & (lengths <= room)).all()), "an extent reaches beyond the end of its object")
        expect(bool((offsets % itemsize == 0).all()), "an extent is not aligned to its dtype")
    objects = np.concatenate([c[0] for c in columns])
    starts = np.concatenate([c[1] for c in columns])
    ends = np.concatenate([c[1] + c[2] * c[3] for c in columns])
    order = np.lexsort((starts, objects))
    same = objects[order][1:] == objects[order][:-1]
    expect(not bool((same & (starts[order][1:] < ends[order][:-1])).any()), "two extents share bytes of an object")


def _tensor(raw: Mapping[str, Any], tiled: bool) -> TensorEntry:
    stated = list_of(raw, "shape")
    expect(len(stated) <= _MAX_DIMS, f"a tensor of {len(stated)} dimensions")
    shape = tuple(integer(n, "a dimension") for n in stated)
    # An empty tensor, too, needs a shape whose strides torch can hold.
    expect(math.prod(max(1, n) for n in shape) < LIMIT, f"a tensor of shape {shape} is too large")
    tiles = raw.get("tiles", [])
    expect(tiled or not tiles, f"tiles in a manifest that says {FORMAT!r}, whose readers don't know them")
    tiling = Tiling.from_json(tiles) if tiles != [] else ROWS
    problem = tiling.problem(shape)
    expect(problem is None, f"a tensor with {problem}")
    entry = TensorEntry(text_of(raw, "fqn"), shape, count_of(raw, "group"), count_of(raw, "base"), tiling)
    expect(entry.numel == raw.get("numel"), f"tensor {entry.fqn!r} of shape {shape} does not have {raw.get('numel')} elements")
    return entry


def _group(raw: Mapping[str, Any]) -> TensorGroup:
    kinds = tuple(
        Extents(text_of(k, "kind"), dtype_of(text_of(k, "dtype")), *(column_of(k, name) for name in ("start", "end", "object", "offset")))
        for k in list_of(raw, "kinds")
    )
    return TensorGroup(count_of(raw, "id"), count_of(raw, "numel"), kinds)
