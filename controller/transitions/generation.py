"""A generation: its orders, its rounds, and its end. Transitions of the control loop."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from vescale_ray.config import RunConfig
from vescale_ray.controller import actions, states
from vescale_ray.controller.actions import Action
from vescale_ray.controller.checkpointing.parked import held_step
from vescale_ray.controller.failures.budget import Cause
from vescale_ray.controller.failures.failure_detector import FailureDetector
from vescale_ray.controller.observations import Observations
from vescale_ray.controller.protocol import Ending, Event, RunSpec, RunState, StateSource, World
from vescale_ray.controller.scaling.scaling import Scaling
from vescale_ray.controller.states import Step
from vescale_ray.controller.transitions.launch import evaluation_due, givers_of
from vescale_ray.controller.transitions.run_end import want_those_left
from vescale_ray.controller.worker_group.worker_news import Lost
from vescale_ray.workers.messages import FaultKind, Origin, Ticket, WorkerPhase, WorkerReport

GIVER_S = 1.0
"""If a leaver is lost before it has confirmed its shards, they may still arrive for this many seconds."""


class Generations:
    """Begins, watches and ends generations."""

    def __init__(self, spec: RunSpec, config: RunConfig, detector: FailureDetector, scaling: Scaling) -> None:
        self._spec, self._config, self._detector, self._scaling = spec, config, detector, scaling

    def launch(
        self,
        members: Sequence[str],
        leaving: Iterable[str],
        source: StateSource,
        seen: Observations,
        ended: Ending | None = None,
        numbered_by: str = "layouts",
    ) -> Step:
        """Order a new generation. ``leaving`` workers, and earlier leavers, are dismissed unless they give shards to it or are members."""
        ticket = Ticket(seen.durable.last_number + 1, max(1, seen.budget.tries))
        world = World(ticket, tuple(members), source)
        givers = tuple(givers_of(world))
        evaluate = evaluation_due(source.step, self._config, self._spec, seen.stats.evaluations)
        do: list[Action] = []
        if seen.world is not None and seen.stats.rescale is None:
            do.append(actions.BeginRescale("failure", seen.world.size))  # the first generation failed before it began
        do += [actions.Dismiss(worker) for worker in sorted({*leaving, *seen.leavers} - {*givers, *members})]
        do.append(actions.Note({"leavers": givers}))
        do.append(actions.Launch(world, givers, evaluate, ended.seconds if ended is not None else 0.0, numbered_by))
        if seen.stats.state is not RunState.STARTING:
            do.append(actions.Enter(RunState.RESCALING))
        return states.Running(world), do

    def running(self, state: states.Running, seen: Observations) -> Step:
        workers, world, leavers = seen.workers, state.world, seen.leavers
        living = [w for w in world.members if workers.alive(w)]
        # A worker that was ended is lost in a moment, though its last report may say that it has left.
        party = (*world.members, *leavers)
        inside = dict.fromkeys(w for w in party if workers.alive(w) and (not seen.is_out(w, world) or workers.ending(w)))
        if not inside:
            return self._ended(state, living, seen)
        gave = state.gave | {w for w in leavers if seen.is_out(w, world) and not seen.fault(w, world)}
        lacking = [w for w in leavers if w not in gave and (seen.fault(w, world) or not workers.alive(w))]
        missing = bool(lacking) and not seen.filled
        state = replace(state, gave=gave, missing_since=(state.missing_since or seen.clock) if missing else None)
        # If a leaver's machine has stopped, or it has failed before it connected, no connection breaks. No member notices that its shards
        # will never come.
        forsaken = state.missing_since is not None and seen.clock - state.missing_since > GIVER_S
        # A worker that writes a checkpoint which an earlier controller ordered no longer trains. The bound of that order applies.
        reports = [workers.report(w) for w in inside]
        writing = any(r is not None and r.phase is WorkerPhase.SAVING and r.ticket == world.ticket for r in reports)
        shown = self._saving_state(seen) if writing and seen.stats.state is RunState.RESCALING else seen.stats.state
        if len(living) == world.size and all(w in inside for w in living) and not forsaken and not writing:
            return self._steady(state, inside, seen)
        return self._draining(state, living, inside, seen, shown, forsaken=forsaken)

    def _steady(self, state: states.Running, inside: Collection[str], seen: Observations) -> Step:
        """Handle a round in which all members train or form their group."""
        detector, world = self._detector, state.world
        hung = detector.hung(world, seen) or ({} if seen.filled else detector.silent_members(world, inside, seen))
        if hung:
            return state, _unless_starved(hung, seen) or [actions.End({w: f"it is hung: {why}" for w, why in hung.items()}, world)]
        if self._is_still_read(world, seen) and seen.stop:
            # The read may take minutes more, and ending it loses nothing. The members leave at its next piece.
            stopping = [actions.Enter(RunState.STOPPING), actions.Fence(tuple(inside), world.ticket)]
            return replace(state, cut_short=True), [] if state.cut_short else stopping
        do = detector.cut_off(world, seen)
        if not any(isinstance(one, actions.End) for one in do):  # otherwise a later round sees the effects
            do += self._scaling.steer(world, seen)
        return state, do

    def _draining(
        self,
        state: states.Running,
        living: Sequence[str],
        inside: Collection[str],
        seen: Observations,
        shown: RunState,
        *,
        forsaken: bool,
    ) -> Step:
        """See that the other workers leave in time, once some have left the generation or are lost. ``shown``: the run's state."""
        detector, world, do = self._detector, state.world, list[Action]([actions.Enter(shown)] if shown is not seen.stats.state else [])
        since = state.first_sign or seen.clock
        state = replace(state, first_sign=since)
        if not state.broken and (len(living) < world.size or forsaken or any(seen.fault(w, world) for w in living)):
            state = replace(state, broken=True)
            if shown is not RunState.STOPPING and (shown is not RunState.STARTING or world.ticket.attempt > 1):
                do += [actions.BeginRescale("failure", world.size), actions.Enter(RunState.RESCALING)]
            do.append(actions.Fence(tuple(inside), world.ticket))  # so that no worker in it begins another step
        silent = detector.silent_members(world, inside, seen)
        if question := _unless_starved(silent, seen):
            return state, [*do, *question]
        late = {w: f"it is hung: {why}" for w, why in silent.items()}
        out = [w for w in living if w not in inside]
        complete = held_step(seen.workers, out) >= seen.stats.step
        late |= detector.exits.late(world, seen.clock - since, [w for w in inside if w not in late], len(out), seen, complete=complete)
        if late and state.cut_short:
            do.append(actions.End(dict.fromkeys(late, "killed: it was still busy with what the stop had made needless")))
        elif late:
            do.append(actions.End(late, world))
        return state, do

    def _is_still_read(self, world: World, seen: Observations) -> bool:
        """Return whether a generation's state is still being read or initialised. No worker has the state then, so it can't be lost."""
        if seen.filled or seen.stats.has_stepped or world.source.origin is Origin.MEMORY:
            return False
        # After a restart nothing is known yet of a generation that may have trained for days.
        return all((report := seen.workers.report(w)) is not None and not has_state(report) for w in world.members)

    def _saving_state(self, seen: Observations) -> RunState:
        """Return the run's state during a checkpoint that an earlier controller ordered. Mostly it is the last one."""
        if seen.stats.step >= self._config.train.steps:
            return RunState.CHECKPOINTING
        return RunState.STOPPING if seen.stop is not None else RunState.RESCALING

    def _ended(self, state: states.Running, living: Sequence[str], seen: Observations) -> Step:
        """Conclude a generation that no living worker is in, or begin to look for a broken network."""
        world = state.world
        faults = [fault for w in living if (fault := seen.fault(w, world)) is not None]
        if faults and len(living) == world.size and not state.cut_short and all(fault.kind is FaultKind.PEER for fault in faults):
            return states.Partitioned(state, tuple(living), seen.leavers, self._detector.begin_partition(seen.now)), []
        lives = frozenset(living)
        return self._concluded(state, living, {w: seen.loss(w) for w in world.members if w not in lives}, seen.leavers, seen)

    def partitioned(self, state: states.Partitioned, seen: Observations) -> Step:
        workers, living = seen.workers, state.living
        if seen.now < state.until and not seen.stop and not state.ended and not any(workers.ending(w) for w in living):
            known, do = self._detector.partitioned(state.generation.world, living, seen)
            if do or not known:
                return replace(state, ended=known), do
        lost = {w: seen.loss(w) for w in living if workers.ending(w)}
        return self._concluded(state.generation, [w for w in living if w not in lost], lost, state.leavers, seen)

    def _concluded(
        self, state: states.Running, living: Sequence[str], gone: Mapping[str, Lost], leavers: Sequence[str], seen: Observations
    ) -> Step:
        """Record how the generation has ended."""
        world, stats = state.world, seen.stats
        faults = {w: fault for w in living if (fault := seen.fault(w, world)) is not None}
        reports = [seen.workers.report(w) for w in living]
        finished = not faults and bool(living) and all(r is not None and r.phase is WorkerPhase.FINISHED for r in reports)
        lost, causes = {w: one.reason for w, one in gone.items()}, {w: str(one.cause) for w, one in gone.items()}
        seconds = seen.clock - state.first_sign if stats.rescale is not None and state.first_sign is not None else 0.0
        ending = Ending(tuple(living), lost, faults, finished, causes, seconds)
        if state.cut_short:
            return states.Recovering(ending), [actions.Conclude(world, ending)]
        if not ending.clean:
            return states.Recovering(ending), self._failed(world, ending, gone, leavers, seen)
        # If nobody has recorded a request to stop, the workers have received it, but their answer was lost.
        asked = not finished and seen.stop is None and (stats.state is RunState.RUNNING or self._was_asked(world, reports, seen))
        return states.Recovering(ending), [actions.BeginRescale(seen.durable.reason, world.size)] if asked else []

    def _failed(self, world: World, ending: Ending, gone: Mapping[str, Lost], leavers: Sequence[str], seen: Observations) -> list[Action]:
        """Count a failed generation, and record it."""
        faults, damaged = ending.faults, any(fault.kind is FaultKind.DATA for fault in ending.faults.values())
        do: list[Action] = [actions.Conclude(world, ending, failed=True, damaged=world.source.commit if damaged else None)]
        # A leaver that fails, or is lost (mostly with its node) before it has given its shards, breaks the generation as well.
        givers = leavers if not seen.filled else ()
        own = {w: f for w in (*ending.living, *givers) if (f := seen.fault(w, world)) is not None and f.kind is not FaultKind.PEER}
        every = {**gone, **{w: seen.losses[w] for w in givers if w in seen.losses and seen.workers.ending(w)}}
        causes = {one.cause for one in every.values()} | ({Cause.ERROR} if own else set())
        errors = [f"{w}: {one.reason}" for w, one in every.items()] + [f"{w}: {f.text}" for w, f in own.items()]
        if seen.durable.counted_generation != world.ticket.generation:  # otherwise an earlier controller counted it
            # For the other workers, a collective that fails though every worker lives is the same as a hang.
            errors = errors or [f"{w}: {f.text}" for w, f in faults.items()][:1]
            do.append(actions.Spend(seen.budget.failed(causes or {Cause.HANG}, errors)))
            do.append(actions.Note({"counted_generation": world.ticket.generation}))
        if own and world.source.origin is Origin.CHECKPOINT and not seen.filled:
            problem = {"commit": world.source.commit, "error": next(iter(own.values())).text}
            do.append(Event("checkpoint_load_failed", problem))
        if ending.lost:
            do.append(want_those_left(seen, self._config, world.size, ending.living))
        about: dict[str, Any] = {
            "lost": ending.lost,
            "faults": {w: f.text for w, f in faults.items()},
            "attempt": world.ticket.attempt,
        }
        if any(fault.kind is FaultKind.NUMBERS for fault in faults.values()):
            about["nonfinite_weights"] = True
        return [*do, Event("generation_failed", about)]

    def _was_asked(self, world: World, reports: Iterable[WorkerReport | None], seen: Observations) -> bool:
        """Return whether all stopped at a boundary because an earlier process of the controller asked them to, and kept no record."""
        parked = all(r is not None and r.ticket == world.ticket and r.phase is WorkerPhase.PARKED for r in reports)
        return parked and world.ticket == seen.inherited and seen.stats.rescale is None


def _unless_starved(accused: Iterable[str], seen: Observations) -> list[Action]:
    """Return the question to ask before hung workers are ended: for how long did they get no processor?"""
    unasked = tuple(w for w in accused if w not in seen.starved)
    return [actions.AskStarved(unasked)] if unasked else []


def has_state(report: WorkerReport) -> bool:
    """Return whether a member of a generation has its state, according to its phase."""
    return report.phase in (WorkerPhase.TRAINING, WorkerPhase.SAVING, WorkerPhase.FINISHED) or (
        report.phase is WorkerPhase.PARKED and report.fault is None
    )
