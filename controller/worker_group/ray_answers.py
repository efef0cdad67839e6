"""Answers of Ray's actors: errors in a few words, and answers that are collected later."""

from __future__ import annotations

import time
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

NODE_LOST = "its node was lost"


class Reaching:
    """Workers that were asked whom they reach (:meth:`WorkerGroup.ask_reach`); their answers are waited for ``until`` then."""

    def __init__(self, refs: dict[Any, str], until: float) -> None:
        self._refs, self._until = refs, until

    def unreached(self) -> dict[str, frozenset[str]] | None:
        """By each worker that has answered, whom it does not reach. None: not all have, and there is time. Who does not answer has told
        nothing."""
        done, left = ray.wait(list(self._refs), num_returns=len(self._refs), timeout=0) if self._refs else ([], [])
        if left and time.monotonic() < self._until:
            return None
        found: dict[str, frozenset[str]] = {}
        for ref in done:
            try:
                found[self._refs[ref]] = frozenset(ray.get(ref))
            except RayError:
                pass  # its death is told of elsewhere
        return found


def has_answered(poll: Any) -> bool:
    """Whether there is an answer, and not only word that the worker can't be reached."""
    if poll is None or not ray.wait([poll], timeout=0)[0]:
        return False
    try:
        ray.get(poll)
    except RayError:
        return False
    return True


def death_of(error: RayActorError) -> str:
    """Ray's long message (it lists all that may have been) as a few words."""
    text = str(error)
    if "killed by `ray.kill`" in text:
        return "killed by ray.kill"
    if "owner has died" in text or "OWNER_DIED" in text:
        return "its owner died"
    if "NODE_DIED" in text or "node died" in text or "node has died" in text:
        return NODE_LOST
    if "NODE_OUT_OF_MEMORY" in text:
        return "killed by Ray's memory monitor"
    if "creation task" in text:
        return one_line(error)
    return "its process died"


def one_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    text = " ".join((lines[0] if lines else type(error).__name__).split())
    return text if len(text) <= 300 else text[:297] + "..."
