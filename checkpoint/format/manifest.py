"""The commit object: one JSON document with the place of every element of every tensor, sealed by its last line.

A manifest is checked before anything in it is trusted: first the seal (SHA-256), then every number against the others. So a damaged or
malicious manifest can neither direct a read outside its objects nor make the reader allocate more than they hold.
``docs/reference/checkpoint-format.md`` describes the format.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch

from ..errors import shortened
from ..stores.store import ALIGNMENT
from .digest import decode_sums, encode_sums, root_of
from .object_layout import FORMAT, dtype_name, dtype_of
from .tiling import ROWS, Tiling

TILED = "rcp/2"
"""Format of a manifest with tensors stored tile by tile; all others have ``rcp/1``."""
_MOST_DEEP = 400
"""Deepest nesting of lists and objects. JSON readers fail a few hundred levels further. Values of a state may be 100 deep, with tags
between their levels."""
_DATA_KEY = re.compile(r"data/[A-Za-z0-9][A-Za-z0-9_-]{0,127}/r[0-9]{5,9}\.safetensors")
_AUX_KEY = re.compile(r"data/[A-Za-z0-9][A-Za-z0-9_-]{0,127}/r[0-9]{5,9}\.aux\.json")
_ATTEMPT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
_COMMIT = re.compile(r"e([0-9]{4,18})-s([0-9]{12,18})")
_MAX_BLOCK = 64 << 20
_MAX_DIMS = 64  # torch's own limit
_LIMIT = 1 << 62

MAX_BYTES = 256 << 20
"""Largest manifest, in bytes: 40 times that of an 8B model on 1024 ranks. Parsing the JSON takes about ten times as much memory."""


class ManifestError(ValueError):
    """The bytes are not a valid manifest. The message says what is wrong in one sentence, and shortens long quotes."""

    def __init__(self, message: str) -> None:
        super().__init__(shortened(message))


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a group: elements ``[base, base + numel)`` of the group's index space, in the order ``tiling``."""

    fqn: str
    shape: tuple[int, ...]
    group: int
    base: int
    tiling: Tiling = ROWS

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, eq=False)
class Extents:
    """Place of one kind of one group: int64 columns, sorted, tiling ``[0, numel)``.

    Elements ``[start[i], end[i])`` of the group are bytes ``[offset[i], offset[i] + (end[i] - start[i]) * itemsize)`` of object
    ``object[i]``.
    """

    kind: str
    dtype: torch.dtype
    start: np.ndarray
    end: np.ndarray
    object: np.ndarray
    offset: np.ndarray


@dataclass(frozen=True, eq=False)
class TensorGroup:
    """Tensors with the same kinds and dtypes, laid end to end."""

    id: int
    numel: int
    kinds: tuple[Extents, ...]

    def extents(self, kind: str) -> Extents | None:
        return next((e for e in self.kinds if e.kind == kind), None)


@dataclass(frozen=True, eq=False)
class ObjectEntry:
    """One rank's data object and its checksums."""

    key: str
    rank: int
    bytes: int
    block_bytes: int
    sums: np.ndarray = field(repr=False)
    root: str

    def to_json(self) -> dict[str, Any]:
        return {
            "key": self.key,
            "rank": self.rank,
            "bytes": self.bytes,
            "codec": "none",
            "block_bytes": self.block_bytes,
            "algorithm": "xxh3_64",
            "sums": encode_sums(self.sums),
            "root": self.root,
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> ObjectEntry:
        key, size, block = _text(raw, "key"), _count(raw, "bytes"), _count(raw, "block_bytes")
        _expect(_DATA_KEY.fullmatch(key) is not None, f"object key {key!r} lies outside data/")
        _expect(raw.get("codec") == "none", f"object {key}: codec {raw.get('codec')!r} is not known to this version")
        _expect(
            raw.get("algorithm") == "xxh3_64", f"object {key}: checksum algorithm {raw.get('algorithm')!r} is not known to this version"
        )
        _expect(
            block % ALIGNMENT == 0 and 0 < block <= _MAX_BLOCK, f"object {key}: block_bytes {block} is not a multiple of 4096 up to 64 MiB"
        )
        try:
            sums = decode_sums(_text(raw, "sums"))
        except ValueError as error:
            raise ManifestError(f"object {key}: {error}") from None
        _expect(len(sums) == -(-size // block), f"object {key}: {len(sums)} block sums for {size} bytes in blocks of {block}")
        root = _text(raw, "root")
        _expect(root == root_of(sums), f"object {key}: the block sums do not have the root {root}")
        return cls(key, _count(raw, "rank"), size, block, sums, root)


@dataclass(frozen=True)
class AuxEntry:
    """One rank's JSON object of per-rank state, such as random generators."""

    key: str
    rank: int
    bytes: int
    xxh3_128: str

    def to_json(self) -> dict[str, Any]:
        return {"key": self.key, "rank": self.rank, "bytes": self.bytes, "xxh3_128": self.xxh3_128}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> AuxEntry:
        key = _text(raw, "key")
        _expect(_AUX_KEY.fullmatch(key) is not None, f"aux key {key!r} lies outside data/")
        return cls(key, _count(raw, "rank"), _count(raw, "bytes"), _text(raw, "xxh3_128"))


@dataclass(frozen=True, eq=False)
class Manifest:
    """A complete checkpoint, as committed."""

    step: int
    epoch: int
    attempt: str
    world: int
    created: str
    writer: str
    tensors: tuple[TensorEntry, ...]
    aliases: Mapping[str, str]
    groups: tuple[TensorGroup, ...]
    objects: tuple[ObjectEntry, ...]
    aux: tuple[AuxEntry, ...]
    meta: Mapping[str, Any]

    @property
    def name(self) -> str:
        return commit_name(self.epoch, self.step)

    @property
    def stored(self) -> tuple[ObjectEntry | AuxEntry, ...]:
        """Every object that the commit refers to."""
        return (*self.objects, *self.aux)

    @property
    def bytes(self) -> int:
        return sum(stored.bytes for stored in self.stored)

    @cached_property
    def by_name(self) -> dict[str, TensorEntry]:
        return {t.fqn: t for t in self.tensors}

    def owners(self, object_index: int, start: int, end: int) -> tuple[str, ...]:
        """Contents of bytes ``[start, end)`` of an object: tensors (with their kind unless it is ``param``), ``header``, ``padding``."""
        found: list[str] = []
        covered = 0
        first = self._data_start(object_index)
        if start < first:
            found.append("header")
            covered += min(end, first) - start
        for group in self.groups:
            for extents in group.kinds:
                size = extents.dtype.itemsize
                for i in np.flatnonzero(extents.object == object_index):
                    offset = int(extents.offset[i])
                    length = int(extents.end[i] - extents.start[i]) * size
                    low, high = max(start, offset), min(end, offset + length)
                    if low >= high:
                        continue
                    covered += high - low
                    element = int(extents.start[i])
                    names = self._names_in(group.id, element + (low - offset) // size, element - (offset - high) // size)
                    found += names if extents.kind == "param" else [f"{name} ({extents.kind})" for name in names]
        if covered < end - start:
            found.append("padding")
        return tuple(found)

    def _data_start(self, object_index: int) -> int:
        starts = [int(e.offset[e.object == object_index].min()) for g in self.groups for e in g.kinds if (e.object == object_index).any()]
        return min(starts, default=self.objects[object_index].bytes)

    @cached_property
    def _spaces(self) -> dict[int, tuple[list[int], list[str]]]:
        spaces: dict[int, tuple[list[int], list[str]]] = {g.id: ([], []) for g in self.groups}
        for t in self.tensors:
            if t.numel:
                spaces[t.group][0].append(t.base)
                spaces[t.group][1].append(t.fqn)
        return spaces

    def _names_in(self, group: int, start: int, end: int) -> list[str]:
        bases, names = self._spaces[group]
        return names[max(0, bisect_right(bases, start) - 1) : bisect_left(bases, end)]


def commit_name(epoch: int, step: int) -> str:
    return f"e{epoch:04d}-s{step:012d}"


def parse_commit_name(name: str) -> tuple[int, int] | None:
    """``(epoch, step)``, the order of commits; ``None`` if ``name`` is not a commit's name."""
    match = _COMMIT.fullmatch(name)
    if match is None:
        return None
    epoch, step = int(match[1]), int(match[2])
    return (epoch, step) if commit_name(epoch, step) == name else None


def check_attempt(attempt: str) -> str:
    if not _ATTEMPT.fullmatch(attempt):
        raise ValueError(f"attempt {attempt!r} is not an identifier of letters, digits, '-' and '_' (use new_attempt())")
    return attempt


def check_meta(meta: Mapping[str, Any], what: str = "meta") -> None:
    """Raises ValueError, naming the first value that strict JSON cannot hold."""
    for path, value in _leaves(meta, what):
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{path} is {value}, which JSON has no number for; store it as a string")
        if value is not None and not isinstance(value, (str, bool, int, float)):
            raise ValueError(f"{path} is a {type(value).__name__}, which JSON can't hold; give Python's numbers, strings, lists and dicts")


def _leaves(value: Any, path: str, depth: int = 0) -> Iterator[tuple[str, Any]]:
    if depth > _MOST_DEEP:
        raise ValueError(f"{path[:80]}.. is nested more than {_MOST_DEEP} deep, or holds itself; give flatter values")
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{path} has the key {key!r}; JSON keys are strings")
            yield from _leaves(item, f"{path}.{key}", depth + 1)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]", depth + 1)
    else:
        yield path, value


def strict_json(raw: bytes | str) -> Any:
    """Parse unambiguous JSON: no duplicate key (parsers differ in which counts), no NaN, no infinity, no number that overflows to one.

    Raises:
        ValueError: the text is not such JSON. RecursionError: it is nested some thousand levels deep.
    """
    return json.loads(raw, object_pairs_hook=_object, parse_constant=_no_number, parse_float=_finite)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(n for n in names if names.count(n) > 1)!r} occurs twice in one object")
    return found


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is not a number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large for a number")
    return value


def seal(body: bytes) -> bytes:
    """``body``, a newline, the SHA-256 of both in hexadecimal, a newline."""
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
        raise ManifestError(f"no JSON: {error}") from None
    _expect(isinstance(document, dict), "no JSON object")
    stated = document.get("format")
    known = re.fullmatch(r"(rcp/[12])(\.\d+)?", stated) if isinstance(stated, str) else None
    _expect(known is not None, f"format {stated!r} is not {FORMAT!r} or {TILED!r}")
    tiled = known is not None and known[1] == TILED
    try:
        manifest = Manifest(
            step=_count(document, "step"),
            epoch=_count(document, "epoch"),
            attempt=_text(document, "attempt"),
            world=_count(document, "world"),
            created=_information(document, "created"),
            writer=_information(document, "writer"),
            tensors=tuple(_tensor(raw_tensor, tiled) for raw_tensor in _list(document, "tensors")),
            aliases=cast(dict[str, str], document.get("aliases", {})),
            groups=tuple(_group(raw_group) for raw_group in _list(document, "groups")),
            objects=tuple(ObjectEntry.from_json(o) for o in _list(document, "objects")),
            aux=tuple(AuxEntry.from_json(a) for a in _list(document, "aux")),
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
    _expect(_ATTEMPT.fullmatch(manifest.attempt) is not None, f"attempt {manifest.attempt!r} is not an identifier")
    _expect(isinstance(manifest.aliases, dict) and isinstance(manifest.meta, dict), "aliases and meta must be JSON objects")
    _expect(
        [o.rank for o in manifest.objects] == list(range(len(manifest.objects))) and len(manifest.objects) == manifest.world,
        f"world {manifest.world} without one object per rank in order",
    )
    _expect(len({o.key for o in manifest.objects}) == manifest.world, "an object is listed twice")
    for stored in manifest.stored:
        _expect(stored.key.split("/")[1] == manifest.attempt, f"{stored.key} is not of attempt {manifest.attempt}")
    _expect([g.id for g in manifest.groups] == list(range(len(manifest.groups))), "group ids are not 0, 1, 2, ..")
    position = [0] * len(manifest.groups)
    names: set[str] = set()
    for t in manifest.tensors:
        _expect(t.fqn not in names, f"tensor {t.fqn!r} is listed twice")
        names.add(t.fqn)
        _expect(t.group < len(position), f"tensor {t.fqn!r} is of group {t.group}, which does not exist")
        _expect(
            t.base == position[t.group], f"tensor {t.fqn!r} starts at element {t.base} of group {t.group}, expected {position[t.group]}"
        )
        position[t.group] += t.numel
    for alias, target in manifest.aliases.items():
        stands = isinstance(target, str) and target in names and alias not in names
        _expect(stands, f"alias {alias!r} of {target!r} does not stand for a stored tensor")
    for g in manifest.groups:
        _expect(bool(g.kinds) and len({e.kind for e in g.kinds}) == len(g.kinds), f"group {g.id} names no kind, or one twice")
        _expect(g.numel == position[g.id], f"group {g.id} has {g.numel} elements, its tensors {position[g.id]}")
        for e in g.kinds:
            _check_tiling(e, g.numel, f"{e.kind!r} of group {g.id}")
    _check_bytes(manifest)


def _check_tiling(e: Extents, numel: int, what: str) -> None:
    count = len(e.start)
    _expect(len(e.end) == len(e.object) == len(e.offset) == count, f"{what}: extent columns of different lengths")
    _expect(count > 0 or numel == 0, f"{what}: no extents for {numel} elements")
    if not count:
        return
    tiles = int(e.start[0]) == 0 and int(e.end[-1]) == numel and bool((e.start[1:] == e.end[:-1]).all()) and bool((e.end > e.start).all())
    _expect(tiles, f"{what}: the extents do not tile its {numel} elements exactly")


def _check_bytes(manifest: Manifest) -> None:
    """Check that every extent lies inside its object and is aligned to its dtype, and that no two share a byte. Otherwise a small file
    could claim a huge tensor."""
    columns = [(e.object, e.offset, (e.end - e.start), e.dtype.itemsize) for g in manifest.groups for e in g.kinds if len(e.start)]
    if not columns:
        return
    sizes = np.array([o.bytes for o in manifest.objects], dtype=np.int64)
    for objects, offsets, lengths, itemsize in columns:
        _expect(bool(((objects >= 0) & (objects < len(sizes))).all()), "an extent names an object that does not exist")
        # Divide rather than multiply, since a product could overflow int64.
        room = (sizes[objects] - offsets) // itemsize
        _expect(bool(((offsets >= 0) & (lengths <= room)).all()), "an extent reaches beyond the end of its object")
        _expect(bool((offsets % itemsize == 0).all()), "an extent is not aligned to its dtype")
    objects = np.concatenate([c[0] for c in columns])
    starts = np.concatenate([c[1] for c in columns])
    ends = np.concatenate([c[1] + c[2] * c[3] for c in columns])
    order = np.lexsort((starts, objects))
    same = objects[order][1:] == objects[order][:-1]
    _expect(not bool((same & (starts[order][1:] < ends[order][:-1])).any()), "two extents share bytes of an object")


def _tensor(raw: Mapping[str, Any], tiled: bool) -> TensorEntry:
    stated = _list(raw, "shape")
    _expect(len(stated) <= _MAX_DIMS, f"a tensor of {len(stated)} dimensions")
    shape = tuple(_integer(n, "a dimension") for n in stated)
    # An empty tensor, too, needs a shape whose strides torch can hold.
    _expect(math.prod(max(1, n) for n in shape) < _LIMIT, f"a tensor of shape {shape} is too large")
    tiles = raw.get("tiles", [])
    _expect(tiled or not tiles, f"tiles in a manifest that says {FORMAT!r}, whose readers don't know them")
    tiling = Tiling.from_json(tiles) if tiles != [] else ROWS
    problem = tiling.problem(shape)
    _expect(problem is None, f"a tensor with {problem}")
    entry = TensorEntry(_text(raw, "fqn"), shape, _count(raw, "group"), _count(raw, "base"), tiling)
    _expect(entry.numel == raw.get("numel"), f"tensor {entry.fqn!r} of shape {shape} does not have {raw.get('numel')} elements")
    return entry


def _group(raw: Mapping[str, Any]) -> TensorGroup:
    kinds = tuple(
        Extents(_text(k, "kind"), dtype_of(_text(k, "dtype")), *(_column(k, name) for name in ("start", "end", "object", "offset")))
        for k in _list(raw, "kinds")
    )
    return TensorGroup(_count(raw, "id"), _count(raw, "numel"), kinds)


def _column(raw: Mapping[str, Any], key: str) -> np.ndarray:
    values = _list(raw, key)
    _expect(all(type(v) is int for v in values), f"column {key!r} holds something else than integers")
    return np.array(values, dtype=np.int64)


def _count(raw: Mapping[str, Any], key: str) -> int:
    return _integer(raw.get(key), key)


def _integer(value: Any, what: str) -> int:
    _expect(type(value) is int and 0 <= value < _LIMIT, f"{what} is {value!r}, no non-negative integer")
    return int(value)


def _information(document: Mapping[str, Any], key: str) -> str:
    value = document.get(key, "")
    _expect(isinstance(value, str), f"{key} is not text")
    return str(value)


def _text(raw: Mapping[str, Any], key: str) -> str:
    value = raw.get(key)
    _expect(isinstance(value, str) and bool(value), f"{key} is {value!r}, no text")
    return str(value)


def _list(raw: Mapping[str, Any], key: str) -> list[Any]:
    value = raw.get(key)
    _expect(isinstance(value, list), f"{key} is not a list")
    return cast(list[Any], value)


def _expect(condition: bool, message: str) -> None:
    if not condition:
        raise ManifestError(message)
