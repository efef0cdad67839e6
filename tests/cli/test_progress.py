"""Output while a run goes on, and the demo's events, on a run folder that the test writes."""

from __future__ import annotations

import errno
import io
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vescale_ray.cli.demo import demo_config, demo_schedule, shortcomings
from vescale_ray.config import ConfigError
from vescale_ray.reporting.progress import Progress
from vescale_ray.reporting.report import Accounting, Summary
from vescale_ray.runfolder import RunFolder


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run").create()


def step(run: RunFolder, number: int, world: int = 3) -> None:
    run.append_metrics({"step": number, "loss": 2.5, "bpb": 3.607, "tokens_per_second": 1234.0, "world": world})


def wait_for(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen"
        time.sleep(0.01)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_control_characters_in_errors_are_escaped_on_one_line(run: RunFolder) -> None:
    nasty = "\x1b[31mRuntimeError\x1b[0m: a\r\nb\x07 \u202egnp.exe"
    out = io.StringIO()
    with Progress(run, 200, 3600.0, out):
        run.append_event({"event": "worker_lost", "step": 3, "worker": "w\x1b]0;t\x07", "reason": nasty})
        run.append_event({"event": "run_failed", "step": 3, "error": nasty})
        run.append_event({"event": "warning", "text": nasty})
    lines = out.getvalue().splitlines()
    assert len(lines) == 3 and all(line.isprintable() for line in lines), lines
    assert "failed: \\x1b[31mRuntimeError\\x1b[0m: a b\\x07 \\u202egnp.exe" in lines[1], "nothing is hidden"


def test_log_has_one_line_per_interval_event_and_last_step(run: RunFolder) -> None:
    step(run, 1)
    out = io.StringIO()
    with Progress(run, 200, 3600.0, out):
        step(run, 2)
        wait_for(lambda: "step   2/200" in out.getvalue())
        run.append_event(
            {
                "event": "rescaled",
                "step": 3,
                "from": 3,
                "to": 2,
                "reason": "failure",
                "source": "peer",
                "pause_seconds": 1.5,
                "steps_replayed": 0,
                "moved_bytes": 72_400_000,
                "lower_bound_bytes": 71_900_000,
            }
        )
        run.append_event({"event": "state", "before": "RUNNING", "state": "RESCALING"})
        for number in range(3, 9):
            step(run, number, 2)
    lines = out.getvalue().splitlines()
    assert lines[0] == "step   2/200  loss 2.500 (3.61 bits/byte)  1,234 tokens/s  3 workers"
    assert "step 3: 3 -> 2 workers (failure), state from peer, 72.4 MB moved of at least 71.9, paused 1.50 s" in lines[1]
    assert lines[2] == "step   8/200  loss 2.500 (3.61 bits/byte)  1,234 tokens/s  2 workers"
    assert len(lines) == 3 and "\x1b" not in out.getvalue() and "\r" not in out.getvalue()


def test_progress_omits_steps_from_before_it_started(run: RunFolder) -> None:
    step(run, 1)
    run.append_event({"event": "run_started"})
    out = io.StringIO()
    with Progress(run, 200, 0.1, out):
        pass
    assert out.getvalue() == ""


def test_an_event_before_the_state_is_loaded_shows_no_step(run: RunFolder) -> None:
    out = io.StringIO()
    with Progress(run, 200, 0.1, out):
        run.append_event({"event": "run_started", "step": 0})
        run.append_event({"event": "rolled_back", "step": 7, "from": 9})
    assert "] started\n" in out.getvalue() and "] step 7: rolled back" in out.getvalue()


def test_terminal_shows_a_live_line_with_events_above_it(run: RunFolder) -> None:
    out = Terminal()
    with Progress(run, 200, 1.0, out):
        step(run, 7)
        run.append_event({"event": "worker_lost", "worker": "w2", "reason": "died", "step": 7})
        wait_for(lambda: "worker w2 lost: died" in out.getvalue())
    assert "7/200" in out.getvalue()


def test_closed_output_does_not_end_the_run(run: RunFolder) -> None:
    out = io.StringIO()
    with Progress(run, 200, 0.01, out):
        out.close()
        step(run, 1)
        time.sleep(0.3)


class FullDisk(io.StringIO):
    """A file on a full disk; writes fail until ``room`` is set."""

    room = False

    def write(self, text: str) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(text)


def test_a_log_on_a_full_disk_goes_on_when_there_is_room_again(run: RunFolder) -> None:
    out = FullDisk()
    with Progress(run, 200, 0.01, out):
        step(run, 1)
        run.append_event({"event": "warning", "step": 1, "text": "not to be written"})
        time.sleep(0.3)
        out.room = True
        step(run, 2)
        wait_for(lambda: "step   2/200" in out.getvalue())


def test_null_loss_is_shown_as_not_a_finite_number(run: RunFolder) -> None:
    out = io.StringIO()
    with Progress(run, 10, 0.01, out):
        run.append_metrics({"step": 1, "loss": None, "tokens_per_second": 5.0, "world": 3})
    assert "loss not a finite number" in out.getvalue()


# ------------------------------------------------------------------------------------------------------------------- demo


def test_each_demo_is_a_run_of_its_own_unless_it_is_named() -> None:
    assert demo_config().run.name.startswith("demo-2")
    assert demo_config(["run.name=mine", "train.steps=9"]).run.name == "mine"
    with pytest.raises(ConfigError, match=r"did you mean train\.steps"):
        demo_config(["train.setps=5"])


def test_the_demo_never_joins_a_cluster_that_others_use() -> None:
    assert demo_config().ray.address == "local"


@pytest.mark.parametrize("override", ["elastic.workers=1", "elastic.min_workers=3", "train.steps=5"])
def test_a_demo_with_nothing_to_show_is_refused(override: str) -> None:
    with pytest.raises(ConfigError, match="the demo needs"):
        demo_config([override])


@pytest.mark.parametrize("steps", [6, 7, 8, 30, 200])
def test_demo_schedule_kills_at_a_third_and_grows_at_two_thirds(steps: int) -> None:
    kill, grow = demo_schedule(demo_config([f"train.steps={steps}"]))
    assert (kill.action, kill.value, grow.action, grow.value) == ("kill", 2, "rescale", 3)
    assert abs(kill.step - steps / 3) < 1 and abs(grow.step - 2 * steps / 3) < 2
    assert 0 < kill.step < grow.step < steps - 1


GOOD = Summary(
    run="r",
    state="DONE",
    error=None,
    steps=9,
    steps_done=9,
    loss_first=5.0,
    loss_last=2.0,
    heldout=((0, 7.9), (9, 3.0)),
    tokens=1,
    tokens_per_second=1.0,
    events=(),
    processes=(),
    accounting=Accounting(9, 0, 0, 0),
    goodput=None,
    checkpoint="/c",
    checkpoint_problems=(),
)
CHANGES = [{"event": "rescaled", "direction": "shrink"}, {"event": "x"}, {"event": "rescaled", "direction": "grow"}]


@pytest.mark.parametrize(
    ("change", "changes", "words"),
    [
        ({}, CHANGES, []),
        ({"accounting": Accounting(9, 1, 0, 0)}, CHANGES, ["lost or repeated"]),
        ({"accounting": Accounting(9, 0, 1, 0)}, CHANGES, ["lost or repeated"]),
        ({"accounting": None}, CHANGES, ["lost or repeated"]),
        ({"checkpoint": None}, CHANGES, ["no sound checkpoint"]),
        ({"checkpoint_problems": ("bad",)}, CHANGES, ["no sound checkpoint"]),
        ({"heldout": ((0, 7.9), (9, 7.9))}, CHANGES, ["did not fall"]),
        ({}, [], ["did: neither"]),
        ({}, CHANGES[:1], ["did: shrink"]),
    ],
)
def test_demo_reports_each_shortcoming(change: dict[str, Any], changes: list[dict[str, Any]], words: list[str]) -> None:
    told = shortcomings(replace(GOOD, **change), changes)
    assert len(told) == len(words) and all(word in text for word, text in zip(words, told, strict=True))
