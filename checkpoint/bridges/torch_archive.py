"""Read a ``torch.save`` archive without its elements: its directory, and its pickle through the interpreter of ``dcp_pickle.py``.

torch's own loader refuses foreign classes (``weights_only``). Still, a file of a few hundred bytes could make it hash nested tuples for
ever in one uninterruptible call, or allocate a ``bytearray`` of any size. Here nothing is called, and only texts and numbers are hashed. A
tensor is a description, checked against the archive's actual storage.
"""

from __future__ import annotations

import math
import struct
import zipfile
from collections import Counter
from dataclasses import dataclass
from typing import IO, Any

import torch

from vescale_ray.compat.core import dtype_to_storage_type_map

from ..errors import ForeignFileError
from .dcp_pickle import MAX_BYTES, MAX_DIMS, OPCODES, Global, Machine, short

_STORAGES = {("torch", name): dtype for dtype, name in dtype_to_storage_type_map().items()}
_UNTYPED = ("torch.storage", "UntypedStorage")
_CALLS = {
    ("collections", "OrderedDict"),
    ("collections", "Counter"),
    ("torch", "Size"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_tensor_v3"),
    ("torch._utils", "_rebuild_parameter"),
}


@dataclass(frozen=True, slots=True)
class Strided:
    """A dense tensor of an archive: its first element is at byte ``offset`` of the archive, the others as in memory."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def contiguous(self) -> bool:
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return not math.prod(self.shape)
            expected *= size
        return True


def read_archive(file: IO[bytes], length: int) -> Any:
    """The saved value, with a :class:`Strided` for every tensor.

    Args:
        length: bytes of ``file``, which begins where the archive does.

    Raises:
        ForeignFileError: the file is not an archive, is cut off, or holds values that only unpickling could read.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            # torch stores without compression; compressed entries could grow a thousandfold in memory.
            if any(one.compress_type or one.file_size != one.compress_size for one in entries):
                raise ForeignFileError("it is compressed, which torch.save never does")
            names = {one.filename: one for one in entries}
            pickles = [name for name in names if name.endswith("/data.pkl")]
            if len(names) < len(entries) or len(pickles) != 1 or names[pickles[0]].file_size > MAX_BYTES:
                raise ForeignFileError("it is not an archive of torch.save: a name occurs twice, or there is not exactly one data.pkl")
            top = pickles[0].removesuffix("data.pkl")
            if f"{top}byteorder" in names and archive.read(f"{top}byteorder") != b"little":
                raise ForeignFileError("it was saved on a machine of the other byte order")
            raw = archive.read(pickles[0])
    except ForeignFileError:
        raise
    except Exception as error:  # zipfile raises many types for a malformed directory
        said = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise ForeignFileError(f"it is not an archive of torch.save, or cut off: {said}") from None

    def locate(key: str) -> tuple[int, int]:
        entry = names.get(f"{top}data/{key}")
        if entry is None:
            raise ForeignFileError(f"it has no storage {short(key)}")
        file.seek(max(0, entry.header_offset))
        head = file.read(30)
        if entry.header_offset < 0 or len(head) < 30 or head[:4] != b"PK\3\4":
            raise ForeignFileError(f"its directory gives a wrong place for storage {short(key)}")
        begin = entry.header_offset + 30 + sum(struct.unpack("<HH", head[26:]))
        if begin + entry.file_size > length:
            raise ForeignFileError("its elements reach beyond its archive")
        return begin, entry.file_size

    return _ArchiveMachine(raw, locate).run()


@dataclass(frozen=True, slots=True, eq=False)
class _Storage:
    key: str
    width: int
    """Bytes of an element; 1 if it has no dtype."""
    dtype: torch.dtype | None
    numel: int


class _ArchiveMachine(Machine):
    kind, writer = "pickle of torch.save", "torch.save"
    keys = (str, int, float, bool, type(None))

    def __init__(self, data: bytes, locate: Any) -> None:
        super().__init__(data)
        self._locate, self._counted = locate, 0
        self._places: dict[str, tuple[int, int]] = {}

    def find(self, module: str, name: str) -> None:
        if (module, name) in _CALLS or (module, name) in _STORAGES or (module, name) == _UNTYPED:
            self.push(Global(module, name))
            return
        dtype = vars(torch).get(name) if module == "torch" else None
        if not isinstance(dtype, torch.dtype):
            raise ForeignFileError(f"it refers to {short(module)}.{short(name)}, which only unpickling could make: it is not read")
        self.push(dtype)

    def new(self) -> None:
        raise self.odd("an object of a class")

    def build(self) -> None:
        self.pop()
        self.top(dict)  # the attributes of an OrderedDict, as in a module's state, do not affect its values

    def persistent(self) -> None:
        said = self.pop()
        if type(said) is not tuple or len(said) != 5 or [type(one) for one in said] != [str, Global, str, str, int] or said[0] != "storage":
            raise self.odd("an invalid storage")
        _, cls, key, _, numel = said
        dtype = _STORAGES.get((cls.module, cls.name))
        if (dtype is None and (cls.module, cls.name) != _UNTYPED) or not 0 <= numel < 1 << 62:
            raise self.odd("an invalid storage")
        self.push(_Storage(key, 1 if dtype is None else dtype.itemsize, dtype, numel))

    def reduce(self) -> None:
        arguments, called = self.pop(), self.pop()
        if type(called) is not Global or type(arguments) is not tuple:
            raise self.odd("a call that torch.save does not make")
        count, first = len(arguments), arguments[0] if arguments else None
        if called.name == "OrderedDict" and not count:
            self.push({})
        elif called.name == "Counter" and count == 1 and type(first) is dict:
            self._counted += len(first)
            if self._counted > len(self.data):  # one large dict, repeated many times
                raise self.odd("more counts than the pickle can hold")
            self.push(Counter(first))
        elif called.name == "Size" and count == 1 and _counts(first):
            self.push(first)
        elif called.name == "_rebuild_parameter" and count == 3 and type(first) is Strided:
            self.push(first)
        elif called.name == "_rebuild_tensor_v2" and count in (6, 7) and type(first) is _Storage and first.dtype is not None:
            self.push(self._tensor(first, first.dtype, *arguments[1:4], said=arguments[6:]))
        elif called.name == "_rebuild_tensor_v3" and count in (7, 8) and type(first) is _Storage and isinstance(arguments[6], torch.dtype):
            self.push(self._tensor(first, arguments[6], *arguments[1:4], said=arguments[7:]))
        else:
            raise self.odd("a call that torch.save does not make")

    def _tensor(self, storage: _Storage, dtype: torch.dtype, first: Any, shape: Any, stride: Any, *, said: tuple[Any, ...]) -> Strided:
        if not (_counts((first,)) and _counts(shape) and _counts(stride) and len(shape) == len(stride)) or math.prod(shape) >= 1 << 62:
            raise self.odd("an invalid tensor")
        if any(said):
            raise ForeignFileError("it is a conjugated or negated view, whose elements are not what is stored")
        if not math.prod(shape):
            return Strided(0, shape, stride, dtype)
        if storage.key not in self._places:
            self._places[storage.key] = self._locate(storage.key)
        begin, size = self._places[storage.key]
        span = sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) + 1
        if (first + span) * dtype.itemsize > min(size, storage.numel * storage.width):
            raise ForeignFileError("its elements reach beyond its archive")
        return Strided(begin + first * dtype.itemsize, shape, stride, dtype)


_ArchiveMachine.opcodes = {**OPCODES, ord("Q"): lambda m: m.persistent()}


def _counts(values: Any) -> bool:
    return type(values) is tuple and len(values) <= MAX_DIMS and all(type(n) is int and 0 <= n < 1 << 62 for n in values)
