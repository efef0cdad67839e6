"""Detect and end the workers of a generation that are lost, hung, silent, late to leave, or cut off."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from vescale_ray.config import RunConfig
from vescale_ray.controller.failures.budget import Cause
from vescale_ray.controller.failures.connectivity import TRY_S, CutOff
from vescale_ray.controller.failures.evidence import Evidence
from vescale_ray.controller.failures.exit_deadlines import ExitDeadlines, Surroundings, WorkerView
from vescale_ray.controller.failures.hang import HangWatch
from vescale_ray.controller.failures.hang_report import end_hung
from vescale_ray.controller.protocol import Bounds, World
from vescale_ray.controller.scaling.scaling import Scaling
from vescale_ray.controller.state.run_log import RunLog
from vescale_ray.controller.worker_group.member import POLL_WAIT_S
from vescale_ray.controller.worker_group.worker_group import WorkerGroup
from vescale_ray.controller.worker_group.worker_news import Lost
from vescale_ray.workers.messages import Stepped, Ticket, WorkerFault, WorkerPhase, WorkerReport


class FailureDetector:
    """Detects failed workers and ends them. Only the controller's thread uses it.

    Attributes:
        evidence: evidence of the last failures, for the report of a run that fails.
        inherited: ticket of the generation that an earlier life of the controller launched; None if there is none.
    """

    def __init__(self, config: RunConfig, bounds: Bounds, worker_group: WorkerGroup, log: RunLog, scaling: Scaling) -> None:
        self._worker_group, self._log, self._scaling = worker_group, log, scaling
        self.evidence = Evidence()
        self.inherited: Ticket | None = None
        self._gone: dict[str, Lost] = {}
        self._exit_deadlines = ExitDeadlines(config.elastic, bounds)
        elastic = config.elastic
        patience = None if elastic.hang_timeout_s == "auto" else elastic.hang_timeout_s
        replaced = elastic.replace_lost or elastic.grow or elastic.spares > 0
        self._hangs = HangWatch(patience, elastic.collective_timeout_s, replaced)
        self._silence_s = bounds.silence or elastic.collective_timeout_s

    # --------------------------------------------------------------------------------------------------------------- news

    def begin(self, world: World) -> None:
        """Begin to watch a generation that is about to form."""
        self._hangs.begin(world.ticket, world.size)

    def adopt(self, world: World) -> None:
        """Begin to watch a generation that an earlier life of the controller launched."""
        stats = self._log.stats
        self.inherited = world.ticket
        # Without this, only the collectives' timeout would find a worker that hangs already.
        self._hangs.expect(stats.steps.last_seconds or 0.0, stats.steps.paces)
        self._hangs.begin(world.ticket, world.size)

    def heard(self, report: WorkerReport) -> None:
        """Take a worker's report."""
        self._hangs.heard(report, time.monotonic())

    def stepped(self, item: Stepped) -> None:
        """Take a step that a member has completed."""
        self._hangs.stepped(item.ticket, item.record.step, item.record.seconds, item.record.alone_seconds)

    def lost(self, one: Lost) -> Lost:
        """Record the loss of a worker and return it. If the worker's node drains, the node is the cause."""
        if one.info is not None and one.info.node in self._scaling.nodes.draining:
            one = replace(one, cause=Cause.NODE)
        self._gone[one.worker] = one
        return one

    def end_mute(self) -> None:
        """End the workers that have been silent for the longest time that any answer may take."""
        mute = f"killed: answered nothing for {self._silence_s:g} s, its process is hung or stopped"
        self._worker_group.kill(dict.fromkeys(self._worker_group.silent(self._silence_s), mute))

    # ------------------------------------------------------------------------------------------------------ what is known

    def loss(self, worker: str) -> Lost:
        """The loss of a worker that is not alive."""
        return self._gone.get(worker, Lost(worker, None, "its process died"))

    def losses(self, workers: Iterable[str]) -> dict[str, Lost]:
        """The reported losses among ``workers``."""
        return {w: self._gone[w] for w in workers if w in self._gone}

    def is_out(self, worker: str, world: World) -> bool:
        """Return whether a worker has left the generation."""
        report = self._worker_group.report(worker)
        if report is None or not report.out:
            return False
        # If an earlier controller launched the generation, an order that has not arrived by now never will.
        return report.ticket == world.ticket or (world.ticket == self.inherited and report.ticket < world.ticket)

    def fault(self, worker: str, world: World) -> WorkerFault | None:
        """The fault that a worker reports for this generation, if any."""
        report = self._worker_group.report(worker)
        return report.fault if report is not None and report.ticket == world.ticket else None

    # -------------------------------------------------------------------------------------------------------- all train

    def hung(self, world: World) -> Mapping[str, str]:
        """The hung members to end, each with the reason."""
        now = time.monotonic()
        if any(self._worker_group.doomed(worker) for worker in world.members):
            return {}  # one was just ended; a later round sees the effects
        hung = self._hangs.verdict(world.members, now)
        starved = self._worker_group.starved(hung) if hung else {}
        if starved:
            for worker, seconds in starved.items():
                self._hangs.starved(worker, seconds)
            hung = self._hangs.verdict(world.members, now)
        if hung:
            self._hangs.ended(hung)
        return hung

    def mute(self, world: World, inside: Collection[str]) -> Mapping[str, str]:
        """The silent workers that others wait for while the group forms or is broken, each with the reason. Empty if all members are
        silent."""
        found = self._mutes(world, inside)
        return self._mutes(world, inside) if found and self._worker_group.starved(found) else found

    def _mutes(self, world: World, inside: Collection[str]) -> Mapping[str, str]:
        found: dict[str, str] = {}
        forming, training = self._hangs.forming_s, min(self._hangs.bound_s, self._hangs.forming_s)
        silent = {bound: self._worker_group.silent(bound - POLL_WAIT_S) for bound in (forming, training)}
        for worker in silent[training].intersection(inside):
            report = self._worker_group.report(worker)
            if self._worker_group.doomed(worker) or (report is not None and report.phase is WorkerPhase.SAVING):
                continue
            trains = report is not None and report.ticket == world.ticket and report.phase is WorkerPhase.TRAINING
            bound = training if trains else forming
            if worker in silent[bound]:
                found[worker] = f"it has answered nothing for {bound:.1f} s"
        return found if not found or any(self._worker_group.alive(w) and w not in found for w in world.members) else {}

    def late(self, world: World, since: float, inside: Sequence[str], out: Sequence[str], *, complete: bool) -> dict[str, str]:
        """The workers to end, because they are still in a generation that is over.

        Args:
            since: seconds since the first sign of its end.
            inside: workers in it; ``out``: living members that have left it.
            complete: whether the workers ``out`` hold the newest step together.
        """
        worker_group, steps = self._worker_group, self._log.stats.steps
        silent, ready = worker_group.silent(self._exit_deadlines.silence_s), frozenset(worker_group.ready())
        views = {w: WorkerView(worker_group.report(w), w in silent, worker_group.doomed(w)) for w in inside}
        spares = sum(w in ready for w in self._scaling.outside(world.members))
        return self._exit_deadlines.late(since, views, Surroundings(len(out), complete, spares, steps.last_seconds, steps.longest))

    def end(self, world: World, hung: Mapping[str, str], cut: CutOff | None = None) -> None:
        """End the workers ``hung``, each with the reason, and write a report with the position of every worker."""
        self.evidence.hung(end_hung(self._worker_group, self._log, world, hung, cut))

    # -------------------------------------------------------------------------------------------------------- partitions

    def end_cut_off(self, world: World) -> None:
        """If all members stand still and none hangs, probe the connections of their nodes, and end the workers that are cut off."""
        leavers = [w for w in self._scaling.leavers if self._worker_group.alive(w)]
        if any(self._worker_group.doomed(worker) for worker in (*world.members, *leavers)):
            return  # one was just ended; a later round sees the effects
        if not self._hangs.stalled(world.members, time.monotonic()):
            return self._scaling.connectivity.progressed()
        cut = self._scaling.cut_off(world.members, leavers)
        if cut is not None and self._is_due(world, world.members, cut):
            self._end_unreached(world, cut)

    def begin_partition(self) -> float:
        """Probe the connections at once, because a collective has failed though all workers live. Returns the monotonic time by which the
        result is known."""
        self._scaling.connectivity.hurry()
        return time.monotonic() + self._scaling.connectivity.patience_s + 3 * TRY_S

    def partitioned(self, world: World, living: Sequence[str]) -> dict[str, Lost] | None:
        """End the workers that are cut off and return those of ``living``; None while the result is not known.

        Leavers that are cut off are ended and recorded as lost, too.
        """
        scaling = self._scaling
        leavers = [w for w in scaling.leavers if not self._worker_group.doomed(w)]
        cut = scaling.cut_off(living, leavers)
        if cut is not None and not cut.workers:
            return {}
        if cut is None or not self._is_due(world, living, cut):
            return None
        lost = {w: Lost(w, self._worker_group.info(w), f"killed: {cut.why(node)}", Cause.NODE) for w, node in cut.workers.items()}
        self._end_unreached(world, cut)
        self._gone |= {w: one for w, one in lost.items() if w in scaling.leavers}
        scaling.keep(w for w in scaling.leavers if w not in cut.workers)
        return {w: one for w, one in lost.items() if w in living}

    def _is_due(self, world: World, members: Sequence[str], cut: CutOff) -> bool:
        """Return whether to end the workers that are cut off now, and record the policy's events."""
        due, events = self._scaling.connectivity.due(cut, members, len(self._spares(world, cut)), world.ticket)
        for event in events:
            self._log.record(event.name, **event.about)
        return due

    def _spares(self, world: World, cut: CutOff) -> list[str]:
        """Warm workers outside the generation that could take a place, on nodes that are not cut off themselves."""
        ready, nodes = frozenset(self._worker_group.ready()), set(cut.workers.values())
        spares = [w for w in self._scaling.outside(world.members) if w in ready]
        return [w for w in spares if (info := self._worker_group.info(w)) is not None and info.node not in nodes]

    def _end_unreached(self, world: World, cut: CutOff) -> None:
        """End the workers that are cut off, and hire none on their nodes for a while."""
        scaling, gone = self._scaling, set(cut.workers.values())
        for node in gone:
            scaling.nodes.shun(node)
        for worker in scaling.outside(world.members):
            info = self._worker_group.info(worker)
            if info is not None and info.node in gone:
                scaling.let_go(worker)  # otherwise it would take the place of an ended worker
        self.end(world, {worker: cut.why(node) for worker, node in cut.workers.items()}, cut)
