"""What the ranks tell of themselves: added up by rank, gone with the rank, and a utilisation only where all is known."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.controller.runs import tiny
from tests.controller.test_books import generation, stepped
from vescale_ray.controller.exposition import families
from vescale_ray.controller.ledger import Ledger
from vescale_ray.controller.tally import Tally
from vescale_ray.runfolder import RunFolder
from vescale_ray.workers.messages import Filled, Origin, Stepped, Usage


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(RunFolder(tmp_path / "r").create(), tiny(tmp_path, "r"), "id", 1, 1)


def usage(waited: float, parameters: int = 100, **more: Any) -> Usage:
    return Usage({"all_gather": waited, "step_end": 2 * waited}, {"comm": 3 * waited}, {"parameters": parameters}, **more)


def fresh(tally: Tally) -> dict[str, Any]:
    tally._due = 0.0
    return tally.figures()


def test_seconds_add_up_by_rank_over_generations_and_a_rank_that_left_is_not_told_of() -> None:
    tally = Tally()
    tally.opened(("a", "b", "c"))
    for worker, waited in (("a", 1.0), ("b", 2.0), ("c", 4.0), ("a", 0.5), ("x", 99.0)):
        tally.stepped(worker, 0.1, usage(waited))
    tally.heard("b", 7.0)
    tally.heard("x", 8.0)
    first = tally.figures()
    assert first["waited"] == {"all_gather": {0: 1.5, 1: 2.0, 2: 4.0}, "step_end": {0: 3.0, 1: 4.0, 2: 8.0}}
    assert first["heard"] == {1: 7.0} and first["memory_kinds"] == {"parameters": {0: 100, 1: 100, 2: 100}}
    tally.opened(("c", "a"))  # b is lost: c is rank 0 now
    gone = tally.figures()
    assert gone["waited"] == {"all_gather": {0: 1.5, 1: 2.0}, "step_end": {0: 3.0, 1: 4.0}}, "a counter of a rank does not fall"
    assert not any(gone[name] for name in ("memory_kinds", "heard", "rank_step_seconds")), "of another layout"
    tally.stepped("b", 0.1, usage(50.0))  # what a lost worker had still said
    tally.stepped("c", 0.25, usage(1.0, 150))
    tally.moved("a", 0.75)
    again = fresh(tally)
    assert again["waited"]["all_gather"] == {0: 2.5, 1: 2.0} and again["waited"]["reshard"] == {1: 0.75}
    assert again["memory_kinds"] == {"parameters": {0: 150}} and again["rank_step_seconds"] == {0: 0.25}
    tally.opened(("c", "a", "d"))
    assert tally.figures()["waited"]["all_gather"] == {0: 2.5, 1: 2.0, 2: 4.0}, "rank 2 goes on where it was"
    assert first["waited"]["all_gather"] == {0: 1.5, 1: 2.0, 2: 4.0}, "what was given out stays as it was"


def test_utilisation_is_told_only_where_every_rank_s_device_is_known() -> None:
    tally = Tally()
    tally.opened(("a", "b"))
    tally.stepped("a", 1.0, usage(0.0, token_flops=600, peak_flops=1e6))
    assert tally.utilisation(100.0) is None, "nothing has come from b"
    tally.stepped("b", 1.0, usage(0.0, token_flops=600))
    assert tally.utilisation(100.0) is None, "b's device is not known"
    tally.stepped("b", 1.0, usage(0.0, token_flops=600, peak_flops=3e6))
    assert tally.utilisation(100.0) == pytest.approx(100.0 * 600 / 4e6)
    assert tally.utilisation(None) is None
    tally.opened(("a",))
    assert tally.utilisation(100.0) is None


def test_making_the_figures_takes_a_fiftieth_of_the_time_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    tally = Tally()
    made: list[float] = []

    def slow() -> dict[str, Any]:
        now[0] += 0.01
        made.append(now[0])
        return {}

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(tally, "_made", slow)
    for _ in range(1000):
        tally.figures()
        now[0] += 0.01
    assert len(made) == pytest.approx((now[0] - 100.0) / (51 * 0.01), abs=2)


def told(ledger: Ledger, name: str) -> dict[tuple[str, ...], float]:
    ledger._tally._due = 0.0
    ledger.publish({})
    found = [s for family in families(ledger.snapshot) for s in family.samples if s.name == name]
    return {tuple(value for key, value in sorted(s.labels.items()) if key not in ("run", "le")): s.value for s in found}


def test_the_books_count_steps_that_went_wrong_once_and_know_of_them_after_a_restart(ledger: Ledger) -> None:
    ledger.started()
    world = generation(1, 0, "a", "b", origin=Origin.FRESH)
    ledger.opened(world)
    begin = time.time()
    worst = {"loss": -math.inf, "grad_norm": math.nan}
    wrong: list[dict[str, Any]] = [{}, {"loss": math.nan}, {"grad_norm": math.inf, "skipped": True}, {"clipped": True}, worst, {}]
    for i, changes in enumerate(wrong):
        item = stepped(world, i, begin + i)
        used = usage(0.05, token_flops=6, peak_flops=1e3)
        item = replace(item, record=replace(item.record, **changes), usage=used, between={"checkpoint": 0.25})
        for worker in ("a", "b"):
            ledger.used(worker, item)
            ledger.stepped(item)
    again = Ledger(ledger.folder, tiny(ledger.folder.path.parent, "r"), "id", 1, 2)
    again.restore(world)
    for books in (ledger, again):
        assert told(books, "vescale_nonfinite_steps_total") == {(): 3}
        assert told(books, "vescale_clipped_steps_total") == {(): 1}
        assert told(books, "vescale_skipped_steps_total") == {(): 1}
        spent = {phase: seconds for phase, seconds in told(books, "vescale_phase_seconds_total").items() if seconds}
        assert spent == {("checkpoint",): 1.5, ("comm",): pytest.approx(6 * 0.15)}
        assert told(books, "vescale_model_flops_utilization_ratio") == {(): pytest.approx(192 / 0.5 * 6 / 2e3)}
    assert told(ledger, "vescale_worker_exposed_communication_seconds_total") == {
        (op, rank): pytest.approx(6 * seconds) for op, seconds in (("all_gather", 0.05), ("step_end", 0.1)) for rank in "01"
    }
    line = ledger.folder.read_metrics()[-1]
    assert line["waited_seconds"] == {"all_gather": 0.05, "step_end": 0.1} and line["memory_kinds"] == {"parameters": 100}
    assert line["waited_of_seconds"] == line["step_seconds"] == 0.5


def test_a_move_of_shards_counts_for_each_rank_and_a_checkpoint_that_was_read_as_a_load(ledger: Ledger) -> None:
    first = generation(1, 10, "a", "b", origin=Origin.CHECKPOINT)
    ledger.opened(first)
    for _ in range(2):  # told again after a restart of the controller, for example
        ledger.filled("a", Filled(first.ticket, 10, Origin.CHECKPOINT, {"sync": 0.5}))
        ledger.filled("b", Filled(first.ticket, 10, Origin.CHECKPOINT, {"sync": 2.0}))
    second = generation(2, 12, "b", "c")
    ledger.opened(second)
    for _ in range(2):
        ledger.filled("b", Filled(second.ticket, 12, Origin.MEMORY, {"sync": 0.25}))
        ledger.filled("c", Filled(second.ticket, 12, Origin.MEMORY, {"sync": 0.75}))
    assert told(ledger, "vescale_checkpoint_duration_seconds_sum")[("load", "read")] == 2.0
    assert told(ledger, "vescale_checkpoint_duration_seconds_count")[("load", "read")] == 1
    name = "vescale_worker_exposed_communication_seconds_total"
    assert told(ledger, name) == {("reshard", "0"): 0.25, ("reshard", "1"): 0.75}


def test_an_older_generation_s_word_counts_for_nothing(ledger: Ledger) -> None:
    first, second = generation(1, 0, "a", origin=Origin.FRESH), generation(2, 0, "a", origin=Origin.FRESH)
    ledger.opened(first)
    ledger.opened(second)
    late: Stepped = replace(stepped(first, 0, 10.0), usage=usage(1.0))
    ledger.used("a", late)
    assert not told(ledger, "vescale_worker_exposed_communication_seconds_total")
