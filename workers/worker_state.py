"""The state that the control threads of a worker share with its training thread: orders in, reports out. Imports neither Ray nor torch.

One condition guards everything. No method but those that say so waits for the other side, so a worker answers within milliseconds during
any computation.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from vescale_ray.workers.messages import (
    NO_TICKET,
    FaultKind,
    Give,
    Item,
    Order,
    Outlined,
    Save,
    SavedShard,
    Ticket,
    WorkerFault,
    WorkerInfo,
    WorkerPhase,
    WorkerReport,
)
from vescale_ray.workers.monitoring.process import resident_bytes
from vescale_ray.workers.network.connections import Connections

if TYPE_CHECKING:
    from vescale_ray.workers.resharding.held_state import HeldState

OUT = (WorkerPhase.PARKED, WorkerPhase.FINISHED)
"""Phases of a worker that has been in a generation and is in none."""


class Refused(ValueError):
    """An order or request does not fit the worker's state; the message says why. Nothing was changed."""


class WorkerState:
    """Phase, order, and unacknowledged items of one worker. ``worker`` is its id."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._change = threading.Condition()
        self._phase = self._resting = WorkerPhase.WARMING
        self._ticket = NO_TICKET
        self._fenced = NO_TICKET
        self._fault: WorkerFault | None = None
        self._completed = 0
        self._asked = 0
        self._order: Order | None = None
        self._items: deque[tuple[int, Item]] = deque()
        self._last_item = 0
        self._info: WorkerInfo | None = None
        self._start_error: str | None = None
        self._lifeline = 0
        self._outlined: Outlined | None = None
        self._connections: tuple[Connections, ...] = ()
        """Connections of the groups that the training thread is in or forms."""

    @property
    def ticket(self) -> Ticket:
        return self._ticket

    @property
    def phase(self) -> WorkerPhase:
        return self._phase

    @property
    def outlined(self) -> Outlined | None:
        """Inputs of the layouts at every world size. None until this worker has first built a model or, if it joined a running group, taken
        a step. All workers keep them for a restarted controller."""
        return self._outlined

    def is_fenced(self, ticket: Ticket) -> bool:
        """Return whether the generation of ``ticket`` is closed."""
        return ticket <= self._fenced

    # ---------------------------------------------------------------------------------------------------- control threads

    def identity(self, wait_s: float) -> WorkerInfo | None:
        """Return the identity of this worker once it is warm; None if it is still warming up after ``wait_s`` seconds.

        Raises:
            RuntimeError: the worker cannot start; the message is one line.
        """
        with self._change:
            self._change.wait_for(lambda: self._info or self._start_error, wait_s)
            if self._start_error:
                raise RuntimeError(self._start_error)
            return self._info

    def report(
        self, seen: int, known: tuple[WorkerPhase, Ticket] | None, wait_s: float, held: Callable[[], Sequence[HeldState]]
    ) -> WorkerReport:
        """Report the items after ``seen``. Returns at once if there are any, or if phase and ticket differ from ``known``, those of the
        last report; otherwise after ``wait_s`` seconds.

        ``seen`` also acknowledges: items up to it are dropped. A restarted controller passes -1 and gets all items still kept, which always
        include the last vote for a checkpoint. ``held`` returns the states that the worker holds; it is called once the worker is out of
        its group.
        """
        with self._change:
            self._change.wait_for(lambda: self._last_item > seen or (self._phase, self._ticket) != known, wait_s)
            if seen >= 0:
                self._forget(seen)
            items = tuple(entry for entry in self._items if entry[0] > seen)
            kept = tuple(held()) if self._phase in OUT else ()
            return WorkerReport(self._worker, self._ticket, self._phase, self._completed, items, kept, self._fault, resident_bytes())

    def give_order(self, order: Order) -> None:
        """Accept an order; the training thread executes it.

        Raises:
            Refused: the order is older than an earlier order or fence, or the worker is busy.
        """
        with self._change:
            newest = max(self._ticket, self._fenced)
            if order.ticket < self._ticket or (not isinstance(order, Save) and order.ticket <= newest):
                raise Refused(f"{self._worker}: an order of {order.ticket} comes too late: {newest} has ended or is running")
            if self._order is not None or self._phase not in (*OUT, WorkerPhase.IDLE):
                raise Refused(f"{self._worker} is {self._phase} in {self._ticket}: it takes an order of {order.ticket} once it is parked")
            self._order = order
            # Set the phase now, not when the training thread starts, so that the next poll sees it. The training thread may still be
            # building a model. In this phase the controller allows it the time to form a group, and detects if it hangs.
            if isinstance(order, Save):
                self._resting, self._phase = self._phase, WorkerPhase.SAVING
            else:
                self.enter(order.ticket, WorkerPhase.GIVING if isinstance(order, Give) else WorkerPhase.FORMING)
            self._change.notify_all()

    def ask(self, ticket: Ticket, flags: int) -> None:
        """Add ``flags`` to the next step's exchange. All ranks see them there and act at the same boundary.

        Raises:
            Refused: the worker is not, or no longer, in that generation.
        """
        with self._change:
            if ticket != self._ticket or self._phase not in (WorkerPhase.FORMING, WorkerPhase.TRAINING, WorkerPhase.SAVING):
                raise Refused(f"{self._worker} is {self._phase} in {self._ticket}: it takes no request for {ticket}")
            self._asked |= flags

    def fence(self, ticket: Ticket) -> None:
        """Refuse orders up to ``ticket``, and leave its generation if the worker is in it, so that a wait for an unreachable rank ends.
        Resumption uses the copies, so an interrupted step is not half committed."""
        with self._change:
            self._fenced = max(self._fenced, ticket)
            if self._ticket <= ticket:
                for connections in self._connections:
                    connections.cut()

    def hold(self, call: int) -> None:
        """Block until a later call of this method, so that only the newest controller has a pending call. There is no time limit."""
        with self._change:
            self._lifeline = call
            self._change.notify_all()
            self._change.wait_for(lambda: self._lifeline != call)

    # ---------------------------------------------------------------------------------------------------- training thread

    def started(self, info: WorkerInfo) -> None:
        """Report the worker as ready for orders."""
        with self._change:
            self._info, self._phase = info, WorkerPhase.IDLE
            self._change.notify_all()

    def cannot_start(self, reason: str) -> None:
        """Report that the worker never gets ready for orders. ``reason`` is one line."""
        with self._change:
            self._start_error = reason
            self._change.notify_all()

    def next_order(self) -> Order:
        """Wait for an order whose generation is not closed. There is no time limit."""
        with self._change:
            while True:
                self._change.wait_for(lambda: self._order is not None)
                order, self._order = self._order, None
                assert order is not None
                if isinstance(order, Save) or not self.is_fenced(order.ticket):
                    return order
                # A fence came between the order and now. The controller waits until this worker is out of that generation, and it is.
                self.enter(order.ticket, WorkerPhase.PARKED)
                self.settle(WorkerPhase.PARKED, WorkerFault(FaultKind.PEER, f"generation {order.ticket} was closed before it began"))

    def enter(self, ticket: Ticket, phase: WorkerPhase) -> None:
        """Set the generation and the worker's phase in it. A new generation begins without faults, requests and connections."""
        with self._change:
            if ticket != self._ticket:
                self._ticket, self._fault, self._asked, self._connections = ticket, None, 0, ()
            self._phase = phase
            self._change.notify_all()

    def settle(self, phase: WorkerPhase, fault: WorkerFault | None) -> None:
        """Leave the generation, for the reason ``fault``, or as ordered if that is None."""
        with self._change:
            self._phase, self._fault, self._asked = phase, fault, 0
            self._change.notify_all()

    def rest(self) -> None:
        """Return to the phase that the worker had before it saved."""
        with self._change:
            self._phase = self._resting
            self._change.notify_all()

    def publish(self, item: Item, phase: WorkerPhase | None = None, completed: int | None = None) -> None:
        """Add an item for the next reports. With it, the phase and the number of completed steps may change."""
        with self._change:
            self._last_item += 1
            self._items.append((self._last_item, item))
            if phase is not None:
                self._phase = phase
            if completed is not None:
                self._completed = completed
            self._change.notify_all()

    def outline(self, outlined: Outlined) -> None:
        """Keep the answer to the controller's question for the outline of the layouts."""
        self._outlined = outlined

    def take_flags(self) -> int:
        """Return the flags asked for since the last call."""
        with self._change:
            flags, self._asked = self._asked, 0
            return flags

    @contextmanager
    def connecting(self, ticket: Ticket) -> Iterator[Connections]:
        """Register the connections of a group that the block forms. A fence of ``ticket`` cuts them, even one during the block."""
        connections = Connections()
        with self._change:
            self._connections = (*self._connections, connections)
        yield connections
        with self._change:
            # That fence cut only the connections that were open by then.
            if self.is_fenced(ticket):
                connections.cut()

    def abandon_connections(self) -> None:
        """Forget the groups' communicators: the caller is about to dissolve the groups, which ends them."""
        with self._change:
            for connections in self._connections:
                connections.abandon()

    def _forget(self, seen: int) -> None:
        """Drop acknowledged items except the newest vote, which a controller that restarts before its commit needs again."""
        votes = [number for number, item in self._items if isinstance(item, SavedShard)]
        last_vote = votes[-1] if votes else 0
        self._items = deque(entry for entry in self._items if entry[0] > seen or entry[0] == last_vote)
