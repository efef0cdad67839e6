"""A standby takes the place of a killed worker, on a real local Ray cluster."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.controller.runs import carry_out, parents, print_figures, tiny, until
from vescale_ray.cli import client
from vescale_ray.controller.protocol import NAMESPACE
from vescale_ray.controller.worker_group.supervisor import supervisor_name
from vescale_ray.runfolder import RunFolder

pytestmark = [pytest.mark.usefixtures("ray_here"), pytest.mark.timeout(240)]


def standing(status: Mapping[str, Any]) -> int:
    """Number of standbys that can take a place."""
    import ray

    supervisor = ray.get_actor(supervisor_name(status["info"]["run_id"]), NAMESPACE)
    return sum(ray.get(supervisor.standbys.remote(), timeout=20).values())


def processes() -> list[int]:
    """Worker processes of this process' Ray, standbys included."""
    above = parents()

    def is_ours(pid: int) -> bool:
        while pid in above and pid != os.getpid():
            pid = above[pid]
        return pid == os.getpid()

    def title(pid: int) -> bytes:
        try:
            return Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return b""

    return [pid for pid in above if title(pid).startswith(b"ray::Worker") and is_ours(pid)]


@pytest.mark.fault("W17")
def test_a_standby_takes_a_killed_workers_place(tmp_path: Path) -> None:
    """No process is started between the kill and the first new step. The run can't train without the second worker."""
    elastic = {"elastic_workers": 2, "elastic_min_workers": 2, "elastic_replace_lost": True, "elastic_standby": 1}
    config = tiny(tmp_path, "stands-by", train_steps=1_000_000, checkpoint_every=0, **elastic)
    folder = RunFolder(config.run_folder)
    killed: list[float] = []
    ticks: list[float] = []

    def watch(status: Mapping[str, Any]) -> None:
        if not killed and status["state"] == "RUNNING" and status["step"] >= 10 and standing(status):
            pid = next(e["pid"] for e in folder.read_events() if e["event"] == "worker_started" and e["worker"] == "w0")
            ticks.append(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))
            killed.append(time.time())
            os.kill(pid, signal.SIGKILL)
        elif killed and status["rescales"] and standing(status):  # another one has followed
            client.request(folder, "stop", {})

    finished = carry_out(config, watch=watch)
    assert finished.result.state == "STOPPED", finished.result
    print_figures(f"{finished.of('rescaled')[0]['time'] - killed[0]:.2f} s after the kill", finished.of("rescaled"))
    (event,) = finished.of("rescaled")
    assert (event["from"], event["to"], event["source"]) == (2, 2, "peer") and event["steps_replayed"] <= 1
    started = finished.of("worker_started")
    assert sorted(one["worker"] for one in started) == ["w0", "w1", "w2"]
    assert started[2]["worker"] == "w2" and started[2]["time"] > killed[0]
    assert started[2]["born"] < ticks[0] and started[2]["warm_seconds"] < started[1]["warm_seconds"]
    assert len(finished.of("generation")) == 2 and not any(one["waiting"] for one in finished.of("waiting"))
    assert finished.accounting().exact
    until(lambda: not processes(), 20, "the end of all workers and standbys")
