"""``vescale-ray data prepare`` on Ray: its output in parallel, its messages, and a run on it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.data.sources import random_texts, write_jsonl
from vescale_ray.cli import main

TEXTS = random_texts(np.random.default_rng(5), 300)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "Missing argument 'SOURCE...'"),
        (["none.jsonl", "--out", "out"], "Missing option '--tokenizer'"),
        (["none.jsonl", "--out", "out", "--tokenizer", "none.json"], "SOURCE = .*none.jsonl: no such file or folder"),
        (["a.jsonl", "--out", "out", "--tokenizer", "none.json"], "--tokenizer = .*none.json: can't be read"),
        (
            ["a.jsonl", "--out", "session_2026-01-01_00-00-00_000000_1/x", "--tokenizer", "t"],
            "--out: .* lies in the folder of a Ray session",
        ),
    ],
)
def test_bad_input_is_one_line_without_ray(
    options: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("vescale_ray.controller.driver.preparing.Cluster", lambda _: pytest.fail("Ray was started"))
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    assert main(["data", "prepare", *options]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(error)
