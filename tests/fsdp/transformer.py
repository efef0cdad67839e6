"""A small plain PyTorch transformer for the engine's tests, with sizes that divide nothing evenly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

VOCAB, DIM, HIDDEN, EXPERTS, SEQ = 31, 20, 36, 7, 6


class Mixture(nn.Module):
    """Soft mixture of experts with fused 3-D weights and a 0-dimensional gain."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, DIM, 11) * 0.1)
        self.down = nn.Parameter(torch.randn(EXPERTS, 11, DIM) * 0.1)
        self.gain = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.router(x).softmax(-1)
        hidden = torch.einsum("bsd,edh->bseh", x, self.up).relu()
        out = torch.einsum("bseh,ehd->bsed", hidden, self.down)
        return (out * gate.unsqueeze(-1)).sum(-2) * self.gain


class Block(nn.Module):
    def __init__(self, mixture: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM, bias=False)
        self.out = nn.Linear(DIM, DIM)
        self.ffn: nn.Module = Mixture() if mixture else nn.Sequential(nn.Linear(DIM, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.ffn(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, layers: int = 3, tie: bool = False, recompute: str | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block(mixture=i % 2 == 1) for i in range(layers))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        if tie:
            self.head.weight = self.embed.weight
        self.recompute = recompute

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            if self.recompute is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.recompute == "reentrant")
        return self.head(self.norm(x))


def build(seed: int = 0, **options) -> Transformer:
    torch.manual_seed(seed)
    return Transformer(**options)


def batch(step: int, size: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """The global batch of a step, the same for every world size that divides 12."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(VOCAB, (size, SEQ + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())


def part(tensor: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    size = tensor.shape[0] // world
    return tensor[rank * size : (rank + 1) * size]


def full(tensor: Any) -> torch.Tensor:
    """The whole tensor, sharded or not."""
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def apart(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest difference relative to the largest element."""
    return ((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-12)).item() if theirs.numel() else 0.0


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter in full, by name. Collective if the model is sharded."""
    return {name: full(p).float() for name, p in model.named_parameters()}


def worst(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> tuple[float, str]:
    """The largest difference of any parameter, and the parameter's name."""
    assert mine.keys() == theirs.keys()
    return max((apart(mine[name].reshape(theirs[name].shape), theirs[name]), name) for name in theirs)


def train(
    model: Any,
    optimizer: torch.optim.Optimizer,
    rank: int,
    world: int,
    *,
    steps: int,
    accumulate: int = 1,
    sync_every: bool = True,
    clip: Callable | None = None,
) -> list[float]:
    """Train on this rank's part of each global batch, in ``accumulate`` micro-batches; return the global losses."""
    losses = []
    for step in range(steps):
        tokens, targets = (part(t, rank, world) for t in batch(step))
        total = torch.zeros(())
        for micro in range(accumulate):
            last = micro == accumulate - 1
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(sync_every or last)
                model.set_is_last_backward(last)
            loss = loss_of(model, part(tokens, micro, accumulate), part(targets, micro, accumulate)) / accumulate
            loss.backward()
            total += loss.detach()
        if clip is not None:
            clip(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        if world > 1:
            dist.all_reduce(total)
        losses.append(total.item() / world)
    return losses
