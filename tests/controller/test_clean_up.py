"""15 s after the end of a run, nothing of it is left: no process, no listening socket, no temporary folder.

A driver in a session of its own starts its own Ray. The test finds its processes by that session (Ray's workers leave the process group,
not the session) and by a mark in their environment. The product finds them in other ways.
"""

from __future__ import annotations

import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.controller.runs import environment, tiny, until
from vescale_ray import checkpoint
from vescale_ray.cli import client
from vescale_ray.config import RunConfig
from vescale_ray.runfolder import RunFolder

pytestmark = pytest.mark.timeout(240)
GONE_S = 15.0
AT_TERMINAL = """
import os, runpy
os.close(os.open(os.ttyname(0), os.O_RDWR))  # the first one that the head of a session opens is the one whose keys are signals
runpy.run_module("vescale_ray.cli", run_name="__main__")
"""


class Driver:
    """A driver process whose descendants can be recognized. With ``terminal`` it is `vescale-ray train` at a terminal of its own."""

    def __init__(self, folder: Path, *actions: str, terminal: bool = False, **changes: Any) -> None:
        self.where = folder
        self.config: RunConfig = tiny(folder, "clean", ray_address="local", data_eval_samples=0, **changes)
        self.folder = RunFolder(self.config.run_folder)
        self.mark = f"CLEAN_UP_TEST={uuid.uuid4().hex}"
        path = folder / "clean.yaml"
        path.write_text(self.config.to_yaml())
        name, _, value = self.mark.partition("=")
        command = [sys.executable, "-m", "tests.controller.drive", str(path), *actions]
        self.output = open(folder / "output.txt", "w+", encoding="utf-8")
        self._keys = -1
        at: dict[str, Any] = {"stdout": self.output, "stderr": self.output}
        if terminal:
            self._keys, screen = pty.openpty()
            command = [sys.executable, "-c", AT_TERMINAL, "train", str(path)]
            at = {"stdin": screen, "stdout": screen, "stderr": screen}
            threading.Thread(target=self._read, args=(self._keys,), daemon=True).start()
        self.process = subprocess.Popen(command, cwd=folder, env=environment(**{name: value}), start_new_session=True, **at)
        if terminal:
            os.close(screen)

    def _read(self, keys: int) -> None:
        """Record the terminal's output."""
        while True:
            try:
                text = os.read(keys, 4096)
            except OSError:
                return  # no process has the terminal open any more
            self.output.write(text.decode(errors="replace"))

    def type(self, keys: bytes) -> None:
        """Press keys at the terminal."""
        os.write(self._keys, keys)

    def processes(self) -> set[int]:
        """Every living process of the driver's session or with its mark, except the driver itself."""
        found = set()
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
                marked = self.mark.encode() in Path(f"/proc/{name}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if fields[0] != "Z" and (marked or int(fields[3]) == self.process.pid):
                found.add(int(name))
        return found - {self.process.pid}

    def sockets(self) -> set[str]:
        """Inodes of the sockets that these processes hold."""
        found = set()
        for pid in self.processes():
            try:
                for descriptor in os.listdir(f"/proc/{pid}/fd"):
                    target = os.readlink(f"/proc/{pid}/fd/{descriptor}")
                    if target.startswith("socket:["):
                        found.add(target[8:-1])
            except OSError:
                continue
        return found

    def actors(self, name: str) -> list[int]:
        """Process ids of the run's actors of a class."""
        return [p for p in self.processes() if Path(f"/proc/{p}/cmdline").read_bytes().startswith(b"ray::" + name.encode())]

    def wait_for_step(self, step: int) -> None:
        def there() -> bool:
            assert self.process.poll() is None, self.text()
            return any(line["step"] >= step for line in self.folder.read_metrics())

        until(there, 150, f"step {step}")

    def text(self) -> str:
        self.output.flush()
        return Path(self.output.name).read_text()

    def close(self) -> None:
        for pid in [self.process.pid, *self.processes()]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.wait(10)
        self.output.close()
        if self._keys >= 0:
            os.close(self._keys)


@pytest.fixture
def drivers() -> Iterator[list[Driver]]:
    started: list[Driver] = []
    yield started
    for driver in started:
        driver.close()


def listening() -> set[str]:
    """Inodes of all listening TCP sockets of the machine."""
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {row[9] for row in rows if row[3] == "0A"}


def nothing_left(driver: Driver, sockets: set[str], folders: set[Path]) -> float:
    """Wait until nothing of the run is left, and return the seconds it took."""

    def gone() -> bool:
        # A process that is ending has lost its environment, by which it is found, before its sockets are closed.
        return not driver.processes() and not sockets & listening() and not any(folder.exists() for folder in folders)

    return until(gone, GONE_S, "the end of the run's processes, sockets and folders")


def ray_folders(driver: Driver) -> set[Path]:
    found = set()
    for pid in driver.processes():
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        found |= {Path(word.decode().partition("=")[2].split("/session_")[0]) for word in words if b"/tmp/vsr-" in word and b"=" in word}
    return found


CODES = {"success": 0, "failure": 1, "stop": 0, "SIGINT to the group": 130, "SIGTERM to the group": 130, "SIGKILL": -signal.SIGKILL}


@pytest.mark.slow
@pytest.mark.fault("E1", "E4")
def test_nothing_is_left_of_a_run_within_15_s_whatever_ends_it(tmp_path: Path, drivers: list[Driver]) -> None:
    # All runs start at once: most of a start is waiting, and the runs must not get in each other's way either.
    by_ending: dict[str, Driver] = {}
    for ending in CODES:
        (tmp_path / ending).mkdir()
        steps = 400 if ending == "success" else 100_000
        workers = 2 if ending == "failure" else 1
        changes: dict[str, Any] = {"elastic_workers": workers, "elastic_min_workers": workers, "train_steps": steps, "checkpoint_every": 0}
        by_ending[ending] = Driver(tmp_path / ending, **changes)
        drivers.append(by_ending[ending])
    left: dict[str, tuple[set[str], set[Path]]] = {}
    for ending, driver in by_ending.items():
        driver.wait_for_step(2)
        left[ending] = driver.sockets() & listening(), ray_folders(driver)
        # Ray's servers, the supervisor, the controller, a worker; Ray's own agents come and go.
        assert len(driver.processes()) > 4 and all(left[ending]), ending
    client.request(by_ending["stop"].folder, "stop", {})
    os.kill(by_ending["failure"].actors("Worker")[0], signal.SIGKILL)
    os.kill(by_ending["SIGKILL"].process.pid, signal.SIGKILL)
    # As `timeout`, a service manager or a batch system does. Ray's servers get the signal, too, and must not end before there is a
    # checkpoint.
    os.killpg(by_ending["SIGTERM to the group"].process.pid, signal.SIGTERM)
    os.killpg(by_ending["SIGINT to the group"].process.pid, signal.SIGINT)  # as a terminal does: Ray's servers get it too
    for ending in ("SIGKILL", "SIGINT to the group", "SIGTERM to the group", "stop", "failure", "success"):
        driver = by_ending[ending]
        code = driver.process.wait(90)
        seconds = nothing_left(driver, *left[ending])
        print(f"\n{ending}: exit code {code}, nothing left {seconds:.1f} s after the driver's end", end="")
        assert code == CODES[ending], (ending, driver.text())
    for ending in ("stop", "SIGINT to the group", "SIGTERM to the group"):
        folder, newest = by_ending[ending].folder, checkpoint.latest(by_ending[ending].config.checkpoint_root)
        state = folder.read_state()
        assert state is not None and newest is not None
        assert (state["state"], state["step"]) == ("STOPPED", newest.step) and newest.step >= 2
        assert folder.read_control() is None
    for ending, name in (("success", "DONE"), ("failure", "FAILED")):
        state = by_ending[ending].folder.read_state()
        assert state is not None and state["state"] == name
    # The survivor wrote its own shard and its copy of the lost one before the run gave up.
    root = by_ending["failure"].config.checkpoint_root
    newest = checkpoint.latest(root)
    assert newest is not None and newest.step >= 9 and newest.world == 2 and checkpoint.verify(root).ok
    text = by_ending["failure"].text()
    assert "fewer than elastic.min_workers = 2" in text and f"resumed from step {newest.step}" in text


@pytest.mark.slow
@pytest.mark.fault("E4")
def test_killed_driver_with_a_dead_controller_leaves_nothing(tmp_path: Path, drivers: list[Driver]) -> None:
    driver = Driver(tmp_path, elastic_workers=1, train_steps=100_000, checkpoint_every=0)
    drivers.append(driver)
    driver.wait_for_step(2)
    left = driver.sockets() & listening(), ray_folders(driver)
    os.kill(driver.actors("Controller")[0], signal.SIGKILL)
    os.kill(driver.process.pid, signal.SIGKILL)
    assert driver.process.wait(10) == -signal.SIGKILL
    nothing_left(driver, *left)


@pytest.mark.slow
@pytest.mark.fault("E2")
def test_signal_during_ray_start_stops_the_run_without_failure(tmp_path: Path, drivers: list[Driver]) -> None:
    """While Ray starts, Ray itself handles SIGTERM and ends the process. The run must not be FAILED for the reason "15"."""
    driver = Driver(tmp_path, elastic_workers=1, train_steps=100_000)
    drivers.append(driver)
    until(lambda: bool(ray_folders(driver)), 60, "the first of Ray's servers")
    os.kill(driver.process.pid, signal.SIGTERM)
    assert driver.process.wait(90) == 130, driver.text()
    nothing_left(driver, set(), ray_folders(driver))
    assert (driver.folder.read_state() or {})["state"] == "STOPPED"


@pytest.mark.slow
def test_a_second_signal_ends_the_run_at_once(tmp_path: Path, drivers: list[Driver]) -> None:
    driver = Driver(tmp_path, elastic_workers=1, train_steps=100_000)
    drivers.append(driver)
    until(lambda: len(driver.processes()) > 4, 60, "the start of Ray")
    os.kill(driver.process.pid, signal.SIGTERM)
    os.kill(driver.process.pid, signal.SIGINT)
    driver.process.wait(30)
    nothing_left(driver, set(), ray_folders(driver))
    assert driver.process.returncode != 0


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_ctrl_c_in_a_pending_change_saves_and_leaves_nothing(tmp_path: Path, drivers: list[Driver]) -> None:
    """The test presses the key at a terminal. One run waits for a worker that a user has requested, the other for places that don't
    exist."""
    common: dict[str, Any] = {"train_steps": 100_000, "checkpoint_every": 0, "elastic_workers": 2, "ray_cpus_per_worker": 1.0}
    growing = {"ray_num_cpus": 2, "elastic_max_workers": 4, "elastic_grow": True, "elastic_demand": 2}
    by_cause: dict[str, Driver] = {}
    for cause, changes in (("growth", growing), ("rescale", {"ray_num_cpus": 3, "elastic_max_workers": 3})):
        (tmp_path / cause).mkdir()
        by_cause[cause] = Driver(tmp_path / cause, terminal=True, **common, **changes)
        drivers.append(by_cause[cause])
    for cause, driver in by_cause.items():
        driver.wait_for_step(5)
        left = driver.sockets() & listening(), ray_folders(driver)

        def status(driver: Driver = driver) -> Mapping[str, Any]:
            return client.request(driver.folder, "status")

        if cause == "growth":
            until(lambda status=status: status()["places_wanted"] == 2, 60, "the requests")  # type: ignore[misc]
        else:
            client.request(driver.folder, "rescale", {"workers": 3})
        reached = max(line["step"] for line in driver.folder.read_metrics())
        driver.type(b"\x03")
        code = driver.process.wait(90)
        seconds = nothing_left(driver, *left)
        newest, state = checkpoint.latest(driver.config.checkpoint_root), driver.folder.read_state()
        assert code == 130, driver.text()
        assert newest is not None and newest.step >= reached and checkpoint.verify(driver.config.checkpoint_root).ok
        assert state is not None and (state["state"], state["step"]) == ("STOPPED", newest.step)
        events = driver.folder.read_events()
        sizes = {len(event["workers"]) for event in events if event["event"] == "generation"}
        print(f"\n{cause}: step {newest.step}, worlds {sizes}, nothing left {seconds:.1f} s after the driver's end", end="")
        assert sizes == {2}, "it did not wait for what it had requested"
        last = re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", driver.text()).strip().splitlines()[-1]
        said = re.fullmatch(r"vescale-ray: interrupted; nothing is left running; resume at step (\d+) with: vescale-ray (train .+)", last)
        assert said and int(said[1]) == newest.step, last
        said_to_do = shlex.split(said[2])
    # Run the printed command of one of the runs.
    command = [sys.executable, "-m", "vescale_ray.cli", *said_to_do, f"train.steps={newest.step + 20}"]
    resumed = subprocess.run(command, cwd=driver.where, env=environment(), capture_output=True, text=True, timeout=120)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    lines = driver.folder.read_all_metrics()
    assert [line["step"] for line in lines] == list(range(1, newest.step + 21)), "no step is lost, none is done again"
