"""A cluster of several raylets on this machine, in a process of its own, whose nodes come and go as they do in life."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.controller.runs import environment

_HOLD = """
import json, sys, threading, time
from ray.cluster_utils import Cluster
system = json.loads(sys.argv[1])
head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": 100 << 20}
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

threading.Thread(target=reap, daemon=True).start()
print(cluster.address, flush=True)
for line in sys.stdin:
    word, about = line.split()
    if word == "add":
        node = cluster.add_node(num_cpus=int(about), object_store_memory=100 << 20)
        nodes[node.node_id] = node
        raylet = node.all_processes["raylet"][0].process.pid
        print(node.node_id, raylet, flush=True)
    elif word == "end":
        cluster.remove_node(nodes.pop(about), allow_graceful=False)
        print("gone", flush=True)
cluster.shutdown()
"""

TUNED = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}
"""Ray notices the loss of a node after 13 s with its own settings, after 1.2 to 1.5 s with these (`docs/fault-tolerance.md`)."""


class Nodes:
    """A head without room for workers, and nodes with as many CPUs as asked for.

    Attributes:
        address: to join it.
        raylets: process id of each node's raylet, by node id, in the order of their start.
        session: of all its processes.
    """

    def __init__(self, *cpus: int, system: dict[str, int] | None = None, **env: str) -> None:
        command = [sys.executable, "-c", _HOLD, json.dumps(system or {})]
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
        assert self._holder.stdout is not None and self._holder.stdin is not None
        self._out, self._into = self._holder.stdout, self._holder.stdin
        self.address = self._out.readline().strip()
        self.raylets: dict[str, int] = {}
        for count in cpus:
            self.add(count)

    def add(self, cpus: int) -> str:
        """Start a node; its id."""
        node, raylet = self._say(f"add {cpus}").split()
        self.raylets[node] = int(raylet)
        return node

    def end(self, node: str) -> None:
        """SIGKILL a node's raylet; its workers are without one then."""
        del self.raylets[node]
        assert self._say(f"end {node}") == "gone"

    def processes(self) -> set[int]:
        """All living processes of the cluster: they keep its session."""
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
        """SIGKILL everything at once."""
        while left := self.processes():
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            self._holder.poll()
        self._holder.wait(10)

    def close(self) -> None:
        try:
            self._holder.communicate(timeout=30)
        except (subprocess.TimeoutExpired, ValueError):
            pass
        self.kill()

    def _say(self, line: str) -> str:
        self._into.write(line + "\n")
        self._into.flush()
        return self._out.readline().strip()


@contextmanager
def cluster(*cpus: int, system: dict[str, int] | None = None, **env: str) -> Iterator[Nodes]:
    """:class:`Nodes`, gone afterwards."""
    nodes = Nodes(*cpus, system=system, **env)
    try:
        yield nodes
    finally:
        nodes.close()


_DRAIN = """
import sys, time
from ray._raylet import GcsClient
from ray.core.generated import autoscaler_pb2
reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
client = GcsClient(address=sys.argv[1])
accepted, why = client.drain_node(sys.argv[2], reason, "a test", int((time.time() + float(sys.argv[3])) * 1000))
assert accepted, why
"""


def drain(address: str, node: str, seconds: float) -> None:
    """Give notice that a node goes in so many seconds."""
    subprocess.run([sys.executable, "-c", _DRAIN, address, node, str(seconds)], check=True, env=environment(), timeout=60)
