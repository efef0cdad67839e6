"""``vescale-ray data inspect``: the figures of each source, a decoded sample, and the errors of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.data.chats import write_folder, write_rows
from tests.data.sources import train_tokenizer, write_jsonl
from vescale_ray.cli import main
from vescale_ray.config import load_config
from vescale_ray.controller.driver import preflight
from vescale_ray.errors import BadInput

TEXTS = ["shard worker ring step"] * 40


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    """A run of 100 samples on a mixture of text and token ids, and an evaluation set, with a tokenizer."""
    tokenizer = train_tokenizer(tmp_path / "tokenizer.json", TEXTS)
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    ids = tokenizer.encode("loss").ids
    np.array(ids * 400, dtype=np.uint16).tofile(tmp_path / "b.bin")
    mixture = [{"corpus": str(tmp_path / "a.jsonl"), "weight": 3, "end_token": "<|end|>"}, {"corpus": str(tmp_path / "b.bin")}]
    sets = {"same": {"corpus": str(tmp_path / "a.jsonl"), "end_token": "<|end|>"}}
    data = {"mixture": mixture, "eval": sets, "tokenizer": str(tmp_path / "tokenizer.json"), "seq_len": 8, "heldout": 0}
    tree: dict[str, Any] = {"data": data, "train": {"steps": 10, "slots": 5, "slot_batch": 2}, "run": {"dir": str(tmp_path)}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    return tmp_path / "run.yaml"


def test_each_source_and_set_is_counted_and_decoded(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "inspect", str(run_file), "--json"]) == 0
    text, flat, same = json.loads(capsys.readouterr().out)["sources"]
    assert [one["key"] for one in (text, flat, same)] == ["data.mixture.0", "data.mixture.1", "data.eval.same"]
    assert [one["share"] for one in (text, flat, same)] == [0.75, 0.25, None]
    assert text["epochs"] == pytest.approx(75 / text["about"]["samples"]) and flat["epochs"] == 25 / flat["about"]["samples"]
    assert (text["about"]["documents"], flat["about"]["documents"], text["about"]["files"]) == (40, None, 1)
    assert text["about"] == same["about"] and text["bytes_per_token"] == pytest.approx(22 * 40 / text["about"]["tokens"])
    assert text["sample"] in "<|end|>".join(TEXTS) and "loss" in flat["sample"] and flat["bytes_per_token"] is None
    assert main(["data", "inspect", str(run_file), "train.steps=20"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6
    assert lines[0].startswith(f"data.mixture.0 = {run_file.parent}/a.jsonl (text): files 1, documents 40, tokens ")
    assert "share 75.000%, epochs in 20 steps " in lines[0] and lines[1].startswith("  '") and "share" not in lines[4]


def test_a_path_is_inspected_without_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("a long enough text, " * 30)
    assert main(["data", "inspect", str(tmp_path / "a.txt"), "data.seq_len=16"]) == 0
    counts, sample = capsys.readouterr().out.splitlines()
    assert "documents 1, tokens 601, blocks 1, samples 35, held-out samples 1, bytes per token 1.00" in counts and "share" not in counts
    assert sample.strip("' ") in "a long enough text, " * 30
    assert main(["data", "inspect", f"{tmp_path}/none.parquet"]) == 2
    assert "data.corpus = " in (said := capsys.readouterr().err) and "none.parquet: no such file" in said and said.count("\n") == 1


def test_answers_of_chat_data_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    write_folder(tmp_path / "model")
    rows = write_rows(tmp_path / "a.jsonl", [{"prompt": "a question", "completion": "yes"}, {"prompt": "a", "completion": ""}] * 20)
    assert main(["data", "inspect", rows, "data.format=chat", f"data.tokenizer={tmp_path}/model/tokenizer.json", "data.seq_len=8"]) == 0
    counts, sample = capsys.readouterr().out.splitlines()
    assert "documents 40, rows without answer 20, tokens " in counts and ", answer tokens 40, " in counts
    assert "yes<|im_end|>" in sample


@pytest.mark.parametrize(
    "change",
    ["data.eval={same: {corpus: none.txt}}", "data.tokenizer=null", "data.mixture=[{corpus: none.bin}]", "data.document_mask=true"],
)
def test_the_errors_are_those_of_a_run(change: str, run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BadInput) as caught:
        preflight.foresee(load_config(run_file, [change]))
    assert main(["data", "inspect", str(run_file), change]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.removeprefix("vescale-ray: ").strip() == str(caught.value)


@pytest.mark.parametrize("rule", ["train.early_stop={patience: 1}", "checkpoint={keep_best: 1, keep_metric: heldout_loss}"])
def test_rules_need_a_heldout_sample(rule: str, tmp_path: Path) -> None:
    corpus = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    given = [f"data.corpus={corpus}", f"run.dir={tmp_path}", "data.seq_len=64", "train.eval_every=1", rule]
    preflight.foresee(load_config(None, [*given, "data.heldout=0.2"]))
    with pytest.raises(BadInput, match=r"with data.heldout = 0.05: the data has 14 samples and none to hold out"):
        preflight.foresee(load_config(None, given))
