"""Commands about a run: status, stop, rescale and ls, with a living, dead or foreign controller."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.cli.made_runs import made_run, said
from vescale_ray.cli.pages import prometheus
from vescale_ray.controller.http.metrics import MetricsServer
from vescale_ray.controller.state.snapshot import Snapshot
from vescale_ray.errors import BadInput
from vescale_ray.runfolder import RunFolder


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each test works in its own empty folder, and so has its own ./runs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Controller:
    """A run with a live HTTP side: the real server on a snapshot, without a controller."""

    def __init__(self, run: RunFolder) -> None:
        self.commands: list[tuple[str, dict[str, Any]]] = []
        self.snapshot = Snapshot(
            run=run.path.name, state="RUNNING", step=12, steps=50, loss=2.0, bpb=2.885, world=3, generation=2, tokens_per_second=5000.0
        )
        self.server = MetricsServer("127.0.0.1", 0, lambda: self.snapshot, self.control, "tok")
        run.write_control(self.server.url(), "tok")

    def control(self, action: str, body: dict[str, Any]) -> dict[str, Any]:
        if body.get("workers", 0) > 6:
            raise BadInput(f"{body['workers']} workers are more than the 6 slots")
        self.commands.append((action, body))
        return {}


@pytest.fixture
def alive(elsewhere: Path) -> Iterator[Controller]:
    controller = Controller(made_run(elsewhere / "runs" / "live", state="RUNNING", step=10))
    yield controller
    controller.server.close()


# ------------------------------------------------------------------------------------------------------------ living runs


def test_status_shows_a_living_run(alive: Controller, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(capsys, "status")
    assert code == 0
    assert "live: RUNNING, step 12 of 50, loss 2.000 (2.88 bits/byte)" in out  # the server's figures, not run.json's
    assert "workers 3, generation 2, 5,000 tokens/s" in out and f"{alive.server.url()}/metrics" in out


def test_nan_loss_and_unknown_loss_are_shown_differently(alive: Controller, capsys: pytest.CaptureFixture[str]) -> None:
    alive.snapshot = replace(alive.snapshot, loss=float("nan"), bpb=float("nan"))
    for command in (["status"], ["top", "--once"]):
        assert "not a finite number" in said(capsys, *command)[1]
    alive.snapshot = replace(alive.snapshot, loss=None, bpb=None, tokens_per_second=None)
    for command in (["status"], ["top", "--once"]):
        assert "none yet" in said(capsys, *command)[1]


def test_status_shows_newest_checkpoint_and_chosen_interval(alive: Controller, capsys: pytest.CaptureFixture[str]) -> None:
    assert "checkpoint" not in said(capsys, "status")[1]
    alive.snapshot = replace(alive.snapshot, checkpoint_step=10, checkpoint_interval=61.0, checkpoint_interval_text="61 s (why)")
    out = said(capsys, "status")[1]
    assert "newest checkpoint: step 10" in out and "checkpoint interval: 61 s (why)" in out


def test_status_names_slow_workers_and_the_slots_that_they_do(alive: Controller, capsys: pytest.CaptureFixture[str]) -> None:
    assert "slow: " not in said(capsys, "status")[1]
    slow = {"w4": {"rank": 1, "factor": 2.96, "since_step": 7, "node": "n"}}
    alive.snapshot = replace(alive.snapshot, stragglers=slow)
    assert "slow: worker w4 (rank 1) takes 3.0 times as long for a slot as the others since step 7\n" in said(capsys, "status")[1]
    alive.snapshot = replace(alive.snapshot, slots={0: 3, 1: 1, 2: 2})
    assert "since step 7, and does 1 of 6 slots\n" in said(capsys, "status")[1]


def test_status_as_json_is_one_object(alive: Controller, capsys: pytest.CaptureFixture[str]) -> None:
    status = json.loads(said(capsys, "status", "--json", "runs/live")[1])
    assert (status["alive"], status["state"], status["step"], status["world"]) == (True, "RUNNING", 12, 3)
    assert status["folder"] == str(Path("runs/live").absolute())


def test_stop_and_rescale_reach_the_run(alive: Controller, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "rescale", "2")[0] == 0
    code, out, _ = said(capsys, "stop")
    assert code == 0 and f"vescale-ray train {Path('runs/live/config.yaml').absolute()}" in out
    assert alive.commands == [("rescale", {"workers": 2}), ("stop", {})]


def test_refused_rescale_is_bad_input_with_the_runs_reason(alive: Controller, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "rescale", "9") == (2, "", "vescale-ray: rescale to 9: 9 workers are more than the 6 slots")


def test_run_refuses_a_wrong_token_and_stop_reports_it(alive: Controller, capsys: pytest.CaptureFixture[str]) -> None:
    RunFolder("runs/live").write_control(alive.server.url(), "old")
    code, _, err = said(capsys, "stop")
    assert code == 1 and "token" in err and len(err.splitlines()) == 1


def test_status_without_a_run_name_shows_the_newest_run(alive: Controller, elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = made_run(elsewhere / "runs" / "old", state="DONE", step=50)
    os.utime(old.path / "run.json", (1, 1))
    os.utime(old.path / "config.yaml", (1, 1))
    assert "live: RUNNING" in said(capsys, "status")[1]


@pytest.mark.parametrize("command", [["stop"], ["rescale", "2"]])
@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"state": "DONE", "step": 50}, "it is done, with 50 steps"),
        ({"state": "FAILED", "step": 7}, "FAILED at step 7; resume it with `vescale-ray train {here}/runs/x/config.yaml`"),
        ({"state": "RUNNING", "step": 7}, "nothing answers, its last known state is RUNNING at step 7; resume it with"),
        ({}, "never got to its first state"),
    ],
)
def test_command_to_a_dead_run_says_so_and_how_to_resume(
    command: list[str], state: dict[str, Any], words: str, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = made_run(elsewhere / "runs" / "x", **state)
    words = words.replace("{here}", str(Path.cwd()))
    run.write_control("http://127.0.0.1:9", "t")  # the discard port, where nothing listens
    code, out, err = said(capsys, *command)
    assert code == 1 and words in err and len(err.splitlines()) == 1 and out == ""
    code, out, _ = said(capsys, "status")
    assert code == 0 and words in out
    assert json.loads(said(capsys, "status", "--json")[1])["alive"] is False


def test_status_rejects_another_runs_answer_on_a_reused_port(
    alive: Controller, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dead = made_run(elsewhere / "runs" / "dead", state="RUNNING", step=3)
    dead.write_control(alive.server.url(), "tok")
    assert "nothing answers" in said(capsys, "status", "runs/dead")[1]


def test_ls_lists_runs_with_the_newest_last(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "ls") == (0, "", "")
    for number, name in enumerate(("one", "two")):
        run = made_run(elsewhere / "runs" / name, state="DONE", step=number, started=1e9)
        for path in run.path.iterdir():
            os.utime(path, (1000 + number, 1000 + number))
    made_run(elsewhere / "runs" / "new")
    lines = said(capsys, "ls")[1].splitlines()
    assert [line.split("/")[-1] for line in lines] == ["one", "two", "new"]
    assert "DONE" in lines[0] and "1/50 steps" in lines[1] and "NEW" in lines[2]
    folders = [json.loads(line)["folder"] for line in said(capsys, "ls", "--json")[1].splitlines()]
    assert folders == [str(Path("runs", name).absolute()) for name in ("one", "two", "new")]


def test_ls_reports_a_damaged_run_and_still_lists_the_others(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b", "c"):
        made_run(elsewhere / "runs" / name, state="DONE", step=1)
    (elsewhere / "runs" / "b" / "run.json").write_text('{"step": 1')
    code, out, err = said(capsys, "ls")
    assert code == 1 and err == f"vescale-ray: {Path('runs/b/run.json').absolute()}: is not JSON; the file was changed from outside"
    assert sorted(line.split()[-1] for line in out.splitlines()) == [str(Path("runs", name).absolute()) for name in "abc"]
    assert "UNREADABLE" in out
    code, out, _ = said(capsys, "ls", "--json")
    assert code == 1 and sorted(json.loads(line)["state"] for line in out.splitlines()) == ["DONE", "DONE", "UNREADABLE"]


def test_foreign_run_json_keeps_terminal_and_json_output_clean(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = made_run(elsewhere / "runs" / "a", state="DONE", step=1)
    (run.path / "run.json").write_text('{"run": "a", "state": "\\u001b]0;x\\u0007DONE", "step": NaN, "started": 1e300}')
    code, out, _ = said(capsys, "ls")
    assert code == 0 and out.isprintable() and "\\x1b]0;x\\x07DONE" in out
    for command in (["ls", "--json"], ["status", "--json", "runs/a"]):
        code, out, _ = said(capsys, *command)
        assert code == 0 and json.loads(out, parse_constant=pytest.fail)["step"] is None


@pytest.mark.parametrize("control", ['{"url": 5}', '{"url": "foo bar", "token": "t"}', '{"url": "http://x", "token": "a\\nb"}', "{}"])
def test_an_address_that_no_run_has_written_is_bad_input(control: str, elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = made_run(elsewhere / "runs" / "x", state="RUNNING", step=3)
    (run.path / "control.json").write_text(control)
    for command in ("status", "stop", "top"):
        code, out, err = said(capsys, command)
        assert code == 2 and not out and "control.json: holds no address and token of a run; the file was changed from outside" in err


@pytest.mark.parametrize("there", ["nobody", "another run"])
def test_run_on_another_hosts_loopback_is_not_called_dead(there: str, elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run's folder is on a shared file system. Its address is this machine's loopback, where no server or another run's listens."""
    run, other = made_run(elsewhere / "runs" / "x", state="RUNNING", step=3), made_run(elsewhere / "others" / "y", state="RUNNING", step=9)
    controller = Controller(other)
    if there == "nobody":
        controller.server.close()
    control = {"url": controller.server.url(), "token": "not y's", "host": "gpu-17"}
    try:
        with run.claim():  # the driver's lock, which a network file system shows here
            (run.path / "control.json").write_text(json.dumps(control))
            code, out, _ = said(capsys, "status")
            assert code == 0 and "listens on the loopback of gpu-17 alone" in out and "metrics.host=0.0.0.0" in out
            assert "RUNNING at step 3" in out and "resume" not in out and "not alive" not in out
            assert json.loads(said(capsys, "status", "--json")[1])["alive"] is None
            for command in ("top", "stop"):
                code, out, err = said(capsys, command)
                assert code == 1 and not out and "listens on the loopback of gpu-17 alone" in err and len(err.splitlines()) == 1
        (run.path / "control.json").write_text(json.dumps({**control, "url": controller.server.url().replace("127.0.0.1", "127.0.0.1.x")}))
        assert "the run is not alive" in said(capsys, "status")[1]
        (run.path / "control.json").write_text(json.dumps(control))
        run.write_state({"run": "x", "state": "DONE", "step": 50, "steps": 50})
        assert "it is done, with 50 steps" in said(capsys, "status")[1]
    finally:
        if there != "nobody":
            controller.server.close()
    assert controller.commands == []


class Stranger(BaseHTTPRequestHandler):
    """Another program at the address of a run or of a Prometheus. The address contains its answer."""

    def do_GET(self) -> None:
        what = self.path.split("/")[1]
        self.send_response(500 if what == "500" else 200)
        if what in ("drip", "short"):
            self.send_header("Content-Length", "1000")
        self.end_headers()
        try:
            self.wfile.write({"list": b"[]", "odd": b'{"status": "success", "data": {}}', "html": b"<html>"}.get(what, b" "))
            for _ in range(200 if what == "drip" else 0):
                self.wfile.write(b" ")
                time.sleep(0.05)
        except OSError:
            pass

    do_POST = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def stranger() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Stranger)
    server.daemon_threads, server.block_on_close = True, False
    Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("what", ["500", "drip", "short", "list", "odd", "html"])
def test_foreign_server_is_reported_in_one_line_and_soon(
    what: str, stranger: str, elsewhere: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prometheus, "WAIT_S", 0.2)
    url, run, began = f"{stranger}/{what}", made_run(elsewhere / "runs" / "x", state="RUNNING", step=3), time.monotonic()
    code, out, err = said(capsys, "dash", "--prometheus", url, "--run", "x")
    assert code == 2 and not out and len(err.splitlines()) == 1 and f"--prometheus {url}" in err
    run.write_control(url, "t")
    code, out, _ = said(capsys, "status")
    assert code == 0 and ("answers HTTP 500 Internal Server Error, as no run does" if what == "500" else "nothing answers") in out
    assert time.monotonic() - began < 6
