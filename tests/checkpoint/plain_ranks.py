"""Functions that ranks run in the tests of plain values.

Each rank saves its own loader state; another number of ranks loads it.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from vescale_ray import checkpoint as ckpt


def loader_state(rank: int) -> dict[str, Any]:
    """State of a shuffled loader, as torchdata stores it, with arrays and bytes in addition."""
    generator = torch.Generator().manual_seed(rank)
    return {
        "yielded": 4 + rank,
        "sampler": {"generator": generator.get_state(), "weights": [torch.full((3,), rank / 3, dtype=torch.bfloat16)]},
        "numpy": np.random.RandomState(rank).get_state(),
        "cursor": bytes(range(rank, 200)) * 4,
        "at": np.int64(2**40 + rank),
    }


def digest(value: Any) -> str:
    """Digest of a value with its type and dtype."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{tuple(value.shape)}{value.view(-1).view(torch.uint8).tolist()}"
    if isinstance(value, (np.ndarray, np.generic)):
        return f"{type(value).__name__}{value.dtype.str}{value.shape}{value.tobytes()!r}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key!r}:{digest(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return type(value).__name__ + "(" + ",".join(map(digest, value)) + ")"
    return f"{type(value).__name__} {value!r}"


def weights(world: int) -> torch.Tensor:
    return distribute_tensor(torch.arange(12.0).view(6, 2), init_device_mesh("cpu", (world,)), [Shard(0)])


def save_rank(rank: int, world: int, root: str, beside: bool) -> tuple[str | None, list[str]]:
    """Save twice, each rank with its own loader state.

    Returns the error, if any, and the logged messages.
    """
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("vescale_ray.checkpoint").addHandler(handler)
    mine = loader_state(rank)
    options: dict[str, Any] = {"aux": {"loader": mine}} if beside else {}
    with ckpt.Saver(root) as saver:
        for step in (1, 2):
            saver.save({"model": {"w": weights(world)}, "loader": mine, "same": {"n": (1, 2)}}, step, **options)
    return None, records


def load_rank(rank: int, world: int, root: str) -> tuple[str, str, bool]:
    state: dict[str, Any] = {"model": {"w": torch.zeros_like(weights(world))}, "loader": None}
    loaded = ckpt.load(state, root)
    right = torch.equal(state["model"]["w"].full_tensor(), torch.arange(12.0).view(6, 2))
    return digest(state["loader"]), digest(loaded.aux), right


def sharded_inside(rank: int, world: int, root: str) -> str:
    try:
        ckpt.save({"model": {"w": weights(world)}, "x": {"n": 1, "deep": [{"w": weights(world)}]}}, root, 1)
    except ValueError as error:
        return str(error)
    return "saved"
