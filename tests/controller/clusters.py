"""A Ray cluster of several raylets on this machine, in a process of its own. Its nodes join, drain and leave as real nodes do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.controller.hosts import Network
from tests.controller.runs import end_all, environment

_HOLD = """
import ctypes, json, os, sys, threading, time
from contextlib import contextmanager
import ray
from ray._raylet import GcsClient
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2
from ray.util.placement_group import placement_group, placement_group_table

system, ip = json.loads(sys.argv[1]), json.loads(sys.argv[2])
head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": 100 << 20, **({"node_ip_address": ip} if ip else {})}
cluster = Cluster(initialize_head=True, head_node_args={**head, **({"_system_config": system} if system else {})})
nodes = {}

def reap():
    # A raylet that was killed is a zombie until somebody asks, and its workers take a zombie for alive.
    while True:
        for node in list(nodes.values()):
            for started in list(node.all_processes.values()):
                for one in started:
                    one.process.poll()
        time.sleep(0.1)

@contextmanager
def on_host(space):
    # What this thread starts meanwhile is on that host.
    setns = ctypes.CDLL(None, use_errno=True).setns
    back, there = os.open("/proc/thread-self/ns/net", os.O_RDONLY), os.open("/run/netns/" + space, os.O_RDONLY)
    try:
        assert setns(there, 0) == 0, os.strerror(ctypes.get_errno())
        yield
    finally:
        assert setns(back, 0) == 0
        os.close(back), os.close(there)

def add(cpus, space, ip):
    if space is None:
        node = cluster.add_node(num_cpus=cpus, object_store_memory=100 << 20)
    else:
        with on_host(space):
            node = cluster.add_node(wait=False, num_cpus=cpus, object_store_memory=100 << 20, node_ip_address=ip)
        cluster.wait_for_nodes()
    nodes[node.node_id] = node
    return [node.node_id, node.all_processes["raylet"][0].process.pid]

def end(node):
    cluster.remove_node(nodes.pop(node), allow_graceful=False)

def leave(node):
    cluster.remove_node(nodes.pop(node), allow_graceful=True)

def drain(node, seconds):
    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    accepted, why = GcsClient(address=cluster.address).drain_node(node, reason, "a test", int((time.time() + seconds) * 1000))
    assert accepted, why

def groups():
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR", ignore_reinit_error=True)
    return [[g["name"], g["state"], g["bundles_to_node_id"].get(0)] for g in placement_group_table().values()]

def want(name, bundles):
    # What a job of its own waits for.
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR", ignore_reinit_error=True)
    placement_group([{"CPU": count} for count in bundles], strategy="STRICT_SPREAD", name=name)

def asked():
    # What an autoscaler would read.
    from ray.autoscaler.v2.sdk import get_cluster_resource_state
    state = get_cluster_resource_state(GcsClient(address=cluster.address))
    return sum(len(request.requests) for request in state.pending_gang_resource_requests)

def kill_actor(name, namespace):
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR", ignore_reinit_error=True)
    ray.kill(ray.get_actor(name, namespace), no_restart=False)

threading.Thread(target=reap, daemon=True).start()
print(json.dumps(cluster.address), flush=True)
for line in sys.stdin:
    name, *arguments = json.loads(line)
    print(json.dumps(globals()[name](*arguments)), flush=True)
ray.shutdown()
cluster.shutdown()
"""

NOTHING: Mapping[str, str] = {}
TUNED = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}
"""Settings with which Ray notices the loss of a node after 1.2 to 1.5 s. With its defaults it takes 13 s (`docs/fault-tolerance.md`)."""


class Nodes:
    """A head node without CPUs, and one node for each number in ``cpus``, with that many CPUs. The methods are thread-safe.

    Args:
        env: environment variables of the nodes' processes, added to this process' own.
        system: Ray's internal settings (``_system_config``).
        net: network whose hosts get one node each, in order. None: all nodes have this machine's address.

    Attributes:
        address: address at which drivers join the cluster.
        raylets: process id of each node's raylet, by node id, in the order of their start.
        session: session id of all processes of the cluster.
    """

    def __init__(
        self, *cpus: int, system: dict[str, int] | None = None, net: Network | None = None, env: Mapping[str, str] = NOTHING
    ) -> None:
        command = [sys.executable, "-c", _HOLD, json.dumps(system or {}), json.dumps(net.head if net else None)]
        self._free = list(net.hosts) if net else None
        self._holder = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            bufsize=1,
            env=environment(**env),
            start_new_session=True,
        )
        self.session = self._holder.pid
        self._lock = threading.Lock()
        assert self._holder.stdout is not None and self._holder.stdin is not None
        self._out, self._into = self._holder.stdout, self._holder.stdin
        self.address = str(json.loads(self._out.readline()))
        self.raylets: dict[str, int] = {}
        for count in cpus:
            self.add(count)

    def add(self, cpus: int) -> str:
        """Start a node and return its id. With a network, the node is on the next host."""
        host = self._free.pop(0) if self._free is not None else None
        node, raylet = self._call("add", cpus, host and host.space, host and host.ip)
        self.raylets[node] = int(raylet)
        return str(node)

    def end(self, node: str) -> None:
        """SIGKILL a node's raylet. The node's workers have no raylet from then on."""
        del self.raylets[node]
        self._call("end", node)

    def leave(self, node: str) -> None:
        """Remove a node in an orderly way: Ray knows at once."""
        del self.raylets[node]
        self._call("leave", node)

    def drain(self, node: str, seconds: float) -> None:
        """Announce that a node will be preempted in ``seconds`` seconds."""
        self._call("drain", node, seconds)

    def groups(self) -> list[tuple[str, str, str | None]]:
        """Name, state and node of every placement group."""
        return [tuple(group) for group in self._call("groups")]

    def want(self, name: str, *cpus: float) -> None:
        """Have another job wait for a placement group with one bundle for each number in ``cpus``, each bundle on a different node."""
        self._call("want", name, cpus)

    def asked(self) -> int:
        """Bundles of pending placement groups, as Ray reports them to its autoscaler."""
        return int(self._call("asked"))

    def kill_actor(self, name: str, namespace: str) -> None:
        """Kill a named actor; Ray may restart it."""
        self._call("kill_actor", name, namespace)

    def processes(self) -> set[int]:
        """All living processes of the cluster, found by their session id."""
        found = set()
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] != "Z" and int(fields[3]) == self.session:
                found.add(int(name))
        return found

    def kill(self) -> None:
        """SIGKILL all processes of the cluster at once."""
        end_all(self.processes, self._holder.poll)
        self._holder.wait(10)

    def close(self) -> None:
        try:
            self._holder.communicate(timeout=30)
        except (subprocess.TimeoutExpired, ValueError):
            pass
        self.kill()

    def _call(self, *words: Any) -> Any:
        with self._lock:
            self._into.write(json.dumps(words) + "\n")
            self._into.flush()
            return json.loads(self._out.readline())


@contextmanager
def cluster(
    *cpus: int, system: dict[str, int] | None = None, net: Network | None = None, env: Mapping[str, str] = NOTHING
) -> Iterator[Nodes]:
    """Start :class:`Nodes`, and close them at the end."""
    nodes = Nodes(*cpus, system=system, net=net, env=env)
    try:
        yield nodes
    finally:
        nodes.close()
