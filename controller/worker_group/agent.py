"""The agent actor, one per node: sends signals to processes of its machine, and fetches the stacks and run delays of those that do not
answer. It has no logic and does not import torch. It starts when the node's first worker is warm, because starting it during a recovery
would take longer than the rest of the recovery. It ends with the node's last worker.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from vescale_ray.workers.monitoring.heartbeat import starved_s, take_stacks
from vescale_ray.workers.monitoring.process import born

Thread = tuple[int, int, int]
"""Process id, start time of the process, and the system's id of the thread."""


class Agent:
    """The agent of one node."""

    def signal(self, pid: int, process_born: int, number: int) -> bool:
        """Send a signal, as :func:`send_signal`."""
        return send_signal(pid, process_born, number)

    def stacks(self, pid: int, process_born: int, descriptor: int, wait_s: float) -> str:
        """Return the stacks of all threads of a worker's process, or why there are none."""
        return fetch_stacks(pid, process_born, descriptor, wait_s)

    def starved(self, threads: Sequence[Thread]) -> list[float]:
        """Return the seconds for which each thread got no processor."""
        return fetch_starved(threads)


def send_signal(pid: int, process_born: int, number: int) -> bool:
    """Signal the process of this machine that started at ``process_born``; False if it is gone."""
    if born(pid) != process_born:
        return False
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def fetch_stacks(pid: int, process_born: int, descriptor: int, wait_s: float) -> str:
    """Return the stacks of a worker of this machine, if its process is still the one that started at ``process_born``."""
    return take_stacks(pid, descriptor, wait_s) if born(pid) == process_born else "(its process is gone)"


def fetch_starved(threads: Sequence[Thread]) -> list[float]:
    """Return the seconds for which each of these threads of this machine got no processor; 0 if its process is gone."""
    return [starved_s(pid, thread) if born(pid) == process_born else 0.0 for pid, process_born, thread in threads]


def start_agent(node: str) -> Any:
    """Start the agent of ``node``, and return its handle without waiting."""
    place = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(Agent).options(num_cpus=0, max_restarts=0, max_concurrency=4, scheduling_strategy=place).remote()
