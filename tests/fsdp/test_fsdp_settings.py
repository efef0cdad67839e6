"""Settings of a unit: divide factor, accumulation, replicas, neighbours, custom collectives, prefetch, hooks."""

from __future__ import annotations

import math
import threading
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from tests.fsdp.branches import Branches
from tests.fsdp.towers import Tower, alike, grads, inputs, same, seeded, shard_tower
from tests.fsdp.transformer import full
from tests.fsdp.units import unit_of
from tests.ranks import on_threads, run_gloo, run_threads
from vescale_ray.fsdp import explain, fully_shard, share_comm_ctx
from vescale_ray.fsdp.communication import comm

# -- switches --------------------------------------------------------------------------------------------------------------


@on_threads(3)
def test_the_divide_factor_is_torchs(rank, world):
    for factor in (1.0, 3.0):
        models = [fully_shard(seeded(lambda: nn.Linear(20, 7))), torch_fully_shard(seeded(lambda: nn.Linear(20, 7)))]
        for model in models:
            model.set_gradient_divide_factor(factor)
            if model is models[1]:
                model.set_force_sum_reduction_for_comms(True)
            model(inputs(rank, world)).square().mean().backward()
        same(grads(models[0]), grads(models[1]))
    with pytest.raises(ValueError, match="divide factor is 0"):
        models[0].set_gradient_divide_factor(0)


@on_threads(2)
def test_gradients_accumulate_without_communication(rank, world):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for options in ({}, {"mp_policy": policy}):
        models = [shard_tower(seeded(Tower), how, **options) for how in (fully_shard, torch_fully_shard)]
        for keep in (True, False):
            for model in models:
                model.zero_grad()
                for micro in range(3):
                    last = micro == 2
                    model.set_requires_gradient_sync(last)
                    model.set_reshard_after_backward(keep or last)
                    model.set_is_last_backward(last)
                    model(inputs(rank, world, micro)).float().square().mean().backward()
                    assert last or all(p.grad is None for p in (model.reshard() or model).head.parameters())
            same(grads(models[0]), grads(models[1]), 1e-5 if not options else 2e-2)


@on_threads(4)
def test_hsdp_shards_inside_and_sums_over_replicas(rank, world):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    ours, alone = shard_tower(seeded(Tower), mesh=mesh), seeded(Tower)
    assert 0 < ours.layers[0][0].weight.to_local().numel() < ours.layers[0][0].weight.numel()
    for late in (False, True):
        for model in (ours, alone):
            model.zero_grad()
        for micro in range(2):
            if late:
                ours.set_requires_all_reduce(micro == 1)
            ours(inputs(rank, world, micro)).square().mean().backward()
            alone(inputs(0, 1, micro)).square().mean().backward()
        same(grads(ours), grads(alone))
    optimizer = torch.optim.AdamW(ours.parameters())
    nn.utils.clip_grad_norm_(ours.parameters(), 0.1)
    optimizer.step()


def to_neighbours(rank, world, shape, size, options):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    ours, alone = shard_tower(seeded(Tower), mesh=mesh, reshard_after_forward=size, **options), seeded(Tower)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, alone)]
    bound = 5e-2 if options else 1e-5
    for step in range(3):
        for model, r, w in ((ours, rank, world), (alone, 0, 1)):
            if step == 1:
                with torch.no_grad():
                    model(inputs(r, w, 9, rows=24))
            if step == 2:
                model(inputs(r, w, 9, rows=24))  # without a backward
            with GatherSizes() as sizes:
                model(inputs(r, w, step, rows=24)).float().square().mean().backward()
            if model is ours:
                backward = sizes.of[6:] if step == 0 else sizes.of[-6:]
                assert backward == [size] * 6, sizes.of
        same(grads(ours), grads(alone), bound)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert f"to groups of {size} ranks" in str(explain(ours))
    ours.set_reshard_after_forward(True)
    with GatherSizes() as sizes:
        ours(inputs(rank, world, rows=24)).float().sum().backward()
    assert set(sizes.of) == {shape[-1]}
    return True


class GatherSizes:
    """Records the sizes of the groups in which this thread's all-gathers ran."""

    here = threading.local()

    def __enter__(self):
        self.of = type(self).here.sizes = []
        return self

    def __exit__(self, *_):
        type(self).here.sizes = None


BF16 = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}


@pytest.mark.parametrize(("shape", "size", "options"), [((4,), 2, BF16), ((6,), 3, {}), ((2, 4), 2, {})])
def test_parameters_may_stay_with_neighbours_until_backward(shape, size, options, monkeypatch):
    def gather(out, shard, group, lane, **options):
        if getattr(GatherSizes.here, "sizes", None) is not None:
            GatherSizes.here.sizes.append(group.size())
        return original(out, shard, group, lane, **options)

    original = comm.all_gather
    monkeypatch.setattr(comm, "all_gather", gather)
    assert all(run_threads(math.prod(shape), to_neighbours, shape, size, options))


def held_while_gathered(rank, world, gather):
    ours = shard_tower(seeded(Tower), reshard_after_forward=2)
    ours(inputs(rank, world, 0))
    dist.barrier()
    comm.all_gather = gather
    unit = unit_of(ours.layers[1])
    part = weakref.ref(unit.groups[0]._part)
    unit.start_unshard(backward=True)
    return part() is not None


def test_all_gather_input_is_held_until_the_gather_completes(monkeypatch):
    """On an accelerator the all-gather still reads its input when the call returns, and no other object holds that memory."""
    monkeypatch.setattr(comm, "all_gather", comm.all_gather)
    assert all(run_threads(4, held_while_gathered, lambda *_, **__: comm.Done()))


class CustomGather(AllGather):
    """A custom all-gather that counts its calls, allocates its outputs, and returns work to wait for if ``later``."""

    def __init__(self, later):
        self.later, self.calls, self.given = later, 0, []

    def allocate(self, size, *, dtype, device):
        self.given.append(torch.full(size, torch.nan, dtype=dtype, device=device))
        return self.given[-1]

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        self.calls += 1
        assert any(output_tensor.data_ptr() == given.data_ptr() for given in self.given)
        return dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=self.later and async_op)


class TooMuch(CustomGather):
    def allocate(self, size, *, dtype, device):
        return torch.zeros(size[0] + 1, dtype=dtype, device=device)


class CustomScatter(ReduceScatter):
    def __init__(self, later):
        self.later, self.ops, self.given = later, [], 0

    def allocate(self, size, *, dtype, device):
        self.given += 1
        return torch.full(size, torch.nan, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        self.ops.append(op)
        return dist.reduce_scatter_single(output=output_tensor, input=input_tensor, group=group, op=op, async_op=self.later and async_op)


def custom_collectives(rank, world):
    for later in (False, True):
        ours, alone = seeded(Branches), seeded(Branches)  # two groups: trainable and frozen
        fully_shard(ours)
        gather, scatter = CustomGather(later), CustomScatter(later)
        ours.set_custom_all_gather(gather)
        ours.set_custom_reduce_scatter(scatter)
        for step in range(3):
            if step == 2:
                ours.set_gradient_divide_factor(1.0)
            for model, r, w in ((ours, rank, world), (alone, 0, 1)):
                model.zero_grad()
                model(inputs(r, w, step)).square().mean().backward()
            expected = {name: None if g is None else g * (world if step == 2 else 1) for name, g in grads(alone).items()}
            same(grads(ours), expected)
        assert gather.calls == 2 * 3 and len(gather.given) == 2, "memory is asked for once"
        assert scatter.ops == [dist.ReduceOp.AVG] * 2 + [dist.ReduceOp.SUM]
        with pytest.raises(AssertionError, match="whose allocate"):
            ours.set_allocate_memory_from_process_group_for_comm(True)
        ours, alone = fully_shard(seeded(Branches)), seeded(Branches)
        ours.set_allocate_memory_from_process_group_for_comm(True)
        for model, r, w in ((ours, rank, world), (alone, 0, 1)):
            model(inputs(r, w, 7)).square().mean().backward()
        same(grads(ours), grads(alone))
    ours.set_custom_all_gather(TooMuch(False))
    with pytest.raises(ValueError, match=r"TooMuch.allocate was asked for \d+ elements"):
        ours(inputs(rank, world))
    return True


def test_collectives_may_be_the_users_own():
    assert all(run_gloo(2, custom_collectives))


@on_threads(2)
def test_prefetch_lists_change_nothing_but_the_order(rank, world):
    ours, alone = shard_tower(seeded(Tower)), seeded(Tower)
    layers = list(ours.layers)
    for i, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[i + 1 : i + 3])
        layer.set_modules_to_backward_prefetch(layers[max(0, i - 2) : i][::-1])
    alike(ours, alone, rank, world, range(3))
    with pytest.raises(ValueError, match="Expects FSDPModule but got Linear"):
        ours.set_modules_to_forward_prefetch([nn.Linear(1, 1)])


@on_threads(2)
def test_manual_unshard_and_reshard_swap_the_parameters(rank, world):
    model = shard_tower(seeded(Tower))
    expected = seeded(Tower)
    handle = model.layers[0].unshard(async_op=True)
    handle.wait()
    assert type(model.layers[0][0].weight) is nn.Parameter
    assert torch.equal(model.layers[0][0].weight, expected.layers[0][0].weight)
    model.layers[0].reshard()
    assert model.layers[0][0].weight.placements
    assert model.layers[1].unshard() is None
    ahead = model.layers[1].unshard(async_op=True)
    ahead.wait()
    model(inputs(rank, world)).sum().backward()
    assert all(hasattr(p, "placements") for p in model.parameters()), "backward reshards everything"
    model.unshard()
    model.set_requires_gradient_sync(False)
    share = [shard_tower(seeded(Tower)), shard_tower(seeded(Tower))]
    share_comm_ctx(share)
    for one in share:
        one(inputs(rank, world)).sum().backward()
    assert unit_of(share[0]).lanes is unit_of(share[1]).lanes


@on_threads(2)
def test_hooks_on_sharded_parameters_run_when_gradients_arrive(rank, world):
    ours, alone = shard_tower(seeded(Tower)), seeded(Tower)
    for model, r, w in ((ours, rank, world), (alone, 0, 1)):
        for p in model.parameters():
            optimizer = torch.optim.SGD([p], lr=0.1)

            def step(q, optimizer=optimizer):
                optimizer.step()
                optimizer.zero_grad()

            p.register_post_accumulate_grad_hook(step)
        for k in range(3):
            model(inputs(r, w, k)).square().mean().backward()
    same({n: full(p) for n, p in ours.named_parameters()}, {n: full(p) for n, p in alone.named_parameters()})
