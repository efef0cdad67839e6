"""The live view shows the controller's figures, ends with the run, and is plain text if there is no terminal."""

from __future__ import annotations

import io
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from tests.deploy.test_alerts import full_snapshot
from vescale_ray.cli import app, client, top
from vescale_ray.controller.http.metrics import MetricsServer
from vescale_ray.controller.state.snapshot import Histogram, Snapshot
from vescale_ray.runfolder import RunFolder, RunFolderError

NOW = 1_700_000_000.0
SNAPSHOT = replace(
    full_snapshot(),
    step=30,
    steps=120,
    loss=2.5,
    tokens_per_second=12345.0,
    world=2,
    world_target=3,
    world_min=1,
    world_max=4,
    generation=7,
    rescales={("shrink", "failure"): 2, ("grow", "manual"): 1},
    step_seconds=Histogram().observe(0.25).observe(0.75),
    last_step_time=NOW - 5,
    productive_seconds=75.0,
    lost_seconds={"failure": 25.0},
    memory={0: 100 << 20, 1: 300 << 20},
    workers={0: {"worker": "w-a", "node": "n1"}, 1: {"worker": "w-b", "node": "n2"}},
    slowness={0: 1.0, 1: 3.25},
    stragglers={"w-b": {"rank": 1, "factor": 3.25, "since_step": 9, "node": "n2"}},
    flops_utilization=0.375,
    phase_seconds={"data": 10.0, "comm": 20.0, "forward_backward": 50.0, "checkpoint": 400.0},
    waited={"all_gather": {0: 3.0, 1: 1.0}, "step_end": {0: 12.0, 1: 0.0}, "reshard": {0: 99.0, 1: 99.0}},
    memory_kinds={"parameters": {0: 10 << 20, 1: 40 << 20}, "optimizer": {0: 80 << 20, 1: 80 << 20}, "padding": {0: 8, 1: 0}},
    device_memory={"peak_allocated": {0: 8 << 30, 1: 60 << 30}, "capacity": {0: 80 << 30, 1: 64 << 30}},
    checkpoint_time=NOW - 7300,
    checkpoint_step=20,
)


def drawn(snapshot: Snapshot, events: list[dict[str, object]], rows: int = 5) -> str:
    console = Console(file=io.StringIO(), width=130, force_terminal=False)
    console.print(top.picture(snapshot.to_json(), events, NOW, rows))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b" not in text, "no control characters where there is no terminal"
    return str(text)


@pytest.mark.parametrize("width", [40, 60, 80, 130])
def test_rank_table_drops_columns_as_the_terminal_narrows(width: int) -> None:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    ranks = range(1000, 1003)
    snapshot = replace(SNAPSHOT, workers={}, memory=dict.fromkeys(ranks, 300 << 20), slowness=dict.fromkeys(ranks, 3.25), slots={})
    console.print(top.picture(snapshot.to_json(), [], NOW, 5, width=width))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    table = lines[next(index for index, line in enumerate(lines) if line.startswith("╭─ ranks")) :]
    assert all(any(str(rank) in line and "3.25" in line for line in table) for rank in ranks), "\n".join(table)
    assert ("300 MiB" in "".join(table)) == ("worker" in "".join(table)) == (width > 40) and ("node" in "".join(table)) == (width > 80)


@pytest.mark.parametrize(
    ("status", "event"), [({"rescales": {"grow": None}}, {}), ({"memory": {"zero": 1}}, {}), ({}, {"event": "checkpoint_interval"})]
)
def test_top_refuses_another_versions_data_in_one_sentence(
    status: dict[str, object], event: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path / "r").create()
    folder.append_event({"event": "run_started", "time": NOW, **event})
    monkeypatch.setattr(top.client, "request", lambda *_, **__: {"run": "r", "state": "RUNNING", **status})
    with pytest.raises(RunFolderError, match=r"can't be shown \(\w+Error: .*\); is it a run of another version"):
        top.show(folder, 1.0, Console(file=io.StringIO()), once=True)


def test_top_shows_the_controllers_snapshot_and_events() -> None:
    events = [{"time": NOW - 60 * i, "event": "worker_lost", "step": i, "worker": f"w{i}", "reason": "[bold]x"} for i in range(9, 0, -1)]
    text = drawn(SNAPSHOT, events)
    for words in (
        "30 of 120",
        "2.5000",
        "12,345 tokens/s, 37.5% of the devices' peak, 0.5 s a step, last step 5 s ago",
        "25.0% of the steps' time for other ranks; of that step end 75%, all gather 25%",
        "optimizer 80 MiB, parameters 40 MiB, GPU 60.0 of 64.0 GiB",
        "2 of 3 wanted (1 to 4), generation 7, 3 rescales",
        "75.0% of 100.0 s in steps that count; lost: failure 25.0 s",
        "step 20, 2 h 1 min ago",
        "300 MiB",
        "3.25",
    ):
        assert words in text, (words, text)
    assert "w5 lost: [bold]x" in text and "w6 lost" not in text, "the newest five, and no markup"


def test_top_shows_a_pending_run_without_figures() -> None:
    text = drawn(Snapshot("r", "PENDING"), [])
    assert "PENDING" in text and "none yet" in text and "0 of 0" in text


@pytest.fixture
def run(tmp_path: Path) -> Iterator[tuple[RunFolder, MetricsServer]]:
    folder = RunFolder(tmp_path / "r").create()
    (folder.path / "config.yaml").write_text("run: {name: r}\n")
    server = MetricsServer("127.0.0.1", 0, lambda: SNAPSHOT, None, "t")
    folder.write_control(server.url(), "t")
    folder.write_state({"run": "r", "state": "RUNNING", "step": 30, "steps": 120})
    folder.append_event({"time": time.time(), "event": "run_started", "generation": 0, "step": 0})
    try:
        yield folder, server
    finally:
        server.close()


def test_top_draws_once_without_a_terminal(run: tuple[RunFolder, MetricsServer]) -> None:
    told = CliRunner().invoke(app.cli, ["top", str(run[0].path)], standalone_mode=False)
    assert told.return_value == 0 and "12,345 tokens/s" in told.output and "started" in told.output and "\x1b" not in told.output


def test_top_redraws_until_the_run_ends_and_reports_the_end(run: tuple[RunFolder, MetricsServer]) -> None:
    folder, server = run
    out = io.StringIO()

    def end_after_two_redraws() -> None:
        deadline = time.monotonic() + 60
        while out.getvalue().count("12,345 tokens/s") < 3 and time.monotonic() < deadline:
            time.sleep(0.02)
        folder.write_state({"run": "r", "state": "DONE", "step": 120, "steps": 120})
        server.close()

    threading.Thread(target=end_after_two_redraws).start()
    said = top.show(folder, 0.1, Console(file=out, force_terminal=True, width=120, height=40), once=False)
    assert "it is done, with 120 steps" in said and out.getvalue().count("12,345 tokens/s") > 2, "drawn again and again"


def test_top_says_when_the_controller_is_silent_but_driver_lives(run: tuple[RunFolder, MetricsServer]) -> None:
    """While the driver lives, the run is not over, and the message must not say that it is."""
    folder, server = run
    with folder.claim():
        server.close()
        with pytest.raises(client.RunNotAlive, match=f"does not answer now, but its driver lives .process {os.getpid()}.") as told:
            client.request(folder, "status", timeout_s=1)
        assert told.value.again
    with pytest.raises(client.RunNotAlive, match="resume it with") as told:
        client.request(folder, "status", timeout_s=1)
    assert not told.value.again
    text = io.StringIO()
    Console(file=text, width=130).print(top.picture(SNAPSHOT.to_json(), [], NOW, 5, note="its controller does not answer now"))
    assert "its controller does not answer now" in text.getvalue() and "12,345 tokens/s" in text.getvalue(), "with what was known last"


def test_top_shows_the_slowest_ranks_and_fits_narrow_terminals() -> None:
    ranks = range(1024)
    pace = {r: 1.0 + (r % 50 == 7) for r in ranks}
    workers = {r: {"worker": f"w{r}", "node": "n"} for r in ranks}
    many = replace(SNAPSHOT, memory=dict.fromkeys(ranks, 1 << 30), workers=workers, slowness=pace)
    text = drawn(replace(many, stragglers={"w900": {"rank": 900, "factor": 3.0, "since_step": 1, "node": "n"}}), [])
    assert "the slowest 32; 992 more" in text and "w900" in text and "w57 " in text and text.count("GiB") < 40
    assert len(text.splitlines()) < 60
    console = Console(file=io.StringIO(), width=40, force_terminal=False)
    console.print(top.picture(SNAPSHOT.to_json(), [], NOW, 5))
    assert max(map(len, console.file.getvalue().splitlines())) <= 40  # type: ignore[attr-defined]


def test_top_escapes_markup_and_control_characters() -> None:
    odd = replace(SNAPSHOT, workers={0: {"worker": "[/x]", "node": "[red]n"}}, error="\x1b[31mno room")
    text = drawn(odd, [{"time": NOW, "event": "warning", "step": "[/y]", "text": "[/z]"}])
    for words in ("[/x]", "[red]n", "step [/y]", "[/z]", "\\x1b[31mno room"):
        assert words in text, words


def test_top_refuses_a_run_that_is_not_alive(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "r").create()
    (folder.path / "config.yaml").write_text("run: {name: r}\n")
    with pytest.raises(client.RunNotAlive):
        top.show(folder, 0.1, Console(file=io.StringIO()), once=True)
