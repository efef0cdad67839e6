"""Whether workers reach each other over the network that their process groups use. Standard library and psutil only.

A collective does not tell why it does not end. Where the network between two nodes is gone (a cable, a port, a firewall's rule) and both
still answer the controller, all wait for each other and nobody is to blame. So each worker has a door, a port on which connections are
taken and closed again; whoever is asked to tries the doors of others. A connection is made by the kernel: a worker that is stopped, or
computes, is reached all the same.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Mapping

import psutil

_log = logging.getLogger(__name__)

AT_ONCE = 500
"""Connections that are tried at a time: a process may have 1,024 files open."""
GLOO = "GLOO_SOCKET_IFNAME"


def choose_interface(node: str) -> str | None:
    """Have gloo use the interface that has the address ``node``, by which the cluster's nodes know this one, where this machine's name has
    no address but the loopback's, which no other machine reaches; the interface, if it was chosen here.

    What is set in ``GLOO_SOCKET_IFNAME`` is left.
    """
    named = _named()
    if os.environ.get(GLOO) or (named is not None and not ipaddress.ip_address(named).is_loopback) or named == node:
        return None
    found = next((name for name, addresses in psutil.net_if_addrs().items() if any(one.address == node for one in addresses)), None)
    if found is not None:
        _log.info("process groups use the interface %s, with the address %s: this machine's name is %s", found, node, named or "unknown")
        os.environ[GLOO] = found
    return found


def group_address(node: str) -> str:
    """The address at which process groups meet this process: of gloo's interface, else of this machine's name; ``node``, where it is not
    known."""
    wanted = os.environ.get(GLOO, "").split(",")[0].strip()
    if not wanted:
        return _named() or node
    own = [one.address for one in psutil.net_if_addrs().get(wanted, ()) if one.family in (socket.AF_INET, socket.AF_INET6)]
    return min((one.partition("%")[0] for one in own), key=lambda one: ":" in one, default=node)


def _named() -> str | None:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return None


class Door:
    """A port on ``host`` that can be tried, for as long as the process lives.

    Attributes:
        address: ``host:port``; empty where none could be had: then nobody can tell whether this process is reached.
    """

    def __init__(self, host: str) -> None:
        self.address = ""
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = socket.create_server((host, 0), family=family, backlog=4096)
        except OSError as error:
            _log.warning("no port can be had on %s (%s): whether others reach this worker can't be told", host, error.strerror)
            return
        self.address = f"{host}:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._answer, name="vescale-door", daemon=True).start()

    def _answer(self) -> None:
        while True:
            try:
                caller, _ = self._socket.accept()
                caller.close()
            except OSError:
                time.sleep(0.1)  # no file to be had for it, say: the kernel has answered


def unreached(addresses: Mapping[str, str], wait_s: float) -> tuple[str, ...]:
    """Those whose address (``host:port``) answers nothing within ``wait_s`` seconds.

    A host that refuses the connection is reached: the process is gone, which others will find. One whose SYN was lost is tried again by the
    kernel after a second: give it more.
    """
    names = [name for name, address in addresses.items() if address]
    found: list[str] = []
    for begin in range(0, len(names), AT_ONCE):
        found += _unreached({name: addresses[name] for name in names[begin : begin + AT_ONCE]}, wait_s)
    return tuple(found)


def _unreached(addresses: Mapping[str, str], wait_s: float) -> list[str]:
    found: list[str] = []
    with selectors.DefaultSelector() as waiting:
        for name, address in addresses.items():
            host, _, port = address.rpartition(":")
            line = socket.socket(socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET)
            line.setblocking(False)
            code = line.connect_ex((host, int(port)))
            if code == errno.EINPROGRESS:
                waiting.register(line, selectors.EVENT_WRITE, name)
                continue
            line.close()
            if not _is_reached(code):
                found.append(name)
        # From now on: where other threads are busy, to begin all that takes its time.
        deadline = time.monotonic() + wait_s
        while waiting.get_map():
            left = deadline - time.monotonic()
            there = waiting.select(max(0.0, left))
            if not there and left <= 0:
                break  # looked at after the time was over: what had come by then counts, though this thread was late to see it
            for key, _ in there:
                tried = key.fileobj
                assert isinstance(tried, socket.socket)
                code = tried.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                waiting.unregister(tried)
                tried.close()
                if not _is_reached(code):
                    found.append(key.data)
        for key in list(waiting.get_map().values()):
            found.append(key.data)
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
    return found


def _is_reached(code: int) -> bool:
    return code in (0, errno.ECONNREFUSED, errno.ECONNRESET)
