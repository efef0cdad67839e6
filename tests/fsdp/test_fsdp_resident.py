"""On gloo, FP32 shards live in the buffers into which they are gathered. All results equal those of shards with their own memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from tests.fsdp import test_fsdp_behaviour as behaviour
from tests.fsdp import test_fsdp_settings as unit_settings
from tests.operations import Operations
from tests.ranks import on_processes, run_gloo
from vescale_ray.fsdp import fully_shard, set_debug
from vescale_ray.fsdp.buffers import memory
from vescale_ray.fsdp.buffers.memory import MAPPED_BYTES, Buffer, Pool, may_stay
from vescale_ray.fsdp.units.schedule import unit_of

CPU = torch.device("cpu")
PAGE = 4096
MIB = 1 << 20
pytestmark = pytest.mark.skipif(not may_stay(MAPPED_BYTES, CPU), reason="needs Linux: memory is moved by mremap")


# -- the buffer ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", [(0, 5000), (3 * PAGE + 128, 9 * PAGE + 256), (MAPPED_BYTES - 700, MAPPED_BYTES), (PAGE, 2 * PAGE)])
def test_resident_part_keeps_its_contents_while_the_rest_moves(where: tuple[int, int]) -> None:
    start, end = where
    first, second = Buffer(MAPPED_BYTES, CPU, stays=where), Buffer(MAPPED_BYTES, CPU, stays=where)
    own = [buffer.resident(torch.uint8) for buffer in (first, second)]
    assert [tensor.numel() for tensor in own] == [end - start] * 2 and not any(tensor.any() for tensor in own)
    own[0].fill_(1)
    own[1].fill_(2)
    first.allocate()
    outside = torch.cat([torch.arange(start), torch.arange(end, MAPPED_BYTES)])
    flat = first.flat(torch.uint8)
    flat[outside] = (outside % 251).to(torch.uint8)
    assert (flat[start:end] == 1).all() and own[0].data_ptr() == flat.data_ptr() + start
    second.allocate(first)
    moved = second.flat(torch.uint8)
    # The incomplete pages at both ends of the part stay in place, too; a gather overwrites them.
    inner = outside[(outside < start // PAGE * PAGE) | (outside >= -(-end // PAGE) * PAGE)]
    assert torch.equal(moved[inner], (inner % 251).to(torch.uint8)) and (moved[start:end] == 2).all()
    second.free()
    first.free()
    assert (own[0] == 1).all() and (own[1] == 2).all()


def test_pool_hands_memory_on_only_between_equal_resident_parts() -> None:
    pool = Pool(CPU)
    part = (0, MAPPED_BYTES // 2)
    users = [Buffer(8, CPU) for _ in range(2)]  # any object that lives as long
    for user in users:
        pool.expect(MAPPED_BYTES, user, part)
        pool.expect(MAPPED_BYTES, user)
    kept = Buffer(MAPPED_BYTES, CPU, stays=part)
    pool.provide(kept)
    assert pool.bytes_held() == MAPPED_BYTES // 2
    pool.release(kept, None)
    whole = pool.take(MAPPED_BYTES, CPU)
    assert kept.allocated and pool.bytes_held() == MAPPED_BYTES // 2 + MAPPED_BYTES
    exchange = pool.take(MAPPED_BYTES, CPU, stays=part)
    assert not kept.allocated and pool.bytes_held() == MAPPED_BYTES // 2 + MAPPED_BYTES
    pool.give_back(whole)
    pool.give_back(exchange)
    pool.trim()
    assert pool.bytes_held() == 0


def test_kept_resident_part_does_not_keep_gathered_memory() -> None:
    buffer = Buffer(64 * MIB, CPU, stays=(0, PAGE))
    own = buffer.resident(torch.uint8)
    own.fill_(7)
    buffer.allocate()
    buffer.flat(torch.uint8)[PAGE:] = 1
    view = buffer.flat(torch.uint8)[-PAGE:]
    full = resident_bytes()
    del buffer
    assert (view == 1).all()  # all memory stays while a graph may read it
    del view
    assert full - resident_bytes() > 56 * MIB
    assert (own == 7).all()


def resident_bytes() -> int:
    """Resident memory of this process, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


# -- a model ---------------------------------------------------------------------------------------------------------------


class Blocks(nn.Module):
    """Three layers of 260 KiB, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(257, 257), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(257, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.head(x)
        return out


def pair(how: Callable[..., Any] = torch_fully_shard, **options: Any) -> tuple[Any, Any]:
    """The same model twice, sharded by our fully_shard and by ``how``."""
    torch.manual_seed(1)
    ours: Any = Blocks()
    theirs: Any = copy.deepcopy(ours)
    for model, shard in ((ours, fully_shard), (theirs, how)):
        for layer in model.layers:
            shard(layer, **options)
        shard(model, **options)
    return ours, theirs


def given(rank: int, index: int) -> torch.Tensor:
    return torch.randn(4, 257, generator=torch.Generator().manual_seed(100 * index + rank))


def lives_in_its_buffer(module: nn.Module) -> bool:
    unit = unit_of(module)
    assert unit is not None
    group = unit.groups[0]
    if group.gathered.buffer is None or group.gathered.stays == (0, 0):
        return False
    assert group.gathered.buffer._range is not None
    start = group.gathered.buffer._range.address + group.gathered.stays[0]
    return group.master.flat.data_ptr() == start and group.gathered.stays[1] - group.gathered.stays[0] == group.master.flat.nbytes


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)])
@on_processes()
def test_training_is_torchs_and_gathering_copies_nothing(rank: int, world: int) -> None:
    ours, theirs = pair()
    assert all(lives_in_its_buffer(layer) for layer in ours.layers)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (ours, theirs)]
    for step in range(4):
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            for micro in range(2):
                model.set_requires_gradient_sync(micro == 1)
                model(given(rank, 2 * step + micro)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(p.full_tensor(), q.full_tensor(), rtol=2e-4, atol=1e-6)

    def copied(name: str, args: Any) -> str | None:
        copies = ("aten::copy_", "aten::clone", "aten::_to_copy", "aten::cat")
        return name if name in copies and (not isinstance(args[0], torch.Tensor) or args[0].numel()) else None

    with Operations(copied) as seen:
        ours.layers[1].unshard()
    assert not seen.seen
    assert isinstance(ours.layers[1][0].weight, nn.Parameter)
    ours.layers[1].reshard()


@on_processes(2)
def test_the_optimizer_may_step_between_forward_and_backward(rank: int, world: int) -> None:
    """Step the optimizer between the backwards of two forwards: the second backward sees new weights.

    autograd does not take the write to the shards for a write to its saved tensors.
    """
    ours, theirs = pair()
    for model in (ours, theirs):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(2):
            first, second = (model(given(rank, 10 * step + i)).square().mean() for i in range(2))
            first.backward()
            optimizer.step()
            optimizer.zero_grad()
            second.backward()
            optimizer.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor(), q.full_tensor(), rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 3])
@on_processes()
def test_backward_after_a_step_uses_only_the_new_weights(rank: int, world: int) -> None:
    """All units stay gathered while a step doubles all weights. The backward then multiplies by the whole new weights."""
    torch.manual_seed(3)
    ours: Any = nn.Sequential(*(nn.Linear(257, 257, bias=False) for _ in range(3)))
    weights = [layer.weight.detach().clone() for layer in ours]
    for layer in ours:
        fully_shard(layer, reshard_after_forward=False)
    fully_shard(ours)
    optimizer = torch.optim.SGD(ours.parameters(), lr=1.0)
    for parameter in ours.parameters():
        parameter.grad = -parameter.detach()
    x = given(0, 0).requires_grad_()
    out = ours(x)
    optimizer.step()
    optimizer.zero_grad()
    out.sum().backward()
    expected = torch.ones_like(out)
    for weight in reversed(weights):
        expected = expected @ (2 * weight)
    torch.testing.assert_close(x.grad, expected, rtol=1e-4, atol=1e-4)


@on_processes(3)
def test_shards_from_meta_or_cast_later_live_in_their_buffers(rank: int, world: int) -> None:
    """Materialise from the meta device, and cast after a step. The pool knows the new buffers and hands on their memory."""
    with torch.device("meta"):
        ours: Any = Blocks()
    for layer in ours.layers:
        fully_shard(layer)
    fully_shard(ours).to_empty(device="cpu")
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.fill_(0.01)
    for dtype in (torch.float32, torch.float64):
        ours.to(dtype)
        ours(given(rank, 0).to(dtype)).sum().backward()
        for layer in ours.layers:
            assert lives_in_its_buffer(layer)
            group = unit_of(layer).groups[0]  # type: ignore[union-attr]
            assert group.grads.leaves_out
            assert len(group.gathered.pool._users[group.gathered.buffer.key]) == 3  # type: ignore[union-attr]


@on_processes(2)
def test_writing_to_gathered_parameters_is_refused(rank: int, world: int) -> None:
    ours, _ = pair()
    before = ours.layers[1][0].bias.full_tensor()
    ours(given(rank, 0))
    ours.layers[1].unshard()
    with torch.no_grad():
        ours.layers[1][0].weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="gathered parameters of 'layers.1") as caught:
        ours.layers[1].reshard()
    assert "write to the sharded parameters" in str(caught.value) and "layers.1.0.weight. " in str(caught.value)
    assert torch.equal(ours.layers[1][0].bias.full_tensor(), before)
    ours(given(rank, 0)).sum().backward()  # and training goes on


@on_processes(2)
def test_embedding_max_norm_writes_are_discarded_as_with_torch(rank: int, world: int) -> None:
    torch.manual_seed(2)
    ours: Any = nn.Sequential(nn.Embedding(700, 128, max_norm=0.5), nn.Linear(128, 2))
    theirs = copy.deepcopy(ours)
    for model, shard in ((ours, fully_shard), (theirs, torch_fully_shard)):
        optimizer = torch.optim.SGD(shard(model).parameters(), lr=0.1)
        for step in range(3):
            tokens = torch.randint(0, 700, (40,), generator=torch.Generator().manual_seed(10 * step + rank))
            model(tokens).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert not lives_in_its_buffer(ours)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor(), q.full_tensor(), rtol=1e-5, atol=1e-7)


@on_processes(2)
def test_shards_may_be_cast_written_and_moved_away(rank: int, world: int) -> None:
    """After casts, loads, sharing of memory and debug mode, the values are right wherever the shards are."""
    ours, alone = pair(how=lambda module: module)
    x = given(rank, 0)

    def same(bound: float = 1e-6) -> None:
        given_now = x.to(alone.head.weight.dtype)
        torch.testing.assert_close(ours(given_now), alone(given_now), rtol=bound, atol=bound)
        ours.reshard()

    same()
    saved = {name: p.full_tensor().clone() for name, p in ours.named_parameters()}
    for model in (ours, alone):
        model.to(torch.float64)
    same()
    assert all(lives_in_its_buffer(layer) for layer in ours.layers)
    for model in (ours, alone):
        model.to(torch.float32)
    same()
    for p in ours.parameters():
        p.detach().to_local().zero_()
    for name, p in ours.named_parameters():
        assert not p.full_tensor().any()
        with torch.no_grad():
            p.copy_(saved[name])
    same()
    set_debug(True)
    try:
        for _ in range(2):
            ours(x).sum().backward()
        same()
    finally:
        set_debug(False)
    ours.layers[0][0].weight.to_local().share_memory_()  # moves the storage elsewhere
    same()


ROUTES = [
    behaviour.test_unused_and_frozen_parameters_keep_no_gradient,
    behaviour.test_a_model_may_run_several_times_before_backward,
    behaviour.test_units_with_open_backward_share_no_buffers_with_others,
    behaviour.test_forward_always_uses_the_newest_parameters,
    behaviour.test_a_list_of_modules_is_one_unit_and_may_run_in_parts,
    behaviour.test_another_method_can_be_a_forward,
    behaviour.test_inputs_and_outputs_may_be_nested,
    unit_settings.test_gradients_accumulate_without_communication,
    unit_settings.test_prefetch_lists_change_nothing_but_the_order,
    unit_settings.test_manual_unshard_and_reshard_swap_the_parameters,
    unit_settings.test_hooks_on_sharded_parameters_run_when_gradients_arrive,
    behaviour.test_casting_the_model_casts_its_shards,
    behaviour.test_after_an_exception_a_step_can_be_repeated,
]


def with_small_ranges(rank: int, world: int, routes: Sequence[Any]) -> int:
    """Run these tests' functions with every buffer in an address range, regardless of size. Return how many shards lived in one."""
    resident, count = Buffer.resident, 0

    def counted(buffer: Buffer, dtype: torch.dtype) -> torch.Tensor:
        nonlocal count
        count += 1
        return resident(buffer, dtype)

    with patch.object(Buffer, "resident", counted), patch.object(memory, "MAPPED_BYTES", 0):
        for route in routes:
            route.__wrapped__(rank, world)
    return count


AMONG_THREE = [
    behaviour.test_state_dicts_are_views_and_load_from_sharded_or_full,
    unit_settings.test_the_divide_factor_is_torchs,
]
AMONG_FOUR = [unit_settings.test_hsdp_shards_inside_and_sums_over_replicas]


@pytest.mark.parametrize(("world", "routes"), [(2, ROUTES), (3, AMONG_THREE), (4, AMONG_FOUR)])
def test_scenarios_of_other_files_pass_with_resident_shards(world: int, routes: list[Any]) -> None:
    assert min(run_gloo(world, with_small_ranges, routes, timeout=110)) >= len(routes)
