"""A slow store and a time limit, for asynchronous saves."""

from __future__ import annotations

import threading
import time
from typing import Any

from vescale_ray import checkpoint as ckpt


class Slow(ckpt.PosixStore):
    """A store whose data writes wait until ``gate`` is set."""

    def __init__(self, root: Any) -> None:
        super().__init__(root)
        self.gate = threading.Event()
        self.began = threading.Semaphore(0)

    def put_stream(self, key, chunks, size):
        self.began.release()
        assert self.gate.wait(30)
        super().put_stream(key, chunks, size)


def within(seconds, work):
    began = time.monotonic()
    result = work()
    assert time.monotonic() - began < seconds
    return result
