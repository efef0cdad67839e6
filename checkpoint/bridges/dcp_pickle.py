"""Read DCP's index, a pickle, without the ``pickle`` module: an interpreter of only the opcodes that DCP's writer produces.

An unpickler that merely refuses foreign classes is not enough. An attacker can still make it change the allowed classes (BUILD on a class),
take all memory (a memo index of 4 billion), or take all time (hashes of nested tuples). Here a class is only a name and an object only a
:class:`Record`. Nothing is called, and only texts, numbers and records (by identity) are hashed. Every opcode costs time and memory in
proportion to its own bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import ForeignFileError

MAX_BYTES = 1 << 30
"""Largest index, in bytes: about 7 million chunks. Objects take about 20 times the memory of their pickle."""

MAX_DIMS = 64
"""Most dimensions of a tensor; torch's own limit."""

_METADATA, _FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
_RECORDS = {
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
}
# Results of calls that are not needed here: layouts, memory formats, and the checkpoint's path (for Python up to 3.12, and since).
_IGNORED = {("torch.serialization", "_get_layout"), (_METADATA, "_MEM_FORMAT_ENCODING")}
_IGNORED |= {(module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "PurePosixPath")}


@dataclass(slots=True, eq=False)
class Record:
    """An object of one of DCP's classes: the class's name, and its pickled state (a dict by attribute, or a tuple)."""

    name: str
    state: Any = None


@dataclass(frozen=True, slots=True)
class Global:
    module: str
    name: str


_SIZE, _ORDERED = Global("torch", "Size"), Global("collections", "OrderedDict")
_MEMORY_FORMAT = Global(_METADATA, "_MEM_FORMAT_ENCODING")
_GETATTR = (Global("builtins", "getattr"), Global("__builtin__", "getattr"))
"""Python 3.11.0 to 3.11.3 (Debian 12) pickle an enumeration member as a call of getattr (in protocol 2 by its old name). Other versions
call the enumeration."""
_MARK = object()


def read_pickle(data: bytes) -> Any:
    """The value in ``data``: texts, numbers, tuples, lists, dicts, dtypes and :class:`Record`; a ``torch.Size`` becomes a tuple.

    Raises:
        ForeignFileError: the data is cut off, refers to classes other than DCP's, or is not as DCP writes it.
    """
    return Machine(data).run()


class Machine:
    """The interpreter. Subclasses override :meth:`find`, :meth:`new`, :meth:`reduce` and :meth:`build` to allow other names and objects."""

    kind, writer = "DCP metadata", "DCP"
    keys: tuple[type, ...] = (str, int, Record)
    """Allowed types of a dict's keys, whose hashes cost time in proportion to their own bytes."""
    opcodes: dict[int, Callable[[Any], None]]

    def __init__(self, data: bytes) -> None:
        self.data, self._at = data, 0
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        while True:
            code = self._take(1)[0]
            if code == 0x2E:  # STOP
                value = self.pop()
                if self._stack:
                    raise self.odd("values are left over at its end")
                return value
            handler = self.opcodes.get(code)
            if handler is None:
                raise self.odd(f"{self.writer} never writes opcode {code:#04x}")
            handler(self)

    def odd(self, what: str) -> ForeignFileError:
        return ForeignFileError(f"no {self.kind}: at byte {self._at}: {what}")

    def _take(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self.data):
            raise ForeignFileError(f"no {self.kind}: cut off at byte {len(self.data)}")
        taken = self.data[self._at : end]
        self._at = end
        return taken

    def _number(self, form: str) -> Any:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def pop(self) -> Any:
        if not self._stack or self._stack[-1] is _MARK:
            raise self.odd("a value is missing")
        return self._stack.pop()

    def _pop_to_mark(self) -> list[Any]:
        for index in range(len(self._stack) - 1, -1, -1):
            if self._stack[index] is _MARK:
                items = self._stack[index + 1 :]
                del self._stack[index:]
                return items
        raise self.odd("a mark is missing")

    def top(self, kind: type) -> Any:
        if not self._stack or type(self._stack[-1]) is not kind:
            raise self.odd(f"a {kind.__name__.lower()} is missing")
        return self._stack[-1]

    # ---------------------------------------------------------------------------------------------------------- plain values

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def _text(self, size: int) -> None:
        try:
            self.push(self._take(size).decode())
        except UnicodeDecodeError:
            raise self.odd("a text is no UTF-8") from None

    def _long(self) -> None:
        size = self._take(1)[0]
        if size > 9:
            raise self.odd(f"a number of {size} bytes")
        self.push(int.from_bytes(self._take(size), "little", signed=True))

    def _frame(self) -> None:
        self._take(8)  # the frame's length, a hint for stream readers

    def _protocol(self) -> None:
        if self._take(1)[0] > 5:
            raise self.odd("a pickle of a protocol above 5")

    def _tuple(self, count: int) -> None:
        items = [self.pop() for _ in range(count)]
        self.push(tuple(reversed(items)))

    def _append(self) -> None:
        value = self.pop()
        self.top(list).append(value)

    def _appends(self) -> None:
        items = self._pop_to_mark()
        self.top(list).extend(items)

    def _set(self, items: list[Any]) -> None:
        target = self.top(dict)
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Thousands of larger numbers can share one hash.
            if type(key) not in self.keys or (type(key) is int and not -(1 << 63) <= key < 1 << 63):
                raise self.odd("a dict's key is not text")
            target[key] = value

    def _setitem(self) -> None:
        value = self.pop()
        self._set([self.pop(), value])

    def _setitems(self) -> None:
        items = self._pop_to_mark()
        if len(items) % 2:
            raise self.odd("a dict's value is missing")
        self._set(items)

    # ------------------------------------------------------------------------------------------------------------------ memo

    def _memoize(self) -> None:
        self._memo[len(self._memo)] = self._last()

    def _put(self, index: int) -> None:
        self._memo[index] = self._last()

    def _last(self) -> Any:
        if not self._stack or self._stack[-1] is _MARK:
            raise self.odd("a value is missing")
        return self._stack[-1]

    def _get(self, index: int) -> None:
        try:
            self.push(self._memo[index])
        except KeyError:
            raise self.odd(f"nothing was kept under {index}") from None

    # --------------------------------------------------------------------------------------------------------------- objects

    def _global(self) -> None:
        lines = self.data[self._at : self._at + 512].split(b"\n", 2)
        if len(lines) < 3:
            raise self.odd("a class's name is missing")
        self._at += len(lines[0]) + len(lines[1]) + 2
        self.find(lines[0].decode(errors="replace"), lines[1].decode(errors="replace"))

    def _stack_global(self) -> None:
        name, module = self.pop(), self.pop()
        if type(name) is not str or type(module) is not str:
            raise self.odd("a class's name is missing")
        self.find(module, name)

    def find(self, module: str, name: str) -> None:
        found = Global(module, name)
        if found in (_SIZE, _ORDERED, *_GETATTR) or (module, name) in _RECORDS or (module, name) in _IGNORED:
            self.push(found)
            return
        dtype = vars(torch).get(name) if module == "torch" else None  # not getattr(), which imports some of torch's modules
        if not isinstance(dtype, torch.dtype):
            raise ForeignFileError(f"it refers to {short(module)}.{short(name)}, which is none of DCP's own classes: it is not read")
        self.push(dtype)

    def new(self) -> None:
        arguments, cls = self.pop(), self.pop()
        if type(cls) is not Global or (cls.module, cls.name) not in _RECORDS or arguments != ():
            raise self.odd("an object of a class other than DCP's")
        self.push(Record(cls.name))

    def reduce(self) -> None:
        arguments, called = self.pop(), self.pop()
        if type(called) is not Global or type(arguments) is not tuple:
            raise self.odd("a call that DCP does not make")
        if called == _SIZE:
            shape = arguments[0] if len(arguments) == 1 else None
            if type(shape) is not tuple or len(shape) > MAX_DIMS or not all(type(n) is int for n in shape):
                raise self.odd("an invalid shape")
            self.push(shape)
        elif called == _ORDERED and arguments == ():
            self.push({})
        elif (called.module, called.name) in _IGNORED or (called in _GETATTR and arguments[:1] == (_MEMORY_FORMAT,)):
            self.push(None)
        else:
            raise self.odd("a call that DCP does not make")

    def build(self) -> None:
        state = self.pop()
        record = self.top(Record)
        if record.state is not None or type(state) not in (dict, tuple):
            raise self.odd("an object's state that DCP does not write")
        record.state = state  # not a copy: one large state shared by many objects would cost as much as many states


OPCODES: dict[int, Callable[[Any], None]] = {
    0x80: lambda m: m._protocol(),
    0x95: lambda m: m._frame(),
    ord("("): lambda m: m.push(_MARK),
    ord("N"): lambda m: m.push(None),
    0x88: lambda m: m.push(True),
    0x89: lambda m: m.push(False),
    ord("J"): lambda m: m.push(m._number("<i")),
    ord("K"): lambda m: m.push(m._take(1)[0]),
    ord("M"): lambda m: m.push(m._number("<H")),
    0x8A: lambda m: m._long(),
    ord("G"): lambda m: m.push(m._number(">d")),
    0x8C: lambda m: m._text(m._take(1)[0]),
    ord("X"): lambda m: m._text(m._number("<I")),
    ord("]"): lambda m: m.push([]),
    ord("}"): lambda m: m.push({}),
    ord(")"): lambda m: m.push(()),
    ord("t"): lambda m: m.push(tuple(m._pop_to_mark())),
    0x85: lambda m: m._tuple(1),
    0x86: lambda m: m._tuple(2),
    0x87: lambda m: m._tuple(3),
    ord("a"): lambda m: m._append(),
    ord("e"): lambda m: m._appends(),
    ord("s"): lambda m: m._setitem(),
    ord("u"): lambda m: m._setitems(),
    0x94: lambda m: m._memoize(),
    ord("q"): lambda m: m._put(m._take(1)[0]),
    ord("r"): lambda m: m._put(m._number("<I")),
    ord("h"): lambda m: m._get(m._take(1)[0]),
    ord("j"): lambda m: m._get(m._number("<I")),
    ord("c"): lambda m: m._global(),
    0x93: lambda m: m._stack_global(),
    0x81: lambda m: m.new(),
    ord("R"): lambda m: m.reduce(),
    ord("b"): lambda m: m.build(),
}

Machine.opcodes = OPCODES


def short(text: str) -> str:
    return text if len(text) <= 80 and text.isprintable() else ascii(text[:80])
