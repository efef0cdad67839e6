"""`ray job submit --working-dir DIR -- vescale-ray train run.yaml` and `ray job stop`, as documented, on a `ray start` cluster.

Other things that can happen to a job are tested in test_started_cluster.py, which takes minutes.
"""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.controller.hanging import SLOWLY
from tests.controller.runs import Finished, tiny, until, write_text
from tests.controller.started import Started, started
from vescale_ray import checkpoint
from vescale_ray.controller.driver.driver import RunResult
from vescale_ray.runfolder import RunFolder

STEPS = 40
NOT_YET = "No available agent", "Remote end closed connection", "Failed to connect to Ray at address"
"""On a busy machine, the head answers before its agent does, and drops connections of commands that wait for the processor."""


def ray_job(cluster: Started, *words: str) -> str:
    """Run a `ray job` command, and return its output."""
    for _ in range(10):
        done = subprocess.run(["ray", "job", *words], env=cluster.env(), capture_output=True, text=True, timeout=120)
        if cluster.head.poll() is not None or not any(text in done.stdout + done.stderr for text in NOT_YET):
            break
        time.sleep(2.0)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}\n{cluster.logs()}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_submitted_folder_stops_and_resumes_to_its_end(tmp_path: Path) -> None:
    from ray.job_submission import JobSubmissionClient

    # Model and configuration are only in the folder, and nowhere on the Python path of the cluster's processes.
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "mine.py").write_text("from tests.controller.hanging import model as made\n\ndef model():\n    return made()\n")
    config = tiny(
        tmp_path,
        "submitted",
        ray_address="auto",
        train_steps=STEPS,
        elastic_workers=2,
        checkpoint_every=1000,
        data_corpus=str(write_text(tmp_path)),
        data_eval_samples=0,
        model_factory="mine:model",
        model_units=["body"],
    )
    (folder / "run.yaml").write_text(yaml.safe_dump(yaml.safe_load(config.to_yaml())))
    run = RunFolder(config.run_folder)

    def submitted(job: str, slowly: str, *overrides: str) -> tuple[str, ...]:
        env = json.dumps({"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "60", SLOWLY: slowly}})
        how = ("--no-wait", "--working-dir", str(folder), "--runtime-env-json", env, "--submission-id", job)
        return ("submit", *how, "--", "vescale-ray", "train", "run.yaml", *overrides)

    def steps() -> int:
        return max((int(line["step"]) for line in run.read_metrics()), default=0)

    with started(3) as cluster:
        client: Any = JobSubmissionClient(cluster.dashboard)

        def status(job: str) -> str:
            return str(client.get_job_status(job).value)

        def ended(job: str) -> bool:
            return bool(client.get_job_status(job).is_terminal())

        def under_way() -> bool:
            assert not ended("first"), client.get_job_logs("first")
            return steps() >= 5

        # A relative folder would be in the package of this one submission, and its checkpoints with it.
        ray_job(cluster, *submitted("relative", "0", "run.dir=runs"))
        until(lambda: ended("relative"), 90, "the refusal")
        said = client.get_job_logs("relative")
        assert status("relative") == "FAILED" and "run.dir = runs: /" in said and "/_ray_pkg_" in said, said
        assert "lies in the package that Ray has unpacked for this job" in said and "give an absolute path" in said
        packages = list(Path(cluster.folder).glob("session_*/runtime_resources/working_dir_files/_ray_pkg_*"))
        assert packages and not any((package / "runs").exists() for package in packages)

        ray_job(cluster, *submitted("first", "0.4"))  # `ray job stop` itself takes seconds to start: steps are left by then
        until(under_way, 90, "some steps")
        ray_job(cluster, "stop", "--no-wait", "first")
        until(lambda: ended("first"), 60, "the end of the job")
        assert status("first") == "STOPPED", client.get_job_logs("first")
        text, state, kept = client.get_job_logs("first"), run.read_state(), checkpoint.latest(config.checkpoint_root)
        assert state is not None and state["state"] == "STOPPED" and kept is not None, text
        assert 5 <= kept.step == state["step"] == steps() < STEPS, "a checkpoint of the very step at which it was stopped"
        controls = {character for character in text if ord(character) < 32} - {"\n", "\t"}  # tabs are Ray's own
        assert "resume" in text and not controls, "what moves a terminal's cursor does not belong into a log"

        ray_job(cluster, *submitted("last", "0"))
        until(lambda: ended("last"), 180, "the end of the run")
        assert status("last") == "SUCCEEDED", client.get_job_logs("last")
        until(lambda: not cluster.of_runs(), 15, "the end of its processes")

    finished = Finished(config, RunResult("DONE", STEPS, STEPS, None, None, run.path))
    accounting = finished.accounting()
    assert sorted(finished.losses) == list(range(1, STEPS + 1)) and accounting.exact and accounting.replayed_steps == 0
    assert [(e["source"], e["step"]) for e in finished.of("generation")] == [("fresh", 0), ("checkpoint", kept.step)]
