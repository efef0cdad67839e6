"""Scale a generation that runs as it should: hire and dismiss workers, and ask the generation to stop at a step boundary.

The control loop asks this policy in every round while all members train. Once no member is in the generation any more, the loop decides
what follows. The policy takes values, and returns actions.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from vescale_ray.config import RunConfig
from vescale_ray.controller import actions, policy
from vescale_ray.controller.actions import Action
from vescale_ray.controller.checkpointing.cadence import Cadence
from vescale_ray.controller.failures.connectivity import Connectivity
from vescale_ray.controller.failures.failure_detector import network
from vescale_ray.controller.failures.straggler import Stragglers
from vescale_ray.controller.observations import Observations
from vescale_ray.controller.protocol import Event, RunSpec, RunState, World
from vescale_ray.controller.scaling.autoscaling import PLACE_S, Autoscaling, RunProgress
from vescale_ray.controller.statistics.run_stats import RunStats
from vescale_ray.workers.messages import CHECKPOINT, RESCALE, STOP, StepRecord, Ticket
from vescale_ray.workers.resharding.shard_layouts import Layouts

WRITTEN_S, LONGEST_S = 30.0, 300.0
"""Seconds for which a change that can wait lets a checkpoint be written: twice the duration of the last checkpoint, but at least the first
number and at most the second."""

PLANNED_S = 10.0
"""Seconds for which a change that can wait is put off until the layouts before and after it are planned."""


class Scaling:
    """Decides whom to hire, admit and dismiss, and when the generation should stop for another one. It remembers its observations, and
    changes nothing else.

    Args:
        layouts: layouts by world size. Those before and after a change determine its rank assignment.

    Attributes:
        asked: ticket of the generation that was asked to stop at its next boundary.
        refusals: reasons why nodes of warm workers were refused, since a new worker was last admitted or more workers were wanted.
        fleeting: reasons why warm workers were lost before they joined, since a worker last joined.
        untried: warm workers whose connections to the others are not known yet.
        hire_failures: reasons why recently hired workers did not become warm, or nodes were refused. ``failed_hires``: number of all such
            failures.
        stragglers: the policy for slow workers.
        spares: number of warm workers that neither train nor are to join. ``places_wanted``: number of places asked of Ray's autoscaler.
    """

    def __init__(self, spec: RunSpec, config: RunConfig, connectivity: Connectivity, cadence: Cadence, layouts: Layouts) -> None:
        self._spec, self._config, self._cadence, self._layouts, self._connectivity = spec, config, cadence, layouts, connectivity
        self._autoscaling = Autoscaling(config.elastic, config.whole)
        self.stragglers = Stragglers(config, spec.capacity, spec.bounds.start)
        self.asked: Ticket | None = None
        self.hire_failures: list[str] = []
        self.failed_hires = 0
        self.fleeting: list[str] = []
        self.refusals: list[str] = []
        self.untried: frozenset[str] = frozenset()
        self._let_in: frozenset[str] = frozenset()
        """Workers outside the generation that were admitted before. A spare that waits for long is probed again, which does not count as a
        new admission."""
        self.spares = self.places_wanted = 0
        self._drained: frozenset[str] = frozenset()
        self._trained: frozenset[str] = frozenset()
        """Members of the generation that was last seen to have its state."""
        self._save_now = False
        self._aim = 0
        self._short = False
        """True if more workers are wanted than train."""
        self._put_off: float | None = None
        """Since when the wanted change has waited for a checkpoint."""
        self._unplanned: float | None = None
        """Since when it has waited for layouts."""

    # --------------------------------------------------------------------------------------------------------------- news

    def forget_hires(self) -> None:
        """Forget recent failures, because a hired worker is warm, or because the run waits for workers."""
        self.hire_failures.clear()

    def lost(self, worker: str, reason: str, *, warm: bool, joined: bool) -> None:
        """Note the loss of a worker. ``joined``: the worker was a member, or a leaver."""
        if not warm:
            self._hire_failed(reason)
        elif not joined:
            self.fleeting.append(reason)

    def stepped(self, record: StepRecord, stats: RunStats) -> Sequence[Action]:
        """Return the events of a step that the members have completed: the straggler policy's."""
        return self.stragglers.stepped(record, stats, time.monotonic())

    def taken(self, ask: actions.Ask) -> None:
        """Note that a member has accepted a request to its generation, so that the request is not repeated."""
        if ask.flags != CHECKPOINT:
            self.asked, self._put_off = ask.world.ticket, None
        elif ask.auto:
            self._cadence.begun(time.monotonic())
        else:
            self._save_now = False

    # ---------------------------------------------------------------------------------------------------------- decisions

    def steer(self, world: World, seen: Observations) -> list[Action]:
        """Hire workers, or regroup or stop the generation, if that is wanted."""
        stats, do = seen.stats, list[Action]()
        if not seen.filled:
            return do
        if not self._trained.issuperset(world.members):
            self.fleeting.clear()
        self._trained = frozenset(world.members)
        if stats.has_stepped and seen.leavers:
            # Not earlier: until all members have their peers' copies, the leavers' state may be the only one to go back to.
            do += [*map(actions.Dismiss, seen.leavers), actions.Note({"leavers": ()})]
        if self.asked == world.ticket:
            return do
        if stats.state in (RunState.STARTING, RunState.RESCALING):
            do.append(actions.Enter(RunState.RUNNING))
        if seen.stop:
            return [*do, self._ask_to_park(world, STOP)]
        do += self._save_if_due(world, seen)
        warm = frozenset(seen.workers.ready())
        leaving = seen.leaving(warm)
        drain = self._drain(world, warm, leaving, seen)
        do += drain
        if any(isinstance(one, actions.Ask) and one.flags == RESCALE for one in drain):
            return do
        outside = seen.outside(world.members)
        do += [actions.Dismiss(worker) for worker in outside if worker in leaving]
        return do + self._staff(world, warm, [w for w in world.members if w not in leaving], [w for w in outside if w not in leaving], seen)

    def _drain(self, world: World, warm: frozenset[str], leaving: frozenset[str], seen: Observations) -> list[Action]:
        """If members are on draining nodes and enough workers are left, ask the generation to stop. If too few workers are left, ask it for
        a checkpoint instead."""
        durable, staying = seen.durable, [w for w in world.members if w not in leaving]
        # Workers that can take a place at once: admitted, and not yet members.
        comers = self._let_in.intersection(warm).difference(world.members, seen.leavers, leaving)
        enough = len(staying) + len(comers) >= self._config.elastic.min_workers
        do: list[Action] = list(self.drain_events(world.members, seen))
        self._save_now |= bool(do) and bool(seen.leaving(world.members)) and not enough
        if self._save_now:
            do.append(actions.Ask(world, CHECKPOINT))
        if len(staying) == world.size or not enough:
            return do
        if self._config.elastic.replace_lost:
            do.append(actions.Note({"reason": "replacement"}))  # the reason of the later change, in which replacements join
        else:
            # Workers that are still starting count as well: they were asked for, and come a moment later.
            others = [w for w in seen.outside(world.members) if w not in leaving]
            comes = bool(seen.workers.hiring) or any(w not in warm for w in others)
            target = self._config.whole(min(durable.target, len(staying) + len(others) + seen.workers.hiring))
            do.append(want(target, durable.reason if comes else "drain"))
        return [*do, self._ask_to_park(world, RESCALE, "drain")]

    def _staff(self, world: World, warm: frozenset[str], staying: Sequence[str], outside: list[str], seen: Observations) -> list[Action]:
        """Hire and dismiss workers, and ask the generation to stop if another should follow. ``outside``: workers that may join."""
        workers, now, elastic = seen.workers, seen.now, self._config.elastic
        ready, do = self._admitted([w for w in outside if w in warm], world, seen)
        refused = {one.worker for one in do if isinstance(one, actions.Dismiss)}
        outside = [w for w in outside if w not in refused]
        target, grown = self._use_capacity(world.size, len(ready), len(outside) - len(ready), seen)
        do += grown
        reason = seen.durable.reason if target == seen.durable.target else "growth"
        if target > self._aim:
            self._forget_failures()  # the failures belong to an earlier target
        self._aim = target
        if target <= world.size:
            self._short = False
        elif not self._short:
            self._short = True
            self._forget_failures()  # the failures belong to spares
        if target > world.size and (abandoned := self._cannot_grow(world, outside, target, reason, seen)):
            return do + abandoned
        if target <= world.size:
            do += self._end_late_spares(seen)
        total = world.size + len(outside)
        unwanted, events = self.stragglers.unwanted(staying, target, total, self.failed_hires, seen.stats.stragglers, now)
        do += events
        there, warming = len(staying) - len(unwanted), len(outside) - len(ready) + workers.hiring
        todo = policy.staffing(there, len(ready), warming, target, elastic.spares)
        failures = max(len(self.hire_failures), len(self.refusals), len(self.fleeting))
        do += self._hire(todo.hire + min(todo.spares, self._autoscaling.spare_places(failures, now)), seen.avoided, now)
        self.spares, self.places_wanted = max(0, len(ready) - max(0, target - there)), len(workers.places.requests)
        do += [actions.Dismiss(worker) for worker in outside[max(0, len(outside) - todo.dismiss) :]]
        if len(outside) > len(ready):
            do += self.replace_overconstrained(seen.avoided, seen)
        if not todo.regroup:
            self._put_off = self._unplanned = None
        elif len(staying) < world.size or not (
            self._lets_layouts_be_planned(world, target, seen) or self._lets_one_be_written(world, seen)
        ):
            # (If members are on draining nodes, the change does not wait: the nodes may go first.)
            do.append(self._ask_to_park(world, RESCALE, "straggler" if unwanted else reason))
        return do

    def _use_capacity(self, world: int, ready: int, warming: int, seen: Observations) -> tuple[int, list[Action]]:
        """Ask for places, and raise the target if places have been free for long enough. Returns the target. ``ready`` and ``warming``
        count workers outside the generation."""
        stats, durable, now, avoid = seen.stats, seen.durable, seen.now, seen.avoided
        if not self._config.watches_room:
            return durable.target, []
        left, warm_s = self._config.train.steps - stats.step, max((info.warm_seconds for info in stats.workers.values()), default=0.0)
        ceiling = durable.requested or self._config.max_workers
        run = RunProgress(world, ready, warming, durable.target, ceiling, left, stats.steps.last_seconds, warm_s)
        do: list[Action] = [actions.RequestPlaces(self._autoscaling.places_to_request(run, now), avoid)]
        self._autoscaling.look(seen.free, seen.workers.places.requests, avoid)
        target, events = self._autoscaling.grow(run, now)
        return (durable.target, [*do, *events]) if target is None else (target, [*do, *events, want(target, "growth")])

    def _hire(self, count: int, avoid: frozenset[str], now: float) -> list[Action]:
        if count > 0:
            self._autoscaling.hired(now)
        return [actions.Hire(avoid)] * count

    def _admitted(self, ready: list[str], world: World, seen: Observations) -> tuple[list[str], list[Action]]:
        """Return the workers of ``ready`` that are connected to the members in both directions.

        Any other worker would stop all of them. It is dismissed, and its node is avoided for a while."""
        if not ready:
            self._let_in = self.untried = frozenset()
            return [], []
        admission = self._connectivity.admit(ready, world.members, network(seen, (*world.members, *ready)))
        do: list[Action] = [] if admission.probe is None else [admission.probe]
        fine, cut = list(admission.admitted), admission.refused
        # One failure for each node, however many of its workers are refused. Workers on other nodes are still to be probed.
        for node in sorted(set(cut.workers.values())):
            do.append(actions.ExcludeNode(node))
            self._hire_failed(cut.why(node))
            self.refusals.append(cut.why(node))
        for worker, node in cut.workers.items():
            do += [Event("joiner_refused", {"worker": worker, "node": node, "reason": cut.why(node)}), actions.Dismiss(worker)]
        if not self._let_in.issuperset(fine):
            self.refusals.clear()
        self._let_in = self._let_in.intersection(ready).union(fine)
        self.untried = frozenset(ready).difference(fine)
        return fine, do

    def replace_overconstrained(self, avoid: frozenset[str], seen: Observations) -> list[Action]:
        """Replace the workers without a place that exclude a node which is no longer to ``avoid``. Ray fixes a worker's excluded nodes when
        it is hired."""
        overconstrained, places = seen.workers.overconstrained(avoid), seen.workers.places
        if not overconstrained:
            return []
        unplaced = [worker for worker in overconstrained if worker in places.unplaced]
        # The answer to the request tells which of them have no place.
        request = actions.RequestPlaces(len(places.requests), avoid)
        return [request, *map(actions.Dismiss, unplaced), *self._hire(len(unplaced), avoid, seen.now)]

    def _lets_one_be_written(self, world: World, seen: Observations) -> bool:
        """Return whether the change waits for the checkpoint that is being written, which the end of the generation would abandon. Without
        such waits, frequent changes would abandon every checkpoint."""
        last_s = seen.stats.checkpoints.seconds
        reports = [seen.workers.report(worker) for worker in world.members]
        if not seen.saving and not any(report is not None and report.writing for report in reports):
            return False
        self._put_off = self._put_off or seen.now
        return seen.now - self._put_off < min(LONGEST_S, max(WRITTEN_S, 2.0 * (last_s or 0.0)))

    def _lets_layouts_be_planned(self, world: World, target: int, seen: Observations) -> bool:
        """Return whether the change waits for the layouts that determine its rank assignment. A controller that was just restarted has not
        planned them yet. Without them, more bytes than necessary would move, and the pause would include the wait for them."""
        if self._layouts.planned(*(self._config.grid(workers).shards for workers in (world.size, target))):
            self._unplanned = None
            return False
        self._unplanned = self._unplanned or seen.now
        return seen.now - self._unplanned < PLANNED_S

    def drain_events(self, members: Collection[str], seen: Observations) -> list[Event]:
        """Return the events of nodes that have begun to drain, with those of ``members`` on them."""
        fresh = seen.draining.keys() - self._drained
        self._drained = frozenset(seen.draining)
        leaving, events = seen.leaving(members) if fresh else frozenset(), []
        for node in sorted(fresh):
            left = seen.draining[node] - time.time()
            workers = [w for w in leaving if (info := seen.workers.info(w)) is not None and info.node == node]
            about = {"node": node, "workers": workers, "seconds_left": left if left < float("inf") else None}
            events.append(Event("node_draining", about))
        return events

    def _save_if_due(self, world: World, seen: Observations) -> list[Action]:
        """With ``checkpoint.every: auto``, update the interval, and once it is over, ask for a checkpoint at the next boundary."""
        do: list[Action] = []
        interval = self._cadence.news(seen.now, seen.stats.lost)
        if interval is not None:
            about = {"seconds": interval.seconds, "by": interval.by, "mtbf_hours": interval.mtbf_s / 3600}
            more = {"stall_seconds": interval.stall_s, "persist_seconds": interval.persist_s, "text": str(interval)}
            do.append(Event("checkpoint_interval", {**about, **more}))
        return [*do, actions.Ask(world, CHECKPOINT, auto=True)] if self._cadence.due(seen.now, seen.saving) else do

    def _cannot_grow(self, world: World, outside: list[str], target: int, reason: str, seen: Observations) -> list[Action]:
        """If hired workers do not come, lower the target to the members and the hired workers that have come."""
        workers = seen.workers
        late = self._late(seen, growing=reason == "growth")
        if max(len(self.hire_failures), len(self.refusals), len(self.fleeting)) > self._config.elastic.max_recoveries_without_progress:
            late = list(workers.warming())
        elif not late:
            return []
        failures = self.hire_failures or self.refusals or self.fleeting
        why = failures[-1] if failures else f"no place or not warm after {workers.age(late[0]):.0f} s"
        self._forget_failures()  # they are handled now; otherwise the rescale would be abandoned again and again
        self._autoscaling.ended(complete=False)
        abandoned = Event("rescale_abandoned", {"from": world.size, "to": target, "error": why})
        fewer = self._config.whole(min(target, world.size + len([w for w in outside if w not in late])))
        return [*map(actions.Dismiss, late), abandoned, want(fewer, reason)]

    def _forget_failures(self) -> None:
        for of in (self.hire_failures, self.refusals, self.fleeting):
            of.clear()

    def _end_late_spares(self, seen: Observations) -> list[Action]:
        late = self._late(seen, growing=True)
        for worker in late:
            self._hire_failed(f"no place or not warm after {seen.workers.age(worker):.0f} s")
        return [*map(actions.Dismiss, late)]

    def _late(self, seen: Observations, *, growing: bool) -> list[str]:
        """Return the workers that should be warm by now. With ``growing``, also workers that have no place after :data:`PLACE_S` although
        places were free."""
        ages = {w: seen.workers.age(w) for w in seen.workers.warming()}
        late = [w for w, age in ages.items() if age > self._spec.bounds.start]
        misplaced = [w for w, age in ages.items() if w in seen.workers.places.unplaced and age > PLACE_S]
        return late + [w for w in misplaced if growing and w not in late]

    def _ask_to_park(self, world: World, flags: int, reason: str = "") -> actions.Ask:
        """Have one rank carry the request into the step's exchange. All ranks see it there, and stop at the same boundary.

        If no rank accepts the request, all are just leaving, or one hangs; a later round handles that."""
        if flags == STOP:
            return actions.Ask(world, flags, (actions.Enter(RunState.STOPPING),))
        return actions.Ask(world, flags, (actions.BeginRescale(reason, world.size), actions.Enter(RunState.RESCALING)))

    def _hire_failed(self, reason: str) -> None:
        """Note that a hired worker will not become warm."""
        self.hire_failures.append(reason)
        self.failed_hires += 1


def want(workers: int, reason: str) -> actions.Note:
    """Change the number of workers wanted."""
    return actions.Note({"target": workers, "reason": reason}, write=True)
