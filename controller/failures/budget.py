"""The failure budget of a run: how many recoveries of each cause it may take. A value, without clock or process.

A run that recovers again and again without progress must end itself, because its owner sees only that it "runs". But a cluster that takes
nodes away is not the run's fault. So lost nodes and crash loops have different limits. Only a step beyond all earlier steps counts as
progress: a run that goes back to a checkpoint and dies at the same step each time makes none.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from vescale_ray.config import ElasticSection


class Cause(StrEnum):
    """Cause of the early end of a generation, or of the controller.

    ========== =====================================================================================================
    ERROR      a worker raised: a bug, out of memory, damaged data
    KILLED     a worker's process ended: ``os._exit``, a signal, the machine's or Ray's memory monitor
    HANG       a worker made no progress and was ended, or a collective failed though all workers live
    NODE       the worker's node was lost, drains, does not answer, or is cut off from the other nodes
    CONTROLLER the controller was restarted
    ========== =====================================================================================================
    """

    ERROR = "error"
    KILLED = "killed"
    HANG = "hang"
    NODE = "node"
    CONTROLLER = "controller"


CRASHES = frozenset({Cause.ERROR, Cause.KILLED, Cause.HANG})
"""Causes that count together, because one crash loop may show all three: lack of memory may raise an error, kill a process or hang a
worker."""


@dataclass(frozen=True)
class Limits:
    """Largest numbers of failures that a run survives.

    ``crashes``, ``nodes`` and ``controllers`` limit failures in a row, without a new step between them. ``total`` limits all failures of
    the run, by cause; a cause without an entry has no limit.
    """

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
        crashes, nodes, controllers: failures in a row, since the last progress.
        total: failures since the start, by cause.
        high: largest number of steps that were ever completed.
        errors: texts of the latest failures since the last progress, newest last.
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
        """Number of failed generations in a row, without a new step between them."""
        return self.crashes + self.nodes

    def progressed(self, step: int) -> Budget:
        """Return the budget once ``step`` steps are complete."""
        return replace(self, crashes=0, nodes=0, controllers=0, high=step, errors=()) if step > self.high else self

    def failed(self, causes: Collection[Cause], errors: Sequence[str]) -> Budget:
        """Return the budget after one failure with these causes.

        Each cause counts once, however many workers were lost. A crash together with the loss of a node counts as a crash; the loss of a
        node alone does not."""
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
        """Return the fields of the snapshot."""
        in_a_row = {"crash": self.crashes, "node": self.nodes, "controller": self.controllers}
        return {"failures": {str(cause): count for cause, count in self.total.items()}, "failures_in_a_row": in_a_row}

    @property
    def verdict(self) -> str | None:
        """The reason to give the run up, in one line; None if it may go on."""
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
