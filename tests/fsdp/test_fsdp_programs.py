"""Training programs that people write around a model: averages of frozen models, in-place operations, retries after an error."""

from __future__ import annotations

import contextlib
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
from vescale_ray.compat.core import has_function_mode
from vescale_ray.fsdp import MixedPrecisionPolicy, fully_shard

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


@on_threads(2)
def test_a_frozen_model_may_run_in_a_backward_hook(rank: int, world: int) -> None:
    """A critic scales the gradient of another model. Afterwards its parameters are sharded."""
    results = []
    for how in (sharded, lambda m, units=(): m):
        model, critic = (filled(nn.Sequential(nn.Linear(D, D), nn.Linear(D, D)), seed, 0.3) for seed in (1, 2))
        for one in (model, critic):
            how(one, [one[0]])
        filled(model, 1, 0.3), filled(critic.requires_grad_(False), 2, 0.3)
        y = model(batch())

        def scaled(gradient: torch.Tensor, critic: Any = critic) -> torch.Tensor:
            with torch.no_grad():
                return gradient * critic(batch(1)).mean()

        y.register_hook(scaled)
        y.square().mean().backward()
        assert how is not sharded or all(isinstance(p, DTensor) for p in critic.parameters())
        results.append([full(p.grad) for p in model.parameters()])
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


# -- what a unit gets is what its caller gave ------------------------------------------------------------------------------------


class Looks(nn.Module):
    """A block whose computation depends on the objects that it gets, not only on their values."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.f, self.g, self.how = nn.Linear(D, D), nn.Linear(D, D), how

    def forward(self, h: Any, other: Any = None) -> torch.Tensor:
        if self.how == "tensor":
            return self.f(h).tanh() if other is h else self.g(h).tanh()
        if self.how == "attribute":
            return self.f(h) * getattr(h, "scale", 1.0) + self.g(h)
        h.append(self.f(h[-1]).tanh())
        return self.g(other[-1])


class Around(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.blocks, self.how = nn.Linear(D, D), nn.ModuleList(Looks(how) for _ in range(2)), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        total = h.sum() * 0.0
        for block in self.blocks:
            if self.how == "list":
                seen = [h]
                h = block(seen, other=seen)
                total = total + seen[1].square().mean()
            elif self.how == "attribute":
                h.scale = 3.0  # type: ignore[attr-defined]
                h = block(h)
            else:
                h = block(h, other=h)
        return h.square().mean() + total


@pytest.mark.parametrize("how", ["tensor", "list", "attribute"])
@pytest.mark.parametrize("policy", [None, torch.float64], ids=["as given", "cast"])
@on_threads(2)
def test_a_unit_sees_its_callers_objects(rank: int, world: int, how: str, policy: torch.dtype | None) -> None:
    """One object given twice is one object inside, and a tensor keeps its attributes."""
    ours, alone = filled(Around(how), 5, 0.3), filled(Around(how), 5, 0.3)
    for block in ours.blocks:
        fully_shard(block, mp_policy=MixedPrecisionPolicy(param_dtype=policy, output_dtype=torch.float32))
    fully_shard(ours)
    for model in (ours, alone):
        model(batch()).backward()
    for (name, p), q in zip(alone.named_parameters(), ours.parameters(), strict=True):
        assert (q.grad is None) == (p.grad is None), name
        if p.grad is not None:
            torch.testing.assert_close(full(q.grad), p.grad, rtol=1e-4, atol=1e-5, msg=name)


# -- a unit that calls itself ----------------------------------------------------------------------------------------------------


class Recursive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(D, D)

    def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
        if depth == 0:
            raise ValueError("a leaf")
        try:
            return self(x, depth - 1) + self.f(x)
        except ValueError:
            return self.f(x).tanh()


@on_threads(2)
def test_a_unit_may_call_itself_and_catch_the_error(rank: int, world: int) -> None:
    same_as_alone(lambda: nn.Sequential(Recursive(), nn.Linear(D, 2)), lambda m: m[:1], lambda m: m(batch()).square().mean())


# -- backwards inside of a forward -----------------------------------------------------------------------------------------------


class Forces(nn.Module):
    """An energy and its negative gradient, as molecular models compute them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.detach().requires_grad_()
        energy = self.net(x).sum(1)
        (slope,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return energy, -slope


class Learns(nn.Module):
    """A layer that takes a step on its own loss in its forward (test-time training)."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.out = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (slope,) = torch.autograd.grad((self.f(x) - x).square().mean(), self.f.weight, create_graph=True)
        return self.out(F.linear(x, self.f.weight - 0.1 * slope, self.f.bias))


class Local(nn.Module):
    """Layers that train by losses of their own, as in greedy layer-wise training."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x.detach()).tanh()
            x.square().mean().backward()
        return x


def force_loss(model: nn.Module) -> torch.Tensor:
    energy, force = model(batch())
    return energy.square().mean() + force.square().mean()


@pytest.mark.parametrize(
    ("make", "loss"),
    [
        pytest.param(Forces, force_loss, id="forces"),
        pytest.param(lambda: nn.Sequential(Learns(), Learns()), lambda m: m(batch()).square().mean(), id="test-time training"),
    ],
)
@on_threads(2)
def test_a_unit_may_differentiate_in_its_forward(
    rank: int, world: int, make: Callable[[], nn.Module], loss: Callable[[nn.Module], torch.Tensor]
) -> None:
    same_as_alone(make, lambda m: m if isinstance(m, nn.Sequential) else (), loss)


@pytest.mark.parametrize("units", [False, True], ids=["root", "layers"])
@on_threads(2)
def test_losses_inside_a_forward_train_their_layers(rank: int, world: int, units: bool) -> None:
    """No backward follows the forward."""
    ours, alone = Local(), filled(Local(), 5, 0.3)
    sharded(ours, [*ours.layers] if units else [])
    params = list(ours.parameters())
    for _ in range(2):  # gradients add up
        for model in (ours, alone):
            model(batch())
    for (name, p), q in zip(alone.named_parameters(), params, strict=True):
        assert q.grad is not None, name
        torch.testing.assert_close(full(q.grad), p.grad, rtol=1e-5, atol=1e-6, msg=name)


# -- forwards in grad mode without a backward ------------------------------------------------------------------------------------


@on_threads(2)
def test_weights_after_a_step_are_the_new_ones(rank: int, world: int) -> None:
    """A validation that forgot ``no_grad`` leaves the root gathered, until the step."""
    ours, alone = nn.Sequential(nn.Linear(D, D), nn.Linear(D, 2)), filled(nn.Sequential(nn.Linear(D, D), nn.Linear(D, 2)), 5, 0.3)
    sharded(ours, [ours[0]])
    for model in (ours, alone):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model(batch()).square().mean().backward()
        model(batch(1))
        optimizer.step()
    for (name, p), (_, q) in zip(alone.named_parameters(), ours.named_parameters(), strict=True):
        assert isinstance(q, DTensor), name
        torch.testing.assert_close(full(q), p.detach(), rtol=1e-5, atol=1e-6, msg=name)


# -- replaced linear layers ------------------------------------------------------------------------------------------------------


class Halved(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            args = (args[0], args[1] * 0.5, *args[2:])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("how", ["function", "mode", "class", "swap"])
@on_threads(1)
def test_a_replaced_linear_layer_is_differentiated(rank: int, world: int, how: str) -> None:
    """Layers are large enough for the gradient that the matrix product writes."""
    linear, forward = F.linear, nn.Linear.forward

    class Other(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return linear(input, self.weight * 0.5, self.bias)

    grads = []
    for sharding in (fully_shard, lambda m: m):
        model = filled(nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300)), 5, 0.05)
        sharding(model)
        x = torch.randn(4, 300, generator=torch.Generator().manual_seed(0))
        with pytest.MonkeyPatch.context() as patch:
            if how == "function":
                patch.setattr(F, "linear", lambda x, w, b=None: linear(x, w * 0.5, b))
            elif how == "class":
                patch.setattr(nn.Linear, "forward", lambda self, x: forward(self, x).tanh())
            elif how == "swap":
                for layer in model:
                    layer.__class__ = Other
            with Halved() if how == "mode" else contextlib.nullcontext():
                model(x).square().mean().backward()
        grads.append([full(p.grad) for p in model.parameters()])
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-6)


def test_a_default_device_replaces_no_function() -> None:
    """``torch.set_default_device`` is a TorchFunctionMode, too."""
    torch.set_default_device("cpu")
    try:
        assert not has_function_mode()
        with Halved():
            assert has_function_mode()
    finally:
        torch.set_default_device(None)
    assert not has_function_mode()
