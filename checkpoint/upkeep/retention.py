"""Retention: the rules for which checkpoints stay. :mod:`.collection` deletes the others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal

from ..arguments import whole
from ..commits import Commit


@dataclass(frozen=True)
class Retention:
    """Rules for which checkpoints to keep. Only verified ones count: sealed, with all data read back and right.

    Args:
        keep_last: number of newest checkpoints to keep; at least 1.
        keep_every: also keep one checkpoint per this many steps: the first at or after each multiple. 0: off.
        keep_best: also keep this many of the best by ``metric``. 0: off.
        metric: name in the ``metrics`` of the save. Checkpoints without it, or with NaN or infinity, are never among the best.
        mode: whether a small (``min``) or a large (``max``) metric is good. Of equal ones the newer is better.
        verify: whether a checkpoint counts only after all its data was read back with right checksums. Each rank reads its own object back
            after the commit, while training continues. A note in ``verified/`` records success, so that each checkpoint is read once.
            ``False`` skips that: a checkpoint then counts if every object exists in full size.

    A pinned checkpoint (:func:`pin`) is always kept.
    """

    keep_last: int = 2
    keep_every: int = 0
    keep_best: int = 0
    metric: str | None = None
    mode: Literal["min", "max"] = "min"
    verify: bool = True

    def __post_init__(self) -> None:
        whole("keep_last", self.keep_last, 1, "at least the newest checkpoint must stay: give 1 or more")
        for name in ("keep_every", "keep_best"):
            whole(name, getattr(self, name), 0, "give 0 (off) or more")
        if self.mode not in ("min", "max"):
            raise ValueError(f"mode is {self.mode!r}; give 'min' or 'max'")
        if self.keep_best and not self.metric:
            raise ValueError(f"keep_best is {self.keep_best} without a metric to compare by; give metric='loss', for example")

    def kept(self, whole: Sequence[Commit], metrics: Mapping[str, float]) -> dict[str, tuple[str, ...]]:
        """Return the names of the commits that a rule keeps, each with its rules: ``last``, ``every``, ``best``.

        Args:
            whole: commits that count, oldest first. metrics: metric by commit name, if known.
        """
        why: dict[str, list[str]] = {}
        for commit in whole[-self.keep_last :]:
            why.setdefault(commit.name, []).append("last")
        if self.keep_every:
            # If a step has several commits, the newest epoch's counts. The first step at or after a multiple counts for it.
            for _, bucket in groupby(sorted(whole, key=lambda c: (c.step, -c.epoch)), key=lambda c: c.step // self.keep_every):
                why.setdefault(next(bucket).name, []).append("every")
        if self.keep_best:
            sign = 1.0 if self.mode == "min" else -1.0
            rated = [
                (sign * metrics[c.name], -index, c.name) for index, c in enumerate(whole) if math.isfinite(metrics.get(c.name, math.nan))
            ]
            for *_, name in sorted(rated)[: self.keep_best]:
                why.setdefault(name, []).append("best")
        return {name: tuple(rules) for name, rules in why.items()}


@dataclass(frozen=True)
class Grace:
    """Seconds, by the store's clock, for which unreferenced data stays.

    Attributes:
        orphans: for an attempt of an ended epoch without a commit, from its last write. A save waits up to 10 minutes for a vote.
        current: the same for an attempt of the newest epoch, a later one or an unknown one, since it may still be running. Also for
            unfinished uploads and temporary files, from their start. Their epoch is unknown, and a large object may take hours.
        readers: from the deletion of a commit, or the marking of an orphan, to the deletion of its data, for current readers.
    """

    orphans: float = 3600.0
    current: float = 24 * 3600.0
    readers: float = 60.0

    def __post_init__(self) -> None:
        for name in ("orphans", "current", "readers"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
                raise ValueError(f"{name} of the grace is {value!r}; give seconds")


NO_GRACE = Grace(0.0, 0.0, 0.0)
"""Grace for a root that nothing writes to or reads from."""


@dataclass(frozen=True)
class GcReport:
    """Result of a collection, or of its dry run.

    Args:
        kept: names of the commits that stay, oldest first.
        deleted: names of the deleted commits.
        swept: attempts without a commit whose data was deleted, including commits deleted earlier.
        freed_bytes: bytes of the deleted data.
        problems: failures, one line each.
        why: for each kept commit its rules: ``last``, ``every``, ``best``, ``pinned``. ``newer``: newer than the last verified ones, and
            not verified yet, or damaged. ``unread``: it could not be read now. ``undeletable``: its deletion failed.
        waiting: attempts whose data stays until the readers' grace is over.
        dry_run: whether nothing was changed.
    """

    kept: tuple[str, ...]
    deleted: tuple[str, ...]
    swept: tuple[str, ...]
    freed_bytes: int
    problems: tuple[str, ...]
    why: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    waiting: tuple[str, ...] = ()
    dry_run: bool = False
