"""Random, seeded schedules of deaths, leavers and joiners: every sample once, and the undisturbed run's losses.

In deterministic mode the losses are equal bit for bit. `vescale_ray.workers` runs without Ray: :class:`tests.workers.tiny.Run` plays the
controller.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from tests.workers.fleet import Fleet
from tests.workers.test_shared_experts import EXPERTS
from tests.workers.tiny import FullState, Run, forget, keep_on_leaving, same_bits, text_of, tiny
from vescale_ray.config import RunConfig
from vescale_ray.data.order.stream import SampleStream

STEPS = 9
MOST = 5
"""The number of slots."""


class Play:
    """Schedules on one fleet, each compared with an undisturbed run."""

    def __init__(self, fleet: Fleet, config: RunConfig) -> None:
        self.fleet, self.config, self.living = fleet, config, [0, 1]
        self.whole, self.more = config.whole, config.step_of_workers[1]
        """The most of a number of workers that train together, and the workers of a growth."""
        run = Run(fleet, config)
        run.fresh(self.living)
        self.losses = [record.loss for record in run.train(STEPS)]
        self.state: FullState = run.full_state()
        self._leave(run)

    def _leave(self, run: Run) -> None:
        run.end()
        self.fleet.run(run.members, forget)

    def _joiners(self, count: int) -> list[int]:
        new = self.fleet.add(count)
        self.living += new
        return new

    def schedule(self, seed: int) -> list[str]:
        """Play one schedule. Returns the list of events, for the message of a failure."""
        rng = random.Random(seed)
        world = self.whole(rng.randint(2, 4))
        self._joiners(max(0, world - len(self.living)))
        members = self.living[:world]
        run, told = Run(self.fleet, self.config), [f"{world} workers"]
        run.fresh(members)
        at = 0
        leavers: list[int] = []
        while at < STEPS:
            # 0 is in the first step of a generation, while its first copies are being sent.
            steps = rng.randint(0 if leavers else 1, 3)
            at = min(STEPS, at + steps)
            if steps:
                self.fleet.run(leavers, forget)
                leavers = []
            act = rng.choice(["kill", "kill", "grow", "shrink", "replace"])
            if act == "kill" and len(run.members) > 1 and at < STEPS:
                victim, delay = rng.choice(run.members), rng.random() * 0.05
                if at >= STEPS - 2:
                    # Without a delay, because the last step may be over before the kill: on a fast machine two steps take less than the
                    # delay.
                    delay = 0.0
                told.append(f"{victim} of {run.members} killed in step {at} after {delay:.3f} s")
                at += 1
                survivors, _, _ = run.train_with_a_death(STEPS, victim, at - 1, delay)
                self.living.remove(victim)
                joiners = self._joiners(1) if rng.random() < 0.3 else []
                after = [*survivors, *joiners]
                after = after[: self.whole(len(after))]
                rest = [w for w in survivors if w not in after]
                self.fleet.run(rest, keep_on_leaving)
                run.resume([*survivors, *leavers], after)
                self.fleet.run(leavers, forget)
                leavers = rest
                continue
            run.train(at, rescale=act != "kill")
            before = list(run.members)
            if act == "grow" and len(before) + self.more <= MOST:
                after = [*before, *self._joiners(self.more)]
            elif act == "shrink" and len(before) > 1:
                after = rng.sample(before, self.whole(rng.randint(1, len(before) - 1)))
            elif act == "replace":
                after = [*rng.sample(before, len(before) - 1), *self._joiners(1)]
            else:
                continue
            after = after[: self.whole(len(after))]
            told.append(f"{before} -> {after} after step {at}")
            run.end()
            gone = [w for w in before if w not in after]
            self.fleet.run(gone, keep_on_leaving)
            run.resume([*before, *leavers], after)
            leavers += gone  # leavers stay until a step is complete
        run.train(STEPS)
        self._check(run, told)
        self._leave(run)
        return told

    def _check(self, run: Run, told: list[str]) -> None:
        assert sorted(run.records) == list(range(STEPS)), told
        used = [sample for index in range(STEPS) for sample in run.records[index].ids]
        stream = SampleStream(text_of(self.config).num_samples, self.config.run.seed)
        assert used == stream.ids(0, STEPS * self.config.global_batch).tolist(), told
        if self.config.elastic.deterministic:
            assert run.losses() == self.losses, told
            assert same_bits(run.full_state(), self.state), told
        else:
            assert run.losses() == pytest.approx(self.losses, rel=1e-4), told


def play(text: str, seeds: Sequence[int], **changes: Any) -> None:
    with Fleet(2) as fleet:
        here = Play(fleet, tiny(text, train_steps=STEPS, **changes))
        happened = [len(here.schedule(seed)) - 1 for seed in seeds]
        assert sum(happened) > 2 * len(seeds), "the schedules hardly disturb anything"


def test_a_random_schedule_leaves_no_trace(text: str) -> None:
    """It has deaths, joiners, leavers and a replacement, with one to three workers."""
    play(text, [0], elastic_deterministic=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(2))
@pytest.mark.fault("I1", "W19")
def test_random_schedules_of_replicas_leave_no_trace(text: str, part: int) -> None:
    """Two shards and one or two replicas. Workers beyond whole replicas are left over."""
    play(text, range(10 * part, 10 * part + 10), train_sharding={"shard_group": 2}, train_zero_stage=2, elastic_workers=2)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.fault("I1", "W1")
def test_random_schedules_of_shared_experts_leave_no_trace(text: str) -> None:
    """One or two pairs of workers share the experts of each layer, and a worker that is left alone has all of them."""
    play(text, range(6), train_expert_parallel=2, elastic_workers=2, **EXPERTS)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(10))
@pytest.mark.fault("I1")
def test_two_hundred_random_schedules_leave_no_trace(text: str, part: int) -> None:
    play(text, range(10 + 20 * part, 30 + 20 * part), elastic_deterministic=part % 2 == 0)
