"""What a save gives back: when the state may change again, and how it ended."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from .commits import Commit
from .errors import SaveFailed, SaveSkipped


class SaveHandle:
    """A save under way, or over; safe to ask from any thread. Its methods are those of ``concurrent.futures.Future``, which
    ``torch.distributed.checkpoint.async_save`` returns, and :meth:`wait_staged`.

    Attributes:
        step: of the state.
        skipped: it was not begun, because earlier ones were still being written; there will be no commit. Known at once where this rank is
            the busy one, else when the ranks have agreed.
        stall_s: seconds that the caller was held up: taking the state apart, the copy.
        persist_s: seconds from the staged copy to the commit; ``None`` until then.
    """

    def __init__(self, step: int, bound_s: float | None) -> None:
        self.step = step
        self.skipped = False
        self.stall_s = 0.0
        self.persist_s: float | None = None
        self.surfaced = False
        """Whether somebody was told of the error."""
        self._begin_copy: Callable[[], Callable[[], None]] | None = None
        self._finish_copy: Callable[[], None] | None = None
        self._bound_s = bound_s
        self._copying = threading.Lock()
        self._staged, self._done = threading.Event(), threading.Event()
        self._commit: Commit | None = None
        self._error: BaseException | None = None

    @classmethod
    def finished(cls, step: int, commit: Commit, seconds: float) -> SaveHandle:
        """Of a save that did not return before it was over."""
        handle = cls(step, None)
        handle.stall_s = handle.persist_s = seconds
        handle.staged()
        handle.end(commit)
        return handle

    def wait_staged(self, timeout_s: float | None = None) -> None:
        """Until the state is copied: from then on it may change. Returns at once for a save that was skipped.

        Raises:
            TimeoutError: not within ``timeout_s``. Whatever made the copy fail.
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
        """Until the checkpoint is committed. Bounded by the saver's timeouts, or ``timeout_s`` if that is shorter.

        Raises:
            SaveFailed: there is no commit; earlier checkpoints are untouched. SaveSkipped: this one was never begun.
            TimeoutError: not within ``timeout_s``; the save goes on.
        """
        self._wait(timeout_s)
        if self._error is not None:
            self._raise()
        assert self._commit is not None
        return self._commit

    result = wait

    def done(self) -> bool:
        """Whether it is over, well or not."""
        return self._done.is_set()

    def exception(self, timeout_s: float | None = None) -> BaseException | None:
        """Why there is no commit, ``None`` if there is one; waits as :meth:`wait`."""
        self._wait(timeout_s)
        self.surfaced = True
        return self._error

    @property
    def commit(self) -> Commit:
        """As :meth:`wait`."""
        return self.wait()

    # ------------------------------------------------------------------------------------------------------ for the saver

    def copy_with(self, begin: Callable[[], Callable[[], None]]) -> None:
        """``begin`` begins the copy and gives what waits for its end, after which it calls :meth:`staged`. Whoever comes first copies, the
        writer or the one who waits: so that who waits never waits for what else the writer does."""
        self._begin_copy = begin

    def begin_copy(self) -> None:
        with self._copying:
            if self._begin_copy is not None:
                self._finish_copy = self._begin_copy()
            self._begin_copy = None

    def staged(self) -> None:
        self._staged.set()

    def end(self, outcome: Commit | BaseException) -> None:
        """The first outcome counts."""
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
        """The error of a save that is over and that nobody was told of yet."""
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
            # A new object: the same one, raised in several threads, would gather all their tracebacks.
            raise type(error)(*error.args) from error
        raise error
