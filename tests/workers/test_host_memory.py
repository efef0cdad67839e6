"""Free memory is that which the limit of a container leaves."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from vescale_ray.workers.building.host_memory import free_memory

FREE = 1 << 40


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, FREE),
        ({"memory.max": "max", "memory.current": "5", "memory.stat": ""}, FREE),
        ({"memory.max": "1000", "memory.current": "900", "memory.stat": "anon 600\ninactive_file 250"}, 350),
        ({"memory.max": "1000", "memory.current": "1200", "memory.stat": "inactive_file 0"}, 0),
        ({"memory.max": str(2 * FREE), "memory.current": "0", "memory.stat": ""}, FREE),
        (
            {
                "memory/memory.limit_in_bytes": "1000",
                "memory/memory.usage_in_bytes": "900",
                "memory/memory.stat": "inactive_file 1\ntotal_inactive_file 100",
            },
            200,
        ),
        (
            {
                "memory/memory.limit_in_bytes": "9223372036854771712",
                "memory/memory.usage_in_bytes": "900",
                "memory/memory.stat": "total_inactive_file 100",
            },
            FREE,
        ),
    ],
)
def test_the_limit_of_a_container_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], free: int) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": FREE}))
    (tmp_path / "memory").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text + "\n")
    assert free_memory(tmp_path) == free
