"""The order of streams, checked without a device: events must order every two conflicting uses of a buffer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard

from tests.fsdp.simulated_streams import Stream, simulate
from tests.fsdp.towers import Tower, alike, grads, inputs, same, seeded, shard_tower
from tests.fsdp.units import unit_of
from tests.ranks import on_processes, on_threads, run_gloo, run_threads
from vescale_ray.compat.distributed import all_gather_many
from vescale_ray.compat.fsdp import AllGather
from vescale_ray.dbuffer import KeptShard
from vescale_ray.fsdp import Sharding, fully_shard
from vescale_ray.fsdp.buffers.freed import EVERYWHERE, FreedMemory
from vescale_ray.fsdp.buffers.memory import Pool
from vescale_ray.fsdp.communication import comm
from vescale_ray.fsdp.groups.master_shard import MasterShard
from vescale_ray.fsdp.layouts.code_parts import CodeParts
from vescale_ray.fsdp.layouts.wire import CodeWire
from vescale_ray.geometry import Block
from vescale_ray.planner import TensorSpec, plan_layout, unit_plan
from vescale_ray.quantization import Fp8Block

CPU = torch.device("cpu")


@pytest.fixture
def streams(monkeypatch):
    return simulate(monkeypatch)


def train(rank, world, streams, options):
    here = streams()
    ours, alone = shard_tower(seeded(Tower), **options), seeded(Tower)
    for module in ours.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda m, a: here.note("forward reads", m.weight.data, False))
            module.register_full_backward_pre_hook(lambda m, g: here.note("backward reads", m.weight.data, False))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, alone)]
    bound = 1e-5 if not options else 5e-2
    for step in range(4):
        ours(inputs(rank, world, step)).float().square().mean().backward()
        alone(inputs(0, 1, step)).square().mean().backward()
        same(grads(ours), grads(alone), bound)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for group in (g for m in ours.modules() if hasattr(m, "_get_fsdp_state") for g in unit_of(m).groups):
            here.note("optimizer writes", group.master.flat, True)
    layer, root = (unit_of(module).groups[0] for module in (ours.layers[0], ours))
    assert layer.gathered.nbytes == layer.grads.buffer_bytes
    apart = root.gathered.nbytes != layer.gathered.nbytes
    for group, stream in ((layer, "lane 1"), (root, "compute" if apart else "lane 1")):
        assert {name for (name, n), blocks in here.freed.items() if blocks and n == group.gathered.nbytes} == {stream}
    return here.races(), len(here.accesses), len(here.freed["lane 1", layer.gathered.nbytes]), len(here.blocks)


MIXED = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}


@pytest.mark.parametrize("options", [{}, MIXED, {**MIXED, "keep_cast": True}], ids=["fp32", "mixed", "kept cast"])
def test_every_use_of_a_buffer_is_ordered_by_events(streams, options):
    for races, accesses, blocks, used in run_threads(2, train, streams, options):
        assert races == []
        assert accesses > 200
        assert blocks == 3, "two units are gathered and one has gradients, or one is gathered and two have gradients"
        assert used == 0, "between steps all memory is the allocator's"


@pytest.mark.parametrize("which", ["all", "weights"])
def test_row_sharded_parameters_are_copied_without_races(streams, which):
    def along_rows(param):
        return Shard(0) if which == "all" or param.dim() == 2 else None

    for races, accesses, *_ in run_threads(2, train, streams, {"shard_placement_fn": along_rows}):
        assert races == []
        assert accesses > 200


def test_parameters_kept_until_the_step_are_used_without_races(streams):
    for races, accesses, *_ in run_threads(2, train, streams, {"sharding": Sharding.zero2()}):
        assert races == []
        assert accesses > 100


class OwnGather(AllGather):
    """An all-gather into memory of its own, which is never freed."""

    def __init__(self, here):
        self.here = here

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        self.here.note("all-gather reads", input_tensor, False)
        self.here.note("all-gather writes", output_tensor, True)
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


@on_threads(2)
def test_memory_of_an_own_all_gather_is_used_without_races(rank, world, streams):
    here = streams()
    ours, alone = shard_tower(seeded(Tower)), seeded(Tower)
    for module in ours.modules():
        if hasattr(module, "set_custom_all_gather"):
            module.set_custom_all_gather(OwnGather(here))
        if isinstance(module, nn.Linear):
            module.register_full_backward_pre_hook(lambda m, g: here.note("backward reads", m.weight.data, False))
            module.register_forward_hook(lambda m, a, y: here.note("forward reads", m.weight.data, False))
    alike(ours, alone, rank, world, range(3))
    assert here.races() == []
    assert sum(what == "all-gather writes" for what, *_ in here.accesses) > 10


def test_the_checker_finds_a_missing_wait(streams, monkeypatch):
    monkeypatch.setattr(FreedMemory, "reuse", lambda self, addresses, stream: None)
    assert any(races for races, *_ in run_threads(2, train, streams, {}))


def test_the_checker_finds_a_gather_into_unreduced_gradients(streams, monkeypatch):
    monkeypatch.setattr(Pool, "lend", lambda self, buffer, event: self._take_back(buffer))
    assert any(races for races, *_ in run_threads(2, train, streams, {}))


@on_threads(2)
def test_the_gathers_of_a_units_groups_are_one_call(rank, world, streams):
    """Train with two groups in each unit, whose all-gathers are one call."""
    here = streams()
    models = seeded(Tower), seeded(Tower)
    for model in models:
        for layer in model.layers:
            layer[0].bias.requires_grad_(False)
    ours, alone = shard_tower(models[0]), models[1]
    alike(ours, alone, rank, world, range(3))
    assert here.races() == []
    assert here.together.count(2) >= 5 * 3


class Uneven(nn.Module):
    """Layers whose two matrices have rows of different lengths."""

    def __init__(self, layers=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(20, 28), nn.Tanh(), nn.Linear(28, 20)) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def a_buffer_for_each_matrix(specs, num_shards, **_):
    matrices = [spec for spec in specs if len(spec.shape) == 2]
    rest = [spec for spec in specs if len(spec.shape) != 2]
    return tuple(plan_layout([spec, *others], num_shards) for spec, others in zip(matrices, [rest, []], strict=True))


def train_uneven(rank, world, mixed, staging=None):
    """Train with blocks of 4 rows. Returns the number of groups of a layer, and all gradients and parameters."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if mixed else MixedPrecisionPolicy()
    model = seeded(Uneven)
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy, block_policy=lambda name, p: Block.rows(4) if p.dim() == 2 else None)
    fully_shard(model, mp_policy=policy)
    model.set_reduce_scatter_staging(staging)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    values = []
    for step in range(3):
        model(inputs(rank, world, step)).float().square().mean().backward()
        values += [p.grad.full_tensor() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    values += [p.full_tensor() for p in model.parameters()]
    return len(unit_of(model.layers[0]).groups), values


def uneven_calls(rank, world, streams, mixed, staging=None):
    here = streams()
    groups, values = train_uneven(rank, world, mixed, staging)
    return groups, values, here.races(), here.together, here.reduced_together


@pytest.mark.parametrize(("mixed", "staging"), [(False, 1 << 20), (True, 1 << 11)])
def test_a_unit_of_several_buffers_is_one_call_in_each_direction(streams, monkeypatch, mixed, staging):
    one = run_threads(2, uneven_calls, streams, mixed)
    monkeypatch.setattr(unit_plan, "plan_buffers", a_buffer_for_each_matrix)
    several = run_threads(2, uneven_calls, streams, mixed, staging)
    for (groups, expected, *_), (more, values, races, gathers, sums) in zip(one, several, strict=True):
        assert (groups, more) == (1, 2)
        assert races == []
        assert all(torch.equal(a, b) for a, b in zip(expected, values, strict=True)), "to the bit"
        assert gathers == [2] * (2 * 4) * 3, "forward and backward gather each of four layers"
        if mixed and staging < 1 << 20:
            numel = 2 * (320 + 336) + 2 * 32
            chunks = -(-4 * numel // staging)
            assert len(sums) <= (chunks + 1) * 4 * 3 and sums.count(2) == 4 * 3, "one chunk has parts of both buffers"
        else:
            assert sums == [2] * 4 * 3


def test_gloo_trains_several_buffers_like_one():
    for several, one in zip(run_gloo(2, uneven_on_gloo, True), run_gloo(2, uneven_on_gloo, False), strict=True):
        assert (several[0], one[0]) == (2, 1)
        assert all((a == b).all() for a, b in zip(several[1], one[1], strict=True))


def uneven_on_gloo(rank, world, several):
    with pytest.MonkeyPatch.context() as patch:
        if several:
            patch.setattr(unit_plan, "plan_buffers", a_buffer_for_each_matrix)
        groups, values = train_uneven(rank, world, False)
    return groups, [value.detach().numpy() for value in values]


@on_processes(2)
def test_gloo_runs_several_gathers_in_one_call(rank, world):
    inputs = [torch.full((n,), float(rank * 10 + n)) for n in (3, 5)]
    outputs = [torch.empty(world * n) for n in (3, 5)]
    world_group = dist.group.WORLD
    assert world_group is not None
    for work in all_gather_many(list(zip(outputs, inputs, strict=True)), group=world_group, async_op=True):
        work.wait()
    for n, out in zip((3, 5), outputs, strict=True):
        assert torch.equal(out, torch.cat([torch.full((n,), float(r * 10 + n)) for r in range(world)]))


def test_a_stream_waits_only_for_the_last_use_of_its_own_memory():
    freed, others = FreedMemory(), [Stream(name) for name in ("compute", "reduce")]
    used = [other.record_event() for other in others]
    for addresses, event in zip([(0, 100), (100, 300)], used, strict=True):
        freed.add(addresses, event)
    freed.add((0, 300), None)  # host memory has no events
    lane = Stream("gather")
    freed.reuse((300, 400), lane)
    assert lane.clock == {}
    freed.reuse((0, 100), lane)
    assert lane.clock == {"compute": 1}
    for start in (100, 200):  # the halves of one freed range
        half = Stream("half")
        freed.reuse((start, start + 100), half)
        assert half.clock == {"reduce": 1}
    again = Stream("again")
    freed.reuse((0, 100), again)
    assert again.clock == {}, "the first user has waited"
    everything = Stream("all")
    freed.reuse(EVERYWHERE, everything)
    assert everything.clock == {"reduce": 1}


def test_temporaries_wait_for_earlier_users_and_later_ones_wait():
    freed, reduce, lane, compute = FreedMemory(), Stream("reduce"), Stream("gather"), Stream("compute")
    freed.add((0, 100), reduce.record_event())
    with freed.borrowed(lane):
        assert lane.clock == {"reduce": 1}
    freed.reuse((0, 50), compute)
    assert compute.clock == {"reduce": 1, "gather": 1}
    with FreedMemory().borrowed(None):
        pass  # on the CPU there is no stream


@pytest.mark.parametrize("how", ["from the host", "cut tiles"])
def test_temporaries_of_a_second_all_gather_wait_for_memory(streams, monkeypatch, how):
    """torch casts a shard from the host in memory that it allocates on the lane, and so are the largest magnitudes in cut tiles."""
    monkeypatch.setattr(MasterShard, "_largest_of_ranks", lambda self, mine, lane, name: mine)
    form, spec = Fp8Block(32, 32), TensorSpec("w", (64, 64), Block.rows(1), torch.float8_e4m3fn)
    layout = plan_layout([spec], 3)
    parts, kept = CodeParts(layout, {"w": form}), layout.kept(0)
    wire: Any = CodeWire(parts, 0) if how == "cut tiles" else SimpleNamespace(keeps_cast=False)
    place: Any = SimpleNamespace(device=CPU)
    division: Any = None
    master = MasterShard(place, division, wire, [], KeptShard(kept, torch.ones(kept.numel)), pinned=False)
    if how == "cut tiles":
        part = torch.empty(parts.part_bytes, dtype=torch.uint8)
    else:
        part = torch.empty(kept.numel, dtype=torch.bfloat16, device="meta")
    lane = comm.Lane(CPU)
    pool, reduce = Pool(CPU, lane), Stream("reduce")
    master.cast_to(part, (0,), lane, pool, "w")
    pool.freed.add((0, 100), reduce.record_event())
    master.cast_to(part, (0,), lane, pool, "w")
    assert lane.stream.clock["reduce"] == 1
    assert streams().current.name == "compute"
