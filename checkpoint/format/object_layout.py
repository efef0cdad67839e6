"""Layout of one rank's object: a pure plan, made from shapes before anything is copied.

    offset 0        8              D = data start (multiple of 4096)
    +--------------+--------------+----------------+-----+------------------+-----+----------------+-----+
    | header bytes | JSON, spaces | param of g0    | pad | exp_avg of g0    | pad | param of g1    | pad |
    +--------------+--------------+----------------+-----+------------------+-----+----------------+-----+
     <---------- safetensors header ---------->  one section per (group, kind), each starting at a multiple of 4096

The object is a valid safetensors file. Each section is one 1-D tensor ``<kind>.g<n>``, and each gap an explicit uint8 tensor
``__pad__<n>``, since safetensors rejects holes and trailing bytes. Inside a section the rank's pieces follow each other without gaps, in
the given order, so that neighbouring tensors form one run.
"""

from __future__ import annotations

import builtins
import json
import math
from bisect import bisect_right
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch

from ..stores.store import ALIGNMENT
from .digest import as_bytes, copy_bytes
from .tiling import ROWS, Tiling

FORMAT = "rcp/1"

_SAFETENSORS_NAME = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class ShardPiece:
    """Elements ``[start, end)`` of one kind of one tensor, as held by a rank.

    Args:
        name: the tensor's fully qualified name.
        kind: ``"param"`` for the tensor itself, or the optimizer state's key, such as ``"exp_avg"``.
        start, end: flat elements of the whole tensor, in row-major order or in the order of ``tiling``. If ``start == end``, the rank holds
            none of the tensor; the piece only states that the tensor exists, and its place in the order.
        shape: shape of the whole tensor.
        dtype: dtype of this kind.
        data: 1-D tensor of ``end - start`` elements, on CPU or GPU. :func:`write_shard` reads it and does not keep it.
        copied: whether other ranks may also hold and write these elements. If equal, the commit uses any copy. Otherwise an element written
            by two ranks is an error.
        tiling: order in which elements are counted. It should be the same on all ranks; otherwise their intervals are split into rows.
    """

    name: str
    kind: str
    start: int
    end: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    data: torch.Tensor = field(repr=False, compare=False)
    copied: bool = False
    tiling: Tiling = ROWS

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(n) for n in self.shape))
        what = f"piece {self.kind!r} of tensor {self.name!r}"
        if not self.name or not self.kind:
            raise ValueError(f"{what}: name and kind must not be empty")
        if not 0 <= self.start <= self.end <= math.prod(self.shape):
            raise ValueError(
                f"{what}: range [{self.start}, {self.end}) is not inside a tensor of shape {self.shape} ({math.prod(self.shape)} elements)"
            )
        if self.tiling.cuts and (problem := self.tiling.problem(self.shape)):
            raise ValueError(f"{what}: {problem}")
        if self.data.dim() != 1 or self.data.numel() != self.end - self.start:
            raise ValueError(f"{what}: data has shape {tuple(self.data.shape)}; give a flat tensor of {self.end - self.start} elements")
        if self.data.dtype != self.dtype:
            raise ValueError(f"{what}: data is {self.data.dtype}, but dtype is given as {self.dtype}")
        if self.data.is_meta:
            raise ValueError(f"{what} is on the meta device, it has no data to save; call to_empty() and set it first")


@dataclass(frozen=True, slots=True)
class PlacedPiece:
    """A piece's description and its offset in the object, in bytes. A ``copied`` piece gets its digest once it is written."""

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int
    offset: int
    copied: bool = False
    digest: str = ""
    tiling: Tiling = ROWS


_METADATA_ROOM = 512
"""Bytes of the header reserved for the metadata, so that the layout depends on the shapes alone."""


@dataclass(frozen=True)
class ObjectLayout:
    """Layout of one rank's object. It depends on the pieces' descriptions alone, so it can be reused while these stay the same.

    Args:
        sections: the header's JSON without ``__metadata__``.
        header_bytes: length of the header with any metadata; the data starts there.
        bytes: length of the object.
        placed: every piece, in the object's order; ``order``: its index among the given pieces.
    """

    sections: str = field(repr=False)
    header_bytes: int
    bytes: int
    placed: tuple[PlacedPiece, ...] = field(repr=False)
    order: tuple[int, ...] = field(repr=False)

    def header(self, metadata: Mapping[str, str]) -> builtins.bytes:
        """Return the object's first ``header_bytes`` bytes."""
        about = json.dumps({"format": FORMAT, **metadata}, separators=(",", ":"))
        if len(about) > _METADATA_ROOM - len('"__metadata__":,'):
            raise ValueError(f"the metadata of an object takes {len(about)} bytes; at most {_METADATA_ROOM - 16} fit")
        text = ('{"__metadata__":' + about + ("," + self.sections[1:] if self.sections != "{}" else "}")).encode()
        text += b" " * (self.header_bytes - 8 - len(text))
        return len(text).to_bytes(8, "little") + text

    @staticmethod
    def itemsize(place: PlacedPiece) -> int:
        return dtype_of(place.dtype).itemsize

    def sources(self, pieces: Sequence[ShardPiece]) -> Iterator[tuple[int, torch.Tensor]]:
        """(offset, bytes) of each non-empty piece, in the object's order. ``pieces`` are those given to :func:`lay_out`."""
        for place, index in zip(self.placed, self.order, strict=True):
            data = pieces[index].data
            if data.numel():
                yield place.offset, as_bytes(data.detach().contiguous())


@dataclass(frozen=True)
class ObjectPlan:
    """The bytes of one rank's object: the header, then (offset, bytes) sources in order; the gaps are zero."""

    header: bytes
    bytes: int
    pieces: tuple[PlacedPiece, ...]
    sources: tuple[tuple[int, torch.Tensor], ...] = field(repr=False)
    starts: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "starts", tuple(start for start, _ in self.sources))

    def fill(self, buffer: torch.Tensor, offset: int) -> None:
        """Write the object's bytes ``[offset, offset + len(buffer))`` into the uint8 ``buffer``."""
        size = buffer.numel()
        position = offset
        if offset < len(self.header):
            part = bytearray(self.header[offset : offset + size])
            buffer[: len(part)].copy_(torch.frombuffer(part, dtype=torch.uint8))
            position += len(part)
        k = max(0, bisect_right(self.starts, position) - 1)
        while position < offset + size:
            source_start = self.starts[k] if k < len(self.starts) else self.bytes
            if position < source_start:
                until = min(source_start, offset + size)
                buffer[position - offset : until - offset].zero_()
                position = until
                continue
            flat = self.sources[k][1]
            until = min(source_start + flat.numel(), offset + size)
            if until > position:
                copy_bytes(buffer[position - offset : until - offset], flat[position - source_start : until - source_start])
                position = until
            k += 1


def plan_object(pieces: Sequence[ShardPiece], metadata: Mapping[str, str]) -> ObjectPlan:
    """Lay out one rank's pieces as an object.

    Args:
        pieces: pieces in the order that the tensors have on all ranks (the model's order).
        metadata: strings for the safetensors header.

    Raises:
        ValueError: a tensor has two shapes, or one of its kinds has two dtypes.
    """
    layout = lay_out(pieces)
    return ObjectPlan(layout.header(metadata), layout.bytes, layout.placed, tuple(layout.sources(pieces)))


class Described(Protocol):
    """The properties of a piece that a layout needs; :class:`ShardPiece` has them."""

    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def copied(self) -> bool: ...
    @property
    def tiling(self) -> Tiling: ...


def lay_out(pieces: Sequence[Described]) -> ObjectLayout:
    """Return the layout of an object of these pieces. Raises ValueError as :func:`plan_object`."""
    kinds = tensor_kinds((p.name, p.kind, dtype_name(p.dtype), p.shape) for p in pieces)
    groups = group_tensors(kinds)
    group_of = {name: index for index, (_, names) in enumerate(groups) for name in names}
    sections: dict[tuple[int, str], list[int]] = {
        (index, kind): [] for index, (kind_dtypes, _) in enumerate(groups) for kind, _ in kind_dtypes
    }
    # Optimizers list parameters by their own groups. On disk all kinds follow one order of tensors, so that runs stay whole.
    rank_of = {name: index for index, name in enumerate(kinds)}
    for number in sorted(range(len(pieces)), key=lambda i: (rank_of[pieces[i].name], pieces[i].start)):
        sections[group_of[pieces[number].name], pieces[number].kind].append(number)

    def size_of(number: int) -> int:
        return (pieces[number].end - pieces[number].start) * pieces[number].dtype.itemsize

    header: dict[str, object] = {}
    position = 0  # relative to the data start
    pads = 0
    relative: list[tuple[int, int]] = []
    for (index, kind), members in sections.items():
        size = sum(map(size_of, members))
        if not size:
            relative += [(position, number) for number in members]
            continue
        dtype = pieces[members[0]].dtype
        native = _SAFETENSORS_NAME.get(dtype)
        shape = [size // dtype.itemsize] if native else [size]
        header[f"{kind}.g{index}"] = {"dtype": native or "U8", "shape": shape, "data_offsets": [position, position + size]}
        for number in members:
            relative.append((position, number))
            position += size_of(number)
        pad = -position % ALIGNMENT
        if pad:
            header[f"__pad__{pads}"] = {"dtype": "U8", "shape": [pad], "data_offsets": [position, position + pad]}
            pads += 1
            position += pad
    text = json.dumps(header, separators=(",", ":"))
    start = -(-(8 + len(text.encode()) + _METADATA_ROOM) // ALIGNMENT) * ALIGNMENT
    placed = []
    for offset, number in relative:
        p = pieces[number]
        where = p.start, p.end, start + offset
        placed.append(PlacedPiece(p.name, p.kind, dtype_name(p.dtype), p.shape, *where, p.copied, tiling=p.tiling))
    return ObjectLayout(text, start, start + position, tuple(placed), tuple(number for _, number in relative))


def tensor_kinds(entries: Iterable[tuple[str, str, str, tuple[int, ...]]]) -> dict[str, dict[str, str]]:
    """Return ``{name: {kind: dtype}}`` in order of first occurrence, from (name, kind, dtype, shape) entries.

    Raises:
        ValueError: shapes or dtypes contradict each other.
    """
    kinds: dict[str, dict[str, str]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, kind, dtype, shape in entries:
        if shapes.setdefault(name, shape) != shape:
            raise ValueError(f"tensor {name!r} is given with shapes {shapes[name]} and {shape}; all its pieces and kinds share one")
        if kinds.setdefault(name, {}).setdefault(kind, dtype) != dtype:
            raise ValueError(f"{kind!r} of tensor {name!r} is given as {kinds[name][kind]} and as {dtype}")
    return kinds


def group_tensors(kinds: Mapping[str, Mapping[str, str]]) -> list[tuple[tuple[tuple[str, str], ...], list[str]]]:
    """Group tensors that have the same kinds with the same dtypes: ``[(((kind, dtype), ..), [name, ..]), ..]``.

    Groups and their tensors stay in the given order. Kinds are in the order of their first occurrence in any tensor.
    """
    order: dict[str, int] = {}
    for of_tensor in kinds.values():
        for kind in of_tensor:
            order.setdefault(kind, len(order))
    groups: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for name, of_tensor in kinds.items():
        groups.setdefault(tuple(sorted(of_tensor.items(), key=lambda item: order[item[0]])), []).append(name)
    return list(groups.items())


def merge_orders(orders: Iterable[Iterable[K]]) -> list[K]:
    """Merge the ranks' orders into one that keeps neighbours close: an unseen item goes right after its predecessor.

    If every rank lists every tensor, the order is unchanged. If each rank lists only the parts that it holds, the parts of a unit end up
    next to each other, as in the model.
    """
    following: dict[K | None, K | None] = {None: None}
    for items in orders:
        previous: K | None = None
        for item in items:
            if item not in following:
                following[item] = following[previous]
                following[previous] = item
            previous = item
    merged: list[K] = []
    current = following[None]
    while current is not None:
        merged.append(current)
        current = following[current]
    return merged


def dtype_name(dtype: torch.dtype) -> str:
    """Return the dtype's name in the manifest: ``torch.bfloat16`` -> ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of that name. Raises ValueError for a name that this torch does not know."""
    dtype = vars(torch).get(name)  # not getattr(), which imports some of torch's modules
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype {name!r} is not known to torch {torch.__version__}")
    if name.startswith("q"):
        # A quantized tensor created without its quantizer crashes the process with a segmentation fault (torch 2.13).
        raise ValueError(f"dtype {name!r} is quantized: its scales are no part of the tensor; store int_repr() and the scales")
    return dtype
