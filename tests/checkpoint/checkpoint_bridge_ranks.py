"""What the ranks of the tests with other programs' formats do; importable by the processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.checkpoint.checkpoint_load_ranks import sharded_llama, whole
from vescale_ray import checkpoint as ckpt
from vescale_ray.checkpoint import huggingface


def hf_into_model_rank(rank: int, world: int, folder: str) -> dict[str, Any]:
    found = {}
    for kind in ("ours", "torch"):
        model = sharded_llama(kind, world, "meta")
        done = ckpt.import_hf(folder, model, rename=huggingface.LLAMA)
        found[kind] = whole(model), done.bytes
    return found


def hf_into_commit_rank(rank: int, world: int, folder: str) -> str:
    commit = ckpt.import_hf(Path(folder, "x.safetensors"), Path(folder, "root"), object_bytes=4000)
    ckpt.export_hf(Path(folder, "root"), None, Path(folder, "out"), max_shard_bytes=4000)
    return commit.name
