"""A generation: its orders, its rounds, and its end. Transitions of the control loop."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from vescale_ray.controller import states
from vescale_ray.controller.failures.budget import Cause
from vescale_ray.controller.parts import ControllerParts
from vescale_ray.controller.protocol import Ending, RunState, StateSource, World
from vescale_ray.controller.state.durable_state import LaunchedGeneration
from vescale_ray.controller.states import State
from vescale_ray.controller.transitions.launch import evaluation_due, givers_of, orders_of
from vescale_ray.controller.worker_group.worker_news import Lost
from vescale_ray.workers.messages import FaultKind, Origin, Ticket, WorkerPhase, WorkerReport

GIVER_S = 1.0
"""If a leaver is lost before it has confirmed its shards, they may still arrive for this many seconds."""


class Generations:
    """Begins, watches and ends generations."""

    def __init__(self, parts: ControllerParts) -> None:
        self._parts = parts
        self._fence_s = 0.0
        """Seconds that the end of the last generation took."""

    def launch(self, members: Sequence[str], leaving: Iterable[str], source: StateSource) -> states.Running:
        """Order a new generation. Its number is in the durable state before any worker gets it."""
        began, log, generation = time.monotonic(), self._parts.log, self._parts.generation
        world = World(Ticket(self._parts.durable.take_number(), max(1, self._parts.account.budget.tries)), tuple(members), source)
        if generation.world is not None and log.stats.rescale is None:
            generation.begin_rescale("failure", generation.world.size)  # the first generation failed before it began
        givers = givers_of(world)
        self._parts.scaling.begin(world.members, givers, leaving)
        self._parts.coordinator.abandon("the next generation began before it was written")
        self._parts.committer.fence(world.ticket.generation)
        self._parts.detector.begin(world)
        self._parts.durable.note(generation=LaunchedGeneration.of(world))
        self._parts.durable.write()
        evaluate = evaluation_due(source.step, self._parts.config, self._parts.spec, log.stats.heldout)
        orders = orders_of(world, givers, self._parts.worker_group.store(), self._parts.spec.run_id, evaluate=evaluate)
        generation.open(world, {"fence": self._fence_s, "plan": time.monotonic() - began}, self._parts.coordinator.numbered_by)
        self._fence_s = 0.0
        if self._parts.lifecycle.state is not RunState.STARTING:
            self._parts.lifecycle.enter(RunState.RESCALING)
        refused = self._parts.worker_group.order(orders)
        self._parts.worker_group.kill(
            {worker: f"killed: {problem}" for worker, problem in refused.items() if self._parts.worker_group.alive(worker)}
        )
        return states.Running(world)

    def running(self, state: states.Running) -> State:
        worker_group, detector, world, leavers = self._parts.worker_group, self._parts.detector, state.world, self._parts.scaling.leavers
        living = [w for w in world.members if worker_group.alive(w)]
        # A worker that was ended is lost in a moment, though its last report may say that it has left.
        party = (*world.members, *leavers)
        inside = dict.fromkeys(w for w in party if worker_group.alive(w) and (not detector.is_out(w, world) or worker_group.doomed(w)))
        if not inside:
            return self._ended(state, living)
        gave = state.gave | {w for w in leavers if detector.is_out(w, world) and not detector.fault(w, world)}
        lacking = [w for w in leavers if w not in gave and (detector.fault(w, world) or not worker_group.alive(w))]
        missing = bool(lacking) and not self._parts.generation.all_filled
        state = replace(state, gave=gave, missing_since=(state.missing_since or worker_group.clock()) if missing else None)
        # If a leaver's machine has stopped, or it has failed before it connected, no connection breaks. No member notices that its shards
        # will never come.
        forsaken = state.missing_since is not None and worker_group.clock() - state.missing_since > GIVER_S
        # A worker that writes a checkpoint which an earlier controller ordered no longer trains. The bound of that order applies.
        reports = [worker_group.report(w) for w in inside]
        writing = any(r is not None and r.phase is WorkerPhase.SAVING and r.ticket == world.ticket for r in reports)
        if writing and self._parts.lifecycle.state is RunState.RESCALING:
            self._enter_saving()
        if len(living) == world.size and all(w in inside for w in living) and not forsaken and not writing:
            return self._steady(state, inside)
        return self._draining(state, living, inside, forsaken=forsaken)

    def _steady(self, state: states.Running, inside: Collection[str]) -> states.Running:
        """Handle a round in which all members train or form their group."""
        detector, world, filled = self._parts.detector, state.world, self._parts.generation.all_filled
        if hung := detector.hung(world) or ({} if filled else detector.mute(world, inside)):
            detector.end(world, {w: f"it is hung: {why}" for w, why in hung.items()})
        elif self._is_still_read(world) and self._parts.commands.stop:
            # The read may take minutes more, and ending it loses nothing. The members leave at its next piece.
            if not state.cut_short:
                self._parts.lifecycle.enter(RunState.STOPPING)
                self._parts.worker_group.fence(inside, world.ticket)
            return replace(state, cut_short=True)
        else:
            detector.end_cut_off(world)
            self._parts.scaling.steer(world)
            if filled:
                self._parts.plan_ahead(world)
        return state

    def _draining(self, state: states.Running, living: Sequence[str], inside: Collection[str], *, forsaken: bool) -> states.Running:
        """See that the other workers leave in time, once some have left the generation or are lost."""
        worker_group, detector, world = self._parts.worker_group, self._parts.detector, state.world
        since = state.first_sign or worker_group.clock()
        state = replace(state, first_sign=since)
        if not state.broken and (len(living) < world.size or forsaken or any(detector.fault(w, world) for w in living)):
            state = replace(state, broken=True)
            self._break(world, inside)
        late = {w: f"it is hung: {why}" for w, why in detector.mute(world, inside).items()}
        out = [w for w in living if w not in inside]
        complete = self._parts.coordinator.held_step(out) >= self._parts.log.stats.step
        late |= detector.late(world, worker_group.clock() - since, [w for w in inside if w not in late], out, complete=complete)
        if late and state.cut_short:
            worker_group.kill(dict.fromkeys(late, "killed: it was still busy with what the stop had made needless"))
        elif late:
            detector.end(world, late)
        return state

    def _break(self, world: World, inside: Iterable[str]) -> None:
        """Close a generation that is broken, so that no worker in it begins another step."""
        state = self._parts.lifecycle.state
        if state is not RunState.STOPPING and (state is not RunState.STARTING or world.ticket.attempt > 1):
            self._parts.generation.begin_rescale("failure", world.size)
            self._parts.lifecycle.enter(RunState.RESCALING)
        self._parts.worker_group.fence(inside, world.ticket)

    def _is_still_read(self, world: World) -> bool:
        """Return whether a generation's state is still being read or initialised. No worker has the state then, so it can't be lost."""
        if self._parts.generation.all_filled or self._parts.log.stats.has_stepped or world.source.origin is Origin.MEMORY:
            return False
        # After a restart nothing is known yet of a generation that may have trained for days.
        return all((report := self._parts.worker_group.report(w)) is not None and not has_state(report) for w in world.members)

    def _enter_saving(self) -> None:
        """Enter the run state for a checkpoint that an earlier controller ordered. Mostly it is the last one."""
        if self._parts.log.stats.step >= self._parts.config.train.steps:
            self._parts.lifecycle.enter(RunState.CHECKPOINTING)
        elif self._parts.commands.stop is not None:
            self._parts.lifecycle.enter(RunState.STOPPING)

    # ------------------------------------------------------------------------------------------------------------ its end

    def _ended(self, state: states.Running, living: Sequence[str]) -> State:
        """Conclude a generation that no living worker is in, or begin to look for a broken network."""
        world, detector, leavers = state.world, self._parts.detector, self._parts.scaling.leavers
        faults = [fault for w in living if (fault := detector.fault(w, world)) is not None]
        if faults and len(living) == world.size and not state.cut_short and all(fault.kind is FaultKind.PEER for fault in faults):
            return states.Partitioned(state, tuple(living), leavers, detector.begin_partition())
        lives = frozenset(living)
        return self._concluded(state, living, {w: detector.loss(w) for w in world.members if w not in lives}, leavers)

    def partitioned(self, state: states.Partitioned) -> State:
        worker_group, detector, living = self._parts.worker_group, self._parts.detector, state.living
        lost: Mapping[str, Lost] = {}
        if time.monotonic() < state.until and not self._parts.commands.stop and not any(worker_group.doomed(w) for w in living):
            found = detector.partitioned(state.generation.world, living)
            if found is None:
                return state
            lost = found
        lost = {w: detector.loss(w) for w in living if worker_group.doomed(w)} | dict(lost)
        return self._concluded(state.generation, [w for w in living if w not in lost], lost, state.leavers)

    def _concluded(self, state: states.Running, living: Sequence[str], gone: Mapping[str, Lost], leavers: Sequence[str]) -> State:
        """Record how the generation has ended."""
        world, log, detector, worker_group = state.world, self._parts.log, self._parts.detector, self._parts.worker_group
        faults = {w: fault for w in living if (fault := detector.fault(w, world)) is not None}
        reports = [worker_group.report(w) for w in living]
        finished = not faults and bool(living) and all(r is not None and r.phase is WorkerPhase.FINISHED for r in reports)
        lost, causes = {w: one.reason for w, one in gone.items()}, {w: str(one.cause) for w, one in gone.items()}
        ending = Ending(tuple(living), lost, faults, finished, causes)
        if log.stats.rescale is not None and state.first_sign is not None:
            self._fence_s += worker_group.clock() - state.first_sign
        if state.cut_short:
            self._parts.coordinator.abandon()
        elif not ending.clean:
            self._failed(world, ending, gone, leavers)
        elif (
            not finished
            and self._parts.commands.stop is None
            and (self._parts.lifecycle.state is RunState.RUNNING or self._was_asked(world, reports))
        ):
            # The workers have received the request to stop, but their answer was lost.
            self._parts.generation.begin_rescale(self._parts.commands.reason, world.size)
        return states.Recovering(ending)

    def _failed(self, world: World, ending: Ending, gone: Mapping[str, Lost], leavers: Sequence[str]) -> None:
        """Count a failed generation, and record it."""
        log, detector, faults = self._parts.log, self._parts.detector, ending.faults
        self._parts.coordinator.abandon()
        # A leaver that fails, or is lost (mostly with its node) before it has given its shards, breaks the generation as well.
        givers = leavers if not self._parts.generation.all_filled else ()
        own = {w: f for w in (*ending.living, *givers) if (f := detector.fault(w, world)) is not None and f.kind is not FaultKind.PEER}
        every = {**gone, **detector.losses(w for w in givers if self._parts.worker_group.doomed(w))}
        causes = {one.cause for one in every.values()} | ({Cause.ERROR} if own else set())
        errors = [f"{w}: {one.reason}" for w, one in every.items()] + [f"{w}: {f.text}" for w, f in own.items()]
        if self._parts.durable.state.counted_generation != world.ticket.generation:  # otherwise an earlier controller counted it
            # For the other workers, a collective that fails though every worker lives is the same as a hang.
            self._parts.account.spend(
                self._parts.account.budget.failed(causes or {Cause.HANG}, errors or [f"{w}: {f.text}" for w, f in faults.items()][:1])
            )
            self._parts.durable.note(counted_generation=world.ticket.generation)
        detector.evidence.failed(world, ending, log)
        if any(fault.kind is FaultKind.DATA for fault in faults.values()) and world.source.commit:
            self._parts.coordinator.distrust(world.source.commit)
        if own and world.source.origin is Origin.CHECKPOINT and not self._parts.generation.all_filled:
            log.record("checkpoint_load_failed", commit=world.source.commit, error=next(iter(own.values())).text)
        if ending.lost:
            self._parts.want_those_left(world.size, ending.living)
        log.record("generation_failed", lost=ending.lost, faults={w: f.text for w, f in faults.items()}, attempt=world.ticket.attempt)

    def _was_asked(self, world: World, reports: Iterable[WorkerReport | None]) -> bool:
        """Return whether all stopped at a boundary because an earlier life of the controller asked them to, without a record of it."""
        parked = all(r is not None and r.ticket == world.ticket and r.phase is WorkerPhase.PARKED for r in reports)
        return parked and world.ticket == self._parts.detector.inherited and self._parts.log.stats.rescale is None


def has_state(report: WorkerReport) -> bool:
    """Return whether a member of a generation has its state, according to its phase."""
    return report.phase in (WorkerPhase.TRAINING, WorkerPhase.SAVING, WorkerPhase.FINISHED) or (
        report.phase is WorkerPhase.PARKED and report.fault is None
    )
