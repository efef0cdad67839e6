"""Common fields of every benchmark's result file: figures with their spread, the machine, the versions, the commit."""

from __future__ import annotations

import json
import os
import platform
import shutil
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def figure(values: Sequence[float], unit: str, goal: str | None = None, peer: str | None = "fsdp2") -> dict[str, Any]:
    """The median of the rounds, and half the distance of their quartiles as the spread."""
    quartiles = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return {"value": statistics.median(values), "spread": (quartiles[2] - quartiles[0]) / 2, "unit": unit, "goal": goal, "peer": peer}


def machine() -> dict[str, Any]:
    """The processor, its cores, the current load, and the GPU if there is one."""
    import torch

    names = (line.split(":", 1)[1].strip() for line in _lines(Path("/proc/cpuinfo")) if line.startswith("model name"))
    cpu = next(names, "") or platform.processor() or platform.machine()
    found: dict[str, Any] = {"cpu": cpu, "cores": os.cpu_count(), "load": os.getloadavg()}
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def write(path: Path | None, figures: dict[str, Any], **more: Any) -> None:
    """Write the result file, if there is a path. ``more``: further top-level fields."""
    if path is None:
        return
    import torch

    git = shutil.which("git")  # a GPU machine may lack it
    commit = git and subprocess.run([git, "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout.strip()
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    document = {"machine": machine(), "versions": versions, "commit": commit or None, **more, "figures": figures}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
