"""Data that is left out, or hardly meant for training, begins the run with a warning."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.chats import write_folder
from tests.data.sources import train_tokenizer, write_jsonl, write_parquet
from vescale_ray.config import parse_config
from vescale_ray.controller.driver import preflight
from vescale_ray.errors import BadInput


def warned(path: Path, **data: Any) -> tuple[str, ...]:
    tree = {"run": {"dir": str(path.parent)}, "data": {"corpus": str(path), "seq_len": 8, "heldout": 0.0, **data}}
    return preflight.foresee(parse_config(tree)).warnings


def test_null_documents_are_told(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["some text for a run"] * 30 + [None] * 2)
    assert warned(path) == ("data.corpus: 2 of 32 documents are null, and count as empty ones",)


def test_rows_without_an_answer_are_told_with_their_roles(tmp_path: Path) -> None:
    write_folder(tmp_path / "model")
    path, tokenizer = tmp_path / "a.jsonl", str(tmp_path / "model" / "tokenizer.json")

    def rows(answer: str, count: int) -> str:
        talk = [{"role": "user", "content": "a question for it"}, {"role": answer, "content": "an answer to that"}]
        return f"{json.dumps({'messages': talk})}\n" * count

    path.write_text(rows("assistant", 30) + rows("gpt", 2))
    assert warned(path, format="chat", tokenizer=tokenizer, seq_len=32) == (
        "data.corpus: 2 of 32 rows are left out, since they have no answer of the role assistant, but messages of gpt",
    )
    (_, said) = warned(path, format="chat", tokenizer=tokenizer)
    assert re.match(r"data.corpus: a row has \d\d tokens on average, more than two samples of data.seq_len = 8, so many", said)
    path.write_text(rows("gpt", 3) + rows("human", 3))
    with pytest.raises(BadInput, match="no row has an answer to learn, but messages of gpt, human; give rows with a completion"):
        warned(path, format="chat", tokenizer=tokenizer)


def test_short_files_of_tokens_are_told(tmp_path: Path) -> None:
    for number in range(40):
        np.save(tmp_path / f"{number}.npy", np.arange(20 if number < 20 else 7))
    assert warned(tmp_path, vocab=20) == (
        "data.corpus: 220 of 540 tokens are in no sample, since each file is cut into samples of data.seq_len = 8 by itself; lower "
        "data.seq_len, or join the files",
    )
    assert warned(tmp_path, vocab=20, seq_len=1) == ()


def test_a_file_that_is_named_twice_is_told(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["some text for a run"] * 30)
    said = f"data.corpus: {path} is read several times, since several of its paths name it; give each file once"
    assert warned(path, corpus=[str(path), f"{tmp_path}/*.jsonl"]) == (said,)
    assert warned(path, corpus=[str(path)]) == ()


def test_data_for_another_purpose_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    for name in ("train-00000-of-00001", "test-00000-of-00001"):
        folder.mkdir(exist_ok=True)
        write_parquet(folder / f"{name}.parquet", pa.array(["some text for a run"] * 30))
    train, test = (f"{folder}/{name}-00000-of-00001.parquet" for name in ("train", "test"))
    splits = f"data.corpus: trains on files of other splits, too, such as {test}; if that is not meant, give a glob for those of train"
    assert warned(folder) == (splits,)
    assert warned(Path(f"{folder}/train*"), eval={"test": {"corpus": test}}) == ()
    said = f"data.eval.test: {test} is training data of data.corpus, too; give data that is not trained on"
    assert warned(folder, eval={"test": {"corpus": test}}) == (splits, said)
    (tmp_path / "a.txt").write_text("some text for a run\n" * 30)
    said = "data.eval.same: its text is training data of data.corpus, too; give data that is not trained on"
    assert warned(tmp_path / "a.txt", eval={"same": {"corpus": str(tmp_path / "a.txt")}}) == (said,)
    Path(test).rename(folder / "train-test-split.parquet")  # a part of train
    assert warned(folder) == ()
    ids = pa.array([[1, 2, 3]] * 60, pa.list_(pa.int32()))
    pq.write_table(pa.table({"input_ids": ids, "labels": ids}), train)
    assert warned(Path(train), column="input_ids", vocab=9) == (
        "data.corpus: the column labels is not read, so all tokens are learned; rows with data.format = chat learn answers only",
    )


def test_tests_of_source_code_are_no_split(tmp_path: Path) -> None:
    folder, tokenizer = tmp_path / "code", tmp_path / "tokenizer.json"
    train_tokenizer(tokenizer, ["some text for a run"] * 30)
    for name in ("train.py", "model.py", "test/run.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("some text for a run\n" * 30)
    keys = {"tokenizer": str(tokenizer), "end_token": "<|end|>"}
    assert warned(folder, **keys) == ()
    (folder / "model.py").unlink()
    assert "trains on files of other splits, too, such as" in warned(folder, **keys)[0]


def test_keys_that_no_file_needs_are_told(tmp_path: Path) -> None:
    text, tokens = tmp_path / "a.txt", tmp_path / "a.bin"
    text.write_text("some text for a run\n" * 30)
    tokens.write_bytes(np.arange(400, dtype=np.uint32).tobytes())
    column = "data.column = body has no effect: no file of the data has columns"
    dtype = "data.dtype = uint32 has no effect: it is the type of tokens in .bin files, of which the data has none"
    assert warned(text, column="body", dtype="uint32") == (column, dtype)
    assert warned(tokens, column="body", dtype="uint32", vocab=500) == (column,)
    lines = write_jsonl(tmp_path / "a.jsonl", ["some text for a run"] * 30)
    lines.write_text(lines.read_text().replace('"text"', '"body"'))
    assert warned(lines, column="body") == ()
