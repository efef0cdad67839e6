"""A small Llama and its Muon."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vescale_ray.models.llama import Llama, LlamaConfig
from vescale_ray.optim import OptimizerConfig

SIZES = LlamaConfig(dim=16, layers=2, heads=2, kv_heads=1, ffn=24, vocab=32, max_seq=8)


MUON = OptimizerConfig("muon", lr=0.02, weight_decay=0.5)


def llama(tie: bool = False) -> Llama:
    model = Llama(LlamaConfig(**{**SIZES.__dict__, "tie": tie}))
    model.reset_parameters(3)
    return model


def loss_of(model: nn.Module, step: int) -> Tensor:
    tokens = torch.randint(0, 32, (2, 9), generator=torch.Generator().manual_seed(step))
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
