"""The connections of a process group, so that another thread can break them.

A gloo collective can't be aborted; it ends when the connection to the rank that it waits for does. A peer whose process dies takes care of
that. One whose machine has stopped or whose network is gone does not: without this the survivors would wait for the collective's bound,
and so would the run. Breaking our own ends of the connections looks to gloo as if the peer had died, here and on the peer. Who waits for a
message that was half way is not told, either way: those waits are ended by :func:`vescale_ray.waits.give_up`.

Linux only (``/proc``); elsewhere nothing is recorded, and the collective's bound counts.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from vescale_ray import waits


class Lines:
    """The sockets that a group has opened. :meth:`cut` may be called from any thread, also after the group is gone."""

    def __init__(self) -> None:
        self._sockets: frozenset[tuple[int, str]] = frozenset()

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """While the group is formed: what is opened meanwhile is its own. (A connection of Ray's that is made in the same moment is taken
        along: Ray makes it anew.)"""
        before = _open_sockets()
        try:
            yield
        finally:
            self._sockets = _open_sockets() - before

    def cut(self) -> int:
        """Break the connections that are still open; how many. Whoever waits on one gets an error at once, or is woken: see
        :mod:`vescale_ray.waits`."""
        broken = 0
        for descriptor, name in self._sockets:
            try:
                copy = os.dup(descriptor)
            except OSError:
                continue  # closed by now
            try:
                # The number may have been given to another file since. That of the copy can't be.
                if os.readlink(f"/proc/self/fd/{copy}") == name:
                    with socket.socket(fileno=os.dup(copy)) as end:
                        end.getpeername()  # raises for the one that the group listens on: gloo would end the process if that one broke
                        end.shutdown(socket.SHUT_RDWR)
                    broken += 1
            except OSError:
                pass  # not connected, or broken already
            finally:
                os.close(copy)
        self._sockets = frozenset()
        waits.give_up()
        return broken


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
