"""A store over any fsspec file system: ``gs://``, ``abfs://``, ``hdfs://``, ``memory://``, ..

The guarantees are those of the file system; see :class:`FsspecStore`.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime
from typing import Any

from ..faults import fault_point
from ..format.digest import one_ahead
from .ranges import ParallelReader
from .store import Entry, KeyExists, KeyMissing, check_key, delete_each, is_key

_log = logging.getLogger(__name__)
_WHEN = ("mtime", "LastModified", "last_modified", "updated", "modified", "created", "timeCreated")


class FsspecStore:
    """Objects below an fsspec URL. Its guarantees are limited, and a warning says so once:

    - *Exclusive creation* is the file system's own (``mode="create"``) if it refuses a second creation of a probe. Otherwise the store
      checks before and after the write. Then two processes that commit at the same moment may both briefly see success, so let only one
      process commit.
    - *Durability* on return is what the file system gives on close. *Ages*, which garbage collection uses, compare the file system's times
      with this host's clock. *Unfinished uploads* cannot be listed and are not deleted, so give the bucket a lifecycle rule.

    Args:
        url: any URL that ``fsspec.core.url_to_fs`` takes.
        options: options of the file system (credentials, project, ..).

    Raises:
        ValueError: fsspec does not know the protocol, or its package is not installed.
    """

    request_bytes = 4 << 20

    def __init__(self, url: str, **options: Any) -> None:
        self._url = url
        self._options = options
        self._made: tuple[int, Any, str] | None = None
        self._exclusive: bool | None = None
        self._fs  # noqa: B018 - fail now, not at the first save, if the protocol's package is missing

    def __repr__(self) -> str:
        return f"FsspecStore({self._url!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self._url, self._options)

    def describe(self, key: str = "") -> str:
        return f"{self._url.rstrip('/')}/{key}" if key else self._url

    def put_stream(self, key: str, chunks: Iterable[memoryview], size: int) -> None:
        path = self._path(key)
        if self.size(key) is not None:
            raise KeyExists(errno.EEXIST, "exists already", self.describe(key))
        with _as_oserror(f"writing {self.describe(key)}"):
            self._make_folder(path)
            file = self._fs.open(path, "wb")
        total = 0
        try:
            fault_point("data.created")
            with closing(one_ahead(iter(chunks))) as made:
                for index, chunk in enumerate(made):  # outside the translation, so that the caller's own errors stay unchanged
                    with _as_oserror(f"writing {self.describe(key)}"):
                        file.write(chunk)
                    total += len(chunk)
                    fault_point("data.chunk", index)
            if total != size:
                raise ValueError(f"{key}: {total} bytes were streamed, {size} announced")
            fault_point("data.written")
            with _as_oserror(f"writing {self.describe(key)}"):
                file.close()
            found = self.size(key)
            if found != size:
                raise OSError(errno.EIO, f"{self.describe(key)} has {found} bytes after {size} were written")
        except BaseException:
            # Closing a file opened for writing publishes its partial content. So discard it first, then delete what may exist.
            _discard(file)
            with suppress(Exception):
                self._fs.rm_file(path)
            raise
        fault_point("data.published")

    def put(self, key: str, data: bytes) -> None:
        path = self._path(key)
        exclusive = self._creates_exclusively() if key.startswith("commits/") else False
        if self.size(key) is not None:
            raise KeyExists(errno.EEXIST, "exists already", self.describe(key))
        try:
            with _as_oserror(f"writing {self.describe(key)}"):
                self._make_folder(path)
                if exclusive:
                    self._fs.pipe_file(path, data, mode="create")
                else:
                    self._fs.pipe_file(path, data)
        except FileExistsError as error:
            if not self._holds(key, data):
                raise KeyExists(errno.EEXIST, "exists already", self.describe(key)) from error
        except OSError:
            # Perhaps only the answer was lost.
            with suppress(OSError):
                if self._holds(key, data):
                    return
            raise
        if key.startswith("commits/"):
            fault_point("commit.linked")
        if not self._holds(key, data):
            raise KeyExists(errno.EEXIST, "was replaced by another writer", self.describe(key))

    def get(self, key: str) -> bytes:
        with _as_oserror(f"reading {self.describe(key)}", self.describe(key)):
            data: bytes = self._fs.cat_file(self._path(key))
            return data

    @contextmanager
    def open_read(self, key: str) -> Iterator[ParallelReader]:
        path = self._path(key)
        size = self.size(key)
        if size is None:
            raise KeyMissing(errno.ENOENT, "no such object", self.describe(key))

        def fetch(offset: int, view: memoryview, _cancel: threading.Event) -> None:
            with _as_oserror(f"reading {self.describe(key)}", self.describe(key)):
                data = self._fs.cat_file(path, start=offset, end=offset + len(view))
            if len(data) != len(view):
                raise OSError(errno.EIO, f"{self.describe(key)}: {len(data)} bytes came of {len(view)} from byte {offset} on")
            view[:] = data

        reader = ParallelReader(fetch, size, parallel=8, range_bytes=4 << 20)
        try:
            yield reader
        finally:
            reader.close()

    def size(self, key: str) -> int | None:
        path = self._path(key)
        try:
            with _as_oserror(f"looking for {self.describe(key)}"):
                self._fs.invalidate_cache()
                found = self._fs.info(path)
        except FileNotFoundError:
            return None
        return int(found["size"]) if found["type"] == "file" else None

    def list(self, prefix: str) -> list[Entry]:
        top = self._root + "/"
        try:
            with _as_oserror(f"listing {self.describe(prefix)}"):
                self._fs.invalidate_cache()
                found = self._fs.find(top + prefix.rstrip("/"), detail=True)
                if not found:
                    # Walking ignores unlistable folders. So check whether the root is empty or does not answer.
                    self._fs.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        entries = []
        for path, info in found.items():
            key = path.lstrip("/").removeprefix(top.lstrip("/"))
            if is_key(key) and key.startswith(prefix):
                entries.append(Entry(key, int(info["size"]), self._when(info)))
        return sorted(entries, key=lambda entry: entry.key)

    def clock(self) -> float:
        """This host's clock; fsspec has no other."""
        return time.time()

    def delete(self, key: str) -> bool:
        if self.size(key) is None:
            return False
        with suppress(FileNotFoundError), _as_oserror(f"deleting {self.describe(key)}"):
            self._fs.rm_file(self._path(key))
        return True

    def delete_many(self, keys: Sequence[str]) -> Iterator[tuple[str, OSError | None]]:
        return delete_each(self, keys)

    def tidy(self, prefix: str, older_than_s: float) -> int:
        return 0

    @property
    def _fs(self) -> Any:
        return self._open()[1]

    @property
    def _root(self) -> str:
        return self._open()[2]

    def _open(self) -> tuple[int, Any, str]:
        # The thread of asynchronous file systems does not survive a fork, so a child process makes its own.
        made = self._made
        if made is None or made[0] != os.getpid():
            import fsspec

            try:
                options = {"skip_instance_cache": True, "use_listings_cache": False, **self._options}
                fs, root = fsspec.core.url_to_fs(self._url, **options)
            except (ValueError, ImportError) as error:
                raise ValueError(f"checkpoint root {self._url!r}: {error}") from None
            made = self._made = (os.getpid(), fs, root.rstrip("/"))
        return made

    def _creates_exclusively(self) -> bool:
        """Whether the file system refuses to create an existing object. Probes and warns only once."""
        if self._exclusive is None:
            path = f"{self._root}/probes/{uuid.uuid4().hex}"
            refused = False
            with _as_oserror(f"probing {self._url}"):
                self._make_folder(path)
                try:
                    self._fs.pipe_file(path, b"1", mode="create")
                    try:
                        self._fs.pipe_file(path, b"2", mode="create")
                    except FileExistsError:
                        refused = True
                except (TypeError, NotImplementedError, ValueError):
                    refused = False  # the file system does not know mode=
                finally:
                    with suppress(Exception):
                        self._fs.rm_file(path)
            self._exclusive = refused
            _log.warning(
                "%s: checkpoints through fsspec are as safe as this file system: %s; durability and ages are its own, unfinished uploads "
                "are not collected",
                self._url,
                "it refuses to create an object twice"
                if refused
                else "it can't create exclusively, so make sure that only one process commits",
            )
        return self._exclusive

    def _holds(self, key: str, data: bytes) -> bool:
        try:
            return self.get(key) == data
        except KeyMissing:
            return False

    def _make_folder(self, path: str) -> None:
        # Object stores have no folders, and some create a bucket for one. So create folders only on local-like file systems.
        if getattr(self._fs, "local_file", False) or self._protocol() in ("memory", "hdfs", "sftp", "smb", "dir", "arrow_hdfs", "webhdfs"):
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)

    def _protocol(self) -> str:
        protocol = self._fs.protocol
        return str(protocol if isinstance(protocol, str) else protocol[0])

    def _when(self, info: dict[str, Any]) -> float:
        """Time of an object's last write. If the file system does not report it, the current time, so that the object never counts as
        old."""
        for name in _WHEN:
            value = info.get(name)
            if isinstance(value, int | float):
                return float(value)
            if isinstance(value, str):
                with suppress(ValueError):
                    value = datetime.fromisoformat(value)
            if isinstance(value, datetime):
                return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
        return self.clock()

    def _path(self, key: str) -> str:
        return f"{self._root}/{check_key(key)}"


@contextmanager
def _as_oserror(what: str, missing: str | None = None) -> Iterator[None]:
    """Turn other exceptions of client libraries into OSError, the only storage error that callers of a store handle."""
    try:
        yield
    except FileNotFoundError as error:
        if missing is None:
            raise
        raise KeyMissing(errno.ENOENT, "no such object", missing) from error
    except (OSError, ValueError, TypeError, NotImplementedError):
        raise
    except Exception as error:
        raise OSError(errno.EIO, f"{what}: {type(error).__name__}: {error}") from error


def _discard(file: Any) -> None:
    with suppress(Exception):
        file.discard()
    with suppress(Exception):
        file.closed = True  # otherwise the file system's __del__ would close it, which completes the upload
    with suppress(Exception):
        if not file.closed:
            file.close()


def _again(url: str, options: dict[str, Any]) -> FsspecStore:
    return FsspecStore(url, **options)
