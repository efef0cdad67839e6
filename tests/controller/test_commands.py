"""Commands from outside: each is answered in bounded time, and one that was given up is never carried out."""

from __future__ import annotations

import inspect
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.controller.recorded import Recorded
from tests.controller.runs import tiny, until
from vescale_ray.cli import client
from vescale_ray.controller.commands import ANSWER_S, DONE_S, Commands
from vescale_ray.controller.protocol import RequestRefused
from vescale_ray.controller.state.durable_state import DurableState
from vescale_ray.controller.state.state_store import StateWriter


def test_commands_after_the_loops_end_are_answered_at_once(run: Recorded, tmp_path: Path) -> None:
    """This holds for commands that wait already and for later ones: no client waits 8 s for a run that is over."""
    spec: Any = SimpleNamespace(schedule=(), capacity=None)
    store: Any = SimpleNamespace(write=lambda state: state)
    commands = Commands(spec, tiny(tmp_path, "books"), SimpleNamespace(), run.log, StateWriter(DurableState("r1", 0), store))  # type: ignore[arg-type]
    told: list[dict[str, Any]] = []
    early = threading.Thread(target=lambda: told.append(commands.command("stop", {})))
    early.start()
    time.sleep(0.1)
    began = time.monotonic()
    commands.close()
    early.join(5)
    assert told == [{"ok": True, "message": "the run is over, at step 0"}] == [commands.command("stop", {})]
    with pytest.raises(RequestRefused, match="the run is over, at step 0: rescale comes too late"):
        commands.command("rescale", {"workers": 2})
    assert time.monotonic() - began < 2.0


@pytest.mark.parametrize("action", ["rescale", "stop"])
def test_a_command_that_was_given_up_is_never_carried_out(run: Recorded, tmp_path: Path, action: str) -> None:
    """If a client's command is given up and the client sends another one, only the second may take effect."""
    spec: Any = SimpleNamespace(schedule=(), capacity=None)
    store: Any = SimpleNamespace(write=lambda state: state)
    commands = Commands(spec, tiny(tmp_path, "books"), SimpleNamespace(), run.log, StateWriter(DurableState("r1", 0), store))  # type: ignore[arg-type]
    before = commands.target
    with pytest.raises(RequestRefused, match=f"did not begin {action} within 0.2 s"):
        commands.command(action, {"workers": 1}, wait_s=0.2)
    commands.carry_out()
    assert (commands.target, commands.stop) == (before, None)
    told: list[dict[str, Any]] = []
    second = threading.Thread(target=lambda: told.append(commands.command("rescale", {"workers": 2})))
    second.start()
    until(lambda: bool(commands.carry_out() or told), 5, "an answer")
    second.join(5)
    assert told[0]["workers"] == commands.target == 2


def test_command_is_answered_within_the_clients_timeout() -> None:
    """This holds for a controller that has just started, too: a client without an answer does not know what became of its command."""
    patience = inspect.signature(client.request).parameters["timeout_s"].default
    assert ANSWER_S + DONE_S < patience
