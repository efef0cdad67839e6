"""The safetensors format, read by flat ranges and written as a stream. Every number of a header is checked before use.

    8 bytes length | JSON {name: {dtype, shape, data_offsets}, "__metadata__": {text: text}} | the tensors' bytes, without holes

The ``safetensors`` package is not used: it maps files, which counts as memory, and cannot read a part of a flat tensor. Tests check both
directions against it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import ForeignFileError
from ..format.object_layout import _SAFETENSORS_NAME
from .foreign import Files

MAX_HEADER = 100_000_000
"""Most bytes of a header or an index; the safetensors library's own limit."""

_MAX_DIMS = 64  # torch's own limit
_LIMIT = 1 << 62

SAFETENSORS_NAME = {**_SAFETENSORS_NAME, torch.float8_e8m0fnu: "F8_E8M0", torch.complex64: "C64"}
"""Names of every dtype that both torch and safetensors have. (Our data objects use only those that older releases know.)"""
_DTYPES = {name: dtype for dtype, name in SAFETENSORS_NAME.items()}


@dataclass(frozen=True)
class Located:
    """A tensor in a file: its bytes begin at byte ``offset`` of the file."""

    file: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int


def read_header(files: Files, name: str) -> tuple[dict[str, Located], dict[str, str]]:
    """The tensors of file ``name``, and the texts of its ``__metadata__``.

    Raises:
        ForeignFileError: the file is not a complete safetensors file. The message names the file and the fault.
    """
    size = files.size(name)

    def expect(condition: bool, message: str) -> None:
        if not condition:
            raise ForeignFileError(f"{files.folder / name}: no safetensors file: {message}")

    expect(size >= 8, f"{size} bytes are too few for a header")
    length = int.from_bytes(files.read(name, 0, 8), "little")
    expect(length <= min(MAX_HEADER, size - 8), f"a header of {length} bytes is announced in a file of {size} (at most {MAX_HEADER})")
    try:
        header = json.loads(files.read(name, 8, length), object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise ForeignFileError(f"{files.folder / name}: no safetensors file: its header is no JSON: {error}") from None
    expect(isinstance(header, dict), "its header is not a JSON object")
    metadata = header.pop("__metadata__", {})
    expect(isinstance(metadata, dict) and all(isinstance(text, str) for text in metadata.values()), "__metadata__ holds more than texts")
    tensors: dict[str, Located] = {}
    spans: list[tuple[int, int, str]] = []
    for key, raw in header.items():
        expect(bool(key), "a tensor without a name")
        expect(isinstance(raw, dict), f"the entry of {key!r} is not an object")
        dtype, shape, offsets = raw.get("dtype"), raw.get("shape"), raw.get("data_offsets")
        expect(isinstance(dtype, str) and dtype in _DTYPES, f"{key!r} has dtype {dtype!r}, which is unknown")
        # Check before multiplying or printing: a header can hold a million numbers with thousands of digits each.
        expect(_counts(shape, _MAX_DIMS) and math.prod(max(1, n) for n in shape) < _LIMIT, f"{key!r} has an invalid shape")
        expect(_counts(offsets, 2) and len(offsets) == 2 and offsets[0] <= offsets[1], f"{key!r} has invalid data_offsets")
        wanted = math.prod(shape) * _DTYPES[dtype].itemsize
        expect(offsets[1] - offsets[0] == wanted, f"{key!r} of shape {shape} takes {wanted} bytes, not {offsets[1] - offsets[0]}")
        tensors[key] = Located(name, tuple(shape), _DTYPES[dtype], 8 + length + offsets[0])
        spans.append((offsets[0], offsets[1], key))
    position = 0
    for start, end, key in sorted(spans):
        expect(start == position, f"{key!r} begins at byte {start} of the data, {'before' if start < position else 'after'} {position}")
        position = end
    expect(8 + length + position == size, f"its tensors end at byte {8 + length + position}, the file at {size}")
    return tensors, metadata


def header_of(tensors: Sequence[tuple[str, tuple[int, ...], torch.dtype]], metadata: Mapping[str, str]) -> bytes:
    """The header of a file with ``tensors`` (name, shape, dtype) in this order."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    position = 0
    for name, shape, dtype in tensors:
        size = math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": SAFETENSORS_NAME[dtype], "shape": list(shape), "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8
    return len(text).to_bytes(8, "little") + text


def _counts(value: Any, most: int) -> bool:
    return isinstance(value, list) and len(value) <= most and all(type(n) is int and 0 <= n < _LIMIT for n in value)


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Hook for ``json.loads`` that rejects duplicate keys, since readers differ in which of the two they take."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key occurs twice")
    return found
