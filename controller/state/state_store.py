"""The store of a controller's durable state.

The state is written before it is used, so that no generation number is ever given out twice. It lies in the run's folder. If the folder
can't be written (its disk is full, or does not answer), the supervisor, which outlives the controller, keeps it in memory.
"""

from __future__ import annotations

import errno
import logging
import os
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from vescale_ray.controller.bounded_io import BoundedIO
from vescale_ray.controller.state.durable_state import DurableState

NAME = "controller.json"
CALL_S = 5.0
"""Bound of a call to the supervisor, which only keeps a text or returns it."""

_log = logging.getLogger(__name__)


class StateStore:
    """Writes a run's durable state, and finds the newest.

    Args:
        folder: the run's folder.
        supervisor: the run's supervisor actor.
    """

    def __init__(self, folder: str | os.PathLike[str], supervisor: Any) -> None:
        self._folder, self._supervisor, self._bounded_io = folder, supervisor, BoundedIO()

    def newest(self, run_id: str) -> DurableState | None:
        """The newest state of the start ``run_id``, from the folder or the supervisor. If there is none, the folder's state of another
        start.

        Raises:
            OSError: the folder can't be read, so that the supervisor's state may be older and its numbers would be given out twice. Or
                there is no state of this start, though the run has workers.
        """
        written = read_state(self._folder)
        try:
            text = self._ask("kept")
            kept = DurableState.from_json(text) if text else None
        except (RayError, ValueError) as error:
            _log.warning("the supervisor does not tell whether it has a state: %s", error)
            kept = None
        own = [state for state in (written, kept) if state is not None and state.run_id == run_id]
        if not own and self._has_workers():
            # The state was written before the first worker was hired. The folder may not be mounted any more.
            raise FileNotFoundError(errno.ENOENT, f"no {NAME} of this run, though the run has workers", str(self._folder))
        return max(own, key=lambda state: state.revision, default=written)

    def write(self, state: DurableState) -> DurableState:
        """Keep ``state`` with the next revision, and return it. Never raises: if it can be kept nowhere, a restarted controller gets an
        older state."""
        state = replace(state, revision=state.revision + 1)
        try:
            self._bounded_io.do(lambda: _replace(self._folder, state.to_json()))
        except OSError as error:
            _log.warning("%s could not be written: %s; the supervisor keeps the state", self._folder, error)
            try:
                self._ask("keep", state.to_json())
            except RayError as problem:
                _log.warning("nor could the supervisor: %s", problem)
        return state

    def _has_workers(self) -> bool:
        try:
            return bool(self._ask("roster"))
        except RayError:
            return False

    def _ask(self, method: str, *args: Any) -> Any:
        return ray.get(getattr(self._supervisor, method).remote(*args), timeout=CALL_S)


class StateWriter:
    """The durable state of a running controller. Each part of the controller notes its own fields; a write keeps all of them.

    Used from the controller's thread.
    """

    def __init__(self, state: DurableState, store: StateStore) -> None:
        self.state, self._written, self._store = state, state, store

    def note(self, **fields: Any) -> None:
        """Change fields. The next write keeps them."""
        self.state = replace(self.state, **fields)

    def update(self, **fields: Any) -> None:
        """Change fields, and write the state if it differs from what was written last."""
        self.note(**fields)
        if self.state != self._written:
            self.write()

    def write(self) -> None:
        """Write the state."""
        self.state = self._written = self._store.write(self.state)

    def take_number(self) -> int:
        """A number for a generation, written before it is used."""
        self.note(last_number=self.state.last_number + 1)
        self.write()
        return self.state.last_number


def read_state(folder: str | os.PathLike[str]) -> DurableState | None:
    """The state in a run's folder. A damaged file, or one of another version, counts as none, with a warning in the log.

    Raises:
        OSError: the folder can't be read.
    """
    path = Path(folder) / NAME
    try:
        return DurableState.from_json(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        _log.warning("%s counts as none: %s", path, error)
        return None


def _replace(folder: str | os.PathLike[str], text: str) -> None:
    """Replace the file atomically: a reader sees the old text or the new one, even after a crash of the machine.

    Raises:
        OSError: the file can't be written, because the disk is full, for example.
    """
    descriptor, temporary = tempfile.mkstemp(dir=folder, prefix=f".{NAME}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as handle:
            handle.write(text)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(temporary, Path(folder) / NAME)
        _sync(folder)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _sync(folder: str | os.PathLike[str]) -> None:
    """Make a new name in ``folder`` durable, if its file system can. Otherwise the old state may return: a number would be given twice."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
