"""All processes of a machine share compiled code on disk. Code that was compiled for one rank's part must not run for another's."""

from __future__ import annotations

import os
import shutil
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.fsdp.towers import filled
from tests.ranks import run_gloo
from vescale_ray import RaggedShard, distribute_tensor, fully_shard


def hashes(rank: int, world: int) -> list[str]:
    mesh = init_device_mesh("cpu", (world,))
    found = []
    for units in ((1, 2, 3), (1, 1, 1), (0, 0, 1)):
        tensor: Any = distribute_tensor(torch.ones(6, 4), mesh, [RaggedShard((0,), units)])
        assert tensor._stable_hash_for_caching() == tensor.clone()._stable_hash_for_caching(), "the same for the same part"
        found += [tensor._stable_hash_for_caching(), tensor.sum()._stable_hash_for_caching()]
    return found


def test_keys_differ_from_rank_to_rank_and_from_layout_to_layout() -> None:
    by_rank = run_gloo(3, hashes)  # processes, since on threads the ranks have different meshes
    assert len({key for keys in by_rank for key in keys[::2]}) == 9
    assert len({keys[1] for keys in by_rank}) == 3, "pending results, too"


def model() -> Any:
    net = filled(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)), 0, 1.0)
    for layer in (net[0], net[2]):
        fully_shard(layer)
    return fully_shard(net)


def compiled_steps(rank: int, world: int, folder: str) -> float:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    nets = model(), model()
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.01, foreach=True) for net in nets]
    steps = [torch.compile(optimizers[0].step), optimizers[1].step]
    for index in range(3):
        for net, optimizer, step in zip(nets, optimizers, steps, strict=True):
            net(torch.ones(2, 8) * (index + 1)).square().sum().backward()
            step()
            optimizer.zero_grad()
    pairs = zip(nets[0].parameters(), nets[1].parameters(), strict=True)
    return max(float((p.full_tensor() - q.full_tensor()).abs().max().detach()) for p, q in pairs)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_optimizer_step_is_right_with_and_without_cache(tmp_path: Any) -> None:
    for _ in range(2):
        assert max(run_gloo(3, compiled_steps, str(tmp_path), timeout=200)) < 1e-5
