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

_HERE = Path(__file__).resolve().parent
_FIRST = ("controller/test_runs_on_ray.py", "checkpoint", "cli", "controller", "workers")
"""Begun in this order, before all others. `make test` gives a file to one of two lanes as a whole: what takes five minutes must not come
last, and has time limits, so that beside it comes what leaves it a processor."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = [name for name in _FIRST if not (_HERE / name).exists()]
    if missing:
        raise pytest.UsageError(f"tests/conftest.py begins with {', '.join(missing)}, which is not there: name what takes longest")

    def place(item: pytest.Item) -> int:
        return next((k for k, name in enumerate(_FIRST) if item.path.is_relative_to(_HERE / name)), len(_FIRST))

    items.sort(key=place)
