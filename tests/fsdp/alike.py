"""A small model and its batches, for behaviour that must be torch's."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn

from tests.fsdp.towers import filled
from vescale_ray.fsdp import fully_shard


class Net(nn.Module):
    def __init__(self, width: int = 24, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        filled(self, 5, 0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def sharded(model: nn.Module | None = None, how: Any = fully_shard, **options: Any) -> Any:
    model = Net() if model is None else model
    for layer in model.layers:
        how(layer, **options)
    return how(model, **options)


def batch(rank: int, width: int = 24) -> torch.Tensor:
    return torch.randn(4, width, generator=torch.Generator().manual_seed(rank))


def averaged(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    tensor = tensor.clone()
    dist.all_reduce(tensor, group=group)
    return tensor / dist.get_world_size(group)
