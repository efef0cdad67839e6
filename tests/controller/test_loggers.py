"""TensorBoard and W&B beside metrics.jsonl: read by TensorBoard's own reader, and from the files that `wandb sync` sends."""

from __future__ import annotations

import json
import struct
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from tests.controller.recorded import Recorded
from tests.controller.runs import tiny
from vescale_ray.config import RunConfig
from vescale_ray.controller.protocol import StateSource
from vescale_ray.controller.state import loggers
from vescale_ray.workers.messages import Origin, StepRecord


def trained(run: Recorded, steps: range, offset: float = 0.0, generation: int = 1) -> None:
    """Record steps whose loss is their number, plus ``offset``."""
    for step in steps:
        record = StepRecord(step - 1, step + offset, 192, (), 1.0, 1e-3, 0.5, 0, 3, generation, (5, 5, 5))
        line = {"step": step, "loss": step + offset, "lr": 1e-3, "grad_norm": float("nan"), "clipped": True, "generation": generation}
        groups = {"phase_seconds": {"comm": 0.25}, "data": {"waiting_tokens": 9}, "memory": {0: 5}}
        run.log.record_step({**line, "time": 1e9 + step, "world": 3, **groups}, record)


def evaluated(run: Recorded, step: int) -> None:
    run.log.record("evaluation", loss=step / 10, bpb=1.0, samples=13, sets={"wiki": {"loss": 1.0, "perplexity": 2.7}}, step=step)


def ended(run: Recorded) -> list[str]:
    run.log.close(20.0, 5.0)
    return [event["text"] for event in run.folder.read_events() if event["event"] == "warning"]


def a_run_that_goes_back(config: RunConfig) -> None:
    """Eight steps, of which a rollback repeats three; then a start from the checkpoint of step 5, which goes on to step 9."""
    first = Recorded(config)
    evaluated(first, 0)
    trained(first, range(1, 9))
    evaluated(first, 4)
    trained(first, range(6, 11), offset=0.5, generation=2)
    assert not ended(first)
    second = Recorded(config, "r2", StateSource(Origin.CHECKPOINT, 5), steps_before=10)
    trained(second, range(6, 13), offset=0.25)
    assert not ended(second)


def curve(folder: Path, tag: str) -> list[tuple[int, float]]:
    """What TensorBoard shows."""
    read = EventAccumulator(str(folder))
    read.Reload()
    return [(event.step, round(event.value, 6)) for event in read.Scalars(tag)]


def test_tensorboard_shows_each_step_once_after_going_back(tmp_path: Path) -> None:
    config = tiny(tmp_path, "r", metrics_tensorboard=True)
    a_run_that_goes_back(config)
    folder = config.run_folder / "tensorboard"
    assert curve(folder, "train/loss") == [(step, step + 0.25 * (step > 5)) for step in range(1, 13)]
    assert curve(folder, "eval/heldout_loss") == [(0, 0.0), (4, 0.4)]
    assert curve(folder, "phase_seconds/comm") == [(step, 0.25) for step in range(1, 13)]
    assert curve(folder, "data/waiting_tokens") == [(step, 9.0) for step in range(1, 13)]
    read = EventAccumulator(str(folder))
    read.Reload()
    assert {"train/loss", "train/lr", "train/clipped", "train/world", "eval/heldout_bpb", "eval/wiki_perplexity"} <= set(
        read.Tags()["scalars"]
    )
    assert "train/grad_norm" not in read.Tags()["scalars"], "it was never finite"
    assert read.Scalars("train/loss")[2].wall_time == 1e9 + 3


def completed(run: Recorded, step: int, *texts: str) -> None:
    run.log.record("completions", completions=[{"prompt": "Once ", "text": text, "tokens": 3} for text in texts], step=step)


def test_tensorboard_shows_the_completions_of_each_step(tmp_path: Path) -> None:
    run = Recorded(tiny(tmp_path, "r", metrics_tensorboard=True))
    trained(run, range(1, 3))
    completed(run, 2, "upon a time", "é\n\n# x")
    completed(run, 4, "more")
    assert not ended(run)
    read = EventAccumulator(str(run.folder.path / "tensorboard"))
    read.Reload()
    found = {
        tag: [(event.step, event.tensor_proto.string_val[0].decode()) for event in read.Tensors(tag)] for tag in read.Tags()["tensors"]
    }
    assert found == {"completions/0": [(2, "Once upon a time"), (4, "Once more")], "completions/1": [(2, "Once é\n\n# x")]}
    assert read.summary_metadata["completions/0"].plugin_data.plugin_name == "text"


@pytest.mark.slow
def test_wandb_has_the_completions_of_each_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = tiny(tmp_path, "r", metrics_wandb={"project": "p"})
    run = Recorded(config)
    trained(run, range(1, 3))
    completed(run, 2, "upon a time")
    trained(run, range(3, 4))
    assert not ended(run)
    (path,) = (config.run_folder / "wandb").glob("offline-run-*/*.wandb")
    items = [{item.key or item.nested_key[-1]: json.loads(item.value_json) for item in r.history.item} for r in records_of(path)]
    assert [(line["_step"], line["completions/0"]) for line in items if "completions/0" in line] == [(2, "Once upon a time")]


def test_a_run_that_begins_anew_replaces_tensorboards_curves(tmp_path: Path) -> None:
    config = tiny(tmp_path, "r", metrics_tensorboard=True)
    a_run_that_goes_back(config)
    anew = Recorded(config, "r3")
    evaluated(anew, 0)
    trained(anew, range(1, 3), offset=0.75)
    ended(anew)
    assert curve(config.run_folder / "tensorboard", "train/loss") == [(1, 1.75), (2, 2.75)]
    assert curve(config.run_folder / "tensorboard", "eval/heldout_loss") == [(0, 0.0)]


def records_of(path: Path) -> list[Any]:
    """The messages in a file of W&B: after 7 bytes a log of LevelDB's form, in blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    data, at, part, found = path.read_bytes(), 7, b"", []
    while at < len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
        _, length, kind = struct.unpack_from("<IHB", data, at)
        part, at = part + data[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):  # whole, or the last part
            found.append(Record.FromString(part))
            part = b""
    return found


def offline(config: RunConfig) -> list[tuple[str, list[tuple[int, float]]]]:
    """Id and training losses of each start, from its file."""
    found = []
    for path in sorted((config.run_folder / "wandb").glob("offline-run-*/*.wandb")):
        records = records_of(path)
        lines = [{item.key or item.nested_key[-1]: json.loads(item.value_json) for item in r.history.item} for r in records]
        losses = [(line["_step"], line["train/loss"]) for line in lines if "train/loss" in line]
        found.append((next(r.run.run_id for r in records if r.run.run_id), losses))
    return found


def test_wandb_offline_continues_one_run_with_each_step_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = tiny(tmp_path, "r", metrics_wandb={"project": "p"})
    a_run_that_goes_back(config)
    (first, losses), (second, more) = offline(config)
    assert losses == [(step, step + 0.5 * (step > 8)) for step in range(1, 11)] and more == [(11, 11.25), (12, 12.25)]
    assert first == second
    ids, steps = [], []

    def init(**settings: Any) -> Any:
        ids.append(settings["id"])
        return SimpleNamespace(log=lambda figures, step: steps.append(step), finish=lambda: None)

    monkeypatch.setattr("wandb.init", init)
    anew = Recorded(tiny(tmp_path, "r", metrics_wandb={"project": "p"}, checkpoint_resume="never"), "r3")
    trained(anew, range(1, 3))
    assert not ended(anew)
    assert len(ids) == 1 and ids != [first] and steps == [1, 2]


@pytest.mark.parametrize("method", ["add_event", "flush", "__init__"])
def test_a_logger_that_fails_gives_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(EventFileWriter, method, full)
    monkeypatch.setattr(loggers, "FLUSH_S", 0.0)
    run = Recorded(tiny(tmp_path, "r", metrics_tensorboard=True))
    trained(run, range(1, 30))
    (warning,) = ended(run)
    assert warning.startswith("metrics.tensorboard: no more figures are logged ([Errno 28] No space left on device); training goes on")
    assert [line["step"] for line in run.folder.read_metrics()] == [*range(1, 30)]


def test_a_logger_that_hangs_delays_no_step_and_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()
    monkeypatch.setattr(EventFileWriter, "add_event", lambda *_: goes_on.wait(60))
    monkeypatch.setattr(loggers, "MOST_WAITING", 5)
    run = Recorded(tiny(tmp_path, "r", metrics_tensorboard=True))
    began = time.monotonic()
    trained(run, range(1, 30))
    run.log.close(0.2, 5.0)
    assert time.monotonic() - began < 20
    goes_on.set()
    first, last = (event["text"] for event in run.folder.read_events() if event["event"] == "warning")
    assert "metrics.tensorboard: too slow; training goes on" in first and "not done 0.2 s after the end of the run" in last
    assert len(run.folder.read_metrics()) == 29
