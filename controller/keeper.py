"""Which state a generation starts from, and keeping what parked workers hold as a checkpoint.

The checkpoint after the last step, the one after a stop, and the one that a failing run leaves are all the same thing here: the
newest state that the living workers hold together, each shard written by its owner or by whoever has its copy. So the loss
of a worker in that moment costs nothing while a copy is left.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from vescale_ray.controller import policy
from vescale_ray.controller.cadence import Cadence
from vescale_ray.controller.checkpoint_stats import saved_event
from vescale_ray.controller.crew import Crew
from vescale_ray.controller.generation_log import GenerationLog
from vescale_ray.controller.protocol import Source
from vescale_ray.controller.run_log import RunLog
from vescale_ray.controller.saves import SaveResult, Saves, newest_kept
from vescale_ray.controller.scribe import Scribe
from vescale_ray.workers.holdings import Holding, Resume, choose_resume
from vescale_ray.workers.layouts import Layouts
from vescale_ray.workers.messages import Phase, Save

_log = logging.getLogger(__name__)

TRIES = 3
STORAGE_S = 60.0
"""For the storage to tell its newest checkpoint: in a file system whose server is gone it never would."""
LOOK_S = 0.5
"""Between two looks whether it has."""


class Keeper:
    """Chooses states and keeps them.

    Args:
        root: folder of the checkpoints.
        run_id: of this start of the run; goes into the identifiers of checkpoints.
        take_number: a generation's number that nobody has; the epoch of a checkpoint.
        wait: runs the conductor's loop until its argument is true, at most so many seconds; whether it became true.
        save_s: bound of a checkpoint.
        cadence: is told what each checkpoint cost.
        most: the largest world size that can be.
        oldest: generation of the oldest checkpoint to go back to.

    Attributes:
        layouts: who owns what at each world size.
        numbered_by: what the last ranks were numbered by: the planned layouts, or, where these were not known yet, equal intervals. Then
            another numbering might have moved less.
    """

    def __init__(
        self,
        root: str,
        run_id: str,
        crew: Crew,
        log: RunLog,
        generation: GenerationLog,
        saves: Saves,
        take_number: Callable[[], int],
        wait: Callable[[Callable[[], bool], float], bool],
        save_s: float,
        cadence: Cadence,
        most: int,
        oldest: int = 0,
    ) -> None:
        self.layouts = Layouts(most)
        self.numbered_by = "layouts"
        self._cadence = cadence
        self._root, self._run_id, self._save_s, self._oldest = root, run_id, save_s, oldest
        self._crew, self._log, self._generation, self._saves = crew, log, generation, saves
        self._take_number, self._wait = take_number, wait
        self._scribe = Scribe()
        self._bad: frozenset[str] = frozenset()
        self._results: dict[str, SaveResult] = {}
        self._damaged: set[str] = set()
        self._last: SaveResult | None = None
        """The newest that was committed."""

    def distrust(self, commit: str) -> None:
        """A checkpoint turned out to be damaged: use an older one."""
        self._bad |= {commit}

    def damaged(self, attempt: str) -> None:
        """What a worker wrote of an attempt can't be read back: use an older one, if it was committed."""
        self._damaged.add(attempt)
        result = self._results.get(attempt)
        if result is not None and result.kept is not None:
            self.distrust(result.kept.name)

    def newest(self) -> policy.Kept | None:
        """The newest checkpoint that is not known to be damaged; what the books know of where the storage does not tell."""
        try:
            return self._ask_storage()
        except OSError as error:
            _log.warning("%s does not tell its newest checkpoint: %s", self._root, error)
        path, step = self._log.stats.checkpoints.path, self._log.stats.checkpoints.step
        return policy.Kept(path.rpartition("/")[2], path, step) if path is not None and step is not None else None

    def source(self, members: Sequence[str], holders: Iterable[str]) -> Source:
        """Where ``members`` start from, with what ``holders`` (parked workers, leavers too) hold. Where they hold a state as new as any
        checkpoint the storage is not asked: it may be slow, or out of reach.

        Raises:
            OSError: no state is held, and the storage is out of reach, or shows none of the checkpoints that there must be (it is not
                mounted, say): to begin anew would be wrong.
        """
        held, newest = self._held(holders), None
        if _newest_step(held) < (self._log.stats.checkpoints.step or 0):
            try:
                newest = self._ask_storage()
                held = self._held(holders)  # somebody may have been lost meanwhile
            except OSError as error:
                held = self._held(holders)
                if (step := _newest_step(held)) < 0:
                    raise
                _log.warning("%s is out of reach: going on from step %d in memory: %s", self._root, step, error)
        return policy.choose_source(held, members, newest, self._generation.world)

    def _ask_storage(self) -> policy.Kept | None:
        """Raises OSError also where the storage says nothing for :data:`STORAGE_S`. Meanwhile the loop goes on: else it took no command."""
        question = partial(newest_kept, self._root, self._bad, self._oldest, self._log.stats.checkpoints.step)
        deadline = time.monotonic() + STORAGE_S
        while True:
            try:
                found: policy.Kept | None = self._scribe.do(question)
                return found
            except TimeoutError:
                if time.monotonic() > deadline:
                    raise
            self._wait(lambda: False, LOOK_S)

    def held_step(self, workers: Iterable[str]) -> int:
        """Of the newest state that ``workers``, who are parked, hold together; -1: none. The storage is not asked."""
        return _newest_step(self._held(workers))

    def seated(self, members: Sequence[str], source: Source, holders: Iterable[str]) -> tuple[str, ...]:
        """``members`` in the order of their ranks: the one in which the fewest bytes move."""
        from vescale_ray.workers.seating import seated

        resume = source.resume
        if resume is None:
            return tuple(members)
        overlap = self.layouts.overlap(resume.world, len(members))
        self.numbered_by = "layouts" if self.layouts.exact else "equal intervals"
        return seated(members, self._parts(resume, holders), overlap)

    def staying(self, candidates: Sequence[str], count: int, holders: Sequence[str]) -> tuple[str, ...]:
        """The ``count`` of ``candidates`` that stay so that the fewest bytes move; where that moves no more, so that copies lie on other
        nodes, and whole nodes become free."""
        from vescale_ray.workers.seating import staying

        resume = self.source(candidates, holders).resume
        if resume is None:
            return tuple(candidates[:count])
        there: dict[str, list[str]] = {}
        for worker in (*self._crew.ready(), *self._crew.warming()):
            info = self._crew.info(worker)
            there.setdefault(info.node if info is not None else "", []).append(worker)
        overlap = self.layouts.overlap(resume.world, count)
        return tuple(staying(candidates, self._parts(resume, holders), overlap, list(there.values())))

    def _parts(self, resume: Resume, holders: Iterable[str]) -> dict[str, list[int]]:
        """By worker, the ranks of that state whose shards it has."""
        state = (resume.generation, resume.step, resume.world)
        return {
            worker: [rank for one in holdings if (one.generation, one.step, one.world) == state for rank in one.ranks]
            for worker, holdings in self._held(holders).items()
        }

    def collect(self) -> None:
        """Take note of checkpoints that were committed or have failed."""
        for result in self._saves.results():
            self._note(result)

    def abandon(self, reason: str = "a worker was lost before it had written its part") -> None:
        """Give up checkpoints of a generation that is over: the votes that they lack will not come."""
        for result in self._saves.abandon(reason):
            self._note(result)

    def save(self, workers: Sequence[str]) -> SaveResult | None:
        """A checkpoint of the newest state that ``workers``, who are parked, hold together; None when they hold none, or a checkpoint is
        newer than what they hold (copies that are not made every step): an older state, committed later, would pass for the newest.

        A worker that dies meanwhile is no reason to give up while the others have copies of its shards.
        """
        problem = "the workers died while they wrote it"
        for _ in range(TRIES):
            held = self._held(workers)
            resume = choose_resume(held)
            if resume is None:
                return None
            if resume.step < (self._log.stats.checkpoints.step or 0) and (kept := self.newest()) is not None and kept.step > resume.step:
                return None
            last = self._last
            if last is not None and last.step == resume.step and last.epoch >= resume.generation:
                return last
            holders: dict[int, list[str]] = {}
            for worker, holdings in held.items():
                for holding in holdings:
                    if (holding.generation, holding.step) == (resume.generation, resume.step):
                        for rank in holding.ranks:
                            holders.setdefault(rank, []).append(worker)
            world = self._generation.world
            owners = world.members if world is not None and world.ticket.generation == resume.generation else ()
            plan = policy.spread_saving(holders, owners)
            epoch = self._take_number()
            attempt = f"{self._run_id}-h{epoch}-s{resume.step}"
            tickets = {w: report.ticket for w in plan if (report := self._crew.report(w)) is not None}
            refused = self._crew.order({w: Save(tickets[w], resume, ranks, attempt, epoch) for w, ranks in plan.items()})
            if not refused:
                self._wait(lambda name=attempt, of=tuple(plan): self._decided(name, of), self._save_s)  # type: ignore[misc]
                if attempt in self._results:
                    return self._results[attempt]
                if all(self._crew.alive(w) for w in plan):  # nothing would be another time: the storage hangs
                    self.abandon(problem := f"it was not written within {self._save_s:g} s (checkpoint.last_timeout_s)")
                    break
            self.abandon()
            # Who still writes for the attempt that has failed can neither write again nor join: its order would be refused. Nor
            # does it count as a holder.
            self._wait(lambda: not self.writes(workers), self._save_s)
            problem = next(iter(refused.values()), problem)
        return SaveResult("", self._log.stats.step, 0, 0.0, error=problem)

    def _decided(self, attempt: str, writers: Sequence[str]) -> bool:
        if attempt in self._results:
            return True
        return not all(self._crew.alive(w) for w in writers) and not self._saves.committing(attempt)

    def writes(self, workers: Iterable[str]) -> bool:
        """Whether one of them writes a checkpoint that was ordered here, as far as it is known."""
        reports = {w: self._crew.report(w) for w in workers}
        return any(one is not None and (one.phase is Phase.SAVING or self._crew.stale(w)) for w, one in reports.items())

    def _held(self, workers: Iterable[str]) -> Mapping[str, Sequence[Holding]]:
        reports = {w: self._crew.report(w) for w in workers if self._crew.alive(w)}
        return {w: report.held for w, report in reports.items() if report is not None and report.out}

    def _note(self, result: SaveResult) -> None:
        self._results[result.attempt] = result
        if result.attempt in self._damaged and result.kept is not None:
            self.distrust(result.kept.name)
        self._cadence.saved(result)
        self._last = result if result.kept is not None else self._last
        name, about = saved_event(result, self._log.stats.ended(result.step))
        self._log.record(name, **about)


def _newest_step(held: Mapping[str, Sequence[Holding]]) -> int:
    """Of the newest state that workers hold together; -1: none."""
    resume = choose_resume(held)
    return -1 if resume is None else resume.step
