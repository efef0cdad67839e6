"""Simulated streams of a device, and a simulated allocator, for tests on a CPU.

Work on a stream runs at once, but each access to a buffer is recorded with the vector clock of its stream. On a device, two accesses are a
race if one of them writes and no events order them.

Buffers keep their addresses, while torch's allocator provides their memory and takes it back. The allocator is simulated, too: a freed
block is the next one of its size for the stream that allocated it. Accesses are compared by block.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from contextlib import contextmanager

import torch.distributed as dist

from vescale_ray.dbuffer import KeptShard
from vescale_ray.fsdp.buffers import memory
from vescale_ray.fsdp.buffers.memory import Buffer, Pool
from vescale_ray.fsdp.communication import comm
from vescale_ray.fsdp.groups import reduction
from vescale_ray.fsdp.groups.delivery import Delivery
from vescale_ray.fsdp.groups.gradients import Gradients
from vescale_ray.fsdp.layouts.division import Chunks


class Event(dict):
    """A vector clock."""

    def query(self):
        return False


class Stream:
    def __init__(self, name):
        self.name, self.clock = name, {}

    def tick(self):
        self.clock[self.name] = self.clock.get(self.name, 0) + 1
        return Event(self.clock)

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
        self.together, self.reduced_together = [], []
        """Number of buffers of each call."""
        self.blocks, self.freed, self.count = {}, defaultdict(list), 0
        self.held = self.peak = 0

    def allocate(self, buffer):
        self.held += buffer.nbytes
        self.peak = max(self.peak, self.held)
        freed = self.freed[self.current.name, buffer.nbytes]
        if not freed:
            self.count += 1
            freed.append(((self.count + 4096) << 40, self.current.name))
        self.blocks[buffer._storage.untyped_storage()._cdata] = freed.pop()

    def addresses(self, buffer):
        block = self.blocks.get(buffer._storage.untyped_storage()._cdata)
        return None if block is None else (block[0], block[0] + buffer.nbytes)

    def free(self, buffer):
        self.held -= buffer.nbytes
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


def simulate(monkeypatch):
    """Give every rank simulated streams and a simulated allocator. Returns a function that gives the calling rank its world."""
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

    def gather_many(pairs, *, group, async_op=False):
        here().together.append(len(pairs))
        return [gather(output, input, group=group, async_op=async_op) for output, input in pairs]

    def scatter_many(pairs, *, op, group, async_op=False):
        here().reduced_together.append(len(pairs))
        return [work for pair in pairs if (work := scatter(*pair, op=op, group=group, async_op=async_op)) is not None]

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

    def spread(self, part, **options):
        here().note("shard cast", self.flat, False)
        here().note("cast written", part, True)
        original_spread(self, part, **options)

    def start_pool(self, device, lane=None):
        original_pool(self, device, lane)
        self.hands_on = False

    def allocate(self, donor=None):
        assert donor is None
        if self.nbytes and not self.fixed:
            here().allocate(self)
        original_allocate(self)

    def free(self):
        if self.nbytes and self.allocated and not self.fixed:
            here().free(self)
        original_free(self)

    original_locate = Buffer.locate
    monkeypatch.setattr(Buffer, "locate", lambda self: here().addresses(self) or original_locate(self))
    original_join, original_split, original_spread = Chunks.join, Chunks.split, KeptShard.spread
    original_pool, original_allocate, original_free = Pool.__init__, Buffer.allocate, Buffer.free
    original_gather, original_scatter = dist.all_gather_single, dist.reduce_scatter_single
    original_accumulate, original_deliver = Gradients.accumulate, Delivery.deliver
    monkeypatch.setattr(Chunks, "join", join)
    monkeypatch.setattr(Chunks, "split", split)
    monkeypatch.setattr(KeptShard, "spread", spread)
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
    monkeypatch.setattr(reduction, "reduce_scatter_many", scatter_many)
    monkeypatch.setattr(Gradients, "accumulate", accumulate)
    monkeypatch.setattr(Delivery, "deliver", deliver)
    return here
