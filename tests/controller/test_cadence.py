"""The time between checkpoints, measured and adapted."""

from __future__ import annotations

import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from tests.controller.recorded import Recorded, generation
from vescale_ray.config import CheckpointSection
from vescale_ray.controller.checkpointing.cadence import Cadence
from vescale_ray.controller.checkpointing.committer import SaveResult
from vescale_ray.controller.policy import CommittedCheckpoint
from vescale_ray.controller.protocol import Bounds
from vescale_ray.controller.scaling.scaling import Scaling


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
