"""``torch.vmap`` over sharded modules, whose batched tensors have no graph of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.fsdp.towers import filled
from tests.fsdp.transformer import full
from tests.ranks import on_threads
from vescale_ray.fsdp import fully_shard


class Layer(nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        h = super().forward(x)
        return {"out": torch.tanh(h), "also": [h]}


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(6, 6), Layer(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.first(x)
        return self.second(first["out"])["out"] + first["also"][0]


def over_the_model(model: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.vmap(model)(x)


def twice(model: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.vmap(torch.vmap(model))(x)


def with_input_gradients(model: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.vmap(model)(x.requires_grad_())


def jacobian(model: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.vmap(torch.func.jacrev(model))(x[0])


@pytest.mark.parametrize(
    ("call", "reshard"),
    [
        *((over_the_model, reshard) for reshard in (None, True, False)),
        (twice, True),
        (with_input_gradients, True),
        (with_input_gradients, False),
        (jacobian, None),
        (jacobian, True),
    ],
)
@on_threads(2)
def test_vmap_trains_as_over_a_plain_module(
    rank: int, world: int, call: Callable[[Any, torch.Tensor], torch.Tensor], reshard: bool | None
) -> None:
    ours, alone = (filled(Tower(), 1, 0.5) for _ in "ab")
    for module in (ours.first, ours.second, ours):
        fully_shard(module, reshard_after_forward=reshard)
    for step in range(2):
        results = []
        for model in (ours, alone):
            result = call(model, torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(step)))
            results.append(result.detach())
            result.square().mean().backward()
        torch.testing.assert_close(*results)
    for p, q in zip(ours.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(full(p.grad), q.grad)
