"""The actions that transitions of the control loop return: frozen values, which ``executor`` performs in their order.

``protocol.Event`` (record it) and ``connectivity.Probe`` (have workers try connections) are actions, too. A question is an action with an
answer. The loop repeats the transition once ``Observations`` has the answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vescale_ray.controller.failures.budget import Budget
from vescale_ray.controller.failures.connectivity import CutOff, Probe
from vescale_ray.controller.protocol import Ending, Event, RunState, World
from vescale_ray.workers.messages import Ticket


class LoopAction:
    """Base class of this module's actions."""


class Question(LoopAction):
    """Base class of actions that have an answer."""


Action = LoopAction | Event | Probe


@dataclass(frozen=True)
class Hire(LoopAction):
    """Hire a worker, on none of the nodes to ``avoid``."""

    avoid: frozenset[str] = frozenset()


@dataclass(frozen=True)
class RequestPlaces(LoopAction):
    """Keep ``count`` places for workers that are not hired yet, on none of the nodes to ``avoid``; None takes all places back."""

    count: int | None
    avoid: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Dismiss(LoopAction):
    """End a worker. No news of it follows. ``tell``: record that the worker has left."""

    worker: str
    tell: bool = True


@dataclass(frozen=True)
class End(LoopAction):
    """End workers, each for a reason. News of each loss follows.

    Attributes:
        world: the workers' generation. A hang report gives the position of each member.
        cut: the workers are cut off, not hung.
    """

    reasons: Mapping[str, str]
    world: World | None = None
    cut: CutOff | None = None


@dataclass(frozen=True)
class ExcludeNode(LoopAction):
    """Start no worker on this node for a while."""

    node: str


@dataclass(frozen=True)
class Fence(LoopAction):
    """Close a generation for these workers."""

    workers: tuple[str, ...]
    ticket: Ticket


@dataclass(frozen=True)
class Ask(LoopAction):
    """Have one member carry ``flags`` into the next step, where all ranks see them. If a member accepts the flags, perform ``then``.

    Attributes:
        auto: the checkpoint is due by the interval of ``checkpoint.every: auto``.
    """

    world: World
    flags: int
    then: tuple[Action, ...] = ()
    auto: bool = False


@dataclass(frozen=True)
class Launch(LoopAction):
    """Order a new generation. Its number is in the durable state before any worker gets it.

    Attributes:
        givers: workers outside the generation that give shards to it.
        evaluate: whether the members evaluate before their first step.
        fence_s: seconds that the end of the last generation took.
        numbered_by: basis of the rank assignment: the planned layouts, or equal intervals if the layouts were not known yet.
    """

    world: World
    givers: tuple[str, ...]
    evaluate: bool
    fence_s: float
    numbered_by: str


@dataclass(frozen=True)
class Conclude(LoopAction):
    """Give up the checkpoints of a generation that is over, because the votes that they lack will not come.

    Attributes:
        failed: the generation has failed, so its evidence is kept.
        damaged: name of a checkpoint that is damaged. The run then uses an older one.
    """

    world: World
    ending: Ending
    failed: bool = False
    damaged: str | None = None


@dataclass(frozen=True)
class TakeOver(LoopAction):
    """Take over the workers of an earlier controller, and the generation that it has launched, if any."""

    world: World | None


@dataclass(frozen=True)
class Enter(LoopAction):
    """Move the run to another state."""

    state: RunState


@dataclass(frozen=True)
class BeginRescale(LoopAction):
    """Record the first sign of a rescale of a generation of ``before`` workers."""

    reason: str
    before: int


@dataclass(frozen=True)
class EndRescale(LoopAction):
    """Record that the run has ended before the rescale under way, if there is one."""


@dataclass(frozen=True)
class Note(LoopAction):
    """Change fields of the durable state. With ``write``, the state is written at once; otherwise the next write includes them."""

    fields: Mapping[str, Any]
    write: bool = False


@dataclass(frozen=True)
class Spend(LoopAction):
    """Replace the failure budget by one that counts further failures."""

    budget: Budget


@dataclass(frozen=True)
class AskStarved(Question):
    """Ask for how long these workers got no processor. The answer is the seconds of silence that are excused, by worker."""

    workers: tuple[str, ...]


@dataclass(frozen=True)
class SaveParked(Question):
    """Make a checkpoint of the newest state that these workers hold together (``CheckpointCoordinator.save``).

    The answer is the result, or None if no checkpoint is needed."""

    workers: tuple[str, ...]
    only_newer: bool = False


@dataclass(frozen=True)
class FindCheckpoint(Question):
    """Ask for the newest checkpoint (``CheckpointCoordinator.newer``).

    If ``holders`` are given, the answer is None if no checkpoint is newer than the state of these workers. It is an OSError if none of them
    holds a state and the storage is out of reach."""

    holders: tuple[str, ...] | None = None


@dataclass(frozen=True)
class WriteEvidence(Question):
    """Write the evidence of the last failures. The answer is its path, or None if there is none."""
