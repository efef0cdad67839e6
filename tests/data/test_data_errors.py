"""Every mistake in a data set is one line that names the file, and is found when the data set is opened, if it can be."""

from __future__ import annotations

import builtins
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.sources import dataset, keys, random_rows, train_tokenizer, write_ipc, write_jsonl, write_parquet
from vescale_ray.data.dataset_loading import load_dataset
from vescale_ray.errors import BadInput

IDS = pa.list_(pa.int32())


def refused(corpus: str | list[str] | Path, **changes: Any) -> str:
    """The message with which opening the data set, or reading all of it, is refused."""
    with pytest.raises(BadInput) as caught:
        made = load_dataset(keys(str(corpus) if isinstance(corpus, Path) else corpus, **changes), least=64)
        made.batch(np.arange(made.num_samples))
    text = str(caught.value)
    assert "\n" not in text and len(text) < 600
    return text


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    return write_parquet(tmp_path / "a.parquet", pa.array(random_rows(np.random.default_rng(0), 200), IDS), 20)


def test_missing_files_are_named(tmp_path: Path, parquet: Path) -> None:
    assert f"data.corpus = {tmp_path}/none: no such file or folder" in refused([str(tmp_path / "none")])
    assert "no file matches this glob" in refused(tmp_path / "*.arrow")
    (tmp_path / "empty").mkdir()
    assert "is empty" in refused([str(tmp_path / "empty")])
    assert "file://" in refused("file:///no/such/folder") and "no such file" in refused("file:///no/such/folder")
    assert f"{tmp_path}/none.parquet: no such file" in refused([str(parquet), str(tmp_path / "none.parquet")])


def test_empty_files_are_named(tmp_path: Path, parquet: Path) -> None:
    (tmp_path / "b.parquet").write_bytes(b"")
    assert f"{tmp_path}/b.parquet is empty" in refused(tmp_path)


def test_a_missing_column_is_refused_with_those_that_exist(tmp_path: Path, parquet: Path) -> None:
    said = refused(parquet, column="tokens")
    assert said == f"data.column = tokens: {parquet} has no column of that name; it has text, other"
    arrow = write_ipc(tmp_path / "a.arrow", pa.array([[1]], IDS))
    assert refused(arrow, column="tokens") == f"data.column = tokens: {arrow} has no column of that name; it has other, text"
    lines = write_jsonl(tmp_path / "a.jsonl", ["one", "two"])
    assert refused(lines, column="body") == f"data.column = body: {lines}: line 1 has no such field; it has n, text"


@pytest.mark.parametrize("kind", [pa.list_(pa.float32()), pa.int64(), pa.list_(pa.string()), pa.bool_()], ids=str)
def test_a_column_of_another_type_is_refused(kind: pa.DataType, tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", pa.nulls(3, kind))
    said = refused(path)
    assert said.startswith(f"data.column = text: {path} holds ") and said.endswith("give a column of text or of lists of token ids")


@pytest.mark.parametrize("source", ["parquet", "arrow"])
@pytest.mark.parametrize("bad", [1000, -1])
def test_a_token_outside_the_vocabulary_is_named_with_its_row(source: str, bad: int, tmp_path: Path) -> None:
    rows = random_rows(np.random.default_rng(1), 100)
    rows[57] = [5, bad, 5]
    write = write_parquet if source == "parquet" else write_ipc
    path = write(tmp_path / f"a.{source}", pa.array(rows, IDS), 20)
    told = "is not below the vocabulary's size, 1000" if bad > 0 else "is negative; give token ids, not labels"
    assert f"{path}: row 57: token {bad} {told}" in refused(path)


def test_a_large_token_in_any_row_group_is_found_at_once(tmp_path: Path) -> None:
    rows = random_rows(np.random.default_rng(1), 400)
    rows[257] = [5, 1000, 5]
    path = write_parquet(tmp_path / "a.parquet", pa.array(rows, IDS), 20)
    with pytest.raises(BadInput, match="row 257: token 1000 is not below"):
        dataset(str(path))


def test_a_token_outside_the_vocabulary_of_a_flat_file_is_named(tmp_path: Path) -> None:
    tokens = np.zeros(1000, dtype=np.uint16)
    tokens[777] = 1000
    tokens.tofile(tmp_path / "a.bin")
    assert f"{tmp_path}/a.bin: token 777: token 1000 is not below" in refused(tmp_path / "a.bin")
    np.save(tmp_path / "a.npy", tokens.reshape(100, 10))
    assert f"{tmp_path}/a.npy: row 77, column 7: token 1000" in refused(tmp_path / "a.npy")


def test_a_null_token_is_named(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", pa.array([[1] * 20, [1, None]], IDS))
    assert f"{path}: row 1: a token is null" in refused(path)


def test_files_of_different_types_are_refused(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", pa.array([[1] * 30], IDS))
    write_parquet(tmp_path / "b.parquet", pa.array(["text"]))
    held = f"{tmp_path}/a.parquet holds list<element: int32>, but {tmp_path}/b.parquet holds string"
    assert f"{held}; give files of text, or files of token ids" in refused(tmp_path)


def test_files_of_different_formats_are_refused(tmp_path: Path, parquet: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    said = refused(tmp_path)
    assert f"{parquet} is parquet by its suffix, but {tmp_path}/notes.txt is text" in said and "data.format" in said


@pytest.mark.parametrize("cut", [3, 100, 500])
def test_a_truncated_parquet_file_is_named(cut: int, tmp_path: Path, parquet: Path) -> None:
    parquet.write_bytes(parquet.read_bytes()[:-cut])
    assert refused(tmp_path).startswith(f"{parquet}: its footer is damaged or truncated (")


def test_a_damaged_page_is_named_with_its_row_group(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", pa.array(random_rows(np.random.default_rng(2), 200), IDS), 20, compression="zstd")
    chunk = pq.read_metadata(path).row_group(4).column(0)
    content = bytearray(path.read_bytes())
    middle = chunk.data_page_offset + 40
    content[middle : middle + 30] = b"\xff" * 30
    path.write_bytes(content)
    assert refused(path).startswith(f"{path}: row group 4 is damaged or truncated (")


def test_other_damaged_files_are_named(tmp_path: Path) -> None:
    path = write_ipc(tmp_path / "a.arrow", pa.array(random_rows(np.random.default_rng(3), 100), IDS))
    content = path.read_bytes()
    path.write_bytes(content[:-200])
    assert refused(path).startswith(f"{path}: its format is damaged or truncated (")
    path.write_bytes(b"no arrow file at all")
    assert refused(path).startswith(f"{path}: its format is damaged or truncated (")
    stream = write_ipc(tmp_path / "b.arrow", pa.array(random_rows(np.random.default_rng(3), 100), IDS), 20, stream=True)
    stream.write_bytes(stream.read_bytes()[:-300])
    assert refused(stream).startswith(f"{stream}: its format is damaged or truncated (")
    (tmp_path / "a.bin").write_bytes(b"12345")
    said = refused(tmp_path / "a.bin")
    assert said.endswith(
        "2, the size of data.dtype = uint16; it is truncated or of another type: write or download the file again, or set data.dtype"
    )
    np.save(tmp_path / "a.npy", np.zeros(100, np.uint16))
    (tmp_path / "a.npy").write_bytes((tmp_path / "a.npy").read_bytes()[:-20])
    assert f"{tmp_path}/a.npy is truncated: 308 bytes of 328; write or download the file again" in refused(tmp_path / "a.npy")
    (tmp_path / "a.npy").write_bytes(b"garbage" * 30)
    assert "is damaged or not a .npy file" in refused(tmp_path / "a.npy")
    for wrong in (np.zeros((3, 3, 3), int), np.zeros(9), np.zeros((3, 4), order="F", dtype=int), np.zeros(9, ">i4")):
        np.save(tmp_path / "a.npy", wrong)
        assert "give a 1-D or row-major 2-D array of little-endian integers" in refused(tmp_path / "a.npy")


def test_broken_lines_are_named_with_their_number(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for line, words in (
        ("{", "is not JSON"),
        ("[1]", "is not a JSON object"),
        ('{"text": 5}', "the field is not text, but int; name one that holds text"),
        ("\ufeff", "is not JSON"),
    ):
        path.write_text('{"text": "a"}\n\n{"text": "b"}\n' + line)
        said = refused(path)
        assert "line 4" in said and words in said and str(path) in said


def test_lines_that_python_reads_but_nobody_can_use_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for line, words in (
        ('{"text": "half \\ud800"}', "line 2: '\\ud800' alone is not a character"),
        ('{"text": ' + "[" * 10**5 + "]" * 10**5 + "}", "line 2 is not JSON"),
        (json.dumps({f"key{i}": 0 for i in range(10**4)}), "line 2 has no such field; it has key0, key1"),
    ):
        path.write_text('{"text": "a"}\n' + line)
        said = refused(path)
        assert words in said and str(path) in said


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "latin-1"])
def test_lines_in_another_encoding_than_utf8_are_named(tmp_path: Path, encoding: str) -> None:
    path, text = tmp_path / "a.jsonl", '{"text": "naïve words of several"}\n' * 9
    path.write_bytes(text.encode(encoding))
    place = "line 1 is not UTF-8; write the file as UTF-8" if encoding == "latin-1" else "is not UTF-8, but as if UTF-16; write it as UTF-8"
    assert refused(path, vocab=None) == f"{path}: {place}"
    assert refused(path, vocab=None, damaged="skip").endswith(f"{path}: {place}"), "all of it is left out"
    path.write_bytes(text.encode("utf-8-sig") * 2)
    assert dataset(str(path), vocab=None).describe()["documents"] == 18, "each part of joined files may begin with a mark"


def test_damaged_headers_and_offsets_are_named(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros(100, np.uint16))
    whole = (tmp_path / "a.npy").read_bytes()
    for damaged in (whole.replace(b")", b"(", 1), whole.replace(b"(100,)", b"(-10,)")):
        (tmp_path / "a.npy").write_bytes(damaged)
        assert "is damaged or not a .npy file" in refused(tmp_path / "a.npy")
    for column, changes in ((pa.array(["text"] * 50), {"vocab": None}), (pa.array([[7] * 4] * 50, IDS), {})):
        path = write_ipc(tmp_path / "a.arrow", column)
        content = path.read_bytes()
        offsets = np.arange(0, 204, 4, dtype=np.int32).tobytes()
        assert offsets in content
        for wild in (-4, 1 << 28):
            places = np.frombuffer(offsets, np.int32).copy()
            places[20] = wild
            path.write_bytes(content.replace(offsets, places.tobytes()))
            assert refused(path, **changes).startswith(f"{path}: record batch 0 is damaged or truncated (")


def test_a_damaged_footer_does_not_end_the_process(tmp_path: Path, parquet: Path) -> None:
    content = parquet.read_bytes()
    name = content.rindex(b"\x04text\x04list\x07element")  # the path of a column chunk
    kind = content.rindex(b"\x1c\x15\x02", 0, name) + 2  # its type
    parquet.write_bytes(content[:kind] + b"\x04" + content[kind + 1 :])
    assert refused(parquet).startswith(f"{parquet}: its footer is damaged or truncated (")


def test_a_name_that_is_no_text_is_named_as_damage(tmp_path: Path) -> None:
    path = write_ipc(tmp_path / "a.arrow", pa.array([[1] * 30], IDS))
    path.write_bytes(path.read_bytes().replace(b"text", b"\xfeext"))
    assert refused(path).startswith(f"{path}: its format is damaged or truncated (")


def test_columns_with_dots_in_their_names_are_not_confused(tmp_path: Path) -> None:
    table = pa.table({"text.raw": pa.array([[9]] * 50, IDS), "other": [{"text": 1}] * 50, "text": pa.array([[1, 2, 3]] * 50, IDS)})
    pq.write_table(table, tmp_path / "a.parquet")
    for column, first in (("text", [1, 2, 3, 1, 2, 3, 1, 2]), ("text.raw", [9] * 8)):
        made = dataset(str(tmp_path / "a.parquet"), column=column)
        assert sorted(made.batch(np.array([0]))[0][0].tolist())[::7] == sorted(first)[::7]


def test_text_that_is_not_utf8_is_refused_for_a_tokenizer(tmp_path: Path) -> None:
    train_tokenizer(tmp_path / "tokenizer.json", ["some words"])
    buffers = [pa.py_buffer(np.array([0, 4, 6], np.int32)), pa.py_buffer(b"fine\xff\xfe")]
    for column in (pa.array([b"fine", b"\xff\xfe"], pa.binary()), pa.StringArray.from_buffers(2, *buffers)):
        path = write_parquet(tmp_path / "a.parquet", column)
        said = refused(path, tokenizer=str(tmp_path / "tokenizer.json"), end_token="<|end|>", vocab=None)
        assert said == f"{path}: row 1: is not UTF-8; write it as UTF-8"


def test_keys_that_do_not_fit_the_data_are_refused(tmp_path: Path, parquet: Path) -> None:
    size = train_tokenizer(tmp_path / "tokenizer.json", ["some words"]).get_vocab_size()
    tokenizer = str(tmp_path / "tokenizer.json")
    assert "holds token ids: set data.vocab to the number of tokens" in refused(parquet, vocab=None)
    assert f"data.vocab = 5: data.tokenizer has ids up to {size - 1}" in refused(parquet, tokenizer=tokenizer, vocab=5)
    text = write_parquet(tmp_path / "b.parquet", pa.array(["text"]))
    said = refused(text, vocab=255)
    assert f"data.vocab = 255: text of {text} without data.tokenizer is bytes" in said
    assert "Lists of token ids belong in Parquet, .npy or .bin" in said
    assert "data.vocab = 255: text without data.tokenizer is bytes" in refused("stdlib", vocab=255)
    assert "needs the token that ends a document" in refused(text, tokenizer=tokenizer)
    assert "has no such token; its special tokens are <|end|>" in refused(text, tokenizer=tokenizer, end_token="</s>")
    assert "give the token's number" in refused(parquet, end_token="</s>")
    assert "data.end_token = 1000: is not below the vocabulary's size, 1000" in refused(parquet, end_token=1000)
    assert "data.end_token = 256: is not below the vocabulary's size, 256" in refused(text, vocab=None, end_token=256)
    np.zeros(100, np.uint16).tofile(tmp_path / "a.bin")
    assert "data.end_token = 5: .bin files hold their documents' ends already" in refused(tmp_path / "a.bin", end_token=5)


def test_a_wrong_tokenizer_is_refused(tmp_path: Path, parquet: Path) -> None:
    assert f"data.tokenizer = {tmp_path}/none.json: can't be read" in refused(parquet, tokenizer=str(tmp_path / "none.json"))
    (tmp_path / "wrong.json").write_text("{}")
    said = refused(parquet, tokenizer=str(tmp_path / "wrong.json"))
    assert f"data.tokenizer = {tmp_path}/wrong.json: is not a tokenizer.json (" in said and said.endswith("the package tokenizers wrote")


def test_text_that_a_tokenizer_can_not_encode_is_named(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({"known": 0, "<|end|>": 1}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    path = write_jsonl(tmp_path / "a.jsonl", ["known known"] * 5 + ["unknown"])
    said = refused(path, tokenizer=str(tmp_path / "tokenizer.json"), end_token="<|end|>", vocab=None)
    assert said == f"{path}: row 6: data.tokenizer can't encode it (WordLevel error: Missing [UNK] token from the vocabulary)"


def test_missing_extras_are_named(tmp_path: Path, parquet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] in ("tokenizers", "gcsfs"):
            raise ImportError(f"No module named {name!r}")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    for name in [name for name in sys.modules if name.split(".")[0] in ("tokenizers", "gcsfs")]:
        monkeypatch.delitem(sys.modules, name)
    assert "pip install 'vescale-ray[hf]'" in refused(parquet, tokenizer="tokenizer.json")
    said = refused("gs://bucket/a.parquet")
    assert (
        said.startswith("data.corpus = gs://bucket/a.parquet: the package of this file system is not installed; install it (")
        and "gcsfs" in said
    )
    assert "data.corpus = nope://x/a.parquet: can't be listed (Protocol not known: nope" in refused("nope://x/a.parquet")


def test_too_little_data_or_memory_is_refused(tmp_path: Path, parquet: Path) -> None:
    short = write_parquet(tmp_path / "b.parquet", pa.array([[1, 2]], IDS))
    assert "2 tokens in 1 file(s) give no training sample of data.seq_len = 8" in refused(short)
    rows = pa.array([np.zeros(100_000, np.int32)] * 40, IDS)
    large = write_parquet(tmp_path / "c.parquet", rows, 2)
    said = refused(large, readahead_mb=1, shuffle_blocks=2)
    assert "data.readahead_mb = 1 is too little: two windows of data.shuffle_blocks = 2 blocks take 2 MB" in said
    assert dataset(str(large), readahead_mb=1, shuffle_blocks=1, seq_len=1000, vocab=256).num_samples > 0


def test_compressed_files_are_refused_however_they_are_named(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl.gz"
    file.write_bytes(b"x" * 1000)
    for named in ([str(file)], file, tmp_path):
        assert f"{file} is compressed; decompress it" in refused(named, vocab=None)
        assert f"{file} is compressed; decompress it" in refused(named, vocab=None, format="text")


@pytest.mark.parametrize("suffix", ["json", "csv", "npz"])
def test_files_that_are_hardly_meant_as_text_are_refused(tmp_path: Path, suffix: str) -> None:
    file = write_jsonl(tmp_path / f"a.{suffix}", ["some words and more"] * 30)
    for named in ([str(file)], file, tmp_path):
        said = refused(named, vocab=None)
        remedy = "would be read as plain text; set data.format to jsonl if each line is a JSON object, or to text"
        assert f"{file} {'is not text by its suffix; write token ids as .npy' if suffix == 'npz' else remedy}" in said
    lines, text = (load_dataset(keys(str(file), vocab=None, format=one)) for one in ("jsonl", "text"))
    assert bytes(lines.batch(np.array([0]))[0][0].tolist()) == b"some wor"
    assert bytes(text.batch(np.array([0]))[0][0].tolist()).startswith(b"{")
    (tmp_path / "code.py").write_text("print()\n" * 9)
    if suffix == "npz":
        assert f"{file} is not text by its suffix; give a glob that leaves it out, or set data.format" in refused(tmp_path, vocab=None)
    else:
        assert load_dataset(keys(str(tmp_path), vocab=None)).num_samples > 0, "a folder of several kinds of text"


def test_documents_without_any_text_are_refused(tmp_path: Path) -> None:
    for path in (write_jsonl(tmp_path / "a.jsonl", [""] * 99), write_parquet(tmp_path / "a.parquet", pa.nulls(99, pa.string()))):
        assert refused(path, vocab=None) == f"data.corpus = {path}: all 99 documents are empty; give data with text in it"


def test_an_end_token_from_the_folder_is_named_with_it(tmp_path: Path) -> None:
    size = train_tokenizer(tmp_path / "tokenizer.json", ["some words"]).get_vocab_size()
    (tmp_path / "config.json").write_text('{"eos_token_id": 99999}')
    lines, tokenizer = write_jsonl(tmp_path / "a.jsonl", ["some words"] * 9), str(tmp_path / "tokenizer.json")
    assert refused(lines, vocab=None, tokenizer=tokenizer) == (
        f"data.end_token = 99999, from the files beside {tokenizer}: is not below the vocabulary's size, {size}; set another token"
    )


def test_lines_of_another_kind_get_a_remedy(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"messages": []}\n')
    assert refused(path, vocab=None).endswith("line 1 has no such field; it has messages; set data.format to chat for conversations")
    path.write_text('{"input_ids": [1, 2]}\n')
    said = refused(path, column="input_ids", vocab=None)
    assert said.endswith("line 1: the field is not text, but list; write token ids as Parquet, .npy or .bin")
    path.write_text('[{"text": "a"}]\n')
    assert refused(path, vocab=None).endswith("line 1 is not a JSON object; write one object a line")


def test_an_end_token_of_local_bytes_is_used(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some words\n" * 9)
    assert load_dataset(keys(str(tmp_path / "a.txt"), vocab=None, end_token="10")).end_token == 10
    assert "there is no data.tokenizer to look up a name" in refused(tmp_path / "a.txt", vocab=None, end_token="<|end|>")


@pytest.mark.parametrize("content", [b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "some text".encode("utf-16"), b"PAR1\x15\0" + b"x" * 90])
def test_files_that_are_no_text_are_refused(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(content * 9)
    (tmp_path / "more.txt").write_text("some text " * 9)
    for named in (file, tmp_path, [str(file)]):
        said = refused(named, vocab=None)
        assert f"{file} has zero bytes, so it is not text; give a glob that leaves it out, write it as UTF-8 if it is UTF-16, or" in said
    assert load_dataset(keys(str(file), vocab=None, format="text")).num_samples > 0, "who says that it is text is believed"


def test_wide_tokens_read_as_narrow_ones_are_refused(tmp_path: Path) -> None:
    file, ids = tmp_path / "a.bin", np.random.default_rng(0).integers(0, 128_256, 5000)
    ids.astype("<u4").tofile(file)
    said = f"{file}: every second token is below 4, as if they were uint32; set data.dtype to uint32"
    assert refused(file, vocab=128_256) == said
    assert dataset(str(file), dtype="uint32", vocab=128_256).num_samples == 5000 // 8 - 1
    ids.astype("<i8").tofile(file)  # every second uint32 would be token 0
    for dtype in ("uint16", "uint32"):
        said = f"{file}: every second word of 4 bytes is 0, as if its tokens were int64; write them as {dtype}"
        assert refused(file, vocab=128_256, dtype=dtype) == said
    for narrow in (ids % 4, ids % 1000):
        narrow.astype("<u2").tofile(file)
        assert dataset(str(file), vocab=1000).num_samples == 5000 // 8 - 1


def test_a_glob_for_the_files_that_are_meant_is_named(tmp_path: Path) -> None:
    write_ipc(tmp_path / "data-00000-of-00001.arrow", pa.array(["some text"] * 9), stream=True)
    (tmp_path / "state.json").write_text("{}")
    assert refused(tmp_path, vocab=None).endswith("give a glob (*.arrow), or set data.format")


def test_a_folder_that_a_glob_matches_is_named(tmp_path: Path) -> None:
    for folder in (tmp_path / "a.jsonl", tmp_path / "_logs", tmp_path / ".git"):
        folder.mkdir()
        write_jsonl(folder / "part-0.jsonl", ["some words"] * 9)
    for more in (False, True):
        said = refused(tmp_path / "*.jsonl", vocab=None)
        assert f"the glob matches the folder {tmp_path}/a.jsonl, but not its files; give **/* for the files in it, too, or" in said
        assert dataset(str(tmp_path / "**/*.jsonl"), vocab=None).describe()["files"] == 1 + more
        write_jsonl(tmp_path / "b.jsonl", ["some words"] * 9)


def test_token_ids_in_a_column_of_bytes_are_refused(tmp_path: Path) -> None:
    rows = [np.arange(5, 20, dtype=np.uint16).tobytes()] * 50
    for kind in (pa.binary(), pa.large_binary()):
        path = write_parquet(tmp_path / "a.parquet", pa.array(rows, kind))
        said = refused(path)
        assert said == f"{path}: the column of type {kind} has zero bytes, so it is not text; write token ids as lists of integers"
    dataset(str(write_parquet(tmp_path / "a.parquet", pa.array([b"text of another program"] * 50))))
