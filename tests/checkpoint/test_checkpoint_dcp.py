"""Stock PyTorch DCP reads our checkpoints, and we read and write DCP's, checked against ``torch.distributed.checkpoint``."""

from __future__ import annotations

import copy
import io
import os
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from tests.checkpoint.checkpoint_bridge_ranks import dcp_export_rank, dcp_foreign_save_rank, dcp_into_model_rank, dcp_load_rank
from tests.checkpoint.checkpoint_ranks import Mlp, one_step, save_rank
from tests.checkpoint.checkpoint_support import (
    bits,
    damage,
    dcp_index,
    flip,
    memory_folder,
    peak_growths,
    random_bits,
    random_layout,
    rewrite_dcp_index,
    save_in_process,
)
from tests.checkpoint.test_checkpoint_state import SCHEDULERS, Net, adam, rates, same_module, train
from tests.checkpoint.test_checkpoint_tiling import save_tiled
from tests.ranks import on_processes, run_gloo
from vescale_ray import checkpoint as ckpt
from vescale_ray.checkpoint.bridges import dcp_export as bridge
from vescale_ray.checkpoint.bridges.dcp_files import DcpFiles

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated")


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.complex64)


@st.composite
def models(draw):
    shapes = draw(st.lists(st.lists(st.integers(0, 7), min_size=0, max_size=3), min_size=1, max_size=5))
    return {f"a.t{i}": random_bits(shape, draw(st.sampled_from(DTYPES)), seed=i) for i, shape in enumerate(shapes)}


def trained(seed: int = 0) -> tuple[Net, torch.optim.Optimizer]:
    net = Net(seed)
    optimizer = adam(net)
    train(net, optimizer, 2)
    return net, optimizer


def torch_state(net: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> dict[str, Any]:
    chosen = StateDictOptions(**options)
    return {"model": get_model_state_dict(net, options=chosen), "optim": get_optimizer_state_dict(net, optimizer, options=chosen)}


def same_optimizers(a: torch.optim.Optimizer, net_a: nn.Module, b: torch.optim.Optimizer, net_b: nn.Module) -> None:
    for ours, theirs in zip(net_a.parameters(), net_b.parameters(), strict=True):
        left, right = a.state.get(ours, {}), b.state.get(theirs, {})
        assert left.keys() == right.keys()
        for key in left:
            assert bits(left[key]) == bits(right[key]), key


# ------------------------------------------------------------------------------------------------------- stock DCP reads ours


@settings(max_examples=20)
@given(models(), st.integers(1, 4), st.integers(0, 10**6))
def test_stock_dcp_reads_any_tensors_that_any_ranks_wrote(tensors, writers, seed):
    with memory_folder() as place:
        stored = {(name, "param"): t for name, t in tensors.items()}
        save_in_process(place, stored, random_layout(stored, writers, seed))
        for outer in (lambda t: {"model": t}, lambda t: t):
            target = {name: torch.zeros_like(t) for name, t in tensors.items()}
            dcp.load(outer(target), storage_reader=ckpt.DcpReader(place))
            assert all(bits(target[name]) == bits(t) for name, t in tensors.items())


@pytest.mark.parametrize("flatten", [False, True])
def test_torch_resumes_model_and_optimizer_from_our_checkpoint(root, flatten):
    net, optimizer = trained()
    ckpt.save({"model": net, "optimizer": optimizer, "stream": {"consumed": 7}, "note": "x"}, root, 2)
    other = Net(1)
    fresh = adam(other, lr=9.0)
    state = torch_state(other, fresh, flatten_optimizer_state_dict=flatten) | {"stream": {"consumed": 0}, "note": ""}
    dcp.load(state, storage_reader=ckpt.DcpReader(root))
    set_optimizer_state_dict(other, fresh, state["optim"], options=StateDictOptions(flatten_optimizer_state_dict=flatten))
    assert same_module(net, other) and state["stream"] == {"consumed": 7} and state["note"] == "x"
    same_optimizers(optimizer, net, fresh, other)
    assert [g["lr"] for g in fresh.param_groups] == [1e-2, 1e-2] and [g["weight_decay"] for g in fresh.param_groups] == [0.0, 0.01]
    assert train(net, optimizer, 2, seed=4) == train(other, fresh, 2, seed=4)


def test_dcps_converter_makes_one_file_of_ours(root):
    """The converter builds the state dict from the metadata alone, so the metadata must list every key once."""
    net, optimizer = trained()
    ckpt.save({"model": net, "optimizer": optimizer}, root / "a", 2)
    state: dict[str, Any] = {}
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner

    dcp.state_dict_loader._load_state_dict(
        state, storage_reader=ckpt.DcpReader(root / "a"), planner=_EmptyStateDictLoadPlanner(), no_dist=True
    )
    assert set(state) == {"model", "optim"} and set(state["model"]) == set(net.state_dict())
    assert all(bits(state["model"][name]) == bits(t) for name, t in net.state_dict().items())


def test_dcp_reader_refuses_another_dtype_unless_cast(root):
    values = torch.randn(50) * 1e6
    ckpt.save({"model": {"w": values}}, root, 1)
    target = {"w": torch.zeros(50, dtype=torch.float16)}
    with pytest.raises(BaseException, match=r"'w' is float32 in checkpoint .*, float16 wanted; DcpReader\(cast=True\) converts"):
        dcp.load(target, storage_reader=ckpt.DcpReader(root))
    assert not target["w"].any()
    dcp.load(target, storage_reader=ckpt.DcpReader(root, cast=True))
    assert torch.equal(target["w"], values.half())


def test_damage_and_missing_names_are_errors(root):
    commit = ckpt.save({"model": {"w": torch.randn(3000), "v": torch.randn(3000)}}, root, 1).commit
    with pytest.raises(BaseException, match="Missing key in checkpoint state_dict: x"):
        dcp.load({"x": torch.zeros(3)}, storage_reader=ckpt.DcpReader(root))
    with pytest.raises(BaseException, match="Size mismatch"):
        dcp.load({"w": torch.zeros(3)}, storage_reader=ckpt.DcpReader(root))
    damage(root, commit)
    with pytest.raises(BaseException, match="checkpoint is damaged: .* block 1 "):
        dcp.load({"w": torch.zeros(3000)}, storage_reader=ckpt.DcpReader(root))


@pytest.fixture(scope="module")
def ranks_saved(tmp_path_factory):
    roots = {builder: str(tmp_path_factory.mktemp(builder)) for builder in ("fsdp2", "ragged")}
    truth = run_gloo(2, save_rank, roots)[0]
    return roots, {builder: state for builder, (_, state) in truth.items()}


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 4])
def test_stock_dcp_loads_our_checkpoint_into_fsdp2_tp_and_2d(ranks_saved, world):
    roots, truth = ranks_saved
    for result in run_gloo(world, dcp_load_rank, roots):
        for (root, kind), (state, needed, read) in result.items():
            for name, value in state.items():
                assert np.array_equal(value, truth[root][name]), (root, kind, name)
            assert read <= 1.05 * needed + (2 << 20), (root, kind, needed, read)


@pytest.mark.parametrize("cut", [True, False])
def test_dcp_reader_requests_a_box_of_columns_as_one_range(tmp_path, monkeypatch, cut):
    """Stock DCP requests a tensor-parallel rank's part as a box.

    Reading it row by row takes minutes for a model of 13 billion parameters.
    """
    full = random_bits((300, 40), torch.bfloat16, 3)
    save_tiled(tmp_path, full, [{1: [20, 20]} if cut else {}] * 2, [6000])
    asked: list[int] = []
    read = ckpt.Checkpoint.read_ranges

    def counted(self, ranges, **more):
        asked.append(len(ranges))
        return read(self, ranges, **more)

    monkeypatch.setattr(ckpt.Checkpoint, "read_ranges", counted)
    into = torch.zeros(299, 10, dtype=torch.bfloat16)

    class Planner(DefaultLoadPlanner):
        def resolve_tensor(self, item):
            return into

    reader = ckpt.DcpReader(tmp_path)
    index = MetadataIndex(next(key for key in reader.read_metadata().state_dict_metadata if key.endswith("w")), torch.Size([0, 0]))
    box = torch.Size([1, 15]), torch.Size([299, 10])
    item = ReadItem(LoadItemType.TENSOR, index, torch.Size([0, 0]), index, *box)
    reader.read_data(LoadPlan([item]), Planner()).wait()
    assert bits(into) == bits(full[1:, 15:25]) and asked == [1]


@on_processes(2)
def test_dcp_reader_raises_if_ranks_see_different_newest_commits(rank, world, tmp_path):
    for name, step in (("a", 1), ("b", 2)):
        ckpt.save({"model": {"w": torch.ones(3)}}, tmp_path / name, step, timeout_s=20)
    said = r"the ranks see different newest checkpoints \(e0000-s000000000001, e0000-s000000000002\)"
    with pytest.raises(BaseException, match=said):  # CheckpointException does not derive from Exception
        dcp.load({"w": torch.zeros(3)}, storage_reader=ckpt.DcpReader(tmp_path / "ab"[rank]))


# ----------------------------------------------------------------------------------------------------------------- import


@pytest.mark.parametrize("flatten", [False, True])
def test_training_resumes_from_a_commit_imported_from_dcp(root, flatten):
    net, optimizer = trained()
    state = torch_state(net, optimizer, flatten_optimizer_state_dict=flatten)
    state |= {"stream": {"consumed": 7, "list": [1, 2, {"a": None}]}, "ema": {"w": torch.randn(3, 3).t()}}
    dcp.save(state, checkpoint_id=root / "dcp", no_dist=True)
    tied = {"head.weight": "embed.weight"}
    commit = ckpt.import_dcp(root / "dcp", root / "root", step=2, object_bytes=300, tied=tied)
    assert commit.step == 2 and ckpt.verify(root / "root").ok and commit.world > 5
    other = Net(1)
    fresh = adam(other, lr=9.0)
    into: dict[str, Any] = {"model": other, "optimizer": fresh, "stream": None, "ema": {"w": torch.zeros(3, 3)}}
    ckpt.load(into, root / "root")
    assert same_module(net, other) and into["stream"] == state["stream"] and torch.equal(into["ema"]["w"], state["ema"]["w"])
    same_optimizers(optimizer, net, fresh, other)
    if not flatten:  # if flattened, groups with equal hyperparameters can't be told apart; these differ in weight decay
        assert [g["weight_decay"] for g in fresh.param_groups] == [0.0, 0.01]
    assert train(net, optimizer, 2, seed=4) == train(other, fresh, 2, seed=4)


@pytest.mark.parametrize(("flatten", "meta"), [(False, True), (True, False)])
def test_training_resumes_from_a_state_filled_directly_from_dcp(root, flatten, meta):
    """The import goes straight into the state: weights, moments, steps, hyperparameters and plain values.

    No commit is made in between, and no other value of the DCP checkpoint is read.
    """
    net, optimizer = trained()
    state = torch_state(net, optimizer, flatten_optimizer_state_dict=flatten)
    state |= {"stream": {"consumed": 7, "list": [1, 2, {"a": None}]}, "unreadable": random.Random(3)}
    dcp.save(state, checkpoint_id=root, no_dist=True)
    with torch.device("meta" if meta else "cpu"):
        other = Net(1)
        other.scratch = torch.zeros(2, device="cpu")
    fresh = adam(other, lr=9.0)
    fresh.param_groups.reverse()  # nested groups are identified by position, flattened groups by their parameters
    into: dict[str, Any] = {"model": other, "optimizer": fresh, "stream": None}
    with pytest.raises(ckpt.CheckpointMismatch, match="are one tensor in the model, but two in"):
        ckpt.import_dcp(root, {"model": other})
    tied = {"head.weight": "embed.weight"}
    if not flatten:
        with pytest.raises(ckpt.CheckpointMismatch, match="parameter group 0 of optimizer 'optimizer' differs"):
            ckpt.import_dcp(root, into, tied=tied)
        fresh.param_groups.reverse()
    done = ckpt.import_dcp(root, into, tied=tied)
    assert set(done.tensors) == {name for name in net.state_dict() if name != "head.weight"}
    assert same_module(net, other) and into["stream"] == state["stream"]
    same_optimizers(optimizer, net, fresh, other)
    assert train(net, optimizer, 2, seed=4) == train(other, fresh, 2, seed=4)


def test_an_import_into_a_state_is_as_strict_as_a_load(root):
    net, optimizer = trained()
    dcp.save(torch_state(net, optimizer), checkpoint_id=root, no_dist=True)
    tied = {"head.weight": "embed.weight"}
    other = Net(1)
    before = copy.deepcopy(other.state_dict())
    sgd = torch.optim.SGD([{"params": g["params"]} for g in adam(other).param_groups], momentum=0.9)
    for state, words in (
        ({"model": other, "optimizer": sgd}, "is SGD, the checkpoint's is another: they differ in the hyperparameters"),
        ({"model": other, "optimizer": adam(other), "stream": None}, "has no state 'stream'"),
        ({"model": other, "momentum": adam(other)}, "has no state 'momentum'; it has"),
    ):
        with pytest.raises(ckpt.CheckpointMismatch, match=words):
            ckpt.import_dcp(root, state, tied=tied)
    assert all(bits(other.state_dict()[name]) == bits(value) for name, value in before.items()) and not sgd.state
    ckpt.import_dcp(root, {"model": other}, tied=tied, include="body.*", rename={"body.*": "body.*"})
    assert bits(other.get_parameter("body.0.weight")) == bits(net.get_parameter("body.0.weight"))
    assert bits(other.scale) == bits(before["scale"])


def test_import_globs_match_our_names_before_renaming(root):
    dcp.save({"model": {"layers.0.w": torch.ones(3), "layers.1.w": torch.ones(3), "x": torch.ones(1)}}, checkpoint_id=root, no_dist=True)
    target = {"blocks.0.w": torch.zeros(3), "blocks.1.w": torch.zeros(3), "x": torch.zeros(1)}
    ckpt.import_dcp(root, target, rename={"blocks.*": "layers.*"}, include="blocks.*", exclude="*.1.*")
    assert [float(t.sum()) for t in target.values()] == [3.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("writers", "readers"), [(3, 2), pytest.param(2, 4, marks=pytest.mark.slow), pytest.param(4, 1, marks=pytest.mark.slow)]
)
def test_dcp_checkpoint_of_n_ranks_fills_shards_of_m_ranks(tmp_path, writers, readers):
    truth, later = run_gloo(writers, dcp_foreign_save_rank, str(tmp_path))[0]
    results = run_gloo(readers, dcp_into_model_rank, str(tmp_path))
    for kind in ("fsdp2", "ragged"):
        for state, _ in (result[kind] for result in results):
            assert state.keys() == truth.keys() and all(np.array_equal(state[name], truth[name]) for name in truth)
        for state in (result[f"{kind} state"] for result in results):
            assert state.keys() == later.keys() and all(np.allclose(state[name], later[name], atol=1e-6) for name in later)
    assert len({result["commit"] for result in results}) == 1
    got = ckpt.open(tmp_path / "root")
    assert all(np.array_equal(got.read(name).numpy(), value) for name, value in truth.items())


def test_import_ties_tensors_that_dcp_stored_twice_only_if_equal(root):
    net, _ = trained()
    dcp.save({"model": net.state_dict()}, checkpoint_id=root / "dcp", no_dist=True)
    with pytest.raises(ckpt.CheckpointMismatch, match="'body.0.weight' and 'embed.weight' differ: they are not tied"):
        ckpt.import_dcp(root / "dcp", root / "root", tied={"body.0.weight": "embed.weight"})
    with pytest.raises(ckpt.CheckpointMismatch, match="has no tensor 'x', which is in tied"):
        ckpt.import_dcp(root / "dcp", root / "root", tied={"x": "embed.weight"})
    ckpt.import_dcp(root / "dcp", root / "root")
    other = Net(1)
    with pytest.raises(ckpt.CheckpointMismatch, match="are one tensor in the model, but two in .*; allow_unexpected='head.weight' takes"):
        ckpt.load({"model": other}, root / "root")
    ckpt.load({"model": other}, root / "root", allow_unexpected="head.weight")
    assert same_module(net, other)


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flattened"])
def test_import_looks_into_an_object_around_the_whole_state(root, flat):
    """torch's tutorial saves ``{"app": AppState(model, optimizer)}``."""
    net, other = Net(tie=False), Net(1, tie=False)
    optimizer = adam(net)
    train(net, optimizer, 2)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    app = {"model": get_model_state_dict(net), "optim": get_optimizer_state_dict(net, optimizer, options=options), "step": 7}
    dcp.save({"app": app, "epoch": 3}, checkpoint_id=root / "dcp", no_dist=True)
    resumed = adam(other)
    state: dict[str, Any] = {"model": other, "optimizer": resumed, "step": None, "epoch": None}
    ckpt.import_dcp(root / "dcp", state)
    assert same_module(net, other) and (state["step"], state["epoch"]) == (7, 3)
    train(net, optimizer, 1)
    train(other, resumed, 1)
    assert same_module(net, other)
    dcp.save({"app": {"model": get_model_state_dict(net)}}, checkpoint_id=root / "weights", no_dist=True)
    ckpt.import_dcp(root / "weights", other)
    assert same_module(net, other)


def test_import_takes_a_bare_state_dict_with_model_dot_names(root):
    tensors = {
        "model.embed": torch.randn(4, 3),
        "model.layers.0.w": torch.randn(3),
        "lm_head": torch.randn(2),
        "transposed": torch.randn(4, 6).t(),
    }
    dcp.save(dict(tensors), checkpoint_id=root / "dcp", no_dist=True)
    ckpt.import_dcp(root / "dcp", root / "root")
    got = ckpt.open(root / "root").to_state_dict()
    assert got.keys() == tensors.keys() and all(torch.equal(got[n], t) for n, t in tensors.items())
    target = {"embed": torch.zeros(4, 3), "head": torch.zeros(2)}
    ckpt.import_dcp(root / "dcp", target, rename={"embed": "model.embed", "head": "lm_head"}, allow_unexpected=["model.layers.*", "tr*"])
    assert torch.equal(target["embed"], tensors["model.embed"]) and torch.equal(target["head"], tensors["lm_head"])


@settings(max_examples=12)
@given(models(), st.integers(1, 200), st.integers(0, 1000))
def test_any_tensors_go_to_dcp_and_come_back_bit_for_bit(tensors, piece, seed):
    with memory_folder() as place:
        stored = {(name, "param"): t for name, t in tensors.items()}
        save_in_process(place / "a", stored, random_layout(stored, 3, seed))
        ckpt.export_dcp(place / "a", None, place / "dcp")
        target = {"model": {name: torch.zeros_like(t) for name, t in tensors.items()}}
        dcp.load(target, checkpoint_id=place / "dcp", no_dist=True)
        assert all(bits(target["model"][name]) == bits(t) for name, t in tensors.items())
        ckpt.import_dcp(place / "dcp", place / "b", object_bytes=piece)
        assert all(bits(ckpt.open(place / "b").read(name)) == bits(t) for name, t in tensors.items())


# ----------------------------------------------------------------------------------------------------------------- export


def test_torch_resumes_from_a_dcp_export_and_converts_it(root, monkeypatch):
    monkeypatch.setattr(bridge, "_CHUNK_BYTES", 100)  # small chunks, so that rows go to separate archives
    monkeypatch.setattr(bridge, "_FILE_BYTES", 30_000)
    net, optimizer = trained()
    ckpt.save({"model": net, "optimizer": optimizer, "stream": {"consumed": 7}}, root / "a", 2)
    done = ckpt.export_dcp(root / "a", None, root / "dcp")
    assert len(done.files) > 1 and {f"model.{n}" for n in net.state_dict()} <= set(done.keys)
    other = Net(1)
    fresh = adam(other, lr=9.0)
    state = torch_state(other, fresh) | {"stream": {"consumed": 0}}
    dcp.load(state, checkpoint_id=root / "dcp")
    set_optimizer_state_dict(other, fresh, state["optim"])
    assert same_module(net, other) and state["stream"] == {"consumed": 7}
    same_optimizers(optimizer, net, fresh, other)
    dcp_to_torch_save(root / "dcp", root / "one.pt")
    one = torch.load(root / "one.pt", weights_only=True)
    assert all(bits(one["model"][n]) == bits(t) for n, t in net.state_dict().items()) and one["stream"] == {"consumed": 7}


def test_ranks_share_an_export(ranks_saved, tmp_path):
    roots, truth = ranks_saved
    files = run_gloo(3, dcp_export_rank, roots["ragged"], str(tmp_path / "dcp"))
    assert files[0] == files[1] and {name.split("_")[2] for name in files[0]} == {"0", "1", "2"}
    model = Mlp(3)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "dcp")
    assert all(np.array_equal(t.numpy(), truth["ragged"][n]) for n, t in state["model"].items())


def test_dcp_export_verifies_written_bytes_and_removes_a_bad_one(root, monkeypatch):
    ckpt.save({"model": {"w": torch.randn(3000)}}, root / "a", 1)
    real = os.fsync

    def flipping(fd: int) -> None:
        real(fd)
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if path.suffix == ".distcp":
            flip(path, path.stat().st_size // 2)

    monkeypatch.setattr(bridge.os, "fsync", flipping)
    with pytest.raises(ckpt.ExportFailed, match="'model.w' was read back with other bytes than were written"):
        ckpt.export_dcp(root / "a", None, root / "dcp")
    assert not (root / "dcp").exists()
    monkeypatch.undo()
    ckpt.export_dcp(root / "a", None, root / "dcp")
    with pytest.raises(ValueError, match="holds .metadata, __0_0.distcp: give an empty folder"):
        ckpt.export_dcp(root / "a", None, root / "dcp")


def test_dcp_export_refuses_a_dtype_that_torch_cannot_save(root):
    ckpt.save({"model": {"w": torch.ones(3), "q": torch.ones(3, dtype=torch.uint8).view(torch.int4)}}, root / "a", 1)
    with pytest.raises(ckpt.CheckpointMismatch, match="'model.q' is int4, which torch.save.* can't write: exclude it"):
        ckpt.export_dcp(root / "a", None, root / "dcp")
    assert not (root / "dcp").exists()
    ckpt.export_dcp(root / "a", None, root / "dcp", exclude="model.q")


# ---------------------------------------------------------------------------------------------------------- what is refused


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("/tmp/vescale-evil-was-here",)


def stock(place: Path, **more: Any) -> Metadata:
    dcp.save({"model": {"w": torch.arange(12.0).view(4, 3)}, **more}, checkpoint_id=place, no_dist=True)
    return dcp_index(place)


def test_nothing_but_dcps_own_classes_is_unpickled(root):
    described = stock(root)
    described.planner_data = Evil()
    rewrite_dcp_index(root, described)
    with pytest.raises(ckpt.ForeignFileError, match=r"refers to posix.mkdir, which is none of DCP's own classes"):
        ckpt.import_dcp(root, {"w": torch.zeros(4, 3)})
    assert not os.path.exists("/tmp/vescale-evil-was-here")


def test_import_refuses_a_pickled_object_unless_excluded(root):
    stock(root / "dcp", thing=random.Random(3), other={"n": 3})
    with pytest.raises(ckpt.ForeignFileError, match=r"'thing': .*: it refers to random.Random, which only unpickling could make"):
        ckpt.import_dcp(root / "dcp", root / "root")
    ckpt.import_dcp(root / "dcp", root / "root", exclude="thing")
    assert ckpt.open(root / "root").meta["state"] == {"other": {"n": 3}}


def test_import_refuses_a_hyperparameter_of_several_elements(root):
    group = {"lr": torch.tensor([0.5]), "scales": torch.arange(3.0), "params": ["w"]}
    stock(root / "dcp", optim={"state": {"w": {"step": torch.tensor(1.0)}}, "param_groups": [group]})
    with pytest.raises(ckpt.ForeignFileError, match=r"scales' is a tensor of shape \(3,\), not of one element: exclude it"):
        ckpt.import_dcp(root / "dcp", root / "root")
    group.pop("scales")
    stock(root / "dcp2", optim={"state": {"w": {"step": torch.tensor(1.0)}}, "param_groups": [group]})
    ckpt.import_dcp(root / "dcp2", root / "root")
    (saved,) = ckpt.open(root / "root").meta["optimizers"]["optimizer"]["groups"]
    assert saved["hyper"]["lr"] == {"dtype": "float32", "value": [0.5]}


@pytest.mark.parametrize("which", ["milestones", "sequence", "plateau"])
def test_imported_scheduler_state_keeps_milestones_as_numbers(root, which):
    """DCP stores the members of a dict one by one, with the keys as strings. It stores a list of dicts whole."""
    net, into = nn.Linear(2, 2), nn.Linear(2, 2)
    ours, other = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (net, into))
    scheduler, resumed = SCHEDULERS[which](ours), SCHEDULERS[which](other)
    rates(ours, scheduler, 2)
    dcp.save({"model": net.state_dict(), "scheduler": scheduler.state_dict()}, checkpoint_id=root / "dcp", no_dist=True)
    at = ours.param_groups[0]["lr"]
    wanted = rates(ours, scheduler, 8)
    ckpt.import_dcp(root / "dcp", root / "root")
    for number, take in enumerate((lambda state: ckpt.import_dcp(root / "dcp", state), lambda state: ckpt.load(state, root / "root"))):
        other = torch.optim.SGD(into.parameters(), lr=0.1)
        resumed = SCHEDULERS[which](other)
        take({"model": into, "scheduler": resumed})
        other.param_groups[0]["lr"] = at
        assert rates(other, resumed, 8) == wanted, number


def change_chunks(*chunks: tuple[list[int], list[int]]) -> Any:
    def change(described: Metadata) -> None:
        entry = described.state_dict_metadata["model.w"]
        info = next(v for k, v in described.storage_data.items() if k.fqn == "model.w")
        entry.chunks = [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in chunks]
        described.storage_data |= {MetadataIndex("model.w", torch.Size(o)): info for o, _ in chunks}

    return change


def change_info(**fields: Any) -> Any:
    def change(described: Metadata) -> None:
        for info in described.storage_data.values():
            for name, value in fields.items():
                setattr(info, name, value)

    return change


def change_size(described: Metadata) -> None:
    described.state_dict_metadata["model.w"] = TensorStorageMetadata(
        TensorProperties(dtype=torch.float64), torch.Size([4, 3]), [ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([4, 3]))]
    )


def change_to_bytes(described: Metadata) -> None:
    described.state_dict_metadata["model.w"] = BytesStorageMetadata()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (change_chunks(([0, 0], [2, 3])), "has 12 elements, its chunks 6"),
        (change_chunks(([0, 0], [4, 3]), ([0, 0], [0, 3])), None),
        (change_chunks(([0, 0], [2, 3]), ([1, 0], [2, 3])), r"of shape \(4, 3\): its chunks overlap, or leave a hole, at \(1, 0\)"),
        (change_chunks(([0, 0], [5, 3])), r"has a chunk at \(0, 0\) of sizes \(5, 3\)"),
        (change_chunks(([0, 0], [2, 3]), ([2, 0], [2, 3])), r"is torch.float32 of shape \(4, 3\) there, .* of shape \(2, 3\) in .metadata"),
        (change_size, "is torch.float32 of shape .* there, torch.float64"),
        (change_info(relative_path="../x"), r"keeps data in '../x', which is not a file of the folder"),
        (change_info(relative_path="missing.distcp"), "can't be opened"),
        (change_info(offset=10**9), "ends before byte"),
        (change_info(offset=1, length=500), "archive at byte 1: it is not an archive of torch.save"),
        (change_info(offset=-5), "at byte -5"),
        (change_info(transform_descriptors=["zstd"]), "streams were transformed"),
        (change_to_bytes, "it does not say where 'model.w' is stored"),
    ],
)
def test_import_refuses_inconsistent_dcp_metadata(root, change, words):
    described = stock(root)
    change(described)
    rewrite_dcp_index(root, described)
    target = {"w": torch.zeros(4, 3)}
    if words is None:
        ckpt.import_dcp(root, target)
        assert torch.equal(target["w"], torch.arange(12.0).view(4, 3))
        return
    with pytest.raises(ckpt.ForeignFileError, match=words) as caught:
        ckpt.import_dcp(root, target, cast=True)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("raw", [b"", b"junk", pickle.dumps(3), pickle.dumps(None)])
def test_missing_or_invalid_metadata_file_is_refused(root, raw):
    with pytest.raises(ckpt.ForeignFileError, match="not a DCP checkpoint: it has no .metadata"):
        DcpFiles(root)
    (root / ".metadata").write_bytes(raw)
    with pytest.raises(ckpt.ForeignFileError, match="not DCP metadata"):
        DcpFiles(root)


def test_every_range_of_a_tensor_stored_in_boxes_reads_correctly(root):
    """Read all ranges of a 3-D tensor, stored in four boxes and a transposed one. The oracle is torch's own load."""
    full = torch.arange(4 * 3 * 5.0).view(4, 3, 5)
    boxes = [((0, 0, 0), (2, 3, 2)), ((0, 0, 2), (2, 3, 3)), ((2, 0, 0), (2, 1, 5)), ((2, 1, 0), (2, 2, 5))]
    described = stock(root)
    infos = {}
    with open(root / "x.distcp", "wb") as file:
        for i, (offsets, sizes) in enumerate(boxes):
            part = full[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))].clone()
            if i == 1:
                part = part.transpose(0, 2).contiguous().transpose(0, 2)
            raw = io.BytesIO()
            torch.save(part, raw)
            info = type(next(iter(described.storage_data.values())))("x.distcp", file.tell(), len(raw.getvalue()))
            file.write(raw.getvalue())
            infos[MetadataIndex("t", torch.Size(offsets))] = info
    chunks = [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in boxes]
    entry = TensorStorageMetadata(TensorProperties(dtype=torch.float32), full.shape, chunks)
    rewrite_dcp_index(root, Metadata({"t": entry}, {"t": ("t",)}, infos))
    theirs = {"t": torch.zeros(4, 3, 5)}
    dcp.load(theirs, checkpoint_id=root, no_dist=True)
    assert torch.equal(theirs["t"], full)
    files = DcpFiles(root)
    for start in range(60):
        for end in range(start, 61):
            out = torch.zeros(end - start)
            files.read_into("t", start, out)
            assert torch.equal(out, full.view(-1)[start:end]), (start, end)


def export_and_import(root):
    ckpt.save({"model": {f"t{i}": torch.zeros(16 << 20, dtype=torch.uint8) for i in range(20)}}, root / "ckpt", 1)
    yield
    ckpt.export_dcp(root / "ckpt", None, root / "dcp")
    yield
    ckpt.import_dcp(root / "dcp", root / "back", object_bytes=32 << 20)
    yield


@pytest.mark.slow
def test_a_dcp_import_and_export_take_a_bounded_memory(tmp_path):
    exported, imported = peak_growths(export_and_import, tmp_path)
    assert exported <= (128 << 20) + (40 << 20), "a chunk, its archive's buffer, the reader's budget"
    assert imported <= (32 << 20) + (96 << 20), "an object, the writer's buffers, what the allocator keeps: not the 320 MiB"


def test_a_trained_mlp_of_plain_dcp_needs_no_process_group(root):
    model = Mlp(0)
    optimizer = torch.optim.AdamW(model.parameters())
    one_step(model, optimizer)
    dcp.save(torch_state(model, optimizer), checkpoint_id=root / "dcp", no_dist=True)
    with torch.device("meta"):
        other = Mlp(1)
    ckpt.import_dcp(root / "dcp", other)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))
