"""FP8 codes of a shard whose tiles are cut, on devices that this machine may lack."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vescale_ray.dbuffer import KeptShard
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

    monkeypatch.setattr(wire.dist, "all_reduce", all_reduce)
    sender, shard = first_rank(3)
    assert sender.cuts_tiles
    with pytest.raises(Reached):
        sender.renew(shard, None, torch.device("meta"), stepped=True)  # type: ignore[arg-type]
    assert [device.type for device in reduced] == ["meta"]


class OnDevice(torch.Tensor):
    """Host memory that claims to be on an accelerator."""

    device = property(lambda self: DEVICE)  # type: ignore[assignment]


class Event:
    """An event that counts waits of the host."""

    waits = 0

    def synchronize(self) -> None:
        Event.waits += 1


def test_the_host_waits_for_checks_only_after_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that share tiles renew their codes in each all-gather."""
    monkeypatch.setattr(wire, "current_event", lambda device: Event())
    monkeypatch.setattr(Event, "waits", 0)
    sender, shard = first_rank(1)
    parts = torch.empty(sender.parts.part_bytes, dtype=torch.uint8)
    flat = torch.empty(64 * 64).as_subclass(OnDevice)

    def gather(*, stepped: bool) -> int:
        sender.renew(shard, None, DEVICE, stepped=stepped)  # type: ignore[arg-type]
        sender.write(parts, non_blocking=False)
        sender.join(parts, flat)
        return Event.waits

    waits = [gather(stepped=stepped) for stepped in (True, False, False, True, False, True)]
    assert waits == [0, 0, 0, 1, 1, 2]
    shard.flat[0] = torch.nan
    assert [gather(stepped=stepped) for stepped in (False, True, False)] == [2, 3, 3], "the host does not know yet"
    with pytest.raises(NonFiniteWeights, match=r"'w' \(1 tile\)"):
        gather(stepped=True)
