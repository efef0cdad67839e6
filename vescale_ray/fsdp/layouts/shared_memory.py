"""Parameters that share memory: an update of one changes the other in one process, but each of them has its own shards.

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
    """Return the sharded parameters whose originals share elements with ``original``. Mark the memory of ``original`` as that of ``param``.

    Only plain tensors without gaps are compared.
    """
    if type(original) not in (torch.Tensor, nn.Parameter) or original.is_meta or not original.numel():
        return ()
    start = original.storage_offset()
    end = start + sum((size - 1) * stride for size, stride in zip(original.shape, original.stride(), strict=True)) + 1
    if end - start != original.numel():
        return ()
    start, end = start * original.itemsize, end * original.itemsize
    marks = original.untyped_storage().__dict__
    alive = [mark for mark in marks.get(_SHARDED, ()) if mark[0]() is not None]
    marks[_SHARDED] = [*alive, (weakref.ref(param), start, end)]
    return tuple(ref for ref, first, last in alive if first < end and start < last)
