"""The controller's thread: one generation after another, until the run is done.

    gather -> launch -> watch -> decide -> launch -> watch -> ... -> last checkpoint -> Outcome

``watch`` lasts as long as a generation: from the orders to form it until nobody is in it any more, whether it ended at a
boundary that all agreed on or because a member was lost; while all goes well, ``steering`` staffs it. What follows is
``policy.after_generation``'s answer. Every wait is a loop over :meth:`Conductor._tick`, which hears the workers, carries commands in
and keeps the books; so commands, deaths and checkpoints are dealt with the same way wherever the run is. Nothing here blocks without
a bound.
"""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from vescale_ray.config import RunConfig
from vescale_ray.controller import policy
from vescale_ray.controller.autoscaling import PLACE_S
from vescale_ray.controller.budget import Cause
from vescale_ray.controller.cadence import Cadence
from vescale_ray.controller.connectivity import TRY_S, CutOff
from vescale_ray.controller.crew import POLL_WAIT_S, Crew, Heard, Lost, News, Ready, Told
from vescale_ray.controller.desk import Desk
from vescale_ray.controller.durable_state import DurableState, LaunchedGeneration, StateStore
from vescale_ray.controller.evidence import Evidence
from vescale_ray.controller.exit_deadlines import ExitDeadlines, Surroundings, WorkerView
from vescale_ray.controller.generation_log import GenerationLog
from vescale_ray.controller.hang import HangWatch
from vescale_ray.controller.hang_report import end_hung
from vescale_ray.controller.keeper import Keeper
from vescale_ray.controller.protocol import (
    Ending,
    Outcome,
    RunSpec,
    RunState,
    Source,
    World,
    check_transition,
)
from vescale_ray.controller.publisher import Observed, Publisher
from vescale_ray.controller.run_lifecycle import budget_of, enter
from vescale_ray.controller.run_log import RunLog
from vescale_ray.controller.saves import Saves
from vescale_ray.controller.scribe import begun
from vescale_ray.controller.steering import Steering
from vescale_ray.workers.messages import (
    Damaged,
    Evaluated,
    Fault,
    FaultKind,
    Filled,
    Give,
    Join,
    Order,
    Origin,
    Outlined,
    Phase,
    Report,
    Saved,
    Seat,
    Skipped,
    Stepped,
    Ticket,
)

_log = logging.getLogger(__name__)

TICK_S = 0.1
"""Longest wait for news in one round of the loop."""
ADOPT_S = 3.0
"""A restarted controller hears the workers for this long before it goes on with those that have answered."""
OUTLINE_S = 0.5
"""After that it goes on without having heard what the layouts follow from."""
SILENT_S = 1.0
"""Of those that could join, one that has owed an answer for so long is the last to be taken."""
GIVER_S = 1.0
"""A leaver that is lost before it has told that its shards are given may have given them all the same: so long they may still arrive."""
STORAGE_GAP_S = 2.0
"""Between two questions to a storage that is out of reach."""
AHEAD = 4
"""Layouts are planned for so many workers more or fewer than there are."""
LAST_LIVES = 3
"""So many controllers of a run that is given up may try to keep what the workers hold; those after them end the run at once."""


class Conductor:
    """Conducts one run, in one thread; ``desk`` takes commands from others.

    Args:
        spec: what the driver wants.
        state: what an earlier life of the controller left; ``store``: where the next one goes.
        publisher: is given what each round of the loop has seen.
    """

    def __init__(
        self,
        spec: RunSpec,
        config: RunConfig,
        crew: Crew,
        log: RunLog,
        publisher: Publisher,
        saves: Saves,
        state: DurableState,
        store: StateStore,
    ) -> None:
        self._spec, self._config = spec, config
        self._crew, self._log, self._publisher, self._saves = crew, log, publisher, saves
        self._generation = generation = GenerationLog(log, config)
        if state.generation is not None:
            generation.adopt(state.generation.world())
        self._state, self._store = state, store
        self._budget = budget_of(config, state, log.stats.step)
        self._fence_s = 0.0
        """Seconds that the end of the last generation took."""
        self._evidence = Evidence()
        self.desk = Desk(spec, config, crew, log, state, self._remember)
        root = config.checkpoint_root
        self._cadence = Cadence(config.checkpoint, time.monotonic(), max(0.0, time.time() - log.stats.started))
        self._keeper = Keeper(
            root,
            spec.run_id,
            crew,
            log,
            generation,
            saves,
            self._take_number,
            self._wait,
            spec.bounds.save,
            self._cadence,
            config.max_workers,
            spec.oldest,
        )
        planned = self._keeper.layouts.planned
        self._steering = Steering(
            spec, config, crew, log, generation, saves, self.desk, self._cadence, state, self._remember, self._enter, planned
        )
        self._exit_deadlines = ExitDeadlines(config.elastic, spec.bounds)
        patience = config.elastic.hang_timeout_s
        elastic = config.elastic
        replaced = elastic.replace_lost or elastic.grow or elastic.spares > 0
        self._hangs = HangWatch(None if patience == "auto" else patience, elastic.collective_timeout_s, replaced)
        self._inherited: Ticket | None = None
        self._cut_short: Ticket | None = None
        """The generation that a stop ended before it had its state."""
        self._gone: dict[str, Lost] = {}
        self._leaving: frozenset[str] = frozenset()
        """Of those that the last decision was about, whoever leaves whatever else is wanted."""

    _giving_up = False
    """The budget was spent before this life began: it keeps what there is. Nothing that comes of that makes the next one go on."""

    # ----------------------------------------------------------------------------------------------------------- the whole

    def run(self) -> Outcome:
        """The run from where it is to its end. Raises only what is a bug, or the loss of the nursery."""
        try:
            return self._conduct()
        finally:
            self.desk.close()
            self._keeper.layouts.close()

    def _conduct(self) -> Outcome:
        self._remember()  # that the controller was restarted counts, also for the next one
        begun(import_heavy)
        self._steering.nodes.start()
        if self._budget.controllers and (spent := self._budget.verdict) is not None:
            self._giving_up = True
            return self._give_up(self._brought_to_rest(), spent, refused=False)
        if self._state.generation is not None:
            ended = self._watch(self._adopted())
        else:
            self._enter(RunState.STARTING)
            outcome = self._gather()
            if outcome is not None:
                return outcome
            members = self._crew.ready()[: self.desk.target]
            ended = self._watch(self._launch(members, (), self._spec.source))
        waited, unreached = False, None
        while True:
            decision = self._decide(ended, waited)
            if not isinstance(decision, policy.Go | policy.Await):
                self._crew.unwish()
            match decision:
                case policy.Go(members, leavers):
                    waited = False
                    try:
                        chosen = self._chosen(ended, members, leavers)
                    except OSError as problem:
                        if unreached is None:
                            unreached = time.monotonic()
                            self._log.record("storage_unreachable", error=str(problem), patience_seconds=self._spec.bounds.storage)
                        if time.monotonic() - unreached > self._spec.bounds.storage:
                            return self._give_up(ended, f"no worker holds a state to go on from, and {problem}", refused=False)
                        self._await_storage()
                        ended = self._still_living(ended)
                    else:
                        unreached = None
                        ended = self._watch(self._launch(*chosen))
                case policy.Await(workers, hire):
                    waited = not self._await(ended, workers, hire)
                    ended = self._still_living(ended)
                case policy.Complete():
                    outcome = self._complete(ended)
                    if outcome is not None:
                        return outcome
                    ended = replace(self._still_living(ended), finished=False)
                case policy.Halt():
                    return self._halt(ended)
                case policy.GiveUp(error, refused):
                    return self._give_up(ended, error, refused)
                case _:
                    raise AssertionError(f"no such decision: {decision} at step {self._log.stats.step}")

    def _decide(self, ended: Ending, waited: bool) -> policy.Decision:
        silent = self._crew.silent(SILENT_S)
        stragglers = self._steering.stragglers
        # Whoever was to leave after a move that has failed is as good as a joiner, where one is missing now.
        ready = [w for w in self._crew.ready() if w not in ended.living]
        # A joiner that is stopped would hold up everyone, and one that does not reach the others.
        ready.sort(key=lambda w: (w in silent, w in self._steering.leavers, w in self._steering.untried))
        self._leaving = self._steering.leaving((*ended.living, *ready)) | stragglers.leaving(ended.living, ready, self.desk.target)
        situation = policy.Situation(
            stopping=self.desk.stop is not None,
            target=self.desk.target,
            fewest=self._config.elastic.min_workers,
            ready=tuple(ready),
            warming=len(self._crew.warming()) + self._crew.hiring,
            replace_lost=self._config.elastic.replace_lost or self._config.elastic.grow,
            budget=self._budget,
            waited=waited,
            leaving=self._leaving,
        )
        return policy.after_generation(ended, situation)

    # ----------------------------------------------------------------------------------------------------- gathering workers

    def _gather(self) -> Outcome | None:
        """Have the first workers warm; an outcome if it can't be, or is not wanted any more."""
        fewest = self._config.elastic.min_workers
        if self._state.epoch > 1:
            self._crew.adopt(self._log.stats.workers)
        self._crew.prepare_store()
        deadline = time.monotonic() + self._spec.bounds.start
        while len(self._crew.ready()) < (wanted := self.desk.target):  # which may be changed meanwhile
            if len(self._steering.hire_failures) > self._config.elastic.max_recoveries_without_progress:
                return self._failed(f"workers do not start: {self._steering.hire_failures[-1]}")
            for _ in range(wanted - len(self._crew.ready()) - len(self._crew.warming()) - self._crew.hiring):
                self._crew.hire()
            self._tick()
            if self.desk.stop:
                return self._halt(Ending(()))
            if time.monotonic() > deadline:
                ready = len(self._crew.ready())
                if ready < fewest:
                    need = self._config.ray
                    return self._failed(
                        f"{ready} of {wanted} workers were up after {self._spec.bounds.start:g} s, elastic.min_workers = {fewest}: has the "
                        f"cluster {wanted} times {need.cpus_per_worker:g} CPUs and {need.gpus_per_worker:g} GPUs free?"
                    )
                for worker in self._crew.warming():
                    self._crew.dismiss(worker)
                self.desk.want(ready, "manual")
                return None
        return None

    def _await(self, ended: Ending, workers: int, hire: int) -> bool:
        """Wait until ``workers`` are there, survivors included; whether they came in time."""
        self._remember()  # it may take minutes
        elastic, failures, nodes = self._config.elastic, self._steering.hire_failures, self._steering.nodes
        failures.clear()
        self._waits(True)
        try:
            began, told_of = time.monotonic(), frozenset[str]()
            while (waited := time.monotonic() - began) < self._spec.bounds.replace and not self.desk.stop:
                # Without more there is no training: where no other node has a place, one that was cut off may do by now.
                avoid = nodes.avoided if waited < PLACE_S else nodes.draining.keys()
                for _ in range(hire):
                    self._crew.hire(avoid)
                self._tick()
                holders = (*ended.living, *self._steering.leavers)
                self._steering.hear_of_drains(holders)
                leaving = self._steering.leaving(holders)
                if leaving - told_of and self._keeper.held_step(holders) > (self._log.stats.checkpoints.step or 0):
                    # What they hold may be the only copies, and nobody trains: it is kept before their node goes.
                    self._keeper.save([w for w in holders if self._crew.alive(w)])
                told_of |= leaving
                self._steering.free_hemmed(avoid)
                # Who still writes, or seems to, counts as one that holds nothing, and takes no order.
                if len(self._crew.ready()) >= workers and not self._keeper.writes(holders):
                    return True
                hire = max(0, workers - len(self._crew.ready()) - len(self._crew.warming()) - self._crew.hiring)
                # Those that were to come have died: as often as while a run begins, others are hired.
                if hire and (not (elastic.replace_lost or elastic.grow) or len(failures) > elastic.max_recoveries_without_progress):
                    return False
            return self.desk.stop is not None
        finally:
            self._waits(False)

    def _await_storage(self) -> None:
        """What nobody holds is in checkpoints only, and where they are nothing answers: it may in a moment."""
        self._remember()
        self._waits(True)  # until the next generation
        self._wait(lambda: self.desk.stop is not None, STORAGE_GAP_S)

    def _waits(self, waiting: bool) -> None:
        """There is too little to go on with; or not any more."""
        if waiting is not self._log.stats.waiting:
            self._log.record("waiting", waiting=waiting)

    def _still_living(self, ended: Ending) -> Ending:
        """The ending as it is now: parked workers may die as well."""
        return replace(ended, living=tuple(w for w in ended.living if self._crew.alive(w)))

    # ----------------------------------------------------------------------------------------------------- one generation

    def _chosen(self, ended: Ending, members: tuple[str, ...], leavers: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...], Source]:
        """Members in the order of their ranks, leavers, and the state to go on from.

        Raises:
            OSError: nobody holds a state, and the checkpoints are out of reach.
        """
        holders = (*members, *leavers, *self._steering.leavers)
        candidates = [w for w in ended.living if w in members or w not in self._leaving]
        if len(candidates) > len(members):  # fewer are wanted than could stay: nobody has joined
            members = self._keeper.staying(candidates, len(members), holders)
            leavers = tuple(w for w in ended.living if w not in members)
        source = self._keeper.source(members, holders)
        return self._keeper.seated(members, source, holders), leavers, source

    def _launch(self, members: tuple[str, ...], leavers: Iterable[str], source: Source) -> World:
        """Order a new generation. Its number is written down before anyone hears of it."""
        began = time.monotonic()
        log, generation = self._log, self._generation
        world = World(Ticket(self._take_number(), max(1, self._budget.tries)), tuple(members), source)
        if generation.world is not None and log.stats.rescale is None:
            generation.begin_rescale("failure", generation.world.size)  # the first generation failed before it began
        givers = [w for w in source.resume.workers if w not in members] if source.resume is not None else []
        for worker in {*leavers, *self._steering.leavers} - {*givers, *members}:
            self._steering.let_go(worker)
        self._steering.leavers = givers
        self._steering.asked = None
        self._state = replace(self._state, generation=LaunchedGeneration.of(world))
        self._keeper.abandon("the next generation began before it was written")
        self._saves.fence(world.ticket.generation)
        self._hangs.begin(world.ticket, world.size)
        self._remember(always=True)
        orders = self._orders(world, givers)
        generation.open(world, {"fence": self._fence_s, "plan": time.monotonic() - began}, self._keeper.numbered_by)
        self._fence_s = 0.0
        if log.stats.state is not RunState.STARTING:
            self._enter(RunState.RESCALING)
        refused = self._crew.order(orders)
        self._crew.kill({worker: f"killed: {problem}" for worker, problem in refused.items() if self._crew.alive(worker)})
        return world

    def _orders(self, world: World, givers: Sequence[str]) -> dict[str, Order]:
        """The orders for the members and for the leavers that give them shards."""
        store, source = self._crew.store(), world.source
        prefix = f"{self._spec.run_id}/{world.ticket}"
        party = (*world.members, *givers)
        orders: dict[str, Order] = {}
        for rank, worker in enumerate(party):
            transfer = Seat(*store, f"{prefix}/move", rank, len(party)) if givers else None
            if rank >= world.size:
                assert transfer is not None
                orders[worker] = Give(world.ticket, transfer, source.resume)
                continue
            orders[worker] = Join(
                ticket=world.ticket,
                seat=Seat(*store, prefix, rank, world.size),
                origin=source.origin,
                save_prefix=f"{self._spec.run_id}-g{world.ticket.generation}",
                transfer=transfer,
                commit=source.commit,
                resume=source.resume,
                evaluate=self._evaluation_due(source.step),
            )
        return orders

    def _evaluation_due(self, step: int) -> bool:
        """Before the first step, and where that of the step which the run goes on from was lost with a worker; never twice. What it has
        begun with was evaluated before it was kept."""
        every, first = self._config.train.eval_every, self._spec.source.step
        due = step in (0, self._config.train.steps) or (every > 0 and step % every == 0 and step > first)
        return due and self._config.data.eval_samples > 0 and step not in self._log.stats.heldout

    def _watch(self, world: World) -> Ending:
        """Drive a generation until nobody is in it any more."""
        first_sign: float | None = None
        missing_since: float | None = None
        broken = False
        gave: set[str] = set()
        while True:
            self._tick()
            party = [w for w in (*world.members, *self._steering.leavers) if self._crew.alive(w)]
            living = [w for w in world.members if self._crew.alive(w)]
            lost = {w: self._gone.get(w, Lost(w, None, "its process died")) for w in world.members if not self._crew.alive(w)}
            # Who was ended is none of those that go on, though the last word of it may be that it is out: a moment later it is lost.
            inside = dict.fromkeys(w for w in party if not self._is_out(w, world) or self._crew.doomed(w))
            if not inside:
                return self._end(world, living, lost, first_sign)
            gave |= {w for w in self._steering.leavers if self._is_out(w, world) and not self._fault(w, world)}
            missing = [w for w in self._steering.leavers if w not in gave and (self._fault(w, world) or not self._crew.alive(w))]
            missing_since = (missing_since or self._crew.clock()) if missing and not self._generation.all_filled else None
            # Where a leaver's machine has stopped no connection breaks, nor where it has failed before it had any: nobody notices that what
            # it was to give will never come.
            forsaken = missing_since is not None and self._crew.clock() - missing_since > GIVER_S
            # Who writes what the controller before this one has ordered does not train any more: it is waited for as that one would have.
            reports = [self._crew.report(w) for w in inside]
            writing = any(r is not None and r.phase is Phase.SAVING and r.ticket == world.ticket for r in reports)
            if writing and self._log.stats.state is RunState.RESCALING:
                self._tell_what_is_saved_for()
            if len(living) == world.size and all(w in inside for w in living) and not forsaken and not writing:
                hung = self._hung(world) or (self._mute(world, inside) if not self._generation.all_filled else {})
                if hung:
                    self._evidence.hung(end_hung(self._crew, self._log, world, {w: f"it is hung: {why}" for w, why in hung.items()}))
                elif self._is_still_read(world) and self.desk.stop:
                    # Nothing is lost with what they have read so far, and that may take minutes more. They leave at the next piece.
                    if self._cut_short != world.ticket:
                        self._cut_short = world.ticket
                        self._enter(RunState.STOPPING)
                        self._crew.fence(inside, world.ticket)
                else:
                    self._end_cut_off(world)
                    self._steering.steer(world)
                    if self._generation.all_filled:
                        self._plan_ahead(world)
                continue
            first_sign = first_sign or self._crew.clock()
            if not broken and (lost or forsaken or any(self._fault(w, world) for w in living)):
                broken = True
                self._break(world, inside)
            late = {w: f"it is hung: {why}" for w, why in self._mute(world, inside).items()}
            out = [w for w in living if w not in inside]
            late |= self._late(world, self._crew.clock() - first_sign, [w for w in inside if w not in late], out)
            if late and self._cut_short == world.ticket:
                self._crew.kill(dict.fromkeys(late, "killed: it was still busy with what the stop had made needless"))
            elif late:
                self._evidence.hung(end_hung(self._crew, self._log, world, late))

    def _late(self, world: World, since: float, inside: Sequence[str], out: Sequence[str]) -> dict[str, str]:
        """The workers of ``inside`` that are still in a generation that is over, and have to be ended; ``out`` have left it."""
        crew, stats = self._crew, self._log.stats
        silent, ready = crew.silent(self._exit_deadlines.silence_s), crew.ready()
        views = {w: WorkerView(crew.report(w), w in silent, crew.doomed(w)) for w in inside}
        spares = sum(w in ready for w in self._steering.outside(world.members))
        complete = self._keeper.held_step(out) >= stats.step
        rest = Surroundings(len(out), complete, spares, stats.steps.last_seconds, stats.steps.longest)
        return self._exit_deadlines.late(since, views, rest)

    def _is_still_read(self, world: World) -> bool:
        """Whether a generation's state is still on its way from a checkpoint, or being made: nobody has it, so that none can be lost."""
        if self._generation.all_filled or self._log.stats.has_stepped or world.source.origin is Origin.MEMORY:
            return False
        # After a restart nothing is known yet of a generation that may train for days.
        return all((report := self._crew.report(w)) is not None and not _has_state(report) for w in world.members)

    def _tell_what_is_saved_for(self) -> None:
        """A checkpoint that the controller before this one has ordered is being written: the last one, mostly."""
        if self._log.stats.step >= self._config.train.steps:
            self._enter(RunState.CHECKPOINTING)
        elif self.desk.stop is not None:
            self._enter(RunState.STOPPING)

    def _hung(self, world: World) -> Mapping[str, str]:
        """Who hangs, and is to be ended."""
        now = time.monotonic()
        if any(self._crew.doomed(worker) for worker in world.members):
            return {}  # somebody was just ended: what follows from that is seen in a moment
        hung = self._hangs.verdict(world.members, now)
        starved = self._crew.starved(hung) if hung else {}
        if starved:
            for worker, seconds in starved.items():
                self._hangs.starved(worker, seconds)
            hung = self._hangs.verdict(world.members, now)
        if hung:
            self._hangs.ended(hung)
        return hung

    def _end_cut_off(self, world: World) -> None:
        """Where all stand still and nobody hangs, see whether their nodes reach each other, and do without those that have to go."""
        leavers = [w for w in self._steering.leavers if self._crew.alive(w)]
        if any(self._crew.doomed(worker) for worker in (*world.members, *leavers)):
            return  # what follows from that is seen in a moment
        if not self._hangs.stalled(world.members, time.monotonic()):
            return self._steering.connectivity.progressed()
        cut = self._steering.cut_off(world.members, leavers)
        if cut is not None and self._has_to_be(world, world.members, cut):
            self._do_without(world, cut)

    def _lost_to_network(self, world: World, living: Sequence[str]) -> dict[str, Lost]:
        """A collective has failed, or no group was formed, though everybody is there: those whose nodes and others' don't reach each other.
        They are ended, and so are leavers, who are among those gone afterwards. Where all reach each other that is known at once. Who dies
        meanwhile is lost, too."""
        self._steering.connectivity.hurry()
        steering, lost = self._steering, dict[str, Lost]()
        deadline = time.monotonic() + self._steering.connectivity.patience_s + 3 * TRY_S
        while time.monotonic() < deadline and not self.desk.stop and not any(self._crew.doomed(w) for w in living):
            leavers = [w for w in steering.leavers if not self._crew.doomed(w)]
            cut = steering.cut_off(living, leavers)
            if cut is not None and not cut.workers:
                break
            if cut is not None and self._has_to_be(world, living, cut):
                lost = {w: Lost(w, self._crew.info(w), f"killed: {cut.why(n)}", Cause.NODE) for w, n in cut.workers.items() if w in living}
                self._do_without(world, cut)
                for worker in set(steering.leavers).intersection(cut.workers):
                    self._gone[worker] = Lost(worker, self._crew.info(worker), f"killed: {cut.why(cut.workers[worker])}", Cause.NODE)
                steering.leavers = [w for w in steering.leavers if w not in cut.workers]
                break
            self._tick()
        return {w: self._gone.get(w, Lost(w, None, "its process died")) for w in living if self._crew.doomed(w)} | lost

    def _has_to_be(self, world: World, members: Sequence[str], cut: CutOff) -> bool:
        """Whether it is time to do without the workers that are cut off."""
        due, events = self._steering.connectivity.due(cut, members, len(self._spares(world, cut)), world.ticket)
        for event in events:
            self._log.record(event.name, **event.about)
        return due

    def _spares(self, world: World, cut: CutOff) -> list[str]:
        """Warm workers beside the members that could take a place, on nodes that are not cut off themselves."""
        ready, nodes = self._crew.ready(), set(cut.workers.values())
        spares = [w for w in self._steering.outside(world.members) if w in ready]
        return [w for w in spares if (info := self._crew.info(w)) is not None and info.node not in nodes]

    def _do_without(self, world: World, cut: CutOff) -> None:
        """End those that are cut off, and have nobody on their nodes for a while."""
        steering = self._steering
        gone = set(cut.workers.values())
        for node in gone:
            steering.nodes.shun(node)
        for worker in steering.outside(world.members):
            info = self._crew.info(worker)
            if info is not None and info.node in gone:
                steering.let_go(worker)  # else it would take the place of one of them
        why = {worker: cut.why(node) for worker, node in cut.workers.items()}
        self._evidence.hung(end_hung(self._crew, self._log, world, why, cut))

    def _mute(self, world: World, inside: Collection[str]) -> Mapping[str, str]:
        """Who of those that the others wait for answers nothing, though nobody trains: while the group forms, or once it is broken. Not
        where all are silent."""
        found = self._mutes(world, inside)
        return self._mutes(world, inside) if found and self._crew.starved(found) else found

    def _mutes(self, world: World, inside: Collection[str]) -> Mapping[str, str]:
        found: dict[str, str] = {}
        for worker in inside:
            report = self._crew.report(worker)
            if self._crew.doomed(worker) or (report is not None and report.phase is Phase.SAVING):
                continue
            trains = report is not None and report.ticket == world.ticket and report.phase is Phase.TRAINING
            bound = min(self._hangs.bound_s, self._hangs.forming_s) if trains else self._hangs.forming_s
            if worker in self._crew.silent(bound - POLL_WAIT_S):
                found[worker] = f"it has answered nothing for {bound:.1f} s"
        return found if any(self._crew.alive(w) and w not in found for w in world.members) else {}

    def _plan_ahead(self, world: World) -> None:
        """Have the layouts that may come next planned while the workers train; what they follow from is any member's to tell."""
        layouts = self._keeper.layouts
        if layouts.told:
            layouts.ahead(worlds_ahead(world.size, self.desk.target))
        else:
            self._crew.ask_outline(world.members)

    def _is_planned(self, world: World) -> bool:
        """Whether nobody owes an answer any more of what the layouts follow from; who has not been asked is asked now."""
        self._plan_ahead(world)
        return not self._crew.asking_outline

    def _is_out(self, worker: str, world: World) -> bool:
        report = self._crew.report(worker)
        if report is None or not report.out:
            return False
        # In a generation that an earlier controller launched, an order that has not come by now never will.
        return report.ticket == world.ticket or (world.ticket == self._inherited and report.ticket < world.ticket)

    def _fault(self, worker: str, world: World) -> Fault | None:
        report = self._crew.report(worker)
        return report.fault if report is not None and report.ticket == world.ticket else None

    def _break(self, world: World, inside: Iterable[str]) -> None:
        """A generation is broken: close it, so that whoever is still in it does not begin another step."""
        state = self._log.stats.state
        if state is RunState.STOPPING:
            pass  # what is left stops: there is no other generation
        elif state is not RunState.STARTING or world.ticket.attempt > 1:
            self._generation.begin_rescale("failure", world.size)
            self._enter(RunState.RESCALING)
        self._crew.fence(inside, world.ticket)

    def _end(self, world: World, living: list[str], gone: dict[str, Lost], first_sign: float | None) -> Ending:
        faults = {w: fault for w in living if (fault := self._fault(w, world)) is not None}
        leavers = tuple(self._steering.leavers)
        if faults and not gone and self._cut_short != world.ticket and all(fault.kind is FaultKind.PEER for fault in faults.values()):
            gone = self._lost_to_network(world, living)
            living = [w for w in living if w not in gone]
            faults = {w: fault for w, fault in faults.items() if w in living}
        reports = [self._crew.report(w) for w in living]
        finished = not faults and bool(living) and all(r is not None and r.phase is Phase.FINISHED for r in reports)
        lost = {w: one.reason for w, one in gone.items()}
        ending = Ending(tuple(living), lost, faults, finished, {w: str(one.cause) for w, one in gone.items()})
        log = self._log
        if log.stats.rescale is not None and first_sign is not None:
            self._fence_s += self._crew.clock() - first_sign
        if self._cut_short == world.ticket:
            self._keeper.abandon()
        elif not ending.clean:
            self._keeper.abandon()
            # A leaver that is lost before all is given, mostly since its node went, breaks the generation as well. So does one that fails.
            givers = leavers if not self._generation.all_filled else ()
            own = {w: f for w in (*living, *givers) if (f := self._fault(w, world)) is not None and f.kind is not FaultKind.PEER}
            every = gone | {w: self._gone[w] for w in givers if w in self._gone and self._crew.doomed(w)}
            causes = {one.cause for one in every.values()} | ({Cause.ERROR} if own else set())
            errors = [f"{w}: {one.reason}" for w, one in every.items()] + [f"{w}: {f.text}" for w, f in own.items()]
            if self._state.counted_generation != world.ticket.generation:  # else an earlier life of the controller has counted it
                # A collective that fails though everybody is there: to the others, that is what a hang is.
                self._budget = self._budget.failed(causes or {Cause.HANG}, errors or [f"{w}: {f.text}" for w, f in faults.items()][:1])
                self._state = replace(self._state, counted_generation=world.ticket.generation)
            self._evidence.failed(world, ending, log)
            if any(fault.kind is FaultKind.DATA for fault in faults.values()) and world.source.commit:
                self._keeper.distrust(world.source.commit)
            if own and world.source.origin is Origin.CHECKPOINT and not self._generation.all_filled:
                log.record("checkpoint_load_failed", commit=world.source.commit, error=next(iter(own.values())).text)
            if lost:
                self._want_those_left(world.size, living)
            log.record("generation_failed", lost=lost, faults={w: f.text for w, f in faults.items()}, attempt=world.ticket.attempt)
        elif not finished and self.desk.stop is None and (log.stats.state is RunState.RUNNING or self._was_asked(world, reports)):
            # The wish to stop was heard, though the answer to it was not.
            self._generation.begin_rescale(self.desk.reason, world.size)
        return ending

    def _was_asked(self, world: World, reports: Iterable[Report | None]) -> bool:
        """Whether all have stopped at a boundary since an earlier life of the controller, which told nobody of it, had asked them to."""
        parked = all(r is not None and r.ticket == world.ticket and r.phase is Phase.PARKED for r in reports)
        return parked and world.ticket == self._inherited and self._log.stats.rescale is None

    def _want_those_left(self, before: int, living: Sequence[str]) -> None:
        """Members were lost: the run goes on with those that are left, whoever wants more asks for more."""
        desk, elastic, steering = self.desk, self._config.elastic, self._steering
        fully = desk.target == before
        if not elastic.replace_lost:
            draining = steering.leaving(steering.leavers)
            back = [w for w in steering.leavers if self._crew.alive(w) and w not in draining]
            left = len(living) + len(back) + len(steering.outside(living)) + self._crew.hiring
            desk.want(max(elastic.min_workers, min(desk.target, left)), desk.reason)
        if fully or elastic.replace_lost:
            desk.explain("replacement")

    # ------------------------------------------------------------------------------------------------------ states to go on from

    def _complete(self, ended: Ending) -> Outcome | None:
        """The last checkpoint; None when a state is lost with a worker that died now, and training must go back."""
        self._generation.end_rescale(time.time(), self.desk.target)
        self._enter(RunState.CHECKPOINTING)
        result = self._keeper.save(ended.living)
        kept = result.kept if result is not None else None
        if kept is not None and kept.step == self._config.train.steps:
            self._enter(RunState.DONE)
            self._log.record("run_finished", checkpoint=kept.path)
            return Outcome("DONE", self._log.stats.step, checkpoint=kept.path)
        living = self._still_living(ended).living
        lost = set(ended.living) - set(living)
        if result is None or kept is not None or lost:
            if lost:  # else what is missing was lost, and counted, before
                causes = {self._gone[w].cause for w in lost if w in self._gone}
                self._budget = self._budget.failed(causes or {Cause.KILLED}, ["workers were lost after the last step"])
                self._want_those_left(len(ended.living), living)
            self._generation.begin_rescale("failure", len(ended.living))
            return None
        newest = self._log.stats.checkpoints.path or "none"
        return self._failed(
            f"all {self._log.stats.step} steps are done, but the last checkpoint failed: {result.error}; the newest is {newest}"
        )

    def _halt(self, ended: Ending) -> Outcome:
        self._enter(RunState.STOPPING)
        result = self._keeper.save((*ended.living, *self._steering.leavers))
        kept = self._keeper.newest()
        if result is not None and result.kept is None:
            return self._failed(f"stopped at step {self._log.stats.step}, but its checkpoint failed: {result.error}")
        step = result.step if result is not None else kept.step if kept else 0
        self._enter(RunState.DONE)
        self._log.record("run_stopped", reason=self.desk.stop, resume=kept.path if kept else None, resume_step=step)
        return Outcome("STOPPED", step, checkpoint=kept.path if kept else None)

    def _give_up(self, ended: Ending, error: str, refused: bool) -> Outcome:
        """The run has failed: keep what the survivors still hold, if it is more than the newest checkpoint."""
        kept = self._keeper.newest()
        holders = (*ended.living, *self._steering.leavers)
        if not refused and self._keeper.held_step(holders) > (kept.step if kept else 0):
            self._keeper.save(holders)
            kept = self._keeper.newest()
        found = None if refused else self._evidence.write(self._crew, self._log)
        error += f"; tracebacks and stacks of all workers: {found}" if found else ""
        hint = f"; it can be resumed from step {kept.step} ({kept.path})" if kept else ""
        return self._failed(error + hint, refused)

    def _brought_to_rest(self) -> Ending:
        """Controllers came and went, and the workers train on, or are parked since the one before this was to keep what they hold: have
        them stop at a boundary, so that it can be kept. Not for ever: what ended this controller's predecessors may be just that."""
        if self._state.generation is None or self._budget.controllers > self._budget.limits.controllers + LAST_LIVES:
            return Ending(())
        self.desk.end("it is given up")
        return self._watch(self._adopted())

    def _failed(self, error: str, refused: bool = False) -> Outcome:
        self._log.record("run_failed", error=error)
        self._enter(RunState.FAILED)
        kept = self._keeper.newest()
        return Outcome("FAILED", self._log.stats.step, error, kept.path if kept else None, refused)

    # ----------------------------------------------------------------------------------------------------------- restarts

    def _adopted(self) -> World:
        """The generation that an earlier life of the controller had launched. Its workers have not stopped for that."""
        stats, world = self._log.stats, self._generation.world
        assert world is not None
        self._inherited = world.ticket
        # Else who hangs by now would be found by the collectives only.
        self._hangs.expect(stats.steps.last_seconds or 0.0, stats.steps.paces)
        self._hangs.begin(world.ticket, world.size)
        # Each worker tells its last vote again; those of an older generation were given up.
        self._saves.fence(world.ticket.generation)
        self._crew.adopt(stats.workers)
        heard: set[str] = set()
        deadline = time.monotonic() + ADOPT_S
        while time.monotonic() < deadline and not all(w in heard or not self._crew.alive(w) for w in world.members):
            # Books are kept from here on too: what comes in now is not told twice.
            heard |= {n.report.worker for n in self._tick() if isinstance(n, Heard)}
            self._plan_ahead(world)
        # What comes next may be a recovery: it is numbered by the layouts, too.
        self._wait(lambda: self._is_planned(world), OUTLINE_S)
        party = (*world.members, *self._steering.leavers)
        reports = [self._crew.report(w) for w in party]
        if any(report is not None and report.ticket < world.ticket for report in reports):
            self._crew.fence(party, world.ticket)
        filled = all(report is not None and report.ticket == world.ticket and _has_state(report) for report in reports[: world.size])
        if stats.has_stepped or filled:
            # The move is over for all: whoever was to give and is not there any more was let go, and is not missing.
            self._steering.leavers = [w for w in self._steering.leavers if self._crew.alive(w)]
        return world

    def _take_number(self) -> int:
        """A generation's number, noted before it is used."""
        self._state = replace(self._state, last_number=self._state.last_number + 1)
        self._remember(always=True)
        return self._state.last_number

    def _remember(self, *, always: bool = False) -> None:
        state = replace(
            self._state,
            target=self.desk.target,
            reason=self.desk.reason,
            requested=self.desk.requested,
            actions_done=self.desk.actions,
            highest_step=self._budget.high,
            crashes=self._budget.crashes,
            node_losses=self._budget.nodes,
            controller_restarts=self._budget.controllers,
            failures={str(cause): count for cause, count in self._budget.total.items()},
            leavers=tuple(self._steering.leavers),
            growth=self._steering.autoscaling.note,
            straggler=self._steering.stragglers.note,
            stop_reason=self._state.stop_reason if self._giving_up else self.desk.stop,
        )
        if state != self._state or always:
            self._state = self._store.write(state)

    # -------------------------------------------------------------------------------------------------------------- the loop

    def _tick(self) -> list[News]:
        """One round: hear the workers, keep the books, carry commands in. At most :data:`TICK_S` seconds."""
        news, generation = self._crew.pump(TICK_S), self._generation
        for one in news:
            match one:
                case Ready(info):
                    generation.worker_started(info)
                    self._steering.hire_failures.clear()
                case Heard(report):
                    self._hangs.heard(report, time.monotonic())
                    self._hear(report)
                case Told(Outlined(outline)):
                    self._keeper.layouts.take(outline)
                case Lost(worker, info, reason):
                    if info is not None and info.node in self._steering.nodes.draining:
                        one = replace(one, cause=Cause.NODE)
                    self._gone[worker] = one
                    kind, at = "killed" if "killed:" in reason else "died", {"pid": info and info.pid, "node": info and info.node}
                    self._log.record("worker_lost", worker=worker, reason=reason, kind=kind, cause=str(one.cause), **at)
                    if info is None:
                        self._steering.hire_failed(reason)
                    elif worker not in self._steering.leavers and (generation.world is None or worker not in generation.world.members):
                        self._steering.fleeting.append(reason)
        silence = self._spec.bounds.silence or self._config.elastic.collective_timeout_s
        mute = f"killed: answered nothing for {silence:g} s, its process is hung or stopped"
        self._crew.kill(dict.fromkeys(self._crew.silent(silence), mute))
        self._keeper.collect()
        self.desk.heed()
        self._publisher.publish(self._observed())
        self._publisher.write_record()
        return news

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

    def _wait(self, until: Callable[[], bool], seconds: float) -> bool:
        """Run the loop until then, or for so long; whether it came to it."""
        deadline = time.monotonic() + seconds
        while not until() and time.monotonic() < deadline:
            self._tick()
        return until()

    def _hear(self, report: Report) -> None:
        generation = self._generation
        generation.workers.heard(report.worker, time.time())
        for _, item in report.items:
            match item:
                case Stepped():
                    self._hangs.stepped(item.ticket, item.record.step, item.record.seconds, item.record.alone_seconds)
                    if generation.stepped(report.worker, item):
                        progressed = self._budget.progressed(item.record.step)
                        self._budget = replace(self._budget, high=progressed.high) if self._giving_up else progressed
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
            # It has its state, though the item that said so may have gone to the controller before this one.
            generation.filled(report.worker, Filled(world.ticket, world.source.step, world.source.origin, {}))

    def _enter(self, state: RunState) -> None:
        before = self._log.stats.state
        if state is not before:
            check_transition(before, state)
            enter(self._log, self._publisher, state)


def _has_state(report: Report) -> bool:
    """Whether a member of a generation has got its state, by what it does in it."""
    return report.phase in (Phase.TRAINING, Phase.SAVING, Phase.FINISHED) or (report.phase is Phase.PARKED and report.fault is None)


def worlds_ahead(size: int, target: int) -> tuple[int, ...]:
    """The world sizes that may come next, the likely ones first: what is wanted, then a few lost or joined."""
    return (size, target, *(size + step * sign for step in range(1, AHEAD + 1) for sign in (-1, 1)))


def import_heavy() -> None:
    """What takes seconds to import and is needed in a recovery: while the workers train, or become warm, nobody waits for it. What fails
    here fails again where it is needed, and is told there."""
    for module in ("checkpoint", "workers.snapshot", "workers.trainer"):
        importlib.import_module(f"vescale_ray.{module}")
