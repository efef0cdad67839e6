"""Profiles of a window of steps (``train.profile``) in the run's folder: a Chrome trace, and on CUDA a snapshot of the device memory.

torch holds the interpreter lock while it starts or ends a profile, so the worker answers nothing for up to seconds. This happens in steps
of the window only, and the controller knows it (``HangWatch.slow_steps``). Another thread then writes the files.

If the generation fails within the window, the profile goes on in the next generation. Operations of the broken group end meanwhile; if they
ended after the profile, torch would write to memory that it has freed. At an ordered rescale the profile ends, and ranks of the next
generation begin other ones.
"""

from __future__ import annotations

import gzip
import os
import pickle
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vescale_ray.errors import one_line
from vescale_ray.workers.messages import Happened, Item, Noticed, Ticket

if TYPE_CHECKING:
    import torch

    from vescale_ray.config import RunConfig
    from vescale_ray.workers.monitoring.heartbeat import Heartbeat

MOST_ALLOCATIONS = 100_000
"""Maximum number of allocations and frees that a memory snapshot tells of, with their stacks: the newest."""
WRITE_S = 60.0
"""Longest wait for the files at the end of a generation, after which the process may end."""


@dataclass
class _Begun:
    """A profile under way, of torch's, and the first step, rank and ticket with which it began. ``last``: the newest complete step."""

    profile: Any
    first: int
    rank: int
    ticket: Ticket
    last: int


class StepProfiler:
    """The profiles of one worker. The training thread calls the methods.

    Args:
        publish: takes the events, from any thread.
    """

    def __init__(self, config: RunConfig, device: torch.device, heartbeat: Heartbeat, publish: Callable[[Item], object]) -> None:
        self._window, self._folder = config.train.profile, config.run_folder / "profiles"
        self._on_gpu, self._heartbeat, self._publish = device.type == "cuda", heartbeat, publish
        self._begun: _Begun | None = None
        self._writer: threading.Thread | None = None

    @contextmanager
    def step(self, number: int, rank: int, ticket: Ticket) -> Iterator[None]:
        """Profile step ``number`` if it is in the window. Steps count from 1, as in metrics.jsonl."""
        window = self._window
        if window is None:
            yield
            return
        if self._begun is None and rank in window.ranks and window.step <= number <= window.last:
            with self._heartbeat.long_work():
                self._begin(number, rank, ticket)
        if self._begun is None:
            yield
            return
        from torch.profiler import record_function

        with record_function(f"ProfilerStep#{number}"):
            yield
        self._begun.last = number
        if number >= window.last:
            self.end()

    def end(self) -> None:
        """End the profile, if there is one. No operation of a process group may be under way."""
        if self._begun is not None:
            begun, self._begun = self._begun, None
            with self._heartbeat.long_work():
                self._end(begun)

    def finish(self, wait_s: float) -> None:
        """Wait for the files of profiles that have ended."""
        if self._writer is not None:
            with self._heartbeat.long_work():
                self._writer.join(wait_s)

    def _begin(self, number: int, rank: int, ticket: Ticket) -> None:
        from torch.profiler import ProfilerActivity, profile

        from vescale_ray.compat.core import record_memory_history

        try:
            if self._on_gpu:
                record_memory_history(max_entries=MOST_ALLOCATIONS)
            made = profile(
                activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA] if self._on_gpu else [ProfilerActivity.CPU], record_shapes=True
            )
            made.start()
        except Exception as error:
            return self._fail(error, rank, ticket)
        self._begun = _Begun(made, number, rank, ticket, number)
        self._publish(Happened(ticket, "profile_started", {"generation": ticket.generation, "step": number, "rank": rank}))

    def _end(self, begun: _Begun) -> None:
        from vescale_ray.compat.core import memory_snapshot, record_memory_history

        try:
            begun.profile.stop()
            trace = tempfile.TemporaryDirectory()  # a local folder, so that no file server delays the step
            begun.profile.export_chrome_trace(os.path.join(trace.name, "trace.json"))
            begun.profile = memory = None
            if self._on_gpu:
                memory = pickle.dumps(memory_snapshot())
                record_memory_history(enabled=None)
        except Exception as error:
            return self._fail(error, begun.rank, begun.ticket)
        self._writer = threading.Thread(target=self._write, args=(begun, trace, memory), name="vescale-profile", daemon=True)
        self._writer.start()

    def _write(self, begun: _Begun, trace: tempfile.TemporaryDirectory[str], memory: bytes | None) -> None:
        generation = begun.ticket.generation
        name = f"steps-{begun.first}-{begun.last}-rank-{begun.rank}-generation-{generation}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with trace as at, _appearing(self._folder / f"{name}.trace.json.gz") as path:
                with open(os.path.join(at, "trace.json"), "rb") as read, gzip.open(path, "wb", compresslevel=4) as file:
                    shutil.copyfileobj(read, file, 1 << 20)
            if memory is not None:
                with _appearing(self._folder / f"{name}.memory.pickle") as path:
                    path.write_bytes(memory)
        except Exception as error:
            return self._fail(error, begun.rank, begun.ticket)
        about = {"generation": generation, "step": begun.last, "first": begun.first, "rank": begun.rank, "file": str(self._folder / name)}
        self._publish(Happened(begun.ticket, "profiled", about))

    def _fail(self, error: Exception, rank: int, ticket: Ticket) -> None:
        self._window = None
        if self._on_gpu:
            from vescale_ray.compat.core import record_memory_history

            with suppress(Exception):
                record_memory_history(enabled=None)
        why = one_line(error) or type(error).__name__
        self._publish(Noticed(ticket, f"train.profile: rank {rank} has no profile ({why}); training goes on"))


@contextmanager
def _appearing(path: Path) -> Iterator[Path]:
    """The path of a file to write. It becomes ``path`` once it is whole."""
    new = path.with_name(f".{path.name}")
    yield new
    new.replace(path)
