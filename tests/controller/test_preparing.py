"""``vescale-ray data prepare`` on Ray: its output in parallel, its messages, and a run on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import vescale_ray
from tests.controller.runs import tiny
from tests.data.sources import random_texts, train_tokenizer, write_jsonl
from vescale_ray.cli import main
from vescale_ray.controller.driver.preparing import StorageFailed, prepare
from vescale_ray.data import preparation
from vescale_ray.data.preparation import COLUMN

TEXTS = random_texts(np.random.default_rng(5), 300)


def test_prepared_files_are_inspected_kept_and_trained_on(ray_here: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = train_tokenizer(tmp_path / "tokenizer.json", TEXTS)
    for number in range(4):
        write_jsonl(tmp_path / f"{number}.jsonl", TEXTS[number::4])
    options = ["--tokenizer", str(tmp_path / "tokenizer.json"), "--end-token", "<|end|>", "--out", str(tmp_path / "out")]
    command = ["data", "prepare", f"{tmp_path}/?.jsonl", *options, "--shards", "3", "--workers", "2"]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert f"{tmp_path}/out: files 3 (0 kept), documents 300, tokens " in out and f"data.column={COLUMN}" in out
    files = sorted((tmp_path / "out").glob("*.parquet"))
    rows = [row for path in files for row in pq.read_table(path).column(COLUMN).to_pylist()]
    end = tokenizer.token_to_id("<|end|>")
    texts = [text for number in range(4) for text in TEXTS[number::4]]
    assert rows == [[*tokenizer.encode(text, add_special_tokens=False).ids, end] for text in texts], "as a loop in one process"

    files[1].write_bytes(files[1].read_bytes()[:-9])
    assert main([*command, "--workers", "1"]) == 0
    told = capsys.readouterr()
    assert "files 3 (2 kept), documents 300" in told.out and f"made anew: {files[1]}: its content is damaged" in told.err
    given: dict[str, Any] = {
        "corpus": f"{tmp_path}/out/*.parquet",
        "column": COLUMN,
        "tokenizer": str(tmp_path / "tokenizer.json"),
        "seq_len": 16,
    }
    assert main(["data", "inspect", given["corpus"], *(f"data.{key}={value}" for key, value in given.items() if key != "corpus")]) == 0
    assert f"files 3, documents 300, tokens {sum(map(len, rows)):,}" in capsys.readouterr().out
    changes: Any = {f"data_{key}": value for key, value in given.items()}
    result = vescale_ray.train(tiny(tmp_path, "on", **changes, train_steps=2, elastic_workers=1), progress=False)
    assert result.done

    # A task reports a bad source as one line.
    with (tmp_path / "3.jsonl").open("a") as file:
        file.write('{"text": 5}\n')
    assert main([*command[:-6], "--out", str(tmp_path / "new"), "--shards", "2"]) == 2
    error = capsys.readouterr().err
    assert error == f"vescale-ray: --column = text: {tmp_path}/3.jsonl: line 76: the field is no text, but int\n"
    assert main([*command, "--shards", "2"]) == 2
    assert f"--out {tmp_path}/out: was begun with SOURCE = " in capsys.readouterr().err
    # A storage that does not answer is no bad input.
    data = tiny(tmp_path, "x", data_corpus=f"{tmp_path}/0.jsonl", data_tokenizer=options[1], data_end_token="0").data
    with pytest.raises(StorageFailed, match="gone: No such file or directory; the same command goes on"):
        prepare(preparation.plan(data, str(tmp_path / "gone")), 1, lambda one: None)


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
