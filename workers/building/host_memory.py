"""Host memory that a worker can still take, on a machine or in a container with a limit."""

from __future__ import annotations

from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")
"""Folder of a container's own control group, in a pod or in Docker."""
_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
)
"""Files of the limit and the use, and the key of ``memory.stat`` for unused pages of files, which the system drops; versions 2 and 1."""


def free_memory(cgroup: Path = _CGROUP) -> int:
    """Return the bytes of host memory that this process can still take: the machine's, or what the limit of its container leaves."""
    free = psutil.virtual_memory().available
    for limit, use, dropped in _FILES:
        try:
            most, taken = int((cgroup / limit).read_text()), int((cgroup / use).read_text())
            lines = (cgroup / use).with_name("memory.stat").read_text().splitlines()
            free = min(free, most - taken + int(dict(line.split() for line in lines).get(dropped, 0)))
        except (OSError, ValueError):  # there is no such file, or it says "max", for no limit
            continue
    return max(free, 0)
