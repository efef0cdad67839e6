"""A Ray cluster of several nodes on this machine, in a process of its own, whose nodes come, drain and go as a test wants."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.controller.runs import environment

HOLD = """
import json, sys, time
import ray
from ray._raylet import GcsClient
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2
from ray.util.placement_group import placement_group_table

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
nodes = {}

def add(cpus):
    node = cluster.add_node(num_cpus=cpus)
    nodes[node.node_id] = node
    return node.node_id

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

def asked():
    # What an autoscaler would read.
    from ray.autoscaler.v2.sdk import get_cluster_resource_state
    state = get_cluster_resource_state(GcsClient(address=cluster.address))
    return sum(len(request.requests) for request in state.pending_gang_resource_requests)

def kill(name, namespace):
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR", ignore_reinit_error=True)
    ray.kill(ray.get_actor(name, namespace), no_restart=False)

for cpus in sys.argv[1:]:
    add(int(cpus))
print(json.dumps(cluster.address), flush=True)
for line in sys.stdin:
    name, *arguments = json.loads(line)
    print(json.dumps(globals()[name](*arguments)), flush=True)
ray.shutdown()
cluster.shutdown()
"""


class Given:
    """The cluster; its methods may be called from several threads."""

    def __init__(self, holder: subprocess.Popen[str]) -> None:
        self._holder, self._lock = holder, threading.Lock()
        assert holder.stdout is not None
        self.address = str(json.loads(holder.stdout.readline()))

    def add(self, cpus: int) -> str:
        """Add a node; its id."""
        return str(self._call("add", cpus))

    def end(self, node: str) -> None:
        """Kill a node's raylet."""
        self._call("end", node)

    def leave(self, node: str) -> None:
        """Have a node leave in order: Ray knows at once."""
        self._call("leave", node)

    def drain(self, node: str, seconds: float) -> None:
        """Tell Ray that the node goes after so many seconds: a pre-emption notice."""
        self._call("drain", node, seconds)

    def groups(self) -> list[tuple[str, str, str | None]]:
        """Name, state and node of every placement group."""
        return [tuple(group) for group in self._call("groups")]

    def asked(self) -> int:
        """Placement groups without a place, as Ray's autoscaler is told of them."""
        return int(self._call("asked"))

    def kill(self, name: str, namespace: str) -> None:
        """Kill a named actor, which may be restarted."""
        self._call("kill", name, namespace)

    def _call(self, *words: Any) -> Any:
        assert self._holder.stdin is not None and self._holder.stdout is not None
        with self._lock:
            self._holder.stdin.write(json.dumps(words) + "\n")
            self._holder.stdin.flush()
            return json.loads(self._holder.stdout.readline())


@contextmanager
def given(*cpus: int) -> Iterator[Given]:
    """A cluster with nodes of so many CPUs each beside a head without any."""
    command = [sys.executable, "-c", HOLD, *map(str, cpus)]
    holder = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, env=environment(), start_new_session=True
    )
    try:
        yield Given(holder)
    finally:
        holder.communicate(timeout=60)
