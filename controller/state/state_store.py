"""The store of a controller's durable state, which the run's supervisor keeps in memory.

The supervisor outlives the controller, and a run whose supervisor is lost begins anew. The state is kept before it is used, so that no
generation number is ever given out twice. The run's folder has a copy, which later starts of the run and the driver read.
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from vescale_ray.controller.bounded_io import BoundedIO
from vescale_ray.controller.state.durable_state import DurableState
from vescale_ray.controller.worker_group.worker_news import SupervisorLost
from vescale_ray.runfolder import RunFolder

NAME = "controller.json"
CALL_S = 5.0
"""Bound of a call to the supervisor, which only keeps a text or returns it."""

_log = logging.getLogger(__name__)


class StateStore:
    """Keeps a run's durable state, and gives it to the next controller.

    Args:
        folder: the run's folder.
        supervisor: the run's supervisor actor.
    """

    def __init__(self, folder: str | os.PathLike[str], supervisor: Any) -> None:
        self._folder, self._supervisor, self._bounded_io = RunFolder(folder), supervisor, BoundedIO()

    def newest(self) -> DurableState | None:
        """Return the state that was kept last; None: an earlier controller died before it kept one.

        Raises:
            TimeoutError: the supervisor has not answered.
            SupervisorLost: it is gone.
        """
        try:
            text = ray.get(self._supervisor.kept.remote(), timeout=CALL_S)
        except ActorUnavailableError as error:
            raise TimeoutError(f"the supervisor is out of reach: {error}") from None
        except RayActorError:
            raise SupervisorLost("the supervisor actor is gone, and the workers that it owned") from None
        return DurableState.from_json(text) if text else None

    def write(self, state: DurableState) -> None:
        """Keep ``state``. Never raises: the loss of the supervisor is noticed elsewhere, and a full disk stops nothing."""
        text = state.to_json()
        try:
            ray.get(self._supervisor.keep.remote(text), timeout=CALL_S)
        except RayError as error:
            _log.warning("the supervisor does not confirm that it keeps the controller's state: %s", error)
        try:
            self._bounded_io.do(lambda: self._folder.write_durable_state(text))
        except OSError as error:
            _log.warning("%s could not be written: %s; the supervisor has the state", self._folder.path / NAME, error)


class StateWriter:
    """The durable state of a running controller. Each part of the controller notes its own fields; a write keeps all of them.

    Used from the controller's thread.
    """

    def __init__(self, state: DurableState, store: StateStore) -> None:
        self.state, self._written, self._store = state, state, store

    def note(self, **fields: Any) -> None:
        """Change fields of the durable state. The next write keeps them."""
        self.state = replace(self.state, **fields)

    def update(self, **fields: Any) -> None:
        """Change fields, and write the state if it differs from the last written one."""
        self.note(**fields)
        if self.state != self._written:
            self.write()

    def write(self) -> None:
        """Write the durable state."""
        self._store.write(self.state)
        self._written = self.state

    def take_number(self) -> int:
        """Return a number for a generation, written before it is used."""
        self.note(last_number=self.state.last_number + 1)
        self.write()
        return self.state.last_number


def read_state(folder: str | os.PathLike[str]) -> DurableState | None:
    """Return the durable state in a run's folder; None if there is none.

    A file that is damaged or has another version is ignored, with a warning in the log.

    Raises:
        OSError: the folder can't be read.
    """
    path = Path(folder) / NAME
    try:
        return DurableState.from_json(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        _log.warning("%s is ignored: %s", path, error)
        return None
