"""Gradients are cleared and parameters are frozen in the middle of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.fsdp.towers import filled
from tests.ranks import on_processes, on_threads
from vescale_ray import fully_shard


def net() -> Any:
    inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    return filled(nn.Sequential(nn.Linear(6, 6), inner, nn.Linear(6, 6)))


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
@pytest.mark.usefixtures("usual_threshold")
@on_threads(2)
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


class Branches(nn.ModuleList):
    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self[which](x)


class Net(nn.Module):
    """Each micro-batch of each rank uses one of three branches."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.branches = Branches(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.last(self.branches(torch.tanh(self.first(x)), which))


def no_sync(model: Any, last: bool) -> None:
    model.set_requires_gradient_sync(last)


def not_last(model: Any, last: bool) -> None:
    model.set_is_last_backward(last)


def no_all_reduce(model: Any, last: bool) -> None:
    model.set_requires_all_reduce(last)


def no_sync_with_zeros(model: Any, last: bool) -> None:
    model.set_reduce_scatter_unused_params(True)
    model.set_requires_gradient_sync(last)


FROZEN = {
    "one": lambda m: [m.branches[0].weight],
    "of the root": lambda m: [m.first.weight, m.first.bias],
    "a unit": lambda m: list(m.branches.parameters()),
    "all but one": lambda m: [p for p in m.parameters() if p is not m.last.bias],
}


@on_processes(4)
def test_frozen_parameters_keep_their_earlier_gradients(rank: int, world: int) -> None:
    """A parameter is frozen after a micro-batch whose gradients are not reduced yet. They are, with those of the next one."""
    for accumulate in (no_sync, not_last, no_all_reduce, no_sync_with_zeros):
        for frozen in FROZEN:
            freezes_between(rank, world, accumulate, frozen)


def freezes_between(rank: int, world: int, accumulate: Callable[[Any, bool], None], frozen: str) -> None:
    torch.manual_seed(0)
    alone, ours = Net(), Net()
    ours.load_state_dict(alone.state_dict())
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if accumulate is no_all_reduce else None
    for unit in (ours.branches, ours):
        fully_shard(unit, mesh=mesh)
    for p in [*FROZEN[frozen](alone), *FROZEN[frozen](ours)]:
        p.requires_grad_(True)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (alone, ours)]
    for step in range(2):
        for micro in range(2):
            for model in (alone, ours):
                for p in FROZEN[frozen](model):
                    p.requires_grad_(micro == 0)
            accumulate(ours, micro == 1)
            inputs = [torch.randn(2, 6, generator=torch.Generator().manual_seed(100 * step + 10 * micro + r)) for r in range(world)]
            which = [(r + step) % 2 if micro == 0 else 2 * ((r + step) % 2) for r in range(world)]
            for r in range(world):
                (alone(inputs[r], which[r]).square().mean() / world).backward()
            ours(inputs[rank], which[rank]).square().mean().backward()
        for (key, p), q in zip(alone.named_parameters(), ours.parameters(), strict=True):
            name = f"{accumulate.__name__}, {frozen}, {key}"
            if p.grad is None or q.grad is None:
                zero = accumulate is no_sync_with_zeros and p.grad is None and q.grad is not None and not q.grad.full_tensor().any()
                assert zero or p.grad is q.grad is None, f"{name}: {p.grad} in one process, {q.grad}"
            else:
                torch.testing.assert_close(q.grad.full_tensor(), p.grad, msg=lambda text, name=name: f"{name}: {text}")  # type: ignore[misc]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def halve(model: Any) -> None:
    for param in model.parameters():
        param.data = param.data * 0.5


def assign(model: Any) -> None:
    full = {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in model.state_dict().items()}
    model.load_state_dict({name: value * 0.5 for name, value in full.items()}, assign=True)


def evaluate(model: Any) -> None:
    with torch.no_grad():
        model(model(torch.ones(2, 6)))


def gather(model: Any) -> None:
    if hasattr(model, "unshard"):
        model.unshard()
        model.reshard()


def cast_and_back(model: Any) -> None:
    model.double()
    model(torch.ones(2, 6, dtype=torch.float64))
    model.float()


@pytest.mark.parametrize(
    ("then", "reshard"), [(halve, None), (halve, False), (assign, None), (evaluate, False), (gather, None), (cast_and_back, False)]
)
@on_threads(2)
def test_the_unit_of_a_replaced_layer_goes_on(rank: int, world: int, reshard: bool | None, then: Callable[[Any], None]) -> None:
    """The unit still holds the parameters of the layer that was taken away, and no module does."""
    models = net(), sharded(reshard)
    for model in models:
        model(torch.ones(2, 6)).sum().backward()
        model[2] = filled(nn.Linear(6, 6), 1)
    fully_shard(models[1][2])
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for model in models:
        model.zero_grad()
        then(model)
    for step in range(2):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer = optimizer if then is not assign else torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer.zero_grad()
            (model(x).square().mean() + model(2 * x).square().mean()).backward()  # between the two the root is gathered
            optimizer.step()
    for (name, p), q in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(q.full_tensor(), p.data, msg=lambda text, name=name: f"{name}: {text}")  # type: ignore[misc]


@pytest.mark.parametrize("reshard", [None, False])
@pytest.mark.parametrize("cast", [False, True])
@on_threads(2)
def test_assigned_values_are_first_seen_in_inference_mode(rank: int, world: int, reshard: bool | None, cast: bool) -> None:
    """Averaged weights go in by ``.data =``, and the evaluation is in inference mode; then training goes on."""
    models = net(), sharded(reshard)
    for model in models:
        model = model.double() if cast else model
        halve(model)
    x = torch.ones(2, 6, dtype=torch.float64 if cast else torch.float32)
    with torch.inference_mode():
        torch.testing.assert_close(models[1](x), models[0](x))
    for model in models:
        model(x).square().mean().backward()
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(q.grad.full_tensor(), p.grad)
