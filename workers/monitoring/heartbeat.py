"""Heartbeats and current position of a worker's training thread, for monitoring, without Ray.

When a rank hangs, its peers wait for it in a collective and look just as stuck. Their positions tell them apart. So a report says
whether the training thread waits for other ranks; its innermost Python frame tells this.

If a thread holds the interpreter lock, no other thread of its process can inspect it. :func:`offer_stacks` lets another process get all
stacks. A signal handler that needs no lock (:mod:`faulthandler`) writes them to memory that the other process reads through ``/proc``.
"""

from __future__ import annotations

import faulthandler
import gc
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

from vescale_ray.communication import abortable_waits
from vescale_ray.communication.wait_notes import awaited, passed
from vescale_ray.compat.optional import flight_record

IN = "in: "
RECORDER = {"TORCH_FR_BUFFER_SIZE": "256"}
"""Environment that makes torch record its last collectives. It must be set before torch is imported; its cost is not measurable."""
STACKS_SIGNAL = signal.SIGUSR2
_COLLECTIVES = f"{os.sep}torch{os.sep}distributed{os.sep}"
_COMPILER = os.path.join("torch", "_dynamo", "convert_frame.py")
"""File that is on the stack while torch compiles a frame, but not while compiled code runs."""
_WAITS = re.compile(r"\.wait\(|\bdist\.\w+\(|\.(allgather|alltoall_base|allreduce|barrier)\(")
_OWN = re.compile(r"(?:vescale_ray|workers|controller|checkpoint)/(.+)$")


@dataclass(frozen=True)
class Where:
    """Position of a thread in its code.

    Attributes:
        text: the innermost frames first, such as ``wait (fsdp/communication/comm.py:53) < reduce (fsdp/groups/gradients.py:234)``.
        waiting: whether it waits for other ranks in a collective.
        compiling: whether torch compiles code, which takes an unknown time.
    """

    text: str
    waiting: bool
    compiling: bool = False


NOWHERE = Where("", False)


class Heartbeat:
    """Heartbeats of the thread that creates this object. Only that thread calls ``beat``; other threads call everything else."""

    def __init__(self) -> None:
        self.in_long_work = False
        """True if the thread is inside :meth:`long_work`."""
        self._thread = threading.get_ident()
        self._beats = -passed(self._thread)
        self.native = threading.get_native_id()
        """Operating system's id of the thread."""

    def beat(self) -> None:
        self._beats += 1

    @property
    def beats(self) -> int:
        """Calls of ``beat`` plus collectives that the thread has reached. While the number grows, the thread makes progress."""
        return self._beats + passed(self._thread)

    def starved_s(self) -> float:
        """Return the seconds in which the thread was runnable but had no processor, as :func:`starved_s`."""
        return starved_s(os.getpid(), self.native)

    @contextmanager
    def long_work(self) -> Iterator[None]:
        """Mark work that may take longer than any step, here or on another rank, such as a copy of all shards."""
        self.in_long_work = True
        try:
            yield
        finally:
            self.in_long_work = False

    def collective(self) -> str:
        """Return the collective in which the thread waits: operation, subject, size and number of ranks. Empty if it waits in none."""
        frame = frames().get(self._thread)
        if frame is None or not where(frame).waiting:
            return ""
        return awaited(self._thread) or recorded() or ""

    def where(self) -> Where:
        frame = frames().get(self._thread)
        return where(frame) if frame is not None else NOWHERE


_PASSED_OVER = {abortable_waits.__file__, os.path.join(os.path.dirname(abortable_waits.__file__), "point_to_point.py")}
"""Files that only forward a wait, so that their callers tell more. (The second imports torch, so it cannot be imported here.)"""


def frames() -> dict[int, FrameType]:
    """Return the innermost frame of each thread, by the thread's identifier.

    Garbage collection is off meanwhile. Before CPython 3.11.9, ``sys._current_frames`` may collect garbage while it holds the lock that a
    starting or ending thread takes. If a destructor lets such a thread run, the process waits for ever (python/cpython#106883).
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if enabled:
            gc.enable()


def where(frame: FrameType, depth: int = 4) -> Where:
    """Return the position of a thread whose innermost frame is ``frame``: this frame, then the next few frames of other files."""
    code = frame.f_code
    # A running thread's frame may have no line between two instructions.
    line = linecache.getline(code.co_filename, frame.f_lineno or 0)
    waiting = _COLLECTIVES in code.co_filename or bool(_WAITS.search(line))
    parts: list[str] = []
    compiling = False
    at: FrameType | None = frame
    while at is not None:
        name = at.f_code.co_filename
        compiling |= name.endswith(_COMPILER)
        waiting |= name in _PASSED_OVER  # these files run between two polls of a message, too
        if len(parts) < depth and (not parts or _COLLECTIVES not in name) and name not in _PASSED_OVER:
            own = _OWN.search(name.replace(os.sep, "/"))
            parts.append(f"{at.f_code.co_name} ({own[1] if own else os.path.basename(name)}:{at.f_lineno or '?'})")
        at = at.f_back
    return Where(" < ".join(parts), waiting, compiling)


def recorded() -> str | None:
    """Return the newest unfinished collective of torch's own in this process, from its flight recorder (:data:`RECORDER`)."""
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
    """Return the Python stacks of all threads of this process, innermost call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found = []
    for ident, frame in frames().items():
        found.append(f"Thread {names.get(ident, ident)}:\n" + "".join(traceback.format_stack(frame)))
    return "\n".join(found)


def starved_s(pid: int, thread: int) -> float:
    """Return the seconds in which a thread of this machine was runnable but had no processor, or its container had used up its quota. The
    kernel calls this run delay. 0 if the kernel does not report it."""
    try:
        with open(f"/proc/{pid}/task/{thread}/schedstat", encoding="ascii") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def offer_stacks() -> int:
    """Make :data:`STACKS_SIGNAL` write all stacks to anonymous memory. Returns its file descriptor, readable as ``/proc/PID/fd/N``, or -1
    if the system has no such memory."""
    if not hasattr(os, "memfd_create"):
        return -1
    descriptor = os.memfd_create("stacks")
    faulthandler.register(STACKS_SIGNAL, file=descriptor, all_threads=True)
    return descriptor


def take_stacks(pid: int, descriptor: int, wait_s: float) -> str:
    """Return the stacks of another process of this machine that called :func:`offer_stacks`. If there are none, the reason (the process is
    stopped or gone)."""
    path = f"/proc/{pid}/fd/{descriptor}"
    if descriptor < 0:
        return "(this system cannot share the stacks with other processes)"
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
    """Return the kernel's name of a process's state, such as ``T (stopped)``; empty if the process does not exist."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8") as file:
            return next((line.split(None, 1)[1].strip() for line in file if line.startswith("State:")), "")
    except OSError:
        return ""
