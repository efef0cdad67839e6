"""Debug mode names a rank whose collectives differ, before it exchanges data."""

from __future__ import annotations

import importlib
import os
import re
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tests.fsdp.towers import Tower, alike, grads, inputs, same, seeded, shard_tower
from tests.ranks import on_processes, run_threads
from vescale_ray.fsdp import MixedPrecisionPolicy, OrderError, fully_shard, set_debug


class Forking(Tower):
    """A model in which rank 1 leaves out a layer."""

    skip = False

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            if not (self.skip and i == 2):
                x = layer(x)
        return self.head(x)


@on_processes(2)
def test_a_rank_that_strays_is_named_on_every_rank(rank, world):
    set_debug(True)
    model = shard_tower(seeded(Forking))
    model(inputs(rank, world)).sum().backward()
    model.skip = rank == 1
    model.reshard()
    with pytest.raises(OrderError) as error:
        model(inputs(rank, world)).sum().backward()
    found = re.search(r"rank 0 of the group the all-gather of '(layers.\d).*', rank 1 the all-gather of '(layers.\d).*'", str(error.value))
    assert found and found[1] == "layers.2" != found[2], str(error.value)
    assert f"this is rank {rank}" in str(error.value)
    model.skip = False
    model.reset_iter_state()
    model.zero_grad()
    alone = seeded(Forking)
    alike(model, alone, rank, world)


@on_processes(2)
def test_a_rank_that_strays_in_backward_is_named(rank, world):
    set_debug(True)
    model = shard_tower(seeded(Tower), reshard_after_forward=False)
    out = model(inputs(rank, world))
    if rank == 1:
        model.layers[3].set_requires_gradient_sync(False)
    with pytest.raises(OrderError, match=r"reduce-scatter of 'layers.3.*reduce-scatter of 'layers.2"):
        out.sum().backward()


class Heads(nn.Module):
    """A loss that depends on one of two heads, which are units."""

    def __init__(self):
        super().__init__()
        self.body, self.heads = nn.Linear(20, 20), nn.ModuleList(nn.Linear(20, 3) for _ in range(2))

    def forward(self, x, which, follows_remedy):
        x = self.body(x)
        results = [head(x) for head in self.heads]
        return results[which].square().mean() + (results[1 - which].sum() * 0 if follows_remedy else 0)


@on_processes(2)
def test_a_unit_for_other_ranks_runs_times_zero(rank, world):
    set_debug(True)
    for follows_remedy in (False, True):
        ours, alone = seeded(Heads), seeded(Heads)
        for head in ours.heads:
            fully_shard(head)
        fully_shard(ours).set_reduce_scatter_unused_params(not follows_remedy)
        loss = ours(inputs(rank, world), rank, follows_remedy)
        if not follows_remedy:
            with pytest.raises(OrderError, match=r"heads.0.*heads.1.*: run each unit on every rank, .* its result times 0"):
                loss.backward()
            continue
        loss.backward()
        for r in range(world):
            (alone(inputs(r, world), r, False) / world).backward()
        same(grads(ours), grads(alone))


@on_processes(2)
def test_load_on_one_rank_only_is_named(rank, world):
    """Whole tensors are loaded without communication, so a rank that leaves out the load would keep its old values."""
    model, other = shard_tower(seeded(Tower)), seeded(Tower, 3)
    if rank == 0:
        model.load_state_dict(other.state_dict())
    with pytest.raises(RuntimeError, match="module states loaded: .*load the same state dicts, on every rank"):
        model(inputs(rank, world))
    set_debug(True)
    model = shard_tower(seeded(Tower))
    for loads in (lambda: model.load_state_dict(other.state_dict()), lambda: model.layers[1].load_state_dict(other.layers[1].state_dict())):
        model(inputs(rank, world)).sum().backward()
        with pytest.raises(OrderError, match="load of a state dict into .*all-gather of"):
            if rank == 0:
                loads()
            model(inputs(rank, world))
        model.reset_iter_state()
        model.zero_grad()
        loads()
        model(inputs(rank, world)).sum().backward()


@on_processes(2)
def test_failed_wait_names_its_collective_and_debug_mode(rank, world):
    """Without debug mode, ranks that stray wait for each other until the group's timeout."""
    group = dist.new_group(timeout=timedelta(seconds=3))
    model = seeded(Forking)
    for unit in (*model.layers, model):
        fully_shard(unit, mesh=DeviceMesh.from_group(group, "cpu"))
    model.skip = rank == 1
    with pytest.raises(RuntimeError) as error:
        model(inputs(rank, world)).sum().backward()
    assert re.search(r"waited for (all-gather|reduce-scatter) of .*VESCALE_RAY_FSDP_DEBUG=1", "".join(error.value.__notes__)), error.value


@pytest.mark.parametrize("debug", [False, True])
@on_processes(2)
def test_reductions_of_different_sizes_never_meet(rank, world, debug):
    """Rank 0 alone has asked for backwards without gradient sync, so it sends FP32. A message of another size would end its receiver."""
    set_debug(debug)
    mesh = DeviceMesh.from_group(dist.new_group(timeout=timedelta(seconds=1)), "cpu")
    model = shard_tower(seeded(Tower), mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    model.set_requires_gradient_sync(rank == 1)
    model.set_requires_gradient_sync(True)
    with pytest.raises(RuntimeError) as error:
        model(inputs(rank, world)).sum().backward()
    if debug:
        assert re.search(r"rank 0 .*reduce-scatter of .* in torch.float32, rank 1 .* in torch.bfloat16", str(error.value))
    else:
        assert "waited for reduce-scatter of" in "".join(error.value.__notes__), error.value


def kept(rank, world):
    model, alone = shard_tower(seeded(Tower)), seeded(Tower)
    held = []
    model.layers[1][0].register_forward_hook(lambda module, *_: held.append(module.weight))
    for step in range(3):
        for one, r, w in ((model, rank, world), (alone, 0, 1)):
            one.zero_grad()
            one(inputs(r, w, step)).square().mean().backward()
        same(grads(model), grads(alone))
    with pytest.raises(RuntimeError, match=r"unit .layers.1. \(layers.1.0.weight.* resharded"):
        held[0].isnan()
    return True


@pytest.mark.parametrize("debug", [False, True])
def test_reading_a_kept_gathered_parameter_raises(debug):
    set_debug(debug)
    try:
        assert all(run_threads(2, kept))
    finally:
        set_debug(False)


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("0", False), ("", False)])
@on_processes(1)
def test_environment_variable_enables_debug_mode(rank, world, value, expected):
    """Import the module again, in a process that ends with the test."""
    os.environ["VESCALE_RAY_FSDP_DEBUG"] = value
    assert importlib.reload(importlib.import_module("vescale_ray.fsdp.communication.debug")).debugging() == expected


def test_ranks_exchange_no_checks_without_debug_mode(monkeypatch):
    from vescale_ray.fsdp.communication.debug import agree

    monkeypatch.setattr(dist, "all_gather_single", None)
    agree("all-gather of nothing", None, torch.device("cpu"))  # type: ignore[arg-type]
