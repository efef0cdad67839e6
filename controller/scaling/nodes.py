"""The cluster's nodes: which are about to go (pre-emption notices, ``ray drain-node``, SIGTERM of ``ray start --block``), and what is free
on the others.

Ray tells the first through one private call only: `ray.nodes()` and the resources don't exclude nodes that drain (Ray
2.60). A Ray without it is taken to have none. A thread of its own asks, since the answer may take as long as Ray's control store
does; whoever reads gets the last answer at once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from typing import Any

from vescale_ray.controller.scaling.capacity import Free, places

_log = logging.getLogger(__name__)

POLL_S = 0.25
SHUN_S, LONGEST_SHUN_S = 60.0, 120.0
"""A node that others don't reach is left alone for so long, the next time for longer. Shorter than a worker is waited for that has no place
(``Bounds``): who is hired there too early is tried, and refused."""
FORGET_S = 600.0
"""After so long it is as if it had not been."""
ROOM_POLLS = 2
"""Polls between two questions about free resources."""


class Nodes:
    """Asks four times a second, from :meth:`start` on, as long as the process lives.

    Args:
        each: what a worker takes of a node; None: what is free is not asked for.
    """

    def __init__(self, each: Mapping[str, float] | None = None) -> None:
        self._each = each
        self._draining: Mapping[str, float] = {}
        self._free: Free | None = None
        self._shunned: dict[str, tuple[float, int]] = {}
        """Until when, and how often it was."""
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._watch, name="vescale-nodes", daemon=True)
        self._thread.start()

    @property
    def draining(self) -> Mapping[str, float]:
        """By node id, the time (seconds since the epoch) at which it goes; infinite where that is not known."""
        return self._draining

    def shun(self, node: str) -> None:
        """Have no worker on ``node`` for a while: others don't reach it."""
        now = time.monotonic()
        until, times = self._shunned.get(node, (0.0, 0))
        times = 0 if now > until + FORGET_S else times
        self._shunned[node] = (now + min(SHUN_S * 2.0 ** min(times, 30), LONGEST_SHUN_S), times + 1)

    @property
    def avoided(self) -> frozenset[str]:
        """Nodes on which no worker is to be started: those that are about to go, and those that others don't reach."""
        now = time.monotonic()
        return frozenset(self._draining) | {node for node, (until, _) in list(self._shunned.items()) if until > now}

    @property
    def free(self) -> Free | None:
        """Free places as of the last question; None: not known yet, or this Ray does not tell."""
        return self._free

    def _watch(self) -> None:
        ask, ask_free = _call("get_draining_nodes"), _call("available_resources_per_node") if self._each else None
        if ask is None:
            _log.warning("this Ray does not tell which nodes drain: workers on them are noticed when they are lost")
        if self._each and ask_free is None:
            _log.warning("this Ray does not tell what is free on its nodes: the run neither grows by itself nor has spares")
        turn = 0
        while ask is not None or ask_free is not None:
            try:
                if ask is not None:
                    self._draining = {str(node): float(at) / 1000 if at else float("inf") for node, at in ask().items()}
                if ask_free is not None and turn % ROOM_POLLS == 0:
                    self._free = self._look(ask_free)
            except Exception as error:  # whatever a private call raises; the last answer stays
                _log.debug("nodes: %s", error)
            turn += 1
            time.sleep(POLL_S)

    def _look(self, ask: Any) -> Free:
        assert self._each is not None
        at, avoided = time.monotonic(), self.avoided
        free = {str(node): has for node, has in ask().items()}
        return Free(at, places(free, self._each, avoided), frozenset(free) - avoided)


def _call(name: str) -> Any:
    try:
        from ray._private.state import state
    except ImportError:
        return None
    return getattr(state, name, None)
