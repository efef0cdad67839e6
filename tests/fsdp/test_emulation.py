"""The emulated world: engines run in it, and its collectives take the time that the network model gives."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

from vescale_ray import Fp8Block, fully_shard
from vescale_ray.emulation import emulated_world
from vescale_ray.optim import clip_grad_norm_
from vescale_ray.planner import plan_layout, unit_plan
from vescale_ray.planner.hardware import HARDWARE, collective_time


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


def train(how: Any, **options: Any) -> Any:
    model: Any = Model()
    for layer in model.layers:
        how(layer, **options)
    how(model, **options)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.ones(2, 32)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model(torch.ones(2, 32)).sum().backward()
    return model


@pytest.mark.parametrize(("how", "world"), [(fully_shard, 8), (fully_shard, 1024), (torch_fully_shard, 64)])
def test_both_engines_train_in_a_claimed_world(how: Any, world: int) -> None:
    with emulated_world(world) as wire:
        model = train(how)
        assert dist.get_world_size() == world and dist.get_rank() == 0
        weight = model.layers[0].weight
        assert isinstance(weight, DTensor) and weight.device_mesh.size() == world
        names = [name for name, *_ in wire.log]
        assert names.count("reduce-scatter") == 4 * 3
        clip_grad_norm_(model.parameters(), 1.0)
    assert not dist.is_initialized()


def test_claimed_ranks_gather_finite_codes_and_values() -> None:
    """Uninitialized memory is NaN in torch's deterministic mode, and FP8 weights refuse it."""
    torch.use_deterministic_algorithms(True)
    try:
        with emulated_world(8):
            model = train(fully_shard, quantize_policy=lambda name, param: Fp8Block(4, 16) if param.dim() == 2 else None)
            assert all(p.to_local().isfinite().all() for p in model.parameters())
            gathered = [torch.empty(3) for _ in range(8)]
            dist.all_gather(gathered, torch.ones(3))
            assert torch.stack(gathered).eq(1).all()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_units_of_several_buffers_make_as_many_calls_as_torchs(compute: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    precision = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)

    def calls(how: Any) -> Counter[str]:
        with emulated_world(64) as wire:
            model = train(how, mp_policy=precision)
            wire.log.clear()
            model(torch.ones(2, 32)).sum().backward()
            return Counter(name for name, *_ in wire.log if name != "all-reduce")

    monkeypatch.setattr(unit_plan, "plan_buffers", lambda specs, ranks, **_: tuple(plan_layout([spec], ranks) for spec in specs))
    assert calls(fully_shard) == calls(torch_fully_shard) == {"all-gather": 8, "reduce-scatter": 4}


def test_hybrid_sharding_reduces_over_claimed_replicas() -> None:
    with emulated_world(64) as wire:
        train(fully_shard, mesh=init_device_mesh("cpu", (8, 8), mesh_dim_names=("replicate", "shard")))
        ranks = {(name, claimed) for name, _, claimed, _ in wire.log}
        assert {("all-gather", 8), ("reduce-scatter", 8), ("all-reduce", 8)} <= ranks


def test_collectives_take_modelled_time_and_queue_on_one_wire() -> None:
    with emulated_world(16, scale=200.0) as wire:
        out, part = torch.zeros(16 * 4096), torch.arange(4096.0)
        began = time.perf_counter()
        works = [dist.all_gather_single(out, part, async_op=True) for _ in range(3)]
        issued = time.perf_counter() - began
        for work in works:
            assert work is not None
            work.wait()
        waited = time.perf_counter() - began
        expected = 200.0 * collective_time(out.nbytes, 16, HARDWARE["h100"], rank_bytes=part.nbytes)
        assert [seconds for *_, seconds in wire.log] == [expected] * 3
        assert waited >= 3 * expected > issued, "asynchronous calls return at once, and take their turns"
        assert torch.equal(out[:4096], part), "this rank is rank 0"
        shard = torch.zeros(4096)
        dist.reduce_scatter_single(shard, out)
        assert torch.equal(shard, part)
        odd = torch.zeros(16 * 3)
        dist.all_gather_single(odd, torch.zeros(3))
        aligned = 200.0 * collective_time(odd.nbytes, 16, HARDWARE["h100"], rank_bytes=16)
        assert wire.log[-1][-1] > aligned, "12 bytes a rank: not a multiple of 16"


def test_emulated_world_refuses_zero_ranks_and_existing_groups() -> None:
    with pytest.raises(ValueError, match="0 ranks: give at least 1"), emulated_world(0):
        pass
    with emulated_world(2), pytest.raises(ValueError, match="a process group exists already"), emulated_world(4):
        pass
    assert not dist.is_initialized()
