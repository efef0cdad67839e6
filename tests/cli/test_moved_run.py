"""A run's folder that was moved or copied: its configuration names the old place, where the run would start anew or another resume."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from vescale_ray.cli import main
from vescale_ray.cli.common import check_place
from vescale_ray.config import load_config
from vescale_ray.runfolder import RunFolder


def made(path: Path) -> Path:
    """The ``config.yaml`` of a run in the folder ``path``."""
    run = RunFolder(path).create()
    run.config_path.write_text(f"run: {{name: {path.name}, dir: {path.parent}}}\n")
    (path / "run.json").write_text('{"state": "STOPPED", "step": 5}')
    return run.config_path


@pytest.mark.parametrize("move", [shutil.move, shutil.copytree])
def test_a_run_whose_folder_was_moved_is_not_started_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str], move: object) -> None:
    old, new = tmp_path / "runs" / "x", tmp_path / "kept here" / "y"
    made(old)
    new.parent.mkdir()
    move(old, new)  # type: ignore[operator]
    assert main(["train", str(new / "config.yaml")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"was moved or copied from {old}; to continue this run, add" in said
    remedy = shlex.split(re.sub(".* add ", "", said))
    config = load_config(new / "config.yaml", remedy)
    check_place(new / "config.yaml", config, remedy)
    assert config.run_folder == new


def test_configurations_that_lie_elsewhere_are_taken(tmp_path: Path) -> None:
    kept = made(tmp_path / "runs" / "x")
    for file, overrides in ((kept, []), (kept, ["run.name=other"]), (kept, ["run.dir=/tmp/runs"])):
        check_place(file, load_config(file, overrides), overrides)
    (tmp_path / "link").symlink_to(tmp_path / "runs")
    check_place(tmp_path / "link" / "x" / "config.yaml", load_config(kept), [])
    own = tmp_path / "config.yaml"  # a job file of this name beside no run
    own.write_text("run: {name: z, dir: runs}\n")
    check_place(own, load_config(own), [])
