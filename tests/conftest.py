"""Settings of every test: one thread per process, no token authentication in Ray, no colour, and its own folders.

The per-test time limit (300 s) is in pyproject.toml; a test with another limit has ``@pytest.mark.timeout``.
"""

from __future__ import annotations

import gc
import os
import sys

# Set before torch or Ray is imported; every process that a test starts inherits these.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_worker_niceness"] = "0"  # Ray's default of 15 would put the tests behind those of the other pytest process
os.environ["NO_COLOR"] = "1"
os.environ.pop("RAY_ADDRESS", None)  # a test must not join a cluster of the machine

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
# On a busy machine, the time to make examples says nothing about the code. A pause of one second failed a test.
settings.register_profile("here", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("here")


@pytest.fixture(autouse=True)
def apart_from_ray(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the session's Ray cluster (``ray_here``) from tests that do not ask for it: a run uses the Ray that its process has."""
    if "ray_here" not in request.fixturenames and "ray" in sys.modules:
        monkeypatch.setattr(sys.modules["ray"], "is_initialized", lambda: False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the folders whose tests start clusters first, since each test takes a minute. So both lanes of `make test` end together."""
    items.sort(key=lambda item: item.path.parent.name not in ("controller", "workers"))


def pytest_collection_finish() -> None:
    """Exclude the imports' objects from garbage collection.

    Each collection took 0.3 s, and each dissolved process group requests one.
    """
    gc.collect()
    gc.freeze()
