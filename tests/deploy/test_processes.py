"""The processes that KubeRay starts in a rendered job's pods, run here with their parameters and variables.

Kubernetes is absent, so only the contents of its containers run: `ray start` with the manifest's rayStartParams, the containers' variables,
the operator's token, and `ray job submit` with the manifest's entrypoint and runtime environment.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.controller.runs import environment, until, write_text
from vescale_ray.config import load_config
from vescale_ray.k8s import Options, documents
from vescale_ray.runfolder import RunFolder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]
RUN = """
run: {{name: pods, dir: {folder}/runs}}
model: {{dim: 32, layers: 2, heads: 4, kv_heads: 2, ffn: 56}}
data: {{corpus: {folder}/text.txt, seq_len: 16, heldout: 0.1, eval_samples: 0}}
train: {{steps: 100000, slots: 6, device: cpu}}
elastic: {{workers: 2, max_workers: 2, collective_timeout_s: 20}}
checkpoint: {{every: 0}}
ray: {{address: auto, cpus_per_worker: 1}}
metrics: {{host: 0.0.0.0, port: {port}}}
"""


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Pods:
    """Containers without Kubernetes: each a session of processes.

    Args:
        made: the job's documents, made with ``options``.
        folder: stands for the volume, and holds all other files.
    """

    def __init__(self, made: list[dict[str, Any]], options: Options, folder: Path) -> None:
        self.options = options
        job = next(one for one in made if one["kind"] == "RayJob")
        self._spec, self._folder = job["spec"], folder
        self._cluster = job["spec"]["rayClusterSpec"]
        self.grace_s = int(self._cluster["workerGroupSpecs"][0]["template"]["spec"]["terminationGracePeriodSeconds"])
        self._token = secrets.token_hex(16)
        self._started: list[subprocess.Popen[bytes]] = []
        self._port, self._dashboard = free_port(), free_port()
        text = next(one for one in made if one["kind"] == "ConfigMap")["data"]["run.yaml"]
        (folder / "config").mkdir()
        (folder / "config" / "run.yaml").write_text(text)
        program = folder / "bin" / "vescale-ray"  # of this checkout
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m vescale_ray.cli "$@"\n')
        program.chmod(0o755)

    def head(self) -> subprocess.Popen[bytes]:
        # In a cluster the ports are the pod's own. This machine has other users of them.
        ours = {
            "port": str(self._port),
            "dashboard-port": str(self._dashboard),
            "ray-client-server-port": str(free_port()),
            "temp-dir": str(self._folder / "t"),
        }
        return self._start(self._cluster["headGroupSpec"], ["--head"], ours)

    def ready(self) -> bool:
        """True if the head answers the health check for which the submitter and the operator wait."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._dashboard}/api/gcs_healthz", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def worker(self) -> subprocess.Popen[bytes]:
        group = self._cluster["workerGroupSpecs"][0]
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        return self._start(group, [f"--address=127.0.0.1:{self._port}"], {"num-cpus": limits["cpu"]})

    def submit(self) -> str:
        """Submit the job as the operator's submitter does. Returns the job's id."""
        entrypoint = self._spec["entrypoint"].replace("/etc/vescale-ray", str(self._folder / "config"))
        runtime = json.dumps(yaml.safe_load(self._spec["runtimeEnvYAML"]))
        self.ray("job", "submit", "--runtime-env-json", runtime, "--submission-id", "it", "--no-wait", "--", *entrypoint.split())
        return "it"

    def ray(self, *words: str) -> str:
        """Run a command of the submitter's pod."""
        env = {**self._env(), "RAY_ADDRESS": f"http://127.0.0.1:{self._dashboard}"}
        done = subprocess.run(
            [sys.executable, "-m", "ray.scripts.scripts", *words], env=env, capture_output=True, text=True, timeout=150, cwd=self._folder
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout + done.stderr

    def close(self) -> None:
        # Not SIGTERM, on which each would first drain its node.
        sessions = {one.pid for one in self._started}
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) in sessions:
                    os.kill(int(name), signal.SIGKILL)
            except OSError:
                pass
        for one in self._started:
            one.wait(10)

    def _start(self, group: Mapping[str, Any], words: list[str], ours: Mapping[str, str]) -> subprocess.Popen[bytes]:
        container = group["template"]["spec"]["containers"][0]
        ports = {name: str(free_port()) for name in ("dashboard-agent-listen-port", "metrics-export-port", "dashboard-agent-grpc-port")}
        params = {**ports, **group["rayStartParams"], **ours}
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *words]
        command += [f"--{name}={value}" for name, value in params.items()]
        env = {one["name"]: one["value"] for one in container["env"]}
        # Interfaces have other names here than in a pod.
        env = {name: value for name, value in env.items() if name != "GLOO_SOCKET_IFNAME"}
        log = (self._folder / f"ray-{len(self._started)}.log").open("wb")
        with log:
            one = subprocess.Popen(
                command, env=self._env(**env), stdout=log, stderr=subprocess.STDOUT, start_new_session=True, cwd=self._folder
            )
        self._started.append(one)
        # Start one at a time: on one host, simultaneous starts confuse each other's files.
        until(lambda: "will now block" in Path(log.name).read_text() or one.poll() is not None, 90, "ray start")
        assert one.poll() is None, Path(log.name).read_text()[-2000:]
        return one

    def _env(self, **more: str) -> dict[str, str]:
        base = environment(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=self._token, **more)
        return {**base, "PATH": f"{self._folder / 'bin'}:{base['PATH']}"}


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a short name, because Ray puts its sockets there."""
    path = Path(os.path.realpath(tmp_path_factory.mktemp("p")))
    write_text(path)
    return path


@pytest.fixture
def pods(folder: Path) -> Iterator[Pods]:
    (folder / "run.yaml").write_text(RUN.format(folder=folder, port=free_port()))
    config = load_config(folder / "run.yaml")
    options = Options(mount=str(folder), shm="256Mi", memory="2Gi", head_memory="2Gi", drain_s=20)
    pods = Pods(documents(config, options, "job"), options, folder)
    yield pods
    pods.close()


def test_pod_processes_train_drain_and_stop_with_a_checkpoint(pods: Pods, folder: Path) -> None:
    run = RunFolder(folder / "runs" / "pods")
    pods.head()
    until(pods.ready, 90, "Ray's dashboard")
    _, leaving = pods.worker(), pods.worker()
    job = pods.submit()
    until(lambda: any(line["step"] >= 5 for line in run.read_metrics()), 150, "step 5")
    events = run.read_events()
    assert len([one for one in events if one["event"] == "worker_started"]) == 2

    # Prometheus would query the head's pod at the port that its container declares.
    url = f"http://127.0.0.1:{load_config(run.config_path).metrics.port}/metrics"
    text = urllib.request.urlopen(url, timeout=10).read().decode()
    assert 'vescale_world_size{run="pods"} 2.0' in text

    leaving.send_signal(signal.SIGTERM)  # what the kubelet sends
    until(lambda: any(one["event"] == "rescaled" for one in run.read_events()), 60, "the rescale")
    (rescaled,) = [one for one in run.read_events() if one["event"] == "rescaled"]
    assert (rescaled["from"], rescaled["to"], rescaled["reason"]) == (2, 1, "drain")
    assert not [one for one in run.read_events() if one["event"] == "worker_lost"], "it left before its node did"
    # In a pod the node must be gone before the kubelet's SIGKILL. It takes the whole drain, because the run's agent stays on the node.
    assert leaving.wait(pods.grace_s) is not None

    pods.ray("job", "stop", job)
    state = run.read_state() or {}
    assert state["state"] == "STOPPED" and state["checkpoint"], state
    assert "was stopped" in pods.ray("job", "status", job)
