"""The Python stacks of workers, also of those that do not answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import ray
from ray.exceptions import RayError

from vescale_ray.controller.worker_group.member import Member
from vescale_ray.controller.worker_group.ray_answers import one_line


def node_by_node(members: Mapping[str, Member], workers: Iterable[str]) -> list[str]:
    """Order the workers: first one of each node, then another of each.

    The first call to a node shows the supervisor whether the node answers, and blocks one of its few threads for up to a second. In the
    order of hiring, all threads would wait for the same node, and the nodes would come one after the other.
    """
    turns: Counter[str] = Counter()
    turn: dict[str, int] = {}
    for worker in workers:
        info = members[worker].info
        node = info.node if info is not None else worker
        turn[worker] = turns[node]
        turns[node] += 1
    return sorted(turn, key=turn.__getitem__)


def stacks_of(members: Mapping[str, Member], silent: Collection[str], supervisor: Any, wait_s: float, call_s: float) -> dict[str, str]:
    """Return the stacks of all ``members``.

    Args:
        silent: workers that have owed an answer for long. Only their nodes' agents are asked.
        wait_s: longest wait for the workers' own answers.
        call_s: longest wait for the answers of all agents together. A recovery waits for this.
    """
    asked = {w: member.handle.stacks.remote() for w, member in members.items() if w not in silent}
    done, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=wait_s) if asked else ([], [])
    infos = {w: member.info for w, member in members.items() if asked.get(w) not in done}
    # All at once: any of them may be on a machine that does not answer.
    refs = {w: supervisor.stacks.remote(info, wait_s) for w in node_by_node(members, infos) if (info := infos[w]) is not None}
    refs |= {w: ref for w, ref in asked.items() if ref in done}
    there = set(ray.wait(list(refs.values()), num_returns=len(refs), timeout=call_s)[0]) if refs else set()
    found: dict[str, str] = {}
    for worker, ref in refs.items():
        if ref not in there:
            found[worker] = f"(no answer within {call_s:g} s)"
            continue
        try:
            found[worker] = str(ray.get(ref))
        except RayError as error:
            found[worker] = f"({one_line(error)})"
    return found
