"""``vescale-ray doctor``: checks this machine for problems that have made runs fail, and gives a remedy for each.

Each check is a function that looks at one thing, within its own time limit, and leaves no changes. If it can't find something out, it
reports that, too.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import importlib.metadata
import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from vescale_ray import compat
from vescale_ray.config import RunConfig
from vescale_ray.controller.driver.local_ray import address_of, connection_problem
from vescale_ray.errors import one_line
from vescale_ray.lasting import REMEDY, goes_with, in_temporary_folder
from vescale_ray.runfolder import unlockable

Verdict = Literal["ok", "warn", "fail"]
TESTED = {"torch": compat.RELEASES, "ray": ("2.60",)}
"""The releases that the tests run with, the oldest first. Another release of Ray is a warning; another torch is refused at import."""
SHM_BYTES = 1 << 30
FILES = 65536
SKEW_S = 5.0
RAY_S = 40.0


@dataclass(frozen=True)
class Finding:
    """Finding of one check. ``remedy`` is empty if nothing is to be done."""

    check: str
    verdict: Verdict
    text: str
    remedy: str = ""

    def to_json(self) -> dict[str, str]:
        return asdict(self)


def examine(config: RunConfig | None) -> Iterator[Finding]:
    """Run all checks, one after the other. With ``config``, they include the run's folder, its storage, its port and Ray."""
    checks: list[tuple[str, Callable[[], Finding]]] = [
        ("python", python),
        *((name, lambda name=name: package(name)) for name in TESTED),  # type: ignore[misc]
        ("gpus", lambda: gpus(config)),
        ("network", network),
        ("shared memory", shared_memory),
        ("open files", open_files),
        ("locked memory", locked_memory),
        ("clock", clock),
    ]
    if config is not None:
        checks += [
            ("run folder", lambda: run_folder(config)),
            ("storage", lambda: storage(config.checkpoint_root)),
            ("metrics port", lambda: port(config.metrics.host, config.metrics.port)),
            ("ray cluster", lambda: ray_cluster(config.ray.address)),
        ]
    for name, check in checks:
        try:
            yield check()
        except Exception as error:
            said = f"{type(error).__name__}: {one_line(error)}"
            yield Finding(name, "fail", f"could not be looked at: {said}", "a fault of this check; please report it with this line")


def python() -> Finding:
    version = platform.python_version()
    fit = (3, 11) <= sys.version_info[:2] <= (3, 13)
    return Finding("python", "ok" if fit else "fail", f"Python {version}", "" if fit else "use Python 3.11 to 3.13")


def package(name: str) -> Finding:
    """Check whether ``name`` is installed, in the release that the tests run with."""
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "fail", "is not installed", f"pip install -c constraints.txt {name}")
    if ".".join(version.split(".")[:2]) in TESTED[name]:
        return Finding(name, "ok", version)
    tested, newest = " to ".join(dict.fromkeys((TESTED[name][0], TESTED[name][-1]))), TESTED[name][-1]
    return Finding(name, "warn", f"{version}; tested with {tested}", f"pip install '{name}=={newest}.*', or run the tests with this one")


def gpus(config: RunConfig | None) -> Finding:
    """Check whether torch sees the GPUs of this machine, and whether the run uses them."""
    import torch

    driver = shutil.which("nvidia-smi") is not None
    if torch.cuda.is_available():
        names = sorted({torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())})
        nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None
        text = f"{torch.cuda.device_count()} ({', '.join(names)}), CUDA {torch.version.cuda}, NCCL {nccl or 'missing'}"
        if nccl and config is not None and config.train.device == "auto" and not config.ray.gpus_per_worker:
            text = f"{text}; with ray.gpus_per_worker = 0 workers compute on the CPU"
            return Finding("gpus", "warn", text, "set ray.gpus_per_worker to 1, or train.device to cpu")
        return Finding("gpus", "ok" if nccl else "fail", text, "" if nccl else "install torch's CUDA build, which has NCCL")
    if driver:
        return Finding(
            "gpus", "fail", "there is a driver, but torch sees no GPU", "install torch's CUDA build; look at CUDA_VISIBLE_DEVICES"
        )
    return Finding("gpus", "warn", "none: workers train on the CPU, with gloo", "fine for a trial; a node without GPUs can hold the head")


def network() -> Finding:
    """Check the network interface over which the ranks will communicate."""
    there = {name for _, name in socket.if_nameindex()}
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        wanted = os.environ.get(variable)
        if not wanted or wanted.startswith("^"):
            continue
        # "=eth0" means this interface; "eth" means all that begin with it (NCCL), or exactly this one (gloo).
        names = [name.removeprefix("=") for name in wanted.split(",")]
        if not any(have.startswith(name) for name in names for have in there):
            remedy = f"set it to one of {', '.join(sorted(there))}, or unset it"
            return Finding("network", "fail", f"{variable} = {wanted}: this machine has no such interface", remedy)
    host = socket.gethostname()
    try:
        address = socket.gethostbyname(host)
    except OSError:
        return Finding("network", "warn", f"the name {host} has no address", "add it to /etc/hosts: torch's process groups look it up")
    if address.startswith("127.") and len(there) > 1:
        remedy = (
            "fine on one machine, and for a run's workers, which take the interface of their node's address in Ray; for torchrun on "
            "several set GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) to the interface between them"
        )
        return Finding("network", "warn", f"{host} is {address}: other machines could not reach it", remedy)
    return Finding("network", "ok", f"{host} is {address}; interfaces: {', '.join(sorted(there))}")


def shared_memory(path: str = "/dev/shm") -> Finding:
    """Check the free shared memory, which Ray's objects and NCCL's rings between a node's GPUs use. A container has 64 MiB by
    default."""
    try:
        free = shutil.disk_usage(path).free
    except OSError as error:
        return Finding("shared memory", "fail", f"{path}: {error.strerror}", "mount a tmpfs there")
    if free >= SHM_BYTES:
        return Finding("shared memory", "ok", f"{path}: {free / (1 << 30):.1f} GiB free")
    remedy = "docker run --shm-size=8g; on Kubernetes an emptyDir with medium: Memory at /dev/shm. Without it NCCL ends with a bus error"
    return Finding("shared memory", "fail", f"{path}: {free / (1 << 20):.0f} MiB free, {SHM_BYTES >> 20} are needed", remedy)


def open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= FILES:
        return Finding("open files", "ok", f"ulimit -n {soft}")
    enough = hard == resource.RLIM_INFINITY or hard >= FILES
    remedy = f"ulimit -n {FILES}" if enough else f"raise the hard limit, {hard}, too (limits.conf)"
    return Finding("open files", "warn", f"ulimit -n {soft}: Ray's head needs more with some hundred workers", remedy)


def locked_memory() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding("locked memory", "ok", "ulimit -l unlimited")
    if not Path("/sys/class/infiniband").is_dir():
        return Finding("locked memory", "ok", f"ulimit -l {soft // 1024} KiB; no InfiniBand here, which would need more")
    return Finding(
        "locked memory",
        "fail",
        f"ulimit -l {soft // 1024} KiB",
        "ulimit -l unlimited (and IPC_LOCK in a container): InfiniBand locks its buffers",
    )


class _Timex(ctypes.Structure):
    """``struct timex`` of adjtimex(2). ``rest`` covers the fields that are not read here."""

    _fields_: ClassVar = [
        ("modes", ctypes.c_uint),
        *((name, ctypes.c_long) for name in ("offset", "freq", "maxerror", "esterror")),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_long * 64),
    ]


UNSYNCHRONISED = 5
"""``TIME_ERROR``: adjtimex(2) returns this if the clock is not synchronised."""


def clock() -> Finding:
    """Check whether this machine's clock is synchronised, according to the kernel. :func:`ray_cluster` compares the nodes' clocks."""
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(told := _Timex()))
    except (OSError, AttributeError):
        state = -1
    if state < 0:
        return Finding("clock", "ok", "whether something keeps it this system doesn't tell")
    if state == UNSYNCHRONISED:
        remedy = "run an NTP client (chrony): S3 refuses requests of a clock that is 15 minutes off, and the events and metrics of several "
        return Finding("clock", "warn", "nothing keeps it, says the kernel", f"{remedy}machines can't be compared")
    return Finding("clock", "ok", f"kept, to {told.maxerror / 1e6:.3f} s")


def run_folder(config: RunConfig) -> Finding:
    """Check whether the run's folder can be written and locked, and how many bytes are free there."""
    folder = config.run_folder
    if (reason := goes_with(folder)) is not None:
        return Finding("run folder", "fail", f"{folder} lies in {reason}", f"set run.dir: {REMEDY}")
    if in_temporary_folder(folder) and address_of(config) != "local":
        return Finding("run folder", "warn", f"{folder} lies in this node's folder for temporary files", f"set run.dir: {REMEDY}")
    at = next(parent for parent in (folder, *folder.parents) if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=at) as file:  # permissions are not enough: the file system may be read-only or full
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                text, _, remedy = unlockable(error).partition("; ")
                return Finding("run folder", "fail", f"{at}: {text}", remedy)
    except OSError as error:
        return Finding("run folder", "fail", f"{at}: can't be written ({error.strerror or error})", "set run.dir to a folder of yours")
    free = shutil.disk_usage(at).free
    text = f"{folder}: {free / (1 << 30):.1f} GiB free"
    if free > 1 << 30:
        return Finding("run folder", "ok", text)
    return Finding("run folder", "warn", text, "make room: metrics, events and samples are kept there")


def storage(root: str) -> Finding:
    """Check whether the store can write, read and list, refuses to create a name twice, deletes, and has the right time."""
    from vescale_ray.checkpoint.stores.opening import store_of

    if (reason := goes_with(root)) is not None:
        return Finding("storage", "fail", f"{root} lies in {reason}", f"set checkpoint.dir: {REMEDY}, or a URL")
    key = f"attempts/doctor-{uuid.uuid4().hex}/probe.json"
    try:
        store = store_of(root)
    except (OSError, ValueError) as error:
        return Finding("storage", "fail", _said(error), "set checkpoint.dir to a folder, or to a URL that checkpoints can be written to")
    folders = [] if "://" in root else [Path(root, key).absolute().parent, *Path(root, key).absolute().parent.parents]
    made = [folder for folder in folders if not folder.exists()]
    found = _tried(store, key)
    try:
        store.delete(key)
    except Exception as error:
        if found.verdict == "ok":
            text = f"{store.describe()}: can't delete ({_said(error)}), so that old checkpoints stay"
            found = Finding("storage", "warn", text, "let the run delete objects there")
    finally:
        for folder in made:
            with suppress(OSError):
                folder.rmdir()  # fails unless it is empty
    return found


def _tried(store: Any, key: str) -> Finding:
    from vescale_ray.checkpoint.stores.store import KeyExists

    there, data, began = store.describe(), b'{"probe": 1}\n', time.monotonic()
    try:
        store.put(key, data)
    except Exception as error:
        return Finding("storage", "fail", f"{there}: can't be written ({_said(error)})", "check the path, credentials and quota")
    try:
        try:
            store.put(key, data)
            exclusive = False
        except KeyExists:
            exclusive = True
        right, listed = store.get(key) == data, any(entry.key == key for entry in store.list(key.rpartition("/")[0] + "/"))
        skew = abs(store.clock() - time.time())
    except Exception as error:
        remedy = "checkpoints need to read and list, too"
        return Finding("storage", "fail", f"{there}: was written, but can't be used ({_said(error)})", remedy)
    took = time.monotonic() - began
    if not right or not listed:
        return Finding("storage", "fail", f"{there}: what was written is not there", "use a store that shows what it has acknowledged")
    if not exclusive:
        remedy = "use a store with exclusive creation, or let one process alone commit"
        return Finding("storage", "fail", f"{there}: creates one name twice", remedy)
    if skew > SKEW_S:
        return Finding("storage", "warn", f"{there}: its clock and this machine's are {skew:.0f} s apart", "run an NTP client (chrony)")
    return Finding("storage", "ok", f"{there}: written, read, listed, created once, deleted, in {took:.2f} s; clocks {skew:.1f} s apart")


def _said(error: Exception) -> str:
    return one_line(getattr(error, "strerror", None) or error) or type(error).__name__


def port(host: str, number: int) -> Finding:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, number))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                remedy = "another run on this machine? A run would take any free port instead; choose another metrics.port for Prometheus"
                return Finding("metrics port", "warn", f"{host}:{number}: {error.strerror}", remedy)
            remedy = "set metrics.host to an address of this machine, and metrics.port to a port from 1024 on"
            return Finding("metrics port", "fail", f"{host}:{number}: {error.strerror or error}", remedy)
    if number == 0:
        return Finding("metrics port", "ok", "any free one (metrics.port = 0); give a fixed one for Prometheus to find")
    return Finding("metrics port", "ok", f"{host}:{number} is free")


_PROBE = """
import json, sys, time, ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On
ray.init(address=sys.argv[1], logging_level="ERROR", log_to_driver=False)
nodes = [n for n in ray.nodes() if n["Alive"]]

@ray.remote(num_cpus=0)
class Clock:
    def now(self):
        return time.time()

end = time.monotonic() + float(sys.argv[2])
clocks = {n["NodeID"]: Clock.options(scheduling_strategy=On(n["NodeID"], soft=False)).remote() for n in nodes[: int(sys.argv[3])]}
first = {node: clock.now.remote() for node, clock in clocks.items()}  # a process starts there meanwhile
ready, _ = ray.wait(list(first.values()), num_returns=len(first), timeout=max(0.0, end - time.monotonic()))
apart = {}
for node, clock in clocks.items():
    if first[node] in ready:
        began = time.time()
        try:
            there = ray.get(clock.now.remote(), timeout=max(0.1, end - time.monotonic()))
        except ray.exceptions.RayError:
            continue
        apart[node] = there - (began + time.time()) / 2
told = {"nodes": len(nodes), "resources": ray.cluster_resources(), "version": ray.__version__}
print("\\n" + json.dumps({**told, "asked": len(clocks), "apart": apart}))
"""
CLOCKS, CLOCKS_S = 64, 15.0
"""Maximum number of nodes whose clocks are read, and how many seconds that may take."""


def ray_cluster(address: str | None, wait_s: float = RAY_S) -> Finding:
    """Check whether the cluster can be used. A separate process connects to it, because that can be ended if it hangs."""
    address = address or os.environ.get("RAY_ADDRESS")
    if address in (None, "", "local"):
        return Finding("ray cluster", "ok", "none is named: the run starts a Ray of its own")
    assert address is not None
    reason = connection_problem(address)
    if reason is not None:
        told = f"{address}: no cluster answers there ({reason})"
        return Finding("ray cluster", "fail", told, "is its head up, and this port of it reachable from here?")
    try:
        command = [sys.executable, "-c", _PROBE, address, str(CLOCKS_S), str(CLOCKS)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=wait_s, check=False)
    except subprocess.TimeoutExpired:
        return Finding(
            "ray cluster", "fail", f"{address}: no answer within {wait_s:g} s", "is its head up, and port 6379 reachable from here?"
        )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        said = re.sub(r"\x1b\[[0-9;]*m", "", lines[-1])[:300] if lines else f"exit code {done.returncode}"
        remedy = "start one (ray start --head), or set ray.address; with AuthenticationError set RAY_AUTH_MODE to what the cluster has"
        return Finding("ray cluster", "fail", f"{address}: {said}", remedy)
    return _cluster(address, json.loads(done.stdout.splitlines()[-1]))


def _cluster(address: str, told: dict[str, Any]) -> Finding:
    """Make the finding from a probe's answer. ``apart`` in the answer: for each node, the seconds by which its clock is ahead of this
    machine's."""
    have, apart = told["resources"], told["apart"]
    text = f"{address}: {told['nodes']} nodes, {have.get('CPU', 0):g} CPUs, {have.get('GPU', 0):g} GPUs, Ray {told['version']}"
    mute = told["asked"] - len(apart)
    if mute:
        remedy = "look at these nodes in `ray status` and the dashboard: no process could be started there"
        return Finding("ray cluster", "warn", f"{text}; {mute} of {told['asked']} nodes asked for their clock did not answer", remedy)
    ahead, behind = (choose(apart, key=lambda node: apart[node]) for choose in (max, min)) if apart else ("", "")
    skew = apart[ahead] - apart[behind] if apart else 0.0
    if skew > SKEW_S:
        remedy = "run an NTP client (chrony) on every node: times in events, logs and metrics can't be compared"
        return Finding("ray cluster", "warn", f"{text}; the clock of node {ahead} is {skew:.1f} s ahead of node {behind}'s", remedy)
    return Finding("ray cluster", "ok", f"{text}; clocks {skew:.2f} s apart")
