"""News of the workers, which the worker group reports to the control loop. Only values, no Ray."""

from __future__ import annotations

from dataclasses import dataclass

from vescale_ray.controller.failures.budget import Cause
from vescale_ray.workers.messages import Outlined, WorkerInfo, WorkerReport


class SupervisorLost(RuntimeError):
    """The supervisor does not answer: the workers that it owned are gone with it."""


@dataclass(frozen=True)
class Ready:
    """A worker has become warm."""

    info: WorkerInfo


@dataclass(frozen=True)
class Heard:
    """A worker has reported."""

    report: WorkerReport


@dataclass(frozen=True)
class Lost:
    """A worker's process has ended, or it could not become warm (then there is no ``info``)."""

    worker: str
    info: WorkerInfo | None
    reason: str
    cause: Cause = Cause.KILLED


@dataclass(frozen=True)
class Told:
    """A worker has answered :meth:`WorkerGroup.ask_outline`; None: it does not know the outline yet."""

    outlined: Outlined | None


News = Ready | Heard | Lost | Told
