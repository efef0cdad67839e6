"""Fresh processes for the ranks of a benchmark, free of other systems' state, and their process group."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from queue import Empty
from typing import Any

LOAD = 32 << 20
"""Bytes that a rank sends in a round of :func:`wire_mb_s`, about as many as in a rescale of recovery.py's run."""


def run_ranks(
    target: Callable[..., None], world: int, *args: Any, environment: Mapping[str, str] | None = None, timeout: float = 1200.0
) -> list[Any]:
    """Call ``target(rank, world, store, *args, queue)`` in ``world`` fresh processes; each puts ``(rank, result)`` into the queue.

    Args:
        store: path of a file for ``torch.distributed.FileStore``.
        environment: variables to set in the processes, besides one thread for OpenMP.

    Returns:
        The results by rank.

    Raises:
        RuntimeError: a rank died, or has no result after ``timeout`` seconds. All processes are ended.
    """
    context = multiprocessing.get_context("spawn")
    queue: Any = context.Queue()
    changed = {"OMP_NUM_THREADS": "1", **(environment or {})}
    before = {key: os.environ.get(key) for key in changed}
    os.environ.update(changed)
    ranks: list[Any] = []
    found: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    try:
        with tempfile.TemporaryDirectory() as folder:
            ranks = [context.Process(target=target, args=(r, world, f"{folder}/store", *args, queue), daemon=True) for r in range(world)]
            for process in ranks:
                process.start()
            while len(found) < world:
                try:
                    found.update([queue.get(timeout=0.5)])
                except Empty:
                    if any(process.exitcode for process in ranks):
                        raise RuntimeError(f"{target.__name__}{args}: a rank died; its traceback is above") from None
                    if time.monotonic() > deadline:
                        raise RuntimeError(f"{target.__name__}{args}: ranks without a result after {timeout:g} s") from None
            for process in ranks:
                process.join(timeout=60)
            return [found[r] for r in range(world)]
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()
        for key, value in before.items():
            os.environ.pop(key, None) if value is None else os.environ.__setitem__(key, value)


def join(store: str, rank: int, world: int, backend: str = "gloo") -> None:
    """Initialise the default process group of the ranks that meet at the file ``store``."""
    import torch.distributed as dist

    from vescale_ray import gloo

    gloo.init_process_group(backend, store=dist.FileStore(store, world), rank=rank, world_size=world)


def wire_mb_s(world: int, rounds: int) -> list[float]:
    """MB per second that ``world`` processes on gloo exchange in total, counted once at the sender: uneven all-to-alls of existing
    memory."""
    return [LOAD * world / 1e6 / max(seconds) for seconds in zip(*run_ranks(_exchange, world, rounds, timeout=300.0), strict=True)]


def _exchange(rank: int, world: int, store: str, rounds: int, queue: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    join(store, rank, world)
    splits = [0 if r == rank else LOAD // (world - 1) for r in range(world)]
    sent, received = torch.ones(sum(splits), dtype=torch.uint8), torch.zeros(sum(splits), dtype=torch.uint8)
    seconds = []
    for _ in range(rounds + 1):
        dist.barrier()
        began = time.perf_counter()
        dist.all_to_all_single(received, sent, splits, splits)
        seconds.append(time.perf_counter() - began)
    dist.destroy_process_group()
    queue.put((rank, seconds[1:]))
