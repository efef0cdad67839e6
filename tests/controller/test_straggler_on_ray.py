"""Runs on Ray in which one worker becomes slow.

The worker is found by its own time, reported, and relieved of slots or replaced. Samples and losses show no trace of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.controller.hanging import at_full_speed, slow_down
from tests.controller.runs import Finished, carry_out, tiny, worst_difference
from vescale_ray.cli import client
from vescale_ray.config import RunConfig
from vescale_ray.runfolder import RunFolder

pytestmark = [pytest.mark.usefixtures("ray_here"), pytest.mark.slow, pytest.mark.timeout(400)]
SLOW_FROM = 12
MOST = 600


def config_of(home: Path, name: str, **changes: Any) -> RunConfig:
    model = {"model_factory": "tests.controller.hanging:model", "model_units": ["body"]}
    return tiny(home, name, train_steps=MOST, checkpoint_every=0, train_slots=12, elastic_deterministic=True, **model, **changes)


def run_with_a_slow_worker(home: Path, name: str, over: str, **changes: Any) -> tuple[Finished, str]:
    """A run that ends some steps after the event ``over``. From some step on, the worker of rank 1 sleeps in its slots."""
    config = config_of(home, name, **changes)
    folder = RunFolder(config.run_folder)
    victim: list[tuple[str, int]] = []
    enough: list[int] = []

    def watch(status: Mapping[str, Any]) -> None:
        if status["state"] != "RUNNING":
            return
        events = folder.read_events()
        if not victim and status["step"] >= SLOW_FROM:
            worker = status["workers"]["1"]["worker"]
            victim.append((worker, next(e["pid"] for e in events if e["event"] == "worker_started" and e["worker"] == worker)))
            slow_down(victim[0][1], 0.15)
        if any(e["event"] == over for e in events):
            enough.append(status["step"])
        if enough and status["step"] >= enough[0] + 10:
            client.request(folder, "stop", {})

    try:
        finished = carry_out(config, watch=watch)
    finally:
        for _, pid in victim:
            at_full_speed(pid)
    assert finished.result.state == "STOPPED", finished.result
    assert finished.accounting().exact
    return finished, victim[0][0]


@pytest.mark.fault("W14")
def test_slow_worker_is_relieved_or_replaced_with_equal_losses(tmp_path: Path) -> None:
    relieved, slow = run_with_a_slow_worker(tmp_path, "relieved", "slots_spread", elastic_straggler="relieve")
    told = relieved.of("straggler")
    assert [event["worker"] for event in told] == [slow] and told[0]["factor"] > 1.4 and told[0]["since_step"] >= SLOW_FROM
    moved = relieved.of("slots_spread")[0]["slots"]
    assert moved[slow] < 4 and sum(moved.values()) == 12
    assert len(relieved.generations()) == 1, "slots move without another process group"
    print(f"\nslow since step {told[0]['since_step']}, found at step {told[0]['step']}, slots {moved}", end="")

    replaced, slow = run_with_a_slow_worker(tmp_path, "replaced", "straggler_over", elastic_straggler="replace")
    assert [event["worker"] for event in replaced.of("straggler")] == [slow]
    assert [(event["worker"], event["reason"]) for event in replaced.of("straggler_over")] == [(slow, "it was replaced")]
    change = replaced.of("rescaled")
    assert [(e["from"], e["to"], e["direction"], e["reason"], e["steps_replayed"]) for e in change] == [(3, 3, "replace", "straggler", 0)]
    first, second = replaced.generations()
    assert slow in first and slow not in second and len(set(first) & set(second)) == 2
    print(f"\nreplaced with a pause of {change[0]['pause_seconds']:.2f} s", end="")

    # Five workers for 12 slots, of which none is slow: the result is the same bit for bit.
    steps = max(max(relieved.losses), max(replaced.losses))
    config = config_of(tmp_path, "undisturbed", elastic_workers=5)

    def stop(status: Mapping[str, Any]) -> None:
        if status["step"] >= steps:
            client.request(RunFolder(config.run_folder), "stop", {})

    undisturbed = carry_out(config, watch=stop)
    assert undisturbed.accounting().exact and undisturbed.of("straggler") == []
    for finished in (relieved, replaced):
        assert worst_difference(finished.losses, {step: undisturbed.losses[step] for step in finished.losses}) == 0.0
