"""Runs on a cluster of `ray start --block` processes.

`ray job stop` stops a job, and SIGTERM announces the end of a node, as Kubernetes and spot markets do.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.controller.hanging import SLOWLY
from tests.controller.runs import Finished, alive, parents, tiny, until
from tests.controller.soak import MODEL, start_driver
from tests.controller.started import Started, started
from vescale_ray import checkpoint
from vescale_ray.controller.driver.driver import RunResult
from vescale_ray.runfolder import RunFolder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
EVERY, STEPS, SOON_S = 40, 240, 15.0
GONE = {"SUCCEEDED", "FAILED", "STOPPED"}


class Jobs:
    """Submits one command again and again."""

    def __init__(self, cluster: Started, command: str) -> None:
        from ray.job_submission import JobSubmissionClient

        self._client: Any = JobSubmissionClient(cluster.dashboard)
        self._command = command

    def submit(self, **env: str) -> str:
        return str(self._client.submit_job(entrypoint=self._command, runtime_env={"env_vars": env}))

    def stop(self, job: str) -> None:
        assert self._client.stop_job(job)

    def status(self, job: str) -> str:
        return str(self._client.get_job_status(job).value)

    def text(self, job: str) -> str:
        return str(self._client.get_job_logs(job))

    def groups(self) -> list[str]:
        """Placement groups that hold a place or wait for one."""
        from ray.util.state import list_placement_groups

        return [group.name for group in list_placement_groups(address=self._client.get_address()) if group.state != "REMOVED"]


@pytest.mark.fault("E1", "E3")
def test_next_submission_resumes_after_a_job_stop_or_kill(
    tmp_path: Path,
) -> None:
    config = tiny(tmp_path, "job", ray_address="auto", train_steps=STEPS, checkpoint_every=EVERY, data_eval_samples=0, **MODEL)
    path = tmp_path / "job.yaml"
    path.write_text(config.to_yaml())
    folder = RunFolder(config.run_folder)

    def steps() -> int:
        return max((int(line["step"]) for line in folder.read_metrics()), default=0)

    with started(4, {SLOWLY: "0.01"}) as cluster:
        jobs = Jobs(cluster, f"vescale-ray train {path}")
        assert not cluster.of_runs()

        def reach(job: str, step: int) -> None:
            def there() -> bool:
                assert jobs.status(job) not in GONE, jobs.text(job)
                return steps() >= step

            until(there, 120, f"step {step}")

        # 1. Stop the job, with the time for a checkpoint that deploy/rayjob.yaml gives.
        first = jobs.submit(RAY_JOB_STOP_WAIT_TIME_S="60")
        reach(first, EVERY + 5)
        assert len([title for title in cluster.of_runs().values() if "ray::Worker" in title]) == 3
        before, began = steps(), time.time()
        jobs.stop(first)
        until(lambda: not any("vescale-ray" in title for title in cluster.of_runs().values()), 60, "the end of the driver")
        ended = time.time() - began
        until(lambda: jobs.status(first) == "STOPPED", 60, "the end of the job")
        took = time.time() - began
        left = until(lambda: not cluster.of_runs(), SOON_S, "the end of its processes")
        newest, state = checkpoint.latest(config.checkpoint_root), folder.read_state()
        assert newest is not None and state is not None
        stopped = newest.step
        saved = [e["time"] - began for e in folder.read_events() if e["event"] == "checkpoint_saved" and e["step"] == stopped]
        print(
            f"\n`ray job stop`: step {stopped} is kept {saved[0]:.1f} s after, the driver ends {ended:.1f} s after, the job is STOPPED "
            f"{took:.1f} s after, nothing is left {left:.1f} s later",
            end="",
        )
        assert before <= stopped == state["step"] == steps() and stopped % EVERY and state["state"] == "STOPPED"
        assert "resume" in jobs.text(first) and checkpoint.verify(config.checkpoint_root).ok
        assert not jobs.groups()

        # 2. Submit it again, and have it killed without a grace period.
        second = jobs.submit(RAY_JOB_STOP_WAIT_TIME_S="0")
        reach(second, max(stopped, 2 * EVERY) + 15)
        until(lambda: len([e for e in folder.read_events() if e["event"] == "checkpoint_saved"]) >= 3, 30, "the second checkpoint")
        jobs.stop(second)
        until(lambda: jobs.status(second) == "STOPPED", 60, "the end of the job")
        until(lambda: not cluster.of_runs(), SOON_S, "the end of its processes")
        until(lambda: not jobs.groups(), SOON_S, "the end of its places")
        newest = checkpoint.latest(config.checkpoint_root)
        assert newest is not None and newest.step % EVERY == 0 and stopped < newest.step < steps()

        # 3. Train to the end.
        third = jobs.submit()
        until(lambda: jobs.status(third) in GONE, 120, "the end of the run")
        assert jobs.status(third) == "SUCCEEDED", jobs.text(third)
        until(lambda: not cluster.of_runs() and not jobs.groups(), SOON_S, "the end of its processes")

    finished = Finished(config, RunResult("DONE", STEPS, STEPS, None, None, folder.path))
    accounting = finished.accounting()
    assert sorted(finished.losses) == list(range(1, STEPS + 1))
    assert accounting.exact and accounting.due == STEPS * config.global_batch
    generations = [(event["source"], event["step"]) for event in finished.of("generation")]
    print(f", generations {generations}, steps replayed {accounting.replayed_steps}", end="")


NOTICE_S = 20


@pytest.mark.fault("N6", "N8")
def test_sigterm_on_a_node_moves_workers_off_without_lost_steps(tmp_path: Path) -> None:
    """Training needs the node, so a replacement is awaited. `ray start --block` announces its own drain, waits for at most
    ``RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S``, and ends its node."""
    changes: dict[str, Any] = {"elastic_workers": 3, "elastic_deterministic": True, "train_steps": 1_000_000, "checkpoint_every": 0}
    changes |= {"elastic_min_workers": 3, "elastic_replace_lost": True}
    with started(0, {SLOWLY: "0.01"}) as cluster:
        leaving = cluster.add(2, RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=str(NOTICE_S))
        cluster.add(3)
        config = tiny(tmp_path, "told", ray_address=cluster.address, ray_cpus_per_worker=1.0, data_eval_samples=0, **changes, **MODEL)
        folder, output = RunFolder(config.run_folder), tmp_path / "told.txt"
        driver = start_driver(config, output)

        def events(*kinds: str) -> list[dict[str, Any]]:
            return [event for event in folder.read_events() if event["event"] in kinds]

        def steps() -> int:
            assert driver.poll() is None, output.read_text()
            return max((int(line["step"]) for line in folder.read_metrics()), default=0)

        until(lambda: steps() >= 20, 120, "step 20")
        raylet, of = cluster.raylet_of(leaving), parents()
        assert raylet is not None
        there = [event for event in events("worker_started") if of[event["pid"]] == raylet]
        (node,), theirs = {event["node"] for event in there}, [event["pid"] for event in there]
        assert 1 <= len(theirs) <= 2
        ended: list[float] = []

        def gone() -> bool:
            if not ended and not alive(raylet):
                ended.append(time.time())
            return bool(ended) and leaving.poll() is not None and bool(events("rescaled"))

        began = time.time()
        leaving.terminate()
        until(gone, NOTICE_S + 40, "the end of the node")
        (event,) = events("rescaled")
        left_at, gone_at = event["time"] - began, ended[0] - began
        assert left_at < min(gone_at, NOTICE_S), "the job goes on before the node goes"
        assert gone_at < max(left_at + 5, NOTICE_S - 2), "nothing of the run is left there that it would have to wait for"
        assert not any(alive(pid) for pid in theirs)
        at = steps()
        print(
            f"\nleft {left_at:.2f} s after SIGTERM, pause {event['pause_seconds']:.2f} s, the node went {gone_at:.1f} s after it",
            end="",
        )
        assert (event["from"], event["to"], event["source"], event["steps_replayed"]) == (3, 3, "memory", 0)
        (notice,) = events("node_draining")
        assert notice["node"] == node and 0 < notice["seconds_left"] <= NOTICE_S
        until(lambda: steps() >= at + 50, 60, "50 more steps")
        os.kill(driver.pid, signal.SIGTERM)
        driver.wait(100)
        assert not events("worker_lost", "generation_failed"), "the node that has gone took nothing along"
        finished = Finished(config, RunResult("STOPPED", 0, 0, None, None, folder.path))
        assert "STOPPED" in output.read_text() and finished.accounting().exact and finished.accounting().replayed_steps == 0
        assert len(events("checkpoint_saved")) == 2, "at once, because training can't do without the node, and at the end"
