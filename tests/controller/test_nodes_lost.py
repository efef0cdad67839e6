"""A lost node: all its processes are killed, its raylet alone is killed, or nothing on it answers.

There are two nodes with two workers each, so that every copy is on the other node. Ray's health checks are tuned as
docs/fault-tolerance.md says.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.controller.clusters import TUNED, Nodes, cluster
from tests.controller.runs import Finished, lives, parents, until
from tests.controller.soak import config_of, start_driver
from vescale_ray.controller.driver.driver import RunResult
from vescale_ray.runfolder import RunFolder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def everything_of(nodes: Nodes, node: str) -> list[int]:
    """Process ids of a node: its raylet and all processes that the raylet has started."""
    raylet = nodes.raylets[node]
    return [raylet, *(pid for pid, parent in parents().items() if parent == raylet)]


def signal_all(pids: list[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass


def kill_all(nodes: Nodes, node: str) -> None:
    signal_all(everything_of(nodes, node), signal.SIGKILL)


def kill_the_raylet(nodes: Nodes, node: str) -> None:
    signal_all(everything_of(nodes, node)[:1], signal.SIGKILL)


def freeze(nodes: Nodes, node: str) -> None:
    """Stop all processes of a node. Their sockets stay open without answers: one machine can't come closer to a lost network."""
    signal_all(everything_of(nodes, node), signal.SIGSTOP)


@pytest.mark.parametrize(
    ("how", "shard_group"),
    [(kill_all, None), (kill_the_raylet, None), (freeze, None), (kill_all, 2)],
    ids=["all is killed", "the raylet is killed", "nothing answers", "a replica's node is killed"],
)
@pytest.mark.fault("W5", "W19", "N1", "N2")
def test_lost_node_costs_only_its_workers_and_is_not_readmitted(
    how: Callable[[Nodes, str], None], shard_group: int | None, tmp_path: Path
) -> None:
    """With replicas, each node has a whole one, and the other node has all shards without copies."""
    with cluster(2, 2, system=TUNED) as nodes:
        about: dict[str, Any] = {"ray_address": nodes.address}
        if shard_group is not None:
            about |= {"train_sharding": {"shard_group": shard_group}, "elastic_deterministic": False}
        config = config_of(tmp_path, "lost", elastic_workers=4, elastic_replace_lost=False, **about)
        folder, output = RunFolder(config.run_folder), tmp_path / "lost.txt"
        driver = start_driver(config, output)

        def events(kind: str) -> list[dict[str, Any]]:
            return [event for event in folder.read_events() if event["event"] == kind]

        def steps() -> int:
            assert driver.poll() is None, output.read_text()
            return max((int(line["step"]) for line in folder.read_metrics()), default=0)

        until(lambda: steps() >= 20, 150, "step 20")
        places = {event["worker"]: event for event in events("worker_started")}
        node = list(nodes.raylets)[1]
        lost = [event for event in places.values() if event["node"] == node]
        assert len(lost) == 2
        processes = everything_of(nodes, node)
        assert {event["pid"] for event in lost} <= set(processes)
        began = time.time()
        how(nodes, node)
        until(lambda: bool(events("rescaled")), 60, "the rescale")
        (event,) = events("rescaled")
        gone = until(lambda: how is freeze or not any(lives(e) for e in lost), 30, "the end of the node's workers")
        told = [e["time"] - began for e in events("worker_lost")]
        print(
            f"\n{how.__name__}: trained again {event['time'] - began:.2f} s after, pause {event['pause_seconds']:.2f} s, workers noticed "
            f"after {', '.join(f'{t:.2f}' for t in told)} s, gone {gone:.2f} s later",
            end="",
        )
        source = "peer" if shard_group is None else "replica"
        assert (event["from"], event["to"], event["source"]) == (4, 2, source) and event["steps_replayed"] <= 1
        assert shard_group is None or event["moved_bytes"] == 0
        before = steps()
        until(lambda: steps() >= before + 20, 60, "20 more steps")
        # When a node comes back after it was given up, Ray ends its raylet, and the raylet ends its workers.
        signal_all(processes, signal.SIGCONT)
        until(lambda: not any(lives(e) for e in lost), 60, "the end of the node's workers")
        before = steps()
        until(lambda: steps() >= before + 20, 60, "20 more steps")
        os.kill(driver.pid, signal.SIGTERM)
        driver.wait(100)
        finished = Finished(config, RunResult("STOPPED", 0, 0, None, None, folder.path))
        assert "STOPPED" in output.read_text() and finished.accounting().exact
        assert len(finished.of("rescaled")) == 1 and len(finished.generations()[-1]) == 2
