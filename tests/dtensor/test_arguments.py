"""Calls that users of torch's DTensor make: a missing shape, wrong placements, exports of memory, and shapes changed in place."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from tests.ranks import on_processes, on_threads
from vescale_ray import gloo
from vescale_ray.dtensor import RaggedDTensor, RaggedShard, distribute_tensor, redistribute

UNITS = RaggedShard((0,), (1, 2))


def ragged() -> tuple[Any, torch.Tensor, DeviceMesh]:
    whole, mesh = torch.arange(24.0).reshape(6, 4) + 1, init_device_mesh("cpu", (2,))
    return distribute_tensor(whole.clone(), mesh, [UNITS], src_data_rank=None), whole, mesh


@on_threads(2)
def test_rows_that_every_rank_has_tell_the_shape(rank: int, world: int) -> None:
    x, whole, mesh = ragged()
    again = RaggedDTensor.from_local(x.to_local(), mesh, x.placements)
    assert again.shape == x.shape
    assert torch.equal(again.full_tensor(), whole)
    for placement in (RaggedShard((0,), (1, 0)), RaggedShard((0, 1), (1, 2)), RaggedShard((0,), (1, 2, 3))):
        with pytest.raises(ValueError, match="give shape=, the shape of the whole tensor"):
            RaggedDTensor.from_local(x.to_local(), mesh, [placement])
    with pytest.raises(ValueError, match="hold 0 RaggedShard"):
        RaggedDTensor.from_local(x.to_local(), mesh, [Shard(0)])


WRONG: dict[str, tuple[Callable[[Any, Any], object], str]] = {
    "no list": (lambda x, mesh: x.redistribute(placements=Shard(0)), r"placements are Shard\(dim=0\): give a list"),
    "numbers": (lambda x, mesh: redistribute(x, [0]), r"placements are \[0\]: give a list"),  # type: ignore[list-item]
    "without a name": (lambda x, mesh: x.redistribute([Replicate()]), r"name the argument: redistribute\(placements="),
    "of a plain tensor": (lambda x, mesh: distribute_tensor(torch.ones(6, 4), mesh, Shard(0)), "give a list"),  # type: ignore[arg-type]
    "of a part": (lambda x, mesh: RaggedDTensor.from_local(x.to_local(), mesh, UNITS), "give a list"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("what", WRONG)
@on_threads(2)
def test_placements_that_are_no_list_are_refused(rank: int, world: int, what: str) -> None:
    x, _, mesh = ragged()
    call, words = WRONG[what]
    with pytest.raises(TypeError, match=words):
        call(x, mesh)


def saved(x: Any, folder: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file({"x": x}, folder / f"{dist.get_rank()}.safetensors")


@pytest.mark.parametrize(
    "export",
    [saved, lambda x, _: x.numpy(), lambda x, _: np.asarray(x), lambda x, _: torch.from_dlpack(x), lambda x, _: x.storage()],
    ids=["safetensors", "numpy", "asarray", "dlpack", "storage"],
)
@on_threads(2)
def test_export_of_memory_names_what_has_some(rank: int, world: int, export: Callable[[Any, Path], object], tmp_path: Path) -> None:
    """A ragged tensor, a gathered view and a result: torch would read no memory, or end the process."""
    x, whole, _ = ragged()
    for value, expected in ((x, whole), (x[1], whole[1]), (x.cumsum(0), whole.cumsum(0))):
        with pytest.raises(RuntimeError, match=r"no memory of its own .* or full_tensor\(\), taken on every rank"):
            export(value, tmp_path)
        export(value.full_tensor(), tmp_path)
        assert torch.equal(value.full_tensor(), expected)


@on_threads(2)
def test_results_take_a_new_shape_in_place(rank: int, world: int) -> None:
    x, whole, _ = ragged()
    calls: list[Callable[[Any], Any]] = [
        lambda v: v.cumsum(0).unsqueeze_(0),
        lambda v: v.cumsum(0).t_(),
        lambda v: v.cumsum(0).transpose_(0, 1).mul_(2),
        lambda v: v.sum().unsqueeze(0).squeeze_(),
        lambda v: torch.stack([v.sum(), v.max()]).unsqueeze_(1).squeeze_(-1),
        lambda v: v.norm().view(1, 1).squeeze_(0),
        lambda v: torch.quantile(v, 0.3),
        lambda v: v.nanquantile(0.7, keepdim=True),
    ]
    for call in calls:
        found, expected = call(x), call(whole.clone())
        assert found.shape == expected.shape
        torch.testing.assert_close(found.full_tensor(), expected)


@on_threads(2)
def test_a_new_shape_in_place_of_parts_is_refused(rank: int, world: int) -> None:
    x, whole, _ = ragged()
    for value in (x[1:], x.cumsum(0).redistribute(placements=[Shard(0)])):
        with pytest.raises(RuntimeError, match=r"aten.t_.default would change the shape .* \(t\(\) for t_\(\)\)"):
            value.t_()
    for write in (lambda v: v.resize_(2, 2), lambda v: v.set_(torch.ones(2))):
        with pytest.raises(RuntimeError, match="would change the shape or the memory of"):
            write(x.cumsum(0))
    assert torch.equal(x.full_tensor(), whole)


def pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpickled(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)


@on_processes(2)
def test_a_part_is_loaded_on_the_rank_that_saved_it(rank: int, world: int) -> None:
    """One rank's file, loaded on all: the values would be those of another part. Parts have equal shapes here."""
    whole = torch.arange(24.0).reshape(6, 4)
    mesh, replicas = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (2, 1))
    x = distribute_tensor(whole, mesh, [RaggedShard((0,), (1, 1))])
    norm, copies = x.norm(), distribute_tensor(whole, replicas, [Replicate(), RaggedShard((0,), (1,))])
    files: list[list[bytes]] = [[], []]
    dist.all_gather_object(files, [pickled(x), pickled(norm), pickled(copies)])
    torch.testing.assert_close(unpickled(files[rank][0]).full_tensor(), whole)
    torch.testing.assert_close(unpickled(files[rank][1]).full_tensor(), whole.norm())
    assert torch.equal(unpickled(files[1 - rank][2]).full_tensor(), whole), "replicas have the same part"
    for other in files[1 - rank][:2]:
        with pytest.raises(ValueError, match=rf"the part that rank {1 - rank} on .* on rank {rank} of 2: .* full_state_dict=True"):
            unpickled(other)
    dist.barrier()
    dist.destroy_process_group()
    alone = unpickled(files[rank][0])
    assert torch.equal(alone.to_local(), whole[3 * rank : 3 * rank + 3])
    for read in (lambda: alone.full_tensor(), lambda: alone.norm().item(), lambda: float(unpickled(files[rank][1]))):
        with pytest.raises(RuntimeError, match=r"this process has no process group: load whole tensors"):
            read()
    gloo.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.raises(ValueError, match=rf"the part that rank {rank} on .* on rank 0 of 1: load each rank's own file on as many ranks"):
        unpickled(files[rank][0])
