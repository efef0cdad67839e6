"""Run a function on several ranks, as threads of this process (fast) or as gloo processes (real).

Processes come from a fork server with preloaded imports (:mod:`tests.preload`), so that a rank starts in about 0.1 s.
"""

from __future__ import annotations

import functools
import inspect
import multiprocessing
import os
import queue
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from multiprocessing.context import ForkServerContext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from vescale_ray import gloo

_OTHERS_S = 2.0
"""Time to wait for the errors of other ranks after the first one."""


class RankFailed(AssertionError):
    """One or more ranks raised an error; the message has their tracebacks."""


def run_gloo(world: int, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
    """Call ``function(rank, world, *args)`` in ``world`` gloo processes; return the results by rank.

    No rank calls ``function`` before all have met: one that ends at once would close its connections while another waits for them.
    ``function`` must be importable (module level) and its result picklable (small: numpy or plain values, or CPU tensors via ``.numpy()``).
    If a rank raises, dies or still runs after ``timeout`` seconds, the call fails. No rank is left behind.
    """
    context = _context()
    results: Any = context.Queue()
    with tempfile.TemporaryDirectory(prefix="vescale-ranks-") as folder:
        ranks = [
            context.Process(
                target=_rank_main, args=(rank, world, os.path.join(folder, "store"), results, timeout, function, args), daemon=True
            )
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        got: dict[int, Any] = {}
        errors: dict[int, str] = {}
        deadline = time.monotonic() + timeout
        try:
            while len(got) + len(errors) < world:
                try:
                    rank, ok, value = results.get(timeout=0.2)
                    (got if ok else errors)[rank] = value
                except queue.Empty:
                    dead = [r for r, p in enumerate(ranks) if p.exitcode not in (None, 0) and r not in got and r not in errors]
                    for r in dead:
                        errors[r] = f"died with exit code {ranks[r].exitcode}"
                    if time.monotonic() > deadline:
                        missing = [r for r in range(world) if r not in got and r not in errors]
                        raise RankFailed(f"ranks {missing} still running\n" + _report(errors)) from None
                if errors:  # the rank that failed first may be the last to tell
                    deadline = min(deadline, time.monotonic() + _OTHERS_S)
            if errors:
                raise RankFailed(_report(errors))
            return [got[rank] for rank in range(world)]
        finally:
            for process in ranks:
                process.join(timeout=2)
                if process.is_alive():
                    process.kill()
                    process.join()


def join(store: dist.Store, rank: int, world: int, timeout: float) -> None:
    """Initialise the default process group on gloo, for ranks that :func:`run_gloo` has not started."""
    gloo.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout))


def run_threads(world: int, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
    """Call ``function(rank, world, *args)`` in ``world`` threads with torch's threaded process group; return results by rank.

    Collectives: all-gather, reduce-scatter (SUM, AVG), all-to-all (uneven too), all-reduce, broadcast. The autograd engine is isolated only
    as far as torch's own tests need. The threads share torch's random state, so several of them must not seed it: fill parameters from a
    generator (``tests.fsdp.towers.filled``).
    """
    from torch.testing._internal.common_distributed import spawn_threads_and_init_comms

    results: list[Any] = [None] * world
    failures: dict[int, str] = {}

    @spawn_threads_and_init_comms(world_size=world)
    def body(_self: Any) -> None:
        rank = dist.get_rank()
        try:
            results[rank] = function(rank, world, *args)
        except BaseException:
            failures[rank] = traceback.format_exc()
            raise

    def refuse(seed: int) -> None:
        raise AssertionError("ranks on threads share torch's random state: draw from a generator of your own")

    try:
        with mock.patch.object(torch, "manual_seed", refuse) if world > 1 else nullcontext():
            body(None)
    except BaseException:
        if not failures:
            raise
    if failures:
        raise RankFailed(_report(failures))
    return results


World = int | Callable[..., int] | None


def on_threads(world: World = None, timeout: float = 60.0) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test of ``function(rank, world, ...)``, which runs on ``world`` threads. Its further parameters are those of the test.

    ``world`` may be a function of some of these parameters. If the decorator gets no ``world``, the test has that parameter too.
    """
    return functools.partial(_test_on, run_threads, world, timeout)


def on_processes(world: World = None, timeout: float = 60.0) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test as :func:`on_threads` does, but in gloo processes. Arguments of the test have to be picklable."""
    return functools.partial(_test_on, run_gloo, world, timeout)


def _test_on(run: Callable[..., Any], world: World, timeout: float, function: Callable[..., None]) -> Callable[..., None]:
    all_parameters = inspect.signature(function).parameters.items()
    own = inspect.Signature([p for name, p in all_parameters if name != "rank" and (name != "world" or world is None)])

    @functools.wraps(function)
    def test(*values: Any, **named: Any) -> None:
        arguments = dict(own.bind(*values, **named).arguments)
        if callable(world):
            count = world(**{name: arguments[name] for name in inspect.signature(world).parameters})
        else:
            count = arguments.pop("world") if world is None else world
        run(count, _Body(test), arguments, timeout=timeout)

    test.__signature__ = own  # what pytest and Hypothesis provide
    return test


class _Body:
    """The function inside a test that :func:`_test_on` made. Other processes find it by the name of the test."""

    def __init__(self, test: Callable[..., None]) -> None:
        self.test: Any = test

    def __call__(self, rank: int, world: int, arguments: dict[str, Any]) -> None:
        self.test.__wrapped__(rank, world, **arguments)


def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preload"])
    return context


def _rank_main(
    rank: int, world: int, store: str, results: Any, timeout: float, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    try:
        join(dist.FileStore(store, world), rank, world, max(5.0, timeout))
        dist.barrier()
        value = function(rank, world, *args)
        racing = {dist.get_backend(group) for group in dist.distributed_c10d._world.pg_map if gloo.worker_threads(group) > 1}
        assert not racing, f"process groups of {racing} have several worker threads: make them by vescale_ray.gloo"
        dist.destroy_process_group()
        results.put((rank, True, value))
    except BaseException:
        results.put((rank, False, traceback.format_exc()))
        if dist.is_initialized():
            dist.destroy_process_group()


def _report(errors: dict[int, str]) -> str:
    return "\n".join(f"--- rank {rank} ---\n{text}" for rank, text in sorted(errors.items()))
