"""One rank's training loop, at every world size, against one process of plain PyTorch on the same samples."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.workers.fleet import Fleet, State
from tests.workers.tiny import FullState, Run, evaluate, forget, plain_run, running, same_bits, text_of, tiny, write_text
from vescale_ray import checkpoint
from vescale_ray.config.rank_grid import RankGrid
from vescale_ray.data.order.stream import SampleStream
from vescale_ray.fsdp.units.schedule import unit_of
from vescale_ray.models.unit_selection import select_units
from vescale_ray.workers.building.model_building import Blank, build_model, build_sharded
from vescale_ray.workers.messages import StepRecord
from vescale_ray.workers.network import process_groups
from vescale_ray.workers.network.rank_mesh import rank_meshes
from vescale_ray.workers.resharding import copy_exchange
from vescale_ray.workers.resharding.held_state import choose_resume
from vescale_ray.workers.resharding.memory_snapshots import Snapshots
from vescale_ray.workers.resharding.reshard import execute, restore_from_checkpoint
from vescale_ray.workers.resharding.shards import Piece, export_shards
from vescale_ray.workers.saving import write_checkpoint_shard
from vescale_ray.workers.trainer import Trainer


def _difference(a: FullState, b: FullState) -> float:
    """Largest relative difference of any parameter, in the norm."""
    return max(float(np.linalg.norm(a[key] - b[key]) / np.linalg.norm(b[key])) for key in b)


OTHER: dict[str, Any] = {
    "train_optimizer": "sgd",
    "train_lr": 0.3,
    "train_activation_checkpointing": "full",
    "train_grad_clip": 0,
    "model_tie": True,
}
OTHER |= {"train_no_decay": ["*norm*"], "train_zero_stage": 1}
EXPERTS: dict[str, Any] = {"model_factory": "tests.workers.tiny_models:ExpertsModel", "model_units": ["body"], "train_lr": 0.02}
EXPERTS |= {"train_no_decay": ["*.bias", "embed.*"]}


PATCHES = {**EXPERTS, "model_factory": "tests.workers.tiny_models:PatchModel", "train_zero_stage": 2}
SPREAD = {**EXPERTS, "model_factory": "tests.workers.tiny_models:SpreadModel"}


@pytest.mark.parametrize(
    ("changes", "worlds", "tolerance"),
    # Muon rounds to BF16. If sums differ in their last bit, an update may differ in its third digit.
    [
        ({}, (1, 3), 1e-5),
        (OTHER, (2,), 1e-5),
        (EXPERTS, (3,), 1e-5),
        (PATCHES, (2,), 1e-5),
        (SPREAD, (2,), 1e-5),
        ({**SPREAD, "elastic_deterministic": True}, (2,), 1e-5),
        pytest.param(OTHER, (1, 3, 4), 1e-5, marks=pytest.mark.slow),
        pytest.param(EXPERTS, (1, 2, 4), 1e-5, marks=pytest.mark.slow),
        pytest.param({"train_optimizer": "muon", "train_lr": 0.01}, (1, 3), 5e-4, marks=pytest.mark.slow),
    ],
    ids=[
        *("adamw", "sgd, checkpointing, tied, unclipped", "experts that few slots use"),
        *("patches", "nan of one token", "nan, deterministic"),
        *("more: sgd, checkpointing, tied, unclipped", "more: experts", "muon"),
    ],
)
def test_twenty_steps_equal_plain_pytorch_at_every_world_size(
    text: str, changes: dict[str, Any], worlds: tuple[int, ...], tolerance: float
) -> None:
    config = tiny(text, **changes)
    with Fleet(max(worlds)) as fleet:
        run = Run(fleet, config)
        start: FullState | None = None
        oracle: tuple[list[float], FullState, float] | None = None
        for world in worlds:
            run.fresh(list(range(world)))
            first = run.full_state()
            start = start or first
            assert all((first[key] == start[key]).all() for key in start), "initial values depend on the world size"
            records = run.train(20)
            losses, parameters, heldout = oracle = oracle or plain_run(config, start, 20)
            np.testing.assert_allclose([r.loss for r in records], losses, rtol=tolerance)
            state = run.full_state()
            assert _difference({k: v for k, v in state.items() if k[1] == "param"}, parameters) < (1e-5 if tolerance == 1e-5 else 0.1)
            answers = set(fleet.run(run.members, evaluate).values())
            assert len(answers) == 1
            loss, samples = answers.pop()
            assert samples == 13 and loss == pytest.approx(heldout, rel=tolerance)
            assert losses[-1] < 0.75 * losses[0], "the model learns nothing: the comparison says little"
            run.end()


def test_a_record_accounts_for_the_whole_step_on_every_rank(text: str) -> None:
    config = tiny(text)
    corpus = text_of(config)
    stream = SampleStream(corpus.num_samples, config.run.seed)
    with running(config, 3) as (fleet, run):
        per_rank = fleet.run_each({0: (1, 0.0, 1.2), 1: (4, 1.5), 2: (0,)}, _step_with_flags)
        for index in range(2):
            records: list[StepRecord] = [per_rank[w][index] for w in range(3)]
            for record in records:
                assert (record.index, record.step, record.world, record.generation) == (index, index + 1, 3, 1)
                assert record.ids == tuple(stream.ids(index * 10, 10))
                assert record.flags == (5 if index == 0 else 0)
                assert record.tokens == 10 * 16 and len(record.memory) == 3
                assert all(bytes_ > 10_000_000 for bytes_ in record.memory)
            assert len({(r.loss, r.grad_norm, r.lr) for r in records}) == 1
        first = [per_rank[w][0] for w in range(3)]
        late = first[1].seconds
        assert first[1].alone_seconds == 0.0, "the last to begin waits for nobody"
        about = pytest.approx(late, abs=0.6, rel=0.5)
        assert all(r.alone_seconds > 0.9 and r.seconds - r.alone_seconds == about for r in (first[0], first[2])), first
        assert first[0].alone_seconds == pytest.approx(first[2].alone_seconds, abs=0.6), "what one of them had to settle counts for none"
        run.end()


def _step_with_flags(state: State, flags: int, late: float = 0.0, settles: float = 0.0) -> list[StepRecord]:
    time.sleep(late)
    return [state["trainer"].step(flags, lambda: time.sleep(settles)), state["trainer"].step()]


def test_random_numbers_follow_the_slot_not_the_rank(text: str) -> None:
    config = tiny(text, model_factory="tests.workers.tiny_models:DropoutModel", model_units=["body"])
    curves = []
    with Fleet(3) as fleet:
        run = Run(fleet, config)
        for world in (1, 2, 3):
            run.fresh(list(range(world)))
            curves.append([record.loss for record in run.train(6)])
            run.end()
    np.testing.assert_allclose(curves[1], curves[0], rtol=1e-5)
    np.testing.assert_allclose(curves[2], curves[0], rtol=1e-5)
    assert len(set(curves[0])) == 6


def test_narrow_dtypes_follow_float32_within_their_rounding(text: str) -> None:
    curves = []
    with Fleet(2) as fleet:
        for dtypes in ({}, {"train_param_dtype": "bfloat16"}, {"train_reduce_dtype": "fp8"}):
            run = Run(fleet, tiny(text, **dtypes, train_reshard_after_forward=False))
            run.fresh([0, 1])
            curves.append([record.loss for record in run.train(8)])
            run.end()
    np.testing.assert_allclose(curves[1:], [curves[0]] * 2, rtol=2e-2)
    assert curves[0] != curves[1] != curves[2] != curves[0]


def test_unit_patterns_match_by_part_and_unmatched_ones_raise(text: str) -> None:
    model = build_model(tiny(text))
    names = {module: name for name, module in model.named_modules()}
    assert [names[unit] for unit in select_units(model, ["layers.*"])] == ["layers.0", "layers.1"]
    assert {names[unit] for unit in select_units(model, ["layers.*", "layers.*.ffn", "head"])} >= {"layers.1.ffn", "head", "layers.0"}
    nested = [names[unit] for unit in select_units(model, ["layers.*", "layers.*.ffn"])]
    assert nested.index("layers.0.ffn") < nested.index("layers.0"), "children must be sharded before their parents"
    with pytest.raises(ValueError, match=r"model\.units: 'blocks\.\*' matches no module; the model has embed, layers, norm, head"):
        select_units(model, ["blocks.*"])


def test_modules_fill_themselves_equally_at_every_world_size(text: str) -> None:
    """A factory with arguments, a loss of its own, and a model whose modules have ``reset_parameters``."""
    name = "tests.workers.tiny_models:"
    config = tiny(text, model_factory=f"{name}Plain", model_args={"dim": 24}, model_loss=f"{name}loss_of_scores", model_units="auto")
    states, losses = [], []
    with Fleet(3) as fleet:
        for members in ([0], [2, 1, 0]):
            run = Run(fleet, config)
            run.fresh(members)
            states.append({key: value for key, value in run.full_state().items() if key[1] == "param"})
            losses.append([record.loss for record in run.train(3)])
            run.end()
            fleet.run(members, forget)
    assert same_bits(*states) and losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert states[0]["embed.weight", "param"].std() == pytest.approx(1.0, rel=0.05)
    assert abs(states[0]["blocks.1.0.weight", "param"]).max() <= 24**-0.5
    assert (states[0]["blocks.0.2.weight", "param"] == 1).all() and losses[0][2] < losses[0][0]
    with pytest.raises(ValueError, match=r"model.factory = .*:Plain with model.args = {'width': 3} raises TypeError: .*argument 'width'"):
        build_model(tiny(text, model_factory=f"{name}Plain", model_args={"width": 3}))


def test_untrainable_model_or_world_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match=r"6 workers for train\.slots = 5"):
        Trainer(tiny(text), 0, 6, 1, "cpu", text_of(tiny(text)))
    with pytest.raises(ValueError, match=r"model\.factory = tests\.workers\.tiny_models:nothing"):
        build_model(tiny(text, model_factory="tests.workers.tiny_models:nothing"))
    with pytest.raises(ValueError, match=r"persistent buffers \['seen'\]"):
        build_model(tiny(text, model_factory="tests.workers.tiny_models:with_buffer"))


def test_deterministic_mode_refuses_inexact_16_bit_parameters(text: str) -> None:
    changes = {"model_factory": "tests.workers.tiny_models:of_16_bits", "model_units": ["body"]}
    for deterministic, optimizer in ((False, "sgd"), (True, "adamw")):
        build_model(tiny(text, elastic_deterministic=deterministic, train_optimizer=optimizer, **changes))
    with pytest.raises(ValueError, match=r"train\.optimizer = sgd: embed\.weight has fewer than 32 bits"):
        build_model(tiny(text, elastic_deterministic=True, train_optimizer="sgd", **changes))


def test_repeated_stepless_generations_use_no_more_memory(tmp_path: Path) -> None:
    """The controller forgives twenty node losses in a row. Each left a copy of all values behind until a step was complete."""
    config = tiny(write_text(tmp_path))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    snapshots, taken = Snapshots(1), []
    for generation in range(1, 8):
        process_groups.form("127.0.0.1", store.port, f"test/storm{generation}", 0, 1, "gloo", 10.0)
        try:
            trainer = Trainer(config, 0, 1, generation, "cpu", text_of(config))
            resume = choose_resume({"me": snapshots.held()})
            if resume is None:
                trainer.initialize()
            else:
                execute(snapshots.shards(resume.generation, resume.step), trainer)
            snapshots.begin(trainer, resume.generation if resume is not None else None)
            while trainer.completed < 3:
                trainer.step(settle=snapshots.settle)
                snapshots.after_step(trainer)
            snapshots.settle()
            taken.append(snapshots.nbytes)
            assert {(1, 2), (1, 3), (generation, 3)} <= {(one.generation, one.step) for one in snapshots.held()}
            trainer.close()
        finally:
            snapshots.abandon()
            process_groups.dissolve()
    assert taken[2:] == taken[2:3] * 5 and taken[2] <= 2 * taken[0], taken


def test_slow_copy_still_holds_the_values_of_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy is made while the next step computes. The optimizer and a checkpoint wait for it before they write or take it."""
    real, slow = copy_exchange.copy_pieces, threading.Event()

    def slowly(*args: Any, **kwargs: Any) -> Any:
        if slow.is_set():
            time.sleep(0.3)
        return real(*args, **kwargs)

    def values(pieces: Iterable[Piece]) -> dict[tuple[str, str], Tensor]:
        return {(piece.name, piece.kind): piece.data.clone() for piece in pieces}

    def same(found: dict[tuple[str, str], Tensor], wanted: dict[tuple[str, str], Tensor]) -> bool:
        return found.keys() == wanted.keys() and all(torch.equal(found[key], wanted[key]) for key in wanted)

    monkeypatch.setattr(copy_exchange, "copy_pieces", slowly)
    config = tiny(write_text(tmp_path))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    process_groups.form("127.0.0.1", store.port, "test/copies", 0, 1, "gloo", 10.0)
    snapshots = Snapshots(1)
    try:
        trainer = Trainer(config, 0, 1, 1, "cpu", text_of(config))
        trainer.initialize()
        snapshots.begin(trainer)
        trainer.step(settle=snapshots.settle)
        slow.set()
        after_one = values(export_shards(trainer).pieces)
        began = time.perf_counter()
        snapshots.after_step(trainer)
        assert time.perf_counter() - began < 0.2, "training waited for the copy"
        assert {one.step for one in snapshots.held()} == {0}, "what is not copied yet is not held"
        trainer.step(settle=snapshots.settle)
        assert same(values(snapshots.shards(1, 1)[0].pieces), after_one)
        after_two = values(export_shards(trainer).pieces)
        snapshots.after_step(trainer)
        staged = snapshots.stage(trainer)
        assert staged.shared and staged.step == 2, "it was copied a second time"
        staged.slab.release()
        assert same(values(snapshots.shards(1, 2)[0].pieces), after_two)

        def fails(*args: Any, **kwargs: Any) -> Any:
            raise MemoryError("no room for a copy")

        trainer.step(settle=snapshots.settle)
        monkeypatch.setattr(copy_exchange, "copy_pieces", fails)
        snapshots.after_step(trainer)
        with pytest.raises(MemoryError, match="no room"):
            snapshots.stage(trainer)
        with pytest.raises(MemoryError, match="no room"):
            trainer.step(settle=snapshots.settle)
        assert trainer.completed == 3, "the step was not done"
        snapshots.abandon()
        assert {one.step for one in snapshots.held()} == {2}
        assert same(values(snapshots.shards(1, 2)[0].pieces), after_two)
        snapshots.clear()
        trainer.close()
    finally:
        process_groups.dissolve()


def _pieces_follow_their_tensors(trainer: Trainer) -> None:
    """The pieces are made once. Only a tensor with new memory gets another piece."""
    first = export_shards(trainer).pieces
    assert all(new is old for new, old in zip(export_shards(trainer).pieces, first, strict=True))
    name, parameter = next(iter(trainer.model.named_parameters()))
    state = trainer.optimizer.state[parameter]
    state["exp_avg"] = state["exp_avg"].clone()
    second = export_shards(trainer).pieces
    assert [(new.name, new.kind) for new, old in zip(second, first, strict=True) if new is not old] == [(name, "exp_avg")]
    trainer.model.to_empty(device="cpu")
    for piece in export_shards(trainer).pieces:
        piece.data.fill_(3.0)
    values = [value for values in trainer.optimizer.state.values() for kind, value in values.items() if kind != "step"]
    with torch.no_grad():
        assert all((tensor.to_local() == 3.0).all() for tensor in (*trainer.model.parameters(), *values))


def test_one_process_trains_alone_without_any_held_out_text(tmp_path: Path) -> None:
    config = tiny(write_text(tmp_path), data_heldout=0.0)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    process_groups.form("127.0.0.1", store.port, "test/alone", 0, 1, "gloo", 10.0)
    try:
        trainer = Trainer(config, 0, 1, 1, "cpu", text_of(config))
        beats: list[int] = []
        trainer.beat = lambda: beats.append(1)
        trainer.initialize()
        assert len(beats) == len(list(trainer.model.parameters())), "of a large model this takes minutes, and is to be told from a hang"
        assert trainer.step().step == 1 == trainer.completed and trainer.consumed == 10
        vote = write_checkpoint_shard(export_shards(trainer), tmp_path / "kept", "a1")
        checkpoint.commit(tmp_path / "kept", [vote], step=1, epoch=1, attempt="a1", world=1, meta={})
        beats.clear()
        read = restore_from_checkpoint(trainer, checkpoint.open(tmp_path / "kept"))
        assert 0 < read < 2**20 and beats, "and so is the reading of a checkpoint"
        loss, samples = trainer.evaluate()
        assert samples == 0 and loss != loss
        _pieces_follow_their_tensors(trainer)
        trainer.close()
        trainer.close()
    finally:
        process_groups.dissolve()


def test_states_of_other_blocks_are_refused_despite_equal_shapes(tmp_path: Path) -> None:
    """The scales of one block size used to be taken for another's, without an error."""
    text, store = write_text(tmp_path), dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def trainer_of(block: str) -> Trainer:
        options = {"min_8bit_numel": 512, "block": block}
        config = tiny(text, train_optimizer="adamw8bit", train_optimizer_options=options)
        return Trainer(config, 0, 1, 1, "cpu", text_of(config))

    process_groups.form("127.0.0.1", store.port, "test/blocks", 0, 1, "gloo", 10.0)
    try:
        first = trainer_of("rows 4")
        first.initialize()
        first.step()
        vote = write_checkpoint_shard(export_shards(first), tmp_path / "kept", "a1")
        checkpoint.commit(tmp_path / "kept", [vote], step=1, epoch=1, attempt="a1", world=1, meta={})
        kept = checkpoint.open(tmp_path / "kept")
        other, same = trainer_of("tile 4x56"), trainer_of("rows 4")
        other.initialize()
        before = [piece.data.clone() for piece in export_shards(other).pieces]
        with pytest.raises(ValueError, match=r"has \(block, codec\) \['rows 4', 1\].*train.optimizer_options"):
            restore_from_checkpoint(other, kept)
        after = [piece.data for piece in export_shards(other).pieces]
        assert other.completed == 0 and all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), "before anything is changed"
        restore_from_checkpoint(same, kept)
        assert same.completed == 1 and same.step().loss == first.step().loss
        for one in (first, other, same):
            one.close()
    finally:
        process_groups.dissolve()


def test_staging_of_the_reduction_is_the_job_files(tmp_path: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for megabytes, nbytes in ((3, 3 << 20), (None, None)):
        config = tiny(write_text(tmp_path), train_reduce_staging_mb=megabytes)
        process_groups.form("127.0.0.1", store.port, f"test/staging{megabytes}", 0, 1, "gloo", 10.0)
        try:
            model, _ = build_sharded(config, torch.device("cpu"), rank_meshes(RankGrid(1, 1), "cpu"), Blank(config), filled=True)
            units = {id(u): u for u in map(unit_of, model.modules()) if u is not None}.values()
            assert len(units) > 1 and {group.grads.staging for unit in units for group in unit.groups} == {nbytes}
        finally:
            process_groups.dissolve()


def test_copied_model_trains_as_its_original(tmp_path: Path) -> None:
    config = tiny(write_text(tmp_path), model_factory="tests.workers.tiny_models:ExpertsModel", model_units=["body"])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    losses, template = [], Blank(config)
    for number, blank in enumerate((template.copied(), template.copied(), template)):
        process_groups.form("127.0.0.1", store.port, f"test/copied{number}", 0, 1, "gloo", 10.0)
        try:
            trainer = Trainer(config, 0, 1, 1, "cpu", text_of(config), blank)
            trainer.initialize()
            losses.append([trainer.step().loss for _ in range(4)])
            trainer.close()
        finally:
            process_groups.dissolve()
    assert losses[0] == losses[1] == losses[2] and len(set(losses[0])) == 4
