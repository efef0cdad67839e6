"""A run that is over waits for a final scrape if it has the time: none after Ctrl-C, and the grace period in a job that is stopped."""

from __future__ import annotations

import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest

from vescale_ray.controller.driver import driver
from vescale_ray.controller.http.final_scrape import FINAL_SCRAPE_S, GRACE, RESERVE_S, patience_s


@pytest.mark.parametrize(
    ("signals", "grace", "passed", "expected"),
    [
        (0, "", 0.0, FINAL_SCRAPE_S),
        (0, "3", 999.0, FINAL_SCRAPE_S),
        (1, "", 0.0, 0.0),  # Ctrl-C at a terminal
        (1, "3", 0.0, 0.0),  # Ray's default
        (1, "100", 20.0, FINAL_SCRAPE_S),
        (1, "40", 5.0, 40.0 - RESERVE_S - 5.0),
        (1, "40", 60.0, 0.0),
        (2, "100", 0.0, 0.0),
        (1, "soon", 0.0, 0.0),
        (1, "nan", 0.0, 0.0),
        (1, "inf", 0.0, 0.0),
    ],
)
def test_final_scrape_wait_depends_on_signals_and_grace(signals: int, grace: str, passed: float, expected: float) -> None:
    since = 1000.0 if signals else None
    assert patience_s(signals, since, 1000.0 + passed, {GRACE: grace} if grace else {}) == pytest.approx(expected)


class Over(driver._Attempt):
    """The end of a run that is scraped. ``told``: the answers of its controller."""

    def __init__(self, signals: driver._Signals, *told: tuple[float, int]) -> None:
        self._signals, self._told, self.asked = signals, list(told), 0
        self._supervisor: Any = SimpleNamespace(close=SimpleNamespace(remote=lambda: None))

    def _call(self, method: str, *args: Any) -> Any:
        self.asked += 1
        return self._told.pop(0) if len(self._told) > 1 else self._told[0]


def test_stopped_job_awaits_its_scrape_until_a_second_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    signals = driver._Signals()
    signals._handle(signal.SIGTERM, None)
    monkeypatch.delenv(GRACE, raising=False)
    alone = Over(signals, (20.0, 7))
    alone._final_scrape()
    assert alone.asked == 1, "a terminal's Ctrl-C waits for nobody"
    monkeypatch.setenv(GRACE, "60")
    job = Over(signals, (20.0, 7), (20.0, 7), (0.0, 8))
    began = time.monotonic()
    job._final_scrape()
    assert job.asked == 3 and time.monotonic() - began < 5, "it has come"
    with pytest.raises(KeyboardInterrupt):
        signals._handle(signal.SIGTERM, None)
    impatient = Over(signals, (20.0, 7))
    impatient._final_scrape()
    assert impatient.asked == 1
