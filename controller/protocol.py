"""The run as the controller sees it: its states and which may follow which, and the values that the parts of it exchange.

Frozen values and pure functions; no process, no Ray, no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

from vescale_ray.errors import BadInput
from vescale_ray.workers.messages import Origin, Ticket, WorkerFault

if TYPE_CHECKING:
    from vescale_ray.config import RunConfig

NAMESPACE = "vescale-ray"
"""Namespace of the controller's and the supervisor's names in Ray."""


class RunRefused(BadInput):
    """The run can't begin, or can't go on, with what the person gave; the message is one line with the remedy. Exit code 2."""


@dataclass(frozen=True)
class Event:
    """An event to record: its name, and what it tells."""

    name: str
    about: Mapping[str, Any]


class RequestRefused(ValueError):
    """A command to a running run can't be carried out; the message is one line. The run goes on as it was."""


class RunState(StrEnum):
    """States of a run (docs: ``DESIGN`` 8). The metrics export the same names."""

    PENDING = "PENDING"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    RESCALING = "RESCALING"
    CHECKPOINTING = "CHECKPOINTING"
    STOPPING = "STOPPING"
    DONE = "DONE"
    FAILED = "FAILED"


_S = RunState
TRANSITIONS: Mapping[RunState, frozenset[RunState]] = {
    _S.PENDING: frozenset({_S.STARTING, _S.STOPPING, _S.FAILED}),
    # A worker lost while the first group forms: the next try is a rescale. One step may be all that is left to do.
    _S.STARTING: frozenset({_S.RUNNING, _S.RESCALING, _S.CHECKPOINTING, _S.STOPPING, _S.FAILED}),
    _S.RUNNING: frozenset({_S.RESCALING, _S.CHECKPOINTING, _S.STOPPING, _S.FAILED}),
    _S.RESCALING: frozenset({_S.RUNNING, _S.CHECKPOINTING, _S.STOPPING, _S.FAILED}),
    # DONE comes from the last checkpoint only, so that a run is never done without one.
    _S.CHECKPOINTING: frozenset({_S.RUNNING, _S.RESCALING, _S.STOPPING, _S.DONE, _S.FAILED}),
    # A stop may meet the last step: then all is done, and the last checkpoint is made.
    _S.STOPPING: frozenset({_S.CHECKPOINTING, _S.DONE, _S.FAILED}),
    _S.DONE: frozenset(),
    _S.FAILED: frozenset(),
}
"""Which state may follow which. A restarted controller begins anew at PENDING, then takes up the state that it finds."""

FINAL = frozenset({_S.DONE, _S.FAILED})


def check_transition(before: RunState, after: RunState) -> RunState:
    """``after``, if it may follow ``before``.

    Raises:
        ValueError: it may not: a bug of the controller.
    """
    if after not in TRANSITIONS[before]:
        allowed = ", ".join(sorted(TRANSITIONS[before])) or "nothing: it is final"
        raise ValueError(f"a run that is {before} can't become {after}; allowed: {allowed}")
    return after


@dataclass(frozen=True)
class Bounds:
    """Longest waits of the controller, in seconds. Collectives have a bound of their own (``elastic.collective_timeout_s``).

    Attributes:
        start: for workers to be placed and warm (``elastic.start_timeout_s``).
        park: from the first sign that a generation is over until every member is out of it; slow steps extend it.
        call: for a call to an actor that only notes something.
        save: for the workers to write a checkpoint that the controller ordered, the last one or that of a stop, and for its commit
            (``checkpoint.last_timeout_s``).
        silence: a worker that answers no poll for this long is hung or stopped: killed; None takes the collectives' bound.
        replace: for a replacement when there are too few workers to train (``elastic.start_timeout_s``).
        storage: for the checkpoints' storage to answer where no worker holds a state; and for the run's folder, where the controller was
            started again.
    """

    start: float = 180.0
    park: float = 3.0
    call: float = 10.0
    save: float = 600.0
    silence: float | None = None
    replace: float = 180.0
    storage: float = 600.0

    @classmethod
    def of(cls, config: RunConfig) -> Bounds:
        start = config.elastic.start_timeout_s
        return cls(start=start, replace=start, save=config.checkpoint.last_timeout_s)


class Dismissal(StrEnum):
    """Result of ending a worker."""

    ENDED = "ended"
    """It was sent SIGKILL, or Ray was told where its process is not known."""
    GONE = "gone"
    """Its process had ended before."""
    UNKNOWN = "unknown"
    """Its node does not answer."""


@dataclass(frozen=True)
class Places:
    """State of the run's placement groups.

    Attributes:
        wishes: of those without a worker, the node of each; None: it waits.
        unplaced: workers that wait for a place.
    """

    wishes: tuple[str | None, ...] = ()
    unplaced: frozenset[str] = frozenset()


@dataclass(frozen=True)
class StateSource:
    """The origin and the step of a new generation's state.

    Attributes:
        commit: name of the checkpoint, for ``Origin.CHECKPOINT``.
        path: its path, for people.
        resume: what the workers hold (``vescale_ray.workers.resharding.held_state.Resume``), for ``Origin.MEMORY``.
        copies: some shards come from the copy in another worker's memory, because their owner is gone.
    """

    origin: Origin
    step: int
    commit: str | None = None
    path: str | None = None
    resume: Any = None
    copies: bool = False


@dataclass(frozen=True)
class World:
    """A generation: its ticket, its members in rank order, and where its state comes from."""

    ticket: Ticket
    members: tuple[str, ...]
    source: StateSource

    @property
    def size(self) -> int:
        return len(self.members)


@dataclass(frozen=True)
class Ending:
    """The end of a generation, after all living workers have left it.

    Attributes:
        living: members that are alive and out of their group, in the old rank order.
        lost: members that died or had to be killed, each with the reason; ``causes``: the same in a word (``budget.Cause``).
        faults: of the living, by worker.
        finished: every member that lives has completed the last step of the run.
    """

    living: tuple[str, ...]
    lost: Mapping[str, str] = field(default_factory=dict)
    faults: Mapping[str, WorkerFault] = field(default_factory=dict)
    finished: bool = False
    causes: Mapping[str, str] = field(default_factory=dict)

    @property
    def clean(self) -> bool:
        """It ended at a boundary that all agreed on: nobody was lost, nothing failed."""
        return not self.lost and not self.faults


@dataclass(frozen=True)
class ScheduledAction:
    """Something to do to the run once ``step`` steps are completed: for demonstrations and tests, by the means that anyone has.

    Attributes:
        action: ``kill`` sends SIGKILL to the worker of rank ``value``, ``pause`` SIGSTOP; ``rescale`` asks for ``value`` workers;
            ``stop`` ends the run after a checkpoint.
    """

    step: int
    action: Literal["kill", "pause", "rescale", "stop"]
    value: int = 0

    def __post_init__(self) -> None:
        if self.step < 0 or self.value < 0 or self.action not in ("kill", "pause", "rescale", "stop"):
            raise RunRefused(f"{self}: give kill, pause, rescale or stop, and numbers from 0 on")


@dataclass(frozen=True)
class Outcome:
    """The end of a run.

    Attributes:
        state: ``DONE``, ``STOPPED`` (before its last step, on request) or ``FAILED``.
        refused: the failure is the person's input: exit code 2.
        orphaned: the supervisor was lost, and all workers with it: nothing is wrong with the run, which can begin again from its
            checkpoint.
    """

    state: Literal["DONE", "STOPPED", "FAILED"]
    step: int
    error: str | None = None
    checkpoint: str | None = None
    refused: bool = False
    orphaned: bool = False


@dataclass(frozen=True)
class RunSpec:
    """The driver's order to the controller. Picklable; a restarted controller gets the same.

    Attributes:
        run_id: of this start of the run, unlike any other.
        config: resolved configuration as nested plain values.
        folder: the run's folder, absolute.
        token: that commands must bring.
        source: of the first generation.
        first_generation: number of it; above every generation that has left a checkpoint.
        oldest: generation of the oldest checkpoint that the run may go back to
            (:class:`~vescale_ray.controller.driver.preflight.Preflight`).
        capacity: most workers that the cluster can ever place; None: unknown, it may grow.
        driver_pid: for run.json.
        stream: what makes the order of samples, recorded with each checkpoint.
    """

    run_id: str
    config: Mapping[str, Any]
    folder: str
    token: str
    source: StateSource
    first_generation: int
    capacity: int | None
    driver_pid: int
    stream: Mapping[str, Any]
    schedule: tuple[ScheduledAction, ...] = ()
    bounds: Bounds = Bounds()
    oldest: int = 0
