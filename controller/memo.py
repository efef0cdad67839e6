"""What a restarted controller must know that it can't learn from the workers: a small JSON file in the run's folder.

It is written before what it says is used: no generation number that was given out is ever given out again. A memo of another
start of the run says one thing only, which numbers are taken. While the folder takes nothing (its disk is full, or does not answer) the
nursery has the memo in its memory: it outlives the controller.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from vescale_ray.controller.scribe import Scribe

NAME = "controller.json"
CALL_S = 5.0
"""The nursery only leaves a note, or reads it out."""

_log = logging.getLogger(__name__)


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
        shift: the rescale under way (``shifts.Shift`` as a mapping).
        crashes, nodes, controllers, total: used up of the budget (``budget.Budget``).
        asked: workers that the last rescale asked for; 0: none has come.
        failed: generation whose failure is in these figures.
        growth, stragglers: what the run's growth and the replacing of slow workers wait for (``growth.Growth.note``,
            ``straggler.Stragglers.note``).
        number: how often this start of the run has written one: of two, the newer has the higher.
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
    asked: int = 0
    crashes: int = 0
    nodes: int = 0
    controllers: int = 0
    total: Mapping[str, int] = field(default_factory=dict)
    done: int = 0
    failed: int = 0
    growth: Mapping[str, Any] = field(default_factory=dict)
    stragglers: Mapping[str, Any] = field(default_factory=dict)
    number: int = 0

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Memo:
        """Raises ValueError, TypeError or KeyError where that is none."""
        raw = json.loads(text)
        return cls(**{**raw, "members": tuple(raw["members"]), "leavers": tuple(raw["leavers"])})


class Memos:
    """Writes a run's memos, and finds the newest.

    Args:
        folder: the run's.
        nursery: the run's nursery actor.
    """

    def __init__(self, folder: str | os.PathLike[str], nursery: Any) -> None:
        self._folder, self._nursery, self._scribe = folder, nursery, Scribe()

    def newest(self, run_id: str) -> Memo | None:
        """The newest memo, wherever it is; of another start of the run than ``run_id``, the one in the folder.

        Raises:
            OSError: the folder does not tell what is in it, or there is none though the run has workers. What the nursery has may be
                older: its numbers would be given out twice.
        """
        written = _memo_in(self._folder)
        try:
            text = self._ask("kept")
            kept = Memo.from_json(text) if text else None
        except (RayError, ValueError, TypeError, KeyError) as error:
            _log.warning("the nursery does not tell whether it has a memo: %s", error)
            kept = None
        mine = [memo for memo in (written, kept) if memo is not None and memo.run_id == run_id]
        if not mine and self._has_workers():
            # It was written before the first was hired: the folder is not mounted any more, say.
            raise FileNotFoundError(errno.ENOENT, f"no {NAME}, though the run has workers", str(self._folder))
        return max(mine, key=lambda memo: memo.number, default=written)

    def write(self, memo: Memo) -> Memo:
        """Keep ``memo``, numbered; never raises. Where it is kept nowhere, a controller that were restarted now would know less."""
        memo = replace(memo, number=memo.number + 1)
        try:
            self._scribe.do(lambda: write_memo(self._folder, memo))
        except OSError as error:
            _log.warning("%s could not be written: %s; the nursery keeps what would be there", self._folder, error)
            try:
                self._ask("keep", memo.to_json())
            except RayError as problem:
                _log.warning("nor could the nursery: %s", problem)
        return memo

    def _has_workers(self) -> bool:
        try:
            return bool(self._ask("roster"))
        except RayError:
            return False

    def _ask(self, method: str, *args: Any) -> Any:
        return ray.get(getattr(self._nursery, method).remote(*args), timeout=CALL_S)


def read_memo(folder: str | os.PathLike[str]) -> Memo | None:
    """The memo in a run's folder; None when there is none that can be read (a first start, or an older version's)."""
    try:
        return _memo_in(folder)
    except OSError:
        return None


def _memo_in(folder: str | os.PathLike[str]) -> Memo | None:
    try:
        return Memo.from_json((Path(folder) / NAME).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError, KeyError):
        return None


def write_memo(folder: str | os.PathLike[str], memo: Memo) -> None:
    """Replace the memo: whoever reads it, also after a crash of the machine, sees the old one or this one.

    Raises:
        OSError: the disk is full, or the like.
    """
    descriptor, temporary = tempfile.mkstemp(dir=folder, prefix=f".{NAME}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as handle:
            handle.write(memo.to_json())
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(temporary, Path(folder) / NAME)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
