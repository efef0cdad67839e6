"""Ray for a run: a cluster of its own on this machine, or an existing cluster.

The run's own cluster has its own temporary folder and ports, no dashboard, and the size that the run needs. It ends with the run:
:meth:`Cluster.close` ends it and checks that nothing is left, and a watchdog does the same if this process is killed. ``ray stop`` is never
used, because it would end every Ray of the machine. ``RAY_AUTH_MODE`` is set explicitly: otherwise Ray 2.60 switches token authentication
on with the first local ``ray.init``, and then refuses clients without the token.
"""

from __future__ import annotations

import functools
import importlib
import logging
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vescale_ray import version
from vescale_ray.config import RunConfig
from vescale_ray.controller.driver import watchdog
from vescale_ray.controller.protocol import NAMESPACE, RunRefused
from vescale_ray.errors import one_line

_log = logging.getLogger(__name__)

QUIET = "A worker died or was killed while executing a task"
"""Ray prints a paragraph with this text at every death of a worker. It is suppressed, because the run reports a death in one line."""
CLOSE_S = 10.0
CONNECT_S = 10.0
STARTS = 2
"""Attempts to start Ray on this machine. A start fails on a machine that is so busy that Ray needs more than its 30 s."""


def address_of(config: RunConfig) -> str:
    """Return the address of the Ray that a run uses; ``local``: a cluster of its own. If this process is connected to Ray, the run uses
    that."""
    ray: Any = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return str(ray.get_runtime_context().gcs_address)
    return config.ray.address or os.environ.get("RAY_ADDRESS") or "local"


def connection_problem(address: str) -> str | None:
    """Return the reason why no process answers at ``host:port``, within :data:`CONNECT_S`.

    Return None if a process listens there, or if only Ray can resolve the address, as with ``auto``. Ray's own client would try for many
    minutes."""
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdigit():
        return None
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except (OSError, OverflowError, UnicodeError) as error:
        return getattr(error, "strerror", None) or str(error)
    return None


def check_address(address: str) -> None:
    """Check that a process listens at the address of a Ray cluster.

    Raises:
        RunRefused: no process answers there.
    """
    reason = connection_problem(address)
    if reason is not None:
        raise RunRefused(f"ray.address = {address}: no cluster answers there ({reason}); start one, or use local")


class Cluster:
    """A connection to Ray, and the cluster behind it if it is our own.

    Attributes:
        capacity: workers that can ever be placed; None: unknown, the cluster may grow.
        node: id of the node that this process is on.
    """

    def __init__(self, config: RunConfig) -> None:
        self._folder: str | None = None
        self._watchdog: subprocess.Popen[bytes] | None = None
        self._connected = False
        self.capacity: int | None = None
        try:
            self._connect(config)
        except BaseException:
            self.close()
            raise

    @property
    def own(self) -> bool:
        """True if the cluster was started here."""
        return self._folder is not None

    def close(self) -> list[int]:
        """Leave the cluster, and end it if it is our own. Returns processes that could not be ended, normally none. May be called twice."""
        left: list[int] = []
        try:
            if self._connected:
                self._connected = False
                import ray

                ray.shutdown()
        finally:
            if self._folder is not None:
                left = watchdog.end_all(self._folder, spare=(os.getpid(),), patience_s=CLOSE_S)
                shutil.rmtree(self._folder, ignore_errors=True)
                self._folder = None
            if self._watchdog is not None:
                self._dismiss_watchdog(self._watchdog, finished=not left)
                self._watchdog = None
        return left

    def _connect(self, config: RunConfig) -> None:
        os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", QUIET)  # read when Ray is imported
        address = address_of(config)
        if address == "local":
            os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        import ray

        if not ray.is_initialized():
            if address == "local":
                self._start(config)
            else:
                check_address(address)
                try:
                    with _sigterm_kept():
                        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
                except (ConnectionError, ValueError, RuntimeError) as error:
                    reason = one_line(error)[:200]
                    raise RunRefused(f"ray.address = {address}: no cluster answers there ({reason}); start one, or use local") from None
            self._connected = True
        self.node = ray.get_runtime_context().get_node_id()

    def _start(self, config: RunConfig) -> None:
        each = config.ray.cpus_per_worker
        cpus = config.ray.num_cpus or max(1, math.ceil((config.max_workers + config.elastic.spares) * each))
        self.capacity = math.floor(cpus / each + 1e-6) if each > 0 else None
        if self.capacity is not None and self.capacity < config.elastic.workers:
            raise RunRefused(
                f"elastic.workers = {config.elastic.workers} times ray.cpus_per_worker = {each:g} is more than ray.num_cpus = {cpus}: "
                "raise ray.num_cpus, or lower one of the others"
            )
        for start in range(1, STARTS + 1):
            try:
                self._start_once(cpus, config.ray.object_store_mb)
                return
            except Exception as error:  # Ray raises Exception itself if a node takes more than 30 s to start
                self.close()
                reason = one_line(error)[:200]
                if start == STARTS:
                    raise RunRefused(
                        f"Ray did not start on this machine in {STARTS} attempts ({reason}): "
                        "check its free memory and /tmp, or end other programs"
                    ) from error
                _log.warning("Ray did not start on this machine (%s); starting it again", reason)

    def _start_once(self, cpus: int, store_mb: int) -> None:
        import ray

        # The path is short because it is part of the sockets' paths, which may have at most 107 bytes.
        self._folder = tempfile.mkdtemp(prefix="vsr-", dir="/tmp")
        self._watchdog = _start_watchdog(self._folder)
        # By default, Ray gives its workers niceness 15: any other process on the machine would be served first, and training would starve.
        # In this cluster, workers have the priority that those of `torchrun` have.
        niceness = {"RAY_worker_niceness": os.environ.get("RAY_worker_niceness", "0")}
        with _environment({watchdog.MARK: self._folder, "PYTHONPATH": _python_path(), **niceness}), _servers_apart(), _sigterm_kept():
            ray.init(
                address="local",
                num_cpus=cpus,
                object_store_memory=store_mb * 1024 * 1024,
                include_dashboard=False,
                namespace=NAMESPACE,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _temp_dir=self._folder,
            )

    @staticmethod
    def _dismiss_watchdog(process: subprocess.Popen[bytes], *, finished: bool) -> None:
        assert process.stdin is not None
        try:
            if finished:
                process.stdin.write(b"done")
            process.stdin.close()
        except OSError:
            pass  # someone has killed it
        try:
            process.wait(timeout=watchdog.PATIENCE_S + 2)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=5)


def _start_watchdog(folder: str) -> subprocess.Popen[bytes]:
    """Start the watchdog in a session of its own, so that it outlives the driver's session."""
    script = Path(watchdog.__file__).resolve()
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(script), folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd="/",
    )


@contextmanager
def _servers_apart() -> Iterator[None]:
    """Start the Ray servers of this block in a process group of their own. ``timeout 8h vescale-ray train ..``, a service manager or a
    batch system sends SIGTERM to the driver's whole process group. Servers in it would end before the last checkpoint, and all workers with
    them. (They block SIGINT.) The watchdog finds them by their environment."""
    services: Any = importlib.import_module("ray._private.services")
    before = services.ConsolePopen
    services.ConsolePopen = functools.partial(before, process_group=0)
    try:
        yield
    finally:
        services.ConsolePopen = before


@contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Keep SIGTERM's handler during ``ray.init``. Ray first sets a handler in Python that ends the process at once: a run that is stopped
    while Ray starts would count as failed. A function that does nothing replaces that step. Then Ray's core sets a handler that prints a
    stack and aborts. That can't be prevented, so the earlier handler is set again afterwards."""
    utils: Any = importlib.import_module("ray._private.utils")
    before, handler = utils.set_sigterm_handler, signal.getsignal(signal.SIGTERM)
    utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        utils.set_sigterm_handler = before
        if threading.current_thread() is threading.main_thread() and handler is not None:
            signal.signal(signal.SIGTERM, handler)


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the processes that the block starts, and restore them afterwards."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _python_path() -> str:
    """Return a ``PYTHONPATH`` with which the workers find this package, installed or not."""
    root = str(Path(version.__file__).resolve().parent.parent)
    return os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
