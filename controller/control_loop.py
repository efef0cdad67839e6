"""The control loop: the only loop of a run's controller.

Each round observes (:meth:`ControlLoop.observe`), and then follows the transitions of the state (``states``)::

    Gathering -> Running -> Recovering -> Locating -> Running -> ..
    Recovering -> Waiting -> Recovering              too few workers
    Recovering -> Checkpointing -> Concluding -> Finished
    Adopting -> Running                              a restarted controller
    Running -> Partitioned -> Recovering             a collective failed though all live
    Locating -> AwaitingStorage -> Recovering        only checkpoints have the state, and the storage is out of reach

No transition waits: a state in which something is waited for stays for that round. So commands, losses and checkpoints are handled alike in
every state. ``policy.after_generation`` decides what follows a generation, and ``steering`` looks after one that runs as it should.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from vescale_ray.config import RunConfig
from vescale_ray.controller import policy, states
from vescale_ray.controller.autoscaling import PLACE_S
from vescale_ray.controller.budget import Budget, Cause
from vescale_ray.controller.cadence import Cadence
from vescale_ray.controller.crew import Crew, Heard, Lost, News, Ready, Told
from vescale_ray.controller.desk import Desk
from vescale_ray.controller.durable_state import LaunchedGeneration, StateWriter
from vescale_ray.controller.failure_detector import FailureDetector
from vescale_ray.controller.generation_log import GenerationLog
from vescale_ray.controller.keeper import Keeper, Unanswered
from vescale_ray.controller.launch import evaluation_due, givers_of, orders_of
from vescale_ray.controller.protocol import Ending, Outcome, RunSpec, RunState, Source, World
from vescale_ray.controller.publisher import Observed, Publisher
from vescale_ray.controller.run_lifecycle import Lifecycle, budget_of
from vescale_ray.controller.run_log import RunLog
from vescale_ray.controller.saves import Saves
from vescale_ray.controller.scribe import begun
from vescale_ray.controller.states import Goal, State
from vescale_ray.controller.steering import Steering
from vescale_ray.workers.messages import (
    Damaged,
    Evaluated,
    FaultKind,
    Filled,
    Origin,
    Outlined,
    Phase,
    Report,
    Saved,
    Skipped,
    Stepped,
    Ticket,
)

TICK_S = 0.1
"""Longest wait for news in one round."""
ADOPT_S = 3.0
"""A restarted controller goes on after this time with the workers that have answered."""
OUTLINE_S = 0.5
"""It then waits this long for the outline of the layouts."""
SILENT_S = 1.0
"""Of the workers that could join, one that has owed an answer for this long is taken last."""
GIVER_S = 1.0
"""The shards of a leaver that is lost before it has confirmed them may still arrive for this long."""
STORAGE_GAP_S = 2.0
"""Between two questions to a storage that is out of reach."""
AHEAD = 4
"""Layouts are planned for up to this many workers more or fewer than there are."""
LAST_LIVES = 3
"""Controllers of a run that is given up which try to save what the workers hold. Later ones end the run at once."""


class ControlLoop:
    """One run, in one thread. Other threads hand commands to ``desk``.

    Args:
        spec: what the driver wants.
        durable: what an earlier life of the controller left, and what the next one gets.
        publisher: is given the observations of each round.

    Attributes:
        state: the present state.
    """

    def __init__(
        self,
        spec: RunSpec,
        config: RunConfig,
        crew: Crew,
        log: RunLog,
        publisher: Publisher,
        saves: Saves,
        durable: StateWriter,
    ) -> None:
        self._spec, self._config = spec, config
        self._crew, self._log, self._publisher, self._saves, self._durable = crew, log, publisher, saves, durable
        self._generation = generation = GenerationLog(log, config)
        if durable.state.generation is not None:
            generation.adopt(durable.state.generation.world())
        self._lifecycle = lifecycle = Lifecycle(log, publisher)
        self._budget = budget_of(config, durable.state, log.stats.step)
        self._given_up: str | None = None
        """The budget was spent before this life began, for this reason. What happens in this life does not let the next one go on."""
        self._fence_s = 0.0
        """Seconds that the end of the last generation took."""
        self.desk = Desk(spec, config, crew, log, durable)
        cadence = Cadence(config.checkpoint, time.monotonic(), max(0.0, time.time() - log.stats.started))
        self._keeper = keeper = Keeper(
            config.checkpoint_root,
            spec.run_id,
            crew,
            log,
            generation,
            saves,
            durable,
            spec.bounds.save,
            cadence,
            config.max_workers,
            spec.oldest,
        )
        self._steering = Steering(spec, config, crew, log, generation, saves, self.desk, cadence, durable, lifecycle, keeper.layouts)
        self._detector = FailureDetector(config, spec.bounds, crew, log, self._steering)
        self._news: Sequence[News] = ()
        self.state: State = states.Starting()
        self._transitions: Mapping[type, Callable[[Any], State]] = {
            states.Starting: self._starting,
            states.Gathering: self._gathering,
            states.Adopting: self._adopting,
            states.Running: self._running,
            states.Partitioned: self._partitioned,
            states.Recovering: self._recovering,
            states.Locating: self._locating,
            states.AwaitingStorage: self._awaiting_storage,
            states.Waiting: self._waiting,
            states.Checkpointing: self._checkpointing,
            states.Concluding: self._concluding,
        }

    def run(self) -> Outcome:
        """Run the loop to the end of the run. Raises only what is a bug, or the loss of the nursery."""
        try:
            self._follow()
            while not isinstance(self.state, states.Finished):
                self.step()
            return self.state.outcome
        finally:
            self.desk.close()
            self._keeper.layouts.close()

    def step(self) -> None:
        """One round, of at most :data:`TICK_S` seconds unless a call takes longer."""
        self.observe()
        self._follow()

    def _follow(self) -> None:
        """Follow transitions until a state stays. A state that waits for news (all but these) stays at least until the next round."""
        immediate = (states.Starting, states.Recovering, states.Locating, states.Checkpointing, states.Concluding, states.Partitioned)
        while True:
            before, self.state = self.state, self._transitions[type(self.state)](self.state)
            if type(self.state) is type(before) or not isinstance(self.state, (*immediate, states.Gathering)):
                return

    # ------------------------------------------------------------------------------------------------------- observations

    def observe(self) -> None:
        """Hear the workers, record what they tell, and carry out commands."""
        self._news = self._crew.pump(TICK_S)
        for one in self._news:
            match one:
                case Ready(info):
                    self._generation.worker_started(info)
                    self._steering.hire_failures.clear()
                case Heard(report):
                    self._detector.heard(report)
                    self._hear(report)
                case Told(Outlined(outline)):
                    self._keeper.layouts.take(outline)
                case Lost():
                    self._lose(one)
        self._detector.end_mute()
        self._keeper.collect()
        self.desk.heed()
        self._publisher.publish(self._observed())
        self._publisher.write_record()

    def _lose(self, loss: Lost) -> None:
        loss, world = self._detector.lost(loss), self._generation.world
        info, reason = loss.info, loss.reason
        kind, at = "killed" if "killed:" in reason else "died", {"pid": info and info.pid, "node": info and info.node}
        self._log.record("worker_lost", worker=loss.worker, reason=reason, kind=kind, cause=str(loss.cause), **at)
        member = world is not None and loss.worker in world.members
        self._steering.lost(loss.worker, reason, warm=info is not None, member=member)

    def _hear(self, report: Report) -> None:
        generation = self._generation
        generation.workers.heard(report.worker, time.time())
        for _, item in report.items:
            match item:
                case Stepped():
                    self._detector.stepped(item)
                    if generation.stepped(report.worker, item):
                        progressed = self._budget.progressed(item.record.step)
                        self._spend(replace(self._budget, high=progressed.high) if self._given_up else progressed)
                        self._steering.stepped(item.record)
                case Filled():
                    generation.filled(report.worker, item)
                case Evaluated():
                    generation.evaluated(item)
                case Saved():
                    self._saves.heed(item)
                case Damaged():
                    self._keeper.damaged(item.attempt)
                    about = {"attempt": item.attempt, "step": item.step, "worker": report.worker, "problem": item.problem}
                    self._log.record("checkpoint_damaged", **about)
                case Skipped():
                    self._log.record("checkpoint_skipped", step=item.step, reason="some rank still writes the ones before")
        world = generation.world
        if world is not None and report.ticket == world.ticket == self._inherited and report.phase in (Phase.TRAINING, Phase.SAVING):
            # It has its state. The item that said so may have gone to the controller before this one.
            generation.filled(report.worker, Filled(world.ticket, world.source.step, world.source.origin, {}))

    def _observed(self) -> Observed:
        """The observations of this round, without the run's statistics."""
        members, known = self._log.stats.members, self._log.stats.workers
        reports = {rank: self._crew.report(worker) for rank, worker in enumerate(members)}
        nodes = [info.node if (info := known.get(worker)) is not None else "" for worker in members]
        return Observed(
            target=self.desk.target,
            budget=self._budget,
            spares=self._steering.spares,
            places_wanted=self._steering.places_wanted,
            draining=len(self._steering.leaving(members)),
            unprotected=policy.unprotected(nodes, copies=self._config.elastic.snapshot_every > 0),
            saves_pending=self._saves.pending,
            ranks={rank: (self._crew.info(members[rank]), r.memory) for rank, r in reports.items() if r is not None},
            figures=self._generation.workers.figures(),
            newest=self._generation.newest,
        )

    @property
    def _inherited(self) -> Ticket | None:
        return self._detector.inherited

    # -------------------------------------------------------------------------------------------------------- first workers

    def _starting(self, state: states.Starting) -> State:
        self._spend(self._budget)
        self._durable.update()  # a restart of the controller counts, also for the next one
        begun(import_heavy)
        self._steering.nodes.start()
        launched = self._durable.state.generation
        if self._budget.controllers and (spent := self._budget.verdict) is not None:
            self._given_up = spent
            # What ended this controller's predecessors may end it, too. So not every one tries to bring the workers to rest.
            if launched is None or self._budget.controllers > self._budget.limits.controllers + LAST_LIVES:
                return self._give_up(Ending(()), spent)
            self.desk.end("it is given up", durable=False)
        if launched is not None:
            return self._adopt()
        self._lifecycle.enter(RunState.STARTING)
        if self._durable.state.epoch > 1:
            self._crew.adopt(self._log.stats.workers)
        self._crew.prepare_store()
        return states.Gathering(time.monotonic() + self._spec.bounds.start)

    def _gathering(self, state: states.Gathering) -> State:
        crew, bounds, fewest = self._crew, self._spec.bounds, self._config.elastic.min_workers
        if self.desk.stop:
            return self._halt(Ending(()))
        ready, wanted, failures = crew.ready(), self.desk.target, self._steering.hire_failures  # the target may be changed meanwhile
        if len(ready) >= wanted:
            return self._launch(ready[:wanted], (), self._spec.source)
        if len(failures) > self._config.elastic.max_recoveries_without_progress:
            return states.Concluding(error=f"workers do not start: {failures[-1]}")
        if time.monotonic() > state.deadline:
            if len(ready) < fewest:
                need = self._config.ray
                return states.Concluding(
                    error=f"{len(ready)} of {wanted} workers were up after {bounds.start:g} s, elastic.min_workers = {fewest}: has the "
                    f"cluster {wanted} times {need.cpus_per_worker:g} CPUs and {need.gpus_per_worker:g} GPUs free?"
                )
            for worker in crew.warming():
                crew.dismiss(worker)
            self.desk.want(len(ready), "manual")
            return self._launch(ready, (), self._spec.source)
        for _ in range(wanted - len(ready) - len(crew.warming()) - crew.hiring):
            crew.hire()
        return state

    # ------------------------------------------------------------------------------------------------------------ restarts

    def _adopt(self) -> states.Adopting:
        """Take up the generation that an earlier life of the controller had launched. Its workers have trained on."""
        world = self._generation.world
        assert world is not None
        self._detector.adopt(world)
        # Each worker sends its last vote again. Attempts of older generations were given up.
        self._saves.fence(world.ticket.generation)
        self._crew.adopt(self._log.stats.workers)
        return states.Adopting(world, time.monotonic() + ADOPT_S)

    def _adopting(self, state: states.Adopting) -> State:
        crew, world, now = self._crew, state.world, time.monotonic()
        heard = state.heard | {one.report.worker for one in self._news if isinstance(one, Heard)}
        # A recovery may come next, and its ranks are numbered by the layouts, too.
        self._plan_ahead(world)
        if state.outline_until is None:
            if now < state.until and not all(w in heard or not crew.alive(w) for w in world.members):
                return replace(state, heard=heard)
            state = replace(state, outline_until=now + OUTLINE_S)
        assert state.outline_until is not None
        if crew.asking_outline and now < state.outline_until:
            return state
        party = (*world.members, *self._steering.leavers)
        reports = [crew.report(w) for w in party]
        if any(report is not None and report.ticket < world.ticket for report in reports):
            crew.fence(party, world.ticket)
        filled = all(report is not None and report.ticket == world.ticket and _has_state(report) for report in reports[: world.size])
        if self._log.stats.has_stepped or filled:
            # The move is over for all. A leaver that is not there any more was dismissed, and is not missing.
            self._steering.keep(w for w in self._steering.leavers if crew.alive(w))
        return states.Running(world)

    # --------------------------------------------------------------------------------------------------------- a generation

    def _launch(self, members: Sequence[str], leaving: Iterable[str], source: Source) -> states.Running:
        """Order a new generation. Its number is written down before any worker gets it."""
        began, log, generation = time.monotonic(), self._log, self._generation
        world = World(Ticket(self._durable.take_number(), max(1, self._budget.tries)), tuple(members), source)
        if generation.world is not None and log.stats.rescale is None:
            generation.begin_rescale("failure", generation.world.size)  # the first generation failed before it began
        givers = givers_of(world)
        self._steering.begin(world.members, givers, leaving)
        self._keeper.abandon("the next generation began before it was written")
        self._saves.fence(world.ticket.generation)
        self._detector.begin(world)
        self._durable.note(generation=LaunchedGeneration.of(world))
        self._durable.write()
        evaluate = evaluation_due(source.step, self._config, self._spec, log.stats.heldout)
        orders = orders_of(world, givers, self._crew.store(), self._spec.run_id, evaluate=evaluate)
        generation.open(world, {"fence": self._fence_s, "plan": time.monotonic() - began}, self._keeper.numbered_by)
        self._fence_s = 0.0
        if self._lifecycle.state is not RunState.STARTING:
            self._lifecycle.enter(RunState.RESCALING)
        refused = self._crew.order(orders)
        self._crew.kill({worker: f"killed: {problem}" for worker, problem in refused.items() if self._crew.alive(worker)})
        return states.Running(world)

    def _running(self, state: states.Running) -> State:
        crew, detector, world, leavers = self._crew, self._detector, state.world, self._steering.leavers
        living = [w for w in world.members if crew.alive(w)]
        # A worker that was ended is lost in a moment, though its last report may say that it has left.
        party = (*world.members, *leavers)
        inside = dict.fromkeys(w for w in party if crew.alive(w) and (not detector.is_out(w, world) or crew.doomed(w)))
        if not inside:
            return self._ended(state, living)
        gave = state.gave | {w for w in leavers if detector.is_out(w, world) and not detector.fault(w, world)}
        lacking = [w for w in leavers if w not in gave and (detector.fault(w, world) or not crew.alive(w))]
        missing = bool(lacking) and not self._generation.all_filled
        state = replace(state, gave=gave, missing_since=(state.missing_since or crew.clock()) if missing else None)
        # If a leaver's machine has stopped, or it has failed before it connected, no connection breaks. No member notices that its shards
        # will never come.
        forsaken = state.missing_since is not None and crew.clock() - state.missing_since > GIVER_S
        # A worker that writes what the controller before this one has ordered does not train any more. The bound of that order applies.
        reports = [crew.report(w) for w in inside]
        writing = any(r is not None and r.phase is Phase.SAVING and r.ticket == world.ticket for r in reports)
        if writing and self._lifecycle.state is RunState.RESCALING:
            self._enter_saving()
        if len(living) == world.size and all(w in inside for w in living) and not forsaken and not writing:
            return self._steady(state, inside)
        return self._draining(state, living, inside, forsaken=forsaken)

    def _steady(self, state: states.Running, inside: Collection[str]) -> states.Running:
        """All members train, or form their group."""
        detector, world, filled = self._detector, state.world, self._generation.all_filled
        if hung := detector.hung(world) or ({} if filled else detector.mute(world, inside)):
            detector.end(world, {w: f"it is hung: {why}" for w, why in hung.items()})
        elif self._is_still_read(world) and self.desk.stop:
            # The read may take minutes more, and nothing is lost with it. The members leave at its next piece.
            if not state.cut_short:
                self._lifecycle.enter(RunState.STOPPING)
                self._crew.fence(inside, world.ticket)
            return replace(state, cut_short=True)
        else:
            detector.end_cut_off(world)
            self._steering.steer(world)
            if filled:
                self._plan_ahead(world)
        return state

    def _draining(self, state: states.Running, living: Sequence[str], inside: Collection[str], *, forsaken: bool) -> states.Running:
        """Some have left the generation, or are lost: see that the rest leave in time."""
        crew, detector, world = self._crew, self._detector, state.world
        since = state.first_sign or crew.clock()
        state = replace(state, first_sign=since)
        if not state.broken and (len(living) < world.size or forsaken or any(detector.fault(w, world) for w in living)):
            state = replace(state, broken=True)
            self._break(world, inside)
        late = {w: f"it is hung: {why}" for w, why in detector.mute(world, inside).items()}
        out = [w for w in living if w not in inside]
        complete = self._keeper.held_step(out) >= self._log.stats.step
        late |= detector.late(world, crew.clock() - since, [w for w in inside if w not in late], out, complete=complete)
        if late and state.cut_short:
            crew.kill(dict.fromkeys(late, "killed: it was still busy with what the stop had made needless"))
        elif late:
            detector.end(world, late)
        return state

    def _break(self, world: World, inside: Iterable[str]) -> None:
        """Close a generation that is broken, so that no worker in it begins another step."""
        state = self._lifecycle.state
        if state is not RunState.STOPPING and (state is not RunState.STARTING or world.ticket.attempt > 1):
            self._generation.begin_rescale("failure", world.size)
            self._lifecycle.enter(RunState.RESCALING)
        self._crew.fence(inside, world.ticket)

    def _is_still_read(self, world: World) -> bool:
        """Whether a generation's state is still read from a checkpoint, or made: no worker has it, so that none can be lost."""
        if self._generation.all_filled or self._log.stats.has_stepped or world.source.origin is Origin.MEMORY:
            return False
        # After a restart nothing is known yet of a generation that may have trained for days.
        return all((report := self._crew.report(w)) is not None and not _has_state(report) for w in world.members)

    def _enter_saving(self) -> None:
        """A checkpoint that the controller before this one has ordered is being written: the last one, mostly."""
        if self._log.stats.step >= self._config.train.steps:
            self._lifecycle.enter(RunState.CHECKPOINTING)
        elif self.desk.stop is not None:
            self._lifecycle.enter(RunState.STOPPING)

    def _plan_ahead(self, world: World) -> None:
        """Have the layouts that may come next planned while the workers train. Any member can tell the outline that they follow from."""
        layouts = self._keeper.layouts
        if layouts.told:
            layouts.ahead(worlds_ahead(world.size, self.desk.target))
        else:
            self._crew.ask_outline(world.members)

    # ------------------------------------------------------------------------------------------------- end of a generation

    def _ended(self, state: states.Running, living: Sequence[str]) -> State:
        """No living worker is in the generation."""
        world, detector, leavers = state.world, self._detector, self._steering.leavers
        faults = [fault for w in living if (fault := detector.fault(w, world)) is not None]
        if faults and len(living) == world.size and not state.cut_short and all(fault.kind is FaultKind.PEER for fault in faults):
            return states.Partitioned(state, tuple(living), leavers, detector.begin_partition())
        return self._concluded(state, living, {w: detector.loss(w) for w in world.members if w not in living}, leavers)

    def _partitioned(self, state: states.Partitioned) -> State:
        crew, detector, living = self._crew, self._detector, state.living
        lost: Mapping[str, Lost] = {}
        if time.monotonic() < state.until and not self.desk.stop and not any(crew.doomed(w) for w in living):
            found = detector.partitioned(state.generation.world, living)
            if found is None:
                return state
            lost = found
        lost = {w: detector.loss(w) for w in living if crew.doomed(w)} | dict(lost)
        return self._concluded(state.generation, [w for w in living if w not in lost], lost, state.leavers)

    def _concluded(self, state: states.Running, living: Sequence[str], gone: Mapping[str, Lost], leavers: Sequence[str]) -> State:
        """Record how the generation has ended."""
        world, log, detector, crew = state.world, self._log, self._detector, self._crew
        faults = {w: fault for w in living if (fault := detector.fault(w, world)) is not None}
        reports = [crew.report(w) for w in living]
        finished = not faults and bool(living) and all(r is not None and r.phase is Phase.FINISHED for r in reports)
        lost, causes = {w: one.reason for w, one in gone.items()}, {w: str(one.cause) for w, one in gone.items()}
        ending = Ending(tuple(living), lost, faults, finished, causes)
        if log.stats.rescale is not None and state.first_sign is not None:
            self._fence_s += crew.clock() - state.first_sign
        if state.cut_short:
            self._keeper.abandon()
        elif not ending.clean:
            self._failed(world, ending, gone, leavers)
        elif not finished and self.desk.stop is None and (self._lifecycle.state is RunState.RUNNING or self._was_asked(world, reports)):
            # The workers have heard the wish to stop. The answer to it was not heard.
            self._generation.begin_rescale(self.desk.reason, world.size)
        return states.Recovering(ending)

    def _failed(self, world: World, ending: Ending, gone: Mapping[str, Lost], leavers: Sequence[str]) -> None:
        """Count a failed generation, and record it."""
        log, detector, faults = self._log, self._detector, ending.faults
        self._keeper.abandon()
        # A leaver that fails, or is lost (mostly with its node) before it has given its shards, breaks the generation as well.
        givers = leavers if not self._generation.all_filled else ()
        own = {w: f for w in (*ending.living, *givers) if (f := detector.fault(w, world)) is not None and f.kind is not FaultKind.PEER}
        every = {**gone, **detector.losses(w for w in givers if self._crew.doomed(w))}
        causes = {one.cause for one in every.values()} | ({Cause.ERROR} if own else set())
        errors = [f"{w}: {one.reason}" for w, one in every.items()] + [f"{w}: {f.text}" for w, f in own.items()]
        if self._durable.state.counted_generation != world.ticket.generation:  # or an earlier life of the controller has counted it
            # To the others, a collective that fails though every worker lives is the same as a hang.
            self._spend(self._budget.failed(causes or {Cause.HANG}, errors or [f"{w}: {f.text}" for w, f in faults.items()][:1]))
            self._durable.note(counted_generation=world.ticket.generation)
        detector.evidence.failed(world, ending, log)
        if any(fault.kind is FaultKind.DATA for fault in faults.values()) and world.source.commit:
            self._keeper.distrust(world.source.commit)
        if own and world.source.origin is Origin.CHECKPOINT and not self._generation.all_filled:
            log.record("checkpoint_load_failed", commit=world.source.commit, error=next(iter(own.values())).text)
        if ending.lost:
            self._want_those_left(world.size, ending.living)
        log.record("generation_failed", lost=ending.lost, faults={w: f.text for w, f in faults.items()}, attempt=world.ticket.attempt)

    def _was_asked(self, world: World, reports: Iterable[Report | None]) -> bool:
        """Whether all have stopped at a boundary because an earlier life of the controller had asked them to, and told nobody of it."""
        parked = all(r is not None and r.ticket == world.ticket and r.phase is Phase.PARKED for r in reports)
        return parked and world.ticket == self._inherited and self._log.stats.rescale is None

    def _want_those_left(self, before: int, living: Sequence[str]) -> None:
        """Members were lost: the run goes on with those that are left, unless lost workers are replaced."""
        desk, elastic, steering = self.desk, self._config.elastic, self._steering
        fully = desk.target == before
        if not elastic.replace_lost:
            draining = steering.leaving(steering.leavers)
            back = [w for w in steering.leavers if self._crew.alive(w) and w not in draining]
            left = len(living) + len(back) + len(steering.outside(living)) + self._crew.hiring
            desk.want(max(elastic.min_workers, min(desk.target, left)), desk.reason)
        if fully or elastic.replace_lost:
            desk.explain("replacement")

    # -------------------------------------------------------------------------------------------------------- what follows

    def _recovering(self, state: states.Recovering) -> State:
        ended = state.ended
        if self._given_up is not None:
            return self._give_up(ended, self._given_up)
        decision, leaving = self._decide(ended, waited=state.waited)
        if not isinstance(decision, policy.Go | policy.Await):
            self._crew.unwish()
        match decision:
            case policy.Go(members, leavers):
                return states.Locating(ended, members, leavers, leaving, state.unreached)
            case policy.Await(workers, hire):
                self._durable.update()  # the wait may take minutes
                self._steering.hire_failures.clear()
                self._note_waiting(True)
                return self._hire_awaited(states.Waiting(ended, workers, hire, time.monotonic()))
            case policy.Complete():
                return self._complete(ended)
            case policy.Halt():
                return self._halt(ended)
            case policy.GiveUp(error, refused):
                return self._give_up(ended, error, refused)
        raise AssertionError(f"no such decision: {decision} at step {self._log.stats.step}")

    def _decide(self, ended: Ending, *, waited: bool) -> tuple[policy.Decision, frozenset[str]]:
        """The decision, and the workers that it counts as leaving whatever else is wanted."""
        crew, steering, desk = self._crew, self._steering, self.desk
        silent = crew.silent(SILENT_S)
        # A worker that was to leave after a move that has failed can join like any other.
        ready = [w for w in crew.ready() if w not in ended.living]
        # A joiner that is stopped, or does not reach the others, would hold up all of them.
        ready.sort(key=lambda w: (w in silent, w in steering.leavers, w in steering.untried))
        leaving = steering.leaving((*ended.living, *ready)) | steering.stragglers.leaving(ended.living, ready, desk.target)
        situation = policy.Situation(
            stopping=desk.stop is not None,
            target=desk.target,
            fewest=self._config.elastic.min_workers,
            ready=tuple(ready),
            warming=len(crew.warming()) + crew.hiring,
            replace_lost=self._config.elastic.replace_lost or self._config.elastic.grow,
            budget=self._budget,
            waited=waited,
            leaving=leaving,
        )
        return policy.after_generation(ended, situation), leaving

    def _locating(self, state: states.Locating) -> State:
        keeper, ended, members, leavers = self._keeper, state.ended, state.members, state.leavers
        holders = (*members, *leavers, *self._steering.leavers)
        try:
            newest = keeper.newer(holders)
        except Unanswered:
            return state if self.desk.stop is None else states.Recovering(self._still_living(ended), unreached=state.unreached)
        except OSError as problem:
            unreached, patience = state.unreached, self._spec.bounds.storage
            if unreached is None:
                unreached = time.monotonic()
                self._log.record("storage_unreachable", error=str(problem), patience_seconds=patience)
            if time.monotonic() - unreached > patience:
                return self._give_up(ended, f"no worker holds a state to go on from, and {problem}")
            self._durable.update()
            self._note_waiting(True)  # until the next generation
            return states.AwaitingStorage(ended, time.monotonic() + STORAGE_GAP_S, unreached)
        if not all(self._crew.alive(w) for w in members):
            return states.Recovering(self._still_living(ended), unreached=state.unreached)  # the storage has taken its time
        candidates = [w for w in ended.living if w in members or w not in state.leaving]
        if len(candidates) > len(members):  # fewer are wanted than could stay: no worker has joined
            members = keeper.staying(candidates, len(members), keeper.source(candidates, holders, newest), holders)
            leavers = tuple(w for w in ended.living if w not in members)
        source = keeper.source(members, holders, newest)
        return self._launch(keeper.seated(members, source, holders), leavers, source)

    def _awaiting_storage(self, state: states.AwaitingStorage) -> State:
        if self.desk.stop is None and time.monotonic() < state.until:
            return state
        return states.Recovering(self._still_living(state.ended), unreached=state.unreached)

    def _waiting(self, state: states.Waiting) -> State:
        crew, steering, elastic, ended = self._crew, self._steering, self._config.elastic, state.ended
        if self.desk.stop:
            return self._waited(state, waited=False)
        holders = (*ended.living, *steering.leavers)
        steering.hear_of_drains(holders)
        leaving = steering.leaving(holders)
        if leaving - state.told_of:
            state = replace(state, told_of=state.told_of | leaving)
            if self._keeper.held_step(holders) > (self._log.stats.checkpoints.step or 0):
                # They may hold the only copies, and no worker trains: the state is saved before their node goes.
                return states.Checkpointing(ended, Goal.DRAIN, tuple(w for w in holders if crew.alive(w)), then=state)
        steering.free_hemmed(self._avoided(state))
        # A worker that still writes, or seems to, counts as one that holds nothing, and takes no order.
        if len(crew.ready()) >= state.workers and not self._keeper.writes(holders):
            return self._waited(state, waited=False)
        hire = max(0, state.workers - len(crew.ready()) - len(crew.warming()) - crew.hiring)
        # Those that were to come have died: others are hired, as often as while a run begins.
        failed = len(steering.hire_failures) > elastic.max_recoveries_without_progress
        if hire and (not (elastic.replace_lost or elastic.grow) or failed):
            return self._waited(state, waited=True)
        if time.monotonic() - state.since >= self._spec.bounds.replace:
            return self._waited(state, waited=True)
        return self._hire_awaited(replace(state, hire=hire))

    def _hire_awaited(self, state: states.Waiting) -> states.Waiting:
        for _ in range(state.hire):
            self._crew.hire(self._avoided(state))
        return replace(state, hire=0)

    def _avoided(self, state: states.Waiting) -> Collection[str]:
        """Nodes to hire no worker on. If no other node has had a place for a while, one that was cut off may be used again."""
        nodes = self._steering.nodes
        return nodes.avoided if time.monotonic() - state.since < PLACE_S else nodes.draining.keys()

    def _waited(self, state: states.Waiting, *, waited: bool) -> states.Recovering:
        self._note_waiting(False)
        return states.Recovering(self._still_living(state.ended), waited)

    def _note_waiting(self, waiting: bool) -> None:
        """There is too little to go on with; or not any more."""
        if waiting is not self._log.stats.waiting:
            self._log.record("waiting", waiting=waiting)

    def _still_living(self, ended: Ending) -> Ending:
        """The ending as it is now: parked workers may die as well."""
        return replace(ended, living=tuple(w for w in ended.living if self._crew.alive(w)))

    # ----------------------------------------------------------------------------------------------------------- the end

    def _complete(self, ended: Ending) -> states.Checkpointing:
        self._generation.end_rescale(time.time(), self.desk.target)
        self._lifecycle.enter(RunState.CHECKPOINTING)
        return states.Checkpointing(ended, Goal.LAST, ended.living)

    def _halt(self, ended: Ending) -> states.Checkpointing:
        self._lifecycle.enter(RunState.STOPPING)
        return states.Checkpointing(ended, Goal.STOP, (*ended.living, *self._steering.leavers))

    def _give_up(self, ended: Ending, error: str, refused: bool = False) -> State:
        """The run has failed. What the survivors hold is saved, if it is newer than the newest checkpoint."""
        holders = (*ended.living, *self._steering.leavers)
        return self._with_evidence(error, refused) if refused else states.Checkpointing(ended, Goal.FAILURE, holders, error)

    def _with_evidence(self, error: str, refused: bool) -> states.Concluding:
        found = None if refused else self._detector.evidence.write(self._crew, self._log)
        error += f"; tracebacks and stacks of all workers: {found}" if found else ""
        return states.Concluding(error=error, refused=refused, hint=not refused)

    def _checkpointing(self, state: states.Checkpointing) -> State:
        try:
            result = self._keeper.save(state.workers, only_newer=state.goal is Goal.FAILURE)
        except Unanswered:
            return state
        match state.goal:
            case Goal.DRAIN:
                assert state.then is not None
                return state.then
            case Goal.FAILURE:
                return self._with_evidence(state.error, refused=False)
            case Goal.STOP:
                if result is not None and result.kept is None:
                    return states.Concluding(error=f"stopped at step {self._log.stats.step}, but its checkpoint failed: {result.error}")
                return states.Concluding(result)
        ended, kept, steps = state.ended, result.kept if result is not None else None, self._config.train.steps
        if kept is not None and kept.step == steps:
            self._lifecycle.enter(RunState.DONE)
            self._log.record("run_finished", checkpoint=kept.path)
            return states.Finished(Outcome("DONE", self._log.stats.step, checkpoint=kept.path))
        still = self._still_living(ended)
        lost = set(ended.living) - set(still.living)
        if result is not None and kept is None and not lost:
            newest = self._log.stats.checkpoints.path or "none"
            error = f"all {self._log.stats.step} steps are done, but the last checkpoint failed: {result.error}; the newest is {newest}"
            return states.Concluding(error=error)
        # The state is lost with a worker, and training goes back.
        if lost:  # or the loss was counted before
            causes = {one.cause for one in self._detector.losses(lost).values()}
            self._spend(self._budget.failed(causes or {Cause.KILLED}, ["workers were lost after the last step"]))
            self._want_those_left(len(ended.living), still.living)
        self._generation.begin_rescale("failure", len(ended.living))
        return states.Recovering(replace(still, finished=False))

    def _concluding(self, state: states.Concluding) -> State:
        try:
            kept = self._keeper.newest()
        except Unanswered:
            return state
        result, path = state.result, kept.path if kept is not None else None
        if state.error is not None:
            hint = f"; it can be resumed from step {kept.step} ({kept.path})" if kept is not None and state.hint else ""
            self._log.record("run_failed", error=state.error + hint)
            self._lifecycle.enter(RunState.FAILED)
            return states.Finished(Outcome("FAILED", self._log.stats.step, state.error + hint, path, state.refused))
        step = result.step if result is not None else kept.step if kept is not None else 0
        self._lifecycle.enter(RunState.DONE)
        self._log.record("run_stopped", reason=self.desk.stop, resume=path, resume_step=step)
        return states.Finished(Outcome("STOPPED", step, checkpoint=path))

    def _spend(self, budget: Budget) -> None:
        """Go on with this budget. The next write of the durable state keeps it."""
        self._budget = budget
        self._durable.note(
            highest_step=budget.high,
            crashes=budget.crashes,
            node_losses=budget.nodes,
            controller_restarts=budget.controllers,
            failures={str(cause): count for cause, count in budget.total.items()},
        )


def _has_state(report: Report) -> bool:
    """Whether a member of a generation has its state, by what it does in it."""
    return report.phase in (Phase.TRAINING, Phase.SAVING, Phase.FINISHED) or (report.phase is Phase.PARKED and report.fault is None)


def worlds_ahead(size: int, target: int) -> tuple[int, ...]:
    """The world sizes that may come next, the likely ones first: the target, then a few workers lost or joined."""
    return (size, target, *(size + step * sign for step in range(1, AHEAD + 1) for sign in (-1, 1)))


def import_heavy() -> None:
    """Import modules that take seconds and are needed in a recovery, while no worker waits for it. An error here is raised again, and
    reported, where the module is needed."""
    for module in ("checkpoint", "workers.snapshot", "workers.trainer"):
        importlib.import_module(f"vescale_ray.{module}")
