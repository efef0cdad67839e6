"""Whole runs on a real local Ray cluster: undisturbed, with lost workers, rescaled, resumed, and with a killed controller.

The oracle of every loss curve is the undisturbed run of the first fixture. The oracle of that run, a plain PyTorch loop, is in
tests/workers. The oracle of the samples is the stream, read directly.
"""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.controller.conftest import SECRET
from tests.controller.hanging import hang
from tests.controller.runs import STEPS, Finished, alive, carry_out, parents, print_figures, tiny, until, worst_difference
from tests.workers.test_moved_bytes import common_bytes, most_kept, owned_bytes, trained
from tests.workers.tiny import plain_run
from vescale_ray import checkpoint
from vescale_ray.cli import app, client
from vescale_ray.config import RunConfig
from vescale_ray.controller.controller import controller_name
from vescale_ray.controller.driver.driver import ScheduledAction as Act
from vescale_ray.controller.protocol import NAMESPACE, TRANSITIONS, RunState
from vescale_ray.controller.worker_group.supervisor import actor_of, supervisor_name
from vescale_ray.models.llama import Llama, LlamaConfig
from vescale_ray.runfolder import RunFolder
from vescale_ray.workers.trainer import seed_of

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


@pytest.mark.slow
@pytest.mark.fault("W1")
def test_random_worker_kills_cost_no_sample_and_keep_the_losses(home: Path, undisturbed: Finished) -> None:
    seed = 20261121
    rng = random.Random(seed)
    steps = sorted(rng.sample(range(3, STEPS - 5), 3))
    kills = [Act(step, "kill", rng.randrange(5 - i)) for i, step in enumerate(steps)]
    finished = carry_out(tiny(home, "killed", elastic_workers=5), *kills)
    print_figures(f"killed (seed {seed})", finished.of("rescaled"))
    assert finished.result.state == "DONE", finished.result
    assert [(e["from"], e["to"], e["reason"], e["source"]) for e in finished.of("rescaled")] == [
        (5, 4, "failure", "peer"),
        (4, 3, "failure", "peer"),
        (3, 2, "failure", "peer"),
    ]
    assert worst_difference(finished.losses, undisturbed.losses) < CLOSE
    assert finished.accounting().exact
    # The survivors keep their processes: no process was started after the first five, and each generation is a subset of the one before.
    assert len(finished.pids) == 5
    assert [len(set(finished.generations()[i]) - set(finished.generations()[i + 1])) for i in range(3)] == [1, 1, 1]
    # At most one step is lost: the one whose copies were on their way.
    assert all(e["steps_replayed"] <= 1 for e in finished.of("rescaled"))
    time_is_accounted_for(finished)
    nothing_left(finished)


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


def write_tokens(folder: Path) -> Path:
    """Write 3.2 million tokens in three blocks, most of them their predecessor plus one. Returns the pattern of the files' names."""
    rng = np.random.default_rng(0)
    rows = ((rng.integers(0, VOCAB, (3200, 1)) + np.arange(1000) + (rng.random((3200, 1000)) < 0.1)) % VOCAB).astype(np.int32)
    column = pa.ListArray.from_arrays(np.arange(0, rows.size + 1, 1000, dtype=np.int32), rows.reshape(-1))
    pq.write_table(pa.table({"input_ids": column}), folder / "tokens.parquet", row_group_size=500)
    return folder / "*.parquet"


def initial(config: RunConfig) -> dict[tuple[str, str], np.ndarray]:
    """The parameters that every run with this configuration starts from."""
    m = config.model
    model = Llama(LlamaConfig(m.dim, m.layers, m.heads, m.kv_heads, m.ffn, VOCAB, config.data.seq_len))
    found = {}
    for name, parameter in model.named_parameters():
        full = torch.empty_like(parameter.detach())
        model.init_parameter(name, full, torch.Generator().manual_seed(seed_of(config.run.seed, name)))
        found[name, "param"] = full.numpy()
    return found


def standing(status: Mapping[str, Any]) -> int:
    """Number of standbys that can take a place."""
    import ray

    supervisor = ray.get_actor(supervisor_name(status["info"]["run_id"]), NAMESPACE)
    return sum(ray.get(supervisor.standbys.remote(), timeout=20).values())


def processes() -> list[int]:
    """Worker processes of this process' Ray, standbys included."""
    above = parents()

    def is_ours(pid: int) -> bool:
        while pid in above and pid != os.getpid():
            pid = above[pid]
        return pid == os.getpid()

    def title(pid: int) -> bytes:
        try:
            return Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return b""

    return [pid for pid in above if title(pid).startswith(b"ray::Worker") and is_ours(pid)]


@pytest.mark.fault("G4", "C1", "W1", "W17")
def test_run_rescales_and_outlives_a_controller_and_a_worker(home: Path) -> None:
    """The run trains on Parquet files. Its oracle is a plain PyTorch loop.

    A standby takes the place of the killed worker: no process is started between the kill and the first new step.
    """
    import ray

    data = {"data_corpus": str(write_tokens(home)), "data_column": "input_ids", "data_vocab": VOCAB, "data_shuffle_blocks": 2}
    elastic = {"elastic_replace_lost": True, "elastic_standby": 1}
    config = tiny(home, "rescaled", train_steps=5000, checkpoint_every=0, **data, **elastic)
    folder = RunFolder(config.run_folder)
    seen: dict[str, Any] = {"killed": False, "asked": False, "back": None, "lost": None}

    def watch(status: Mapping[str, Any]) -> None:
        if status["state"] == "RUNNING" and status["step"] >= 30 and not seen["killed"]:
            seen["killed"], seen["url"] = True, status["url"]
            ray.kill(ray.get_actor(controller_name(status["info"]["run_id"]), NAMESPACE), no_restart=False)
        elif status["info"]["controller_epoch"] == "2" and status["state"] == "RUNNING" and not seen["asked"]:
            seen["asked"], seen["back"] = True, status["url"]
            assert client.request(folder, "rescale", {"workers": 2})["workers"] == 2
            with pytest.raises(client.CommandRefused, match="more than train.slots = 6"):
                client.request(folder, "rescale", {"workers": 7})
        elif seen["asked"] and status["state"] == "RUNNING" and status["world"] == 2 and status["world_target"] == 2:
            client.request(folder, "rescale", {"workers": 3})
        elif {"shrink/manual", "grow/manual"} <= set(status["rescales"]) and not seen["lost"] and standing(status):
            seen["lost"] = status["workers"]["1"]["worker"]
            seen["ticks"] = time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK")
            seen["lost_at"] = time.time()
            os.kill(pid_of(config, status, 1), signal.SIGKILL)
        elif seen["lost"] and len(status["rescales"]) > 2 and standing(status):  # another standby has followed
            client.request(folder, "stop", {})

    finished = carry_out(config, watch=watch)
    print_figures("planned, and after the loss of a worker", finished.of("rescaled"))
    assert finished.result.state == "STOPPED", finished.result
    assert seen["asked"] and seen["url"] == seen["back"], "the restarted controller answers under the same address"
    *planned, unplanned = finished.of("rescaled")
    assert [(e["from"], e["to"], e["reason"], e["source"]) for e in planned] == [(3, 2, "manual", "memory"), (2, 3, "manual", "memory")]
    assert all(e["steps_replayed"] == 0 and e["moved_bytes"] == e["lower_bound_bytes"] for e in planned)
    assert all(e["numbered_by"] == "layouts" for e in planned), "else that bound is not the least of all numberings"
    assert [unplanned[key] for key in ("from", "to", "reason", "source")] == [3, 3, "failure", "peer"]
    assert [event["worker"] for event in finished.of("worker_lost")] == [seen["lost"]]
    first, second, third, fourth = finished.generations()
    assert set(second) < set(first) and set(second) < set(third), "the workers that stay keep their processes"
    *started, standby = finished.of("worker_started")
    assert set(fourth) == set(third) - {seen["lost"]} | {standby["worker"]}
    assert standby["born"] < seen["ticks"] and standby["time"] > seen["lost_at"], "it lived before the loss, and had no place"
    assert standby["warm_seconds"] < started[1]["warm_seconds"] and not any(one["waiting"] for one in finished.of("waiting"))
    assert finished.accounting().exact and finished.accounting().replayed_steps == unplanned["steps_replayed"] <= 1
    time_is_accounted_for(finished)  # also the time without a controller
    newest = checkpoint.latest(config.checkpoint_root)
    assert newest is not None and newest.step == finished.result.step and checkpoint.verify(config.checkpoint_root).ok
    states_follow_the_table(finished)
    losses, _, _ = plain_run(config, initial(config), len(finished.losses))
    assert worst_difference(finished.losses, dict(enumerate(losses, 1))) < CLOSE and losses[-1] < losses[0]
    (evaluation,) = finished.of("evaluation")
    assert evaluation["step"] == 0 and evaluation["loss"] == pytest.approx(plain_run(config, initial(config), 0)[2], rel=CLOSE)
    until(lambda: not processes(), 20, "the end of all workers and standbys")
    nothing_left(finished)


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
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        finished = carry_out(tiny(home, "auto", checkpoint_every="auto", metrics_port=port, **keep))
    assert finished.result.state == "DONE", finished.result
    (warning,) = finished.of("warning")
    assert f"metrics.port = {port}: in use on 127.0.0.1; metrics and commands are served on port" in warning["text"]
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


@pytest.mark.slow
def test_growth_after_a_restart_moves_the_fewest_bytes(home: Path) -> None:
    """Whole matrices: equal intervals would move more. The new controller asks a worker for the layouts."""
    import ray

    layout = trained("soap", home)
    before, after = layout.ranks[3], layout.ranks[4]
    common = [[common_bytes(one, other) for other in after] for one in before]
    least = sum(map(owned_bytes, after)) - most_kept([*common, [0] * 4])
    shape = {"model_dim": 64, "model_ffn": 176, "train_slots": 8}
    config = tiny(home, "soap", train_steps=5000, train_optimizer="soap", checkpoint_every=0, **shape)
    folder = RunFolder(config.run_folder)
    seen: set[str] = set()

    def watch(status: Mapping[str, Any]) -> None:
        if status["state"] != "RUNNING" or status["step"] < 5:
            return
        if "killed" not in seen:
            seen.add("killed")
            ray.kill(ray.get_actor(controller_name(status["info"]["run_id"]), NAMESPACE), no_restart=False)
        elif "asked" not in seen and status["info"]["controller_epoch"] == "2":
            seen.add("asked")
            client.request(folder, "rescale", {"workers": 4})
        elif "grow/manual" in status["rescales"] and "stopped" not in seen:
            seen.add("stopped")
            client.request(folder, "stop", {})

    finished = carry_out(config, watch=watch)
    (event,) = finished.of("rescaled")
    assert (event["from"], event["to"], event["source"]) == (3, 4, "memory")
    assert event["moved_bytes"] == least > 0
    assert finished.of("controller_restarted")
    nothing_left(finished)


def test_closed_supervisor_hires_no_worker() -> None:
    """The controller may be about to hire as the driver ends the run. Nothing would give that worker's place back."""
    import ray
    from ray.util.placement_group import placement_group_table

    tree = {"run": {"name": "closed"}, "elastic": {"standby": 0}, "ray": {"cpus_per_worker": 0.5, "gpus_per_worker": 0.0}}
    supervisor = actor_of(tree, "closed", ray.get_runtime_context().get_node_id(), NAMESPACE)
    ray.get(supervisor.close.remote(), timeout=30)
    with pytest.raises(ray.exceptions.RayTaskError, match="the run is over"):
        ray.get(supervisor.hire.remote(), timeout=30)
    ray.kill(supervisor)
    assert {group["state"] for group in placement_group_table().values()} <= {"REMOVED"}
