"""Reduce-scatters that send FP8 or BF16, against sums in FP64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.profiler import ProfilerActivity, profile

from tests.fsdp.transformer import part
from tests.quantization.test_fp8 import E4M3
from tests.ranks import on_threads, run_gloo
from vescale_ray.fsdp import LowPrecisionReduceScatter, fully_shard
from vescale_ray.fsdp.communication import low_precision
from vescale_ray.fsdp.units.schedule import unit_of
from vescale_ray.planner import step_buffers
from vescale_ray.quantization.fp8 import round_stochastically

WORLD = dist.distributed_c10d._get_default_group
PART = 300
"""Elements of a rank's part; no multiple of the 128 that share a scale."""


def gradients(rank: int, world: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randn(world * PART, generator=generator)


def reduced(comm: Any, group: dist.ProcessGroup, rank: int, world: int, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
    out = torch.empty(PART)
    assert comm(out, gradients(rank, world), group, op) is None
    return out


@pytest.mark.parametrize(("wire", "stochastic", "bound"), [("fp8", False, 1 / 16), ("fp8", True, 1 / 8), ("bfloat16", True, 1 / 128)])
@on_threads(3)
def test_a_sum_is_within_the_rounding_of_its_terms(rank: int, world: int, wire: Any, stochastic: bool, bound: float) -> None:
    terms = torch.stack([gradients(r, world).view(world, PART)[rank] for r in range(world)]).double()
    least = 4.5 * 2**-15 if wire == "fp8" else 0.0  # elements much smaller than the largest of their block
    got = reduced(LowPrecisionReduceScatter(wire, stochastic=stochastic), WORLD(), rank, world)
    assert ((got - terms.sum(0)).abs() <= bound * terms.abs().sum(0) + world * least).all()
    mean = reduced(LowPrecisionReduceScatter(wire, stochastic=False), WORLD(), rank, world, dist.ReduceOp.AVG)
    assert ((mean - terms.mean(0)).abs() <= bound * terms.abs().mean(0) + least).all()


@on_threads(2)
def test_stochastic_rounding_is_right_on_average(rank: int, world: int) -> None:
    exact = sum(gradients(r, world).view(world, PART)[rank].double() for r in range(world))
    for wire in ("fp8", "bfloat16"):
        comm = LowPrecisionReduceScatter(wire, seed=3)
        runs = torch.stack([reduced(comm, WORLD(), rank, world) for _ in range(400)]).double()
        one, mean = (runs[0] - exact).norm(), (runs.mean(0) - exact).norm()
        assert mean < one / 12, f"{wire}: the error of the mean of 400 is {mean / one:.3f} of one's; 1/20 is expected"


def test_stochastic_rounding_gives_neighbours_in_proportion() -> None:
    numbers = torch.tensor(E4M3, dtype=torch.float64)
    x = torch.cat((torch.linspace(-440, 440, 997), torch.linspace(-0.02, 0.02, 998), numbers.float(), -numbers.float()))
    noise = (torch.arange(4096) + 0.5) / 4096
    found = round_stochastically(x[:, None].expand(-1, 4096), noise.expand(len(x), -1)).double()
    assert torch.isin(found.abs(), numbers).all()
    assert torch.equal(found.float().to(torch.float8_e4m3fn).double(), found)
    step = found.amax(1) - found.amin(1)
    assert ((found - x[:, None].double()).abs().amax(1) <= step).all()
    assert ((found.mean(1) - x).abs() <= step / 4000).all()


@on_threads(2)
def test_inf_and_nan_arrive_as_nan(rank: int, world: int) -> None:
    for wire in ("fp8", "bfloat16"):
        for bad in (math.inf, math.nan):
            for stochastic in (False, True):
                full, out = torch.ones(world * PART), torch.empty(PART)
                if rank == 0:
                    full[PART - 1] = full[-1] = bad
                LowPrecisionReduceScatter(wire, stochastic=stochastic)(out, full, WORLD(), dist.ReduceOp.SUM)
                assert not out[-1].isfinite() and out[:128].eq(2).all()


def net() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(40, 96), nn.Tanh(), nn.Linear(96, 50))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 6)
    return model


@pytest.mark.parametrize(("how", "wire"), [("ours", "bfloat16"), ("replicas", "fp8"), ("torch", "fp8")])
@on_threads(4)
def test_gradients_of_a_model_follow_exact_ones(rank: int, world: int, how: str, wire: Any) -> None:
    mesh = (
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if how == "replicas" else init_device_mesh("cpu", (world,))
    )
    shard: Any = torch_fully_shard if how == "torch" else fully_shard
    alone, comm = net(), LowPrecisionReduceScatter(wire)
    model: Any = net()
    for unit in (model[0], model[2], model):
        shard(unit, mesh=mesh)
    for unit in (model[0], model[2], model):
        unit.set_custom_reduce_scatter(comm)
    batch = torch.randn(64, 40, generator=torch.Generator().manual_seed(9))
    for _ in range(2):  # gradients add up
        model(part(batch, rank, world)).square().mean().backward()
        alone(batch).square().mean().backward()
    for (name, got), exact in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert got.grad is not None and exact.grad is not None
        error = float((got.grad.full_tensor() - exact.grad).norm() / exact.grad.norm())  # type: ignore[attr-defined]
        assert 0.0 < error < (0.06 if wire == "fp8" else 0.004), f"{name}: {error}"


def test_processes_agree_and_leave_torchs_generator_alone() -> None:
    run_gloo(2, agrees)


def agrees(rank: int, world: int) -> None:
    model: Any = net()
    comm = LowPrecisionReduceScatter(seed=1)
    for unit in (model[0], model[2], model):
        fully_shard(unit)
        unit.set_custom_reduce_scatter(comm)
    before = torch.get_rng_state()
    model(torch.ones(8, 40)).square().mean().backward()
    assert torch.equal(torch.get_rng_state(), before)
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).full_tensor()  # type: ignore[attr-defined]
    norms = torch.empty(world)
    dist.all_gather_into_tensor(norms, norm.view(1))
    assert norms.unique().numel() == 1


@on_threads(3)
def test_gradients_arrive_in_the_compute_dtype(rank: int, world: int) -> None:
    """Half the memory, and the same bits as gradients that were cast before."""
    batch = torch.randn(12, 40, generator=torch.Generator().manual_seed(9))
    found = []
    for narrow in (True, False):
        model: Any = net()
        comm = LowPrecisionReduceScatter(stochastic=False)
        comm.narrow = narrow
        for unit in (model[0], model[2], model):
            fully_shard(unit, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
            unit.set_custom_reduce_scatter(comm)
        (group,) = unit_of(model[0]).groups  # type: ignore[union-attr]
        assert group.grads.buffer_dtype == (torch.bfloat16 if narrow else torch.float32)
        for syncs in (True, False, True):
            model.set_requires_gradient_sync(syncs)
            model(part(batch, rank, world)).float().square().mean().backward()
        found.append([p.grad.to_local().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) and a.abs().sum() > 0 for a, b in zip(*found, strict=True) if a.numel())


@pytest.mark.parametrize("wire", ["fp8", "bfloat16"])
def test_an_exchange_takes_the_memory_that_the_plan_counts(wire: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_precision, "GRADIENT_CHUNK", 1 << 12)
    monkeypatch.setattr(step_buffers, "GRADIENT_CHUNK", 1 << 12)
    comm, parts, out = LowPrecisionReduceScatter(wire), torch.randn(3, (1 << 16) + 7).to(torch.bfloat16), torch.empty((1 << 16) + 7)

    def peak(work: Callable[[], Any]) -> tuple[int, Any]:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
            kept = work()
        changes = sorted((e.start_ns(), e.nbytes()) for e in run.profiler.kineto_results.events() if e.name() == "[memory]")
        return max(itertools.accumulate(nbytes for _, nbytes in changes)), kept

    rounding, sent = peak(lambda: comm._encoded(parts, 0))
    summing, _ = peak(lambda: comm.sum_rows(sent, out, 1.0))
    told = step_buffers.exchange_bytes(out.numel(), 3, wire) - out.nbytes
    assert 0.7 * told < max(rounding, sent.nbytes + summing) + sent.nbytes <= told


@pytest.mark.parametrize("wire", ["fp8", "bfloat16"])
@on_threads(2)
def test_parts_without_elements_are_sums_of_none(rank: int, world: int, wire: Any) -> None:
    out = torch.empty(0)
    LowPrecisionReduceScatter(wire)(out, torch.empty(0), WORLD(), dist.ReduceOp.SUM)


def test_what_cannot_be_reduced_is_refused() -> None:
    with pytest.raises(ValueError, match=r"LowPrecisionReduceScatter\('fp4'\): give 'fp8' or 'bfloat16'"):
        LowPrecisionReduceScatter("fp4")  # type: ignore[arg-type]
    run_gloo(2, refuses)


def refuses(rank: int, world: int) -> None:
    with pytest.raises(ValueError, match="only SUM and AVG have a low precision"):
        LowPrecisionReduceScatter()(torch.empty(2), torch.ones(4), WORLD(), dist.ReduceOp.MAX)
