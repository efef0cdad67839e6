"""Gradients are cleared and parameters are frozen between a forward and its backward, when the root is gathered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks import on_processes
from vescale_ray import fully_shard


def net() -> Any:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    return nn.Sequential(nn.Linear(6, 6), inner, nn.Linear(6, 6))


def sharded(reshard: bool | None) -> Any:
    model = net()
    for unit in (model[1], model):
        fully_shard(unit, reshard_after_forward=reshard)
    return model


def clear(model: Any, step: int) -> None:
    model.zero_grad()


def clear_to_zero(model: Any, step: int) -> None:
    model.zero_grad(set_to_none=False)


def freeze(model: Any, step: int) -> None:
    model.zero_grad()
    dict(model.named_parameters())["0.weight"].requires_grad_(step == 0)


def freeze_all(model: Any, step: int) -> None:
    model.zero_grad()
    model.requires_grad_(step % 2 == 0)


@pytest.mark.parametrize("between", [clear, clear_to_zero, freeze, freeze_all])
@pytest.mark.parametrize("reshard", [None, False])
@on_processes(2)
def test_a_step_is_as_in_one_process(rank: int, world: int, reshard: bool | None, between: Callable[[Any, int], None]) -> None:
    models = net(), sharded(reshard)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    for step in range(4):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        for model, optimizer in zip(models, optimizers, strict=True):
            loss = model(x).square().mean()
            between(model, step)
            loss.backward()
            optimizer.step()
            if between is freeze_all:
                model.requires_grad_(True)
    for (name, p), q in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(q.full_tensor(), p.data, msg=lambda text, name=name: f"{name}: {text}")  # type: ignore[misc]
