"""Writes to a disk that may not answer: carried out in another thread, and waited for only as long as a disk takes that does.

A full disk says so at once. A file system whose server is gone says nothing: whoever writes to it stands still until it is back, and
nothing ends that. The loop that watches the workers must not be the one. So it hands its writes to this, one after another; where one is
not done in time the loop goes on, and whatever else is to be written then waits with it.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import Any

PATIENCE_S = 3.0
"""A write takes milliseconds, on a disk that is busy tenths of a second."""
SHORT_S = 0.2
"""After one that took longer, until one has taken less than this."""


class Scribe:
    """For one thread's use."""

    def __init__(self) -> None:
        self._patience_s = self._wait_s = PATIENCE_S
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="vescale-scribe")
        self._late: tuple[Future[Any], Callable[[], Any]] | None = None
        self._unclaimed: tuple[Future[Any], Callable[[], Any]] | None = None
        """One that was late and is done, and nobody has asked for it yet."""

    def do(self, write: Callable[[], Any], wait_s: float | None = None) -> Any:
        """Carry it out; its result.

        Raises:
            TimeoutError: (an ``OSError``) it is not done in time (``wait_s``, or :data:`PATIENCE_S`), and may be done later: give the same
                ``write`` again to learn what came of it. Or the one before it is not done yet: then this one was not begun.
            OSError: what ``write`` raised.
        """
        if self._late is not None and (self._late[0].done() or (wait_s and wait_for([self._late[0]], wait_s).done)):
            self._late, self._unclaimed = None, self._late
        if self._unclaimed is not None and self._unclaimed[1] is write:
            done, self._unclaimed = self._unclaimed[0], None
            return done.result()
        if self._late is not None:
            raise TimeoutError(errno.ETIMEDOUT, "the disk does not answer")
        made = self._pool.submit(write)
        if not wait_for([made], SHORT_S).done:
            first, self._wait_s = self._wait_s, SHORT_S
            if not wait_for([made], max(wait_s or 0.0, first) - SHORT_S).done:
                self._late = made, write
                raise TimeoutError(errno.ETIMEDOUT, "the disk does not answer")
        else:
            self._wait_s = self._patience_s
        return made.result()
