"""FP8 codes of shards that share tiles: the exchange of magnitudes, and devices that this machine may lack."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tests.ranks import on_processes
from vescale_ray.dbuffer import KeptShard
from vescale_ray.fsdp import fully_shard
from vescale_ray.fsdp.communication import comm
from vescale_ray.fsdp.groups.master_shard import MasterShard
from vescale_ray.fsdp.layouts import wire
from vescale_ray.fsdp.layouts.code_parts import CodeParts
from vescale_ray.fsdp.layouts.wire import CodeWire
from vescale_ray.geometry import Block
from vescale_ray.planner import TensorSpec, plan_layout
from vescale_ray.quantization import Fp8Block
from vescale_ray.quantization.fp8 import NonFiniteWeights

CPU, DEVICE, FORM = torch.device("cpu"), torch.device("cuda"), Fp8Block(32, 32)


def first_rank(ranks: int) -> tuple[CodeWire, KeptShard]:
    """The first of ``ranks`` ranks, which share tiles, and its shard."""
    layout = plan_layout([TensorSpec("w", (64, 64), Block.rows(1), torch.float8_e4m3fn)], ranks)
    kept = layout.kept(0)
    return CodeWire(CodeParts(layout, {"w": FORM}), 0), KeptShard(kept, torch.randn(kept.numel, generator=torch.Generator().manual_seed(1)))


class Reached(Exception):
    """A collective was called."""


def test_offloaded_shards_compare_magnitudes_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL can't reduce host memory. The meta device stands for an accelerator."""
    reduced: list[torch.device] = []

    def all_reduce(tensor: torch.Tensor, *_: Any) -> None:
        reduced.append(tensor.device)
        raise Reached

    monkeypatch.setattr(comm.dist, "all_reduce", all_reduce)
    sender, shard = first_rank(3)
    place = SimpleNamespace(device=torch.device("meta"), shard_group=None, pairwise=False)
    master: Any = SimpleNamespace(place=place)
    assert sender.cuts_tiles
    with pytest.raises(Reached):
        sender.renew(shard, lambda mine: MasterShard._largest_of_ranks(master, mine, comm.Lane(CPU), "w"), check=True)
    assert [device.type for device in reduced] == ["meta"]


class OnDevice(torch.Tensor):
    """Host memory that claims to be on an accelerator."""

    device = property(lambda self: DEVICE)  # type: ignore[assignment]


class Event:
    """An event that counts waits of the host."""

    waits = 0

    def synchronize(self) -> None:
        Event.waits += 1


def test_the_host_waits_for_the_device_only_in_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that share tiles renew their codes in each all-gather, and check them after each optimizer step."""
    monkeypatch.setattr(wire, "current_event", lambda device: Event())
    monkeypatch.setattr(wire, "on_triton", lambda values: False)  # kernels don't take host memory
    monkeypatch.setattr(Event, "waits", 0)
    sender, shard = first_rank(1)
    parts = torch.empty(sender.parts.part_bytes, dtype=torch.uint8)
    flat = torch.empty(64 * 64).as_subclass(OnDevice)

    def gather(*, check: bool) -> int:
        sender.renew(shard, lambda mine: mine, check=check)
        sender.write(parts, non_blocking=False)
        sender.join(parts, flat)
        return Event.waits

    waits = [gather(check=check) for check in (True, False, False, True, False, True)]
    assert waits == [0, 0, 0, 1, 1, 2]
    shard.flat[0] = torch.nan
    assert [gather(check=check) for check in (False, True, False)] == [2, 3, 3], "the host does not know yet"
    with pytest.raises(NonFiniteWeights, match=r"'w' \(1 tile\)"):
        gather(check=True)


@on_processes(3)
def test_ranks_in_other_units_exchange_no_magnitudes(rank: int, world: int) -> None:
    """gloo's all-reduce would mix the magnitudes of units of one size, or end the process if sizes differ."""
    mesh = DeviceMesh.from_group(dist.new_group(timeout=timedelta(seconds=2)), "cpu")
    model: Any = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    for unit in (*model, model):
        fully_shard(unit, mesh=mesh, quantize_policy=lambda name, parameter: FORM)
    with torch.no_grad():
        model(torch.randn(2, 64))
    with pytest.raises(
        RuntimeError, match=r"this rank waited for exchange of largest magnitudes of '?[01] .*, 3 ranks; .* VESCALE_RAY_FSDP_DEBUG"
    ):
        model[0 if rank else 1].unshard(async_op=True)
