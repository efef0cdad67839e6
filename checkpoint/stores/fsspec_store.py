"""A store over any fsspec file system: ``gs://``, ``abfs://``, ``hdfs://``, ``memory://``, ..

The guarantees are those of the file system; see :class:`FsspecStore`.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
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
    _parallel = 8
    _range_bytes = 4 << 20
    _atomic = False
    """True if a creation that succeeds is known to be the only one of its key."""

    def __init__(self, url: str, **options: Any) -> None:
        self._url = url
        self._options = options
        self._made: tuple[int, Any, str] | None = None
        self._exclusive: bool | None = None
        self._check_package()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.describe()!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self._url, self._options)

    def describe(self, key: str = "") -> str:
        return f"{self._url.rstrip('/')}/{key}" if key else self._url

    def put_stream(self, key: str, chunks: Iterable[memoryview], size: int) -> None:
        path = self._path(key)
        if self.size(key) is not None:
            raise self._taken(key)
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
        commit = check_key(key).startswith("commits/")
        if commit:
            self._before_commit()
            fault_point("commit.tmp_synced")
        self._create(key, data)
        if commit:
            fault_point("commit.linked")
            fault_point("commit.published")

    def _create(self, key: str, data: bytes | memoryview) -> None:
        """Create an object that another writer may create as well. After a lost answer, checks whether it took effect."""
        token = uuid.uuid4().hex
        if not self._atomic and self.size(key) is not None:
            raise self._taken(key)
        try:
            self._write(key, data, token)
        except FileExistsError as error:
            if not self._is_mine(key, data, token):
                raise self._taken(key) from error
        except OSError:
            with suppress(OSError):
                if self._is_mine(key, data, token):
                    return
            raise
        if not self._atomic and not self._is_mine(key, data, token):
            raise KeyExists(errno.EEXIST, "was replaced by another writer", self.describe(key))

    def _write(self, key: str, data: bytes | memoryview, token: str) -> None:
        """Write a whole object, and commits and probes only if the key is free, unless the storage does not know that condition."""
        exclusive = key.startswith(("commits/", "probes/")) and self._exclusive is not False
        with _as_oserror(f"writing {self.describe(key)}"):
            self._make_folder(self._path(key))
            self._fs.pipe_file(self._path(key), data, **({"mode": "create"} if exclusive else {}))

    def _is_mine(self, key: str, data: bytes | memoryview, token: str) -> bool:
        """Return whether the object at ``key`` was created with this content and token."""
        try:
            return self.get(key) == data
        except KeyMissing:
            return False

    def _taken(self, key: str) -> KeyExists:
        return KeyExists(errno.EEXIST, "exists already", self.describe(key))

    def get(self, key: str) -> bytes:
        with _as_oserror(f"reading {self.describe(key)}", self.describe(key)):
            data: bytes = self._fs.cat_file(self._path(key))
            return data

    def open_read(self, key: str) -> ParallelReader:
        size, tag = self._stat(key)
        return ParallelReader(partial(self._fetch, key, tag, size), size, parallel=self._parallel, range_bytes=self._range_bytes)

    def _fetch(self, key: str, tag: str | None, size: int, offset: int, view: memoryview, cancel: threading.Event) -> None:
        with _as_oserror(f"reading {self.describe(key)}", self.describe(key)):
            data = self._fs.cat_file(self._path(key), start=offset, end=offset + len(view))
        if len(data) != len(view):
            raise OSError(errno.EIO, f"{self.describe(key)}: only {len(data)} of {len(view)} bytes could be read from byte {offset} on")
        view[:] = data

    def size(self, key: str) -> int | None:
        try:
            return self._stat(key)[0]
        except KeyMissing:
            return None

    def _stat(self, key: str) -> tuple[int, str | None]:
        """Return the bytes of an object, and a tag that changes with its content, if the file system has one."""
        with _as_oserror(f"looking for {self.describe(key)}", self.describe(key)):
            self._fs.invalidate_cache()
            found = self._fs.info(self._path(key))
        if found["type"] != "file":
            raise KeyMissing(errno.ENOENT, "no such object", self.describe(key))
        return int(found["size"]), None

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
        """Return this host's clock; fsspec has no other."""
        return time.time()

    def delete(self, key: str) -> bool:
        if self.size(key) is None:
            return False
        self._remove(key)
        return True

    def _remove(self, key: str) -> None:
        with suppress(FileNotFoundError), _as_oserror(f"deleting {self.describe(key)}"):
            self._fs.rm_file(self._path(key))

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
        # The thread of asynchronous file systems does not survive a fork, so a child process makes its own. Without a lock, which a fork
        # could leave locked: two threads may each make a file system, and the later one stays.
        made = self._made
        if made is None or made[0] != os.getpid():
            made = self._made = (os.getpid(), *self._make())
        return made

    def _make(self) -> tuple[Any, str]:
        import fsspec

        try:
            options = {"skip_instance_cache": True, "use_listings_cache": False, **self._options}
            fs, root = fsspec.core.url_to_fs(self._url, **options)
        except (ValueError, ImportError) as error:
            raise ValueError(f"checkpoint root {self._url!r}: {error}") from None
        return fs, root.rstrip("/")

    def _check_package(self) -> None:
        """Fail now, not at the first save, if the protocol's package is missing."""
        self._open()

    def _before_commit(self) -> None:
        """Probe, once, whether the file system refuses to create an existing object, and warn of its limits."""
        if self._exclusive is not None:
            return
        self._exclusive = self._refuses_second_creation()
        _log.warning(
            "%s: checkpoints have only the guarantees of this fsspec file system: %s; durability and file times are its own, and "
            "unfinished uploads are not deleted",
            self._url,
            "it refuses to create an object twice"
            if self._exclusive
            else "it can't create exclusively, so make sure that only one process commits",
        )

    def _refuses_second_creation(self) -> bool:
        key = f"probes/{uuid.uuid4().hex}"
        try:
            with suppress(FileExistsError):  # the answer to the first creation was lost
                self._write(key, b"1", "")
            try:
                self._write(key, b"2", "")
            except FileExistsError:
                return True
        except (TypeError, NotImplementedError, ValueError):
            pass  # the file system does not know mode=
        finally:
            with suppress(Exception):
                self._remove(key)
        return False

    def _make_folder(self, path: str) -> None:
        # Object stores have no folders, and some create a bucket for one. So create folders only on local-like file systems.
        if getattr(self._fs, "local_file", False) or self._protocol() in ("memory", "hdfs", "sftp", "smb", "dir", "arrow_hdfs", "webhdfs"):
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)

    def _protocol(self) -> str:
        protocol = self._fs.protocol
        return str(protocol if isinstance(protocol, str) else protocol[0])

    def _when(self, info: dict[str, Any]) -> float:
        """Return the time of an object's last write. If the file system does not report it, the current time, so that the object never
        counts as old."""
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


def _unlock_fsspec() -> None:
    """In a forked child, replace the lock of fsspec's event loop, which another thread may have held. fsspec does not."""
    if asyn := sys.modules.get("fsspec.asyn"):
        asyn.reset_lock()


os.register_at_fork(after_in_child=_unlock_fsspec)


def _again(url: str, options: dict[str, Any]) -> FsspecStore:
    return FsspecStore(url, **options)
