"""Calls that can't be interrupted, with an end all the same: a write to a file system that hangs ends neither by itself nor by Ctrl-C.

The work runs in a thread; who waits for it can leave. What was left stops at its next question whether to go on, and that it asks at all is
the sign that it is alive: so a store that is slow is waited for, one that stands still is not.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

DAEMONS = "checkpoint-daemon-"
"""How the names of threads begin that a process that ends need not wait for."""
SLICE_S = 0.2
LEAVE_S = 5.0
"""Seconds that who is interrupted waits for the work to notice, so that it can tell the others and clear up."""


class Quiet(Exception):
    """The work gave no sign of life for so long: ``seconds``."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.seconds = seconds


class Watch:
    """What the work calls between its steps: whether to stop."""

    def __init__(self) -> None:
        self.stop = False
        self.asked = time.monotonic()

    def __call__(self) -> bool:
        self.asked = time.monotonic()
        return self.stop


def bounded(work: Callable[[Watch], T], quiet_s: float) -> T:
    """What ``work`` returns, or raises, in a thread of its own. Daemon: a process must be able to end though a disk hangs.

    Args:
        quiet_s: how long it may not ask whether to go on.

    Raises:
        Quiet: longer than that; it is told to stop, and left behind. KeyboardInterrupt and the like: the same after :data:`LEAVE_S`.
    """
    watch, over = Watch(), threading.Event()
    result: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            result.append(work(watch))
        except BaseException as error:
            errors.append(error)
        finally:
            over.set()

    thread = threading.Thread(target=run, name=f"{DAEMONS}save", daemon=True)
    try:
        thread.start()
        # In slices: where a signal comes to another thread of the process, this one would sleep on.
        while not over.wait(min(SLICE_S, max(0.0, watch.asked + quiet_s - time.monotonic()))):
            since = time.monotonic() - watch.asked
            if since >= quiet_s:
                raise Quiet(since)
    except BaseException as error:
        watch.stop = True
        if not isinstance(error, Quiet):
            over.wait(LEAVE_S)
        raise
    try:
        if errors:
            raise errors[0]
        return result[0]
    finally:
        errors.clear()  # they hold the frames that hold the state


class Workers:
    """A few threads for calls that may hang. ``concurrent.futures`` has such pools, but a process that ends waits for their threads.

    A context: on leaving it, all that was submitted is through, well or not; that wait can hang as the calls can.
    """

    def __init__(self, count: int, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._live, name=f"{DAEMONS}{name}", daemon=True) for _ in range(count)]

    def submit(self, work: Callable[..., T], *arguments: Any) -> Future[T]:
        future: Future[T] = Future()
        self._calls.put((future, work, arguments))
        return future

    def __enter__(self) -> Workers:
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:  # no more threads, or an interrupt: those that run end
            self._end()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._end()
        for thread in self._threads:
            thread.join()

    def _end(self) -> None:
        for _ in self._threads:
            self._calls.put(None)

    def _live(self) -> None:
        while (call := self._calls.get()) is not None:
            future, work, arguments = call
            try:
                future.set_result(work(*arguments))
            except BaseException as error:
                future.set_exception(error)
            del call, future, work, arguments  # the last one holds memory that somebody wants back


@atexit.register
def _ended() -> None:
    """A thread that ends while the interpreter does takes the process along (std::terminate, when it frees a tensor): those that are just
    about to, because what they waited for was given up, get a second."""
    deadline = time.monotonic() + 1.0
    for thread in threading.enumerate():
        if thread.name.startswith(DAEMONS) and thread.is_alive():  # one whose start was interrupted is listed, too
            thread.join(max(0.0, deadline - time.monotonic()))
