"""Links in folders of data, as a downloaded data set of the Hugging Face Hub has them, count as the files and folders that they lead to."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data.sources import keys, train_tokenizer, write_jsonl
from vescale_ray.config import parse_config
from vescale_ray.controller.driver.preflight import absolute
from vescale_ray.data.dataset_loading import load_dataset
from vescale_ray.data.sources.files import find_files
from vescale_ray.errors import BadInput


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """A snapshot of the hub's cache: each file is a link to a blob without a suffix."""
    blobs, folder = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    folder.mkdir(parents=True)
    train_tokenizer(blobs / "t", ["one two three"])
    (blobs / "c").write_text('{"eos_token": "<|end|>"}')
    write_jsonl(blobs / "data.jsonl", ["one two three"] * 50).rename(blobs / "d")
    for name, blob in {"tokenizer.json": "t", "tokenizer_config.json": "c", "data.jsonl": "d"}.items():
        (folder / name).symlink_to(f"../../blobs/{blob}")
    return folder


def test_a_linked_file_keeps_its_name(snapshot: Path) -> None:
    data = {"corpus": str(snapshot / "data.jsonl"), "tokenizer": str(snapshot / "tokenizer.json"), "seq_len": 4}
    found = absolute(parse_config({"data": data})).data
    assert (found.corpus, found.tokenizer) == (data["corpus"], data["tokenizer"])
    assert load_dataset(found).describe()["documents"] == 50, "the suffix and the files beside the tokenizer are known"


def test_links_in_folders_and_globs_are_read(snapshot: Path, tmp_path: Path) -> None:
    write_jsonl(snapshot / "own.jsonl", ["four"])
    assert [one.name for one in find_files(str(snapshot / "*.jsonl"))] == ["data.jsonl", "own.jsonl"]
    (tmp_path / "all").mkdir()
    (tmp_path / "all" / "part").symlink_to(snapshot)
    for spec in ("all", "all/*/*.json*"):
        found = find_files(str(tmp_path / spec))
        names = ("data.jsonl", "own.jsonl", "tokenizer.json", "tokenizer_config.json")
        assert [one.name for one in found] == [f"part/{name}" for name in names]
        assert found[0].size == (snapshot / "data.jsonl").stat().st_size


def test_links_to_folders_of_text_are_read(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "a.txt").write_text("text " * 40)
    (tmp_path / "near").mkdir()
    (tmp_path / "near" / "b.txt").write_text("more " * 40)
    (tmp_path / "near" / "far").symlink_to("../far")
    assert load_dataset(keys(str(tmp_path / "near"), vocab=None)).describe()["files"] == 2


@pytest.mark.parametrize("target, what", [("nothing", "nothing"), (".", "a folder above it"), ("..", "a folder above it")])
@pytest.mark.parametrize("as_list", [False, True])
def test_a_link_that_leads_nowhere_is_named(target: str, what: str, as_list: bool, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.txt").write_text("text " * 40)
    (folder / ".lock").symlink_to("hidden links are left out")
    spec = [str(folder)] if as_list else str(folder)
    assert load_dataset(keys(spec, vocab=None)).describe()["files"] == 1
    (folder / "link").symlink_to(target)
    with pytest.raises(BadInput) as caught:
        load_dataset(keys(spec, vocab=None))
    said = f"{folder}/link is a link to {what}; remove it, or give a glob that leaves it out"
    assert str(caught.value) == f"data.corpus = {folder}: {said}"
    assert load_dataset(keys([str(folder / "*.txt")], vocab=None)).describe()["files"] == 1
