"""Writes to gathered views of ragged tensors: ``weight[padding_idx].zero_()``, as modules initialize their parameters.

The operation runs on the gathered memory, on every rank alike, and each rank takes its part back. Views of the same gathered memory see the
write. The ragged tensor must not have been written since it was gathered, and the operation must give the same values on every rank.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from vescale_ray.dtensor.spec import contiguous_stride, sharding_of
from vescale_ray.dtensor.transfer import writes_of

_OTHER = {torch.Tag.nondeterministic_seeded, torch.Tag.inplace_view}
"""Operations that may not be written back: their numbers differ by rank, or they change the shape of the view."""


class Source:
    """A ragged tensor that was gathered, and the number of its writes at that time. All views of one gathered memory share it."""

    __slots__ = ("tensor", "writes")

    def __init__(self, tensor: DTensor) -> None:
        self.tensor, self.writes = tensor, writes_of(tensor)

    @property
    def is_stale(self) -> bool:
        """Return whether the tensor was written since it was gathered, other than through its gathered views."""
        return writes_of(self.tensor) != self.writes

    def accepts(self, func: Any, local: Tensor) -> bool:
        """Return whether ``func`` may write to ``local``, a view of the gathered memory."""
        tensor = self.tensor
        if _OTHER & set(func.tags) or type(local) is not Tensor or local.dtype != tensor.dtype or sharding_of(tensor._spec).pending:
            return False
        if tensor.requires_grad and torch.is_grad_enabled():
            return False
        return local.untyped_storage().nbytes() == math.prod(tensor.shape) * tensor.dtype.itemsize

    def take_back(self, view: Tensor, local: Tensor) -> None:
        """Take this rank's part of the gathered memory, to which ``view`` with the plain tensor ``local`` was written."""
        shape = tuple(self.tensor.shape)
        whole = torch.empty(0, dtype=local.dtype, device=local.device).set_(local.untyped_storage(), 0, shape, contiguous_stride(shape))
        torch.ops.aten.copy_.default(self.tensor, whole)
        # Autograd counts one more write when the operation returns: the view and the tensor share a counter.
        self.writes = writes_of(self.tensor) + (view._is_view() and not view.is_inference())
