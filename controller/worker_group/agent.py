"""One agent per node: does on its machine what only a process there can: send signals, and fetch the stacks of a process that does not
answer, or tell whether it could. An actor without logic and without torch, started when the node's first worker is warm, so that it is
there when it is needed: starting one then would take longer than all the rest of a recovery. It is ended with the node's last worker.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from vescale_ray.workers.monitoring.heartbeat import starved_s, take_stacks
from vescale_ray.workers.worker import born

Thread = tuple[int, int, int]
"""Process, when that was born, and the system's number of the thread."""


class Agent:
    """Of one node."""

    def signal(self, pid: int, process_born: int, number: int) -> bool:
        """Signal a process of this machine, if it is still the one that was born then; False if it is gone."""
        return send_signal(pid, process_born, number)

    def stacks(self, pid: int, process_born: int, descriptor: int, wait_s: float) -> str:
        """The stacks of all threads of a worker's process, or why there are none."""
        return fetch_stacks(pid, process_born, descriptor, wait_s)

    def starved(self, threads: Sequence[Thread]) -> list[float]:
        """Seconds for which each of these got no processor."""
        return fetch_starved(threads)


def send_signal(pid: int, process_born: int, number: int) -> bool:
    """Signal a process of this machine, if it is still the one that was born then; False if it is gone."""
    if born(pid) != process_born:
        return False
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def fetch_stacks(pid: int, process_born: int, descriptor: int, wait_s: float) -> str:
    """The stacks of a worker of this machine, if it is still the one that was born then."""
    return take_stacks(pid, descriptor, wait_s) if born(pid) == process_born else "(its process is gone)"


def fetch_starved(threads: Sequence[Thread]) -> list[float]:
    """Seconds for which each of these threads of this machine got no processor; 0 where its process is not the one that was born then."""
    return [starved_s(pid, thread) if born(pid) == process_born else 0.0 for pid, process_born, thread in threads]


def start_agent(node: str) -> Any:
    """Start the agent of ``node``; its handle, at once."""
    place = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(Agent).options(num_cpus=0, max_restarts=0, max_concurrency=4, scheduling_strategy=place).remote()
