"""How far a worker's training thread is, for whoever watches it: beats that it counts, and where it stands now. No Ray.

A rank that hangs is not the one that others notice first: they wait for it in a collective, and look as stuck as it does. What tells them
apart is where each stands. So a report says whether the training thread waits for others, by its innermost Python frame.

For a thread that holds the interpreter's lock nobody in its process can look. :func:`offer_stacks` lets another process have all stacks
written by a signal handler that needs no lock (:mod:`faulthandler`), into memory that it reads through ``/proc``.
"""

from __future__ import annotations

import faulthandler
import json
import linecache
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from vescale_ray import waits
from vescale_ray.compat.optional import flight_record
from vescale_ray.waiting import awaited, passed

IN = "in: "
RECORDER = {"TORCH_FR_BUFFER_SIZE": "256"}
"""Environment, set before torch is imported, with which torch notes the last collectives. Costs less than can be measured."""
STACKS_SIGNAL = signal.SIGUSR2
_COLLECTIVES = f"{os.sep}torch{os.sep}distributed{os.sep}"
_COMPILER = os.path.join("torch", "_dynamo", "convert_frame.py")
"""On the stack while a frame is compiled, not while compiled code runs."""
_WAITS = re.compile(r"\.wait\(|\bdist\.\w+\(|\.(allgather|alltoall_base|allreduce|barrier)\(")
_OWN = re.compile(r"(?:vescale_ray|workers|controller|checkpoint)/(.+)$")


@dataclass(frozen=True)
class Where:
    """Where a thread stands.

    Attributes:
        text: innermost first, such as ``wait (fsdp/comm.py:53) < reduce (fsdp/gradients.py:234)``.
        waiting: it waits for other ranks, in a collective.
        compiling: torch makes code for what it has not met before, which takes as long as it takes.
    """

    text: str
    waiting: bool
    compiling: bool = False


NOWHERE = Where("", False)


class Pulse:
    """Counts what the thread that made it does. ``beat`` is called by that thread, everything else by others."""

    def __init__(self) -> None:
        self.unhurried = False
        """Within :meth:`without_hurry`."""
        self._thread = threading.get_ident()
        self._beats = -passed(self._thread)
        self.native = threading.get_native_id()
        """The system's number of the thread."""

    def beat(self) -> None:
        self._beats += 1

    @property
    def beats(self) -> int:
        """Those that the thread made, and the collectives that it came to: it goes on as long as they grow."""
        return self._beats + passed(self._thread)

    def starved_s(self) -> float:
        """As :func:`starved_s` tells of the thread."""
        return starved_s(os.getpid(), self.native)

    @contextmanager
    def without_hurry(self) -> Iterator[None]:
        """What is done inside may take longer than any step, here or on another rank: a copy of all shards, for example."""
        self.unhurried = True
        try:
            yield
        finally:
            self.unhurried = False

    def collective(self) -> str:
        """The collective that the thread waits in, if it does: which, of what, how large, on how many ranks; else empty."""
        frame = sys._current_frames().get(self._thread)
        if frame is None or not where(frame).waiting:
            return ""
        return awaited(self._thread) or recorded() or ""

    def where(self) -> Where:
        frame = sys._current_frames().get(self._thread)
        return where(frame) if frame is not None else NOWHERE


_PASSED_OVER = {waits.__file__, os.path.join(os.path.dirname(waits.__file__), "messages.py")}
"""Files that only pass a wait on: who called them tells more. (The second can't be imported here: it imports torch.)"""


def where(frame: FrameType, depth: int = 4) -> Where:
    """Where a thread with this innermost ``frame`` stands: the innermost frame, then the next few of other files."""
    code = frame.f_code
    # Between two instructions of a running thread a frame may have no line.
    line = linecache.getline(code.co_filename, frame.f_lineno or 0)
    waiting = _COLLECTIVES in code.co_filename or bool(_WAITS.search(line))
    parts: list[str] = []
    compiling = False
    at: FrameType | None = frame
    while at is not None:
        name = at.f_code.co_filename
        compiling |= name.endswith(_COMPILER)
        if len(parts) < depth and (not parts or _COLLECTIVES not in name) and name not in _PASSED_OVER:
            own = _OWN.search(name.replace(os.sep, "/"))
            parts.append(f"{at.f_code.co_name} ({own[1] if own else os.path.basename(name)}:{at.f_lineno or '?'})")
        at = at.f_back
    return Where(" < ".join(parts), waiting, compiling)


def recorded() -> str | None:
    """The newest collective of torch's own that this process has begun and not ended, as its flight recorder tells (:data:`RECORDER`)."""
    dump = flight_record()
    entries = json.loads(dump()).get("entries", []) if dump is not None else []
    for entry in reversed(entries):
        if not entry.get("retired", True) and entry.get("state") != "completed":
            name, number = entry.get("profiling_name"), entry.get("collective_seq_id")
            group = " ".join(map(str, entry.get("process_group", ())))
            sizes = ", ".join(f"{kind}{size}" for kind, size in zip(entry["input_dtypes"], entry["input_sizes"], strict=False))
            return f"{name} of {sizes}, number {number} of group {group}"
    return None


def stacks() -> str:
    """The Python stacks of all threads of this process, innermost call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found = []
    for ident, frame in sys._current_frames().items():
        found.append(f"Thread {names.get(ident, ident)}:\n" + "".join(traceback.format_stack(frame)))
    return "\n".join(found)


def starved_s(pid: int, thread: int) -> float:
    """Seconds so far for which a thread of this machine could have run and others had the processors (or its container had used up what it
    may): what the kernel calls run delay. 0 where it doesn't tell."""
    try:
        with open(f"/proc/{pid}/task/{thread}/schedstat", encoding="ascii") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def offer_stacks() -> int:
    """Have :data:`STACKS_SIGNAL` write all stacks into anonymous memory; its file descriptor, to be read as ``/proc/PID/fd/N``. -1 where
    the system has no such thing."""
    if not hasattr(os, "memfd_create"):
        return -1
    descriptor = os.memfd_create("stacks")
    faulthandler.register(STACKS_SIGNAL, file=descriptor, all_threads=True)
    return descriptor


def take_stacks(pid: int, descriptor: int, wait_s: float) -> str:
    """The stacks of another process of this machine that called :func:`offer_stacks`; or why there are none (it is stopped, or gone)."""
    path = f"/proc/{pid}/fd/{descriptor}"
    if descriptor < 0:
        return "(this system lets no other process have the stacks)"
    try:
        before = os.stat(path).st_size
        os.kill(pid, STACKS_SIGNAL)
        deadline, size = time.monotonic() + wait_s, before
        while time.monotonic() < deadline:
            if (state := state_of(pid))[:1] in ("T", "t", "Z"):
                return f"(none: process state {state})"
            time.sleep(0.02)
            now = os.stat(path).st_size
            if now > before and now == size:
                with open(path, encoding="utf-8", errors="replace") as file:
                    file.seek(before)
                    return file.read()
            size = now
        return f"(no answer within {wait_s:g} s: process state {state_of(pid)})"
    except OSError as error:
        return f"({error.strerror})"


def state_of(pid: int) -> str:
    """The kernel's word for a process' state, such as ``T (stopped)``; empty if there is none."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8") as file:
            return next((line.split(None, 1)[1].strip() for line in file if line.startswith("State:")), "")
    except OSError:
        return ""
