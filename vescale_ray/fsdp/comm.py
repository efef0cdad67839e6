"""The two collectives of a group, and the handles to wait on.

Both work on the flat buffers themselves. On CUDA they run on a side stream and an event marks their end. On the CPU they are asynchronous
work handles of the process group, so communication overlaps with compute there, too.

On gloo the ranks exchange parts pairwise, straight between the buffers. gloo's own all-gather uses a flat temporary of the whole
buffer: 44 MiB more memory and 3x the CPU time for 44 MiB on two ranks. gloo has no reduce-scatter: torch emulates it by a clone and an
all-reduce of everything, with twice the bytes on the wire. Sums are local, in rank order, in FP32 or better, so the result depends on the
values alone.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist

from vescale_ray.communication.point_to_point import Messages
from vescale_ray.compat.distributed import all_gather_many
from vescale_ray.compat.fsdp import AllGather, Comm, ReduceScatter
from vescale_ray.fsdp.memory import NOWHERE, Buffer, Pool, may_stay

_GATHER_TAG, _REDUCE_TAG = 0x56530001, 0x56530002
"""Tags that keep these messages apart from a user's on the same process group. Messages with one tag arrive in the order of sending."""


class Pending(Protocol):
    """A running operation. ``wait`` makes its result usable by the calling thread and its current stream; waiting twice is harmless."""

    def wait(self) -> None: ...


class Done:
    """An operation that needs no waiting."""

    def wait(self) -> None:
        return


class Works:
    """Running operations of ``lane`` in a CPU process group; the group's timeout bounds each wait."""

    __slots__ = ("_lane", "_works")

    def __init__(self, lane: Lane, *works: Any) -> None:
        self._lane, self._works = lane, works

    def wait(self) -> None:
        # Drop the works first: a failed one keeps its exception, and with it frames, alive.
        works, self._works = self._works, ()
        began = time.perf_counter()
        for work in works:
            work.wait()
        self._lane.waited_s += time.perf_counter() - began


class EventPending:
    """Work on a side stream of an accelerator, marked by an event."""

    __slots__ = ("_device", "_event")

    def __init__(self, event: Any, device: torch.device) -> None:
        self._event, self._device = event, device

    def wait(self) -> None:
        event, self._event = self._event, None
        if event is not None:
            current_stream(self._device).wait_event(event)


class Together:
    """All-gathers that are collected and then started in one call per process group, on an accelerator."""

    __slots__ = ("_asked", "_lane")

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._asked: dict[dist.ProcessGroup, list[tuple[torch.Tensor, torch.Tensor, EventPending]]] = {}

    def add(self, out: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup, device: torch.device) -> Pending:
        pending = EventPending(None, device)
        self._asked.setdefault(group, []).append((out, shard, pending))
        return pending

    def start(self) -> None:
        asked, self._asked = self._asked, {}
        for group, members in asked.items():
            with self._lane.context():
                if len(members) == 1:
                    dist.all_gather_single(members[0][0], members[0][1], group=group)
                else:
                    all_gather_many([(out, shard) for out, shard, _ in members], group=group)
                event = self._lane.stream.record_event()
            for _, _, pending in members:
                pending._event = event


class Lane:
    """A side stream of one device. On the CPU it is empty: the process group's threads take its place."""

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self.stream: Any = None
        self.issued = 0
        """Number of collectives started so far."""
        self.waited_s = 0.0
        """Seconds for which a thread has waited for collectives; always 0 on an accelerator, where a stream waits."""
        self._device = device
        if device.type != "cpu":
            self.stream = torch.get_device_module(device).Stream(device=device, priority=priority)

    def after_current(self) -> None:
        """Let later work on the lane run after the current work of the current stream."""
        if self.stream is not None:
            self.stream.wait_stream(current_stream(self._device))

    def after(self, event: Any) -> None:
        if self.stream is not None and event is not None:
            self.stream.wait_event(event)

    def context(self) -> Any:
        """A context that puts work on the lane; on the CPU the work just runs."""
        return nullcontext() if self.stream is None else torch.get_device_module(self._device).stream(self.stream)

    def mark(self) -> Pending:
        """A handle that waits for everything on the lane so far."""
        return EventPending(self.stream.record_event(), self._device) if self.stream is not None else Done()


def current_stream(device: torch.device) -> Any:
    """The current stream of ``device``, which must not be the CPU."""
    return torch.get_device_module(device).current_stream(device)


def current_event(device: torch.device) -> Any:
    """An event at the current position of the current stream; None on the CPU."""
    return None if device.type == "cpu" else current_stream(device).record_event()


def allocate(custom: Comm, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A buffer of a custom collective, as bytes.

    Raises:
        ValueError: its ``allocate`` returned memory of another size or dtype, or memory that is not contiguous.
    """
    with torch.inference_mode(False), torch.no_grad():
        memory = custom.allocate((numel,), dtype=dtype, device=device)
    if memory.numel() != numel or memory.dtype != dtype or not memory.is_contiguous():
        raise ValueError(
            f"{type(custom).__name__}.allocate was asked for {numel} elements of {dtype} and gave shape {tuple(memory.shape)} of "
            f"{memory.dtype}: return a contiguous tensor of just that many elements"
        )
    return memory.view(-1).view(torch.uint8)


def all_gather(
    out: torch.Tensor,
    shard: torch.Tensor,
    group: dist.ProcessGroup,
    lane: Lane,
    *,
    together: Together,
    pairwise: bool,
    custom: AllGather | None = None,
) -> Pending:
    """Gather every rank's ``shard`` into ``out``, with the ``custom`` collective if there is one.

    With a stream, the all-gather may start as late as ``together.start``; on the CPU it starts at once.
    """
    lane.issued += 1
    if custom is not None:
        with lane.context():
            work = custom(out, shard, group, async_op=lane.stream is None)
            return Works(lane, work) if work is not None else lane.mark()
    if pairwise:
        rank, world, size = group.rank(), group.size(), shard.numel()
        messages = Messages(group, _GATHER_TAG, lane)
        for distance in range(1, world):
            source, target = (rank - distance) % world, (rank + distance) % world
            messages.receive(out[source * size : (source + 1) * size], source)
            messages.send(shard, target)
        own = out[rank * size : (rank + 1) * size]
        if own.data_ptr() != shard.data_ptr():
            own.copy_(shard)
        return messages
    if lane.stream is None:
        return Works(lane, dist.all_gather_single(out, shard, group=group, async_op=True))
    return together.add(out, shard, group, out.device)


def reduce_scatter(
    out: torch.Tensor,
    full: torch.Tensor,
    group: dist.ProcessGroup,
    lane: Lane,
    pool: Pool,
    factor: float,
    *,
    pairwise: bool,
    leaves_out: bool = False,
    sum_only: bool = False,
    ordered: bool = False,
    custom: ReduceScatter | None = None,
) -> Pending:
    """Sum every rank's ``full`` and write this rank's part, times ``factor``, to ``out``, which may have another dtype.

    ``full`` belongs to the operation until the result's ``wait`` has returned. ``leaves_out``: buffers of gathered parameters have no
    memory for this rank's part. An exchange does not need that part either, so it can use such a buffer. ``sum_only``: never use AVG.
    ``ordered``: return an :class:`InOrder`, which sums only when its ``add_to`` is called. ``custom``: a collective that gets AVG if
    ``factor`` is the mean, else SUM, and may return work to wait for.
    """
    lane.issued += 1
    world = group.size()
    if ordered:
        return InOrder(full, group, lane, pool, factor, pairwise=pairwise, leaves_out=leaves_out)
    if custom is not None:
        lane.after_current()
        with lane.context():
            average = not sum_only and full.dtype != torch.float16 and abs(factor * world - 1.0) < 1e-12
            target = allocate(custom, out.numel(), full.dtype, out.device).view(full.dtype)
            work = custom(target, full, group, dist.ReduceOp.AVG if average else dist.ReduceOp.SUM, async_op=lane.stream is None)
            rest = _CastAndScale(None if work is None else Works(lane, work), out, target, 1.0 if average else factor)
            if lane.stream is None:
                return rest
            rest.wait()
            return lane.mark()
    if pairwise:
        return _ExchangeAndSum(out, full, group, lane, pool, factor, leaves_out)
    if lane.stream is None:
        target = out if out.dtype == full.dtype else torch.empty_like(out, dtype=full.dtype)
        work = dist.reduce_scatter_single(target, full, group=group, async_op=True) if world > 1 else None
        if work is None:
            target.copy_(full)
        return _CastAndScale(None if work is None else Works(lane, work), out, target, factor)
    lane.after_current()
    with lane.context():
        op: Any = dist.ReduceOp.SUM
        if full.dtype == torch.float16 and factor != 1.0:
            # A sum over many ranks can leave FP16's range: divide by a part of the divisor before, by the rest after (as FSDP2).
            before = float(world) ** -0.5
            full.mul_(before)
            factor /= before
        elif not sum_only and abs(factor * world - 1.0) < 1e-12 and dist.get_backend(group) == "nccl":
            op, factor = dist.ReduceOp.AVG, 1.0
        target = out if out.dtype == full.dtype else torch.empty_like(out, dtype=full.dtype)
        if world > 1:
            dist.reduce_scatter_single(target, full, op=op, group=group)
        else:
            target.copy_(full)
        if target is not out:
            out.copy_(target)
        if factor != 1.0:
            out.mul_(factor)
        return lane.mark()


def _exchange(mine: torch.Tensor, parts: list[torch.Tensor], group: dist.ProcessGroup, lane: Lane) -> Messages:
    """Send row i of ``mine`` to rank i, and receive every other rank's row in ``parts``."""
    rank, world = group.rank(), group.size()
    messages = Messages(group, _REDUCE_TAG, lane)
    for distance in range(1, world):
        source, target = (rank - distance) % world, (rank + distance) % world
        messages.receive(parts[source], source)
        messages.send(mine[target], target)
    return messages


def _scratch(full: torch.Tensor, group: dist.ProcessGroup, pool: Pool, leaves_out: bool) -> Buffer:
    """Memory for the other ranks' parts: a released buffer of gathered parameters if the sizes match."""
    nbytes = full.numel() * full.element_size()
    part = nbytes // group.size()
    own = (group.rank() * part, (group.rank() + 1) * part) if leaves_out and may_stay(nbytes, full.device) else NOWHERE
    scratch = pool.take(nbytes, full.device, stays=own)
    scratch.clean_for = None
    return scratch


class _CastAndScale:
    """A reduce-scatter whose result the waiting thread still has to cast or scale."""

    __slots__ = ("_factor", "_out", "_target", "_work")

    def __init__(self, work: Any, out: torch.Tensor, target: torch.Tensor | None, factor: float) -> None:
        self._work, self._out, self._target, self._factor = work, out, target, factor

    def wait(self) -> None:
        work, target, self._work, self._target = self._work, self._target, None, None
        if target is None:
            return
        if work is not None:
            work.wait()
        if target is not self._out:
            self._out.copy_(target)
        if self._factor != 1.0:
            self._out.mul_(self._factor)


class _ExchangeAndSum:
    """Reduce-scatter as a pairwise exchange of parts and a local sum in rank order.

    If the dtypes allow it, one of the other ranks' parts is received in the result itself. The rest (none with two ranks) is received in
    scratch memory, which is that of just released gathered parameters if the sizes match.
    """

    __slots__ = ("_factor", "_messages", "_out", "_parts", "_pool", "_scratch")

    def __init__(
        self, out: torch.Tensor, full: torch.Tensor, group: dist.ProcessGroup, lane: Lane, pool: Pool, factor: float, leaves_out: bool
    ) -> None:
        self._out, self._pool, self._factor = out, pool, factor
        rank, world, size = group.rank(), group.size(), out.numel()
        mine = full.view(world, size)
        self._parts = list(mine.unbind())
        others = [r for r in range(world) if r != rank]
        if _sums_in(out.dtype, full.dtype):
            # The first of the other parts is one of the first two summands on every rank, so the order of the sum is kept.
            self._parts[others.pop(0)] = out
        self._scratch = _scratch(full, group, pool, leaves_out) if others else None
        if self._scratch is not None:
            received = self._scratch.flat(full.dtype).view(world, size)
            for r in others:
                self._parts[r] = received[r]
        self._messages = _exchange(mine, self._parts, group, lane)

    def wait(self) -> None:
        parts, self._parts = self._parts, []
        if not parts:
            return
        self._messages.wait()
        out = self._out
        if _sums_in(out.dtype, parts[0].dtype):
            total = torch.add(parts[0], parts[1], out=out)
        else:
            total = parts[0].to(torch.promote_types(out.dtype, torch.float32), copy=True).add_(parts[1])
        for part in parts[2:]:
            total.add_(part)
        if self._factor != 1.0:
            total.mul_(self._factor)
        if total is not out:
            out.copy_(total)
        scratch, self._scratch = self._scratch, None
        if scratch is not None:
            self._pool.give_back(scratch)


class InOrder:
    """Reduce-scatter as an exchange of parts and a sum in rank order that continues an earlier sum.

    Each part is scaled before it is added. The additions are then those of one process that adds the ranks'
    gradients one after the other, for any number of ranks.
    """

    __slots__ = ("_parts", "_pending", "_pool", "_scratch")

    def __init__(
        self, full: torch.Tensor, group: dist.ProcessGroup, lane: Lane, pool: Pool, factor: float, *, pairwise: bool, leaves_out: bool
    ) -> None:
        rank, world = group.rank(), group.size()
        if factor != 1.0:
            full.mul_(factor)
        mine = full.view(world, -1)
        self._parts, self._pool = list(mine.unbind()), pool
        self._scratch: Buffer | None = None
        self._pending: Pending = Done()
        if pairwise:
            self._scratch = _scratch(full, group, pool, leaves_out)
            received = self._scratch.flat(full.dtype).view(world, -1)
            self._parts = [mine[r] if r == rank else received[r] for r in range(world)]
            self._pending = _exchange(mine, self._parts, group, lane)
        elif world > 1:
            received = torch.empty_like(mine)
            self._parts = list(received.unbind())
            lane.after_current()
            with lane.context():
                work = dist.all_to_all_single(received.view(-1), full, group=group, async_op=lane.stream is None)
                self._pending = Works(lane, work) if work is not None else lane.mark()

    def add_to(self, total: torch.Tensor) -> None:
        """Add the ranks' parts to ``total``, rank 0's first."""
        self._pending.wait()
        for part in self._parts:
            total.add_(part)
        self.wait()

    def wait(self) -> None:
        """Wait, and drop the received parts."""
        self._pending.wait()
        self._parts = []
        scratch, self._scratch = self._scratch, None
        if scratch is not None:
            self._pool.give_back(scratch)


def _sums_in(out: torch.dtype, parts: torch.dtype) -> bool:
    """Whether parts can be summed in the result itself: the dtypes are equal, and additions in this dtype lose few bits."""
    return out == parts and out not in (torch.float16, torch.bfloat16)
