"""A model with quantized weights, and the reference: one process that computes with the quantized values of whole weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.fsdp.transformer import full
from vescale_ray.fsdp import fully_shard
from vescale_ray.quantization import Fp8Block
from vescale_ray.quantization.fp8 import dequantize, quantize

WIDTH = 64
TILE, EDGE, POWER = Fp8Block(16, 24), Fp8Block(32, 32), Fp8Block(16, 16, "power_of_two")
"""Formats whose tiles divide none of the weights' sides evenly, or all of them."""


class Layer(nn.Module):
    """A dense product, a stack of five experts whose last tiles are smaller, and a norm that is not quantized."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.dense = nn.Linear(WIDTH, 72)
        self.up = nn.Parameter(torch.zeros(5, 72, WIDTH))
        self.down = nn.Parameter(torch.zeros(5, WIDTH, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.einsum("bi,eij->ebj", self.dense(self.norm(x)).tanh(), self.up).tanh()
        return x + torch.bmm(hidden, self.down).sum(0)


class Model(nn.Module):
    def __init__(self, layers: int = 2, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return self.head(x)


def model_of(recompute: bool = False, layers: int = 2) -> Model:
    model, generator = Model(layers, recompute), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.1)
    return model


def policy(name: str, param: nn.Parameter) -> Fp8Block | None:
    if name.endswith("up"):
        return TILE
    if name.endswith("down"):
        return POWER
    return EDGE if name.endswith("dense.weight") else None


def sharded(model: Model, **options: Any) -> Any:
    for layer in model.layers:
        fully_shard(layer, quantize_policy=policy, **options)
    return fully_shard(model, quantize_policy=policy, **options)


def rounded(name: str, value: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The value with which forward computes: through FP8 if the policy gives the parameter a format."""
    form = policy(name, nn.Parameter(value))
    return value.to(dtype) if form is None else dequantize(*quantize(value, form), form, dtype=dtype)


class Reference:
    """FP32 master weights and a compute model of their rounded values. Gradients of the latter count for the former."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.master, self.dtype = model_of(), dtype
        self.optimizer = torch.optim.AdamW(self.master.parameters(), lr=1e-2)

    def backward(self, batches: list[torch.Tensor]) -> None:
        compute = copy.deepcopy(self.master).to(self.dtype)
        with torch.no_grad():
            for (name, p), master in zip(compute.named_parameters(), self.master.parameters(), strict=True):
                p.copy_(rounded(name, master, self.dtype))
        for x in batches:
            compute(x.to(self.dtype)).float().square().mean().backward()
        for p, master in zip(compute.parameters(), self.master.parameters(), strict=True):
            master.grad = p.grad.float() if p.grad is not None else None

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


@contextmanager
def gathered(model: Any) -> Iterator[dict[str, torch.Tensor]]:
    """Every parameter as forward sees it."""
    units = [*model.layers, model]
    for unit in units:
        unit.unshard()
    yield {name: p.detach().clone() for name, p in model.named_parameters()}
    for unit in units:
        unit.reshard()


def whole_values(model: Any) -> dict[str, torch.Tensor]:
    return {name: full(p).detach() for name, p in model.named_parameters()}
