"""Detect the workers of a generation that are lost, hung, silent, late to leave, or cut off. Takes values, returns decisions and
actions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from vescale_ray.config import RunConfig
from vescale_ray.controller import actions
from vescale_ray.controller.actions import Action
from vescale_ray.controller.failures.budget import Cause
from vescale_ray.controller.failures.connectivity import TRY_S, Connectivity, CutOff, Network, Probe
from vescale_ray.controller.failures.exit_deadlines import ExitDeadlines
from vescale_ray.controller.failures.hang import HangWatch
from vescale_ray.controller.observations import Observations, WorkersView
from vescale_ray.controller.protocol import Bounds, World
from vescale_ray.controller.worker_group.member import POLL_WAIT_S
from vescale_ray.controller.worker_group.worker_news import Lost
from vescale_ray.workers.messages import Ticket, WorkerPhase


class FailureDetector:
    """Detects failed workers. It remembers the news of the workers, and changes nothing else.

    Attributes:
        inherited: ticket of the generation that an earlier process of the controller launched; None if there is none.
        losses: reported losses, by worker.
        hangs, exits: the policies that find hung workers, and workers that are late to leave.
    """

    def __init__(self, config: RunConfig, bounds: Bounds, connectivity: Connectivity) -> None:
        self._connectivity = connectivity
        self.inherited: Ticket | None = None
        self.losses: dict[str, Lost] = {}
        self.exits = ExitDeadlines(config.elastic, bounds)
        elastic = config.elastic
        patience = None if elastic.hang_timeout_s == "auto" else elastic.hang_timeout_s
        replaced = elastic.replace_lost or elastic.grow or elastic.spares > 0
        window = config.train.profile
        slow = range(window.step, window.last + 2) if window is not None else range(0)  # the profile ends after the last one
        self.hangs = HangWatch(patience, elastic.collective_timeout_s, replaced, slow)
        self._silence_s = bounds.silence or elastic.collective_timeout_s

    # --------------------------------------------------------------------------------------------------------------- news

    def adopt(self, world: World, last_s: float | None, paces: Collection[tuple[int, float]]) -> None:
        """Begin to watch a generation that an earlier process of the controller launched.

        The durations of its steps are passed on. Without them, a worker that hangs already would be found only by the collectives' timeout.
        """
        self.inherited = world.ticket
        self.hangs.expect(last_s or 0.0, paces)
        self.hangs.begin(world.ticket, world.size)

    def lost(self, one: Lost, draining: Collection[str]) -> Lost:
        """Record the loss of a worker and return it. If the worker's node drains, the node is the cause."""
        if one.info is not None and one.info.node in draining:
            one = replace(one, cause=Cause.NODE)
        self.losses[one.worker] = one
        return one

    # ---------------------------------------------------------------------------------------------------- hung and silent

    def silent(self, workers: WorkersView) -> actions.End:
        """End the workers that have been silent for the longest time that any answer may take."""
        why = f"killed: answered nothing for {self._silence_s:g} s, its process is hung or stopped"
        return actions.End(dict.fromkeys(workers.silent(self._silence_s), why))

    def hung(self, world: World, seen: Observations) -> Mapping[str, str]:
        """Return the hung members, each with the reason."""
        if any(seen.workers.ending(worker) for worker in world.members):
            return {}  # one was just ended; a later round sees the effects
        hung = self.hangs.verdict(world.members, seen.now)
        if hung and hung.keys() <= seen.starved.keys():
            self.hangs.ended(hung)
        return hung

    def silent_members(self, world: World, inside: Collection[str], seen: Observations) -> Mapping[str, str]:
        """Return the silent workers that others wait for while the group forms or is broken, each with the reason. Empty if all members are
        silent."""
        found: dict[str, str] = {}
        workers, forming, training = seen.workers, self.hangs.forming_s, min(self.hangs.bound_s, self.hangs.forming_s)
        silent = {bound: workers.silent(bound - POLL_WAIT_S) for bound in (forming, training)}
        for worker in silent[training].intersection(inside):
            report = workers.report(worker)
            if workers.ending(worker) or (report is not None and report.phase is WorkerPhase.SAVING):
                continue
            trains = report is not None and report.ticket == world.ticket and report.phase is WorkerPhase.TRAINING
            bound = training if trains else forming
            if worker in silent[bound]:
                found[worker] = f"it has answered nothing for {bound:.1f} s"
        return found if not found or any(workers.alive(w) and w not in found for w in world.members) else {}

    # --------------------------------------------------------------------------------------------------------- partitions

    def cut_off(self, world: World, seen: Observations) -> list[Action]:
        """If all members stand still and none hangs, probe the connections of their nodes, and end the workers that are cut off."""
        leavers = [w for w in seen.leavers if seen.workers.alive(w)]
        if any(seen.workers.ending(worker) for worker in (*world.members, *leavers)):
            return []  # one was just ended; a later round sees the effects
        if not self.hangs.stalled(world.members, seen.now):
            self._connectivity.progressed()
            return []
        _, do = self._cut_off(world, world.members, leavers, seen)
        return do

    def begin_partition(self, now: float) -> float:
        """Probe the connections at once, because a collective has failed though all workers live. Returns the monotonic time by which the
        result is known."""
        self._connectivity.hurry()
        return now + self._connectivity.patience_s + 3 * TRY_S

    def partitioned(self, world: World, living: Sequence[str], seen: Observations) -> tuple[bool, list[Action]]:
        """Return whether it is known which members and leavers are cut off, and the actions to take: end them, or probe further."""
        leavers = [w for w in seen.leavers if not seen.workers.ending(w)]
        cut, do = self._cut_off(world, living, leavers, seen)
        if cut is not None and any(isinstance(one, actions.End) for one in do):
            return True, [*do, actions.Note({"leavers": tuple(w for w in seen.leavers if w not in cut.workers)})]
        return cut is not None and not cut.workers, do

    def _cut_off(
        self, world: World, members: Sequence[str], leavers: Sequence[str], seen: Observations
    ) -> tuple[CutOff | None, list[Action]]:
        """Return the workers that are cut off, if that is known, and the actions that end them once it is time."""
        cut = self._connectivity.cut_off(members, leavers, network(seen, (*members, *leavers)))
        if cut is None or isinstance(cut, Probe):
            return None, [cut] if cut is not None else []
        # Warm workers outside the generation could take a place, unless their nodes are cut off themselves.
        ready, nodes = frozenset(seen.workers.ready()), set(cut.workers.values())
        infos = [seen.workers.info(w) for w in seen.outside(world.members) if w in ready]
        spares = sum(info is not None and info.node not in nodes for info in infos)
        due, events = self._connectivity.due(cut, members, spares, world.ticket)
        return cut, [*events, *(self._end_unreached(world, cut, seen) if due else ())]

    def _end_unreached(self, world: World, cut: CutOff, seen: Observations) -> list[Action]:
        """End the workers that are cut off, and hire none on their nodes for a while."""
        gone = set(cut.workers.values())
        for worker, node in cut.workers.items():
            self.losses[worker] = Lost(worker, seen.workers.info(worker), f"killed: {cut.why(node)}", Cause.NODE)
        infos = {worker: seen.workers.info(worker) for worker in seen.outside(world.members)}
        # A worker outside would take the place of an ended one.
        beside = [actions.Dismiss(worker) for worker, info in infos.items() if info is not None and info.node in gone]
        reasons = {worker: cut.why(node) for worker, node in cut.workers.items()}
        return [*map(actions.ExcludeNode, gone), *beside, actions.End(reasons, world, cut)]


def network(seen: Observations, workers: Sequence[str]) -> Network:
    """Return the view of these ``workers`` that the connectivity policy needs."""
    infos = {worker: info for worker in workers if (info := seen.workers.info(worker)) is not None}
    return Network(infos, seen.workers.silent(0.0), seen.now)
