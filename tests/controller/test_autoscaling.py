"""Runs that grow by themselves, request places and keep spares, on clusters whose nodes come and go."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.controller.clusters import cluster
from tests.controller.runs import Finished, environment, print_figures, tiny, until
from vescale_ray.cli import client
from vescale_ray.config import RunConfig
from vescale_ray.controller.controller import controller_name
from vescale_ray.controller.driver.driver import RunResult
from vescale_ray.controller.protocol import NAMESPACE
from vescale_ray.runfolder import RunFolder

pytestmark = pytest.mark.timeout(400)
AFTER_S, GAP_S = 4.0, 3.0


class Driven:
    """A run whose driver is another process."""

    def __init__(self, config: RunConfig, where: Path) -> None:
        self.config, self.folder = config, RunFolder(config.run_folder)
        path = where / "run.yaml"
        path.write_text(config.to_yaml())
        command = [sys.executable, "-m", "tests.controller.drive", str(path)]
        self.driver = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.folder.read_events() if event["event"] == kind]

    def status(self) -> Mapping[str, Any]:
        return client.request(self.folder, "status")

    def rescales(self) -> list[tuple[int, int, str]]:
        return [(event["from"], event["to"], event["reason"]) for event in self.of("rescaled")]

    def wait(self, condition: Callable[[], bool], seconds: float, what: str) -> float:
        def met() -> bool:
            assert self.driver.poll() is None, self.driver.communicate()[0]
            return condition()

        return until(met, seconds, what)

    def stop(self) -> Finished:
        os.kill(self.driver.pid, signal.SIGTERM)
        output, _ = self.driver.communicate(timeout=100)
        assert "STOPPED" in output, output
        result = RunResult("STOPPED", 0, 0, None, None, self.folder.path)
        return Finished(self.config, result)


@pytest.mark.slow
@pytest.mark.fault("G1", "G2")
def test_run_grows_only_into_nodes_that_stay_and_obeys_a_rescale(tmp_path: Path) -> None:
    elastic = {"workers": 2, "max_workers": 4, "grow": True, "grow_after_s": AFTER_S, "grow_gap_s": GAP_S, "demand": 1}
    changes: dict[str, Any] = {f"elastic_{key}": value for key, value in elastic.items()}
    with cluster(2) as nodes:
        changes |= {"ray_address": nodes.address, "ray_cpus_per_worker": 1.0, "train_steps": 100_000, "checkpoint_every": 0}
        run = Driven(tiny(tmp_path, "grow", **changes), tmp_path)

        def places(*states: str) -> list[str | None]:
            return [node for name, state, node in nodes.groups() if state in states and ":request" in name]

        run.wait(lambda: len(run.folder.read_metrics()) >= 20, 120, "step 20")
        run.wait(lambda: len(places("PENDING")) == 1 and run.status()["places_wanted"] == 1, 60, "the request")
        assert nodes.asked() == 1, "an autoscaler is told of one place more, as elastic.demand says, and not of both"

        # Nodes that don't stay change nothing.
        for _ in range(3):
            node = nodes.add(2)
            run.wait(lambda node=node: places("CREATED") == [node], 60, "the request on the new node")  # type: ignore[misc]
            nodes.leave(node)
            run.wait(lambda: len(places("PENDING", "RESCHEDULING")) == 1, 60, "the request without the node")
        assert not run.of("growth") and len(run.of("generation")) == 1 and len(run.of("worker_started")) == 2

        # The run grows into a node that stays, with both workers at once.
        began = time.time()
        node = nodes.add(2)
        run.wait(lambda: bool(run.rescales()), 120, "the growth")
        assert run.rescales() == [(2, 4, "growth")]
        (growth,) = run.of("growth")
        assert growth["time"] - began >= AFTER_S and growth["room"] == 2
        workers = {event["worker"]: event for event in run.of("worker_started")}
        assert [workers[w]["node"] for w in run.of("generation")[-1]["workers"]].count(node) == 2
        run.wait(lambda: run.status()["places_wanted"] == 0 and nodes.asked() == 0, 60, "the end of the request")

        # After the loss of a worker whose place is free, the run grows back to its former size.
        os.kill(workers[run.of("generation")[-1]["workers"][3]]["pid"], signal.SIGKILL)
        run.wait(lambda: len(run.rescales()) >= 3, 120, "the loss and the growth")
        assert run.rescales()[1:] == [(4, 3, "failure"), (3, 4, "growth")]

        # A manual rescale sets the limit of growth from then on; more room changes nothing.
        assert "grows by itself up to 2" in client.request(run.folder, "rescale", {"workers": 2})["message"]
        run.wait(lambda: len(run.rescales()) >= 4, 60, "the rescale")
        time.sleep(AFTER_S + GAP_S + 3)
        assert run.rescales()[3:] == [(4, 2, "manual")] and nodes.asked() == 0
        client.request(run.folder, "rescale", {"workers": 3})
        run.wait(lambda: len(run.rescales()) >= 5, 60, "the rescale back")

        # On a draining node the run requests no place, although the node has room.
        nodes.drain(node, 60.0)
        client.request(run.folder, "rescale", {"workers": 4})
        run.wait(lambda: bool(run.of("node_draining")), 20, "the notice")
        run.wait(lambda: run.status()["world"] <= 2 and run.status()["state"] == "RUNNING", 60, "the end of those on it")
        time.sleep(AFTER_S + GAP_S + 3)
        assert node not in [of for _, state, of in nodes.groups() if state == "CREATED"]
        finished = run.stop()
        print_figures("growth", finished.of("rescaled"))
        assert finished.accounting().exact
        assert {state for _, state, _ in nodes.groups()} == {"REMOVED"}


@pytest.mark.slow
@pytest.mark.fault("G3")
def test_growth_yields_to_pending_jobs_but_not_to_partial_gangs(tmp_path: Path) -> None:
    """Ray gives a new place to a waiting job before a growing run has seen it free for long enough. Ray reserves no place for a job
    whose places are not all there."""
    with cluster(2) as nodes:
        changes: dict[str, Any] = {"ray_address": nodes.address, "train_steps": 100_000, "ray_cpus_per_worker": 1.0, "checkpoint_every": 0}
        elastic = {"elastic_workers": 2, "elastic_max_workers": 4, "elastic_grow_after_s": AFTER_S, "elastic_grow_gap_s": GAP_S}
        run = Driven(tiny(tmp_path, "queue", elastic_grow=True, **elastic, **changes), tmp_path)

        def place(name: str) -> tuple[str, str | None]:
            return next((state, node) for of, state, node in nodes.groups() if of == name)

        run.wait(lambda: len(run.folder.read_metrics()) >= 5, 120, "step 5")
        nodes.want("fits", 2.0)
        node = nodes.add(2)
        run.wait(lambda: place("fits") == ("CREATED", node), 30, "its place")
        time.sleep(3 * AFTER_S)
        assert not run.of("growth"), "all that came was another's"

        nodes.want("gang", 1.0, 1.0)
        nodes.add(2)
        run.wait(lambda: bool(run.rescales()), 120, "the growth")
        assert run.rescales() == [(2, 4, "growth")] and place("gang")[0] == "PENDING"

        # Places that the run gives back go to the waiting job.
        client.request(run.folder, "rescale", {"workers": 2})
        nodes.add(2)
        run.wait(lambda: place("gang")[0] == "CREATED", 60, "the places of the gang")
        time.sleep(AFTER_S + GAP_S)
        assert run.rescales()[1:] == [(4, 2, "manual")]
        assert run.stop().accounting().exact


@pytest.mark.slow
def test_killed_controller_or_driver_leaks_no_requested_places(tmp_path: Path) -> None:
    with cluster(2) as nodes:
        changes: dict[str, Any] = {"ray_address": nodes.address, "train_steps": 100_000, "ray_cpus_per_worker": 1.0, "elastic_workers": 2}
        run = Driven(tiny(tmp_path, "asks", elastic_grow=True, elastic_demand=3, elastic_max_workers=4, **changes), tmp_path)

        def waiting() -> int:
            return len([name for name, state, _ in nodes.groups() if state == "PENDING" and ":request" in name])

        run.wait(lambda: len(run.folder.read_metrics()) >= 5 and waiting() == 2, 120, "the requests, as many as there may be workers")
        for _ in range(2):
            nodes.kill_actor(controller_name(run.of("run_started")[-1]["run_id"]), NAMESPACE)
            epochs = len(run.of("controller_restarted"))
            run.wait(lambda epochs=epochs: len(run.of("controller_restarted")) > epochs, 60, "the next controller")  # type: ignore[misc]
            run.wait(lambda: run.status()["state"] == "RUNNING" and run.status()["places_wanted"] == 2, 30, "its requests")
            assert waiting() == 2
        os.kill(run.driver.pid, signal.SIGKILL)
        run.driver.communicate(timeout=10)
        until(lambda: {state for _, state, _ in nodes.groups()} == {"REMOVED"}, 20, "the end of all placement groups")
