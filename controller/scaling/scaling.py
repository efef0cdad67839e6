"""Scale a generation that runs as it should: hire and dismiss workers, and ask the generation to stop at a step boundary.

The control loop calls this in every round while all members train. Once no member is in the generation any more, the loop decides what
follows.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence

from vescale_ray.config import RunConfig
from vescale_ray.controller import policy
from vescale_ray.controller.checkpointing.cadence import Cadence
from vescale_ray.controller.checkpointing.committer import Committer
from vescale_ray.controller.commands import Commands
from vescale_ray.controller.failures.connectivity import TRY_S, Connectivity, CutOff, Network, Probe
from vescale_ray.controller.failures.straggler import Known, Stragglers
from vescale_ray.controller.protocol import Event, RunSpec, RunState, World
from vescale_ray.controller.scaling.autoscaling import PLACE_S, Autoscaling, RunProgress
from vescale_ray.controller.scaling.nodes import Nodes
from vescale_ray.controller.state.durable_state import StateWriter
from vescale_ray.controller.state.generation_log import GenerationLog
from vescale_ray.controller.state.run_lifecycle import Lifecycle
from vescale_ray.controller.state.run_log import RunLog
from vescale_ray.controller.worker_group.ray_answers import Reaching
from vescale_ray.controller.worker_group.worker_group import WorkerGroup
from vescale_ray.workers.messages import CHECKPOINT, RESCALE, STOP, StepRecord, Ticket
from vescale_ray.workers.resharding.shard_layouts import Layouts

WRITTEN_S, LONGEST_S = 30.0, 300.0
"""Seconds for which a change that can wait lets a checkpoint be written. If twice the duration of the last checkpoint is longer, that
counts, up to the second number."""

PLANNED_S = 10.0
"""Seconds for which a change that can wait lets the layouts before and after it be planned."""


class Scaling:
    """Hires, admits and dismisses workers, and asks the generation to stop if another should follow.

    Args:
        durable: durable state; this class owns its fields ``leavers``, ``growth`` and ``straggler``.
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

    def __init__(
        self,
        spec: RunSpec,
        config: RunConfig,
        worker_group: WorkerGroup,
        log: RunLog,
        generation: GenerationLog,
        committer: Committer,
        commands: Commands,
        cadence: Cadence,
        durable: StateWriter,
        lifecycle: Lifecycle,
        layouts: Layouts,
    ) -> None:
        self._spec, self._config = spec, config
        self._worker_group, self._log, self._committer, self._commands, self._cadence = worker_group, log, committer, commands, cadence
        self._generation, self._lifecycle, self._layouts = generation, lifecycle, layouts
        state, self._durable = durable.state, durable
        self.nodes = Nodes(config.resources_per_worker if config.watches_room else None)
        self.autoscaling = Autoscaling(config.elastic, state.growth, time.monotonic())
        self.connectivity = Connectivity(config.elastic)
        self._probes: dict[Probe, Reaching] = {}
        self.asked: Ticket | None = None
        self.hire_failures: list[str] = []
        self.failed_hires = 0
        self.fleeting: list[str] = []
        self.refusals: list[str] = []
        self.untried: frozenset[str] = frozenset()
        self._let_in: frozenset[str] = frozenset()
        """Workers outside the generation that were admitted before. A spare that waits for long is probed again, which does not count as a
        new admission."""
        self.stragglers = Stragglers(config, spec.capacity, spec.bounds.start, state.straggler, time.monotonic())
        self.spares = self.places_wanted = 0
        self._drained: frozenset[str] = frozenset()
        self._trained: frozenset[str] = frozenset()
        """Members of the generation that was last seen to have its state."""
        self._save_now = False
        self._aim = 0
        self._short = False
        """Whether more workers are wanted than train."""
        self._put_off: float | None = None
        """Since when the wanted change has waited for a checkpoint."""
        self._unplanned: float | None = None
        """Since when it has waited for layouts."""

    @property
    def leavers(self) -> tuple[str, ...]:
        """Workers that are in no generation and must give their shards to the next."""
        return self._durable.state.leavers

    def keep(self, leavers: Iterable[str]) -> None:
        """Set the leavers."""
        self._durable.note(leavers=tuple(leavers))

    def begin(self, members: Sequence[str], givers: Sequence[str], leaving: Iterable[str]) -> None:
        """Prepare for a generation that is about to form. ``givers`` give shards to it. All other workers of ``leaving``, and all other
        earlier leavers, are dismissed unless they are members."""
        for worker in {*leaving, *self.leavers} - {*givers, *members}:
            self.let_go(worker)
        self.keep(givers)
        self.asked = None

    def lost(self, worker: str, reason: str, *, warm: bool, member: bool) -> None:
        """Note the loss of a worker."""
        if not warm:
            self.hire_failed(reason)
        elif not member and worker not in self.leavers:
            self.fleeting.append(reason)

    def steer(self, world: World) -> None:
        """Hire workers, or regroup or stop the generation, if that is wanted."""
        stats = self._log.stats
        if not self._generation.all_filled:
            return
        if not self._trained.issuperset(world.members):
            self.fleeting.clear()
        self._trained = frozenset(world.members)
        if stats.has_stepped:
            # Not earlier: until all members have their peers' copies, the leavers' state may be the only one to go back to.
            for worker in self.leavers:
                self.let_go(worker)
            self.keep(())
        if self.asked == world.ticket:
            return
        if stats.state in (RunState.STARTING, RunState.RESCALING):
            self._lifecycle.enter(RunState.RUNNING)
        if self._commands.stop:
            self._ask_to_park(world, stop=True)
            return
        self._save_if_due(world)
        warm = frozenset(self._worker_group.ready())
        leaving = self.leaving(warm)
        if self._drain(world, warm, leaving):
            return
        for worker in leaving & set(self.outside(world.members)):
            self.let_go(worker)
        self._staff(world, warm, [w for w in world.members if w not in leaving])

    def _drain(self, world: World, warm: frozenset[str], leaving: frozenset[str]) -> bool:
        """If members are on draining nodes and enough workers are left, ask the generation to stop. Returns whether it did. If too few
        workers are left, it asks for a checkpoint instead."""
        staying = [w for w in world.members if w not in leaving]
        # Workers that can take a place at once: admitted, and not yet members.
        comers = self._let_in.intersection(warm).difference(world.members, self.leavers, leaving)
        enough = len(staying) + len(comers) >= self._config.elastic.min_workers
        self._save_now |= self.hear_of_drains(world.members) and not enough
        if self._save_now:
            self._save_now = not self._worker_group.ask(world.members, world.ticket, CHECKPOINT)
        if len(staying) == world.size or not enough:
            return False
        if self._config.elastic.replace_lost:
            self._commands.explain("replacement")  # the reason of the later change, in which replacements join
        else:
            # Workers that are still starting count as well: they were asked for, and come a moment later.
            others = [w for w in self.outside(world.members) if w not in leaving]
            comes = bool(self._worker_group.hiring) or any(w not in warm for w in others)
            target = min(self._commands.target, len(staying) + len(others) + self._worker_group.hiring)
            self._commands.want(target, self._commands.reason if comes else "drain")
        self._ask_to_park(world, stop=False, reason="drain")
        return True

    def _staff(self, world: World, warm: frozenset[str], staying: Sequence[str]) -> None:
        """Hire and dismiss workers, and ask the generation to stop if another should follow."""
        stats, outside = self._log.stats, self.outside(world.members)
        ready = self._admitted([w for w in outside if w in warm], world)
        outside = [w for w in outside if self._worker_group.alive(w)]
        self._use_capacity(world.size, len(ready), len(outside) - len(ready))
        if self._commands.target > self._aim:
            self._forget_failures()  # they concern an earlier target
        self._aim = self._commands.target
        if self._aim <= world.size:
            self._short = False
        elif not self._short:
            self._short = True
            self._forget_failures()  # they concern spares
        if self._aim > world.size and self._cannot_grow(world, outside):
            return
        if self._aim <= world.size:
            self._end_late_spares()
        total = world.size + len(outside)
        unwanted, events = self.stragglers.unwanted(staying, self._aim, total, self.failed_hires, stats.stragglers, time.monotonic())
        self._record(events)
        there, warming = len(staying) - len(unwanted), len(outside) - len(ready) + self._worker_group.hiring
        todo = policy.staffing(there, len(ready), warming, self._aim, self._config.elastic.spares)
        failures = max(len(self.hire_failures), len(self.refusals), len(self.fleeting))
        for _ in range(todo.hire + min(todo.spares, self.autoscaling.spare_places(failures, time.monotonic()))):
            self._hire(self.nodes.avoided)
        self.spares, self.places_wanted = max(0, len(ready) - max(0, self._aim - there)), len(self._worker_group.places.wishes)
        for worker in outside[max(0, len(outside) - todo.dismiss) :]:
            self.let_go(worker)
        if len(outside) > len(ready):
            self.free_hemmed(self.nodes.avoided)
        if not todo.regroup:
            self._put_off = self._unplanned = None
        elif len(staying) < world.size or not (self._lets_layouts_be_planned(world) or self._lets_one_be_written(world)):
            # (If members are on draining nodes, the change does not wait: the nodes may go first.)
            self._ask_to_park(world, stop=False, reason="straggler" if unwanted else None)

    def stepped(self, record: StepRecord) -> None:
        """Give a step that the members have completed to the straggler policy, and record its events."""
        stats = self._log.stats
        known = Known(stats.stragglers, stats.spread, stats.workers)
        self._record(self.stragglers.stepped(record, stats.members, known, time.monotonic()))

    def _record(self, events: Iterable[Event]) -> None:
        """Record the events of a policy. If a policy's note has changed, write it to the durable state."""
        for event in events:
            self._log.record(event.name, **event.about)
        before = self._durable.state
        if (self.autoscaling.note, self.stragglers.note) != (before.growth, before.straggler):
            self._durable.update(growth=self.autoscaling.note, straggler=self.stragglers.note)

    def _use_capacity(self, world: int, ready: int, warming: int) -> None:
        """Ask for places, and raise the target if places have been free for long enough. ``ready`` and ``warming`` count workers outside
        the generation."""
        if not self._config.watches_room:
            return
        stats, commands, now, avoid = self._log.stats, self._commands, time.monotonic(), self.nodes.avoided
        left, warm_s = self._config.train.steps - stats.step, max((info.warm_seconds for info in stats.workers.values()), default=0.0)
        run = RunProgress(world, ready, warming, commands.target, commands.ceiling, left, stats.steps.last_seconds, warm_s)
        self._worker_group.wish(self.autoscaling.wishes(run, now), avoid)  # this also collects the answers to earlier wishes
        self.autoscaling.look(self.nodes.free, self._worker_group.places.wishes, avoid)
        target, events = self.autoscaling.grow(run, now)
        self._record(events)
        if target is not None:
            commands.want(target, "growth")

    def _hire(self, avoid: Collection[str]) -> None:
        self._worker_group.hire(avoid)
        self.autoscaling.hired(time.monotonic())

    def _admitted(self, ready: list[str], world: World) -> list[str]:
        """The workers of ``ready`` that are connected to the members in both directions. A worker that is not would stop them all: it is
        dismissed, and its node is avoided for a while."""
        if not ready and not self._probes:
            self._let_in = self.untried = frozenset()
            return []
        admission = self.connectivity.admit(ready, world.members, self._network((*world.members, *ready)))
        self._make(admission.probe)
        fine, cut = list(admission.admitted), admission.refused
        # One failure for each node, however many of its workers are refused. Workers on other nodes are still to be probed.
        for node in sorted(set(cut.workers.values())):
            self.nodes.shun(node)
            self.hire_failed(cut.why(node))
            self.refusals.append(cut.why(node))
        for worker, node in cut.workers.items():
            self._log.record("joiner_refused", worker=worker, node=node, reason=cut.why(node))
            self.let_go(worker)
        if not self._let_in.issuperset(fine):
            self.refusals.clear()
        self._let_in = self._let_in.intersection(ready).union(fine)
        self.untried = frozenset(ready).difference(fine)
        return fine

    def cut_off(self, members: Sequence[str], leavers: Sequence[str]) -> CutOff | None:
        """The workers to do without, because all ``members`` stand still and nodes do not reach each other; None while that is not
        known."""
        found = self.connectivity.cut_off(members, leavers, self._network((*members, *leavers)))
        self._make(found if isinstance(found, Probe) else None)
        return found if isinstance(found, CutOff) else None

    def _make(self, probe: Probe | None) -> None:
        """Have the workers try the connections of a probe."""
        if probe is not None:
            self._probes[probe] = self._worker_group.ask_reachability(probe.tries, TRY_S)

    def _network(self, workers: Iterable[str]) -> Network:
        """Hand in the answers to earlier probes, and return the present view of ``workers``."""
        for probe, asked in tuple(self._probes.items()):
            if (answers := asked.unreached()) is not None:
                del self._probes[probe]
                self.connectivity.answered(probe, answers)
        infos = {worker: info for worker in workers if (info := self._worker_group.info(worker)) is not None}
        return Network(infos, self._worker_group.silent(0.0), time.monotonic())

    def free_hemmed(self, avoid: Collection[str]) -> None:
        """Replace workers that have no place yet and exclude a node which is no longer among those to ``avoid``. Ray fixes the excluded
        nodes of a worker when it is hired."""
        hemmed = self._worker_group.hemmed(avoid)
        if hemmed:
            self._worker_group.wish(len(self._worker_group.places.wishes), avoid)  # the answer also tells which of them have no place
        for worker in hemmed:
            if worker in self._worker_group.places.unplaced:
                self.let_go(worker)
                self._hire(avoid)

    def leaving(self, workers: Iterable[str]) -> frozenset[str]:
        """Select from ``workers`` those on draining nodes."""
        draining = self.nodes.draining
        infos = {w: self._worker_group.info(w) for w in workers} if draining else {}
        return frozenset(w for w, info in infos.items() if info is not None and info.node in draining)

    def _lets_one_be_written(self, world: World) -> bool:
        """Return whether the change waits for the checkpoint that is being written. The end of the generation would abandon it. If one
        change followed the other, no checkpoint would ever be completed."""
        now, last_s = time.monotonic(), self._log.stats.checkpoints.seconds
        reports = [self._worker_group.report(worker) for worker in world.members]
        if not self._committer.busy and not any(report is not None and report.writing for report in reports):
            return False
        self._put_off = self._put_off or now
        return now - self._put_off < min(LONGEST_S, max(WRITTEN_S, 2.0 * (last_s or 0.0)))

    def _lets_layouts_be_planned(self, world: World) -> bool:
        """Return whether the change waits for the layouts that determine its rank assignment. A controller that was just restarted has not
        planned them yet. Without them, more bytes than necessary would move, and the pause would include the wait for them."""
        now = time.monotonic()
        if self._layouts.planned(world.size, self._commands.target):
            self._unplanned = None
            return False
        self._unplanned = self._unplanned or now
        return now - self._unplanned < PLANNED_S

    def hear_of_drains(self, members: Collection[str]) -> bool:
        """Record nodes that have begun to drain. If there are any, return whether one of ``members`` is on a draining node."""
        draining = self.nodes.draining
        fresh = draining.keys() - self._drained
        self._drained = frozenset(draining)
        leaving = self.leaving(members) if fresh else frozenset()
        for node in sorted(fresh):
            left = draining[node] - time.time()
            workers = [w for w in leaving if (info := self._worker_group.info(w)) is not None and info.node == node]
            self._log.record("node_draining", node=node, workers=workers, seconds_left=left if left < float("inf") else None)
        return bool(leaving)

    def _save_if_due(self, world: World) -> None:
        """With ``checkpoint.every: auto``, update the interval, and once it is over, ask for a checkpoint at the next boundary."""
        now = time.monotonic()
        interval = self._cadence.news(now, self._log.stats.lost)
        if interval is not None:
            about = {"seconds": interval.seconds, "by": interval.by, "mtbf_hours": interval.mtbf_s / 3600}
            more = {"stall_seconds": interval.stall_s, "persist_seconds": interval.persist_s, "text": str(interval)}
            self._log.record("checkpoint_interval", **about, **more)
        if self._cadence.due(now, self._committer.busy) and self._worker_group.ask(world.members, world.ticket, CHECKPOINT):
            self._cadence.begun(now)

    def _cannot_grow(self, world: World, outside: list[str]) -> bool:
        """Return whether hired workers do not come. If so, lower the target to the workers that do."""
        late = self._late(growing=self._commands.reason == "growth")
        if max(len(self.hire_failures), len(self.refusals), len(self.fleeting)) > self._config.elastic.max_recoveries_without_progress:
            late = list(self._worker_group.warming())
        elif not late:
            return False
        failures = self.hire_failures or self.refusals or self.fleeting
        why = failures[-1] if failures else f"no place or not warm after {self._worker_group.age(late[0]):.0f} s"
        for worker in late:
            self.let_go(worker)
        self._forget_failures()  # they are handled now; otherwise the rescale would be abandoned again and again
        self.autoscaling.ended(time.monotonic(), complete=False)
        self._record([Event("rescale_abandoned", {"from": world.size, "to": self._commands.target, "error": why})])
        self._commands.want(min(self._commands.target, world.size + len([w for w in outside if w not in late])), self._commands.reason)
        return True

    def _forget_failures(self) -> None:
        for of in (self.hire_failures, self.refusals, self.fleeting):
            of.clear()

    def _end_late_spares(self) -> None:
        for worker in self._late(growing=True):
            self.hire_failed(f"no place or not warm after {self._worker_group.age(worker):.0f} s")
            self.let_go(worker)

    def _late(self, *, growing: bool) -> list[str]:
        """Workers that should be warm by now. With ``growing``, also workers that have no place after :data:`PLACE_S` although places were
        free."""
        late = [w for w in self._worker_group.warming() if self._worker_group.age(w) > self._spec.bounds.start]
        misplaced = [
            w for w in self._worker_group.warming() if w in self._worker_group.places.unplaced and self._worker_group.age(w) > PLACE_S
        ]
        return late + [w for w in misplaced if growing and w not in late]

    def _ask_to_park(self, world: World, *, stop: bool, reason: str | None = None) -> None:
        """Have one rank carry the request into the step's exchange. All ranks see it there and stop at the same boundary."""
        if not self._worker_group.ask(world.members, world.ticket, STOP if stop else RESCALE):
            return  # they are just leaving, or one hangs; a later round handles that
        self.asked, self._put_off = world.ticket, None
        if stop:
            self._lifecycle.enter(RunState.STOPPING)
        else:
            self._generation.begin_rescale(reason or self._commands.reason, world.size)
            self._lifecycle.enter(RunState.RESCALING)

    def hire_failed(self, reason: str) -> None:
        """Note that a hired worker will not become warm."""
        self.hire_failures.append(reason)
        self.failed_hires += 1

    def let_go(self, worker: str) -> None:
        info = self._worker_group.info(worker)
        self._worker_group.dismiss(worker)
        self._log.record("worker_left", worker=worker, pid=info.pid if info else None)

    def outside(self, living: Iterable[str]) -> list[str]:
        """Workers that were hired to join, warm or not."""
        taken = {*living, *self.leavers}
        return [w for w in (*self._worker_group.ready(), *self._worker_group.warming()) if w not in taken]
