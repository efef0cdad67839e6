"""A model that hangs, fails or becomes slow when it is told to, in the worker that it is told, and how to tell it."""

from __future__ import annotations

import ctypes
import os
import signal
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.workers.tiny import DropoutModel
from vescale_ray.workers.worker import born

FOR_S = 60
LATE_S = 8.0
SLOWLY = "VESCALE_TEST_SLOWLY"
"""Environment variable: seconds that each forward takes longer."""


def _word(pid: int) -> Path:
    """By the process' birth, too: its number is given to others later, and what it was told would be left for them."""
    return Path(tempfile.gettempdir()) / f"vescale-test-hang-{pid}-{born(pid)}"


class HangingModel(DropoutModel):
    shortest_input = 1
    """So that what a worker without a slot computes on is known by its length."""

    def forward(self, tokens: Tensor) -> Tensor:
        time.sleep(float(os.environ.get(SLOWLY, "0")))
        word = _word(os.getpid())
        if word.exists():
            way = word.read_text()
            if way == "raise again":
                raise ZeroDivisionError(f"no luck in process {os.getpid()}")
            kind, _, seconds = way.partition(" ")
            if kind == "slow":
                time.sleep(float(seconds) if tokens.numel() > 1 else 0.0)
            if kind == "works":
                end = time.thread_time() + (float(seconds) if tokens.numel() > 1 else 0.0)
                much = torch.ones(400, 400)
                while time.thread_time() < end:  # as a model does: mostly without the interpreter's lock
                    torch.mm(much, much)
            if kind in ("slow", "works"):
                return super().forward(tokens)
            word.unlink()
            act(way)
        return super().forward(tokens)


class LateModel(HangingModel):
    """Rank 0 takes much longer than the others to fill it in."""

    def init_parameter(self, name: str, full: Tensor, generator: torch.Generator) -> None:
        if dist.get_rank() == 0 and name == "head.weight":
            time.sleep(LATE_S)
        super().init_parameter(name, full, generator)


class SlowlyFilledModel(HangingModel):
    """On every rank, as one of many gigabytes is."""

    def init_parameter(self, name: str, full: Tensor, generator: torch.Generator) -> None:
        time.sleep(LATE_S)
        super().init_parameter(name, full, generator)


def act(way: str) -> None:
    """Hang or fail here and now."""
    match way:
        case "lock":
            ctypes.PyDLL(None).sleep(FOR_S)  # unlike CDLL it keeps the interpreter's lock
        case "sleep":
            time.sleep(FOR_S)
        case "wait":
            torch.futures.Future().wait()  # looks like a collective that nobody comes to, and that no time-out ends
        case "exit":
            os._exit(13)
        case "raise":
            raise RuntimeError("told to fail")
        case "collective":
            # No other rank enters this collective, which has a time limit of its own: it fails here alone, as with a broken network.
            # torch asks for the back end's name, and ours has another one.
            with mock.patch.object(dist.distributed_c10d, "get_backend", return_value="gloo"):
                dist.monitored_barrier(timeout=timedelta(seconds=0.5))
        case _:
            raise AssertionError(way)


def model() -> nn.Module:
    return HangingModel()


def late_model() -> nn.Module:
    return LateModel()


def slowly_filled_model() -> nn.Module:
    return SlowlyFilledModel()


def hang(pid: int, way: str) -> None:
    """Have the worker of this process hang in its next forward: in code that ``sleep``s, that sleeps with the interpreter's ``lock``, that
    ``wait``s as for other ranks, or ``stop`` it. Or have it ``raise``, ``raise again`` in every forward from now on, ``exit``, or fail in a
    ``collective``."""
    if way == "stop":
        os.kill(pid, signal.SIGSTOP)
        return
    part = _word(pid).with_suffix(".part")
    part.write_text(way)
    part.rename(_word(pid))


def slow_down(pid: int, seconds: float) -> None:
    """Each slot of the worker of this process takes so much longer from now on."""
    hang(pid, f"slow {seconds}")


def work_more(pid: int, seconds: float) -> None:
    """Each slot of the worker of this process takes so many seconds of a processor more from now on."""
    hang(pid, f"works {seconds}")


def at_full_speed(pid: int) -> None:
    """It is as fast as the others again."""
    _word(pid).unlink(missing_ok=True)
