"""Reports of the ranks: they are summed by rank and end with the rank, and a utilisation is only given if all its inputs are known."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import pytest

from tests.controller.recorded import Recorded, generation, stepped
from vescale_ray.controller.http.exposition import families
from vescale_ray.controller.statistics.worker_stats import WorkerStats
from vescale_ray.workers.messages import Filled, Origin, Stepped, Usage


def usage(waited: float, parameters: int = 100, **more: Any) -> Usage:
    return Usage({"all_gather": waited, "step_end": 2 * waited}, {"comm": 3 * waited}, {"parameters": parameters}, **more)


def fresh(workers: WorkerStats) -> dict[str, Any]:
    workers._due = 0.0
    return workers.figures()


def test_rank_seconds_add_up_and_a_departed_rank_is_not_shown() -> None:
    workers = WorkerStats()
    workers.opened(("a", "b", "c"))
    for worker, waited in (("a", 1.0), ("b", 2.0), ("c", 4.0), ("a", 0.5), ("x", 99.0)):
        workers.stepped(worker, 0.1, usage(waited))
    workers.heard("b", 7.0, 1 << 20)
    workers.heard("x", 8.0, 1)
    first = workers.figures()
    assert first["waited"] == {"all_gather": {0: 1.5, 1: 2.0, 2: 4.0}, "step_end": {0: 3.0, 1: 4.0, 2: 8.0}}
    assert first["heard"] == {1: 7.0} and first["memory"] == {1: 1 << 20}
    assert first["memory_kinds"] == {"parameters": {0: 100, 1: 100, 2: 100}}
    workers.opened(("c", "a"))  # b is lost: c is rank 0 now
    gone = workers.figures()
    assert gone["waited"] == {"all_gather": {0: 1.5, 1: 2.0}, "step_end": {0: 3.0, 1: 4.0}}, "a counter of a rank does not fall"
    assert not any(gone[name] for name in ("memory_kinds", "heard", "rank_step_seconds")), "of another layout"
    workers.stepped("b", 0.1, usage(50.0))  # a late report of a lost worker
    workers.stepped("c", 0.25, usage(1.0, 150))
    workers.moved("a", 0.75)
    again = fresh(workers)
    assert again["waited"]["all_gather"] == {0: 2.5, 1: 2.0} and again["waited"]["reshard"] == {1: 0.75}
    assert again["memory_kinds"] == {"parameters": {0: 150}} and again["rank_step_seconds"] == {0: 0.25}
    workers.opened(("c", "a", "d"))
    assert workers.figures()["waited"]["all_gather"] == {0: 2.5, 1: 2.0, 2: 4.0}, "rank 2 goes on where it was"
    assert first["waited"]["all_gather"] == {0: 1.5, 1: 2.0, 2: 4.0}, "what was given out stays as it was"


def test_reading_is_summed_over_workers_and_its_bytes_never_fall() -> None:
    workers = WorkerStats()
    workers.opened(("a", "b"))
    assert fresh(workers)["data_waiting_tokens"] is None
    for worker, tokens, read, lines in (("a", 500, 100, 0), ("b", 300, 40, 7), ("a", 700, 150, 2)):
        loading = {"waiting_tokens": tokens, "read_bytes": read, "skipped_files": 1, "skipped_records": lines}
        workers.stepped(worker, 0.1, usage(0.0, loading=loading))
    names = ("data_waiting_tokens", "data_read_bytes", "data_skipped")
    assert [fresh(workers)[name] for name in names] == [300, 190, {"files": 1, "records": 7}]
    workers.opened(("b", "c"))  # a is lost
    told = {"waiting_tokens": 9, "read_bytes": 5, "skipped_files": 1, "skipped_records": 0}
    workers.stepped("c", 0.1, usage(0.0, loading=told))
    assert [fresh(workers)[name] for name in names] == [9, 195, {"files": 1, "records": 0}]
    assert workers.loading() == {**told, "read_bytes": 195} and WorkerStats().loading() == {}


def test_utilisation_is_shown_only_if_all_devices_are_known() -> None:
    workers = WorkerStats()
    workers.opened(("a", "b"))
    workers.stepped("a", 1.0, usage(0.0, token_flops=600, peak_flops=1e6))
    assert workers.utilisation(100.0) is None, "nothing has come from b"
    workers.stepped("b", 1.0, usage(0.0, token_flops=600))
    assert workers.utilisation(100.0) is None, "b's device is not known"
    workers.stepped("b", 1.0, usage(0.0, token_flops=600, peak_flops=3e6))
    assert workers.utilisation(100.0) == pytest.approx(100.0 * 600 / 4e6)
    assert workers.utilisation(None) is None
    workers.opened(("a",))
    assert workers.utilisation(100.0) is None


def test_making_the_figures_takes_a_fiftieth_of_the_time_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    workers = WorkerStats()
    made: list[float] = []

    def slow() -> dict[str, Any]:
        now[0] += 0.01
        made.append(now[0])
        return {}

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(workers, "_made", slow)
    for _ in range(1000):
        workers.figures()
        now[0] += 0.01
    assert len(made) == pytest.approx((now[0] - 100.0) / (51 * 0.01), abs=2)


def told(run: Recorded, name: str) -> dict[tuple[str, ...], float]:
    found = [s for family in families(run.snapshot) for s in family.samples if s.name == name]
    return {tuple(value for key, value in sorted(s.labels.items()) if key not in ("run", "le")): s.value for s in found}


def test_bad_steps_are_counted_once_and_known_after_a_restart(run: Recorded) -> None:
    run.started()
    world = generation(1, 0, "a", "b", origin=Origin.FRESH)
    run.open(world)
    begin = time.time()
    worst = {"loss": -math.inf, "grad_norm": math.nan}
    wrong: list[dict[str, Any]] = [{}, {"loss": math.nan}, {"grad_norm": math.inf, "skipped": True}, {"clipped": True}, worst, {}]
    for i, changes in enumerate(wrong):
        item = stepped(world, i, begin + i)
        loading = {"waiting_tokens": 9, "read_bytes": 5, "skipped_files": 1, "skipped_records": 0}
        used = usage(0.05, token_flops=6, peak_flops=1e3, loading=loading)
        item = replace(item, record=replace(item.record, **changes), usage=used, between={"checkpoint": 0.25})
        for worker in ("a", "b"):
            run.generation.stepped(worker, item)
    again = run.restarted(world)
    for one in (run, again):
        assert told(one, "vescale_nonfinite_steps_total") == {(): 3}
        assert told(one, "vescale_clipped_steps_total") == {(): 1}
        assert told(one, "vescale_skipped_steps_total") == {(): 1}
        spent = {phase: seconds for phase, seconds in told(one, "vescale_phase_seconds_total").items() if seconds}
        assert spent == {("checkpoint",): 1.5, ("comm",): pytest.approx(6 * 0.15)}
        assert told(one, "vescale_model_flops_utilization_ratio") == {(): pytest.approx(192 / 0.5 * 6 / 2e3)}
    assert told(run, "vescale_worker_exposed_communication_seconds_total") == {
        (op, rank): pytest.approx(6 * seconds) for op, seconds in (("all_gather", 0.05), ("step_end", 0.1)) for rank in "01"
    }
    line = run.folder.read_metrics()[-1]
    assert line["waited_seconds"] == {"all_gather": 0.05, "step_end": 0.1} and line["memory_kinds"] == {"parameters": 100}
    assert line["waited_of_seconds"] == line["step_seconds"] == 0.5
    assert line["data"] == {**loading, "read_bytes": 10}


def test_shard_move_counts_per_rank_and_checkpoint_read_as_load(run: Recorded) -> None:
    first = generation(1, 10, "a", "b", origin=Origin.CHECKPOINT)
    run.open(first)
    for _ in range(2):  # reported again, for example after a restart of the controller
        run.generation.filled("a", Filled(first.ticket, 10, Origin.CHECKPOINT, {"sync": 0.5}))
        run.generation.filled("b", Filled(first.ticket, 10, Origin.CHECKPOINT, {"sync": 2.0}))
    second = generation(2, 12, "b", "c")
    run.open(second)
    for _ in range(2):
        run.generation.filled("b", Filled(second.ticket, 12, Origin.MEMORY, {"sync": 0.25}))
        run.generation.filled("c", Filled(second.ticket, 12, Origin.MEMORY, {"sync": 0.75}))
    assert told(run, "vescale_checkpoint_duration_seconds_sum")[("load", "read")] == 2.0
    assert told(run, "vescale_checkpoint_duration_seconds_count")[("load", "read")] == 1
    name = "vescale_worker_exposed_communication_seconds_total"
    assert told(run, name) == {("reshard", "0"): 0.25, ("reshard", "1"): 0.75}


def test_report_of_an_older_generation_counts_for_nothing(run: Recorded) -> None:
    first, second = generation(1, 0, "a", origin=Origin.FRESH), generation(2, 0, "a", origin=Origin.FRESH)
    run.open(first)
    run.open(second)
    late: Stepped = replace(stepped(first, 0, 10.0), usage=usage(1.0))
    assert not run.generation.stepped("a", late)
    assert not told(run, "vescale_worker_exposed_communication_seconds_total")
