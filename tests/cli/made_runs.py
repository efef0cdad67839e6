"""Runs and controllers that commands read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vescale_ray.cli import main
from vescale_ray.runfolder import RunFolder


def made_run(folder: Path, **state: Any) -> RunFolder:
    run = RunFolder(folder).create()
    run.write_config("train: {steps: 50}\n")
    if state:
        run.write_state({"run": folder.name, "steps": 50, **state})
    return run


def said(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = main(args)
    out = capsys.readouterr()
    return code, out.out.strip(), out.err.strip()
