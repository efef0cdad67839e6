"""States, durable state, run log, saves and watchdog: the controller's parts that need no Ray."""

from __future__ import annotations

import errno
import inspect
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.controller.recorded import Recorded, recorded
from tests.controller.runs import tiny, until
from vescale_ray import checkpoint
from vescale_ray.checkpoint import commits
from vescale_ray.cli import client
from vescale_ray.config import CheckpointSection
from vescale_ray.controller import controller
from vescale_ray.controller.bounded_io import BoundedIO
from vescale_ray.controller.checkpointing import coordinator, parked
from vescale_ray.controller.checkpointing.cadence import Cadence
from vescale_ray.controller.checkpointing.committer import Committer, SaveResult, newest_kept
from vescale_ray.controller.checkpointing.coordinator import CheckpointCoordinator, Unanswered
from vescale_ray.controller.commands import ANSWER_S, DONE_S, Commands
from vescale_ray.controller.control_loop import ControlLoop
from vescale_ray.controller.driver import driver, watchdog
from vescale_ray.controller.executor import Executor
from vescale_ray.controller.failures.budget import Budget, Limits
from vescale_ray.controller.failures.hang import PERIOD
from vescale_ray.controller.policy import CommittedCheckpoint, choose_source
from vescale_ray.controller.protocol import (
    FINAL,
    TRANSITIONS,
    Bounds,
    RequestRefused,
    RunSpec,
    RunState,
    StateSource,
    World,
    check_transition,
)
from vescale_ray.controller.scaling.scaling import Scaling
from vescale_ray.controller.state import run_log, snapshot, step_stats
from vescale_ray.controller.state.checkpoint_stats import CheckpointStats, saved_event
from vescale_ray.controller.state.durable_state import VERSION, DurableState, LaunchedGeneration
from vescale_ray.controller.state.publisher import Observed
from vescale_ray.controller.state.state_store import NAME, StateStore, StateWriter, read_state
from vescale_ray.controller.state.step_stats import StepStats
from vescale_ray.runfolder import RunFolder, committed
from vescale_ray.workers.messages import Evaluated, Filled, Origin, Save, SavedShard, Stepped, StepRecord, Ticket, WorkerPhase, WorkerReport
from vescale_ray.workers.resharding.held_state import HeldState

# ------------------------------------------------------------------------------------------------------------------- states


def test_every_state_can_be_reached_and_leads_to_an_end() -> None:
    def reach(state: RunState) -> set[RunState]:
        seen = {state}
        while new := {after for one in seen for after in TRANSITIONS[one]} - seen:
            seen |= new
        return seen

    assert reach(RunState.PENDING) == set(RunState)
    assert all(reach(state) & FINAL for state in RunState)
    assert all(RunState.FAILED in TRANSITIONS[state] for state in set(RunState) - FINAL)
    assert all(not TRANSITIONS[state] for state in FINAL)
    assert tuple(RunState) == snapshot.STATES


def test_transition_outside_the_table_names_the_allowed_states() -> None:
    assert check_transition(RunState.RUNNING, RunState.RESCALING) is RunState.RESCALING
    with pytest.raises(ValueError, match="RUNNING can't become PENDING; allowed: CHECKPOINTING, FAILED"):
        check_transition(RunState.RUNNING, RunState.PENDING)
    with pytest.raises(ValueError, match="DONE can't become RUNNING; allowed: nothing"):
        check_transition(RunState.DONE, RunState.RUNNING)


# ------------------------------------------------------------------------------------------------------------ durable state


class Keeper:
    """The part of a supervisor that keeps the durable state."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, state: DurableState | None = None) -> None:
        self.text = state.to_json() if state is not None else None
        self.keep = SimpleNamespace(remote=lambda text: setattr(self, "text", text))
        self.kept = SimpleNamespace(remote=lambda: self.text)
        monkeypatch.setattr("vescale_ray.controller.state.state_store.ray.get", lambda answer, timeout: answer)


def test_a_durable_state_comes_back_as_it_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_state(tmp_path) is None
    launched = LaunchedGeneration.of(generation(6, 41, "w0", "w3"))
    state = DurableState("r1", 7, launched, ("w1",), 2, "replacement", 2, 1, "SIGTERM", 3, 44, failures={"hang": 2}, port=8080, epoch=3)
    keeper = Keeper(monkeypatch)
    StateStore(tmp_path, keeper).write(state)
    assert StateStore(tmp_path, keeper).newest() == state == read_state(tmp_path)
    assert launched.world() == generation(6, 41, "w0", "w3")


def test_damaged_or_other_version_durable_state_counts_as_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = json.loads(DurableState("r1", 7, LaunchedGeneration(6, 1, ("a",), "memory", 4)).to_json())
    others = ["", "{", "[]", "null", "[" * 100_000, '{"run_id": "x"}', json.dumps({**whole, "version": VERSION + 1})]
    others += [json.dumps({**whole, "unknown": 1}), json.dumps({**whole, "generation": {"number": 6}})]
    others += [json.dumps({**whole, "generation": {**whole["generation"], "origin": "luck"}})]
    for text in others:
        (tmp_path / NAME).write_text(text)
        caplog.clear()
        assert read_state(tmp_path) is None
        (line,) = caplog.messages
        assert line.startswith(f"{tmp_path / NAME} counts as none: ") and "\n" not in line
    (tmp_path / NAME).write_text(json.dumps({**whole, "version": VERSION + 1}))
    read_state(tmp_path)
    assert f"it has version {VERSION + 1}, this controller reads version {VERSION}" in caplog.messages[-1]


def test_a_run_that_was_to_stop_is_not_begun_anew_by_itself(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert not driver._was_to_stop(folder)
    for stop in (None, "asked to"):
        folder.write_durable_state(DurableState("r1", 7, stop_reason=stop).to_json())
        assert driver._was_to_stop(folder) is (stop is not None)


# ------------------------------------------------------------------------------------------------------------------ run log


def stepped(world: World, index: int, ended: float, seconds: float = 0.5, alone: float = 0.0) -> Stepped:
    ids = tuple(range(index * 12, index * 12 + 12))
    generation = world.ticket.generation
    about = (world.size, generation, (1, 2))
    record = StepRecord(index, 2.0 - index / 100, 192, ids, 1.0, 1e-3, seconds, 0, *about, alone_seconds=alone)
    return Stepped(world.ticket, record, ended)


def generation(number: int, step: int, *members: str, origin: Origin = Origin.MEMORY, lender: Any = None) -> World:
    return World(Ticket(number, 1), members, StateSource(origin, step, lender=lender))


@pytest.fixture
def run(tmp_path: Path) -> Recorded:
    return recorded(tmp_path)


@pytest.mark.fault("W5")
def test_step_is_written_once_and_never_for_an_older_generation(run: Recorded) -> None:
    first = generation(1, 0, "a", "b", origin=Origin.FRESH)
    run.open(first)
    told = [run.stepped(stepped(first, i, 10.0 + i)) for i in (0, 0, 1, 0, 1, 2)]
    assert told == [True, False, True, False, False, True]
    second = generation(2, 2, "a")
    run.open(second)
    assert not run.stepped(stepped(first, 2, 13.0)) and not run.stepped(stepped(first, 3, 13.0))
    assert run.stepped(stepped(second, 2, 14.0))
    assert [(line["step"], line["generation"]) for line in run.folder.read_metrics()] == [(1, 1), (2, 1), (3, 2)]
    assert [line["step"] for line in run.folder.read_all_metrics()] == [1, 2, 3, 3]
    assert [line["ids"][0] for line in committed(run.folder.each_samples())] == [0, 12, 24]


def test_steps_lost_with_a_controller_do_not_block_later_steps(run: Recorded) -> None:
    """A controller that is killed while its lines wait for a full disk loses them. The run's recorded step must still advance
    afterwards."""
    world = generation(3, 0, "a", "b", origin=Origin.FRESH)
    run.open(world)
    assert [run.stepped(stepped(world, i, 10.0 + i)) for i in (0, 40, 40, 41, 39)] == [True, True, False, True, False]
    assert run.stats.step == 42 and [line["step"] for line in run.folder.read_metrics()] == [1, 41, 42]


def test_recovery_pause_counts_from_the_end_of_the_restored_step(run: Recorded) -> None:
    first = generation(1, 0, "a", "b", "c", origin=Origin.FRESH)
    run.open(first)
    for i in range(10):
        run.stepped(stepped(first, i, 100.0 + i))
    run.generation.begin_rescale("manual", 3)
    run.generation.begin_rescale("failure", 3)  # a worker died while the planned change was on its way
    run.log.record("generation_failed", lost={"c": "died"})
    second = generation(2, 8, "a", "b", lender="peer")
    run.open(second)
    third = generation(3, 8, "a", "b", lender="peer")  # the second generation failed before its first step
    run.open(third)
    run.generation.filled("a", Filled(third.ticket, 8, Origin.MEMORY, {"form": 0.1, "sync": 0.4}, 1000, 900))
    run.generation.filled("b", Filled(third.ticket, 8, Origin.MEMORY, {"form": 0.2, "sync": 0.3}, 1000, 900))
    run.generation.filled("b", Filled(third.ticket, 8, Origin.MEMORY, {}))  # a restarted controller assumes this of each worker that trains
    item = stepped(third, 8, 115.0, seconds=0.5, alone=0.2)
    run.stepped(replace(item, usage=replace(item.usage, phases={"comm": 0.3, "other": 0.2})))
    (event,) = [e for e in run.folder.read_events() if e["event"] == "rescaled"]
    # Step 8 ended at 107. In the next step, this rank waited 0.2 s for the last rank to begin it.
    assert event["pause_seconds"] == pytest.approx(115.0 - 0.3 - 107.0)
    assert (event["from"], event["to"], event["direction"], event["reason"]) == (3, 2, "shrink", "failure")
    assert (event["source"], event["steps_replayed"], event["moved_bytes"]) == ("peer", 2, 1000)
    assert (event["phases"]["form"], event["phases"]["sync"]) == (0.2, 0.4)
    last = run.folder.read_metrics()[-1]
    assert last["step_seconds"] == pytest.approx(0.3), "that wait is the pause's, for who reads the line later as well"
    assert last["phase_seconds"] == pytest.approx({"comm": 0.1, "other": 0.2})
    assert run.snapshot.rescales == {("shrink", "failure"): 1} and run.snapshot.replayed_steps == 2


@pytest.mark.parametrize("ends", ["in order", "with a loss"])
def test_rescale_before_a_pending_first_step_keeps_its_reason(run: Recorded, ends: str) -> None:
    """A drain at that moment must not be reported and counted as a failure."""
    first, second, third = generation(1, 0, "a", "b", "c"), generation(2, 1, "a", "b"), generation(3, 2 if ends == "in order" else 1, "a")
    begin = time.time()
    run.open(first)
    run.stepped(stepped(first, 0, begin + 1))
    run.generation.begin_rescale("manual", 3)
    run.open(second)
    run.generation.begin_rescale("drain", 2)
    if ends == "in order":
        run.stepped(stepped(second, 1, begin + 3))
        now = run.stats.rescale
        assert now is not None and (now.reason, now.before, now.step) == ("drain", 2, 2)
    else:
        run.generation.begin_rescale("failure", 2)
        run.log.record("generation_failed", lost={"b": "died"})
    run.open(third)
    run.stepped(stepped(third, third.source.step, begin + 5))
    told = [(e["from"], e["to"], e["reason"]) for e in run.folder.read_events() if e["event"] == "rescaled"]
    assert told == ([(3, 2, "manual"), (2, 1, "drain")] if ends == "in order" else [(3, 1, "failure")])
    assert run.stats.rescale is None and ("failure" in run.stats.goodput.lost) == (ends != "in order")


def test_commands_after_the_loops_end_are_answered_at_once(run: Recorded, tmp_path: Path) -> None:
    """This holds for commands that wait already and for later ones: no client waits 8 s for a run that is over."""
    spec: Any = SimpleNamespace(schedule=(), capacity=None)
    store: Any = SimpleNamespace(write=lambda state: state)
    commands = Commands(spec, tiny(tmp_path, "books"), SimpleNamespace(), run.log, StateWriter(DurableState("r1", 0), store))  # type: ignore[arg-type]
    told: list[dict[str, Any]] = []
    early = threading.Thread(target=lambda: told.append(commands.command("stop", {})))
    early.start()
    time.sleep(0.1)
    began = time.monotonic()
    commands.close()
    early.join(5)
    assert told == [{"ok": True, "message": "the run is over, at step 0"}] == [commands.command("stop", {})]
    with pytest.raises(RequestRefused, match="the run is over, at step 0: rescale comes too late"):
        commands.command("rescale", {"workers": 2})
    assert time.monotonic() - began < 2.0


@pytest.mark.parametrize("action", ["rescale", "stop"])
def test_a_command_that_was_given_up_is_never_carried_out(run: Recorded, tmp_path: Path, action: str) -> None:
    """If a client's command is given up and the client sends another one, only the second may take effect."""
    spec: Any = SimpleNamespace(schedule=(), capacity=None)
    store: Any = SimpleNamespace(write=lambda state: state)
    commands = Commands(spec, tiny(tmp_path, "books"), SimpleNamespace(), run.log, StateWriter(DurableState("r1", 0), store))  # type: ignore[arg-type]
    before = commands.target
    with pytest.raises(RequestRefused, match=f"did not come to {action} within 0.2 s"):
        commands.command(action, {"workers": 1}, wait_s=0.2)
    commands.heed()
    assert (commands.target, commands.stop) == (before, None)
    told: list[dict[str, Any]] = []
    second = threading.Thread(target=lambda: told.append(commands.command("rescale", {"workers": 2})))
    second.start()
    until(lambda: bool(commands.heed() or told), 5, "an answer")
    second.join(5)
    assert told[0]["workers"] == commands.target == 2


def test_command_is_answered_within_the_clients_timeout() -> None:
    """This holds for a controller that has just started, too: a client without an answer does not know what became of its command."""
    patience = inspect.signature(client.request).parameters["timeout_s"].default
    assert ANSWER_S + DONE_S < patience


def test_step_with_samples_but_no_metrics_is_not_written_twice(run: Recorded) -> None:
    """If a controller is killed between the two lines, its workers report the step to the next controller again."""
    run.started()
    first = generation(1, 0, "a", "b", origin=Origin.FRESH)
    run.open(first)
    begin = time.time()
    for i in range(3):
        run.stepped(stepped(first, i, begin + i))
    run.folder.append_samples(3, 1, list(range(36, 48)))
    again = run.restarted(first)
    assert again.stepped(stepped(first, 3, begin + 3)) and again.stepped(stepped(first, 4, begin + 4))
    assert [line["step"] for line in run.folder.each_samples()] == [0, 1, 2, 3, 4]
    assert [line["step"] for line in run.folder.read_all_metrics()] == [1, 2, 3, 4, 5]
    second = generation(2, 3, "a")
    again.open(second)
    assert again.stepped(stepped(second, 3, begin + 9)), "a step that is done again is written again"
    assert [line["step"] for line in run.folder.each_samples()] == [0, 1, 2, 3, 4, 3]


def test_a_restarted_run_goes_on_with_the_accounts_of_the_time(run: Recorded) -> None:
    """The accounts come from the run's lines alone; run.json is for other readers."""
    run.started()
    first = generation(1, 0, "a", "b", origin=Origin.FRESH)
    run.open(first)
    begin = time.time()
    for i in range(4):
        run.stepped(stepped(first, i, begin + i))
    told = run.stats.goodput
    assert told.productive == pytest.approx(4 * 0.5, abs=0.5) and told.lost["stall"] == pytest.approx(3 * 0.5)
    (run.folder.path / "run.json").write_text("{}")
    again = run.restarted(first)
    restarted = run.folder.read_events()[-1]
    assert (restarted["event"], restarted["epoch"], restarted["step"]) == ("controller_restarted", 2, 4), "0 stood there"
    assert again.stats.goodput == told and again.stats.goodput.since < begin


def test_replay_reads_only_the_last_lines_and_matches_live_stats(run: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 1,000 ranks a line has 18 KB. After a month, a full replay would leave the workers unwatched for minutes, until the run is
    given up."""
    for module, name, value in ((run_log, "EACH", 8), (run_log, "LEAST", 20), (step_stats, "LEAST", 20)):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr("vescale_ray.runfolder._BLOCK", 700)
    # An earlier start of the run, with lines of its own that carry totals.
    run.started()
    world = generation(1, 0, "a", "b", origin=Origin.FRESH)
    run.open(world)
    for i in range(30):
        run.stepped(stepped(world, i, time.time()))
    begins = {"run_id": "r2", "source": StateSource(Origin.CHECKPOINT, 10), "steps_before": 30}
    now, read = Recorded(run.config, **begins).started(), list[int]()  # type: ignore[arg-type]
    real = RunFolder.each_metrics

    def counted(folder: RunFolder, offset: int = 0) -> Iterator[Any]:
        for line in real(folder, offset):
            read.append(int(line["step"]))
            yield line

    monkeypatch.setattr(RunFolder, "each_metrics", counted)

    def check_replayed() -> None:
        read.clear()
        again = Recorded(run.config, **begins)  # type: ignore[arg-type]
        again.log.replay()
        assert again.stats == now.stats
        assert 0 < len(read) <= 20 + 8 + 1

    done = 10
    for number, (goes_to, back_to) in enumerate([(15, 12), (60, 50), (70, 40), (93, 93)], 2):
        world = generation(number, done, "a", "b", origin=Origin.CHECKPOINT)
        now.open(world)
        for i in range(done, goes_to):
            now.stepped(stepped(world, i, time.time(), seconds=0.01))
            if i % 7 == 0 or i + 1 == goes_to:
                check_replayed()
        done = back_to
    assert now.snapshot.replayed_steps == 20, "of the earlier start's; those of rescales are told by their events"
    assert now.snapshot.steps_executed == 5 + 48 + 20 + 53
    # The replay ignores totals that it can't read, and counts from their line on.
    text = (run.folder.path / "metrics.jsonl").read_text().replace('"highest"', '"lowest"')
    (run.folder.path / "metrics.jsonl").write_text(text)
    assert now.restarted(world).stats.step == 93


@pytest.mark.parametrize("block", [7, 64, 1 << 20])
def test_marked_lines_are_found_from_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr("vescale_ray.runfolder._BLOCK", block)
    folder = RunFolder(tmp_path)
    assert folder.marked_metrics("mark", 0) == 0
    lines: list[dict[str, Any]] = [{"step": i, "time": 1.0, "generation": 1, "loss": 1.0, "text": "x" * (i * 7 % 23)} for i in range(48)]
    for line in lines[5::10]:
        line["mark"] = 1
    lines[47]["text"] = 'no "mark": of it'
    for cut in (0, 1, 9):
        raw = "".join(json.dumps(line) + "\n" for line in lines).encode()
        folder.path.joinpath("metrics.jsonl").write_bytes(raw + json.dumps(lines[5]).encode()[:cut])
        for least, found in ((0, 45), (2, 45), (3 + bool(cut), 35), (40, 5), (100, None)):
            at = folder.marked_metrics("mark", least)
            assert at == (0 if found is None else raw.index(json.dumps(lines[found]).encode())), (cut, least)
            assert next(folder.each_metrics(at))["step"] == (found or 0)


def test_wait_for_workers_counts_as_lost_time_while_it_lasts(run: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the wait ends, the newest generation is the one before it, which was complete."""
    run.started()
    first = generation(1, 0, "a", "b")
    run.open(first)
    for worker in "ab":
        run.generation.filled(worker, Filled(first.ticket, 0, Origin.MEMORY, {"sync": 0.1}))
    begin = time.time()
    run.stepped(stepped(first, 0, begin))
    run.generation.begin_rescale("failure", 2)
    run.log.record("waiting", waiting=True)
    monkeypatch.setattr(time, "time", lambda: begin + 100.0)
    assert run.snapshot.lost_seconds["wait_for_workers"] == pytest.approx(100.0, abs=3.0)
    run.log.record("waiting", waiting=False)
    monkeypatch.setattr(time, "time", lambda: begin + 120.0)
    run.stepped(stepped(first, 1, begin + 120.0))
    assert run.stats.goodput.lost["wait_for_workers"] == pytest.approx(100.0, abs=3.0)


def test_evaluation_after_last_step_is_not_checkpoint_time(run: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step's line accounts for the time before the step, and the last step has no successor."""
    run.started()
    first = generation(1, 0, "a", "b")
    run.open(first)
    begin, last = time.time(), tiny(run.folder.path.parent, "books").train.steps
    for i in (last - 2, last - 1):
        run.generation.evaluated(Evaluated(first.ticket, i, 7.5, 3))
        run.stepped(stepped(first, i, begin + i))
    ended = begin + last - 1
    monkeypatch.setattr(time, "time", lambda: ended + 40.0)
    run.generation.evaluated(Evaluated(first.ticket, last, 7.4, 3))
    monkeypatch.setattr(time, "time", lambda: ended + 41.5)
    run.enter(RunState.CHECKPOINTING)
    monkeypatch.setattr(time, "time", lambda: ended + 45.0)
    run.enter(RunState.DONE)
    assert run.stats.goodput.lost["evaluation"] == pytest.approx(40.0)
    assert run.stats.goodput.lost["checkpoint"] == pytest.approx(5.0)


def test_steps_done_by_an_earlier_start_count_as_replayed(tmp_path: Path) -> None:
    """This happens after a rollback, or after the loss of everything since the newest checkpoint."""
    run = recorded(tmp_path, source=StateSource(Origin.CHECKPOINT, 2, path="/c2"), steps_before=4).started()
    first = generation(1, 2, "a", "b", origin=Origin.CHECKPOINT)
    run.open(first)
    begin = time.time()
    for i in range(2, 6):
        run.stepped(stepped(first, i, begin + i))
    again = run.restarted(first)
    for one in (run, again):
        assert (one.snapshot.replayed_steps, one.snapshot.steps_executed) == (2, 4), "steps 3 and 4; 5 and 6 are new"
        assert one.stats.goodput.lost["replay"] == pytest.approx(2 * 0.5) and one.stats.goodput.productive == pytest.approx(2 * 0.5)
    assert run.folder.last_step() == 6


def test_a_step_that_was_replayed_is_not_recorded_again(run: Recorded) -> None:
    run.started()
    first = generation(1, 0, "a", "b", origin=Origin.FRESH)
    run.open(first)
    for i in range(5):
        run.stepped(stepped(first, i, time.time() + i))
    again = run.restarted(first)
    assert again.stats.has_stepped
    assert again.stepped(stepped(first, 5, time.time() + 20)) and not again.stepped(stepped(first, 4, time.time() + 20))


def saved(run: Recorded, result: SaveResult) -> None:
    name, about = saved_event(result, run.stats.ended(result.step))
    run.log.record(name, **about)


def test_checkpoint_stages_and_reads_are_counted_over_a_restart(tmp_path: Path) -> None:
    first = World(Ticket(1, 1), ("a", "b"), StateSource(Origin.CHECKPOINT, 4, commit="c4", path="/c4"))
    run = recorded(tmp_path, source=first.source).started()
    assert (run.snapshot.checkpoint_step, run.snapshot.checkpoint_path, run.snapshot.checkpoint_time) == (4, "/c4", None)
    run.open(first)
    for worker, seconds, read in (("a", 0.5, 1000), ("b", 2.0, 3000)):
        run.generation.filled(worker, Filled(first.ticket, 4, Origin.CHECKPOINT, {"sync": seconds}, read_bytes=read))
    run.log.record("checkpoint_load_failed", commit="c3", error="block 3 is damaged")
    for stall in (0.25, 0.5):
        stages = {"snapshot": stall, "upload": 3.0, "commit": 0.125}
        saved(run, SaveResult("x", 5, 1, 3.125, CommittedCheckpoint("c5", "/c5", 5), 700, stall_s=stall, stages=stages))
    again = run.restarted(first)
    for worker in ("a", "b"):  # they train, so the restarted controller assumes that they have their state
        again.generation.filled(worker, Filled(first.ticket, 4, Origin.CHECKPOINT, {}))
    for one in (run, again):
        told = one.snapshot
        assert (told.checkpoint_loads.count, told.checkpoint_loads.sum, told.checkpoint_read_bytes) == (1, 2.0, 4000), "the slowest's time"
        assert {stage: (one.count, one.sum) for stage, one in told.checkpoint_stages.items()} == {
            "snapshot": (2, 0.75),
            "upload": (2, 6.0),
            "commit": (2, 0.25),
        }
        assert (told.checkpoint_bytes, told.checkpoint_load_failures, told.checkpoint_step) == (1400, 1, 5)
        assert told.checkpoint_time is not None


def test_restart_reads_a_long_runs_lines_without_holding_them(run: Recorded) -> None:
    """With 1,024 ranks and 100,000 steps, the lines take gigabytes."""
    run.started().open(generation(1, 0, "a", "b", origin=Origin.FRESH))
    begin = time.time()
    memory = {str(rank): (1 << 30) + rank for rank in range(1024)}
    for step in range(1, 101):
        line = {"step": step, "loss": 1.0, "time": begin + step, "step_seconds": 0.5, "generation": 1, "memory": memory}
        run.folder.append_metrics({**line, "run_id": "r1", "seq": 2 + step})
    again = Recorded(run.config)
    tracemalloc.start()
    again.log.replay()
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    size = (run.folder.path / "metrics.jsonl").stat().st_size
    assert again.stats.step == 100 and again.stats.has_stepped and most < size / 2, f"{most} bytes for a file of {size}"


class _Ended(Exception):
    pass


def test_controller_restarts_are_counted_until_a_step_is_done(run: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash loop of the controller must end the run; restarts weeks apart, with steps between them, must not."""
    run.started()
    world, begin = generation(1, 0, "a", "b", origin=Origin.FRESH), time.time()
    config = tiny(run.folder.path.parent, "books")
    where: Any = run.folder.path
    spec = RunSpec("r1", config.model_dump(mode="json"), str(where), "t", world.source, 1, None, 1, {})
    run.open(world)
    keeper = Keeper(monkeypatch, DurableState("r1", 1, LaunchedGeneration.of(world), epoch=1))

    def ended(known: Any) -> None:
        raise _Ended

    def life(steps: range) -> DurableState:
        store = StateStore(where, keeper)
        state = store.newest()
        assert state is not None
        state = replace(state, epoch=state.epoch + 1)
        one = run.restarted(world)
        nobody: Any = SimpleNamespace(clock=time.monotonic, busy=False, fence=lambda number: None, adopt=ended)
        executor = Executor(spec, config, nobody, one.log, one.publisher, nobody, StateWriter(state, store))
        with pytest.raises(_Ended):
            ControlLoop(executor).run()
        for i in steps:
            assert one.stepped(stepped(world, i, begin + i))
        after = store.newest()
        assert after is not None and list(after.failures) == ["controller"]
        return after

    assert [life(range(0)).controller_restarts for _ in range(3)] == [1, 2, 3]
    last = life(range(4))
    assert (last.controller_restarts, last.failures) == (4, {"controller": 4})
    again = life(range(0))
    assert (again.controller_restarts, again.failures, again.highest_step) == (1, {"controller": 5}, 4), "there were steps between"


def test_full_disk_stops_nothing_and_lines_are_written_later(run: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    first = generation(1, 0, "a", origin=Origin.FRESH)
    run.open(first)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk:
        for name in ("append_metrics", "append_samples", "append_event", "write_state"):
            disk.setattr(RunFolder, name, full)
        assert all(run.stepped(stepped(first, i, 1.0 + i)) for i in range(3))
        run.write_record()
        (warning,) = run.log.journal.warnings
        assert "No space left on device" in warning and warning == run.snapshot.record["warning"]
    assert run.stepped(stepped(first, 3, 5.0))
    assert [line["step"] for line in run.folder.read_metrics()] == [1, 2, 3, 4]
    assert len(committed(run.folder.each_samples())) == 4


class Hung:
    """A disk that does not answer: a write blocks until :meth:`back`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tell_s: float = 0.0) -> None:
        self._back = threading.Event()
        monkeypatch.setattr("vescale_ray.controller.bounded_io.PATIENCE_S", 0.4)
        monkeypatch.setattr("vescale_ray.controller.state.journal.TELL_S", tell_s)
        for owner, name in ((RunFolder, "_append"), (RunFolder, "_replace")):
            monkeypatch.setattr(owner, name, self._stands_still(getattr(owner, name)))

    def _stands_still(self, write: Callable[..., None]) -> Callable[..., None]:
        def stand(*about: Any, **how: Any) -> None:
            assert self._back.wait(30)
            write(*about, **how)

        return stand

    def back(self) -> None:
        self._back.set()


@pytest.mark.fault("S3")
def test_hung_disk_blocks_nothing_and_lines_are_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the loop blocks while the run folder's server is gone, hung and dead workers go unnoticed."""
    disk, config = Hung(monkeypatch), tiny(tmp_path, "hung")
    run = Recorded(config)
    first = generation(1, 0, "a", origin=Origin.FRESH)
    began = time.monotonic()
    run.open(first)
    assert all(run.stepped(stepped(first, i, 1.0 + i)) for i in range(50))
    run.write_record()
    assert run.log.journal.report(run.folder.write_hang, "generation-1", "where all stood") is None
    assert time.monotonic() - began < 1.5 and run.stats.step == 50
    (warning,) = run.log.journal.warnings
    assert "can't be written (the disk does not answer); training goes on, lines wait in memory" in warning
    disk.back()
    until(lambda: bool(run.write_record() or run.folder.read_state()), 10, "the disk")
    run.log.journal.flush(5.0)
    assert run.stepped(stepped(first, 50, 60.0))
    assert [line["step"] for line in run.folder.read_all_metrics()] == list(range(1, 52))
    assert [line["step"] for line in run.folder.each_samples()] == list(range(51))
    assert [event["event"] for event in run.folder.read_events()] == ["generation", "warning"]


def test_slow_disk_causes_no_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy shared disk takes seconds for a line. Users can do nothing about that, so a warning would be noise."""
    disk, config = Hung(monkeypatch, tell_s=30.0), tiny(tmp_path, "slow")
    run = Recorded(config)
    first = generation(1, 0, "a", origin=Origin.FRESH)
    run.open(first)
    assert run.stepped(stepped(first, 0, 1.0))
    assert run.folder.read_all_metrics() == []
    disk.back()
    run.log.journal.flush(10.0)
    assert run.stepped(stepped(first, 1, 2.0)) and run.log.journal.warnings == ()
    assert [line["step"] for line in run.folder.read_all_metrics()] == [1, 2]


def test_late_write_is_not_repeated_after_another_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a line of samples is there twice, its samples count as used twice."""
    monkeypatch.setattr("vescale_ray.controller.bounded_io.PATIENCE_S", 0.3)
    bounded_io, back, done = BoundedIO(), threading.Event(), []

    def line() -> str:
        done.append("line")
        assert back.wait(30)
        return "written"

    for _ in range(3):
        with pytest.raises(OSError, match="does not answer"):
            bounded_io.do(line)
    with pytest.raises(TimeoutError):
        bounded_io.do(lambda: done.append("not begun"))
    back.set()
    until(lambda: bounded_io._late is not None and bounded_io._late[0].done(), 10, "the disk")
    bounded_io.do(lambda: done.append("report"))
    assert bounded_io.do(line) == "written" and done == ["line", "report"]
    with pytest.raises(ZeroDivisionError):
        bounded_io.do(lambda: 1 // 0)


def test_late_line_is_not_repeated_after_other_late_writes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The disk is back, but slow. The reports of a hang are written next, and their results are not asked for."""
    monkeypatch.setattr("vescale_ray.controller.bounded_io.PATIENCE_S", 0.1)
    bounded_io, done = BoundedIO(), []

    def line() -> None:
        done.append("line")
        assert back.wait(30)

    def report(number: int) -> None:
        assert back.wait(30)
        done.append(f"report {number}")

    writes: list[Callable[[], None]] = [line, *(partial(report, number) for number in range(4))]
    for write in writes:
        back = threading.Event()
        with pytest.raises(TimeoutError):
            bounded_io.do(write)
        back.set()
        until(lambda: bounded_io._late is not None and bounded_io._late[0].done(), 10, "the disk")
    bounded_io.do(line)
    assert done == ["line", *(f"report {number}" for number in range(4))]


def test_a_process_ends_though_a_disk_does_not_answer() -> None:
    """At its end, the interpreter would wait for the threads of a pool, in this case for ever."""
    program = (
        "import threading, vescale_ray.controller.bounded_io as bounded_io\n"
        "bounded_io.PATIENCE_S = 0.3\n"
        "try:\n    bounded_io.BoundedIO().do(threading.Event().wait)\n"
        "except TimeoutError:\n    print('goes on')\n"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, check=True).stdout == b"goes on\n"


@pytest.mark.parametrize("comes_back", [False, True])
@pytest.mark.fault("S3")
def test_run_with_hung_disk_shuts_down_and_writes_its_end_later(comes_back: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shutdown that waits for the disk would end no worker and take no signal."""
    monkeypatch.setattr("vescale_ray.controller.bounded_io.PATIENCE_S", 0.3)
    monkeypatch.setattr(driver, "LAST_WORDS_S", 30.0 if comes_back else 0.3)
    back, ended, config = threading.Event(), [], tiny(tmp_path, "hung")
    folder = RunFolder(config.run_folder).create()
    monkeypatch.setattr(folder, "clear_discovery", lambda: back.wait(60))
    about: Any = SimpleNamespace(config=config)
    attempt = driver._Attempt(about, folder, (), Bounds(), driver._Signals(), None, ())

    def end() -> list[int]:
        ended.append("cluster")
        if comes_back:
            back.set()
        return []

    attempt._cluster = SimpleNamespace(close=end)  # type: ignore[assignment]
    monkeypatch.setattr(attempt, "_end_actors", lambda: ended.append("actors"))
    attempt.close()
    assert ended == ["actors", "cluster"]
    assert (folder.read_state() or {}).get("state") == ("FAILED" if comes_back else None)
    back.set()


def answered(ask: Callable[[], Any], each_round: Callable[[], None] = lambda: None) -> Any:
    """The answer to a question that is asked again in each round of a loop."""
    while True:
        try:
            return ask()
        except Unanswered:
            each_round()
            time.sleep(0.02)


@pytest.mark.fault("S6")
def test_silent_storage_counts_as_out_of_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the run's thread waits for silent storage, the run can be neither given up nor stopped. A wait of a minute is too long as well:
    `vescale-ray stop` waits for 8 s."""
    back = threading.Event()
    newest = CommittedCheckpoint("commit-4", "/runs/checkpoints/commit-4", 30)
    monkeypatch.setattr(coordinator, "newest_kept", lambda *_: newest if back.wait(60) else None)
    monkeypatch.setattr(coordinator, "STORAGE_S", 1.5)
    monkeypatch.setattr("vescale_ray.controller.bounded_io.PATIENCE_S", 0.3)
    known = CheckpointStats(20, "/runs/checkpoints/commit-3")
    log: Any = SimpleNamespace(stats=SimpleNamespace(checkpoints=known))
    nobody: Any = SimpleNamespace(alive=lambda worker: False)
    nothing: Any = None
    keeps = coordinator.CheckpointCoordinator(str(tmp_path), "r1", nobody, log, nothing, nothing, nothing, 1.0, nothing)
    rounds: list[float] = []
    assert answered(keeps.newest, lambda: rounds.append(time.monotonic())) == CommittedCheckpoint(
        "commit-3", "/runs/checkpoints/commit-3", 20
    )
    assert len(rounds) > 10, "the loop goes on meanwhile"
    monkeypatch.setattr(coordinator, "STORAGE_S", 0.8)
    with pytest.raises(OSError, match="does not answer"):
        answered(lambda: keeps.newer(["a"]))
    threading.Timer(0.3, back.set).start()
    monkeypatch.setattr(coordinator, "STORAGE_S", 60.0)
    known.path = "/stale/commit-1"
    assert answered(keeps.newest) == newest, "what it says late is heard"


@pytest.mark.fault("S3", "S7")
def test_state_is_kept_though_the_disk_hangs_or_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a new controller would give out the same generation number again."""

    def newest() -> int:
        state = StateStore(tmp_path, keeper).newest()
        return state.last_number if state is not None else 0

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    disk, keeper = Hung(monkeypatch), Keeper(monkeypatch)
    store, began = StateStore(tmp_path, keeper), time.monotonic()
    for number in (8, 9):
        store.write(DurableState("r1", number))
        assert newest() == number
    assert time.monotonic() - began < 20 and read_state(tmp_path) is None
    disk.back()
    monkeypatch.setattr(RunFolder, "_replace", full)
    store.write(DurableState("r1", 10))
    assert newest() == 10


def test_restarted_controller_does_not_wait_for_silent_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This is safe, since votes that come again make the same commit."""
    back = threading.Event()
    monkeypatch.setattr(checkpoint, "latest", lambda _: back.wait(60))
    monkeypatch.setattr(controller, "LATEST_S", 0.3)
    monkeypatch.setattr("vescale_ray.controller.bounded_io.PATIENCE_S", 0.3)
    began = time.monotonic()
    assert controller._committed_attempt("r1", str(tmp_path)) is None and time.monotonic() - began < 30
    back.set()


def begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, knows: bool = True, conducts: bool = False
) -> tuple[Callable[[], controller.Controller], list[Any]]:
    """A function that starts a controller as Ray restarts it, and a list for the arguments of its loop.

    ``knows``: the supervisor keeps the state of the first controller. The folder has an older one. If ``conducts``, the controller runs its
    loop, and the list stays empty.
    """
    config, conducted = tiny(tmp_path, "again"), []
    folder = RunFolder(config.run_folder).create()
    first = DurableState("r1", 7, LaunchedGeneration(7, 1, ("a",), "fresh", 0), epoch=1)
    folder.write_durable_state(replace(first, last_number=6).to_json())
    spec = RunSpec("r1", config.model_dump(mode="json"), str(folder.path), "t", StateSource(Origin.FRESH, 0), 1, None, 1, {})
    about = SimpleNamespace(was_current_actor_reconstructed=True, get_session_name=lambda: "session")
    supervisor = Keeper(monkeypatch, first if knows else None)
    stub = SimpleNamespace(get_actor=lambda *_: supervisor, get_runtime_context=lambda: about)
    monkeypatch.setattr(controller, "ray", stub)

    def conduct(self: controller.Controller, *what: Any) -> None:
        conducted.append(what)
        self._known.set()

    if not conducts:
        monkeypatch.setattr(controller.Controller, "_conduct", conduct)
    monkeypatch.setattr(controller, "FOLDER_S", 0.3)
    monkeypatch.setattr(controller, "TELL_S", 0.5)
    monkeypatch.setattr(controller, "ASK_GAP_S", 0.05)
    return lambda: controller.Controller(pickle.dumps(spec), "supervisor:r1"), conducted


@pytest.mark.fault("S4")
def test_controller_warns_of_unreadable_run_folder_and_awaits_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the constructor waits for the disk, the driver ends the training workers after two minutes: all since the checkpoint is lost."""
    start, conducted = begun_again(tmp_path, monkeypatch)
    back, told = threading.Event(), controller.read_state
    monkeypatch.setattr(controller, "read_state", lambda folder: told(folder) if back.wait(60) else None)
    with monkeypatch.context() as patient:
        patient.setattr(controller, "TELL_S", 60.0)
        one = start()
        status = one.status()
        assert (status["outcome"], status["waits"], status["warnings"], conducted) == (None, True, (), [])
    until(lambda: bool(one.status()["warnings"]), 10, "the word of it")
    (text,) = one.status()["warnings"]
    assert text.startswith(str(tmp_path)) and "could not be read by the controller" in text and "the workers train on" in text
    with monkeypatch.context() as impatient, pytest.raises(RequestRefused, match="try stop again"):
        impatient.setattr(controller, "BEGIN_S", 0.1)
        one.command("stop", {})
    back.set()
    until(lambda: "waits" not in one.status(), 10, "the disk")
    ((*_, state, again),) = conducted
    assert again and (state.last_number, state.epoch) == (7, 2) and one.status()["record"]["state"] == "PENDING"
    one.close()


@pytest.mark.parametrize("again", [False, True])
def test_late_startup_failure_is_reported_like_an_early_one(again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start, _ = begun_again(tmp_path, monkeypatch)
    about: Any = controller.ray.get_runtime_context()
    about.was_current_actor_reconstructed = again
    back = threading.Event()

    def refuse(*_: Any) -> None:
        assert back.wait(60)
        raise RequestRefused("metrics.host: can't be listened on")

    monkeypatch.setattr(controller, "read_state", refuse)
    one = start()
    assert one.status()["waits"]
    back.set()
    wait_for([one._up], 10)
    if again:
        with pytest.raises(RequestRefused, match="listened on"):
            one.status()
    else:
        outcome = one.status()["outcome"]
        assert outcome["refused"] and outcome["error"] == "the controller can't start: RequestRefused: metrics.host: can't be listened on"


def test_controller_killed_before_its_first_state_begins_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start, conducted = begun_again(tmp_path, monkeypatch, knows=False)
    (RunFolder(tiny(tmp_path, "again").run_folder).path / NAME).unlink()
    one = start()
    until(lambda: bool(conducted), 30, "the loop's thread")
    ((*_, state, again),) = conducted
    assert not again and state.epoch == 1
    one.close()


@pytest.mark.fault("S4")
def test_run_log_read_error_is_retried_without_double_counting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If another file can't be read after the state was, the run must not fail: its workers would be ended, and their steps lost."""
    run = recorded(tmp_path).started()
    first = generation(1, 0, "a", "b", origin=Origin.FRESH)
    run.open(first)
    for i in range(3):
        run.stepped(stepped(first, i, time.time() + i))
    run.log.record("worker_lost", worker="b", reason="its process died", kind="died", pid=None)
    saved(run, SaveResult("x", 2, 1, 0.3, error="no space"))
    run.generation.begin_rescale("failure", 2)
    run.open(second := generation(2, 2, "a"))
    run.stepped(stepped(second, 2, time.time() + 5))
    whole = RunFolder.each_metrics

    def cut(folder: RunFolder, offset: int) -> Any:
        yield next(whole(folder, offset))
        raise OSError(errno.EIO, "Input/output error")

    again = Recorded(run.config)
    with monkeypatch.context() as flaky, pytest.raises(OSError, match="Input/output"):
        flaky.setattr(RunFolder, "each_metrics", cut)
        again.log.replay()
    again.log.replay()
    assert again.stats == run.stats

    start, _ = begun_again(tmp_path, monkeypatch, conducts=True)
    taken: list[Any] = []

    def take(*what: Any) -> Any:
        taken.append(what)
        if len(taken) == 1:
            raise OSError(errno.EIO, "Input/output error")
        return Observed(2, Budget(Limits(3, 20, 20)))

    monkeypatch.setattr(controller, "take_up", take)
    monkeypatch.setattr(controller, "WorkerGroup", lambda *_, **__: 1 // 0)
    controlled = start()
    until(lambda: controlled.status()["outcome"] is not None, 10, "the end")
    assert len(taken) == 2 and controlled.status()["outcome"]["error"].startswith("ZeroDivisionError"), "and so it came past its books"
    controlled.close()


@pytest.mark.parametrize("orphaned", [False, True])
@pytest.mark.fault("S3")
def test_ended_run_does_not_wait_for_its_state_on_a_hung_disk(orphaned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the driver is left by then. It must not block, deaf to signals."""
    config, back = tiny(tmp_path, "over"), threading.Event()
    ready = SimpleNamespace(config=config, source=StateSource(Origin.FRESH, 0), oldest=0)
    result = driver.RunResult("FAILED", 7, 10, "the reason", None, RunFolder(config.run_folder).create().path)
    attempt = SimpleNamespace(run=lambda: result, close=lambda: None, orphaned=orphaned, run_id="r1")
    monkeypatch.setattr(driver, "check", lambda *_: ready)
    monkeypatch.setattr(driver, "_Attempt", lambda *_: attempt)
    monkeypatch.setattr(driver, "_was_to_stop", lambda _: back.wait(60))
    monkeypatch.setattr(driver, "LAST_WORDS_S", 0.3)
    monkeypatch.setattr("vescale_ray.controller.bounded_io.PATIENCE_S", 0.3)
    began = time.monotonic()
    error = driver.run(config).error
    back.set()
    assert time.monotonic() - began < 30
    assert error == "the reason" + orphaned * f"; and it can't begin anew: {config.run_folder} does not answer"


@pytest.mark.parametrize("comes_back", [False, True])
@pytest.mark.fault("S4")
def test_driver_awaits_unreadable_run_log_for_the_storage_bound(comes_back: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, seen = RunFolder(tiny(tmp_path, "unread").run_folder).create(), []
    about: Any = None
    bounds = Bounds(storage=30.0 if comes_back else 0.3)
    attempt = driver._Attempt(about, folder, (), bounds, driver._Signals(), lambda status: seen.append(status["step"]), ())
    full = {"outcome": None, "step": 40, "checkpoint_path": "/c/commit-3", "processes": [(1, 2.0, "n")], "warnings": ()}
    done = {**full, "outcome": {"state": "DONE", "step": 60}}
    unread = {"outcome": None, "waits": True, "warnings": ("it can't be read",)}
    answers = iter([full, None, *[unread] * (5 if comes_back else 1000), None, done])
    monkeypatch.setattr(driver, "POLL_S", 0.01)
    monkeypatch.setattr(driver, "CONTROLLER_GONE_S", 5.0)
    monkeypatch.setattr(attempt, "_call", lambda *_: next(answers))
    outcome = attempt._follow()
    assert attempt._status["processes"] == full["processes"] and attempt._warnings == ["it can't be read"] and seen == [40]
    if comes_back:
        assert outcome.state == "DONE"
    else:
        assert (outcome.state, outcome.step, outcome.checkpoint) == ("FAILED", 40, "/c/commit-3")
        assert outcome.error == f"{folder.path}: the controller was started again, and could not read it for 0.3 s"


def test_leftovers_of_a_killed_writer_are_removed(tmp_path: Path) -> None:
    code = "import os; from vescale_ray.runfolder import RunFolder; os.replace = lambda *names: os.kill(os.getpid(), 9)\n"
    code += f"RunFolder({str(tmp_path)!r}).write_durable_state('{{}}')"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).resolve().parents[2], timeout=60, check=False).returncode == -9
    (left,) = tmp_path.iterdir()
    others = [tmp_path / name for name in (".hidden", "run.json", ".run.json", "events.jsonl", ".something.else.abc")]
    for other in others:
        other.write_text("")
    folder = RunFolder(tmp_path)
    folder.clear_leftovers()
    assert not left.exists() and sorted(tmp_path.iterdir()) == sorted(others)


@pytest.mark.fault("S2")
def test_lines_stay_whole_and_ordered_after_a_partial_write(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    run = Recorded(tiny(tmp_path, "filling"))
    world = generation(1, 0, "a", "b", origin=Origin.FRESH)
    run.open(world)
    try:
        for index in range(60):
            # The kernel limits the size of a file: it takes the part of a line that still fits, and no more.
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft if index >= 50 else 5000, hard))
            assert run.stepped(stepped(world, index, 1.0 + index))
            run.write_record()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    (warning,) = run.log.journal.warnings
    assert "can't be written (File too large); training goes on, lines wait in memory" in warning
    folder = RunFolder(tmp_path / "filling")
    assert [line["step"] for line in folder.read_all_metrics()] == list(range(1, 61))
    assert [line["step"] for line in folder.each_samples()] == list(range(60))
    raw = (folder.path / "metrics.jsonl").read_text().splitlines()
    assert len(raw) == 61, "one that was cut short, and whole again after it"
    assert [event["event"] for event in folder.read_events()] == ["generation", "warning"]


# -------------------------------------------------------------------------------------------------------------------- saves


def vote(root: Path, attempt: str, rank: int, world: int, step: int) -> SavedShard:
    data = torch.arange(8, dtype=torch.float32)
    cut = [8 * r // world for r in range(world + 1)]
    piece = checkpoint.ShardPiece("w", "param", cut[rank], cut[rank + 1], (8,), torch.float32, data[cut[rank] : cut[rank + 1]])
    given = checkpoint.write_shard(root, attempt, rank, [piece], step=step, epoch=1)
    return SavedShard(Ticket(1, 1), attempt, step, 1, rank, world, given.to_json(), None, 1.5)


def ended(committer: Committer) -> list[SaveResult]:
    deadline = time.monotonic() + 20
    results: list[SaveResult] = []
    while not results and time.monotonic() < deadline:
        results = committer.results()
        time.sleep(0.01)
    return results


def test_checkpoint_is_committed_only_after_the_last_vote(tmp_path: Path) -> None:
    committer = Committer(str(tmp_path), lambda: checkpoint.Retention(keep_last=2), lambda step: {"at": step}, None)
    committer.heed(vote(tmp_path, "t1", 0, 2, 5))
    assert committer.busy and not committer.results() and newest_kept(str(tmp_path)) is None
    committer.heed(vote(tmp_path, "t1", 1, 2, 5))
    (result,) = ended(committer)
    assert result.error is None and result.kept == newest_kept(str(tmp_path)) and result.step == 5
    assert result.stages["upload"] == 1.5 and sum(result.stages.values()) == pytest.approx(result.seconds + result.stall_s)
    assert checkpoint.open(tmp_path).meta["at"] == 5 and not committer.busy


@pytest.mark.fault("S1")
def test_checkpoint_reported_damaged_at_any_time_is_not_resumed(tmp_path: Path) -> None:
    for order in ("told after the commit", "told before"):
        noted: list[str] = []
        log = log_of(None)[0]
        log.record = lambda name, noted=noted, **about: noted.append(name)
        committer = SimpleNamespace(results=lambda: [SaveResult("bad", 7, 1, 0.1, CommittedCheckpoint("c7", "/c7", 7))])
        build: Any = CheckpointCoordinator
        coordinator = build(str(tmp_path), "run", None, log, None, committer, None, 1.0, SimpleNamespace(saved=lambda _: None))
        if order == "told before":
            coordinator.damaged("bad")
        coordinator.collect()
        if order == "told after the commit":
            coordinator.damaged("bad")
        assert coordinator._bad == {"c7"} and noted == ["checkpoint_saved"], order


def log_of(kept: int | None, path: str | None = None, world: World | None = None, **stats: Any) -> tuple[Any, Any]:
    """The log and the generation of a run whose newest checkpoint is of step ``kept``."""
    about = SimpleNamespace(checkpoints=CheckpointStats(kept, path), ended=lambda step: None, **stats)
    return SimpleNamespace(stats=about, record=lambda name, **fields: None), SimpleNamespace(world=world or generation(4, 0, "a"))


def source(worker_group: Any, coordinator: CheckpointCoordinator) -> StateSource:
    """Return the source of worker ``a``'s state, given what it holds and the newest checkpoint."""
    return choose_source(parked.held(worker_group, "a"), "a", coordinator.newer("a"))


@pytest.mark.parametrize("in_memory", [41, 30, None], ids=["as new as any", "older", "nothing"])
@pytest.mark.fault("S5")
def test_recovery_needs_no_storage_if_workers_hold_a_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_memory: int | None) -> None:
    """If the storage is out of reach, the loss of a worker must not fail the run. If only the manifests are out of reach, a run without
    copies must not begin from its first step."""
    asked: list[str] = []

    def refuse(store: Any) -> Any:
        asked.append("asked")
        raise OSError(errno.EIO, "out of reach")

    monkeypatch.setattr(commits, "_listed", refuse)
    held = () if in_memory is None else (HeldState(4, 1, in_memory, (0,)),)
    worker_group: Any = SimpleNamespace(
        alive=lambda w: True, report=lambda w: WorkerReport(w, Ticket(4, 1), WorkerPhase.PARKED, 41, (), held, None, 0)
    )
    coordinator = CheckpointCoordinator(str(tmp_path), "run", worker_group, *log_of(40, "/c/e4-s40"), None, None, 1.0, None)  # type: ignore[arg-type]
    assert parked.held_step(worker_group, "a") == (-1 if in_memory is None else in_memory) and not asked
    if in_memory is None:
        with pytest.raises(OSError, match="out of reach"):
            coordinator.newer("a")
        return
    begins = source(worker_group, coordinator)
    assert (begins.origin, begins.step) == (Origin.MEMORY, in_memory)
    assert len(asked) == (in_memory < 40), "only where a checkpoint may be newer"
    newest = coordinator.newest()
    assert newest is not None and newest.path == "/c/e4-s40", "what the end of the run tells is not worth failing for"


@pytest.mark.fault("S6")
def test_vanished_checkpoints_are_no_reason_to_begin_anew(tmp_path: Path) -> None:
    """If the mount is gone, a run must not begin from its first step, and a stopped run must not announce that it will."""
    worker_group: Any = SimpleNamespace(alive=lambda w: True, report=lambda w: None)
    log, newest = log_of(40, "/c/e4-s40")
    coordinator = CheckpointCoordinator(str(tmp_path / "not mounted"), "run", worker_group, log, newest, None, None, 1.0, None)  # type: ignore[arg-type]
    with pytest.raises(OSError, match="not mounted has no checkpoint any more, though there was one of step 40: is it mounted"):
        coordinator.newer("a")
    assert coordinator.newest() == CommittedCheckpoint("e4-s40", "/c/e4-s40", 40)
    coordinator.distrust("one of long ago")
    with pytest.raises(OSError, match="is it mounted"):
        coordinator.newer("a")
    log.stats.checkpoints.step = None
    assert coordinator.newest() is None and source(worker_group, coordinator).origin is Origin.FRESH, "there was none yet"


def test_run_with_only_damaged_checkpoints_begins_anew(tmp_path: Path) -> None:
    committer = Committer(str(tmp_path), lambda: checkpoint.Retention(keep_last=2), lambda step: {}, None)
    committer.heed(vote(tmp_path, "t1", 0, 1, 40))
    (result,) = ended(committer)
    assert result.kept is not None
    worker_group: Any = SimpleNamespace(alive=lambda w: True, report=lambda w: None)
    log, newest = log_of(40, result.kept.path)
    coordinator = CheckpointCoordinator(str(tmp_path), "run", worker_group, log, newest, None, None, 1.0, None)  # type: ignore[arg-type]
    assert source(worker_group, coordinator).commit == result.kept.name
    coordinator.distrust(result.kept.name)
    assert coordinator.newest() is None and source(worker_group, coordinator).origin is Origin.FRESH, "its data is damaged"
    again = CheckpointCoordinator(str(tmp_path), "run", worker_group, log, newest, None, None, 1.0, None)  # type: ignore[arg-type]
    for piece in (tmp_path / "data").rglob("*"):
        if piece.is_file():
            piece.write_bytes(b"")
    assert again.newest() is None and source(worker_group, again).origin is Origin.FRESH, "it is cut short"


@pytest.mark.parametrize("kept", [None, "/runs/c/commits/e4-s40.json"])
def test_supervisor_loss_with_hidden_checkpoints_ends_the_run(kept: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny(tmp_path, "mislaid")
    ready = SimpleNamespace(config=config, source=StateSource(Origin.FRESH, 0), oldest=0)
    folder, lives = RunFolder(config.run_folder).create(), iter([True, False])
    result = driver.RunResult("FAILED", 47, 60, "the reason", kept, folder.path)
    monkeypatch.setattr(driver, "check", lambda *_, **__: ready)
    monkeypatch.setattr(driver, "_asked_for", lambda *_: 0)
    monkeypatch.setattr(
        driver, "_Attempt", lambda *_: SimpleNamespace(run=lambda: result, close=lambda: None, orphaned=next(lives), run_id="r1")
    )
    error = driver.run(config).error
    if kept is None:
        assert error == "the reason" and next(lives, None) is None, "it was begun anew, once"
    else:
        assert error is not None and next(lives) is False
        assert error.startswith(f"the reason; and it can't begin anew: {kept} and those before it can't be resumed from: are they mounted?")


@pytest.mark.parametrize("ends", ["comes back", "stays away", "signal", "bad input"])
def test_supervisor_loss_awaits_storage_before_the_new_start(ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the storage's server is lost with the head's network, a single try would leave the run FAILED."""
    config, now, asked = tiny(tmp_path, "away"), [0.0], list[float]()
    signals: Any = SimpleNamespace(count=0)
    ready: Any = object()
    monkeypatch.setattr(driver.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(driver.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))

    def check(config: Any, oldest: int) -> Any:
        asked.append(now[0])
        if ends == "comes back" and now[0] >= 60.0:
            return ready
        signals.count = int(ends == "signal" and now[0] >= 20.0)
        if len(asked) % 2:
            raise OSError(errno.EIO, "no answer")
        try:
            raise OSError(errno.EIO, "no answer")
        except OSError:
            raise driver.RunRefused("can't be written (no answer)") from None

    def refuse(config: Any, oldest: int) -> Any:
        asked.append(now[0])
        raise driver.RunRefused("another text")

    monkeypatch.setattr(driver, "check", refuse if ends == "bad input" else check)
    if ends == "comes back":
        assert driver._checked_again(config, 0, 600.0, signals) is ready
    else:
        with pytest.raises((OSError, driver.RunRefused)):
            driver._checked_again(config, 0, 600.0, signals)
    last = {"comes back": 60.0, "stays away": 600.0, "signal": 20.0, "bad input": 0.0}[ends]
    assert last <= asked[-1] <= last + 2 * driver.AGAIN_S


def test_longest_recent_step_is_remembered_for_one_period() -> None:
    steps, line = StepStats(), {"time": 0.0, "loss": 1.0, "grad_norm": 1.0, "world": 3}
    assert steps.longest == 0.0
    for step in range(2 * PERIOD):
        steps.count({**line, "step": step, "step_seconds": 9.0 if step == 5 else 0.5})
        assert steps.longest == (9.0 if 5 <= step < 5 + PERIOD else 0.5)
    assert steps.paces == ((3, 0.5),) * PERIOD


def test_loss_while_silent_storage_is_asked_does_not_begin_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers hold a state older than the checkpoint, and one dies while the storage is asked. The run must not begin from its first
    step."""
    back, living = threading.Event(), {"a", "b"}
    monkeypatch.setattr(coordinator, "newest_kept", lambda *_: back.wait(60) and None)
    monkeypatch.setattr(coordinator, "STORAGE_S", 1.0)
    monkeypatch.setattr("vescale_ray.controller.bounded_io.PATIENCE_S", 0.3)

    def report(worker: str) -> WorkerReport:
        return WorkerReport(worker, Ticket(4, 1), WorkerPhase.PARKED, 30, (), (HeldState(4, 2, 30, ("ab".index(worker),)),), None, 0)

    worker_group: Any = SimpleNamespace(alive=lambda w: w in living, report=report)
    log, newest = log_of(40, "/c/e4-s40", generation(4, 0, "a", "b"))
    nothing: Any = None

    keeps = CheckpointCoordinator(str(tmp_path), "run", worker_group, log, newest, nothing, nothing, 1.0, nothing)  # type: ignore[arg-type]
    assert parked.held_step(worker_group, "ab") == 30
    with pytest.raises(OSError, match="does not answer"):
        answered(lambda: keeps.newer("ab"), lambda: living.discard("b"))
    back.set()


class Writers:
    """Two parked workers that hold each other's shards. ``b`` dies of its first order. ``a`` carries out its own order for 5 rounds,
    refuses others meanwhile, and its reports come 3 rounds late."""

    TICKET = Ticket(4, 1)

    def __init__(self) -> None:
        self.round, self.ordered, self.refused, self.living = 10, 0, 0, {"a", "b"}
        self.results: list[SaveResult] = []
        self.coordinator: Any = None

    def report(self, worker: str) -> WorkerReport:
        held = (HeldState(4, 2, 41, (0, 1)),)
        seen = self.round - 3
        phase = WorkerPhase.SAVING if worker == "a" and self.ordered and self.ordered <= seen < self.ordered + 5 else WorkerPhase.FINISHED
        return WorkerReport(worker, self.TICKET, phase, 41, (), held if phase is WorkerPhase.FINISHED else (), None, 0)

    def alive(self, worker: str) -> bool:
        return worker in self.living

    def stale(self, worker: str) -> bool:
        return worker == "a" and self.round - 3 <= self.ordered

    def order(self, orders: Mapping[str, Save]) -> dict[str, str]:
        if self.ordered and self.round < self.ordered + 5:
            self.refused += 1
            return dict.fromkeys(orders, "is saving")
        self.ordered = self.round
        self.living.discard("b")
        if orders.keys() == {"a"}:
            self.results.append(SaveResult(orders["a"].attempt, 41, orders["a"].epoch, 0.1, CommittedCheckpoint("c41", "/c41", 41)))
        return {}

    def save(self) -> SaveResult | None:
        """Save the checkpoint of both, in as many rounds as it takes."""
        result: SaveResult | None = answered(lambda: self.coordinator.save(["a", "b"]), self.next_round)
        return result

    def next_round(self) -> None:
        assert self.round < 110
        self.round += 1
        self.coordinator.collect()


def test_survivor_writes_last_checkpoint_after_its_broken_save(tmp_path: Path) -> None:
    """The survivor still writes when the next order would come, and its report is late. An order that it refuses would count as a try."""
    worker_group, numbers = Writers(), SimpleNamespace(take_number=iter(range(5, 100)).__next__)
    log, current = log_of(None, None, generation(4, 40, "a", "b"), step=41)
    committer: Any = SimpleNamespace(
        results=lambda: [worker_group.results.pop()] if worker_group.results else [], abandon=lambda _: [], committing=lambda _: False
    )
    cadence: Any = SimpleNamespace(saved=lambda _: None)
    worker_group.coordinator = CheckpointCoordinator(str(tmp_path), "run", worker_group, log, current, committer, numbers, 30.0, cadence)  # type: ignore[arg-type]
    result = worker_group.save()
    assert result is not None and result.kept is not None and result.error is None
    assert worker_group.refused == 0 and worker_group.living == {"a"}


def test_held_state_is_not_saved_over_a_newer_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With copies every 10 steps and a checkpoint of step 45, a worker is lost as the run stops. If the held state of step 41 became the
    newest checkpoint, retention would delete step 45."""
    worker_group, numbers = Writers(), SimpleNamespace(take_number=iter(range(5, 100)).__next__)
    newest = [CommittedCheckpoint("c45", "/c45", 45)]
    monkeypatch.setattr(coordinator, "newest_kept", lambda *about: newest[0])
    log, current = log_of(45, None, generation(4, 40, "a", "b"), step=47)
    committer: Any = SimpleNamespace(
        results=lambda: [worker_group.results.pop()] if worker_group.results else [], abandon=lambda _: [], committing=lambda _: False
    )
    cadence: Any = SimpleNamespace(saved=lambda _: None)
    worker_group.coordinator = CheckpointCoordinator(str(tmp_path), "run", worker_group, log, current, committer, numbers, 30.0, cadence)  # type: ignore[arg-type]
    assert worker_group.save() is None and worker_group.ordered == 0
    newest[0] = CommittedCheckpoint("c40", "/c40", 40)  # the checkpoint of step 45 is damaged
    result = worker_group.save()
    assert result is not None and result.kept is not None and result.step == 41


def test_hung_last_checkpoint_is_given_up_at_its_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two more orders, each with the same limit and a wait for workers that still write, would take more than an hour."""
    now, ordered = [50.0], []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    busy = WorkerReport("a", Writers.TICKET, WorkerPhase.FINISHED, 41, (), (HeldState(4, 1, 41, (0,)),), None, 0)
    log, current = log_of(None, None, generation(4, 40, "a"), step=41)
    committer: Any = SimpleNamespace(results=list, abandon=lambda _: [], committing=lambda _: False)
    stuck: Any = SimpleNamespace(
        alive=lambda w: True, stale=lambda w: bool(ordered), report=lambda w: busy, order=lambda o: ordered.append(o)
    )
    numbers: Any = SimpleNamespace(take_number=lambda: 8)
    coordinator = CheckpointCoordinator(str(tmp_path), "run", stuck, log, current, committer, numbers, 600.0, None)  # type: ignore[arg-type]
    result = answered(lambda: coordinator.save(["a"]), lambda: now.__setitem__(0, now[0] + 10.0))
    assert result is not None and result.kept is None and result.error == "it was not written within 600 s (checkpoint.last_timeout_s)"
    assert now == [650.0] and len(ordered) == 1


def test_votes_that_come_again_after_a_restart_change_nothing(tmp_path: Path) -> None:
    committer = Committer(str(tmp_path), lambda: checkpoint.Retention(keep_last=2), lambda step: {}, None)
    votes = [vote(tmp_path, "t1", rank, 2, 5) for rank in range(2)]
    for one in votes:
        committer.heed(one)
    assert len(ended(committer)) == 1
    for one in votes:
        committer.heed(one)
    known: Future[str | None] = Future()
    again = Committer(str(tmp_path), lambda: checkpoint.Retention(keep_last=2), lambda step: {}, known)
    for one in votes:
        again.heed(one)
    assert again.busy and not again.results() and not again.committing("t1"), "a restarted controller asks the storage first"
    known.set_result("t1")
    assert not committer.busy and not again.busy and len(checkpoint.ls(tmp_path)) == 1
    # If the controller restarts before the commit is noted, the same votes make the same commit.
    third = Committer(str(tmp_path), lambda: checkpoint.Retention(keep_last=2), lambda step: {}, None)
    for one in votes:
        third.heed(one)
    assert ended(third)[0].error is None and len(checkpoint.ls(tmp_path)) == 1
    for step, failed in ((6, None), (7, RuntimeError("no such store"))):
        asked: Future[str | None] = Future()
        fourth = Committer(str(tmp_path), lambda: checkpoint.Retention(keep_last=2), lambda step: {}, asked)
        fourth.heed(vote(tmp_path, f"t{step}", 0, 2, step))
        if failed is None:
            asked.set_result(None)
        else:
            asked.set_exception(failed)
        fourth.heed(vote(tmp_path, f"t{step}", 1, 2, step))
        (made,) = ended(fourth)
        assert made.error is None and made.step == step, "what came before the answer counts as well"


def test_failed_rank_fails_checkpoint_and_keeps_the_older_one(tmp_path: Path) -> None:
    committer = Committer(str(tmp_path), lambda: checkpoint.Retention(keep_last=2), lambda step: {}, None)
    for rank in range(2):
        committer.heed(vote(tmp_path, "t1", rank, 2, 5))
    ended(committer)
    committer.heed(vote(tmp_path, "t2", 0, 2, 6))
    committer.heed(SavedShard(Ticket(1, 1), "t2", 6, 1, 1, 2, None, "No space left on device", 0.5))
    (result,) = ended(committer)
    assert result.kept is None and result.error == "rank 1: No space left on device"
    committer.heed(vote(tmp_path, "t3", 0, 2, 7))
    (result,) = committer.abandon("a worker was lost")
    assert result.error == "a worker was lost" and not committer.busy
    kept = newest_kept(str(tmp_path))
    assert kept is not None and kept.step == 5
    assert newest_kept(str(tmp_path), frozenset({kept.name})) is None


def test_a_failed_checkpoint_keeps_no_space_on_the_disk(tmp_path: Path) -> None:
    committer = Committer(str(tmp_path), lambda: checkpoint.Retention(keep_last=2), lambda step: {}, None)
    committer.heed(vote(tmp_path, "t2", 0, 2, 6))
    assert (tmp_path / "data/t2").is_dir()
    committer.heed(SavedShard(Ticket(1, 1), "t2", 6, 1, 1, 2, None, "No space left on device", 0.5))
    assert ended(committer)[0].error is not None
    committer.close()
    assert not (tmp_path / "data/t2").exists()


def test_missing_vote_or_hung_commit_fails_in_bounded_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    committer = Committer(str(tmp_path), lambda: checkpoint.Retention(keep_last=2), lambda step: {}, None, 0.3)
    committer.heed(vote(tmp_path, "t1", 1, 3, 5))
    (result,) = ended(committer)
    assert result.kept is None and result.error == "no vote from ranks [0, 2] for 0.3 s: given up" and not committer.busy
    gate = threading.Event()
    real = checkpoint.commit
    monkeypatch.setattr(checkpoint, "commit", lambda *a, **k: gate.wait(20) and real(*a, **k))
    committer.heed(vote(tmp_path, "t2", 0, 1, 6))
    (result,) = ended(committer)
    assert result.error is not None and "no answer to its commit from" in result.error and not committer.busy
    gate.set()
    committer.heed(vote(tmp_path, "t3", 0, 1, 7))
    assert ended(committer)[0].error is None, "a store that answers again is used again"


def test_checkpoint_duration_is_independent_of_host_clocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint interval is never less than the duration of a checkpoint. A clock that is a day ahead would make it a day."""
    real = time.time
    committer = Committer(str(tmp_path), lambda: checkpoint.Retention(keep_last=2), lambda step: {}, None)
    committer.heed(vote(tmp_path, "t1", 0, 2, 5))
    monkeypatch.setattr(time, "time", lambda: real() + 86400)
    committer.heed(vote(tmp_path, "t1", 1, 2, 5))
    (result,) = ended(committer)
    assert result.error is None and 1.5 <= result.seconds < 10


def test_retention_waits_until_the_newer_checkpoint_is_proven(tmp_path: Path) -> None:
    from vescale_ray.checkpoint.upkeep.proof import prove

    committer = Committer(str(tmp_path), lambda: checkpoint.Retention(keep_last=1), lambda step: {}, None)
    for step in (5, 6, 7):
        told = [vote(tmp_path, f"t{step}", rank, 2, step) for rank in range(2)]
        for one in told:
            committer.heed(one)
        assert ended(committer)[0].error is None
        if step < 7:
            for given in (checkpoint.Vote.from_json(one.vote) for one in told if one.vote):
                assert prove(checkpoint.PosixStore(tmp_path), given.object, given.aux) is None
        else:
            # The garbage collection after step 6 may run after step 7 was committed. It must leave step 7 to its own workers all the same.
            deadline = time.monotonic() + 20
            while len(checkpoint.ls(tmp_path)) > 2 and time.monotonic() < deadline:
                time.sleep(0.02)
            time.sleep(0.3)
            assert [c.step for c in checkpoint.ls(tmp_path)] == [6, 7], "7 has not been read back"
    committer.close()
    assert [c.step for c in checkpoint.ls(tmp_path)] == [6, 7]


# ----------------------------------------------------------------------------------------------------------------- watchdog

SLEEPER = "import sys, time; {}; print('up', flush=True); time.sleep(60)"


def sleeper(code: str, **more: str) -> subprocess.Popen[str]:
    environ = {**os.environ, **more}
    process = subprocess.Popen([sys.executable, "-c", SLEEPER.format(code)], env=environ, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    return process


def test_watchdog_ends_only_marked_processes_and_folder_writers(tmp_path: Path) -> None:
    folder = str(tmp_path)
    (tmp_path / "log").write_text("")
    marked = sleeper("pass", **{watchdog.MARK: folder})
    writer = sleeper(f"f = open({folder + '/log'!r}, 'a')")
    reader = sleeper(f"f = open({folder + '/log'!r})")
    other = sleeper("pass", **{watchdog.MARK: folder + "x"})
    try:
        assert set(watchdog.processes_of(folder)) == {marked.pid, writer.pid}
        assert watchdog.processes_of(folder, spare=(writer.pid,)) == [marked.pid]
        assert watchdog.end_all(folder) == []
        assert marked.wait(5) == writer.wait(5) == -9
        assert reader.poll() is None and other.poll() is None
    finally:
        for process in (marked, writer, reader, other):
            process.kill()
            process.communicate()


@pytest.mark.parametrize("word", [b"done", b""])
def test_watchdog_acts_if_its_pipe_ends_without_the_done_word(tmp_path: Path, word: bytes) -> None:
    folder = tmp_path / "cluster"
    folder.mkdir()
    marked = sleeper("pass", **{watchdog.MARK: str(folder)})
    try:
        dog = subprocess.Popen([sys.executable, "-I", "-S", watchdog.__file__, str(folder)], stdin=subprocess.PIPE)
        dog.communicate(word, timeout=20)
        assert dog.returncode == 0
        assert (marked.poll() is None, folder.exists()) == ((True, True) if word else (False, False))
    finally:
        marked.kill()
        marked.communicate()


def test_late_vote_completes_a_begun_attempt_but_begins_none(tmp_path: Path) -> None:
    """Votes have epoch 1. An attempt with a vote before the fence may still be completed; an attempt that begins later never would be."""
    committer = Committer(str(tmp_path), lambda: checkpoint.Retention(keep_last=2), lambda step: {}, None)
    committer.heed(vote(tmp_path, "t1", 0, 2, 5))
    committer.fence(2)
    committer.heed(vote(tmp_path, "t2", 0, 2, 6))
    committer.heed(vote(tmp_path, "t1", 1, 2, 5))
    (result,) = ended(committer)
    assert result.kept is not None and result.kept.step == 5 and not committer.busy


def test_an_attempt_that_a_later_one_has_overtaken_is_given_up(tmp_path: Path) -> None:
    """The missing vote went to a controller that no longer exists. Workers vote in order, so it will not come again."""
    committer = Committer(str(tmp_path), lambda: checkpoint.Retention(keep_last=2), lambda step: {}, None)
    committer.heed(vote(tmp_path, "t1", 0, 2, 5))
    for rank in (0, 1):
        committer.heed(vote(tmp_path, "t2", rank, 2, 6))
    results = ended(committer)
    assert [(r.step, r.error) for r in results] == [(6, None), (5, "a later one was complete before it")] and not committer.busy


# ------------------------------------------------------------------------------------------------------------------- cadence


def kept(stall: float, seconds: float, step: int = 1) -> SaveResult:
    return SaveResult("a", step, 1, seconds, CommittedCheckpoint("n", "p", step), 5, stall_s=stall)


def auto(**changes: Any) -> Cadence:
    return Cadence(CheckpointSection(every="auto", **changes), now=1000.0)


def test_first_interval_is_the_minimum_and_the_next_is_measured() -> None:
    cadence = auto(auto_min_s=10, auto_max_s=3600, mtbf_hours=1)
    assert not cadence.due(1009.0, False) and cadence.due(1010.0, False) and not cadence.due(1010.0, True)
    assert cadence.news(1010.0, 0) is None, "nothing is known of the cost yet"
    cadence.begun(1010.0)
    cadence.saved(kept(0.5, 3.0))
    news = cadence.news(1014.0, 0)
    # Young: sqrt(2 * 0.5 * 3614) = 60.1
    assert news is not None and news.by == "formula" and abs(news.seconds - 60.1) < 1.5
    assert not cadence.due(1060.0, False) and cadence.due(1073.0, False)


def test_cadence_imports_no_torch_before_the_first_checkpoint() -> None:
    """On a busy machine, the import of torch takes 5 s. The loop would watch no worker and refuse a stop meanwhile."""
    program = (
        "import sys; from vescale_ray.config import CheckpointSection; from vescale_ray.controller.checkpointing.cadence import Cadence\n"
        "for every in ('auto', 100): assert Cadence(CheckpointSection(every=every), 0.0).news(1.0, 3) is None\n"
        "assert not {'torch', 'vescale_ray.checkpoint'} & sys.modules.keys()"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr


def test_failures_shorten_the_interval_and_quiet_lengthens_it() -> None:
    cadence = auto(auto_min_s=1, auto_max_s=3600, mtbf_hours=1)
    cadence.saved(kept(0.5, 3.0))
    first = cadence.news(1000.0, 0)
    assert first is not None and cadence.news(1001.0, 0) is None
    often = cadence.news(1002.0, 3)
    # With the prior, this makes four failures in an hour: a quarter of the time between them, and half the interval.
    assert often is not None and abs(often.seconds / first.seconds - 0.5) < 0.02
    rare = cadence.news(1002.0 + 8 * 3600, 3)
    assert rare is not None and rare.seconds > 2 * often.seconds


def test_restarted_controller_knows_the_time_span_of_failures(run: Recorded) -> None:
    """If a month's failures counted as if they had come in no time, checkpoints would be made many times as often."""
    before = auto(auto_min_s=1, auto_max_s=1e6, mtbf_hours=24)
    before.saved(kept(0.5, 3.0))
    month = 30 * 86400.0
    then = before.news(1000.0 + month, 50)
    after = Cadence(CheckpointSection(every="auto", auto_min_s=1, auto_max_s=1e6, mtbf_hours=24), 77.0, age_s=month)
    after.saved(kept(0.5, 3.0))
    now = after.news(77.0, 50)
    assert now is not None and then is not None and now.seconds == pytest.approx(then.seconds)
    assert not after.due(77.0, False), "that the run is old is no reason for one now"
    with pytest.MonkeyPatch.context() as patch:
        hour_ago = time.time() - 3600.0
        patch.setattr(time, "time", lambda: hour_ago)
        run.started()
    again = run.restarted(None)
    assert time.time() - again.stats.started == pytest.approx(3600.0, abs=30.0)


def test_interval_bounds_hold_and_one_slow_save_changes_nothing() -> None:
    cadence = auto(auto_min_s=20, auto_max_s=30, mtbf_hours=24)
    for _ in range(4):
        cadence.saved(kept(0.5, 3.0))
    news = cadence.news(1000.0, 0)
    assert news is not None and (news.seconds, news.by) == (30.0, "most") and "held at its most" in str(news)
    cadence.saved(kept(9.0, 300.0))
    assert cadence.news(1001.0, 0) is None
    for _ in range(4):
        cadence.saved(kept(0.0001, 300.0))
    slow = cadence.news(1002.0, 0)
    assert slow is not None and (slow.seconds, slow.by) == (300.0, "persist"), "the one before must be written first"


def test_failed_and_parked_saves_do_not_change_the_interval() -> None:
    cadence = auto(auto_min_s=20)
    cadence.saved(SaveResult("a", 1, 1, 3.0, error="no"))
    cadence.saved(kept(0.0, 50.0))
    assert cadence.news(2000.0, 0) is None
    assert not Cadence(CheckpointSection(every=100), 0.0).due(1e9, False)


def test_new_checkpoint_interval_is_recorded_over_a_restart(run: Recorded) -> None:
    run.started()
    cadence = auto()
    cadence.saved(kept(0.5, 3.0))
    spec, seen, nothing = SimpleNamespace(capacity=None, bounds=Bounds()), SimpleNamespace(now=0.0, stats=run.stats, saving=True), None
    scaling: Any = Scaling(spec, run.config, nothing, cadence, nothing)  # type: ignore[arg-type]
    (event,) = scaling._save_if_due(generation(1, 0, "a"), seen)
    run.log.record(event.name, **event.about)
    text = str(cadence.interval)
    for one in (run, run.restarted(None)):
        told = one.snapshot
        assert cadence.interval and (told.checkpoint_interval, told.checkpoint_interval_text) == (cadence.interval.seconds, text)


def test_a_checkpoint_has_the_metrics_of_its_own_step(run: Recorded) -> None:
    first = generation(1, 0, "w0")
    run.open(first)
    for index in range(2):
        run.stepped(stepped(first, index, 100.0 + index))
    run.generation.evaluated(Evaluated(first.ticket, 2, 7.5, 3))
    found = [run.stats.metrics_of(step) for step in (1, 2, 3)]
    assert found[0].keys() == {"loss"} and found[1]["heldout_loss"] == 7.5 and found[2] == {"heldout_loss": 7.5}


@pytest.mark.parametrize("gone", [False, True])
def test_frozen_driver_asks_again_before_it_fails_the_run(gone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a container was frozen for two minutes, its first question is not answered in time. That must not fail the run."""
    now, asked = [1000.0], list[float]()
    about: Any = SimpleNamespace(config=tiny(tmp_path, "still"), source=StateSource(Origin.FRESH, 0), oldest=0)
    attempt = driver._Attempt(about, RunFolder(tmp_path), (), Bounds(), driver._Signals(), None, ())
    monkeypatch.setattr(driver.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(driver.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    ended = {"outcome": {"state": "DONE", "step": 3}}

    def call(method: str, *what: Any) -> Any:
        asked.append(now[0])
        now[0] += 200.0 if len(asked) == 2 else driver.CALL_S if gone else 0.1
        return None if len(asked) in (2, 3) or gone else ended if len(asked) > 4 else {"outcome": None}

    monkeypatch.setattr(attempt, "_call", call)
    outcome = attempt._follow()
    assert (outcome.state == "FAILED") is gone
    assert not gone or (f"not answered for {driver.CONTROLLER_GONE_S:g} s" in str(outcome.error) and 20 < len(asked) < 30)


def test_signal_during_the_teardown_of_a_lost_start_is_kept() -> None:
    """If the signal were ignored, the run would begin anew. No signal may interrupt the teardown."""
    with driver._Signals() as signals:
        with signals.deferred():
            for _ in range(3):
                signal.raise_signal(signal.SIGTERM)
        assert signals.count == 3 and signals.name == "SIGTERM"
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
