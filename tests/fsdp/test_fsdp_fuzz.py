"""Random programs on two ranks against a plain module.

The programs vary units, kinds of sharding, orders, checkpoints, branches without gradient, and switches. All buffers are address ranges
here, regardless of size, so that a read of a buffer whose memory has gone ends the process.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from tests.fsdp.towers import grads, inputs, same, seeded
from tests.fsdp.units import unit_of
from tests.ranks import on_processes, run_threads
from vescale_ray.fsdp import Sharding, fully_shard
from vescale_ray.fsdp.buffers import memory


class Program(nn.Module):
    """A model that runs its layers as ``plan`` says."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(20, 20), nn.Tanh()) for _ in range(layers))
        self.extra = nn.Linear(20, 5)
        self.plan: list[tuple] = []

    def forward(self, x):
        for kind, i, j in self.plan:
            first, second = self.layers[i], self.layers[j]
            if kind == "call":
                x = first(x)
            elif kind == "recompute":
                x = checkpoint(lambda y, first=first, second=second: second(first(y)), x, use_reentrant=False)
            elif kind == "recompute_reentrant":
                x = checkpoint(lambda y, first=first, second=second: second(first(y)), x.requires_grad_(), use_reentrant=True)
            elif kind == "branch":
                x = first(x) + second(x.detach())
            elif kind == "residual":
                x = x + first(x)
        return self.extra(x)


KINDS = ["call", "call", "call", "recompute", "recompute_reentrant", "branch", "residual"]
MODES = ["plain", "plain", "plain", "plain", "two_graphs", "without_sync", "kept", "evaluated", "frozen"]


def random_plan(rnd, layers):
    return [(rnd.choice(KINDS), rnd.randrange(layers), rnd.randrange(layers)) for _ in range(rnd.randint(2, 6))]


def run_program(rank, world, seed):
    rnd = random.Random(seed)
    layers = rnd.randint(2, 5)
    ours, alone = seeded(lambda: Program(layers)), seeded(lambda: Program(layers))
    sharding = rnd.choice([None, None, None, Sharding.zero1(), Sharding.zero2(), Sharding.zero3(), Sharding.ddp()])
    along_rows = rnd.choice([None, None, lambda p: Shard(0), lambda p: Shard(1) if p.dim() == 2 and p.shape[1] % world == 0 else None])
    for layer in ours.layers:
        if rnd.random() < 0.85:
            fully_shard(layer, reshard_after_forward=rnd.choice([None, True, False]), sharding=sharding, shard_placement_fn=along_rows)
    fully_shard(ours, reshard_after_forward=rnd.choice([None, True, False]), sharding=sharding, shard_placement_fn=along_rows)
    plans = [random_plan(rnd, layers), random_plan(rnd, layers)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in (ours, alone)]
    mode = "plain"
    for step in range(12):
        if rnd.random() < 0.3:
            mode = rnd.choice(MODES)
        if rnd.random() < 0.2:
            plans = [random_plan(rnd, layers), plans[0]]
        frozen = rnd.randrange(layers)
        for model, r, w in ((ours, rank, world), (alone, 0, 1)):
            one_step(model, mode, plans, frozen, inputs(r, w, step), inputs(r, w, step + 20))
        ours.reshard()
        mine, expected = grads(ours), grads(alone)
        if mode == "without_sync":  # a unit that the last micro-batch did not use keeps its gradients until the next one
            expected = {name: None if mine[name] is None else grad for name, grad in expected.items()}
            for unit in unit_of(ours).schedule.units:
                for group in unit.groups:
                    group.grads.discard()
        same(mine, expected)
        for optimizer in optimizers:
            if mode != "without_sync" and step % 3:
                optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            for wanted, parameter in zip(alone.parameters(), ours.parameters(), strict=True):
                torch.testing.assert_close(parameter.full_tensor(), wanted, rtol=1e-3, atol=1e-5)
                wanted.copy_(parameter.full_tensor())  # so that rounding differences do not accumulate


def one_step(model, mode, plans, frozen, x, other):
    sharded = hasattr(model, "set_requires_gradient_sync")
    model.plan = plans[0]
    if mode == "frozen":
        model.layers[frozen].requires_grad_(False)
    if mode == "evaluated":
        with torch.no_grad():
            model(other)
    if mode == "two_graphs":
        first = model(x)
        model.plan = plans[1]
        second = model(other)
        first.square().mean().backward()
        second.square().mean().backward()
    elif mode in ("without_sync", "kept"):
        if sharded:
            model.set_requires_gradient_sync(mode == "kept")
            model.set_reshard_after_backward(mode != "kept")
        model(x).square().mean().backward()
        if sharded:
            model.set_requires_gradient_sync(True)
            model.set_reshard_after_backward(True)
        model(other).square().mean().backward()
    else:
        model(x).square().mean().backward()
    if mode == "frozen":
        for unit in [model, *model.layers]:
            if hasattr(unit, "reshard"):
                unit.reshard()
        model.layers[frozen].requires_grad_(True)


@pytest.mark.parametrize(
    ("world", "seeds"),
    [(2, range(20, 23)), *(pytest.param(*more, marks=pytest.mark.slow) for more in ((2, range(23, 28)), (3, range(30, 36))))],
)
@on_processes()
def test_random_programs_are_right_with_shards_in_gather_buffers(rank, world, seeds):
    memory.MAPPED_BYTES = 0
    for seed in seeds:
        run_program(rank, world, seed)


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(8, 16))])
def test_a_random_program_gives_the_gradients_of_a_plain_module(seed, monkeypatch):
    monkeypatch.setattr(memory, "MAPPED_BYTES", 0)
    run_threads(2, run_program, seed)
