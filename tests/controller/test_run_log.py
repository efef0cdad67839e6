"""The run log: what the controller records of steps, pauses and checkpoints, and what a restarted one reads back."""

from __future__ import annotations

import errno
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.controller.recorded import Recorded, generation, recorded, saved, stepped
from tests.controller.runs import tiny
from tests.resident import peak_growth
from vescale_ray.controller.checkpointing.committer import SaveResult
from vescale_ray.controller.failures.hang import PERIOD
from vescale_ray.controller.policy import CommittedCheckpoint
from vescale_ray.controller.protocol import RunState, StateSource, World
from vescale_ray.controller.state import run_log
from vescale_ray.controller.statistics import step_stats
from vescale_ray.controller.statistics.step_stats import StepStats
from vescale_ray.runfolder import RunFolder, committed
from vescale_ray.workers.messages import Evaluated, Filled, Origin, Ticket


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
    for step in range(1, 2001):
        line = {"step": step, "loss": 1.0, "time": begin + step, "step_seconds": 0.5, "generation": 1, "memory": memory}
        run.folder.append_metrics({**line, "run_id": "r1", "seq": 2 + step})
    again = Recorded(run.config)
    most = peak_growth(again.log.replay)
    size = (run.folder.path / "metrics.jsonl").stat().st_size
    assert again.stats.step == 2000 and again.stats.has_stepped and most < size / 2, f"{most} bytes for a file of {size}"


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


def test_longest_recent_step_is_remembered_for_one_period() -> None:
    steps, line = StepStats(), {"time": 0.0, "loss": 1.0, "grad_norm": 1.0, "world": 3}
    assert steps.longest == 0.0
    for step in range(2 * PERIOD):
        steps.count({**line, "step": step, "step_seconds": 9.0 if step == 5 else 0.5})
        assert steps.longest == (9.0 if 5 <= step < 5 + PERIOD else 0.5)
    assert steps.paces == ((3, 0.5),) * PERIOD


def test_a_checkpoint_has_the_metrics_of_its_own_step(run: Recorded) -> None:
    first = generation(1, 0, "w0")
    run.open(first)
    for index in range(2):
        run.stepped(stepped(first, index, 100.0 + index))
    run.generation.evaluated(Evaluated(first.ticket, 2, 7.5, 3))
    found = [run.stats.metrics_of(step) for step in (1, 2, 3)]
    assert found[0].keys() == {"loss"} and found[1]["heldout_loss"] == 7.5 and found[2] == {"heldout_loss": 7.5}
