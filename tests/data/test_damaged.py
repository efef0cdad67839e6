"""``data.damaged: skip``: damaged and missing files, row groups and lines are left out and counted, and all other samples stay."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.data.chats import write_folder, write_rows
from tests.data.slow_files import slow_files
from tests.data.sources import (
    VOCAB,
    as_bytes,
    dataset,
    ended,
    keys,
    random_rows,
    random_texts,
    samples,
    windows_of,
    write_jsonl,
    write_parquet,
)
from vescale_ray.config import parse_config
from vescale_ray.controller.driver import preflight
from vescale_ray.data.dataset_loading import load_dataset, load_eval_sets
from vescale_ray.data.loading_figures import figures_of, take_errors
from vescale_ray.data.sources.files import reason_of
from vescale_ray.data.text.chat import IGNORED
from vescale_ray.errors import BadInput

IDS = pa.list_(pa.int32())


def damage_page(path: Path, group: int) -> None:
    """Overwrite a part of the pages of the first column of a row group."""
    start = pq.read_metadata(path).row_group(group).column(0).data_page_offset + 40
    content = bytearray(path.read_bytes())
    content[start : start + 30] = b"\xff" * 30
    path.write_bytes(content)


def write_tokens(path: Path, seed: int = 0) -> list[list[int]]:
    """Write a file of 10 row groups of 20 rows, and return its rows."""
    rows = random_rows(np.random.default_rng(seed), 200)
    write_parquet(path, pa.array(rows, IDS), 20, compression="zstd")
    return rows


def test_files_that_can_not_be_opened_are_left_out(tmp_path: Path) -> None:
    rows = [write_tokens(tmp_path / f"{name}.parquet", seed) for seed, name in enumerate("abc")]
    (tmp_path / "b.parquet").write_bytes((tmp_path / "b.parquet").read_bytes()[:-9])
    (tmp_path / "d.parquet").write_bytes(b"")
    corpus = [str(tmp_path), str(tmp_path / "none.parquet")]
    made = dataset(corpus, damaged="skip", least=1)
    expected = [ended(one[i : i + 20], None) for one in (rows[0], rows[2]) for i in range(0, 200, 20)]
    assert samples(made) == windows_of(expected, 1, 8)
    assert (made.describe()["skipped_files"], made.describe()["skipped_records"]) == (3, 0)
    tree = {"run": {"dir": str(tmp_path)}, "data": {"corpus": corpus, "vocab": VOCAB, "damaged": "skip", "seq_len": 8, "heldout": 0.0}}
    first, *others = preflight.foresee(parse_config(tree)).warnings
    assert first == "data.corpus: 3 missing or damaged files and 0 damaged records are left out (data.damaged = skip)"
    assert [next(name for name in ("none", "b.parquet", "d.parquet") if name in one) for one in others] == [
        "none",
        "d.parquet",
        "b.parquet",
    ]
    assert all(one.startswith("data.corpus: left out: ") for one in others)


def test_a_damaged_row_group_has_no_targets_and_moves_no_sample(tmp_path: Path) -> None:
    write_tokens(tmp_path / "a.parquet")
    whole = dataset(str(tmp_path), least=1)
    every = np.arange(whole.num_samples)
    tokens, targets = whole.batch(every)
    damage_page(tmp_path / "a.parquet", 4)
    with pytest.raises(BadInput, match="row group 4 is damaged or truncated .*; write or download the file again"):
        dataset(str(tmp_path), least=1).batch(every)
    made = dataset(str(tmp_path), damaged="skip", least=1)
    assert made.num_samples == whole.num_samples and made.masked
    found, wanted = made.batch(every)
    lost = (wanted == IGNORED).any(dim=1)
    groups = np.searchsorted(made._starts, every, side="right") - 1
    assert lost.tolist() == (groups == 4).tolist() and (wanted[lost] == IGNORED).all() and (found[lost] == 0).all()
    assert torch.equal(found[~lost], tokens[~lost]) and torch.equal(wanted[~lost], targets[~lost])
    figures = figures_of(made)
    assert (figures["skipped_files"], figures["skipped_records"]) == (0, 20) and figures["read_bytes"] > 0
    (error,) = take_errors(made)
    assert f"{tmp_path}/a.parquet: row group 4 is damaged" in error and not take_errors(made)
    made.batch(every)
    assert figures_of(made)["skipped_records"] == 20, "each row group counts once"


def test_damage_is_told_in_the_same_words_before_a_run_and_in_it(tmp_path: Path) -> None:
    write_tokens(tmp_path / "a.parquet")
    damage_page(tmp_path / "a.parquet", 0)
    tree = {"run": {"dir": str(tmp_path)}, "data": {"corpus": str(tmp_path / "a.parquet"), "vocab": VOCAB, "damaged": "skip", "seq_len": 8}}
    _, told = preflight.foresee(parse_config(tree)).warnings[:2]
    made = dataset(str(tmp_path / "a.parquet"), damaged="skip", least=1)
    made.batch([0])
    assert take_errors(made) == [told] and told.startswith("data.corpus: left out: ")
    for attribute in ("names", "sources"):
        assert take_errors(SimpleNamespace(**{attribute: ["a", "b"]})) == [], "a caller's own Dataset may have such an attribute"


def test_damaged_lines_are_left_out(tmp_path: Path) -> None:
    texts = random_texts(np.random.default_rng(0), 90)
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    lines = path.read_text().splitlines()
    lines[3:3] = ["{", "[1]", '{"text": "half \\ud800"}']
    path.write_text("\n".join(lines))
    with pytest.raises(BadInput, match="line 4 is not JSON"):
        dataset(str(path), vocab=None)
    made = dataset(str(path), vocab=None, damaged="skip", least=1 << 30)
    assert samples(made) == windows_of([ended(as_bytes(texts), 0)], 1 << 30, 8)
    assert (made.describe()["documents"], made.describe()["skipped_records"]) == (90, 3)
    assert [next(n for n in (4, 5, 6) if f"line {n}" in error) for error in take_errors(made)] == [4, 5, 6]


def test_text_that_is_not_unicode_is_left_out(tmp_path: Path) -> None:
    write_folder(tmp_path / "model")
    tokenizer: dict[str, Any] = {"tokenizer": str(tmp_path / "model" / "tokenizer.json"), "vocab": None, "damaged": "skip"}
    for name, content in (("a.txt", b"some words " * 50), ("b.txt", b"some w\xf6rds " * 50)):
        (tmp_path / name).write_bytes(content)
    parts = [pa.array([b"some words"] * 9, pa.binary()), pa.array([b"w\xf6rds"], pa.binary())]
    rows = [{"prompt": "a", "completion": "some words " * 9}, {"prompt": "a", "completion": "half \ud83d"}]
    for corpus, files, records, place in (
        (str(tmp_path / "*.txt"), 1, 0, "b.txt: row 0: is not UTF-8"),
        ([str(write_parquet(tmp_path / f"{n}.parquet", one)) for n, one in enumerate(parts)], 1, 0, "1.parquet: row 0: is not UTF-8"),
        (write_rows(tmp_path / "c.jsonl", rows), 0, 1, "c.jsonl: line 2: '\\ud83d' alone is not a character"),
    ):
        made = dataset(corpus, format="chat" if records else "auto", **tokenizer)
        assert (made.describe()["skipped_files"], made.describe()["skipped_records"]) == (files, records)
        (error,) = take_errors(made)
        assert place in error


def test_lines_damaged_later_have_no_targets_and_move_no_sample(tmp_path: Path) -> None:
    texts = random_texts(np.random.default_rng(0), 90)
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    made, whole = (dataset(str(path), vocab=None, damaged="skip", least=1, readahead_mb=1) for _ in range(2))
    every = np.arange(made.num_samples)
    tokens, targets = whole.batch(every)
    content = path.read_bytes()
    path.write_bytes(content[:-40] + b"}" * 39 + b"\n")
    found, wanted = made.batch(every)
    lost = (wanted == IGNORED).any(dim=1)
    assert lost[-1] and torch.equal(found[~lost], tokens[~lost]) and torch.equal(wanted[~lost], targets[~lost])
    (error,) = take_errors(made)
    assert "tokens stand where" in error and figures_of(made)["skipped_records"] > 0


@pytest.mark.parametrize("error", [MemoryError(), pa.ArrowMemoryError("no memory"), OSError(5, "Input/output error")])
def test_faults_of_one_machine_are_not_taken_for_damage(tmp_path: Path, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tokens(tmp_path / "a.parquet")
    made = dataset(str(tmp_path), damaged="skip", least=1)

    def fails(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", fails)
    with pytest.raises(type(error)) as caught:
        made.batch([0])
    assert caught.value is error and not take_errors(made)


def test_bytes_of_a_damaged_file_are_escaped_in_its_error() -> None:
    assert reason_of(ValueError("unknown type: \x0f\x1b[2J\n of a page. ")) == r"unknown type: \x0f\x1b[2J of a page"
    assert reason_of(OSError(2, "nichts unter /käse")) == "nichts unter /käse"


def test_evaluation_sets_must_be_whole(tmp_path: Path) -> None:
    write_tokens(tmp_path / "a.parquet")
    (tmp_path / "b.parquet").write_bytes(b"PAR1")
    section = keys(str(tmp_path / "a.parquet"), damaged="skip", eval={"own": {"corpus": str(tmp_path)}})
    with pytest.raises(BadInput, match=r"data.eval.own: .*b.parquet: its footer is damaged"):
        load_eval_sets(section, load_dataset(section))


def test_a_file_that_disappears_is_no_damage(tmp_path: Path) -> None:
    write_tokens(tmp_path / "a.parquet")
    content = {"/data/a.parquet": (tmp_path / "a.parquet").read_bytes(), "/data/b.parquet": (tmp_path / "a.parquet").read_bytes()}
    with slow_files(content) as system:
        stops, skips = (dataset("slow://data/*.parquet", damaged=policy, least=1) for policy in ("stop", "skip"))
        system().rm_file("/data/b.parquet")
        last = [stops.num_samples - 1]
        for one in (stops, skips):
            with pytest.raises(OSError, match="slow:///data/b.parquet: the file is gone; put it back"):
                one.batch(last)
        assert not (skips.batch([0])[1] == IGNORED).any() and not take_errors(skips)
        system().pipe_file("/data/b.parquet", content["/data/b.parquet"])
    local = dataset(str(tmp_path / "a.parquet"), least=1)
    (tmp_path / "a.parquet").unlink()
    with pytest.raises(OSError, match="a.parquet: the file is gone; put it back"):
        local.batch([0])


def test_nothing_left_and_wrong_settings_are_refused(tmp_path: Path) -> None:
    write_tokens(tmp_path / "a.parquet")
    changes: list[dict[str, Any]] = [{"column": "other"}, {"column": "none"}, {"vocab": 5}]
    for change in changes:
        with pytest.raises(BadInput):
            made = load_dataset(keys(str(tmp_path), damaged="skip", **change), least=1)
            made.batch(np.arange(made.num_samples))
    for content in (b"", b"PAR1"):
        (tmp_path / "a.parquet").write_bytes(content)
        for corpus in (str(tmp_path), [str(tmp_path)], [str(tmp_path / "none")], str(tmp_path / "none")):
            with pytest.raises(BadInput) as caught:
                dataset(corpus, damaged="skip")
            assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


def test_skip_has_no_effect_on_text_in_memory(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text " * 2000)
    tree = {"run": {"dir": str(tmp_path)}, "data": {"corpus": str(tmp_path), "damaged": "skip", "seq_len": 8, "heldout": 0.0}}
    told = "data.damaged = skip has no effect on data.corpus: it is held in memory, and damaged files end the run"
    assert told in preflight.foresee(parse_config(tree)).warnings
