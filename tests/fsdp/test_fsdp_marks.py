"""Attributes that users set on parameters: scales, optimizer groups, gradients of their own."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.fsdp.towers import Tower, alike, inputs, seeded, shard_tower
from tests.ranks import on_threads
from vescale_ray.fsdp import fully_shard


class Scaled(nn.Linear):
    """Reads an attribute of its weight in forward, and counts calls in another."""

    def forward(self, x):
        self.weight.calls = getattr(self.weight, "calls", 0) + 1
        return super().forward(x) * self.weight.scale


def scaled_tower():
    model = seeded(Tower)
    for layer in model.layers:
        layer[0].__class__ = Scaled
        layer[0].weight.scale = 3.0
    return model


@on_threads(2)
def test_attributes_of_parameters_are_there_in_forward_and_after(rank, world):
    ours, alone = shard_tower(scaled_tower()), scaled_tower()
    alike(ours, alone, rank, world)
    for model in (ours, alone):
        for layer in model.layers:
            layer[0].weight.scale = 0.5
    alike(ours, alone, rank, world)
    assert [layer[0].weight.calls for layer in ours.layers] == [2] * len(ours.layers)
    for layer in ours.layers:
        del layer[0].weight.scale
    with pytest.raises(AttributeError, match="scale"):
        ours(inputs(rank, world))


class Fused(torch.autograd.Function):
    """Adds the weight's gradient to an attribute, as fused kernels do, and returns none."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        ctx.weight = weight
        return functional.linear(x, weight)

    @staticmethod
    def backward(ctx, grad):
        ctx.weight.main_grad = grad.t() @ ctx.saved_tensors[0]
        return None, None


@on_threads(2)
def test_a_gradient_in_an_attribute_is_not_lost_silently(rank, world):
    ours = shard_tower(seeded(Tower))
    head = ours.layers[0][0]
    head.forward = lambda x: Fused.apply(x, head.weight) + head.bias
    ours(inputs(rank, world)).sum().backward()
    assert head.weight.main_grad.shape == head.weight.shape
    head.weight.grad = head.weight.main_grad
    with pytest.raises(ValueError, match=r"the gradient of parameter 'layers.0.0.weight' is a plain tensor of shape"):
        torch.optim.SGD(ours.parameters(), lr=0.1).step()


@on_threads(1)
def test_gradients_from_before_sharding_are_named_in_one_warning(rank, world):
    model = seeded(Tower)
    model(inputs(rank, world)).sum().backward()
    with pytest.warns(UserWarning, match=r"parameters 0.weight, 0.bias have gradients, which fully_shard drops: .* or zero_grad\(\)"):
        fully_shard(model.layers[0])
    model.zero_grad(set_to_none=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fully_shard(model.layers[1])
