"""Parameters and buffers that share memory: an update of one changes the other in one process, but each parameter has its own shards.

The mark lies on the storage object, which torch keeps as long as any tensor uses the memory. Parameters of one model are compared at its
first forward, since other models may hold tensors of the same state dict.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

_SHARDED = "_vescale_sharded"


def sharers(original: torch.Tensor, param: Any) -> tuple[weakref.ref[Any], ...]:
    """Return the sharded parameters whose originals share elements with ``original``. Mark its memory as that of ``param``."""
    if (extent := _extent(original)) is None:
        return ()
    found = sharded_in(original)
    marks = original.untyped_storage().__dict__
    marks[_SHARDED] = [*(mark for mark in marks.get(_SHARDED, ()) if mark[0]() is not None), (weakref.ref(param), *extent)]
    return found


def sharded_in(tensor: torch.Tensor) -> tuple[weakref.ref[Any], ...]:
    """Return the sharded parameters whose originals share elements with ``tensor``. Only plain tensors without gaps are compared."""
    if (extent := _extent(tensor)) is None:
        return ()
    start, end = extent
    marks = tensor.untyped_storage().__dict__.get(_SHARDED, ())
    return tuple(ref for ref, first, last in marks if ref() is not None and first < end and start < last)


def _extent(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Return the first byte of a plain tensor in its storage, and the byte after its last one; None if it has gaps or no memory."""
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.is_meta or not tensor.numel():
        return None
    start = int(tensor.storage_offset())
    end = start + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return (start * tensor.itemsize, end * tensor.itemsize) if end - start == tensor.numel() else None
