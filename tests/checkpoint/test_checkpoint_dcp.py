"""Stock PyTorch DCP reads our checkpoints, and we read and write DCP's, checked against ``torch.distributed.checkpoint``."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    set_optimizer_state_dict,
)

from tests.checkpoint.built_models import Mlp
from tests.checkpoint.checkpoint_bridge_ranks import dcp_export_rank, dcp_load_rank
from tests.checkpoint.checkpoint_ranks import save_rank
from tests.checkpoint.checkpoint_support import (
    bits,
    damage,
    flip,
    memory_folder,
    peak_growths,
    random_bits,
    random_layout,
    rewrite_dcp_index,
    save_in_process,
)
from tests.checkpoint.dcp_states import same_optimizers, stock, torch_state, trained
from tests.checkpoint.test_checkpoint_state import Net, adam, same_module, train
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
