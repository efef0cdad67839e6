"""Phases of a unit and its groups, and the allowed transitions: a misuse raises at the line that causes it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Phase(Enum):
    """The pass that a unit is in."""

    RESTING = "resting"
    """Between passes: before forward, between forward and backward, after backward."""
    FORWARD = "forward"
    """From the pre-forward hook to the post-forward hook; for a list of modules, to the last module's."""
    BACKWARD = "backward"
    """From the first gradient of an output to the gradients of the inputs."""
    RECOMPUTE = "recompute"
    """A forward inside backward: activation checkpointing runs the module again."""


class Residency(Enum):
    """The form in which the modules hold a group's parameters."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    """An all-gather is under way; the modules still hold the sharded parameters."""
    UNSHARDED = "unsharded"
    """The modules hold the full parameters."""


class Retain(Enum):
    """The gathered parameters that a group keeps until the next optimizer step."""

    NOTHING = "nothing"
    PART = "part"
    """A part of the group's parameters. The ranks of the subgroup together keep all of them."""
    ALL = "all"


_ALLOWED = {
    Phase.RESTING: {Phase.FORWARD, Phase.BACKWARD, Phase.RECOMPUTE},
    Phase.FORWARD: {Phase.RESTING},
    Phase.BACKWARD: {Phase.RESTING, Phase.RECOMPUTE},
    Phase.RECOMPUTE: {Phase.RESTING, Phase.BACKWARD},
}

_WHY = {
    (Phase.FORWARD, Phase.BACKWARD): "a backward reached it although its forward has not returned",
    (Phase.BACKWARD, Phase.FORWARD): "a forward starts although its backward has not ended (did the last backward raise an exception?)",
    (Phase.RECOMPUTE, Phase.FORWARD): "a forward starts in the middle of a recomputation (did the last backward raise an exception?)",
}


@dataclass
class StepEnd:
    """State of the end of a step on one root: which backward waits for all reductions, and whether the user ends the step by hand."""

    is_last: bool = True
    by_hand: bool = False
    active: bool | None = None
    """Value of ``by_hand`` when the step's first backward started; None between steps."""
    pending: bool = False
    """True if ``finalize_backward(async_op=True)`` was called and its handle still has to be waited on."""
    step: int = 0
    """Number of finished steps; a handle is valid for one."""

    def begin(self) -> None:
        """Record that a backward starts."""
        if self.active is None:
            self.active = self.by_hand

    def over(self) -> None:
        """End the step: its gradients are delivered or lost."""
        self.active, self.pending, self.step = None, False, self.step + 1


class PhaseError(RuntimeError):
    """A call that the unit's phase does not allow."""


def check_transition(unit: str, old: Phase, new: Phase) -> None:
    """Raise :class:`PhaseError` if a unit can't go from ``old`` to ``new``."""
    if new not in _ALLOWED[old]:
        why = _WHY.get((old, new), f"it can't go from phase {old.value} to phase {new.value}")
        raise PhaseError(f"unit {unit!r}: {why}; after an exception in a step, call reset_iter_state() on the root module")
