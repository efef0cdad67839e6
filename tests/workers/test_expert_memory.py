"""Memory of a run whose workers share experts: the plan of a job file against the bytes that its workers hold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.workers.fleet import Fleet
from tests.workers.test_fp8_memory import compare, measured, watch
from tests.workers.tiny import Run, leave
from vescale_ray.config import RunConfig, load_config
from vescale_ray.geometry import Block
from vescale_ray.planner.cost import Memory, Policy, plan_model, predict_memory
from vescale_ray.planner.models.model_shapes import model_shapes
from vescale_ray.workers.model_building import build_model

JOB = """
run: {seed: 7}
model:
  factory: "vescale_ray.models.moe:build"
  args: {dim: 192, layers: 3, heads: 4, kv_heads: 2, head_dim: 32, experts: 8, top_k: 2, ffn: 128, vocab: 256, max_seq: 16}
data: {corpus: TEXT, seq_len: 16, heldout: 0.1}
train: {steps: 2, slots: 4, slot_batch: 2, lr: 1.0e-3, warmup_steps: 0, expert_parallel: 2}
elastic: {workers: 4}
"""
FP8 = ["train.quantize=fp8", "train.param_dtype=bfloat16", "train.reduce_dtype=float32"]


def planned(config: RunConfig, world: int, rank: int) -> tuple[Memory, int]:
    """The prediction of a rank's memory, and the number of parameters."""
    shapes = model_shapes(build_model(config))
    train = config.train
    policy = Policy(
        tokens=16,
        compute_dtype=getattr(torch, train.param_dtype),
        quantize=None if train.quantize is None else Block.tile(128, 128),
        expert_parallel=train.expert_parallel,
    )
    plan = plan_model(
        shapes, world, policy.block_options[0], dtype=policy.compute_dtype, codes=policy.codes, expert_parallel=train.expert_parallel
    )
    return predict_memory(plan, policy, backend="gloo", rank=rank), shapes.numel


@pytest.mark.parametrize(("options", "worlds"), [([], (4, 2)), (FP8, (4,))], ids=["FP32", "FP8"])
def test_the_plan_tells_the_memory_of_shared_experts(tmp_path: Path, text: str, options: list[str], worlds: tuple[int, ...]) -> None:
    (tmp_path / "job.yaml").write_text(JOB.replace("TEXT", text))
    with Fleet(4) as fleet:
        for world in worlds:
            config = load_config(tmp_path / "job.yaml", [f"train.slots={world}", f"elastic.workers={world}", *options])
            run = Run(fleet, config)
            run.fresh(list(range(world)))
            fleet.run(run.members, watch)
            run.train(2)
            compare(config, fleet.run(run.members, measured), planned)
            fleet.run(run.members, leave)
