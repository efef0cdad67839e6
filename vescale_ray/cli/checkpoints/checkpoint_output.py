"""Progress bars and texts of ``vescale-ray ckpt``. Bars appear on a terminal only, so logs stay plain lines."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from vescale_ray.checkpoint import ObjectStore


class Watched:
    """A store wrapper that reports how many bytes are read."""

    def __init__(self, store: ObjectStore, advance: Callable[[int], None]) -> None:
        self._store, self._advance = store, advance

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    @contextmanager
    def open_read(self, key: str) -> Iterator[_WatchedReader]:
        with self._store.open_read(key) as reader:
            yield _WatchedReader(reader, self._advance)


class _WatchedReader:
    def __init__(self, reader: Any, advance: Callable[[int], None]) -> None:
        self._reader, self._advance = reader, advance

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    def read_into(self, offset: int, view: memoryview) -> int:
        count: int = self._reader.read_into(offset, view)
        self._advance(count)
        return count


@contextmanager
def bar(what: str, total: int | None, as_json: bool) -> Iterator[Callable[[int], None]]:
    """Draw a bar on stderr if that is a terminal; yields a function to call with the number of finished bytes."""
    if as_json or not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.advance(task, count)


def size_text(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def dtype_text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def clean(text: str) -> str:
    """Return a name from a file as text without control characters, which a terminal would obey."""
    return text if text.isprintable() else ascii(text)


def finite(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else repr(value)
