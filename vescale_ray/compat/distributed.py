"""Private names of ``torch.distributed``: process groups and their collectives. Importing them imports no DTensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from vescale_ray.compat import need, private_names

with private_names():
    # A back end's collective with its own time limit; torch.distributed's collectives take none.
    from torch._C._distributed_c10d import AllgatherOptions, BarrierOptions

    # While torch traces, collectives must be operations of the graph; the first use of a result waits for it.
    from torch.distributed import _functional_collectives as functional
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed._functional_collectives import _are_we_tracing as are_we_tracing

    # Ends NCCL kernels of a group that has lost a rank; destroy_process_group would wait for them.
    from torch.distributed.distributed_c10d import _abort_process_group as abort_process_group

    # Several collectives as one launch of NCCL; the public ones for lists copy out of a flat temporary.
    from torch.distributed.distributed_c10d import _coalescing_manager as coalescing_manager

    # The default group as an object; it raises one sentence if there is none.
    from torch.distributed.distributed_c10d import _get_default_group as get_default_group

    # The store with which a group was made: votes on a checkpoint outlive one collective.
    from torch.distributed.distributed_c10d import _get_process_group_store as get_process_group_store

    need("torch.distributed.distributed_c10d", "_world")  # its number of groups names the next one
    need("torch.distributed.ProcessGroup", "_get_backend", "_device_types")  # gloo's half and NCCL's half of one group
    need("torch.distributed.ProcessGroupGloo", "_Options")  # the number of worker threads, which init_process_group does not accept
    need("torch._C._distributed_c10d.Backend.Options", "_timeout")  # the limit of a group's collectives
    need("torch.distributed.device_mesh.DeviceMesh", "_flatten", "_unflatten", "_concatenate")  # meshes of several parallelisms


def all_gather_many(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], *, group: dist.ProcessGroup, async_op: bool = False) -> list[Any]:
    """Run all-gathers of ``(output, input)`` as one call of the back end (NCCL: one launch). Returns the work to wait for."""
    if len(pairs) == 1:
        work = dist.all_gather_single(*pairs[0], group=group, async_op=async_op)
        return [] if work is None else [work]
    with coalescing_manager(group=group, async_ops=async_op) as running:
        for output, input in pairs:
            dist.all_gather_single(output, input, group=group, async_op=async_op)
    return list(running.works)


def reduce_scatter_many(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], *, op: Any, group: dist.ProcessGroup, async_op: bool = False
) -> list[Any]:
    """Run reduce-scatters of ``(output, input)`` as one call of the back end (NCCL: one launch). Returns the work to wait for."""
    if len(pairs) == 1:
        work = dist.reduce_scatter_single(*pairs[0], op=op, group=group, async_op=async_op)
        return [] if work is None else [work]
    with coalescing_manager(group=group, async_ops=async_op) as running:
        for output, input in pairs:
            dist.reduce_scatter_single(output, input, op=op, group=group, async_op=async_op)
    return list(running.works)


def count_groups_anew() -> None:
    """Name the next group as a fresh process would.

    Ranks meet under a name that torch makes from its number of groups. Torch resets this number when the default group is destroyed, but
    not when forming the group fails. Ranks with different numbers would then never meet again.
    """
    distributed_c10d._world.group_count = 0  # looked up at each call: torch's tests with a thread per rank replace it
