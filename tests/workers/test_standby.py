"""Standbys: devices stay hidden until they have a place, and their threads wait for each other."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
import torch

from vescale_ray.workers import standby as subject
from vescale_ray.workers.standby import VISIBLE, Standby, hide_devices, show_devices


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore the variables afterwards."""
    for name in (VISIBLE, subject._BY_NVML):
        monkeypatch.setenv(name, "3")
    yield


def test_standby_sees_no_gpu_before_it_gets_those_of_its_place() -> None:
    """CUDA reads the variable at its first use. A check for GPUs before that must not be one."""
    hide_devices()
    assert os.environ[VISIBLE] == "" and os.environ[subject._BY_NVML] == "1"
    assert not torch.cuda.is_available()
    show_devices("2,GPU-7")
    assert os.environ[VISIBLE] == "2,GPU-7" and subject._BY_NVML not in os.environ


def test_a_standby_that_has_used_cuda_refuses_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would train on another GPU than the one that is reserved for it, or on none."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    hide_devices()
    with pytest.raises(RuntimeError, match=f"CUDA was initialised before this standby got {VISIBLE}=1"):
        show_devices("1")
    assert os.environ[VISIBLE] == ""
    show_devices("")


def test_a_standby_is_prepared_once_it_awaits_a_place() -> None:
    hide_devices()
    standby, gone_on = Standby(), threading.Event()
    threading.Thread(target=lambda: (standby.await_devices(), gone_on.set()), daemon=True).start()
    standby.wait_prepared()
    assert not gone_on.wait(0.05)
    standby.employ("1")
    assert gone_on.wait(10) and os.environ[VISIBLE] == "1"


def test_standby_that_cannot_be_prepared_raises_its_reason() -> None:
    standby = Standby()
    standby.fail("worker w2 cannot start: no such corpus")
    with pytest.raises(RuntimeError, match="w2 cannot start: no such corpus"):
        standby.wait_prepared()
