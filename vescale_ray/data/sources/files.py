"""Files of a data set: found by path, folder, glob or URL, and read by ranges of bytes over fsspec.

pyarrow maps local files into memory. Every other file system is read by ranges with ``cat_file``, which keeps no state between reads and is
safe in threads.
"""

from __future__ import annotations

import glob
import hashlib
import io
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

import fsspec
import pyarrow as pa
from fsspec.implementations.local import LocalFileSystem

from vescale_ray.data.sources.corpus import leads_up, lost_link, text_files
from vescale_ray.data.text.encoders import half_character
from vescale_ray.errors import BadInput

_EDGE = 1 << 16
"""Bytes of each end that identify a file."""
_GLOB = frozenset("*?[")
MOST_TEXTS = 20
"""Errors that are told of a data set. More are counted only."""
AGAIN = "write or download the file again"
"""Remedy for a damaged file."""


class DamagedData(BadInput):
    """A file, or a part of it, is missing or damaged. With ``data.damaged: skip`` the run goes on without it."""


class FileGone(DamagedData):
    """A file is missing."""


class Skipped:
    """Data that a data set leaves out because it is damaged (``data.damaged: skip``). Threads may add to it.

    Attributes:
        files: number of files that could not be opened.
        records: number of damaged lines, and of documents in parts that could not be read.
        texts: the errors, at most :data:`MOST_TEXTS`.
    """

    def __init__(self) -> None:
        self.files = self.records = 0
        self.texts: list[str] = []
        self._taken = 0
        self._parts = set[tuple[str, int]]()
        self._lock = threading.Lock()

    def file(self, error: DamagedData) -> None:
        """Count a file."""
        self._add([str(error)], files=1)

    def lines(self, count: int, errors: Sequence[str]) -> None:
        """Count ``count`` lines, with the errors of the first ones."""
        self._add(errors, records=count)

    def part(self, url: str, part: int, documents: int, error: DamagedData) -> None:
        """Count the documents of a part of a file, each part once."""
        with self._lock:
            known = (url, part) in self._parts
            self._parts.add((url, part))
        if not known:
            self._add([str(error)], records=documents)

    def take(self) -> list[str]:
        """Return the texts that have come since the last call."""
        with self._lock:
            new, self._taken = self.texts[self._taken :], len(self.texts)
            return new

    def _add(self, errors: Sequence[str], files: int = 0, records: int = 0) -> None:
        with self._lock:
            self.files, self.records = self.files + files, self.records + records
            self.texts += errors[: MOST_TEXTS - len(self.texts)]


@dataclass(frozen=True)
class DataFile:
    """One file of a data set.

    Attributes:
        fs: file system that holds it.
        path: path in ``fs``.
        url: path or URL for messages.
        name: path relative to the given folder or glob, the same wherever the data lies.
        size: number of bytes, at least 1.
        skips: whether damaged lines are left out (``data.damaged: skip``).
    """

    fs: Any
    path: str
    url: str
    name: str
    size: int
    skips: bool = False

    @property
    def is_local(self) -> bool:
        return isinstance(self.fs, LocalFileSystem)

    def read(self, start: int, end: int) -> bytes:
        """Return the bytes ``[start, end)``.

        Raises:
            OSError: the storage does not answer.
            DamagedData: the file is gone, or has become shorter.
        """
        try:
            if self.is_local:
                with open(self.path, "rb") as file:
                    file.seek(start)
                    data = file.read(end - start)
            else:
                data = self.fs.cat_file(self.path, start=start, end=end)
        except FileNotFoundError:
            raise gone(self.url) from None
        except Exception as error:
            raise OSError(f"{self.url}: bytes {start} to {end} can't be read ({reason_of(error)})") from error
        if len(data) != end - start:
            raise DamagedData(
                f"{self.url}: only {len(data)} of {end - start} bytes could be read from byte {start} on; the file is truncated; {AGAIN}"
            )
        return data

    def edges(self) -> bytes:
        """Return a hash of the size and of both ends, which identifies a file that would take long to read."""
        ends = self.read(0, min(_EDGE, self.size)) + self.read(max(0, self.size - _EDGE), self.size)
        return hashlib.sha256(f"{self.size} ".encode() + ends).digest()

    def opened(self) -> pa.NativeFile:
        """Return the file for a reader of pyarrow: mapped if it is local, else read by ranges."""
        return pa.memory_map(self.path) if self.is_local else pa.PythonFile(_Ranged(self), mode="r")


class LinkedFileSystem(LocalFileSystem):  # type: ignore[misc]
    """Local files, where a link counts as the file or folder that it leads to. In fsspec's own listings a link is neither."""

    def info(self, path: Any, **options: Any) -> dict[str, Any]:
        """Return what the system knows of a path. A link that leads nowhere, or to a folder above it, has the type ``other``."""
        found: dict[str, Any] = super().info(path, **options)
        if found["islink"]:
            name = found["name"]
            kind = "directory" if os.path.isdir(name) else "file" if os.path.isfile(name) else "other"
            found["type"] = "other" if kind == "directory" and leads_up(name) else kind
        return found


class _Ranged(io.RawIOBase):
    """A file object over :meth:`DataFile.read`, without a buffer: each read is one request."""

    def __init__(self, file: DataFile) -> None:
        self._file, self._at = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._file.size)[whence]
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        end = self._file.size if size is None or size < 0 else min(self._at + size, self._file.size)
        data = self._file.read(self._at, end) if end > self._at else b""
        self._at += len(data)
        return data


def gone(url: str) -> FileGone:
    """Return the error for a file that was found before and is missing now."""
    return FileGone(f"{url}: the file is gone; put it back")


def find_files(corpus: str | Sequence[str], skipped: Skipped | None = None) -> list[DataFile]:
    """Return the files of a path, folder, glob or URL, or of a list of them, in a fixed order. Hidden files and ``_SUCCESS`` are left out.

    Args:
        skipped: counts missing and empty files, which are left out; None: they are refused.

    Raises:
        BadInput: there is no such file, a file is empty, or a file system's package is not installed.
    """
    found: list[DataFile] = []
    for spec in [corpus] if isinstance(corpus, str) else corpus:
        try:
            found += sorted(_find(spec), key=lambda file: PurePosixPath(file.name).parts)
        except DamagedData as error:
            if skipped is None or isinstance(corpus, str):
                raise
            skipped.file(error)
        except BadInput:
            raise
        except ImportError as error:
            said = f"the package of this file system is not installed; install it ({reason_of(error)})"
            raise BadInput(f"data.corpus = {spec}: {said}") from None
        except Exception as error:
            raise BadInput(f"data.corpus = {spec}: can't be listed ({reason_of(error)}); check address, credentials and network") from None
    if not found and skipped is not None and skipped.texts:
        raise BadInput(f"data.corpus: no file is left; {skipped.texts[0]}")
    if not found:
        raise BadInput(f"data.corpus = {corpus}: no file but hidden ones; give paths that every worker can read")
    for file in [one for one in found if one.size < 1]:
        empty = DamagedData(f"data.corpus: {file.url} is empty; remove it, or give a glob that leaves it out")
        if skipped is None or len(found) == 1:
            raise empty
        skipped.file(empty)
        found.remove(file)
    return found if skipped is None else [replace(file, skips=True) for file in found]


def _find(spec: str) -> Iterator[DataFile]:
    if spec == "stdlib":
        library, texts = text_files(spec)
        local = LocalFileSystem()
        for text in texts:
            if size := text.stat().st_size:  # packages have empty modules
                yield DataFile(local, str(text), str(text), text.relative_to(library).as_posix(), size)
        return
    fs, path = fsspec.core.url_to_fs(spec)
    fs = LinkedFileSystem() if isinstance(fs, LocalFileSystem) else fs
    entries, root = _entries(fs, path)
    files = {name: info for name, info in entries.items() if info["type"] == "file"}
    if not entries and not is_glob(path) and not isinstance(fs, LocalFileSystem):
        _check_answers(fs, path)
    if not files and not (is_glob(path) and entries):
        remedy = "no file matches this glob" if is_glob(path) else "no such file or folder" if not entries else "is empty"
        raise DamagedData(f"data.corpus = {spec}: {remedy}; give paths that every worker can read")
    for name, info in entries.items():
        relative = name[len(root) :].lstrip("/") if root and name.startswith(root) else PurePosixPath(name).name
        if any(part.startswith((".", "_")) for part in PurePosixPath(relative).parts):
            continue
        if info["type"] == "directory" and "**" not in path:  # data/*; data/*.parquet, where Spark has written a.parquet/part-0.parquet
            remedy = "give **/* for the files in it, too, or a glob that leaves it out"
            raise BadInput(f"data.corpus = {spec}: the glob matches the folder {name}, but not its files; {remedy}")
        if info["type"] == "file" and info["size"] is None:
            raise BadInput(f"data.corpus = {spec}: the server reports no size for {name}; download it, and give the file")
        if info["type"] == "file":
            yield DataFile(fs, name, name if isinstance(fs, LocalFileSystem) else fs.unstrip_protocol(name), relative, int(info["size"]))
        elif info.get("islink") and info["type"] == "other":
            raise lost_link(spec, name)


def _check_answers(fs: Any, path: str) -> None:
    """Raise the connection error if the storage does not answer. fsspec's HTTP file system reports that as a missing file."""
    try:
        fs.info(path)
    except FileNotFoundError as error:
        if isinstance(error.__cause__, OSError) and not isinstance(error.__cause__, FileNotFoundError):
            raise error.__cause__ from None


def _entries(fs: Any, path: str) -> tuple[dict[str, Any], str]:
    """Return the entries that ``path`` matches, by path, and the folder that their names are relative to (empty: no folder)."""
    fs.invalidate_cache()
    if fs.exists(path):
        if not fs.isdir(path):
            return {path: fs.info(path)}, ""
        return fs.find(path, detail=True) or {path: {"type": "directory"}}, path.rstrip("/")
    if is_glob(path):
        above = _named_folder(fs, path)
        rest = path[len(above) :]
        fixed = above + rest[: min((rest.index(sign) for sign in _GLOB if sign in rest), default=len(rest))]
        return fs.glob(glob.escape(above) + rest, detail=True), fixed.rpartition("/")[0]
    return {}, ""


def _named_folder(fs: Any, path: str) -> str:
    """Return the longest prefix of a glob that is an existing folder of exactly that name.

    The name may contain signs of a glob: ``data/[2024] web``."""
    above, parts = "", path.split("/")[:-1]
    for end in range(1, len(parts) + 1):
        if is_glob(parts[end - 1]):
            if not fs.isdir("/".join(parts[:end])):
                break
            above = "/".join(parts[:end])
    return above


def is_glob(path: str) -> bool:
    """Return whether the path contains signs of a glob."""
    return bool(_GLOB & set(path))


def whole_text(text: str | None, where: str) -> str | None:
    """Return the text. ``where``: its place, for the message.

    Raises:
        DamagedData: it holds half of a surrogate pair.
    """
    try:
        (text or "").encode()
    except UnicodeEncodeError as error:
        raise DamagedData(f"{where}: {half_character(error)}") from None
    return text


def reason_of(error: BaseException) -> str:
    """Return the reason in an error of the storage or of pyarrow, as one line without its traceback.

    The error may quote bytes of a damaged file."""
    text = (getattr(error, "strerror", None) or str(error)) or type(error).__name__
    told = " ".join(text.split())[:200].rstrip(". ")
    return "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in told)
