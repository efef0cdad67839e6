"""A run on a cluster that another program started: two nodes, of which the driver's has no room for workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.controller.clusters import cluster
from tests.controller.runs import alive, environment, tiny, until
from vescale_ray.runfolder import RunFolder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def address() -> Iterator[str]:
    with cluster(2) as nodes:
        yield nodes.address


def start(folder: Path, address: str, *actions: str, **changes: Any) -> tuple[RunFolder, subprocess.Popen[str]]:
    config = tiny(folder, "given", ray_address=address, **changes)
    path = folder / "given.yaml"
    path.write_text(config.to_yaml())
    command = [sys.executable, "-m", "tests.controller.drive", str(path), *actions]
    return RunFolder(config.run_folder), subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)


def goes_on_and_stops(driver: subprocess.Popen[str], folder: RunFolder) -> None:
    """Check that the run does 50 more steps, stops when it is asked to, and has lost no worker."""
    before = len(folder.read_metrics())
    until(lambda: len(folder.read_metrics()) >= before + 50, 60, "50 more steps")
    os.kill(driver.pid, signal.SIGTERM)
    output, _ = driver.communicate(timeout=100)
    told = {event["event"] for event in folder.read_events()}
    assert "STOPPED" in output and not told & {"worker_lost", "generation_failed"}, output


def test_stopped_remote_worker_is_killed_and_cluster_survives(tmp_path: Path, address: str) -> None:
    # The tests share one machine, so that "another node" is another raylet; the way to it is the same.
    changes = {"elastic_workers": 2, "elastic_collective_timeout_s": 4, "data_eval_samples": 0}
    folder, driver = start(tmp_path, address, "10:pause:1", **changes)
    output, _ = driver.communicate(timeout=150)
    assert driver.returncode == 0 and output.startswith("DONE"), output
    (event,) = [e for e in folder.read_events() if e["event"] == "rescaled"]
    assert (event["from"], event["to"]) == (2, 1) and event["pause_seconds"] < 15
    pids = [e["pid"] for e in folder.read_events() if e["event"] == "worker_started"]
    assert not any(alive(pid) for pid in pids)

    # The same cluster again, and this time the driver is killed.
    (tmp_path / "second").mkdir()
    folder, driver = start(tmp_path / "second", address, elastic_workers=2, train_steps=100_000)
    until(lambda: any(line["step"] >= 5 for line in folder.read_metrics()), 120, "step 5")
    pids = [e["pid"] for e in folder.read_events() if e["event"] == "worker_started"]
    assert len(pids) == 2 and all(alive(pid) for pid in pids)
    os.kill(driver.pid, signal.SIGKILL)
    driver.communicate(timeout=10)
    seconds = until(lambda: not any(alive(pid) for pid in pids), 15, "the end of the workers")
    print(f"\nworkers gone {seconds:.1f} s after the SIGKILL of the driver", end="")


@pytest.mark.fault("N6")
def test_draining_node_is_left_in_time_without_lost_steps(tmp_path: Path) -> None:
    with cluster(2, 2) as nodes:
        changes = {"elastic_workers": 3, "train_steps": 3000, "ray_cpus_per_worker": 1.0, "checkpoint_every": 0}
        folder, driver = start(tmp_path, nodes.address, **changes)

        def steps() -> int:
            return max((int(line["step"]) for line in folder.read_metrics()), default=0)

        def events(kind: str) -> list[dict[str, Any]]:
            return [event for event in folder.read_events() if event["event"] == kind]

        until(lambda: steps() >= 20, 120, "step 20")
        workers = {event["worker"]: event for event in events("worker_started")}
        places = [workers[w]["node"] for w in events("generation")[-1]["workers"]]
        node = min(places, key=places.count)
        staying = 3 - places.count(node)
        began = time.time()
        nodes.drain(node, 20.0)
        until(lambda: bool(events("rescaled")), 20, "the rescale")
        (event,) = events("rescaled")
        print(f"\nleft {event['time'] - began:.2f} s after the notice, pause {event['pause_seconds']:.2f} s", end="")
        assert (event["from"], event["to"], event["reason"], event["source"]) == (3, staying, "drain", "memory")
        assert event["steps_replayed"] == 0 and event["moved_bytes"] == event["lower_bound_bytes"] > 0
        assert event["numbered_by"] == "layouts"
        (notice,) = events("node_draining")
        assert notice["node"] == node and len(notice["workers"]) == 3 - staying and 10 < notice["seconds_left"] <= 20
        gone = [workers[w]["pid"] for w in notice["workers"]]
        until(lambda: not any(alive(pid) for pid in gone), 10, "the end of the leavers")
        nodes.end(node)
        goes_on_and_stops(driver, folder)
