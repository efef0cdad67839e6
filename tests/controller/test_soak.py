"""The soak test: half an hour of random faults, drains, joiners and pauses, one every 10 s; then SIGKILL of all processes and a resume.

VESCALE_SOAK_MINUTES=3 VESCALE_SOAK_SEED=7 python -m pytest tests/controller/test_soak.py -m slow -s
"""

from __future__ import annotations

import os
import random
import subprocess
import time
from pathlib import Path

import pytest

from tests.controller.leaks import Life, Watch, theil_sen
from tests.controller.runs import Finished, lives, until
from tests.controller.soak import Soak, config_of, start_driver
from vescale_ray import checkpoint
from vescale_ray.config import RunConfig
from vescale_ray.controller.driver.driver import RunResult
from vescale_ray.runfolder import RunFolder
from vescale_ray.workers.monitoring.process import born

MINUTES = float(os.environ.get("VESCALE_SOAK_MINUTES", "30"))
SEED = int(os.environ.get("VESCALE_SOAK_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
GAP_S = 10.0
MORE = 60
"""Number of steps after the resume."""


def carried_on(config: RunConfig, output: Path, until_step: int) -> RunFolder:
    """Continue the run on a Ray cluster of its own, and stop it after step ``until_step``."""
    driver = start_driver(config, output, f"{until_step}:stop:0")
    code = driver.wait(600 + 60 * MINUTES)
    assert code == 0, output.read_text()[-3000:]
    return RunFolder(config.run_folder)


@pytest.mark.slow
@pytest.mark.timeout(60 * MINUTES * 2.5 + 900)
@pytest.mark.fault("B2")
def test_soak_costs_no_sample_changes_no_bit_and_leaks_nothing(tmp_path: Path) -> None:
    print(f"\nseed {SEED}, {MINUTES:g} minutes")
    soak = Soak(tmp_path, SEED, GAP_S)
    try:
        with Watch(soak.watched) as watch:
            soak.torment(60 * MINUTES)
            time.sleep(10)
        print(watch.table(least_s=min(60.0, 12 * MINUTES)))
        leaks = watch.leaks()
        assert {"driver", "supervisor"} <= {life.name for life in watch.lives.values() if life.tells}, (
            "nobody lived long enough to be judged"
        )
        reached = soak.step()
    finally:
        soak.end_everything()
    hired = len(soak.events("worker_started"))
    until(lambda: not soak.workers(), 15, "the end of the workers")
    orphans = watch.shared_memory_left()
    newest = checkpoint.latest(soak.config.checkpoint_root)
    assert newest is not None and checkpoint.verify(soak.config.checkpoint_root).ok
    print(f"all killed at step {reached}, resumed from {newest.step} with 2 workers")

    resumed = soak.config.model_copy(update={"elastic": soak.config.elastic.model_copy(update={"workers": 2})})
    carried_on(resumed, tmp_path / "resumed.txt", reached + MORE)
    finished = Finished(soak.config, RunResult("STOPPED", 0, 0, None, None, soak.folder.path))
    steps = max(finished.losses)
    assert sorted(finished.losses) == list(range(1, steps + 1)) and steps >= reached + MORE
    assert finished.accounting().exact
    rescaled = finished.of("rescaled")
    pauses = sorted(event["pause_seconds"] for event in rescaled)
    print(
        f"{steps} steps, {soak.blows} blows, {len(rescaled)} changes of the world, {finished.accounting().replayed_steps} steps again, "
        f"{len(finished.of('controller_restarted'))} controllers, {hired} workers, median pause {pauses[len(pauses) // 2]:.2f} s"
    )

    assert soak.blows > 60 * MINUTES / GAP_S / 4, "hardly anything has happened"

    calm = config_of(tmp_path, "calm", elastic_workers=1, elastic_max_workers=1)
    reference = {line["step"]: line["loss"] for line in carried_on(calm, tmp_path / "calm.txt", steps).read_metrics()}
    assert {step: reference[step] for step in finished.losses} == finished.losses, "a loss differs from the undisturbed run's"
    assert not leaks, "\n".join(leaks)
    assert not orphans, "shared memory is left in /dev/shm"


def test_soak_strikes_no_process_with_a_reused_pid() -> None:
    """A process of another test may have the id that a worker of the soak had half an hour before."""
    with subprocess.Popen(["sleep", "60"]) as other:
        started = {"pid": other.pid, "born": born(other.pid)}
        assert lives(started) and not lives({**started, "born": started["born"] - 1})
        other.kill()
        assert until(lambda: not lives(started), 10, "its end") < 10


def test_leak_watch_ignores_a_process_with_a_reused_pid() -> None:
    """If thousands of processes come and go, their ids are used again within minutes."""
    with subprocess.Popen(["sleep", "60"]) as other:
        life = Life("worker", os.getpid())
        life.look({})
        life.pid = other.pid
        life.look({})
        other.kill()
    assert len(life.times) == 1 and life.since > 0


def test_a_leak_is_told_from_noise_warming_up_and_a_peak() -> None:
    rng = random.Random(3)

    def life(of: object) -> Life:
        one = Life("worker", 1)
        for i in range(100):
            one.times.append(float(i))
            for name in one.held:
                one.held[name].append(of(i) + rng.random() if name == "files" else 5.0)  # type: ignore[operator]
        return one

    assert not life(lambda i: 50 + rng.randrange(4)).leaks(), "noise"
    assert not life(lambda i: min(i, 20)).leaks(), "it fills up and stays"
    assert not life(lambda i: 20 + 100 * (40 < i < 52)).leaks(), "a peak"
    (text,) = life(lambda i: 20 + i / 5).leaks()
    assert text.startswith("worker (1): files grew by 1")
    assert theil_sen([0, 1, 2, 3], [0, 2, 99, 6]) == 2.0
