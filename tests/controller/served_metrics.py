"""A server of metrics, and requests to it."""

from __future__ import annotations

import urllib.error
import urllib.request
from typing import Any

from prometheus_client.parser import text_string_to_metric_families as parse_text

from vescale_ray.controller.http.metrics import MetricsServer
from vescale_ray.controller.state.snapshot import Histogram, Snapshot

FULL = Snapshot(
    run="r1",
    state="RUNNING",
    step=40,
    steps=100,
    steps_executed=43,
    tokens=43000,
    loss=2.5,
    bpb=3.6,
    tokens_per_second=1234.5,
    grad_norm=0.7,
    learning_rate=1e-3,
    world=3,
    world_target=3,
    world_min=1,
    world_max=6,
    generation=4,
    started=1e9,
    last_step_time=1.5e9,
    step_seconds=Histogram().observe(0.2).observe(0.3),
    rescales={("shrink", "failure"): 1, ("grow", "manual"): 2},
    rescale_seconds=Histogram().observe(1.5),
    rescale_phase_seconds={"detect": 0.1, "sync": 1.4},
    replayed_steps=3,
    worker_failures={"died": 1},
    memory={0: 100, 1: 200, 2: 300},
    flops_utilization=0.375,
    phase_seconds={"data": 0.5, "comm": 2.0},
    nonfinite_steps=2,
    nonfinite_weights=1,
    clipped_steps=5,
    skipped_steps=1,
    draining=1,
    unprotected=2,
    memory_kinds={"parameters": {0: 400, 1: 410, 2: 420}, "padding": {0: 0, 1: 8, 2: 0}},
    device_memory={"allocated": {0: 7, 1: 8, 2: 9}, "capacity": {0: 80, 1: 80, 2: 80}},
    data_waiting_tokens=7000,
    data_read_bytes=123456,
    data_skipped={"files": 2, "records": 30},
    alloc_retries={0: 0, 1: 3, 2: 0},
    waited={"all_gather": {0: 1.25, 1: 0.5, 2: 0.75}, "step_end": {0: 0.0, 1: 2.5, 2: 0.0}},
    rank_step_seconds={0: 0.3, 1: 0.3, 2: 0.31},
    heard={0: 1.5e9, 1: 1.5e9 + 0.25, 2: 1.5e9},
    workers={0: {"worker": "w0", "node": "n0"}, 2: {"worker": "w3", "node": "n1"}},
    slot_seconds={0: 0.1, 1: 0.3, 2: 0.1},
    slowness={0: 1.0, 1: 3.0, 2: 1.0},
    slots={0: 3, 1: 1, 2: 2},
    stragglers={"w1": {"rank": 1, "factor": 3.0, "since_step": 20, "node": "n0"}},
    checkpoint_step=30,
    checkpoint_time=1.4e9,
    checkpoint_path="/c/30",
    checkpoint_bytes=1000,
    checkpoint_failures=0,
    checkpoint_read_bytes=4000,
    checkpoint_load_failures=2,
    checkpoint_stages={"snapshot": Histogram().observe(0.05), "upload": Histogram().observe(7.0)},
    checkpoint_loads=Histogram().observe(0.4).observe(0.5),
    checkpoints_pending=1,
    info={"model": "llama", "torch": "2.13.0"},
)


class Box:
    """The server's inputs: a snapshot that a test changes, and the commands that arrived."""

    def __init__(self) -> None:
        self.snapshot = FULL
        self.commands: list[tuple[str, dict[str, Any]]] = []
        self.raises: Exception | None = None

    def control(self, action: str, body: dict[str, Any]) -> dict[str, Any]:
        if self.raises is not None:
            raise self.raises
        self.commands.append((action, body))
        return {"done": action}


def get(server: MetricsServer, path: str, accept: str = "") -> str:
    request = urllib.request.Request(server.url() + path, headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.read().decode()


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {(s.name, frozenset(s.labels.items())): s.value for family in parse_text(text) for s in family.samples}


def value(text: str, name: str, **labels: str) -> float:
    return samples(text)[name, frozenset({"run": "r1", **labels}.items())]
