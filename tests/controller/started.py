"""A Ray cluster as users and KubeRay start it: one `ray start --head --block` and any number of `ray start --block`.

Each node is a process of its own on this machine, and is ended by its id. The head has a dashboard, so that jobs can be submitted.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.controller.runs import alive, end_all, environment, parents, until

NOTHING: Mapping[str, str] = {}
UP_S = 120.0
IDLE_S = 6.0
HEAD_ID = "f" * 51 + "00000"
AUTOSCALER = {
    "RAY_FAKE_CLUSTER": "1",
    "RAY_enable_autoscaler_v2": "1",
    "AUTOSCALER_UPDATE_INTERVAL_S": "1",
    "RAY_CLOUD_INSTANCE_ID": HEAD_ID,
    "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_ID,
}
STORE = str(100 << 20)


class Started:
    """A head node and the nodes that join it.

    Args:
        cpus: number of CPUs of the head.
        autoscaled: largest number of nodes that Ray's autoscaler starts on demand, as processes of this machine with one CPU each. The
            autoscaler ends a node that was idle for :data:`IDLE_S` seconds.
        env: environment variables of all processes, jobs included.

    Attributes:
        address: address of Ray's control store, for ``ray.address``.
        dashboard: its URL, for ``ray job submit``.
        folder: folder of Ray's sessions.
        head: the head's process; the cluster ends with it.
    """

    def __init__(self, cpus: int, env: Mapping[str, str] = NOTHING, *, autoscaled: int = 0) -> None:
        self._mark = uuid.uuid4().hex
        self.folder = tempfile.mkdtemp(prefix="rs-", dir="/tmp")  # short: its sockets' names may have 107 bytes
        # Without this setting, a head that gets SIGTERM first drains itself for half a minute.
        self._env = environment(**{"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0", **env, "STARTED_TEST": self._mark})
        self._env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{self._env['PATH']}"
        port, board = free_ports(2)
        self.address, self.dashboard = f"127.0.0.1:{port}", f"http://127.0.0.1:{board}"
        self._nodes: list[subprocess.Popen[bytes]] = []
        more: list[str] = []
        if autoscaled:
            more.append(f"--autoscaling-config={self.folder}/autoscaling.json")
            Path(self.folder, "autoscaling.json").write_text(json.dumps(_autoscaling(self.address, autoscaled)))
            self._env |= AUTOSCALER
        try:
            self.head = self._start(
                more,
                ["--head", f"--port={port}", f"--temp-dir={self.folder}", f"--num-cpus={cpus}", "--include-dashboard=true"],
                ["--dashboard-host=127.0.0.1", f"--dashboard-port={board}"],
            )
            until(self._answers, UP_S, "the dashboard")
        except BaseException:
            self.close()
            raise

    def _start(self, *words: list[str], **env: str) -> subprocess.Popen[bytes]:
        (agent,) = free_ports(1)
        common = ["--block", "--node-ip-address=127.0.0.1", f"--dashboard-agent-listen-port={agent}", f"--object-store-memory={STORE}"]
        command = ["ray", "start", *common, *(word for group in words for word in group)]
        with open(f"{self.folder}.txt", "ab") as out:
            process = subprocess.Popen(command, env={**self._env, **env}, stdout=out, stderr=out, start_new_session=True)
        self._nodes.append(process)
        return process

    def add(self, cpus: int, **env: str) -> subprocess.Popen[bytes]:
        """Have a node join, and return the process of its ``ray start --block``.

        Nodes must start one at a time: two that start at once on one machine choose the same names for their sockets.
        """
        node = self._start([f"--address={self.address}", f"--num-cpus={cpus}"], **env)
        until(self._all_there, UP_S, "the node")
        return node

    def _all_there(self) -> bool:
        assert all(node.poll() is None for node in self._nodes), self.text()
        return self.alive() == len(self._nodes)

    def alive(self) -> int:
        """Nodes that Ray calls alive."""
        with urllib.request.urlopen(f"{self.dashboard}/api/v0/nodes?limit=100", timeout=10) as answer:
            return sum(node["state"] == "ALIVE" for node in json.load(answer)["data"]["result"]["result"])

    @staticmethod
    def raylet_of(node: subprocess.Popen[bytes]) -> int | None:
        """Process id of a node's raylet, if it lives."""
        return next((pid for pid, parent in parents().items() if parent == node.pid and "raylet/raylet" in title_of(pid)), None)

    def _answers(self) -> bool:
        assert self.head.poll() is None, self.text()
        try:
            with urllib.request.urlopen(f"{self.dashboard}/api/version", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def env(self) -> dict[str, str]:
        """Environment variables for `ray` commands that talk to the cluster."""
        return {**self._env, "RAY_ADDRESS": self.dashboard, "RAY_API_SERVER_ADDRESS": self.dashboard}

    def text(self) -> str:
        """The output of all ``ray start`` commands."""
        return Path(f"{self.folder}.txt").read_text()

    def logs(self, lines: int = 20) -> str:
        """The ends of the head's logs, and how its process fares: the reason, if Ray itself has failed."""
        parts = [f"head: {'alive' if self.head.poll() is None else f'exited with {self.head.poll()}'}", self.text()]
        for path in sorted(Path(self.folder).glob("session_latest/logs/*")):
            if path.name.startswith(("dashboard.", "gcs_server", "raylet.")) and path.stat().st_size:
                parts.append("\n".join([f"{path.name}:", *path.read_text(errors="replace").splitlines()[-lines:]]))
        return "\n".join(parts)

    def processes(self) -> dict[int, str]:
        """All living processes of the cluster and its jobs, with their titles. A mark in their environment identifies them."""
        found = {}
        mark = f"STARTED_TEST={self._mark}".encode()
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                if mark in Path(f"/proc/{name}/environ").read_bytes().split(b"\0") and alive(int(name)):
                    found[int(name)] = title_of(int(name))
            except OSError:
                continue
        return found

    def of_runs(self) -> dict[int, str]:
        """The processes that belong to a run: its driver and its actors."""
        words = ("vescale-ray", "vescale_ray", "ray::Worker", "ray::Controller", "ray::Supervisor", "ray::Agent")
        return {pid: title for pid, title in self.processes().items() if any(word in title for word in words)}

    def close(self) -> None:
        for process in self._nodes:
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + 10
        while self.processes() and time.monotonic() < deadline:
            [process.poll() for process in self._nodes]
            time.sleep(0.1)
        end_all(self.processes, lambda: [process.poll() for process in self._nodes])
        for process in self._nodes:
            process.wait(10)
        shutil.rmtree(self.folder, ignore_errors=True)
        Path(f"{self.folder}.txt").unlink(missing_ok=True)


def _autoscaling(address: str, nodes: int) -> dict[str, object]:
    """A configuration for Ray's autoscaler whose nodes are raylets that it starts on this machine (its ``fake_multinode`` provider)."""
    worker = {"resources": {"CPU": 1, "object_store_memory": int(STORE)}, "node_config": {}, "min_workers": 0, "max_workers": nodes}
    return {
        "cluster_name": "tests",
        "max_workers": nodes,
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": IDLE_S / 60,
        "provider": {
            "type": "external",  # by its own name, Ray would read a file that its wheels lack
            "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
            "gcs_address": address,
            "head_node_id": HEAD_ID,
            "launch_multiple": True,
        },
        "available_node_types": {"ray.head.default": {"resources": {}, "node_config": {}, "max_workers": 0}, "worker": worker},
        "head_node_type": "ray.head.default",
        "docker": {},
        "auth": {},
        "file_mounts": {},
        "cluster_synced_files": [],
        "file_mounts_sync_continuously": False,
        "rsync_exclude": [],
        "rsync_filter": [],
        "initialization_commands": [],
        "setup_commands": [],
        "head_setup_commands": [],
        "worker_setup_commands": [],
        "head_start_ray_commands": [],
        "worker_start_ray_commands": [],
    }


def title_of(pid: int) -> str:
    """Command line of a process; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def free_ports(count: int) -> list[int]:
    """Ports on which no process listens now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()


@contextmanager
def started(cpus: int, env: Mapping[str, str] = NOTHING, *, autoscaled: int = 0) -> Iterator[Started]:
    """Start a :class:`Started` cluster, and close it at the end."""
    cluster = Started(cpus, env, autoscaled=autoscaled)
    try:
        yield cluster
    finally:
        cluster.close()
