"""The corpus: its files, their order, the held-out part, and windows that cover the text without overlap."""

from __future__ import annotations

import hashlib
import math
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch

from vescale_ray.data.loss_units import bits_per_byte
from vescale_ray.data.sources.corpus import Corpus, CorpusError, load_corpus
from vescale_ray.errors import BadInput


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """200 files of 100 to 299 bytes in nested folders."""
    root = tmp_path / "text"
    for number in range(200):
        path = root / f"{number % 7}" / f"file{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes([number]) * 50 + f"text {number} ".encode() * 7 + b"x" * number)
    return root


@pytest.fixture(scope="module")
def stdlib() -> Corpus:
    return load_corpus("stdlib", 128, 0.05)


def test_windows_cover_the_text_once_with_next_byte_targets(folder: Path) -> None:
    corpus = load_corpus(str(folder), 16, 0.1)
    tokens, targets = corpus.batch(np.arange(corpus.num_samples))
    assert tokens.dtype == targets.dtype == torch.int64
    assert tokens.shape == targets.shape == (corpus.num_samples, 16)
    assert bytes(tokens.flatten().tolist()) == corpus.train[: corpus.num_samples * 16].tobytes()
    assert bytes(targets.flatten().tolist()) == corpus.train[1 : corpus.num_samples * 16 + 1].tobytes()
    assert 0 <= len(corpus.train) - 1 - corpus.num_samples * 16 < 16


def test_a_batch_has_the_samples_in_the_order_asked_for(folder: Path) -> None:
    corpus = load_corpus(str(folder), 10, 0.1)
    tokens, targets = corpus.batch([5, 0, 5])
    for row, sample in enumerate((5, 0, 5)):
        assert tokens[row].tolist() == list(corpus.train[sample * 10 : sample * 10 + 10])
        assert targets[row].tolist() == list(corpus.train[sample * 10 + 1 : sample * 10 + 11])
    held, _ = corpus.heldout_batch([1])
    assert held[0].tolist() == list(corpus.heldout[10:20])


@pytest.mark.parametrize("bad", [-1, 10**9])
def test_a_sample_that_does_not_exist_is_refused(folder: Path, bad: int) -> None:
    corpus = load_corpus(str(folder), 10, 0.1)
    with pytest.raises(IndexError, match="there are"):
        corpus.batch([0, bad])
    with pytest.raises(IndexError):
        corpus.heldout_batch([corpus.heldout_samples])


def test_every_byte_of_every_file_is_in_exactly_one_part(folder: Path) -> None:
    corpus = load_corpus(str(folder), 16, 0.2)
    contents = [path.read_bytes() for path in folder.rglob("*.txt")]
    parts = corpus.train.tobytes() + corpus.heldout.tobytes()
    assert len(parts) == corpus.bytes == sum(len(content) + 1 for content in contents)
    assert sorted(parts.split(b"\0")[:-1]) == sorted(b"\0".join(contents).split(b"\0"))
    assert (corpus.files, corpus.name) == (200, str(folder))


def test_each_files_own_hash_decides_if_it_is_held_out(folder: Path) -> None:
    before = load_corpus(str(folder), 16, 0.2)
    held = {path for path in folder.rglob("*.txt") if int(hashlib.sha256(path.read_bytes()).hexdigest(), 16) / 2**256 < 0.2}
    assert 20 < len(held) < 60
    assert before.heldout_files == len(held)
    assert all(path.read_bytes() in before.heldout.tobytes() for path in held)
    (folder / "0" / "aaa.txt").write_bytes(b"one more file, first in the order" * 3)
    after = load_corpus(str(folder), 16, 0.2)
    assert set(before.heldout.tobytes().split(b"\0")) <= set(after.heldout.tobytes().split(b"\0"))
    assert set(before.train.tobytes().split(b"\0")) <= set(after.train.tobytes().split(b"\0"))


def test_larger_fraction_holds_out_a_superset_of_files(folder: Path) -> None:
    small, large = load_corpus(str(folder), 16, 0.1), load_corpus(str(folder), 16, 0.4)
    assert set(small.heldout.tobytes().split(b"\0")) < set(large.heldout.tobytes().split(b"\0"))
    assert load_corpus(str(folder), 16, 0.0).heldout_samples == 0


def test_corpus_hash_depends_on_text_and_names_not_location(folder: Path, tmp_path: Path) -> None:
    first = load_corpus(str(folder), 16, 0.1)
    moved = tmp_path / "elsewhere"
    folder.rename(moved)
    again = load_corpus(str(moved), 16, 0.1)
    assert first.sha256 == again.sha256
    assert np.array_equal(first.train, again.train)
    path = moved / "3" / "file3.txt"
    path.write_bytes(path.read_bytes() + b"!")
    assert load_corpus(str(moved), 16, 0.1).sha256 != first.sha256
    path.rename(moved / "3" / "renamed.txt")
    assert len({first.sha256, load_corpus(str(moved), 16, 0.1).sha256}) == 2


def test_hidden_files_and_empty_files_are_left_out(folder: Path) -> None:
    before = load_corpus(str(folder), 16, 0.1)
    (folder / ".hidden").write_bytes(b"x" * 1000)
    (folder / ".git").mkdir()
    (folder / ".git" / "object").write_bytes(b"x" * 1000)
    (folder / "empty.txt").touch()
    assert load_corpus(str(folder), 16, 0.1).sha256 == before.sha256


def test_single_file_holds_out_its_end(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_bytes(bytes(range(256)) * 4)
    corpus = load_corpus(str(path), 8, 0.25)
    assert corpus.train.tobytes() + corpus.heldout.tobytes() == path.read_bytes() + b"\0"
    assert len(corpus.heldout) == 256
    assert (corpus.files, corpus.heldout_files) == (1, 1)


@pytest.mark.parametrize("kind", ["missing", "empty folder", "empty file", "only hidden", "too short"])
def test_corpus_without_text_is_refused_with_its_path(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "c"
    match kind:
        case "empty folder":
            path.mkdir()
        case "empty file":
            path.touch()
        case "only hidden":
            path.mkdir()
            (path / ".x").write_text("text")
        case "too short":
            path.write_text("a few words")
    with pytest.raises(CorpusError) as caught:
        load_corpus(str(path), 128, 0.05)
    assert f"data.corpus = {path}: " in str(caught.value) and "\n" not in str(caught.value)
    assert isinstance(caught.value, BadInput)


def test_stdlib_is_a_corpus_of_about_ten_megabytes(stdlib: Corpus) -> None:
    assert 5e6 < stdlib.bytes < 3e7
    assert stdlib.files > 300
    assert 0.01 < len(stdlib.heldout) / stdlib.bytes < 0.15
    assert b"def " in stdlib.heldout.tobytes()
    argparse = (Path(sysconfig.get_paths()["stdlib"]) / "argparse.py").read_bytes()
    assert (argparse in stdlib.train.tobytes()) != (argparse in stdlib.heldout.tobytes())
    assert stdlib.describe()["sha256"] == load_corpus("stdlib", 64, 0.05).sha256


def test_stdlib_unigram_entropy_is_4_to_5_2_bits_per_byte(stdlib: Corpus) -> None:
    counts = np.bincount(stdlib.train, minlength=256)
    p = counts[counts > 0] / counts.sum()
    assert 4.0 < float(-(p * np.log2(p)).sum()) < 5.2


def test_bits_per_byte_of_guessing_is_eight() -> None:
    assert bits_per_byte(math.log(256)) == pytest.approx(8.0)


@pytest.mark.parametrize(("seq_len", "fraction"), [(0, 0.1), (8, 1.0), (8, -0.1)])
def test_sizes_out_of_range_are_refused(seq_len: int, fraction: float) -> None:
    with pytest.raises(ValueError, match="="):
        load_corpus("stdlib", seq_len, fraction)
