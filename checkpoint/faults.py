"""Named points at which a test can kill or fail a save, a commit or a garbage collection.

The environment variable ``VESCALE_RAY_CHECKPOINT_FAULT`` holds ``NAME``, ``NAME#INDEX``, ``NAME=ERRNO`` or ``NAME#INDEX=ERRNO``. At that
point the process gets SIGKILL, so that no handler runs and nothing is flushed, as in a node failure. With ``=ERRNO``, such as
``data.chunk#2=ENOSPC``, it raises ``OSError(ERRNO)`` instead. Points are stateless: the index is part of the program's position (the n-th
chunk), not a count of hits, so that ranks may be threads of one process.
"""

from __future__ import annotations

import errno
import os
import signal

FAULT_ENV = "VESCALE_RAY_CHECKPOINT_FAULT"

FAULT_POINTS: tuple[str, ...] = (
    "stage.copied",  # the state is copied in memory (asynchronous save)
    "shard.planned",  # nothing of this rank is on disk
    "data.created",  # the object exists, empty (S3: its upload is begun)
    "data.chunk",  # after chunk #index is written
    "data.written",  # all bytes written, not synced (S3: all parts uploaded, not completed)
    "data.synced",  # synced, its directory entry perhaps not
    "data.published",  # durable
    "aux.written",  # the rank's aux object is durable too
    "vote.written",  # the rank's vote is readable by others (high-level save)
    "commit.begun",  # all votes are there, nothing is checked
    "commit.validated",  # all votes checked, nothing of the commit on disk
    "commit.tmp_written",  # the manifest's temporary file is written, not synced
    "commit.tmp_synced",  # .. synced, not linked
    "commit.linked",  # the commit is visible; the directory is not synced
    "commit.published",  # the commit is durable; the temporary name may still be there
    "gc.commit_deleted",  # a commit is gone, its data is not
    "gc.object_deleted",  # after object #index of an attempt is gone
    "gc.swept",  # after orphan attempt #index is gone
)
"""All points, in the order in which a save to disk and then a collection pass them. Other back ends have only some of them."""


def fault_point(name: str, index: int = 0) -> None:
    """Die or fail here if the environment says so. Otherwise it costs a few hundred nanoseconds."""
    plan = os.environ.get(FAULT_ENV)
    if not plan:
        return
    where, _, action = plan.partition("=")
    wanted, _, position = where.partition("#")
    if wanted not in FAULT_POINTS:
        raise ValueError(f"{FAULT_ENV}={plan!r} names no fault point; choose from {', '.join(FAULT_POINTS)}")
    if wanted != name or int(position or 0) != index:
        return
    if action:
        code = getattr(errno, action)
        raise OSError(code, os.strerror(code), f"injected at {name}#{index}")
    os.kill(os.getpid(), signal.SIGKILL)
