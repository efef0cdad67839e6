"""A small process that ends a local Ray cluster if the driver was killed.

Ray ends its servers with the process that started them. It does not end its agents (they were still there 50 s after a SIGKILL of the
driver, ray 2.60), nor a worker that is just starting or stopped. So the driver starts this script, with the reading end of a pipe as its
standard input. If it reads ``done``, all was cleaned up. If the pipe ends without it, the driver was killed.

The cluster's temporary folder, whose name is unique, identifies the processes. They have it in their environment, or write to files in it
(their logs; a process that changes its title overwrites its environment). The script never searches by a program's name, and spares
processes that only read the logs. It uses only the standard library, and starts in 30 ms.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Collection

MARK = "VESCALE_RAY_LOCAL"
"""Environment variable of every process of a local cluster: the cluster's temporary folder."""
QUIET_SCANS = 3
PATIENCE_S = 12.0


def processes_of(folder: str, spare: Collection[int] = ()) -> list[int]:
    """Processes that belong to the local cluster in ``folder``, without this one and ``spare``. Zombies do not count."""
    mark = f"{MARK}={folder}".encode()
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid() and int(name) not in spare and _belongs(name, folder, mark):
            found.append(int(name))
    return found


def _belongs(pid: str, folder: str, mark: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as handle:
            if mark in handle.read().split(b"\0"):
                return True
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            try:
                if os.readlink(f"/proc/{pid}/fd/{descriptor}").startswith(folder + "/") and _writes(pid, descriptor):
                    return True
            except OSError:
                continue
    except OSError:
        pass  # it has ended, or is another user's
    return False


def _writes(pid: str, descriptor: str) -> bool:
    with open(f"/proc/{pid}/fdinfo/{descriptor}", "rb") as handle:
        flags = next(int(line.split()[1], 8) for line in handle if line.startswith(b"flags:"))
    return flags & os.O_ACCMODE != os.O_RDONLY


def end_all(folder: str, spare: Collection[int] = (), patience_s: float = PATIENCE_S) -> list[int]:
    """SIGKILL every process of the cluster until no more appear. Returns those left after ``patience_s`` seconds, normally none.

    A dying process may have just started another, so only several empty scans in a row count.
    """
    deadline = time.monotonic() + patience_s
    quiet = 0
    left: list[int] = []
    while quiet < QUIET_SCANS and time.monotonic() < deadline:
        left = processes_of(folder, spare)
        quiet = 0 if left else quiet + 1
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(0.1)
    return left


def main(folder: str) -> None:
    # Ctrl-C on a terminal goes to the whole process group. The driver handles it; this process only waits for the driver.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    word = sys.stdin.buffer.read()
    if b"done" not in word:
        end_all(folder)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1])
