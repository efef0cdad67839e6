"""Copies of gathered parameters, and values that replace the parameters, are plain parameters of their own."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.fsdp.towers import filled
from tests.fsdp.transformer import full
from tests.ranks import on_threads
from vescale_ray import fully_shard


def net() -> Any:
    """The first layer is large enough for the gradient that the matrix product writes."""
    return filled(nn.Sequential(nn.Linear(300, 300), nn.Tanh(), nn.Sequential(nn.Linear(300, 6)), nn.Linear(6, 6)), 3, 0.1)


def sharded() -> Any:
    model = net()
    fully_shard(model[2])
    return fully_shard(model)


def batch() -> torch.Tensor:
    return torch.randn(4, 300, generator=torch.Generator().manual_seed(0))


def saved(tensor: torch.Tensor) -> Any:
    file = io.BytesIO()
    torch.save(tensor, file)
    return torch.load(io.BytesIO(file.getvalue()))


def pickled(tensor: torch.Tensor) -> Any:
    return pickle.loads(pickle.dumps(tensor))


@pytest.mark.parametrize("copy", [saved, pickled])
@on_threads(2)
def test_a_pickled_gathered_parameter_is_a_plain_one(rank: int, world: int, copy: Callable[[torch.Tensor], Any]) -> None:
    model, alone = sharded(), net()
    model(batch()).square().mean().backward()  # the gathered parameters have all their marks
    model.unshard()
    copies = [copy(param) for param in model[0].parameters()]
    for param, original in zip(copies, alone[0].parameters(), strict=True):
        assert type(param) is nn.Parameter
        torch.testing.assert_close(param, original)
    layer = nn.Linear(300, 300)
    layer.weight, layer.bias = copies
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer(batch()).sum().backward()
    optimizer.step()
    assert not torch.equal(layer.weight, alone[0].weight)


@pytest.mark.filterwarnings("error:backward hook")
@on_threads(2)
def test_saved_tensors_may_be_pickled_until_backward(rank: int, world: int) -> None:
    model, alone = sharded(), net()
    with torch.autograd.graph.saved_tensors_hooks(pickle.dumps, pickle.loads):
        for one in (model, alone):
            one(batch()).square().mean().backward()
    for param, original in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(full(param.grad), original.grad)


@on_threads(2)
def test_an_optimizer_older_than_assigned_values_raises(rank: int, world: int) -> None:
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()}, assign=True)
    model(batch()).sum().backward()
    with pytest.raises(RuntimeError, match=r"build the optimizer after fully_shard and load_state_dict\(assign=True\)"):
        optimizer.step()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
