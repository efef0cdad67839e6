"""What a unit and its groups are doing, and which changes make sense: misuse fails at the line that misuses."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Phase(Enum):
    """What pass a unit is in."""

    RESTING = "resting"
    """Between passes: before forward, between forward and backward, after backward."""
    FORWARD = "forward"
    """From the pre-forward hook to the post-forward hook (of the last module, for a list of modules)."""
    BACKWARD = "backward"
    """From the first gradient of one of its outputs to the gradients of its inputs."""
    RECOMPUTE = "recompute"
    """A forward inside backward: activation checkpointing runs the module again."""


class Residency(Enum):
    """Where the parameters of a group are."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    """An all-gather is under way; the modules still hold the sharded parameters."""
    UNSHARDED = "unsharded"
    """The modules hold the full parameters."""


class Retain(Enum):
    """What of the gathered parameters stays until the next optimizer step."""

    NOTHING = "nothing"
    PART = "part"
    """This rank's part of its subgroup's."""
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
class Ending:
    """The end of a root's backwards: which of them waits for all reductions, and whether the user calls ``finalize_backward()``."""

    is_last: bool = True
    by_hand: bool = False
    active: bool | None = None
    """``by_hand`` as it was when the first backward of the step started; None between steps."""
    pending: bool = False
    """``finalize_backward(async_op=True)`` was called, and its handle was not waited on."""
    step: int = 0
    """Counts steps that are over: a handle is good for one."""

    def begin(self) -> None:
        """A backward starts."""
        if self.active is None:
            self.active = self.by_hand

    def over(self) -> None:
        """The step's gradients are delivered, or lost."""
        self.active, self.pending, self.step = None, False, self.step + 1


class PhaseError(RuntimeError):
    """A unit was asked for something that its phase does not allow."""


def check_transition(unit: str, old: Phase, new: Phase) -> None:
    """Raise :class:`PhaseError` if a unit can't go from ``old`` to ``new``."""
    if new not in _ALLOWED[old]:
        why = _WHY.get((old, new), f"it can't go from phase {old.value} to phase {new.value}")
        raise PhaseError(f"unit {unit!r}: {why}; after an exception in a step, call reset_iter_state() on the root module")
