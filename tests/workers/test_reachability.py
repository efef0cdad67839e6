"""Connection tests of workers' ports over real sockets, and the choice of gloo's interface."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests.controller import hosts
from vescale_ray.workers.network import reachability
from vescale_ray.workers.network.reachability import AT_ONCE, GLOO, ProbePort, choose_interface, group_address, unreached

CLOSED = socket.socket()
CLOSED.bind(("127.0.0.1", 0))
"""A bound socket that does not listen, so that no other process takes its port."""


def test_refused_connection_or_missing_port_is_not_unreached() -> None:
    ports = {f"w{i}": ProbePort("127.0.0.1").address for i in range(3)}
    refused = f"127.0.0.1:{CLOSED.getsockname()[1]}"
    assert unreached({**ports, "closed": refused, "portless": ""}, 1.0) == ()
    assert unreached({}, 1.0) == ()


def test_a_probe_port_answers_again_and_again_and_many_at_once() -> None:
    port = ProbePort("127.0.0.1").address
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        assert unreached({f"w{i}": port for i in range(2 * AT_ONCE + 5)}, 5.0) == ()
    assert len(os.listdir("/proc/self/fd")) <= before + 2


def test_busy_process_finds_no_answering_worker_unreached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beginning two hundred connections took five seconds, so the time was over before the first one was checked."""
    port, real = ProbePort("127.0.0.1").address, socket.socket.connect_ex

    class Slow(socket.socket):
        def connect_ex(self, address: Any) -> int:
            time.sleep(0.02)
            return real(self, address)

    monkeypatch.setattr(reachability.socket, "socket", Slow)
    assert unreached({f"w{i}": port for i in range(20)}, 0.1) == ()
    monkeypatch.undo()

    class Late(reachability.selectors.DefaultSelector):  # type: ignore[misc, valid-type]
        def select(self, timeout: float | None = None) -> Any:
            if timeout:
                time.sleep(timeout + 0.2)  # the thread is scheduled only after the time is over
                return []
            return super().select(timeout)

    monkeypatch.setattr(reachability.selectors, "DefaultSelector", Late)
    assert unreached({f"w{i}": port for i in range(20)}, 0.1) == ()


def test_stopped_process_is_reached_and_full_queue_is_not(tmp_path: Path) -> None:
    """The kernel accepts for a stopped process. If the queue is full it accepts nothing, as if the network were gone."""
    listens = socket.create_server(("127.0.0.1", 0), backlog=0)
    address = f"127.0.0.1:{listens.getsockname()[1]}"
    assert unreached({"stopped": address}, 1.0) == ()
    held = []
    for _ in range(8):
        line = socket.socket()
        line.setblocking(False)
        line.connect_ex(listens.getsockname())
        held.append(line)
    began = time.monotonic()
    assert unreached({"full": address, "fine": ProbePort("127.0.0.1").address}, 0.5) == ("full",)
    assert 0.4 < time.monotonic() - began < 2.0, "no longer than it was to wait"


@pytest.mark.skipif(not hosts.possible(), reason="network namespaces need root and iproute2 (ip)")
def test_host_is_unreached_only_while_its_link_is_cut() -> None:
    with hosts.network(1) as net:
        there = net.hosts[0]
        code = "import socket, time; s = socket.create_server(('0.0.0.0', 4321)); print('up', flush=True); time.sleep(60)"
        server = subprocess.Popen(["ip", "netns", "exec", there.space, "python3", "-c", code], stdout=subprocess.PIPE)
        try:
            assert server.stdout is not None and server.stdout.readline() == b"up\n"
            address = {"w": f"{there.ip}:4321"}
            assert unreached(address, 5.0) == ()
            net.cut(there)
            began = time.monotonic()
            assert unreached(address, 1.0) == ("w",) and time.monotonic() - began < 3.0
            net.heal(there)
            assert unreached(address, 20.0) == ()
        finally:
            server.kill()
            server.wait(10)


def addresses(monkeypatch: pytest.MonkeyPatch, named: str | None, **interfaces: str) -> None:
    monkeypatch.setenv(GLOO, "")  # so that monkeypatch removes the chosen value at the end
    monkeypatch.delenv(GLOO)
    monkeypatch.setattr(reachability, "_named", lambda: named)

    def family(address: str) -> socket.AddressFamily:
        return socket.AF_INET6 if ":" in address else socket.AF_INET

    found: dict[str, list[Any]] = {
        name: [SimpleNamespace(family=family(one), address=one) for one in text.split()] for name, text in interfaces.items()
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)


def test_gloo_uses_the_node_address_if_the_hostname_misleads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    addresses(monkeypatch, "127.0.1.1", lo="127.0.0.1 ::1", eth0="192.0.2.7", ib0="10.9.0.7 fe80::7%ib0")
    assert choose_interface("10.9.0.7") == "ib0" and os.environ[GLOO] == "ib0"
    assert group_address("10.9.0.7") == "10.9.0.7"
    # A user's setting stays and has precedence.
    monkeypatch.setenv(GLOO, "eth0")
    assert choose_interface("10.9.0.7") is None and os.environ[GLOO] == "eth0"
    assert group_address("10.9.0.7") == "192.0.2.7"
    monkeypatch.setenv(GLOO, "eth9")
    assert group_address("10.9.0.7") == "10.9.0.7"
    # If the host name resolves, no interface is chosen. The same holds if no interface has the address, as behind address translation.
    for named in ("10.9.0.7", "192.0.2.7"):
        addresses(monkeypatch, named, eth0="10.9.0.7", ib0="192.0.2.7")
        assert choose_interface("10.9.0.7") is None and GLOO not in os.environ and group_address("10.9.0.7") == named
    addresses(monkeypatch, "127.0.0.1", lo="127.0.0.1")
    assert choose_interface("127.0.0.1") is None and GLOO not in os.environ, "a cluster of this machine alone"
    addresses(monkeypatch, "127.0.1.1", eth0="10.9.0.7")
    assert choose_interface("203.0.113.1") is None and GLOO not in os.environ and group_address("203.0.113.1") == "127.0.1.1"
    addresses(monkeypatch, None, eth0="10.9.0.7")
    assert group_address("203.0.113.1") == "203.0.113.1"
    addresses(monkeypatch, None, ib1="fe80::1%ib1")
    monkeypatch.setenv(GLOO, "ib1")
    assert group_address("10.9.0.7") == "fe80::1"


def test_host_without_a_port_has_no_address_and_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    assert ProbePort("203.0.113.1").address == ""
    assert [record.levelname for record in caplog.records] == ["WARNING"] and "cannot check" in caplog.text
