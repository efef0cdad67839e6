"""Ray on this machine is started again if its start fails, and the run is refused in one sentence if that fails, too."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from tests.controller.runs import tiny
from vescale_ray.controller.driver.local_ray import Cluster
from vescale_ray.controller.protocol import RunRefused

BUSY = Exception("The current node timed out during startup.\nThis could happen because some of the raylet failed to startup")


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[Exception | None]], list[str]]:
    """Replaces Ray's start: each one raises its exception, or succeeds. Returns the list of the folders of the starts."""

    def replace(ends: list[Exception | None]) -> list[str]:
        folders: list[str] = []

        def init(**options: Any) -> None:
            folders.append(options["_temp_dir"])
            assert os.path.isdir(folders[-1])
            error = ends[len(folders) - 1]
            if error is not None:
                raise error

        monkeypatch.setattr(ray, "init", init)
        monkeypatch.setattr(ray, "shutdown", lambda: None)
        monkeypatch.setattr(ray, "is_initialized", lambda: False)
        monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "n0"))
        return folders

    return replace


def test_second_start_of_ray_follows_a_failed_one(tmp_path: Path, starts: Any) -> None:
    folders = starts([BUSY, None])
    cluster = Cluster(tiny(tmp_path, "again", ray_address="local"))
    first, second = folders
    assert cluster.node == "n0" and not os.path.exists(first) and os.path.isdir(second)
    assert cluster.close() == [] and not os.path.exists(second)


def test_two_failed_starts_of_ray_refuse_the_run(tmp_path: Path, starts: Any) -> None:
    folders = starts([BUSY, BUSY])
    with pytest.raises(
        RunRefused, match=r"Ray did not start on this machine in 2 attempts \(The current node timed out .*\): check"
    ) as told:
        Cluster(tiny(tmp_path, "busy", ray_address="local"))
    assert "\n" not in str(told.value) and len(folders) == 2 and not any(map(os.path.exists, folders))
