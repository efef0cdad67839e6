"""Import of DCP's checkpoints: into a commit or a state, under our names, without unpickling foreign objects."""

from __future__ import annotations

import copy
import os
import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)

from tests.checkpoint.built_models import Mlp, one_step
from tests.checkpoint.checkpoint_bridge_ranks import dcp_foreign_save_rank, dcp_into_model_rank
from tests.checkpoint.checkpoint_support import (
    bits,
    rewrite_dcp_index,
)
from tests.checkpoint.dcp_states import same_optimizers, stock, torch_state, trained
from tests.checkpoint.test_checkpoint_state import SCHEDULERS, Net, adam, rates, same_module, train
from tests.ranks import run_gloo
from vescale_ray import checkpoint as ckpt
from vescale_ray.checkpoint.bridges.dcp_files import DcpFiles

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated")


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


# ---------------------------------------------------------------------------------------------------------- what is refused


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("/tmp/vescale-evil-was-here",)


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


def test_a_trained_mlp_of_plain_dcp_needs_no_process_group(root):
    model = Mlp(0)
    optimizer = torch.optim.AdamW(model.parameters())
    one_step(model, optimizer)
    dcp.save(torch_state(model, optimizer), checkpoint_id=root / "dcp", no_dist=True)
    with torch.device("meta"):
        other = Mlp(1)
    ckpt.import_dcp(root / "dcp", other)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))
