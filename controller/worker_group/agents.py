"""The agents of a run's nodes, as the supervisor calls them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import ray

from vescale_ray.controller.worker_group.agent import start_agent

_log = logging.getLogger(__name__)

AGENT_S = 1.0
"""If an agent has not answered after this time, its node counts as gone or stopped. A recovery waits for this."""
GONE_S = 10.0
"""The agent of a node that counts as gone is not asked again for this time."""


class Agents:
    """One agent per node, for any thread.

    Args:
        home: the supervisor's own node, which has no agent.
        submit: has a thread do a call that may wait for Ray's control store, one after another.
    """

    def __init__(self, home: str, submit: Callable[..., Future[Any]]) -> None:
        self._home, self._submit = home, submit
        self._lock = threading.Lock()
        self._agents: dict[str, Future[Any]] = {}
        self._gone: dict[str, float] = {}

    def have(self, node: str) -> None:
        """Ensure that ``node`` has an agent."""
        with self._lock:
            self._have(node)

    def _have(self, node: str) -> None:
        if node != self._home and node not in self._agents:
            self._agents[node] = self._submit(start_agent, node)

    def end(self, node: str) -> None:
        """End the agent of ``node``, if there is one."""
        with self._lock:
            agent = self._agents.pop(node, None)
        if agent is not None:
            self._submit(_end_agent, agent)

    def call(self, node: str, wait_s: float, method: str, *args: Any) -> Any:
        """Return the answer of the agent of ``node``; None if there is none, and the node counts as gone."""
        if time.monotonic() - self._gone.get(node, -GONE_S) < GONE_S:
            return None
        with self._lock:
            self._have(node)
            agent = self._agents[node]
        began = time.monotonic()
        try:
            ref = getattr(agent.result(wait_s), method).remote(*args)
            done, _ = ray.wait([ref], timeout=max(0.0, began + wait_s - time.monotonic()))
            if done:
                return ray.get(done[0])
        except TimeoutError:
            pass  # it could not be started yet
        except Exception as error:
            _log.warning("the agent on node %s has ended or could not be started: %s", node, error)
            with self._lock:
                if self._agents.get(node) is agent:
                    del self._agents[node]
        self._gone[node] = time.monotonic()
        return None

    def close(self) -> None:
        """End all agents."""
        for node in list(self._agents):
            self.end(node)


def _end_agent(agent: Future[Any]) -> None:
    """End an agent. Called in the thread that starts agents, so its start is done."""
    ray.kill(agent.result(0.0), no_restart=True)
