"""The benchmark runs and writes its figures; figures that do not depend on the machine's load meet their goals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_quick_benchmark_writes_figures_and_meets_fixed_goals(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "checkpoint.py"), "--quick", "--json", str(out), "--folder", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=280, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert ended.returncode == 0, ended.stderr[-3000:]
    figures = json.loads(out.read_text())["figures"]
    for name in ("save_vs_raw", "persist_vs_raw", "save_vs_dcp", "stall_vs_memcpy", "load_vs_raw", "load_vs_dcp"):
        assert figures[name]["value"] > 0 and figures[name]["goal"] and name in ended.stdout
    assert 1.0 <= figures["reshard_8_to_6"]["value"] <= 1.05 and 1.0 <= figures["reshard_8_to_16"]["value"] <= 1.05
    assert figures["really_read_8_to_6"]["value"] >= 1.0
    for name in ("save_memory", "async_memory", "load_memory"):
        assert figures[name]["value"] <= 20  # the budget of 16, and 4 for the allocator
    assert not list(tmp_path.glob("vescale-ckpt-bench-*")), "its files are gone"
