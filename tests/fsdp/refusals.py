"""A refusal as data: the user's mistake, the exception, and the remedy, which then trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from vescale_ray import fully_shard

WIDTH, WORLD = 8, 2


class Net(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head = nn.Linear(width, 4)
        self.register_buffer("scale", torch.ones(4))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(x) * self.scale


def half_frozen() -> Net:
    model = Net()
    model.head.requires_grad_(False)
    return model


def fill(model: Any) -> Any:
    """Fill the model without random numbers, because threads share the generator."""
    with torch.no_grad():
        dense = [p for p in model.parameters() if not isinstance(p, nn.UninitializedParameter) and p.layout is torch.strided]
        for index, param in enumerate(p for p in dense if p.is_floating_point()):
            if not param.is_meta and not isinstance(param, DTensor):
                param.copy_(torch.arange(param.numel()).add(index).sin().view(param.shape) / 2)
    return model


def batch(rank: int, step: int, width: int = WIDTH) -> torch.Tensor:
    return torch.arange(3 * width, dtype=torch.float64).add(7 * rank + 3 * step).cos().view(3, width)


def trains_as_plain(rank: int, model: Any, plain: Any, width: int = WIDTH) -> None:
    """Check that two steps of ``model`` on this rank's batches equal two steps of ``plain`` on all batches."""
    trained = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1) for m in (model, plain)]
    for step in range(2):
        for optimizer in trained:
            optimizer.zero_grad()
        model(batch(rank, step, width)).square().mean().backward()
        (sum(plain(batch(one, step, width)).square().mean() for one in range(WORLD)) / WORLD).backward()
        for optimizer in trained:
            optimizer.step()
    expected = dict(plain.named_parameters())
    for name, param in model.named_parameters():
        if param.requires_grad:
            full = param.full_tensor() if isinstance(param, DTensor) else param
            torch.testing.assert_close(full, expected[name], rtol=0, atol=1e-12, msg=name)


def snapshot(model: nn.Module) -> dict[Any, Any]:
    """All properties of the model that ``fully_shard`` changes."""
    seen: dict[Any, Any] = {}
    for name, module in model.named_modules():
        seen[name, "class"] = type(module)
        seen[name, "attributes"] = sorted(module.__dict__)
        seen[name, "hooks"] = {
            k: [*map(id, v.values())] for k, v in module.__dict__.items() if k.endswith("_hooks") and isinstance(v, dict)
        }
        seen[name, "buffers"] = {k: id(v) for k, v in module._buffers.items()}
        seen[name, "parameters"] = {k: (id(v), v._version, sorted(v.__dict__)) for k, v in module._parameters.items() if v is not None}
    return seen


@dataclass
class Case:
    """A user's mistake (``wrong``), its exception, and the remedy that the message names (``right``), applied to the same model."""

    wrong: Callable[[Any], Any]
    kind: type[BaseException]
    words: tuple[str, ...]
    right: Callable[[Any], Any] = fully_shard
    build: Callable[[], Any] = Net
    plain: Callable[[], Any] = Net
    width: int = WIDTH


def names(*names_: str) -> DeviceMesh:
    shape = (1,) * (len(names_) - 1) + (WORLD,)
    return init_device_mesh("cpu", shape, mesh_dim_names=names_)


def each_layer(model: Any) -> Any:
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)
