"""The folder of a run: what it writes while it runs, and how anyone reads it during and afterwards.

    config.yaml     the resolved configuration; `vescale-ray train RUN_FOLDER/config.yaml` resumes the run
    run.json        state of the run: one object, replaced atomically
    control.json    url, token and host of the controller, readable by the owner only
    vescale_service_discovery.json    where Prometheus finds the metrics; only while the run goes on
    metrics.jsonl   one line per committed step
    events.jsonl    one line per event
    samples.jsonl   the sample ids that each step consumed
    checkpoints/    see vescale_ray.checkpoint
    hangs/          where every worker stood when one hung
    failures/       tracebacks and stacks of all workers of a run that was given up
    curve.png       the picture that report.draw makes

Lines are only ever appended. After a rollback the replayed steps are written again with a higher generation; readers keep
the last line of each step and drop lines of steps that a rollback undid (:func:`committed`). Imports neither torch nor Ray.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import socket
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, count
from pathlib import Path
from typing import IO, Any

from vescale_ray.errors import BadInput

Record = dict[str, Any]

DISCOVERY = "vescale_service_discovery.json"
REPLACED = frozenset({"run.json", "control.json", "controller.json", "config.yaml", DISCOVERY})
"""Files that are written beside their place first, under a name of their own with a dot before it and a random ending."""
LAST_TIME = 1e11
"""Seconds since the epoch, in the year 5138: what is beyond, or is no number, no run has written."""
_BLOCK = 1 << 18
"""Bytes that are read at a time from a file's end on."""
FINAL_STATES = frozenset({"DONE", "FAILED", "STOPPED"})
"""States in run.json after which nothing of the run is alive."""


class RunFolderError(BadInput):
    """The folder can't be made or written, is in use by another run, or is none; the message is one line with its path and the remedy."""


def unlockable(error: OSError) -> str:
    """What a file system that refuses flock(2) itself lacks, and the remedy."""
    return (
        f"files can't be locked there ({error.strerror or error}), and two runs in one folder would mix their lines; mount it with locks "
        "(Lustre: -o flock; NFS: without nolock), or set run.dir to another file system: checkpoint.dir may stay on this one"
    )


class RunFolder:
    """Readers and writers of one run's files. Holds nothing but the path: any number may exist, in any process."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"

    @property
    def config_path(self) -> Path:
        return self.path / "config.yaml"

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints lie unless the configuration names another folder."""
        return self.path / "checkpoints"

    @property
    def curve_path(self) -> Path:
        return self.path / "curve.png"

    # ------------------------------------------------------------------------------------------------------------- writing

    def create(self) -> RunFolder:
        """Make the folder, and prove that it can be written.

        Raises:
            RunFolderError: it can't.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path):
                pass
        except OSError as error:
            raise RunFolderError(f"{self.path}: can't be written ({error.strerror}); set run.dir to a folder that can") from None
        return self

    def discard(self) -> None:
        """Remove a folder in which no run has begun; one that holds anything but the lock and an empty ``checkpoints/`` stays."""
        try:
            if self.checkpoints.is_dir():
                self.checkpoints.rmdir()
            if {path.name for path in self.path.iterdir()} <= {"lock"}:
                (self.path / "lock").unlink(missing_ok=True)
                self.path.rmdir()
        except OSError:
            pass  # something is in it: it is somebody's

    def claim(self) -> IO[str]:
        """Take the run for this process: two runs in one folder would mix their lines. Held until the file returned is closed
        or the process ends, however it ends (a lock of the kernel's).

        Raises:
            RunFolderError: another live process has it, or no file can be locked there.
        """
        handle = open(self.path / "lock", "a+", encoding="utf-8")
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # the second in CIFS
            handle.seek(0)
            owner = handle.read().strip() or "unknown"
            handle.close()
            raise RunFolderError(
                f"{self.path}: a run is going on here (process {owner}); end it with `vescale-ray stop {self.path}` or set another run.name"
            ) from None
        except OSError as error:
            handle.close()
            self.discard()
            raise RunFolderError(f"{self.path}: {unlockable(error)}") from None
        handle.truncate(0)
        handle.write(f"{os.getpid()} on {socket.gethostname()}\n")
        handle.flush()
        return handle

    def owner(self) -> str | None:
        """The process id and the machine of the live driver that has the run, as it has written them; None when there is none that a lock
        shows: of a driver on another machine, only a network file system shows it."""
        try:
            with open(self.path / "lock", encoding="utf-8") as handle:
                try:
                    fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except (BlockingIOError, PermissionError):
                    return handle.read().strip() or "unknown"
        except OSError:
            pass
        return None

    def append_metrics(self, record: Mapping[str, Any]) -> None:
        """One line of a committed step; ``step`` counts completed steps, from 1."""
        self._append("metrics.jsonl", record)

    def append_event(self, record: Mapping[str, Any]) -> None:
        """One event; ``time`` is filled in when it is missing."""
        self._append("events.jsonl", {"time": time.time(), **record})

    def write_hang(self, name: str, text: str) -> Path:
        """Keep a report of a hang, beside those of the same name; its path."""
        return self._keep("hangs", name, text)

    def write_failure(self, name: str, text: str) -> Path:
        """Keep what is known of the failures that ended a run; its path."""
        return self._keep("failures", name, text)

    def _keep(self, kind: str, name: str, text: str) -> Path:
        folder = self.path / kind
        folder.mkdir(exist_ok=True)
        names = chain([name], (f"{name}-{number}" for number in count(2)))
        path = next(path for one in names if not (path := folder / f"{one}.txt").exists())
        path.write_text(text, encoding="utf-8")
        return path

    def append_samples(self, step: int, generation: int, ids: Iterable[int]) -> None:
        """The ids that 0-based ``step`` consumed, of all ranks."""
        self._append("samples.jsonl", {"step": step, "generation": generation, "ids": [int(one) for one in ids]})

    def write_state(self, record: Mapping[str, Any]) -> None:
        """Replace run.json: a reader sees the old object or the new one, never a part."""
        self._replace("run.json", json.dumps(plain(record), indent=1) + "\n", mode=0o644)

    def write_control(self, url: str, token: str) -> None:
        """Replace control.json, readable by the owner only: the token lets its holder stop and rescale the run. With the name of this
        machine, by which a reader on another one knows that a loopback address is not its own."""
        self._replace("control.json", json.dumps({"url": url, "token": token, "host": socket.gethostname()}) + "\n", mode=0o600)

    def write_discovery(self, url: str) -> None:
        """Replace vescale_service_discovery.json, which tells Prometheus (``file_sd_configs``) to scrape the server at ``url``.

        Without a label for the run: the metrics have one.
        """
        found = [{"labels": {"job": "vescale-ray"}, "targets": [url.partition("://")[2].rstrip("/")]}]
        self._replace(DISCOVERY, json.dumps(found) + "\n", mode=0o644)

    def write_config(self, text: str) -> None:
        """Replace config.yaml."""
        self._replace("config.yaml", text, mode=0o644)

    def clear_discovery(self) -> None:
        """Remove the service discovery: a run that ends is to be scraped no more."""
        (self.path / DISCOVERY).unlink(missing_ok=True)

    def clear_control(self) -> None:
        """Remove control.json and the service discovery: nothing listens any more."""
        for name in ("control.json", DISCOVERY):
            (self.path / name).unlink(missing_ok=True)

    def clear_leftovers(self) -> None:
        """Remove what a writer that was killed has left of files that it was about to replace. Only while nobody writes."""
        for path in self.path.glob(".*"):
            name, _, suffix = path.name.removeprefix(".").rpartition(".")
            if suffix and name in REPLACED:
                path.unlink(missing_ok=True)

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        line = json.dumps(plain(record), separators=(",", ":")).encode() + b"\n"
        # One write in append mode: no other writer's line can lie between. A line that a crash cut short is ended first.
        descriptor = os.open(self.path / name, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                line = b"\n" + line
            # A disk that is nearly full takes a part, and only then says so: what was cut short is written again, on a line of its own.
            while line:
                line = line[os.write(descriptor, line) :]
        finally:
            os.close(descriptor)

    def _replace(self, name: str, text: str, *, mode: int) -> None:
        descriptor, temporary = tempfile.mkstemp(dir=self.path, prefix=f".{name}.")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as handle:
                os.fchmod(handle.fileno(), mode)
                handle.write(text)
            os.replace(temporary, self.path / name)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise

    # ------------------------------------------------------------------------------------------------------------- reading

    def read_state(self) -> Record | None:
        """run.json, or None when the run has not written it."""
        return self._read_object("run.json")

    def read_control(self) -> Record | None:
        """control.json (``url``, ``token``, ``host``), or None when nothing listens."""
        return self._read_object("control.json")

    def read_metrics(self) -> list[Record]:
        """The line of each committed step, by step."""
        return committed(self.read_all_metrics())

    def read_all_metrics(self) -> list[Record]:
        """Every line as written, undone steps included."""
        return self._read_lines("metrics.jsonl")

    def each_metrics(self, offset: int = 0) -> Iterator[Record]:
        """The same, one after the other, from a byte on at which a line begins: the lines of a long run with many ranks are gigabytes."""
        return self._each_line("metrics.jsonl", offset)

    def marked_metrics(self, key: str, least: int) -> int:
        """Where the last line of the metrics begins that has ``key`` and is followed by ``least`` others or more; 0 if there is none. Reads
        the file's end alone."""
        needle, name = b'"%s":' % key.encode(), "metrics.jsonl"
        try:
            with (self.path / name).open("rb") as file:
                end, after, rest = file.seek(0, os.SEEK_END), 0, b""
                while end > 0:
                    start = max(0, end - _BLOCK)
                    file.seek(start)
                    raw = file.read(end - start) + rest
                    # What lies before the first line's end is a part of a line, unless it is the file's beginning.
                    whole = raw.find(b"\n") + 1 if start else 0
                    at = start + len(raw)
                    if start and not whole:
                        end, rest = start, raw
                        continue
                    for number, line in enumerate(reversed(raw[whole:].split(b"\n"))):
                        at -= len(line) + (number > 0)
                        if needle in line and after >= least and any(key in record for record in _parse(line, name)):
                            return at
                        after += bool(line)
                    end, rest = start, raw[:whole]
        except (FileNotFoundError, NotADirectoryError):
            pass
        return 0

    def read_events(self) -> list[Record]:
        """All events in the order in which they happened."""
        return self._read_lines("events.jsonl")

    def each_samples(self) -> Iterator[Record]:
        """Every line of consumed ids as written, undone steps included, one after the other."""
        return self._each_line("samples.jsonl")

    def read_samples(self) -> list[Record]:
        """The line of consumed ids of each committed step, by step."""
        return committed(self.read_all_samples())

    def read_all_samples(self) -> list[Record]:
        """Every line of consumed ids as written, undone steps included."""
        return self._read_lines("samples.jsonl")

    def last_samples(self) -> Record | None:
        """The newest line of consumed ids; None if there is none."""
        return self._last_line("samples.jsonl")

    def last_step(self) -> int:
        """Of the newest line of the metrics; 0 if there is none."""
        return int((self.last_metrics() or {}).get("step") or 0)

    def last_metrics(self) -> Record | None:
        """The newest line of the metrics; None if there is none."""
        return self._last_line("metrics.jsonl")

    def size_of(self, name: str) -> int:
        """Bytes of a file of the folder; 0 if there is none."""
        path = self.path / name
        return path.stat().st_size if path.is_file() else 0

    def _last_line(self, name: str) -> Record | None:
        """The newest whole line; None if there is none. Reads the file's end alone, which grows to gigabytes."""
        try:
            with (self.path / name).open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                length = 1 << 16
                while True:
                    start = max(0, size - length)
                    file.seek(start)
                    # What lies before the first line's end is a part of a line, unless it is the file's beginning.
                    raw = file.read(size - start)
                    found = _parse(raw if start == 0 else raw.partition(b"\n")[2], name)
                    if found or start == 0:
                        return found[-1] if found else None
                    length *= 4
        except (FileNotFoundError, NotADirectoryError):
            return None

    def is_run(self) -> bool:
        """Whether a run has ever written here."""
        return self.config_path.is_file() or (self.path / "run.json").is_file()

    def _read_object(self, name: str) -> Record | None:
        try:
            value = json.loads((self.path / name).read_text(encoding="utf-8"), parse_constant=lambda text: None)  # NaN: not of our writing
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (ValueError, RecursionError):
            raise RunFolderError(f"{self.path / name}: is not JSON; the file was changed from outside") from None
        if not isinstance(value, dict):
            raise RunFolderError(f"{self.path / name}: is not a JSON object; the file was changed from outside")
        return value

    def _read_lines(self, name: str) -> list[Record]:
        return list(self._each_line(name))

    def _each_line(self, name: str, offset: int = 0) -> Iterator[Record]:
        try:
            with (self.path / name).open("rb") as file:
                file.seek(offset)
                for raw in file:
                    yield from _parse(raw, name)
        except (FileNotFoundError, NotADirectoryError):
            return

    def tail_metrics(self, *, skip_old: bool = False) -> Tail:
        """A reader of the metrics as they come; ``skip_old`` starts it behind what is there."""
        return self._tail("metrics.jsonl", skip_old)

    def tail_events(self, *, skip_old: bool = False) -> Tail:
        """A reader of the events as they come."""
        return self._tail("events.jsonl", skip_old)

    def _tail(self, name: str, skip_old: bool) -> Tail:
        tail = Tail(self.path / name)
        if skip_old:
            tail.read()
        return tail


class Tail:
    """Reads a file of JSON lines while it grows: each :meth:`read` gives the records completed since the one before."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[Record]:
        try:
            with open(self._path, "rb") as handle:
                handle.seek(self._offset)
                raw = handle.read()
        except FileNotFoundError:
            return []
        end = raw.rfind(b"\n") + 1
        self._offset += end
        return _parse(raw[:end], self._path.name)


def committed(lines: Sequence[Record]) -> list[Record]:
    """The lines that count, by step: a line of step ``s`` undoes every earlier line of a step ``>= s``, because the run went
    back to before ``s`` when it wrote it."""
    kept: list[Record] = []
    for line in lines:
        while kept and kept[-1]["step"] >= line["step"]:
            kept.pop()
        kept.append(line)
    return kept


def newest_run(folder: str | os.PathLike[str] = "runs") -> RunFolder:
    """The run folder under ``folder`` whose run.json (or config.yaml) changed last.

    Raises:
        RunFolderError: there is none.
    """
    runs = list_runs(folder)
    if not runs:
        raise RunFolderError(f"{os.path.abspath(folder)}: holds no run; give a run's folder, or start one with `vescale-ray demo`")
    return runs[-1]


def list_runs(folder: str | os.PathLike[str] = "runs") -> list[RunFolder]:
    """All run folders under ``folder``, the newest last."""
    root = Path(folder)
    if not root.is_dir():
        return []
    found = [RunFolder(path) for path in root.iterdir() if path.is_dir()]
    return sorted((run for run in found if run.is_run()), key=lambda run: (_changed(run), run.path.name))


def _parse(raw: bytes, name: str) -> list[Record]:
    """The whole lines of the file ``name`` that are in ``raw``; what is no line of such a file is left out."""
    records = []
    for line in raw.splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue  # cut short by a crash, or by reading while it is written
        if isinstance(record, dict) and _is_ours(record, name):
            records.append(record)
    return records


def _is_ours(record: Record, name: str) -> bool:
    """Whether a line has what all lines of its file have: everybody who reads them relies on it."""

    def a(kind: type | tuple[type, ...], key: str, *, there: bool = True) -> bool:
        value = record.get(key)
        return not there if value is None else isinstance(value, kind) and not isinstance(value, bool)

    match name:
        case "metrics.jsonl":
            return a(int, "step") and a((int, float), "time", there=False) and abs(record.get("time") or 0) < LAST_TIME
        case "events.jsonl":
            return a(str, "event") and a((int, float), "time") and abs(record["time"]) < LAST_TIME
        case "samples.jsonl":
            return a(int, "step") and a(list, "ids")
    return True


def _changed(run: RunFolder) -> float:
    times = [path.stat().st_mtime for path in (run.path / "run.json", run.config_path) if path.exists()]
    return max(times, default=0.0)


def plain(value: Any) -> Any:
    """The value as JSON holds it: keys are text, and figures that are not finite become null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return value
