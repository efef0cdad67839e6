"""The cluster's nodes: the draining ones (pre-emption notices, ``ray drain-node``, SIGTERM of ``ray start --block``), and the free
resources of the others.

Ray reports draining nodes through one private call only: ``ray.nodes()`` and the resources do not exclude them (Ray 2.60). If a Ray lacks
that call, no node counts as draining. A separate thread asks, because the answer may take as long as Ray's control store takes. Readers get
the last answer at once.
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
EXCLUDED_S, LONGEST_EXCLUDED_S = 60.0, 120.0
"""Seconds for which a node that others don't reach is avoided. The time doubles each time, up to the second number. It is shorter than the
wait for a worker without a place (``Bounds``). If a worker is hired there too early, its connections are probed and it is refused."""
FORGET_S = 600.0
"""If a node was not avoided for this many seconds, its earlier times are forgotten."""
ROOM_POLLS = 2
"""Polls between two questions about free resources."""


class Nodes:
    """Watches the nodes: asks Ray every :data:`POLL_S` seconds, from :meth:`start` until the process ends.

    Args:
        each: resources of one worker; None: free resources are not asked for.
    """

    def __init__(self, each: Mapping[str, float] | None = None) -> None:
        self._each = each
        self._draining: Mapping[str, float] = {}
        self._free: Free | None = None
        self._excluded: dict[str, tuple[float, int]] = {}
        """For each node that was avoided: until when, and how many times."""
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._watch, name="vescale-nodes", daemon=True)
        self._thread.start()

    @property
    def draining(self) -> Mapping[str, float]:
        """Return the time at which each draining node goes, by node id, in seconds since the epoch; infinite if unknown."""
        return self._draining

    def exclude(self, node: str) -> None:
        """Start no worker on ``node`` for a while, because others don't reach it."""
        now = time.monotonic()
        until, times = self._excluded.get(node, (0.0, 0))
        times = 0 if now > until + FORGET_S else times
        self._excluded[node] = (now + min(EXCLUDED_S * 2.0 ** min(times, 30), LONGEST_EXCLUDED_S), times + 1)

    @property
    def avoided(self) -> frozenset[str]:
        """Nodes on which no worker is to be started: draining nodes, and nodes that others don't reach."""
        now = time.monotonic()
        return frozenset(self._draining) | {node for node, (until, _) in list(self._excluded.items()) if until > now}

    @property
    def free(self) -> Free | None:
        """Free places at the last poll; None if they are not known yet, or if this Ray does not report them."""
        return self._free

    def _watch(self) -> None:
        ask, ask_free = _call("get_draining_nodes"), _call("available_resources_per_node") if self._each else None
        if ask is None:
            _log.warning("this Ray does not report draining nodes: the run notices their workers only when they are lost")
        if self._each and ask_free is None:
            _log.warning("this Ray does not report the free resources of its nodes: the run neither grows by itself nor has spares")
        turn = 0
        while ask is not None or ask_free is not None:
            try:
                if ask is not None:
                    self._draining = {str(node): float(at) / 1000 if at else float("inf") for node, at in ask().items()}
                if ask_free is not None and turn % ROOM_POLLS == 0:
                    self._free = self._look(ask_free)
            except Exception as error:  # a private call may raise anything; the last answer stays
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
