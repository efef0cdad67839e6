"""Silent workers whose machine is overloaded."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Any

import ray

from vescale_ray.controller.worker_group.member import Member
from vescale_ray.controller.worker_group.ray_answers import answer_of
from vescale_ray.workers.messages import WorkerInfo

SLOW_S, SLOWER, SLOWEST_S = 0.1, 10, 5.0
"""If other workers of a machine answer more than ``SLOW_S`` late (hundredths of it are usual), a silent worker there gets more time:
``SLOWER`` times their lateness, at most ``SLOWEST_S``. Its answer passes through about ``SLOWER`` processes."""
LOOKS = 8
"""Maximum number of nodes that :func:`excused` asks. If workers of more nodes are silent, the reason is not a slow machine."""


def excused(members: Mapping[str, Member], workers: Collection[str], starved: Any, call_s: float) -> dict[str, float]:
    """Return the workers that are silent because their machine is overloaded, each with the newly excused seconds of silence.

    These seconds add to those that earlier calls have excused since the worker's last report. A worker is excused for the time in which its
    training thread got no processor. Its answering threads are excused for a multiple of the lateness of the other workers on the machine,
    and of the agent that answers this call.

    Args:
        starved: the supervisor's method that asks a node.
        call_s: longest wait for all answers together.
    """
    asked: dict[str, dict[str, WorkerInfo]] = {}
    for worker in workers:
        member = members.get(worker)
        if member is not None and member.owes and member.info is not None and member.report is not None:
            asked.setdefault(member.info.node, {})[worker] = member.info
    began = time.monotonic()
    nodes = asked if len(asked) <= LOOKS else {}
    owed = {starved.remote(node, list(nodes[node].values())): node for node in nodes}
    found: dict[str, float] = {}
    while owed:
        there, _ = ray.wait(list(owed), num_returns=1, timeout=max(0.0, began + call_s - time.monotonic()))
        if not there:
            break
        took, node = time.monotonic() - began, owed.pop(there[0])
        told = answer_of(there[0], call_s)
        for worker, seconds in zip(asked[node], told or (), strict=False):
            member = members[worker]
            late = max(took, lateness(members, node, workers))
            slow = seconds - member.report.starved_s if seconds and member.report is not None else 0.0
            slow = max(slow, min(SLOWER * late, SLOWEST_S) if late > SLOW_S else 0.0)
            if more := member.excuse(slow):
                found[worker] = more
    return found


def lateness(members: Mapping[str, Member], node: str, but: Collection[str]) -> float:
    """Return the largest recent lateness of a node's workers in seconds, without those in ``but``."""
    now = time.monotonic()
    others = [m for w, m in members.items() if w not in but and m.info is not None and m.info.node == node]
    return max((m.lateness(now) for m in others), default=0.0)
