"""Training programs that people write around a model: averages of frozen models, in-place operations, retries after an error."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from tests.fsdp.towers import filled
from tests.fsdp.transformer import full
from tests.ranks import on_threads
from vescale_ray.fsdp import fully_shard

D = 6


def batch(step: int = 0) -> torch.Tensor:
    """The same on all ranks, so that the mean over the ranks is the gradient of one process."""
    return torch.randn(4, D, generator=torch.Generator().manual_seed(step))


def sharded(model: nn.Module, units: Iterable[nn.Module] = ()) -> nn.Module:
    filled(model, 5, 0.3)
    for unit in units:
        fully_shard(unit)
    return fully_shard(model)


def same_as_alone(make: Callable[[], nn.Module], units: Callable[[Any], Iterable[nn.Module]], loss: Callable[[nn.Module], Any]) -> None:
    """Compare the gradients with those of one process."""
    ours, alone = make(), filled(make(), 5, 0.3)
    sharded(ours, units(ours))
    for model in (ours, alone):
        loss(model).backward()
    for (name, p), q in zip(alone.named_parameters(), ours.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None, name
        torch.testing.assert_close(full(q.grad), p.grad, rtol=1e-5, atol=1e-6, msg=name)


# -- frozen models ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [None, False], ids=["root", "reshard_after_forward=False"])
@on_threads(2)
def test_average_of_a_frozen_model_that_ran_with_gradients(rank: int, world: int, keep: bool | None) -> None:
    """A teacher of BYOL or DINO runs in grad mode. No backward follows that would reshard it."""
    results = []
    for how in (lambda m: fully_shard(m, reshard_after_forward=keep), lambda m: m):
        student, teacher = (filled(nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 2)), seed, 0.3) for seed in (1, 2))
        how(student), how(teacher.requires_grad_(False))
        optimizer = torch.optim.SGD(student.parameters(), 0.1)
        for step in range(3):
            optimizer.zero_grad()
            (student(batch(step)) - teacher(batch(step))).square().mean().backward()
            optimizer.step()
            with torch.no_grad():
                for p, q in zip(teacher.parameters(), student.parameters(), strict=True):
                    p.lerp_(q, 0.1)
        results.append([full(p) for p in teacher.parameters()])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


# -- inputs that are changed in place --------------------------------------------------------------------------------------------


class Adds(nn.Module):
    """A residual block that adds to its input."""

    def __init__(self, returns: bool) -> None:
        super().__init__()
        self.f, self.returns = nn.Linear(D, D), returns

    def forward(self, h: torch.Tensor) -> torch.Tensor | None:
        h += self.f(h * 0.5).tanh()
        return h if self.returns else None


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f, self.g = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, h: torch.Tensor, a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h.add_(self.f(a).tanh())
        h[:, 0] = 0
        return self.g(h), a


class Stream(nn.Module):
    """Blocks around a residual stream, which they change."""

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.first, self.blocks, self.last = nn.Linear(D, D), nn.ModuleList(blocks), nn.Linear(D, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x) * 1.0
        for block in self.blocks:
            out = block(h, h * 2) if isinstance(block, Two) else block(h)
            h = h if out is None else out[0] if isinstance(out, tuple) else out
        return self.last(h)


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(D, D)), id="relu first"),
        pytest.param(lambda: Adds(True), id="adds and returns"),
        pytest.param(lambda: Adds(False), id="adds to the caller's tensor"),
        pytest.param(Two, id="one of two inputs"),
    ],
)
@on_threads(2)
def test_a_unit_may_change_its_input_in_place(rank: int, world: int, block: Callable[[], nn.Module]) -> None:
    same_as_alone(lambda: Stream(block() for _ in range(2)), lambda m: m.blocks, lambda m: m(batch()).square().mean())


# -- forwards inside of a handler ------------------------------------------------------------------------------------------------


class Writes(nn.Module):
    """A block that writes into a dict and returns None."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(D, D)

    def forward(self, state: dict[str, torch.Tensor]) -> None:
        state["h"] = state["h"] + self.f(state["h"]).tanh()


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Writes() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = {"h": x}
        for block in self.blocks:
            block(state)
        return state["h"]


@on_threads(2)
def test_forward_without_a_result_counts_in_an_except_block(rank: int, world: int) -> None:
    """A retry with a smaller batch runs while Python still shows the handled error."""

    def retried(model: nn.Module) -> torch.Tensor:
        try:
            raise MemoryError("the first batch")
        except MemoryError:
            loss = model(batch()).square().mean()
            assert isinstance(loss, torch.Tensor)
            return loss

    same_as_alone(Stateful, lambda m: m.blocks, retried)


@on_threads(2)
def test_a_failed_forward_in_an_except_block_leaves_nothing(rank: int, world: int) -> None:
    model = sharded(Stateful())
    for _ in range(2):
        try:
            raise MemoryError("the first batch")
        except MemoryError:
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                model(torch.ones(2, D + 1))
    assert all(isinstance(p, DTensor) for p in model.parameters())
    model(batch()).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


# -- parameters that something else holds ----------------------------------------------------------------------------------------


class Held(nn.Module):
    """A model that reads its weight from another place than its attribute."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(D, D))
        kept: dict[str, Any] = {
            "list": [self.w],
            "partial": functools.partial(F.linear, weight=self.w),
            "closure": lambda x, w=self.w: x @ w.T,
        }
        self.kept: Any = kept[how]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.kept[0]) if isinstance(self.kept, list) else self.kept(x)


@pytest.mark.parametrize("how", ["list", "partial", "closure"])
@on_threads(2)
def test_an_original_that_something_holds_is_named(rank: int, world: int, how: str) -> None:
    model = fully_shard(Held(how))
    loss = model(batch()).sum()
    with pytest.raises(RuntimeError, match="the original of parameter 'w' got a gradient, but fully_shard has replaced it"):
        loss.backward()


@on_threads(2)
def test_a_list_that_is_filled_after_sharding_trains(rank: int, world: int) -> None:
    """The remedy of the refusal."""
    model = fully_shard(Held("list"))
    model.kept = []
    model.register_forward_pre_hook(lambda m, args: setattr(m, "kept", [m.w]))
    model(batch()).sum().backward()
    assert model.w.grad is not None


@on_threads(2)
def test_a_copy_made_before_sharding_trains_by_itself(rank: int, world: int) -> None:
    model = nn.Linear(D, D)
    other = copy.deepcopy(model)
    fully_shard(model)
    other(batch()).sum().backward()
    assert other.weight.grad is not None
