"""The connections of a process group, for another thread to break.

A gloo collective cannot be aborted; it ends when the connection to the awaited rank ends. If the peer's process dies, its kernel closes the
connection. If the peer's machine stops or its network fails, nothing does, and the survivors wait until the collective's timeout. Therefore
:meth:`Connections.cut` breaks this process's ends of the connections. To gloo, on both sides, this looks as if the peer had died. A wait
for a half-received message gets no error either way; :func:`vescale_ray.communication.abortable_waits.give_up` ends those waits.

While a group is formed, its ranks wait in two more ways. They wait at the store for the others' addresses, which ends with the connection
to the store. And they accept connections from the others, which nothing can break. Therefore :meth:`Connections.cut` itself makes and
closes each connection that gloo may accept, as if that rank had come and died. (If a rank's machine is gone, gloo would wait five times its
timeout, 75 s.)

NCCL communicators can and must be aborted. The kernel of a collective whose peer is gone runs on, and blocks every wait for the device. The
result of an aborted collective is invalid, but no error reports that, so ``Trainer`` verifies a step's collectives at its end.

This works on Linux only (``/proc``). Elsewhere no connection is recorded, and the collective's timeout applies.
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

from vescale_ray.communication import abortable_waits

_log = logging.getLogger(__name__)

CALL_S = 0.5
"""Time limit, in seconds, of a connection from this process to itself."""
TRIES, TRY_S = 10, 0.02
"""While a group forms, its connections are broken this many times, at this interval in seconds. Once is not enough, because gloo tries four
times to connect to a rank."""


class Communicator(Protocol):
    """Communicator that any thread may abort, any number of times: ``torch.distributed.ProcessGroupNCCL``."""

    def abort(self) -> None: ...


class Connections:
    """The sockets that a group has opened, and its NCCL communicators. Any thread may call :meth:`cut`, during or after the group's
    life."""

    def __init__(self) -> None:
        self._sockets: frozenset[tuple[int, str]] = frozenset()
        self._forming: tuple[frozenset[tuple[int, str]], int] | None = None
        """While the group is formed: the sockets that were open before, and the number of ranks."""
        self._ended = self._paused = False
        self._held: tuple[Communicator, ...] = ()
        self._lock = threading.Lock()
        """Guards the communicators, and the pause together with its end."""

    @contextmanager
    def recorded(self, ranks: int = 0) -> Iterator[None]:
        """Record the sockets opened inside the block, while a group of ``ranks`` ranks is formed, as the group's own. They add to those of
        earlier blocks.

        If Ray opens a connection at the same moment, it is recorded too; Ray reconnects if it is broken.

        Raises:
            RuntimeError: :meth:`cut` was called meanwhile, so some of the group's connections are broken.
        """
        self._forming = _open_sockets(), ranks
        try:
            yield
        finally:
            self._sockets, self._forming = self._sockets | (_open_sockets() - self._forming[0]), None
        if self._ended:
            raise RuntimeError("the group's connections were broken while it was formed")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not record sockets that are opened inside the block, which stands within :meth:`recorded`: none of them is the group's.
        :meth:`cut` breaks nothing meanwhile, so the block must end by itself.

        Raises:
            RuntimeError: :meth:`cut` was called meanwhile.
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
        """Register a communicator for :meth:`cut` to abort."""
        with self._lock:
            self._held = (*self._held, communicator)

    def abandon(self) -> None:
        """Forget the communicators: the caller is about to dissolve the group, which ends them."""
        with self._lock:
            self._held = ()

    def cut(self) -> int:
        """Break the open connections and return their number. A wait on one of them fails at once or is woken (see
        :mod:`vescale_ray.communication.abortable_waits`). If the group is being formed, the forming fails. Each communicator is aborted in
        its own thread, since an abort may block."""
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
            sockets = self._sockets if forming is None else self._sockets | (_open_sockets() - forming[0])
            for descriptor, name in sockets:
                broken += _break(descriptor, name, ranks, forming is not None)
            if forming is None:
                self._sockets = frozenset()
                break
            ranks = 0  # only the first attempt connects as the missing ranks
            time.sleep(TRY_S)
        abortable_waits.give_up()
        return broken


def _abort(communicator: Communicator) -> None:
    try:
        communicator.abort()
    except Exception as error:
        _log.warning("a communicator could not be aborted: %s", error)


def _break(descriptor: int, name: str, ranks: int, forming: bool) -> bool:
    """Break the socket ``name`` if the descriptor still refers to it; return whether a connection was broken."""
    try:
        copy = os.dup(descriptor)
    except OSError:
        return False  # already closed
    try:
        # The descriptor may refer to another file by now; that of the copy cannot change.
        if os.readlink(f"/proc/self/fd/{copy}") != name:
            return False
        with socket.socket(fileno=os.dup(copy)) as end:
            if end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                _connect_and_close(end, ranks)  # if the listening socket broke, gloo would end the process
                return False
            if not forming:
                end.getpeername()  # raises if there is no connection; while forming, new connections are broken too
            end.shutdown(socket.SHUT_RDWR)
            return True
    except OSError:
        return False  # not connected, or already broken
    finally:
        os.close(copy)


def _connect_and_close(end: socket.socket, ranks: int) -> None:
    """Connect to ``end`` once as each of ``ranks`` ranks, and close again."""
    for number in range(ranks):
        with socket.socket(end.family) as caller:
            caller.settimeout(CALL_S)
            caller.connect(end.getsockname())
            caller.sendall(number.to_bytes(8, sys.byteorder))  # gloo identifies a rank by these bytes


def _open_sockets() -> frozenset[tuple[int, str]]:
    """Descriptor and name (which contains the inode) of each socket of this process."""
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
