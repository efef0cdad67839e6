"""Files of fine-tuning rows: JSONL and Parquet. A row becomes JSON for :class:`vescale_ray.data.text.chat.ChatEncoder`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vescale_ray.data.sources.document_files import DocumentFile, JsonLinesFile, ParquetFile, guarded
from vescale_ray.data.sources.files import DataFile, whole_text
from vescale_ray.data.text.chat import REMEDY, ChatEncoder, normalized, roles_of
from vescale_ray.data.text.encoders import Tokens
from vescale_ray.errors import BadInput

FIELDS = ("messages", "prompt", "completion", "tools")
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


class _ChatFile(DocumentFile):
    """Base of fine-tuning files, which counts answers as it reads. A row without an answer is a null document, which has no tokens."""

    encoder: ChatEncoder

    def __init__(self, *about: Any) -> None:
        self._answers: dict[int, tuple[int, int, int]] = {}
        self.foreign_roles = set[str]()
        super().__init__(*about)
        self.kind = "chat"

    @property
    def answers(self) -> tuple[int, int, int]:
        tokens, rows, ended = (sum(counts) for counts in zip((0, 0, 0), *self._answers.values(), strict=True))
        return tokens, rows, ended

    def encoded(self, part: int, arrays: Sequence[pa.Array]) -> Tokens:
        tokens = super().encoded(part, arrays)
        self._answers[part] = int(np.count_nonzero(tokens >= 0)), sum(one.null_count for one in arrays), self.encoder.ended(tokens)
        return tokens

    def _json(self, record: Mapping[str, Any], where: str) -> str | None:
        try:
            row = normalized(record)
            if row is None:
                self.foreign_roles |= roles_of(record) - _ROLES
        except (TypeError, ValueError) as error:
            raise BadInput(f"{self.file.url}: {where}: {error}") from None
        return whole_text(None if row is None else json.dumps(row, ensure_ascii=False), f"{self.file.url}: {where}")


class ChatLinesFile(_ChatFile, JsonLinesFile):
    """A JSONL file with one row per line."""

    def __init__(self, file: DataFile, encoder: ChatEncoder) -> None:
        super().__init__(file, "messages", encoder)

    def _text(self, line: bytes, number: int) -> str | None:
        return self._json(self._record(line, number), f"line {number}")


class ChatParquetFile(_ChatFile, ParquetFile):
    """A Parquet file of rows. Its columns are those of :data:`FIELDS` that the file has."""

    def __init__(self, file: DataFile, encoder: ChatEncoder) -> None:
        names: list[str] = guarded(file, lambda: pq.ParquetFile(file.opened()).schema_arrow, "its footer").names
        self._fields = [name for name in FIELDS if name in names]
        if not {"messages", "completion"} & set(names):
            has = ", ".join(names[:20]) or "no column"
            raise BadInput(f"{file.url}: has neither messages nor prompt and completion; it has {has}; {REMEDY}")
        super().__init__(file, "messages" if "messages" in names else "completion", lambda *_: encoder)

    def documents(self, part: int) -> Sequence[pa.Array]:
        reader = pq.ParquetFile(self.file.opened(), metadata=self._metadata, pre_buffer=not self.file.is_local)
        table = reader.read_row_group(part, columns=self._fields, use_threads=False)
        given = ({field: _given(value) for field, value in row.items()} for row in table.to_pylist())
        rows = (self._json(row, f"row {self.first_row(part) + number}") for number, row in enumerate(given))
        return [pa.array(rows, type=pa.large_string())]


def _given(value: Any) -> Any:
    """Return the value without fields that are null.

    All rows of a Parquet column have the same fields, so a row has nulls for fields that only other rows use."""
    if isinstance(value, dict):
        return {key: _given(one) for key, one in value.items() if one is not None}
    return [_given(one) for one in value] if isinstance(value, list) else value
