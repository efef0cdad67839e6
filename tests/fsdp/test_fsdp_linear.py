"""Weight gradients that linear layers write into the buffer themselves, against a plain module in the same test."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.fsdp.towers import filled
from tests.fsdp.transformer import apart, full
from tests.fsdp.units import unit_of
from tests.ranks import on_threads, run_threads
from vescale_ray.fsdp import fully_shard
from vescale_ray.fsdp.groups import linear
from vescale_ray.fsdp.groups.gradients import Gradients

WIDTH = 12


class Net(nn.Module):
    """Linear layers for two units, called in the way that ``how`` names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.extra = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, how: str = "plain") -> torch.Tensor:
        if how == "twice":
            x = self.second(self.first(self.first(x)).tanh())
        elif how == "also by hand":  # others use the weight too, before and after its layer
            x = F.linear(self.first(x @ self.first.weight).tanh(), self.first.weight)
        elif how == "reentrant inside":
            x = self.first(checkpoint(lambda y: self.first(y).tanh(), self.first(x), use_reentrant=True))
        elif how == "recomputed":
            x = checkpoint(lambda y: self.second(self.first(y).tanh()), x, use_reentrant=False)
        elif how == "broadcast":
            x = self.second(self.first(x).sum(0, keepdim=True).expand(5, -1, -1)).transpose(0, 1)
        elif how == "changed in place":
            x = self.extra(self.second(self.first(x).relu_()).add_(1)[0]).tanh_()
        elif how == "one row":
            x = self.first(x[0, 0])
        elif how == "no rows":
            x = self.first(x[:, :0]).sum() + self.second(x)
        elif how == "detached input":
            x = self.first(x.detach()) + self.second(x)
        else:
            x = self.second(self.first(x).tanh())
        return x


HOWS = [
    "changed in place",
    "plain",
    "twice",
    "also by hand",
    "reentrant inside",
    "recomputed",
    "broadcast",
    "one row",
    "no rows",
    "detached input",
]


def pair() -> tuple[Any, Net]:
    return fully_shard(filled(Net(), 3, 0.4)), filled(Net(), 3, 0.4)


def samples(rank: int, world: int, step: int) -> torch.Tensor:
    return torch.randn(2 * world, 3, WIDTH, generator=torch.Generator().manual_seed(step)).chunk(world)[rank]


def agree(ours: nn.Module, alone: nn.Module, scale: float = 1.0) -> None:
    for (name, p), q in zip(ours.named_parameters(), alone.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if q.grad is not None:
            assert apart(full(p.grad), q.grad * scale) <= 1e-5, name


@pytest.mark.parametrize("how", HOWS)
@on_threads(2)
def test_gradients_are_those_of_a_plain_module(rank: int, world: int, how: str) -> None:
    ours, alone = pair()
    for step in range(3):
        for micro in range(2):
            ours.set_requires_gradient_sync(micro == 1)
            ours(samples(rank, world, 2 * step + micro).requires_grad_(), how).square().sum().backward()
            for r in range(world):
                alone(samples(r, world, 2 * step + micro).requires_grad_(), how).square().sum().backward()
        agree(ours, alone, 1 / world)
        ours.zero_grad()
        alone.zero_grad()


def written(rank: int, world: int) -> list[bool]:
    """True if each of a step's first gradients was taken over without a copy."""
    ours, _ = pair()
    group = unit_of(ours).groups[0]
    taken = []
    ours.set_requires_gradient_sync(False)
    ours(samples(rank, world, 0)).sum().backward()
    taken.append(not group.grads._claims and sum(group.grads._arrived) == 3)
    return taken


def test_backward_leaves_no_gradient_in_flight() -> None:
    assert run_threads(2, written) == [[True]] * 2


def test_a_gradient_is_taken_over_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    from vescale_ray.fsdp.groups import gradients

    same: list[bool] = []

    def noted(grad: torch.Tensor, view: torch.Tensor) -> bool:
        same.append(is_same(grad, view))
        return same[-1]

    is_same = gradients._is_same
    monkeypatch.setattr(gradients, "_is_same", noted)
    run_threads(2, written)
    assert same == [True] * 4, "two weights on each of two ranks"


@on_threads(2)
def test_autograd_grad_user_hooks_and_autocast_work_as_plain(rank: int, world: int) -> None:
    ours, alone = pair()
    x = samples(rank, world, 1)
    # autograd.grad returns gradients and accumulates none, so nothing may stay in the buffer.
    y = x.clone().requires_grad_()
    (got,) = torch.autograd.grad(ours(y).square().sum(), y)
    z = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(alone(z).square().sum(), z)
    assert apart(got, expected) <= 1e-5
    ours(x).sum().backward()
    for r in range(world):
        alone(samples(r, world, 1)).sum().backward()
    agree(ours, alone, 1 / world)
    ours.zero_grad()
    alone.zero_grad()
    # A user's hook on the gathered weight changes its gradient.
    ours.unshard()
    handle = ours.first.weight.register_hook(lambda grad: grad * 3)
    ours(x).sum().backward()
    handle.remove()
    other = alone.first.weight.register_hook(lambda grad: grad * 3)
    for r in range(world):
        alone(samples(r, world, 1)).sum().backward()
    other.remove()
    agree(ours, alone, 1 / world)
    ours.zero_grad()
    alone.zero_grad()
    # Under autocast torch computes the gradients, because its products have another dtype.
    with torch.autocast("cpu", torch.bfloat16):
        assert ours(x).dtype == torch.bfloat16
        ours(x).float().sum().backward()
    with torch.autocast("cpu", torch.bfloat16):
        for r in range(world):
            alone(samples(r, world, 1)).float().sum().backward()
    for (name, p), q in zip(ours.named_parameters(), alone.parameters(), strict=True):
        if q.grad is not None:
            assert apart(full(p.grad), q.grad / world) <= 3e-2, name


def test_small_layers_and_other_classes_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) + 1

    mine, own = Mine(3, 3), nn.Linear(3, 3)
    own.forward = lambda input: input  # type: ignore[method-assign,assignment]
    for module in (mine, own):
        before = module.__dict__.get("forward")
        linear.adopt_linear(module, None)
        assert module.__dict__.get("forward") is before
    monkeypatch.setattr(linear, "LEAST_NUMEL", 10)
    plain = nn.Linear(3, 3)
    linear.adopt_linear(plain, None)
    gradients: Any = Gradients
    plain.weight.__dict__["_vescale_sink"] = (weakref.ref(gradients), 0)
    assert plain(torch.ones(2, 3)).grad_fn.name() == "AddmmBackward0"


@on_threads(2)
def test_complex_weights_have_the_gradients_of_a_plain_module(rank: int, world: int) -> None:
    models: list[Any] = []
    for _ in range(2):
        models.append(filled(nn.Sequential(*(nn.Linear(WIDTH, WIDTH, dtype=torch.complex64) for _ in range(2))), 3, 1.0))
    fully_shard(models[0])
    x = torch.randn(4, WIDTH, dtype=torch.complex64, generator=torch.Generator().manual_seed(1))
    for model in models:
        model(x).abs().square().mean().backward()
    agree(models[0], models[1])


def tower() -> tuple[Any, Any]:
    """Three layers as units, and the same layers unsharded."""
    models: list[Any] = [nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(3))) for _ in "ab"]
    models[1].load_state_dict(models[0].state_dict())
    for layer in models[0]:
        fully_shard(layer)
    return fully_shard(models[0]), models[1]


@on_threads(2)
def test_weight_frozen_after_forward_holds_up_no_other_gradient(rank: int, world: int) -> None:
    ours, alone = tower()
    alone.load_state_dict({name: full(p) for name, p in ours.named_parameters()})
    for step in range(3):
        for model in (ours, alone):
            y = model(samples(0, 1, step))
            if step == 1:
                model[1][0].weight.requires_grad_(False)
            y.square().sum().backward()
        agree(ours, alone)
        ours.zero_grad()
        alone.zero_grad()


@on_threads(2)
def test_gradient_kept_by_a_user_hook_stays_unchanged(rank: int, world: int) -> None:
    ours, _ = tower()
    seen: list[torch.Tensor] = []
    ours[1].unshard()
    handle = ours[1][0].weight.register_hook(seen.append)
    ours(samples(rank, world, 0)).sum().backward()
    handle.remove()
    expected = full(ours[1][0].weight.grad) * world
    whole = seen[0].clone()
    torch.distributed.all_reduce(whole)
    assert torch.allclose(whole, expected, atol=1e-5)


@on_threads(2)
def test_a_gradient_that_never_arrives_holds_up_nothing(rank: int, world: int) -> None:
    """A gradient that was written but never arrives, as if autograd had dropped it, blocks nothing."""
    ours, alone = pair()
    grads = unit_of(ours).groups[0].grads
    own = grads.accumulate
    index = next(i for i, p in enumerate(grads.params) if p.name == "second.weight")
    grads.accumulate = lambda i: own(i) if i != index else None
    ours(samples(rank, world, 1)).sum().backward()
    assert not grads.awaits_claimed and ours.second.weight.grad is None and ours.first.weight.grad is not None
    grads.accumulate = own
    ours.zero_grad()
    ours(samples(rank, world, 2)).sum().backward()
    for r in range(world):
        alone(samples(r, world, 2)).sum().backward()
    agree(ours, alone, 1 / world)


class Decayed(nn.Module):
    """A parametrization with a state, as that of ``spectral_norm``."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return weight / self.calls


@on_threads(2)
def test_a_parametrization_runs_once_per_forward(rank: int, world: int) -> None:
    ours, alone = (filled(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), 3, 0.3) for _ in "ab")
    for model in (ours, alone):
        nn.utils.parametrize.register_parametrization(model[1], "weight", Decayed())
    fully_shard(ours[1])
    fully_shard(ours)
    for step in range(2):
        for model in (ours, alone):
            model(samples(0, 1, step)).square().sum().backward()
        assert model[1].parametrizations.weight[0].calls == ours[1].parametrizations.weight[0].calls == 2 + step
        agree(ours, alone)
