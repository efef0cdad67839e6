"""Growth of this process's resident memory, as the kernel counts it.

Tests do not use ``tracemalloc``. It exchanges Python's allocators without a lock: a thread that starts or ends at the same time reads half
of the old ones and half of the new ones, and the process dies (python/cpython#128679).
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path

STATUS = Path("/proc/self/status")


def peak_growth(work: Callable[[], object]) -> int:
    """Return by how many bytes the resident memory grows at most while ``work`` runs.

    Memory that was free before, and memory that other threads take, make an error of a few MiB.
    """
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins at the present size
    before = _kilobytes("VmRSS")
    work()
    return 1024 * (_kilobytes("VmHWM") - before)


def _kilobytes(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+)", STATUS.read_text())
    assert found is not None
    return int(found[1])
