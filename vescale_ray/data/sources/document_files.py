"""Files of documents: Parquet, Arrow, JSONL and text. A part becomes an Arrow array of documents, which an encoder turns into tokens."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence, Set
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from vescale_ray.data.order.stream import Ids
from vescale_ray.data.sources.files import AGAIN, MOST_TEXTS, DamagedData, DataFile, gone, reason_of, whole_text
from vescale_ray.data.text.encoders import BadDocument, Encoder, IdEncoder, Tokens, plain
from vescale_ray.errors import BadInput

CHUNK = 4 << 20
"""Bytes of a part of a file of text or JSONL, without the rest of its last line."""

PREPARED = b"vescale-ray"
"""Key in the metadata of Parquet files of :mod:`vescale_ray.data.preparation`, whose documents have their end tokens."""

ChooseEncoder = Callable[[DataFile, pa.DataType], Encoder]
"""Returns the encoder for a column's type. Raises BadInput if the type is neither text nor lists of integers."""


class DocumentFile(ABC):
    """A file in parts of documents, as :class:`vescale_ray.data.sources.token_files.TokenFile`. Subclasses set ``counts`` and
    ``fingerprint``."""

    joins = True
    foreign_roles: Set[str] = frozenset()
    columns: Sequence[str] = ()
    """Names of all columns of the file."""
    counts: Ids
    fingerprint: bytes
    kind: str
    parts = "part"
    """Name of a part in messages."""

    def __init__(self, file: DataFile, encoder: Encoder) -> None:
        self.file, self.encoder = file, encoder
        self.itemsize, self.unit = int(np.dtype(encoder.dtype).itemsize), encoder.unit
        self._seen: dict[int, tuple[int, int, int]] = {}
        """Of each part read so far: documents that end in it, bytes of the text that a tokenizer has read, and nulls in place of text."""

    @property
    def text_bytes(self) -> int:
        return sum(size for _, size, _ in self._seen.values())

    @property
    def nulls(self) -> int:
        return sum(nulls for _, _, nulls in self._seen.values())

    @property
    def answers(self) -> tuple[int, int, int] | None:
        return None

    @property
    def count(self) -> int:
        """Number of documents."""
        return sum(ended for ended, _, _ in self._seen.values())

    @abstractmethod
    def documents(self, part: int) -> Sequence[pa.Array]:
        """Return the documents of a part; pyarrow's errors mean that they are damaged."""

    @abstractmethod
    def first_row(self, part: int) -> int:
        """Return the number of the part's first document within the file, for messages."""

    def ends(self, part: int) -> bool:
        """Return whether the last document of the part ends with the part."""
        return True

    def rows(self, part: int) -> int:
        return 1

    def read(self, part: int) -> Tokens:
        return self.encoded(part, self._documents(part))

    def _documents(self, part: int) -> Any:
        return guarded(self.file, lambda: self.documents(part), f"{self.parts} {part}")

    def _keep_ends(self, first: int | None, known: bool = False) -> None:
        """If token ids already contain end tokens, add no others.

        The caller may know that (``known``). Otherwise the part ``first`` shows it."""
        encoder = self.encoder
        if isinstance(encoder, IdEncoder) and encoder.end is not None and first is not None:
            if known or encoder.has_ends(self._documents(first)):
                self.encoder = IdEncoder(encoder.vocab, None)

    def encoded(self, part: int, arrays: Sequence[pa.Array]) -> Tokens:
        """Return the tokens of a part's documents."""
        row = self.first_row(part)
        encoded = []
        if part not in self._seen:
            size = sum(pc.sum(pc.binary_length(one)).as_py() or 0 for one in arrays) if self.unit == "tokenizer" else 0
            nulls = sum(one.null_count for one in arrays) if self.unit in ("bytes", "tokenizer") else 0
            if "binary" in self.kind and any(pc.any(pc.match_substring(one, "\0")).as_py() for one in arrays):
                where = f"{self.file.url}: the column of type {self.kind}"
                raise BadInput(f"{where} has zero bytes, so it is not text; write token ids as lists of integers")
            self._seen[part] = sum(map(len, arrays)) if self.ends(part) else 0, size, nulls
        for documents in arrays:
            try:
                encoded.append(self.encoder.encode(documents, ends=self.ends(part)))
            except BadDocument as error:
                kind = DamagedData if error.is_damage else BadInput
                raise kind(f"{self.file.url}: row {row + error.row}: {error.reason}") from None
            row += len(documents)
        tokens: Tokens = np.concatenate(encoded) if len(encoded) > 1 else encoded[0] if encoded else np.zeros(0, self.encoder.dtype)
        return tokens


def guarded(file: DataFile, work: Callable[[], Any], what: str) -> Any:
    """Do ``work``, which reads with pyarrow. Errors of the storage pass unchanged; any other error of pyarrow becomes DamagedData.

    Raises:
        DamagedData: ``what`` of the file is damaged, or the file is gone.
        MemoryError, OSError: there is too little memory, or the storage does not answer.
    """
    try:
        return work()
    except (BadInput, MemoryError):
        raise
    except FileNotFoundError:
        raise gone(file.url) from None
    except (pa.ArrowException, OSError, UnicodeError) as error:
        if isinstance(error, OSError) and (error.errno is not None or str(error).startswith(file.url)):
            raise  # the second kind is DataFile.read's
        said = f"{what} is damaged or truncated ({reason_of(error)})"
        raise DamagedData(f"{file.url}: {said}; {AGAIN}") from None


def column_of(file: DataFile, schema: pa.Schema, column: str) -> pa.Field:
    """Return the field of a column.

    Raises:
        BadInput: no column, or more than one, has that name.
    """
    if schema.names.count(column) != 1:
        many = "several columns" if column in schema.names else "no column"
        raise BadInput(f"data.column = {column}: {file.url} has {many} of that name; it has {', '.join(schema.names[:20]) or 'none'}")
    return schema.field(column)


class ParquetFile(DocumentFile):
    """A column of a Parquet file. A part is a row group. Numbers of tokens come from the footer if the column holds token ids.

    Args:
        counted: whether text is read once, to count its tokens.
    """

    parts = "row group"

    def __init__(self, file: DataFile, column: str, encoder_of: ChooseEncoder, *, counted: bool = True) -> None:
        opened = guarded(file, lambda: pq.ParquetFile(file.opened()), "its footer")
        schema = guarded(file, lambda: opened.schema_arrow, "its footer")
        field = column_of(file, schema, column)
        super().__init__(file, encoder_of(file, field.type))
        self._column, self._metadata, self.kind = column, opened.metadata, str(field.type)
        self.columns = schema.names
        self._leaf = sum(_leaves(one.type) for one in list(schema)[: schema.get_field_index(column)])
        groups = [self._metadata.row_group(group) for group in range(self._metadata.num_row_groups)]
        self._rows = np.concatenate([np.zeros(1, np.int64), np.cumsum([group.num_rows for group in groups], dtype=np.int64)])
        self.fingerprint = file.edges()
        self.sizes = [int(group.column(self._leaf).total_uncompressed_size) if group.num_rows else 0 for group in groups]
        """Bytes of the column in each part; 0 for a part without rows."""
        if not counted:
            return
        self._keep_ends(next((part for part, size in enumerate(self.sizes) if size), None), PREPARED in (self._metadata.metadata or {}))
        self._footer = [guarded(file, partial(self._footer_count, part, group), "its footer") for part, group in enumerate(groups)]
        self.counts = np.array([len(self.read(p)) if count is None else count for p, count in enumerate(self._footer)], dtype=np.int64)

    @property
    def count(self) -> int:
        return int(self._rows[-1])

    def documents(self, part: int) -> Sequence[pa.Array]:
        reader = pq.ParquetFile(self.file.opened(), metadata=self._metadata, pre_buffer=not self.file.is_local)
        chunks: Sequence[pa.Array] = reader.read_row_group(part, columns=[self._column], use_threads=False).column(self._column).chunks
        return [plain(chunk) for chunk in chunks]

    def first_row(self, part: int) -> int:
        return int(self._rows[part])

    def rows(self, part: int) -> int:
        return int(self._rows[part + 1] - self._rows[part])

    def encoded(self, part: int, arrays: Sequence[pa.Array]) -> Tokens:
        tokens = super().encoded(part, arrays)
        told = self._footer[part]
        if told is not None and len(tokens) != told:
            raise DamagedData(f"{self.file.url}: row group {part} holds {len(tokens)} tokens, but its footer counts {told}; write it anew")
        return tokens

    def _footer_count(self, part: int, group: Any) -> int | None:
        """Return the number of tokens of a row group, if the footer tells it; else None.

        It is the number of values that are not null. Parquet counts an empty list as a null value."""
        if self.encoder.identity != "ids":
            return None
        chunk, described = group.column(self._leaf), self._metadata.schema.column(self._leaf)
        if chunk.physical_type != described.physical_type:  # pyarrow would end the process
            raise pa.ArrowInvalid(f"row group {part} holds {chunk.physical_type}, its schema says {described.physical_type}")
        told = chunk.statistics
        if told is not None and told.has_min_max and not 0 <= told.min <= told.max < self.encoder.vocab:
            super().encoded(part, self._documents(part))  # raises an error that names the row
        if told is None or not told.has_null_count:
            return None
        rows = int(self._rows[part + 1] - self._rows[part])
        return int(chunk.num_values - told.null_count) + (rows if self.encoder.end is not None else 0)


def _leaves(kind: pa.DataType) -> int:
    """Return the number of Parquet columns that store one column of this Arrow type."""
    kind = getattr(kind, "storage_type", kind)
    return sum(_leaves(kind.field(child).type) for child in range(kind.num_fields)) or 1


class ArrowFile(DocumentFile):
    """A column of an Arrow IPC file (Feather) or stream. A part is a record batch."""

    parts = "record batch"

    def __init__(self, file: DataFile, column: str, encoder_of: ChooseEncoder) -> None:
        self._schema, self._places = guarded(file, lambda: self._parts_of(file), "its format")
        field = guarded(file, lambda: column_of(file, self._schema, column), "its format")
        super().__init__(file, encoder_of(file, field.type))
        self._number, self.kind, self.columns = self._schema.names.index(column), str(field.type), self._schema.names
        self._rows = np.zeros(len(self._places) + 1, dtype=np.int64)
        self.counts = np.zeros(len(self._places), dtype=np.int64)
        self._keep_ends(0 if self._places else None)
        for part in range(len(self._places)):
            documents = self._documents(part)
            self._rows[part + 1] = self._rows[part] + sum(map(len, documents))
            self.counts[part] = len(self.encoded(part, documents))
        self.fingerprint = file.edges()

    @staticmethod
    def _parts_of(file: DataFile) -> tuple[pa.Schema, list[int | None]]:
        """Return the schema, and the position of each batch. In the file format the positions are None, since the file's footer has
        them."""
        opened = file.opened()
        if file.read(0, min(6, file.size)) == b"ARROW1":
            reader = pa.ipc.open_file(opened)
            return reader.schema, [None] * reader.num_record_batches
        stream, places = pa.ipc.open_stream(opened), list[int | None]()
        coded = next((field.name for field in stream.schema if "dictionary<" in str(field.type)), None)
        if coded is not None:
            raise BadInput(
                f"{file.url} is an Arrow stream with categories in the column {coded}, whose batches can't be read one by one; write it "
                "as an Arrow file or as Parquet"
            )
        while True:
            place = opened.tell()
            try:
                stream.read_next_batch()
            except StopIteration:
                return stream.schema, places
            places.append(place)

    def documents(self, part: int) -> Sequence[pa.Array]:
        opened, place = self.file.opened(), self._places[part]
        if place is None:
            options = pa.ipc.IpcReadOptions(included_fields=[self._number], use_threads=False)
            array = pa.ipc.open_file(opened, options=options).get_batch(part).column(0)
        else:
            opened.seek(place)
            array = pa.ipc.read_record_batch(pa.ipc.read_message(opened), self._schema).column(self._number)
        array.validate(full=True)  # offsets are read as they are, and would lead out of the array if they are damaged
        return [plain(array)]

    def first_row(self, part: int) -> int:
        return int(self._rows[part])


class LinesFile(DocumentFile):
    """A file of lines in parts of about :data:`CHUNK` bytes. One pass over the file counts its tokens.

    Args:
        span: the only part of the file to read, as its first byte and its end, without counting its tokens.
        line: number of lines before ``span``.
    """

    def __init__(self, file: DataFile, encoder: Encoder, span: tuple[int, int] | None = None, line: int = 0) -> None:
        super().__init__(file, encoder)
        self.kind = "text"
        if span is not None:
            self._places, self._lines = list(span), [line]
            return
        self._places, self._lines, digest = [0], [0], hashlib.sha256()
        counts = []
        for content in chunks_of(file):
            digest.update(content)
            self._places.append(self._places[-1] + len(content))
            self._lines.append(self._lines[-1] + content.count(b"\n"))
            counts.append(len(self.read(len(self._places) - 2)))
        self.counts, self.fingerprint = np.array(counts, dtype=np.int64), digest.digest()

    def content(self, part: int) -> bytes:
        return self.file.read(self._places[part], self._places[part + 1])


class JsonLinesFile(LinesFile):
    """A text field of a file with one JSON object a line; each line is a document."""

    def __init__(self, file: DataFile, column: str, encoder: Encoder, span: tuple[int, int] | None = None, line: int = 0) -> None:
        self._column = column
        self.damaged_lines: dict[int, tuple[int, list[str]]] = {}
        """For each part, the number of damaged lines that are left out, and the errors of the first ones."""
        super().__init__(file, encoder, span, line)

    def documents(self, part: int) -> Sequence[pa.Array]:
        content, texts, damaged = self.content(part), list[str | None](), list[DamagedData]()
        if self._places[part] == 0 and b"\0" in content[:4]:
            raise DamagedData(f"{self.file.url}: is not UTF-8, but as if UTF-16; write it as UTF-8")
        for number, line in enumerate(content.split(b"\n"), self._lines[part] + 1):
            try:
                if line.strip():
                    texts.append(whole_text(self._text(line, number), f"{self.file.url}: line {number}"))
            except DamagedData as error:
                damaged.append(error)
            if damaged and not self.file.skips:
                raise damaged[0] from None
        self.damaged_lines[part] = len(damaged), [str(error) for error in damaged[:MOST_TEXTS]]
        return [pa.array(texts, type=pa.large_string())]

    def first_row(self, part: int) -> int:
        return self._lines[part] + 1

    def _text(self, line: bytes, number: int) -> str | None:
        record = self._record(line, number)
        if self._column not in record:
            chat = "; set data.format to chat for conversations" if {"messages", "completion", "conversations"} & set(record) else ""
            fields = ", ".join(list(record)[:20])
            raise BadInput(f"data.column = {self._column}: {self.file.url}: line {number} has no such field; it has {fields}{chat}")
        text = record[self._column]
        if not isinstance(text, str | None):
            remedy = "write token ids as Parquet, .npy or .bin" if isinstance(text, list) else "name one that holds text"
            what = f"the field is not text, but {type(text).__name__}; {remedy}"
            raise BadInput(f"data.column = {self._column}: {self.file.url}: line {number}: {what}")
        return text

    def _record(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            record = json.loads(line.decode("utf-8-sig"))
        except UnicodeDecodeError:
            raise DamagedData(f"{self.file.url}: line {number} is not UTF-8; write the file as UTF-8") from None
        except (ValueError, RecursionError) as error:
            raise DamagedData(f"{self.file.url}: line {number} is not JSON ({reason_of(error)}); write one object a line") from None
        if not isinstance(record, dict):
            raise DamagedData(f"{self.file.url}: line {number} is not a JSON object; write one object a line")
        return record


class TextFile(LinesFile):
    """A file of text, which is one document. A long one is encoded in parts that end with a line."""

    def documents(self, part: int) -> Sequence[pa.Array]:
        return [pa.array([self.content(part)], type=pa.large_binary())]

    def first_row(self, part: int) -> int:
        return part

    def ends(self, part: int) -> bool:
        return self._places[part + 1] == self.file.size


def chunks_of(file: DataFile) -> Iterator[bytes]:
    """Yield the content in chunks of at least :data:`CHUNK` bytes that end with a line, or with the file."""
    at, pending = 0, b""
    while at < file.size:
        end = min(at + CHUNK, file.size)
        pending += file.read(at, end)
        at = end
        cut = len(pending) if at == file.size else pending.rfind(b"\n") + 1
        if cut:
            yield pending[:cut]
            pending = pending[cut:]
