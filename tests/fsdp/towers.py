"""A model of equal layers, the data of a step, and comparisons of a sharded model with the same model on one process."""

from __future__ import annotations

import torch
from torch import nn

from tests.fsdp.transformer import apart, full, part
from vescale_ray.fsdp import fully_shard


def filled(model, seed=0, scale=0.3):
    """The model with the same parameters on every rank. (All threads share torch's random state.)"""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, dtype=p.dtype, generator=generator) * scale)
    return model


def seeded(make, seed=0):
    return filled(make(), seed)


class Tower(nn.Module):
    """Equal layers, so that units can share buffers."""

    def __init__(self, layers=5, width=20):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers))
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def shard_tower(model, how=fully_shard, **options):
    for layer in model.layers:
        how(layer, **options)
    return how(model, **options)


def inputs(rank, world, step=0, width=20, rows=12):
    return part(torch.randn(rows, width, generator=torch.Generator().manual_seed(77 + step)), rank, world)


def grads(model):
    return {name: None if p.grad is None else full(p.grad) for name, p in model.named_parameters()}


def same(ours, theirs, bound=1e-5):
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        got = ours[name]
        assert (got is None) == (expected is None), name
        if expected is not None:
            assert apart(got, expected) <= bound, name


def alike(ours, alone, rank, world, steps=range(1)):
    """Check that the gradients of each step are those of one process with the data of all ranks."""
    for step in steps:
        for model, r, w in ((ours, rank, world), (alone, 0, 1)):
            model.zero_grad()
            model(inputs(r, w, step)).square().mean().backward()
        same(grads(ours), grads(alone))
