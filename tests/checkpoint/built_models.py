"""Sharded models for multi-process checkpoint tests."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


class Mlp(nn.Module):
    """A model with odd sizes, so that shards are uneven and some are empty, and with a buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(7, 13)
        self.blocks = nn.ModuleList(nn.Linear(13, 13) for _ in range(2))
        self.last = nn.Linear(13, 3, bias=False)
        self.gain = nn.Parameter(torch.randn(2))
        self.register_buffer("count", torch.tensor([seed, 4]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = torch.tanh(block(x)) * self.gain.mean()
        return self.last(x)


def fsdp2(seed: int, world: int) -> tuple[Mlp, torch.optim.AdamW]:
    mesh = init_device_mesh("cpu", (world,))
    model = Mlp(seed)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01 * (seed + 1))


def ragged(seed: int, world: int) -> tuple[Mlp, torch.optim.AdamW]:
    """Model whose parameters are RaggedDTensors. The cuts differ for every world size, and one parameter has empty ranks."""
    from vescale_ray import RaggedDTensor, RaggedShard
    from vescale_ray import distribute_tensor as distribute_ragged

    mesh = init_device_mesh("cpu", (world,))
    model = Mlp(seed)
    for index, (name, parameter) in enumerate(list(model.named_parameters())):
        rng = np.random.RandomState(100 * world + index)
        cuts = [0, *sorted(rng.randint(0, parameter.numel() + 1, world - 1)), parameter.numel()]
        counts = [int(b - a) for a, b in zip(cuts, cuts[1:], strict=False)]
        placement = RaggedShard(tuple(range(parameter.dim())), counts)
        owner = model.get_submodule(name.rpartition(".")[0])
        sharded = distribute_ragged(parameter.detach(), mesh, [placement])
        assert isinstance(sharded, RaggedDTensor)
        owner.register_parameter(name.rpartition(".")[2], nn.Parameter(sharded))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01 * (seed + 1))


BUILDERS = {"fsdp2": fsdp2, "ragged": ragged}


def gathered(tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    with torch.no_grad():
        return {n: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone().numpy() for n, t in tensors.items()}


def full_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, np.ndarray]:
    """Gather every tensor with its own full_tensor(): the oracle."""
    states = {name: optimizer.state.get(parameter, {}) for name, parameter in model.named_parameters()}
    return gathered({**model.state_dict(), **{f"{name}/{key}": value for name, held in states.items() for key, value in held.items()}})


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Make one step with deterministic gradients and no forward pass, so that it works for any sharding."""
    for index, parameter in enumerate(model.parameters()):
        with torch.no_grad():
            parameter.grad = parameter * (0.1 + index)
    optimizer.step()
    optimizer.zero_grad()
