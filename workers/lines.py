"""The connections of a process group, so that another thread can break them.

A gloo collective can't be aborted; it ends when the connection to the rank that it waits for does. A peer whose process dies takes care of
that. One whose machine has stopped or whose network is gone does not: without this the survivors would wait for the collective's bound,
and so would the run. Breaking our own ends of the connections looks to gloo as if the peer had died, here and on the peer. Who waits for a
message that was half way is not told, either way: those waits are ended by :func:`vescale_ray.waits.give_up`.

While a group is still being formed its ranks wait for each other in two ways more: for the others' addresses at the store, which ends with
the connection to the store, and for whoever is to connect to them. Nothing breaks the latter, so it is brought to its end: every
connection that gloo may wait for is made, and closed again, as if that rank had come and died. (For a rank whose machine is gone gloo
would wait five times as long as it was told to, 75 s.)

NCCL's communicators can be aborted, and have to be: the kernel of a collective whose peer has gone runs on, and who waits for the device
waits with it. What an aborted collective leaves must not be used, and nobody is told: ``Trainer`` proves a step's collectives at its end.

Linux only (``/proc``); elsewhere no connection is recorded, and the collective's bound counts.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from vescale_ray import waits

_log = logging.getLogger(__name__)

CALL_S = 0.5
"""A call of this process to itself."""
TRIES, TRY_S = 10, 0.02
"""gloo tries four times to connect to a rank, without a pause."""


class Communicator(Protocol):
    """Of a back end that can be aborted, from any thread and more than once: ``torch.distributed.ProcessGroupNCCL``."""

    def abort(self) -> None: ...


class Lines:
    """The sockets that a group has opened, and its NCCL communicators. :meth:`cut` may be called from any thread, while the group is formed
    and afterwards, also after it is gone."""

    def __init__(self) -> None:
        self._sockets: frozenset[tuple[int, str]] = frozenset()
        self._forming: tuple[frozenset[tuple[int, str]], int] | None = None
        """What was open before the group, and its ranks, while it is formed."""
        self._ended = self._paused = False
        self._held: tuple[Communicator, ...] = ()
        self._lock = threading.Lock()
        """Of whether it is paused, and was ended meanwhile."""

    @contextmanager
    def recorded(self, ranks: int = 0) -> Iterator[None]:
        """While the group, of so many ranks, is formed: what is opened meanwhile is its own. (A connection of Ray's that is made in the
        same moment is taken along: Ray makes it anew.)

        Raises:
            RuntimeError: the lines were cut meanwhile; some of the group's connections are none.
        """
        self._forming = _open_sockets(), ranks
        try:
            yield
        finally:
            self._sockets, self._forming = _open_sockets() - self._forming[0], None
        if self._ended:
            raise RuntimeError("the group's connections were broken while it was formed")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within :meth:`recorded`, while nothing of the group's is opened: connections that are made to this process meanwhile are none of
        its own. :meth:`cut` breaks nothing here; the block is to end for the same reason by itself.

        Raises:
            RuntimeError: the lines were cut meanwhile.
        """
        assert self._forming is not None, "nothing is recorded"
        before, ranks = self._forming
        mine, self._paused = _open_sockets() - before, True
        try:
            yield
        finally:
            with self._lock:
                self._forming, self._paused = (_open_sockets() - mine, ranks), False
        if self._ended:
            raise RuntimeError("the group was given up before it was formed")

    def hold(self, communicator: Communicator) -> None:
        """One that :meth:`cut` is to abort."""
        with self._lock:
            self._held = (*self._held, communicator)

    def let_go(self) -> None:
        """Of the communicators: whoever uses them dissolves the group now, which ends them."""
        with self._lock:
            self._held = ()

    def cut(self) -> int:
        """Break the connections that are open; how many. Whoever waits on one gets an error at once, or is woken: see
        :mod:`vescale_ray.waits`. In the middle of forming, that ends. Communicators are aborted in a thread of their own, which may take
        as long as it takes them."""
        with self._lock:
            held, self._held = self._held, ()
        for communicator in held:
            threading.Thread(target=_abort, args=(communicator,), name="vescale-abort", daemon=True).start()
        with self._lock:
            broken, ranks = 0, self._forming[1] if self._forming is not None else 0
            self._ended |= self._paused
            paused = self._paused
        for _ in range(0 if paused else TRIES):
            forming = self._forming
            self._ended |= forming is not None
            sockets = self._sockets if forming is None else _open_sockets() - forming[0]
            for descriptor, name in sockets:
                broken += _break(descriptor, name, ranks, forming is not None)
            if forming is None:
                self._sockets = frozenset()
                break
            ranks = 0  # told once
            time.sleep(TRY_S)
        waits.give_up()
        return broken


def _abort(communicator: Communicator) -> None:
    try:
        communicator.abort()
    except Exception as error:
        _log.warning("a communicator could not be aborted: %s", error)


def _break(descriptor: int, name: str, ranks: int, forming: bool) -> bool:
    """Break the socket ``name``, if it still has that number; whether there was a connection."""
    try:
        copy = os.dup(descriptor)
    except OSError:
        return False  # closed by now
    try:
        # The number may have been given to another file since. That of the copy can't be.
        if os.readlink(f"/proc/self/fd/{copy}") != name:
            return False
        with socket.socket(fileno=os.dup(copy)) as end:
            if end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                _come_and_go(end, ranks)  # gloo would end the process if this one broke
                return False
            if not forming:
                end.getpeername()  # raises where there is no connection; one that is just made is broken, too
            end.shutdown(socket.SHUT_RDWR)
            return True
    except OSError:
        return False  # not connected, or broken already
    finally:
        os.close(copy)


def _come_and_go(end: socket.socket, ranks: int) -> None:
    """Connect to ``end`` as each of ``ranks`` would, and close again."""
    for number in range(ranks):
        with socket.socket(end.family) as caller:
            caller.settimeout(CALL_S)
            caller.connect(end.getsockname())
            caller.sendall(number.to_bytes(8, sys.byteorder))  # what gloo tells the ranks apart by


def _open_sockets() -> frozenset[tuple[int, str]]:
    """Number and name (with the inode) of each socket of this process."""
    found = set()
    try:
        descriptors = os.listdir("/proc/self/fd")
    except OSError:
        return frozenset()
    for descriptor in descriptors:
        try:
            name = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            continue
        if name.startswith("socket:"):
            found.add((int(descriptor), name))
    return frozenset(found)
