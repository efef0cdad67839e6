"""The commit object: the place of every element of every tensor. :mod:`.manifest_codec` writes and reads it.

``docs/reference/checkpoint-format.md`` describes the format.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from ..stores.store import ALIGNMENT
from .commit_names import commit_name
from .digest import decode_sums, encode_sums, root_of
from .manifest_fields import ManifestError, count_of, expect, text_of
from .tiling import ROWS, Tiling

_DATA_KEY = re.compile(r"data/[A-Za-z0-9][A-Za-z0-9_-]{0,127}/r[0-9]{5,9}\.safetensors")
_AUX_KEY = re.compile(r"data/[A-Za-z0-9][A-Za-z0-9_-]{0,127}/r[0-9]{5,9}\.aux\.json")
_MAX_BLOCK = 64 << 20


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
        key, size, block = text_of(raw, "key"), count_of(raw, "bytes"), count_of(raw, "block_bytes")
        expect(_DATA_KEY.fullmatch(key) is not None, f"object key {key!r} lies outside data/")
        expect(raw.get("codec") == "none", f"object {key}: codec {raw.get('codec')!r} is not known to this version")
        expect(raw.get("algorithm") == "xxh3_64", f"object {key}: checksum algorithm {raw.get('algorithm')!r} is not known to this version")
        expect(
            block % ALIGNMENT == 0 and 0 < block <= _MAX_BLOCK, f"object {key}: block_bytes {block} is not a multiple of 4096 up to 64 MiB"
        )
        try:
            sums = decode_sums(text_of(raw, "sums"))
        except ValueError as error:
            raise ManifestError(f"object {key}: {error}") from None
        expect(len(sums) == -(-size // block), f"object {key}: {len(sums)} block sums for {size} bytes in blocks of {block}")
        root = text_of(raw, "root")
        expect(root == root_of(sums), f"object {key}: the block sums do not have the root {root}")
        return cls(key, count_of(raw, "rank"), size, block, sums, root)


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
        key = text_of(raw, "key")
        expect(_AUX_KEY.fullmatch(key) is not None, f"aux key {key!r} lies outside data/")
        return cls(key, count_of(raw, "rank"), count_of(raw, "bytes"), text_of(raw, "xxh3_128"))


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
