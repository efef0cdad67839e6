"""Read DCP's index, the file ``.metadata``, which is a pickle of DCP's dataclasses.

The unpickler knows only the names that DCP writes, and makes a :class:`_Record` of each object, so that no code of the file runs. Every
number is checked before use.
"""

from __future__ import annotations

import io
import math
import os
import pickle
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard, cast

import torch

from vescale_ray.geometry import Box

from ..errors import ForeignFileError

_METADATA, _FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
_RECORDS = [
    *(
        (_METADATA, name)
        for name in (
            "Metadata",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "MetadataIndex",
            "StorageMeta",
        )
    ),
    (_FILES, "_StorageInfo"),
    (_FILES, "_StoragePrefix"),
]
_IGNORED = [
    ("torch.serialization", "_get_layout"),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    # Python 3.11.0 to 3.11.3 (Debian 12) pickle an enumeration member as a call of getattr, in protocol 2 by its old name.
    ("builtins", "getattr"),
    ("__builtin__", "getattr"),
    # The checkpoint's path, for Python up to 3.12, and since.
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "PurePosixPath")),
]
"""Functions whose results are not needed here: layouts, memory formats and paths."""


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
    info: StorageInfo


@dataclass(frozen=True)
class DcpTensor:
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class DcpIndex:
    """The content of a DCP checkpoint, by DCP's flat keys: tensors, places of other values, and paths in the nested state dict."""

    tensors: dict[str, DcpTensor] = field(default_factory=dict)
    objects: dict[str, StorageInfo] = field(default_factory=dict)
    paths: dict[str, tuple[str | int, ...]] = field(default_factory=dict)


def read_index(data: bytes) -> DcpIndex:
    """Return the index in ``data``.

    Raises:
        ForeignFileError: the data is cut off, refers to classes other than DCP's, or is not as DCP writes it, or the chunks of a tensor
            overlap or leave a hole.
    """
    try:
        fields = _fields(_Unpickler(data).load(), "Metadata")
    except ForeignFileError:
        raise
    except Exception as error:  # an unpickler raises many types for malformed data
        said = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise ForeignFileError(f"not DCP metadata, or cut off: {said}") from None
    described, storage, planned = _dict(fields, "state_dict_metadata"), _storage(_dict(fields, "storage_data")), fields.get("planner_data")
    index = DcpIndex()
    for key, entry in described.items():
        if type(key) is not str or not key:
            raise ForeignFileError("malformed: a name is not text, or empty")
        index.paths[key] = _path(key, planned.get(key, (key,)) if isinstance(planned, dict) else (key,))
        if isinstance(entry, _Record) and entry.name == "BytesStorageMetadata":
            index.objects[key] = _located(storage, key, None)
        else:
            index.tensors[key] = _tensor(key, _fields(entry, "TensorStorageMetadata"), storage)
    return index


class _Record:
    """An object of one of DCP's classes: the class's name, and its pickled state (a dict by attribute, or a tuple)."""

    name: str
    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._names: dict[tuple[str, str], Any] = {("torch", "Size"): tuple, ("collections", "OrderedDict"): dict}
        self._names |= {one: lambda *_: None for one in _IGNORED}
        # Classes of this unpickler alone, so that no pickle changes a class that others use.
        self._names |= {(module, name): type(name, (_Record,), {"name": name}) for module, name in _RECORDS}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._names:
            return self._names[module, name]
        dtype = vars(torch).get(name) if module == "torch" else None  # not getattr(), which imports some of torch's modules
        if not isinstance(dtype, torch.dtype):
            shown = ascii(f"{module}.{name}")[1:-1][:80]
            raise ForeignFileError(f"it refers to {shown}, which is none of DCP's own classes: it is not read")
        return dtype


def _fields(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, _Record) or value.name != name or not isinstance(value.state, dict):
        found = value.name if isinstance(value, _Record) else type(value).__name__
        raise ForeignFileError(f"not DCP metadata: it has a {found} in place of a {name}")
    return value.state


def _dict(fields: Mapping[str, Any], name: str) -> dict[Any, Any]:
    value = fields.get(name)
    if not isinstance(value, dict):
        raise ForeignFileError(f"not DCP metadata: its {name} is not a dict")
    return value


def _list(fields: Mapping[str, Any], name: str) -> list[Any]:
    value = fields.get(name)
    if not isinstance(value, list):
        raise ForeignFileError(f"not DCP metadata: {name} of a tensor is not a list")
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
        raise ForeignFileError(f"malformed: {key!r} lies at byte {_brief(start)} of {name!r}, in {_brief(length)} bytes")
    if fields.get("transform_descriptors"):
        raise ForeignFileError(
            f"its streams were transformed ({_brief(fields['transform_descriptors'])}); only plain ones can be read by ranges"
        )
    return StorageInfo(str(name), cast(int, start), cast(int, length))


def _path(key: str, path: Any) -> tuple[str | int, ...]:
    if type(path) is not tuple or not path or not all(type(part) in (str, int) for part in path):
        raise ForeignFileError(f"malformed: the path of {key!r} in the state dict is not a tuple of names")
    return path


def _tensor(key: str, fields: Mapping[str, Any], storage: Mapping[tuple[str, tuple[int, ...] | None], Any]) -> DcpTensor:
    properties, shape = fields.get("properties"), fields.get("size")
    state = properties.state if isinstance(properties, _Record) and properties.name == "TensorProperties" else None
    dtype = state.get("dtype") if isinstance(state, dict) else state[0] if state else None
    if not isinstance(dtype, torch.dtype) or not _counts(shape) or math.prod(max(1, n) for n in shape) >= 1 << 62:
        raise ForeignFileError(f"{key!r} has shape {_brief(shape)} and dtype {_brief(dtype)}")
    chunks = []
    for one in _list(fields, "chunks"):
        place = _fields(one, "ChunkStorageMetadata")
        offsets, sizes = place.get("offsets"), place.get("sizes")
        if not (_counts(offsets) and _counts(sizes) and len(offsets) == len(sizes) == len(shape)) or any(
            o + s > n for o, s, n in zip(offsets, sizes, shape, strict=True)
        ):
            raise ForeignFileError(f"{key!r} of shape {shape} has a chunk at {_brief(offsets)} of sizes {_brief(sizes)}")
        if math.prod(sizes):
            chunks.append(Chunk((offsets, sizes), _located(storage, key, offsets)))
    held = sum(math.prod(chunk.box[1]) for chunk in chunks)
    if held != math.prod(shape):
        raise ForeignFileError(f"{key!r} of shape {shape} has {math.prod(shape)} elements, its chunks {held}")
    _check_tiling(key, shape, chunks)
    return DcpTensor(shape, dtype, tuple(chunks))


def _check_tiling(key: str, shape: tuple[int, ...], chunks: list[Chunk]) -> None:
    """Check that the chunks cover each element of the tensor once.

    This holds if and only if their corners, counted with alternating signs, are those of the whole tensor: the mixed difference determines
    the sum of the boxes' indicator functions, and is non-zero only at corners.
    """
    cut = [d for d, n in enumerate(shape) if any(chunk.box[1][d] != n for chunk in chunks)]
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
    """Return whether ``values`` is a tuple of numbers that are valid in a shape or an offset."""
    return type(values) is tuple and all(type(n) is int and 0 <= n < 1 << 62 for n in values)


def _brief(value: Any) -> str:
    """Return a value from a file, shortened for a message."""
    if isinstance(value, (int, float, str, torch.dtype)) or value is None or _counts(value):
        text = repr(value)
    elif isinstance(value, (tuple, list)):
        text = ", ".join(repr(one) if isinstance(one, (int, str)) else type(one).__name__ for one in value[:4])
        text = f"[{text}{', ..' if len(value) > 4 else ''}]"
    else:
        text = f"a {type(value).__name__}"
    return text if len(text) <= 200 else text[:200] + ".."
