"""Whole runs on a real local Ray cluster: undisturbed, with lost workers, rescaled, resumed, and with a killed controller.

The oracle of every loss curve is the undisturbed run of the first fixture. The oracle of that run, a plain PyTorch loop, is in
tests/workers. The oracle of the samples is the stream, read directly.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.controller.conftest import SECRET
from tests.controller.hanging import hang
from tests.controller.runs import STEPS, Finished, alive, carry_out, print_figures, tiny, worst_difference
from vescale_ray import checkpoint
from vescale_ray.cli import app, client
from vescale_ray.config import RunConfig
from vescale_ray.controller.driver.driver import ScheduledAction as Act
from vescale_ray.controller.protocol import TRANSITIONS, RunState
from vescale_ray.runfolder import RunFolder

pytestmark = [pytest.mark.usefixtures("ray_here"), pytest.mark.timeout(240)]
CLOSE = 1e-4
VOCAB = 300


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def undisturbed(home: Path, ray_here: None) -> Finished:
    return carry_out(tiny(home, "undisturbed", elastic_workers=2))


def nothing_left(finished: Finished) -> None:
    """Check that no worker's process, no actor and no placement group of any run is left."""
    import ray
    from ray.util.placement_group import placement_group_table

    assert not finished.left_behind
    assert {group["state"] for group in placement_group_table().values()} <= {"REMOVED"}
    # Ray Data keeps actors of its own on a cluster (`data prepare`).
    others = ("_dataset_stats_actor", "AutoscalingCoordinator")
    assert not [actor for actor in ray.util.list_named_actors(all_namespaces=True) if actor["namespace"] not in others]


@pytest.mark.slow
def test_undisturbed_run_leaves_only_a_verified_checkpoint(undisturbed: Finished) -> None:
    result = undisturbed.result
    assert (result.state, result.step, result.exit_code, result.error) == ("DONE", STEPS, 0, None)
    assert sorted(undisturbed.losses) == list(range(1, STEPS + 1))
    assert undisturbed.losses[STEPS] < 0.6 * undisturbed.losses[1]
    assert undisturbed.accounting().exact
    assert [event["step"] for event in undisturbed.of("evaluation")] == [0, STEPS]
    assert [event["step"] for event in undisturbed.of("checkpoint_saved")] == [25, 50, STEPS]
    newest = checkpoint.latest(undisturbed.config.checkpoint_root)
    assert newest is not None and newest.step == STEPS and newest.path == result.checkpoint
    assert checkpoint.verify(undisturbed.config.checkpoint_root).ok
    state = undisturbed.folder.read_state()
    assert state is not None and (state["state"], state["step"], state["finished"] is not None) == ("DONE", STEPS, True)
    assert undisturbed.folder.read_control() is None
    states_follow_the_table(undisturbed)
    nothing_left(undisturbed)


def states_follow_the_table(finished: Finished) -> None:
    moves = [(event["before"], event["state"]) for event in finished.of("state")]
    assert moves[0] == ("PENDING", "STARTING") and moves[-1][1] == "DONE"  # of a stopped run, too
    assert all(after in TRANSITIONS[RunState(before)] for before, after in moves)
    restarts = len(finished.of("controller_restarted"))  # a restarted controller goes on from RESCALING, from any state
    assert sum(moves[i][1] != moves[i + 1][0] for i in range(len(moves) - 1)) <= restarts


def time_is_accounted_for(finished: Finished) -> None:
    """Check the accounts against the lines and events of the run's folder, which other code writes."""
    state = finished.folder.read_state() or {}
    told, wall = state["goodput"], state["finished"] - state["started"]
    lost = told["lost"]
    assert abs(told["productive"] + sum(lost.values()) - wall) < 0.01 * wall, told
    lines = finished.folder.read_all_metrics()
    first: dict[int, float] = {}
    for line in lines:
        first.setdefault(line["step"], line["step_seconds"])
    assert told["productive"] == pytest.approx(sum(first.values()), rel=0.03, abs=0.3)
    again = sum(line["step_seconds"] for line in lines) - sum(first.values())
    assert lost.get("replay", 0.0) == pytest.approx(again, rel=0.03, abs=0.2)
    assert lost["startup"] == pytest.approx(lines[0]["time"] - lines[0]["step_seconds"] - state["started"], abs=0.3)
    for cause, reasons in (("failure", {"failure"}), ("rescale", {"manual", "replacement", "drain"})):
        pauses = [e["pause_seconds"] for e in finished.of("rescaled") if e["reason"] in reasons]
        assert (cause in lost) == bool(pauses)
        # Undone steps lie in the pause but count as productive, since they were not known to be lost.
        assert abs(lost.get(cause, 0.0) + (again if pauses else 0.0) - sum(pauses)) < 0.1 + 0.15 * len(pauses) + again, (told, pauses)
    (event,) = finished.of("goodput")
    assert event["productive"] == told["productive"], "told when the last step was done"


@pytest.mark.slow
@pytest.mark.fault("S9")
def test_stopped_run_resumes_with_fewer_workers_and_equal_losses(home: Path, undisturbed: Finished) -> None:
    stopped = carry_out(tiny(home, "stopped", elastic_workers=2), Act(17, "stop"))
    step = stopped.result.step
    assert stopped.result.state == "STOPPED" and stopped.result.exit_code == 0 and 17 <= step < STEPS
    newest = checkpoint.latest(stopped.config.checkpoint_root)
    assert newest is not None and newest.step == step and len(stopped.losses) == step
    state = stopped.folder.read_state()
    assert state is not None and state["state"] == "STOPPED"
    resumed = carry_out(tiny(home, "stopped", elastic_workers=1))
    assert resumed.result.state == "DONE"
    assert worst_difference(resumed.losses, undisturbed.losses) < CLOSE
    assert resumed.accounting().exact and resumed.accounting().replayed_steps == 0
    assert [e["step"] for e in resumed.of("evaluation")] == [0, STEPS], "a resumed run is not evaluated at its start"
    again = carry_out(tiny(home, "stopped", elastic_workers=1))
    assert again.result.state == "DONE" and len(again.events) == len(resumed.events), "a run that is done does nothing"
    older = checkpoint.ls(resumed.config.checkpoint_root)[-2]
    assert app.main(["ckpt", "rollback", str(resumed.folder.path), str(older.step)]) == 0
    back = carry_out(tiny(home, "stopped", elastic_workers=1))
    done_again = STEPS - older.step
    assert back.result.state == "DONE" and done_again > 0 and len(back.losses) == STEPS
    assert worst_difference(back.losses, undisturbed.losses) < CLOSE
    assert back.accounting().exact and back.accounting().replayed_steps == done_again
    state = back.folder.read_state() or {}
    told = state["goodput"]
    assert told["productive"] == 0 and told["lost"]["replay"] > 0, "what had been done before does not count again"
    assert sum(told["lost"].values()) == pytest.approx(state["finished"] - state["started"], rel=0.01)


@pytest.mark.slow
@pytest.mark.fault("S2", "S8")
def test_unwritable_checkpoint_is_an_event_and_training_goes_on(home: Path) -> None:
    """The path of the first checkpoint's object is taken, so its write fails, once. Besides, the disk takes no line at first, and
    another process has the metrics port."""
    other = socket.create_server(("127.0.0.1", 0))
    port = other.getsockname()[1]
    config = tiny(home, "unwritable", elastic_workers=1, train_steps=48, checkpoint_every=16, metrics_port=port)
    root = Path(config.checkpoint_root)
    full = [RunFolder(config.run_folder).create().path / f"{name}.jsonl" for name in ("metrics", "events", "samples")]
    for line_file in full:
        line_file.symlink_to("/dev/full")

    def watch(status: Mapping[str, Any]) -> None:
        attempt = f"{status['info']['run_id']}-g1-s16"
        if not (root / "data" / attempt).exists() and status["step"] < 16:
            (root / "data" / attempt / "r00000.safetensors").mkdir(parents=True)
            (root / "data" / attempt / "r00000.safetensors" / "in-the-way").touch()
        for line_file in full if status["step"] >= 2 else ():
            if line_file.is_symlink():
                line_file.unlink()  # there is room again

    with other:
        finished = carry_out(config, watch=watch)
    assert (finished.result.state, finished.result.step, finished.result.exit_code) == ("DONE", 48, 0), finished.result
    (failure,) = finished.of("checkpoint_failed")
    assert failure["step"] == 16 and failure["error"].startswith("rank 0: ")
    assert [event["step"] for event in finished.of("checkpoint_saved")] == [32, 48]
    assert [c.step for c in checkpoint.ls(root) if c.problem is None] == [32, 48] and checkpoint.verify(root).ok
    assert not finished.of("worker_lost", "generation_failed", "rescaled") and sorted(finished.losses) == list(range(1, 49))
    assert finished.accounting().exact
    taken, no_room = sorted(finished.result.warnings, key=lambda text: not text.startswith("metrics.port"))
    assert f"metrics.port = {port}: in use on 127.0.0.1; metrics and commands are served on port" in taken
    assert "No space left on device" in no_room and "lines wait in memory" in no_room
    assert sorted(event["text"] for event in finished.of("warning")) == sorted(finished.result.warnings), "each is told of once"
    times = [event["time"] for event in finished.events]
    assert times == sorted(times) and "run_started" in [event["event"] for event in finished.events[:3]], "written in its order"
    nothing_left(finished)


@pytest.mark.slow
def test_run_keeps_checkpoints_on_s3_and_resumes_from_there(home: Path, undisturbed: Finished) -> None:
    server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        root = f"s3://bucket/runs/on-s3?endpoint=http://{host}:{port}"
        urllib.request.urlopen(urllib.request.Request(f"http://{host}:{port}/bucket", method="PUT"), timeout=10).close()
        folder = RunFolder(home / "on-s3")
        served: list[str] = []

        def watch(status: Mapping[str, Any]) -> None:
            if status["step"] and not served:
                for page in ("metrics", "status"):
                    served.append(urllib.request.urlopen(f"{status['url']}/{page}", timeout=10).read().decode())
                served.append(folder.read_control()["token"])  # type: ignore[index]

        stopped = carry_out(tiny(home, "on-s3", elastic_workers=2, checkpoint_dir=root), Act(17, "stop"), watch=watch)
        assert stopped.result.state == "STOPPED", stopped.result
        newest = checkpoint.latest(root)
        assert newest is not None and newest.step == stopped.result.step and checkpoint.verify(root).ok
        resumed = carry_out(tiny(home, "on-s3", elastic_workers=1, checkpoint_dir=root))
        assert resumed.result.state == "DONE" and resumed.result.checkpoint == checkpoint.latest(root).path
        assert worst_difference(resumed.losses, undisturbed.losses) < CLOSE
        assert not (resumed.config.run_folder / "checkpoints").exists()
        no_secret_is_told(folder, served)
    finally:
        server.stop()
    nothing_left(resumed)


def no_secret_is_told(folder: RunFolder, served: list[str]) -> None:
    """Check that neither the storage's key nor the token for commands is in what the run serves, writes or logs, checkpoints included."""
    import ray

    *pages, token = served
    assert len(pages) == 2 and len(token) > 20
    logs = Path(ray._private.worker._global_node.get_logs_dir_path())
    texts = {str(path): path.read_bytes() for top in (folder.path, logs) for path in top.rglob("*") if path.is_file()}
    assert any("events.jsonl" in name for name in texts) and any("worker-" in name for name in texts)
    texts |= {f"page {i}": page.encode() for i, page in enumerate(pages)}
    for secret in (SECRET, token):
        assert [name for name, text in texts.items() if secret.encode() in text and not name.endswith("control.json")] == []


@pytest.mark.slow
def test_automatic_interval_saves_by_the_clock_and_says_why(home: Path, undisturbed: Finished) -> None:
    keep = {"checkpoint_auto_min_s": 0.2, "checkpoint_auto_max_s": 0.4, "checkpoint_keep_last": 3, "checkpoint_keep_best": 1}
    finished = carry_out(tiny(home, "auto", checkpoint_every="auto", **keep))
    assert finished.result.state == "DONE", finished.result
    saved = [event["step"] for event in finished.of("checkpoint_saved")]
    assert len(saved) >= 3 and saved == sorted(saved) and saved[-1] == STEPS
    assert all(event["stall_seconds"] > 0 for event in finished.of("checkpoint_saved")[:-1])
    intervals = finished.of("checkpoint_interval")
    assert intervals and all(0.2 <= event["seconds"] <= 0.4 or event["by"] == "persist" for event in intervals)
    root = finished.config.checkpoint_root
    losses = {c.step: checkpoint.open(root, c).meta["metrics"]["loss"] for c in checkpoint.ls(root)}
    # If the last checkpoint was not read back before the run ended, the three before it are still there.
    assert 3 <= len(losses) <= 5 and all(loss == finished.losses[step] for step, loss in losses.items())
    assert all(checkpoint.verify(root, c).ok for c in checkpoint.ls(root))
    assert worst_difference(finished.losses, undisturbed.losses) < CLOSE
    nothing_left(finished)


def pid_of(config: RunConfig, status: Mapping[str, Any], rank: int) -> int:
    """Process id of a rank of the world in ``status``."""
    events = RunFolder(config.run_folder).read_events()
    pids = {event["worker"]: event["pid"] for event in events if event["event"] == "worker_started"}
    return int(pids[status["workers"][str(rank)]["worker"]])


@pytest.mark.slow
@pytest.mark.fault("W2")
def test_hung_workers_are_found_named_and_ended(home: Path) -> None:
    """One worker after another hangs: in code that never returns, in such code with the interpreter's lock, and as a stopped process.

    Their sockets stay open, so the others' collectives would wait until their time limit.
    """
    factory = "tests.controller.hanging:model"
    ways = ("sleep", "lock", "stop")
    most = len(ways) + 1
    model = {"model_factory": factory, "model_units": ["body"]}
    config = tiny(home, f"hung-{most}", elastic_workers=most, train_steps=2000, checkpoint_every=0, **model)
    struck: dict[str, tuple[float, int, str]] = {}

    def watch(status: Mapping[str, Any]) -> None:
        done = len(struck)
        if status["state"] != "RUNNING" or status["world"] != most - done or status["step"] < 40 * (done + 1):
            return
        if done == len(ways):
            client.request(RunFolder(config.run_folder), "stop", {})
            return
        rank = done % (most - done)
        pid = pid_of(config, status, rank)
        struck[ways[done]] = time.time(), pid, status["workers"][str(rank)]["worker"]
        hang(pid, ways[done])

    finished = carry_out(config, watch=watch)
    print_figures("hung", finished.of("rescaled"))
    assert finished.result.state == "STOPPED", finished.result
    lost = {event["worker"]: event for event in finished.of("worker_lost")}
    told = finished.of("hang")
    for way, (when, pid, worker), event in zip(ways, struck.values(), told, strict=True):
        print(f"\n{way}: ended {lost[worker]['time'] - when:.2f} s after it hung", end="")
        assert set(event["workers"]) == {worker} and not alive(pid)
        # Within 2 s on a machine that does nothing else. The 0.5 s are for the others to come into a step, and for the test's own polling.
        assert lost[worker]["time"] - when - event["given_s"][worker] < 2.5
        text = Path(event["report"]).read_text()
        assert f"{worker}: training" in text and " <- it is hung: " in text
        if way != "stop":
            assert "hanging.py" in text.split(f"---- {worker}")[1], "the stack of the one that hangs is not there"
        else:
            assert "T (stopped)" in text
        others = [line for line in text.splitlines() if line.startswith("rank ") and "<-" not in line]
        named = re.compile(r", in (all-gather of .*|reduce-scatter of .*|gloo:.*), ([\d,]+ bytes, \d ranks|number \d+)")
        assert any(named.search(line) for line in others), text
    shrinks = [(size, size - 1, "peer") for size in range(most, 1, -1)]
    assert [(e["from"], e["to"], e["source"]) for e in finished.of("rescaled")] == shrinks
    assert finished.accounting().exact and all(e["steps_replayed"] <= 1 for e in finished.of("rescaled"))
    nothing_left(finished)


@pytest.mark.slow
def test_waiting_survivor_that_is_replaced_is_ended_early(home: Path) -> None:
    """Now and then gloo does not notice that a peer has died. Here the model's code waits instead, which no cut connection ends."""
    bound = 8
    elastic = {"elastic_workers": 4, "elastic_replace_lost": True, "elastic_collective_timeout_s": bound}
    model = {"model_factory": "tests.controller.hanging:model", "model_units": ["body"]}
    config = tiny(home, "waits", train_steps=100_000, checkpoint_every=0, **elastic, **model)
    struck: list[float] = []

    def watch(status: Mapping[str, Any]) -> None:
        if status["state"] == "RUNNING" and status["step"] >= 20 and not struck:
            hang(pid_of(config, status, 2), "wait")
            time.sleep(0.3)
            struck.append(time.time())
            os.kill(pid_of(config, status, 0), signal.SIGKILL)  # its copy is on rank 1, and that of rank 2 on rank 3
        elif struck and status["rescales"] and status["world"] == 4:
            client.request(RunFolder(config.run_folder), "stop", {})

    finished = carry_out(config, watch=watch)
    assert finished.result.state == "STOPPED", finished.result
    (event,) = finished.of("hang")
    ((worker, why),) = event["workers"].items()
    after = event["time"] - struck[0]
    first = finished.of("rescaled")[0]
    print(f"\n{why}: ended {after:.2f} s after the loss", end="")
    assert worker == finished.generations()[0][2]
    assert (first["to"], first["source"]) == (2, "peer") and first["steps_replayed"] <= 1
    assert 3.0 <= after < bound and why.startswith("waits for a rank that is gone")
    assert finished.accounting().exact
    nothing_left(finished)


@pytest.mark.slow
@pytest.mark.fault("B1")
def test_run_that_keeps_failing_reports_all_tracebacks(home: Path) -> None:
    model = {"model_factory": "tests.controller.hanging:model", "model_units": ["body"]}
    limits = {"elastic_workers": 2, "elastic_max_recoveries_without_progress": 1}
    config = tiny(home, "hopeless", train_steps=5000, checkpoint_every=0, data_eval_samples=0, **limits, **model)
    bad: list[int] = []
    seen: list[Mapping[str, Any]] = []

    def watch(status: Mapping[str, Any]) -> None:
        seen.append(status)
        if status["step"] >= 10 and not bad:
            bad.append(pid_of(config, status, 1))
            hang(bad[0], "raise again")

    finished = carry_out(config, watch=watch)
    result = finished.result
    assert result.state == "FAILED" and result.error is not None
    assert result.error.startswith("2 recoveries in a row without one more step: w"), result.error
    assert f"ZeroDivisionError: no luck in process {bad[0]}" in result.error and "it can be resumed from step" in result.error
    found = re.search(r"tracebacks and stacks of all workers: (\S+);", result.error)
    assert found, result.error
    text = Path(found[1]).read_text()
    failures = text.split("==== generation ")[1:]
    assert len(failures) == 2, "each failure once, the newest first"
    for failure in failures:
        ranks = failure.split("---- rank ")[1:3]
        assert len(ranks) == 2
        of = {"raised" if f"process {bad[0]}\n" in rank else "survived": rank for rank in ranks}
        assert "hanging.py" in of["raised"] and "in forward" in of["raised"] and "Traceback (most recent call last)" in of["raised"]
        assert "GroupFailed: " in of["survived"] and "membership.py" in of["survived"]
    now = text.split("==== now")[1:]
    assert len(now) == 2 and all("vescale-train" in one for one in now), "both still live, and stand somewhere"
    assert len(finished.of("generation_failed")) == 2 and not finished.of("worker_lost", "hang")
    assert seen[-1]["failures"].keys() <= {"error"}, "the driver may not have asked after the last one"
    newest = checkpoint.latest(config.checkpoint_root)
    assert newest is not None and newest.step == finished.result.step
    nothing_left(finished)
