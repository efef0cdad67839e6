"""Facts about a process that the kernel reports in ``/proc``."""

from __future__ import annotations

import os
from pathlib import Path


def born(pid: int) -> int:
    """Return the kernel's start time of a process, in clock ticks since boot; 0 if there is no such process."""
    try:
        # The name in parentheses may contain anything, so count from its end: the start time is field 22.
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return 0


def resident_bytes() -> int:
    """Resident memory of this process in bytes; 0 if the system does not report it."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
