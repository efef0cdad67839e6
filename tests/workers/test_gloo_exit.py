"""A gloo worker thread that needs the interpreter's lock while the process ends does not abort it."""

from __future__ import annotations

import ctypes
import hashlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import ranks
from vescale_ray import gloo

WORK: dict[str, Callable[[], Any]] = {
    "computes without the lock, then takes it": lambda: hashlib.sha256(b"x" * (1 << 28)).digest(),
    "competes for the lock": lambda: sum(n for n in range(10**7)),
}


def end_during(work: str) -> None:
    """End this process as an interpreter ends, while a gloo worker thread does ``work``."""
    gloo.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    main, begun = threading.get_ident(), threading.Event()

    def compute(_: Any) -> None:
        if threading.get_ident() != main:  # a reduction that has ended already calls it here
            begun.set()
            WORK[work]()

    computed = []
    while not begun.wait(0.05):
        computed.append(dist.all_reduce(torch.ones(1), async_op=True).get_future().then(compute))
    ctypes.pythonapi.Py_Exit(7)


@pytest.mark.parametrize("work", WORK)
def test_process_ends_while_a_gloo_worker_needs_the_interpreter(work: str) -> None:
    process = ranks._context().Process(target=end_during, args=(work,), daemon=True)
    process.start()
    process.join(100)
    assert process.exitcode == 7
