"""Worker processes that live through many generations, keep a dict of state, and run the calls that the test sends over a pipe.

``tests.ranks.run_gloo`` starts ranks for one call. Tests of elasticity need processes that outlive their process groups, lose some members,
and form groups again. The store lives in the test's process, as it lives outside the workers in a run.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.connection import Connection, wait
from typing import Any

import torch.distributed as dist

from tests import ranks
from tests.ranks import RankFailed

State = dict[str, Any]


class Fleet:
    """``with Fleet(4) as fleet: fleet.run([0, 1], function, *args)``; workers are named 0, 1, ..

    ``function(state, *args)`` must be importable; ``state`` is the worker's own dict, kept between calls.

    Args:
        spawn: start new interpreters, which CUDA needs, and not forks of a server with preloaded imports.
    """

    def __init__(self, count: int, *, spawn: bool = False) -> None:
        self._context: Any = multiprocessing.get_context("spawn") if spawn else ranks._context()
        self._workers: dict[int, tuple[Any, Connection]] = {}
        self._names = itertools.count()
        self._prefixes = itertools.count()
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.port = self._store.port
        self.add(count)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        for process, pipe in self._workers.values():
            pipe.close()
            process.kill()
            process.join()

    def add(self, count: int = 1) -> list[int]:
        """Start more workers."""
        added = []
        for _ in range(count):
            here, there = self._context.Pipe()
            process = self._context.Process(target=_main, args=(there,), daemon=True)
            process.start()
            there.close()
            name = next(self._names)
            self._workers[name] = (process, here)
            added.append(name)
        return added

    def pid(self, worker: int) -> int:
        return int(self._workers[worker][0].pid)

    def prefix(self) -> str:
        """A store prefix that no attempt has used."""
        return f"test/{next(self._prefixes)}"

    def start(self, worker: int, function: Callable[..., Any], *args: Any) -> None:
        process, pipe = self._workers[worker]
        try:
            pipe.send((function, args))
        except BrokenPipeError:
            process.join(10)
            raise RankFailed(f"worker {worker} (process {process.pid}) was dead already: exit code {process.exitcode}") from None

    def results(self, workers: Iterable[int], timeout: float = 200.0) -> dict[int, Any]:
        """Results by worker. Fails if a worker has raised or died."""
        outcome = self.outcomes(workers, timeout)
        failed = {w: value for w, (ok, value) in outcome.items() if not ok}
        if failed:
            raise RankFailed("\n".join(f"--- worker {w} ---\n{text}" for w, text in sorted(failed.items())))
        return {w: value for w, (_, value) in outcome.items()}

    def outcomes(self, workers: Iterable[int], timeout: float = 200.0) -> dict[int, tuple[bool, Any]]:
        """By worker, (True, result) or (False, traceback or 'died')."""
        pending = {self._workers[w][1]: w for w in workers}
        got: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout
        while pending:
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RankFailed(f"workers {sorted(pending.values())} still busy after {timeout} s; finished: {got}")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                worker = pending.pop(pipe)
                try:
                    got[worker] = pipe.recv()
                except (EOFError, ConnectionResetError):
                    got[worker] = (False, "died")
        return got

    def run(self, workers: Iterable[int], function: Callable[..., Any], *args: Any, timeout: float = 200.0) -> dict[int, Any]:
        """Run the same call on each worker, at the same time."""
        return self.run_each(dict.fromkeys(workers, args), function, timeout=timeout)

    def run_each(self, calls: Mapping[int, tuple[Any, ...]], function: Callable[..., Any], *, timeout: float = 200.0) -> dict[int, Any]:
        for worker, args in calls.items():
            self.start(worker, function, *args)
        return self.results(calls, timeout)

    def kill(self, worker: int) -> None:
        """Kill the worker with SIGKILL and reap it."""
        process, pipe = self._workers.pop(worker)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        pipe.close()

    def reap(self, worker: int) -> None:
        """Remove a worker that has killed itself with SIGKILL."""
        process, pipe = self._workers.pop(worker)
        process.join(10)
        assert process.exitcode == -signal.SIGKILL, process.exitcode
        pipe.close()


def _main(pipe: Connection) -> None:
    import torch

    from vescale_ray.workers.network import process_groups

    torch.set_num_threads(1)
    process_groups.prepare()
    state: State = {}
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            answer = (True, function(state, *args))
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send(answer)
