"""Copies, pickles, modules and checkpoints of ragged tensors. torch itself stays unchanged."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import math
import subprocess
import sys
import tempfile
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from torch import nn
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as torch_distribute

from tests.dtensor.layouts import Case, cases, hsdp, one_dim_mesh, ragged, values, whole
from tests.ranks import on_processes, on_threads, run_gloo
from vescale_ray.dtensor import RaggedDTensor, RaggedShard, distribute_tensor

CASE = Case((6, 5), 2, (4, 0, 26))


@on_threads(3)
def test_parameters_survive_copy_pickle_and_data_assignment(rank: int, world: int) -> None:
    mesh, full = one_dim_mesh(world), values(CASE.shape)
    p: Any = nn.Parameter(ragged(CASE, full, mesh, rank))
    assert type(p) is RaggedDTensor and isinstance(p, nn.Parameter) and isinstance(p, DTensor) and p.requires_grad
    p.grad = RaggedDTensor.from_spec(p.to_local().detach() * 2, p._spec)

    twin = copy.deepcopy(p)
    assert type(twin) is RaggedDTensor and isinstance(twin, nn.Parameter) and twin.requires_grad and twin.device_mesh is mesh
    assert torch.equal(twin.full_tensor(), full) and isinstance(twin.grad, RaggedDTensor) and torch.equal(twin.grad.full_tensor(), full * 2)
    with torch.no_grad():
        twin.zero_()
        twin.grad.zero_()
    assert torch.equal(p.full_tensor(), full) and torch.equal(p.grad.full_tensor(), full * 2), "the copy shares nothing"
    pair = copy.deepcopy({"a": p, "b": p})
    assert pair["a"] is pair["b"], "tied stays tied"

    buffer = io.BytesIO()
    torch.save({"p": p, "x": p.detach()}, buffer)
    for weights_only in (True, False):
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=weights_only)
        assert isinstance(loaded["p"], nn.Parameter) and not isinstance(loaded["x"], nn.Parameter)
        for t in loaded.values():
            assert type(t) is RaggedDTensor and t.placements == p.placements and torch.equal(t.to_local(), p.to_local())
        assert torch.equal(loaded["x"].full_tensor(), full)

    moved = torch.empty(p.to_local().shape)
    p._local_tensor = moved  # the engine does so to give a parameter other storage
    with torch.no_grad():
        p.fill_(3.0)
    assert bool((moved == 3).all()) and torch.equal(p.full_tensor(), torch.full(CASE.shape, 3.0))
    p.data = ragged(CASE, full, mesh, rank)
    assert torch.equal(p.full_tensor(), full) and p.data.to_local().data_ptr() == p.to_local().data_ptr()
    p.data.mul_(2)
    assert torch.equal(p.full_tensor(), full * 2)
    placements = p.placements
    for other in (ragged(Case((6, 5), 1, (1, 2, 3)), full, mesh, rank), distribute_tensor(full, mesh, [Replicate()])):
        p.data.zero_()
        p.data = other
        assert p.placements == placements and torch.equal(p.full_tensor(), full)
    for wrong in (full, p.detach()[:2]):
        with pytest.raises(ValueError, match="can't set .data of a ragged tensor"):
            p.data = wrong


class Model(nn.Module):
    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(6, 5, device=device))
        self.inner = nn.Linear(3, 7, device=device)


CUTS = {"weight": CASE, "inner.weight": Case((7, 3), 1, (2, 2, 3)), "inner.bias": Case((7,), 1, (0, 0, 7))}
OTHER_CUTS = {"weight": Case((6, 5), 1, (1, 2, 3)), "inner.weight": Case((7, 3), 0, (0, 1, 0)), "inner.bias": Case((7,), 1, (3, 3, 1))}


def shard(model: nn.Module, mesh: DeviceMesh, layout: dict[str, Case]) -> nn.Module:
    for name, parameter in list(model.named_parameters()):
        owner = model.get_submodule(name.rpartition(".")[0])
        sharded = distribute_tensor(parameter.detach(), mesh, [layout[name].placement], src_data_rank=None)
        setattr(owner, name.rpartition(".")[2], nn.Parameter(sharded))
    return model


def reference() -> Model:
    model = Model()
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(values(tuple(p.shape), seed=i) / 3)
    return model


@on_threads(3)
def test_modules_cast_leave_meta_and_load_other_layouts_states(rank: int, world: int) -> None:
    mesh, plain = one_dim_mesh(world), reference()
    model = shard(reference(), mesh, CUTS)

    def same(a: nn.Module, dtype: torch.dtype = torch.float32) -> bool:
        pairs = zip(a.parameters(), plain.parameters(), strict=True)
        return all(isinstance(p, RaggedDTensor) and torch.equal(p.full_tensor(), q.to(dtype)) for p, q in pairs)

    assert same(model)
    half = copy.deepcopy(model).to(torch.bfloat16)
    assert same(half, torch.bfloat16) and all(isinstance(p, nn.Parameter) for p in half.parameters()) and same(model)

    empty = shard(Model("meta"), mesh, CUTS)
    assert all(p.is_meta for p in empty.parameters())
    empty = empty.to_empty(device="cpu")
    assert all(isinstance(p, RaggedDTensor) and not p.is_meta for p in empty.parameters())
    for name, p in empty.named_parameters():
        assert tuple(p.to_local().shape) == tuple(CUTS[name].part(plain.get_parameter(name), rank).shape)
        nn.init.constant_(p, 4.0)
    for source in (plain.state_dict(), shard(reference(), mesh, OTHER_CUTS).state_dict(), model.state_dict()):
        nn.init.zeros_(empty.get_parameter("weight"))
        empty.load_state_dict(source)
        assert same(empty)
    target = shard(Model("meta"), mesh, OTHER_CUTS)
    target.load_state_dict(model.state_dict(), assign=True)
    assert same(target)
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        empty.load_state_dict({**plain.state_dict(), "weight": torch.zeros(5, 5)})
    with torch.no_grad():  # copy a whole tensor into a part of the model, as initialisation does
        empty.get_parameter("inner.bias").copy_(torch.arange(7.0))
    assert torch.equal(whole(empty.get_parameter("inner.bias")), torch.arange(7.0))


@settings(max_examples=40)
@given(cases())
@on_threads(lambda case: case.world)
def test_checkpoint_chunks_tile_the_tensor_and_none_is_empty(rank: int, world: int, case: Case) -> None:
    full = values(case.shape, torch.int64)
    x = ragged(case, full, one_dim_mesh(world), rank)
    chunks = x.__create_chunk_list__()
    items = x.__create_write_items__("x", x)
    assert [i.tensor_data.chunk for i in items] == chunks and len(chunks) <= max(1, 2 * len(case.shape) - 1)
    taken = torch.zeros(case.shape, dtype=torch.int64)
    for chunk in chunks:
        assert 0 not in chunk.sizes or not full.numel(), "an empty chunk"
        where = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
        view = x.__get_tensor_shard__(MetadataIndex("x", chunk.offsets))
        assert torch.equal(view, full[where])
        if view.numel():
            assert view.untyped_storage().data_ptr() == x.to_local().untyped_storage().data_ptr(), "loading writes into the part"
        taken[where] += 1
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, (taken.numpy().tolist(), len(chunks)))
    assert bool((torch.tensor(np.array([t for t, _ in everyone])).sum(0) == 1).all()), "every element is written exactly once"
    assert full.numel() or sum(n for _, n in everyone) == 1, "an empty tensor is named by one writer"
    with pytest.raises(ValueError, match="x: this rank holds no box at offset"):
        x.__get_tensor_shard__(MetadataIndex("x", torch.Size([99] * max(1, len(case.shape)))))


LAYOUTS: dict[str, list[Case]] = {
    "element cuts": [Case((6, 5), 2, (4, 26)), Case((7,), 1, (7, 0)), Case((2, 3, 4), 3, (5, 19)), Case((), 0, (0, 1))],
    "row cuts": [Case((6, 5), 1, (2, 4)), Case((7,), 1, (3, 4)), Case((2, 3, 4), 2, (1, 5)), Case((), 0, (1, 0))],
}
for cuts in LAYOUTS.values():
    cuts.append(Case((0, 3), 1, (0, 0)))


def _checkpoint(rank: int, world: int, folder: str) -> None:
    mesh = one_dim_mesh(world)
    wholes = [values(c.shape, seed=i) + 0.5 for i, c in enumerate(LAYOUTS["row cuts"])]

    def state(kind: str, empty: bool) -> dict[str, torch.Tensor]:
        made: dict[str, torch.Tensor] = {}
        for i, full in enumerate(wholes):
            source = torch.full_like(full, -1.0) if empty else full
            if kind in LAYOUTS:
                made[f"t{i}"] = ragged(LAYOUTS[kind][i], source, mesh, rank)
            elif kind == "plain" or not full.ndim:
                made[f"t{i}"] = source.clone()
            else:
                made[f"t{i}"] = torch_distribute(source.clone(), mesh, [Shard(0)])
        return made

    kinds = [*LAYOUTS, "plain", "Shard(0)"]
    for kind in kinds:
        dcp.save(state(kind, False), checkpoint_id=str(Path(folder) / kind))
    for source, target in itertools.product(kinds, kinds):
        if source in LAYOUTS or target in LAYOUTS:
            loaded = state(target, True)
            dcp.load(loaded, checkpoint_id=str(Path(folder) / source))
            for i, full in enumerate(wholes):
                assert torch.equal(whole(loaded[f"t{i}"]), full), (source, target, i)


def _model_and_optimizer(rank: int, world: int, folder: str) -> None:
    mesh = one_dim_mesh(world)
    cuts = {"weight": Case((6, 5), 2, (4, 26)), "inner.weight": Case((7, 3), 1, (2, 5)), "inner.bias": Case((7,), 1, (0, 7))}
    others = {"weight": Case((6, 5), 1, (3, 3)), "inner.weight": Case((7, 3), 0, (0, 1)), "inner.bias": Case((7,), 1, (4, 3))}

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        for i, p in enumerate(model.parameters()):
            gradient = values(tuple(p.shape), seed=10 * step + i)
            p.grad = distribute_tensor(gradient, mesh, p.placements, src_data_rank=None) if isinstance(p, DTensor) else gradient
        optimizer.step()

    plain, model = reference(), shard(reference(), mesh, cuts)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (plain, model)]
    for m, optimizer in zip((plain, model), optimizers, strict=True):
        train(m, optimizer, 1)
    saved = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizers[1])}
    assert all(isinstance(v, RaggedDTensor) for v in saved["model"].values())
    dcp.async_save(saved, checkpoint_id=folder).result()
    gathered: Any = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        assert all(torch.equal(gathered[k], v) for k, v in plain.state_dict().items())

    resumed = shard(reference(), mesh, others)
    optimizer = torch.optim.AdamW(resumed.parameters(), lr=0.1)
    loaded: dict[str, Any] = {"model": get_model_state_dict(resumed), "optimizer": get_optimizer_state_dict(resumed, optimizer)}
    dcp.load(loaded, checkpoint_id=folder)
    resumed.load_state_dict(loaded["model"])
    set_optimizer_state_dict(resumed, optimizer, loaded["optimizer"])
    train(plain, optimizers[0], 2)
    train(resumed, optimizer, 2)
    for (name, p), q in zip(resumed.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(whole(p), q), f"{name}: one more step after loading into another layout is not that of the undisturbed run"


def _dcp(rank: int, world: int, folder: str) -> None:
    _checkpoint(rank, world, folder)
    _model_and_optimizer(rank, world, str(Path(folder) / "training"))


def test_dcp_loads_bit_for_bit_across_ragged_plain_and_shard_0() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_gloo(2, _dcp, folder, timeout=100)


def _dcp_hsdp(rank: int, world: int, folder: str) -> None:
    mesh, full = init_device_mesh("cpu", (2, 2)), values((6, 5))
    case = Case((6, 5), 2, (4, 26))
    x = RaggedDTensor.from_local(case.part(full, mesh.get_local_rank(1)).clone(), mesh, hsdp(case), shape=(6, 5))
    dcp.save({"x": x}, checkpoint_id=folder)
    placements: list[Placement] = [Replicate(), RaggedShard((0,), (5, 1))]
    y = distribute_tensor(torch.zeros(6, 5), mesh, placements)
    dcp.load({"x": y}, checkpoint_id=folder)
    assert torch.equal(y.full_tensor(), full)


def test_dcp_writes_replicas_once() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_gloo(4, _dcp_hsdp, folder, timeout=60)
        metadata: Any = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata["x"]
        assert sum(c.sizes.numel() for c in metadata.chunks) == 30


@on_processes(3)
def test_a_mesh_is_let_go_with_the_last_tensor_on_it(rank: int, world: int) -> None:
    """A rescale must be able to drop the old process groups, so nothing but the tensors may hold a mesh."""

    def use() -> list[weakref.ref[Any]]:
        mesh = DeviceMesh("cpu", list(range(world)))
        p: Any = nn.Parameter(ragged(CASE, values(CASE.shape), mesh, rank))
        p.grad = torch.ones_like(p)
        torch.optim.AdamW([p], foreach=True).step()
        p.redistribute(placements=[OTHER_CUTS["weight"].placement]).full_tensor()
        p.redistribute(placements=[Shard(1)])
        assert math.isfinite(p.sum().item()) and math.isfinite(torch._foreach_norm([p])[0].item())
        return [weakref.ref(mesh), weakref.ref(p._spec)]

    held = use()
    gc.collect()
    assert [ref() is not None for ref in held] == [False, False]


UNCHANGED = """
import torch, types
import torch.distributed.tensor, torch.distributed.checkpoint, torch.optim, torch.distributed.fsdp
import torch.distributed.tensor._redistribute, torch.distributed.tensor._api, torch.distributed.tensor._dispatch
import torch.distributed.checkpoint.planner_helpers, torch.distributed.checkpoint.state_dict, torch.nn.utils.clip_grad
import torch._dynamo, torch.compiler  # torch's own import of it wraps functions of torch
import sys

def members(owner, prefix):
    for name, value in sorted(vars(owner).items()):
        if isinstance(value, (types.FunctionType, type, types.BuiltinFunctionType, classmethod, staticmethod, property)):
            yield f"{prefix}.{name}", id(value)
            if isinstance(value, type) and value.__module__.startswith("torch"):
                for inner, attribute in sorted(vars(value).items()):
                    yield f"{prefix}.{name}.{inner}", id(attribute)

def snapshot():
    found = {}
    for name, module in sorted(sys.modules.items()):
        if name == "torch" or name.startswith("torch."):
            found.update(members(module, name))
    return found

from torch.optim.optimizer import _foreach_supported_types as a
from torch.utils._foreach_utils import _foreach_supported_types as b

LISTS = (a, b)
before, lists = snapshot(), [list(x) for x in LISTS]
safe = set(torch.serialization.get_safe_globals())
import vescale_ray, vescale_ray.dtensor.ragged_dtensor as ours
import vescale_ray.state_dict, vescale_ray.fsdp, vescale_ray.optim, vescale_ray.dtensor.redistribution, vescale_ray.checkpoint
after = snapshot()
changed = [k for k in before if before[k] != after.get(k)]
added = [k for k in after if k not in before and k.rpartition(".")[0] in before]  # new attributes of torch's classes
assert not changed, changed
assert not added, added
for now, then in zip(LISTS, lists):
    assert list(now) == [*then, ours.RaggedDTensor]
extra = set(torch.serialization.get_safe_globals()) - safe
from vescale_ray.dtensor.derived import unpickled_derived
from torch.distributed.tensor._ops._math_ops import _NormPartial
assert extra == {ours.RaggedDTensor, ours.RaggedShard, ours._rebuild, unpickled_derived, _NormPartial}, extra
from torch.optim.optimizer import _global_optimizer_pre_hooks as hooks, _global_optimizer_post_hooks
from vescale_ray.fsdp.units.forward_checks import check_optimizer
from vescale_ray.fsdp.units.optimizer_steps import after_optimizer_step
assert list(hooks.values()) == [ours._refuse_muon, check_optimizer]
assert list(_global_optimizer_post_hooks.values()) == [after_optimizer_step]
print("unchanged", len(before))
"""


def test_import_changes_torch_only_in_dtensors_registries() -> None:
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", UNCHANGED], cwd=root, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[1]) > 5000, "the snapshot saw torch's classes and functions"
