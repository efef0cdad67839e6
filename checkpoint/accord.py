"""How the ranks agree on a save without a collective: through the process group's own key-value store.

    every rank                                rank 0
    <save>/r1 = ready | busy | its problem --> every word, or none within the time limit
                                               go: the attempt's name and epoch; else why not
                                           <-- <save>/verdict

The words are some bytes each and are asked for by polling, from the writers' threads: so nothing here can meet a collective of the
training, no watchdog can strike, and a rank that never comes costs a save, not the job. Nothing is written before the verdict, so that a
save that one rank must skip leaves nothing behind on the others.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed import distributed_c10d

from .errors import SaveAborted, SaveFailed
from .polling import pause_after

_SPACE = "vescale-ray/saves"


@dataclass(frozen=True)
class Word:
    """What one rank has to say of a save: it is ready (neither of the two), still busy with earlier ones, or can't take part."""

    problem: str | None = None
    busy: bool = False


@dataclass(frozen=True)
class Verdict:
    """What becomes of a save, the same on all ranks. ``go``: written as ``attempt``. ``busy``: skipped. ``unfit``: a rank's state can't be
    stored. ``failed``: the ranks did not come to an agreement. ``text`` says why it is not to be."""

    fate: Literal["go", "busy", "unfit", "failed"]
    attempt: str = ""
    epoch: int = 0
    text: str = ""


class Accord:
    """The channel of one saver (or one ``save()``) with its counterparts on the other ranks.

    Making one is no collective; but every rank makes its first, its second, .. for the same saves, in the thread that trains.
    """

    def __init__(self, group: dist.ProcessGroup | None, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self._store: dist.Store | None = None
        self._read: list[str] = []
        self._times: dict[int, int] = {}
        if world > 1:
            # The store that the group itself was made with; torch has no public name for it that all releases since 2.11 share.
            here = group or dist.group.WORLD
            assert here is not None
            shared: Any = distributed_c10d._get_process_group_store(here)
            self._shared = shared  # on rank 0 it may be the server: a save under way must not lose it with the group
            number = shared.add(f"{_SPACE}/r{rank}", 1)
            # A connection of its own: this one's polls and the training's requests never wait for each other.
            self._store = dist.PrefixStore(f"{_SPACE}/{number}", shared.clone())

    def key(self, step: int) -> str:
        """Of the next save of ``step``: a step may be saved again, and a rank that missed a save finds the others at the next."""
        self._times[step] = self._times.get(step, 0) + 1
        return f"{step}.{self._times[step]}"

    def tell(self, key: str, word: Word) -> None:
        """Say why this rank takes no part, without waiting for the others. Rank 0, which they listen to, says it as the verdict."""
        if self._store is None:
            return
        with _answering(key):
            if self.rank == 0:
                self._publish(key, self._judge([word]))
            else:
                self._store.set(f"{key}/r{self.rank}", json.dumps(asdict(word)))

    def agree(
        self, key: str, word: Word, name: Callable[[], tuple[str, int]], timeout_s: float, cancelled: Callable[[], bool] = lambda: False
    ) -> Verdict:
        """Come to one verdict with the other ranks.

        Args:
            name: attempt and epoch of a save that goes ahead; called on rank 0.
            timeout_s: how long rank 0 waits for the slowest; the others twice as long for it.

        Raises:
            SaveFailed: rank 0, or the store, said nothing. SaveAborted: cancelled while it waited.
        """
        if self._store is None:
            return self._named([word], name)
        with _answering(key):
            if self.rank:
                self._store.set(f"{key}/r{self.rank}", json.dumps(asdict(word)))
                raw = self._await(f"{key}/verdict", 2 * timeout_s, cancelled)
                if raw is None:
                    raise SaveFailed(f"step {_step(key)}: rank 0 did not begin this save within {2 * timeout_s:g} s; nothing was written")
                return Verdict(**json.loads(raw))
            if word.problem is not None or word.busy:
                verdict = self._judge([word])
            else:
                try:
                    verdict = self._collect(key, word, name, timeout_s, cancelled)
                except SaveAborted as error:
                    self._publish(key, Verdict("failed", text=str(error)))
                    raise
            self._publish(key, verdict)
            return verdict

    def forget(self) -> None:
        """On rank 0, when every rank is known to have read the verdicts so far: they need not stay in the store."""
        for key in self._read:
            with suppress(RuntimeError):
                assert self._store is not None
                self._store.delete_key(key)
        self._read = []

    def _collect(
        self, key: str, own: Word, name: Callable[[], tuple[str, int]], timeout_s: float, cancelled: Callable[[], bool]
    ) -> Verdict:
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
            return Verdict("failed", text=f"ranks {absent} of {self.world} did not come to this save within {timeout_s:g} s")
        self.forget()  # whoever is here has read what came before: every word of a rank comes from one thread, in order
        return self._named(words, name)

    def _named(self, words: Sequence[Word], name: Callable[[], tuple[str, int]]) -> Verdict:
        verdict = self._judge(words)
        if verdict.fate != "go":
            return verdict
        try:
            attempt, epoch = name()
        except OSError as error:
            return Verdict("failed", text=f"the newest checkpoint could not be looked for: {error.strerror or error}")
        return Verdict("go", attempt, epoch)

    def _judge(self, words: Sequence[Word]) -> Verdict:
        for rank, word in enumerate(words):
            if word.problem is not None:
                return Verdict("unfit", text=f"rank {rank}: {word.problem}" if self.world > 1 else word.problem)
        late = [rank for rank, word in enumerate(words) if word.busy]
        return Verdict("busy", text=f"ranks {late} are still writing the ones before") if late else Verdict("go")

    def _publish(self, key: str, verdict: Verdict) -> None:
        assert self._store is not None
        self._store.set(f"{key}/verdict", json.dumps(asdict(verdict)))
        self._read.append(f"{key}/verdict")

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


@contextmanager
def _answering(key: str) -> Iterator[None]:
    """The group's store raises a RuntimeError when the process that holds it is gone."""
    try:
        yield
    except RuntimeError as error:
        text = " ".join(str(error).split())[:200]
        raise SaveFailed(
            f"step {_step(key)}: the process group's store, through which the ranks agree on a save, does not answer ({text}); "
            "earlier checkpoints are untouched"
        ) from error


def _step(key: str) -> str:
    return key.partition(".")[0]
