"""The command line for its users: speed, exit codes, one-line errors, and commands that reach a run."""

from __future__ import annotations

import errno
import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.checkpoint_support import flip
from tests.cli.made_runs import made_run, said
from vescale_ray.cli import app, main
from vescale_ray.config import RunConfig
from vescale_ray.controller.driver import driver
from vescale_ray.controller.driver.preflight import Preflight
from vescale_ray.controller.protocol import StateSource
from vescale_ray.reporting import report
from vescale_ray.runfolder import RunFolder
from vescale_ray.workers.messages import Origin


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each test works in its own empty folder, and so has its own ./runs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


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
        (["init", "a", "--model", "m"], "No such option '--model'. (see vescale-ray init --help)"),
        (["init", "a", "--worker", "2"], "No such option '--worker'. Did you mean '--workers'? (see vescale-ray init --help)"),
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
