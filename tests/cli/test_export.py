"""A run's metrics as a Parquet table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from vescale_ray.cli import main
from vescale_ray.reporting.parquet import to_parquet
from vescale_ray.runfolder import RunFolder


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "r").create()
    for step in range(1, 6):
        line: dict[str, Any] = {"step": step, "loss": 3 if step == 1 else 1.0 / step, "clipped": step == 2}
        line["memory"] = {"0": 10, "1": 20 + step}
        line |= {"waited_seconds": {"step_end": 0.5, "all_gather": 0.25}} if step > 2 else {}
        folder.append_metrics(line)
    return folder


def test_export_makes_lines_rows_and_nested_fields_columns(run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vescale_ray.reporting.parquet.ROWS", 2)
    assert to_parquet(run, tmp_path / "m.parquet") == 5
    rows = pq.read_table(tmp_path / "m.parquet").to_pylist()
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5] and [row["loss"] for row in rows] == [3.0, 0.5, 1 / 3, 0.25, 0.2]
    assert rows[0]["memory"] == [10, 21] and [row["clipped"] for row in rows] == [False, True, False, False, False]
    assert [row["waited_seconds.step_end"] for row in rows] == [None, None, 0.5, 0.5, 0.5]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.parquet", "r"]


def test_a_run_without_a_step_gives_an_empty_table(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "r").create()
    assert to_parquet(folder, tmp_path / "m.parquet") == 0 and pq.read_table(tmp_path / "m.parquet").num_rows == 0


def test_the_command_names_its_file_and_why_it_is_not_written(run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run.write_state({"run": "r", "state": "DONE"})
    assert main(["export", str(run.path)]) == 0
    assert f"wrote {run.path / 'metrics.parquet'}: 5 steps" in capsys.readouterr().out
    assert main(["export", str(run.path), "--out", str(tmp_path / "no" / "m.parquet")]) == 2
    told = capsys.readouterr().err
    assert f"{tmp_path / 'no' / 'm.parquet'}: can't be written (No such file or directory)" in told and "Traceback" not in told
