"""A run on a cluster of several nodes, with one fault after another."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.controller.clusters import TUNED, Nodes
from tests.controller.hanging import SLOWLY, hang
from tests.controller.runs import environment, lives, tiny, until
from vescale_ray.cli import client
from vescale_ray.config import RunConfig
from vescale_ray.runfolder import RunFolder

MODEL = {"model_factory": "tests.controller.hanging:model", "model_units": ["body"]}
LARGEST = 4
FAULTS = {
    "kill": 4,
    "exit": 2,
    "raise": 2,
    "collective": 1,
    "lock": 1,
    "sleep": 1,
    "pause": 3,
    "two": 2,
    "controller": 3,
    "controller and worker": 1,
    "rescale": 4,
    "drain": 1,
    "lose a node": 1,
}
"""Relative frequency of each fault."""
RECOVERED_S = 90.0
"""Time limit for the next complete step after any fault, in seconds."""


def config_of(folder: Path, name: str, **changes: Any) -> RunConfig:
    """The configuration of a tiny run in deterministic mode. Faults change no bit of its losses."""
    fixed = {
        "train_steps": 1_000_000,
        "elastic_workers": 3,
        "elastic_max_workers": LARGEST,
        "elastic_replace_lost": True,
        "elastic_deterministic": True,
        "elastic_collective_timeout_s": 10,
        "elastic_max_recoveries_without_progress": 10,
        "checkpoint_every": 100,
        "data_eval_samples": 0,
        "ray_cpus_per_worker": 1.0,
    }
    return tiny(folder, name, **{**fixed, **MODEL, **changes})


def start_driver(config: RunConfig, output: Path, *actions: str, **env: str) -> subprocess.Popen[bytes]:
    """Start ``tests.controller.drive`` with this configuration. Its output goes to the file ``output``."""
    path = output.with_suffix(".yaml")
    path.write_text(config.to_yaml())
    with open(output, "ab") as out:
        command = [sys.executable, "-m", "tests.controller.drive", str(path), *actions]
        return subprocess.Popen(command, env=environment(**env), stdout=out, stderr=out, start_new_session=True)


class Soak:
    """A run with random faults.

    Args:
        seed: seed of the faults. Their timing depends on the machine, so a seed repeats the kinds of faults and not their course.
        gap_s: mean time between two faults, in seconds.
    """

    def __init__(self, folder: Path, seed: int, gap_s: float) -> None:
        self.config = config_of(folder, "soak")
        self.folder = RunFolder(self.config.run_folder)
        self.output = folder / "soak.txt"
        self.told: list[str] = []
        self.blows = 0
        self._rng, self._gap_s = random.Random(seed), gap_s
        self.nodes = Nodes(2, 2, 2, system=TUNED, env={SLOWLY: "0.03"})
        self._safe = next(iter(self.nodes.raylets))
        """The node that no fault removes, so that some processes live long enough to show a leak."""
        self._spared: str | None = None
        self.driver = start_driver(self.config.model_copy(update={"ray": self._ray()}), self.output)
        self._read = 0
        self._events: list[dict[str, Any]] = []
        self._began = time.monotonic()
        self._lock = threading.Lock()

    def _ray(self) -> Any:
        return self.config.ray.model_copy(update={"address": self.nodes.address})

    # -------------------------------------------------------------------------------------------------------------- observations

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        """The run's events of these kinds."""
        with self._lock:  # the leak watch's thread reads the events, too
            try:
                with open(self.folder.path / "events.jsonl", "rb") as file:
                    file.seek(self._read)
                    data = file.read()
            except FileNotFoundError:
                return []
            whole = data[: data.rfind(b"\n") + 1]
            self._read += len(whole)
            self._events += [json.loads(line) for line in whole.splitlines()]
            return [event for event in self._events if event["event"] in kinds]

    def step(self) -> int:
        """Last step in the run's state file."""
        state = self.folder.read_state()
        return int(state["step"]) if state else 0

    def workers(self) -> dict[str, dict[str, Any]]:
        """Living workers that were ever warm, the oldest first."""
        return {e["worker"]: e for e in self.events("worker_started") if lives(e)}

    def watched(self) -> Mapping[str, int]:
        """Processes to check for leaks."""
        found = {"driver": self.driver.pid, **{f"worker {name}": e["pid"] for name, e in self.workers().items()}}
        for pid in self.nodes.processes():
            try:
                title = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]
            except OSError:
                continue
            for name in (b"ray::Controller", b"ray::Supervisor"):
                if title.startswith(name):
                    found[name.decode()[5:].lower()] = pid
        return found

    # ------------------------------------------------------------------------------------------------------------------ faults

    def torment(self, seconds: float) -> None:
        """Cause faults for ``seconds``, and check that the run recovers."""
        end = time.monotonic() + seconds
        until(lambda: self.step() >= 5, 120, "step 5")
        while time.monotonic() < end:
            time.sleep(min(3 * self._gap_s, self._rng.expovariate(1 / self._gap_s)))
            self.strike(self._rng.choices(list(FAULTS), list(FAULTS.values()))[0])
            # Sometimes the next fault follows at once, so that it hits the recovery from this one.
            if self._rng.random() < 0.7:
                self._goes_on()
        self._goes_on()

    def _goes_on(self) -> None:
        before = self.step()

        def further() -> bool:
            assert self.driver.poll() is None, self.told[-5:] + [self.output.read_text()[-2000:]]
            return self.step() > before

        until(further, RECOVERED_S, f"a step after {self.told[-5:]}")

    def strike(self, what: str) -> None:
        """Cause one fault."""
        everyone = self.workers()
        here = [name for name, e in everyone.items() if e["node"] == self._safe]
        if self._spared not in here:
            self._spared = here[0] if here else None
        others = [name for name in everyone if name != self._spared]
        self._rng.shuffle(others)
        about = ""
        try:
            about = self._do(what, [everyone[name] for name in others])
        except (OSError, client.RunNotAlive, client.CommandRefused) as error:
            about = f"not done: {error}"
        self.blows += "not done" not in about
        self.told.append(f"{time.monotonic() - self._began:6.1f} s, step {self.step()}: {what} {about}")
        print(self.told[-1], flush=True)

    def _do(self, what: str, others: list[dict[str, Any]]) -> str:
        rng = self._rng
        if what == "controller":
            return self._end_controller()
        if what == "rescale":
            size = rng.randint(2, LARGEST)
            client.request(self.folder, "rescale", {"workers": size}, timeout_s=20)
            return str(size)
        if what in ("drain", "lose a node"):
            return self._lose_a_node(what == "drain")
        if not others:
            return "nobody to strike: not done"
        victim = others[0]
        if what == "two":
            for each in others[:2]:
                os.kill(each["pid"], signal.SIGKILL)
            return f"{[each['worker'] for each in others[:2]]}"
        if what == "controller and worker":
            os.kill(victim["pid"], signal.SIGKILL)
            return f"{victim['worker']}, {self._end_controller()}"
        if what == "pause":
            seconds = rng.choice([0.3, 0.8, 2.0, 5.0])
            os.kill(victim["pid"], signal.SIGSTOP)
            time.sleep(seconds)
            os.kill(victim["pid"], signal.SIGCONT)
            return f"{victim['worker']} for {seconds} s"
        if what == "kill":
            os.kill(victim["pid"], signal.SIGKILL)
        else:
            hang(victim["pid"], what)
        return str(victim["worker"])

    def _end_controller(self) -> str:
        pid = self.watched().get("controller")
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
        return f"process {pid}"

    def _lose_a_node(self, noticed: bool) -> str:
        node = self._rng.choice([node for node in self.nodes.raylets if node != self._safe])
        if noticed:
            self.nodes.drain(node, 20.0)
            time.sleep(self._rng.choice([1.0, 8.0]))
        else:
            for each in self.workers().values():
                if each["node"] == node:
                    os.kill(each["pid"], signal.SIGKILL)
        self.nodes.end(node)
        new = self.nodes.add(2)
        return f"{node[:8]}, then {new[:8]} comes"

    def end_everything(self) -> None:
        """SIGKILL all processes at once, the driver first."""
        os.kill(self.driver.pid, signal.SIGKILL)
        self.nodes.kill()
        self.driver.wait(10)
