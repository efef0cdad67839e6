"""States of the control loop: frozen values. ``control_loop`` says what follows which.

Times are those of ``time.monotonic``, except ``first_sign`` and ``missing_since``, which are of the worker group's clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from vescale_ray.controller.checkpointing.committer import SaveResult
from vescale_ray.controller.protocol import Ending, Outcome, World


@dataclass(frozen=True)
class Starting:
    """The loop has not begun."""


@dataclass(frozen=True)
class Gathering:
    """The run's first workers start.

    Attributes:
        deadline: the run goes on with the workers that are warm by then.
    """

    deadline: float


@dataclass(frozen=True)
class Adopting:
    """A restarted controller hears the members of the generation that an earlier one has launched.

    Attributes:
        until: the loop goes on with those that have answered by then.
        outline_until: all have answered, or are gone. The loop waits until then for the outline of the layouts.
    """

    world: World
    until: float
    outline_until: float | None = None


@dataclass(frozen=True)
class Running:
    """A generation: from the orders to form it until no living worker is in it.

    Attributes:
        gave: leavers that have given their shards.
        missing_since: when a leaver was found lost, or failed, before it gave its shards.
        first_sign: when the first sign was seen that the generation ends; None: there is none.
        broken: the generation was closed, because a member or a leaver is lost or has failed.
        cut_short: a stop has ended it before its members had their state.
    """

    world: World
    gave: frozenset[str] = frozenset()
    missing_since: float | None = None
    first_sign: float | None = None
    broken: bool = False
    cut_short: bool = False


@dataclass(frozen=True)
class Partitioned:
    """A collective has failed though every member lives: the nodes' connections are tried.

    Attributes:
        living: members that have left the generation.
        leavers: workers that were to give shards to it.
        until: nobody is cut off if that is not known by then.
    """

    generation: Running
    living: tuple[str, ...]
    leavers: tuple[str, ...]
    until: float


@dataclass(frozen=True)
class Recovering:
    """A generation has ended: the policy decides what follows.

    Attributes:
        waited: the time to wait for workers is over.
        unreached: since when the checkpoints' storage is out of reach while no worker holds a state.
    """

    ended: Ending
    waited: bool = False
    unreached: float | None = None


@dataclass(frozen=True)
class Locating:
    """The next generation is decided: the state that it starts from is located.

    Attributes:
        members, leavers: as in ``policy.Go``.
        leaving: of those that the decision was about, workers that leave whatever else is wanted.
        unreached: as in :class:`Recovering`.
    """

    ended: Ending
    members: tuple[str, ...]
    leavers: tuple[str, ...]
    leaving: frozenset[str] = frozenset()
    unreached: float | None = None


@dataclass(frozen=True)
class AwaitingStorage:
    """The storage was out of reach: it is asked again at ``until``."""

    ended: Ending
    until: float
    unreached: float


@dataclass(frozen=True)
class Waiting:
    """There are too few workers to train.

    Attributes:
        workers: number that is needed, survivors included.
        hire: workers to hire in the next round.
        since: when the wait began.
        told_of: workers on draining nodes, whose state was saved.
        unreached: as in :class:`Recovering`.
    """

    ended: Ending
    workers: int
    hire: int
    since: float
    told_of: frozenset[str] = frozenset()
    unreached: float | None = None


class Goal(StrEnum):
    """Why a checkpoint of what parked workers hold is written."""

    LAST = "last"
    """All steps are done."""
    STOP = "stop"
    """The run was asked to stop."""
    FAILURE = "failure"
    """The run has failed."""
    DRAIN = "drain"
    """The node of one that waits is about to go."""


@dataclass(frozen=True)
class Checkpointing:
    """Parked workers write a checkpoint.

    Attributes:
        workers: those that may hold a part of the state.
        error: of ``Goal.FAILURE``: why the run has failed.
        then: of ``Goal.DRAIN``: the wait that goes on.
    """

    ended: Ending
    goal: Goal
    workers: tuple[str, ...]
    error: str = ""
    then: Waiting | None = None


@dataclass(frozen=True)
class Concluding:
    """The run is over but for the name of its newest checkpoint.

    Attributes:
        result: of the checkpoint that a stop has made; None: none had to be made.
        error: why the run has failed; None: it was stopped.
        refused: the input is the reason.
        hint: the error names the checkpoint that the run can be resumed from.
    """

    result: SaveResult | None = None
    error: str | None = None
    refused: bool = False
    hint: bool = False


@dataclass(frozen=True)
class Finished:
    """The run is over."""

    outcome: Outcome


State = (
    Starting
    | Gathering
    | Adopting
    | Running
    | Partitioned
    | Recovering
    | Locating
    | AwaitingStorage
    | Waiting
    | Checkpointing
    | Concluding
    | Finished
)
