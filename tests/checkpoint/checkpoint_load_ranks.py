"""Functions that ranks run in the loading tests; processes can import them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from vescale_ray import checkpoint as ckpt
from vescale_ray import fully_shard
from vescale_ray.models.llama import Llama, LlamaConfig

CONFIG = LlamaConfig(dim=24, layers=2, heads=2, kv_heads=1, ffn=40, vocab=31)


def sharded_llama(kind: str, world: int, device: str) -> Llama:
    shard: Any = fully_shard if kind == "ours" else torch_fully_shard
    mesh = init_device_mesh("cpu", (world,))
    with torch.device(device):
        model = Llama(CONFIG)
    for layer in model.layers:
        shard(layer, mesh=mesh)
    shard(model, mesh=mesh)
    return model


def whole(model: nn.Module) -> dict[str, np.ndarray]:
    with torch.no_grad():
        return {n: (t.full_tensor() if isinstance(t, DTensor) else t).clone().numpy() for n, t in model.state_dict().items()}


def losses_of(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    tokens = torch.randint(0, 31, (2, 9), generator=torch.Generator().manual_seed(3))
    losses = []
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def meta_rank(rank: int, world: int, root: str, save: bool) -> dict[str, Any]:
    """Save a trained model of each kind, or load it into a model that was built and sharded on the meta device; then train on."""
    found = {}
    for kind in ("ours", "torch"):
        torch.manual_seed(0)
        model = sharded_llama(kind, world, "cpu" if save else "meta")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        state: dict[str, Any] = {"model": model, "optimizer": optimizer}
        if save:
            losses_of(model, optimizer, 2)
            ckpt.save(state, f"{root}/{kind}", 2, timeout_s=20)
        else:
            ckpt.load(state, f"{root}/{kind}")
        found[kind] = whole(model), losses_of(model, optimizer, 2)
    return found


def partial_rank(rank: int, world: int, root: str) -> dict[str, np.ndarray]:
    mesh = init_device_mesh("cpu", (world,))
    target: dict[str, torch.Tensor] = {f"blocks.{i}.w": distribute_tensor(torch.zeros(7, 5), mesh, [Shard(i % 2)]) for i in range(3)}
    target["new"] = torch.zeros(2)
    ckpt.load({"model": target}, root, exclude="blocks.1.*", allow_missing="new", allow_unexpected="head", rename={"blocks.*": "layers.*"})
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).numpy() for name, t in target.items()}


def fallback_rank(rank: int, world: int, root: str) -> tuple[int, tuple[str, ...], np.ndarray]:
    """Load only the rank's own rows, so that one rank alone meets the damage."""
    mesh = init_device_mesh("cpu", (world,))
    target = {"w": distribute_tensor(torch.zeros(64, 1024), mesh, [Shard(0)])}
    loaded = ckpt.load({"model": target}, root)
    return loaded.step, loaded.skipped, target["w"].full_tensor().numpy()
