"""Redistributed ragged tensors, and results computed from them, go back to ragged placements.

Plain tensors beside them count as whole only within torch's ``implicit_replication()``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import implicit_replication
from torch.utils._pytree import tree_map

from tests.dtensor.layouts import values, whole
from tests.ranks import on_processes, run_threads
from vescale_ray.dtensor import RaggedDTensor, distribute_tensor
from vescale_ray.dtensor.placement import RaggedShard
from vescale_ray.fsdp import stand_in_for_torch

FULL = values((6, 4))


def back(tensor: Any, placements: Any, expected: Tensor) -> None:
    """Assert that ``tensor``, redistributed to ``placements``, equals ``expected`` part by part."""
    found = tensor.redistribute(placements=placements)
    mesh = found.device_mesh
    assert type(found) is RaggedDTensor and found.placements == tuple(placements) and found.dtype == expected.dtype
    assert torch.equal(found.to_local(), distribute_tensor(expected, mesh, placements, src_data_rank=None).to_local())


def _every_way(rank: int, world: int, sizes: tuple[int, ...], home: list[Placement], ways: list[list[Placement]]) -> None:
    mesh = init_device_mesh("cpu", sizes)
    start: Any = distribute_tensor(FULL, mesh, home, src_data_rank=None)
    for way in ways:
        there = start.redistribute(placements=way)
        assert isinstance(there, DTensor) and there.placements == tuple(way)
        back(there, home, FULL)
        if any(p.is_partial() for p in way):
            continue
        computed: list[tuple[Any, Tensor]] = [
            (there * 2 + 1, FULL * 2 + 1),
            (there.detach().clone().mul_(3), FULL * 3),
            (torch.zeros_like(there), torch.zeros_like(FULL)),
            (there.to(torch.float64), FULL.double()),
            (there @ there.mT @ there, FULL @ FULL.mT @ FULL),
            (torch._foreach_add([there], 1)[0], FULL + 1),
            (there.mT.contiguous().mT, FULL),
            (there.redistribute(placements=[Replicate()] * mesh.ndim) / 4, FULL / 4),
            (copy.deepcopy(there), FULL),
            (there + start, FULL * 2),
        ]
        for tensor, expected in computed:
            back(tensor, home, expected)
        leaf = start.detach().clone().requires_grad_()
        (leaf.redistribute(placements=way) * 3).redistribute(placements=home).pow(2).sum().backward()
        assert torch.equal(leaf.grad.full_tensor(), 18 * FULL), way


def test_tensors_of_every_layout_go_back_to_ragged() -> None:
    home: list[Placement] = [RaggedShard((0,), (1, 0, 2))]
    ways: list[list[Placement]] = [[Replicate()], [Shard(0)], [Shard(1)], [Partial()], [RaggedShard((0, 1), (1, 3, 0))]]
    run_threads(3, _every_way, (3,), home, ways)
    home = [Replicate(), RaggedShard((0,), (1, 2))]
    ways = [[Replicate(), Replicate()], [Shard(0), Replicate()], [Replicate(), Shard(1)], [Partial(), Replicate()], [Shard(0), Shard(1)]]
    run_threads(4, _every_way, (2, 2), home, ways)


@on_processes(2)
def test_stand_in_builds_ragged_tensors_from_local_parts(rank: int, world: int) -> None:
    mesh, home = init_device_mesh("cpu", (world,)), [RaggedShard((0,), (1, 2))]
    start: Any = distribute_tensor(FULL, mesh, home, src_data_rank=None)
    torchs = DTensor.from_local, DTensor.redistribute
    with stand_in_for_torch():
        made = DTensor.from_local(start.to_local() * 2, mesh, start.placements, shape=start.shape, stride=start.stride())
        assert type(made) is RaggedDTensor and torch.equal(made.full_tensor(), FULL * 2)
        assert torch.equal(DTensor.from_local(start.to_local(), mesh, home).full_tensor(), FULL), "the shape follows from even one part"
        back(DTensor.from_local(FULL, mesh, [Replicate()]), home, FULL)
        rows = DTensor.from_local(FULL.chunk(world)[rank], mesh, [Shard(0)])
        back(rows, home, FULL)
        assert type(rows.redistribute(placements=[Replicate()])) is DTensor, "between torch's own it is torch's"
        leaf = start.to_local().detach().clone().requires_grad_()
        (DTensor.from_local(leaf, mesh, home) * FULL.sum()).sum().backward()
        assert torch.equal(leaf.grad, torch.full_like(leaf, FULL.sum().item()))
        with pytest.raises(ValueError, match=r"give shape=, the shape of the whole tensor"):
            DTensor.from_local(torch.ones(4), mesh, [RaggedShard((0, 1), (1, 1))])
        with pytest.raises(ValueError, match=r"holds \(2, 4\)|holds \(4, 4\)"):
            DTensor.from_local(torch.ones(3, 4), mesh, home, shape=torch.Size((6, 4)))
    assert (DTensor.from_local, DTensor.redistribute) == torchs, "undone"


WITH_PLAIN: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda d, p: d + p,
    "on the left": lambda d, p: p - d,
    "a row": lambda d, p: d * p[0],
    "a column": lambda d, p: d * p[:, :1],
    "larger": lambda d, p: d + p.expand(3, 6, 4),
    "in place": lambda d, p: d.clone().mul_(0.9).add_(p, alpha=0.1).addcdiv_(p, d),
    "foreach": lambda d, p: torch._foreach_mul([p, d], [d, p]),
    "stack": lambda d, p: torch.stack([d, p]),
    "where": lambda d, p: torch.where(d > p, d, p),
    "matmul": lambda d, p: p.mT @ d,
    "norm of a difference": lambda d, p: torch.linalg.vector_norm(d - p),
    "pending": lambda d, p: d.sum() * p,
    "gathered": lambda d, p: (d @ d.mT) + p.sum(1),
    "view": lambda d, p: d.mT + p.mT,
    "equal": lambda d, p: torch.equal(d, p),
}


@on_processes(2)
def test_plain_tensors_are_whole_in_implicit_replication_only(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    other = values((6, 4), seed=1) + 30
    for placements in ([RaggedShard((0,), (1, 2))], [RaggedShard((0, 1), (5, 1))]):
        mine = distribute_tensor(FULL, mesh, placements, src_data_rank=None)
        for name, function in WITH_PLAIN.items():
            expected = function(FULL, other)
            with implicit_replication():
                torch.testing.assert_close(tree_map(whole, function(mine, other)), expected, msg=lambda text, name=name: f"{name}: {text}")  # type: ignore[misc]
            with pytest.raises((ValueError, RuntimeError), match=r"a plain tensor of shape|would write a|ragged"):
                function(mine, other)
        with implicit_replication():
            p, q = mine.clone().requires_grad_(), FULL.clone().requires_grad_()
            (p * other).pow(2).sum().backward()
            (q * other).pow(2).sum().backward()
            assert p.grad is not None
            torch.testing.assert_close(whole(p.grad), q.grad)
