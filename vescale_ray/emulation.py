"""EMULATION: a process group of one real rank that claims to be one of many, for benchmarks without a cluster.

No data is sent. A collective fills its outputs as if every rank held this rank's data. It then takes the time that a model of the
links gives (:func:`vescale_ray.planner.hardware.collective_time`, 16-byte alignment included). Collectives of all groups queue on one
link, each for a latency and for its bytes over the bandwidth. Kernels, allocator, streams and overlap are real, so two engines can
be compared at 8 to 1024 claimed ranks on one device, or on none. It does not show stragglers, contention of communication kernels
for the device, or meaningful numerical results.

On the CPU a collective is complete when its time has passed, and ``wait`` sleeps until then. On an accelerator a sleeping kernel takes
the time, on the calling stream, or for asynchronous calls on a separate stream.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from vescale_ray.planner.hardware import HARDWARE, Hardware, collective_time

BACKEND = "emulated"


@dataclass
class Wire:
    """The link that all groups of the process share.

    Attributes:
        hardware: hardware whose collective times are emulated.
        scale: factor on all times; it keeps communication in proportion for a small model on a CPU.
        log: (operation, bytes of the whole, claimed ranks, seconds) of every collective.
    """

    hardware: Hardware
    scale: float = 1.0
    log: list[tuple[str, int, int, float]] = field(default_factory=list)
    free_at: float = 0.0
    stream: Any = None
    cycles_per_second: float = 0.0

    def seconds(self, name: str, nbytes: int, ranks: int, part: int) -> float:
        taken = self.scale * collective_time(nbytes, ranks, self.hardware, rank_bytes=part)
        self.log.append((name, nbytes, ranks, taken))
        return taken


_WIRE: list[Wire] = []
_ProcessGroup: Any = dist.ProcessGroup  # its stubs have the callers' signatures, not those of the implementation


class _Work(dist.Work):
    """Common part of both kinds of work: outputs, which hold their values from the start."""

    def __init__(self, outputs: list[torch.Tensor]) -> None:
        super().__init__()
        self._outputs = outputs

    def result(self) -> list[torch.Tensor]:
        return self._outputs

    def get_future(self) -> Any:
        self.wait()
        future: Any = torch.futures.Future()
        future.set_result(self._outputs)
        return future


class _Timed(_Work):
    """Work on the CPU, complete when its time on the link has passed."""

    def __init__(self, ends: float, outputs: list[torch.Tensor]) -> None:
        super().__init__(outputs)
        self._ends = ends

    def is_completed(self) -> bool:
        return time.perf_counter() >= self._ends

    def wait(self, timeout: Any = None) -> bool:
        left = self._ends - time.perf_counter()
        if left > 0:
            time.sleep(left)
        return True


class _OnStream(_Work):
    """Work on an accelerator, complete when its stream is; a wait makes the current stream wait."""

    def __init__(self, event: Any, outputs: list[torch.Tensor], device: torch.device) -> None:
        super().__init__(outputs)
        self._event, self._device = event, device

    def is_completed(self) -> bool:
        return bool(self._event.query())

    def wait(self, timeout: Any = None) -> bool:
        torch.get_device_module(self._device).current_stream(self._device).wait_event(self._event)
        return True


class EmulatedGroup(_ProcessGroup):  # type: ignore[misc]
    """The emulated process group. Operations that are not defined here raise ``ProcessGroup``'s own error."""

    def __init__(self, rank: int, world: int, wire: Wire) -> None:
        super().__init__(rank, world)
        self._rank, self._world, self._wire = rank, world, wire
        self._name = ""

    def getBackendName(self) -> str:
        return BACKEND

    def size(self) -> int:
        return self._world

    def rank(self) -> int:
        return self._rank

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        return

    def __repr__(self) -> str:
        return f"EmulatedGroup(rank {self._rank} of {self._world}, claimed)"

    # -- the operations: fill the outputs, then take time ----------------------------------------------------------------------

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        return self.allgather_into_tensor_coalesced([output], [input], opts)

    def allgather_into_tensor_coalesced(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> dist.Work:
        def fill() -> None:
            for output, input in zip(outputs, inputs, strict=True):
                parts = output.view(self._world, -1)  # the input may be this rank's part of them
                for some in (parts[: self._rank], parts[self._rank], parts[self._rank + 1 :]):
                    if some.data_ptr() != input.data_ptr():
                        some.copy_(input.reshape(-1))

        return self._take("all-gather", outputs, sum(out.nbytes for out in outputs), _worst_aligned(inputs), fill, opts)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> dist.Work:
        def fill() -> None:
            for parts, one in zip(outputs, inputs, strict=True):
                for part in parts:
                    part.copy_(one)

        size = sum(t.nbytes for parts in outputs for t in parts)
        return self._take("all-gather", [t for parts in outputs for t in parts], size, inputs[0].nbytes, fill, opts)

    def _reduce_scatter_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        return self.reduce_scatter_tensor_coalesced([output], [input], opts)

    def reduce_scatter_tensor_coalesced(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> dist.Work:
        def fill() -> None:
            for output, input in zip(outputs, inputs, strict=True):
                output.view(-1).copy_(input.view(-1)[self._rank * output.numel() : (self._rank + 1) * output.numel()])

        return self._take("reduce-scatter", outputs, sum(one.nbytes for one in inputs), _worst_aligned(outputs), fill, opts)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        size = 2 * sum(t.nbytes for t in tensors)  # a reduce-scatter and an all-gather
        return self._take("all-reduce", tensors, size, -(-size // (2 * self._world)), lambda: None, opts)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        return self.allreduce(tensors, opts)

    def alltoall_base(
        self, output: torch.Tensor, input: torch.Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> dist.Work:
        def fill() -> None:
            count = min(output.numel(), input.numel())
            output.view(-1)[:count].copy_(input.reshape(-1)[:count])

        return self._take("all-to-all", [output], input.nbytes, -(-input.nbytes // self._world), fill, opts)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        return self._take("broadcast", tensors, sum(t.nbytes for t in tensors), 16, lambda: None, opts)

    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None) -> dist.Work:
        def fill() -> None:
            for out, parts in zip(outputs, inputs, strict=False):
                out.copy_(parts[self._rank])

        return self._take("scatter", outputs, sum(t.nbytes for t in outputs) * self._world, 16, fill, opts)

    def barrier(self, opts: Any = None) -> dist.Work:
        return _Timed(0.0, [])

    # The names of these operations since torch 2.13.
    all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base
    all_gather_single_coalesced, reduce_scatter_single_coalesced = allgather_into_tensor_coalesced, reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base

    def _take(self, name: str, outputs: list[torch.Tensor], nbytes: int, part: int, fill: Any, opts: Any) -> dist.Work:
        wire = self._wire
        taken = wire.seconds(name, nbytes, self._world, part)
        device = outputs[0].device if outputs else torch.device("cpu")
        if device.type == "cpu":
            fill()
            wire.free_at = max(wire.free_at, time.perf_counter()) + taken
            return _Timed(wire.free_at, outputs)
        module = torch.get_device_module(device)
        current = module.current_stream(device)
        stream = current
        if bool(getattr(opts, "asyncOp", False)):
            wire.stream = wire.stream or module.Stream(device=device)
            stream = wire.stream
            stream.wait_stream(current)
        if not wire.cycles_per_second:
            wire.cycles_per_second = _calibrate(module)
        with module.stream(stream):
            fill()
            module._sleep(int(taken * wire.cycles_per_second))
            return _OnStream(stream.record_event(), outputs, device)


def _worst_aligned(parts: list[torch.Tensor]) -> int:
    """Return the bytes of the rank's part with the worst alignment, which decides about the speed of operations that run as one."""
    return max((part.nbytes for part in parts), key=lambda nbytes: nbytes % 16)


def _calibrate(module: Any) -> float:
    """Return the cycles of the sleeping kernel in one second."""
    cycles = 20_000_000
    module._sleep(cycles)
    start, end = module.Event(enable_timing=True), module.Event(enable_timing=True)
    start.record()
    module._sleep(cycles)
    end.record()
    module.synchronize()
    return float(cycles / (start.elapsed_time(end) / 1e3))


class _NoStore(dist.Store):
    """A store without operations, because there is no other rank."""


def _create(store: Any, rank: int, world: int, timeout: Any) -> EmulatedGroup:
    return EmulatedGroup(rank, world, _WIRE[-1])


@contextmanager
def emulated_world(world: int, hardware: str | Hardware = "h100", *, scale: float = 1.0) -> Iterator[Wire]:
    """Make this process rank 0 of a claimed world of ``world`` ranks, as the default process group, until the block ends.

    Args:
        hardware: hardware whose links are emulated.
        scale: factor on all times.

    Raises:
        ValueError: ``world`` is below 1, or a process group exists already.
    """
    if world < 1:
        raise ValueError(f"a world of {world} ranks: give at least 1")
    if dist.is_initialized():
        raise ValueError("a process group exists already: destroy it before an emulated world is made")
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, _create, devices=["cpu", "cuda"])
    wire = Wire(HARDWARE[hardware] if isinstance(hardware, str) else hardware, scale)
    _WIRE.append(wire)
    try:
        dist.init_process_group(BACKEND, rank=0, world_size=world, store=_NoStore())
        yield wire
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        _WIRE.pop()
