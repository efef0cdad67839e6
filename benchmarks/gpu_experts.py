"""Checks of experts on a GPU: the grouped kernel against one product per expert, below ``fully_shard`` and expert parallelism."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from vescale_ray import fully_shard, parallelize_experts
from vescale_ray.models import moe

SIZES: dict[str, Any] = {"dim": 256, "layers": 1, "heads": 4, "kv_heads": 2, "experts": 8, "top_k": 2, "ffn": 192, "vocab": 512}


@contextmanager
def _products(has_kernel: Callable[..., bool]) -> Iterator[list[bool]]:
    """Let ``has_kernel`` say whether a product takes the kernel. Yields what it said."""
    said: list[bool] = []
    usual = moe._has_kernel
    moe._has_kernel = lambda *operands: said.append(has_kernel(*operands)) or said[-1]  # type: ignore[func-returns-value]
    try:
        yield said
    finally:
        moe._has_kernel = usual


def check_experts(device: torch.device) -> str:
    """Compare loss and gradients in BF16. On the CPU, torch's own loop stands for the kernel."""
    original = moe.build(**SIZES)
    original.reset_parameters(0)
    tokens = torch.randint(512, (2, 200), generator=torch.Generator().manual_seed(0)).to(device)
    found = []
    usual = moe._has_kernel if device.type == "cuda" else lambda *_: True
    for has_kernel in (usual, lambda *_: False):
        mesh = init_device_mesh(device.type, (1, 1), mesh_dim_names=("dp", "ep"))
        model: Any = copy.deepcopy(original).to(device)
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for experts in parallelize_experts(model, mesh["ep"]):
            fully_shard(experts, mesh=mesh["dp"], mp_policy=policy)
        fully_shard(model.layers[0], mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        with _products(has_kernel) as said:
            output = model(tokens)
            loss = output.logits.float().square().mean() + output.aux_loss
            loss.backward()
        assert said and all(said) == (has_kernel is usual), f"of {len(said)} products, {sum(said)} took the kernel"
        found.append([loss.detach().reshape(1), *(p.grad.full_tensor() for p in model.parameters())])
    furthest = max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) for a, b in zip(*found, strict=True))
    assert furthest <= 2e-2, f"loss or gradients differ from those of single products by {furthest:.1e}"
    return f"loss and gradients equal those of single products to {furthest:.1e}"
