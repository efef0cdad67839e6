"""Tokenizing beforehand: the files of a plan against a loop over the documents, and what happens to files that are there already."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.sources import ended, keys, random_texts, train_tokenizer, write_jsonl, write_parquet
from vescale_ray.cli import main
from vescale_ray.controller.driver.data_warnings import foreign_tokens
from vescale_ray.data.block_dataset import BlockDataset
from vescale_ray.data.dataset_loading import load_dataset
from vescale_ray.data.preparation import COLUMN, Preparation, begin, make, plan
from vescale_ray.data.sources.files import DataFile
from vescale_ray.errors import BadInput

TEXTS = random_texts(np.random.default_rng(3), 400)
TEXTS[250] += "<|end|>"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    made = train_tokenizer(folder / "tokenizer.json", TEXTS)
    made.path = str(folder / "tokenizer.json")
    return made


def planned(tokenizer: Any, corpus: Path | str | list[str], out: Path | str, count: int = 3, chunk: int = 300, **more: Any) -> Preparation:
    given = corpus if isinstance(corpus, list) else str(corpus)
    section = keys(given, vocab=None, tokenizer=tokenizer.path, **{"end_token": "<|end|>", **more})
    return plan(section, str(out), count, chunk)


def carried_out(made: Preparation) -> list[list[int]]:
    """The rows of all files of a plan, in order."""
    begin(made)
    done = [make(made, number) for number in range(len(made.pieces))]
    rows = [pq.read_table(Path(made.out) / made.name(one.number)).column(COLUMN).to_pylist() for one in done]
    assert [len(one) for one in rows] == [one.documents for one in done]
    assert [sum(map(len, one)) for one in rows] == [one.tokens for one in done]
    return [row for one in rows for row in one]


def write(kind: str, folder: Path) -> list[str]:
    """Sources of a kind in three files; returns their paths."""
    paths = [folder / f"{name}.{kind}" for name in "abc"]
    for number, path in enumerate(paths):
        texts = TEXTS[number::3]
        if kind == "jsonl":
            write_jsonl(path, texts)
        else:
            write_parquet(path, pa.array(texts), rows=30)
    return [str(path) for path in paths]


@pytest.mark.parametrize("count", [1, 3, 1000])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_rows_are_those_of_a_loop_over_the_documents(kind: str, count: int, tokenizer: Any, tmp_path: Path) -> None:
    made = planned(tokenizer, write(kind, tmp_path), tmp_path / "out", count)
    end = tokenizer.token_to_id("<|end|>")
    texts = [text.removesuffix("<|end|>") for number in range(3) for text in TEXTS[number::3]]
    assert carried_out(made) == [[*tokenizer.encode(text, add_special_tokens=False).ids, end] for text in texts]
    assert len(made.pieces) == count if count < 1000 else len(made.pieces) > 3, "no more files than pieces"


@pytest.mark.parametrize("chunk", [64, 300, 10_000_000])
def test_text_has_the_tokens_that_training_on_it_would_have(
    chunk: int, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vescale_ray.data.sources.document_files.CHUNK", chunk)
    for name, texts in (("a", TEXTS[:100]), ("b", ["x" * 500]), ("c", TEXTS[100:200])):
        (tmp_path / f"{name}.txt").write_text("\n".join(texts))
    given = {"tokenizer": tokenizer.path, "end_token": "<|end|>", "vocab": None}
    direct: Any = load_dataset(keys(f"{tmp_path}/*.txt", **given))
    rows = carried_out(planned(tokenizer, f"{tmp_path}/*.txt", tmp_path / "out", chunk=chunk))
    whole = [token for file in direct.files for part in range(len(file.counts)) for token in file.read(part).tolist()]
    assert ended(rows, None) == whole
    assert whole.count(tokenizer.token_to_id("<|end|>")) == 3


def test_output_trains_with_the_tokens_of_its_rows(tokenizer: Any, tmp_path: Path) -> None:
    rows = carried_out(planned(tokenizer, write("jsonl", tmp_path), tmp_path / "out"))
    data = load_dataset(keys(str(tmp_path / "out"), column=COLUMN, tokenizer=tokenizer.path, vocab=None))
    assert isinstance(data, BlockDataset) and data.tokens == sum(map(len, rows)) and data.describe()["documents"] == len(TEXTS)
    for end in ("<|end|>", "5"):  # for data.document_mask; a long text has rows without an end
        again: Any = load_dataset(keys(str(tmp_path / "out"), column=COLUMN, tokenizer=tokenizer.path, vocab=None, end_token=end))
        assert again.tokens == data.tokens and again.end_token is not None
    train_tokenizer(tmp_path / "other.json", ["other words"])
    assert not list(foreign_tokens(data, tokenizer.path)) and not list(foreign_tokens(data, None))
    (said,) = foreign_tokens(data, str(tmp_path / "other.json"))
    assert said.startswith(f"data.corpus: was prepared with another tokenizer.json than {tmp_path}/other.json; if their vocabularies")
    # The files' tokens follow each other in one block.
    assert data.batch([0, 1])[0].flatten().tolist() == ended(rows, None)[:16]


def contents(made: Preparation) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(made.out).iterdir()}


def test_files_are_the_same_in_any_order_and_kept(tokenizer: Any, tmp_path: Path) -> None:
    sources = write("parquet", tmp_path)
    made, other = planned(tokenizer, sources, tmp_path / "out"), planned(tokenizer, sources, tmp_path / "other")
    carried_out(made)
    begin(other)
    for number in (2, 0, 1):
        assert not make(other, number).kept
    before = contents(made)
    assert contents(other) == before and set(before) == {"_prepare.json", *(f"part-0000{n}-of-00003.parquet" for n in range(3))}
    begin(made)
    times = {path: path.stat().st_mtime_ns for path in Path(made.out).iterdir()}
    again = [make(made, number) for number in range(3)]
    assert all(one.kept and one.damaged is None for one in again) and sum(one.documents for one in again) == len(TEXTS)
    assert {path: path.stat().st_mtime_ns for path in Path(made.out).iterdir()} == times


@pytest.mark.parametrize("how", ["truncated", "emptied", "changed", "of another plan", "without proof"])
def test_damaged_file_is_made_anew(how: str, tokenizer: Any, tmp_path: Path) -> None:
    made = planned(tokenizer, write("jsonl", tmp_path), tmp_path / "out")
    carried_out(made)
    before, path = contents(made), Path(made.out) / made.name(1)
    (path.parent / f".{path.name}.left").write_bytes(b"by a process that was killed")
    content = path.read_bytes()
    match how:
        case "truncated":
            path.write_bytes(content[:-100])
        case "emptied":
            path.write_bytes(b"")
        case "changed":
            table = pq.read_table(path)
            rows = table.column(COLUMN).to_pylist()
            rows[5] = [1, *rows[5][1:]]
            pq.write_table(pa.table({COLUMN: pa.array(rows, table.schema.field(COLUMN).type)}, table.schema), path)
        case "of another plan":
            path.write_bytes((Path(made.out) / made.name(0)).read_bytes().replace(made.digest.encode(), b"0" * 64))
        case "without proof":
            pq.write_table(pa.table({"other": [1]}), path)
    done = make(made, 1)
    assert not done.kept and done.damaged is not None and done.damaged.startswith(str(path)) and "\n" not in done.damaged
    assert contents(made) == before


@pytest.mark.parametrize(
    ("change", "option"),
    [
        ({"tokenizer": True}, "--tokenizer = tokenizer [0-9a-f]{16}, now it is tokenizer [0-9a-f]{16}"),
        ({"end_token": "7"}, "--end-token = 0, now it is 7"),
        ({"column": "more"}, "--column = text, now it is more"),
        ({"count": 2}, "--shards = 3, now it is 2"),
        ({"corpus": 2}, "SOURCE = "),
    ],
    ids=["tokenizer", "end token", "column", "shards", "sources"],
)
def test_other_options_on_resume_are_refused_by_name(change: dict[str, Any], option: str, tokenizer: Any, tmp_path: Path) -> None:
    sources = write("jsonl", tmp_path)
    for path in map(Path, sources):
        path.write_text(path.read_text().replace('"text":', '"more": "a", "text":'))
    carried_out(planned(tokenizer, sources, tmp_path / "out"))
    if "tokenizer" in change:
        tokenizer = train_tokenizer(tmp_path / "other.json", TEXTS[:3])
        tokenizer.path = str(tmp_path / "other.json")
        change = {}
    if "corpus" in change:
        sources, change = sources[: change["corpus"]], {}
    with pytest.raises(BadInput, match=f"out: was begun with {option}") as refused:
        begin(planned(tokenizer, sources, tmp_path / "out", **change))
    assert "set it back, or give another --out" in str(refused.value)


def test_damaged_line_is_named_by_its_number_in_the_file(tokenizer: Any, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    lines = path.read_bytes().splitlines()
    lines[250] = b'{"text": '
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(BadInput, match=f"{path}: line 251 is not JSON"):
        carried_out(planned(tokenizer, path, tmp_path / "out"))
    assert not list((tmp_path / "out").glob(".*")), "nothing but finished files is left"


def test_a_wrong_field_is_found_before_ray_starts(tokenizer: Any, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    with pytest.raises(BadInput, match=f"data.column = words: {path}: line 1 has no such field; it has n, text"):
        planned(tokenizer, path, tmp_path / "out", column="words")


@pytest.mark.parametrize(
    ("name", "content", "more", "words"),
    [
        ("a.jsonl", b"", {}, "a.jsonl is empty; remove it"),
        ("a.jsonl", b'{"n": 1}\n', {}, "data.column = text: .*line 1 has no such field; it has n"),
        ("a.jsonl", b'{"text": 5}\n', {}, "line 1: the field is not text, but int"),
        ("a.txt", b"\xff\xfe", {}, "a.txt: row 0: is not UTF-8"),
        ("a.bin", b"ab", {}, "bin can't be prepared; give Parquet, JSONL or text"),
        ("a.jsonl", b"{}", {"format": "chat"}, "chat can't be prepared"),
        ("a.jsonl", b"{}", {"end_token": None}, "data.end_token = null: data.tokenizer needs the token that ends a document"),
        ("a.jsonl", b"{}", {"end_token": "<none>"}, "data.end_token = <none>: data.tokenizer has no such token"),
        ("a.jsonl.gz", b"ab", {}, "a.jsonl.gz is compressed; decompress it"),
        ("a.parquet", pa.table({"text": pa.array([], pa.string())}), {}, "a.parquet: holds no row; give files with documents"),
        ("a.parquet", b"PAR1PAR1", {}, "a.parquet: its footer is damaged or truncated"),
        ("a.parquet", pa.table({"text": [[1, 2]]}), {}, "holds token ids there, which need no preparation; give a column of text"),
        ("a.parquet", pa.table({"text": [1.5]}), {}, "holds double there; give a column of text"),
        ("a.parquet", pa.table({"words": ["a"]}), {}, "data.column = text: .* has no column of that name; it has words"),
    ],
)
def test_bad_sources_are_one_line(name: str, content: Any, more: dict[str, Any], words: str, tokenizer: Any, tmp_path: Path) -> None:
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    else:
        pq.write_table(content, tmp_path / name)
    with pytest.raises(BadInput, match=words) as refused:
        carried_out(planned(tokenizer, tmp_path / name, tmp_path / "out", **more))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("out", "words"), [("", "--out = '': give a folder"), ("nope://x", "--out nope://x: can't be used .Protocol not")])
def test_an_output_that_is_no_place_is_refused(
    out: str, words: str, tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sources, before = write("jsonl", tmp_path), sorted(tmp_path.iterdir())
    command = ["data", "prepare", *sources, "--tokenizer", tokenizer.path, "--end-token", "<|end|>", "--out", out]
    assert main(command) == 2
    assert re.search(words, capsys.readouterr().err) and sorted(tmp_path.iterdir()) == before


def test_folder_of_another_origin_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    sources = write("jsonl", tmp_path)
    (tmp_path / "out").mkdir()
    pq.write_table(pa.table({"x": [1]}), tmp_path / "out" / "x.parquet")
    with pytest.raises(BadInput, match="out: holds Parquet files of another origin; give another folder"):
        begin(planned(tokenizer, sources, tmp_path / "out"))
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(BadInput, match="file: can't be used .*; give a folder that every worker can write"):
        begin(planned(tokenizer, sources, tmp_path / "file"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "_prepare.json").write_text("{")
    with pytest.raises(BadInput, match="other: can't be used"):
        begin(planned(tokenizer, sources, tmp_path / "other"))


def test_url_of_an_object_store_holds_the_same_files(tokenizer: Any, tmp_path: Path) -> None:
    sources = write("jsonl", tmp_path)
    local, remote = planned(tokenizer, sources, tmp_path / "out"), planned(tokenizer, sources, "memory://prepared/out")
    carried_out(local)
    begin(remote)
    assert [make(remote, number).kept for number in (0, 1, 2, 0)] == [False, False, False, True]
    fs = fsspec.filesystem("memory")
    assert {name: fs.cat_file(f"/prepared/out/{name}") for name in contents(local)} == contents(local)
    begin(remote)
    fs.rm("/prepared", recursive=True)


def test_default_is_one_file_for_64_mib_of_text(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(plan(keys(write("jsonl", tmp_path), vocab=None, tokenizer=tokenizer.path, end_token="<|end|>"), "out").pieces) == 1
    monkeypatch.setattr(DataFile, "edges", lambda self: b"")
    system = SimpleNamespace(cat_file=lambda _, start, end: bytes(end - start))
    monkeypatch.setattr("vescale_ray.data.preparation.find_files", lambda _: [DataFile(system, "x", "x", "x.jsonl", 640 << 20)])
    large = plan(keys("x.jsonl", vocab=None, tokenizer=tokenizer.path, end_token="<|end|>"), "out")
    assert [len(pieces) for pieces in large.pieces] == [16] * 10
    assert json.dumps(dict(large.facts))
