"""Operands of other shapes, and with placements that only torch knows, are joined as plain tensors are, or refused on every rank."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as torchs_distribute_tensor

from tests.dtensor.layouts import values, whole
from tests.ranks import on_processes
from vescale_ray.dtensor import distribute_tensor
from vescale_ray.dtensor.placement import RaggedShard

WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "copy_": lambda a, b: a.copy_(b),
    "add_": lambda a, b: a.add_(b),
    "_foreach_add_": lambda a, b: torch._foreach_add_([a], [b]),
    "_foreach_copy_": lambda a, b: torch._foreach_copy_([a], [b]),
    "_foreach_lerp_": lambda a, b: torch._foreach_lerp_([a], [b], 0.5),
    "_foreach_addcmul_": lambda a, b: torch._foreach_addcmul_([a], [b], [b]),
    "_foreach_add": lambda a, b: torch._foreach_add([a], [b]),
    "masked_fill_": lambda a, b: a.masked_fill_(b > 0, 0.0),
}
FITTING = [(4, 2), (2,), (1, 2), (4, 1), (1,)]
OTHERS = [(6,), (8,), (2, 4), (3, 2), (5, 2), (1, 4, 2), (0, 2), (2, 4, 2)]


@on_processes(2, timeout=120.0)
def test_operands_that_do_not_broadcast_change_nothing(rank: int, world: int) -> None:
    """The first elements of such an operand were taken."""
    mesh = init_device_mesh("cpu", (world,))
    layouts: list[Placement] = [Replicate(), Shard(0), RaggedShard((), (0, 1))]
    for shape, placement, units in itertools.product(FITTING + OTHERS, layouts, [(1, 0), (1, 3)]):
        full, other = values((4, 2)), values(shape) - 2
        for name, write in WRITES.items():
            target = distribute_tensor(full.clone(), mesh, [RaggedShard((0,), units)], src_data_rank=None)
            operand = distribute_tensor(other.clone(), mesh, [placement], src_data_rank=None)
            if shape in FITTING:
                expected = full.clone()
                write(expected, other)
                write(target, operand)
                assert torch.equal(whole(target), expected), (name, shape, placement, units)
            else:
                with pytest.raises((ValueError, RuntimeError)):
                    write(target, operand)
                assert torch.equal(whole(target), full), (name, shape, placement, units)


JOINS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "times a norm": lambda a, u, norm: u.flatten() * norm,
    "outer product with a norm": lambda a, u, norm: torch.outer(norm.view(1), u.flatten()),
    "sum": lambda a, u, norm: a.flatten() + u.flatten(),
    "copy_": lambda a, u, norm: a.clone().flatten().copy_(u.flatten()),
    "cat": lambda a, u, norm: torch.cat([a.flatten(), u.flatten()]),
}


PLACEMENTS: list[list[Placement]] = [
    [Shard(1), Replicate()],
    [Replicate(), Shard(1)],
    [Shard(1), Shard(1)],
    [Shard(1), Shard(0)],
    [Shard(0), Shard(0)],
]


@on_processes(4, timeout=120.0)
def test_flattened_columns_of_torchs_dtensors_are_joined_whole(rank: int, world: int) -> None:
    """A flattened ``Shard(1)`` is torch's ``_StridedShard``. It counted as whole, so that each rank computed with its part."""
    mesh = init_device_mesh("cpu", (2, 2))
    full, other = values((4, 4)), values((4, 4)) * 3 - 7
    ragged: Any = distribute_tensor(full.clone(), mesh, [Replicate(), RaggedShard((0,), (1, 3))], src_data_rank=None)
    for placements in PLACEMENTS:
        columns = torchs_distribute_tensor(other.clone(), mesh, placements, src_data_rank=None)
        for tensor in (ragged, ragged.redistribute(placements=[Replicate(), Replicate()])):
            for name, join in JOINS.items():
                found: Tensor = whole(join(tensor, columns, ragged.norm()))
                torch.testing.assert_close(found, join(full, other, full.norm()), msg=f"{name}, {placements}")
