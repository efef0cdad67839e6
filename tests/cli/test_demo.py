"""The demo, and a run stopped from the keyboard, as processes and through the command line alone. Slow, since each starts Ray."""

from __future__ import annotations

import json
import os
import re
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from vescale_ray.runfolder import RunFolder

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
SMALL = ["model.dim=64", "model.layers=2", "model.ffn=128", "train.slot_batch=2", "data.eval_samples=32"]

RUN = """
run: {{name: r}}
data: {{seq_len: 64}}
train: {{steps: {steps}, device: cpu}}
elastic: {{workers: 2}}
ray: {{address: local, cpus_per_worker: 0.5}}
"""

pytestmark = pytest.mark.slow


def start(folder: Path, *args: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "vescale_ray.cli", *args]
    return subprocess.Popen(command, cwd=folder, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def cli(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "vescale_ray.cli", *args], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=60
    )


def wait_for_step(run: RunFolder, step: int, process: subprocess.Popen[str], seconds: float = 240.0) -> None:
    deadline = time.monotonic() + seconds
    while not any(line["step"] >= step for line in run.read_metrics()):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, f"step {step} was not reached"
        time.sleep(0.1)


def pids(run: RunFolder) -> list[int]:
    return [int(event["pid"]) for event in run.read_events() if event["event"] == "worker_started"]


def assert_gone(processes: list[int], seconds: float = 15.0) -> None:
    """Assert that no process runs. A zombie that waits for its parent counts as gone."""
    deadline = time.monotonic() + seconds

    def runs(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
        except (FileNotFoundError, ProcessLookupError):
            return False

    while any(runs(pid) for pid in processes):
        assert time.monotonic() < deadline, f"still alive: {[pid for pid in processes if runs(pid)]}"
        time.sleep(0.1)


def finished(process: subprocess.Popen[str], seconds: float) -> tuple[int, str]:
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"not over after {seconds} s:\n{process.communicate()[0]}") from None
    return process.returncode, output


@pytest.mark.timeout(600)
def test_demo_loses_a_worker_grows_back_and_loses_no_sample(tmp_path: Path) -> None:
    process = start(tmp_path, "demo", "run.name=d", "train.steps=150", "data.eval_samples=64")
    code, output = finished(process, 580)
    assert code == 0, output
    run = RunFolder(tmp_path / "runs" / "d")
    events = run.read_events()
    shrink, grow = (event for event in events if event["event"] == "rescaled")
    assert (shrink["from"], shrink["to"], shrink["direction"]) == (3, 2, "shrink")
    assert (grow["from"], grow["to"], grow["direction"]) == (2, 3, "grow")
    assert shrink["pause_seconds"] < 20 and grow["pause_seconds"] < 20
    started = pids(run)
    assert len(started) == 4 and len(set(started)) == 4, "three workers, and one that joined: the survivors kept their processes"
    assert [line["step"] for line in run.read_metrics()] == list(range(1, 151))
    assert re.search(r"samples +lost 0, repeated 0, of 3,600 due", output)
    assert "verified, every checksum right" in output
    first, last = (event["bpb"] for event in events if event["event"] == "evaluation")
    assert 7.5 < first < 8.5 and last < 3.8
    png = run.curve_path.read_bytes()
    assert png[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">I", png[16:20])[0] >= 800
    assert "runs/d/curve.png" in output
    assert_gone(started)
    state: dict[str, Any] = run.read_state() or {}
    assert (state["state"], state["step"]) == ("DONE", 150)
    assert run.read_control() is None


@pytest.mark.timeout(600)
def test_ctrl_c_leaves_no_process_and_the_resume_loses_no_sample(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(RUN.format(steps=400))
    process = start(tmp_path, "train", "run.yaml", *SMALL)
    run = RunFolder(tmp_path / "runs" / "r")
    wait_for_step(run, 5, process)
    status = json.loads(cli(tmp_path, "status", "--json").stdout)
    assert status["alive"] is True and status["state"] == "RUNNING" and status["world"] == 2
    second = cli(tmp_path, "train", "run.yaml")
    assert second.returncode == 2 and "a run is going on here" in second.stderr
    started = [*pids(run), process.pid]
    process.send_signal(signal.SIGINT)
    code, output = finished(process, 60)
    assert code == 130, output
    hint = re.search(r"resume at step (\d+) with: vescale-ray (train \S+)", output)
    assert hint and "nothing is left running" in output, output
    assert_gone(started)
    stopped_at = int(hint[1])
    assert stopped_at >= 5 and cli(tmp_path, "status").stdout.count("STOPPED") == 1

    process = start(tmp_path, *hint[2].split(), f"train.steps={stopped_at + 10}")
    code, output = finished(process, 300)
    assert code == 0, output
    assert re.search(rf"samples +lost 0, repeated 0, of {(stopped_at + 10) * 12:,} due", output), output
    assert [line["step"] for line in run.read_metrics()] == list(range(1, stopped_at + 11))


@pytest.mark.timeout(600)
def test_a_run_is_rescaled_and_stopped_from_another_terminal(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(RUN.format(steps=100000))
    process = start(tmp_path, "train", "run.yaml", *SMALL)
    run = RunFolder(tmp_path / "runs" / "r")
    try:
        wait_for_step(run, 3, process)
        assert cli(tmp_path, "rescale", "99").returncode == 2
        done = cli(tmp_path, "rescale", "1")
        assert done.returncode == 0, done.stderr
        deadline = time.monotonic() + 60
        while run.read_metrics()[-1]["world"] != 1:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.1)
        assert cli(tmp_path, "stop").returncode == 0
        code, output = finished(process, 60)
        assert code == 0 and "stopped; resume at step" in output, output
        assert cli(tmp_path, "ckpt", "verify").returncode == 0
        assert_gone(pids(run))
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            finished(process, 60)
