"""Run states, the transitions between them, and the values that the controller's parts exchange.

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
    """The run can't begin or go on with the user's input; the message is one line with the remedy. Exit code 2."""


@dataclass(frozen=True)
class Event:
    """An event to record: its name and its fields."""

    name: str
    about: Mapping[str, Any]


class RequestRefused(ValueError):
    """A command to a running run can't be carried out; the message is one line. The run continues unchanged."""


class RunState(StrEnum):
    """States of a run (see :data:`TRANSITIONS`). The metrics export the same names."""

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
    # RESCALING: a worker was lost while the first group formed. CHECKPOINTING: only one step was left.
    _S.STARTING: frozenset({_S.RUNNING, _S.RESCALING, _S.CHECKPOINTING, _S.STOPPING, _S.FAILED}),
    _S.RUNNING: frozenset({_S.RESCALING, _S.CHECKPOINTING, _S.STOPPING, _S.FAILED}),
    _S.RESCALING: frozenset({_S.RUNNING, _S.CHECKPOINTING, _S.STOPPING, _S.FAILED}),
    # DONE comes from the last checkpoint only, so that a run is never done without one.
    _S.CHECKPOINTING: frozenset({_S.RUNNING, _S.RESCALING, _S.STOPPING, _S.DONE, _S.FAILED}),
    # If a stop comes with the last step, all steps are done, and the last checkpoint is written.
    _S.STOPPING: frozenset({_S.CHECKPOINTING, _S.DONE, _S.FAILED}),
    _S.DONE: frozenset(),
    _S.FAILED: frozenset(),
}
"""The states that may follow each state. A restarted controller begins at PENDING, then takes up the state that it finds."""

FINAL = frozenset({_S.DONE, _S.FAILED})


def check_transition(before: RunState, after: RunState) -> RunState:
    """Return ``after``, if it may follow ``before``.

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
        silence: until a worker that answers no poll counts as hung or stopped, and is killed; None takes the collectives' bound.
        replace: for a replacement when there are too few workers to train (``elastic.start_timeout_s``).
        storage: for the checkpoints' storage to answer if no worker holds a state, and for the run's folder after a restart of the
            controller.
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
    """The process was sent SIGKILL. If the process is not known, Ray ends it."""
    GONE = "gone"
    """The process had ended before."""
    UNKNOWN = "unknown"
    """The worker's node does not answer."""


@dataclass(frozen=True)
class Places:
    """State of the run's placement groups.

    Attributes:
        requests: the node of each group without a worker; None if the group waits for a place.
        unplaced: workers that wait for a place.
    """

    requests: tuple[str | None, ...] = ()
    unplaced: frozenset[str] = frozenset()


@dataclass(frozen=True)
class StateSource:
    """The origin and the step of a new generation's state.

    Attributes:
        commit: name of the checkpoint, for ``Origin.CHECKPOINT``.
        path: its path, for people.
        resume: what the workers hold (``vescale_ray.workers.resharding.held_state.Resume``), for ``Origin.MEMORY``.
        lender: whose memory has the shards of lost workers: ``replica`` if every shard has an owner left, else ``peer`` (a copy). None: no
            owner is lost.
    """

    origin: Origin
    step: int
    commit: str | None = None
    path: str | None = None
    resume: Any = None
    lender: Literal["peer", "replica"] | None = None


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
        lost: members that died or had to be killed, each with the reason; ``causes``: the cause of each (``budget.Cause``).
        faults: faults of living members, by worker.
        finished: every member that lives has completed the last step of the run.
        seconds: time from the first sign of the end; 0 if no rescale was under way.
    """

    living: tuple[str, ...]
    lost: Mapping[str, str] = field(default_factory=dict)
    faults: Mapping[str, WorkerFault] = field(default_factory=dict)
    finished: bool = False
    causes: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def clean(self) -> bool:
        """Return whether the generation ended at an agreed step boundary, without losses and faults."""
        return not self.lost and not self.faults


@dataclass(frozen=True)
class ScheduledAction:
    """An action on the run once ``step`` steps are completed, for demonstrations and tests. It uses signals and commands as a user could.

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
        refused: the user's input caused the failure: exit code 2.
        orphaned: the supervisor was lost, and all workers with it. The run itself is sound and can begin again from its checkpoint.
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
        run_id: unique id of this start of the run.
        config: resolved configuration as nested plain values.
        folder: the run's folder, absolute.
        token: secret that commands must carry.
        source: source of the first generation's state.
        first_generation: number of the first generation, above every generation that has left a checkpoint.
        oldest: generation of the oldest checkpoint that the run may go back to
            (:class:`~vescale_ray.controller.driver.preflight.Preflight`).
        capacity: largest number of workers that the cluster can ever place; None: unknown, it may grow.
        driver_pid: process id of the driver, for run.json.
        stream: values that determine the order of samples, recorded with each checkpoint.
        bytes_per_token: mean bytes of text of a token of the training data; None: unknown.
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
    bytes_per_token: float | None = None
