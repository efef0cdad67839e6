"""Check whether workers reach each other over the network of their process groups. Uses the standard library and psutil only.

A hung collective does not tell its cause. If the network between two nodes fails (cable, port, firewall rule), both may still answer the
controller. All ranks then wait for each other, and none is at fault. Therefore each worker has a probe port, which accepts connections and
closes them. On request, a worker connects to the probe ports of others. The kernel completes a connection, so a worker that is stopped or
busy still counts as reached.
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
"""Connections tried at a time, since a process may have only 1,024 open files."""
GLOO = "GLOO_SOCKET_IFNAME"


def choose_interface(node: str) -> str | None:
    """Point gloo to the interface with address ``node``, the cluster's address of this node, and return the interface's name.

    This happens only if this machine's host name resolves to nothing but the loopback address, which other machines cannot reach. An
    existing ``GLOO_SOCKET_IFNAME`` stays. Returns None if the choice is not needed or no interface has the address.
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
    """Return the address at which process groups reach this process: of gloo's interface, else of this machine's host name, else
    ``node``."""
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


class ProbePort:
    """Probe port on ``host``, open for the life of the process.

    Attributes:
        address: ``host:port``; empty if no port could be opened. Then other workers cannot check whether they reach this process.
    """

    def __init__(self, host: str) -> None:
        self.address = ""
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = socket.create_server((host, 0), family=family, backlog=4096)
        except OSError as error:
            _log.warning("no probe port on %s (%s): the run cannot check whether others reach this worker", host, error.strerror)
            return
        self.address = f"{host}:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._answer, name="vescale-probe-port", daemon=True).start()

    def _answer(self) -> None:
        while True:
            try:
                caller, _ = self._socket.accept()
                caller.close()
            except OSError:
                time.sleep(0.1)  # for example no free file descriptor; the kernel has completed the connection anyway


def unreached(addresses: Mapping[str, str], wait_s: float) -> tuple[str, ...]:
    """Return the names of the workers whose address (``host:port``) does not answer within ``wait_s`` seconds.

    A host that refuses the connection counts as reached: only the process is gone, which other checks find. The kernel resends a lost SYN
    after one second, so ``wait_s`` should be longer.
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
        # Start the clock only now: if other threads are busy, starting the connections takes time too.
        deadline = time.monotonic() + wait_s
        while waiting.get_map():
            left = deadline - time.monotonic()
            there = waiting.select(max(0.0, left))
            if not there and left <= 0:
                break  # checked after the deadline: answers that came in time count even if this thread is late
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
