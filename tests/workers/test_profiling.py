"""``train.profile`` writes a trace of its steps, also if a generation ends among them."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.workers.fleet import State
from tests.workers.tiny import running, tiny, write_text
from vescale_ray.compat import core
from vescale_ray.config import RunConfig
from vescale_ray.workers.messages import Happened, Noticed, Ticket
from vescale_ray.workers.monitoring.heartbeat import Heartbeat
from vescale_ray.workers.monitoring.profiling import StepProfiler


def profiling(folder: Path, **window: Any) -> RunConfig:
    return tiny(write_text(folder), train_profile=window, run_dir=str(folder), run_name="r", elastic_max_workers=2)


def profiler_of(config: RunConfig, heard: list[Any], device: str = "cpu") -> StepProfiler:
    return StepProfiler(config, torch.device(device), Heartbeat(), heard.append)


def train_with_profile(state: State, config: RunConfig, generation: int, until: int) -> list[Any]:
    """Train with the worker's profiler to an ordered rescale, and return what the profiler has published."""
    heard: list[Any] = []
    trainer, profiler = state["trainer"], profiler_of(config, heard)
    while trainer.completed < until:
        with profiler.step(trainer.completed + 1, dist.get_rank(), Ticket(generation, 1)):
            trainer.step(settle=state["snapshots"].settle)
        state["snapshots"].after_step(trainer)
    profiler.end()
    profiler.finish(30.0)
    return heard


def names(path: Path) -> list[str]:
    """Names of the trace's ranges."""
    with gzip.open(path, "rt") as file:
        return [event["name"] for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]


def test_trace_has_the_steps_and_collectives_of_its_window(tmp_path: Path) -> None:
    """A rescale comes after the window's second step of three, and the next generation profiles the third."""
    config = profiling(tmp_path, step=2, steps=3, ranks=[1])
    with running(config, 2) as (fleet, run):
        first = fleet.run([0, 1], train_with_profile, config, 4, 3)
        second = fleet.run([0, 1], train_with_profile, config, 5, 6)
    assert first[0] == second[0] == [], "rank 0 is not profiled"
    folder = tmp_path / "r" / "profiles"
    for generation, begin, last, events in ((4, 2, 3, first[1]), (5, 4, 4, second[1])):
        name = f"steps-{begin}-{last}-rank-1-generation-{generation}"
        ticket, about = Ticket(generation, 1), {"generation": generation, "rank": 1}
        assert events == [
            Happened(ticket, "profile_started", {**about, "step": begin}),
            Happened(ticket, "profiled", {**about, "step": last, "first": begin, "file": str(folder / name)}),
        ]
        seen = names(folder / f"{name}.trace.json.gz")
        assert [one for one in seen if one.startswith("ProfilerStep#")] == [f"ProfilerStep#{step}" for step in range(begin, last + 1)]
        for label in ("FSDP::all_gather (layers.0)", "FSDP::post_backward_reduce (layers.1)", "gloo:all_gather", "aten::mm"):
            assert label in seen, f"{label} is missing in {sorted({one for one in seen if 'FSDP' in one or 'gloo' in one})}"
    assert len([*folder.iterdir()]) == 2


def test_a_profile_goes_on_after_a_failed_step(tmp_path: Path) -> None:
    """The worker has another rank afterwards, and repeats a step."""
    heard: list[Any] = []
    profiler = profiler_of(profiling(tmp_path, step=7, steps=3), heard)
    with profiler.step(7, 0, Ticket(3, 1)):
        torch.ones(3) @ torch.ones(3)
    with pytest.raises(RuntimeError), profiler.step(8, 0, Ticket(3, 1)):
        torch.ones(3) @ torch.ones(4)
    for step in (7, 8, 9, 10):
        with profiler.step(step, 1, Ticket(4, 1)):
            torch.ones(3) + 1
    profiler.finish(30.0)
    assert [event.event for event in heard] == ["profile_started", "profiled"]
    assert heard[1].about["file"].endswith("steps-7-9-rank-0-generation-3")
    seen = names(Path(heard[1].about["file"] + ".trace.json.gz"))
    assert [one for one in seen if one.startswith("ProfilerStep#")] == [f"ProfilerStep#{step}" for step in (7, 8, 7, 8, 9)]


def test_a_profile_that_can_not_be_written_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "r").write_text("a file where the run's folder should be")
    heard: list[Any] = []
    profiler = profiler_of(profiling(tmp_path, step=1, steps=1), heard)
    for step in (1, 2, 3):
        with profiler.step(step, 0, Ticket(3, 1)):
            torch.ones(3)
    profiler.finish(30.0)
    problem = heard[-1]
    assert len(heard) == 2 and isinstance(problem, Noticed)
    assert problem.text.startswith("train.profile: rank 0 has no profile ([Errno 20] Not a directory")


def test_a_profiler_that_does_not_start_lets_steps_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(**_: Any) -> Any:
        raise RuntimeError("another profiler is active")

    monkeypatch.setattr(torch.profiler, "profile", busy)
    heard: list[Any] = []
    profiler = profiler_of(profiling(tmp_path, step=1, steps=2), heard)
    for step in (1, 2):
        with profiler.step(step, 0, Ticket(3, 1)):
            pass
    profiler.end()
    text = "train.profile: rank 0 has no profile (another profiler is active); training goes on"
    assert [problem.text for problem in heard] == [text]


def test_memory_is_recorded_in_the_window_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's functions for it are replaced: this machine may have no GPU."""
    calls: list[Any] = []
    monkeypatch.setattr(core, "record_memory_history", lambda **about: calls.append(about))
    monkeypatch.setattr(core, "memory_snapshot", lambda: {"segments": len(calls)})
    heard: list[Any] = []
    profiler = profiler_of(profiling(tmp_path, step=2, steps=1), heard, "cuda")
    for step in (1, 2, 3):
        with profiler.step(step, 0, Ticket(3, 1)):
            calls.append(step)
    profiler.finish(30.0)
    assert all(isinstance(one, Happened) for one in heard), heard
    assert calls == [1, {"max_entries": 100_000}, 2, {"enabled": None}, 3]
    assert pickle.loads(Path(heard[1].about["file"] + ".memory.pickle").read_bytes()) == {"segments": 3}
