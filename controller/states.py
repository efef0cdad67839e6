"""States of the control loop: frozen values. ``control_loop`` has the transitions between them.

Times are those of ``time.monotonic``, except ``first_sign`` and ``missing_since``, which are those of the worker group's clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from vescale_ray.controller.actions import Action
from vescale_ray.controller.checkpointing.committer import SaveResult
from vescale_ray.controller.protocol import Ending, Outcome, World


@dataclass(frozen=True)
class Starting:
    """The loop has not begun."""


@dataclass(frozen=True)
class Gathering:
    """The run's first workers start.

    Attributes:
        deadline: the run begins at this time at the latest, with the workers that are warm by then.
    """

    deadline: float


@dataclass(frozen=True)
class Adopting:
    """A restarted controller waits for the members of the generation that an earlier controller has launched.

    Attributes:
        until: the loop goes on at this time, with the members that have answered by then.
        outline_until: the loop then waits until this time for the outline of the layouts; None before.
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
        first_sign: time of the first sign that the generation ends; None: there is none.
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
    """A collective has failed though every member lives: the members try their connections to each other.

    Attributes:
        living: members that have left the generation.
        leavers: workers that were to give shards to it.
        until: the wait ends at this time. Without a result by then, no worker counts as cut off.
        ended: the workers that are cut off were ended.
    """

    generation: Running
    living: tuple[str, ...]
    leavers: tuple[str, ...]
    until: float
    ended: bool = False


@dataclass(frozen=True)
class Recovering:
    """A generation has ended: the policy decides what follows.

    Attributes:
        waited: the time to wait for workers is over.
        unreached: time since which the checkpoints' storage has been out of reach while no worker holds a state; None: it is in reach, or
            was not asked.
        until: the wait for standbys, which take the places of lost workers, ends at this time; None: none were hired yet.
    """

    ended: Ending
    waited: bool = False
    unreached: float | None = None
    until: float | None = None


@dataclass(frozen=True)
class Locating:
    """The next generation is decided. The controller locates the state that it starts from.

    Attributes:
        members, leavers: members of the next generation, and living workers that are not in it.
        leaving: workers that leave in any case.
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
        workers: number of workers needed, survivors included.
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
    """The reason why parked workers write a checkpoint."""

    LAST = "last"
    """All steps are done."""
    STOP = "stop"
    """The run was asked to stop."""
    FAILURE = "failure"
    """The run has failed."""
    DRAIN = "drain"
    """The node of a parked worker is about to go."""


@dataclass(frozen=True)
class Checkpointing:
    """Parked workers write a checkpoint.

    Attributes:
        workers: workers that may hold a part of the state.
        error: for ``Goal.FAILURE``, why the run has failed.
        refused: the user's input caused the failure.
        then: for ``Goal.DRAIN``, the wait to go on with.
    """

    ended: Ending
    goal: Goal
    workers: tuple[str, ...]
    error: str = ""
    refused: bool = False
    then: Waiting | None = None


@dataclass(frozen=True)
class Concluding:
    """The run is over, and the controller looks up the name of its newest checkpoint.

    Attributes:
        result: result of the checkpoint that a stop has made; None: no checkpoint was needed.
        error: why the run has failed; None: it was stopped.
        refused: the user's input caused the failure.
        hint: whether the error message names the checkpoint from which the run can resume.
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
Step = tuple[State, Sequence[Action]]
"""The state that follows, and the actions on the way."""
