"""FP8 weights in safetensors files, as DeepSeek-V3 publishes them: tensor ``X`` has e4m3 codes, ``X_scale_inv`` one scale per block.

An element is its code times its block's scale. Blocks at the lower and right edges are smaller. ``config.json`` tells the size of a block
(:mod:`vescale_ray.models.fp8_folder`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from vescale_ray.errors import BadInput
from vescale_ray.models.fp8_folder import block_size_of
from vescale_ray.quantization import Fp8Block

from ..errors import CheckpointMismatch, ForeignFileError, first_few
from ..state.matching import StoredTensor
from .foreign import TensorSource

SCALES = "_scale_inv"
"""Suffix of the name of a tensor's scales."""
CODES = torch.float8_e4m3fn
SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
"""Dtypes of scales, all of which FP32 holds exactly."""
CHUNK_NUMEL = 1 << 20
"""Number of elements that are dequantized at a time."""


def block_in(folder: Path) -> Fp8Block | None:
    """Return the blocks of the weights in a model's folder; None if its ``config.json``, if any, has no ``quantization_config``.

    Raises:
        ForeignFileError: ``config.json`` can't be read, or describes other formats than FP8 with one scale per block.
    """
    path = folder / "config.json"
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ForeignFileError(f"{path}: can't be read ({' '.join(str(error).split())})") from None
    try:
        size = block_size_of(given) if isinstance(given, dict) else None
    except BadInput as error:
        raise ForeignFileError(f"{path}: {error}") from None
    return None if size is None else Fp8Block(*size)


class DequantizedSource:
    """The tensors of ``source``, with those in FP8 as FP32 values, and without scales. Any flat range can be read.

    Raises:
        CheckpointMismatch: scales are missing, or have another shape or sort of dtype.
    """

    def __init__(self, source: TensorSource, form: Fp8Block) -> None:
        self._source, self._form = source, form
        stored, where = source.tensors, source.describe()
        self._coded = [name for name, tensor in stored.items() if tensor.kinds.get("param") == CODES]
        lacking = [name for name in self._coded if name + SCALES not in stored]
        if lacking:
            names = first_few([name + SCALES for name in lacking])
            raise CheckpointMismatch(f"{where}: scales of {len(lacking)} FP8 tensors are missing: {names}")
        for name in self._coded:
            scales, expected = stored[name + SCALES], self._grid_shape(name)
            if tuple(scales.shape) != expected or scales.kinds["param"] not in SCALE_DTYPES:
                raise CheckpointMismatch(
                    f"{where}: {name + SCALES!r} has shape {list(scales.shape)} and dtype {scales.kinds['param']}; {name!r} of shape "
                    f"{list(stored[name].shape)} in blocks of {form.rows}x{form.columns} needs {list(expected)} floating-point scales"
                )
        hidden = {name + SCALES for name in self._coded}
        values = dict.fromkeys(self._coded, {"param": torch.float32})
        self._tensors = {
            name: StoredTensor(tensor.shape, values.get(name, tensor.kinds)) for name, tensor in stored.items() if name not in hidden
        }

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        return self._tensors

    @property
    def aliases(self) -> Mapping[str, str]:
        return self._source.aliases

    @property
    def meta(self) -> Mapping[str, Any]:
        return self._source.meta

    def describe(self) -> str:
        return self._source.describe()

    def check_scales(self) -> None:
        """Read all scales, which are few. Raises ForeignFileError if one is Inf or NaN."""
        for name in self._coded:
            *lead, bands, columns = self._grid_shape(name)
            scales = self._scales(name, 0, bands * (lead[0] if lead else 1), columns)
            bad = int((~torch.isfinite(scales)).sum())
            if bad:
                raise ForeignFileError(f"{self.describe()}: {bad} scales of {name + SCALES!r} are Inf or NaN; download the file again")

    def read_into(self, name: str, kind: str, start: int, out: torch.Tensor) -> None:
        if self._tensors[name].kinds[kind] == self._source.tensors[name].kinds[kind]:
            self._source.read_into(name, kind, start, out)
            return
        codes = torch.empty(min(CHUNK_NUMEL, out.numel()), dtype=CODES)
        for position in range(0, out.numel(), CHUNK_NUMEL):
            values = out[position : position + CHUNK_NUMEL]
            here = codes[: values.numel()]
            self._source.read_into(name, kind, start + position, here)
            values.copy_(here)
            self._scale(name, start + position, values)
            if not torch.isfinite(values).all():
                raise ForeignFileError(f"{self.describe()}: {name!r} holds Inf or NaN, or a scale of it does; download the file again")

    def _scale(self, name: str, start: int, values: torch.Tensor) -> None:
        """Multiply decoded codes, those of the tensor from ``start`` on, by their blocks' scales."""
        rows, cols = self._source.tensors[name].shape[-2:]
        bands, columns = self._grid_shape(name)[-2:]
        for first, count, left, right in _rectangles(start, start + values.numel(), cols):
            row = torch.arange(first, first + count)
            band = row // rows * bands + row % rows // self._form.rows
            lowest = int(band[0])
            scales = self._scales(name, lowest, int(band[-1]) + 1 - lowest, columns)
            spread = scales[:, torch.arange(left, right) // self._form.columns]
            offset = first * cols + left - start
            values[offset : offset + count * (right - left)].view(count, -1).mul_(spread[band - lowest])

    def _scales(self, name: str, band: int, count: int, columns: int) -> torch.Tensor:
        stored = torch.empty(count * columns, dtype=self._source.tensors[name + SCALES].kinds["param"])
        self._source.read_into(name + SCALES, "param", band * columns, stored)
        return stored.float().view(count, columns)

    def _grid_shape(self, name: str) -> tuple[int, ...]:
        shape = tuple(self._source.tensors[name].shape)
        if len(shape) not in (2, 3):
            raise CheckpointMismatch(
                f"{self.describe()}: {name!r} of shape {list(shape)} is in FP8; only matrices and stacks of matrices have blocks"
            )
        return (*shape[:-2], -(-shape[-2] // self._form.rows), -(-shape[-1] // self._form.columns))


def _rectangles(start: int, end: int, cols: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (first row, rows, first column, end column) of the at most three rectangles that elements ``[start, end)`` are, in order."""
    while start < end:
        row, left = divmod(start, cols)
        count = 1 if left else max(1, (end - start) // cols)
        right = min(cols, left + end - start)
        yield row, count, left, right
        start += count * (right - left)
