"""Workers that share the experts of each layer (expert parallelism): losses are those of one process, at every number of workers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.models import hf_folders
from tests.workers.fleet import Fleet, State
from tests.workers.test_balance_loss import SIZES, alone
from tests.workers.test_unit_forward import graphs, trace_only
from tests.workers.tiny import FullState, Run, evaluate, forget, same_bits, tiny
from vescale_ray import checkpoint, gloo
from vescale_ray.config import RunConfig
from vescale_ray.config.rank_grid import RankGrid
from vescale_ray.models.moe import build
from vescale_ray.workers.building.compile_ahead import compile_units
from vescale_ray.workers.building.model_building import Blank
from vescale_ray.workers.network import process_groups
from vescale_ray.workers.resharding.shards import export_shards
from vescale_ray.workers.saving import write_checkpoint_shard

os.environ["HF_HUB_OFFLINE"] = "1"
EXPERTS: dict[str, Any] = {"model_factory": "vescale_ray.models.moe:build", "model_args": SIZES, "train_lr": 0.01}


@pytest.mark.fault("W1")
def test_shared_experts_train_as_one_process_through_loss(text: str, tmp_path: Path) -> None:
    """2 x 2 workers lose one; two go on, then one that has all experts, then four again. Checkpoints load with and without sharing."""
    config = tiny(text, train_expert_parallel=2, elastic_workers=4, **EXPERTS)
    root = str(tmp_path / "checkpoints")
    with Fleet(5) as fleet:
        run = Run(fleet, config)
        run.fresh([0, 1, 2, 3])
        start = run.full_state()
        losses, parameters = alone(config, build(**SIZES), start, 0.5, 8)
        survivors, _, _ = run.train_with_a_death(9, victim=2, step=3, delay=0.0)
        assert survivors == [0, 1, 3] and config.grid(3) == RankGrid(1, 2, 2)
        assert run.resume(survivors, [0, 3]).step in (2, 3)
        run.train(5, rescale=True)
        for until, members in ((6, [3]), (8, [0, 1, 3, 4])):
            before, holders = run.full_state(), run.members
            run.end()
            run.resume(holders, members)
            assert same_bits(before, run.full_state())
            run.train(until, rescale=True)
        np.testing.assert_allclose(run.losses(), losses, rtol=1e-4)
        saved = run.full_state()
        for key, value in parameters.items():
            np.testing.assert_allclose(saved[key], value, rtol=1e-4, atol=1e-5, err_msg=key[0])
        save(run, root)
        run.end()
        heldout: list[tuple[float, int]] = []
        for members, degree in (([0, 1, 3], 1), ([0, 1, 3, 4], 4), ([3, 1], 2)):
            run.config = tiny(text, train_expert_parallel=degree, elastic_workers=len(members), **EXPERTS)
            assert run.from_checkpoint(members, root) == 8 and same_bits(saved, run.full_state())
            heldout += fleet.run(members, evaluate).values()
            run.end()
        np.testing.assert_allclose(heldout, [heldout[0]] * len(heldout), rtol=1e-5)


def save(run: Run, root: str) -> None:
    attempt = checkpoint.new_attempt()
    votes = [checkpoint.Vote.from_json(vote) for vote in run.fleet.run(run.members, _write, root, attempt).values()]
    checkpoint.commit(root, votes, step=8, epoch=run.generation, attempt=attempt, world=len(votes), meta={})


def _write(state: State, root: str, attempt: str) -> str:
    return write_checkpoint_shard(export_shards(state["trainer"]), root, attempt).to_json()


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    with Fleet(4) as workers:
        yield workers


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"train_optimizer": "muon", "train_activation_checkpointing": "full"},
        {"train_optimizer": "adamw8bit", "train_optimizer_options": {"min_8bit_numel": 256}},
        {"train_optimizer": "soap"},
        {"train_optimizer": "shampoo"},
        {"train_activation_checkpointing": "selective", "train_reshard_after_forward": False},
        {"train_sharding": {"shard_group": 2}},
        {"model_units": ["layers.*.ffn.experts", "layers.*"]},
        {"train_quantize": "fp8 4x4"},
        {"train_quantize": "fp8 4x4", "train_quantize_products": True, "train_reduce_dtype": "fp8"},
    ],
    ids=["muon, recomputed", "8-bit Adam", "SOAP", "Shampoo", "selective", "replicas", "units of experts", "FP8", "all in FP8"],
)
def test_options_train_with_shared_experts_as_without(text: str, fleet: Fleet, options: dict[str, Any]) -> None:
    """Muon rounds to BF16, and FP8 to 3 bits: a sum in another order may change the last of them."""
    found: list[tuple[list[float], FullState]] = []
    for members, degree in (([0, 1, 2, 3], 2), ([0, 1], 1)):
        run = Run(fleet, tiny(text, **{**EXPERTS, "train_expert_parallel": degree, "elastic_workers": len(members), **options}))
        run.fresh(members)
        run.train(3, rescale=True)
        run.end()
        run.resume(members, members[:2] if degree == 2 else members)
        run.train(5)
        found.append((run.losses(), run.full_state()))
        run.end()
        fleet.run([0, 1, 2, 3], forget)
    rough = "train_quantize" in options or options.get("train_optimizer") in ("muon", "shampoo", "soap")
    bound = 1e-2 if "train_reduce_dtype" in options else 1e-3 if rough else 1e-4
    np.testing.assert_allclose(found[0][0], found[1][0], rtol=bound)
    assert found[0][1].keys() == found[1][1].keys()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["none", "full"])
def test_layers_are_compiled_around_shared_experts(text: str, fleet: Fleet, how: str) -> None:
    """A worker compiles them before it joins; that code serves four workers, and two, and one that has all experts."""
    fleet.run([0, 1, 2, 3], trace_only)
    options = {**EXPERTS, "train_expert_parallel": 2, "train_activation_checkpointing": how}
    config = tiny(text, **options, elastic_workers=4, train_compile=True)
    ahead = fleet.run([0, 1, 2, 3], compile_ahead, config)
    run = Run(fleet, config)
    run.fresh([0, 1, 2, 3])
    for until, members in ((3, [0, 1]), (5, [1]), (7, [])):
        run.train(until, rescale=True)
        if members:
            holders = run.members
            run.end()
            run.resume(holders, members)
    compiled = run.losses()
    run.end()
    assert fleet.run([0, 1, 2, 3], graphs) == ahead == dict.fromkeys(range(4), 4), "two pieces for each of two masks"
    plain = Run(fleet, tiny(text, **options, elastic_workers=2))
    plain.fresh([0, 1])
    plain.train(7)
    np.testing.assert_allclose(compiled, plain.losses(), rtol=1e-4)


def compile_ahead(state: State, config: RunConfig) -> int:
    gloo.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    blank = Blank(config)
    compile_units(config, torch.device("cpu"), blank)
    process_groups.dissolve()
    assert blank.compiler.take_problems() == []
    return graphs()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "lora"), [("qwen3_moe", None), ("gpt_oss", None), ("deepseek_v3", None), ("qwen3_moe", {"rank": 4})])
def test_shared_experts_of_transformers_train_as_without(tmp_path: Path, fleet: Fleet, kind: str, lora: dict[str, Any] | None) -> None:
    pytest.importorskip("transformers")
    from tests.workers.test_hf_models import configured

    folder, tokens = hf_folders.write(tmp_path / "model", kind), hf_folders.write_tokens(tmp_path / "tokens.npy")
    states, losses = [], []
    for members, degree in (([0, 1, 2, 3], 2), ([0], 1)):
        options = {"train_expert_parallel": degree, "elastic_workers": len(members), "model_lora": lora}
        run = Run(fleet, configured(folder, tokens, **options))
        run.fresh(members)
        states.append(run.full_state())
        run.train(4)
        losses.append(run.losses())
        run.end()
        fleet.run([0, 1, 2, 3], forget)
    assert same_bits(*states)
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)
