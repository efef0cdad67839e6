"""Clipping by the global norm gives torch's value, the same on every number of ranks."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor import distribute_tensor as torch_distribute

from tests.ranks import on_threads, run_gloo, run_threads
from vescale_ray.fsdp import fully_shard
from vescale_ray.optim import clip_grad_norm_

SHAPES = [(37, 20), (7, 11, 5), (3,), ()]


def gradients():
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator) * 10 ** (i - 1) for i, shape in enumerate(SHAPES)]


class Holder(nn.Module):
    def __init__(self):
        super().__init__()
        for i, shape in enumerate(SHAPES):
            setattr(self, f"p{i}", nn.Parameter(torch.zeros(shape)))

    def forward(self):
        return sum((p * g).sum() for p, g in zip(self.parameters(), gradients(), strict=True))


def clipped(rank, world, max_norm, norm_type):
    model = fully_shard(Holder(), mesh=init_device_mesh("cpu", (world,)))
    model().backward()
    norm = clip_grad_norm_(model.parameters(), max_norm, norm_type)
    return norm, [p.grad.full_tensor() for p in model.parameters()]


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_norm_and_gradients_match_torch_on_plain_tensors(norm_type, max_norm):
    alone = Holder()
    alone().backward()
    expected = nn.utils.clip_grad_norm_(alone.parameters(), max_norm, norm_type)
    for norm, grads in run_threads(3, clipped, max_norm, norm_type):
        torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
        for got, p in zip(grads, alone.parameters(), strict=True):
            torch.testing.assert_close(got, p.grad, rtol=1e-5, atol=1e-12)


def test_norm_is_bitwise_equal_on_any_number_of_ranks():
    norms = {world: {norm.item() for norm, _ in run_threads(world, clipped, 0.5, 2.0)} for world in (1, 2, 3, 4, 5)}
    assert len(set.union(*norms.values())) == 1, norms


def without_the_first(rank, world):
    model = fully_shard(Holder(), mesh=init_device_mesh("cpu", (world,)))
    model().backward()
    params = list(model.parameters())
    norm = clip_grad_norm_(params, 0.5, leave_out=params[:1])
    return norm, [p.grad.full_tensor() for p in params]


def test_omitted_parameters_are_neither_counted_nor_scaled():
    alone = Holder()
    alone().backward()
    first, *rest = alone.parameters()
    expected = nn.utils.clip_grad_norm_(rest, 0.5)
    norms = set()
    for world in (1, 3):
        for norm, grads in run_threads(world, without_the_first):
            norms.add(norm.item())
            torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
            torch.testing.assert_close(grads[0], gradients()[0], rtol=1e-6, atol=0)
            for got, p in zip(grads[1:], rest, strict=True):
                torch.testing.assert_close(got, p.grad, rtol=1e-5, atol=1e-12)
    assert len(norms) == 1


@on_threads(2)
def test_sharded_plain_and_torchs_own_dtensors_may_be_mixed(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    sharded = fully_shard(Holder(), mesh=mesh)
    sharded().backward()
    plain = nn.Parameter(torch.zeros(5))
    plain.grad = torch.full((5,), 2.0)
    theirs = nn.Parameter(torch_distribute(torch.zeros(8, 3), mesh, [Shard(0)]))
    theirs.grad = torch_distribute(torch.full((8, 3), 3.0), mesh, [Shard(0)])
    without = nn.Parameter(torch.zeros(2))
    norm = clip_grad_norm_([*sharded.parameters(), plain, theirs, without], 1e9)
    expected = math.sqrt(sum(g.double().square().sum().item() for g in gradients()) + 5 * 4 + 24 * 9)
    assert math.isclose(norm.item(), expected, rel_tol=1e-6)
    plain.grad.fill_(math.nan)
    with pytest.raises(RuntimeError, match="gradient norm is nan"):
        clip_grad_norm_([plain], 1.0, error_if_nonfinite=True)
    assert clip_grad_norm_([without], 1.0) == 0
    dist.barrier()


def some_without(rank, world):
    """Two meshes: rank 0 has no gradient on the first and rank 1 none on the second; then rank 1 has none at all."""
    row, grid = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (2, 1))
    first = nn.Parameter(torch_distribute(torch.zeros(4, 3), row, [Shard(0)], src_data_rank=None))
    second = nn.Parameter(torch_distribute(torch.zeros(4, 3), grid, [Shard(0), Shard(1)], src_data_rank=None))
    (second if rank == 0 else first).grad = torch.full_like(second if rank == 0 else first, 2.0)
    norms = [clip_grad_norm_([first, second], 1e9).item()]
    if rank == 1:
        first.grad = None
    norms.append(clip_grad_norm_([first, second], 1e9).item())
    second.grad = None
    return [*norms, clip_grad_norm_([first, second], 1.0).item()]


def test_ranks_lacking_different_gradients_get_one_norm():
    one, other = run_gloo(2, some_without, timeout=20)
    assert one == other == pytest.approx([math.sqrt(48.0), math.sqrt(24.0), 0.0], rel=1e-6)


@on_threads(4)
def test_torchs_clipping_over_two_meshes_names_ours(rank, world):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    meshes = (init_device_mesh("cpu", (4,), mesh_dim_names=("f",)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s")))
    for layer, mesh in zip(model, meshes, strict=True):
        fully_shard(layer, mesh=mesh)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match=r"different meshes, .*: move one with full_tensor\(\); .* use vescale_ray.optim.clip_grad_norm_"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert clip_grad_norm_(model.parameters(), 1.0).item() == pytest.approx(40**0.5)
