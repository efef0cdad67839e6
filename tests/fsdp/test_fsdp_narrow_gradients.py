"""Gradients that arrive in the compute dtype and are summed in a wider reduce dtype: the same bits as if they were cast before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.fsdp.towers import filled
from tests.ranks import on_processes, on_threads, run_gloo, run_threads
from vescale_ray.compat.fsdp import ReduceScatter
from vescale_ray.fsdp import MixedPrecisionPolicy, fully_shard
from vescale_ray.fsdp.buffers.memory import Pool
from vescale_ray.fsdp.communication.comm import Lane
from vescale_ray.fsdp.groups import reduction
from vescale_ray.fsdp.units.schedule import unit_of

CPU = torch.device("cpu")
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
STEPS = 3


def gradients_of(rank, size, world, dtype):
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(size * world, generator=generator) * 10.0 ** torch.randint(-3, 4, (size * world,), generator=generator)).to(dtype)


def summed(rank, world, size, arrives, dtype, to, factor):
    """This rank's part of the sum in rank order, cast before and not after the exchange."""
    parts = [gradients_of(r, size, world, arrives).view(world, size)[rank].to(dtype) for r in range(world)]
    total = parts[0] + parts[1]
    for part in parts[2:]:
        total += part
    return (total * factor).to(to)


def exchange(rank, world, size, arrives, dtype, to, factor, pairwise, staging=None):
    out, full = torch.empty(size, dtype=to), gradients_of(rank, size, world, arrives)
    lane, pool, group = Lane(CPU), Pool(CPU), dist.group.WORLD
    assert group is not None
    together = reduction.Sums(lane)
    how = {"together": together, "pairwise": pairwise, "staging": staging}
    pending = reduction.reduce_scatter(out, full, group, lane, pool, factor, dtype, **how)
    together.start()
    pending.wait()
    assert torch.equal(out, summed(rank, world, size, arrives, dtype, to, factor))


@pytest.mark.parametrize("world", [2, 3])
@on_processes()
def test_an_exchange_sums_narrow_gradients_like_wide_ones(rank, world):
    for size in (1, 7, 4097, 70001):
        for arrives, dtype, to in (
            (torch.bfloat16, torch.float32, torch.float32),
            (torch.float16, torch.float32, torch.float32),
            (torch.bfloat16, torch.float32, torch.bfloat16),
            (torch.bfloat16, torch.float64, torch.float64),
            (torch.float32, torch.float32, torch.float32),
        ):
            exchange(rank, world, size, arrives, dtype, to, 1.0 / 3.0, True)


def in_rank_order(target, full, *, op, group, async_op):
    """A reduce-scatter that sums in rank order, for a group whose own sum depends on the places of the elements."""
    world, size = group.size(), target.numel()
    parts = [torch.empty_like(target) for _ in range(world)]
    dist.all_to_all(parts, [row.contiguous() for row in full.view(world, size)], group=group)
    assert op == dist.ReduceOp.SUM
    total = parts[0] + parts[1]
    for part in parts[2:]:
        total += part
    target.copy_(total)
    return dist.barrier(group=group, async_op=True) if async_op else None


@pytest.mark.parametrize("staging", [1, 4096, 1 << 16])
def test_a_reduction_in_chunks_gives_the_bits_of_a_whole_one(staging, monkeypatch):
    sizes = []

    def scatter(target, full, **options):
        sizes.append(full.nbytes)
        return in_rank_order(target, full, **options)

    monkeypatch.setattr(dist, "reduce_scatter_single", scatter)
    for world, size in ((2, 5), (3, 1000), (4, 3001)):
        sizes.clear()
        run_threads(world, exchange, size, torch.bfloat16, torch.float32, torch.float32, 0.5, False, staging)
        assert max(sizes) <= max(staging, world * 128)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(24, 300), nn.Linear(300, 24)

    def forward(self, x, again=False):
        def run(x):
            return self.two(torch.tanh(self.one(x)))

        y = run(x)
        return checkpoint(run, y, use_reentrant=True) if again else y


def net():
    return filled(Net(), 0, 0.25)


def batch(k):
    return torch.randn(5, 24, generator=torch.Generator().manual_seed(k))


def alone(world):
    """The sum over steps of BF16 gradients on each rank, added in FP32, then over the ranks, divided by their number."""
    ranks = []
    for rank in range(world):
        sums = {}
        for step in range(STEPS):
            model = net().bfloat16()
            model(batch(step * world + rank).bfloat16()).float().square().sum().backward()
            for name, p in model.named_parameters():
                assert p.grad is not None
                sums[name] = sums[name] + p.grad.float() if name in sums else p.grad.float()
        ranks.append(sums)
    return {name: sum((one[name] for one in ranks[1:]), ranks[0][name]) / world for name in ranks[0]}


@pytest.mark.parametrize("world", [2, 4])
@on_threads()
def test_gradients_of_several_backwards_add_in_the_reduce_dtype(rank, world):
    model = fully_shard(net(), mp_policy=BF16)
    held = []
    for step in range(STEPS):
        model.set_requires_gradient_sync(step == STEPS - 1)
        model(batch(step * world + rank)).float().square().sum().backward()
        if step < STEPS - 1:
            held.append(unit_of(model).groups[0].grads._flat.tensor.dtype)
    for name, p in model.named_parameters():
        assert torch.equal(p.grad.full_tensor(), alone(world)[name]), name
    assert held == [torch.float32, torch.float32]


def peak(rank, world, policy):
    """Peak bytes of gathered parameters and gradients, in units of one layer's BF16 bytes."""
    side, layers = 256, 6
    model = nn.Sequential(*(nn.Linear(side, side, bias=False) for _ in range(layers)))
    for layer in model:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    for _ in range(3):
        unit = unit_of(model)
        assert unit is not None
        if unit.lanes is not None:
            unit.lanes.pool.peak_bytes = 0
        model(torch.ones(2, side)).float().sum().backward()
    unit = unit_of(model)
    assert unit is not None and unit.lanes is not None
    return unit.lanes.pool.peak_bytes / (side * side * 2)


def test_no_rank_holds_gradients_of_a_unit_in_the_wide_dtype():
    """Two units are gathered and one has gradients, or one is gathered, one has gradients and the other ranks' parts arrive."""
    assert max(run_gloo(4, peak, BF16)) <= 3


class InFloat32(ReduceScatter):
    """A reduce-scatter of the user's, which checks the dtype that it gets."""

    calls = 0

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        assert input_tensor.dtype == torch.float32
        self.calls += 1
        return dist.reduce_scatter_single(output_tensor, input_tensor, op=dist.ReduceOp.SUM, group=group, async_op=async_op)


@on_threads(2)
def test_a_reduce_scatter_of_the_users_gets_the_reduce_dtype(rank, world):
    """The user's collective comes after a backward without gradient sync, through another part of the unit."""
    model, custom = fully_shard(net(), mp_policy=BF16), InFloat32()
    model.set_requires_gradient_sync(False)
    model(batch(rank)).float().square().sum().backward()
    model.set_requires_gradient_sync(True)
    model.set_custom_reduce_scatter(custom)
    model(batch(rank)).float().square().sum().backward()
    assert custom.calls == 1


@on_threads(2)
def test_gradients_of_two_graph_tasks_are_both_counted(rank, world):
    """Two graph tasks give gradients of one parameter before the reduction."""
    ours, alone = fully_shard(net(), mp_policy=BF16), net().bfloat16()
    x = batch(rank)
    ours(x.requires_grad_(), again=True).float().square().sum().backward()
    alone(x.detach().bfloat16().requires_grad_(), again=True).float().square().sum().backward()
    for (name, p), (_, q) in zip(ours.named_parameters(), alone.named_parameters(), strict=True):
        mean = q.grad.float()
        dist.all_reduce(mean)
        assert torch.allclose(p.grad.full_tensor(), mean / world, rtol=2e-2, atol=2e-2 * mean.abs().max()), name


class Depth(nn.Module):
    """One layer, applied ``times`` times, after the first time under reentrant checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(24, 24)

    def forward(self, x: torch.Tensor, times: int) -> torch.Tensor:
        for k in range(times):
            x = checkpoint(self.layer, x, use_reentrant=True) if k else self.layer(x)
        return x * 1.0


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.deep = nn.Linear(24, 24), Depth()

    def forward(self, x: torch.Tensor, times: int) -> Any:
        return self.deep(self.first(x), times).float().square().sum()


@pytest.mark.parametrize("backwards", [[(1, 0), (1, 1)], [(0, 1), (0, 0), (1, 0)], [(2, 1)], [(1, 3), (0, 2)]])
@on_processes(2)
def test_ranks_that_sum_different_numbers_of_gradients(rank: int, world: int, backwards: list[tuple[int, int]]) -> None:
    """Each backward applies the unit's layer as often as given for each rank. All of them but the last are without sync."""
    ours, alone = filled(Two(), 0, 0.25), filled(Two(), 0, 0.25).bfloat16()
    fully_shard(ours.deep, mp_policy=BF16)
    fully_shard(ours, mp_policy=BF16)
    sums = [torch.zeros(p.shape) for p in alone.parameters()]
    for k, times in enumerate(backwards):
        ours.set_requires_gradient_sync(k == len(backwards) - 1)
        ours(batch(2 * k + rank), times[rank]).backward()
        alone(batch(2 * k + rank).bfloat16(), times[rank]).backward()
        for total, p in zip(sums, alone.parameters(), strict=True):
            total += p.grad if p.grad is not None else 0.0
            p.grad = None
    for total, (name, p) in zip(sums, ours.named_parameters(), strict=True):
        dist.all_reduce(total)
        assert p.grad is not None, name
        assert torch.allclose(p.grad.full_tensor(), total / world, rtol=2e-2, atol=2e-2 * float(total.abs().max())), name
