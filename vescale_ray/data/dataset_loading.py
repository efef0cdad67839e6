"""Load the data set that the configuration's section ``data`` names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import pyarrow as pa

from vescale_ray.config.data_section import DataSection
from vescale_ray.data.block_dataset import BlockDataset, block_tokens
from vescale_ray.data.dataset import Dataset
from vescale_ray.data.given_dataset import dataset_of
from vescale_ray.data.mixture import Mixture, check_unit
from vescale_ray.data.sources.chat_files import ChatLinesFile, ChatParquetFile
from vescale_ray.data.sources.corpus import VOCAB, load_corpus, text_files
from vescale_ray.data.sources.document_files import ArrowFile, JsonLinesFile, ParquetFile, TextFile
from vescale_ray.data.sources.files import DamagedData, DataFile, Skipped, find_files, is_glob
from vescale_ray.data.sources.token_files import TokenFile, open_bin, open_npy
from vescale_ray.data.text.chat import ChatEncoder, ChatTemplate
from vescale_ray.data.text.encoders import (
    ByteEncoder,
    Encoder,
    IdEncoder,
    TokenizerEncoder,
    end_token_beside,
    id_count,
    load_tokenizer,
    plain_type,
)
from vescale_ray.errors import BadInput

FORMATS = {
    ".bin": "bin",
    ".npy": "npy",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
}
"""Format of a file by its suffix; all others are text."""
_COMPRESSED = frozenset({".gz", ".zst", ".bz2", ".xz", ".zip", ".lz4", ".tar", ".tgz"})
_BINARY = frozenset({".npz", ".pt", ".pkl", ".safetensors", ".orc", ".avro"})
_NO_TEXT = _BINARY | {".json", ".csv", ".tsv"}
"""Suffixes of files that are probably not meant to be read as plain text, although they could be."""
_HEAD = 8000
"""First bytes of a file that are searched for a zero byte. A text file has none there; Git uses the same rule."""
T = TypeVar("T")
_OPENERS = 16
"""Threads that open the files of an object store, whose footers take two requests each."""


def load_dataset(keys: DataSection, least: int | None = None, given: Any = None) -> Dataset:
    """Open the data set, check its files and count their tokens.

    Args:
        least: minimum number of tokens of a block; None: :func:`vescale_ray.data.block_dataset.block_tokens`.
        given: an object of the caller that takes the place of files.

    Raises:
        BadInput: with one line, for the first thing that is wrong.
    """
    if given is not None:
        return dataset_of(given, keys)
    if keys.mixture is None:
        alone = _load(keys, keys.heldout, least)
        _reserve([alone], [1.0], keys)
        return alone
    weighted = [(f"data.mixture.{i}", one) for i, one in enumerate(keys.mixture) if one.weight > 0]
    sources = [_load_part(name, keys.of(one), keys.heldout, least) for name, one in weighted]
    made = Mixture(sources, [one.weight for _, one in weighted], [name for name, _ in weighted])
    _reserve(sources, made.shares.counts.tolist(), keys)
    return made


def load_eval_sets(keys: DataSection, trained: Dataset) -> dict[str, Dataset]:
    """Open the evaluation sets of ``data.eval``, by name. Nothing is held out, so all samples of a set are its training samples.

    Args:
        trained: the data set of the run.

    Raises:
        BadInput: with one line, for the first thing that is wrong. For example, a set's tokens are bytes and the run's are not.
    """
    keys = keys.model_copy(update={"damaged": "stop"})  # ranks must not evaluate on different samples
    sets = {name: _load_part(f"data.eval.{name}", keys.of(one), 0.0) for name, one in keys.eval.items()}
    check_unit([trained, *sets.values()], ["the training data", *(f"data.eval.{name}" for name in sets)])
    return sets


def _load_part(name: str, keys: DataSection, heldout: float, least: int | None = None) -> Dataset:
    """Open one of several sources. ``name``: its key, for messages."""
    try:
        return _load(keys, heldout, least)
    except BadInput as error:
        raise BadInput(f"{name}: {error}") from None


def _reserve(sources: Sequence[Dataset], shares: Sequence[float], keys: DataSection) -> None:
    """Divide ``data.readahead_mb`` between the sources that are read in blocks. Each gets memory for two windows, and its share of the
    rest."""
    blocks = [(source, share) for source, share in zip(sources, shares, strict=True) if isinstance(source, BlockDataset)]
    needed, memory = sum(source.needed for source, _ in blocks), keys.readahead_mb << 20
    if needed > memory:
        of_all = "" if len(blocks) == 1 else f" of each of {len(blocks)} sources"
        raise BadInput(
            f"data.readahead_mb = {keys.readahead_mb} is too little: two windows of data.shuffle_blocks = {keys.shuffle_blocks} "
            f"blocks{of_all} take {-(-needed >> 20)} MB; raise it, lower data.shuffle_blocks, or write smaller row groups"
        )
    for source, share in blocks:
        source.reserve(source.needed + int((memory - needed) * share / sum(share for _, share in blocks)))


def _load(keys: DataSection, heldout: float, least: int | None) -> Dataset:
    """Open one source, and hold out a fraction of it.

    Local text without a tokenizer is read into memory as bytes. Everything else is read in blocks. Token ids are counted from footers;
    text is read once, to count its tokens.
    """
    assert keys.corpus is not None
    if _is_plain_text(keys):
        assert isinstance(keys.corpus, str)
        _vocab_of_bytes(keys)
        return load_corpus(keys.corpus, keys.seq_len, heldout)
    skipped = Skipped() if keys.damaged == "skip" else None
    found = find_files(keys.corpus, skipped)
    name = keys.corpus if isinstance(keys.corpus, str) else ", ".join(keys.corpus)
    kind = kind_of(keys, name, found)
    encoders = Encoders(keys)
    least = least or block_tokens(keys.seq_len)
    opened = _opened(found, _opener(kind, keys, encoders, -(-least // keys.seq_len) * keys.seq_len), skipped)
    return BlockDataset(
        opened,
        name=name,
        seq_len=keys.seq_len,
        heldout=heldout,
        vocab=encoders.vocab,
        window=keys.shuffle_blocks,
        least=least,
        keys=encoders.identity,
        end_token=encoders.end if kind != "chat" else None,
        skipped=skipped,
    )


def _opened(found: Sequence[DataFile], work: Callable[[DataFile], TokenFile], skipped: Skipped | None) -> list[TokenFile]:
    """Open the files, with all damage in the order of the files in ``skipped``, unless that is None.

    Raises:
        BadInput: no file can be used.
    """
    if skipped is None:
        return in_threads(found, work)

    def tried(file: DataFile) -> TokenFile | DamagedData:
        try:
            return work(file)
        except DamagedData as error:
            return error

    opened = list[TokenFile]()
    for one in in_threads(found, tried):
        if isinstance(one, DamagedData):
            skipped.file(one)
            continue
        opened.append(one)
        for count, errors in getattr(one, "damaged_lines", {}).values():
            skipped.lines(count, errors)
    if not opened:
        raise BadInput(f"data.corpus: no file is left; {skipped.texts[0]}")
    return opened


def _is_plain_text(keys: DataSection) -> bool:
    """Return whether the data is local text that is read as bytes. Raises BadInput if the files of a folder have several formats."""
    spec = keys.corpus
    if not isinstance(spec, str) or "://" in spec or keys.tokenizer is not None or keys.format not in ("auto", "text"):
        return False
    if keys.end_token is not None:  # in memory a zero ends each document
        return False
    if spec == "stdlib":
        return True
    if is_glob(spec) and not Path(spec).expanduser().exists():
        return False
    files = [(path.name, str(path)) for path in text_files(spec)[1]]
    _refuse_compressed(spec, files)
    if keys.format == "auto" and files and _format_of(spec, files) != "text":
        return False
    if keys.format == "auto":
        _refuse_binary(spec, ((path, _head_of(path)) for _, path in files))
    return True


def kind_of(keys: DataSection, name: str, found: Sequence[DataFile]) -> str:
    """Return the format of files. Raises BadInput if the files have several formats, or one file is compressed."""
    files = [(file.name, file.url) for file in found]
    _refuse_compressed(name, files)
    kind = keys.format if keys.format != "auto" else _format_of(name, files)
    if kind == "text" and keys.format == "auto" and keys.corpus != "stdlib":
        _refuse_binary(name, ((file.url, file.read(0, min(_HEAD, file.size))) for file in found))
    return kind


def _refuse_compressed(spec: str, files: Sequence[tuple[str, str]]) -> None:
    packed = next((path for name, path in files if PurePosixPath(name).suffix.lower() in _COMPRESSED), None)
    if packed is not None:
        raise BadInput(f"data.corpus = {spec}: {packed} is compressed; decompress it, or write Parquet, which compresses its pages")


def _head_of(path: str) -> bytes:
    """Return the first bytes of a local file. Empty if the file can't be read; the reader of the text then raises the error."""
    try:
        with open(path, "rb") as file:
            return file.read(_HEAD)
    except OSError:
        return b""


def _refuse_binary(spec: str, heads: Iterable[tuple[str, bytes]]) -> None:
    """Refuse files that are not text and have no suffix of :data:`FORMATS`: pictures, or Parquet under another name."""
    binary = next((path for path, head in heads if b"\0" in head), None)
    if binary is not None:
        raise BadInput(
            f"data.corpus = {spec}: {binary} has zero bytes, so it is not text; give a glob that leaves it out, write it as UTF-8 if it is "
            "UTF-16, or set data.format to what it is"
        )


def _format_of(spec: str, files: Sequence[tuple[str, str]]) -> str:
    """Return the format that the suffixes of ``files`` have in common. ``files``: names and paths.

    Raises:
        BadInput: the files have several formats, or all have suffixes that no text file has.
    """
    first: dict[str, str] = {}
    for name, path in files:
        if not name.startswith("_"):
            first.setdefault(FORMATS.get(PurePosixPath(name).suffix.lower(), "text"), path)
    if len(first) > 1:
        (one, here), (other, there) = list(first.items())[:2]
        meant = PurePosixPath(there if one == "text" else here).suffix
        raise BadInput(
            f"data.corpus = {spec}: {here} is {one} by its suffix, but {there} is {other}; give a glob (*{meant}), or set data.format"
        )
    suffixes = {PurePosixPath(name).suffix.lower() for name, _ in files}
    if suffixes and suffixes <= _BINARY:
        raise BadInput(
            f"data.corpus = {spec}: {files[0][1]} is not text by its suffix; write token ids as .npy, or documents as Parquet or JSONL"
        )
    if suffixes and suffixes <= _NO_TEXT:
        raise BadInput(
            f"data.corpus = {spec}: {files[0][1]} would be read as plain text; set data.format to jsonl if each line is a JSON object, "
            "or to text to read it as it is, or write Parquet"
        )
    kind = next(iter(first), "text")
    binary = next((path for name, path in files if PurePosixPath(name).suffix.lower() in _BINARY), None)
    if kind == "text" and binary is not None:
        raise BadInput(f"data.corpus = {spec}: {binary} is not text by its suffix; give a glob that leaves it out, or set data.format")
    return kind


class Encoders:
    """The encoders that the configuration chooses, by the type of a column.

    Attributes:
        vocab: number of token ids.
        identity: values that identify the tokens, besides the files.
    """

    def __init__(self, keys: DataSection) -> None:
        self._keys = keys
        none: tuple[Any, str] = (None, "")
        self._tokenizer, self._digest = load_tokenizer(keys.tokenizer) if keys.tokenizer is not None else none
        smallest = id_count(self._tokenizer) if self._tokenizer is not None else 1
        self.vocab = keys.vocab or (smallest if self._tokenizer is not None else 0)
        if keys.vocab is not None and keys.vocab < smallest:
            raise BadInput(f"data.vocab = {keys.vocab}: data.tokenizer has ids up to {smallest - 1}; raise it, or leave it out")
        self._named = keys.end_token
        self.end = self._end(self._named)
        self.identity = {"data.column": keys.column, "data.tokenizer": self._digest, "data.end_token": str(self.end)}

    def _end(self, given: str | None) -> int | None:
        if given is None or given.isdecimal():
            return None if given is None else int(given)
        if self._tokenizer is None:
            raise BadInput(f"data.end_token = {given}: give the token's number, as there is no data.tokenizer to look up a name")
        found = self._tokenizer.token_to_id(given)
        if found is None:
            special = [token.content for token in self._tokenizer.get_added_tokens_decoder().values() if token.special]
            raise BadInput(f"data.end_token = {given}: data.tokenizer has no such token; its special tokens are {', '.join(special[:20])}")
        return int(found)

    def ids(self, what: str) -> IdEncoder:
        """Return the encoder of token ids. ``what``: the data, for the message."""
        if not self.vocab:
            raise BadInput(f"{what} holds token ids: set data.vocab to the number of tokens, or data.tokenizer to the file that made them")
        self._check_end()
        return IdEncoder(self.vocab, self.end)

    def text(self, what: str = "text") -> Encoder:
        """Return the encoder of text. ``what``: the text, for the message."""
        if self._tokenizer is None:
            self.vocab = _vocab_of_bytes(self._keys, what)
            self._check_end()
            self.end = self.end or 0
            return ByteEncoder(self.vocab, self.end)
        if self.end is None:
            assert self._keys.tokenizer is not None
            self._named = end_token_beside(self._keys.tokenizer)
            self.end = self._end(self._named)
            self.identity["data.end_token"] = str(self.end)
        if self.end is None:
            raise BadInput("data.end_token = null: data.tokenizer needs the token that ends a document, for example <|endoftext|>")
        self._check_end()
        return TokenizerEncoder(self._tokenizer, self.vocab, self.end, self._digest)

    def chat(self) -> ChatEncoder:
        """Return the encoder of fine-tuning rows."""
        if self._tokenizer is None or self._keys.tokenizer is None:
            raise BadInput("data.format = chat: there is no tokenizer; set data.tokenizer to the tokenizer.json of the model")
        last = self.text().end
        assert last is not None
        added = self._tokenizer.get_added_tokens_decoder().values()
        template = ChatTemplate(self._keys.tokenizer, [token.content for token in added if token.special])
        encoder = ChatEncoder(self._tokenizer, self.vocab, last, template)
        self.identity["data.format"] = encoder.identity
        return encoder

    def _check_end(self) -> None:
        if self.end is not None and self.end >= self.vocab:
            where = "" if self._keys.end_token else f", from the files beside {self._keys.tokenizer}"
            raise BadInput(f"data.end_token = {self._named}{where}: is not below the vocabulary's size, {self.vocab}; set another token")

    def of(self, file: DataFile, kind: pa.DataType) -> Encoder:
        """Return the encoder of a column's type."""
        types, kind = pa.types, plain_type(kind)
        if types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind) or types.is_large_binary(kind):
            return self.text(f"text of {file.url}")
        if (types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)) and types.is_integer(kind.value_type):
            return self.ids(f"data.column = {self._keys.column}: {file.url}")
        raise BadInput(f"data.column = {self._keys.column}: {file.url} holds {kind} there; give a column of text or of lists of token ids")


def _vocab_of_bytes(keys: DataSection, what: str = "text") -> int:
    if keys.vocab is not None and keys.vocab < VOCAB:
        raise BadInput(
            f"data.vocab = {keys.vocab}: {what} without data.tokenizer is bytes, with {VOCAB} tokens; set data.tokenizer, or {VOCAB} or "
            "more. Lists of token ids belong in Parquet, .npy or .bin"
        )
    return keys.vocab or VOCAB


def _opener(kind: str, keys: DataSection, encoders: Encoders, step: int) -> Callable[[DataFile], TokenFile]:
    match kind:
        case "parquet":
            return lambda file: ParquetFile(file, keys.column, encoders.of)
        case "arrow":
            return lambda file: ArrowFile(file, keys.column, encoders.of)
        case "chat":
            rows = encoders.chat()
            return lambda file: _open_chat(file, rows)
        case "jsonl" | "text":
            encoder = encoders.text()
            return lambda file: JsonLinesFile(file, keys.column, encoder) if kind == "jsonl" else TextFile(file, encoder)
    vocab = encoders.ids(f"data.corpus = {keys.corpus}").vocab
    if keys.end_token is not None and not keys.document_mask:
        raise BadInput(f"data.end_token = {keys.end_token}: .{kind} files hold their documents' ends already; leave it out")
    return lambda file: open_bin(file, keys.dtype, step, vocab) if kind == "bin" else open_npy(file, step, vocab)


def _open_chat(file: DataFile, encoder: ChatEncoder) -> TokenFile:
    kind = FORMATS.get(PurePosixPath(file.name).suffix.lower(), "jsonl")
    if kind not in ("jsonl", "parquet"):
        raise BadInput(f"data.format = chat: {file.url} is {kind} by its suffix; give rows as JSONL or Parquet")
    return ChatParquetFile(file, encoder) if kind == "parquet" else ChatLinesFile(file, encoder)


def in_threads(found: Sequence[DataFile], work: Callable[[DataFile], T]) -> list[T]:
    """Do ``work`` for each file, in order. Files of an object store are processed several at a time."""
    if all(file.is_local for file in found):
        return [work(file) for file in found]
    with ThreadPoolExecutor(_OPENERS) as pool:
        return list(pool.map(work, found))
