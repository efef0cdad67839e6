"""The plan of a job file against the bytes that its workers hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models import hf_folders
from tests.workers.fleet import Fleet, State
from tests.workers.tiny import Run
from vescale_ray.config import RunConfig, load_config
from vescale_ray.fsdp import explain
from vescale_ray.fsdp.buffers.memory import Pool
from vescale_ray.fsdp.layouts.wire import CodeWire
from vescale_ray.fsdp.surface.overview import held_bytes
from vescale_ray.fsdp.units.schedule import unit_of
from vescale_ray.planner.cost import Memory, predict_memory
from vescale_ray.planner.hardware import HARDWARE
from vescale_ray.workers.building.job_plan import choose_for_job

JOB = """
run: {seed: 7}
data: {corpus: TEXT, seq_len: 16, heldout: 0.1}
train: {steps: 3, slot_batch: 2, lr: 1.0e-3, warmup_steps: 0}
"""
FP8 = ["train.quantize=fp8", "train.param_dtype=bfloat16", "train.reduce_dtype=float32"]
DENSE = ["model={dim: 384, layers: 3, heads: 6, kv_heads: 2, ffn: 700}", "train.optimizer=adamw8bit", *FP8]
"""The last tiles of a side of 700 have 60 elements."""
SIZES = "{dim: 192, layers: 3, heads: 4, kv_heads: 2, head_dim: 32, experts: 8, top_k: 2, ffn: 128, vocab: 256, max_seq: 16}"
EXPERTS = [f'model={{factory: "vescale_ray.models.moe:build", args: {SIZES}}}', "train.expert_parallel=2"]


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
        "casts": held["casts"],
        "gradients": held["gradients"] + held["padding"] // 2,
        "optimizer": sum(s.nbytes for s in states),
        **state["most"],
    }, explain(trainer.model).memory


def planned(config: RunConfig, world: int, rank: int) -> tuple[Memory, int]:
    """The prediction of a rank's memory, and the number of parameters."""
    choice = choose_for_job(config, world, HARDWARE["h100"])
    return predict_memory(choice.options[0].plan, choice.policy, backend="gloo", rank=rank), choice.model.numel


def trained(path: Path, text: str, options: list[str], world: int) -> float:
    """Train a job, and compare the memory of its workers with the plan. Returns the result of :func:`compare`."""
    (path / "job.yaml").write_text(JOB.replace("TEXT", text))
    with Fleet(world) as fleet:
        config = load_config(path / "job.yaml", [f"train.slots={2 * world}", f"elastic.workers={world}", *options])
        run = Run(fleet, config)
        run.fresh(list(range(world)))
        fleet.run(run.members, watch)
        run.train(2)
        return compare(config, fleet.run(run.members, measured))


def test_the_plan_tells_the_memory_of_a_job_in_8_bits(tmp_path: Path, text: str) -> None:
    assert 4 + 1 + 2 < trained(tmp_path, text, DENSE, 3) < 7.6, "FP32 master, codes, 8-bit states; embedding and head have FP32 states"


def test_the_plan_tells_the_memory_of_kept_casts(tmp_path: Path, text: str) -> None:
    trained(tmp_path, text, [*DENSE, "train.quantize=null", "train.keep_cast=true"], 2)


@pytest.mark.parametrize("options", [[], pytest.param(FP8, marks=pytest.mark.slow)], ids=["FP32", "FP8"])
def test_the_plan_tells_the_memory_of_shared_experts(tmp_path: Path, text: str, options: list[str]) -> None:
    trained(tmp_path, text, [*EXPERTS, *options], 4)


def test_the_plan_tells_the_memory_of_adapters(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    folder = hf_folders.write(tmp_path / "model", "llama", dtype=torch.bfloat16, shard="1GB", hidden_size=256, intermediate_size=512)
    tokens = hf_folders.write_tokens(tmp_path / "tokens.npy")
    options = [f"model={{hf: {folder}, lora: {{rank: 2}}}}", f"data.vocab={hf_folders.VOCAB}", "train.param_dtype=bfloat16"]
    assert trained(tmp_path, tokens, options, 2) < 3.0, "a frozen base in BF16, and few adapters"


def compare(config: RunConfig, found: dict[int, tuple[dict[str, int], dict[str, int]]]) -> float:
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
