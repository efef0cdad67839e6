"""How the ranks agree on a save without a collective: through the process group's own key-value store.

    every rank                                rank 0
    <save>/r1 = ready | busy | its problem --> every word, or none within the time limit
                                               go: the attempt's name and epoch; else why not
                                           <-- <save>/verdict

The words are some bytes each and are asked for by polling, from the writers' threads: so nothing here can meet a collective of the
training, no watchdog can strike, and a rank that never comes costs a save, not the job. Nothing is written before the verdict, so that a
save that one rank must skip leaves nothing behind on the others.

A save is known by its root, its step, and how often this rank has come to that step there, which the store counts. So a rank that has
missed a save finds the others at the next step, and what a group before this one has left in the same store is nobody's.
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

from .digest import digest_of
from .errors import STAGES, SaveAborted, SaveFailed
from .polling import pause_after
from .store import Root

_SPACE = "vescale-ray/saves"
_log = logging.getLogger(__name__)
_warned: set[str] = set()
"""Tensors that were named in a warning: once, not at each save."""


@dataclass(frozen=True)
class Word:
    """What one rank has to say of a save: it is ready (none of the first three), still busy with earlier ones, can't take part for a
    ``problem`` of its state, or has ``left`` it before it was begun. ``alike``: a digest of what every rank's state must have the same;
    ``plain``: digests of its plain values, by entry, of which rank 0's are stored for all. ``copies``: of the tensors that are taken to
    be the same on all ranks, eight hexadecimal digits of their names and of a sample of each; ``names``: their names, not told to others.
    """

    problem: str | None = None
    busy: bool = False
    left: str | None = None
    alike: str = ""
    plain: Mapping[str, str] = field(default_factory=dict)
    copies: str = ""
    names: Sequence[str] = ()

    def to_json(self) -> str:
        return json.dumps(asdict(replace(self, names=())))


@dataclass(frozen=True)
class Verdict:
    """What becomes of a save, the same on all ranks. ``go``: written as ``attempt``. ``busy``: skipped. ``unfit``: a rank's state can't be
    stored. ``failed``: the ranks did not come to an agreement. ``text`` says why it is not to be."""

    fate: Literal["go", "busy", "unfit", "failed"]
    attempt: str = ""
    epoch: int = 0
    text: str = ""


class Accord:
    """The channel of one saver (or one ``save()``) with its counterparts on the other ranks. Making one says nothing to them.

    Args:
        root: where is saved to, as it was given: the ranks that save together give the same.

    Raises:
        ValueError: the group is no more.
    """

    def __init__(self, group: dist.ProcessGroup | None, rank: int, world: int, root: Root) -> None:
        self.rank, self.world = rank, world
        self._store: dist.Store | None = None
        self._group: dist.ProcessGroup | None = None
        self._over: list[tuple[str, bool]] = []
        """Saves whose verdict stands in the store; whether every word on them was taken from it."""
        if world > 1:
            # The store that the group itself was made with.
            self._group = here = group or dist.group.WORLD
            assert here is not None
            try:
                shared: Any = get_process_group_store(here)
            except KeyError:
                raise ValueError("the process group of this save was destroyed; make a new one, and a new saver with it") from None
            text = os.fspath(root) if isinstance(root, (str, os.PathLike)) else root.describe()
            # On rank 0 it may be the server: a save under way must not lose it with the group.
            self._shared = dist.PrefixStore(f"{_SPACE}/{digest_of(str(text).encode())}", shared)
            # A connection of its own: this one's polls and the training's requests never wait for each other.
            with _answering(""):
                self._store = dist.PrefixStore(f"{_SPACE}/{digest_of(str(text).encode())}", shared.clone())

    def serves(self, group: dist.ProcessGroup | None, rank: int, world: int) -> bool:
        """Whether it is one between these ranks: a program may make its process group anew."""
        return (self.rank, self.world) == (rank, world) and (world == 1 or self._group is (group or dist.group.WORLD))

    def key(self, step: int) -> str:
        """Of the next save of ``step``. Called by the thread that trains, so that several savers' saves of one step are counted in the same
        order on all ranks.

        Raises:
            SaveFailed: the store does not answer.
        """
        if self._store is None:
            return str(step)
        with _answering(str(step)):
            return f"{step}.{self._shared.add(_counter(step, self.rank), 1)}"

    def tell(self, key: str, word: Word) -> None:
        """Say why this rank takes no part, without waiting for the others. Rank 0, which they listen to, says it as the verdict."""
        if self._store is None:
            return
        with _answering(key):
            if self.rank == 0:
                self._publish(key, self._judge([word]))
            else:
                self._store.set(f"{key}/r{self.rank}", word.to_json())

    def agree(
        self, key: str, word: Word, name: Callable[[], tuple[str, int]], timeout_s: float, cancelled: Callable[[], bool] = lambda: False
    ) -> Verdict:
        """Come to one verdict with the other ranks. Whoever leaves before, for whatever reason, tells the others.

        Args:
            name: attempt and epoch of a save that goes ahead; called on rank 0.
            timeout_s: how long rank 0 waits for the slowest; the others twice as long for it.

        Raises:
            SaveFailed: rank 0, or the store, said nothing. SaveAborted: cancelled while it waited.
        """
        if self._store is None:
            return self._named([word], name)
        with _answering(key):
            try:
                return self._heard(key, word, timeout_s, cancelled) if self.rank else self._ruled(key, word, name, timeout_s, cancelled)
            except RuntimeError:  # the store itself
                raise
            except BaseException as error:
                with suppress(SaveFailed):
                    self.tell(key, Word(left=_why_left(error)))
                raise

    def forget(self, now: str = "") -> None:
        """On rank 0, when every rank is known to have read the verdicts so far: what was said on those saves need not stay in the store.

        Args:
            now: the key of the save that is under way. A step that is saved more than once is counted on.
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

    def _heard(self, key: str, word: Word, timeout_s: float, cancelled: Callable[[], bool]) -> Verdict:
        """Rank 1 and up."""
        assert self._store is not None
        self._store.set(f"{key}/r{self.rank}", word.to_json())
        raw = self._await(f"{key}/verdict", 2 * timeout_s, cancelled)
        if raw is None:
            raise SaveFailed(f"step {_step(key)}: rank 0 did not begin this save within {2 * timeout_s:g} s; nothing was written")
        return Verdict(**json.loads(raw))

    def _ruled(self, key: str, word: Word, name: Callable[[], tuple[str, int]], timeout_s: float, cancelled: Callable[[], bool]) -> Verdict:
        """Rank 0."""
        if word.problem is not None or word.busy:
            verdict, taken = self._judge([word]), False
        else:
            verdict, taken = self._collect(key, word, name, timeout_s, cancelled)
        self._publish(key, verdict, taken=taken)
        return verdict

    def _collect(
        self, key: str, own: Word, name: Callable[[], tuple[str, int]], timeout_s: float, cancelled: Callable[[], bool]
    ) -> tuple[Verdict, bool]:
        """The verdict, and whether every rank's word was there."""
        assert self._store is not None
        deadline = time.monotonic() + timeout_s
        words, absent = [own], []
        for rank in range(1, self.world):
            raw = self._await(f"{key}/r{rank}", max(0.0, deadline - time.monotonic()), cancelled)
            if raw is None:
                absent.append(rank)
                continue
            words.append(Word(**json.loads(raw)))
            self._store.delete_key(f"{key}/r{rank}")
        if absent:
            text = f"ranks {absent} of {self.world} did not come to this save within {timeout_s:g} s"
            return Verdict("failed", text=f"{text} (every rank saves the same step into the same root)"), False
        self.forget(key)  # whoever is here has read what came before: every word of a rank comes from one thread, in order
        return self._named(words, name), True

    def _named(self, words: Sequence[Word], name: Callable[[], tuple[str, int]]) -> Verdict:
        verdict = self._judge(words)
        if verdict.fate != "go":
            return verdict
        try:
            attempt, epoch = name()
        except Exception as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            return Verdict("failed", text=f"the newest checkpoint could not be looked for: {reason}")
        return Verdict("go", attempt, epoch)

    def _judge(self, words: Sequence[Word]) -> Verdict:
        for rank, word in enumerate(words):
            said = word.problem if word.left is None else word.left
            if said is not None:
                return Verdict("unfit" if word.left is None else "failed", text=f"rank {rank}: {said}" if self.world > 1 else said)
        late = [rank for rank, word in enumerate(words) if word.busy]
        if late:
            return Verdict("busy", text=f"ranks {late} are still writing the ones before")
        for rank, word in enumerate(words):
            if own := sorted(set(word.plain) - set(words[0].plain)):
                text = f"rank {rank} has entries {own} that rank 0 has not, whose plain values are stored for all; give them on rank 0, too"
                return Verdict("unfit", text=f"{text}, or what is a rank's own as aux")
        other = next((rank for rank, word in enumerate(words) if word.alike != words[0].alike), None)
        if other is None:
            _warn_of_others(words)
            return Verdict("go")
        return Verdict(
            "unfit",
            text=f"rank {other} has other optimizers than rank 0, or others' parameters in them, and no load could take them up: what is "
            f"stored of them for all ranks is rank 0's; give the same on every rank ({STAGES})",
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


def _warn_of_others(words: Sequence[Word]) -> None:
    """No reason to fail: running statistics of ranks that don't tell each other differ, and that one rank's are stored may be meant."""
    own = words[0]
    values = {key: rank for rank, word in enumerate(words) for key in word.plain if word.plain[key] != own.plain.get(key)}
    for key, rank in values.items():
        if f"plain {key}" not in _warned:
            _warned.add(f"plain {key}")
            _log.warning(
                "the plain value %r is not the same on ranks 0 and %d: rank 0's is stored for all ranks; if it is a rank's own (a data "
                "loader's position, a random state), give it as aux={%r: ..}, which each rank gets back",
                key,
                rank,
                key,
            )
    unlike: dict[str, int] = {}
    for rank, word in enumerate(words):
        if word.copies != own.copies and word.copies[:8] == own.copies[:8]:
            for position, name in enumerate(own.names, 1):
                if word.copies[8 * position :][:8] != own.copies[8 * position :][:8]:
                    unlike.setdefault(name, rank)
    if unlike.keys() - _warned:
        _warned.update(unlike)
        name, rank = next(iter(unlike.items()))
        text = "plain tensors that are not the same on all ranks: %d (%s, on ranks 0 and %d, for one); of each only one rank's is stored; "
        remedy = "if they are a rank's own (experts, parts of a layer), make DTensors of them, give them names of their own, or save %s"
        _log.warning(text + remedy, len(unlike), name, rank, "each rank by itself")


def _counter(step: int | str, rank: int) -> str:
    return f"{step}/times/r{rank}"


@contextmanager
def _answering(key: str) -> Iterator[None]:
    """The group's store raises a RuntimeError when the process that holds it is gone."""
    try:
        yield
    except RuntimeError as error:
        text = " ".join(str(error).split())[:200]
        which = f"step {_step(key)}: " if key else ""
        raise SaveFailed(
            f"{which}the process group's store, through which the ranks agree on a save, does not answer ({text}); earlier checkpoints are "
            "untouched"
        ) from error


def _why_left(error: BaseException) -> str:
    if isinstance(error, SaveAborted):
        return "given up before it began"
    return "waited in vain for this save" if isinstance(error, SaveFailed) else f"interrupted by {type(error).__name__}"


def _step(key: str) -> str:
    return key.partition(".")[0]
