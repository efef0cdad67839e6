"""Retention: which checkpoints stay, and deletion of the others. A crash at any point loses nothing, and readers get a grace time.

    a commit that no rule keeps --> deletes its commit object --> (readers' grace) --> deletes its data
    an attempt without a commit --> (no writes for long)       --> marks it, (readers' grace) --> deletes its data

The commit object always goes first. A crash then leaves an orphan, which a later collection finds; the other order would leave a commit
without data. A mark in the store records when an orphan was first seen (``attempts/<attempt>/orphan.json``, aged by the store's clock). So
the grace time survives crashes and is the same for every collector.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal

from .arguments import of_type, whole
from .commits import Commit, ls, read_manifest
from .errors import NoCheckpoint
from .faults import fault_point
from .format.manifest_fields import ManifestError
from .format.names import check_attempt, commit_name, parse_commit_name
from .saving.proof import Noted, lacking, noted, prove
from .stores.opening import store_of
from .stores.store import ALIGNMENT, Entry, KeyExists, KeyMissing, ObjectStore, Root

_PIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
_EPOCH, _STEP = (re.compile(b'"' + word + b'":"([0-9]{1,18})"') for word in (b"epoch", b"step"))
_MARK = "orphan.json"


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
        """Names of the commits that a rule keeps, each with its rules: ``last``, ``every``, ``best``.

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


def pin(root: Root, commit: str | Commit, name: str) -> None:
    """Keep a checkpoint until :func:`unpin`, even if no retention rule keeps it. Several pins with different names may hold one checkpoint.

    Args:
        name: name of the pin: letters, digits, ``_`` and ``-``. Pinning again under a name changes nothing.

    Raises:
        ValueError: the name is invalid. NoCheckpoint: the commit does not exist (any more).
    """
    store = store_of(root)
    key = _pin_key(commit, name)
    target = key.split("/")[1]
    if store.size(f"commits/{target}.json") is None:
        raise NoCheckpoint(f"no checkpoint {target} in {store.describe()} to pin")
    try:
        store.put(key, b"{}\n")
    except KeyExists:
        pass
    if store.size(f"commits/{target}.json") is None:
        store.delete(key)
        raise NoCheckpoint(f"checkpoint {target} in {store.describe()} was deleted by a collection while it was being pinned")


def unpin(root: Root, commit: str | Commit, name: str) -> bool:
    """Remove a pin; ``False`` if there is none of that name. The next collection that finds no rule for the checkpoint deletes it."""
    return store_of(root).delete(_pin_key(commit, name))


def pins(root: Root) -> dict[str, tuple[str, ...]]:
    """All pins: ``{commit name: (pin, ..)}``."""
    found: dict[str, list[str]] = {}
    for entry in store_of(root).list("pins/"):
        _, commit, name = (*entry.key.split("/"), "", "")[:3]
        found.setdefault(commit, []).append(name.removesuffix(".json"))
    return {commit: tuple(names) for commit, names in found.items()}


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


def discard(root: Root, attempt: str) -> None:
    """Delete the data of an attempt that has no writers any more and cannot be committed.

    Raises:
        OSError: some of it could not be deleted.
    """
    store = store_of(root)
    for _, error in store.delete_many([entry.key for entry in store.list(f"data/{check_attempt(attempt)}/")]):
        if error is not None:
            raise error


def tend(root: Root, retention: Retention, made: Commit, patience_s: float, stop: Callable[[], bool] = lambda: False) -> tuple[str, ...]:
    """Collect once the ranks of a commit have read it back, or after ``patience_s`` seconds. Returns the problems."""
    store, deadline, pause = store_of(root), time.monotonic() + patience_s, 0.005
    while retention.verify and len(noted(store, made.attempt).get(made.attempt, ())) < made.world:
        if time.monotonic() >= deadline or stop():
            break
        time.sleep(pause)
        pause = min(1.0, pause * 1.5)
    return gc(store, retention, young=made).problems


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
        doomed = {c.name for c in commits} - set(why)
        dead: dict[str, str] = {}
        deleted: list[str] = []
        for victim in commits:
            if victim.name not in doomed:
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
        """The commits that count, oldest first: intact ones and, with ``verify``, only those whose data was read back and is right."""
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
                # It may be the best: one failure of the store must not cost it.
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
        """Whether this attempt has a commit after all. It is looked up by the name in the objects' headers, since a listing may be
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
        """Seconds that this attempt without a commit may be quiet. Its objects' headers tell its epoch."""
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


def _pin_key(commit: str | Commit, name: str) -> str:
    text = commit.name if isinstance(commit, Commit) else commit
    if not isinstance(text, str) or parse_commit_name(text) is None:
        raise ValueError(f"{text!r} is not a name of a checkpoint; they look like e0007-s000000012000")
    if not isinstance(name, str) or not _PIN_NAME.fullmatch(name):
        raise ValueError(f"{name!r} can't be a pin's name: give 1 to 128 letters, digits, '_' and '-', not beginning with '_' or '-'")
    return f"pins/{text}/{name}.json"


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
    from .format.digest import view_of
    from .format.pages import aligned_buffer

    head = aligned_buffer(ALIGNMENT)
    try:
        with store.open_read(entry.key) as reader:
            reader.read_into(0, view_of(head))
    except OSError:
        return None
    raw = bytes(view_of(head))
    epoch, step = _EPOCH.search(raw), _STEP.search(raw)
    return (int(epoch[1]), int(step[1])) if epoch and step else None
