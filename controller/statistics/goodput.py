"""Goodput: where the run's time went, into steps that count or into losses by cause.

Every second since the run began is in exactly one account, so the accounts add up to the wall time. An interval that ends with a step is
productive for the duration of the step; the time before the step is lost to the cause that was known by then. A step that was done before
(after a rollback, or when a rank died in it) counts as lost when it is done again.

No account ever falls: the open interval since :attr:`Goodput.until` is left out until its cause is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class Loss(StrEnum):
    """Causes of lost time."""

    STARTUP = "startup"
    """From the beginning to the first step: workers, model, checkpoint, the first evaluation."""
    FAILURE = "failure"
    """From the last complete step before a failure to the next step, including the step that was under way."""
    RESCALE = "rescale"
    """From the last complete step before a requested change of workers to the next step."""
    WAITING = "wait_for_workers"
    """There were too few workers to go on."""
    REPLAY = "replay"
    """Steps that had been done before."""
    CHECKPOINT = "checkpoint"
    """Training waited for the copy of its state, or for the last checkpoint."""
    COPY = "peer_copy"
    """Training waited for the copy that goes to another worker."""
    EVALUATION = "evaluation"
    STALL = "stall"
    """Time between two steps without any of these causes."""
    SHUTDOWN = "shutdown"


@dataclass
class Goodput:
    """The accounts of the run's time. :meth:`to_json` returns them as JSON values.

    Attributes:
        since: when the run began; seconds since the epoch, as all times here.
        until: the time before it is accounted for.
        productive: seconds in steps that count.
        lost: seconds by cause.
        cause: cause of the loss after ``until``; None: a step is under way, as far as is known.
    """

    since: float
    until: float
    productive: float = 0.0
    lost: dict[str, float] = field(default_factory=dict)
    cause: Loss | None = Loss.STARTUP

    @classmethod
    def beginning(cls, now: float) -> Goodput:
        return cls(now, now)

    def step(self, ended: float, seconds: float, *, again: bool, between: Mapping[str, float]) -> None:
        """Account for a step that has taken ``seconds``.

        Args:
            again: the step had been done before.
            between: seconds of the time before it by :class:`Loss`, as far as the workers know the causes. Used if no other cause is known.
        """
        if ended <= self.until:
            return  # accounted for before the controller was restarted
        began = min(max(self.until, ended - max(0.0, seconds)), ended)
        gap = began - self.until
        if self.cause is None:
            for cause, wanted in between.items():
                part = min(gap, max(0.0, wanted))
                self._lose(Loss(cause), part)
                gap -= part
            self._lose(Loss.STALL, gap)
        else:
            self._lose(self.cause, gap)
        if again:
            self._lose(Loss.REPLAY, ended - began)
        else:
            self.productive += ended - began
        self.until, self.cause = ended, None

    def open(self, cause: Loss) -> None:
        """Count the time that is not accounted for yet, and the time until the next step, as lost to ``cause``."""
        self.cause = cause

    def train(self) -> None:
        """Begin a step: from now on the workers' reports determine the lost time, by cause."""
        self.cause = None

    def turn(self, cause: Loss, now: float) -> None:
        """Count the time from ``now`` on as lost to ``cause``. The time before keeps its cause."""
        self.advance(now)
        self.cause = cause

    def advance(self, now: float) -> None:
        """Account for the time until ``now``; nothing if a step may be under way."""
        if self.cause is not None and now > self.until:
            self._lose(self.cause, now - self.until)
            self.until = now

    def close(self, now: float) -> None:
        """End the accounts with the run. If the last time has no known cause, it counts as shutdown."""
        self.cause = self.cause or Loss.SHUTDOWN
        self.advance(now)

    @property
    def ratio(self) -> float | None:
        """The share of the time that was productive; None before there is any."""
        spent = self.until - self.since
        return self.productive / spent if spent > 0 else None

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "cause": None if self.cause is None else str(self.cause), "ratio": self.ratio}

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> Goodput:
        cause = tree["cause"]
        lost = {str(Loss(name)): float(seconds) for name, seconds in tree["lost"].items()}
        since, until, productive = (float(tree[name]) for name in ("since", "until", "productive"))
        return cls(since, until, productive, lost, None if cause is None else Loss(cause))

    def _lose(self, cause: Loss, seconds: float) -> None:
        if seconds > 0:
            self.lost[str(cause)] = self.lost.get(str(cause), 0.0) + seconds
