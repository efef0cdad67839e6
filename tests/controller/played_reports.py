"""Reports of workers as a play: each act is a time and what the workers say then."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vescale_ray.controller.failures.hang import (
    STEPS,
    HangWatch,
)
from vescale_ray.workers.messages import Ticket, WorkerPhase, WorkerReport

TICKET = Ticket(3, 1)


MEMBERS = ("a", "b", "c")


IDLE = WorkerReport("", TICKET, WorkerPhase.TRAINING, 0, (), (), None, 0, where="forward (model.py:7)")


class Play:
    """Three workers that report every 0.1 s. Each makes a beat unless it is told to be ``stuck``, to wait or to be silent. A ``starved``
    one has a processor for a fifth of the time."""

    def __init__(self, fixed: float | None = None, step: float = 0.2, steps: int = STEPS, members: tuple[str, ...] = MEMBERS) -> None:
        self.watch, self.now, self.beats, self.members = HangWatch(fixed), 100.0, dict.fromkeys(members, 0), members
        self.starved_s, self.completed = dict.fromkeys(members, 0.0), steps
        self.ticket = TICKET
        self.watch.begin(TICKET, len(members))
        for number in range(steps * len(members)):
            self.watch.stepped(TICKET, 1 + number // len(members), step)

    def done(self, step: float, steps: int = 1, begins_anew: bool = False) -> None:
        """Complete the next ``steps`` steps, in ``step`` seconds each; in a new generation if ``begins_anew``."""
        if begins_anew:
            self.ticket = Ticket(self.ticket.generation + 1, 1)
            self.watch.begin(self.ticket, len(self.members))
        for _ in range(steps):
            self.completed += 1
            for _ in self.members:
                self.watch.stepped(self.ticket, self.completed, step)

    def go(self, seconds: float, tick: float = 0.1, phase: WorkerPhase = WorkerPhase.TRAINING, **acts: str) -> dict[str, str]:
        """The first verdict within ``seconds``; ``since`` is the time until then."""
        begin = self.now
        while self.now < begin + seconds:
            self.now += tick
            for worker in self.members:
                act = acts.get(worker, "beats")
                self.beats[worker] += act == "beats"
                self.starved_s[worker] += 0.8 * tick * (act == "starved")
                if act != "silent":
                    figures: Any = {"completed": self.completed, "beats": self.beats[worker], "starved_s": self.starved_s[worker]}
                    how: Any = {"ticket": self.ticket, "phase": phase, "waiting": act == "waits", "in_long_work": act == "copies"}
                    self.watch.heard(replace(IDLE, worker=worker, **figures, **how), self.now)
            hung = dict(self.watch.verdict(self.members, self.now))
            if hung:
                self.watch.ended(hung)
                self.since = self.now - begin
                return hung
        return {}
