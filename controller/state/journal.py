"""Writes lines to the run's folder without blocking training or the control loop. If the disk is full, gone or does not answer, lines wait
in memory until they can be written, and one warning is given."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sized
from pathlib import Path
from typing import Any

from vescale_ray.controller.bounded_io import BoundedIO
from vescale_ray.runfolder import RunFolder

_log = logging.getLogger(__name__)

MOST_WAITING = 2_500_000
"""Maximum number of values of lines that wait in memory for the disk; beyond that, the oldest lines are lost. A value takes about 100
bytes. A line of 1,000 ranks has some thousand values."""
TELL_S = 20.0
"""If a disk does not answer for this long, a warning is given. A disk that is only busy, as a shared one may be, answers sooner."""


class Journal:
    """Writer of the run's lines. Used from the controller's thread; any thread may read :attr:`warnings`, which is immutable.

    Args:
        stamp: makes the whole event from a name and its fields.

    Attributes:
        warnings: problems that did not end the run, each once.
    """

    def __init__(self, folder: RunFolder, stamp: Callable[[str, Mapping[str, Any]], Mapping[str, Any]]) -> None:
        self._folder, self._stamp, self._bounded_io = folder, stamp, BoundedIO()
        self._waiting: deque[tuple[Callable[[], None], int]] = deque()
        """Functions that write one line each, and the number of values in the line."""
        self._values = 0
        self._unwritable = False
        self._silent_since: float | None = None
        """Since when the disk does not answer."""
        self.warnings: tuple[str, ...] = ()

    def event(self, name: str, about: Mapping[str, Any]) -> None:
        """Write an event."""
        self._put_event(name, about)
        self._catch_up()

    def metrics(self, line: Mapping[str, Any]) -> None:
        """Write the line of a step."""
        self._put(lambda: self._folder.append_metrics(line), line.values())
        self._catch_up()

    def samples(self, index: int, generation: int, ids: Any) -> None:
        """Write the samples that a step has consumed."""
        self._put(lambda: self._folder.append_samples(index, generation, ids), (ids,))
        self._catch_up()

    def state(self, record: Mapping[str, Any]) -> None:
        """Write run.json. Only the newest record counts, so none waits for the disk."""
        self._catch_up()
        try:
            self._bounded_io.do(lambda: self._folder.write_state(record))
            self._silent_since = None
        except OSError as error:
            self._trouble(error)

    def report(self, keep: Callable[[str, str], Path], name: str, text: str) -> str | None:
        """Write a report with a method of the folder, and return its path; None if it can't be written."""
        try:
            return str(self._bounded_io.do(lambda: keep(name, text)))
        except OSError as error:
            self._trouble(error)
            return None

    def warn(self, text: str) -> None:
        """Give a warning of a problem that does not stop training: in the log, in run.json and as an event."""
        _log.warning("%s", text)
        self.warnings = (*self.warnings, text)
        self.event("warning", {"text": text})

    def flush(self, wait_s: float) -> None:
        """Write the lines that still wait, if the disk answers within ``wait_s`` seconds."""
        deadline = time.monotonic() + wait_s
        while self._waiting and (left := deadline - time.monotonic()) > 0:
            self._catch_up(left)
            time.sleep(0.01)

    def _put_event(self, name: str, about: Mapping[str, Any]) -> None:
        record = self._stamp(name, about)
        self._put(lambda: self._folder.append_event(record), record.values())

    def _put(self, append: Callable[[], None], values: Iterable[Any]) -> None:
        count = sum(len(one) if isinstance(one, Sized) else 1 for one in values)
        self._waiting.append((append, count))
        self._values += count

    def _drop(self) -> None:
        self._values -= self._waiting.popleft()[1]

    def _catch_up(self, wait_s: float | None = None) -> None:
        while self._waiting:
            try:
                self._bounded_io.do(self._waiting[0][0], wait_s)
            except OSError as error:
                self._trouble(error)
                while self._values > MOST_WAITING:
                    self._drop()
                return
            self._silent_since = None
            self._drop()

    def _trouble(self, error: OSError) -> None:
        if isinstance(error, TimeoutError):
            now = time.monotonic()
            self._silent_since = now if self._silent_since is None else self._silent_since
            if now - self._silent_since < TELL_S:
                return
        if not self._unwritable:
            self._unwritable = True
            text = f"{self._folder.path}: can't be written ({error.strerror or error}); training goes on, lines wait in memory"
            self.warnings = (*self.warnings, text)
            self._put_event("warning", {"text": text})  # after the lines that wait, so that a reader sees when it began
            _log.warning("%s", text)
