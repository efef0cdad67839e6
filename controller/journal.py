"""The lines in the run's folder as the controller writes them: a disk that is full or gone, or does not answer, never stops the training
nor the watching of it. Lines wait in memory until they can be written, and one warning is given."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sized
from pathlib import Path
from typing import Any

from vescale_ray.controller.scribe import Scribe
from vescale_ray.runfolder import RunFolder

_log = logging.getLogger(__name__)

MOST_WAITING = 2_500_000
"""Values of lines that wait in memory for a disk that can be written again; beyond it the oldest are lost. A value takes about 100 bytes, a
line of a thousand ranks has some thousands."""
TELL_S = 20.0
"""A disk that does not answer is told of after so long: one that is only busy, as a shared one may be, has answered by then."""


class Journal:
    """Used from the conductor's thread; :attr:`warnings` may be read from any.

    Args:
        stamp: of an event of this name, what all events tell: time, generation, step.

    Attributes:
        warnings: what went wrong without ending the run, each once.
    """

    def __init__(self, folder: RunFolder, stamp: Callable[[str], dict[str, Any]]) -> None:
        self._folder, self._stamp, self._scribe = folder, stamp, Scribe()
        self._waiting: deque[tuple[Callable[[], None], int]] = deque()
        """What writes a line, and how many values that has."""
        self._values = 0
        self._unwritable = False
        self._silent_since: float | None = None
        """Since when the disk does not answer."""
        self.warnings: tuple[str, ...] = ()

    def event(self, name: str, about: Mapping[str, Any]) -> None:
        """Write an event."""
        record = {**self._stamp(name), **about}
        self._write(lambda: self._folder.append_event(record), record.values())

    def metrics(self, line: Mapping[str, Any]) -> None:
        """Write the line of a step."""
        self._write(lambda: self._folder.append_metrics(line), line.values())

    def samples(self, index: int, generation: int, ids: Any) -> None:
        """Write what a step has consumed."""
        self._write(lambda: self._folder.append_samples(index, generation, ids), (ids,))

    def state(self, record: Mapping[str, Any]) -> None:
        """Write run.json: the newest alone counts, so that none waits."""
        self._catch_up()
        try:
            self._scribe.do(lambda: self._folder.write_state(record))
            self._silent_since = None
        except OSError as error:
            self._trouble(error)

    def report(self, keep: Callable[[str, str], Path], name: str, text: str) -> str | None:
        """Keep a report, by a method of the folder's; where it is."""
        try:
            return str(self._scribe.do(lambda: keep(name, text)))
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

    def _write(self, append: Callable[[], None], values: Iterable[Any]) -> None:
        self._put(append, values)
        self._catch_up()

    def _put(self, append: Callable[[], None], values: Iterable[Any]) -> None:
        count = sum(len(one) if isinstance(one, Sized) else 1 for one in values)
        self._waiting.append((append, count))
        self._values += count

    def _drop(self) -> None:
        self._values -= self._waiting.popleft()[1]

    def _catch_up(self, wait_s: float | None = None) -> None:
        while self._waiting:
            try:
                self._scribe.do(self._waiting[0][0], wait_s)
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
            # Behind what waits already: whoever reads the lines later sees when it began.
            record = {**self._stamp("warning"), "text": text}
            self._put(lambda: self._folder.append_event(record), record.values())
            _log.warning("%s", text)
