"""A store in files of a local or shared POSIX file system.

Large objects are written with O_DIRECT from aligned buffers, or buffered if the file system refuses it. Direct writes bypass the page
cache, cost 5 to 8 times less CPU, and leave the trainer's cached pages alone. Every creation is exclusive. Every call syncs the file and
the folders above it before it returns, except for messages (``attempts/``), which need not last. A failed fsync is final for its file: the
kernel may have dropped the dirty pages, so a second fsync would falsely report success.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import tempfile
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from ..faults import fault_point
from ..saving.bounded import in_daemons
from .store import ALIGNMENT, UNDER_WAY, Entry, KeyExists, KeyMissing, check_key, delete_each, is_key

_DIRECT = getattr(os, "O_DIRECT", 0)

_TMP = ".tmp-"
# Not every file system supports fsync of a folder; these errors mean "not supported", not "failed".
_NO_DIR_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EPERM)
_NOTHING = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


class PosixStore:
    """Files below ``root``. Nothing is created before the first ``put``."""

    request_bytes = 1 << 20
    """Bytes of a request. Measured: two processes load 1 GiB from a local disk, with every block verified. Requests of 1, 2 and 4 MiB in 8,
    4 and 4 streams are 1.18, 1.16 and 1.03 times as fast as a raw read in requests of 16 MiB (2 cores, 22 interleaved rounds). On a slower
    machine they are 0.94, 0.92 and 0.88 times as fast (11 rounds)."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(os.path.abspath(os.fspath(root)))

    def __repr__(self) -> str:
        return f"PosixStore({str(self.root)!r})"

    def describe(self, key: str = "") -> str:
        return str(self.root / key) if key else str(self.root)

    def put_stream(self, key: str, chunks: Iterable[memoryview], size: int) -> None:
        path = self._path(key)
        self._make_folder(path)
        fd, direct = _create(path)
        try:
            try:
                fault_point("data.created")
                _reserve(fd, size)
                written, direct = _write_chunks(fd, chunks, direct)
                if written != size:
                    raise ValueError(f"{key}: {written} bytes were streamed, {size} announced")
                fault_point("data.written")
                os.fsync(fd)
                fault_point("data.synced")
                if not direct:
                    # This host rarely reads checkpoint bytes back; do not evict the trainer's pages for them.
                    with suppress(OSError):
                        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
        except BaseException:
            with suppress(OSError):
                path.unlink()
            raise
        self._sync_folders(path.parent)
        fault_point("data.published")

    def put(self, key: str, data: bytes) -> None:
        path = self._path(key)
        self._make_folder(path)
        point = key.startswith("commits/")
        # Messages between a save's ranks matter only while the ranks live, and all ranks wait for them.
        lasting = not key.startswith("attempts/")
        tmp = path.parent / f"{_TMP}{uuid.uuid4().hex}"
        fd = os.open(tmp, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644)
        try:
            try:
                _write_all(fd, memoryview(data), 0, direct=False)
                if point:
                    fault_point("commit.tmp_written")
                if lasting:
                    os.fsync(fd)
                if point:
                    fault_point("commit.tmp_synced")
            finally:
                os.close(fd)
            try:
                # Only link() is exclusive and atomic on both POSIX and NFS; rename() would overwrite.
                os.link(tmp, path)
            except FileExistsError:
                # NFS repeats a link whose answer was lost, and then reports that the name is taken, by this very file.
                if not _same_file(tmp, path):
                    # The existing file may be the caller's own, from an earlier failed try, and must be durable too.
                    sync_folder(path.parent)
                    raise KeyExists(errno.EEXIST, "exists already", str(path)) from None
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                text = "this file system has no hard links, without which a commit can't be exclusive; use another, or an object store"
                raise OSError(error.errno, text, str(path)) from error
            if point:
                fault_point("commit.linked")
            if lasting:
                self._sync_folders(path.parent)
            if point:
                fault_point("commit.published")
        finally:
            with suppress(OSError):
                tmp.unlink()

    def get(self, key: str) -> bytes:
        try:
            if self.size(key) is not None:
                return self._path(key).read_bytes()
            raise FileNotFoundError
        except (FileNotFoundError, NotADirectoryError):
            raise KeyMissing(errno.ENOENT, "no such object", self.describe(key)) from None

    @contextmanager
    def open_read(self, key: str) -> Iterator[PosixReader]:
        try:
            fd, direct = _open_read(self._path(key))
        except (FileNotFoundError, NotADirectoryError):
            raise KeyMissing(errno.ENOENT, "no such object", self.describe(key)) from None
        reader = PosixReader(fd, direct)
        try:
            yield reader
        finally:
            os.close(fd)

    def size(self, key: str) -> int | None:
        try:
            status = self._path(key).stat()
        except OSError as error:
            if error.errno not in _NOTHING:
                raise
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None  # reading a pipe or a device might never end

    def list(self, prefix: str) -> list[Entry]:
        top = self.root / prefix
        found: list[Entry] = []
        if not top.is_dir():
            return found

        def unlisted(error: OSError) -> None:
            # An unreadable folder is not empty, but one deleted by another collector is. Unreadable subfolders, which may be another
            # user's, are skipped.
            if error.errno not in _NOTHING and Path(error.filename) == top:
                raise error

        for folder, _, names in os.walk(top, onerror=unlisted):
            for name in names:
                path = Path(folder, name)
                if not is_key(path.relative_to(self.root).as_posix()):
                    continue
                # Another collector may delete a file that was just listed.
                try:
                    status = path.stat()
                except OSError as error:
                    if error.errno not in _NOTHING:
                        raise
                else:
                    if stat.S_ISREG(status.st_mode):
                        found.append(Entry(path.relative_to(self.root).as_posix(), status.st_size, status.st_mtime))
        return sorted(found, key=lambda entry: entry.key)

    def clock(self) -> float:
        """Return the file system's clock, on NFS the server's; the local clock only if nothing can be written."""
        try:
            with tempfile.TemporaryFile(dir=self.root) as probe:
                probe.write(b"0")
                probe.flush()
                return os.fstat(probe.fileno()).st_mtime
        except OSError:
            return time.time()

    def delete(self, key: str) -> bool:
        path = self._path(key)
        try:
            path.unlink()
        except (FileNotFoundError, NotADirectoryError):
            return False
        if key.startswith("commits/"):
            # The commit's deletion must be durable before its data goes.
            sync_folder(path.parent)
        else:
            with suppress(OSError):
                path.parent.rmdir()  # removes the attempt's folder with its last object; fails while others are left
        return True

    def delete_many(self, keys: Sequence[str]) -> Iterator[tuple[str, OSError | None]]:
        return delete_each(self, keys)

    def tidy(self, prefix: str, older_than_s: float) -> int:
        top = self.root / prefix
        removed = 0
        if not top.is_dir():
            return removed
        now = self.clock()
        for folder, _, names in os.walk(top, topdown=False):
            for name in names:
                path = Path(folder, name)
                with suppress(OSError):
                    if name.startswith(_TMP) and now - path.stat().st_mtime >= older_than_s:
                        path.unlink()
                        removed += 1
            if Path(folder) != top:
                with suppress(OSError):
                    if now - os.stat(folder).st_mtime >= older_than_s:
                        os.rmdir(folder)  # fails, as intended, unless the folder is empty
                        removed += 1
        return removed

    def _path(self, key: str) -> Path:
        return self.root / check_key(key)

    def _make_folder(self, path: Path) -> None:
        above = [] if self.root.is_dir() else [folder for folder in self.root.parents if not folder.is_dir()]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            for folder in above:  # the entries from the root down are synced after each creation
                sync_folder(folder.parent)
        except (FileExistsError, NotADirectoryError):
            raise NotADirectoryError(errno.ENOTDIR, "a file is where the checkpoint's folder should be", str(path.parent)) from None

    def _sync_folders(self, folder: Path) -> None:
        """Make the entries of ``folder`` and every folder up to the root durable, whichever rank created them."""
        while True:
            sync_folder(folder)
            if folder == self.root or folder == folder.parent:
                break
            folder = folder.parent
        sync_folder(self.root.parent)


class PosixReader:
    """A file opened for reading. It falls back from O_DIRECT to buffered reads if the file system requires it."""

    def __init__(self, fd: int, direct: bool) -> None:
        self._fd = fd
        self._direct = direct

    def expect(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Do nothing: the caller's own read-ahead keeps a local disk busy."""

    def read_into(self, offset: int, view: memoryview) -> int:
        if self._direct and (offset % ALIGNMENT or len(view) % ALIGNMENT):
            self._buffered()
        done = 0
        while done < len(view):
            try:
                count = os.preadv(self._fd, [view[done:]], offset + done)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                self._buffered()
                continue
            if count == 0:
                break
            done += count
            if self._direct and done % ALIGNMENT and done < len(view):
                # After a short direct read, the file ends or the rest begins at an unaligned position.
                self._buffered()
        return done

    def _buffered(self) -> None:
        _set_direct(self._fd, False)
        self._direct = False


def _create(path: Path) -> tuple[int, bool]:
    """Create a file exclusively, with O_DIRECT if the file system supports it. Returns (descriptor, direct)."""
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
    try:
        if _DIRECT:
            try:
                return os.open(path, flags | _DIRECT, 0o644), True
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                    raise
                # Some kernels create the file before they refuse the flag.
                if path.exists() and path.stat().st_size == 0:
                    path.unlink()
        return os.open(path, flags, 0o644), False
    except FileExistsError:
        raise KeyExists(errno.EEXIST, "exists already", str(path)) from None


def _same_file(first: Path, second: Path) -> bool:
    try:
        return os.path.samefile(first, second)
    except OSError:
        return False


def _open_read(path: Path) -> tuple[int, bool]:
    flags = os.O_RDONLY | os.O_CLOEXEC
    if _DIRECT:
        try:
            return os.open(path, flags | _DIRECT), True
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
    return os.open(path, flags), False


def _set_direct(fd: int, direct: bool) -> None:
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags | _DIRECT if direct else flags & ~_DIRECT)


def _reserve(fd: int, size: int) -> None:
    """Reserve the space first, so that a full disk fails before the first byte, and the file is contiguous."""
    if not size:
        return
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            raise


def _write_chunks(fd: int, chunks: Iterable[memoryview], direct: bool) -> tuple[int, bool]:
    """Write the chunks, :data:`UNDER_WAY` at once. Returns the number of bytes, and whether the descriptor still writes directly.

    Each thread requests a chunk, which makes it (copied and hashed, one thread at a time), and writes it while the next thread requests
    one. Handing chunks from thread to thread took a third of a save's time on a virtual machine, to wake the threads.
    """
    stream = _Stream(iter(chunks), direct)
    in_daemons(UNDER_WAY, "write", partial(stream.run, fd), stream.end)
    try:
        if stream.errors:
            raise stream.errors[min(stream.errors)]
    finally:
        stream.errors.clear()  # errors hold frames, which hold the state
    return stream.offset, stream.direct


class _Stream:
    """State that the threads that write one object share."""

    def __init__(self, chunks: Iterator[memoryview], direct: bool) -> None:
        self.direct = direct
        self.offset = 0
        self.ended = False
        self.errors: dict[int, BaseException] = {}
        self._chunks = chunks
        self._number = 0
        self._turn = threading.Lock()
        """Held by the thread that requests a chunk."""
        self._memory = [threading.Lock() for _ in range(UNDER_WAY)]
        """Lock of chunk ``number % UNDER_WAY``, held until the chunk is written. Only then may the next chunk in that memory be
        requested."""

    def end(self) -> None:
        self.ended = True

    def run(self, shared: int) -> None:
        """Write chunks until the stream ends, through a duplicate of the descriptor ``shared``. After a second Ctrl-C, the caller closes
        ``shared`` while this thread goes on. Another file could then get that number, and this thread's bytes."""
        number = 0
        try:
            with os.fdopen(os.dup(shared), "wb", buffering=0) as own:
                fd = own.fileno()
                while True:
                    with self._turn:
                        number = self._number
                        memory = self._memory[number % UNDER_WAY]
                        memory.acquire()
                        try:
                            chunk = self._next(fd, number, memory)
                        except BaseException:
                            memory.release()
                            raise
                        if chunk is None:
                            memory.release()
                            return
                        offset = self.offset - len(chunk)
                    try:
                        if not _write_all(fd, chunk, offset, self.direct):
                            self.direct = False
                    finally:
                        memory.release()
                    fault_point("data.chunk", number)
        except BaseException as error:
            self.errors[number] = error
            self.ended = True

    def _next(self, fd: int, number: int, own: threading.Lock) -> memoryview | None:
        chunk = None if self.ended else next(self._chunks, None)
        if chunk is None:
            self.ended = True
            return None
        if len(chunk) % ALIGNMENT and self.direct:
            self._buffered(fd, own)
        self.offset += len(chunk)
        self._number = number + 1
        return chunk

    def _buffered(self, fd: int, own: threading.Lock) -> None:
        """Switch to buffered writes, once the chunks before are written directly."""
        for memory in self._memory:
            if memory is not own:
                with memory:
                    pass
        _set_direct(fd, False)
        self.direct = False


def _write_all(fd: int, view: memoryview, offset: int, direct: bool) -> bool:
    """Write every byte at ``offset``. Returns whether the descriptor still writes directly."""
    done = 0
    while done < len(view):
        try:
            count = os.pwrite(fd, view[done:], offset + done)
        except OSError as error:
            if error.errno != errno.EINVAL or not direct:
                raise
            # Some FUSE and overlay file systems accept O_DIRECT at open and refuse it at the first write.
            _set_direct(fd, False)
            direct = False
            continue
        if count == 0:
            raise OSError(errno.EIO, "write made no progress")
        done += count
        if direct and done % ALIGNMENT and done < len(view):
            # After a short direct write, go on at an aligned position. If not even one block was written, switch to buffered writes, or the
            # loop would never end.
            if done % ALIGNMENT == count:
                _set_direct(fd, False)
                direct = False
            else:
                done -= done % ALIGNMENT
    return direct


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, if its file system supports that."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _NO_DIR_SYNC:
            return
        raise
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _NO_DIR_SYNC:
            raise
    finally:
        os.close(fd)
