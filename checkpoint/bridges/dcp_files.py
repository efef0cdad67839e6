"""Read the files of a stock PyTorch distributed checkpoint (DCP) by flat ranges.

DCP keeps its index in ``.metadata`` (see ``dcp_index.py``). Tensors and other values are in ``.distcp`` files, as one ``torch.save``
archive each. torch loads an archive's description without its elements. Elements are then read directly from their place.

DCP has no checksums, so damage at rest goes unnoticed.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import IO, Any, cast

import torch

from vescale_ray.compat.checkpoint import elements_offset, file_view, load_without_elements
from vescale_ray.geometry import Box, boxes, intervals

from ..errors import ForeignFileError
from .dcp_index import Chunk, DcpTensor, StorageInfo, read_index
from .foreign import Files, local_folder

_SPAN_BYTES = 1 << 20


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

    def load(self, info: StorageInfo, load: Callable[[IO[bytes]], Any]) -> Any:
        """Return the result of ``load`` for the archive as a file. Raises ForeignFileError if it fails."""
        where = f"{self.folder / info.relative_path}, archive at byte {info.offset}"
        if info.offset + info.length > self._files.size(info.relative_path):
            raise ForeignFileError(f"{where}: the file ends before byte {info.offset + info.length}: truncated")
        with open(self.folder / info.relative_path, "rb") as file:
            try:
                return load(cast(IO[bytes], file_view(file, info.offset, info.length)))
            except Exception as error:  # torch raises many types for a malformed archive
                refused = re.search(r"Unsupported \w+: GLOBAL (\S+)|disallowed \w+ (\S+)", str(error))
                if refused:
                    raise ForeignFileError(f"{where}: it refers to {refused[1] or refused[2]}, which only unpickling could make") from None
                said = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
                raise ForeignFileError(f"{where}: it is not an archive of torch.save, or cut off: {said}") from None

    def payload(self, info: StorageInfo) -> Payload:
        """Return the place of one archive's elements. Reads its description only."""
        key = (info.relative_path, info.offset)
        if key not in self._payloads:
            found = self.load(info, load_without_elements)
            where = f"{self.folder / info.relative_path}, archive at byte {info.offset}"
            if not isinstance(found, torch.Tensor) or found.layout != torch.strided or found.is_conj() or found.is_neg():
                raise ForeignFileError(f"{where}: holds a {type(found).__name__}, not a dense tensor as it is in memory")
            begin = end = 0
            if found.numel():
                storage = elements_offset(found)
                begin, end = storage + int(found.storage_offset()) * found.element_size(), storage + found.untyped_storage().nbytes()
            if end > info.length:
                raise ForeignFileError(f"{where}: its elements reach beyond its archive")
            self._payloads[key] = Payload(
                info.relative_path, info.offset + begin, tuple(found.shape), found.stride(), found.dtype, found.is_contiguous()
            )
        return self._payloads[key]

    def digest(self, info: StorageInfo, update: Callable[[bytes], object]) -> None:
        """Pass the bytes of one archive's elements to ``update``, in pieces."""
        payload = self.payload(info)
        size = math.prod(payload.shape) * payload.dtype.itemsize
        for start in range(0, size, 4 << 20):
            update(self._files.read(payload.file, payload.offset + start, min(4 << 20, size - start)))


class DcpFiles(Archives):
    """The files of a checkpoint that ``torch.distributed.checkpoint.save`` wrote.

    Attributes:
        tensors: tensors by DCP's flat key. objects: archives of the other values, by key. paths: ``{key: path in the nested state dict}``.

    Raises:
        ForeignFileError: the folder is not a DCP checkpoint, is malformed, or has transformed (compressed) streams.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        super().__init__(folder)
        if not (self.folder / ".metadata").exists():
            raise ForeignFileError(f"{self.folder}: not a DCP checkpoint: it has no .metadata")
        try:
            index = read_index(self._files.read(".metadata", 0, self._files.size(".metadata")))
        except ForeignFileError as error:
            raise ForeignFileError(f"{self.folder / '.metadata'}: {error}") from None
        self.tensors, self.objects, self.paths = index.tensors, index.objects, index.paths

    def check_room(self, keys: Iterable[str]) -> None:
        """Raises ForeignFileError if a file ends before one of the tensors does."""
        for key in keys:
            for info in (chunk.info for chunk in self.tensors[key].chunks):
                if info.offset + info.length > self._files.size(info.relative_path):
                    raise ForeignFileError(
                        f"{self.folder / info.relative_path}: ends before byte {info.offset + info.length}, where {key!r} ends: truncated"
                    )

    def object(self, key: str) -> Any:
        """Return the plain value stored under ``key``, with its tensors on the CPU. Raises ForeignFileError if only unpickling could make
        it."""
        try:
            return self.load(self.objects[key], lambda file: torch.load(file, weights_only=True, map_location="cpu"))
        except ForeignFileError as error:
            raise ForeignFileError(f"{key!r}: {error}") from None

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


def _intersection(left: Box, right: Box) -> Box | None:
    low = tuple(max(a, b) for a, b in zip(left[0], right[0], strict=True))
    high = tuple(min(a + n, b + m) for a, n, b, m in zip(*left, *right, strict=True))
    sizes = tuple(h - lo for lo, h in zip(low, high, strict=True))
    return (low, sizes) if all(n > 0 for n in sizes) else None


def _slices(box: Box, origin: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(o - base, o - base + n) for o, n, base in zip(*box, origin, strict=True))


def _spans(runs: list[tuple[int, int]], width: int) -> Iterator[tuple[int, int, list[tuple[int, int]]]]:
    """Merge runs while the gaps between them are no larger than the wanted elements. Yields (first element, end, the runs in it)."""
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
