"""The flat buffer ``[W * S]`` in which the gradients of one group arrive, from the first gradient to the end of their reduction."""

from __future__ import annotations

import torch

from vescale_ray.compat.fsdp import ReduceScatter
from vescale_ray.dbuffer import DBuffer
from vescale_ray.fsdp.buffers.memory import Buffer, Pool
from vescale_ray.fsdp.communication import comm
from vescale_ray.planner import Layout


class FlatGradient:
    """Gradients of one group in one tensor.

    Attributes:
        tensor: all gradients, ``[W * S]``.
        buffer: its memory, from the pool or a custom collective; None if it is the gradient shard itself.
        views: the gradient of each parameter, in the order of the group's parameters.
    """

    __slots__ = ("_pool", "_written", "buffer", "tensor", "views")

    def __init__(self, tensor: torch.Tensor, views: list[torch.Tensor], buffer: Buffer | None, pool: Pool | None) -> None:
        self.tensor, self.views, self.buffer, self._pool = tensor, views, buffer, pool
        self._written: set[int] = set()
        """Parameters whose part of a newly allocated buffer has been written."""

    @classmethod
    def shard(cls, layout: Layout, names: tuple[str, ...], dtype: torch.dtype, device: torch.device) -> FlatGradient:
        """Return the gradient shard of a single rank, which holds everything."""
        whole = DBuffer(layout, torch.empty(layout.numel, dtype=dtype, device=device), rank=None)
        whole.zero_padding()
        return cls(whole.flat, [whole.tensor(name) for name in names], None, None)

    @classmethod
    def scratch(
        cls,
        layout: Layout,
        names: tuple[str, ...],
        dtype: torch.dtype,
        device: torch.device,
        pool: Pool,
        custom: ReduceScatter | None,
    ) -> FlatGradient:
        """Return a scratch buffer with zero padding and otherwise undefined contents, or memory of the ``custom`` collective."""
        nbytes = layout.numel * dtype.itemsize
        if custom is not None:
            buffer = Buffer(nbytes, device, comm.allocate(custom, layout.numel, dtype, device))
        else:
            buffer = pool.take(nbytes, device, layout.fingerprint, in_pieces=pool.spares(nbytes))
        whole = DBuffer(layout, buffer.flat(dtype), rank=None)
        if buffer.clean_for != layout.fingerprint:
            whole.zero_padding()
            buffer.clean_for = layout.fingerprint
        key = (layout.fingerprint, names, dtype)
        if key not in buffer.views:
            buffer.views[key] = [whole.tensor(name) for name in names]
        return cls(whole.flat, buffer.views[key], buffer, pool)

    def writes(self, index: int) -> None:
        """Tell the pool that the gradient of parameter ``index`` is about to be written for the first time."""
        if self.buffer is not None and self.buffer.unwritten and index not in self._written:
            assert self._pool is not None
            self._written.add(index)
            self._pool.written(self.buffer, self.views[index].nbytes)

    def writes_all(self) -> None:
        """Tell the pool that all of the buffer is about to be written."""
        if self.buffer is not None and self._pool is not None:
            self._pool.written(self.buffer, self.buffer.nbytes)

    def give_back(self) -> None:
        """Return the buffer to the pool."""
        give_back(self.buffer, self._pool)


def give_back(buffer: Buffer | None, pool: Pool | None) -> None:
    """Return a scratch buffer to ``pool``, unless its memory is a custom collective's."""
    if buffer is not None and pool is not None and not buffer.fixed:
        pool.give_back(buffer)
