"""Shard groups with replicas (HSDP): losses are those of one process, and a lost shard comes from its replica."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.models import hf_folders
from tests.workers.fleet import Fleet, State
from tests.workers.tiny import HOST, Run, forget, held, lose_the_group, plain_run, same_bits, tiny
from vescale_ray import checkpoint
from vescale_ray.config.rank_grid import RankGrid
from vescale_ray.workers.network import process_groups
from vescale_ray.workers.network.connections import Connections
from vescale_ray.workers.network.process_groups import GroupFailed
from vescale_ray.workers.network.rank_mesh import rank_meshes
from vescale_ray.workers.resharding.held_state import HeldState
from vescale_ray.workers.resharding.memory_snapshots import Snapshots
from vescale_ray.workers.resharding.shards import export_shards
from vescale_ray.workers.saving import write_checkpoint_shard


@pytest.mark.fault("W19")
def test_replicas_train_as_one_process_through_loss_and_growth(text: str, tmp_path: Path) -> None:
    """2 x 2 workers lose one, go on as one replica, and grow to 2 x 2 again. A checkpoint is read at other numbers of workers."""
    config = tiny(text, train_sharding={"shard_group": 2}, train_zero_stage=1, elastic_workers=4)
    root = str(tmp_path / "checkpoints")
    with Fleet(5) as fleet:
        run = Run(fleet, config)
        run.fresh([0, 1, 2, 3])
        start = run.full_state()
        run.train(4)
        assert fleet.run([3], held)[3][-1] == HeldState(1, 2, 4, (1,)), "its own shard alone: a replica has it, too"
        survivors, _, _ = run.train_with_a_death(9, victim=2, step=4, delay=0.0)
        lost = run.resume(survivors, [0, 1])
        assert (survivors, lost.step, lost.moved_bytes) == ([0, 1, 3], 4, 0)
        run.train(6)
        assert fleet.run([0], held)[0][0] == HeldState(2, 2, 5, (0, 1)), "without replicas, copies are exchanged"
        before = run.full_state()
        run.end()
        grown = run.resume([0, 1], [0, 1, 3, 4])
        assert grown.moved_bytes == grown.lower_bound > 0 and same_bits(before, run.full_state())
        run.train(9)
        losses, _, _ = plain_run(config, start, 9)
        np.testing.assert_allclose(run.losses(), losses, rtol=1e-4)
        saved = run.full_state()
        assert _save_shards(run, root) == 2
        run.end()
        for workers in ([0, 1, 3], [0]):
            run.config = tiny(text) if len(workers) == 3 else config
            assert run.from_checkpoint(workers, root) == 9 and same_bits(saved, run.full_state())
            run.end()


def _save_shards(run: Run, root: str) -> int:
    """Save as the run's workers do: of each shard's replicas, one writes. Returns the number of objects."""
    attempt = checkpoint.new_attempt()
    votes = [checkpoint.Vote.from_json(v) for v in run.fleet.run(run.members, _write_own, root, attempt).values() if v is not None]
    checkpoint.commit(root, votes, step=9, epoch=run.generation, attempt=attempt, world=2, meta={})
    return len(votes)


def _write_own(state: State, root: str, attempt: str) -> str | None:
    trainer = state["trainer"]
    if trainer.grid.writer_of(trainer.grid.shard_of(trainer.rank)) != trainer.rank:
        return None
    return write_checkpoint_shard(export_shards(trainer), root, attempt).to_json()


@pytest.mark.fault("W2")
def test_fence_ends_forming_and_waits_in_replicas_groups(tmp_path: Path) -> None:
    """The fence comes after half a second. Without it, the ranks would wait for the absent ones for 30 s at least."""
    with Fleet(4) as fleet:
        prefix = fleet.prefix()
        forming = fleet.run_each({rank: (fleet.port, prefix, rank, rank == 3, tmp_path / "a") for rank in range(4)}, _form_without_one)
        for rank in range(3):
            text, seconds = forming[rank]
            assert text.startswith("forming the groups of 2 replicas of 2 shards failed") and seconds < 20.0, text
        prefix = fleet.prefix()
        waits = fleet.run_each({rank: (fleet.port, prefix, rank, rank % 2 == 1, tmp_path / "b") for rank in range(4)}, _wait_for_one)
        assert all(waits[rank] < 20.0 for rank in (0, 2))


def _stay_away(done: Path, others: int) -> None:
    """Wait until the other ranks have given up, each of which adds a character to ``done``."""
    began = time.monotonic()
    while time.monotonic() - began < 60.0 and (not done.exists() or len(done.read_text()) < others):
        time.sleep(0.02)


def _gave_up(done: Path) -> None:
    with done.open("a") as file:
        file.write("x")


def _form_without_one(state: State, port: int, prefix: str, rank: int, absent: bool, done: Path) -> tuple[str, float]:
    """Form the default group, and then the replicas' groups without the ``absent`` rank."""
    lines, text = Connections(), ""
    process_groups.form(HOST, port, prefix, rank, 4, "gloo", 30.0, lines=lines)
    began = time.monotonic()
    if absent:
        _stay_away(done, 3)
    else:
        threading.Timer(0.5, lines.cut).start()
        try:
            rank_meshes(RankGrid(2, 2), "cpu", 30.0, lines)
        except GroupFailed as error:
            text = str(error)
        _gave_up(done)
    seconds = time.monotonic() - began
    process_groups.dissolve()
    return text, seconds


def _wait_for_one(state: State, port: int, prefix: str, rank: int, absent: bool, done: Path) -> float:
    """Wait in a collective of the shard group for a rank that is ``absent``. Returns the seconds."""
    lines = Connections()
    process_groups.form(HOST, port, prefix, rank, 4, "gloo", 30.0, lines=lines)
    mesh = rank_meshes(RankGrid(2, 2), "cpu", 30.0, lines).ranks
    groups = mesh.get_all_groups()
    assert [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups] == [30.0, 30.0]
    began = time.monotonic()
    if absent:
        _stay_away(done, 2)
    else:
        threading.Timer(0.5, lines.cut).start()
        with pytest.raises(GroupFailed), process_groups.collectives("wait"):
            dist.all_reduce(torch.ones(4), group=groups[1])
        _gave_up(done)
    seconds = time.monotonic() - began
    del groups, mesh
    process_groups.dissolve()
    return seconds


@pytest.mark.fault("N9")
def test_copies_are_exchanged_if_replicas_share_a_node(text: str) -> None:
    """Both replicas of shard 0 are on one node. When it is lost, the other node has the copies."""
    config = tiny(text, train_sharding={"shard_group": 2}, elastic_workers=4)
    with Fleet(4) as fleet:
        fleet.run_each({worker: ("ab"[worker % 2],) for worker in range(4)}, _on_node)
        run = Run(fleet, config)
        run.fresh([0, 1, 2, 3])
        start = run.full_state()
        run.train(4)
        fleet.run(run.members, _settle)
        assert {held_now[-1] for held_now in fleet.run([1, 3], held).values()} == {HeldState(1, 2, 4, (0, 1))}
        for worker in (0, 2):
            fleet.kill(worker)
        fleet.run([1, 3], lose_the_group)
        assert run.resume([1, 3], [1, 3]).step == 4
        run.train(7)
        losses, _, _ = plain_run(config, start, 7)
        np.testing.assert_allclose(run.losses(), losses, rtol=1e-4)


def _on_node(state: State, node: str) -> None:
    state["snapshots"] = Snapshots(1, node=node)


def _settle(state: State) -> None:
    state["snapshots"].settle()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"train_optimizer": "muon"},
        {"train_optimizer": "adamw8bit", "train_optimizer_options": {"block": "tile 8x16", "min_8bit_numel": 256}},
        {"train_optimizer": "soap"},
        {"train_param_dtype": "bfloat16", "train_reshard_after_forward": False},
        {"model_factory": "tests.workers.tiny_models:ExpertsModel", "model_units": ["body"]},
    ],
    ids=["muon", "8-bit Adam", "SOAP", "bfloat16", "experts"],
)
def test_models_and_optimizers_train_in_replicas_as_alone(text: str, options: dict[str, Any]) -> None:
    losses = []
    with Fleet(4) as fleet:
        for members, sharding in (([0, 1, 2, 3], {"shard_group": 2}), ([0, 1, 2, 3], {"shard_group": 1}), ([0], None)):
            run = Run(fleet, tiny(text, train_sharding=sharding, elastic_workers=len(members), **options))
            run.fresh(members)
            run.train(6)
            run.full_state()  # fails if replicas differ in one bit
            losses.append(run.losses())
            run.end()
            fleet.run(members, forget)
    np.testing.assert_allclose(losses[:2], [losses[2]] * 2, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, {"rank": 4, "targets": ["q_proj"]}], ids=["full", "LoRA"])
def test_weights_of_transformers_are_loaded_into_each_replica(tmp_path: Path, lora: dict[str, Any] | None) -> None:
    pytest.importorskip("transformers")
    from tests.workers.test_hf_models import configured

    folder, tokens = hf_folders.write(tmp_path / "model", "qwen3_moe"), hf_folders.write_tokens(tmp_path / "tokens.npy")
    states, losses = [], []
    with Fleet(4) as fleet:
        for members, sharding in (([0, 1, 2, 3], {"shard_group": 2}), ([0], None)):
            run = Run(fleet, configured(folder, tokens, train_sharding=sharding, elastic_workers=len(members), model_lora=lora))
            run.fresh(members)
            states.append(run.full_state())
            run.train(4)
            losses.append(run.losses())
            run.end()
            fleet.run(members, forget)
    assert same_bits(*states)
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)
