"""The all-gather of a group, the side streams, and the handles to wait on. The reduce-scatter is in ``reduction``.

Both collectives work on the flat buffers themselves. On CUDA they run on a side stream and an event marks their end. On the CPU they are
asynchronous work handles of the process group, so communication overlaps with compute there, too.

On gloo the ranks exchange parts pairwise, straight between the buffers. gloo's own all-gather uses a flat temporary of the whole
buffer: 44 MiB more memory and 3x the CPU time for 44 MiB on two ranks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist

from vescale_ray.communication import wait_notes
from vescale_ray.communication.point_to_point import Messages, tag_of
from vescale_ray.compat.distributed import all_gather_many
from vescale_ray.compat.fsdp import AllGather, Comm


class Pending(Protocol):
    """A running operation. ``wait`` makes its result usable by the calling thread and its current stream; waiting twice is harmless."""

    def wait(self) -> None: ...


class Done:
    """An operation that needs no waiting."""

    def wait(self) -> None:
        return


class Works:
    """Running collectives of a process group, started on ``lane``. On the CPU the group's timeout bounds each wait."""

    __slots__ = ("_lane", "_works")

    def __init__(self, lane: Lane, *works: Any) -> None:
        self._lane, self._works = lane, works

    def follow(self, works: Sequence[Any]) -> None:
        """Wait for ``works``, which have started now."""
        self._works = tuple(works)

    def wait(self) -> None:
        # Drop the works first: a failed one keeps its exception, and with it frames, alive.
        works, self._works = self._works, ()
        began = time.perf_counter()
        for work in works:
            work.wait()
        if self._lane.stream is None:
            self._lane.waited_s += time.perf_counter() - began


class EventPending:
    """Work on a side stream of an accelerator, marked by an event."""

    __slots__ = ("_device", "_event")

    def __init__(self, event: Any, device: torch.device) -> None:
        self._event, self._device = event, device

    @property
    def event(self) -> Any:
        """The event, or None if the work has not started or has been waited for."""
        return self._event

    def follow(self, event: Any) -> None:
        """Wait for ``event``, which marks work that has started now."""
        self._event = event

    def wait(self) -> None:
        event, self._event = self._event, None
        if event is not None:
            current_stream(self._device).wait_event(event)


class Together:
    """All-gathers that are collected and then started in one call per process group."""

    __slots__ = ("_asked", "_lane")

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._asked: dict[dist.ProcessGroup, list[tuple[torch.Tensor, torch.Tensor, Works | EventPending]]] = {}

    def add(self, out: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> Pending:
        pending = self._lane.later()
        self._asked.setdefault(group, []).append((out, shard, pending))
        return pending

    def start(self) -> None:
        asked, self._asked = self._asked, {}
        for group, members in asked.items():
            with self._lane.context():
                works = all_gather_many([(out, shard) for out, shard, _ in members], group=group, async_op=self._lane.stream is None)
            self._lane.started([pending for _, _, pending in members], works)


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
        """Return a context that puts work on the lane; on the CPU the work just runs."""
        return nullcontext() if self.stream is None else torch.get_device_module(self._device).stream(self.stream)

    def later(self) -> Works | EventPending:
        """Return a handle of an operation that starts later; :meth:`started` tells when."""
        return Works(self) if self.stream is None else EventPending(None, self._device)

    def started(self, handles: Sequence[Works | EventPending], works: Sequence[Any]) -> None:
        """Let ``handles`` wait for everything on the lane so far; on the CPU for ``works``."""
        event = None if self.stream is None else self.stream.record_event()
        for handle in handles:
            if isinstance(handle, Works):
                handle.follow(works)
            else:
                handle.follow(event)

    def mark(self) -> Pending:
        """Return a handle that waits for everything on the lane so far."""
        return EventPending(self.stream.record_event(), self._device) if self.stream is not None else Done()


def current_stream(device: torch.device) -> Any:
    """Return the current stream of ``device``, which must not be the CPU."""
    return torch.get_device_module(device).current_stream(device)


def current_event(device: torch.device) -> Any:
    """Return an event at the current position of the current stream; None on the CPU."""
    return None if device.type == "cpu" else current_stream(device).record_event()


def allocate(custom: Comm, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a buffer of a custom collective, as bytes.

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
    name: str = "",
) -> Pending:
    """Gather every rank's ``shard`` into ``out``, with the ``custom`` collective if there is one.

    The process group's own all-gather starts with ``together.start``; the others start at once. ``name``: the parameters' name. Pairwise
    messages are matched only to messages of the same name.
    """
    lane.issued += 1
    if custom is not None:
        with lane.context():
            work = custom(out, shard, group, async_op=lane.stream is None)
            return Works(lane, work) if work is not None else lane.mark()
    if pairwise:
        return all_gather_pairwise([(out, shard)], group, lane, name)
    return together.add(out, shard, group)


def all_gather_pairwise(
    outputs_and_shards: Sequence[tuple[torch.Tensor, torch.Tensor]], group: dist.ProcessGroup, lane: Lane, name: str
) -> Messages:
    """Gather every rank's shard of each pair into the output, by messages between all pairs of ranks."""
    nbytes = sum(shard.nbytes for _, shard in outputs_and_shards)
    rank, world, messages = group.rank(), group.size(), Messages(group, tag_of(f"all-gather {name}, {nbytes} bytes"), lane)
    for out, shard in outputs_and_shards:
        size = shard.numel()
        for distance in range(1, world):
            source, target = (rank - distance) % world, (rank + distance) % world
            messages.receive(out[source * size : (source + 1) * size], source)
            messages.send(shard, target)
        own = out[rank * size : (rank + 1) * size]
        if own.data_ptr() != shard.data_ptr():
            own.copy_(shard)
    return messages


def largest_of_ranks(mine: torch.Tensor, group: dist.ProcessGroup, lane: Lane, *, pairwise: bool, name: str) -> torch.Tensor:
    """Return the element-wise largest of all ranks' FP32 magnitudes ``mine``; NaN if a rank has one. On the CPU it waits for all ranks.

    On gloo it uses messages with a tag by ``name`` (:func:`tag_of`), so magnitudes of different parameters are never mixed up. A wait for a
    lost peer can be ended. ``name``: the parameters' name.
    """
    bits = mine.view(torch.int32)  # as integers, magnitudes have the same order, and NaN is the largest
    if not pairwise:
        with wait_notes.counted("all_reduce"):
            dist.all_reduce(bits, dist.ReduceOp.MAX, group)
        return mine
    every = bits.new_empty(group.size() * bits.numel())
    messages = all_gather_pairwise([(every, bits)], group, lane, f"{name}: magnitudes")
    wait_notes.begin("exchange of largest magnitudes", name, every.nbytes, group.size())
    messages.wait()
    wait_notes.end()
    return every.view(group.size(), -1).amax(0).view(torch.float32)
