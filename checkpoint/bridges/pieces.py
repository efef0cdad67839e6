"""A file's tensors as contiguous ranges of larger tensors: experts that a file stores one by one and a model as one parameter."""

from __future__ import annotations

import bisect
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..errors import CheckpointMismatch, first_few
from ..state.matching import StoredTensor
from .foreign import TensorSource


@dataclass(frozen=True)
class FilePiece:
    """A file's tensor of shape ``shape``: the elements of tensor ``name`` from ``start`` on, in row-major order."""

    name: str
    start: int
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class FileLayout:
    """The tensors of a model as files store them.

    Attributes:
        pieces: the piece of each tensor in the files.
        shapes: shape of each tensor that the pieces make up.
        ignored: regular expressions; files may have tensors whose names one of them is found in.
        tied: names of tensors that are tied to a tensor of ``pieces``, with its name. Files may hold either, or both.
        prefix: beginning of names that all of a folder's files may leave out.
    """

    pieces: Mapping[str, FilePiece]
    shapes: Mapping[str, tuple[int, ...]]
    ignored: tuple[str, ...] = ()
    tied: Mapping[str, str] = field(default_factory=dict)
    prefix: str = ""

    def renamed(self, names: Mapping[str, str]) -> FileLayout:
        """Return the layout with other names of the model's tensors: ``{name: new name}``."""
        pieces = {file: replace(piece, name=names.get(piece.name, piece.name)) for file, piece in self.pieces.items()}
        return replace(self, pieces=pieces, shapes={names.get(name, name): shape for name, shape in self.shapes.items()})

    def names_in(self, tensors: Collection[str]) -> dict[str, str]:
        """Return the name of each piece in files that hold ``tensors``."""
        bare = bool(self.prefix) and not any(name.startswith(self.prefix) for name in tensors)
        names = {name: name.removeprefix(self.prefix) if bare else name for name in self.pieces}
        others = {name: alias for alias, name in self.tied.items() if alias in tensors and name in names}
        return {name: there if there in tensors else others.get(name, there) for name, there in names.items()}


class PiecedSource:
    """A source of the tensors that the tensors of ``source`` make up.

    Raises:
        CheckpointMismatch: ``source`` lacks a tensor, has one too many, or one of another shape.
    """

    def __init__(self, source: TensorSource, layout: FileLayout) -> None:
        where, pieces, shapes, ignored = source.describe(), layout.pieces, layout.shapes, layout.ignored
        names = layout.names_in(source.tensors)
        missing = [name for name, there in names.items() if there not in source.tensors]
        known = {*names.values(), *layout.tied}
        more = [name for name in source.tensors if name not in known and not any(re.search(one, name) for one in ignored)]
        if missing:
            others = f", and has {first_few(more)} instead" if more else ""
            raise CheckpointMismatch(f"{where} lacks {len(missing)} of the model's {len(pieces)} tensors: {first_few(missing)}{others}")
        if more:
            raise CheckpointMismatch(f"{where} has {len(more)} tensors that the model lacks: {first_few(more)}")
        for name, piece in pieces.items():
            shape = tuple(source.tensors[names[name]].shape)
            if shape != piece.shape:
                raise CheckpointMismatch(f"{where}: {name!r} has shape {list(shape)}, the model's has {list(piece.shape)}")
        self._source = source
        self._parts: dict[str, list[tuple[int, str, int]]] = {}
        for name, piece in pieces.items():
            self._parts.setdefault(piece.name, []).append((piece.start, names[name], piece.numel))
        self.tensors: dict[str, StoredTensor] = {}
        for ours, parts in self._parts.items():
            parts.sort()
            dtypes = {source.tensors[name].kinds["param"] for _, name, _ in parts}
            if len(dtypes) > 1:
                names_of = first_few([name for _, name, _ in parts])
                raise CheckpointMismatch(f"{where}: {names_of} have several dtypes, but are one tensor here; save them in one dtype")
            self.tensors[ours] = StoredTensor(shapes[ours], {"param": dtypes.pop()})

    @property
    def aliases(self) -> Mapping[str, str]:
        return {}

    @property
    def meta(self) -> Mapping[str, Any]:
        return self._source.meta

    def describe(self) -> str:
        return self._source.describe()

    def read_into(self, name: str, kind: str, start: int, out: torch.Tensor) -> None:
        parts = self._parts[name]
        index = max(0, bisect.bisect_right(parts, start, key=lambda part: part[0]) - 1)
        done = 0
        while done < out.numel():
            begin, theirs, numel = parts[index]
            skip = start + done - begin
            count = min(numel - skip, out.numel() - done)
            self._source.read_into(theirs, kind, skip, out[done : done + count])
            done, index = done + count, index + 1
