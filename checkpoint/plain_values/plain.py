"""Plain values of a state as JSON and bytes, and back: numbers, texts, bytes, lists, tuples, deques, dicts, tensors, torch's dtypes and
devices, NumPy's arrays and scalars.

JSON holds the structure. A value that JSON lacks becomes an object with one key, the tag (section 6 of
``docs/reference/checkpoint-format.md``). The bytes of arrays and tensors are base64 in the JSON, or are concatenated in the entry's own
tensor of bytes. Nothing is pickled.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime
import enum
import json
import math
import random
import re
from argparse import Namespace
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from pathlib import PurePath
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import numpy as np
import torch

from ..format.digest import as_bytes, digest_of
from ..format.object_layout import dtype_name, dtype_of
from ..state.tensors import check_dense
from .scalars import decode, encode

KIND = "plain"
"""Kind of the ``uint8`` tensor that stores the bytes of a plain value, as ``param`` and ``exp_avg`` are kinds of others."""
INLINE_BYTES = 256
"""Maximum number of bytes of one value that are stored in the JSON itself. Larger ones would make the manifest, which every reader parses,
large."""

_MOST_DEEP = 100
"""Deepest nesting of lists and dicts. Unpacking takes some nested calls per level."""
_MOST_BITS = 4096
"""Maximum number of bits of an int in decimal digits. JSON readers, Python's among them, refuse some thousand digits."""
_TAGS = ("float", "items", "counter", "tensor")
_DTYPE = re.compile(r"[<>|][biufcmMSU][0-9]{1,9}(\[[0-9]{0,9}(generic|[YMWDhms]|[munpfa]s)\])?", re.ASCII)
_KINDS = "biufcmMSU"
"""NumPy's kinds of dtypes that can be stored. Objects and records cannot."""


@dataclass(frozen=True)
class Packed:
    """A plain value for storing. ``tags``: names of the tags in ``json``."""

    json: Any
    data: bytes
    tags: frozenset[str]

    @property
    def extended(self) -> bool:
        """True if ``tags`` has a tag that the first version of the format lacks."""
        return any(tag.startswith("$") for tag in self.tags)

    @property
    def digest(self) -> str:
        return digest_of(json.dumps(self.json, sort_keys=True).encode()) + digest_of(self.data)


def data_name(key: str) -> str:
    """Return the name of the tensor, of kind :data:`KIND`, that holds the bytes of the plain entry ``key``."""
    return f"state.{key}"


def pack(what: str, value: Any, inline: float = INLINE_BYTES, tensor: Callable[[str, torch.Tensor], Any] | None = None) -> Packed:
    """Return a plain value as JSON and bytes.

    Args:
        what: path of the value, for messages.
        inline: maximum number of bytes of one array, tensor or ``bytes`` that go into the JSON.
        tensor: function that returns the JSON of a tensor in ``value`` from its path and itself; the default stores its bytes.

    Raises:
        ValueError: a value cannot be stored. The message has its path and the remedy.
    """
    packer = _Packer(inline, tensor)
    packed = packer.pack(what, value, 0)
    return Packed(packed, bytes(packer.data), frozenset(packer.tags))


@dataclass
class _Packer:
    inline: float
    tensor: Callable[[str, torch.Tensor], Any] | None = None
    data: bytearray = field(default_factory=bytearray)
    tags: set[str] = field(default_factory=set)

    def pack(self, what: str, value: Any, depth: int) -> Any:
        if depth > _MOST_DEEP:
            raise ValueError(f"{what[:80]}.. is nested more than {_MOST_DEEP} deep, or holds itself; give flatter values")
        if type(value) in (dict, OrderedDict, Counter):
            return self._mapping(what, value, depth)
        if type(value) in (list, tuple, torch.Size):
            items = [self.pack(f"{what}[{index}]", item, depth + 1) for index, item in enumerate(value)]
            return items if type(value) is list else self._tag("$tuple" if type(value) is tuple else "$size", items)
        if type(value) is deque:
            return self._tag("$deque", [value.maxlen, self.pack(what, list(value), depth)])
        if isinstance(value, torch.Tensor):
            return self.tensor(what, value) if self.tensor is not None else self._tensor(what, value)
        if isinstance(value, np.ndarray):
            return self._array(what, value)
        if isinstance(value, np.str_ | np.bytes_):  # an array of one element would lose trailing zero characters
            raw = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else bytes(value)
            return self._tag("$scalar", {"dtype": value.dtype.kind, "data": self._bytes(raw)})
        if isinstance(value, np.generic):
            _check_dtype(what, value.dtype)
            return self._tag("$scalar", {"dtype": value.dtype.str, "data": self._bytes(value.tobytes())})
        return self._leaf(what, value)

    def _leaf(self, what: str, value: Any) -> Any:
        kind = type(value)  # a value of a subclass would load as its base type
        if kind is bytes:
            return self._tag("$bytes", self._bytes(value))
        if kind is complex:
            return self._tag("$complex", [self._leaf(what, value.real), self._leaf(what, value.imag)])
        if kind is float and not math.isfinite(value):
            return self._tag("float", repr(value))
        if kind is int and value.bit_length() > _MOST_BITS:
            return self._tag("$int", hex(value))
        if kind is torch.dtype or kind is torch.device:
            return self._tag(f"${kind.__name__}", str(value).removeprefix("torch."))
        if value is None or kind in (str, bool, int, float):
            return value
        raise ValueError(f"{what} is a {type(value).__name__}, which a checkpoint can't hold; {_remedy(value)}")

    def _mapping(self, what: str, value: Mapping[Any, Any], depth: int) -> Any:
        if self.tensor is None and _of_optimizer(value):
            raise ValueError(
                f"{what} is an optimizer's state_dict(); give the objects, for example "
                '{"model": model, "optimizer": optimizer}, and not their state_dict(): each rank then stores its own part of the states'
            )
        pairs = [(self._key(what, key, depth), self.pack(f"{what}.{key}", item, depth + 1)) for key, item in value.items()]
        if type(value) is not dict:
            return self._tag("counter" if type(value) is Counter else "$ordered", [list(pair) for pair in pairs])
        texts = all(isinstance(key, str) for key, _ in pairs)
        if not texts or (len(pairs) == 1 and (pairs[0][0] in _TAGS or pairs[0][0].startswith("$"))):
            return self._tag("items", [list(pair) for pair in pairs])
        return dict(pairs)

    def _key(self, what: str, key: Any, depth: int) -> Any:
        try:
            if isinstance(key, torch.Tensor):  # hashed by identity
                raise ValueError
            packed = self.pack(what, key, depth)
        except ValueError:
            raise ValueError(f"{what} has a {type(key).__name__} as a key; give texts, numbers, bytes or tuples of them") from None
        if isinstance(packed, dict):
            self.tags.add("$key")  # the first version of the format has no tags in place of keys
        return packed

    def _tensor(self, what: str, value: torch.Tensor) -> Any:
        if hasattr(value, "device_mesh") or hasattr(value, "local_boxes"):
            raise ValueError(
                f"{what} is a sharded tensor ({type(value).__name__}) among plain values, of which rank 0's are stored for all ranks; give "
                'the objects, for example {"model": model, "optimizer": optimizer}, or its tensors alone, by name, as an entry of their own'
            )
        check_dense(what, value)
        if value.is_meta:
            raise ValueError(f"tensor {what!r} is on the meta device, it has no storage; give one with values")
        if value.numel() == 1 and not value.is_complex():
            return self._tag("tensor", encode(what, value))
        flat = value.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1)
        return self._tag(
            "$tensor",
            {"dtype": dtype_name(value.dtype), "shape": list(value.shape), "data": self._bytes(as_bytes(flat).numpy().tobytes())},
        )

    def _array(self, what: str, value: np.ndarray) -> Any:
        _check_dtype(what, value.dtype)
        if type(value) not in (np.ndarray, np.memmap):
            raise ValueError(f"{what} is a {type(value).__name__}, which a checkpoint can't hold; give a plain numpy.ndarray")
        return self._tag("$array", {"dtype": value.dtype.str, "shape": list(value.shape), "data": self._bytes(value.tobytes())})

    def _bytes(self, raw: bytes) -> str | list[int]:
        if len(raw) <= self.inline:
            return base64.b64encode(raw).decode("ascii")
        start = len(self.data)
        self.data += raw
        return [start, len(self.data)]

    def _tag(self, tag: str, value: Any) -> dict[str, Any]:
        self.tags.add(tag)
        return {tag: value}


def _of_optimizer(value: Mapping[Any, Any]) -> bool:
    """Return whether ``value`` is an optimizer's state_dict() with a tensor of more than one element."""
    states = value.get("state")
    return (
        isinstance(states, Mapping)
        and value.keys() <= {"state", "param_groups"}
        and any(
            isinstance(tensor, torch.Tensor) and tensor.numel() != 1
            for by_name in states.values()
            if isinstance(by_name, Mapping)
            for tensor in by_name.values()
        )
    )


def _check_dtype(what: str, dtype: np.dtype[Any]) -> None:
    if dtype.kind not in _KINDS or not dtype.itemsize:
        raise ValueError(
            f"{what} has NumPy's dtype {dtype}, which a checkpoint can't hold; give numbers, texts, bytes or dates as elements"
        )


_BASES = (Mapping, list, tuple, str, bytes, int, float, complex)
_CALLS: tuple[tuple[Any, str], ...] = (
    (PurePath | Decimal | Fraction | UUID, "str"),
    (range, "list"),
    (Namespace | SimpleNamespace, "vars"),
)


def _remedy(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return "give its value, and make the member from it after the load"
    base = next((base for base in _BASES if isinstance(value, base)), None)
    if base is not None:
        return f"give {'dict' if base is Mapping else base.__name__}() of it, and make the {type(value).__name__} from it after the load"
    if isinstance(value, (set, frozenset)):
        return "give a sorted list, and make the set from it after the load"
    if isinstance(value, (datetime.date, datetime.time, datetime.timedelta)):
        return "give text or seconds, as isoformat(), timestamp() or total_seconds() make them"
    if isinstance(value, (bytearray, memoryview)):
        return "give bytes"
    call = next((call for kinds, call in _CALLS if isinstance(value, kinds)), None)
    if call is not None or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
        return f"give {call or 'dataclasses.asdict'}() of it, and make the {type(value).__name__} from it after the load"
    if isinstance(value, np.random.Generator | np.random.BitGenerator):
        return "give its bit_generator.state, a dict"
    if isinstance(value, torch.Generator | np.random.RandomState):
        return "give its get_state()"
    if isinstance(value, random.Random):
        return "give its getstate()"
    if isinstance(value, torch.nn.Module | torch.optim.Optimizer):
        return "give it as an entry of the state itself, under a name of its own"
    if not isinstance(value, type) and callable(getattr(value, "state_dict", None)):
        return "give its state_dict(), or the object as an entry of the state itself, under a name of its own"
    return "give numbers, texts, bytes, lists, tuples, dicts, tensors or arrays, or an object with state_dict() and load_state_dict()"


class EntryBytes:
    """The bytes of one entry. At most as many bytes as stored can be taken from it, so that no value is larger than its storage.

    Args:
        states: for an optimizer's state: function from the name of a tensor to the tensor.
    """

    def __init__(self, data: memoryview | bytes = b"", states: Callable[[Any], Any] | None = None) -> None:
        self._data, self._left, self._states = memoryview(data), len(data), states

    def state(self, name: Any) -> Any:
        """Return the tensor ``name`` of an optimizer's state. Raises ValueError."""
        if self._states is None:
            raise ValueError("it has the tag $state, which only states of optimizers have")
        return self._states(name)

    def take(self, where: Any) -> bytearray:
        """Return the bytes at ``where``, which is base64 text or (start, end). Raises ValueError."""
        if isinstance(where, str):
            return bytearray(base64.b64decode(where, validate=True))
        start, end = where
        if type(start) is not int or type(end) is not int or not 0 <= start <= end <= len(self._data) or end - start > self._left:
            raise ValueError(f"bytes {start!r} to {end!r} were requested of {len(self._data)}, of which {self._left} are unused")
        self._left -= end - start
        return bytearray(self._data[start:end])


def unpack(value: Any, data: EntryBytes | None = None) -> Any:
    """Restore a value from ``value``, the JSON that :func:`pack` has made of it.

    Args:
        data: the entry's bytes. Without them, only the tags of the format's first version count, and any other object is a plain dict.

    Raises:
        ValueError: ``value`` is malformed, or has a tag that this version does not know.
    """
    try:
        return _unpack(value, data)
    except (TypeError, KeyError, AttributeError, OverflowError, RuntimeError) as error:  # includes RecursionError
        raise ValueError(f"{type(error).__name__}: {error}".partition("\n")[0]) from None


def _unpack(value: Any, data: EntryBytes | None) -> Any:
    if isinstance(value, list):
        return [_unpack(item, data) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value)) if len(value) == 1 else ""
    if tag == "float":
        return float(value[tag])
    if tag == "tensor":
        return decode(value[tag])
    if tag in ("items", "counter"):
        pairs = {(key if data is None else _unpack(key, data)): _unpack(item, data) for key, item in value[tag]}
        return Counter(pairs) if tag == "counter" else pairs
    if data is not None and tag.startswith("$"):
        if tag not in _READ:
            raise ValueError(f"it has a value of the sort {tag!r}, which this version does not know: load it with a newer one")
        return _READ[tag](value[tag], data)
    return {key: _unpack(item, data) for key, item in value.items()}


def _tuple(items: Any, data: EntryBytes) -> tuple[Any, ...]:
    if not isinstance(items, list):
        raise ValueError("a tuple is not a list")
    return tuple(_unpack(item, data) for item in items)


def _ordered(pairs: Any, data: EntryBytes) -> OrderedDict[Any, Any]:
    return OrderedDict((_unpack(key, data), _unpack(item, data)) for key, item in pairs)


def _deque(about: Any, data: EntryBytes) -> deque[Any]:
    most, items = about
    if most is not None and (type(most) is not int or len(items) > most):
        raise ValueError(f"a deque of at most {most!r:.80} has {len(items)} items")
    return deque(_tuple(items, data), most)


def _dtype(name: Any, _: EntryBytes) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r:.80} is not a dtype of this torch")
    return found


def _complex(parts: Any, data: EntryBytes) -> complex:
    real, imag = (float(_unpack(part, data)) for part in parts)
    return complex(real, imag)


def _shape(raw: Any) -> tuple[int, ...]:
    if not isinstance(raw, list) or any(type(n) is not int or n < 0 for n in raw) or math.prod(max(1, n) for n in raw) >= 1 << 62:
        raise ValueError(f"{str(raw)[:80]} is not a shape")
    return tuple(raw)


def _numpy(about: Any, shape: tuple[int, ...], data: EntryBytes) -> np.ndarray:
    if _DTYPE.fullmatch(about["dtype"]) is None:  # NumPy also parses descriptions of records
        raise ValueError(f"{about['dtype'][:80]!r} is not a dtype of an array that is stored")
    dtype = np.dtype(about["dtype"])
    _check_dtype("it", dtype)
    raw = data.take(about["data"])
    if len(raw) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{len(raw)} bytes do not make an array of shape {shape} and dtype {dtype}")
    return np.ndarray(shape, dtype, raw)


def _scalar(about: Any, data: EntryBytes) -> Any:
    if about["dtype"] == "U":
        return np.str_(data.take(about["data"]).decode("utf-8", "surrogatepass"))
    if about["dtype"] == "S":
        return np.bytes_(data.take(about["data"]))
    return _numpy(about, (), data)[()]


def _torch(about: Any, data: EntryBytes) -> torch.Tensor:
    shape, dtype = _shape(about["shape"]), dtype_of(about["dtype"])
    raw = data.take(about["data"])
    if len(raw) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{len(raw)} bytes do not make a tensor of shape {shape} and dtype {about['dtype']}")
    tensor = torch.empty(shape, dtype=dtype)
    if raw:
        as_bytes(tensor.view(-1)).copy_(torch.frombuffer(raw, dtype=torch.uint8))
    return tensor


_READ: Mapping[str, Callable[[Any, EntryBytes], Any]] = {
    "$tuple": _tuple,
    "$size": lambda items, data: torch.Size(_tuple(items, data)),
    "$ordered": _ordered,
    "$deque": _deque,
    "$dtype": _dtype,
    "$device": lambda name, _: torch.device(name if isinstance(name, str) else ""),
    "$bytes": lambda where, data: bytes(data.take(where)),
    "$int": lambda text, data: int(text, 16),
    "$complex": _complex,
    "$scalar": _scalar,
    "$array": lambda about, data: _numpy(about, _shape(about["shape"]), data),
    "$tensor": _torch,
    "$state": lambda name, data: data.state(name),
}
