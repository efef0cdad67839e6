"""Memory of a run with FP8 gathers and 8-bit optimizer states: the plan of a job file against the bytes that its workers hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.workers.fleet import Fleet, State
from tests.workers.tiny import Run, leave
from vescale_ray.config import RunConfig, load_config
from vescale_ray.fsdp import explain
from vescale_ray.fsdp.buffers.memory import Pool
from vescale_ray.fsdp.layouts.wire import CodeWire
from vescale_ray.fsdp.surface.overview import held_bytes
from vescale_ray.fsdp.units.schedule import unit_of
from vescale_ray.geometry import Block
from vescale_ray.planner.cost import Memory, Policy, plan_model, predict_memory
from vescale_ray.planner.models.model_shapes import model_shapes
from vescale_ray.workers.model_building import build_model

JOB = """
run: {seed: 7}
model: {dim: 384, layers: 3, heads: 6, kv_heads: 2, ffn: 700}
data: {corpus: TEXT, seq_len: 16, heldout: 0.1}
train:
  {steps: 3, slots: 4, slot_batch: 2, lr: 1.0e-3, warmup_steps: 0,
   optimizer: adamw8bit, quantize: fp8, param_dtype: bfloat16, reduce_dtype: float32}
elastic: {workers: 4}
"""
"""The last tiles of a side of 700 have 60 elements."""


def watch(state: State) -> None:
    """Keep the most bytes of gathered parameters, received codes included, and of gradient buffers in this worker's process."""
    groups = [g for m in state["trainer"].model.modules() if (u := unit_of(m)) is not None for g in u.groups]
    received = {g.gathered.parts_bytes for g in groups if isinstance(g.gathered.wire, CodeWire)}
    most = state["most"] = {"gathered": 0, "gradient_buffers": 0}
    noted = Pool._note_peak

    def note(pool: Any) -> None:
        noted(pool)
        count = pool.count().items()
        codes = sum(nbytes * lent for nbytes, (_, lent) in count if nbytes in received)
        most["gathered"] = max(most["gathered"], codes + sum(nbytes * kept for nbytes, (kept, _) in count))
        most["gradient_buffers"] = max(most["gradient_buffers"], sum(nbytes * lent for nbytes, (_, lent) in count) - codes)

    setattr(Pool, "_note_peak", note)  # noqa: B010


def measured(state: State) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes that this worker holds, and those that explain tells."""
    trainer = state["trainer"]
    states = [s.to_local() for one in trainer.optimizer.state.values() for s in one.values() if isinstance(s, torch.Tensor) and s.dim()]
    held = held_bytes(trainer.model)
    return {
        "master": held["parameters"] + held["padding"] // 2,
        "codes": held["codes"],
        "gradients": held["gradients"] + held["padding"] // 2,
        "optimizer": sum(s.nbytes for s in states),
        **state["most"],
    }, explain(trainer.model).memory


def planned(config: RunConfig, world: int, rank: int) -> tuple[Memory, int]:
    """The prediction of a rank's memory, and the number of parameters."""
    shapes = model_shapes(build_model(config))
    policy = Policy(optimizer="adamw8bit", tokens=16, quantize=Block.tile(128, 128))
    plan = plan_model(shapes, world, policy.block_options[0], dtype=policy.compute_dtype, codes=policy.codes)
    return predict_memory(plan, policy, backend="gloo", rank=rank), shapes.numel


def test_the_plan_tells_the_memory_of_a_job_in_8_bits(tmp_path: Path, text: str) -> None:
    (tmp_path / "job.yaml").write_text(JOB.replace("TEXT", text))
    with Fleet(4) as fleet:
        for world in (4, 2):
            config = load_config(tmp_path / "job.yaml", [f"train.slots={world}", f"elastic.workers={world}"])
            run = Run(fleet, config)
            run.fresh(list(range(world)))
            fleet.run(run.members, watch)
            records = run.train(3)
            assert records[-1].loss < records[0].loss
            bytes_per_parameter = compare(config, fleet.run(run.members, measured), planned)
            assert 4 + 1 + 2 < bytes_per_parameter < 7.6, "FP32 master, codes, 8-bit states; embedding and head have FP32 states"
            fleet.run(run.members, leave)


def compare(
    config: RunConfig,
    found: dict[int, tuple[dict[str, int], dict[str, int]]],
    planned: Callable[[RunConfig, int, int], tuple[Memory, int]],
) -> float:
    """Compare what each rank holds with the plan. Returns the bytes of parameters and optimizer states per parameter."""
    lasting = numel = 0
    for rank, (held, explained) in found.items():
        memory, numel = planned(config, len(found), rank)
        told = memory.by_kind()
        for what, nbytes in held.items():
            assert abs(told[what] - nbytes) <= 0.05 * nbytes, (rank, what, told[what], nbytes)
            assert what == "optimizer" or abs(told[what] - explained[what]) <= 0.01 * nbytes, (rank, what, told, explained)
        lasting += held["master"] + held["codes"] + held["optimizer"]
    return lasting / numel
