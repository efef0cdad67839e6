"""The transitions from the end of a generation to the next one: decide, wait for workers, locate the state."""

from __future__ import annotations

from dataclasses import replace

from vescale_ray.config import RunConfig
from vescale_ray.controller import actions, policy, states
from vescale_ray.controller.actions import Action
from vescale_ray.controller.checkpointing.parked import held, held_step, seated, staying, writes
from vescale_ray.controller.observations import Observations
from vescale_ray.controller.protocol import Ending, Event, RunSpec
from vescale_ray.controller.scaling.autoscaling import PLACE_S
from vescale_ray.controller.scaling.scaling import Scaling
from vescale_ray.controller.states import Goal, Step
from vescale_ray.controller.transitions.generation import Generations
from vescale_ray.controller.transitions.run_end import RunEnd
from vescale_ray.workers.resharding.shard_layouts import Layouts

SILENT_S = 1.0
"""Workers that have owed an answer for longer than this (seconds) are the last to join."""
STORAGE_GAP_S = 2.0
"""Seconds between two questions to a storage that is out of reach."""


class Recovery:
    """Goes from one generation to the next, or to the end of the run."""

    def __init__(self, spec: RunSpec, config: RunConfig, scaling: Scaling, layouts: Layouts, generations: Generations, end: RunEnd) -> None:
        self._spec, self._config, self._scaling, self._layouts = spec, config, scaling, layouts
        self._generations, self._end = generations, end

    def recovering(self, state: states.Recovering, seen: Observations) -> Step:
        ended = state.ended
        if seen.given_up is not None:
            return self._end.give_up(ended, seen.given_up, seen)
        decision, leaving = self._decide(ended, seen, waited=state.waited)
        match decision:
            case policy.Go(members, leavers):
                return states.Locating(ended, members, leavers, leaving, state.unreached), []
            case policy.Await(workers, hire):
                self._scaling.forget_hires()
                waiting, hires = self._hire_awaited(states.Waiting(ended, workers, hire, seen.now, unreached=state.unreached), seen)
                return waiting, [actions.Note({}, write=True), *_note_waiting(True, seen), *hires]  # the wait may take minutes
            case policy.Complete():
                following, do = self._end.complete(ended, seen)
            case policy.Halt():
                following, do = self._end.halt(ended, seen)
            case policy.GiveUp(error, refused):
                following, do = self._end.give_up(ended, error, seen, refused)
        return following, [actions.Wish(None), *do]

    def _decide(self, ended: Ending, seen: Observations, *, waited: bool) -> tuple[policy.Decision, frozenset[str]]:
        """The decision, and the workers that must leave in any case."""
        workers, scaling, durable = seen.workers, self._scaling, seen.durable
        silent = workers.silent(SILENT_S)
        # A worker that was to leave after a move that has failed can join like any other.
        living = frozenset(ended.living)
        ready = [w for w in workers.ready() if w not in living]
        # A joiner that is stopped, or does not reach the others, would hold up all of them.
        ready.sort(key=lambda w: (w in silent, w in seen.leavers, w in scaling.untried))
        leaving = seen.leaving((*ended.living, *ready)) | scaling.stragglers.leaving(ended.living, ready, durable.target)
        situation = policy.Situation(
            stopping=seen.stop is not None,
            target=durable.target,
            fewest=self._config.elastic.min_workers,
            ready=tuple(ready),
            warming=len(workers.warming()) + workers.hiring,
            replace_lost=self._config.elastic.replace_lost or self._config.elastic.grow,
            budget=seen.budget,
            waited=waited,
            leaving=leaving,
        )
        return policy.after_generation(ended, situation), leaving

    def locating(self, state: states.Locating, seen: Observations) -> Step:
        workers, ended, members, leavers = seen.workers, state.ended, state.members, state.leavers
        holders = (*members, *leavers, *seen.leavers)
        find, again = actions.FindCheckpoint(holders), states.Recovering(seen.still_living(ended), unreached=state.unreached)
        if find not in seen.answers:
            return (state, [find]) if seen.stop is None else (again, [])
        newest = seen.answers[find]
        if isinstance(newest, OSError):
            return self._storage_unreached(state, newest, seen)
        if not all(workers.alive(w) for w in members):
            return again, []  # lost while the storage was asked
        chosen, held_now = frozenset(members), held(workers, holders)
        candidates = [w for w in ended.living if w in chosen or w not in state.leaving]
        if len(candidates) > len(members):  # fewer are wanted than could stay: no worker has joined
            resume = policy.choose_source(held_now, candidates, newest, seen.world).resume
            members = staying(candidates, len(members), resume, held_now, workers, self._layouts)
            chosen = frozenset(members)
            leavers = tuple(w for w in ended.living if w not in chosen)
        source = policy.choose_source(held_now, members, newest, seen.world)
        ranked, numbered_by = seated(members, source.resume, held_now, self._layouts)
        return self._generations.launch(ranked, leavers, source, seen, ended, numbered_by)

    def _storage_unreached(self, state: states.Locating, problem: OSError, seen: Observations) -> Step:
        do: list[Action] = []
        unreached, patience = state.unreached, self._spec.bounds.storage
        if unreached is None:
            unreached = seen.now
            do.append(Event("storage_unreachable", {"error": str(problem), "patience_seconds": patience}))
        if seen.now - unreached > patience:
            following, more = self._end.give_up(state.ended, f"no worker holds a state to go on from, and {problem}", seen)
            return following, [*do, *more]
        do += [actions.Note({}, write=True), *_note_waiting(True, seen)]  # until the next generation
        return states.AwaitingStorage(state.ended, seen.now + STORAGE_GAP_S, unreached), do

    def awaiting_storage(self, state: states.AwaitingStorage, seen: Observations) -> Step:
        if seen.stop is None and seen.now < state.until:
            return state, []
        return states.Recovering(seen.still_living(state.ended), unreached=state.unreached), []

    def waiting(self, state: states.Waiting, seen: Observations) -> Step:
        workers, elastic, ended = seen.workers, self._config.elastic, state.ended
        if seen.stop:
            return _waited(state, seen, waited=False)
        holders = seen.holders(ended)
        do: list[Action] = [*self._scaling.hear_of_drains(holders, seen)]
        leaving = seen.leaving(holders)
        if leaving - state.told_of:
            state = replace(state, told_of=state.told_of | leaving)
            if held_step(workers, holders) > (seen.stats.checkpoints.step or 0):
                # They may hold the only copies, and no worker trains: the state is saved before their node goes.
                living = tuple(w for w in holders if workers.alive(w))
                return states.Checkpointing(ended, Goal.DRAIN, living, then=state), do
        freed = self._scaling.free_hemmed(self._avoided(state, seen), seen)
        # A worker that still writes, or seems to, counts as one that holds nothing, and takes no order.
        if len(workers.ready()) >= state.workers and not writes(workers, holders):
            return _waited(state, seen, waited=False, do=[*do, *freed])
        hire = max(0, state.workers - len(workers.ready()) - len(workers.warming()) - workers.hiring)
        # If hired workers have died, others are hired, as often as at the beginning of a run.
        failed = len(self._scaling.hire_failures) > elastic.max_recoveries_without_progress
        given_up = hire and (not (elastic.replace_lost or elastic.grow) or failed)
        if given_up or seen.now - state.since >= self._spec.bounds.replace:
            return _waited(state, seen, waited=True, do=[*do, *freed])
        following, hires = self._hire_awaited(replace(state, hire=hire), seen)
        return following, [*do, *freed, *hires]

    def _hire_awaited(self, state: states.Waiting, seen: Observations) -> tuple[states.Waiting, list[Action]]:
        return replace(state, hire=0), [actions.Hire(self._avoided(state, seen))] * state.hire

    def _avoided(self, state: states.Waiting, seen: Observations) -> frozenset[str]:
        """Nodes to hire no worker on. If no other node has had a place for a while, one that was cut off may be used again."""
        return seen.avoided if seen.now - state.since < PLACE_S else frozenset(seen.draining)


def _waited(state: states.Waiting, seen: Observations, *, waited: bool, do: list[Action] | None = None) -> Step:
    following = states.Recovering(seen.still_living(state.ended), waited, state.unreached)
    return following, [*(do or []), *_note_waiting(False, seen)]


def _note_waiting(waiting: bool, seen: Observations) -> list[Action]:
    """Record whether the run waits for workers or for the storage."""
    return [Event("waiting", {"waiting": waiting})] if waiting is not seen.stats.waiting else []
