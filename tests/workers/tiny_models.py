"""Tiny models for the tests of this folder, as a job's factory or loss names them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class DropoutModel(nn.Module):
    """Embedding, dropout and head. Its forward depends on the random generator; its unit is ``body``."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 24)
        self.body = nn.Sequential(nn.Linear(24, 24, bias=True), nn.Dropout(0.5))
        self.head = nn.Linear(24, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(self.embed(tokens)))

    @torch.no_grad()
    def init_parameter(self, name: str, full: Tensor, generator: torch.Generator) -> None:
        full.normal_(0, 0.1, generator=generator)


class Experts(nn.Module):
    """A sequence uses one of 24 experts, so in a slot of two at most two have a gradient. ``gains`` is a buffer."""

    gains: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(24, 24) for _ in range(24))
        self.register_buffer("gains", torch.empty(24), persistent=False)

    def forward(self, x: Tensor, which: Tensor) -> Tensor:
        chosen = zip(x, which.tolist(), strict=True)
        return x + torch.stack([self.experts[k](row).tanh() * self.gains[k] for row, k in chosen])


class ExpertsModel(nn.Module):
    """Embedding, experts and head. Its unit is ``body``."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 24)
        self.body = Experts()
        self.head = nn.Linear(24, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(self.embed(tokens), tokens[:, 0] % 24))

    @torch.no_grad()
    def init_parameter(self, name: str, full: Tensor, generator: torch.Generator) -> None:
        full.normal_(0, 0.1, generator=generator)

    def init_buffer(self, name: str, full: Tensor) -> None:
        assert name == "body.gains"
        full.copy_(torch.linspace(0.5, 1.5, 24))


class PatchModel(DropoutModel):
    """A model for sequences of whole patches of four. Its unit is ``body``."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(24, 24, bias=True))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.head(x + self.body(x.unflatten(1, (-1, 4)).mean(2)).tanh().repeat_interleave(4, 1))


class SpreadModel(PatchModel):
    """A model whose output for a single token is NaN, because it computes a spread."""

    shortest_input = 1

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.head(x + self.body(x.std(1, keepdim=True)).tanh())


class OneWeight(nn.Module):
    """A model with a single weight, so that all ranks but one own nothing. Its unit is ``body``."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(1, 1, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.body(tokens[..., None] / 256.0) * torch.linspace(-1.0, 1.0, 256)

    @torch.no_grad()
    def init_parameter(self, name: str, full: Tensor, generator: torch.Generator) -> None:
        full.normal_(0, 0.1, generator=generator)


class Plain(nn.Module):
    """A model of torch's own modules. ``dim`` is its width; the head is tied to the embedding."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, dim)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(dim, dim), nn.Tanh(), nn.LayerNorm(dim)) for _ in range(2))
        self.head = nn.Linear(dim, 256, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return {"scores": self.head(x)}


def loss_of_scores(output: dict[str, Tensor], targets: Tensor) -> Tensor:
    return F.cross_entropy(output["scores"].flatten(0, 1), targets.flatten(), reduction="sum")


def with_buffer() -> nn.Module:
    model = DropoutModel()
    model.register_buffer("seen", torch.zeros(1))
    return model


def of_16_bits() -> nn.Module:
    return DropoutModel().bfloat16()
