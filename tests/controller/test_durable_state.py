"""The durable state that a restarted controller goes on from, and how a controller begins or takes up a run."""

from __future__ import annotations

import json
import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import wait as wait_for
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError

from tests.controller.recorded import Recorded, generation, stepped
from tests.controller.runs import tiny, until
from vescale_ray.controller import controller
from vescale_ray.controller.control_loop import ControlLoop
from vescale_ray.controller.executor import Executor
from vescale_ray.controller.protocol import RequestRefused, RunSpec, StateSource
from vescale_ray.controller.state.durable_state import VERSION, DurableState, LaunchedGeneration
from vescale_ray.controller.state.state_store import NAME, StateStore, StateWriter, read_state
from vescale_ray.runfolder import RunFolder
from vescale_ray.workers.messages import Origin


class Keeper:
    """The part of a supervisor that keeps the durable state."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, state: DurableState | None = None) -> None:
        self.text = state.to_json() if state is not None else None
        self.keep = SimpleNamespace(remote=lambda text: setattr(self, "text", text))
        self.kept = SimpleNamespace(remote=lambda: self.text)
        monkeypatch.setattr("vescale_ray.controller.state.state_store.ray.get", lambda answer, timeout: answer)


def test_a_durable_state_comes_back_as_it_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_state(tmp_path) is None
    launched = LaunchedGeneration.of(generation(6, 41, "w0", "w3"))
    state = DurableState("r1", 7, launched, ("w1",), 2, "replacement", 2, 1, "SIGTERM", 3, 44, failures={"hang": 2}, port=8080, epoch=3)
    keeper = Keeper(monkeypatch)
    StateStore(tmp_path, keeper).write(state)
    assert StateStore(tmp_path, keeper).newest() == state == read_state(tmp_path)
    assert launched.world() == generation(6, 41, "w0", "w3")


def test_a_supervisor_out_of_reach_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost connection is no lost supervisor: the run would begin anew."""
    keeper = Keeper(monkeypatch, DurableState("r1", 7))
    store, answers = StateStore(tmp_path, keeper), [ActorUnavailableError("the network is down", None)]

    def get(answer: str, timeout: float) -> str:
        if answers:
            raise answers.pop()
        return answer

    monkeypatch.setattr("vescale_ray.controller.state.state_store.ray.get", get)
    monkeypatch.setattr(controller, "ASK_GAP_S", 0.0)
    assert controller._when_told(store.newest) == DurableState("r1", 7) and not answers


def test_damaged_or_other_version_durable_state_counts_as_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = json.loads(DurableState("r1", 7, LaunchedGeneration(6, 1, ("a",), "memory", 4)).to_json())
    others = ["", "{", "[]", "null", "[" * 100_000, '{"run_id": "x"}', json.dumps({**whole, "version": VERSION + 1})]
    others += [json.dumps({**whole, "unknown": 1}), json.dumps({**whole, "generation": {"number": 6}})]
    others += [json.dumps({**whole, "generation": {**whole["generation"], "origin": "luck"}})]
    for text in others:
        (tmp_path / NAME).write_text(text)
        caplog.clear()
        assert read_state(tmp_path) is None
        (line,) = caplog.messages
        assert line.startswith(f"{tmp_path / NAME} is ignored: ") and "\n" not in line
    (tmp_path / NAME).write_text(json.dumps({**whole, "version": VERSION + 1}))
    read_state(tmp_path)
    assert f"it has version {VERSION + 1}, this controller reads version {VERSION}" in caplog.messages[-1]


class _Ended(Exception):
    pass


def test_controller_restarts_are_counted_until_a_step_is_done(run: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash loop of the controller must end the run; restarts weeks apart, with steps between them, must not."""
    run.started()
    world, begin = generation(1, 0, "a", "b", origin=Origin.FRESH), time.time()
    config = tiny(run.folder.path.parent, "books")
    where: Any = run.folder.path
    spec = RunSpec("r1", config.model_dump(mode="json"), str(where), "t", world.source, 1, None, 1, {})
    run.open(world)
    keeper = Keeper(monkeypatch, DurableState("r1", 1, LaunchedGeneration.of(world), epoch=1))

    def ended(known: Any) -> None:
        raise _Ended

    def life(steps: range) -> DurableState:
        store = StateStore(where, keeper)
        state = store.newest()
        assert state is not None
        state = replace(state, epoch=state.epoch + 1)
        one = run.restarted(world)
        nobody: Any = SimpleNamespace(clock=time.monotonic, busy=False, fence=lambda number: None, adopt=ended)
        executor = Executor(spec, config, nobody, one.log, one.publisher, nobody, StateWriter(state, store))
        with pytest.raises(_Ended):
            ControlLoop(executor).run()
        for i in steps:
            assert one.stepped(stepped(world, i, begin + i))
        after = store.newest()
        assert after is not None and list(after.failures) == ["controller"]
        return after

    assert [life(range(0)).controller_restarts for _ in range(3)] == [1, 2, 3]
    last = life(range(4))
    assert (last.controller_restarts, last.failures) == (4, {"controller": 4})
    again = life(range(0))
    assert (again.controller_restarts, again.failures, again.highest_step) == (1, {"controller": 5}, 4), "there were steps between"


def begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, knows: bool = True, conducts: bool = False
) -> tuple[Callable[[], controller.Controller], list[Any]]:
    """A function that starts a controller as Ray restarts it, and a list for the arguments of its loop.

    ``knows``: the supervisor keeps the state of the first controller. The folder has an older one. If ``conducts``, the controller runs its
    loop, and the list stays empty.
    """
    config, conducted = tiny(tmp_path, "again"), []
    folder = RunFolder(config.run_folder).create()
    first = DurableState("r1", 7, LaunchedGeneration(7, 1, ("a",), "fresh", 0), epoch=1)
    folder.write_durable_state(replace(first, last_number=6).to_json())
    spec = RunSpec("r1", config.model_dump(mode="json"), str(folder.path), "t", StateSource(Origin.FRESH, 0), 1, None, 1, {})
    about = SimpleNamespace(was_current_actor_reconstructed=True, get_session_name=lambda: "session")
    supervisor = Keeper(monkeypatch, first if knows else None)
    stub = SimpleNamespace(get_actor=lambda *_: supervisor, get_runtime_context=lambda: about)
    monkeypatch.setattr(controller, "ray", stub)

    def conduct(self: controller.Controller, *what: Any) -> None:
        conducted.append(what)
        self._known.set()

    if not conducts:
        monkeypatch.setattr(controller.Controller, "_run_loop", conduct)
    monkeypatch.setattr(controller, "FOLDER_S", 0.3)
    monkeypatch.setattr(controller, "TELL_S", 0.5)
    monkeypatch.setattr(controller, "ASK_GAP_S", 0.05)
    return lambda: controller.Controller(pickle.dumps(spec), "supervisor:r1"), conducted


@pytest.mark.fault("S4")
def test_controller_warns_of_unreadable_run_folder_and_awaits_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the constructor waits for the disk, the driver ends the training workers after two minutes: all since the checkpoint is lost."""
    start, conducted = begun_again(tmp_path, monkeypatch)
    back, told = threading.Event(), controller.read_state
    monkeypatch.setattr(controller, "read_state", lambda folder: told(folder) if back.wait(60) else None)
    with monkeypatch.context() as patient:
        patient.setattr(controller, "TELL_S", 60.0)
        one = start()
        status = one.status()
        assert (status["outcome"], status["waits"], status["warnings"], conducted) == (None, True, (), [])
    until(lambda: bool(one.status()["warnings"]), 10, "the word of it")
    (text,) = one.status()["warnings"]
    assert text.startswith(str(tmp_path)) and "could not be read by the controller" in text and "the workers train on" in text
    with monkeypatch.context() as impatient, pytest.raises(RequestRefused, match="try stop again"):
        impatient.setattr(controller, "BEGIN_S", 0.1)
        one.command("stop", {})
    back.set()
    until(lambda: "waits" not in one.status(), 10, "the disk")
    ((*_, state, again),) = conducted
    assert again and (state.last_number, state.epoch) == (7, 2) and one.status()["record"]["state"] == "PENDING"
    one.close()


@pytest.mark.parametrize("again", [False, True])
def test_late_startup_failure_is_reported_like_an_early_one(again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start, _ = begun_again(tmp_path, monkeypatch)
    about: Any = controller.ray.get_runtime_context()
    about.was_current_actor_reconstructed = again
    back = threading.Event()

    def refuse(*_: Any) -> None:
        assert back.wait(60)
        raise RequestRefused("metrics.host: can't be listened on")

    monkeypatch.setattr(controller, "read_state", refuse)
    one = start()
    assert one.status()["waits"]
    back.set()
    wait_for([one._up], 10)
    if again:
        with pytest.raises(RequestRefused, match="listened on"):
            one.status()
    else:
        outcome = one.status()["outcome"]
        assert outcome["refused"] and outcome["error"] == "the controller can't start: RequestRefused: metrics.host: can't be listened on"


def test_controller_killed_before_its_first_state_begins_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start, conducted = begun_again(tmp_path, monkeypatch, knows=False)
    (RunFolder(tiny(tmp_path, "again").run_folder).path / NAME).unlink()
    one = start()
    until(lambda: bool(conducted), 30, "the loop's thread")
    ((*_, state, again),) = conducted
    assert not again and state.epoch == 1
    one.close()
