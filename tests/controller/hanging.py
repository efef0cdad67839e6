"""A model that hangs when it is told to, in the worker that it is told, and how to tell it."""

from __future__ import annotations

import ctypes
import os
import signal
import tempfile
import time
from pathlib import Path

from torch import Tensor, nn

from tests.workers.tiny import DropoutModel

FOR_S = 60


def _word(pid: int) -> Path:
    return Path(tempfile.gettempdir()) / f"vescale-test-hang-{pid}"


class HangingModel(DropoutModel):
    def forward(self, tokens: Tensor) -> Tensor:
        word = _word(os.getpid())
        if word.exists():
            way = word.read_text()
            if way == "raise":
                raise ZeroDivisionError(f"no luck in process {os.getpid()}")
            word.unlink()
            if way == "lock":
                ctypes.PyDLL(None).sleep(FOR_S)  # unlike CDLL it keeps the interpreter's lock
            else:
                time.sleep(FOR_S)
        return super().forward(tokens)


def model() -> nn.Module:
    return HangingModel()


def hang(pid: int, way: str) -> None:
    """Have the worker of this process hang: in code that ``sleep``s, that sleeps with the interpreter's ``lock``, or ``stop`` it;
    or have it ``raise`` in every forward from now on."""
    if way == "stop":
        os.kill(pid, signal.SIGSTOP)
        return
    part = _word(pid).with_suffix(".part")
    part.write_text(way)
    part.rename(_word(pid))
