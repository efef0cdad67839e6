"""A run on a cluster that another program started: two nodes, of which the driver's has no room for workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
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
