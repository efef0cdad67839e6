"""save() and load() on several gloo ranks: other world sizes, other layouts, ranks that fail or die."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.distributed.tensor.placement_types import Shard, _StridedShard

from tests.checkpoint.async_ranks import async_failing_rank, async_killed_rank, async_rank
from tests.checkpoint.built_models import Mlp
from tests.checkpoint.checkpoint_ranks import composed, killed_rank, load_rank, mixed_mesh_rank, save_rank
from tests.ranks import _context, on_processes, run_gloo
from vescale_ray import checkpoint as ckpt
from vescale_ray.checkpoint.state.tensors import _strided


def assert_same(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].dtype == right[name].dtype and left[name].tobytes() == right[name].tobytes(), name


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints that two ranks wrote, of an FSDP2 model and of a ragged one, and the original tensors by builder."""
    roots = {builder: str(tmp_path_factory.mktemp(builder)) for builder in ("fsdp2", "ragged")}
    results = run_gloo(2, save_rank, roots)
    assert all({r[b][0] for r in results} == {"e0000-s000000000002"} for b in roots)
    return roots, {builder: results[0][builder][1] for builder in roots}


def test_checkpoint_of_two_ranks_loads_on_three_in_any_sharding(saved):
    roots, truth = saved
    assert all(ckpt.verify(root).ok and len(list(Path(root).glob("data/*/*.safetensors"))) == 2 for root in roots.values())
    pairs = [(written, builder) for written in roots for builder in roots]
    back = run_gloo(3, load_rank, [(roots[written], builder) for written, builder in pairs])
    for results in back:
        for (written, _), (facts, _, state) in zip(pairs, results, strict=True):
            assert facts == (2, {"consumed": 12}, None, 0.01)
            assert_same(truth[written], state)
    assert len({tuple(results[0][1]) for results in back}) == 3, "every rank has its own random stream"


def test_equal_world_size_restores_aux_and_random_state_per_rank(saved):
    root = saved[0]["ragged"]
    back = run_gloo(2, load_rank, [(root, "ragged"), (root, "ragged")])
    assert [results[0][0][2] for results in back] == [{"rank": 0}, {"rank": 1}]
    assert all(results[0][1] == results[1][1] for results in back)


def test_checkpoint_of_ranks_loads_without_a_process_group(saved):
    root, truth = saved[0]["ragged"], saved[1]["ragged"]
    model = Mlp(5)
    loaded = ckpt.load({"model": model}, root)
    assert loaded.step == 2 and loaded.meta == {"note": "two steps"}
    assert_same({k: v for k, v in truth.items() if "/" not in k}, {k: v.detach().numpy() for k, v in model.state_dict().items()})
    checkpoint = ckpt.open(root)
    assert torch.equal(checkpoint.read("first.weight", "exp_avg"), torch.from_numpy(truth["first.weight/exp_avg"]))
    assert {e.kind for e in checkpoint.manifest.groups[0].kinds} == {"param", "exp_avg", "exp_avg_sq"}


def test_replicas_are_written_once_and_restored_everywhere(tmp_path):
    full = np.arange(15, dtype=np.float32).reshape(5, 3)
    for back in run_gloo(4, mixed_mesh_rank, str(tmp_path)):
        assert_same({"hsdp": full, "copy": full + 1, "plain": full + 2, "tall": full[:1] + 3}, back)
    checkpoint = ckpt.open(tmp_path)
    stored = sum((e.end - e.start).sum() for g in checkpoint.manifest.groups for e in g.kinds)
    assert stored == 5 * 15 + 3
    assert np.array_equal(checkpoint.read("some ranks'").numpy(), full + 4)
    assert np.array_equal(checkpoint.read("others'").numpy(), full + 5)
    assert len({int(o) for g in checkpoint.manifest.groups for e in g.kinds for o in e.object}) > 1, "the replicas share the writing"


@pytest.mark.parametrize(("data", "model"), [(2, 2), (3, 4), (4, 3), (1, 5)])
def test_strided_shards_of_tp_then_fsdp_map_to_exact_elements(data, model):
    """The oracle cuts by tensor parallelism and then by FSDP. The cases include cuts of another dimension than the first."""
    for rows, columns, dim in itertools.product((0, 1, 5, 9, 12), (3, 8), (0, 1)):
        full = torch.arange(rows * columns).view(rows, columns)
        for at in itertools.product(range(data), range(model)):
            part = full
            for rank, parts in ((at[1], model), (at[0], data)):
                part = ([*part.chunk(parts, dim)] + [part.narrow(dim, 0, 0)] * parts)[rank]
            mesh = SimpleNamespace(size=(data, model).__getitem__, get_local_rank=at.__getitem__)
            held = _strided((rows, columns), mesh, (_StridedShard(dim, split_factor=model), Shard(dim)))
            assert [e for start, end in held for e in range(start, end)] == part.flatten().tolist()


@pytest.mark.slow
def test_ragged_and_sharded_tensors_load_into_every_other_layout(tmp_path):
    run_gloo(4, composed, str(tmp_path))
    assert torch.equal(ckpt.open(tmp_path, ckpt.ls(tmp_path)[0].name).read("t1").float(), torch.arange(96.0).reshape(8, 2, 6))


@on_processes(2)
def test_a_model_that_differs_on_one_rank_is_refused_by_all(rank, world, tmp_path):
    ckpt.save({"model": {"w": torch.ones(10)}}, tmp_path, 1, timeout_s=20)
    with pytest.raises(ckpt.CheckpointMismatch, match=r"'w' has shape \(10,\), wanted \(11,\)"):
        ckpt.load({"model": {"w": torch.ones(10 + rank)}}, tmp_path)


def one_is_killed(victim, function, *arguments):
    """Run ``function(rank, *arguments)`` in two processes. The victim ends by SIGKILL, the other by itself."""
    ranks = [_context().Process(target=function, args=(rank, *arguments), daemon=True) for rank in range(2)]
    for process in ranks:
        process.start()
    try:
        for process in ranks:
            process.join(30)
            assert not process.is_alive(), "a rank hangs"
    finally:
        for process in ranks:
            process.kill()
    assert [process.exitcode for process in ranks] == [-9 if rank == victim else 0 for rank in range(2)]


@pytest.mark.parametrize(
    ("point", "committed"), [("data.written", False), pytest.param("aux.written", False, marks=pytest.mark.slow), ("vote.written#1", True)]
)
@pytest.mark.fault("K4")
def test_rank_death_before_its_vote_stops_the_commit_in_time(tmp_path, point, committed):
    ckpt.save({"model": {"w": torch.ones(10)}}, tmp_path / "ckpt", 7)
    report = str(tmp_path / "report")
    one_is_killed(1, killed_rank, 2, str(tmp_path / "store"), str(tmp_path / "ckpt"), point, report)
    told = Path(f"{report}.0").read_text()
    if committed:
        assert told == "e0000-s000000000008"
    else:
        assert "no vote from rank 1 of 2 within 1 s" in told
    assert torch.equal(ckpt.open(tmp_path / "ckpt").read("w"), torch.full((10,), 2.0 if committed else 1.0))


def test_async_save_of_two_ranks_loads_on_three_bit_for_bit(tmp_path):
    roots = {builder: str(tmp_path / builder) for builder in ("fsdp2", "ragged")}
    results = run_gloo(2, async_rank, roots)
    for builder, root in roots.items():
        names, truth = results[0][builder]
        assert names[-1] == "e0000-s000000000003" and ckpt.verify(root).ok
        for back in run_gloo(3, load_rank, [(root, builder)]):
            assert back[0][0] == (3, {"consumed": 18}, None, 0.01)
            assert_same(truth, back[0][2])


@pytest.mark.fault("K26", "K27")
def test_all_ranks_agree_on_failing_slow_unfit_and_missing_ranks(tmp_path):
    told = run_gloo(3, async_failing_rank, str(tmp_path / "ckpt"))
    for rank, heard in enumerate(told):
        assert "rank 1 could not write" in heard["full"] and "No space left" in heard["full"]
        assert (heard["after"], heard["sync"]) == (2, "e0000-s000000000003")
        assert heard["skipped"] == [False, False, True] and heard["steps"] == [2, 3, 10, 11, 20, 33, 34]
        assert heard["skipped at once"] == (rank == 1)
        assert heard["single"] == [20, "the checkpoint of step 21 is skipped: ranks [1] are still writing earlier checkpoints", True]
        assert "rank 1: " * (rank != 1) in heard["unfit"] and "a checkpoint can't hold" in heard["unfit"]
        assert heard["unfit sync"].startswith("ValueError") and "a checkpoint can't hold" in heard["unfit sync"]
        assert heard["back"] == [33, 34] and heard["files"] == 7, "what failed, or was skipped, has left no object on any rank"
        assert heard["outside"] == (
            "nothing" if rank < 2 else "rank 2 is not in the given process group: only its members can save or load with it"
        )
        assert "process group of 3 ranks that this saver used was destroyed" in heard["gone"] and heard["anew"] == [42, 43]
        assert heard["two"] == told[0]["two"] and all(any(ends) for ends in heard["two"]), "savers of one folder: all ranks hear the same"
    two = [ckpt.verify(tmp_path / "ckpt-two", commit) for commit in ckpt.ls(tmp_path / "ckpt-two")]
    assert len(two) >= 2 and all(report.ok for report in two)
    for alone in ("alone", "missed"):
        assert "ranks [2] of 3 did not come to this save within 0.5 s" in told[0][alone] and told[0][alone][7:] == told[1][alone][7:]


@pytest.mark.parametrize(
    ("victim", "point", "words"),
    [
        pytest.param(1, "stage.copied", r"ranks \[1\] of 2 did not come to this save within 1 s", marks=pytest.mark.slow),
        pytest.param(0, "stage.copied", "rank 0 did not begin this save within 2 s", marks=pytest.mark.slow),
        (0, "data.written", "rank 0 reported no commit within 2 s"),
        pytest.param(0, "commit.validated", "rank 0 reported no commit within 2 s", marks=pytest.mark.slow),
    ],
)
def test_rank_death_fails_an_async_save_within_the_timeout(tmp_path, victim, point, words):
    ckpt.save({"model": {"w": torch.ones(10)}}, tmp_path / "ckpt", 7)
    report = str(tmp_path / "report")
    one_is_killed(victim, async_killed_rank, 2, str(tmp_path / "store"), str(tmp_path / "ckpt"), report, victim, point)
    seconds, outcome = Path(f"{report}.{1 - victim}").read_text().split(maxsplit=1)
    assert float(seconds) < 7 and re.search(words, outcome), outcome
    assert torch.equal(ckpt.open(tmp_path / "ckpt").read("w"), torch.ones(10))


@on_processes(2)
def test_root_that_ranks_do_not_share_is_named(rank: int, world: int) -> None:
    with pytest.raises(ckpt.SaveFailed, match="in memory://apart; if the rank lives, give a folder or URL that all ranks share"):
        ckpt.save({"model": {"w": torch.ones(10)}}, "memory://apart", 1, timeout_s=1)
