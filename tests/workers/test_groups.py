"""Process groups are formed and dissolved in lasting processes. After a SIGKILL the survivors leave at once and regroup, without leaks."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.workers.fleet import Fleet, State
from vescale_ray import gloo
from vescale_ray.workers.network import process_groups
from vescale_ray.workers.network.connections import Connections
from vescale_ray.workers.network.process_groups import GroupFailed

HOST = "127.0.0.1"


def _form(state: State, port: int, prefix: str, rank: int, world: int, timeout_s: float = 30.0) -> None:
    state["lines"] = process_groups.form(HOST, port, prefix, rank, world, "gloo", timeout_s)


def _sum_of_ranks(state: State) -> float:
    value = torch.full((1000,), float(dist.get_rank()))
    dist.all_reduce(value)
    return float(value[0])


def _dissolve(state: State) -> bool:
    process_groups.dissolve()
    return dist.is_initialized()


def _step_until_a_peer_is_lost(state: State) -> tuple[str, float, int, int, bool]:
    """Run the collectives of a training step, some at the same time, until one fails; then leave the group."""
    full, part = torch.ones(40_000), torch.ones(10_000)
    group = weakref.ref(dist.distributed_c10d._get_default_group())
    try:
        while True:
            with process_groups.collectives("step"):
                ahead = dist.all_gather_into_tensor(torch.empty(dist.get_world_size() * 10_000), part, async_op=True)
                dist.all_reduce(full)
                ahead.wait()
                full.fill_(1.0)
    except GroupFailed as failure:
        text = str(failure)
        assert failure.__context__ is None or failure.__context__.__traceback__ is None
    process_groups.dissolve()
    return text, time.monotonic(), len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), group() is None


@pytest.mark.timeout(300)  # for 20 rounds: 24 processes and 40 groups take a minute on two busy cores
@pytest.mark.parametrize("rounds", [7, pytest.param(20, marks=pytest.mark.slow)])
def test_survivors_of_sigkill_leave_fast_and_regroup_leak_free(rounds: int) -> None:
    """One wait may last until the group's 30 s limit: that for a half-received message within gloo's own collectives.

    gloo reports no error there. This is rare and was seen with both processors busy. The engine's own messages have no such wait; see
    ``tests/workers/test_abortable_waits.py``.
    """
    with Fleet(4) as fleet:
        members = [0, 1, 2, 3]
        delays: list[float] = []
        usage: list[tuple[int, int]] = []
        for round_ in range(rounds):
            prefix = fleet.prefix()
            fleet.run_each({w: (fleet.port, prefix, i, 4) for i, w in enumerate(members)}, _form)
            assert set(fleet.run(members, _sum_of_ranks).values()) == {6.0}
            for worker in members:
                fleet.start(worker, _step_until_a_peer_is_lost)
            time.sleep(0.02 + 0.06 * round_ / rounds)
            victim = members.pop(round_ % 3 + 1)  # worker 0 stays throughout
            killed = time.monotonic()
            fleet.kill(victim)
            out = fleet.results(members, timeout=45)
            delays.append(max(left - killed for _, left, _, _, _ in out.values()))
            assert all(released for *_, released in out.values()), "a survivor still refers to its dissolved group"
            prefix = fleet.prefix()
            fleet.run_each({w: (fleet.port, prefix, i, 3) for i, w in enumerate(members)}, _form)
            assert set(fleet.run(members, _sum_of_ranks).values()) == {3.0}
            assert not any(fleet.run(members, _dissolve).values())
            usage.append(out[0][2:4])
            members += fleet.add()
        # In one round all late survivors wait for the same message, so count rounds and not survivors.
        late = [delay for delay in delays if delay >= 2.0]
        assert len(late) <= max(1, rounds // 6), f"slowest survivor out after {max(delays):.2f} s of a 30 s timeout: {sorted(delays)[-5:]}"
        fds, threads = zip(*usage, strict=True)
        half = rounds // 2
        assert max(fds[half:]) <= max(fds[:half]) and max(threads[half:]) <= max(threads[:half]), usage


def _fail_to_form(state: State, port: int, prefix: str) -> str:
    """Fail while the group forms, as if a rank were lost while the others connect to it."""

    def lost(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("Gloo connectFullMesh failed with: Connection closed by peer")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gloo, "create", lost)
        try:
            process_groups.form(HOST, port, prefix, 0, 1, "gloo", 30.0)
        except GroupFailed as failure:
            return str(failure)
    return ""


def test_ranks_with_different_group_histories_form_a_group() -> None:
    """torch numbers group names within each process. These three ranks once waited for each other under three names, each time."""
    with Fleet(3) as fleet:
        assert "connectFullMesh" in fleet.run_each({0: (fleet.port, fleet.prefix())}, _fail_to_form)[0]
        fleet.run_each({1: (fleet.port, fleet.prefix(), 0, 1)}, _form)
        fleet.run([1], _dissolve)
        for _ in range(2):
            assert "connectFullMesh" in fleet.run_each({0: (fleet.port, fleet.prefix())}, _fail_to_form)[0]
        prefix = fleet.prefix()
        fleet.run_each({w: (fleet.port, prefix, w, 3) for w in range(3)}, _form)
        assert set(fleet.run([0, 1, 2], _sum_of_ranks).values()) == {3.0}


@pytest.mark.slow
@pytest.mark.fault("W5")
def test_cutting_connections_frees_survivors_of_a_stopped_rank() -> None:
    """A stopped machine closes no socket, so every collective would wait for its time limit of 30 s."""
    with Fleet(3) as fleet:
        prefix = fleet.prefix()
        fleet.run_each({w: (fleet.port, prefix, w, 3) for w in range(3)}, _form)
        for worker in range(3):
            fleet.start(worker, _step_until_cut, 1.0 if worker != 1 else None)
        time.sleep(0.3)
        os.kill(fleet.pid(1), signal.SIGSTOP)
        began = time.monotonic()
        out = fleet.results([0, 2], timeout=20)
        assert max(left for _, left, *_ in out.values()) - began < 3.0 and all(released for *_, released in out.values())
        prefix = fleet.prefix()
        fleet.run_each({w: (fleet.port, prefix, i, 2) for i, w in enumerate((0, 2))}, _form)
        assert set(fleet.run([0, 2], _sum_of_ranks).values()) == {1.0}
        os.kill(fleet.pid(1), signal.SIGCONT)
        # The collective fails at once. If it is in the middle of a message, gloo reports no error, and it fails at its time limit.
        assert fleet.results([1], timeout=45)[1][0].startswith("step: "), "its connections were closed by the others"
        assert set(fleet.run([0, 2], _sum_of_ranks).values()) == {1.0}


def _step_until_cut(state: State, after_s: float | None) -> tuple[str, float, int, int, bool]:
    if after_s is not None:
        threading.Timer(after_s, state["lines"].cut).start()
    return _step_until_a_peer_is_lost(state)


def test_cut_leaves_closed_and_reused_descriptors_alone() -> None:
    ours, lines = socket.socketpair(), Connections()
    with lines.recorded():
        gone = socket.socketpair()
    numbers = [end.fileno() for end in gone]
    for end in gone:
        end.close()
    again = socket.socketpair()
    assert {end.fileno() for end in again} == set(numbers), "the numbers are given out again at once"
    assert lines.cut() == 0
    for one, other in (ours, again):
        one.send(b"x")
        assert other.recv(1) == b"x"
    with lines.recorded():
        cut = socket.socketpair()
    assert lines.cut() > 0 and cut[0].recv(1) == b""
    assert lines.cut() == 0
    for end in (*ours, *again, *cut):
        end.close()


def test_cut_spares_connections_made_while_recording_is_paused() -> None:
    """A foreign connection is, for example, Ray's connection to a controller that has just restarted."""
    lines = Connections()
    with lines.recorded(2):
        to_the_store = socket.socketpair()
        with lines.paused():
            foreign = socket.socketpair()
        to_a_rank = socket.socketpair()
    lines.cut()
    foreign[0].send(b"x")
    assert foreign[1].recv(1) == b"x" and to_the_store[1].recv(1) == b"" == to_a_rank[1].recv(1)
    with pytest.raises(RuntimeError, match="given up before it was formed"), lines.recorded(2), lines.paused():
        lines.cut()
    for end in (*foreign, *to_the_store, *to_a_rank):
        end.close()


class _Stuck:
    """A communicator whose waits last until it is aborted; the abort takes 0.3 s."""

    def __init__(self, *, broken: bool = False) -> None:
        self.aborts, self.ended, self._broken = 0, threading.Event(), broken

    def abort(self) -> None:
        self.aborts += 1
        time.sleep(0.3)
        self.ended.set()
        if self._broken:
            raise RuntimeError("NCCL error")


def test_cut_aborts_each_held_communicator_once_in_background() -> None:
    stuck, broken, gone, lines = _Stuck(), _Stuck(broken=True), _Stuck(), Connections()
    lines.hold(gone)
    lines.abandon()
    for one in (broken, stuck):
        lines.hold(one)
    begin = time.perf_counter()
    lines.cut()
    lines.cut()
    assert time.perf_counter() - begin < 0.25, "the fence is to answer at once"
    assert stuck.ended.wait(10.0) and broken.ended.wait(10.0)
    assert (stuck.aborts, broken.aborts, gone.aborts) == (1, 1, 0)


def test_forming_nccl_group_sets_its_environment_unless_user_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in process_groups.NCCL:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")  # the user's own setting
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    if not torch.cuda.is_available():
        with pytest.raises(GroupFailed, match="forming test/nccl as rank 0 of 1 failed"):
            process_groups.form("127.0.0.1", store.port, "test/nccl", 0, 1, "nccl", 20.0)
    else:
        process_groups.form("127.0.0.1", store.port, "test/nccl", 0, 1, "nccl", 20.0)
        process_groups.dissolve()
    assert not dist.is_initialized()
    told = {name: os.environ.pop(name) for name in process_groups.NCCL}
    assert told == {**process_groups.NCCL, "NCCL_NVLS_ENABLE": "1"}


def test_forming_with_a_missing_rank_times_out_and_cleans_up() -> None:
    with Fleet(1) as fleet:
        assert "GroupFailed" in fleet.run([0], _form_alone, fleet.port)[0]
        prefix = fleet.prefix()
        fleet.run_each({0: (fleet.port, prefix, 0, 1)}, _form)
        assert fleet.run([0], _sum_of_ranks)[0] == 0.0


def _form_alone(state: State, port: int) -> str:
    begin = time.monotonic()
    try:
        process_groups.form(HOST, port, "test/alone", 0, 2, "gloo", 30.0, form_timeout_s=1.0)
    except GroupFailed as failure:
        assert not dist.is_initialized()
        assert time.monotonic() - begin < 5.0
        return f"GroupFailed: {failure}"
    return "formed"


def test_closing_an_attempt_ends_the_wait_for_missing_ranks() -> None:
    """If the attempt could not be closed, a rank that is lost before it joins would cost the whole forming timeout of 15 s."""
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    for number, form in enumerate((process_groups.form, process_groups.open_transfer)):
        closed = threading.Event()
        threading.Timer(0.3, closed.set).start()
        began = time.monotonic()
        words = ("gloo", 30.0) if form is process_groups.form else (30.0,)
        with pytest.raises(GroupFailed, match="the attempt was closed when 1 of 2 ranks had joined"):
            form(HOST, store.port, f"test/closed{number}", 0, 2, *words, closed=closed.is_set)  # type: ignore[operator]
        assert 0.2 < time.monotonic() - began < 7.5 and not dist.is_initialized()


@pytest.mark.parametrize("how", ["its address is awaited", "it was to connect", "it does not answer"])
def test_cutting_connections_ends_forming_with_a_lost_rank(how: str) -> None:
    """gloo would wait 15 s, the forming timeout, for the lost rank's address, its connection or its answer."""
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    with _deaf() as port:
        for number, form in enumerate((process_groups.form, process_groups.open_transfer)):
            prefix, lines = f"test/{how.split()[0]}{number}", Connections()
            dist.PrefixStore(prefix, store).add("here", 1)  # the lost rank joins and goes away
            other = {"it was to connect": 0xFFFF, "it does not answer": port}.get(how)
            killer = threading.Thread(target=_lose, args=(store, prefix, other, lines))
            killer.start()
            began = time.monotonic()
            words = ("gloo", 30.0) if form is process_groups.form else (30.0,)
            with pytest.raises(GroupFailed):
                form(HOST, store.port, prefix, 0, 2, *words, lines=lines)  # type: ignore[operator]
            assert 0.5 < time.monotonic() - began < 8.0 and not dist.is_initialized()
            killer.join()


@contextmanager
def _deaf() -> Iterator[int]:
    """A port that accepts no connection, like that of a stopped machine.

    Of two ranks on one machine, the rank with the higher port number in memory order connects to the other. So this port has a low number.
    """
    with ExitStack() as stack:
        end = stack.enter_context(socket.socket())
        for port in range(0x2000, 0x7000, 0x100):
            try:
                end.bind((HOST, port))
                break
            except OSError:
                continue
        end.listen(0)
        for _ in range(8):
            caller = stack.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex((HOST, port))
        yield port


def _lose(store: dist.TCPStore, prefix: str, port: int | None, lines: Connections) -> None:
    """Publish ``port`` as rank 1's, as gloo would, and cut rank 0's connections half a second later."""
    if port is not None:
        mine = _key_of(store, prefix, "/0")
        told = bytearray(store.get(mine))
        at = told.index(socket.AF_INET.to_bytes(2, sys.byteorder), 16) + 2
        told[at : at + 2] = port.to_bytes(2, "big")
        store.set(mine[:-1] + "1", bytes(told))  # type: ignore[arg-type]
    time.sleep(0.6)
    lines.cut()


def _key_of(store: dist.TCPStore, prefix: str, ending: str) -> str:
    while True:
        for key in store.list_keys():
            if key.startswith(prefix) and key.endswith(ending):
                return str(key)
        time.sleep(0.01)


def test_collectives_use_their_own_timeout_not_that_of_forming() -> None:
    with Fleet(2) as fleet:
        prefix = fleet.prefix()
        fleet.run_each({w: (fleet.port, prefix, w, 2, 1.0) for w in (0, 1)}, _form)
        text, seconds = fleet.run([0], _wait_for_an_absent_peer)[0]
        assert 0.5 < seconds < 5.0, (text, seconds)
        fleet.run([0, 1], _dissolve)


def _wait_for_an_absent_peer(state: State) -> tuple[str, float]:
    begin = time.monotonic()
    try:
        with process_groups.collectives("wait"):
            dist.all_reduce(torch.ones(1))
    except GroupFailed as failure:
        return str(failure), time.monotonic() - begin
    return "no failure", 0.0


def test_a_transfer_group_serves_bytes_beside_the_default_group() -> None:
    with Fleet(3) as fleet:
        prefix = fleet.prefix()
        fleet.run_each({w: (fleet.port, prefix, w, 2) for w in (0, 1)}, _form)
        got = fleet.run_each({w: (fleet.port, prefix + "/transfer", w, 3) for w in range(3)}, _transfer)
        assert got == {w: ([b"", b"x", b"xx"], [10 * w + r for r in range(3)]) for w in range(3)}
        assert fleet.run([0, 1], _sum_of_ranks) == {0: 1.0, 1: 1.0}


def _transfer(state: State, port: int, prefix: str, rank: int, world: int) -> Any:
    lines = Connections()
    group = process_groups.open_transfer(HOST, port, prefix, rank, world, 10.0, lines=lines)
    texts = process_groups.all_gather_bytes(b"x" * rank, group)
    long = [bytes([other]) * (30_000 * other + 5) for other in range(world)]  # some fit the first message, some do not
    assert process_groups.all_gather_bytes(long[rank], group) == long
    edge = [b"e" * (process_groups._FIRST_BYTES - 1 + other) for other in range(world)]
    assert process_groups.all_gather_bytes(edge[rank], group) == edge
    # Rank r sends the bytes r, 10 + r, 20 + r to ranks 0, 1, 2.
    data = torch.tensor([10 * j + rank for j in range(world)], dtype=torch.uint8)
    out = torch.full((world,), 11 * rank, dtype=torch.uint8)
    messages = process_groups.messages(group)
    for other in {*range(world)} - {rank}:
        messages.receive(out[other : other + 1], other)
        messages.send(data[other : other + 1], other)
    messages.wait()
    process_groups.Closing(group, lines).wait()
    return texts, out.tolist()


def test_close_and_barrier_bounds_override_the_group_timeout() -> None:
    """A leaver waits for its last receiver beyond the collectives' time limit. Otherwise each try of a move with a slow receiver fails."""
    with Fleet(4) as fleet:
        patient, other = fleet.prefix(), fleet.prefix()
        calls = {w: (fleet.port, patient, w, 20.0) for w in (0, 1)} | {w + 2: (fleet.port, other, w, None) for w in (0, 1)}
        told = fleet.run_each(calls, _come_late)
        assert told[0] == ["done"] * 3
        assert told[2] == ["failed", "failed", "done"], "for a message it is told in any case"


def _come_late(_: State, port: int, prefix: str, rank: int, bound_s: float | None) -> list[str]:
    """Rank 1 is late by twice the group's time limit, each time that rank 0 waits for it."""
    told = []

    def closes() -> None:
        lines = Connections()
        group = process_groups.open_transfer(HOST, port, f"{prefix}/transfer", rank, 2, 0.5, form_timeout_s=20.0, lines=lines)
        time.sleep(1.0 * rank)
        process_groups.Closing(group, lines, bound_s).wait()

    def meets() -> None:
        process_groups.form(HOST, port, f"{prefix}/meets", rank, 2, "gloo", 0.5, form_timeout_s=20.0)
        time.sleep(1.0 * rank)
        process_groups.barrier(bound_s)

    def receives() -> None:
        process_groups.form(HOST, port, f"{prefix}/receives", rank, 2, "gloo", 0.5, form_timeout_s=20.0)
        messages = process_groups.messages()
        time.sleep(1.0 * rank)
        if rank:
            messages.send(torch.ones(3), 0)
        else:
            messages.receive(torch.zeros(3), 1)
        messages.wait(10)

    for act in (closes, meets, receives):
        try:
            with process_groups.collectives("wait"):
                act()
            told.append("done")
        except GroupFailed:
            told.append("failed")
        process_groups.dissolve()
        time.sleep(1.25 * (1 - rank) * (told[-1] == "failed"))
    return told


def test_closing_a_transfer_does_not_wait_for_a_stalled_leaver() -> None:
    with Fleet(2) as fleet:
        prefix = fleet.prefix()
        assert fleet.run_each({w: (fleet.port, prefix, w) for w in (0, 1)}, _open)
        over, seconds = fleet.run([0], _close_alone)[0]
        assert not over and seconds < 2.0, "the collective's bound is 30 s"
        assert "close the transfer group" in fleet.run([1], _wait_until_closed)[1], "the leaver learns that its peer is gone"


def _open(state: State, port: int, prefix: str, rank: int) -> bool:
    state["lines"] = Connections()
    state["group"] = process_groups.open_transfer(HOST, port, prefix, rank, 2, 30.0, lines=state["lines"])
    return True


def _close_alone(state: State) -> tuple[bool, float]:
    closing = process_groups.Closing(state.pop("group"), state["lines"])
    time.sleep(0.2)
    over, began = closing.is_over(), time.monotonic()
    closing.give_up()
    del closing
    return over, time.monotonic() - began


def _wait_until_closed(state: State) -> str:
    try:
        process_groups.Closing(state.pop("group"), state["lines"]).wait()
    except GroupFailed as failure:
        return str(failure)
    return "nothing failed"


def test_own_exceptions_pass_and_group_failures_keep_no_frames() -> None:
    with pytest.raises(ZeroDivisionError), process_groups.collectives("step"):
        _ = 1 // 0
    with pytest.raises(NotImplementedError), process_groups.collectives("step"):
        raise NotImplementedError("not for the gloo backend")

    class Held:
        pass

    def fail() -> None:
        held = Held()
        kept.append(weakref.ref(held))
        raise RuntimeError("[/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234")

    kept: list[weakref.ref[Held]] = []
    with pytest.raises(GroupFailed, match="step: RuntimeError: .*Connection closed by peer") as raised, process_groups.collectives("step"):
        fail()
    assert kept[0]() is None
    assert raised.value.__context__ is None or raised.value.__context__.__traceback__ is None
    assert raised.value.trace is not None and "test_groups.py" in process_groups.tell(raised.value.trace), (
        "where it was is known all the same"
    )
    assert ", in fail" in process_groups.tell(raised.value.trace)


def test_dissolve_needs_no_group_and_form_refuses_to_replace_one() -> None:
    process_groups.dissolve()
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    process_groups.form(HOST, store.port, "test/single", 0, 1, "gloo", 5.0)
    try:
        with pytest.raises(ValueError, match="dissolve"):
            process_groups.form(HOST, store.port, "test/again", 0, 1, "gloo", 5.0)
    finally:
        process_groups.dissolve()
    assert not dist.is_initialized() and threading.active_count() < 50
