"""Values assigned to ``.data``, and casts of single modules, reach the forward, the optimizer and the state dict, or raise an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from tests.fsdp.towers import filled
from tests.fsdp.transformer import full
from tests.ranks import on_threads
from vescale_ray import fully_shard


class Net(nn.Module):
    """Each module computes in the dtype of its weight. The norm and the head belong to the root."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in (*self.layers, self.norm, self.head):
            x = module(x.to(module.weight.dtype)).float()
        return x


def models(change: Callable[[Any], object] | None = None, **options: Any) -> tuple[Any, Any]:
    """A sharded model, and the same model unsharded. Both are changed before the first one is sharded."""
    alone, ours = filled(Net(), 3, 0.3), filled(Net(), 3, 0.3)
    if change is not None:
        change(alone)
        change(ours)
    for layer in ours.layers:
        fully_shard(layer, **options)
    return fully_shard(ours, **options), alone


def batch() -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(5))


def trains_alike(*both: Any) -> None:
    for model in both:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(batch()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    ours, alone = both
    for (name, p), q in zip(ours.named_parameters(), alone.named_parameters(), strict=True):
        assert name == q[0] and p.dtype == q[1].dtype
        torch.testing.assert_close(full(p), q[1].detach(), rtol=1e-5, atol=1e-6, msg=name)


def double(model: Any) -> None:
    for p in model.head.parameters():
        p.data = p.data * 2


@pytest.mark.usefixtures("usual_threshold")
@on_threads(2)
def test_assigned_values_are_gathered_by_unshard(rank: int, world: int) -> None:
    for steps in (False, True):
        for reshard_after_forward in (None, False):
            ours, alone = models(reshard_after_forward=reshard_after_forward)
            if steps:
                trains_alike(ours, alone)
            double(ours)
            double(alone)
            ours.unshard()
            torch.testing.assert_close(ours.head.weight, alone.head.weight, rtol=1e-5, atol=1e-6)
            ours.reshard()
            trains_alike(ours, alone)


@on_threads(2)
def test_unshard_names_a_parameter_that_was_replaced(rank: int, world: int) -> None:
    ours, _ = models()
    ours(batch()).sum().backward()
    ours.head.weight = nn.Parameter(torch.ones(8, 8))
    with pytest.raises(ValueError, match=r"'head\.weight' was replaced"):
        ours.unshard()


def gathered_by_forward(model: Any) -> Callable[[], object]:
    return model(batch()).square().mean().backward  # type: ignore[no-any-return]


def gathered_by_user(model: Any) -> Callable[[], object]:
    model.unshard()
    return model.reshard  # type: ignore[no-any-return]


@pytest.mark.parametrize("gather", [gathered_by_forward, gathered_by_user])
@pytest.mark.usefixtures("usual_threshold")
@on_threads(2)
def test_assignment_to_a_gathered_parameter_raises(rank: int, world: int, gather: Callable[[Any], Callable[[], object]]) -> None:
    """The assigned tensor would replace the gathered one for good: later forwards would compute with it, whatever the optimizer does."""
    for assign in (double, lambda m: m.head.double()):
        for reshard_after_forward in (None, False):
            ours, alone = models(reshard_after_forward=reshard_after_forward)
            reshard = gather(ours)
            assign(ours)
            with pytest.raises(RuntimeError, match=r"assigned through \.data, which is lost.*: head\.weight, head\.bias\. Call reshard"):
                reshard()
            ours.reset_iter_state()
            ours.zero_grad()
            trains_alike(ours, alone)
            # The remedy: reshard, then write to the sharded parameters.
            ours.reshard()
            assign(ours)
            if ours.head.weight.dtype is torch.float32:
                assign(alone)
                trains_alike(ours, alone)


@pytest.mark.usefixtures("usual_threshold")
@on_threads(2)
def test_cast_of_some_parameters_of_a_unit_is_refused(rank: int, world: int) -> None:
    for steps in (False, True):
        for cast in (lambda m: m.norm.double(), lambda m: m.norm.bfloat16()):
            ours, alone = models()
            if steps:
                trains_alike(ours, alone)
            cast(ours)
            said = r"parameter 'norm\.weight' was changed from torch\.float32 on cpu to .* and other parameters of unit 'the root' were not"
            with torch.no_grad(), pytest.raises(ValueError, match=said):
                ours(batch())
            with pytest.raises(ValueError, match=said):
                ours.unshard()
            # Either remedy: cast the whole unit, or before fully_shard.
            cast(alone)
            ours.double()
            alone.double()
            trains_alike(ours, alone)
            trains_alike(*models(cast))


@on_threads(2)
def test_units_may_be_cast_one_by_one(rank: int, world: int) -> None:
    ours, alone = models()
    for model in (ours, alone):
        model.layers.double()
    trains_alike(ours, alone)


@pytest.mark.usefixtures("usual_threshold")
@on_threads(2)
def test_penalty_on_parameters_joins_the_loss_as_the_error_says(rank: int, world: int) -> None:
    def penalty(model: Any) -> Any:
        return sum(p.square().sum() for p in list(model.parameters())) * 0.01

    ours, alone = models()
    with pytest.raises(ValueError, match=r"call full_tensor\(\) on the other operand, or make this one a DTensor \(DTensor\.from_local"):
        _ = penalty(ours) + ours(batch()).square().mean()
    for add in (lambda a, b: a.full_tensor() + b, lambda a, b: a + DTensor.from_local(b, a.device_mesh, [Replicate()])):
        ours, alone = models()
        (penalty(alone) + alone(batch()).square().mean()).backward()
        add(penalty(ours), ours(batch()).square().mean()).backward()
        for (name, p), q in zip(ours.named_parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(full(p.grad), q.grad, rtol=1e-5, atol=1e-6, msg=name)
