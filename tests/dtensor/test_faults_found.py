"""Faults that a review found: each was silently wrong, a crash, or an error on one rank only. Processes on gloo."""

from __future__ import annotations

import math
import re
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.ranks import run_gloo
from vescale_ray import fully_shard
from vescale_ray.dtensor import RaggedDTensor, RaggedFallbackWarning, RaggedShard, distribute_tensor
from vescale_ray.optim import clip_grad_norm_
from vescale_ray.state_dict import StateDictOptions, set_model_state_dict

UNITS = (1, 0, 3)


def ragged(full: torch.Tensor) -> Any:
    return distribute_tensor(full.clone(), init_device_mesh("cpu", (3,)), [RaggedShard((0,), UNITS)], src_data_rank=None)


def whole(value: Any) -> torch.Tensor:
    result: torch.Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return result


def values() -> torch.Tensor:
    return torch.arange(40.0).reshape(8, 5) - 50.0


def reductions(rank: int, world: int) -> None:
    for row in (0, 7):  # NaN on the first rank, and on the last
        full = torch.ones(8, 5)
        full[row, 0] = math.nan
        x = ragged(full)
        for value in (x.max(), x.min(), torch.linalg.vector_norm(x, math.inf), torch._foreach_norm([x], math.inf)[0]):
            assert whole(value).isnan() and math.isnan(value.item())
        p = nn.Parameter(ragged(torch.ones(8, 5)))
        p.grad = x
        with pytest.raises(RuntimeError, match="not clipped"):
            clip_grad_norm_([p], 1.0, norm_type=math.inf, error_if_nonfinite=True)
    full, x = values(), ragged(values())
    n, m = x.norm(), full.norm()
    for ours, plain in (
        (torch.stack([n, -n]), torch.stack([m, -m])),
        (torch.cat([n.view(1), -n.view(1)]), torch.stack([m, -m])),
        (torch.stack([n, x.sum(), x.max()]), torch.stack([m, full.sum(), full.max()])),
        (x.min().to(torch.int64), full.min().to(torch.int64)),
        ((x * 0.1).sum().to(torch.int64), (full * 0.1).sum().to(torch.int64)),
        (x.max().to(torch.bfloat16), full.max().to(torch.bfloat16)),
    ):
        torch.testing.assert_close(whole(ours), plain)


def versions(rank: int, world: int) -> None:
    def step(p: Any) -> None:
        optimizer = torch.optim.SGD([p], lr=0.1, foreach=True)
        optimizer.step()

    for write in (
        step,
        lambda p: torch._foreach_zero_([p]),
        lambda p: torch._foreach_copy_([p], [p.detach() * 2]),
        lambda p: torch._amp_foreach_non_finite_check_and_unscale_([p], torch.zeros(1), torch.ones(1)),
    ):
        p = nn.Parameter(ragged(values()))
        y = (p * p).sum()
        y.backward(retain_graph=True)
        with torch.no_grad():
            write(p)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()


def refusals(rank: int, world: int) -> None:
    x = ragged(values())
    with pytest.raises(RuntimeError, match="to_local"):
        x.share_memory_()
    with pytest.raises(RuntimeError, match="to_local"):
        torch.from_dlpack(x)
    mesh = init_device_mesh("cpu", (3,))
    local = torch.zeros(2, 5) if rank != 2 else torch.zeros(5, 5)
    with pytest.raises(ValueError, match=r"local tensor has shape|the rank at \(1,\) of the mesh: local tensor has shape"):
        RaggedDTensor.from_local(local, mesh, [RaggedShard((0,), UNITS)], shape=(8, 5), run_check=True)
    good = ragged(values()).to_local()
    shape = (8, 5)
    RaggedDTensor.from_local(good, mesh, [RaggedShard((0,), UNITS)], shape=shape, run_check=True)
    with pytest.raises(ValueError, match=r"torch.float64"):
        RaggedDTensor.from_local(good.double() if rank else good, mesh, [RaggedShard((0,), UNITS)], shape=shape, run_check=True)


def state_dicts(rank: int, world: int) -> None:
    model: Any = fully_shard(nn.Linear(4, 6))
    before = {name: p.to_local().clone() for name, p in model.named_parameters()}
    full = {"weight": torch.ones(6, 4), "bias": torch.ones(6)}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    for bad, why in (
        ({**full, "bias": model.bias.detach()}, "'bias' is a RaggedDTensor"),
        ({**full, "bias": torch.ones(6).to_sparse()}, "'bias' is torch.sparse_coo"),
        ({**full, "bias": torch.ones(6, device="meta")}, "'bias' is .* on meta"),
        ({**full, "extra": lambda: None}, "pickle"),
    ):
        with pytest.raises(ValueError, match=re.compile(f"can't be loaded: .*{why}")):
            set_model_state_dict(model, bad if rank == 0 else {}, options=options)
        assert all(torch.equal(p.to_local(), before[name]) for name, p in model.named_parameters())
    set_model_state_dict(model, full if rank == 0 else {}, options=options)
    assert all((whole(p) == 1).all() for p in model.parameters())


def run(function: Any) -> None:
    run_gloo(3, quietly, function)


def quietly(rank: int, world: int, function: Any) -> None:
    warnings.simplefilter("ignore", RaggedFallbackWarning)
    function(rank, world)


@pytest.mark.parametrize("function", [reductions, versions, refusals, state_dicts])
def test_what_was_wrong_is_right_or_refused_on_every_rank(function: Any) -> None:
    run(function)


ODD = [((0,), (1.5, 2.5, 1)), ((0.7,), (1, 2, 1)), ((0,), "123"), (0, (1, 2, 1)), ((0,), ()), ((0,), (0, 0))]


@pytest.mark.parametrize(("dims", "units"), ODD)
def test_placements_of_anything_but_whole_numbers_are_refused(dims: Any, units: Any) -> None:
    with pytest.raises(ValueError, match="give"):
        RaggedShard(dims, units)
