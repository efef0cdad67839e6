"""Random faults in succession and at the same time, for a whole run. The test is slow, and prints its seed."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.controller.runs import carry_out, lives, print_figures, tiny, worst_difference
from vescale_ray.controller.controller import controller_name
from vescale_ray.controller.protocol import NAMESPACE
from vescale_ray.runfolder import RunFolder

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_here"), pytest.mark.timeout(600)]


class Tormentor:
    """Kills and stops a run's workers, and kills its controller, at random moments until there were ``faults`` faults."""

    def __init__(self, folder: RunFolder, seed: int, faults: int, gap_s: float) -> None:
        self.done: list[str] = []
        self.status: Mapping[str, Any] = {}
        self._folder, self._rng, self._faults, self._gap_s = folder, random.Random(seed), faults, gap_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Tormentor:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(10)

    def watch(self, status: Mapping[str, Any]) -> None:
        self.status = status

    def _run(self) -> None:
        while len(self.done) < self._faults and not self._stop.wait(self._rng.expovariate(1 / self._gap_s)):
            if int(self.status.get("step") or 0) < 3:
                continue
            # Often two faults come in quick succession: the second hits the recovery from the first.
            for _ in range(self._rng.choice([1, 1, 2])):
                self._strike()
                time.sleep(self._rng.uniform(0.0, 0.4))

    def _strike(self) -> None:
        import ray

        living = [e["pid"] for e in self._folder.read_events() if e["event"] == "worker_started" and lives(e)]
        what = self._rng.choice(["kill", "kill", "kill", "stop", "controller"])
        try:
            if what == "controller":
                ray.kill(ray.get_actor(controller_name(self.status["info"]["run_id"]), NAMESPACE), no_restart=False)
            elif len(living) > 2:
                os.kill(self._rng.choice(living), signal.SIGKILL if what == "kill" else signal.SIGSTOP)
            else:
                return
        except (ValueError, OSError, ray.exceptions.RayError):
            return  # the controller is being restarted, or the worker has just died
        self.done.append(what)


SEED = 1


def test_random_faults_cost_no_sample_and_keep_the_loss_curve(tmp_path: Path) -> None:
    changes = {"train_steps": 500, "elastic_max_recoveries_without_progress": 8, "elastic_collective_timeout_s": 5}
    calm = carry_out(tiny(tmp_path, "calm", elastic_workers=1, **changes))
    config = tiny(tmp_path, "tormented", elastic_workers=4, elastic_replace_lost=True, **changes)
    with Tormentor(RunFolder(config.run_folder), SEED, faults=10, gap_s=3.0) as tormentor:
        finished = carry_out(config, watch=tormentor.watch)
    print_figures(f"seed {SEED}, {tormentor.done}", finished.of("rescaled"))
    assert finished.result.state == "DONE", finished.result
    assert len(tormentor.done) >= 3, "the run was over before anything happened"
    assert finished.accounting().exact
    early = {step: loss for step, loss in finished.losses.items() if step <= 150}
    assert worst_difference(early, {step: calm.losses[step] for step in early}) < 1e-3
    assert finished.losses.keys() == calm.losses.keys()
    assert abs(finished.losses[500] - calm.losses[500]) < 0.05 * calm.losses[500]
