"""What every test gets: one thread per process, no token authentication in Ray, no colour, and folders of its own.

The per-test time limit (300 s) stands in pyproject.toml; a test that needs another says so with ``@pytest.mark.timeout``.
"""

from __future__ import annotations

import os
from pathlib import Path

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

WAITS = ("test_prometheus.py", "test_runs_on_ray.py", "test_submitted.py", "test_clean_up.py", "test_tally.py", "test_report.py")
"""Files that run whole Ray clusters, for minutes, and mostly wait for their processes."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of two lanes (pytest -n 2) one should wait where the other computes, and none work alone at the end: the files that wait are spread
    among the others, the longest first."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    waiting = sorted((path for path in files if path.name in WAITS), key=lambda path: WAITS.index(path.name))
    order = [path for path in files if path not in waiting]
    apart = len(order) // (len(waiting) + 1)
    for number, path in enumerate(waiting):
        order.insert(number * (apart + 1), path)
    items[:] = [item for path in order for item in files[path]]
