"""What a restarted controller must know that it can't learn from the workers: a small JSON file in the run's folder.

It is written before what it says is used: no generation number that was given out is ever given out again. A memo of another
start of the run says one thing only, which numbers are taken.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

NAME = "controller.json"


@dataclass(frozen=True)
class Memo:
    """The controller's state on disk.

    Attributes:
        run_id: of the start of the run that wrote it.
        generation: the last number that was given out, to a generation or as a checkpoint's epoch.
        current, attempt: of the newest generation.
        members: of it, in rank order; empty before the first.
        origin, step: of the state that it started from.
        leavers: workers that are not in it and still there, to give shards.
        target: workers wanted; ``reason``: why they are not what there is.
        high: most steps that were ever completed; ``done``: by the starts of the run before this one.
        actions: scheduled actions that are done.
        stop: why the run is being stopped, if it is.
        port: of the HTTP server, so that the address stays the same.
        epoch: how often the controller was started.
        shift: the rescale under way (``ledger.Shift`` as a mapping).
        crashes, nodes, controllers, total: used up of the budget (``budget.Budget``).
        ceiling: most workers that the run goes for by itself; 0: nobody has asked for another number.
    """

    run_id: str
    generation: int
    current: int = 0
    attempt: int = 0
    members: tuple[str, ...] = ()
    origin: str = "fresh"
    step: int = 0
    leavers: tuple[str, ...] = ()
    target: int = 0
    reason: str = "manual"
    high: int = 0
    actions: int = 0
    stop: str | None = None
    port: int = 0
    epoch: int = 0
    shift: Mapping[str, Any] | None = None
    ceiling: int = 0
    crashes: int = 0
    nodes: int = 0
    controllers: int = 0
    total: Mapping[str, int] = field(default_factory=dict)
    done: int = 0


def read_memo(folder: str | os.PathLike[str]) -> Memo | None:
    """The memo in a run's folder; None when there is none that can be read (a first start, or an older version's)."""
    try:
        raw = json.loads((Path(folder) / NAME).read_text(encoding="utf-8"))
        return Memo(**{**raw, "members": tuple(raw["members"]), "leavers": tuple(raw["leavers"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def write_memo(folder: str | os.PathLike[str], memo: Memo) -> None:
    """Replace the memo: whoever reads it, also after a crash of the machine, sees the old one or this one.

    Raises:
        OSError: the disk is full, or the like.
    """
    descriptor, temporary = tempfile.mkstemp(dir=folder, prefix=f".{NAME}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as handle:
            json.dump(asdict(memo), handle)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(temporary, Path(folder) / NAME)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
