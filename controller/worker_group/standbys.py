"""The standbys that the supervisor keeps: workers without a place and without a device, which have imported everything.

Each node with workers has ``elastic.standby`` of them, as it has an agent. A standby becomes a worker when it gets the place of a lost one,
which takes no start of a process. It is an actor without resources, so Ray counts it nowhere. Another follows later, so that its start
takes no processor time from the recovery.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup

_log = logging.getLogger(__name__)

FILL_S, LONGEST_FILL_S = 3.0, 600.0
"""Seconds between the need for a standby and its start. They double with each standby in a row that was lost, up to the second number."""
EMPLOY_S = 0.5
"""A standby that has not taken a place after this time is stopped or dead, and is ended."""


@dataclass(frozen=True)
class WorkerPlace:
    """A placement group for a worker. ``node``: where it is, if known. ``devices``: its GPUs; None if they are not known."""

    group: PlacementGroup
    node: str | None = None
    devices: str | None = None


@dataclass(eq=False)
class _Standby:
    worker: str
    handle: Any
    node: str


class Standbys:
    """Keeps standbys on nodes, for any thread.

    Args:
        count: number of standbys per node.
        start: starts a standby on a node, and returns its worker id and handle without waiting.
        submit: has a thread do a call that may wait for Ray's control store.
    """

    def __init__(self, count: int, start: Callable[[str], tuple[str, Any]], submit: Callable[..., Any]) -> None:
        self._count, self._start, self._submit = count, start, submit
        self._lock = threading.Lock()
        self._nodes: set[str] = set()
        self._there: list[_Standby] = []
        self._ready: set[_Standby] = set()
        self._timers: dict[str, threading.Timer] = {}
        self._lost: dict[str, int] = {}
        """By node, the number of standbys in a row that were lost before they were ready."""

    def keep(self, node: str) -> None:
        """Keep standbys on ``node``, until :meth:`release`."""
        if self._count:
            with self._lock:
                self._nodes.add(node)
                self._fill_later(node)

    def release(self, node: str) -> None:
        """End the standbys on ``node``, and start no more."""
        with self._lock:
            self._nodes.discard(node)
            if (timer := self._timers.pop(node, None)) is not None:
                timer.cancel()
            for standby in [one for one in self._there if one.node == node]:
                self._end(standby)

    def ready(self) -> dict[str, int]:
        """Return the number of standbys that can take a place, by node."""
        with self._lock:
            nodes = [one.node for one in self._ready]
        return {node: nodes.count(node) for node in nodes}

    def take(self, node: str, devices: str) -> tuple[str, Any] | None:
        """Turn a standby on ``node`` into a worker that uses ``devices``. Return its id and handle; None if no standby on the node
        answers."""
        while True:
            with self._lock:
                standby = next((one for one in self._there if one in self._ready and one.node == node), None)
                if standby is None:
                    return None
                self._remove(standby)
                self._fill_later(node)
            ref = standby.handle.employ.remote(devices)
            try:
                ray.get(ref, timeout=EMPLOY_S)
                return standby.worker, standby.handle
            except Exception as error:
                _log.warning("standby %s did not become a worker: %s", standby.worker, error)
                self._submit(_kill, standby.handle)

    # ------------------------------------------------------------------------------------------------------------- start

    def _fill_later(self, node: str) -> None:
        """Start the missing standbys on ``node`` after a delay. Call it with the lock held."""
        if node in self._nodes and node not in self._timers and sum(one.node == node for one in self._there) < self._count:
            wait_s = min(FILL_S * 2.0 ** min(self._lost.get(node, 0), 30), LONGEST_FILL_S)
            self._timers[node] = later(wait_s, self._fill, node)

    def _fill(self, node: str) -> None:
        with self._lock:
            if self._timers.pop(node, None) is not None:
                for _ in range(self._count - sum(one.node == node for one in self._there)):
                    self._submit(self._begin, node)

    def _begin(self, node: str) -> None:
        """Start a standby on ``node``. Called in the thread of ``submit``."""
        if node not in self._nodes:
            return
        try:
            worker, handle = self._start(node)
        except Exception as error:
            _log.warning("a standby on node %s could not be started: %s", node, error)
            with self._lock:
                self._count_loss(node)
            return
        standby = _Standby(worker, handle, node)
        with self._lock:
            self._there.append(standby)
            if node not in self._nodes:
                return self._end(standby)
        handle.prepared.remote().future().add_done_callback(partial(self._prepared, standby))
        handle.lifeline.remote(0).future().add_done_callback(partial(self._prepared, standby))

    def _prepared(self, standby: _Standby, done: Future[Any]) -> None:
        """Note that a standby is ready, or remove a lost one. Its lifeline calls this, too: it ends with an error if the process dies."""
        error = done.exception()
        with self._lock:
            if standby not in self._there:
                return
            if error is None:
                self._ready.add(standby)
                self._lost[standby.node] = 0
                return
            _log.warning("standby %s is lost: %s", standby.worker, error)
            self._end(standby)
            self._count_loss(standby.node)

    def _count_loss(self, node: str) -> None:
        self._lost[node] = self._lost.get(node, 0) + 1
        self._fill_later(node)

    def _end(self, standby: _Standby) -> None:
        self._remove(standby)
        self._submit(_kill, standby.handle)

    def _remove(self, standby: _Standby) -> None:
        self._there.remove(standby)
        self._ready.discard(standby)


class _Timer(threading.Timer):
    """A timer that does not keep its process alive."""

    def __init__(self, wait_s: float, function: Callable[..., object], args: tuple[Any, ...]) -> None:
        super().__init__(wait_s, function, args)
        self.daemon = True


def later(wait_s: float, function: Callable[..., object], *args: Any) -> threading.Timer:
    """Call ``function`` after ``wait_s`` in another thread, unless the timer is cancelled."""
    timer = _Timer(wait_s, function, args)
    timer.start()
    return timer


def _kill(handle: Any) -> None:
    try:
        ray.kill(handle, no_restart=True)
    except Exception as error:
        _log.warning("Ray could not end a standby; it ends with the run: %s", error)
