"""A standby: a worker that has imported everything and holds no device, until it takes the place of a lost worker.

Ray can't give a GPU to an actor that has started. The standby is an actor without resources, and the lost worker's placement group stays
reserved. So the standby uses that worker's GPUs, and Ray gives them to no other process. CUDA reads ``CUDA_VISIBLE_DEVICES`` at its first
use only. Until then the standby sees no GPU. This module imports neither Ray nor torch.
"""

from __future__ import annotations

import os
import sys
import threading

VISIBLE = "CUDA_VISIBLE_DEVICES"
_BY_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""With this variable, ``torch.cuda.is_available`` does not initialise CUDA, which would fix the visible devices."""


def hide_devices() -> None:
    """Hide all GPUs from this process, until :func:`show_devices`. Call it before torch is imported."""
    os.environ[VISIBLE], os.environ[_BY_NVML] = "", "1"


def show_devices(devices: str) -> None:
    """Make ``devices`` visible to this process.

    Raises:
        RuntimeError: CUDA is initialised already, without them.
    """
    torch = sys.modules.get("torch")
    if devices and torch is not None and torch.cuda.is_initialized():
        raise RuntimeError(f"CUDA was initialised before this standby got {VISIBLE}={devices}")
    os.environ[VISIBLE] = devices
    del os.environ[_BY_NVML]


class Standby:
    """The state that the threads of a standby share: whether it is prepared, and whether it has a place."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._prepared = False
        self._error: str | None = None
        self._devices: str | None = None

    def wait_prepared(self) -> None:
        """Wait until the standby is prepared. Raises ``RuntimeError`` if it can't be."""
        with self._change:
            self._change.wait_for(lambda: self._prepared or self._error is not None)
            if self._error is not None:
                raise RuntimeError(self._error)

    def employ(self, devices: str) -> None:
        """Make the standby a worker that uses ``devices`` (empty: none)."""
        with self._change:
            self._devices = devices
            self._change.notify_all()

    def fail(self, error: str) -> None:
        """Make waiting calls fail with ``error``: the standby can't become a worker."""
        with self._change:
            self._error = error
            self._change.notify_all()

    # ---------------------------------------------------------------------------------------------------- training thread

    def await_devices(self) -> None:
        """Wait for a place. The devices are visible afterwards. There is no time limit."""
        with self._change:
            self._prepared = True
            self._change.notify_all()
            self._change.wait_for(lambda: self._devices is not None)
            assert self._devices is not None
        show_devices(self._devices)
