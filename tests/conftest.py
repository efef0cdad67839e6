"""What every test gets: one thread per process, no token authentication in Ray, no colour, and folders of its own.

The per-test time limit (300 s) stands in pyproject.toml; a test that needs another says so with ``@pytest.mark.timeout``.
"""

from __future__ import annotations

import gc
import os

# Before torch or Ray is imported, and inherited by every process that a test starts.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_worker_niceness"] = "0"  # not 15: the tests of the other pytest process are no better
os.environ["NO_COLOR"] = "1"
os.environ.pop("RAY_ADDRESS", None)  # a test must not join whatever cluster the machine has

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
# How fast examples are made says nothing of the code on a machine that does much else: a pause of a second failed a test.
settings.register_profile("here", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("here")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the folders whose tests start clusters and take a minute each before the others. So both lanes of `make test` end together."""
    items.sort(key=lambda item: item.path.parent.name not in ("controller", "workers"))


def pytest_collection_finish() -> None:
    """Exclude what the imports made from garbage collection: each collection took 0.3 s, and each process group that is dissolved asks for
    one."""
    gc.collect()
    gc.freeze()
