"""One local Ray for all tests of this folder that need one and don't start their own."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.controller.runs import tiny
from tests.controller.stage import WorkerGroup
from vescale_ray.controller.driver import local_ray

os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", local_ray.QUIET)  # before a test module imports Ray


SECRET = "seeded-0b7fd1c2-secret"
"""Of the S3 service that runs write to; it must turn up nowhere."""


@pytest.fixture(scope="session")
def ray_here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """This process is connected to a Ray of its own, with 8 CPUs and nothing else on it: runs use it and leave it."""
    folder: Path = tmp_path_factory.mktemp("ray")
    # Workers have the environment of the Ray that they run on: what moto wants to see of credentials.
    os.environ.update(AWS_ACCESS_KEY_ID="testing", AWS_SECRET_ACCESS_KEY=SECRET, AWS_REGION="us-east-1")
    cluster = local_ray.Cluster(tiny(folder, "ray", ray_address="local", ray_num_cpus=8))
    print(f"\nray.init took {cluster.seconds:.1f} s", end="")
    try:
        yield
    finally:
        cluster.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of the newest worker group is the one of the whole process."""
    real = time.monotonic
    monkeypatch.setattr(WorkerGroup, "newest", None)
    monkeypatch.setattr(time, "monotonic", lambda: real() if WorkerGroup.newest is None else WorkerGroup.newest.now)
