"""Hosts that don't reach each other, or no host at all: a real network between raylets, with cut links (:mod:`tests.controller.hosts`)."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.controller import hosts
from tests.controller.clusters import TUNED, Nodes, cluster
from tests.controller.hosts import Network, network
from tests.controller.runs import Finished, lives, until
from tests.controller.soak import config_of, start_driver
from vescale_ray.controller.driver.driver import RunResult
from vescale_ray.runfolder import RunFolder

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not hosts.possible(), reason="network namespaces need root and iproute2 (ip)"),
]


class Parted:
    """A run on a cluster whose nodes are the hosts of ``net``, in their order."""

    def __init__(self, net: Network, nodes: Nodes, where: Path, name: str, **changes: Any) -> None:
        self.net, self.nodes = net, nodes
        self.config = config_of(where, name, **{"elastic_replace_lost": False, "ray_address": nodes.address, **changes})
        self.folder, self._output = RunFolder(self.config.run_folder), where / f"{name}.txt"
        self.driver: subprocess.Popen[bytes] = start_driver(self.config, self._output)

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.folder.read_events() if event["event"] == kind]

    def steps(self) -> int:
        assert self.driver.poll() is None, self._output.read_text()
        return max((int(line["step"]) for line in self.folder.read_metrics()), default=0)

    def trains(self, steps: int = 20) -> None:
        before = self.steps()
        until(lambda: self.steps() >= before + steps, 60, f"{steps} more steps")

    def hosts_of(self, workers: Any) -> list[str]:
        """Addresses of the hosts of these workers."""
        host = {event["worker"]: event["host"] for event in self.of("worker_started")}
        return sorted({host[worker] for worker in workers})

    def losses(self) -> Mapping[int, float]:
        return {int(line["step"]): float(line["loss"]) for line in self.folder.read_metrics()}

    def stop(self) -> Finished:
        os.kill(self.driver.pid, signal.SIGTERM)
        self.driver.wait(100)
        assert "STOPPED" in self._output.read_text(), self._output.read_text()
        return Finished(self.config, RunResult("STOPPED", 0, 0, None, None, self.folder.path))


@contextmanager
def parted(net: Network, nodes: Nodes, where: Path, name: str, **changes: Any) -> Iterator[Parted]:
    """Start a :class:`Parted` run, and end its driver at the end."""
    made = Parted(net, nodes, where, name, **{"elastic_workers": 6, "elastic_max_workers": 6, **changes})
    try:
        yield made
    finally:
        if made.driver.poll() is None:
            made.driver.kill()
            made.driver.wait(30)


def part(net: Network, host: int, *others: int) -> None:
    for other in others:
        net.part(net.hosts[host], net.hosts[other])


def join(net: Network, host: int, *others: int) -> None:
    for other in others:
        net.join(net.hosts[host], net.hosts[other])


def told(run: Parted, began: float) -> str:
    (event,) = run.of("rescaled")
    return f"trained again {event['time'] - began:.2f} s after, phases { ({k: round(v, 2) for k, v in event['phases'].items()}) }"


@pytest.mark.slow
@pytest.mark.fault("N4")
def test_unreached_host_is_left_though_it_answers_controller(tmp_path: Path) -> None:
    three: dict[str, Any] = {"elastic_workers": 3, "elastic_max_workers": 3}
    with network(3) as net, cluster(1, 1, 1, system=TUNED, net=net) as nodes:
        with parted(net, nodes, tmp_path, "calm", **three) as calm:
            until(lambda: calm.steps() >= 40, 150, "step 40")
            calm.stop()
        with parted(net, nodes, tmp_path, "parted", **three) as run:
            until(lambda: run.steps() >= 20, 150, "step 20")
            began = time.time()
            part(net, 2, 0, 1)
            until(lambda: bool(run.of("rescaled")), 30, "the rescale")
            print("\n" + told(run, began), end="")
            (event,) = run.of("rescaled")
            assert (event["from"], event["to"], event["source"]) == (3, 2, "peer") and event["steps_replayed"] <= 1
            (cut,) = run.of("cut_off")
            gone = run.hosts_of(cut["workers"])
            assert gone == [net.hosts[2].ip]
            assert all("do not reach each other" in why and gone[0] in why for why in cut["workers"].values())
            assert {event["cause"] for event in run.of("worker_lost")} == {"node"}
            run.trains()
            join(net, 2, 0, 1)
            run.trains()
            finished = run.stop()
            assert finished.accounting().exact and len(finished.generations()) == 2
            reference = calm.losses()
            same = {step: loss for step, loss in run.losses().items() if step in reference}
            assert len(same) >= 40 and same == {step: reference[step] for step in same}, "bit for bit, in deterministic mode"


@pytest.mark.slow
@pytest.mark.fault("N2")
def test_host_without_network_is_left_and_not_readmitted(tmp_path: Path) -> None:
    with network(3) as net, cluster(2, 2, 2, system=TUNED, net=net) as nodes, parted(net, nodes, tmp_path, "cut") as run:
        until(lambda: run.steps() >= 20, 150, "step 20")
        node = list(nodes.raylets)[2]
        lost = [event for event in run.of("worker_started") if event["node"] == node]
        began = time.time()
        net.cut(net.hosts[2])
        until(lambda: bool(run.of("rescaled")), 30, "the rescale")
        print("\n" + told(run, began), end="")
        (event,) = run.of("rescaled")
        assert (event["from"], event["to"], event["source"]) == (6, 4, "peer") and event["steps_replayed"] <= 1
        assert event["time"] - began < 10 and {event["cause"] for event in run.of("worker_lost")} == {"node"}
        run.trains()
        assert all(lives(event) for event in lost), "nobody can tell them to end, and they have not found out by themselves"
        net.heal(net.hosts[2])
        until(lambda: not any(lives(event) for event in lost), 60, "the end of the host's workers")
        run.trains()
        finished = run.stop()
        assert finished.accounting().exact and len(finished.generations()) == 2 and not run.of("cut_off")


@pytest.mark.slow
@pytest.mark.fault("N4")
def test_run_with_one_unreached_host_begins_on_the_others(tmp_path: Path) -> None:
    """Here connections are refused at once; in the test above, nothing gets there."""
    with network(3) as net, cluster(2, 2, 2, system=TUNED, net=net) as nodes:
        for other in (0, 2):
            net.refuse(net.hosts[1], net.hosts[other])
        with parted(net, nodes, tmp_path, "begins") as run:
            until(lambda: run.steps() >= 20, 150, "step 20")
            (cut,) = run.of("cut_off")
            assert run.hosts_of(cut["workers"]) == [net.hosts[1].ip]
            assert len(run.of("generation")[-1]["workers"]) == 4
            assert {event["cause"] for event in run.of("worker_lost")} == {"node"}
            assert run.stop().accounting().exact
