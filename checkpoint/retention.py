"""Deleting old checkpoints, and what interrupted saves left behind, so that a crash at any point loses nothing.

The order is: the commit object first, then its data. Between the two there is an orphan, which a later collection finds;
the other order would leave a commit without data.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from .commits import Commit, ls, read_manifest
from .faults import fault_point
from .manifest import ManifestError
from .store import Entry, KeyMissing, ObjectStore, Root, store_of

GRACE_S = 3600.0
"""An attempt that nobody has written to for this long is not in flight any more: saves wait at most 10 minutes for a vote."""


@dataclass(frozen=True)
class GcReport:
    """Names of the commits kept and deleted, orphan attempts removed, bytes freed, and what could not be done."""

    kept: tuple[str, ...]
    deleted: tuple[str, ...]
    swept: tuple[str, ...]
    freed_bytes: int
    problems: tuple[str, ...]


def gc(root: Root, keep: int, *, grace_s: float = GRACE_S) -> GcReport:
    """Keep the newest ``keep`` whole checkpoints; delete what is older than them, and abandoned attempts.

    Only whole commits count (sealed, every object present in full), so that a damaged one never pushes a good one out.
    A damaged commit that is newer than the ``keep``-th good one stays, for inspection. Call it from one process; two at
    once do no harm. Failed deletions are reported, not raised: they must not stop a training run.

    Args:
        keep: at least 1.
        grace_s: attempts without a commit are removed once nothing was written to them for this long, by the store's clock.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}; at least the newest checkpoint must stay: give 1 or more")
    store = store_of(root)
    problems: list[str] = []
    # Data is listed before commits: an attempt that commits in between is then seen as committed.
    written = store.list("data/") + store.list("attempts/")
    now = store.clock()
    commits = ls(store)
    good = [c for c in commits if c.problem is None]
    victims: list[Commit] = []
    if len(good) >= keep:
        oldest_kept = good[-keep]
        victims = [c for c in commits if (c.epoch, c.step) < (oldest_kept.epoch, oldest_kept.step)]
    deleted: list[str] = []
    dead: set[str] = set()
    for victim in victims:
        attempt = _attempt_of(store, victim)
        try:
            store.delete(victim.key)
        except OSError as error:
            problems.append(f"could not delete {victim.path}: {error.strerror or error}")
            continue
        fault_point("gc.commit_deleted")
        deleted.append(victim.name)
        if attempt:
            dead.add(attempt)
    kept = [c for c in commits if c.name not in deleted]
    live = {_attempt_of(store, c) for c in kept}
    freed = 0
    swept: list[str] = []
    attempts = {name: list(entries) for name, entries in groupby(sorted(written, key=_attempt), key=_attempt)}
    # The attempt of a commit that can't be read is unknown; its data must not be taken for an orphan.
    unknown = None in live
    if unknown:
        problems.append("an unreadable commit is kept: its data can't be told from abandoned attempts, which stay too")
    emptied = 0
    for attempt, entries in attempts.items():
        quiet = now - max(e.modified for e in entries)
        if attempt in live:
            entries = [e for e in entries if e.key.startswith("attempts/") and quiet >= grace_s]
        elif attempt not in dead:
            if unknown or quiet < grace_s:
                continue
            swept.append(attempt)
        for position, entry in enumerate(sorted(entries, key=lambda e: e.key)):
            try:
                if store.delete(entry.key):
                    freed += entry.bytes
            except OSError as error:
                problems.append(f"could not delete {store.describe(entry.key)}: {error.strerror or error}")
            fault_point("gc.object_deleted", position)
        if entries:
            fault_point("gc.swept", emptied)
            emptied += 1
    for prefix in ("commits/", "data/", "attempts/"):
        store.tidy(prefix, grace_s)
    return GcReport(tuple(c.name for c in kept), tuple(deleted), tuple(swept), freed, tuple(problems))


def _attempt(entry: Entry) -> str:
    return entry.key.split("/")[1]


def _attempt_of(store: ObjectStore, commit: Commit) -> str | None:
    if commit.attempt:
        return commit.attempt
    try:
        return read_manifest(store, commit.name)[0].attempt
    except (ManifestError, KeyMissing, OSError):
        return None
