"""The statistics of a run are the same whether they were counted live or replayed from its lines, wherever the controller was killed."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.controller.recorded import Recorded, recorded
from vescale_ray.controller.checkpointing.committer import SaveResult
from vescale_ray.controller.failures.straggler import Stragglers
from vescale_ray.controller.policy import CommittedCheckpoint
from vescale_ray.controller.protocol import FINAL, RunState, StateSource, World
from vescale_ray.controller.state import run_log
from vescale_ray.controller.state.publisher import HEARD_S
from vescale_ray.controller.statistics import step_stats
from vescale_ray.controller.statistics.checkpoint_stats import saved_event
from vescale_ray.controller.statistics.goodput import Goodput
from vescale_ray.controller.statistics.run_stats import RunStats
from vescale_ray.runfolder import RunFolder
from vescale_ray.workers.messages import Evaluated, Filled, Origin, Stepped, StepRecord, Ticket, Usage, WorkerInfo
from vescale_ray.workers.monitoring.pace import View

MOVES = 70
BEGAN_FROM = StateSource(Origin.CHECKPOINT, 5, path="/c5")


class Player:
    """Plays a run at random through the recorder: with NaN, clocks that go back, rollbacks, waits, rescales and restarts."""

    def __init__(self, folder: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.random, self.now, self.number = random.Random(seed), 1e9, 0
        monkeypatch.setattr(time, "time", lambda: self.now)
        self.ended = self.now
        self.run = another(folder).started()
        self.slow = self._stragglers()
        self.form()

    def _stragglers(self) -> Stragglers:
        return Stragglers(self.run.config, None, 30.0)

    @property
    def world(self) -> World:
        world = self.run.generation.world
        assert world is not None
        return world

    def play(self) -> None:
        """Make a random move. Time passes, at times backwards."""
        self.now += self.random.choice((0.0, 0.3, 2.0, 40.0, -1.0))
        moves = [self.step] * 8 + [self.rescale, self.fail, self.form, self.wait, self.state, self.save, self.evaluate]
        self.random.choice([*moves, self.lose, self.publish, self.publish, self.restart, self.load])()

    def form(self) -> None:
        self.number += 1
        members = tuple(self.random.sample("abcd", self.random.randint(1, 4)))
        step = self.random.randint(max(5, self.run.stats.step - 4), max(5, self.run.stats.step))
        world = World(Ticket(self.number, 1), members, StateSource(self.random.choice(list(Origin)), step, commit="c5"))
        phases = {"plan": self.random.random(), "fence": self.random.random()}
        self.run.generation.open(world, phases, self.random.choice(("layouts", "equal intervals")))

    def load(self) -> None:
        for worker in self.world.members:
            about = Filled(self.world.ticket, self.world.source.step, self.world.source.origin, {"sync": self.random.random()}, 7, 6, 100)
            self.run.generation.filled(worker, about)
            self.run.generation.worker_started(WorkerInfo(worker, 1, 2, "node", "host", "cpu", 1.5))
        if self.run.stats.state in (RunState.PENDING, RunState.STARTING, RunState.RESCALING):
            self.run.enter(RunState.RUNNING)

    def step(self) -> None:
        size, seconds = self.world.size, self.random.choice((0.1, 3.0))
        self.ended = max(self.ended, self.now - 1.0) + self.random.choice((seconds, 0.0, 9.0))
        self.now = max(self.now, self.ended + self.random.choice((0.01, 0.4)))
        loss, norm = (self.random.choice((2.0, 2.5, float("nan"), float("inf"))) for _ in range(2))
        factors = tuple(self.random.choice((1.0, 3.0)) for _ in range(size))
        shares = tuple(self.random.sample((1, 2, 3, 4), size))
        pace = View(factors, tuple(0 if factor > 2 else -1 for factor in factors), shares)
        index = self.run.stats.step
        about = (size, self.number, (1,) * size, (0.1,) * size, pace)
        record = StepRecord(index, loss, 192, (index,), norm, 1e-3, seconds, 0, *about, alone_seconds=seconds / 3)
        record = replace(record, clipped=self.random.random() < 0.3, skipped=self.random.random() < 0.3)
        between = {"checkpoint": 0.2, "peer_copy": self.random.random()}
        item = Stepped(self.world.ticket, record, self.ended, between, Usage({"all_gather": 0.1}, {"comm": 0.2, "other": 0.1}, {}))
        for worker in self.world.members:
            self.run.generation.stepped(worker, item)
        stats = self.run.stats
        for event in self.slow.stepped(record, stats, self.now):
            self.run.log.record(event.name, **event.about)

    def rescale(self) -> None:
        self.run.generation.begin_rescale(self.random.choice(("manual", "drain", "failure", "growth")), self.world.size)
        if self.random.random() < 0.3:
            self.run.generation.end_rescale(self.now, 3)

    def fail(self) -> None:
        self.run.generation.begin_rescale("failure", self.world.size)
        self.run.log.record("generation_failed", lost={"a": "died"}, faults={}, attempt=1)

    def wait(self) -> None:
        self.run.log.record("waiting", waiting=self.random.random() < 0.6)

    def state(self) -> None:
        self.run.enter(self.random.choice([state for state in RunState if state not in FINAL or self.random.random() < 0.1]))

    def save(self) -> None:
        step = self.run.stats.step
        kept = CommittedCheckpoint(f"c{step}", f"/c{step}", step) if self.random.random() < 0.7 else None
        stages = {"snapshot": 0.1, "upload": self.random.random(), "commit": 0.05}
        result = SaveResult("x", step, self.number, 1.25, kept, 700, None if kept else "no space", stall_s=0.1, stages=stages)
        name, about = saved_event(result, self.run.stats.ended(step))
        self.run.log.record(name, **about)
        self.run.log.record("checkpoint_interval", seconds=self.random.random(), text="by cost", by="cost")
        if kept is None:
            self.run.log.record("checkpoint_load_failed", commit="c3", error="damaged")

    def evaluate(self) -> None:
        step = self.random.choice((self.run.stats.step, self.run.config.train.steps))
        sets = self.random.choice(({}, {"wiki": (2.5, 8, None), "code": (float("nan"), 8, 1.5)}))
        self.run.generation.evaluated(Evaluated(self.world.ticket, step, self.random.choice((1.5, float("nan"))), 8, sets))

    def lose(self) -> None:
        kind, pid = self.random.choice(("killed", "died")), self.random.choice((3, None))
        self.run.log.record("worker_lost", worker="a", reason="x", kind=kind, pid=pid)

    def publish(self) -> None:
        """Publish the accounts so far. No account may fall afterwards."""
        before = self.run.publisher.snapshot
        self.run.publisher.publish()
        after = self.run.publisher.snapshot
        assert after.productive_seconds >= before.productive_seconds
        assert all(after.lost_seconds[cause] >= seconds - 1e-9 for cause, seconds in before.lost_seconds.items())

    def restart(self) -> None:
        self.run = self.run.restarted(self.world)
        self.run.publisher.publish()
        self.slow = self._stragglers()


def written(folder: RunFolder) -> Iterator[tuple[str, str]]:
    """All lines in the order in which they were written, with the names of their files."""
    lines = [(name, text) for name in ("events.jsonl", "metrics.jsonl") for text in (folder.path / name).read_text().splitlines()]
    yield from sorted(lines, key=lambda line: json.loads(line[1])["seq"])


def another(folder: Path, name: str = "books") -> Recorded:
    """The recorder of a life of the controller that has read nothing yet."""
    return recorded(folder, name, source=BEGAN_FROM, steps_before=9)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 12))])
def test_replayed_statistics_equal_live_ones_after_each_line(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, value in ((run_log, "EACH", 4), (run_log, "LEAST", 7), (step_stats, "LEAST", 7)):
        monkeypatch.setattr(module, name, value)
    player = Player(tmp_path, seed, monkeypatch)
    for _ in range(MOVES):
        player.play()
        again = another(tmp_path)
        again.log.replay()
        assert again.stats == player.run.stats
        again.publisher.publish()
        player.run.publisher.publish()
        told, known = player.run.publisher.snapshot.to_json(), again.publisher.snapshot.to_json()
        # These may differ: the controller's life, and losses, which a clock that went back has left where they were.
        told |= {name: known[name] for name in ("info", "lost_seconds")}
        assert known == told


@pytest.mark.parametrize("seed", range(3))
def test_a_controller_may_be_killed_between_any_two_lines(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Statistics that are counted from a prefix of the lines equal those replayed from a folder that ends there."""
    player = Player(tmp_path, seed, monkeypatch)
    for _ in range(MOVES):
        player.play()
    lines = list(written(player.run.folder))
    assert len(lines) > MOVES and {name for name, _ in lines} == {"events.jsonl", "metrics.jsonl"}
    cut = another(tmp_path, "cut").folder
    alone = another(tmp_path, "alone").stats
    for name, text in lines:
        with (cut.path / name).open("a") as file:
            file.write(text + "\n")
        alone.apply(json.loads(text))
        again = another(tmp_path, "cut")
        again.log.replay()
        assert again.stats == alone
    assert alone == player.run.stats


def test_published_lost_time_stays_lost_if_a_step_had_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    run = recorded(tmp_path).started()
    world = World(Ticket(1, 1), ("a",), StateSource(Origin.FRESH, 0))
    run.open(world)
    now[0] = 1010.0
    assert run.snapshot.lost_seconds == {"startup": 10.0 - HEARD_S}
    about = (1, 1, (1,))
    assert run.stepped(Stepped(world.ticket, StepRecord(0, 2.0, 192, (1,), 1.0, 1e-3, 8.0, 0, *about), 1012.0))
    for one in (run, run.restarted(world)):
        assert one.stats.goodput.lost == {"startup": 10.0 - HEARD_S} and one.stats.goodput.productive == 2.0 + HEARD_S


def test_published_snapshot_never_changes(tmp_path: Path) -> None:
    """The HTTP server's threads may hold a snapshot while the run goes on."""
    run = recorded(tmp_path).started()
    world = World(Ticket(1, 1), ("a", "b"), StateSource(Origin.FRESH, 0))
    run.open(world)
    before = run.snapshot
    told = json.dumps(before.to_json()), json.dumps(before.record), before.processes
    run.generation.worker_started(WorkerInfo("a", 1, 2, "node", "host", "cpu", 1.5))
    run.log.record("straggler", worker="a", rank=0, factor=2.0, since_step=1, node="node")
    run.log.record("worker_lost", worker="a", reason="x", kind="died", pid=1)
    run.generation.begin_rescale("manual", 2)
    run.open(World(Ticket(2, 1), ("a",), StateSource(Origin.FRESH, 0)))
    about = (1, 2, (1,))
    run.stepped(Stepped(Ticket(2, 1), StepRecord(0, 2.0, 192, (1,), 1.0, 1e-3, 8.0, 0, *about), time.time()))
    run.log.record("checkpoint_loaded", seconds=1.0, bytes=2, generation=2)
    assert (json.dumps(before.to_json()), json.dumps(before.record), before.processes) == told
    after = run.snapshot
    assert after.rescales and after.worker_failures and after.processes and after != before


def test_pause_before_a_planned_change_is_not_counted_as_its_own() -> None:
    stats = RunStats(last_step=10, started=0.0, goodput=Goodput.beginning(0.0))
    lines: list[tuple[str | None, float, dict[str, Any]]] = [
        ("run_started", 0.0, {}),
        ("generation", 1.0, {"generation": 1, "step": 0, "workers": ["a", "b"]}),
        (None, 3.0, {"step": 1, "step_seconds": 1.0}),
        ("rescale_started", 3.5, {"generation": 1, "reason": "manual", "from": 2, "step": 1}),
        (None, 6.0, {"step": 2, "step_seconds": 1.0, "between_seconds": {"peer_copy": 1.5}}),  # the request has not reached the workers
        ("generation", 6.2, {"generation": 2, "step": 2, "workers": ["a"]}),
        (None, 8.0, {"step": 3, "step_seconds": 1.0}),
    ]
    for name, at, more in lines:
        stats.apply({"time": at, **more} | ({} if name is None else {"event": name}))
    assert stats.goodput.lost == {"startup": 2.0, "peer_copy": 1.5, "stall": 0.5, "rescale": 1.0}
