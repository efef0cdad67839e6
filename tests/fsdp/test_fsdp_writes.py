"""After any kind of write to a sharded parameter, the next forward computes with the written values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks import on_threads
from vescale_ray.fsdp import MixedPrecisionPolicy, fully_shard

WAYS: dict[str, Callable[[Any], Any]] = {
    "operation": lambda p: p.mul_(2),
    "data": lambda p: p.data.mul_(2),
    "detached": lambda p: p.detach().mul_(2),
    "local": lambda p: p.to_local().mul_(2),
    "local of detached": lambda p: p.detach().to_local().mul_(2),
    "whole tensor": lambda p: p.copy_(p.full_tensor() * 2),
    "foreach": lambda p: torch._foreach_mul_([p], 2.0),
    "foreach of two lists": lambda p: torch._foreach_add_([p], [p.clone()]),
}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "cast to bfloat16"])
@on_threads(2)
def test_a_write_to_a_sharded_parameter_reaches_the_next_forward(rank: int, world: int, dtype: torch.dtype | None) -> None:
    seen = {}
    for way, write in WAYS.items():
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
        for module in (*model, model):
            fully_shard(module, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
        x = torch.ones(2, 8)
        before = model(x).detach().float()
        with torch.no_grad():
            for parameter in model.parameters():
                write(parameter)
        # Doubling is exact in every floating-point format.
        seen[way] = torch.equal(model(x).detach().float(), 4 * before)
    assert seen == dict.fromkeys(WAYS, True)
