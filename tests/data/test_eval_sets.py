"""Evaluation sets: their samples, bytes of text per token, and one line for each mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tests.data.sources import VOCAB, keys, random_rows, random_texts, samples, train_tokenizer, write_ipc, write_jsonl, write_parquet
from vescale_ray.data.block_dataset import BlockDataset
from vescale_ray.data.dataset_loading import load_dataset, load_eval_sets
from vescale_ray.data.sources import document_files
from vescale_ray.errors import BadInput

IDS = pa.list_(pa.int32())


@pytest.fixture
def ids(tmp_path: Path) -> str:
    return str(write_parquet(tmp_path / "ids.parquet", pa.array(random_rows(np.random.default_rng(0), 90), IDS)))


def opened(corpus: str, sets: dict[str, Any], **changes: Any) -> Any:
    section = keys(corpus, eval=sets, **changes)
    return load_eval_sets(section, load_dataset(section, least=64))


def refused(corpus: str, sets: dict[str, Any], **changes: Any) -> str:
    with pytest.raises(BadInput) as caught:
        opened(corpus, sets, **changes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_all_samples_of_a_set_are_evaluated(ids: str, tmp_path: Path) -> None:
    flat = np.random.default_rng(1).integers(0, VOCAB, 500).astype(np.uint32)
    flat.tofile(tmp_path / "more.bin")
    found = opened(ids, {"same": {"corpus": ids}, "more": {"corpus": str(tmp_path / "more.bin"), "dtype": "uint32"}}, heldout=0.5)
    assert list(found) == ["same", "more"]
    assert found["same"].num_samples == len(samples(load_dataset(keys(ids)))) and found["same"].heldout_samples == 0  # type: ignore[arg-type]
    assert found["more"].batch(range(62))[0].flatten().tolist() == flat[:496].tolist()
    assert found["more"].bytes_per_token is None


def test_a_set_keeps_no_more_than_a_block_in_memory(ids: str) -> None:
    found = opened(ids, {"same": {"corpus": ids}})["same"]
    assert isinstance(found, BlockDataset)
    found.batch(range(found.num_samples))
    assert found.reader.held_bytes <= max(found.reader._sizes)


@pytest.mark.parametrize("source", ["jsonl", "parquet", "arrow", "text"])
def test_documents_and_bytes_of_text_are_counted(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_files, "CHUNK", 500)
    texts = [text + "." for text in random_texts(np.random.default_rng(4), 120)]
    tokenizer = train_tokenizer(tmp_path / "tokenizer.json", texts)
    path = tmp_path / f"a.{source}"
    if source == "jsonl":
        write_jsonl(path, texts)
    elif source == "text":
        texts = ["\n".join(texts)]
        path.write_text(texts[0])
    elif source == "parquet":
        write_parquet(path, pa.array(texts), 30)
    else:
        write_ipc(path, pa.array(texts), 30)
    changes = {"tokenizer": str(tmp_path / "tokenizer.json"), "end_token": "<|end|>", "vocab": None}
    found = opened(str(path), {"same": {"corpus": str(path)}}, **changes)["same"]
    size, tokens = sum(len(text.encode()) for text in texts), sum(len(tokenizer.encode(text).ids) + 1 for text in texts)
    assert found.bytes_per_token == pytest.approx(size / tokens)
    assert found.describe()["documents"] == len(texts)
    found.batch(range(found.num_samples))
    assert found.bytes_per_token == pytest.approx(size / tokens), "reading again counts nothing twice"


def test_bytes_are_one_per_token(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a text " * 50)
    lines = write_jsonl(tmp_path / "a.jsonl", ["some words"] * 20)
    found = opened(str(tmp_path / "a.txt"), {"text": {"corpus": str(tmp_path / "a.txt")}, "lines": {"corpus": str(lines)}}, vocab=None)
    assert [one.bytes_per_token for one in found.values()] == [1.0, 1.0]


def test_mistakes_in_a_set_name_it(ids: str, tmp_path: Path) -> None:
    lines = str(write_jsonl(tmp_path / "a.jsonl", ["some words"] * 20))
    assert refused(ids, {"wiki": {"corpus": f"{tmp_path}/none"}}).startswith(f"data.eval.wiki: data.corpus = {tmp_path}/none: no such file")
    assert refused(ids, {"w": {"corpus": ids, "column": "x"}}).startswith("data.eval.w: data.column = x: ")
    short = str(write_parquet(tmp_path / "short.parquet", pa.array([[1, 2]], IDS)))
    assert "data.eval.w: " in refused(ids, {"w": {"corpus": short}})
    assert refused(ids, {"w": {"corpus": lines}}).startswith("the training data holds token ids, but data.eval.w holds bytes: ")
