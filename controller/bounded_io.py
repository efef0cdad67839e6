"""Calls to a disk that may not answer: carried out in another thread, and waited for only as long as a disk takes that does.

A full disk says so at once. A file system whose server is gone says nothing: whoever writes to it stands still until it is back, and
nothing ends that. The loop that watches the workers must not be the one. So it hands its writes to this, one after another; where one is
not done in time the loop goes on, and whatever else is to be written then waits with it. Nor does the end of the process wait for it.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import Any

PATIENCE_S = 3.0
"""A write takes milliseconds, on a disk that is busy tenths of a second."""
SHORT_S = 0.2
"""After one that took longer, until one has taken less than this."""
UNCLAIMED = 8
"""Writes that were late and are done, of which it is remembered what came of them."""


class BoundedIO:
    """For one thread's use."""

    def __init__(self) -> None:
        self._patience_s = self._wait_s = PATIENCE_S
        self._late: tuple[Future[Any], Callable[[], Any]] | None = None
        self._unclaimed: dict[Callable[[], Any], Future[Any]] = {}
        """Those that were late and are done, and nobody has asked for them yet: the newest."""

    def do(self, write: Callable[[], Any], wait_s: float | None = None) -> Any:
        """Carry it out; its result.

        Raises:
            TimeoutError: (an ``OSError``) it is not done in time (``wait_s``, or :data:`PATIENCE_S`), and may be done later: give the same
                ``write`` again to learn what came of it. Or the one before it is not done yet: then this one was not begun.
            OSError: what ``write`` raised.
        """
        if self._late is not None and (self._late[0].done() or (wait_s and wait_for([self._late[0]], wait_s).done)):
            done, of = self._late
            self._late, self._unclaimed[of] = None, done
            if len(self._unclaimed) > UNCLAIMED:
                del self._unclaimed[next(iter(self._unclaimed))]
        if write in self._unclaimed:
            return self._unclaimed.pop(write).result()
        if self._late is not None:
            raise TimeoutError(errno.ETIMEDOUT, "the disk does not answer")
        made = begun(write)
        if not wait_for([made], SHORT_S).done:
            first, self._wait_s = self._wait_s, SHORT_S
            if not wait_for([made], max(wait_s or 0.0, first) - SHORT_S).done:
                self._late = made, write
                raise TimeoutError(errno.ETIMEDOUT, "the disk does not answer")
        else:
            self._wait_s = self._patience_s
        return made.result()


def begun(write: Callable[[], Any]) -> Future[Any]:
    """Carry it out in a thread of its own, for which no process waits when it ends (as it does for those of a ``ThreadPoolExecutor``)."""
    made: Future[Any] = Future()

    def carry_out() -> None:
        try:
            result = write()
        except BaseException as error:
            made.set_exception(error)
        else:
            made.set_result(result)

    threading.Thread(target=carry_out, name="vescale-bounded-io", daemon=True).start()
    return made
