"""The failure budget of a run: recoveries, counted by cause, after which it is given up. A value, without clock or process.

A run that makes no progress in spite of its recoveries must end itself, because its owner sees only that it "runs". But it must be at
fault. So a crash loop and a cluster that takes nodes away have different limits. Only a step beyond all earlier steps counts as progress. A
run that goes back to a checkpoint and dies at the same step each time makes none.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from vescale_ray.config import ElasticSection


class Cause(StrEnum):
    """Why a generation, or the controller, ended before its time.

    ========== =====================================================================================================
    ERROR      a worker raised: a bug, out of memory, damaged data
    KILLED     a worker's process ended: ``os._exit``, a signal, the machine's or Ray's memory monitor
    HANG       a worker made no progress and was ended, or a collective failed though nobody was lost
    NODE       its node was lost, was about to go, does not answer, or is not reached by the others'
    CONTROLLER the controller was restarted
    ========== =====================================================================================================
    """

    ERROR = "error"
    KILLED = "killed"
    HANG = "hang"
    NODE = "node"
    CONTROLLER = "controller"


CRASHES = frozenset({Cause.ERROR, Cause.KILLED, Cause.HANG})
"""One crash loop may show all of them: out of memory is an error here, a kill there, and a hang where nobody notices."""


@dataclass(frozen=True)
class Limits:
    """Most failures that a run survives. Without a new step between them: ``crashes`` of all kinds, ``nodes``, ``controllers``. Altogether,
    by cause: ``total``; a cause that is not in it has no limit."""

    crashes: int
    nodes: int
    controllers: int
    total: Mapping[Cause, int] = field(default_factory=dict)

    @classmethod
    def of(cls, elastic: ElasticSection) -> Limits:
        total = {Cause.ERROR: elastic.max_errors, Cause.KILLED: elastic.max_kills, Cause.HANG: elastic.max_hangs}
        return cls(
            elastic.max_recoveries_without_progress,
            elastic.max_node_losses_without_progress,
            elastic.max_controller_restarts_without_progress,
            {cause: limit for cause, limit in total.items() if limit is not None},
        )


@dataclass(frozen=True)
class Budget:
    """The failures so far.

    Attributes:
        crashes, nodes, controllers: in a row, since the last progress.
        total: since the start, by cause.
        high: most steps that were ever completed.
        errors: what happened, newest last.
    """

    limits: Limits
    crashes: int = 0
    nodes: int = 0
    controllers: int = 0
    total: Mapping[Cause, int] = field(default_factory=dict)
    high: int = 0
    errors: tuple[str, ...] = ()

    @property
    def tries(self) -> int:
        """Generations in a row that brought no step."""
        return self.crashes + self.nodes

    def progressed(self, step: int) -> Budget:
        """After ``step`` steps are complete."""
        return replace(self, crashes=0, nodes=0, controllers=0, high=step, errors=()) if step > self.high else self

    def failed(self, causes: Collection[Cause], errors: Sequence[str]) -> Budget:
        """After one failure with these causes, each counted once however many workers it took. A crash beside the loss of a node is a
        crash; the loss of a node alone is none."""
        total = {cause: self.total.get(cause, 0) + (cause in causes) for cause in Cause}
        crash = not CRASHES.isdisjoint(causes)
        return replace(
            self,
            crashes=self.crashes + crash,
            nodes=self.nodes + (not crash and Cause.NODE in causes),
            controllers=self.controllers + (Cause.CONTROLLER in causes),
            total={cause: count for cause, count in total.items() if count},
            errors=(*self.errors, *errors)[-8:],
        )

    def figures(self) -> dict[str, Any]:
        """Fields of the snapshot."""
        in_a_row = {"crash": self.crashes, "node": self.nodes, "controller": self.controllers}
        return {"failures": {str(cause): count for cause, count in self.total.items()}, "failures_in_a_row": in_a_row}

    @property
    def verdict(self) -> str | None:
        """Why the run is to be given up, in one line; None: it is not."""
        limits, why = self.limits, f": {'; '.join(dict.fromkeys(self.errors)) or 'unknown'}"
        if self.crashes > limits.crashes:
            return f"{self.crashes} recoveries in a row without one more step{why}"
        if self.nodes > limits.nodes:
            bound = f"elastic.max_node_losses_without_progress = {limits.nodes}"
            return f"nodes were lost {self.nodes} times in a row without one more step ({bound}){why}"
        if self.controllers > limits.controllers:
            bound = f"elastic.max_controller_restarts_without_progress = {limits.controllers}"
            return f"the controller was restarted {self.controllers} times without one more step ({bound})"
        for cause, key in ((Cause.ERROR, "max_errors"), (Cause.KILLED, "max_kills"), (Cause.HANG, "max_hangs")):
            if cause in limits.total and self.total.get(cause, 0) > limits.total[cause]:
                words = {Cause.ERROR: "errors of workers", Cause.KILLED: "killed workers", Cause.HANG: "hangs"}[cause]
                return f"{self.total[cause]} {words}, more than elastic.{key} = {limits.total[cause]}{why}"
        return None
