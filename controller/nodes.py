"""Which nodes of the cluster are about to go: pre-emption notices, ``ray drain-node``, SIGTERM of ``ray start --block``.

Ray tells through one private call only: `ray.nodes()` and the resources don't exclude nodes that drain (`research/elastic.md` 0,
finding 8). A Ray without it is taken to have none. A thread of its own asks, since the answer may take as long as Ray's control store
does; whoever reads gets the last answer at once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from typing import Any

_log = logging.getLogger(__name__)

POLL_S = 0.25


class Nodes:
    """Asks four times a second, from :meth:`start` on, as long as the process lives."""

    def __init__(self) -> None:
        self._draining: Mapping[str, float] = {}
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._watch, name="vescale-nodes", daemon=True)
        self._thread.start()

    @property
    def draining(self) -> Mapping[str, float]:
        """By node id, the time (seconds since the epoch) at which it goes; infinite where that is not known."""
        return self._draining

    def _watch(self) -> None:
        ask = _call()
        if ask is None:
            _log.warning("this Ray does not tell which nodes drain: workers on them are noticed when they are lost")
            return
        while True:
            try:
                answer = ask()
                self._draining = {str(node): float(at) / 1000 if at else float("inf") for node, at in answer.items()}
            except Exception as error:  # whatever a private call raises; the last answer stays
                _log.debug("get_draining_nodes: %s", error)
            time.sleep(POLL_S)


def _call() -> Any:
    try:
        from ray._private.state import state
    except ImportError:
        return None
    return getattr(state, "get_draining_nodes", None)
