"""One local Ray cluster for all tests of this folder that need Ray and don't start a cluster of their own."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.controller.recorded import Recorded, recorded
from tests.controller.runs import tiny
from tests.controller.served_metrics import Box
from tests.controller.stage import WorkerGroup
from vescale_ray.controller.driver import local_ray
from vescale_ray.controller.http.metrics import MetricsServer

os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", local_ray.QUIET)  # before a test module imports Ray


SECRET = "seeded-0b7fd1c2-secret"
"""Secret key of the S3 service that runs write to. It must not appear in any output."""


@pytest.fixture(scope="session")
def ray_here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Connect this process to a local Ray cluster with 8 CPUs that only the tests' runs use. Runs leave it running."""
    folder: Path = tmp_path_factory.mktemp("ray")
    # Workers inherit the environment of their Ray cluster. moto requires credentials there.
    os.environ.update(AWS_ACCESS_KEY_ID="testing", AWS_SECRET_ACCESS_KEY=SECRET, AWS_REGION="us-east-1")
    cluster = local_ray.Cluster(tiny(folder, "ray", ray_address="local", ray_num_cpus=8))
    try:
        yield
    finally:
        cluster.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the clock of the newest worker group the clock of the whole process."""
    real = time.monotonic
    monkeypatch.setattr(WorkerGroup, "newest", None)
    monkeypatch.setattr(time, "monotonic", lambda: real() if WorkerGroup.newest is None else WorkerGroup.newest.now)


@pytest.fixture
def run(tmp_path: Path) -> Recorded:
    return recorded(tmp_path)


@pytest.fixture
def box() -> Box:
    return Box()


@pytest.fixture
def server(box: Box) -> Iterator[MetricsServer]:
    """A server of the box's snapshot."""
    server = MetricsServer("127.0.0.1", 0, lambda: box.snapshot, box.control, "secret")
    yield server
    server.close()
