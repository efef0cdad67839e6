"""Answers of Ray's actors: errors in a few words, and answers that are collected later."""

from __future__ import annotations

import time
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from vescale_ray.controller.worker_group.worker_news import SupervisorLost

NODE_LOST = "its node was lost"
LOOK_AGAIN_S = 2.0


class Reaching:
    """Pending answers of workers about which others they reach (:meth:`WorkerGroup.ask_reachability`). The wait ends at ``until``."""

    def __init__(self, refs: dict[Any, str], until: float) -> None:
        self._refs, self._until = refs, until

    def unreached(self) -> dict[str, frozenset[str]] | None:
        """For each worker that has answered, the workers that it does not reach. None while an answer is missing and the wait has not
        ended."""
        done, left = ray.wait(list(self._refs), num_returns=len(self._refs), timeout=0) if self._refs else ([], [])
        if left and time.monotonic() < self._until:
            return None
        found: dict[str, frozenset[str]] = {}
        for ref in done:
            try:
                found[self._refs[ref]] = frozenset(ray.get(ref))
            except RayError:
                pass  # its death is reported elsewhere
        return found


def answer_of(ref: Any, timeout_s: float) -> Any:
    """Return the supervisor's answer, within ``timeout_s``. A frozen process (a stopped container) reads nothing until its time is over, so
    the function tries once more."""
    try:
        try:
            return ray.get(ref, timeout=timeout_s)
        except GetTimeoutError:
            return ray.get(ref, timeout=LOOK_AGAIN_S)
    except RayTaskError:
        raise
    except RayError as error:
        raise SupervisorLost(f"the supervisor actor does not answer ({type(error).__name__}): the workers that it owned are lost") from None


def has_answered(poll: Any) -> bool:
    """Return whether the worker has answered the poll. Ray's error that it can't be reached is no answer."""
    if poll is None or not ray.wait([poll], timeout=0)[0]:
        return False
    try:
        ray.get(poll)
    except RayError:
        return False
    return True


def death_of(error: RayActorError) -> str:
    """Shorten Ray's message, which lists all possible causes, to a few words."""
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
