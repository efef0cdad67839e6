"""Export of a run's metrics as a Parquet table, for pandas, DuckDB or Spark."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from vescale_ray.runfolder import Record, RunFolder

ROWS = 10_000
"""Rows of one row group, and lines in memory at a time."""


def to_parquet(folder: RunFolder, out: Path) -> int:
    """Write each line of metrics.jsonl as a row, and return the number of rows. The file appears only once it is complete.

    A nested field becomes a column for each of its keys (``waited_seconds.step_end``); values by rank become a list. A step that was
    executed again after a rollback has a row for each time.

    Raises:
        OSError: the run's folder can't be read, or ``out`` can't be written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    kinds: dict[str, Any] = {}
    for row in _rows(folder):
        for name, value in row.items():
            if value is not None and (name not in kinds or (kinds[name] == pa.int64() and isinstance(value, float))):
                kinds[name] = pa.array([value]).type
    schema = pa.schema(sorted(kinds.items()))
    part, written, rows = out.with_name(f".{out.name}.part"), 0, _rows(folder)
    try:
        with part.open("wb") as file, pq.ParquetWriter(file, schema) as writer:
            while batch := list(islice(rows, ROWS)):
                writer.write_table(pa.Table.from_pylist(batch, schema))
                written += len(batch)
        part.replace(out)
    finally:
        part.unlink(missing_ok=True)
    return written


def _rows(folder: RunFolder) -> Iterator[dict[str, Any]]:
    for line in folder.each_metrics():
        yield dict(_columns(line))


def _columns(line: Record) -> Iterator[tuple[str, Any]]:
    for name, value in line.items():
        if not isinstance(value, dict):
            yield name, value
        elif all(key.isdigit() for key in value):
            yield name, [value[key] for key in sorted(value, key=int)] or None
        else:
            yield from ((f"{name}.{key}", one) for key, one in value.items() if not isinstance(one, dict | list))
