"""After any kind of write to a sharded parameter, the next forward computes with the written values."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn.utils import prune

import vescale_ray
from tests.fsdp.towers import filled
from tests.fsdp.transformer import full
from tests.ranks import on_processes, on_threads
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
        model: Any = filled(nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)))
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


def layers() -> Any:
    return filled(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), 1, 0.3)


@on_threads(2)
def test_parameters_can_be_written_as_one_vector(rank: int, world: int) -> None:
    ours, alone = layers(), layers()
    for module in (*ours, ours):
        fully_shard(module)
    for step in range(2):
        for model in (ours, alone):
            model(torch.ones(2, 8) * (step + 1)).square().sum().backward()
            vector = nn.utils.parameters_to_vector(model.parameters())
            nn.utils.vector_to_parameters(vector * 0.5, model.parameters())
            torch.optim.SGD(model.parameters(), lr=0.01).step()
    for p, q in zip(ours.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(full(p), q.detach())


@pytest.mark.parametrize("reshard", [None, False])
@on_threads(2)
def test_a_value_assigned_to_data_of_a_plain_shard_raises(rank: int, world: int, reshard: bool | None) -> None:
    """The assignment leaves the local tensor of torch's DTensor as it was, so the value would be lost."""
    model, x = layers(), torch.ones(2, 8)
    for module in (*model, model):
        fully_shard(module, shard_placement_fn=lambda p: Shard(0), reshard_after_forward=reshard)
    model(x).sum().backward()
    before, values = full(model[0].weight), model[0].weight.detach().clone()
    model[0].weight.data = values * 2
    for _ in range(2):
        with pytest.raises(ValueError, match=r"a tensor was assigned to .data of parameter '0.weight', but .* parameter.data.copy_"):
            model(x)
        model[0].weight.data = values
    with pytest.raises(ValueError, match="'0.weight'"):
        model(x)
    model[0].weight.data.copy_(values * 2)
    expected = layers()
    expected[0].weight.data.mul_(2)
    torch.testing.assert_close(model(x), expected(x))
    assert torch.equal(full(model[0].weight), before * 2)


class Momentum(nn.Module):
    """MoCo: the forward moves the key encoder towards the query encoder before it runs it."""

    def __init__(self, write: Callable[[Any, Any], Any], later: bool) -> None:
        super().__init__()
        self.query, self.key = layers(), filled(layers(), 2, 0.3).requires_grad_(False)
        self.write, self.later = write, later

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query = self.query(x) if self.later else None
        with torch.no_grad():
            for key, q in zip(self.key.parameters(), self.query.parameters(), strict=True):
                self.write(key, q)
            key = self.key(x)
        return nn.functional.mse_loss(self.query(x) if query is None else query, key)


BLENDS: dict[str, Callable[[Any, Any], Any]] = {
    "data": lambda key, q: setattr(key, "data", key.data * 0.5 + q.data * 0.5),
    "in place": lambda key, q: key.data.mul_(0.5).add_(q.data * 0.5),
}


@on_processes(2)
def test_a_write_in_a_models_forward_reaches_its_later_units(rank: int, world: int) -> None:
    for width, blend, later in itertools.product((8, 256), BLENDS, (False, True)):  # shards of 256 columns live in the buffer
        ours, alone = (Momentum(BLENDS[blend], later) for _ in "ab")
        if width > 8:
            for model in (ours, alone):
                model.query, model.key = (filled(nn.Sequential(nn.Linear(8, width), nn.Linear(width, width)), i, 0.1) for i in (1, 2))
                model.key.requires_grad_(False)
        for module in (*ours.query, *ours.key, ours):
            fully_shard(module)
        optimizers = [torch.optim.SGD(model.query.parameters(), lr=0.1) for model in (ours, alone)]
        for step in range(3):  # from the second on, units are prefetched
            for model, optimizer in zip((ours, alone), optimizers, strict=True):
                model(torch.ones(2, 8) * (step + 1)).backward()
                optimizer.step()
                optimizer.zero_grad()
        for p, q in zip(ours.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(full(p), q.detach(), rtol=1e-4, atol=1e-5)


def placed_as(parameter: Any, whole: torch.Tensor) -> Any:
    return vescale_ray.distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)


@on_threads(2)
def test_a_write_that_can_not_be_done_names_the_parameter(rank: int, world: int) -> None:
    model, alone, whole, rows = layers(), layers(), torch.arange(64.0).view(8, 8), torch.tensor([0, 2])
    for module in (*model, model):
        fully_shard(module)
    for one in (model, alone):
        one(torch.ones(2, 8)).sum().backward()
    weight, bias, plain = model[1].weight, model[1].bias, alone[1].weight
    by_parts = r"^parameter '1.weight' \(a ragged tensor .*: change its full_tensor\(\) on all ranks alike .* under torch.no_grad\(\)"
    from_plain = r"^parameter '1.weight' is sharded, and aten.*vescale_ray.distribute_tensor\(\), or change the parameter's full_tensor\(\)"
    refusals: list[tuple[str, Callable[[], Any]]] = [
        (by_parts, lambda: nn.init.eye_(weight)),
        (by_parts, lambda: weight.data.__setitem__(rows, 0.0)),
        (from_plain, lambda: nn.init.sparse_(weight, 0.5)),
        (from_plain, lambda: weight.data.mul_(whole)),
        (from_plain, lambda: torch._foreach_mul_([bias.data, weight.data], [placed_as(bias, whole[0]), whole])),
        (r"copy_: .* into parameter '1.weight' \(a ragged tensor", lambda: weight.data.copy_(whole[:3])),
        (r"set .data of parameter '1.weight' \(a ragged tensor", lambda: setattr(weight, "data", whole)),
        (r"^parameter '1.weight': aten.lerp_.* would write .* use full_tensor\(\)", lambda: plain.data.lerp_(weight, 0.5)),
        (r"^parameter '1.weight': aten.mul.out would write .* use full_tensor\(\)", lambda: torch.mul(weight.data, 2.0, out=whole.clone())),
        (r"^parameter '1.weight': aten.copy_", lambda: torch._foreach_copy_([whole.clone()], [weight.data])),
        (r"^parameter '1.weight' has no memory of its own", lambda: weight.detach().numpy()),
        (r"meets .* change a module \(pruning, other embeddings\) before", lambda: prune.custom_from_mask(model[1], "weight", whole)),
    ]
    for text, write in refusals:
        with pytest.raises((RuntimeError, ValueError), match=text):
            write()
    with torch.no_grad():
        nn.init.eye_(written := weight.full_tensor())
        weight.copy_(written)
        weight.mul_(placed_as(weight, whole))
        nn.init.eye_(plain).mul_(whole)
    torch.testing.assert_close(full(weight), plain.detach())


@on_threads(2)
def test_a_step_with_a_plain_gradient_names_the_parameter(rank: int, world: int) -> None:
    model, alone = layers(), layers()
    for module in (*model, model):
        fully_shard(module)
    for one in (model, alone):
        one(torch.ones(2, 8)).sum().backward()
    gradient = alone[1].weight.grad
    model[1].weight.grad = gradient
    for kind in (torch.optim.AdamW, torch.optim.SGD):
        with pytest.raises(ValueError, match=r"^the gradient of parameter '1.weight' is a plain tensor of .*distribute_tensor"):
            kind(model.parameters(), lr=0.1).step()
    model[1].weight.grad = placed_as(model[1].weight, gradient)
    for one in (model, alone):
        torch.optim.AdamW(one.parameters(), lr=0.1).step()
    model[1].weight.grad = gradient
    with implicit_replication():
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    hooked = torch.optim.SGD(model.parameters(), lr=0.1)
    hooked.register_step_pre_hook(lambda *_: setattr(model[1].weight, "grad", placed_as(model[1].weight, gradient)))
    for _ in range(2):
        hooked.step()
        model[1].weight.grad = gradient
    for _ in range(3):
        torch.optim.SGD(alone.parameters(), lr=0.1).step()
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(full(p), q.detach())


@on_threads(2)
def test_a_parameter_of_another_shape_is_named(rank: int, world: int) -> None:
    model = fully_shard(layers())
    model[1].weight = nn.Parameter(placed_as(model[1].weight, torch.ones(16, 8)))
    with pytest.raises(ValueError, match=r"'1.weight' of shape \(8, 8\) was replaced by one of shape \(16, 8\) after fully_shard"):
        model(torch.ones(2, 8))
