"""All ranks gather states in one order, regardless of each rank's addresses, hashes and divisions."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.ranks import on_processes
from vescale_ray import fully_shard
from vescale_ray.optim import AdamW8bit, Flat, build_optimizer
from vescale_ray.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

WHOLE = StateDictOptions(full_state_dict=True)
STEPS = 2


def net() -> nn.Sequential:
    """Small layers between large ones, so that a rank has only some of them, and other ranks have others."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(6 + i, 24), nn.LayerNorm(24), nn.Linear(24, 7 + i)) for i in range(4)]
    return nn.Sequential(*blocks)


def batch(step: int) -> torch.Tensor:
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(step))


def address(p: Any) -> int:
    return int(p._local_tensor.untyped_storage()._cdata)


def sharded(rank: int) -> nn.Sequential:
    """A model whose buffers have another order in memory on rank 1 than on rank 0."""
    wanted: list[Any] = [None]
    for attempt in range(100 if rank else 1):
        made = net()
        garbage = [torch.empty(n) for n in random.Random(rank * attempt).choices(range(1, 4000), k=30 * rank)]
        del garbage[:: 1 + attempt % 3]
        for block in made if rank == 0 else reversed(made):
            fully_shard(block)
        order = sorted(range(4), key=lambda i: address(next(made[i].parameters())))
        if rank == 0 and attempt == 0:
            wanted, chosen = [order], made
        if attempt == 0:
            dist.broadcast_object_list(wanted)
        if rank == 1 and order != wanted[0]:
            chosen = made
            break
    else:
        assert rank == 0, f"the addresses of rank 1 are in the order of rank 0's: {order}"
    dist.barrier()
    return chosen


def otherwise(m: nn.Module) -> list[nn.Parameter]:
    """The parameters in an order that differs by rank, as in a set."""
    return list(m.parameters())[:: 1 - 2 * dist.get_rank()]


OPTIMIZERS: dict[str, Any] = {
    "flat": lambda m: Flat(m.parameters(), torch.optim.AdamW, lr=0.1),
    "a set": lambda m: torch.optim.AdamW(otherwise(m), lr=0.1),
    "combined": lambda m: build_optimizer(m, {"name": "muon", "lr": 0.1}),
    "8 bits": lambda m: AdamW8bit(otherwise(m), lr=0.1),
}


def gathers(rank: int, world: int, kind: str) -> None:
    model = fully_shard(sharded(rank))
    optimizer = OPTIMIZERS[kind](model)
    for step in range(STEPS):
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    whole = get_optimizer_state_dict(model, optimizer, options=WHOLE)
    names = [name for name, _ in model.named_parameters()]
    assert sorted(whole["state"]) == sorted(names)
    orders: list[Any] = [None] * world
    dist.all_gather_object(orders, [(name, list(states)) for name, states in whole["state"].items()])
    assert orders[0] == orders[1]
    if kind in ("flat", "a set"):
        alone = net().double()
        steps = torch.optim.AdamW(alone.parameters(), lr=0.1)
        for step in range(STEPS):
            alone(batch(step).double()).square().mean().backward()
            steps.step()
            steps.zero_grad()
        for name, p in alone.named_parameters():
            for key, value in steps.state[p].items():
                assert torch.allclose(whole["state"][name][key].double(), value.double(), rtol=1e-4, atol=1e-6), (name, key)
    # Load the whole state, from rank 0 alone, into a new optimizer, and gather it again.
    again = fully_shard(sharded(rank))
    fresh = OPTIMIZERS[kind](again)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(again, fresh, whole if rank == 0 else {}, options=options)
    back = get_optimizer_state_dict(again, fresh, options=WHOLE)
    for name, states in whole["state"].items():
        for key, value in states.items():
            assert torch.equal(torch.as_tensor(back["state"][name][key]), torch.as_tensor(value)), (name, key)


@on_processes(2)
def test_whole_states_are_gathered_in_parameter_order(rank: int, world: int) -> None:
    for kind in OPTIMIZERS:
        gathers(rank, world, kind)
