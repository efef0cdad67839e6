"""The command line for its users: speed, exit codes, one-line errors, and commands that reach a run."""

from __future__ import annotations

import errno
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.checkpoint.checkpoint_support import flip
from vescale_ray.cli import app, main
from vescale_ray.cli.pages import prometheus
from vescale_ray.config import RunConfig
from vescale_ray.controller.driver import driver
from vescale_ray.controller.driver.preflight import Preflight
from vescale_ray.controller.http.metrics import MetricsServer
from vescale_ray.controller.protocol import StateSource
from vescale_ray.controller.state.snapshot import Snapshot
from vescale_ray.errors import BadInput
from vescale_ray.reporting import report
from vescale_ray.runfolder import RunFolder
from vescale_ray.workers.messages import Origin


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each test works in its own empty folder, and so has its own ./runs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def made_run(folder: Path, **state: Any) -> RunFolder:
    run = RunFolder(folder).create()
    run.write_config("train: {steps: 50}\n")
    if state:
        run.write_state({"run": folder.name, "steps": 50, **state})
    return run


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


def said(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = main(args)
    out = capsys.readouterr()
    return code, out.out.strip(), out.err.strip()


# ------------------------------------------------------------------------------------------------------------------ start


def test_help_takes_less_than_three_tenths_of_a_second() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(app.__file__).parents[1])}
    wall, cpu = [], []
    for _ in range(7):
        begin, spent = time.perf_counter(), os.times()
        done = subprocess.run(
            [sys.executable, "-m", "vescale_ray.cli", "--help"], capture_output=True, env=environment, timeout=120, check=True
        )
        wall.append(time.perf_counter() - begin)
        now = os.times()
        cpu.append(now.children_user + now.children_system - spent.children_user - spent.children_system)
    assert b"rescale" in done.stdout
    # On a busy machine only the processor time shows what the command itself takes.
    assert statistics.median(wall) < 0.3 or statistics.median(cpu) < 0.25, (wall, cpu)


def test_help_imports_no_torch_ray_numpy_or_pydantic() -> None:
    code = (
        "import sys; from vescale_ray.cli import main; main(['train', '--help'])\n"
        "print([m for m in sys.modules if m in ('torch', 'ray', 'numpy', 'pydantic')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(app.__file__).parents[1], timeout=120, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    "command",
    [[], *([word] for word in ("train", "demo", "status", "stop", "rescale", "ls", "ckpt", "k8s"))]
    + [["ckpt", "ls"], ["ckpt", "verify"], ["k8s", "render"]],
)
def test_every_command_has_help(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(capsys, *command, "--help")
    assert code == 0 and out.startswith("Usage: vescale-ray")


def test_version_option_prints_the_package_version(capsys: pytest.CaptureFixture[str]) -> None:
    import vescale_ray

    assert said(capsys, "--version")[1].endswith(vescale_ray.__version__)


# -------------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["trian"], "did you mean train?"),
        (["resume", "runs/a"], "no such command resume: did you mean train?"),
        (["run.yaml"], "no such command run.yaml: did you mean train?"),
        (["ckpt", "merge", "runs/a"], "no such command merge: did you mean export-hf?"),
        (
            ["train", "run.yaml", "--train.lr", "1e-4"],
            "no such option --train.lr: keys are not options; write train.lr=VALUE behind the file",
        ),
        (["plan", "run.yaml", "--learning_rate=1"], "no such option --learning_rate: keys are not options; write train.lr=VALUE"),
        (["--nope"], "--nope"),
        (["train"], "Missing argument"),
        (["train", "none.yaml"], "none.yaml: no such file"),
        (["train", "train.steps=3"], "give the run's YAML file first"),
        (["train", "run.yaml", "train.setps=3"], "unknown key train.setps: did you mean train.steps?"),
        (["train", "typo.yaml"], "unknown key train.setps: did you mean train.steps?"),
        (["train", "run.yaml", "train.steps=0"], "train.steps = 0: give at least 1"),
        (["train", "run.yaml", "train.steps=-5"], "train.steps = -5: give at least 1"),
        (["train", "run.yaml", "data.seq_len=0"], "data.seq_len = 0: give at least 1"),
        (["train", "run.yaml", "elastic.workers=7"], "elastic.workers = 7 is more than train.slots = 6"),
        (["train", "run.yaml", "run.dir=file"], "can't be written"),
        (["demo", "train.setps=3"], "did you mean train.steps?"),
        (["rescale", "0"], "0 is not in the range"),
        (["rescale", "two"], "two"),
        (["status"], "runs: holds no run"),
        (["status", "nowhere"], "nowhere: is not a run's folder"),
        (["stop"], "holds no run"),
        (["rescale", "2"], "holds no run"),
        (["top", "--interval", "nan"], "--interval nan: give seconds, less than a day"),
        (["top", "--interval", "inf"], "--interval inf: give seconds"),
        (["ls", "nowhere"], "nowhere: no such folder"),
        (["ckpt", "ls", "nowhere"], "no such folder of checkpoints"),
        (["ckpt", "verify"], "holds no run"),
    ],
)
def test_bad_input_is_one_line_on_stderr_and_exit_code_2(args: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.yaml").write_text("train: {steps: 3}\n")
    Path("typo.yaml").write_text("train: {setps: 3}\n")
    Path("file").write_text("")
    code, out, err = said(capsys, *args)
    assert code == 2, err
    assert words in err and len(err.splitlines()) == 1 and out == ""
    assert not Path("runs").exists(), "something was made before the input was checked"


def test_traceback_needs_debug_flag_at_any_position(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Traceback" not in said(capsys, "train", "none.yaml")[2]
    assert "Traceback" in said(capsys, "--debug", "train", "none.yaml")[2]
    assert "Traceback" in said(capsys, "train", "none.yaml", "--debug")[2]


def test_unexpected_error_is_one_line_with_its_type_and_a_hint(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("by\nzero")

    monkeypatch.setattr("vescale_ray.runfolder.newest_run", broken)
    code, _, err = said(capsys, "status")
    assert (code, err) == (1, "vescale-ray: ZeroDivisionError: by zero (--debug shows the traceback)")


def test_checkpoint_mismatch_counts_as_bad_input() -> None:
    class CheckpointMismatch(Exception):
        pass

    assert app._is_bad_input(CheckpointMismatch("other model"))
    assert not app._is_bad_input(RuntimeError())


def test_ctrl_c_is_exit_code_130(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("vescale_ray.runfolder.newest_run", interrupted)
    assert said(capsys, "status")[0] == 130


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


def test_one_folder_takes_one_run_at_a_time(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.yaml").write_text("run: {name: x}\ntrain: {steps: 3}\n")
    with RunFolder("runs/x").create().claim():
        code, _, err = said(capsys, "train", "run.yaml")
    assert code == 2 and "a run is going on here" in err
    assert not Path("runs/x/config.yaml").exists()


# ------------------------------------------------------------------------------------------------------------ checkpoints


def saved(root: Path, step: int) -> None:
    """A real checkpoint of one tensor, by one rank."""
    import torch

    from vescale_ray import checkpoint
    from vescale_ray.checkpoint import ShardPiece, new_attempt, write_shard

    attempt = new_attempt()
    data = torch.arange(6000, dtype=torch.float32)
    piece = ShardPiece("w", "param", 0, 6000, (60, 100), torch.float32, data)
    vote = write_shard(root, attempt, 0, [piece], step=step, epoch=1)
    checkpoint.commit(root, [vote], step=step, epoch=1, attempt=attempt, world=1, meta={})


def test_ckpt_ls_lists_and_verify_names_damage(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = made_run(elsewhere / "runs" / "x", state="DONE", step=20)
    for step in (10, 20):
        saved(run.checkpoints, step)
    lines = said(capsys, "ckpt", "ls")[1].splitlines()
    assert len(lines) == 2 and "step 10" in lines[0] and "step 20" in lines[1]
    assert [json.loads(line)["step"] for line in said(capsys, "ckpt", "ls", "--json", "runs/x")[1].splitlines()] == [10, 20]
    code, out, _ = said(capsys, "ckpt", "verify", "runs/x/checkpoints")
    assert code == 0 and "every checksum right" in out
    commit = next((run.checkpoints / "commits").glob("*20.json")).read_text()  # by name, because both may have the same time
    newest = next(path for path in run.checkpoints.rglob("*.safetensors") if path.parent.name in commit)
    newest.chmod(0o644)
    flip(newest, -100)
    code, _, err = said(capsys, "ckpt", "verify")
    assert code == 1 and "damaged" in err and "w" in err and len(err.splitlines()) == 1


def test_folder_without_checkpoints_lists_none_and_fails_verify(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (elsewhere / "empty").mkdir()
    code, out, _ = said(capsys, "ckpt", "ls", "empty")
    assert code == 0 and "no committed checkpoint" in out
    code, _, err = said(capsys, "ckpt", "verify", "empty")
    assert code == 1 and len(err.splitlines()) == 1


# ------------------------------------------------------------------------------- bad input that is found before Ray starts


def connected() -> bool:
    """True if Ray is initialized in this process, by another test for example."""
    return "ray" in sys.modules and sys.modules["ray"].is_initialized()


def refused(capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    before = connected()
    Path("run.yaml").write_text("run: {name: x}\ntrain: {steps: 3, device: cpu}\nray: {address: local}\n")
    code, out, err = said(capsys, "train", "run.yaml", *overrides)
    assert code == 2 and len(err.splitlines()) == 1 and not out, (out, err)
    assert connected() == before
    return err


def test_a_corpus_that_is_empty_or_missing_is_refused(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (elsewhere / "empty").mkdir()
    assert "is empty; give a file or folder that holds text" in refused(capsys, "data.corpus=empty")
    assert "no such file or folder" in refused(capsys, "data.corpus=missing")
    assert "data.corpus = /dev/zero: is neither a file nor a folder; give stdlib, or" in refused(capsys, "data.corpus=/dev/zero")
    assert not (elsewhere / "runs").exists(), "nothing was made"


def test_a_cluster_that_does_not_answer_is_refused_soon(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ray's own client would retry for a quarter of an hour."""
    began = time.monotonic()
    for address in ("127.0.0.1:9", "[::1]:9", "no-such-host.invalid:6379", "127.0.0.1:99999"):
        assert f"ray.address = {address}: no cluster answers there" in refused(capsys, f"ray.address={address}")
    assert not (elsewhere / "runs").exists() and time.monotonic() - began < 40


def test_an_output_folder_that_can_not_be_written_is_refused(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (elsewhere / "file").write_text("")
    assert "can't be written" in refused(capsys, "run.dir=file/runs")
    assert "can't be written" in refused(capsys, "checkpoint.dir=file/checkpoints")
    assert not (elsewhere / "runs" / "x").exists(), "what was made for a run that did not begin is gone"
    kept = elsewhere / "runs" / "x" / "notes.txt"
    kept.parent.mkdir()
    kept.write_text("mine")
    refused(capsys, "checkpoint.dir=file/checkpoints")
    assert kept.read_text() == "mine"


def test_other_models_checkpoint_is_refused_and_config_stays(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = made_run(elsewhere / "runs" / "x", state="STOPPED", step=2)
    before = run.config_path.read_text()
    saved(run.checkpoints, 2)
    assert "is of another model" in refused(capsys)
    assert run.config_path.read_text() == before
    assert "is of another model" in refused(capsys, "run.name=y", f"checkpoint.dir={run.checkpoints}")
    assert not (elsewhere / "runs" / "y" / "config.yaml").exists()


@pytest.mark.parametrize(("state", "code"), [("DONE", 0), ("STOPPED", 0), ("FAILED", 1)])
def test_full_disk_under_the_job_log_keeps_run_and_exit_code(state: str, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk must neither stop the start of the run nor change its exit code.

    By a wrong exit code Ray and Kubernetes would restart a run that is done.
    """
    began: list[str] = []

    def carried_out(config: RunConfig, **given: Any) -> driver.RunResult:
        given["on_ready"](Preflight(config, StateSource(Origin.FRESH, 0), 1, {}, warnings=("a folder",)))
        began.append(config.run.name)
        return driver.RunResult(state, 3, 3, "no workers" if state == "FAILED" else None, None, config.run_folder, warnings=("a port",))

    monkeypatch.setattr(driver, "run", carried_out)
    Path("run.yaml").write_text("run: {name: x}\ntrain: {steps: 3, device: cpu}\nray: {address: local}\n")
    with suppress(OSError), open("/dev/full", "w") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        patch.setattr(sys, "stderr", full)
        ended = main(["train", "run.yaml"])
    assert ended == code and began == ["x"]


def test_finished_run_exits_0_when_its_report_fails(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def carried_out(config: RunConfig, **given: Any) -> driver.RunResult:
        RunFolder(config.run_folder).append_metrics({"step": 3, "loss": 2.0})
        return driver.RunResult("DONE", 3, 3, None, None, config.run_folder)

    def full(folder: RunFolder) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(driver, "run", carried_out)
    monkeypatch.setattr(report, "draw", full)
    monkeypatch.setattr(report, "summarize", full)
    Path("run.yaml").write_text("run: {name: x}\ntrain: {steps: 3, device: cpu}\nray: {address: local}\n")
    code, out, err = said(capsys, "train", "run.yaml")
    assert code == 0 and "samples" not in out
    assert err.splitlines() == [
        "vescale-ray: warning: no picture: No space left on device",
        "vescale-ray: warning: all 3 steps are done, but there is no report: No space left on device",
    ]
