"""The doctor finds what is wrong with a machine, says what to do, and leaves nothing behind."""

from __future__ import annotations

import errno
import importlib.metadata
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from tests.checkpoint.faulty_store import Fault, FaultyStore
from tests.controller.clusters import cluster
from tests.controller.runs import tiny
from vescale_ray.checkpoint.stores.memory_store import MemoryStore
from vescale_ray.cli import app
from vescale_ray.controller.driver import doctor

CONSTRAINTS = (Path(__file__).resolve().parents[2] / "constraints.txt").read_text()


def test_storage_that_works_is_left_as_it_was(tmp_path: Path) -> None:
    assert doctor.storage(str(tmp_path / "a" / "b")).verdict == "ok"
    assert not list(tmp_path.iterdir()), "not even a folder stays"
    (tmp_path / "mine" / "attempts" / "other").mkdir(parents=True)
    (tmp_path / "mine" / "attempts" / "other" / ".tmp-1").write_text("of a save that is going on")
    assert doctor.storage(str(tmp_path / "mine")).verdict == "ok"
    assert [path.name for path in (tmp_path / "mine").rglob("*")] == ["attempts", "other", ".tmp-1"]


class Twice(MemoryStore):
    def put(self, key: str, data: bytes) -> None:
        self.objects.pop(key, None)
        super().put(key, data)


class Late(MemoryStore):
    def clock(self) -> float:
        return time.time() - 90


@pytest.mark.parametrize(
    ("store", "verdict", "words"),
    [
        (MemoryStore(), "ok", "written, read, listed"),
        (FaultyStore(MemoryStore(), [Fault("put", "error", code=28)]), "fail", "can't be written (No space left on device)"),
        (FaultyStore(MemoryStore(), [Fault("get", "flip")]), "fail", "what was written is not there"),
        (FaultyStore(MemoryStore(), [Fault("list", "stale")]), "fail", "what was written is not there"),
        (FaultyStore(MemoryStore(), [Fault("get", "error", code=13)]), "fail", "was written, but can't be used (Permission denied)"),
        (Twice(), "fail", "creates one name twice"),
        (Late(), "warn", "90 s apart"),
    ],
)
def test_storage_unfit_for_checkpoints_is_found(store: object, verdict: str, words: str, monkeypatch) -> None:
    monkeypatch.setattr("vescale_ray.checkpoint.stores.opening.store_of", lambda root: store)
    found = doctor.storage("memory://x")
    assert (found.verdict, words in found.text) == (verdict, True), found
    assert bool(found.remedy) == (verdict != "ok")
    objects = getattr(store, "store", store).objects
    assert not objects, "the probe is taken away again"


def test_storage_that_refuses_to_delete_is_found(monkeypatch) -> None:
    store = FaultyStore(MemoryStore(), [Fault("delete", "error", code=13)])
    monkeypatch.setattr("vescale_ray.checkpoint.stores.opening.store_of", lambda root: store)
    found = doctor.storage("memory://x")
    assert found.verdict == "warn" and "can't delete (Permission denied), so that old checkpoints stay" in found.text and found.remedy


def test_a_url_that_leads_nowhere_is_told_with_the_remedy() -> None:
    found = doctor.storage("foo://bucket/x")
    assert found.verdict == "fail" and "foo" in found.text and "set checkpoint.dir to" in found.remedy


def test_a_folder_that_can_not_be_written_is_found(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert doctor.storage(str(tmp_path / "file" / "x")).verdict == "fail"


def test_missing_or_untested_packages_are_found(monkeypatch) -> None:
    for name, releases in doctor.TESTED.items():
        assert any(f"\n{name}=={release}." in CONSTRAINTS for release in releases), "what the tests run with"
        assert doctor.package(name).verdict == "ok"
    for version in ("2.13.0", "2.14.1+cu130", "2.15.2"):
        monkeypatch.setattr(importlib.metadata, "version", lambda name, version=version: version)
        assert doctor.package("torch") == doctor.Finding("torch", "ok", version)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.0")
    assert doctor.package("torch") == doctor.Finding("torch", "warn", "9.0; tested with 2.13 to 2.15", doctor.package("torch").remedy)
    assert doctor.package("ray").text == "9.0; tested with 2.60"

    def gone(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", gone)
    assert doctor.package("ray").verdict == "fail" and "pip install" in doctor.package("ray").remedy
    monkeypatch.setattr(sys, "version_info", (3, 10, 1))
    assert doctor.python().verdict == "fail"


def test_limits_of_the_machine_are_found(monkeypatch, tmp_path: Path) -> None:
    Usage = namedtuple("Usage", "total used free")
    for free, verdict in ((64 << 20, "fail"), (8 << 30, "ok")):
        monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path, free=free: Usage(1, 1, free))
        found = doctor.shared_memory()
        assert found.verdict == verdict and ("shm-size" in found.remedy) == (verdict == "fail")
    monkeypatch.undo()
    assert doctor.shared_memory(str(tmp_path / "none")).verdict == "fail"
    for limit, verdict in (((1024, 1 << 20), "warn"), ((1 << 20, 1 << 20), "ok"), ((1024, 4096), "warn")):
        monkeypatch.setattr(resource, "getrlimit", lambda what, limit=limit: limit)
        assert doctor.open_files().verdict == verdict
    assert "hard limit, 4096" in doctor.open_files().remedy


@pytest.mark.parametrize(
    ("state", "verdict", "words"),
    [(0, "ok", "kept, to 0.250 s"), (1, "ok", "kept, to"), (5, "warn", "nothing keeps it"), (-1, "ok", "doesn't tell")],
)
def test_clock_synchronisation_is_read_from_the_kernel(state: int, verdict: str, words: str, monkeypatch) -> None:
    def adjtimex(told: object) -> int:
        told._obj.maxerror = 250_000  # type: ignore[attr-defined]
        return state

    monkeypatch.setattr(doctor.ctypes, "CDLL", lambda *about, **named: SimpleNamespace(adjtimex=adjtimex))
    found = doctor.clock()
    assert (found.verdict, words in found.text, bool(found.remedy)) == (verdict, True, verdict != "ok"), found
    monkeypatch.undo()
    synchronised = subprocess.run(["timedatectl", "show", "-p", "NTPSynchronized", "--value"], capture_output=True, text=True, check=False)
    if synchronised.stdout.strip() in ("yes", "no"):
        assert (doctor.clock().verdict == "ok") == (synchronised.stdout.strip() == "yes")


def test_clock_skew_and_silent_nodes_are_found() -> None:
    told = {"nodes": 3, "resources": {"CPU": 6.0}, "version": "2.60.0", "asked": 3}
    assert doctor._cluster("c:6379", {**told, "apart": {"a": 0.01, "b": -0.02, "c": 0.0}}).text.endswith("; clocks 0.03 s apart")
    found = doctor._cluster("c:6379", {**told, "apart": {"a": 4.0, "b": -3.0, "c": 0.0}})
    assert found.verdict == "warn" and "node a is 7.0 s ahead of node b's" in found.text and "NTP" in found.remedy
    found = doctor._cluster("c:6379", {**told, "apart": {"a": 0.0}})
    assert found.verdict == "warn" and "2 of 3 nodes" in found.text and found.remedy


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_cluster_s_nodes_are_asked_for_their_clocks(monkeypatch) -> None:
    """All nodes, the head (without a CPU) included, are on this machine: their clocks differ by the time of the answers. A stopped node
    says nothing."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with cluster(1, 1, 1) as nodes:
        found = doctor.ray_cluster(nodes.address)
        assert found.verdict == "ok" and "4 nodes, 3 CPUs" in found.text, found
        assert 0 <= float(found.text.rpartition("clocks ")[2].partition(" s apart")[0]) < 1.0
        stopped = next(pid for pid in nodes.processes() if b"raylet/raylet" in Path(f"/proc/{pid}/cmdline").read_bytes())
        os.kill(stopped, signal.SIGSTOP)
        try:
            found = doctor.ray_cluster(nodes.address)
        finally:
            os.kill(stopped, signal.SIGCONT)
        assert found.verdict != "ok" and found.remedy, found


def test_an_interface_that_is_not_there_is_found(monkeypatch) -> None:
    here = socket.if_nameindex()[0][1]
    for wanted, verdict in (("nope0", "fail"), (f"={here}", None), ("^docker", None), (here[:1], None)):
        monkeypatch.setenv("NCCL_SOCKET_IFNAME", wanted)
        found = doctor.network()
        assert (found.verdict == "fail") == (verdict == "fail"), (wanted, found)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nope1")
    assert "GLOO_SOCKET_IFNAME = nope1" in doctor.network().text and here in doctor.network().remedy


def test_port_in_use_and_silent_cluster_are_found(monkeypatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        found = doctor.port("127.0.0.1", taken.getsockname()[1])
        assert found.verdict == "warn" and "any free port" in found.remedy, "it stops no run"
    assert doctor.port("127.0.0.1", 0).verdict == "ok"
    assert doctor.port("192.0.2.1", 9464).verdict == "fail", "an address that this machine has not does"
    assert doctor.port("192.0.2.1", 0).verdict == "fail", "also where any port would do"
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        began = time.monotonic()
        found = doctor.ray_cluster(f"127.0.0.1:{mute.getsockname()[1]}", wait_s=1.0)
    assert found.verdict == "fail" and time.monotonic() - began < 15, "it is ended, and not waited for"
    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "run", lambda *args, **more: pytest.fail("Ray is not asked where nobody listens"))
        found = doctor.ray_cluster("127.0.0.1:1")
    assert found.verdict == "fail" and found.text.startswith("127.0.0.1:1: no cluster answers there (")
    found = doctor.ray_cluster("head..svc:6379")
    assert found.verdict == "fail" and "no cluster answers there (" in found.text, "what can be no host's name is a UnicodeError"
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert doctor.ray_cluster(None).verdict == "ok"


def test_unusable_folder_is_found_whatever_its_permissions(tmp_path: Path) -> None:
    """Root has the permission to write to /proc, but no process can."""
    config = tiny(tmp_path, "r")
    assert doctor.run_folder(config).verdict == "ok" and not (tmp_path / "r").exists()
    found = doctor.run_folder(tiny(tmp_path, "r", run_dir="/proc/nothing"))
    assert found.verdict == "fail" and "/proc: can't be written" in found.text


def test_file_system_without_locks_is_found(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(doctor.fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))))
    found = doctor.run_folder(tiny(tmp_path, "r"))
    assert found.verdict == "fail" and "files can't be locked there (Function not implemented)" in found.text and "-o flock" in found.remedy


def test_gpus_that_the_run_does_not_use_are_found(tmp_path: Path, monkeypatch) -> None:
    for name, value in {"is_available": True, "device_count": 2, "get_device_name": "H100"}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    found = doctor.gpus(tiny(tmp_path, "d", train_device="auto"))
    assert found.verdict == "warn" and found.text.endswith("; with ray.gpus_per_worker = 0 workers compute on the CPU")
    for used in (None, tiny(tmp_path, "d", train_device="cpu"), tiny(tmp_path, "d", train_device="auto", ray_gpus_per_worker=1)):
        assert doctor.gpus(used).verdict == "ok"


def test_a_check_that_breaks_is_a_finding_of_its_own(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(doctor, "gpus", lambda config: 1 // 0)
    found = {one.check: one for one in doctor.examine(tiny(tmp_path, "d"))}
    assert found["gpus"].verdict == "fail" and "ZeroDivisionError" in found["gpus"].text
    assert {"storage", "run folder", "metrics port", "ray cluster"} <= set(found)


def test_doctor_command_prints_findings_and_fails_if_a_run_would(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(doctor, "RAY_S", 1.0)
    path = tmp_path / "run.yaml"
    path.write_text(tiny(tmp_path, "d").to_yaml())
    told = CliRunner().invoke(app.cli, ["doctor", str(path), "--json"], standalone_mode=False)
    findings = [json.loads(line) for line in told.output.splitlines()]
    assert {one["verdict"] for one in findings} <= {"ok", "warn"} and told.return_value == 0, told.output
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        told = CliRunner().invoke(app.cli, ["doctor", str(path), f"metrics.port={taken.getsockname()[1]}"], standalone_mode=False)
    assert told.return_value == 0 and "warn  metrics port" in told.output and "-> another run" in told.output
    told = CliRunner().invoke(app.cli, ["doctor", str(path), "run.dir=/proc/nothing"], standalone_mode=False)
    assert told.return_value == 1 and "FAIL  run folder" in told.output
    assert os.listdir(tmp_path) == ["run.yaml"] or set(os.listdir(tmp_path)) == {"run.yaml", "text.txt"}
