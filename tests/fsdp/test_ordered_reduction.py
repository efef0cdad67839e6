"""Gradients summed in a fixed order. Every number of ranks gives the bits of one process that adds one micro-batch after the other."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.fsdp.towers import filled
from tests.ranks import on_threads, run_gloo, run_threads
from vescale_ray.compat.fsdp import ProcessGroupAllocReduceScatter
from vescale_ray.errors import BadArgument
from vescale_ray.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from vescale_ray.fsdp.layouts.phases import PhaseError

BATCHES = 7


class Net(nn.Module):
    """Odd sizes, so that cuts fall inside tensors. Only every third micro-batch uses ``rare``."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.rare = nn.Linear(13, 37), nn.Linear(37, 11, bias=False), nn.Linear(11, 11)

    def forward(self, x, rarely):
        y = self.two(torch.tanh(self.one(x)))
        return (self.rare(y) if rarely else y).square().sum()


def build():
    return filled(Net(), 0, 0.25)


def micro_batch(k):
    return torch.randn(3, 13, generator=torch.Generator().manual_seed(k)) * 10.0 ** (k % 3)


def alone(dtype=torch.float32):
    """Gradients of one process: those of each micro-batch in ``dtype``, added one after the other in FP32."""
    sums = {}
    for k in range(BATCHES):
        model = build().to(dtype)
        model(micro_batch(k).to(dtype), k % 3 == 0).backward()
        for name, p in model.named_parameters():
            if p.grad is not None:
                sums[name] = sums[name] + p.grad.float() if name in sums else p.grad.float()
    return {name: g.numpy() for name, g in sums.items()}


def ordered(rank, world, options=None, units=True):
    model = build()
    shared = {"mesh": init_device_mesh("cpu", (world,)), **(options or {})}
    for child in (model.one, model.two) if units else ():
        fully_shard(child, **shared)
    fully_shard(model, **shared)
    model.set_ordered_reduction()
    model.set_reduce_scatter_unused_params(True)
    for module in (model, model.one, model.two) if units else (model,):
        module.set_gradient_divide_factor(1.0)
    for turn in range(-(-BATCHES // world)):
        k = turn * world + rank
        model.set_contributes(k < BATCHES)
        model(micro_batch(k), k % 3 == 0).backward()
    return {name: p.grad.full_tensor().numpy() for name, p in model.named_parameters()}


def same(results, expected):
    for got in results:
        assert got.keys() == expected.keys()
        for name in expected:
            assert got[name].dtype == expected[name].dtype and got[name].tobytes() == expected[name].tobytes(), name


@pytest.mark.parametrize("world", [1, 3, 8])
def test_every_number_of_ranks_adds_up_as_one_process_does(world):
    same(run_threads(world, ordered), alone())


@pytest.mark.parametrize("units", [True, False])
def test_gloo_adds_up_gradients_as_one_process_does(units):
    same(run_gloo(3, ordered, None, units), alone())


def test_bf16_gradients_are_added_up_in_fp32():
    expected = alone(torch.bfloat16)
    policy = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)}
    same(run_threads(3, ordered, policy), expected)


def test_cpu_offloaded_gradients_add_up_as_one_process_does():
    same(run_threads(2, ordered, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}), alone())


def earlier_ones_count(rank, world):
    """Rank 1 contributes only to the backward without gradient sync."""
    model = fully_shard(build(), mesh=init_device_mesh("cpu", (world,)))
    model.set_ordered_reduction()
    model.set_gradient_divide_factor(1.0)
    for turn in range(2):
        model.set_requires_gradient_sync(turn == 1)
        model.set_contributes(turn == 0 or rank == 0)
        model(micro_batch(turn * world + rank), True).backward()
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}


def test_rank_that_stops_contributing_keeps_earlier_gradients():
    expected = build()
    for k in range(3):
        expected(micro_batch(k), True).backward()
    for got in run_threads(2, earlier_ones_count):
        for name, p in expected.named_parameters():
            torch.testing.assert_close(got[name], p.grad)


def plain(rank, world):
    model = fully_shard(build(), mesh=init_device_mesh("cpu", (world,)))
    model.set_gradient_divide_factor(1.0)
    for turn in range(-(-BATCHES // world)):
        k = turn * world + rank
        model.set_requires_gradient_sync(turn == BATCHES // world)
        loss = model(micro_batch(k), k % 3 == 0)
        (loss if k < BATCHES else loss * 0.0).backward()
    return {name: p.grad.full_tensor().numpy() for name, p in model.named_parameters() if p.grad is not None}


def test_bits_depend_on_rank_count_without_ordered_reduction():
    expected = alone()
    got = run_threads(2, plain)[0]
    assert any(got[name].tobytes() != expected[name].tobytes() for name in got), "the tests above show nothing"


def scaled(rank, world):
    """Use a divisor, and a second step on top of kept gradients."""
    model = fully_shard(build(), mesh=init_device_mesh("cpu", (world,)))
    model.set_ordered_reduction()
    model.set_gradient_divide_factor(8.0)
    for _ in range(2):
        for turn in range(6 // world):
            model(micro_batch(turn * world + rank), True).backward()
    return {name: p.grad.full_tensor().numpy() for name, p in model.named_parameters()}


def test_divided_and_kept_gradients_equal_those_of_one_rank():
    expected = run_threads(1, scaled)
    same([*run_threads(2, scaled), *run_threads(3, scaled)], expected[0])


@on_threads(2)
def test_ordered_reduction_refuses_replicas_and_custom_scatters(rank, world):
    model = fully_shard(build(), mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
    with pytest.raises(BadArgument, match="can't be summed in a fixed order with a mesh of replicas"):
        model.set_ordered_reduction()
    model.set_ordered_reduction(False)
    model = fully_shard(build(), mesh=init_device_mesh("cpu", (2,)))
    model.set_ordered_reduction()
    with pytest.raises(BadArgument, match="sums gradients in a fixed order"):
        model.set_custom_reduce_scatter(ProcessGroupAllocReduceScatter(init_device_mesh("cpu", (2,)).get_group()))
    handle = model.two.register_forward_hook(lambda *_: model.set_ordered_reduction(False))
    with pytest.raises(PhaseError, match="set its order of summation between steps"):
        model(micro_batch(0), True)
    handle.remove()
