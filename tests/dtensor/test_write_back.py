"""Writes to gathered views of ragged tensors reach the tensor, on every rank."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from tests.fsdp.transformer import full
from tests.ranks import on_threads
from vescale_ray import distribute_tensor, fully_shard
from vescale_ray.dtensor import RaggedFallbackWarning, RaggedShard

pytestmark = pytest.mark.filterwarnings(f"ignore::{RaggedFallbackWarning.__module__}.RaggedFallbackWarning")


def values(seed: int = 0) -> Tensor:
    return torch.randn(8, 5, generator=torch.Generator().manual_seed(seed))


def ragged(value: Tensor) -> Any:
    return distribute_tensor(value, init_device_mesh("cpu", (3,)), [RaggedShard((0, 1), (17, 0, 23))])


def scale_parts(x: Any) -> None:
    for factor, part in enumerate(x.chunk(3)):
        part.mul_(factor + 2.0)
        part[0].sub_(1.0)


WRITES: list[Callable[[Any, Any], Any]] = [
    lambda x, y: x[3].zero_(),
    lambda x, y: x.__setitem__(3, 0.5),
    lambda x, y: x.__setitem__((2, 4), 7.0),
    lambda x, y: x.__setitem__((slice(None), 1), y[:, 0]),
    lambda x, y: x.__setitem__(slice(0, 8, 3), -1.0),
    lambda x, y: x[1:4].copy_(y[2:5]),
    lambda x, y: x[6].copy_(torch.arange(5.0)),
    lambda x, y: x.t().mul_(2.0),
    lambda x, y: x.t()[2:].add_(y.t()[:3], alpha=0.5),
    lambda x, y: x.diagonal().fill_(3.0),
    lambda x, y: x[2].clamp_(-0.1, 0.1).add_(1.0),
    lambda x, y: x[2:6].masked_fill_(y[2:6] > 0, 9.0),
    lambda x, y: scale_parts(x),
    lambda x, y: [row.add_(index) for index, row in enumerate(x.unbind(0))],
]


@on_threads(3)
def test_writes_to_views_reach_the_tensor_on_every_rank(rank, world):
    for write in WRITES:
        wanted, other = values(), values(1)
        x, y = ragged(values()), ragged(values(1))
        write(wanted, other)
        write(x, y)
        assert torch.equal(full(x), wanted) and torch.equal(full(y), other)


@on_threads(3)
def test_a_view_shows_writes_through_its_siblings_but_no_others(rank, world):
    x = ragged(values())
    first, second = x.chunk(2)
    row = second[1]
    second.zero_()
    assert torch.equal(full(row), torch.zeros(5)) and torch.equal(full(first), values()[:4])
    x.mul_(2.0)
    for stale in (lambda: first.zero_(), lambda: row + 1):
        with pytest.raises(RuntimeError, match="that was written since: take the view again"):
            stale()


@on_threads(3)
def test_writes_that_differ_by_rank_or_lose_a_gradient_raise(rank, world):
    x = ragged(values())
    trained = ragged(values()).requires_grad_() * 1.0
    for write in (lambda: x[3].normal_(), lambda: x.t().bernoulli_(0.5)):
        with pytest.raises(RuntimeError, match="a gathered copy, not a view"):
            write()
    with pytest.raises(RuntimeError, match=r"the gradient of a write would be lost: write to its full_tensor\(\).* or .*no_grad\(\)"):
        trained[3].zero_()
    with pytest.raises(ValueError, match="a plain tensor of shape .* meets a gathered copy"):
        x[3].add_(torch.ones(5))
    assert torch.equal(full(x), values())


@on_threads(3)
def test_remedies_for_writes_that_need_a_gradient_work(rank: int, world: int) -> None:
    w, plain = ragged(values()).requires_grad_(), values().requires_grad_()
    whole, expected = (w * 2.0).full_tensor(), plain * 2.0
    for product in (whole, expected):
        product[3] = 0
        product.square().sum().backward()
    assert plain.grad is not None and torch.equal(full(w.grad), plain.grad)
    with torch.no_grad():
        w[3] = 0
        plain[3] = 0
    assert torch.equal(full(w), plain)


@on_threads(2)
def test_an_embedding_with_padding_initializes_once_sharded(rank, world):
    with torch.device("meta"):
        model: Any = nn.Sequential(nn.Embedding(9, 4, padding_idx=5), nn.Linear(4, 3))
    fully_shard(model)
    model.to_empty(device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RaggedFallbackWarning)
        for module in model:
            module.reset_parameters()
    rows = full(model[0].weight).abs().sum(1)
    assert rows[5] == 0 and (rows[[0, 1, 2, 3, 4, 6, 7, 8]] > 0).all()
    assert full(model(torch.tensor([5, 5]))[0]).allclose(full(model[1].bias))


def fill_rows(w: Any) -> None:
    w[torch.tensor([1, 4])] = 0.5


def orthogonal(w: Any) -> None:
    nn.init.orthogonal_(w, generator=torch.Generator().manual_seed(3))


WHOLE: list[Callable[[Any], Any]] = [
    fill_rows,
    orthogonal,
    nn.init.eye_,
    lambda w: w.tril_(),
    lambda w: w.index_fill_(1, torch.tensor([0, 2]), 3.0),
]


@on_threads(3)
def test_remedy_for_writes_that_need_the_whole_tensor_works(rank: int, world: int) -> None:
    for write in WHOLE:
        x, plain = ragged(values().t().contiguous()), values().t().contiguous()
        with pytest.raises(RuntimeError, match=r"change its full_tensor\(\) on all ranks alike and write that back with copy_\(\)"):
            write(x)
        assert torch.equal(full(x), plain), "nothing is written"
        whole = x.full_tensor()
        write(whole)
        x.copy_(whole)
        write(plain)
        assert torch.equal(full(x), plain)
