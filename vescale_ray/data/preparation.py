"""Tokenize documents beforehand: a plan of Parquet files, and the making of each. A file depends on the plan alone, not on who makes it.

The sources are cut into *pieces*: row groups of Parquet, and about 4 MiB of lines of JSONL and text. Each output file holds the tokens of
consecutive pieces, one row a document with its end token, in row groups of about a million tokens. A text file is one document; a piece of
it is a row, and the last one ends with the end token. A finished file holds a hash of its content and of the plan, and so proves itself.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from fsspec.implementations.local import LocalFileSystem

from vescale_ray.config.data_section import DataSection
from vescale_ray.data.block_dataset import BLOCK_TOKENS
from vescale_ray.data.dataset_loading import Encoders, in_threads, kind_of
from vescale_ray.data.sources.document_files import CHUNK, PREPARED, DocumentFile, JsonLinesFile, ParquetFile, TextFile, guarded
from vescale_ray.data.sources.files import DataFile, find_files, reason_of
from vescale_ray.data.text.encoders import BadDocument, Encoder, TokenizerEncoder
from vescale_ray.errors import BadInput

COLUMN = "input_ids"
"""Column of the output."""
PLAN = "_prepare.json"
"""Name of the file beside the output that records the plan."""
FILE_BYTES = 64 << 20
"""Bytes of text of an output file, unless their number is given."""
_SLICE = 4096
"""Documents that are encoded at a time."""
_STEP = 1 << 16
"""Bytes that are read at a time to find the end of a line."""


@dataclass(frozen=True)
class SourcePiece:
    """A part of a source file: a row group of Parquet, or the lines that begin in one chunk.

    Chunk ``number`` has :attr:`Preparation.chunk` bytes."""

    file: int
    number: int


@dataclass(frozen=True)
class Preparation:
    """The plan of the files to make.

    Attributes:
        keys: corpus, format, column, tokenizer and end token, as in the section ``data``.
        files: the sources.
        kind: their format: ``parquet``, ``jsonl`` or ``text``.
        pieces: the pieces of each output file.
        out: folder or URL of the output.
        facts: values that determine the output, by the option that changes each.
        chunk: bytes of a piece of lines.
    """

    keys: DataSection
    files: tuple[DataFile, ...]
    kind: str
    pieces: tuple[tuple[SourcePiece, ...], ...]
    out: str
    facts: Mapping[str, str]
    chunk: int = CHUNK

    @property
    def digest(self) -> str:
        """Hash of the values that determine the output."""
        return hashlib.sha256(json.dumps(self.facts, sort_keys=True).encode()).hexdigest()

    def name(self, number: int) -> str:
        """Return the name of an output file."""
        return f"part-{number:05d}-of-{len(self.pieces):05d}.parquet"


@dataclass(frozen=True)
class PreparedFile:
    """A finished output file. ``kept``: it existed before; ``damaged``: the reason for which an earlier file was replaced."""

    number: int
    documents: int
    tokens: int
    kept: bool = False
    damaged: str | None = None


def plan(keys: DataSection, out: str, count: int | None = None, chunk: int = CHUNK) -> Preparation:
    """Find the sources, read the footers of Parquet files, and cut the sources into pieces.

    Args:
        count: number of output files; None: one for each :data:`FILE_BYTES` of text. There are no more than pieces.

    Raises:
        BadInput: a source is missing, empty, or has no such column; or the tokenizer can't be used.
    """
    assert keys.corpus is not None
    files = find_files(keys.corpus)
    name = ", ".join([keys.corpus] if isinstance(keys.corpus, str) else keys.corpus)
    kind = kind_of(keys, name, files)
    if kind not in ("parquet", "jsonl", "text"):
        raise BadInput(f"data.corpus = {name}: {kind} can't be prepared; give Parquet, JSONL or text")
    encoders = Encoders(keys)
    encoder = encoders.text()
    if not isinstance(encoder, TokenizerEncoder):
        raise BadInput("data.tokenizer = null: there is nothing to prepare, as bytes of text are read as they are; give a tokenizer.json")
    sizes = _sizes(files, kind, keys, encoders, chunk)
    total, starts = sum(size for _, size in sizes), [0, *accumulate(size for _, size in sizes)]
    wanted = count if count is not None else max(1, -(-total // FILE_BYTES))
    groups: dict[int, list[SourcePiece]] = {}
    for (piece, size), start in zip(sizes, starts, strict=False):
        groups.setdefault((2 * start + size) * wanted // max(1, 2 * total), []).append(piece)
    if not groups:
        raise BadInput(f"data.corpus = {name}: holds no row; give files with documents")
    edges = in_threads(files, DataFile.edges)
    facts = {
        "SOURCE": hashlib.sha256(b"".join(f"{file.name} ".encode() + one for file, one in zip(files, edges, strict=True))).hexdigest()[:16],
        "--tokenizer": encoder.identity,
        "--end-token": str(encoder.end),
        "--column": keys.column if kind != "text" else "",
        "--format": kind,
        "--shards": str(wanted),
        "version": f"1 {chunk}",
    }
    return Preparation(keys, tuple(files), kind, tuple(map(tuple, groups.values())), out, facts, chunk)


def tokenizer_of(file: DataFile) -> str | None:
    """Return the identity of the tokenizer that made ``file``, by the plan beside it; None if it is not known."""
    try:
        found = json.loads(file.fs.cat_file(f"{file.path.rpartition('/')[0]}/{PLAN}")).get("--tokenizer")
    except Exception:  # most files have no plan beside them
        return None
    return found if isinstance(found, str) else None


def begin(made: Preparation) -> None:
    """Record the plan beside its output, or check that it is the one recorded there.

    Raises:
        BadInput: the folder can't be written, or it was begun with other sources or options.
    """
    try:
        fs, folder = fsspec.core.url_to_fs(made.out)
        path = f"{folder.rstrip('/')}/{PLAN}"
        fs.makedirs(folder, exist_ok=True)
        fs.invalidate_cache()
        if not fs.exists(path):
            if any(PurePosixPath(one).suffix == ".parquet" for one in fs.ls(folder, detail=False)):
                raise BadInput(f"--out {made.out}: holds Parquet files of another origin; give another folder")
            fs.pipe_file(path, json.dumps({**made.facts, "vocab": _encoder(made).vocab}, indent=1).encode())
            return
        known = json.loads(fs.cat_file(path))
    except (OSError, ValueError, ImportError) as error:
        if isinstance(error, BadInput):
            raise
        raise BadInput(f"--out {made.out}: can't be used ({reason_of(error)}); give a folder that every worker can write") from None
    for option, value in made.facts.items():
        if known.get(option) != value:
            raise BadInput(
                f"--out {made.out}: was begun with {option} = {known.get(option)}, now it is {value}; set it back, or give another --out"
            )


def make(made: Preparation, number: int) -> PreparedFile:
    """Make an output file, unless it exists and its content matches its hash.

    Raises:
        BadInput: a document is damaged; the message names the file and the place.
        OSError: the storage does not answer.
    """
    fs, folder = fsspec.core.url_to_fs(made.out)
    path = f"{folder.rstrip('/')}/{made.name(number)}"
    damaged = None
    if fs.exists(path):
        try:
            return _proven(made, number, DataFile(fs, path, path, made.name(number), int(fs.info(path)["size"])))
        except BadInput as error:
            damaged = str(error)
    local = isinstance(fs, LocalFileSystem)
    # A file system that moves files shows the whole file at once; an object store does so at the end of an upload.
    descriptor, temporary = tempfile.mkstemp(dir=folder if local else None, prefix=f".{made.name(number)}.")
    os.close(descriptor)
    try:
        documents, tokens = _write(made, number, temporary)
        if local:
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
            for left in Path(folder).glob(f".{made.name(number)}.*"):  # of a process that was killed
                left.unlink(missing_ok=True)
        else:
            fs.put_file(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return PreparedFile(number, documents, tokens, damaged=damaged)


def _sizes(files: Sequence[DataFile], kind: str, keys: DataSection, encoders: Encoders, chunk: int) -> list[tuple[SourcePiece, int]]:
    """Return all pieces that hold rows, in order, each with its size in bytes of text."""

    def of(file: DataFile) -> list[int]:
        if kind == "parquet":
            return ParquetFile(file, keys.column, partial(_encoder_of, encoders, keys.column), counted=False).sizes
        end = file.read(0, min(_STEP, file.size)).find(b"\n") if kind == "jsonl" else -1
        if end > 0:  # find a wrong field in the first line, since Ray takes seconds to start
            JsonLinesFile(file, keys.column, encoders.text(), (0, end)).documents(0)
        return [min(chunk, file.size - begin) for begin in range(0, file.size, chunk)]

    every = enumerate(in_threads(files, of))
    return [(SourcePiece(number, part), size) for number, sizes in every for part, size in enumerate(sizes) if size]


def _encoder_of(encoders: Encoders, column: str, file: DataFile, kind: pa.DataType) -> Encoder:
    encoder = encoders.of(file, kind)
    if not isinstance(encoder, TokenizerEncoder):
        raise BadInput(f"data.column = {column}: {file.url} holds token ids there, which need no preparation; give a column of text")
    return encoder


def _encoder(made: Preparation) -> Encoder:
    return Encoders(made.keys).text()


def _write(made: Preparation, number: int, path: str) -> tuple[int, int]:
    """Write an output file; return the numbers of its documents and tokens."""
    encoder = _encoder(made)
    schema = pa.schema([(COLUMN, pa.list_(pa.from_numpy_dtype(encoder.dtype)))])
    digest, documents, written, waiting = _RowsHash(), 0, 0, list[pa.Array]()
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:

        def flush() -> None:
            writer.write_table(pa.table({COLUMN: pa.chunked_array(waiting)}, schema), row_group_size=sum(map(len, waiting)))
            waiting.clear()

        for rows in _rows(made, encoder, made.pieces[number]):
            digest.add(rows)
            documents, written = documents + len(rows), written + len(rows.values)
            waiting.append(rows)
            if sum(len(one.values) for one in waiting) >= BLOCK_TOKENS:
                flush()
        if waiting:
            flush()
        proof = {"plan": made.digest, "documents": documents, "tokens": written, "xxh3": digest.hex()}
        writer.add_key_value_metadata({PREPARED: json.dumps(proof).encode()})
    return documents, written


class _RowsHash:
    """Hash of rows of tokens. It does not depend on the division of the rows into arrays."""

    def __init__(self) -> None:
        self._lengths, self._values = xxhash.xxh3_128(), xxhash.xxh3_128()

    def add(self, rows: pa.ListArray) -> None:
        self._lengths.update(np.ascontiguousarray(rows.value_lengths().to_numpy(zero_copy_only=False), dtype=np.int64).data)
        self._values.update(np.ascontiguousarray(rows.flatten().to_numpy()).data)

    def hex(self) -> str:
        return str(self._lengths.hexdigest() + self._values.hexdigest())


def _proven(made: Preparation, number: int, file: DataFile) -> PreparedFile:
    """Read an existing output file, and compare its content with its hash. Raises BadInput if they differ."""
    if file.size < 1:
        raise BadInput(f"{file.url}: is empty")
    digest = _RowsHash()

    def read() -> dict[str, Any]:
        opened = pq.ParquetFile(file.opened())
        proof = json.loads((opened.metadata.metadata or {}).get(PREPARED, b"{}"))
        for group in range(opened.num_row_groups):
            digest.add(opened.read_row_group(group, columns=[COLUMN]).column(COLUMN).combine_chunks())
        return proof

    try:
        proof: dict[str, Any] = guarded(file, read, "its content")
    except BadInput:
        raise
    except (KeyError, ValueError) as error:
        raise BadInput(f"{file.url}: is damaged ({reason_of(error)})") from None
    if proof.get("plan") != made.digest or proof.get("xxh3") != digest.hex():
        raise BadInput(f"{file.url}: its content is not what was written")
    return PreparedFile(number, int(proof["documents"]), int(proof["tokens"]), kept=True)


def _rows(made: Preparation, encoder: Encoder, pieces: Sequence[SourcePiece]) -> Iterator[pa.ListArray]:
    """Yield the tokens of the pieces' documents, one document per row."""
    for piece in pieces:
        file = made.files[piece.file]
        opened, part, arrays = _read(made, encoder, file, piece)
        row = opened.first_row(part)
        for whole in arrays:
            for start in range(0, len(whole), _SLICE):
                try:
                    values, lengths = encoder.values(whole.slice(start, _SLICE))
                except BadDocument as error:
                    raise BadInput(f"{file.url}: row {row + start + error.row}: {error.reason}") from None
                yield _ended(encoder, values, lengths, opened.ends(part))
            row += len(whole)


def _read(made: Preparation, encoder: Encoder, file: DataFile, piece: SourcePiece) -> tuple[DocumentFile, int, Sequence[pa.Array]]:
    """Return the file that holds a piece, the number of its part in that file, and its documents."""
    if made.kind == "parquet":
        groups = ParquetFile(file, made.keys.column, lambda *_: encoder, counted=False)
        return groups, piece.number, guarded(file, lambda: groups.documents(piece.number), f"row group {piece.number}")
    span = _line_begin(file, piece.number * made.chunk), _line_begin(file, (piece.number + 1) * made.chunk)
    if made.kind == "text":
        text = TextFile(file, encoder, span)
        return text, 0, text.documents(0) if span[0] < span[1] else []

    def lines(before: int) -> tuple[DocumentFile, int, Sequence[pa.Array]]:
        opened = JsonLinesFile(file, made.keys.column, encoder, span, before)
        return opened, 0, opened.documents(0)

    try:
        return lines(0)
    except BadInput:
        return lines(_newlines(file, span[0]))  # raises again, and counts the lines from the beginning of the file


def _line_begin(file: DataFile, place: int) -> int:
    """Return the position at which the last line that ends at or before ``place`` ends; at most the file's size."""
    if place >= file.size:
        return file.size
    while place > 0:
        begin = max(0, place - _STEP)
        found = file.read(begin, place).rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        place = begin
    return 0


def _newlines(file: DataFile, end: int) -> int:
    return sum(file.read(begin, min(begin + CHUNK, end)).count(b"\n") for begin in range(0, end, CHUNK))


def _ended(encoder: Encoder, values: Any, lengths: Any, ends: bool) -> pa.ListArray:
    """Return the documents as rows. If ``ends``, each row gets an end token unless it has one."""
    if ends:
        values, lengths = encoder.with_ends(values, lengths)
    counts = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    return pa.ListArray.from_arrays(pa.array(counts.astype(np.int32)), pa.array(values.astype(encoder.dtype, copy=False)))
