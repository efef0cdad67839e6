"""The order of streams, checked without a device: events must order every two conflicting uses of a buffer.

Lanes get simulated streams. Their work runs at once, but each access to a buffer is recorded with the vector clock of its stream. On a
device, two accesses are a race if one of them writes and no events order them.

Buffers keep their addresses, while torch's allocator provides their memory and takes it back. The allocator is simulated, too: a freed
block is the next one of its size for the stream that allocated it. Accesses are compared by block.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard

from tests.fsdp.towers import Tower, alike, grads, inputs, same, seeded, shard_tower
from tests.fsdp.units import unit_of
from tests.ranks import on_processes, on_threads, run_threads
from vescale_ray.fsdp import Sharding, comm, memory
from vescale_ray.fsdp.delivery import Delivery
from vescale_ray.fsdp.division import Chunks
from vescale_ray.fsdp.gradients import Gradients
from vescale_ray.fsdp.memory import Buffer, Pool


class Stream:
    def __init__(self, name):
        self.name, self.clock = name, {}

    def tick(self):
        self.clock[self.name] = self.clock.get(self.name, 0) + 1
        return dict(self.clock)

    def record_event(self):
        return self.tick()

    def wait_event(self, event):
        for name, time in event.items():
            self.clock[name] = max(self.clock.get(name, 0), time)

    def wait_stream(self, other):
        self.wait_event(other.record_event())


class World:
    """One rank's streams and accesses."""

    def __init__(self):
        self.compute = Stream("compute")
        self.current = self.compute
        self.lanes = 0
        self.accesses = []
        self.together = []
        self.blocks, self.freed, self.count = {}, defaultdict(list), 0

    def allocate(self, buffer):
        freed = self.freed[self.current.name, buffer.nbytes]
        if not freed:
            self.count += 1
            freed.append(((self.count + 4096) << 40, self.current.name))
        self.blocks[buffer._storage.untyped_storage()._cdata] = freed.pop()

    def free(self, buffer):
        block = self.blocks.pop(buffer._storage.untyped_storage()._cdata)
        self.freed[block[1], buffer.nbytes].append(block)

    def note(self, what, tensor, writes):
        storage = tensor.untyped_storage()
        if storage.nbytes():
            block = self.blocks.get(storage._cdata)
            start = block[0] if block is not None else storage.data_ptr()
            self.accesses.append((what, self.current.name, self.current.tick(), start, start + storage.nbytes(), writes))

    def races(self):
        found = []
        for i, (what, stream, clock, start, end, writes) in enumerate(self.accesses):
            for other, stream2, clock2, start2, end2, writes2 in self.accesses[i + 1 :]:
                overlap = start < end2 and start2 < end
                if overlap and (writes or writes2) and stream != stream2 and clock2.get(stream, 0) < clock[stream]:
                    found.append((what, stream, other, stream2))
        return found


@pytest.fixture
def streams(monkeypatch):
    """Simulated streams for every rank. Returns a function that gives the calling rank its world."""
    local = threading.local()

    def here():
        if not hasattr(local, "world"):
            local.world = World()
        return local.world

    def make_lane(self, device, priority=0):
        self._device, self.issued = device, 0
        here().lanes += 1
        self.stream = Stream(f"lane {here().lanes}")

    @contextmanager
    def on(self):
        world = here()
        before, world.current = world.current, self.stream
        yield
        world.current = before

    def gather(output, input, *, group, async_op=False):
        here().note("all-gather reads", input, False)
        here().note("all-gather writes", output, True)
        return original_gather(output, input, group=group, async_op=async_op)

    def gather_many(pairs, *, group):
        here().together.append(len(pairs))
        for output, input in pairs:
            gather(output, input, group=group)

    def scatter(output, input, *, op=dist.ReduceOp.SUM, group, async_op=False):
        here().note("reduce-scatter reads", input, False)
        here().note("reduce-scatter writes", output, True)
        return original_scatter(output, input, op=op, group=group, async_op=async_op)

    def accumulate(self, index):
        original_accumulate(self, index)
        if self._flat is not None:
            here().note("gradient written", self._flat.tensor, True)

    def deliver(self, out, used, **options):
        here().note("gradient shard used", out, True)
        original_deliver(self, out, used, **options)

    def join(self, parts, flat):
        here().note("parts read", parts, False)
        here().note("parameters written", flat, True)
        original_join(self, parts, flat)

    def split(self, flat, parts):
        here().note("gradients read", flat, False)
        here().note("parts written", parts, True)
        original_split(self, flat, parts)

    def start_pool(self, device, lane=None):
        original_pool(self, device, lane)
        self.hands_on = False

    def allocate(self, donor=None):
        assert donor is None
        if self.nbytes:
            here().allocate(self)
        original_allocate(self)

    def free(self):
        if self.nbytes and self.allocated:
            here().free(self)
        original_free(self)

    original_join, original_split = Chunks.join, Chunks.split
    original_pool, original_allocate, original_free = Pool.__init__, Buffer.allocate, Buffer.free
    original_gather, original_scatter = dist.all_gather_single, dist.reduce_scatter_single
    original_accumulate, original_deliver = Gradients.accumulate, Delivery.deliver
    monkeypatch.setattr(Chunks, "join", join)
    monkeypatch.setattr(Chunks, "split", split)
    monkeypatch.setattr(memory, "MAPPED_BYTES", 0)
    monkeypatch.setattr(Pool, "__init__", start_pool)
    monkeypatch.setattr(Buffer, "allocate", allocate)
    monkeypatch.setattr(Buffer, "free", free)
    monkeypatch.setattr(comm.Lane, "__init__", make_lane)
    monkeypatch.setattr(comm.Lane, "context", on)
    monkeypatch.setattr(comm, "current_stream", lambda device: here().current)
    monkeypatch.setattr(comm, "current_event", lambda device: here().current.record_event())
    monkeypatch.setattr(dist, "all_gather_single", gather)
    monkeypatch.setattr(comm, "all_gather_many", gather_many)
    monkeypatch.setattr(dist, "reduce_scatter_single", scatter)
    monkeypatch.setattr(Gradients, "accumulate", accumulate)
    monkeypatch.setattr(Delivery, "deliver", deliver)
    return here


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
    layer = unit_of(ours.layers[0]).groups[0]
    assert layer.gathered.nbytes == layer.grads.buffer_bytes
    assert {stream for (stream, _), blocks in here.freed.items() if blocks} == {"lane 1"}, "one stream allocates"
    return here.races(), len(here.accesses), len(here.freed["lane 1", layer.gathered.nbytes]), len(here.blocks)


@pytest.mark.parametrize("mixed", [False, True])
def test_every_use_of_a_buffer_is_ordered_by_events(streams, mixed):
    options = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)} if mixed else {}
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


def test_the_checker_finds_a_missing_wait(streams, monkeypatch):
    monkeypatch.setattr(comm.Lane, "after", lambda self, event: None)
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
    assert len(here.together) >= 5 * 3 and set(here.together) == {2}


@on_processes(2)
def test_gloo_runs_several_gathers_in_one_call(rank, world):
    inputs = [torch.full((n,), float(rank * 10 + n)) for n in (3, 5)]
    outputs = [torch.empty(world * n) for n in (3, 5)]
    world_group = dist.group.WORLD
    assert world_group is not None
    comm.all_gather_many(list(zip(outputs, inputs, strict=True)), group=world_group)
    for n, out in zip((3, 5), outputs, strict=True):
        assert torch.equal(out, torch.cat([torch.full((n,), float(r * 10 + n)) for r in range(world)]))
