"""Collectives of ragged tensors, into given memory; under ``torch.compile`` they become operations of the compiled graph.

``torch.distributed``'s collectives write in place, and the caller waits for them through a handle. A traced graph does not see the
handle, and would read the memory too early. While torch traces, its functional collectives replace them; these are complete when
they return.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vescale_ray.compat.distributed import are_we_tracing, functional

Group = dist.ProcessGroup | None


def all_to_all(out: Tensor, given: Tensor, out_sizes: Sequence[int], given_sizes: Sequence[int], group: Group) -> Any:
    """Send flat ``given``, cut into ``given_sizes`` per rank, into flat ``out``; return a handle to wait on, or None if complete."""
    if not _traced():
        return dist.all_to_all_single(out, given, list(out_sizes), list(given_sizes), group=group, async_op=True)
    out.copy_(functional.all_to_all_single(given, list(out_sizes), list(given_sizes), _named(group)))
    return None


def all_gather(out: Tensor, given: Tensor, group: Group) -> Any:
    """Gather equal ``given`` of all ranks in rank order; returns a handle as :func:`all_to_all` does."""
    if not _traced():
        return dist.all_gather_single(out, given, group=group, async_op=True)
    out.copy_(functional.all_gather_tensor(given, 0, _named(group)))
    return None


def reduce_scatter(out: Tensor, given: Tensor, group: Group) -> Any:
    """Reduce by a sum and keep this rank's equal part; returns a handle as :func:`all_to_all` does."""
    if not _traced():
        return dist.reduce_scatter_single(out, given, op=dist.ReduceOp.SUM, group=group, async_op=True)
    out.copy_(functional.reduce_scatter_tensor(given, "sum", 0, _named(group)))
    return None


def broadcast(tensor: Tensor, index: int, group: dist.ProcessGroup) -> Any:
    """Send ``tensor`` of the rank at ``index`` of the group to all; returns a handle as :func:`all_to_all` does."""
    source = dist.get_global_rank(group, index)
    if not _traced():
        return dist.broadcast(tensor, src=source, group=group, async_op=True)
    tensor.copy_(functional.broadcast(tensor, source, group))
    return None


def all_reduce(tensor: Tensor, op: str, group: Group) -> None:
    """Reduce ``tensor`` in place: ``op`` is "sum", "max" or "min"."""
    if not _traced():
        dist.all_reduce(tensor, op=_OPS[op], group=group)
        return
    tensor.copy_(functional.all_reduce(tensor, op, _named(group)))


_OPS: dict[str, Any] = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def _traced() -> bool:
    return torch.compiler.is_compiling() or are_we_tracing()


def _named(group: Group) -> dist.ProcessGroup:
    if group is None:
        world = dist.group.WORLD
        assert world is not None
        return world
    return group


def in_parameter_order(states: MutableMapping[Any, Any], parameters: Iterable[Tensor]) -> None:
    """Reorder an optimizer's ``states`` by the position of their parameters; states of no parameter come last.

    States that are gathered one by one must come in the same order on every rank. Their order of creation can differ between ranks: by
    the division of buffers, or by a set of parameters that the optimizer was given.
    """
    position = {id(parameter): index for index, parameter in enumerate(parameters)}
    for key in sorted(states, key=lambda key: position.get(id(key), len(position))):
        states[key] = states.pop(key)
