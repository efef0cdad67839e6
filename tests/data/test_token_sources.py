"""Every source gives the tokens that were written, in windows that do not overlap, for documents of random lengths."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.data.sources import (
    VOCAB,
    as_bytes,
    dataset,
    ended,
    random_rows,
    random_texts,
    samples,
    train_tokenizer,
    windows_of,
    write_ipc,
    write_jsonl,
    write_parquet,
)
from vescale_ray.data.block_dataset import block_tokens
from vescale_ray.data.dataset_loading import load_dataset
from vescale_ray.data.sources import document_files
from vescale_ray.data.sources.corpus import text_files
from vescale_ray.data.sources.files import find_files
from vescale_ray.errors import BadInput

LISTS = [pa.list_(pa.int32()), pa.large_list(pa.int64()), pa.list_(pa.uint16()), pa.list_(pa.field("x", pa.uint32(), nullable=False))]


def cut(rows: list[Any], size: int) -> list[list[Any]]:
    return [rows[i : i + size] for i in range(0, len(rows), size)]


@pytest.mark.parametrize("kind", LISTS, ids=str)
@pytest.mark.parametrize("end", [None, 7])
@pytest.mark.parametrize("seed", range(3))
def test_parquet_gives_the_written_tokens(kind: pa.DataType, end: int | None, seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    parts = []
    for name in ("a", "b"):
        rows, size = random_rows(rng, int(rng.integers(1, 300))), int(rng.integers(1, 60))
        rows = [[token for token in row if token != end] for row in rows]
        write_parquet(tmp_path / f"{name}.parquet", pa.array(rows, kind), size, write_statistics=seed != 2)
        parts += [ended(group, end) for group in cut(rows, size)]
    made = dataset(str(tmp_path), end_token=end)
    assert samples(made) == windows_of(parts, 64, 8)
    assert made.tokens == sum(map(len, parts))


def test_null_rows_are_empty_and_fixed_rows_work(tmp_path: Path) -> None:
    rows = [[1, 2, 3], None, [], [4, 5, 6, 7, 8, 9, 10]]
    write_parquet(tmp_path / "a.parquet", pa.array(rows, pa.list_(pa.int32())))
    assert samples(dataset(str(tmp_path), end_token=0)) == [[1, 2, 3, 0, 0, 0, 4, 5, 6]]
    fixed = pa.array([[i, i + 1, i + 2] for i in range(20)], pa.list_(pa.int32(), 3))
    write_parquet(tmp_path / "a.parquet", fixed)
    assert samples(dataset(str(tmp_path))) == windows_of([fixed.flatten().to_pylist()], 64, 8)


@pytest.mark.parametrize("magic, dtype", [(20240520, "<u2"), (20240801, "<u4")])
def test_files_of_llm_c_are_read_behind_their_header(magic: int, dtype: str, tmp_path: Path) -> None:
    header, tokens, path = np.zeros(256, "<i4"), np.arange(90), tmp_path / "a.bin"
    header[:3] = magic, 1, 90
    path.write_bytes(header.tobytes() + tokens.astype(dtype).tobytes())
    assert samples(dataset(str(path))) == windows_of([tokens.tolist()], 64, 8)
    path.write_bytes(header.tobytes() + tokens[:-1].astype(dtype).tobytes())
    with pytest.raises(BadInput, match="is truncated: its header tells 90 tokens, and"):
        dataset(str(path))


def test_files_of_alike_types_are_read_together(tmp_path: Path) -> None:
    rows = random_rows(np.random.default_rng(0), 90)
    kinds = (pa.list_(pa.int32()), pa.large_list(pa.int64()), pa.list_(pa.uint16()))
    for number, kind in enumerate(kinds):
        write_parquet(tmp_path / f"{number}.parquet", pa.array(rows[number::3], kind))
    parts = [ended(rows[number::3], None) for number in range(3)]
    assert samples(dataset(str(tmp_path))) == windows_of(parts, 64, 8)
    texts, folder = random_texts(np.random.default_rng(0), 60), tmp_path / "text"
    folder.mkdir()
    for number, text in enumerate((pa.string(), pa.large_string(), pa.binary())):
        write_parquet(folder / f"{number}.parquet", pa.array(texts[number::3], text))
    parts = [ended(as_bytes(texts[number::3]), 0) for number in range(3)]
    assert samples(dataset(str(folder))) == windows_of(parts, 64, 8)
    flat = tmp_path / "flat"
    flat.mkdir()
    for number, dtype in enumerate((np.uint16, np.int64)):
        np.save(flat / f"{number}.npy", np.arange(50, dtype=dtype))
    assert samples(dataset(str(flat))) == windows_of([list(range(50))], 64, 8) * 2


def test_null_texts_are_empty_in_each_format(tmp_path: Path) -> None:
    texts = ["one two three", None, "", "four five six seven"] * 3
    write_parquet(tmp_path / "a.parquet", pa.array(texts))
    write_jsonl(tmp_path / "a.jsonl", texts)
    for path in (tmp_path / "a.parquet", tmp_path / "a.jsonl"):
        made = dataset(str(path), end_token=0)
        assert samples(made) == windows_of([ended(as_bytes([text or "" for text in texts]), 0)], 64, 8)
        assert (made.describe()["documents"], made.describe()["documents_without_text"]) == (12, 3)


@pytest.mark.parametrize("pattern", ["*.npy", "part-?.npy", "**/*.npy"])
def test_globs_below_folders_with_brackets_are_read(pattern: str, tmp_path: Path) -> None:
    folder = tmp_path / "run [2024] *final*" / "tokens"
    folder.mkdir(parents=True)
    (tmp_path / "run 2").mkdir()
    np.save(folder / "part-1.npy", np.arange(50, dtype=np.uint16))
    np.save(tmp_path / "run 2" / "part-1.npy", np.arange(50, dtype=np.uint16))
    assert [(file.path, file.name) for file in find_files(f"{folder}/{pattern}")] == [(f"{folder}/part-1.npy", "part-1.npy")]
    assert len(samples(dataset(f"{folder}/{pattern}"))) == 6
    assert [file.name for file in find_files(f"{tmp_path}/run [2]/*.npy")] == ["run 2/part-1.npy"]


@pytest.mark.parametrize(
    "rows", [[[1, 2, 7], [3, 7], [7]], [[7, 1, 2], [], [7, 3]], [[1, 7, 2], [3], [4, 7, 5]]], ids=["last", "first", "any"]
)
@pytest.mark.parametrize("write", [write_parquet, write_ipc])
def test_token_ids_that_have_ends_get_no_others(rows: list[list[int]], write: Any, tmp_path: Path) -> None:
    path = write(tmp_path / ("a.parquet" if write is write_parquet else "a.arrow"), pa.array(rows * 9, pa.list_(pa.int32())), 4)
    made = dataset(str(path), end_token=7)
    assert made.end_token == 7 and samples(made) == windows_of([ended(rows * 9, None)], 64, 8)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("compression", [None, "zstd", "lz4"])
@pytest.mark.parametrize("text", [False, True])
def test_arrow_gives_the_written_tokens(stream: bool, compression: str | None, text: bool, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    rows = random_texts(rng, 170) if text else random_rows(rng, 170)
    column = pa.array(rows, pa.large_string() if text else pa.list_(pa.int32()))
    write_ipc(tmp_path / "a.arrow", column, 33, stream, compression)
    tokens = [ended(as_bytes(part) if text else part, 0) for part in cut(rows, 33)]
    assert samples(dataset(str(tmp_path / "*.arrow"), end_token=0)) == windows_of(tokens, 64, 8)


@pytest.mark.parametrize("kind", ["category", "view", "category beside"])
@pytest.mark.parametrize("source", ["parquet", "file", "stream"])
def test_text_may_be_categories_or_views(source: str, kind: str, tmp_path: Path) -> None:
    """pandas writes categories, and polars views."""
    texts = random_texts(np.random.default_rng(3), 120)
    plain = pa.array(texts)
    column = plain.dictionary_encode() if kind == "category" else plain.cast(pa.string_view()) if kind == "view" else plain
    path, other = tmp_path / f"a.{'parquet' if source == 'parquet' else 'arrow'}", pa.array(["a", "b"] * 60)
    table = pa.table({"other": other.dictionary_encode() if kind == "category beside" else other, "text": column})
    if source == "parquet":
        pq.write_table(table, path, row_group_size=50)
    else:
        with (pa.ipc.new_stream if source == "stream" else pa.ipc.new_file)(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=50)
    if source == "stream" and kind != "view":
        with pytest.raises(BadInput, match="is an Arrow stream with categories in the column .*; write it as an Arrow file or as Parquet"):
            dataset(str(path), vocab=None)
        return
    parts = [ended(as_bytes(part), 0) for part in cut(texts, 50)]
    assert samples(dataset(str(path), vocab=None)) == windows_of(parts, 64, 8)


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
@pytest.mark.parametrize("length", [9, 10, 16, 17, 64, 65, 66, 1000, 1025])
def test_flat_files_lose_no_token_between_blocks(dtype: str, length: int, tmp_path: Path) -> None:
    tokens = np.random.default_rng(length).integers(0, VOCAB, length).astype(dtype)
    expected = windows_of([tokens.tolist()], 1 << 40, 8)
    tokens.tofile(tmp_path / "a.bin")
    assert samples(dataset(str(tmp_path / "a.bin"), dtype=dtype)) == expected
    np.save(tmp_path / "a.npy", tokens)
    assert samples(dataset(str(tmp_path / "a.npy"))) == expected


@pytest.mark.parametrize("source", ["bin", "npy", "arrow"])
def test_a_file_that_becomes_shorter_ends_no_process(source: str, tmp_path: Path) -> None:
    """Blocks in memory stay. Others are refused; a read from a mapped file would be a bus error."""
    tokens, path = np.random.default_rng(0).integers(0, VOCAB, 100_000).astype(np.uint16), tmp_path / f"a.{source}"
    if source == "arrow":
        write_ipc(path, pa.array(tokens.reshape(-1, 100).tolist(), pa.list_(pa.uint16())), 400, stream=True)
    else:
        tokens.tofile(path) if source == "bin" else np.save(path, tokens)
    made = dataset(str(path), least=40_000)
    first, last = made.batch([4990]), [made.num_samples - 1]
    os.truncate(path, 5000)
    assert torch.equal(made.batch([4990])[0], first[0])
    with pytest.raises(BadInput, match="truncated"):
        made.batch(last)


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64])
def test_npy_in_two_dimensions_is_read_row_by_row(dtype: Any, tmp_path: Path) -> None:
    table = np.random.default_rng(0).integers(0, 200, (30, 11)).astype(dtype)
    np.save(tmp_path / "a.npy", table)
    np.save(tmp_path / "b.npy", table[:2])
    expected = windows_of([table.flatten().tolist()], 1 << 40, 8) + windows_of([table[:2].flatten().tolist()], 1 << 40, 8)
    assert samples(dataset(str(tmp_path))) == expected


@pytest.mark.parametrize("source", ["parquet", "jsonl", "text"])
@pytest.mark.parametrize("chunk", [50, 1000, 1 << 20])
def test_text_as_bytes_ends_each_document_with_a_zero(source: str, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_files, "CHUNK", chunk)
    texts = random_texts(np.random.default_rng(2), 90)
    if source == "parquet":
        write_parquet(tmp_path / "a.parquet", pa.array(texts), 90)
    elif source == "jsonl":
        write_jsonl(tmp_path / "a.jsonl", texts)
    else:
        for number, text in enumerate(texts := [text + "x" for text in texts]):
            (tmp_path / f"{number:03}.txt").write_text(text)
    made = dataset([str(tmp_path)], vocab=None, least=1 << 30)
    assert samples(made) == windows_of([ended(as_bytes(texts), 0)], 1 << 30, 8)
    assert made.vocab == 256


def test_a_long_text_is_one_document_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_files, "CHUNK", 100)
    text = "\n".join(random_texts(np.random.default_rng(3), 50))
    (tmp_path / "a.txt").write_text(text)
    made = dataset([str(tmp_path / "a.txt")], vocab=None, least=1 << 30)
    assert samples(made) == windows_of([[*text.encode(), 0]], 1 << 30, 8)


@pytest.mark.parametrize("source", ["parquet", "arrow", "jsonl", "text"])
def test_a_tokenizer_gives_its_tokens_and_its_vocabulary(source: str, tmp_path: Path) -> None:
    texts = [text + "." for text in random_texts(np.random.default_rng(4), 120)]
    texts[::7] = [text + "<|end|>" for text in texts[::7]]
    tokenizer = train_tokenizer(tmp_path / "tokenizer.json", texts)
    data = tmp_path / "data"
    data.mkdir()
    if source == "text":
        for number, text in enumerate(texts):
            (data / f"{number:03}").write_text(text)
    elif source == "jsonl":
        write_jsonl(data / "a.jsonl", texts)
    elif source == "arrow":
        write_ipc(data / "a.arrow", pa.array(texts), 200)
    else:
        write_parquet(data / "a.parquet", pa.array(texts), 200)
    made = dataset(str(data), tokenizer=str(tmp_path / "tokenizer.json"), end_token="<|end|>", vocab=None, least=1 << 30)
    tokens = ended([tokenizer.encode(text.removesuffix("<|end|>")).ids for text in texts], tokenizer.token_to_id("<|end|>"))
    assert samples(made) == windows_of([tokens], 1 << 30, 8)
    assert made.vocab == tokenizer.get_vocab_size()


def test_a_tokenizers_own_settings_change_no_token(tmp_path: Path) -> None:
    """Truncation, padding and dropout in ``tokenizer.json`` would drop text, add tokens, and give other tokens in each read."""
    texts = ["shard worker ring step buddy loss plan " * 20] * 10
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    made = train_tokenizer(tmp_path / "tokenizer.json", texts)
    changes: dict[str, Any] = {"tokenizer": str(tmp_path / "tokenizer.json"), "end_token": "<|end|>", "vocab": None}
    plain = dataset(str(path), **changes)
    every = np.arange(plain.num_samples)
    made.enable_truncation(16)
    made.enable_padding(length=400)
    made.model.dropout = 0.5
    made.save(str(tmp_path / "tokenizer.json"))
    other = dataset(str(path), **changes)
    assert other.num_samples == plain.num_samples and torch.equal(other.batch(every)[0], plain.batch(every)[0])


def test_a_vocabulary_with_unused_ids_has_room_for_the_largest(tmp_path: Path) -> None:
    texts = ["shard worker ring step"] * 20
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    train_tokenizer(tmp_path / "tokenizer.json", texts)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    words = content["model"]["vocab"]
    words[max(words, key=words.__getitem__)] = 90_000
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    changes: dict[str, Any] = {"tokenizer": str(tmp_path / "tokenizer.json"), "end_token": "<|end|>"}
    made = dataset(str(path), vocab=None, **changes)
    assert made.vocab == 90_001 and int(made.batch(np.arange(made.num_samples))[0].max()) == 90_000
    with pytest.raises(BadInput, match="data.vocab = 5000: data.tokenizer has ids up to 90000; raise it"):
        dataset(str(path), vocab=5000, **changes)


def test_heldout_samples_are_the_last_ones_and_never_trained(tmp_path: Path) -> None:
    rows = random_rows(np.random.default_rng(5), 400)
    write_parquet(tmp_path / "a.parquet", pa.array(rows, pa.list_(pa.int32())), 20)
    all_of_them = samples(dataset(str(tmp_path)))
    made = dataset(str(tmp_path), heldout=0.3)
    assert samples(made) == all_of_them and made.heldout_samples == int(len(all_of_them) * 0.3)
    order = made.order(1)
    assert order.num_samples == made.num_samples
    assert sorted(order.ids(0, made.num_samples).tolist()) == list(range(made.num_samples))
    for ids in ([made.num_samples], [-1]):
        with pytest.raises(IndexError, match="there are"):
            made.batch(ids)


def test_files_are_ordered_by_name_and_may_move(tmp_path: Path) -> None:
    rng = np.random.default_rng(6)
    for folder in ("one", "two"):
        (tmp_path / folder / "sub").mkdir(parents=True)
    for name in ("b.parquet", "a.parquet", "sub/c.parquet"):
        column = pa.array(random_rows(rng, 60), pa.list_(pa.int32()))
        for folder in ("one", "two"):
            write_parquet(tmp_path / folder / name, column)
    (tmp_path / "one" / "_SUCCESS").write_text("")
    (tmp_path / "one" / ".hidden").write_text("x")
    first, second = dataset(str(tmp_path / "one")), dataset(f"file://{tmp_path}/two")
    assert first.identity() == second.identity() and samples(first) == samples(second)
    listed = [str(tmp_path / "two" / name) for name in ("a.parquet", "b.parquet", "sub/c.parquet")]
    assert samples(dataset(listed)) == samples(first)
    assert samples(dataset(str(tmp_path / "two" / "**" / "*.parquet"))) == samples(first)
    assert samples(dataset(listed[::-1])) != samples(first), "a list keeps its order"


@pytest.mark.parametrize(
    "change",
    [{"end_token": 3}, {"shuffle_blocks": 4}, {"column": "more"}],
    ids=lambda change: next(iter(change)),
)
def test_identity_names_the_key_that_differs(change: dict[str, Any], tmp_path: Path) -> None:
    rows = pa.array(random_rows(np.random.default_rng(7), 60), pa.list_(pa.int32()))
    pq.write_table(pa.table({"text": rows, "more": rows}), tmp_path / "a.parquet")
    before, after = dataset(str(tmp_path)).identity(), dataset(str(tmp_path), **change).identity()
    assert before.keys() == after.keys()
    assert f"data.{next(iter(change))}" in {key for key in before if before[key] != after[key]}


@pytest.mark.parametrize("source", ["parquet", "arrow", "bin", "npy", "jsonl"])
def test_other_content_is_another_identity(source: str, tmp_path: Path) -> None:
    rows, texts = random_rows(np.random.default_rng(8), 60), random_texts(np.random.default_rng(8), 60)

    def write() -> None:
        lists, flat = pa.array(rows, pa.list_(pa.int32())), np.array(ended(rows, None), dtype=np.uint16)
        match source:
            case "parquet":
                write_parquet(tmp_path / "a.parquet", lists)
            case "arrow":
                write_ipc(tmp_path / "a.arrow", lists)
            case "bin":
                flat.tofile(tmp_path / "a.bin")
            case "npy":
                np.save(tmp_path / "a.npy", flat)
            case _:
                write_jsonl(tmp_path / "a.jsonl", texts)

    write()
    before = dataset(str(tmp_path)).identity()
    assert dataset(str(tmp_path)).identity() == before
    rows[-1] = [*rows[-1][:-1], 5] if rows[-1] else [5]
    texts[-1] += "!"
    write()
    assert dataset(str(tmp_path)).identity() != before


def test_default_blocks_hold_a_million_tokens_and_many_samples() -> None:
    for seq_len in (1, 128, 1000, 8192, 131072):
        assert block_tokens(seq_len) % seq_len == 0 and block_tokens(seq_len) >= max(1 << 20, 64 * seq_len)


def test_a_data_set_with_default_blocks_reads_as_one_block(tmp_path: Path) -> None:
    rows = random_rows(np.random.default_rng(9), 500)
    write_parquet(tmp_path / "a.parquet", pa.array(rows, pa.list_(pa.int32())))
    from tests.data.sources import keys

    made = load_dataset(keys(str(tmp_path)))
    tokens, _ = made.batch(range(made.num_samples))
    assert tokens.flatten().tolist() == ended(rows, None)[: made.num_samples * 8]


def test_empty_modules_of_the_library_are_left_out() -> None:
    """So that the default corpus can be tokenized."""
    found = find_files("stdlib")
    assert len(found) > 300 and all(file.size for file in found)
    empty = {str(path) for path in text_files("stdlib")[1] if not path.stat().st_size}
    assert empty and not empty & {file.url for file in found}
