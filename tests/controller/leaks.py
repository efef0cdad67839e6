"""Open files, threads, memory and children of processes over time.

A leak is growth that does not stop. A robust slope tells it from noise, warm-up and a peak.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vescale_ray.workers.monitoring.process import born

FIELDS = ("files", "threads", "megabytes", "children")
MOST = {"files": 8.0, "threads": 6.0, "megabytes": 25.0, "children": 1.5}
"""Growth that is no leak. Connection buffers and allocator arenas have no fixed size."""
SHARE = 0.15
"""Share of the median memory by which the memory may grow in addition."""
WARM_SHARE = 0.25
"""Share of a life that is ignored at its beginning, while caches fill and threads start."""
POINTS = 20
"""Fewest measurements by which a life can be judged."""


@dataclass
class Life:
    """The measurements of one process."""

    name: str
    pid: int
    times: list[float] = field(default_factory=list)
    held: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in FIELDS})
    shared: set[str] = field(default_factory=set)
    """Files in ``/dev/shm`` that the process ever mapped."""
    since: int = 0
    """Start time according to the kernel. A later process with the same id has another one."""

    @property
    def seconds(self) -> float:
        return self.times[-1] - self.times[0] if self.times else 0.0

    @property
    def tells(self) -> bool:
        """True if there are enough measurements to judge the process."""
        return len(self.times) >= POINTS

    def look(self, children: Mapping[int, int]) -> None:
        """Add a measurement, unless the process is gone."""
        root = Path(f"/proc/{self.pid}")
        since = born(self.pid)
        self.since = self.since if self.times else since
        if not since or since != self.since:
            return
        try:
            status = dict(line.split(":", 1) for line in (root / "status").read_text().splitlines() if ":" in line)
            measured = {
                "files": float(len(os.listdir(root / "fd"))),
                "threads": float(status["Threads"]),
                "megabytes": float(status["RssAnon"].split()[0]) / 1024,
                "children": float(children.get(self.pid, 0)),
            }
            maps = (root / "maps").read_text()
        except (OSError, KeyError):
            return
        self.shared |= {line.rpartition("/dev/shm/")[2].split()[0] for line in maps.splitlines() if "/dev/shm/" in line}
        self.times.append(time.monotonic())
        for name, value in measured.items():
            self.held[name].append(value)

    def growth(self, name: str) -> float:
        """Growth between the end of the warm-up and the last measurement.

        The median of the slopes between all pairs of measurements (Theil-Sen) tolerates a fifth of outliers.
        """
        first = int(len(self.times) * WARM_SHARE)
        slope = theil_sen(self.times[first:], self.held[name][first:])
        return slope * (self.times[-1] - self.times[first])

    def leaks(self) -> list[str]:
        """Descriptions of the fields that grew by more than allowed."""
        if not self.tells:
            return []
        found = []
        for name in FIELDS:
            grown = self.growth(name)
            most = MOST[name] + (SHARE * statistics.median(self.held[name]) if name == "megabytes" else 0.0)
            if grown > most:
                values = self.held[name]
                ends = f"{values[0]:.0f} .. {values[-1]:.0f}"
                found.append(f"{self.name} ({self.pid}): {name} grew by {grown:.1f} in {self.seconds:.0f} s ({ends})")
        return found


def theil_sen(times: Sequence[float], values: Sequence[float], most: int = 300) -> float:
    """The median of the slopes between all pairs of points. A series of 2 * ``most`` points or more is thinned out evenly."""
    every = max(1, len(times) // most)
    t, v = times[::every], values[::every]
    slopes = [(v[j] - v[i]) / (t[j] - t[i]) for i in range(len(t)) for j in range(i + 1, len(t)) if t[j] > t[i]]
    return statistics.median(slopes) if slopes else 0.0


class Watch:
    """Measures processes every ``gap_s`` seconds, in a thread.

    Args:
        who: returns the ids of the processes to measure now, by a name that stays the same for the life of a process.
    """

    def __init__(self, who: Callable[[], Mapping[str, int]], gap_s: float = 2.0) -> None:
        self._who, self._gap_s = who, gap_s
        self.lives: dict[tuple[str, int], Life] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(10)

    def leaks(self) -> list[str]:
        return [text for life in self.lives.values() for text in life.leaks()]

    def shared_memory_left(self) -> set[str]:
        """Files in ``/dev/shm`` that a watched process used and that still exist."""
        return {name for life in self.lives.values() for name in life.shared} & set(os.listdir("/dev/shm"))

    def table(self, least_s: float) -> str:
        """A line for each process that lived for ``least_s`` seconds: its values after its warm-up, in the middle, and at the end."""
        rows = []
        for life in self.lives.values():
            if life.seconds >= least_s and life.tells:
                parts = []
                for name in FIELDS:
                    values = life.held[name]
                    at = [int(len(values) * WARM_SHARE), len(values) // 2, len(values) - 1]
                    parts.append(f"{name} {' '.join(f'{values[i]:.0f}' for i in at)} ({life.growth(name):+.1f})")
                rows.append(f"{life.name} ({life.pid}), {life.seconds:.0f} s: " + ", ".join(parts))
        return "\n".join(rows)

    def _run(self) -> None:
        while not self._stop.wait(self._gap_s):
            children = count_children()
            for name, pid in self._who().items():
                self.lives.setdefault((name, pid), Life(name, pid)).look(children)


def count_children() -> dict[int, int]:
    """The number of children of each process, zombies included."""
    found: dict[int, int] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            parent = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        found[parent] = found.get(parent, 0) + 1
    return found
