"""The transitions from the end of a generation to the next one: decide, wait for workers, locate the state."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import replace

from vescale_ray.controller import policy, states
from vescale_ray.controller.checkpointing.coordinator import Unanswered
from vescale_ray.controller.parts import ControllerParts
from vescale_ray.controller.protocol import Ending
from vescale_ray.controller.scaling.autoscaling import PLACE_S
from vescale_ray.controller.states import Goal, State
from vescale_ray.controller.transitions.generation import Generations
from vescale_ray.controller.transitions.run_end import RunEnd

SILENT_S = 1.0
"""Workers that have owed an answer for longer than this (seconds) are the last to join."""
STORAGE_GAP_S = 2.0
"""Seconds between two questions to a storage that is out of reach."""


class Recovery:
    """Goes from one generation to the next, or to the end of the run."""

    def __init__(self, parts: ControllerParts, generations: Generations, end: RunEnd) -> None:
        self._parts, self._generations, self._end = parts, generations, end

    def recovering(self, state: states.Recovering) -> State:
        ended = state.ended
        if self._parts.account.given_up is not None:
            return self._end.give_up(ended, self._parts.account.given_up)
        decision, leaving = self._decide(ended, waited=state.waited)
        if not isinstance(decision, policy.Go | policy.Await):
            self._parts.worker_group.unwish()
        match decision:
            case policy.Go(members, leavers):
                return states.Locating(ended, members, leavers, leaving, state.unreached)
            case policy.Await(workers, hire):
                self._parts.durable.update()  # the wait may take minutes
                self._parts.scaling.hire_failures.clear()
                self._note_waiting(True)
                return self._hire_awaited(states.Waiting(ended, workers, hire, time.monotonic(), unreached=state.unreached))
            case policy.Complete():
                return self._end.complete(ended)
            case policy.Halt():
                return self._end.halt(ended)
            case policy.GiveUp(error, refused):
                return self._end.give_up(ended, error, refused)
        raise AssertionError(f"no such decision: {decision} at step {self._parts.log.stats.step}")

    def _decide(self, ended: Ending, *, waited: bool) -> tuple[policy.Decision, frozenset[str]]:
        """The decision, and the workers that must leave in any case."""
        worker_group, scaling, commands = self._parts.worker_group, self._parts.scaling, self._parts.commands
        silent = worker_group.silent(SILENT_S)
        # A worker that was to leave after a move that has failed can join like any other.
        living = frozenset(ended.living)
        ready = [w for w in worker_group.ready() if w not in living]
        # A joiner that is stopped, or does not reach the others, would hold up all of them.
        ready.sort(key=lambda w: (w in silent, w in scaling.leavers, w in scaling.untried))
        leaving = scaling.leaving((*ended.living, *ready)) | scaling.stragglers.leaving(ended.living, ready, commands.target)
        situation = policy.Situation(
            stopping=commands.stop is not None,
            target=commands.target,
            fewest=self._parts.config.elastic.min_workers,
            ready=tuple(ready),
            warming=len(worker_group.warming()) + worker_group.hiring,
            replace_lost=self._parts.config.elastic.replace_lost or self._parts.config.elastic.grow,
            budget=self._parts.account.budget,
            waited=waited,
            leaving=leaving,
        )
        return policy.after_generation(ended, situation), leaving

    def locating(self, state: states.Locating) -> State:
        coordinator, ended, members, leavers = self._parts.coordinator, state.ended, state.members, state.leavers
        holders = (*members, *leavers, *self._parts.scaling.leavers)
        try:
            newest = coordinator.newer(holders)
        except Unanswered:
            return (
                state
                if self._parts.commands.stop is None
                else states.Recovering(self._parts.still_living(ended), unreached=state.unreached)
            )
        except OSError as problem:
            unreached, patience = state.unreached, self._parts.spec.bounds.storage
            if unreached is None:
                unreached = time.monotonic()
                self._parts.log.record("storage_unreachable", error=str(problem), patience_seconds=patience)
            if time.monotonic() - unreached > patience:
                return self._end.give_up(ended, f"no worker holds a state to go on from, and {problem}")
            self._parts.durable.update()
            self._note_waiting(True)  # until the next generation
            return states.AwaitingStorage(ended, time.monotonic() + STORAGE_GAP_S, unreached)
        if not all(self._parts.worker_group.alive(w) for w in members):
            return states.Recovering(self._parts.still_living(ended), unreached=state.unreached)  # lost while the storage was asked
        chosen = frozenset(members)
        candidates = [w for w in ended.living if w in chosen or w not in state.leaving]
        if len(candidates) > len(members):  # fewer are wanted than could stay: no worker has joined
            members = coordinator.staying(candidates, len(members), coordinator.source(candidates, holders, newest), holders)
            chosen = frozenset(members)
            leavers = tuple(w for w in ended.living if w not in chosen)
        source = coordinator.source(members, holders, newest)
        return self._generations.launch(coordinator.seated(members, source, holders), leavers, source)

    def awaiting_storage(self, state: states.AwaitingStorage) -> State:
        if self._parts.commands.stop is None and time.monotonic() < state.until:
            return state
        return states.Recovering(self._parts.still_living(state.ended), unreached=state.unreached)

    def waiting(self, state: states.Waiting) -> State:
        worker_group, scaling, elastic, ended = self._parts.worker_group, self._parts.scaling, self._parts.config.elastic, state.ended
        if self._parts.commands.stop:
            return self._waited(state, waited=False)
        holders = (*ended.living, *scaling.leavers)
        scaling.hear_of_drains(holders)
        leaving = scaling.leaving(holders)
        if leaving - state.told_of:
            state = replace(state, told_of=state.told_of | leaving)
            if self._parts.coordinator.held_step(holders) > (self._parts.log.stats.checkpoints.step or 0):
                # They may hold the only copies, and no worker trains: the state is saved before their node goes.
                return states.Checkpointing(ended, Goal.DRAIN, tuple(w for w in holders if worker_group.alive(w)), then=state)
        scaling.free_hemmed(self._avoided(state))
        # A worker that still writes, or seems to, counts as one that holds nothing, and takes no order.
        if len(worker_group.ready()) >= state.workers and not self._parts.coordinator.writes(holders):
            return self._waited(state, waited=False)
        hire = max(0, state.workers - len(worker_group.ready()) - len(worker_group.warming()) - worker_group.hiring)
        # If hired workers have died, others are hired, as often as at the beginning of a run.
        failed = len(scaling.hire_failures) > elastic.max_recoveries_without_progress
        if hire and (not (elastic.replace_lost or elastic.grow) or failed):
            return self._waited(state, waited=True)
        if time.monotonic() - state.since >= self._parts.spec.bounds.replace:
            return self._waited(state, waited=True)
        return self._hire_awaited(replace(state, hire=hire))

    def _hire_awaited(self, state: states.Waiting) -> states.Waiting:
        for _ in range(state.hire):
            self._parts.worker_group.hire(self._avoided(state))
        return replace(state, hire=0)

    def _avoided(self, state: states.Waiting) -> Collection[str]:
        """Nodes to hire no worker on. If no other node has had a place for a while, one that was cut off may be used again."""
        nodes = self._parts.scaling.nodes
        return nodes.avoided if time.monotonic() - state.since < PLACE_S else nodes.draining.keys()

    def _waited(self, state: states.Waiting, *, waited: bool) -> states.Recovering:
        self._note_waiting(False)
        return states.Recovering(self._parts.still_living(state.ended), waited, state.unreached)

    def _note_waiting(self, waiting: bool) -> None:
        """Record whether the run waits for workers or for the storage."""
        if waiting is not self._parts.log.stats.waiting:
            self._parts.log.record("waiting", waiting=waiting)
