"""Read the files of a stock PyTorch distributed checkpoint (DCP) by flat ranges.

DCP keeps its index in ``.metadata``, a pickle. ``dcp_pickle.py`` reads it, and this module checks every number before use. Tensors are in
``.distcp`` files, as one ``torch.save`` archive each. Only an archive's directory and the few bytes that describe the tensor are parsed
(``torch_archive.py``). Elements are then read directly from their place. Plain objects are read in the same way; tensors within them are
refused.

DCP has no checksums, so damage at rest goes unnoticed.
"""

from __future__ import annotations

import io
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeGuard, cast

import torch

from vescale_ray.geometry import Box, boxes, intervals

from ..errors import ForeignFileError
from .dcp_pickle import MAX_BYTES, MAX_DIMS, Record, read_pickle
from .foreign import Files, local_folder
from .torch_archive import Strided, read_archive

_SPAN_BYTES = 1 << 20


@dataclass(frozen=True)
class StorageInfo:
    """Place of an archive: ``length`` bytes from byte ``offset`` of file ``relative_path``."""

    relative_path: str
    offset: int
    length: int


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, and the archive that holds it."""

    box: Box
    info: Any


@dataclass(frozen=True)
class DcpTensor:
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Payload:
    """Place of an archive's elements: from byte ``offset`` of ``file``, with ``stride`` as in memory."""

    file: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    contiguous: bool


class Archives:
    """The ``torch.save`` archives in the files of one folder."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = local_folder(folder, "the folder to read")
        self._files = Files(self.folder)
        self._payloads: dict[tuple[str, int], Payload] = {}

    def payload(self, info: Any) -> Payload:
        """The place of one archive's elements. Reads its directory, not its elements."""
        key = (info.relative_path, info.offset)
        if key not in self._payloads:
            try:
                found = self._load(info)
                if not isinstance(found, Strided):
                    raise ForeignFileError(f"holds a {type(found).__name__}, no dense tensor")
            except ForeignFileError as error:
                raise ForeignFileError(f"{self.folder / info.relative_path}, archive at byte {info.offset}: {error}") from None
            self._payloads[key] = Payload(
                info.relative_path, info.offset + found.offset, found.shape, found.stride, found.dtype, found.contiguous
            )
        return self._payloads[key]

    def _load(self, info: Any) -> Any:
        """The content of an archive, with tensors as descriptions without elements."""
        section = _Section(self._files, info.relative_path, info.offset, info.length)
        return read_archive(cast(IO[bytes], section), info.length)

    def digest(self, info: Any, update: Any) -> None:
        """Pass the bytes of one archive's elements to ``update``, in pieces."""
        payload = self.payload(info)
        size = math.prod(payload.shape) * payload.dtype.itemsize
        for start in range(0, size, 4 << 20):
            update(self._files.read(payload.file, payload.offset + start, min(4 << 20, size - start)))


class DcpFiles(Archives):
    """A folder that ``torch.distributed.checkpoint.save`` wrote.

    Attributes:
        tensors: tensors by DCP's flat key. objects: archives of the other values, by key. paths: ``{key: path in the nested state dict}``.

    Raises:
        ForeignFileError: the folder is not a DCP checkpoint, is malformed, or has transformed (compressed) streams.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        super().__init__(folder)
        self.tensors: dict[str, DcpTensor] = {}
        self.objects: dict[str, StorageInfo] = {}
        self.paths: dict[str, tuple[str | int, ...]] = {}
        try:
            raw = _index(self.folder, self._files)
            self._take(raw, _fields(read_pickle(raw), "Metadata"))
        except ForeignFileError as error:
            raise ForeignFileError(f"{self.folder / '.metadata'}: {error}") from None
        except FileNotFoundError:
            raise ForeignFileError(f"{self.folder}: no DCP checkpoint: it has no .metadata") from None

    def _take(self, raw: bytes, index: Mapping[str, Any]) -> None:
        described, storage = _dict(index, "state_dict_metadata"), _storage(_dict(index, "storage_data"))
        planned = index.get("planner_data")
        chunks = 0
        for key, entry in described.items():
            if type(key) is not str or not key:
                raise ForeignFileError("malformed: a name is not text, or empty")
            self.paths[key] = _path(key, planned.get(key, (key,)) if isinstance(planned, dict) else (key,))
            if isinstance(entry, Record) and entry.name == "BytesStorageMetadata":
                self.objects[key] = _located(storage, key, None)
                continue
            fields = _fields(entry, "TensorStorageMetadata")
            chunks += len(_list(fields, "chunks"))
            if chunks > len(raw):  # a list shared by many names would be processed many times
                raise ForeignFileError(f"malformed: {chunks} chunks in an index of {len(raw)} bytes")
            self.tensors[key] = _tensor(key, fields, storage)

    def check_room(self, keys: Iterable[str]) -> None:
        """Raises ForeignFileError if tensors claim more than the files hold: a chunk exceeds its archive, an archive its file, or two share
        bytes. Otherwise a thousand bytes could become terabytes in a commit (an expanded tensor, one archive for many)."""
        archives: dict[str, list[tuple[int, int, str]]] = {}
        for key in keys:
            tensor = self.tensors[key]
            for chunk in tensor.chunks:
                if math.prod(chunk.box[1]) * tensor.dtype.itemsize > chunk.info.length:
                    raise ForeignFileError(
                        f"{self.folder}: {key!r}: a chunk of shape {chunk.box[1]} exceeds its archive of {chunk.info.length} bytes"
                    )
                archives.setdefault(chunk.info.relative_path, []).append((chunk.info.offset, chunk.info.length, key))
        for name, held in archives.items():
            position, size = 0, self._files.size(name)
            for offset, length, key in sorted(held):
                if offset < position:
                    raise ForeignFileError(f"{self.folder / name}: {key!r} shares bytes with another tensor")
                position = offset + length
                if position > size:
                    raise ForeignFileError(f"{self.folder / name}: ends before byte {position}, where {key!r} ends: truncated")

    def object(self, key: str) -> Any:
        """The plain value stored under ``key``. Raises ForeignFileError if it is not plain."""
        try:
            return _plain(self._load(self.objects[key]))
        except ForeignFileError as error:
            raise ForeignFileError(f"{self.folder}: {key!r}: {error}") from None

    def read_into(self, key: str, start: int, out: torch.Tensor) -> None:
        """Fill ``out`` (flat, on the CPU, of the stored dtype) with the elements of a tensor from ``start`` on."""
        tensor = self.tensors[key]
        position = 0
        for offsets, sizes in boxes(tensor.shape, start, start + out.numel()):
            numel = math.prod(sizes)
            target = out[position : position + numel].view(sizes)
            filled = 0
            for chunk in tensor.chunks:
                part = _intersection((offsets, sizes), chunk.box)
                if part is not None:
                    filled += math.prod(part[1])
                    target_part = target[_slices(part, offsets)]
                    self._read_box(key, tensor, chunk, part, target_part)
            if filled != numel:
                raise ForeignFileError(f"{self.folder}: {key!r}: {numel - filled} of the elements from {start} on are in no file")
            position += numel

    def _read_box(self, key: str, tensor: DcpTensor, chunk: Chunk, part: Box, target: torch.Tensor) -> None:
        payload = self.payload(chunk.info)
        if payload.shape != chunk.box[1] or payload.dtype != tensor.dtype:
            raise ForeignFileError(
                f"{self.folder / payload.file}: {key!r} is {payload.dtype} of shape {payload.shape} there, "
                f"{tensor.dtype} of shape {chunk.box[1]} in .metadata"
            )
        inner = (tuple(o - c for o, c in zip(part[0], chunk.box[0], strict=True)), part[1])
        width = tensor.dtype.itemsize
        if not payload.contiguous:
            # The tensor was transposed when it was saved, so its elements are not in row order. Read it whole and view it.
            span = sum((n - 1) * s for n, s in zip(payload.shape, payload.stride, strict=True)) + 1
            whole = torch.empty(span, dtype=tensor.dtype)
            self._files.read_into(payload.file, payload.offset, whole)
            target.copy_(whole.as_strided(payload.shape, payload.stride)[_slices(inner, (0,) * len(inner[0]))])
            return
        runs = intervals(payload.shape, [inner]) if payload.shape else [(0, 1)]
        if len(runs) == 1 and target.is_contiguous():
            self._files.read_into(payload.file, payload.offset + runs[0][0] * width, target.view(-1))
            return
        flat = torch.empty(math.prod(part[1]), dtype=tensor.dtype)
        position = 0
        for low, high, members in _spans(runs, width):
            # For narrow columns, one read over the gaps costs less than one read per row.
            held = (
                flat[position : position + members[0][1] - members[0][0]]
                if len(members) == 1
                else torch.empty(high - low, dtype=flat.dtype)
            )
            self._files.read_into(payload.file, payload.offset + low * width, held)
            for a, b in members:
                if len(members) > 1:
                    flat[position : position + b - a] = held[a - low : b - low]
                position += b - a
        target.copy_(flat.view(part[1]))


class _Section(io.RawIOBase):
    """A part of a file as a file."""

    def __init__(self, files: Files, name: str, offset: int, length: int) -> None:
        super().__init__()
        if offset + length > files.size(name):
            raise ForeignFileError(f"{files.folder / name}: ends before byte {offset + length}: truncated")
        self._files, self._name, self._offset, self._length, self._at = files, name, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        data = self._files.read(self._name, self._offset + self._at, max(0, min(len(view), self._length - self._at)))
        view[: len(data)] = data
        self._at += len(data)
        return len(data)

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._length - self._at)
        data = self._files.read(self._name, self._offset + self._at, left if size is None or size < 0 else min(size, left))
        self._at += len(data)
        return data


def _index(folder: Path, files: Files) -> bytes:
    os.stat(folder / ".metadata")
    size = files.size(".metadata")
    if size > MAX_BYTES:
        raise ForeignFileError(f"its {size} bytes are more than an index has ({MAX_BYTES})")
    return files.read(".metadata", 0, size)


def _plain(value: Any) -> Any:
    """Return ``value``. Raises ForeignFileError if it contains a tensor or is too large to traverse, such as a value that contains
    itself."""
    left = 1 << 20

    def walk(one: Any, depth: int) -> None:
        nonlocal left
        left -= 1
        if left < 0 or depth > MAX_DIMS:
            raise ForeignFileError(f"it is nested more than {MAX_DIMS} deep, or holds more than a million values")
        if isinstance(one, Strided):
            raise ForeignFileError("it holds a tensor within a plain object, which is not read")
        for inner in one.values() if isinstance(one, Mapping) else one if isinstance(one, (list, tuple)) else ():
            walk(inner, depth + 1)

    walk(value, 0)
    return value


def _fields(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Record) or value.name != name or not isinstance(value.state, dict):
        found = value.name if isinstance(value, Record) else type(value).__name__
        raise ForeignFileError(f"no DCP metadata: it has a {found} in place of a {name}")
    return value.state


def _dict(fields: Mapping[str, Any], name: str) -> dict[Any, Any]:
    value = fields.get(name)
    if not isinstance(value, dict):
        raise ForeignFileError(f"no DCP metadata: its {name} is not a dict")
    return value


def _list(fields: Mapping[str, Any], name: str) -> list[Any]:
    value = fields.get(name)
    if not isinstance(value, list):
        raise ForeignFileError(f"no DCP metadata: {name} of a tensor is not a list")
    return value


def _storage(raw: Mapping[Any, Any]) -> dict[tuple[str, tuple[int, ...] | None], Any]:
    storage: dict[tuple[str, tuple[int, ...] | None], Any] = {}
    for index, info in raw.items():
        fields = _fields(index, "MetadataIndex")
        fqn, offset = fields.get("fqn"), fields.get("offset")
        if type(fqn) is not str or not (offset is None or _counts(offset)):
            raise ForeignFileError("malformed: a storage index without a name or a place")
        if (fqn, offset) in storage:
            raise ForeignFileError(f"malformed: {fqn!r} is stored twice at {offset}")
        storage[fqn, offset] = info
    return storage


def _located(storage: Mapping[tuple[str, tuple[int, ...] | None], Any], key: str, offset: tuple[int, ...] | None) -> StorageInfo:
    found = storage.get((key, offset))
    if found is None:
        raise ForeignFileError(f"malformed: it does not say where {key!r} is stored" + ("" if offset is None else f" from {offset} on"))
    fields = _fields(found, "_StorageInfo")
    name, start, length = fields.get("relative_path"), fields.get("offset"), fields.get("length")
    plain = (
        isinstance(name, str) and name == os.path.basename(name) and name not in ("", ".", "..") and "\\" not in name and "\0" not in name
    )
    if not plain:
        raise ForeignFileError(f"it keeps data in {_brief(name)}, which is not a file of the folder")
    if not _counts((start, length)):
        raise ForeignFileError(f"it keeps data at byte {_brief(start)} of {name!r}, {_brief(length)} bytes")
    if fields.get("transform_descriptors"):
        raise ForeignFileError(
            f"its streams were transformed ({_brief(fields['transform_descriptors'])}); only plain ones can be read by ranges"
        )
    return StorageInfo(str(name), cast(int, start), cast(int, length))


def _path(key: str, path: Any) -> tuple[str | int, ...]:
    if type(path) is not tuple or not 0 < len(path) <= MAX_DIMS or not all(type(part) in (str, int) for part in path):
        raise ForeignFileError(f"malformed: the path of {key!r} in the state dict is not a tuple of names")
    # DCP joins the path's parts with dots to form the key. Otherwise one long text in the paths of many short keys would become many long
    # names.
    if sum(len(part) if type(part) is str else 1 for part in path) > len(key):
        raise ForeignFileError(f"malformed: the path of {key!r} in the state dict is longer than its name")
    return path


def _tensor(key: str, fields: Mapping[str, Any], storage: Mapping[tuple[str, tuple[int, ...] | None], Any]) -> DcpTensor:
    properties, shape = fields.get("properties"), fields.get("size")
    state = properties.state if isinstance(properties, Record) and properties.name == "TensorProperties" else None
    dtype = state.get("dtype") if isinstance(state, dict) else state[0] if state else None
    if not isinstance(dtype, torch.dtype) or not _counts(shape) or math.prod(max(1, n) for n in shape) >= 1 << 62:
        raise ForeignFileError(f"{key!r} has shape {_brief(shape)} and dtype {_brief(dtype)}")
    chunks = []
    seen: set[tuple[int, ...]] = set()
    for one in _list(fields, "chunks"):
        place = _fields(one, "ChunkStorageMetadata")
        offsets, sizes = place.get("offsets"), place.get("sizes")
        if not (_counts(offsets) and _counts(sizes) and len(offsets) == len(sizes) == len(shape)) or any(
            o + s > n for o, s, n in zip(offsets, sizes, shape, strict=True)
        ):
            raise ForeignFileError(f"{key!r} of shape {shape} has a chunk at {_brief(offsets)} of sizes {_brief(sizes)}")
        if math.prod(sizes):
            if offsets in seen:  # checked before the corners: one chunk may occur a million times, in two bytes each
                raise ForeignFileError(f"{key!r} of shape {shape}: its chunks overlap, or leave a hole, at {offsets}")
            seen.add(offsets)
            chunks.append(Chunk((offsets, sizes), _located(storage, key, offsets)))
    held = sum(math.prod(chunk.box[1]) for chunk in chunks)
    if held != math.prod(shape):
        raise ForeignFileError(f"{key!r} of shape {shape} has {math.prod(shape)} elements, its chunks {held}")
    _check_tiling(key, shape, chunks)
    return DcpTensor(shape, dtype, tuple(chunks))


def _check_tiling(key: str, shape: tuple[int, ...], chunks: list[Chunk]) -> None:
    """Check that the chunks cover each element of the tensor once.

    This holds if and only if their corners, counted with alternating signs, are those of the whole tensor: the mixed difference determines
    the sum of the boxes' indicator functions, and is non-zero only at corners. Costs 2 ** (number of cut dimensions) per chunk; with
    pairwise comparisons a small file could take hours.
    """
    cut = [d for d, n in enumerate(shape) if any(chunk.box[1][d] != n for chunk in chunks)]
    if len(cut) > 8:
        raise ForeignFileError(f"{key!r} is cut in {len(cut)} dimensions; 8 at most")
    corners: Counter[tuple[int, ...]] = Counter()
    boxes_and_signs = [(chunk.box, 1) for chunk in chunks] + ([(((0,) * len(shape), shape), -1)] if chunks else [])
    for (offsets, sizes), sign in boxes_and_signs:
        points: list[tuple[tuple[int, ...], int]] = [((), sign)]
        for d in cut:
            points = [((*at, edge), s) for at, one in points for edge, s in ((offsets[d], one), (offsets[d] + sizes[d], -one))]
        for at, one in points:
            corners[at] += one
    odd = min((at for at, count in corners.items() if count), default=None)
    if odd is not None:
        place = tuple(dict(zip(cut, odd, strict=True)).get(d, 0) for d in range(len(shape)))
        raise ForeignFileError(f"{key!r} of shape {shape}: its chunks overlap, or leave a hole, at {place}")


def _counts(values: Any) -> TypeGuard[tuple[int, ...]]:
    """Whether ``values`` is a tuple of at most 64 numbers that are valid in a shape or an offset."""
    return type(values) is tuple and len(values) <= MAX_DIMS and all(type(n) is int and 0 <= n < 1 << 62 for n in values)


def _brief(value: Any) -> str:
    """A value from a file, shortened for a message."""
    if isinstance(value, (int, float, str, torch.dtype)) or value is None or _counts(value):
        text = repr(value)
    elif isinstance(value, (tuple, list)):
        text = ", ".join(repr(one) if isinstance(one, (int, str)) else type(one).__name__ for one in value[:4])
        text = f"[{text}{', ..' if len(value) > 4 else ''}]"
    else:
        text = f"a {type(value).__name__}"
    return text if len(text) <= 200 else text[:200] + ".."


def _intersection(left: Box, right: Box) -> Box | None:
    low = tuple(max(a, b) for a, b in zip(left[0], right[0], strict=True))
    high = tuple(min(a + n, b + m) for a, n, b, m in zip(*left, *right, strict=True))
    sizes = tuple(h - lo for lo, h in zip(low, high, strict=True))
    return (low, sizes) if all(n > 0 for n in sizes) else None


def _slices(box: Box, origin: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(o - base, o - base + n) for o, n, base in zip(*box, origin, strict=True))


def _spans(runs: list[tuple[int, int]], width: int) -> Iterator[tuple[int, int, list[tuple[int, int]]]]:
    """Runs merged if the gaps between them are no larger than the wanted elements: (first element, end, runs in it)."""
    members: list[tuple[int, int]] = []
    wanted = 0
    for run in runs:
        size = run[1] - run[0]
        if members and (2 * (wanted + size) < run[1] - members[0][0] or (run[1] - members[0][0]) * width > _SPAN_BYTES):
            yield members[0][0], members[-1][1], members
            members, wanted = [], 0
        members.append(run)
        wanted += size
    if members:
        yield members[0][0], members[-1][1], members
