"""Two parameters on one memory: one process would train them as one, but shards part them."""

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


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.inner, self.head = nn.Embedding(6, 4), nn.Linear(4, 4), nn.Linear(4, 6, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.inner(self.embedding(tokens))))


def by_data(model: Any) -> None:
    model.head.weight.data = model.embedding.weight.data


def by_parameter(model: Any) -> None:
    model.head.weight = nn.Parameter(model.embedding.weight)


def by_part(model: Any) -> None:
    model.inner.weight = nn.Parameter(model.embedding.weight.data[2:])
    model.head.weight.data = model.embedding.weight.data.clone()


UNITS: dict[str, Callable[[Any], list[Any]]] = {
    "one unit": lambda model: [],
    "root and a unit": lambda model: [model.embedding],
    "a unit and the root": lambda model: [model.head],
    "two units": lambda model: [model.head, model.embedding],
}


@pytest.mark.parametrize(("units", "tie"), [*((units, by_data) for units in UNITS), ("one unit", by_parameter), ("two units", by_part)])
@on_threads(2)
def test_first_forward_names_parameters_that_shared_memory(rank: int, world: int, units: str, tie: Callable[[Any], None]) -> None:
    model = Tied()
    tie(model)
    for unit in (*UNITS[units](model), model):
        fully_shard(unit)
    other = "inner" if tie is by_part else "head"
    with pytest.raises(ValueError, match=f"parameters '(embedding|{other}).weight' and '(embedding|{other}).weight' shared memory"):
        model(torch.arange(4))


def one_parameter(model: Any) -> None:
    model.head.weight = model.embedding.weight


def own_memory(model: Any) -> None:
    by_data(model)
    model.head.weight.data = model.head.weight.data.clone()


def frozen(model: Any) -> None:
    by_data(model)
    model.requires_grad_(False)
    model.inner.requires_grad_(True)


def neighbours(model: Any) -> None:
    both = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))
    model.embedding.weight.data, model.head.weight.data = both[:6], both[6:]


@pytest.mark.parametrize("remedy", [one_parameter, own_memory, frozen, neighbours])
@on_threads(2)
def test_parameters_with_their_own_memory_train(rank: int, world: int, remedy: Callable[[Any], None]) -> None:
    ours, alone = (filled(Tied(), 1, 0.3) for _ in "ab")
    for model in (ours, alone):
        remedy(model)
    fully_shard(ours.inner)
    fully_shard(ours)
    for model in (ours, alone):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.arange(4)).square().mean().backward()
        optimizer.step()
    for p, q in zip(ours.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(full(p), q.detach())


@on_threads(2)
def test_models_of_one_state_dict_train_apart(rank: int, world: int) -> None:
    """``assign=True`` puts the same memory into both models, which fully_shard then parts."""
    state, models = Tied().state_dict(), [Tied(), Tied()]
    for model in models:
        model.load_state_dict(state, assign=True)
        fully_shard(model)
    for model in models:
        model(torch.arange(4)).square().mean().backward()
