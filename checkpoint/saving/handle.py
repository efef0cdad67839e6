"""The handle that a save returns: when the state may change again, and how the save ended."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ..commits import Commit
from ..errors import SaveFailed, SaveSkipped


class SaveHandle:
    """A save in progress or ended. Thread-safe. It has the methods of ``concurrent.futures.Future``, which
    ``torch.distributed.checkpoint.async_save`` returns, and :meth:`wait_staged`.

    Attributes:
        step: step of the saved state.
        skipped: whether the save was skipped because earlier ones were still being written; then there is no commit. It is known at once if
            this rank is the busy one, otherwise once the ranks agree.
        stall_s: seconds that the caller waited while the state was flattened and copied.
        persist_s: seconds from the staged copy to the commit; ``None`` before that.
    """

    def __init__(self, step: int, bound_s: float | None) -> None:
        self.step = step
        self.skipped = False
        self.stall_s = 0.0
        self.persist_s: float | None = None
        self.surfaced = False
        """True if the error was reported to a caller."""
        self._begin_copy: Callable[[], Callable[[], None]] | None = None
        self._finish_copy: Callable[[], None] | None = None
        self._bound_s = bound_s
        self._copying = threading.Lock()
        self._staged, self._done = threading.Event(), threading.Event()
        self._commit: Commit | None = None
        self._error: BaseException | None = None

    @classmethod
    def finished(cls, step: int, commit: Commit, seconds: float) -> SaveHandle:
        """Return the handle of a save that ended before it returned."""
        handle = cls(step, None)
        handle.stall_s = handle.persist_s = seconds
        handle.staged()
        handle.end(commit)
        return handle

    def wait_staged(self, timeout_s: float | None = None) -> None:
        """Wait until the state is copied; then it may change. Returns at once for a skipped save.

        Raises:
            TimeoutError: the copy took longer than ``timeout_s``. The copy's own error, if it failed.
        """
        self.begin_copy()
        with self._copying:
            if self._finish_copy is not None and not self._staged.is_set():
                self._finish_copy()
            self._finish_copy = None
        if not self._staged.wait(timeout_s):
            raise TimeoutError(f"the state of step {self.step} was not copied within {timeout_s:g} s")
        if self._done.is_set() and self._error is not None and not self.skipped:
            self._raise()

    def wait(self, timeout_s: float | None = None) -> Commit:
        """Wait until the checkpoint is committed, at most for the saver's timeouts, or ``timeout_s`` if that is shorter.

        Raises:
            SaveFailed: there is no commit; earlier checkpoints are untouched. SaveSkipped: the save never began.
            TimeoutError: the commit took longer than ``timeout_s``; the save goes on.
        """
        self._wait(timeout_s)
        if self._error is not None:
            self._raise()
        assert self._commit is not None
        return self._commit

    result = wait

    def done(self) -> bool:
        """Return whether the save has ended, successfully or not."""
        return self._done.is_set()

    def exception(self, timeout_s: float | None = None) -> BaseException | None:
        """Return the reason why there is no commit; ``None`` if there is one. Waits as :meth:`wait`."""
        self._wait(timeout_s)
        self.surfaced = True
        return self._error

    @property
    def commit(self) -> Commit:
        """The commit. Waits like :meth:`wait`."""
        return self.wait()

    # ------------------------------------------------------------------------------------------------------ for the saver

    def copy_with(self, begin: Callable[[], Callable[[], None]]) -> None:
        """Set ``begin``, which starts the copy and returns a function that waits for its end and then calls :meth:`staged`.

        The writer or a waiting caller starts the copy, whichever is first. So a caller never waits for the writer's other work.
        """
        self._begin_copy = begin

    def begin_copy(self) -> None:
        with self._copying:
            if self._begin_copy is not None:
                self._finish_copy = self._begin_copy()
            self._begin_copy = None

    def staged(self) -> None:
        self._staged.set()

    def end(self, outcome: Commit | BaseException) -> None:
        """Set the outcome; only the first one counts."""
        if self._done.is_set():
            return
        if isinstance(outcome, Commit):
            self._commit = outcome
        else:
            self._error = outcome
        self._done.set()
        self._staged.set()

    def skip(self, reason: str) -> SaveHandle:
        self.skipped = self.surfaced = True
        self.end(SaveSkipped(reason))
        return self

    def trouble(self) -> str | None:
        """Return the error of an ended save that was not reported to a caller yet."""
        return str(self._error) if self.done() and self._error is not None and not self.surfaced else None

    def _wait(self, timeout_s: float | None) -> None:
        bounds = [b for b in (timeout_s, self._bound_s) if b is not None]
        if not self._done.wait(min(bounds, default=None)):
            raise TimeoutError(f"the checkpoint of step {self.step} was not committed within {min(bounds):g} s; it is still being written")

    def _raise(self) -> Any:
        self.surfaced = True
        error = self._error
        assert error is not None
        if isinstance(error, SaveFailed):
            # A new object: if several threads raised the same one, it would collect all their tracebacks.
            raise type(error)(*error.args) from error
        raise error
