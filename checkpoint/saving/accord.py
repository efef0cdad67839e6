"""Agreement of the ranks on a save, through the process group's key-value store rather than a collective.

    every rank                                rank 0
    <save>/r1 = ready | busy | its problem --> waits for every status, up to the time limit
                                               go: the attempt's name and epoch; or the reason against it
                                           <-- <save>/verdict

Each status has a few bytes. The writers' threads poll for it. So the exchange cannot collide with a collective of the training, and no
watchdog can abort it. A rank that never comes costs one save, not the job. Nothing is written before the verdict, so a save that one rank
must skip leaves nothing behind on the others.

A save is identified by its root, its step, and how often this rank has saved that step there; the store counts. So a rank that missed a
save meets the others again at the next step. Leftovers of an earlier group in the same store are ignored.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch.distributed as dist

from vescale_ray.compat.distributed import get_process_group_store
from vescale_ray.errors import one_line

from ..errors import STAGES, SaveAborted, SaveFailed
from ..format.digest import digest_of
from ..stores.store import ObjectStore, Root
from .polling import pause_after

_SPACE = "vescale-ray/saves"
_log = logging.getLogger(__name__)
_warned: set[str] = set()
"""Tensors already named in a warning, so that each is named once."""


@dataclass(frozen=True)
class RankStatus:
    """One rank's message about a save.

    Attributes:
        problem: why the rank's state cannot be stored.
        busy: whether the rank still writes earlier checkpoints.
        left: why the rank left the save before it began. A rank without ``problem``, ``busy`` and ``left`` is ready.
        alike: digest of the parts of the state that must be equal on all ranks.
        plain: digests of the plain values, by entry. Rank 0's values are stored for all ranks.
        numbers: digests of the optimizers' hyperparameters and scalar states, by their descriptions. Rank 0's are stored for all ranks.
        copies: eight hexadecimal digits of the names of the tensors assumed equal on all ranks, then eight of a sample of each.
        names: names of those tensors; not sent to other ranks.
    """

    problem: str | None = None
    busy: bool = False
    left: str | None = None
    alike: str = ""
    plain: Mapping[str, str] = field(default_factory=dict)
    numbers: Mapping[str, str] = field(default_factory=dict)
    copies: str = ""
    names: Sequence[str] = ()

    def to_json(self) -> str:
        return json.dumps(asdict(replace(self, names=())))


@dataclass(frozen=True)
class Verdict:
    """Outcome of a save, the same on all ranks.

    ``go``: the save is written as ``attempt``. ``busy``: it is skipped. ``unfit``: a rank's state cannot be stored. ``failed``: the ranks
    did not agree. ``text`` is the reason if the outcome is not ``go``.
    """

    fate: Literal["go", "busy", "unfit", "failed"]
    attempt: str = ""
    epoch: int = 0
    text: str = ""


class Accord:
    """The channel of one saver (or one ``save()``) to its counterparts on the other ranks. Creating it sends nothing.

    Args:
        root: checkpoint root as the user gave it; ranks that save together give the same one.

    Raises:
        ValueError: the process group was destroyed.
    """

    def __init__(self, group: dist.ProcessGroup | None, rank: int, world: int, root: Root) -> None:
        self.rank, self.world = rank, world
        self._store: dist.Store | None = None
        self._group: dist.ProcessGroup | None = None
        self._over: list[tuple[str, bool]] = []
        """Saves whose verdict is in the store, and whether every rank's status on them was deleted."""
        if world > 1:
            # The store with which the group was made.
            self._group = here = group or dist.group.WORLD
            assert here is not None
            try:
                shared: Any = get_process_group_store(here)
            except KeyError:
                raise ValueError("the process group of this save was destroyed; make a new one, and a new saver with it") from None
            # The caller refuses a root of any other kind once all ranks can hear of it.
            text = root.describe() if isinstance(root, ObjectStore) else root if isinstance(root, (str, os.PathLike)) else type(root)
            # On rank 0 this may be the server. A save in progress must keep it alive when the group goes.
            self._shared = dist.PrefixStore(f"{_SPACE}/{digest_of(str(text).encode())}", shared)
            # A separate connection, so that these polls and the training's requests never wait for each other.
            with _answering(""):
                self._store = dist.PrefixStore(f"{_SPACE}/{digest_of(str(text).encode())}", shared.clone())

    def serves(self, group: dist.ProcessGroup | None, rank: int, world: int) -> bool:
        """Return whether this channel connects these ranks; a program may recreate its process group."""
        return (self.rank, self.world) == (rank, world) and (world == 1 or self._group is (group or dist.group.WORLD))

    def key(self, step: int) -> str:
        """Return the key of the next save of ``step``. Call it from the training thread, so that all ranks count several savers' saves of a
        step in the same order.

        Raises:
            SaveFailed: the store does not answer.
        """
        if self._store is None:
            return str(step)
        with _answering(str(step)):
            return f"{step}.{self._shared.add(_counter(step, self.rank), 1)}"

    def tell(self, key: str, status: RankStatus) -> None:
        """Report why this rank takes no part, without waiting for the other ranks. On rank 0 the report becomes the verdict."""
        if self._store is None:
            return
        with _answering(key):
            if self.rank == 0:
                self._publish(key, self._judge([status]))
            else:
                self._store.set(f"{key}/r{self.rank}", status.to_json())

    def agree(
        self,
        key: str,
        own: RankStatus,
        name: Callable[[], tuple[str, int]],
        timeout_s: float,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Verdict:
        """Agree on one verdict with the other ranks. A rank that leaves early, for any reason, tells the others.

        Args:
            name: returns attempt and epoch of a save that goes ahead; called on rank 0.
            timeout_s: seconds that rank 0 waits for the slowest rank; the other ranks wait twice as long for rank 0.

        Raises:
            SaveFailed: rank 0 or the store did not answer. SaveAborted: the save was cancelled during the wait.
        """
        if self._store is None:
            return self._named([own], name)
        with _answering(key):
            try:
                return self._follow(key, own, timeout_s, cancelled) if self.rank else self._decide(key, own, name, timeout_s, cancelled)
            except RuntimeError:  # from the store itself
                raise
            except BaseException as error:
                with suppress(SaveFailed):
                    self.tell(key, RankStatus(left=_why_left(error)))
                raise

    def forget(self, now: str = "") -> None:
        """Delete the messages of earlier saves from the store. Rank 0 calls it once every rank is known to have read their verdicts.

        Args:
            now: key of the save in progress. The counters of its step stay, since they are still in use.
        """
        over, self._over = self._over, []
        with suppress(RuntimeError):
            for key, taken in over:
                assert self._store is not None
                self._store.delete_key(f"{key}/verdict")
                once = key.endswith(".1") and _step(key) != _step(now)
                for rank in range(self.world):
                    if once:
                        self._store.delete_key(_counter(_step(key), rank))
                    if rank and not taken:
                        self._store.delete_key(f"{key}/r{rank}")

    def _follow(self, key: str, own: RankStatus, timeout_s: float, cancelled: Callable[[], bool]) -> Verdict:
        """Do the part of :meth:`agree` on a rank other than 0: send this rank's status, and wait for the verdict."""
        assert self._store is not None
        self._store.set(f"{key}/r{self.rank}", own.to_json())
        raw = self._await(f"{key}/verdict", 2 * timeout_s, cancelled)
        if raw is None:
            raise SaveFailed(f"step {_step(key)}: rank 0 did not begin this save within {2 * timeout_s:g} s; nothing was written")
        return Verdict(**json.loads(raw))

    def _decide(
        self, key: str, own: RankStatus, name: Callable[[], tuple[str, int]], timeout_s: float, cancelled: Callable[[], bool]
    ) -> Verdict:
        """Do rank 0's part of :meth:`agree`: collect the statuses, and publish the verdict."""
        if own.problem is not None or own.busy:
            verdict, taken = self._judge([own]), False
        else:
            verdict, taken = self._collect(key, own, name, timeout_s, cancelled)
        self._publish(key, verdict, taken=taken)
        return verdict

    def _collect(
        self, key: str, own: RankStatus, name: Callable[[], tuple[str, int]], timeout_s: float, cancelled: Callable[[], bool]
    ) -> tuple[Verdict, bool]:
        """Return the verdict, and whether every rank sent its status."""
        assert self._store is not None
        deadline = time.monotonic() + timeout_s
        statuses, absent = [own], []
        for rank in range(1, self.world):
            raw = self._await(f"{key}/r{rank}", max(0.0, deadline - time.monotonic()), cancelled)
            if raw is None:
                absent.append(rank)
                continue
            statuses.append(RankStatus(**json.loads(raw)))
            self._store.delete_key(f"{key}/r{rank}")
        if absent:
            text = f"ranks {absent} of {self.world} did not come to this save within {timeout_s:g} s"
            return Verdict("failed", text=f"{text} (every rank saves the same step into the same root)"), False
        self.forget(key)  # all ranks have read the earlier verdicts, since one thread of each rank sends its statuses in order
        return self._named(statuses, name), True

    def _named(self, statuses: Sequence[RankStatus], name: Callable[[], tuple[str, int]]) -> Verdict:
        verdict = self._judge(statuses)
        if verdict.fate != "go":
            return verdict
        try:
            attempt, epoch = name()
        except Exception as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            return Verdict("failed", text=f"the newest checkpoint could not be looked up: {reason}")
        return Verdict("go", attempt, epoch)

    def _judge(self, statuses: Sequence[RankStatus]) -> Verdict:
        for rank, status in enumerate(statuses):
            said = status.problem if status.left is None else status.left
            if said is not None:
                return Verdict("unfit" if status.left is None else "failed", text=f"rank {rank}: {said}" if self.world > 1 else said)
        late = [rank for rank, status in enumerate(statuses) if status.busy]
        if late:
            return Verdict("busy", text=f"ranks {late} are still writing earlier checkpoints")
        for rank, status in enumerate(statuses):
            if own := sorted(set(status.plain) - set(statuses[0].plain)):
                text = f"rank {rank} has entries {own} that rank 0 lacks, but only rank 0's are stored for all; give them on rank 0 too"
                return Verdict("unfit", text=f"{text}, or give a rank's own values as aux")
        other = next((rank for rank, status in enumerate(statuses) if status.alike != statuses[0].alike), None)
        if other is None:
            _warn_of_others(statuses)
            return Verdict("go")
        return Verdict(
            "unfit",
            text=f"rank {other} has other optimizers than rank 0, or other parameters in them, but rank 0's are stored "
            f"for all ranks: give the same optimizers on every rank ({STAGES})",
        )

    def _publish(self, key: str, verdict: Verdict, *, taken: bool = False) -> None:
        assert self._store is not None
        self._store.set(f"{key}/verdict", json.dumps(asdict(verdict)))
        self._over.append((key, taken))

    def _await(self, key: str, seconds: float, cancelled: Callable[[], bool]) -> bytes | None:
        assert self._store is not None
        began = time.monotonic()
        deadline = began + seconds
        while not self._store.check([key]):
            if time.monotonic() >= deadline:
                return None
            if cancelled():
                raise SaveAborted(f"step {_step(key)}: this save was given up before it began; earlier checkpoints are untouched")
            time.sleep(pause_after(time.monotonic() - began))
        return self._store.get(key)


def _warn_of_others(statuses: Sequence[RankStatus]) -> None:
    """Warn of values that differ between ranks. This is no reason to fail: running statistics may differ, and one rank's may be the ones to
    store."""
    own = statuses[0]
    values = {key: rank for rank, status in enumerate(statuses) for key in status.plain if status.plain[key] != own.plain.get(key)}
    for key, rank in values.items():
        if f"plain {key}" not in _warned:
            _warned.add(f"plain {key}")
            _log.warning(
                "the plain value %r differs between ranks 0 and %d, and rank 0's is stored for all ranks; if each rank has its own (a data "
                "loader's position, a random state), give it as aux={%r: ..}, which each rank gets back",
                key,
                rank,
                key,
            )
    numbers = {what: rank for rank, other in enumerate(statuses) for what in other.numbers if other.numbers[what] != own.numbers.get(what)}
    for what, rank in numbers.items():
        if f"numbers {what}" not in _warned:
            _warned.add(f"numbers {what}")
            _log.warning(
                "the %s differ between ranks 0 and %d, and rank 0's are stored for all ranks; set the same on every rank (give a "
                "scheduler such as ReduceLROnPlateau a loss that was reduced over the ranks)",
                what,
                rank,
            )
    unlike: dict[str, int] = {}
    for rank, status in enumerate(statuses):
        if status.copies != own.copies and status.copies[:8] == own.copies[:8]:
            for position, name in enumerate(own.names, 1):
                if status.copies[8 * position :][:8] != own.copies[8 * position :][:8]:
                    unlike.setdefault(name, rank)
    if unlike.keys() - _warned:
        _warned.update(unlike)
        name, rank = next(iter(unlike.items()))
        text = "%d plain tensors differ between ranks (for example %s, on ranks 0 and %d), but one rank's copy of each is stored for all; "
        remedy = "if each rank has its own (experts, parts of a layer), make them DTensors, give them different names, or save %s"
        _log.warning(text + remedy, len(unlike), name, rank, "each rank by itself")


def _counter(step: int | str, rank: int) -> str:
    return f"{step}/times/r{rank}"


@contextmanager
def _answering(key: str) -> Iterator[None]:
    """Turn the store's RuntimeError into SaveFailed; the store raises it if the process that holds it is gone."""
    try:
        yield
    except RuntimeError as error:
        text = one_line(error)[:200]
        which = f"step {_step(key)}: " if key else ""
        raise SaveFailed(
            f"{which}the process group's store, through which the ranks agree on a save, does not answer ({text}); earlier checkpoints are "
            "untouched"
        ) from error


def _why_left(error: BaseException) -> str:
    if isinstance(error, SaveAborted):
        return "given up before it began"
    return "timed out waiting for this save" if isinstance(error, SaveFailed) else f"interrupted by {type(error).__name__}"


def _step(key: str) -> str:
    return key.partition(".")[0]
