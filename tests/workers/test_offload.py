"""``train.offload: cpu`` as far as it shows without an accelerator, whose part the meta device plays. ``make gpu-check`` has the rest."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from vescale_ray.config import load_config
from vescale_ray.fsdp import CPUOffloadPolicy, OffloadPolicy
from vescale_ray.workers.building.model_building import _allocate, sharding_of


@pytest.mark.parametrize(
    ("offload", "device", "kind"), [("cpu", "cuda", CPUOffloadPolicy), ("none", "cuda", OffloadPolicy), ("cpu", "cpu", OffloadPolicy)]
)
def test_units_offload_if_configured_and_on_an_accelerator(offload: str, device: str, kind: type) -> None:
    mesh: Any = SimpleNamespace(device_type=device)
    assert type(sharding_of(load_config(None, [f"train.offload={offload}"]), mesh)["offload_policy"]) is kind


@pytest.mark.parametrize(("policy", "home"), [(CPUOffloadPolicy(), "cpu"), (OffloadPolicy(), "meta")])
def test_shards_are_at_home_and_buffers_on_the_device(policy: OffloadPolicy, home: str) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[1].register_buffer("scale", torch.ones(2), persistent=False)
    model[1].register_buffer("none", None)
    _allocate(model, policy, torch.device("meta"))
    assert {parameter.device.type for parameter in model.parameters()} == {home}
    assert {buffer.device.type for buffer in model.buffers()} == {"meta"}
    _allocate(model, policy, torch.device("cpu"))
    assert {buffer.device.type for buffer in model.buffers()} == {"cpu"} and model[1].scale.shape == (2,)
