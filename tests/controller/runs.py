"""Tiny runs for the tests of this folder: their configuration, their text, and the contents of their folders."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vescale_ray.config import RunConfig, parse_config
from vescale_ray.controller.driver.driver import RunResult, run
from vescale_ray.controller.protocol import ScheduledAction
from vescale_ray.data.dataset_loading import load_dataset
from vescale_ray.reporting import report
from vescale_ray.runfolder import RunFolder
from vescale_ray.workers.monitoring.process import born

STEPS = 60


def write_text(folder: Path) -> Path:
    """Write 40 KB of varied words to a file; deterministic."""
    words = ["shard", "worker", "ring", "step", "buddy", "loss", "epoch", "tensor", "plan", "route"]
    rng = np.random.default_rng(0)
    path = folder / "text.txt"
    path.write_text(" ".join(words[i] + str(i * 7 % 13) for i in rng.integers(0, len(words), 5500)))
    return path


def tiny(folder: Path, name: str, **changes: Any) -> RunConfig:
    """The configuration of a run. ``elastic_workers=2`` sets ``elastic.workers``. 6 slots keep the batch the same at every world size."""
    text = folder / "text.txt"
    tree: dict[str, dict[str, Any]] = {
        "run": {"name": name, "dir": str(folder), "seed": 7},
        "model": {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 56},
        "data": {"corpus": str(text if text.exists() else write_text(folder)), "seq_len": 16, "heldout": 0.1, "eval_samples": 13},
        "train": {"steps": STEPS, "slots": 6, "slot_batch": 2, "lr": 3e-3, "warmup_steps": 4, "device": "cpu"},
        "elastic": {"workers": 3, "collective_timeout_s": 20},
        "checkpoint": {"every": 25},
        "ray": {"cpus_per_worker": 0.5},
    }
    for key, value in changes.items():
        section, _, field = key.partition("_")
        tree.setdefault(section, {})[field] = value
    return parse_config(tree)


class Finished:
    """A run that has ended: its result, and the lines in its folder."""

    def __init__(self, config: RunConfig, result: RunResult) -> None:
        self.config, self.result = config, result
        self.folder = RunFolder(config.run_folder)
        self.events = self.folder.read_events()
        self.losses = {line["step"]: line["loss"] for line in self.folder.read_metrics()}

    def of(self, *kinds: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] in kinds]

    @property
    def pids(self) -> dict[str, int]:
        """Process id of every worker ever started."""
        return {event["worker"]: event["pid"] for event in self.of("worker_started")}

    @property
    def left_behind(self) -> list[str]:
        """Workers whose processes are still there."""
        return [event["worker"] for event in self.of("worker_started") if lives(event)]

    def generations(self) -> list[tuple[str, ...]]:
        """Members of each generation, in rank order."""
        return [tuple(event["workers"]) for event in self.of("generation")]

    def accounting(self) -> report.Accounting:
        """Samples lost and repeated, as computed from the data set and its order and not by the run."""
        stream = load_dataset(self.config.data).order(self.config.run.seed)
        return report.accounting(self.folder, stream, self.config.global_batch, len(self.losses))


def carry_out(config: RunConfig, *schedule: ScheduledAction, watch: Callable[[Mapping[str, Any]], None] | None = None) -> Finished:
    """Run to the end on the Ray that this process is connected to."""
    return Finished(config, run(config, on_progress=watch, schedule=schedule))


def worst_difference(losses: Mapping[int, float], reference: Mapping[int, float]) -> float:
    """Largest relative difference of the losses of any step; both must have the same steps."""
    assert losses.keys() == reference.keys(), sorted(losses.keys() ^ reference.keys())
    return max(abs(losses[step] - reference[step]) / abs(reference[step]) for step in reference)


def alive(pid: int) -> bool:
    """True if the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def lives(started: Mapping[str, Any]) -> bool:
    """True if the process of a ``worker_started`` event still lives.

    The start time must match, too: a later process may get the same id, and a test must not kill another test's process.
    """
    return born(started["pid"]) == started["born"] and alive(started["pid"])


def parents() -> dict[int, int]:
    """The parent of every process of the machine."""
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            found[int(name)] = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    return found


def end_all(living: Callable[[], Iterable[int]], reap: Callable[[], object], seconds: float = 30.0) -> None:
    """SIGKILL the ``living`` processes again and again until none is left. ``reap`` waits for those that this process started."""
    deadline = time.monotonic() + seconds
    while left := list(living()):
        assert time.monotonic() < deadline, f"processes that do not end: {left}"
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        reap()


def until(condition: Callable[[], bool], seconds: float, what: str) -> float:
    """Wait until ``condition`` holds, and return the seconds it took. Fails the test after ``seconds``."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < seconds, f"{what} not within {seconds} s"
        time.sleep(0.05)
    return time.monotonic() - begin


def environment(**more: str) -> dict[str, str]:
    """Environment variables for a driver in another process: it imports this checkout and joins no existing cluster."""
    root = str(Path(__file__).resolve().parents[2])
    base = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "PYTHONPATH")}
    return {**base, "PYTHONPATH": root, "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1", **more}


def print_figures(title: str, events: Sequence[Mapping[str, Any]]) -> None:
    """Print the pauses of a run's rescales; pytest shows them with -s."""
    for event in events:
        phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in event["phases"].items())
        print(f"\n{title}: {event['from']} -> {event['to']} ({event['reason']}) paused {event['pause_seconds']:.2f} s ({phases})", end="")
