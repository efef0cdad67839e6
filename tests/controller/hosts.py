"""A network of several hosts on this machine, each with an address of its own, whose links can be cut: Linux' network namespaces.

A process in a namespace sees its host's interface only, as in a container. Files are shared, as on hosts with a common storage. The
process that makes it is the head of the network; root only, and ``ip`` is needed (Debian's iproute2).
"""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

NOBODY = "02:00:00:00:00:99"
"""The hardware address of nobody: what is sent there is lost, and the sender not told."""


@dataclass(frozen=True)
class Host:
    """One of them: its namespace, its address, and its end of the link at the head."""

    space: str
    ip: str
    link: str


class Network:
    """``count`` hosts on a bridge, on a subnet of its own.

    Attributes:
        head: the address of the processes outside of the namespaces.
        hosts: all, in order.
    """

    def __init__(self, count: int) -> None:
        self._name = f"vs{os.getpid() % 100000}"  # interfaces' names have 15 characters at most
        subnet = f"198.{18 + os.getpid() // 256 % 2}.{os.getpid() % 256}"  # of the networks that are kept free for tests (RFC 2544)
        self.head = f"{subnet}.1"
        self.hosts = [Host(f"{self._name}h{i}", f"{subnet}.{11 + i}", f"{self._name}v{i}") for i in range(count)]
        try:
            _ip("link", "add", self._name, "type", "bridge")
            _ip("addr", "add", f"{self.head}/24", "dev", self._name)
            _ip("link", "set", self._name, "up")
            for host in self.hosts:
                _ip("netns", "add", host.space)
                _ip("link", "add", host.link, "type", "veth", "peer", "name", "eth0", "netns", host.space)
                _ip("link", "set", host.link, "master", self._name, "up")
                _ip("-n", host.space, "addr", "add", f"{host.ip}/24", "dev", "eth0")
                _ip("-n", host.space, "link", "set", "eth0", "up")
                _ip("-n", host.space, "link", "set", "lo", "up")
        except BaseException:
            self.close()
            raise

    def cut(self, host: Host) -> None:
        """Nothing gets from the host to anybody, nor to it; connections stay open, and nobody is told."""
        _ip("link", "set", host.link, "down")

    def heal(self, host: Host) -> None:
        """The reverse of :meth:`cut`."""
        _ip("link", "set", host.link, "up")

    def part(self, one: Host, other: Host) -> None:
        """Nothing gets from either host to the other any more; both reach everyone else."""
        for here, there in ((one, other), (other, one)):
            _ip("-n", here.space, "neigh", "replace", there.ip, "lladdr", NOBODY, "dev", "eth0", "nud", "permanent")

    def refuse(self, one: Host, other: Host) -> None:
        """As :meth:`part`, but whoever begins a connection is told at once that there is no way."""
        for here, there in ((one, other), (other, one)):
            _ip("-n", here.space, "route", "add", "unreachable", f"{there.ip}/32")

    def join(self, one: Host, other: Host) -> None:
        """The reverse of :meth:`part`."""
        for here, there in ((one, other), (other, one)):
            _ip("-n", here.space, "neigh", "del", there.ip, "dev", "eth0")

    def close(self) -> None:
        for host in self.hosts:
            subprocess.run(["ip", "netns", "del", host.space], capture_output=True, check=False, timeout=30)
            # With its namespace the link goes, too, but in its own time, and not while a process is left there.
            subprocess.run(["ip", "link", "del", host.link], capture_output=True, check=False, timeout=30)
        subprocess.run(["ip", "link", "del", self._name], capture_output=True, check=False, timeout=30)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)


@contextmanager
def network(count: int) -> Iterator[Network]:
    """:class:`Network`, gone afterwards."""
    made = Network(count)
    try:
        yield made
    finally:
        made.close()


@functools.cache
def possible() -> bool:
    """Whether this machine lets us have one."""
    try:
        with network(1):
            return True
    except (OSError, subprocess.SubprocessError):
        return False
