"""Folders of runs that trained adapters for one step, with random values in the place of trained ones."""

from __future__ import annotations

import torch

from vescale_ray import checkpoint
from vescale_ray.checkpoint import ShardPiece
from vescale_ray.config import RunConfig
from vescale_ray.controller.driver import preflight
from vescale_ray.models.lora import is_adapter
from vescale_ray.runfolder import RunFolder
from vescale_ray.workers.building.model_building import build_model


def write_adapter_run(config: RunConfig) -> dict[str, torch.Tensor]:
    """Write the run's folder and a checkpoint of step 1, as a worker does. Return the adapters' values."""
    run = RunFolder(config.run_folder)
    run.write_config(config.to_yaml())
    run.write_state({"run": "r", "state": "STOPPED", "step": 1, "steps": 1})
    torch.manual_seed(1)
    shapes = {name: tuple(p.shape) for name, p in build_model(config).named_parameters() if is_adapter(name)}
    values = {name: torch.randn(shape) * 0.2 for name, shape in shapes.items()}
    kept = {(name, "param"): value for name, value in values.items()}
    kept |= {(name, kind): torch.zeros_like(value) for name, value in values.items() for kind in ("exp_avg", "exp_avg_sq")}
    attempt, root = checkpoint.new_attempt(), config.checkpoint_root
    pieces = [ShardPiece(*key, 0, t.numel(), tuple(t.shape), t.dtype, t.flatten()) for key, t in kept.items()]
    aux = {"step": 1, "consumed": config.global_batch, "optimizer": {}, "base": checkpoint.fingerprint(str(config.model.hf))}
    vote = checkpoint.write_shard(root, attempt, 0, pieces, aux=aux, step=1, epoch=1)
    meta = {"stream": dict(preflight.foresee(config).stream), "config": config.model_dump(mode="json")}
    checkpoint.commit(root, [vote], step=1, epoch=1, attempt=attempt, world=1, meta=meta)
    return values
