"""Observations: the world as a transition of the control loop sees it. The transition changes nothing in it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from vescale_ray.controller.actions import AskStarved, Question
from vescale_ray.controller.failures.budget import Budget
from vescale_ray.controller.protocol import Ending, Places, World
from vescale_ray.controller.scaling.capacity import Free
from vescale_ray.controller.state.durable_state import DurableState
from vescale_ray.controller.statistics.run_stats import RunStats
from vescale_ray.controller.worker_group.worker_news import Lost
from vescale_ray.workers.messages import Ticket, WorkerFault, WorkerInfo, WorkerReport


class WorkersView(Protocol):
    """The workers as a policy may see them.

    ``worker_group.WorkerGroup`` implements it, and changes only between two transitions. (A copy of ten thousand workers would take 10 ms
    of each round.)"""

    @property
    def hiring(self) -> int: ...
    @property
    def arriving(self) -> int: ...
    @property
    def asking_outline(self) -> bool: ...
    @property
    def places(self) -> Places: ...
    def alive(self, worker: str) -> bool: ...
    def ending(self, worker: str) -> bool: ...
    def ready(self) -> tuple[str, ...]: ...
    def warming(self) -> tuple[str, ...]: ...
    def report(self, worker: str) -> WorkerReport | None: ...
    def stale(self, worker: str) -> bool: ...
    def info(self, worker: str) -> WorkerInfo | None: ...
    def age(self, worker: str) -> float: ...
    def silent(self, seconds: float) -> frozenset[str]: ...
    def overconstrained(self, avoided: Collection[str]) -> list[str]: ...


@dataclass(frozen=True)
class Observations:
    """The world at the beginning of a transition.

    Attributes:
        now: ``time.monotonic``; ``clock``: the worker group's clock.
        stats: the run's statistics.
        durable: the durable state, with the target, the leavers and the newest generation.
        stop: why the run is to end; None if it is not to end.
        given_up: why the run is given up; None if it is not.
        world: the newest generation; ``filled``: all its members have their state.
        inherited: ticket of the generation that an earlier process of the controller launched; None if there is none.
        losses: reported losses, by worker.
        draining: nodes that are about to go, each with the time since the epoch; ``avoided``: nodes to start no worker on.
        free: free places, if they are known.
        saving: whether a checkpoint waits for votes or its commit.
        answers: answers to the questions that this state has asked in this round.
    """

    now: float
    clock: float
    workers: WorkersView
    stats: RunStats
    durable: DurableState
    budget: Budget
    stop: str | None = None
    given_up: str | None = None
    world: World | None = None
    filled: bool = False
    inherited: Ticket | None = None
    losses: Mapping[str, Lost] = field(default_factory=dict)
    draining: Mapping[str, float] = field(default_factory=dict)
    avoided: frozenset[str] = frozenset()
    free: Free | None = None
    saving: bool = False
    answers: Mapping[Question, Any] = field(default_factory=dict)

    @property
    def starved(self) -> Mapping[str, float]:
        """Seconds of silence that are excused, by worker that a question has named (``actions.AskStarved``)."""
        return {w: s for question, answer in self.answers.items() if isinstance(question, AskStarved) for w, s in answer.items()}

    @property
    def leavers(self) -> tuple[str, ...]:
        """Workers that are in no generation and must give their shards to the next."""
        return self.durable.leavers

    def holders(self, ended: Ending) -> tuple[str, ...]:
        """Return the workers that may hold a part of the state."""
        return (*ended.living, *self.leavers)

    def outside(self, living: Iterable[str]) -> list[str]:
        """Return the workers that were hired to join, warm or not."""
        taken = {*living, *self.leavers}
        return [w for w in (*self.workers.ready(), *self.workers.warming()) if w not in taken]

    def leaving(self, workers: Iterable[str]) -> frozenset[str]:
        """Select from ``workers`` those on draining nodes."""
        infos = {w: self.workers.info(w) for w in workers} if self.draining else {}
        return frozenset(w for w, info in infos.items() if info is not None and info.node in self.draining)

    def still_living(self, ended: Ending) -> Ending:
        """Return the ending without the members that have died since. Parked workers may die, too."""
        return replace(ended, living=tuple(w for w in ended.living if self.workers.alive(w)))

    def is_out(self, worker: str, world: World) -> bool:
        """Return whether a worker has left the generation."""
        report = self.workers.report(worker)
        if report is None or not report.out:
            return False
        # If an earlier controller launched the generation, an order that has not arrived by now never will.
        return report.ticket == world.ticket or (world.ticket == self.inherited and report.ticket < world.ticket)

    def fault(self, worker: str, world: World) -> WorkerFault | None:
        """Return the fault that a worker reports for this generation, if any."""
        report = self.workers.report(worker)
        return report.fault if report is not None and report.ticket == world.ticket else None

    def loss(self, worker: str) -> Lost:
        """Return the loss of a worker that is not alive."""
        return self.losses.get(worker, Lost(worker, None, "its process died"))
