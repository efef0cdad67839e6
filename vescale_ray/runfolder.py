"""The folder of a run: the files that a run writes, and their readers.

    config.yaml     the resolved configuration; `vescale-ray train RUN_FOLDER/config.yaml` resumes the run
    run.json        state of the run: one object, replaced atomically
    control.json    url, token and host of the controller, readable by the owner only
    vescale_service_discovery.json    address of the metrics for Prometheus; exists only while the run is alive
    metrics.jsonl   one line per committed step
    events.jsonl    one line per event
    samples.jsonl   the sample ids that each step consumed
    checkpoints/    see vescale_ray.checkpoint
    model/          configuration, tokenizer and buffers of model.hf, for `vescale-ray ckpt export-hf`
    tensorboard/    event files, if metrics.tensorboard is set
    wandb/          files of Weights & Biases, if metrics.wandb is set
    profiles/       traces and memory snapshots of train.profile
    hangs/          stacks of every worker at a hang
    failures/       tracebacks and stacks of all workers of a run that failed
    curve.png       the picture that report.draw makes

Lines are only appended. After a rollback the replayed steps are written again with a higher generation. Readers keep the last line of
each step and drop lines of steps that a rollback undid (:func:`committed`). Imports neither torch nor Ray.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import socket
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, count
from pathlib import Path
from typing import IO, Any

from vescale_ray.errors import BadInput

Record = dict[str, Any]

DISCOVERY = "vescale_service_discovery.json"
REPLACED = frozenset({"run.json", "control.json", "controller.json", "config.yaml", DISCOVERY})
"""Files that are replaced atomically. The temporary file next to each has a leading dot and a random suffix."""
LAST_TIME = 1e11
"""Upper bound on valid times, in seconds since the epoch (year 5138). A run writes no later time."""
_BLOCK = 1 << 18
"""Bytes per read when a file is read backwards from its end."""
FINAL_STATES = frozenset({"DONE", "FAILED", "STOPPED"})
"""States in run.json after which no process of the run is alive."""


class RunFolderError(BadInput):
    """The folder can't be created or written, is in use by another run, or is not a run's; the message is one line with its path and
    the remedy."""


def unlockable(error: OSError) -> str:
    """Return the message for a file system that refuses flock(2) itself, with the remedy."""
    return (
        f"files can't be locked there ({error.strerror or error}), and two runs in one folder would mix their lines; mount it with locks "
        "(Lustre: -o flock; NFS: without nolock), or set run.dir to another file system: checkpoint.dir may stay on this one"
    )


class RunFolder:
    """Readers and writers of one run's files. Holds only the path, so any number may exist, in any process."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"

    @property
    def config_path(self) -> Path:
        return self.path / "config.yaml"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints, unless the configuration names another one."""
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        """Folder of the configuration and tokenizer of ``model.hf``."""
        return self.path / "model"

    @property
    def curve_path(self) -> Path:
        return self.path / "curve.png"

    # ------------------------------------------------------------------------------------------------------------- writing

    def create(self) -> RunFolder:
        """Create the folder, and check that it can be written.

        Raises:
            RunFolderError: it can't be created or written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path):
                pass
        except OSError as error:
            raise RunFolderError(f"{self.path}: can't be written ({error.strerror}); set run.dir to a folder that can") from None
        return self

    def discard(self) -> None:
        """Remove a folder in which no run has begun. The folder stays if it holds more than the lock and an empty ``checkpoints/``."""
        try:
            if self.checkpoints.is_dir():
                self.checkpoints.rmdir()
            if {path.name for path in self.path.iterdir()} <= {"lock"}:
                (self.path / "lock").unlink(missing_ok=True)
                self.path.rmdir()
        except OSError:
            pass  # The folder is not empty, so it stays.

    def claim(self) -> IO[str]:
        """Lock the folder, so that no other run mixes its lines in. The lock lasts until the file is closed or the process ends.

        Raises:
            RunFolderError: another live process holds the lock, or the file system has no locks.
        """
        handle = open(self.path / "lock", "a+", encoding="utf-8")
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # CIFS raises PermissionError
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
        """Return the process id and machine of the live driver with the lock; None if no lock is visible. Only network file systems show
        locks of other machines."""
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
        """Append the line of a committed step; ``step`` counts completed steps, from 1."""
        self._append("metrics.jsonl", record)

    def append_event(self, record: Mapping[str, Any]) -> None:
        """Append one event; a missing ``time`` is filled in."""
        self._append("events.jsonl", {"time": time.time(), **record})

    def write_hang(self, name: str, text: str) -> Path:
        """Write a report of a hang without replacing one of the same name; return its path."""
        return self._keep("hangs", name, text)

    def write_failure(self, name: str, text: str) -> Path:
        """Write a report of the failures that ended a run; return its path."""
        return self._keep("failures", name, text)

    def _keep(self, kind: str, name: str, text: str) -> Path:
        folder = self.path / kind
        folder.mkdir(exist_ok=True)
        names = chain([name], (f"{name}-{number}" for number in count(2)))
        path = next(path for one in names if not (path := folder / f"{one}.txt").exists())
        path.write_text(text, encoding="utf-8")
        return path

    def append_samples(self, step: int, generation: int, ids: Iterable[int]) -> None:
        """Append the sample ids of all ranks that 0-based ``step`` consumed."""
        self._append("samples.jsonl", {"step": step, "generation": generation, "ids": [int(one) for one in ids]})

    def write_state(self, record: Mapping[str, Any]) -> None:
        """Replace run.json atomically: a reader sees the old object or the new one."""
        self._replace("run.json", json.dumps(plain(record), indent=1) + "\n", mode=0o644)

    def write_control(self, url: str, token: str) -> None:
        """Replace control.json, readable by the owner only, because the token permits stopping and rescaling the run. Its ``host`` tells
        readers on other machines that a loopback address is not theirs."""
        self._replace("control.json", json.dumps({"url": url, "token": token, "host": socket.gethostname()}) + "\n", mode=0o600)

    def write_discovery(self, url: str) -> None:
        """Replace vescale_service_discovery.json, which makes Prometheus (``file_sd_configs``) scrape the server at ``url``.

        It has no label for the run, because the metrics have one.
        """
        found = [{"labels": {"job": "vescale-ray"}, "targets": [url.partition("://")[2].rstrip("/")]}]
        self._replace(DISCOVERY, json.dumps(found) + "\n", mode=0o644)

    def write_config(self, text: str) -> None:
        """Replace config.yaml."""
        self._replace("config.yaml", text, mode=0o644)

    def write_durable_state(self, text: str) -> None:
        """Replace controller.json."""
        self._replace("controller.json", text, mode=0o600)

    def clear_discovery(self) -> None:
        """Remove the service discovery of a run that ends, so that Prometheus stops scraping it."""
        (self.path / DISCOVERY).unlink(missing_ok=True)

    def clear_control(self) -> None:
        """Remove control.json and the service discovery, because no server listens any more."""
        for name in ("control.json", DISCOVERY):
            (self.path / name).unlink(missing_ok=True)

    def clear_leftovers(self) -> None:
        """Remove temporary files that killed writers left behind. Call it only while no process writes."""
        for path in self.path.glob(".*"):
            name, _, suffix = path.name.removeprefix(".").rpartition(".")
            if suffix and name in REPLACED:
                path.unlink(missing_ok=True)

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        line = json.dumps(plain(record), separators=(",", ":")).encode() + b"\n"
        # One write in append mode keeps lines of other writers apart. If a crash cut the last line short, a newline ends it first.
        descriptor = os.open(self.path / name, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                line = b"\n" + line
            # A nearly full disk writes a part first, and fails at the next write. A later append starts a new line.
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
        """Return run.json, or None if the run has not written it."""
        return self._read_object("run.json")

    def read_control(self) -> Record | None:
        """Return control.json (``url``, ``token``, ``host``), or None if no server listens."""
        return self._read_object("control.json")

    def read_metrics(self) -> list[Record]:
        """Return the line of each committed step, by step."""
        return committed(self.read_all_metrics())

    def read_all_metrics(self) -> list[Record]:
        """Return every line of the metrics as written, undone steps included."""
        return self._read_lines("metrics.jsonl")

    def each_metrics(self, offset: int = 0) -> Iterator[Record]:
        """Yield every line of the metrics from byte ``offset`` on, where a line must begin. A long run's lines take gigabytes."""
        return self._each_line("metrics.jsonl", offset)

    def marked_metrics(self, key: str, least: int) -> int:
        """Return the start of the last metrics line that has ``key`` and is followed by at least ``least`` lines; 0 if there is none. Reads
        only the end of the file."""
        needle, after = b'"%s":' % key.encode(), 0
        for at, line in self._from_end("metrics.jsonl"):
            if needle in line and after >= least and any(key in record for record in _parse(line, "metrics.jsonl")):
                return at
            after += bool(line)
        return 0

    def read_events(self) -> list[Record]:
        """Return all events in the order in which they happened."""
        return self._read_lines("events.jsonl")

    def each_samples(self) -> Iterator[Record]:
        """Yield every line of consumed ids as written, undone steps included."""
        return self._each_line("samples.jsonl")

    def last_samples(self) -> Record | None:
        """Return the newest line of consumed ids, or None."""
        return self._last_line("samples.jsonl")

    def last_step(self) -> int:
        """Return the step of the newest line of the metrics; 0 if there is none."""
        return int((self.last_metrics() or {}).get("step") or 0)

    def last_metrics(self) -> Record | None:
        """Return the newest line of the metrics, or None."""
        return self._last_line("metrics.jsonl")

    def size_of(self, name: str) -> int:
        """Return the bytes of a file of the folder; 0 if it does not exist."""
        path = self.path / name
        return path.stat().st_size if path.is_file() else 0

    def _last_line(self, name: str) -> Record | None:
        """Return the newest whole line, or None. Reads only the end of the file, because the file grows to gigabytes."""
        return next((record for _, line in self._from_end(name) for record in _parse(line, name)), None)

    def _from_end(self, name: str) -> Iterator[tuple[int, bytes]]:
        """Yield the lines of a file, the last one first, each with the byte at which it starts."""
        try:
            with (self.path / name).open("rb") as file:
                start, rest = file.seek(0, os.SEEK_END), b""
                while start > 0:
                    end, start = start, max(0, start - _BLOCK)
                    file.seek(start)
                    # The bytes before the first newline are an incomplete line, unless they start the file.
                    rest, *lines = (file.read(end - start) + rest).split(b"\n")
                    at = start + len(rest) + sum(len(line) + 1 for line in lines)
                    for line in reversed(lines):
                        at -= len(line)
                        yield at, line
                        at -= 1
                yield 0, rest
        except (FileNotFoundError, NotADirectoryError):
            return

    def is_run(self) -> bool:
        """Return whether a run has ever written here."""
        return self.config_path.is_file() or (self.path / "run.json").is_file()

    def _read_object(self, name: str) -> Record | None:
        try:
            value = json.loads((self.path / name).read_text(encoding="utf-8"), parse_constant=lambda text: None)  # never NaN
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
        """Return a reader of new metrics; ``skip_old`` skips the existing lines."""
        return self._tail("metrics.jsonl", skip_old)

    def tail_events(self, *, skip_old: bool = False) -> Tail:
        """Return a reader of new events; ``skip_old`` skips the existing lines."""
        return self._tail("events.jsonl", skip_old)

    def _tail(self, name: str, skip_old: bool) -> Tail:
        tail = Tail(self.path / name)
        if skip_old:
            tail.read()
        return tail


class Tail:
    """Reader of a growing file of JSON lines: each :meth:`read` returns the records completed since the last one."""

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


def committed(lines: Iterable[Record]) -> list[Record]:
    """Return the lines of committed steps, by step. A line of step ``s`` undoes all earlier lines of steps ``>= s``: a rollback came
    between."""
    kept: list[Record] = []
    for line in lines:
        while kept and kept[-1]["step"] >= line["step"]:
            kept.pop()
        kept.append(line)
    return kept


def newest_run(folder: str | os.PathLike[str] = "runs") -> RunFolder:
    """Return the run folder under ``folder`` whose run.json (or config.yaml) changed last.

    Raises:
        RunFolderError: there is none.
    """
    runs = list_runs(folder)
    if not runs:
        raise RunFolderError(f"{os.path.abspath(folder)}: holds no run; give a run's folder, or start one with `vescale-ray demo`")
    return runs[-1]


def list_runs(folder: str | os.PathLike[str] = "runs") -> list[RunFolder]:
    """Return all run folders under ``folder``, the newest last."""
    root = Path(folder)
    if not root.is_dir():
        return []
    found = [RunFolder(path) for path in root.iterdir() if path.is_dir()]
    return sorted((run for run in found if run.is_run()), key=lambda run: (_changed(run), run.path.name))


def _parse(raw: bytes, name: str) -> list[Record]:
    """Parse the whole lines in ``raw`` of the file ``name``; invalid lines are dropped."""
    records = []
    for line in raw.splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue  # cut short by a crash, or read while it is being written
        if isinstance(record, dict) and _is_ours(record, name):
            records.append(record)
    return records


def _is_ours(record: Record, name: str) -> bool:
    """Return whether a record has the required fields of its file, which all readers rely on."""

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
    """Return the value as JSON holds it: keys are text, and figures that are not finite become null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return value
