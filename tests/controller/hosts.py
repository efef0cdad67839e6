"""A network of several hosts on this machine, each with its own address, whose links can be cut. Each host is a Linux network namespace.

A process in a namespace sees only its host's interface, as in a container. Files are shared, as on hosts with common storage. The process
that creates the network is its head. It must be root and needs ``ip`` (Debian's iproute2).
"""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil

NOBODY = "02:00:00:00:00:99"
"""A hardware address that no interface has. Packets to it are lost, and the sender gets no error."""


@dataclass(frozen=True)
class Host:
    """A host: its namespace, its address, and the head's end of its link."""

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
        # One of the networks reserved for tests (RFC 2544) that this machine does not have: a killed test leaves its own.
        taken = {one.address.rpartition(".")[0] for those in psutil.net_if_addrs().values() for one in those}
        subnets = (f"198.{18 + number // 256 % 2}.{number % 256}" for number in range(os.getpid(), os.getpid() + 512))
        subnet = next(one for one in subnets if one not in taken)
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
        """Drop all packets from and to the host. Connections stay open, and no side gets an error."""
        _ip("link", "set", host.link, "down")

    def heal(self, host: Host) -> None:
        """The reverse of :meth:`cut`."""
        _ip("link", "set", host.link, "up")

    def part(self, one: Host, other: Host) -> None:
        """Drop all packets between the two hosts. Both still reach all other hosts."""
        for here, there in ((one, other), (other, one)):
            _ip("-n", here.space, "neigh", "replace", there.ip, "lladdr", NOBODY, "dev", "eth0", "nud", "permanent")

    def refuse(self, one: Host, other: Host) -> None:
        """Like :meth:`part`, but a new connection fails at once: the host is unreachable."""
        for here, there in ((one, other), (other, one)):
            _ip("-n", here.space, "route", "add", "unreachable", f"{there.ip}/32")

    def join(self, one: Host, other: Host) -> None:
        """The reverse of :meth:`part`."""
        for here, there in ((one, other), (other, one)):
            _ip("-n", here.space, "neigh", "del", there.ip, "dev", "eth0")

    def close(self) -> None:
        for host in self.hosts:
            subprocess.run(["ip", "netns", "del", host.space], capture_output=True, check=False, timeout=30)
            # The link disappears with its namespace, but with a delay, and not while the namespace has a process.
            subprocess.run(["ip", "link", "del", host.link], capture_output=True, check=False, timeout=30)
        subprocess.run(["ip", "link", "del", self._name], capture_output=True, check=False, timeout=30)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)


@contextmanager
def network(count: int) -> Iterator[Network]:
    """Create a :class:`Network`, and close it at the end."""
    made = Network(count)
    try:
        yield made
    finally:
        made.close()


@functools.cache
def possible() -> bool:
    """True if this machine allows a :class:`Network`."""
    try:
        with network(1):
            return True
    except (OSError, subprocess.SubprocessError):
        return False
