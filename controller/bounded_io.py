"""Disk calls with a time limit, each carried out in another thread.

A full disk reports an error at once. A file system whose server is gone does not answer: a thread that writes to it blocks until the
server is back. The control loop, which watches the workers, must not block, so it makes its disk calls through :class:`BoundedIO`. If a
write takes too long, the loop goes on, and later writes are refused until it is done. The end of the process does not wait for it.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import Any

PATIENCE_S = 3.0
"""Longest wait for a write. A write takes milliseconds, on a busy disk tenths of a second."""
SHORT_S = 0.2
"""Longest wait after a write that took longer than this, until a write takes less."""
UNCLAIMED = 8
"""Late writes whose results are kept once they are done."""


class BoundedIO:
    """Carries out the disk calls of one thread."""

    def __init__(self) -> None:
        self._patience_s = self._wait_s = PATIENCE_S
        self._late: tuple[Future[Any], Callable[[], Any]] | None = None
        self._unclaimed: dict[Callable[[], Any], Future[Any]] = {}
        """Late writes that are done and whose results the caller has not asked for yet; only the newest."""

    def do(self, write: Callable[[], Any], wait_s: float | None = None) -> Any:
        """Carry out ``write``, and return its result.

        Raises:
            TimeoutError: (an ``OSError``) ``write`` takes longer than ``wait_s`` or :data:`PATIENCE_S`. It may finish later: pass the same
                ``write`` again to get its result. Or an earlier write is still under way; then ``write`` was not begun.
            OSError: ``write`` raised it.
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
    """Begin ``write`` in a daemon thread. Unlike a thread of a ``ThreadPoolExecutor``, it does not delay the end of the process."""
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
