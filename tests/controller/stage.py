"""The control loop without Ray, with workers and a clock that the test controls. The tests need the fixture ``clock``."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.controller.recorded import Recorded
from tests.controller.runs import tiny
from vescale_ray.controller import states
from vescale_ray.controller.actions import Action, FindCheckpoint, Question, SaveParked, TakeOver
from vescale_ray.controller.checkpointing.committer import Committer, SaveResult
from vescale_ray.controller.control_loop import TICK_S, ControlLoop
from vescale_ray.controller.executor import Executor
from vescale_ray.controller.failures.budget import Budget, Cause
from vescale_ray.controller.observations import Observations
from vescale_ray.controller.policy import CommittedCheckpoint
from vescale_ray.controller.protocol import Bounds, Ending, Places, RunSpec, RunState, StateSource, World
from vescale_ray.controller.state.durable_state import DurableState, LaunchedGeneration
from vescale_ray.controller.state.state_store import StateWriter
from vescale_ray.controller.worker_group.worker_news import Heard, Lost, News, Ready
from vescale_ray.workers.messages import FaultKind, Filled, Origin, Ticket, WorkerFault, WorkerInfo, WorkerPhase, WorkerReport

TICKET = Ticket(7, 1)
WORLD = World(TICKET, ("a", "b"), StateSource(Origin.MEMORY, 40))
PEER = WorkerFault(FaultKind.PEER, "gloo: connection closed")
BOUNDS = Bounds()
BEGAN = 50.0
"""The clock at the beginning of a test."""


def report(worker: str, phase: WorkerPhase, ticket: Ticket = TICKET, fault: WorkerFault | None = None) -> WorkerReport:
    return WorkerReport(worker, ticket, phase, 40, (), (), fault, 0)


def node_of(worker: str) -> WorkerInfo:
    """The description of a worker on a node of its own."""
    return WorkerInfo(worker, 1, 1, f"n-{worker}", f"host-{worker}", "cpu", 1.0, address="h:1")


class WorkerGroup:
    """Workers that report what the test says. The clock advances by a tick in each round.

    Attributes:
        reports: last report of each living worker; a worker without a generation is warm.
        on_the_way: workers that were hired and are not warm; ``arriving`` of them were standbys.
        starve: seconds for which a worker had no processor, reported once.
        silence: workers that don't answer, with the time since when.
        ended: workers that were ended and are not dead yet, with the time of the order.
    """

    newest: WorkerGroup | None = None

    def __init__(self, *reports: WorkerReport) -> None:
        WorkerGroup.newest = self
        self.reports = {one.worker: one for one in reports}
        self.now = BEGAN
        self.fenced: list[tuple[float, tuple[str, ...]]] = []
        self.hired = self.hiring = self.arriving = 0
        self.on_the_way: list[str] = []
        self.starve: dict[str, float] = {}
        self.silence: dict[str, float] = {}
        self.ended: dict[str, float] = {}
        self.orders: list[Mapping[str, Any]] = []
        self.asked: list[int] = []
        self.dismissed: list[str] = []
        self.news: list[News] = []
        self.infos: dict[str, WorkerInfo | None] = {}
        self.places = Places()
        self.asking_outline = False
        self.each_round: Callable[[float], None] = lambda passed: None

    def pump(self, seconds: float) -> list[News]:
        self.now += TICK_S
        self.each_round(self.now - BEGAN)
        assert self.now < BEGAN + 400.0, "the loop does not end"
        news, self.news = self.news, []
        return [*news, *(Heard(one) for one in self.reports.values() if one.worker not in self.silence)]

    def clock(self) -> float:
        return self.now

    def alive(self, worker: str) -> bool:
        return worker in self.reports or worker in self.on_the_way

    def report(self, worker: str) -> WorkerReport | None:
        return self.reports.get(worker)

    def ending(self, worker: str) -> bool:
        return worker not in self.reports or worker in self.ended

    def silent(self, seconds: float) -> frozenset[str]:
        return frozenset(w for w, since in self.silence.items() if self.now - since > seconds and w in self.reports)

    def starved(self, workers: Any) -> dict[str, float]:
        return {worker: self.starve.pop(worker) for worker in workers if worker in self.starve}

    def given(self, worker: str) -> float:
        return 0.0

    def stale(self, worker: str) -> bool:
        return False

    def ready(self) -> tuple[str, ...]:
        return tuple(w for w in self.reports if w not in self.ended)

    def warming(self) -> tuple[str, ...]:
        return tuple(w for w in self.on_the_way if w not in self.reports)

    def info(self, worker: str) -> WorkerInfo | None:
        return self.infos.get(worker)

    def age(self, worker: str) -> float:
        return 1.0

    def overconstrained(self, avoid: Collection[str]) -> list[str]:
        return []

    def stacks(self, workers: Iterable[str], wait_s: float) -> dict[str, str]:
        return {}

    def fence(self, workers: Iterable[str], ticket: Ticket) -> None:
        self.fenced.append((self.now, tuple(workers)))

    def kill(self, reasons: Mapping[str, str], cause: Cause = Cause.HANG) -> None:
        self.ended |= {w: self.now for w in reasons if w not in self.ended}

    def order(self, orders: Mapping[str, Any]) -> dict[str, str]:
        self.orders.append(orders)
        return {}

    def ask(self, workers: Sequence[str], ticket: Ticket, flags: int) -> bool:
        self.asked.append(flags)
        return True

    def ask_reachability(self, tries: Mapping[str, Collection[str]], wait_s: float) -> Any:
        """Every worker reaches every other."""
        return SimpleNamespace(unreached=lambda: {worker: frozenset() for worker in tries})

    def ask_outline(self, workers: Iterable[str]) -> None:
        pass

    def adopt(self, known: Any) -> None:
        pass

    def prepare_store(self) -> None:
        pass

    def store(self) -> tuple[str, int]:
        return "host", 1

    def hire(self, avoid: Any = ()) -> None:
        self.hired += 1
        self.on_the_way.append(f"new{self.hired}")

    def dismiss(self, worker: str) -> None:
        self.dismissed.append(worker)
        self.reports.pop(worker, None)

    def request_places(self, count: int, avoid: Collection[str] = ()) -> None:
        pass

    def cancel_requests(self) -> None:
        pass


class Scripted(Executor):
    """An executor that records what it performs, and takes answers from the test.

    Attributes:
        performed: the actions so far.
        answers: functions of the test that answer questions, by the question's class.
    """

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.performed: list[Action] = []
        self.answers: dict[type[Question], Callable[[Any], Any]] = {}

    def perform(self, actions: Iterable[Action]) -> dict[Question, Any]:
        self.performed += (actions := tuple(actions))
        return super().perform(actions)

    def answer(self, question: Question) -> Any:
        scripted = self.answers.get(type(question))
        try:
            return super().answer(question) if scripted is None else scripted(question)
        except OSError as problem:
            return problem


class Stage:
    """A control loop with a running generation of two workers. Everything but the workers is real.

    Args:
        filled: whether the members have their state.
        state: state of the run.
        step: number of completed steps.
        elastic: keys of the configuration's section ``elastic``.
    """

    def __init__(
        self,
        worker_group: WorkerGroup,
        folder: Path,
        leavers: tuple[str, ...] = (),
        filled: bool = False,
        state: RunState = RunState.RESCALING,
        step: int = 40,
        world: World = WORLD,
        bounds: Bounds = BOUNDS,
        durable: DurableState | None = None,
        config: Mapping[str, Any] | None = None,
        **elastic: Any,
    ) -> None:
        self.worker_group, self.world = worker_group, replace(world, source=replace(world.source, step=step))
        changes = {"train_steps": 60, "elastic_workers": 2, **(config or {}), **{f"elastic_{key}": value for key, value in elastic.items()}}
        folder.mkdir(exist_ok=True)
        self.config = tiny(folder, "loop", **changes)
        self.run = Recorded(self.config, run_id="r")
        self.run.open(self.world)
        self.run.log.record("state", before="PENDING", state=str(state))
        self.written: list[DurableState] = []
        launched = DurableState("r", 7, LaunchedGeneration.of(self.world), leavers, target=2, reason="drain", epoch=1)
        self.durable = StateWriter(durable or launched, SimpleNamespace(write=self._write))  # type: ignore[arg-type]
        source = StateSource(Origin.FRESH, 0)
        spec = RunSpec("r", self.config.model_dump(mode="json"), str(self.run.folder.path), "t", source, 1, None, 1, {}, bounds=bounds)
        self.committer = Committer(self.config.checkpoint_root, None, lambda step: {}, None)  # type: ignore[arg-type]
        workers: Any = worker_group
        self.executor: Any = Scripted(spec, self.config, workers, self.run.log, self.run.publisher, self.committer, self.durable)
        self.loop: Any = ControlLoop(self.executor)
        self.loop.state = states.Running(self.world)
        for worker in self.world.members if filled else ():
            self.fill(worker)

    def _write(self, state: DurableState) -> DurableState:
        self.written.append(state)
        return state

    def fill(self, worker: str) -> None:
        """Report that a member has its state."""
        self.executor.generation.filled(worker, Filled(self.world.ticket, self.world.source.step, self.world.source.origin, {}))

    @property
    def seen(self) -> Observations:
        """The observations of a transition now."""
        seen: Observations = self.executor.observations(self.worker_group.now, {})
        return seen

    @property
    def budget(self) -> Budget:
        return self.seen.budget

    def inherit(self) -> None:
        """An earlier controller has launched the generation."""
        self.executor.perform([TakeOver(self.world)])

    def saves(self, save: Callable[[tuple[str, ...]], SaveResult | None]) -> None:
        """Have ``save`` make the checkpoints of parked workers."""
        self.executor.answers[SaveParked] = lambda question: save(question.workers)

    def has(self, newest: CommittedCheckpoint | None, newer: Callable[[], CommittedCheckpoint | None] | None = None) -> None:
        """The storage has ``newest``. ``newer`` answers when workers may hold a state that is newer."""
        self.executor.answers[FindCheckpoint] = lambda question: newest if question.holders is None or newer is None else newer()

    def step(self, state: states.State, **changes: Any) -> states.Step:
        """The transition of ``state``. ``changes``: observations that differ from those of now."""
        step: states.Step = self.loop.transition(state, replace(self.seen, **changes))
        return step

    @property
    def events(self) -> list[str]:
        return [event["event"] for event in self._written_events()]

    def of(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self._written_events() if event["event"] == name]

    def _written_events(self) -> list[dict[str, Any]]:
        self.run.log.journal.flush(30.0)  # on a busy machine, lines may still wait for the disk
        return self.run.folder.read_events()

    def rounds(self, *ends: type, begin: Any = None) -> Any:
        """Step the loop until its state is one of ``ends``, and return that state. ``begin``: the state to begin with."""
        transition = self.loop.transition
        self.loop.transition = lambda state, seen: (state, ()) if isinstance(state, ends) else transition(state, seen)
        if begin is not None:
            self.loop.state = begin
            self.loop.follow()
        while not isinstance(self.loop.state, (*ends, states.Finished)):
            self.loop.step()
        self.loop.transition = transition
        return self.loop.state

    def watch(self) -> Ending:
        """Step the loop until the generation has ended, and return how it ended."""
        ended: Ending = self.rounds(states.Recovering).ended
        return ended

    def lose(self, worker: str, cause: Cause) -> None:
        """Lose a worker because its node does not answer."""
        self.worker_group.reports.pop(worker, None)
        self.worker_group.news.append(Lost(worker, self.worker_group.info(worker) or node_of(worker), "its node does not answer", cause))

    def drain(self, *workers: str) -> None:
        """Announce that the nodes of these workers will go in 60 s."""
        self.worker_group.infos |= {worker: node_of(worker) for worker in workers}
        self.executor.nodes._draining = {node_of(worker).node: time.time() + 60.0 for worker in workers}

    def warm(self, worker: str) -> None:
        self.worker_group.reports[worker] = report(worker, WorkerPhase.IDLE, Ticket(0, 0))
        self.worker_group.news.append(Ready(node_of(worker)))
