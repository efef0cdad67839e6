"""The transitions from the end of a generation to the next one: decide, wait for workers, locate the state."""

from __future__ import annotations

from dataclasses import replace

from vescale_ray.config import RunConfig
from vescale_ray.controller import actions, policy, states
from vescale_ray.controller.actions import Action
from vescale_ray.controller.checkpointing.parked import assign_ranks, held, held_step, staying, writes
from vescale_ray.controller.observations import Observations
from vescale_ray.controller.protocol import Ending, Event, RunSpec
from vescale_ray.controller.scaling.autoscaling import PLACE_S
from vescale_ray.controller.scaling.scaling import Scaling
from vescale_ray.controller.states import Goal, Step
from vescale_ray.controller.transitions.generation import Generations
from vescale_ray.controller.transitions.run_end import RunEnd
from vescale_ray.workers.messages import FaultKind
from vescale_ray.workers.resharding.shard_layouts import Layouts

SILENT_S = 1.0
"""Workers that have owed an answer for longer than this (seconds) are the last to join."""
STANDBY_S = 2.0
"""Seconds for which a recovery waits for standbys. It takes much less on a CPU. If one is later, it joins in a change of its own."""
STORAGE_GAP_S = 2.0
"""Seconds between two questions to a storage that is out of reach."""


class Recovery:
    """Goes from one generation to the next, or to the end of the run."""

    def __init__(self, spec: RunSpec, config: RunConfig, scaling: Scaling, layouts: Layouts, generations: Generations, end: RunEnd) -> None:
        self._spec, self._config, self._scaling, self._layouts = spec, config, scaling, layouts
        self._generations, self._end = generations, end

    def recovering(self, state: states.Recovering, seen: Observations) -> Step:
        ended, end, elastic, durable, workers = state.ended, self._end, self._config.elastic, seen.durable, seen.workers
        if seen.given_up is not None:
            return end.give_up(ended, seen.given_up, seen)
        if inputs := [fault.text for fault in ended.faults.values() if fault.kind is FaultKind.INPUT]:
            return end.give_up(ended, inputs[0], seen, refused=True)
        if numbers := [fault.text for fault in ended.faults.values() if fault.kind is FaultKind.NUMBERS]:
            return end.give_up(ended, numbers[0], seen, save=False)
        if ended.finished and ended.living:
            return end.complete(ended, seen)
        if seen.stop is not None:
            return end.halt(ended, seen)
        if (spent := seen.budget.verdict) is not None:
            return end.give_up(ended, spent, seen)
        ready = self._ready(ended, seen)
        # Workers that leave in any case: their node is about to go, or they are slow and have a replacement.
        leaving = seen.leaving((*ended.living, *ready)) | self._scaling.stragglers.leaving(ended.living, ready, durable.target)
        members, leavers = policy.next_members(ended.living, ready, durable.target, leaving, self._config.whole)
        if (standbys := self._standbys(state, len(members), seen)) is not None:
            return standbys
        fewest, warming = elastic.min_workers, len(workers.warming()) + workers.hiring
        if len(members) < fewest:
            # It is better to train with workers that have to leave soon than not to train.
            members, leavers = policy.next_members(ended.living, ready, durable.target, whole=self._config.whole)
        if len(members) >= fewest:
            return states.Locating(ended, members, leavers, leaving, state.unreached), []
        replaced = elastic.replace_lost or elastic.grow
        if state.waited or (not replaced and len(members) + warming < fewest):
            causes = "; ".join(f"{worker}: {reason}" for worker, reason in ended.lost.items())
            lost = f" (lost {causes})" if causes else ""
            more = "no replacement came in time" if state.waited else "set elastic.replace_lost=true to have lost workers replaced"
            error = f"{len(members)} workers are left{lost}, fewer than elastic.min_workers = {fewest}: {more}"
            return end.give_up(ended, error, seen)
        self._scaling.forget_hires()
        hire = max(0, fewest - len(members) - warming)
        waiting, hires = self._hire_awaited(states.Waiting(ended, fewest, hire, seen.now, unreached=state.unreached), seen)
        return waiting, [actions.Note({}, write=True), *_note_waiting(True, seen), *hires]  # the wait may take minutes

    def _standbys(self, state: states.Recovering, members: int, seen: Observations) -> Step | None:
        """Hire workers for the places of lost ones, and wait for those that were standbys; None if there is nothing to wait for.

        Without standbys, the next generation hires."""
        elastic, workers = self._config.elastic, seen.workers
        missing = seen.durable.target - members
        if not (elastic.standby and elastic.replace_lost and state.ended.lost) or state.waited or missing <= 0:
            return None
        if state.until is None and (hire := missing - len(workers.warming()) - workers.hiring) > 0:
            return replace(state, until=seen.now + STANDBY_S), [actions.Hire(seen.avoided)] * hire
        return (state, []) if state.until is not None and workers.arriving and seen.now < state.until else None

    def _ready(self, ended: Ending, seen: Observations) -> list[str]:
        """Return warm workers that may join, preferred ones first. A worker whose move of shards as a leaver has failed may join, too."""
        silent, living = seen.workers.silent(SILENT_S), frozenset(ended.living)
        # A joiner that is stopped, or does not reach the others, would hold up all of them.
        ready = [w for w in seen.workers.ready() if w not in living]
        return sorted(ready, key=lambda w: (w in silent, w in seen.leavers, w in self._scaling.untried))

    def locating(self, state: states.Locating, seen: Observations) -> Step:
        workers, ended, members, leavers = seen.workers, state.ended, state.members, state.leavers
        grid = self._config.grid(len(members))
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
        if len(candidates) > len(members):  # fewer workers are wanted than could stay, so none has joined
            resume = policy.choose_source(held_now, candidates, newest, seen.world).resume
            members = staying(candidates, grid, resume, held_now, workers, self._layouts)
            chosen = frozenset(members)
            leavers = tuple(w for w in ended.living if w not in chosen)
        source = policy.choose_source(held_now, members, newest, seen.world)
        ranked, numbered_by = assign_ranks(members, source.resume, held_now, workers, self._layouts, grid)
        # Workers beyond the whole replicas stay, if the workers that are missing for another replica are to come.
        beyond = [w for w in leavers if w not in state.leaving][: max(0, seen.durable.target - len(members))]
        leavers = tuple(w for w in leavers if w not in beyond)
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
        do: list[Action] = [*self._scaling.drain_events(holders, seen)]
        leaving = seen.leaving(holders)
        if leaving - state.told_of:
            state = replace(state, told_of=state.told_of | leaving)
            if held_step(workers, holders) > (seen.stats.checkpoints.step or 0):
                # They may hold the only copies, and no worker trains: the state is saved before their node goes.
                living = tuple(w for w in holders if workers.alive(w))
                return states.Checkpointing(ended, Goal.DRAIN, living, then=state), do
        freed = self._scaling.replace_overconstrained(self._avoided(state, seen), seen)
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
        """Return the nodes to hire no worker on. If no other node has had a place for a while, a node that was cut off may be used
        again."""
        return seen.avoided if seen.now - state.since < PLACE_S else frozenset(seen.draining)


def _waited(state: states.Waiting, seen: Observations, *, waited: bool, do: list[Action] | None = None) -> Step:
    following = states.Recovering(seen.still_living(state.ended), waited, state.unreached)
    return following, [*(do or []), *_note_waiting(False, seen)]


def _note_waiting(waiting: bool, seen: Observations) -> list[Action]:
    """Record whether the run waits for workers or for the storage."""
    return [Event("waiting", {"waiting": waiting})] if waiting is not seen.stats.waiting else []
