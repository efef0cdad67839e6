"""A model that hangs, fails or slows down in a worker that a test chooses, and the functions with which the test does so."""

from __future__ import annotations

import ctypes
import os
import signal
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.workers.tiny_models import DropoutModel
from vescale_ray.models.llama import Llama, LlamaConfig
from vescale_ray.workers.monitoring.process import born

FOR_S = 60
SLOWLY = "VESCALE_TEST_SLOWLY"
"""Environment variable with the seconds by which each forward takes longer."""


def _word(pid: int) -> Path:
    """The file that tells a process how to fail. Its name has the process' start time, since a later process may get the same id."""
    return Path(tempfile.gettempdir()) / f"vescale-test-hang-{pid}-{born(pid)}"


class HangingModel(DropoutModel):
    shortest_input = 1
    """Lets the length of an input show whether the worker has a slot."""

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
                while time.thread_time() < end:  # like a real model, mostly without the interpreter's lock
                    torch.mm(much, much)
            if kind in ("slow", "works"):
                return super().forward(tokens)
            word.unlink()
            act(way)
        return super().forward(tokens)


VOCAB = 300


class Unhurried(Llama):
    """A tiny model whose forward takes 20 ms, most of which leave the processor to the processes that start meanwhile."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        time.sleep(0.02)
        return super().forward(*args, **kwargs)


def unhurried() -> Unhurried:
    return Unhurried(LlamaConfig(dim=32, layers=2, heads=4, kv_heads=2, ffn=56, vocab=VOCAB, max_seq=16))


def act(way: str) -> None:
    """Hang or fail here and now."""
    match way:
        case "lock":
            ctypes.PyDLL(None).sleep(FOR_S)  # unlike CDLL it keeps the interpreter's lock
        case "sleep":
            time.sleep(FOR_S)
        case "wait":
            torch.futures.Future().wait()  # looks like a collective that no other rank enters, and has no time-out
        case "exit":
            os._exit(13)
        case "raise":
            raise RuntimeError("told to fail")
        case "collective":
            # No other rank enters this collective, so its time limit ends it: it fails on this rank alone, as with a broken network. torch
            # requires the backend's name to be "gloo"; ours is different.
            with mock.patch.object(dist.distributed_c10d, "get_backend", return_value="gloo"):
                dist.monitored_barrier(timeout=timedelta(seconds=0.5))
        case _:
            raise AssertionError(way)


def model() -> nn.Module:
    return HangingModel()


def hang(pid: int, way: str) -> None:
    """Make the worker of this process hang or fail in its next forward.

    Ways to hang are ``sleep``, ``lock`` (a sleep with the interpreter's lock), ``wait`` (as for other ranks), and ``stop`` (a SIGSTOP now).
    Ways to fail are ``raise``, ``raise again`` (in every forward from now on), ``exit``, and ``collective`` (one that fails).
    """
    if way == "stop":
        os.kill(pid, signal.SIGSTOP)
        return
    part = _word(pid).with_suffix(".part")
    part.write_text(way)
    part.rename(_word(pid))


def slow_down(pid: int, seconds: float) -> None:
    """Make each slot of this process' worker take ``seconds`` longer from now on."""
    hang(pid, f"slow {seconds}")


def work_more(pid: int, seconds: float) -> None:
    """Make each slot of this process' worker take ``seconds`` more CPU time from now on."""
    hang(pid, f"works {seconds}")


def at_full_speed(pid: int) -> None:
    """Undo :func:`slow_down` or :func:`work_more`."""
    _word(pid).unlink(missing_ok=True)
