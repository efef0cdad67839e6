"""The files of a stock PyTorch distributed checkpoint (DCP), read by flat ranges.

DCP keeps its index in ``.metadata``, which is a pickle. It is read by an unpickler that knows the classes which DCP itself puts there and
refuses every other name, so that nothing else can run. Tensors lie in ``.distcp`` files as one ``torch.save`` archive each; of an
archive only its directory and the few bytes that describe the tensor are parsed, by torch's own ``weights_only`` loader, and elements
are then read where they lie. Plain objects are read with ``weights_only``, too.

DCP has no checksums: what was damaged at rest can't be told.
"""

from __future__ import annotations

import io
import math
import os
import pathlib
import pickle
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint import filesystem, metadata

from vescale_ray.geometry import Box, boxes, intervals

from .errors import ForeignFileError
from .foreign import Files

_CLASSES: dict[tuple[str, str], Any] = {
    (cls.__module__, cls.__name__): cls
    for cls in (
        metadata.Metadata,
        metadata.TensorStorageMetadata,
        metadata.BytesStorageMetadata,
        metadata.ChunkStorageMetadata,
        metadata.TensorProperties,
        metadata.MetadataIndex,
        metadata.StorageMeta,
        metadata._MEM_FORMAT_ENCODING,
        filesystem._StorageInfo,
        filesystem._StoragePrefix,
        OrderedDict,
    )
}
# Where a checkpoint was saved, as Python up to 3.12 and from 3.13 on call it.
_CLASSES |= {(module, cls.__name__): cls for module in ("pathlib", "pathlib._local") for cls in (pathlib.PosixPath, pathlib.PurePosixPath)}
_CLASSES |= {("torch", "Size"): torch.Size, ("torch.serialization", "_get_layout"): torch.serialization._get_layout}  # type: ignore[attr-defined]

_SPAN_BYTES = 1 << 20


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = _CLASSES.get((module, name))
        if found is None and module == "torch":
            found = getattr(torch, name, None) if name.isidentifier() else None
            found = found if isinstance(found, torch.dtype) else None
        if found is None:
            raise ForeignFileError(f"it refers to {module}.{name}, which is none of DCP's own classes: it is not read")
        return found


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
    """Where an archive's elements lie: from byte ``offset`` of ``file`` on, ``stride`` as in memory."""

    file: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    contiguous: bool


class Archives:
    """The ``torch.save`` archives in the files of one folder."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self._files = Files(self.folder)
        self._payloads: dict[tuple[str, int], Payload] = {}

    def payload(self, info: Any) -> Payload:
        """Where the elements of one archive lie; reads its directory, not its elements."""
        key = (info.relative_path, info.offset)
        if key not in self._payloads:
            section = _Section(self._files, info.relative_path, info.offset, info.length)
            try:
                with FakeTensorMode():
                    fake = torch.load(cast(IO[bytes], section), weights_only=True, map_location="cpu")
                if not isinstance(fake, torch.Tensor) or fake.layout != torch.strided:
                    raise ForeignFileError(f"holds a {type(fake).__name__}, no dense tensor")
                storage = fake.untyped_storage()
                begin = storage._checkpoint_offset
                if begin is None:
                    raise ForeignFileError("torch does not say where its elements lie")
                first = fake.storage_offset() * fake.dtype.itemsize
                span = (sum((n - 1) * s for n, s in zip(fake.shape, fake.stride(), strict=True)) + 1) * fake.dtype.itemsize
                if fake.numel() and not (0 <= begin and first + span <= storage.nbytes() and begin + storage.nbytes() <= info.length):
                    raise ForeignFileError("its elements reach beyond its archive")
            except ForeignFileError as error:
                raise ForeignFileError(f"{self.folder / info.relative_path}, archive at byte {info.offset}: {error}") from None
            except Exception as error:  # whatever a malformed archive makes of torch
                raise ForeignFileError(
                    f"{self.folder / info.relative_path}, archive at byte {info.offset}: not a tensor that can be read safely "
                    f"(weights_only): {_first_line(error)}"
                ) from None
            self._payloads[key] = Payload(
                info.relative_path, info.offset + begin + first, tuple(fake.shape), fake.stride(), fake.dtype, fake.is_contiguous()
            )
        return self._payloads[key]

    def digest(self, info: Any, update: Any) -> None:
        """Give the bytes of one archive's elements to ``update``, a piece at a time."""
        payload = self.payload(info)
        size = math.prod(payload.shape) * payload.dtype.itemsize
        for start in range(0, size, 4 << 20):
            update(self._files.read(payload.file, payload.offset + start, min(4 << 20, size - start)))


class DcpFiles(Archives):
    """A folder that ``torch.distributed.checkpoint.save`` wrote.

    Attributes:
        tensors: by DCP's flat key. objects: the keys of what is no tensor. paths: ``{key: path in the nested state dict}``.

    Raises:
        ForeignFileError: no DCP checkpoint, a malformed one, or one with transformed (compressed) streams.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        super().__init__(folder)
        raw = _metadata(self.folder)
        self.tensors: dict[str, DcpTensor] = {}
        self.objects: dict[str, Any] = {}
        try:
            for key, entry in raw.state_dict_metadata.items():
                if isinstance(entry, metadata.TensorStorageMetadata):
                    self.tensors[key] = _tensor(key, entry, raw.storage_data)
                else:
                    self.objects[key] = _checked_info(raw.storage_data[metadata.MetadataIndex(key)])
            planned = raw.planner_data if isinstance(raw.planner_data, Mapping) else {}
            self.paths: dict[str, tuple[Any, ...]] = {key: tuple(planned.get(key, (key,))) for key in raw.state_dict_metadata}
        except ForeignFileError as error:
            raise ForeignFileError(f"{self.folder / '.metadata'}: {error}") from None
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ForeignFileError(f"{self.folder / '.metadata'}: malformed: {type(error).__name__}: {error}") from None

    def object(self, key: str) -> Any:
        """What was stored under ``key``, if torch's ``weights_only`` loader takes it."""
        info = self.objects[key]
        raw = self._files.read(info.relative_path, info.offset, info.length)
        try:
            return torch.load(io.BytesIO(raw), weights_only=True, map_location="cpu")
        except Exception as error:  # whatever a malformed archive makes of torch
            raise ForeignFileError(f"{self.folder}: {key!r} can't be read safely (weights_only): {_first_line(error)}") from None

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
            # Transposed when it was saved: its elements are not in the order of flat ranges. Read whole, then viewed.
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
            # A few rows of columns: one read over the gaps costs less than one read for each row.
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


def _metadata(folder: Path) -> Any:
    path = folder / ".metadata"
    try:
        with open(path, "rb") as file:
            raw = _Unpickler(file).load()
    except FileNotFoundError:
        raise ForeignFileError(f"{folder}: no DCP checkpoint: it has no .metadata") from None
    except OSError as error:
        raise ForeignFileError(f"{path}: can't be read: {error.strerror}") from None
    except ForeignFileError as error:
        raise ForeignFileError(f"{path}: {error}") from None
    except Exception as error:  # whatever a malformed pickle raises
        raise ForeignFileError(f"{path}: no DCP metadata: {type(error).__name__}: {_first_line(error)}") from None
    if not isinstance(raw, metadata.Metadata) or not isinstance(raw.state_dict_metadata, dict):
        raise ForeignFileError(f"{path}: holds a {type(raw).__name__}, no DCP metadata")
    return raw


def _tensor(key: str, entry: Any, storage: Mapping[Any, Any]) -> DcpTensor:
    shape, dtype = tuple(entry.size), entry.properties.dtype
    if not isinstance(dtype, torch.dtype) or not all(type(n) is int and n >= 0 for n in shape):
        raise ForeignFileError(f"{key!r} has shape {shape} and dtype {dtype}")
    chunks = []
    for raw in entry.chunks:
        box = (tuple(raw.offsets), tuple(raw.sizes))
        inside = len(box[0]) == len(box[1]) == len(shape) and all(
            type(o) is int and type(s) is int and o >= 0 and s >= 0 and o + s <= n for o, s, n in zip(*box, shape, strict=True)
        )
        if not inside:
            raise ForeignFileError(f"{key!r} of shape {shape} has a chunk at {box[0]} of sizes {box[1]}")
        if math.prod(box[1]):
            chunks.append(Chunk(box, _checked_info(storage[metadata.MetadataIndex(key, raw.offsets)])))
    held = sum(math.prod(chunk.box[1]) for chunk in chunks)
    if held != math.prod(shape):
        raise ForeignFileError(f"{key!r} of shape {shape} has {math.prod(shape)} elements, its chunks {held}")
    _check_disjoint(key, chunks)
    return DcpTensor(shape, dtype, tuple(chunks))


def _check_disjoint(key: str, chunks: list[Chunk]) -> None:
    """With as many elements as the tensor and no two in one place, chunks cover it. Swept along the dimension that they are cut in most."""
    if len(chunks) < 2:
        return
    ndim = len(chunks[0].box[0])
    dim = max(range(ndim), key=lambda d: len({chunk.box[0][d] for chunk in chunks}), default=0)
    active: list[Box] = []
    for chunk in sorted(chunks, key=lambda c: c.box[0][dim] if ndim else 0):
        active = [box for box in active if ndim and box[0][dim] + box[1][dim] > chunk.box[0][dim]]
        for box in active:
            if _intersection(box, chunk.box) is not None:
                raise ForeignFileError(f"{key!r}: the chunks at {box[0]} and {chunk.box[0]} overlap")
        active.append(chunk.box)


def _checked_info(info: Any) -> Any:
    name = info.relative_path
    plain = isinstance(name, str) and name == os.path.basename(name) and name not in ("", ".", "..") and "\\" not in name
    if not plain:
        raise ForeignFileError(f"it keeps data in {name!r}, which is no file of the folder")
    if not (type(info.offset) is int and type(info.length) is int and info.offset >= 0 and info.length >= 0):
        raise ForeignFileError(f"it keeps data at byte {info.offset!r} of {name!r}, {info.length!r} bytes")
    if getattr(info, "transform_descriptors", None):
        raise ForeignFileError(f"its streams were transformed ({info.transform_descriptors}); only plain ones can be read by ranges")
    return info


def _intersection(left: Box, right: Box) -> Box | None:
    low = tuple(max(a, b) for a, b in zip(left[0], right[0], strict=True))
    high = tuple(min(a + n, b + m) for a, n, b, m in zip(*left, *right, strict=True))
    sizes = tuple(h - lo for lo, h in zip(low, high, strict=True))
    return (low, sizes) if all(n > 0 for n in sizes) else None


def _slices(box: Box, origin: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(o - base, o - base + n) for o, n, base in zip(*box, origin, strict=True))


def _spans(runs: list[tuple[int, int]], width: int) -> Iterator[tuple[int, int, list[tuple[int, int]]]]:
    """Runs put together where what lies between them is no more than what is wanted: (first element, end, runs in it)."""
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


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
