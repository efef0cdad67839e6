"""Time limits for calls that cannot be interrupted, such as a write to a hung file system.

The work runs in a thread, and its caller can stop waiting for it. The work regularly asks whether to go on; that question also shows that
it is alive. So the caller waits for slow storage, but not for hung storage. Abandoned work stops at its next question.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

DAEMONS = "checkpoint-daemon-"
"""Prefix of the names of threads for which an ending process need not wait."""
SLICE_S = 0.2
LEAVE_S = 5.0
"""Seconds that an interrupted caller waits for the work to notice, so that it can tell the other ranks and clean up."""


class Quiet(Exception):
    """The work was unresponsive for ``seconds`` seconds."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.seconds = seconds


class Watch:
    """A callable for the work to call between its steps; it returns whether to stop."""

    def __init__(self) -> None:
        self.stop = False
        self.asked = time.monotonic()

    def __call__(self) -> bool:
        self.asked = time.monotonic()
        return self.stop


def bounded(work: Callable[[Watch], T], quiet_s: float) -> T:
    """Run ``work`` in a daemon thread and return its result or raise its error. A daemon thread lets the process exit even if a disk hangs.

    Args:
        quiet_s: longest time, in seconds, in which ``work`` may fail to call its :class:`Watch`.

    Raises:
        Quiet: the work was quiet for longer. It is told to stop, and abandoned. KeyboardInterrupt: the same, after :data:`LEAVE_S`.
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
        # Wait in slices: if a signal goes to another thread of the process, a long wait would not end.
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
        errors.clear()  # errors hold frames, which hold the state


def in_daemons(count: int, name: str, work: Callable[[], None], stop: Callable[[], None]) -> None:
    """Run ``work``, which raises nothing, in ``count`` daemon threads, and return once all have ended. The pools of ``concurrent.futures``
    are unsuitable, since an ending process waits for their threads.

    Args:
        stop: tells the threads to end, after an error or an interrupt of the caller, too. The wait hangs if ``work`` hangs.
    """
    threads = [threading.Thread(target=work, name=f"{DAEMONS}{name}", daemon=True) for _ in range(count)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        stop()
        for thread in threads:
            if thread.is_alive():  # it was not started if the process has too many threads
                thread.join()


@atexit.register
def _ended() -> None:
    """Give ending daemon threads one second. A thread that ends together with the interpreter aborts the process (std::terminate, when it
    frees a tensor)."""
    deadline = time.monotonic() + 1.0
    for thread in threading.enumerate():
        if thread.name.startswith(DAEMONS) and thread.is_alive():  # includes a thread whose start was interrupted
            thread.join(max(0.0, deadline - time.monotonic()))
