"""Lines in the run's folder, written so that a disk never stops the training or the watching of it. If the disk is full, gone or silent,
lines wait in memory until they can be written, and one warning is given."""

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
"""Values of lines that wait in memory for a disk that can be written again; beyond it the oldest are lost. A value takes about 100 bytes, a
line of a thousand ranks has some thousands."""
TELL_S = 20.0
"""A disk that does not answer is told of after so long: one that is only busy, as a shared one may be, has answered by then."""


class Journal:
    """Used from the controller's thread; :attr:`warnings` is immutable and may be read from any.

    Args:
        stamp: makes the whole event of a name and its fields.

    Attributes:
        warnings: what went wrong without ending the run, each once.
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
        """Write what a step has consumed."""
        self._put(lambda: self._folder.append_samples(index, generation, ids), (ids,))
        self._catch_up()

    def state(self, record: Mapping[str, Any]) -> None:
        """Write run.json: the newest alone counts, so that none waits."""
        self._catch_up()
        try:
            self._bounded_io.do(lambda: self._folder.write_state(record))
            self._silent_since = None
        except OSError as error:
            self._trouble(error)

    def report(self, keep: Callable[[str, str], Path], name: str, text: str) -> str | None:
        """Keep a report, by a method of the folder's; where it is."""
        try:
            return str(self._bounded_io.do(lambda: keep(name, text)))
        except OSError as error:
            self._trouble(error)
            return None

    def warn(self, text: str) -> None:
        """Tell of something that does not stop the training: in the log, in run.json, as an event."""
        _log.warning("%s", text)
        self.warnings = (*self.warnings, text)
        self.event("warning", {"text": text})

    def flush(self, wait_s: float) -> None:
        """Have what still waits written, if the disk answers within that time."""
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
            self._put_event("warning", {"text": text})  # behind the lines that wait: a reader sees when it began
            _log.warning("%s", text)
