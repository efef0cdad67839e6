"""Functions that ranks run in the tests with other programs' formats; processes can import them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.checkpoint.built_models import Mlp, fsdp2, gathered, one_step, ragged
from vescale_ray import checkpoint as ckpt


def placed(kind: str, world: int) -> tuple[dict[str, torch.Tensor], int]:
    """Zeroed tensors of an Mlp under one kind of sharding, and the bytes of them that this rank holds."""
    model = Mlp(1)
    if kind == "plain":
        tensors: dict[str, torch.Tensor] = {name: torch.zeros_like(t) for name, t in model.state_dict().items()}
    elif kind == "ragged":
        tensors = dict(ragged(1, world)[0].state_dict())
        for tensor in tensors.values():
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).zero_()
    else:
        two = kind == "two dimensions" and world == 4
        mesh = init_device_mesh("cpu", (2, 2) if two else (world,))
        placements = {"fsdp2": [Shard(0)], "columns": [Shard(1)], "two dimensions": [Shard(0), Shard(1)] if two else [Shard(0)]}[kind]
        tensors = {
            name: distribute_tensor(torch.zeros_like(t), mesh, placements if t.dim() == 2 else [Replicate()] * mesh.ndim)
            for name, t in model.state_dict().items()
        }
    held = sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors.values())
    return tensors, held


def dcp_load_rank(rank: int, world: int, roots: dict[str, str]) -> Any:
    found = {}
    for builder, root in roots.items():
        for kind in ("fsdp2", "columns", "two dimensions", "plain", "ragged"):
            tensors, held = placed(kind, world)
            reader = ckpt.DcpReader(root)
            dcp.load({"model": tensors}, storage_reader=reader)
            found[builder, kind] = gathered(tensors), held, reader.bytes_read
    return found


def dcp_foreign_save_rank(rank: int, world: int, folder: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Save a sharded model and its optimizer with stock dcp.save.

    All tensors are sharded by rows, except one that is sharded by columns.

    Returns the weights, and the weights one step later.
    """
    model, optimizer = fsdp2(0, world)
    one_step(model, optimizer)
    state: dict[str, Any] = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
    mesh = init_device_mesh("cpu", (world,))
    whole_first = state["model"]["first.weight"].full_tensor()
    state["model"]["first.weight"] = distribute_tensor(whole_first, mesh, [Shard(1)])
    dcp.save(state, checkpoint_id=Path(folder, "dcp"))
    saved = gathered(model.state_dict())
    one_step(model, optimizer)
    return saved, gathered(model.state_dict())


def dcp_into_model_rank(rank: int, world: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind, build in (("fsdp2", fsdp2), ("ragged", ragged)):
        model, _ = build(1, world)
        done = ckpt.import_dcp(Path(folder, "dcp"), model)
        found[kind] = gathered(model.state_dict()), done.bytes
    for kind, build in (("fsdp2 state", fsdp2), ("ragged state", ragged)):
        model, optimizer = build(1, world)
        ckpt.import_dcp(Path(folder, "dcp"), {"model": model, "optimizer": optimizer})
        one_step(model, optimizer)
        found[kind] = gathered(model.state_dict())
    found["commit"] = ckpt.import_dcp(Path(folder, "dcp"), Path(folder, "root"), object_bytes=500).sha256
    return found


def dcp_export_rank(rank: int, world: int, root: str, folder: str) -> tuple[str, ...]:
    return ckpt.export_dcp(root, None, folder).files
