"""The workers as the controller sees them: which are warm, which died, and the last report of each. Mechanism only, no decisions.

The controller makes three kinds of calls to each worker. The *lifeline* never returns; it fails within milliseconds of the process' death.
A worker answers a *poll*, one at a time, when something has happened, or after ``POLL_WAIT_S``. An *order* only leaves a note there. Each
wait for a call has a bound, so that a stopped worker can't stop the controller. :meth:`WorkerGroup.silent` names workers that owe an
answer.

Used from the controller's thread alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError

from vescale_ray.controller.failures.budget import Cause
from vescale_ray.controller.protocol import Dismissal, Places
from vescale_ray.controller.worker_group.clocks import AwakeClock
from vescale_ray.controller.worker_group.member import POLL_WAIT_S, Member
from vescale_ray.controller.worker_group.ray_answers import NODE_LOST, Reaching, answer_of, death_of, has_answered, one_line
from vescale_ray.controller.worker_group.stacks import node_by_node, stacks_of
from vescale_ray.controller.worker_group.starvation import excused
from vescale_ray.controller.worker_group.worker_news import Lost, News, Ready
from vescale_ray.workers.messages import Order, Ticket, WorkerInfo, WorkerReport
from vescale_ray.workers.network.reachability import AT_ONCE

REQUEST_GAP_S = 0.5
"""Pause between two questions about the state of the placement groups."""
SILENT_S = 1.0
"""If a node does not answer, its workers that have not answered for this long count as lost with it."""
HIRE_S = 2.0
"""Longest wait for a worker's hiring. It takes milliseconds if Ray's control store answers."""
ORDER_S = 5.0
"""A worker that has not taken its order after this time is ended. A free worker takes one within milliseconds."""
ASK_S = 0.2
"""Longest wait for one worker to take flags. The control loop, which watches the others, must not block for long (``clocks.GAP_S``)."""
REACHABILITY_S = 1.0
"""Time for the answers about connections to arrive after the workers' own tries."""
UNTOLD = frozenset({"unknown"})
"""Stands for the unknown nodes that a worker of an earlier controller avoids. No node has this name, so such a worker counts as
overconstrained while it has no place (:meth:`WorkerGroup.overconstrained`)."""


class WorkerGroup:
    """The run's workers, by id, in the order in which they were hired.

    Args:
        supervisor: the actor that creates and ends them.
        call_s: longest wait for a call that only leaves a note.
        epoch: number of this start of the controller. Only the newest controller holds the workers' lifelines.
        vacate: keep the places of lost workers for those that replace them.

    Attributes:
        clock: measures the silence of workers. It stands still while this process does.
    """

    def __init__(self, supervisor: Any, call_s: float, epoch: int, vacate: bool = False) -> None:
        self._supervisor = supervisor
        self._call_s = call_s
        self._epoch, self._vacate = epoch, vacate
        self._ends: list[Any] = []
        """Ends of lost workers that may be under way. A hiring waits for them, because it may take their places."""
        self.clock = AwakeClock()
        self.members: dict[str, Member] = {}
        self.places = Places()
        """State of the placement groups as :meth:`request_places` last heard it."""
        self._answer: Any = None
        self._requested = 0.0
        self._hirings: dict[Any, frozenset[str]] = {}
        """Hirings under way, each with the nodes to avoid."""
        self._unhired: list[str] = []
        """Reasons of hirings that failed."""

    # -------------------------------------------------------------------------------------------------------- membership

    def hire(self, avoid: Collection[str] = ()) -> None:
        """Start a worker, on none of the nodes to ``avoid``. It is ``Ready`` some time later.

        If Ray's control store does not answer soon, the worker counts in :attr:`hiring` until it does.
        """
        if self._ends:
            _, self._ends = ray.wait(self._ends, num_returns=len(self._ends), timeout=0)
        self._hirings[self._supervisor.hire.remote(tuple(avoid), self._epoch, *self._ends)] = frozenset(avoid)
        # If an earlier hiring still waits, this one will, too, so there is no point in waiting here.
        self._enlist(HIRE_S if len(self._hirings) == 1 else 0.0)

    @property
    def hiring(self) -> int:
        """Number of hirings under way. Their workers do not count as ``warming`` yet."""
        return len(self._hirings)

    @property
    def arriving(self) -> int:
        """Number of workers that may be warm in a moment: hirings under way, and standbys that have taken a place."""
        return self.hiring + sum(m.standby and m.info is None and m.verdict is None for m in self.members.values())

    def _enlist(self, wait_s: float) -> None:
        """Add the workers whose hiring is done."""
        if self._hirings:
            done, _ = ray.wait(list(self._hirings), num_returns=len(self._hirings), timeout=wait_s)
            for ref in done:
                avoid = self._hirings.pop(ref)
                try:
                    worker, handle, standby = answer_of(ref, self._call_s)
                except RayTaskError as error:  # a control store that has just come back, for example
                    self._unhired.append(one_line(error.cause if getattr(error, "cause", None) is not None else error))
                else:
                    self._enroll(worker, handle, avoid=avoid, standby=standby)

    def overconstrained(self, avoided: Collection[str]) -> list[str]:
        """Return the workers that are not warm yet and exclude a node that is no longer among those to avoid."""
        return [w for w in self.warming() if self.members[w].avoid.difference(avoided)]

    def adopt(self, known: Mapping[str, WorkerInfo]) -> None:
        """Take over the workers that an earlier controller had hired.

        ``known``: the workers that were warm then. A worker that is stopped by now can't report that itself."""
        for worker, handle in self._ask_supervisor("roster", self._epoch).items():
            self._enroll(worker, handle, known.get(worker), frozenset() if worker in known else UNTOLD)

    def store(self) -> tuple[str, int]:
        """Return the host and port of a store for one generation."""
        host, port = self._ask_supervisor("store", timeout_s=60.0)  # it imports torch
        return str(host), int(port)

    def prepare_store(self) -> None:
        """Have the supervisor import torch now, while the workers do."""
        self._supervisor.store.remote()

    def dismiss(self, worker: str) -> None:
        """End a worker, without further news of it. Does not wait, because its node may not answer."""
        member = self.members.pop(worker, None)
        if member is not None:
            self._supervisor.dismiss.remote(worker, member.info)

    def kill(self, reasons: Mapping[str, str], cause: Cause = Cause.HANG) -> None:
        """End workers. The news of each loss has the worker's reason and ``cause``. All are ended at once, because the supervisor waits a
        moment for each node that does not answer."""
        asked: dict[str, Any] = {}
        for worker in node_by_node(self.members, reasons):
            member = self.members[worker]
            if member.verdict is None:
                member.mark_ended(reasons[worker], cause)
                asked[worker] = self._supervisor.dismiss.remote(worker, member.info, self._vacate)
        for worker, ref in asked.items():
            member, done = self.members[worker], answer_of(ref, self._call_s)
            if done is Dismissal.GONE:
                member.was_gone()
            elif done is Dismissal.UNKNOWN:
                assert member.info is not None
                self._leave_node(member.info.node, worker, reasons[worker])

    def _leave_node(self, node: str, worker: str, reason: str) -> None:
        """Count ``worker``, which could not be ended, and all silent workers of its node as lost, because the node does not answer. Ray
        reports their loss many seconds later, and the next generation would wait for them.

        The method looks for answers that came while this process waited for the node, so ``time.monotonic`` suffices to measure the
        silence."""
        quiet = time.monotonic() - SILENT_S - POLL_WAIT_S
        for other, member in self.members.items():
            there = member.info is not None and member.info.node == node
            if other == worker or (there and member.heard < quiet and not has_answered(member.poll)):
                if member.verdict is None:
                    self._supervisor.dismiss.remote(other, None)
                member.leave(f"{reason}; its node does not answer" if other == worker else "its node does not answer")

    def signal(self, worker: str, number: int) -> bool:
        """Send a signal to a worker's process, as anyone on its machine could."""
        info = self.members[worker].info
        return info is not None and bool(self._ask_supervisor("signal", info, number))

    def stacks(self, workers: Iterable[str], wait_s: float) -> dict[str, str]:
        """Return the Python stacks of workers. If a worker does not answer within ``wait_s``, or has owed an answer for long, its node's
        agent is asked."""
        there = {w: self.members[w] for w in workers if w in self.members}
        return stacks_of(there, self.silent(wait_s), self._supervisor, wait_s, self._call_s)

    def request_places(self, count: int, avoid: Collection[str] = ()) -> None:
        """Keep ``count`` places for workers that are not hired yet, and update :attr:`places`. Does not wait for the answer, so call it
        repeatedly."""
        if self._answer is not None:
            done, _ = ray.wait([self._answer], timeout=0)
            if not done:
                return
            self._answer = None
            try:
                self.places = ray.get(done[0])
            except RayError:
                pass  # the next call that needs an answer finds a lost supervisor
        if time.monotonic() - self._requested >= REQUEST_GAP_S:
            self._requested = time.monotonic()
            self._answer = self._supervisor.request_places.remote(count, tuple(avoid))

    def cancel_requests(self) -> None:
        """Take back all places that wait for workers."""
        self._supervisor.request_places.remote(0, ())

    def alive(self, worker: str) -> bool:
        return worker in self.members

    def ending(self, worker: str) -> bool:
        """Return whether a worker is being ended, or is gone."""
        member = self.members.get(worker)
        return member is None or member.verdict is not None

    def ready(self) -> tuple[str, ...]:
        """Return warm workers that are not being ended."""
        return tuple(w for w, member in self.members.items() if member.info is not None and member.verdict is None)

    def warming(self) -> tuple[str, ...]:
        return tuple(w for w, member in self.members.items() if member.info is None and member.verdict is None)

    def report(self, worker: str) -> WorkerReport | None:
        member = self.members.get(worker)
        return member.report if member else None

    def stale(self, worker: str) -> bool:
        """Return whether a worker's last report may be older than its last order, and therefore does not say what the worker does now."""
        member = self.members.get(worker)
        return member is not None and member.told <= member.ordered

    def info(self, worker: str) -> WorkerInfo | None:
        member = self.members.get(worker)
        return member.info if member else None

    def age(self, worker: str) -> float:
        """Return the seconds since a worker was hired."""
        return time.monotonic() - self.members[worker].hired

    def silent(self, seconds: float) -> frozenset[str]:
        """Return warm workers that have owed an answer for more than ``seconds``, without the time that :meth:`starved` excuses."""
        limit = self.clock() - seconds - POLL_WAIT_S
        return frozenset(w for w, m in self.members.items() if m.owes and m.owes_since + m.starved_s < limit and m.verdict is None)

    def given(self, worker: str) -> float:
        """Return the seconds of a worker's silence that :meth:`starved` excuses."""
        member = self.members.get(worker)
        return member.starved_s if member else 0.0

    def starved(self, workers: Collection[str]) -> dict[str, float]:
        """Return the workers that owe an answer because their machine is overloaded, each with the seconds of silence that this call
        excuses (:func:`~vescale_ray.controller.worker_group.starvation.excused`). Call this method before ending a silent worker."""
        return excused(self.members, workers, self._supervisor.starved, self._call_s)

    # ------------------------------------------------------------------------------------------------------------ orders

    def order(self, orders: Mapping[str, Order]) -> dict[str, str]:
        """Give each worker its order, all at once. Returns the workers that did not accept theirs, each with the reason."""
        refs = {w: self.members[w].handle.give_order.remote(order) for w, order in orders.items() if w in self.members}
        refused = self._tell(refs, min(ORDER_S, self._call_s))
        for worker in orders.keys() & self.members.keys():
            self.members[worker].give_order(time.monotonic())
        return refused

    def ask(self, workers: Sequence[str], ticket: Ticket, flags: int) -> bool:
        """Have one of ``workers`` carry ``flags`` into the next step, where all ranks see them. Return False if none accepts them.

        Tries two workers, for :data:`ASK_S` each. Those that owe no answer come first, because a stopped worker would not answer.
        """
        silent = self.silent(0.0)
        for worker in sorted((w for w in workers if w in self.members), key=lambda w: w in silent)[:2]:
            if not self._tell({worker: self.members[worker].handle.ask.remote(ticket, flags)}, ASK_S):
                return True
        return False

    def ask_outline(self, workers: Iterable[str]) -> None:
        """Ask the first of ``workers`` that has reported for the outline of the layouts, unless an answer is due already.

        A worker that does not know the outline is not asked again for a while.
        """
        if self.asking_outline:
            return
        there = (m for w in workers if (m := self.members.get(w)) is not None and m.report is not None and m.verdict is None)
        member = next((m for m in there if m.outline_next <= time.monotonic()), None)
        if member is not None:
            member.ask_outline()

    @property
    def asking_outline(self) -> bool:
        """True if a worker has not yet answered :meth:`ask_outline`."""
        return any(member.outline is not None for member in self.members.values())

    def ask_reachability(self, asked: Mapping[str, Collection[str]], wait_s: float) -> Reaching:
        """Have each worker in ``asked`` try to reach the workers listed for it, for ``wait_s`` seconds."""
        addresses = {w: m.info.address for w, m in self.members.items() if m.info is not None and m.info.address}
        refs: dict[Any, str] = {}
        longest = 1
        for worker, others in asked.items():
            known = {other: addresses[other] for other in others if other in addresses}
            if worker in self.members and known:
                refs[self.members[worker].handle.unreached.remote(known, wait_s)] = worker
                longest = max(longest, math.ceil(len(known) / AT_ONCE))
        return Reaching(refs, time.monotonic() + longest * wait_s + REACHABILITY_S)

    def fence(self, workers: Iterable[str], ticket: Ticket) -> None:
        """Close a generation. Does not wait: a worker that does not get the call is killed later anyway."""
        for worker in workers:
            if worker in self.members:
                self.members[worker].handle.fence.remote(ticket)

    def _tell(self, refs: dict[str, Any], bound_s: float) -> dict[str, str]:
        if not refs:
            return {}
        done, _ = ray.wait(list(refs.values()), num_returns=len(refs), timeout=bound_s)
        failed: dict[str, str] = {}
        for worker, ref in refs.items():
            if ref not in done:
                failed[worker] = f"took no order within {bound_s:g} s"
                continue
            try:
                ray.get(ref)
            except RayTaskError as error:
                failed[worker] = one_line(error.cause if getattr(error, "cause", None) is not None else error)
            except RayError as error:
                failed[worker] = one_line(error)
        return failed

    # -------------------------------------------------------------------------------------------------------------- news

    def pump(self, timeout_s: float) -> list[News]:
        """Return the workers' news, as soon as there is any; an empty list if there is none within ``timeout_s`` seconds."""
        self._enlist(0.0)
        if self._unhired:
            unhired, self._unhired = self._unhired, []
            return [Lost("nobody", None, f"it could not be hired: {why}") for why in unhired]
        now = time.monotonic()
        self.clock()
        wake = now + timeout_s
        # Ray learns late that a process on a lost node has died. The controller need not wait for that.
        overdue = [member for member in self.members.values() if member.overdue(now)]
        if overdue:
            return [news for member in overdue for news in self._remove_lost(member, "its process died", Cause.KILLED)]
        for member in self.members.values():
            if member.waits_for_poll:
                if member.next_poll <= now:
                    member.send_poll(now, self.clock())
                else:
                    wake = min(wake, member.next_poll)
        owner = {ref: member for member in self.members.values() for ref in member.pending()}
        if not owner:
            time.sleep(max(0.0, min(wake - now, timeout_s)))
            return []
        refs = list(owner)
        ready, _ = ray.wait(refs, num_returns=1, timeout=max(0.0, wake - now))
        if not ready:
            return []
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
        news: list[News] = []
        for ref in ready:
            member = owner[ref]
            if member.worker in self.members:  # else: just found dead by another of its calls
                news += self._receive(member, ref)
        if any(isinstance(one, Lost) for one in news):
            self._ask_supervisor("kept")  # raises if the supervisor is lost, and so all workers
        return news

    def _receive(self, member: Member, ref: Any) -> list[News]:
        try:
            value = ray.get(ref)
        except ActorUnavailableError:
            # A hiccup of the network, not a death: ask again. Silence has its own bound.
            member.renew(ref, self._epoch)
            return []
        except RayTaskError as error:
            cause = error.cause if getattr(error, "cause", None) is not None else error
            return self._remove_lost(member, one_line(cause), Cause.ERROR)
        except RayActorError as error:
            reason = death_of(error)
            gone = reason == NODE_LOST or getattr(error, "preempted", False)
            return self._remove_lost(member, reason, Cause.NODE if gone else Cause.KILLED)
        except RayError as error:
            return self._remove_lost(member, one_line(error), Cause.KILLED)
        news = member.receive(ref, value)
        for one in news:
            if isinstance(one, Ready):
                self._supervisor.station.remote(member.worker, one.info.node)
        return news

    def _remove_lost(self, member: Member, reason: str, cause: Cause) -> list[News]:
        self.members.pop(member.worker, None)
        if member.verdict is None:
            # The worker's place must be given back. A recovery does not wait for that, because the node may be gone.
            end = self._supervisor.dismiss.remote(member.worker, member.info, self._vacate)
            if self._vacate:
                self._ends.append(end)
        told = (reason, cause) if member.verdict is None or member.gone else (member.verdict, member.cause)
        return [Lost(member.worker, member.info, *told)]

    def _enroll(
        self, worker: str, handle: Any, info: WorkerInfo | None = None, avoid: frozenset[str] = frozenset(), standby: bool = False
    ) -> None:
        self.members[worker] = member = Member(worker, handle, time.monotonic(), info, avoid, standby)
        member.start(self._epoch)

    def _ask_supervisor(self, method: str, *args: Any, timeout_s: float | None = None) -> Any:
        return answer_of(getattr(self._supervisor, method).remote(*args), timeout_s or self._call_s)
