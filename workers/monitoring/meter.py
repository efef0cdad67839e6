"""Times of a step and memory of a rank, for monitoring. The cost is about 20 us a step (see benchmarks/metrics_cost.py).

Waiting time is the time in which the training thread waits for other ranks. A collective hidden behind compute adds none. On an accelerator
the stream waits, not this thread, so only the host's waits are counted.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vescale_ray.communication import wait_notes
from vescale_ray.workers.messages import Usage
from vescale_ray.workers.monitoring.flops import peak_flops, token_flops

if TYPE_CHECKING:
    from vescale_ray.config import RunConfig

COUNTED = ("all_reduce", "peer_copy", "step_end")
"""Kinds of waits measured by :func:`vescale_ray.communication.wait_notes.counted`."""


class Meter:
    """Measures one trainer. Call :meth:`begin`, :meth:`computed`, :meth:`stepping`, :meth:`stepped`, :meth:`end` in every step, in this
    order.

    Attributes:
        data_s: seconds that batches took in this step; the trainer adds to it.
        skipped: whether the optimizer skipped this step.
    """

    def __init__(self, config: RunConfig, model: Any, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        from vescale_ray.fsdp import held_bytes
        from vescale_ray.optim import Muon

        self._model, self._optimizer, self._device, self._held_bytes = model, optimizer, device, held_bytes
        exchanges = any(isinstance(part, Muon) for part in getattr(optimizer, "optimizers", (optimizer,)))
        self._counted = (*COUNTED, "all_to_all") if exchanges or config.train.expert_parallel > 1 else COUNTED
        self._token_flops = token_flops(model, config.data.seq_len)
        self._peak = config.metrics.peak_flops or peak_flops(device, config.train.param_dtype)
        self._capacity = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
        self._still: dict[str, int] | None = None
        self.data_s = 0.0
        self.skipped = False

    def begin(self) -> None:
        self.data_s = self._loop_s = self._loop_waited_s = self._step_s = self._step_waited_s = 0.0
        self._waited = self._now()
        self._skips = self._skip_count()

    def computed(self, loop_s: float) -> None:
        """Note the end of the forward and backward passes. They took ``loop_s`` seconds, batches included."""
        self._loop_s, self._loop_waited_s = loop_s, self._since_begin()

    def stepping(self) -> None:
        self._stepping, self._before_s = time.perf_counter(), self._since_begin()

    def stepped(self) -> None:
        self._step_s, self._step_waited_s = time.perf_counter() - self._stepping, self._since_begin() - self._before_s
        self.skipped = self._skip_count() > self._skips

    def end(self, seconds: float) -> Usage:
        """End the measurement of a step that took ``seconds``, and return its usage."""
        waited = {kind: max(0.0, now - self._waited[kind]) for kind, now in self._now().items()}
        phases = {
            "data": self.data_s,
            "forward_backward": self._loop_s - self.data_s - self._loop_waited_s,
            "comm": sum(waited.values()),
            "optimizer": self._step_s - self._step_waited_s,
        }
        phases = {name: max(0.0, spent) for name, spent in phases.items()}
        phases["other"] = max(0.0, seconds - sum(phases.values()))
        device, retries = self._device_memory()
        return Usage(waited, phases, self._memory(), device, retries, self._token_flops, self._peak)

    def _now(self) -> dict[str, float]:
        """Return the seconds waited so far, by cause."""
        counted = wait_notes.counted_s()
        return {**self._model.waited_by_collective, **{kind: counted.get(kind, 0.0) for kind in self._counted}}

    def _since_begin(self) -> float:
        return sum(self._now().values()) - sum(self._waited.values())

    def _skip_count(self) -> int:
        return int(getattr(self._optimizer, "skipped_steps", 0))

    def _memory(self) -> dict[str, int]:
        if self._still is None:
            self._still = {**self._held_bytes(self._model), "optimizer": state_bytes(self._optimizer)}
        # Only the peak of the buffer pool can still change.
        return {**self._still, "buffers": self._model.peak_buffer_bytes}

    def _device_memory(self) -> tuple[dict[str, int], int]:
        if self._device.type != "cuda":
            return {}, 0
        stats = torch.cuda.memory_stats(self._device)  # one call, since each of torch's functions for one figure makes it too
        names = {"allocated": "allocated_bytes.all.current", "reserved": "reserved_bytes.all.current"}
        names["peak_allocated"] = "allocated_bytes.all.peak"
        figures = {name: int(stats.get(key, 0)) for name, key in names.items()}
        return {**figures, "capacity": self._capacity}, int(stats.get("num_alloc_retries", 0))


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of an optimizer's states on this rank."""
    return sum(
        local.numel() * local.element_size()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
        for local in [getattr(value, "_local_tensor", value)]
    )
