"""Collection: deletion of the checkpoints that no retention rule keeps. A crash at any point loses nothing, and readers get a grace time.

    a commit that no rule keeps --> deletes its commit object --> (readers' grace) --> deletes its data
    an attempt without a commit --> (no writes for long)       --> marks it, (readers' grace) --> deletes its data

The commit object always goes first. A crash then leaves an orphan, which a later collection finds; the other order would leave a commit
without data. A mark in the store records when an orphan was first seen (``attempts/<attempt>/orphan.json``, aged by the store's clock). So
the grace time survives crashes and is the same for every collector.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any

from ..arguments import of_type
from ..commits import Commit, ls, read_manifest
from ..faults import fault_point
from ..format.commit_names import check_attempt, commit_name
from ..format.manifest_fields import ManifestError
from ..stores.opening import store_of
from ..stores.store import ALIGNMENT, Entry, KeyExists, KeyMissing, ObjectStore, Root
from .pins import pins
from .proof import Noted, lacking, noted, prove
from .retention import GcReport, Grace, Retention

_log = logging.getLogger(__name__)

_EPOCH, _STEP = (re.compile(b'"' + word + b'":"([0-9]{1,18})"') for word in (b"epoch", b"step"))
_MARK = "orphan.json"


def gc(
    root: Root,
    retention: Retention,
    *,
    dry_run: bool = False,
    grace: Grace | None = None,
    young: Commit | None = None,
    progress: Callable[[int], None] = lambda count: None,
) -> GcReport:
    """Delete the checkpoints that no rule keeps, and the leftovers of abandoned attempts. Call it after a commit, from one process.

    Several processes at once do no harm. A damaged or unverified commit never counts, so it never displaces a good one. Failed deletions
    are reported, not raised, since they must not stop a training run. Data is deleted a grace time after its commit (see :class:`Grace`),
    so a later collection frees its space.

    Args:
        dry_run: only report what would be done.
        young: commit whose writers read it back themselves. It and newer commits are not read here; they count once they are noted as
            right. (A late collection may find the next commit too, which this would read a second time during training.)
        progress: called with the bytes read to verify a checkpoint.
    """
    of_type("retention", retention, Retention, "give Retention(keep_last=2), for example")
    if grace is not None:
        of_type("grace", grace, Grace, "give Grace(readers=0.0), for example, or none")
    since = None if young is None else (young.epoch, young.step)
    collection = _Collection(store_of(root), retention, grace or Grace(), dry_run, since, progress)
    return collection.run()


def discard(root: Root, attempt: str, what: str, keys: Sequence[str] | None = None) -> None:
    """Delete the data of an attempt that can no longer be committed: all of it, or only ``keys`` while other ranks may still write.

    Errors only go to the log, which calls the attempt a failed ``what``. A later collection finds what cannot be deleted now.
    """
    try:
        store = store_of(root)
        unneeded = [entry.key for entry in store.list(f"data/{check_attempt(attempt)}/")] if keys is None else keys
        problems = [error for _, error in store.delete_many(unneeded) if error is not None]
        if problems:
            raise problems[0]
    except Exception as error:
        _log.warning("the data of a failed %s stays until a garbage collection: %s", what, error)


def tend(root: Root, retention: Retention, made: Commit, patience_s: float, stop: Callable[[], bool] = lambda: False) -> None:
    """Collect once the ranks of a commit have read it back, or after ``patience_s`` seconds. Errors only go to the log, since they must not
    stop a training run."""
    deadline, pause = time.monotonic() + patience_s, 0.005
    try:
        store = store_of(root)
        while retention.verify and len(noted(store, made.attempt).get(made.attempt, ())) < made.world:
            if time.monotonic() >= deadline or stop():
                break
            time.sleep(pause)
            pause = min(1.0, pause * 1.5)
        for problem in gc(store, retention, young=made).problems:
            _log.warning("checkpoint retention: %s", problem)
    except Exception as error:
        _log.warning("checkpoint retention: %s: %s", type(error).__name__, error)


class _Collection:
    def __init__(
        self,
        store: ObjectStore,
        retention: Retention,
        grace: Grace,
        dry_run: bool,
        young: tuple[int, int] | None,
        progress: Callable[[int], None],
    ) -> None:
        self.progress = progress
        self.store, self.retention, self.grace, self.dry, self.young = store, retention, grace, dry_run, young
        self.unread: set[str] = set()
        """Commits with unknown state now: they do not count and are not deleted."""
        self.gone: set[str] = set()
        """Commits that another collection deleted after this one listed them. They are no problem."""
        self.problems: list[str] = []
        self.freed = 0
        self.waiting: list[str] = []
        self.emptied = 0

    def run(self) -> GcReport:
        store = self.store
        # List data before commits, so that an attempt that commits in between is seen as committed.
        written = store.list("data/") + store.list("attempts/") + [e for e in store.list("verified/") if e.key.count("/") == 2]
        now = store.clock()
        commits = [c for c in ls(store) if c.problem is None or not self._gone(c)]
        pinned = pins(store)
        why = self._why(commits, pinned)
        unneeded = {c.name for c in commits} - set(why)
        dead: dict[str, str] = {}
        deleted: list[str] = []
        for victim in commits:
            if victim.name not in unneeded:
                continue
            attempt = _attempt_of(store, victim)
            if not self._delete_commit(victim):
                why[victim.name] = ("undeletable",)
                continue
            if victim.name not in self.gone:
                deleted.append(victim.name)
            if attempt:
                dead[attempt] = victim.name
        kept = [c for c in commits if c.name not in deleted and c.name not in self.gone]
        swept = self._sweep(written, kept, dead, now)
        if not self.dry:
            self._forget(pinned, {c.name for c in commits})
            for prefix in ("commits/", "data/", "attempts/", "pins/", "verified/"):
                try:
                    store.tidy(prefix, self.grace.current)
                except OSError as error:
                    self.problems.append(f"could not tidy {store.describe(prefix)}: {error.strerror or error}")
        return GcReport(
            tuple(c.name for c in kept),
            tuple(deleted),
            tuple(swept),
            self.freed,
            tuple(self.problems),
            {c.name: why[c.name] for c in kept},
            tuple(self.waiting),
            self.dry,
        )

    # ---------------------------------------------------------------------------------------------------------- what stays

    def _why(self, commits: Sequence[Commit], pinned: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
        self.unread |= {c.name for c in commits if c.unread}
        for commit in commits:
            if commit.unread:
                self.problems.append(f"checkpoint {commit.name} is kept unread: {commit.problem}")
        counting = self._counting(commits)
        rules = self.retention.kept(counting, self._metrics(counting))
        if len(counting) >= self.retention.keep_last:
            oldest = counting[-self.retention.keep_last]
            edge = (oldest.epoch, oldest.step)
        else:
            edge = (-1, -1)  # too few good ones: delete nothing
        why: dict[str, tuple[str, ...]] = {}
        for commit in commits:
            reasons = rules.get(commit.name, ()) + (("pinned",) if commit.name in pinned else ())
            if commit.name in self.unread:
                reasons += ("unread",)
            if not reasons and (commit.epoch, commit.step) >= edge:
                reasons = ("newer",)
            if reasons:
                why[commit.name] = reasons
        return why

    def _counting(self, commits: Sequence[Commit]) -> list[Commit]:
        """Return the commits that count, oldest first: intact ones and, with ``verify``, only those whose data was read back and is
        right."""
        whole = [c for c in commits if c.problem is None]
        if not self.retention.verify or len(commits) <= self.retention.keep_last:
            return whole  # with so few, none can be deleted
        notes = noted(self.store)
        beyond = bool(self.retention.keep_every or self.retention.keep_best)
        found: list[Commit] = []
        for commit in reversed(whole):
            # No rule can keep a commit older than enough verified ones, so it is not read before its deletion.
            if (beyond or len(found) < self.retention.keep_last) and self._verified(commit, notes):
                found.append(commit)
        return found[::-1]

    def _verified(self, commit: Commit, notes: Noted) -> bool:
        try:
            missing = lacking(read_manifest(self.store, commit.name)[0], notes.get(commit.attempt, set()))
            if missing and self.young is not None and (commit.epoch, commit.step) >= self.young:
                return False
            for entry, aux in missing:
                problem = prove(self.store, entry, aux, note=not self.dry, progress=self.progress)
                if problem is not None:
                    if self._gone(commit):
                        return False
                    self.problems.append(f"checkpoint {commit.name} is damaged and does not count: {problem}")
                    return False
        except (ManifestError, OSError) as error:
            if self._gone(commit):
                return False
            self.unread.add(commit.name)
            self.problems.append(f"checkpoint {commit.name} could not be verified, and is kept: {error}")
            return False
        return True

    def _gone(self, commit: Commit) -> bool:
        with suppress(OSError):
            if self.store.size(commit.key) is None:
                self.gone.add(commit.name)
        return commit.name in self.gone

    def _metrics(self, whole: Sequence[Commit]) -> dict[str, float]:
        if not self.retention.keep_best:
            return {}
        found: dict[str, float] = {}
        for commit in whole:
            try:
                value: Any = read_manifest(self.store, commit.name)[0].meta.get("metrics", {}).get(self.retention.metric)
            except (ManifestError, OSError) as error:
                if self._gone(commit):
                    continue
                # It may be the best one, so it is kept: a single failure of the store must not lose it.
                self.unread.add(commit.name)
                self.problems.append(f"checkpoint {commit.name} could not be rated, and is kept: {error}")
                continue
            except AttributeError:
                continue
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                with suppress(OverflowError):  # a whole number beyond the largest float counts as infinite
                    found[commit.name] = float(value)
        return found

    # ----------------------------------------------------------------------------------------------------------- what goes

    def _delete_commit(self, victim: Commit) -> bool:
        if self.dry:
            return True
        try:
            if self.store.list(f"pins/{victim.name}/"):
                return False  # pinned meanwhile
            self.store.delete(victim.key)
        except OSError as error:
            self.problems.append(f"could not delete {victim.path}: {error.strerror or error}")
            return False
        fault_point("gc.commit_deleted")
        return True

    def _sweep(self, written: Sequence[Entry], kept: Sequence[Commit], dead: Mapping[str, str], now: float) -> list[str]:
        """Delete or mark the data of attempts that no commit refers to."""
        store, grace = self.store, self.grace
        live = {_attempt_of(store, c) for c in kept}
        # An unreadable commit's attempt is unknown; its data must not count as an orphan.
        unknown = None in live
        if unknown:
            self.problems.append("an unreadable commit is kept, and abandoned attempts too, since any of them may be its data")
        newest = max((c.epoch for c in kept), default=-1)
        swept: list[str] = []
        for attempt, group in groupby(sorted(written, key=_attempt), key=_attempt):
            entries = list(group)
            mark = next((e for e in entries if e.key == f"attempts/{attempt}/{_MARK}"), None)
            quiet = now - max((e.modified for e in entries if e is not mark), default=0.0)
            if attempt in live:
                # Votes are useless after the commit; the data stays.
                self._delete([e for e in entries if e.key.startswith("attempts/") and quiet >= grace.orphans])
                continue
            if attempt not in dead and mark is None:
                if unknown or quiet < self._patience(entries, newest):
                    continue
            waited = now - mark.modified if mark is not None else 0.0
            if waited < grace.readers:
                if mark is None:
                    self._mark(attempt)
                self.waiting.append(attempt)
                continue
            if attempt not in dead:
                if self._committed(attempt, entries):
                    continue
                swept.append(attempt)
            self._delete(entries)
        return swept

    def _committed(self, attempt: str, entries: Sequence[Entry]) -> bool:
        """Return whether this attempt has a commit after all. It is looked up by the name in the objects' headers, since a listing may be
        outdated."""
        order = next((o for entry in entries if (o := _order_of(self.store, entry)) is not None), None)
        if order is None:
            return False
        name = commit_name(*order)
        try:
            return read_manifest(self.store, name)[0].attempt == attempt
        except (KeyMissing, ManifestError):
            return False
        except OSError as error:
            self.problems.append(f"the data of attempt {attempt} stays: whether {name} is its commit can't be read: {error}")
            return True

    def _patience(self, entries: Sequence[Entry], newest: int) -> float:
        """Return for how many seconds this attempt without a commit may be quiet. The headers of its objects have its epoch."""
        if self.grace.current == self.grace.orphans:
            return self.grace.orphans
        order = next((o for entry in entries if (o := _order_of(self.store, entry)) is not None), None)
        return self.grace.orphans if order is not None and order[0] < newest else self.grace.current

    def _mark(self, attempt: str) -> None:
        if self.dry:
            return
        try:
            self.store.put(f"attempts/{attempt}/{_MARK}", b"{}\n")
        except KeyExists:
            pass  # another collector marked it
        except OSError as error:
            self.problems.append(f"could not mark the orphan {attempt}: {error.strerror or error}")

    def _delete(self, entries: Sequence[Entry]) -> None:
        if self.dry:
            self.freed += sum(entry.bytes for entry in entries)
            return
        sizes = {entry.key: entry.bytes for entry in entries}
        # Delete data before the mark, so that leftovers of a crash are still known to be an orphan.
        marks = [key for key in sizes if key.endswith(_MARK)]
        position = 0
        for keys in (sorted(sizes.keys() - marks), marks):
            failed = False
            for key, error in self.store.delete_many(keys):
                if error is None:
                    self.freed += sizes[key]
                else:
                    failed = True
                    self.problems.append(f"could not delete {self.store.describe(key)}: {error.strerror or error}")
                fault_point("gc.object_deleted", position)
                position += 1
            if failed:
                break
        if entries:
            fault_point("gc.swept", self.emptied)
            self.emptied += 1

    def _forget(self, pinned: Mapping[str, Sequence[str]], commits: set[str]) -> None:
        """Delete pins of commits that no longer exist."""
        there = {e.key for e in self.store.list("commits/")}
        for commit, names in pinned.items():
            for name in names:
                if commit in commits or f"commits/{commit}.json" in there:
                    continue
                key = f"pins/{commit}/{name}.json"
                try:
                    self.store.delete(key)
                except OSError as error:
                    self.problems.append(f"could not delete {self.store.describe(key)}: {error.strerror or error}")


def _attempt(entry: Entry) -> str:
    return entry.key.split("/")[1]


def _attempt_of(store: ObjectStore, commit: Commit) -> str | None:
    if commit.attempt:
        return commit.attempt
    try:
        return read_manifest(store, commit.name)[0].attempt
    except (ManifestError, KeyMissing, OSError):
        return None


def _order_of(store: ObjectStore, entry: Entry) -> tuple[int, int] | None:
    """Epoch and step in a data object's header. The header is informational; here it can only keep data longer."""
    if not entry.key.endswith(".safetensors") or entry.bytes < ALIGNMENT:
        return None
    from ..format.digest import view_of
    from ..format.pages import aligned_buffer

    head = aligned_buffer(ALIGNMENT)
    try:
        with store.open_read(entry.key) as reader:
            reader.read_into(0, view_of(head))
    except OSError:
        return None
    raw = bytes(view_of(head))
    epoch, step = _EPOCH.search(raw), _STEP.search(raw)
    return (int(epoch[1]), int(step[1])) if epoch and step else None
