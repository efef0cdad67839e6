"""Workers that behave like real ones in simulated time: they form, train, park, hold states, and die of what the test does to them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from tests.controller.stage import PEER, WorkerGroup, node_of, report
from vescale_ray.config.rank_grid import RankGrid
from vescale_ray.controller.failures.budget import Cause
from vescale_ray.controller.worker_group.worker_news import Heard, Lost, News, Ready
from vescale_ray.workers.messages import CHECKPOINT, Filled, Give, Join, Origin, Stepped, StepRecord, Ticket, WorkerPhase
from vescale_ray.workers.resharding.held_state import HeldState

FORM_S, WARM_S, DEATH_S = 0.3, 0.5, 0.3


class Simulated(WorkerGroup):
    """One step of training takes one round.

    Attributes:
        step: steps that the members have completed.
        saved: step of the newest checkpoint.
        grid: arrangement of a number of members in replicas.
        silence: stopped workers. They, and the members that wait for them, make no step.
    """

    def __init__(self, members: Sequence[str], ticket: Ticket, step: int, steps: int) -> None:
        super().__init__(*(report(w, WorkerPhase.TRAINING, ticket) for w in members))
        self.infos |= {w: node_of(w) for w in members}
        self.members, self.ticket, self.step, self.steps = tuple(members), ticket, step, steps
        self.saved, self.flags, self.beats = step, 0, 0
        self.grid: Callable[[int], RankGrid] = partial(RankGrid, 1)
        self.held: dict[str, HeldState] = {}
        self.warm_at: dict[str, float] = {}
        self.formed_at: float | None = None
        self.filled = True

    def strike(self, kind: str, worker: str) -> None:
        """``kill`` a worker, ``stop`` it, or lose its ``node``."""
        if kind == "kill":
            self.die(worker, "its process died", Cause.KILLED)
        elif kind == "stop" and worker in self.reports:
            self.silence.setdefault(worker, self.now)
        elif kind == "node":
            self.die(worker, "its node was lost", Cause.NODE)

    def die(self, worker: str, reason: str, cause: Cause) -> None:
        if self.reports.pop(worker, None) is not None:
            self.news.append(Lost(worker, self.infos[worker], reason, cause))
            self.break_up() if worker in self.members else None
        for of in (self.held, self.silence, self.ended):
            of.pop(worker, None)

    def pump(self, seconds: float) -> list[News]:
        for worker, at in tuple(self.ended.items()):
            if self.now - at > DEATH_S:
                self.die(worker, "killed: it is hung", Cause.HANG)
        for worker in [w for w, at in self.warm_at.items() if self.now > at]:
            del self.warm_at[worker]
            self.on_the_way.remove(worker)
            self.infos[worker] = node_of(worker)
            self.reports[worker] = report(worker, WorkerPhase.IDLE, Ticket(0, 0))
            self.news.append(Ready(node_of(worker)))
        items = self._train()
        told = super().pump(seconds)
        return [Heard(replace(one.report, items=items.get(one.report.worker, ()))) if isinstance(one, Heard) else one for one in told]

    def _train(self) -> dict[str, Any]:
        """One step, or one round of forming. Returns what the members report of it."""
        alive = all(w in self.reports and w not in self.silence for w in self.members)
        if not alive or not self.members or self.formed_at is None and not self.filled:
            return {}
        if self.formed_at is not None:
            if self.now < self.formed_at:
                return {}
            self.formed_at, self.filled = None, True
            self._set(WorkerPhase.TRAINING)
            return {w: ((1, Filled(self.ticket, self.step, Origin.MEMORY, {})),) for w in self.members}
        if self.flags & ~CHECKPOINT:
            return self._park(WorkerPhase.PARKED, None)
        self.step, self.beats, size = self.step + 1, self.beats + 1, len(self.members)
        record = StepRecord(self.step - 1, 2.0, 192, (1,), 1.0, 1e-3, 0.1, 0, size, self.ticket.generation, (1,) * size)
        items = {w: ((self.beats, Stepped(self.ticket, record, time.time())),) for w in self.members}
        self._set(WorkerPhase.TRAINING)
        if self.step >= self.steps:
            self._park(WorkerPhase.FINISHED, None)
        return items

    def _set(self, phase: WorkerPhase) -> None:
        self.reports |= {w: replace(report(w, phase, self.ticket), beats=self.beats) for w in self.members if w in self.reports}

    def _park(self, phase: WorkerPhase, fault: Any) -> dict[str, Any]:
        """The members leave, with their states and, without replicas, the copies of their neighbours'."""
        size = len(self.members)
        grid = self.grid(size)
        for rank, worker in enumerate(self.members):
            if worker in self.reports and worker not in self.silence:
                if self.filled:
                    ranks = (grid.shard_of(rank),) if grid.replicas > 1 else (rank, (rank - 1) % size)
                    self.held[worker] = HeldState(self.ticket.generation, grid.shards, self.step, ranks)
                held = (self.held[worker],) if worker in self.held else ()
                self.reports[worker] = replace(report(worker, phase, self.ticket, fault), held=held)
        self.members, self.flags, self.formed_at = (), 0, None
        return {}

    def break_up(self) -> None:
        """A collective fails on the members, because one is gone."""
        self._park(WorkerPhase.PARKED, PEER)

    def fence(self, workers: Iterable[str], ticket: Ticket) -> None:
        super().fence(workers, ticket)
        if ticket == self.ticket:
            self.break_up()

    def order(self, orders: Mapping[str, Any]) -> dict[str, str]:
        joins = [w for w, order in orders.items() if isinstance(order, Join)]
        self.ticket, self.members = orders[joins[0]].ticket, tuple(joins)
        self.filled, self.formed_at, self.flags = False, self.now + FORM_S, 0
        resume = orders[joins[0]].resume
        self.step = resume.step if resume is not None else self.saved
        self._set(WorkerPhase.FORMING)
        self.reports |= {w: report(w, WorkerPhase.PARKED, self.ticket) for w, order in orders.items() if isinstance(order, Give)}
        return super().order(orders)

    def ask(self, workers: Sequence[str], ticket: Ticket, flags: int) -> bool:
        self.flags |= flags
        return super().ask(workers, ticket, flags)

    def hire(self, avoid: Any = ()) -> None:
        super().hire(avoid)
        self.warm_at[self.on_the_way[-1]] = self.now + WARM_S

    def anyone(self, chance: random.Random) -> str:
        return chance.choice(sorted(self.reports) or ["nobody"])
