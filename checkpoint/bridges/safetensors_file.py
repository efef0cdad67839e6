"""The safetensors format: the ``safetensors`` package checks a file, and its header tells where the tensors are.

    8 bytes length | JSON {name: {dtype, shape, data_offsets}, "__metadata__": {text: text}} | the tensors' bytes, without holes

Tensors are read by flat ranges and written as a stream, which the package cannot do: it maps files, which counts as memory, and writes
whole tensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open

from vescale_ray.errors import one_line

from ..errors import ForeignFileError
from ..format.object_layout import _SAFETENSORS_NAME
from .foreign import Files

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
    """Return the tensors of file ``name``, and the texts of its ``__metadata__``.

    Raises:
        ForeignFileError: the file is not a complete safetensors file. The message names the file and the fault.
    """
    path, size = files.folder / name, files.size(name)
    try:
        with safe_open(path, "pt") as opened:
            metadata = opened.metadata() or {}
    except Exception as error:  # the package raises errors of its own, and Python's for files that it can't map
        said = one_line(error).removeprefix("Error while deserializing header: ")[:200]
        raise ForeignFileError(f"{path}: not a complete safetensors file ({size} bytes): {said}") from None
    length = int.from_bytes(files.read(name, 0, 8), "little")
    header = json.loads(files.read(name, 8, length))
    header.pop("__metadata__", None)
    unknown = next((key for key, raw in header.items() if raw["dtype"] not in _DTYPES), None)
    if unknown is not None:
        raise ForeignFileError(f"{path}: {unknown!r} has dtype {header[unknown]['dtype']!r}, which torch does not have")
    return {
        key: Located(name, tuple(raw["shape"]), _DTYPES[raw["dtype"]], 8 + length + raw["data_offsets"][0]) for key, raw in header.items()
    }, metadata


def header_of(tensors: Sequence[tuple[str, tuple[int, ...], torch.dtype]], metadata: Mapping[str, str]) -> bytes:
    """Return the header of a file with ``tensors`` (name, shape, dtype) in this order."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    position = 0
    for name, shape, dtype in tensors:
        size = math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": SAFETENSORS_NAME[dtype], "shape": list(shape), "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8
    return len(text).to_bytes(8, "little") + text
