"""A run on a cluster that Ray's autoscaler (version 2, as with KubeRay) grows and shrinks. The nodes are raylets on this machine."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.controller.runs import tiny, until
from tests.controller.started import started
from tests.controller.test_autoscaling import Driven
from vescale_ray.cli import client

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
AFTER_S, GAP_S = 2.0, 2.0


def test_autoscaler_starts_requested_nodes_and_ends_idle_ones(tmp_path: Path) -> None:
    elastic = {"workers": 2, "max_workers": 4, "grow": True, "grow_after_s": AFTER_S, "grow_gap_s": GAP_S, "demand": 2}
    changes: dict[str, Any] = {f"elastic_{key}": value for key, value in elastic.items()}
    with started(2, autoscaled=3) as cluster:
        changes |= {"ray_address": cluster.address, "ray_cpus_per_worker": 1.0, "train_steps": 100_000, "checkpoint_every": 0}
        run = Driven(tiny(tmp_path, "autoscaled", **changes), tmp_path)

        def world() -> int:
            return int(run.status()["world"])

        def driven_steps(count: int) -> None:
            seen = len(run.folder.read_metrics())
            run.wait(lambda: len(run.folder.read_metrics()) >= seen + count, 60, f"{count} steps more")

        # 1. The autoscaler starts the nodes that the run requests, and no node more than the run can use.
        run.wait(lambda: len(run.folder.read_metrics()) >= 5, 120, "step 5")
        took = run.wait(lambda: cluster.alive() == 3, 90, "the nodes")
        grown = run.wait(lambda: world() == 4, 120, "the growth")
        print(f"\nnodes after {took:.1f} s, four workers {grown:.1f} s later", end="")
        driven_steps(20)
        assert cluster.alive() == 3 and run.status()["places_wanted"] == 0

        # 2. After a rescale to fewer workers, idle nodes end, and the run does not request them again.
        client.request(run.folder, "rescale", {"workers": 2})
        run.wait(lambda: world() == 2, 60, "the smaller world")
        gone = run.wait(lambda: cluster.alive() < 3, 60, "the end of an idle node")
        left = cluster.alive()
        print(f"; idle nodes gone after {gone:.1f} s", end="")
        driven_steps(40)
        assert cluster.alive() <= left and run.status()["places_wanted"] == 0 and world() == 2

        # 3. A rescale brings all workers back.
        client.request(run.folder, "rescale", {"workers": 4})
        run.wait(lambda: world() == 4, 180, "the second growth")
        driven_steps(10)
        assert not run.of("worker_lost"), "a node that went took nobody along"

        # 4. A killed driver leaves no requested place and no node behind.
        os.kill(run.driver.pid, signal.SIGKILL)
        run.driver.wait(10)
        until(lambda: not cluster.of_runs(), 30, "the end of the run's processes")
        until(lambda: cluster.alive() == 1, 90, "the end of the nodes")
    losses = [line["step"] for line in run.folder.read_metrics()]
    assert losses == list(range(1, len(losses) + 1)), "no step was lost or done twice"
