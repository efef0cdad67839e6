"""Runs on a real local Ray cluster that are part of each test run. They share one cluster, so they are in one file."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
import torch
from ray.util.placement_group import placement_group_table

import vescale_ray
from tests.controller.hanging import VOCAB, unhurried
from tests.controller.runs import carry_out, parents, print_figures, tiny, until, worst_difference
from tests.controller.test_preparing import TEXTS
from tests.controller.test_runs_on_ray import CLOSE, nothing_left, pid_of, states_follow_the_table, time_is_accounted_for
from tests.data.sources import train_tokenizer, write_jsonl
from tests.models import hf_folders
from tests.workers.test_hf_models import plain_losses
from tests.workers.tiny import plain_run
from vescale_ray import checkpoint
from vescale_ray.cli import client, main
from vescale_ray.config import RunConfig
from vescale_ray.controller.controller import controller_name
from vescale_ray.controller.driver.local_ray import address_of
from vescale_ray.controller.driver.preparing import StorageFailed, prepare
from vescale_ray.controller.protocol import NAMESPACE
from vescale_ray.controller.worker_group.supervisor import actor_of, supervisor_name
from vescale_ray.data import preparation
from vescale_ray.data.preparation import COLUMN
from vescale_ray.runfolder import RunFolder
from vescale_ray.workers.trainer import seed_of

pytestmark = [pytest.mark.usefixtures("ray_here"), pytest.mark.timeout(240)]


def write_tokens(folder: Path, vocab: int = VOCAB) -> str:
    """Write 3.2 million tokens in three blocks, most of them their predecessor plus one. Returns the pattern of the files' names."""
    rng = np.random.default_rng(0)
    rows = ((rng.integers(0, vocab, (3200, 1)) + np.arange(1000) + (rng.random((3200, 1000)) < 0.1)) % vocab).astype(np.int32)
    column = pa.ListArray.from_arrays(np.arange(0, rows.size + 1, 1000, dtype=np.int32), rows.reshape(-1))
    pq.write_table(pa.table({"input_ids": column}), folder / "tokens.parquet", row_group_size=500)
    return str(folder / "*.parquet")


def initial(config: RunConfig) -> dict[tuple[str, str], np.ndarray]:
    """The parameters that every run with this configuration starts from."""
    model, found = unhurried(), {}
    for name, parameter in model.named_parameters():
        full = torch.empty_like(parameter.detach())
        model.init_parameter(name, full, torch.Generator().manual_seed(seed_of(config.run.seed, name)))
        found[name, "param"] = full.numpy()
    return found


def standing(status: Mapping[str, Any]) -> int:
    """Number of standbys that can take a place."""
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
def test_run_rescales_and_outlives_a_controller_and_a_worker(tmp_path: Path) -> None:
    """The run trains on Parquet files. Its oracle is a plain PyTorch loop.

    A standby takes the place of the killed worker: no process is started between the kill and the first new step.
    """
    data = {"data_corpus": write_tokens(tmp_path), "data_column": "input_ids", "data_vocab": VOCAB, "data_shuffle_blocks": 2}
    elastic = {"elastic_replace_lost": True, "elastic_standby": 1}
    model = {"model_factory": "tests.controller.hanging:unhurried", "model_units": ["layers.*"]}
    plain = tiny(tmp_path, "rescaled", train_steps=5000, checkpoint_every=0, **data, **elastic)
    config = tiny(tmp_path, "rescaled", train_steps=5000, checkpoint_every=0, **data, **elastic, **model)
    folder = RunFolder(config.run_folder)
    seen: dict[str, Any] = {"killed": False, "asked": False, "back": None, "lost": None}

    def watch(status: Mapping[str, Any]) -> None:
        if status["state"] == "RUNNING" and status["step"] >= 5 and not seen["killed"]:
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
        elif seen["lost"] and len(status["rescales"]) > 2:
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
    losses, _, _ = plain_run(plain, initial(plain), len(finished.losses))
    assert worst_difference(finished.losses, dict(enumerate(losses, 1))) < CLOSE and losses[-1] < losses[0]
    (evaluation,) = finished.of("evaluation")
    assert evaluation["step"] == 0 and evaluation["loss"] == pytest.approx(plain_run(plain, initial(plain), 0)[2], rel=CLOSE)
    until(lambda: not processes(), 20, "the end of all workers and standbys")
    nothing_left(finished)


def test_prepared_files_are_inspected_kept_and_trained_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = train_tokenizer(tmp_path / "tokenizer.json", TEXTS)
    for number in range(4):
        write_jsonl(tmp_path / f"{number}.jsonl", TEXTS[number::4])
    options = ["--tokenizer", str(tmp_path / "tokenizer.json"), "--end-token", "<|end|>", "--out", str(tmp_path / "out")]
    command = ["data", "prepare", f"{tmp_path}/?.jsonl", *options, "--shards", "3", "--workers", "2"]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert f"{tmp_path}/out: files 3 (0 kept), documents 300, tokens " in out and f"data.column={COLUMN}" in out
    files = sorted((tmp_path / "out").glob("*.parquet"))
    rows = [row for path in files for row in pq.read_table(path).column(COLUMN).to_pylist()]
    end = tokenizer.token_to_id("<|end|>")
    texts = [text for number in range(4) for text in TEXTS[number::4]]
    assert rows == [[*tokenizer.encode(text, add_special_tokens=False).ids, end] for text in texts], "as a loop in one process"

    files[1].write_bytes(files[1].read_bytes()[:-9])
    assert main([*command, "--workers", "1"]) == 0
    told = capsys.readouterr()
    assert "files 3 (2 kept), documents 300" in told.out and f"made anew: {files[1]}: its content is damaged" in told.err
    given: dict[str, Any] = {
        "corpus": f"{tmp_path}/out/*.parquet",
        "column": COLUMN,
        "tokenizer": str(tmp_path / "tokenizer.json"),
        "seq_len": 16,
    }
    assert main(["data", "inspect", given["corpus"], *(f"data.{key}={value}" for key, value in given.items() if key != "corpus")]) == 0
    assert f"files 3, documents 300, tokens {sum(map(len, rows)):,}" in capsys.readouterr().out
    transformers = pytest.importorskip("transformers")
    model = hf_folders.write(tmp_path / "model", "llama", vocab_size=304)
    changes: Any = {**{f"data_{key}": value for key, value in given.items()}, "data_vocab": 304, "model_hf": str(model)}
    config = tiny(tmp_path, "on", **changes, train_steps=2, elastic_workers=1)
    result = vescale_ray.train(config, progress=False)
    losses, plain = plain_losses(model, config, 2)
    assert result.done and result.losses["loss"] == pytest.approx(losses[-1], rel=1e-4)
    assert main(["ckpt", "export-hf", str(config.run_folder), str(tmp_path / "exported")]) == 0
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    for name, parameter in exported.named_parameters():
        torch.testing.assert_close(parameter, plain.get_parameter(name), rtol=1e-3, atol=2e-5)
    capsys.readouterr()

    # A task reports a bad source as one line.
    with (tmp_path / "3.jsonl").open("a") as file:
        file.write('{"text": 5}\n')
    assert main([*command[:-6], "--out", str(tmp_path / "new"), "--shards", "2"]) == 2
    error = capsys.readouterr().err
    assert error == f"vescale-ray: --column = text: {tmp_path}/3.jsonl: line 76: the field is not text, but int; name one that holds text\n"
    assert main([*command, "--shards", "2"]) == 2
    assert f"--out {tmp_path}/out: was begun with SOURCE = " in capsys.readouterr().err
    # A storage that does not answer is no bad input.
    data = tiny(tmp_path, "x", data_corpus=f"{tmp_path}/0.jsonl", data_tokenizer=options[1], data_end_token="0").data
    with pytest.raises(StorageFailed, match="gone: No such file or directory; the same command goes on"):
        prepare(preparation.plan(data, str(tmp_path / "gone")), 1, lambda one: None)


def test_connected_process_uses_its_ray_whatever_the_file_says(tmp_path: Path) -> None:
    assert address_of(tiny(tmp_path, "x", ray_address="local")) == ray.get_runtime_context().gcs_address


def test_closed_supervisor_hires_no_worker() -> None:
    """The controller may be about to hire as the driver ends the run. Nothing would give that worker's place back."""
    tree = {"run": {"name": "closed"}, "elastic": {"standby": 0}, "ray": {"cpus_per_worker": 0.5, "gpus_per_worker": 0.0}}
    supervisor = actor_of(tree, "closed", ray.get_runtime_context().get_node_id(), NAMESPACE)
    ray.get(supervisor.close.remote(), timeout=30)
    with pytest.raises(ray.exceptions.RayTaskError, match="the run is over"):
        ray.get(supervisor.hire.remote(), timeout=30)
    ray.kill(supervisor)
    assert {group["state"] for group in placement_group_table().values()} <= {"REMOVED"}
