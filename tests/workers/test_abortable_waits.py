"""Giving up ends a wait for a message between two ranks, also if the peer died in the middle of the message."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.workers.fleet import Fleet, State
from vescale_ray import gloo
from vescale_ray.communication import abortable_waits
from vescale_ray.communication.point_to_point import Messages
from vescale_ray.optim.matrix import newton_schulz
from vescale_ray.optim.matrix.exchange import Exchange, Job, plan
from vescale_ray.optim.matrix.matrices import Holding, MatrixSpan
from vescale_ray.workers.network import process_groups
from vescale_ray.workers.network.process_groups import GroupFailed

HOST = "127.0.0.1"
LIMIT = timedelta(seconds=10)
LARGE = 200 << 20
"""Bytes that take over 0.06 s between two processes of one machine: three times the delay until one of them is stopped."""


def _form(state: State, port: int, prefix: str, rank: int, world: int) -> None:
    state["lines"] = process_groups.form(HOST, port, prefix, rank, world, "gloo", 30.0)
    state["large"] = torch.ones(LARGE, dtype=torch.uint8), torch.zeros(LARGE, dtype=torch.uint8)


def _exchange(state: State, how: str) -> tuple[str, float]:
    """Exchange messages with the other rank until it is lost.

    Returns the error message, or "arrived", and the time.
    """
    mine, theirs = state["large"]
    other = 1 - dist.get_rank()
    try:
        with process_groups.collectives("exchange"):
            if how == "muon":
                _orthogonalize()
            else:
                messages = Messages(dist.distributed_c10d._get_default_group(), 5) if how == "both" else process_groups.messages()
                if how != "send":
                    messages.receive(theirs, other)
                if how != "receive":
                    messages.send(mine, other)
                messages.wait()
    except GroupFailed as failure:
        process_groups.dissolve()
        return str(failure), time.monotonic()
    return "arrived", time.monotonic()


def _orthogonalize() -> None:
    """Orthogonalize a matrix by Muon's exchange.

    Rank 0 has a little more than half of the matrix, so the other rank sends its part of about LARGE bytes.
    """
    side = math.isqrt(LARGE)
    cut = (side // 2 + 1) * side
    intervals = ((0, cut), (cut, side * side))
    job = Job.of(0, MatrixSpan(0, side, side), intervals, newton_schulz.coefficients([3.4445, -4.7750, 2.0315], 5), 1e-7)
    itinerary = plan([job], 2)
    assert itinerary.where(0) == (0, 0)
    held = Holding((side, side), intervals, dist.get_rank(), dist.distributed_c10d._get_default_group())
    exchange = Exchange(itinerary, held, torch.device("cpu"), newton_schulz.NewtonSchulz())
    nothing = torch.zeros(1, dtype=torch.bfloat16)
    exchange.run(lambda _, where: nothing.expand(where.stop - where.start), frozenset({0}))


def _stop_half_way(state: State, how: str) -> None:
    stop = threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGSTOP))
    if how == "muon":  # Muon fills a buffer before it sends it, so start the timer at the send
        send = Exchange._send

        def stopped(*args: Any) -> Any:
            stop.start()
            return send(*args)

        Exchange._send = stopped  # type: ignore[method-assign, assignment]
    else:
        stop.start()
    _exchange(state, how)


def _cut(state: State, after_s: float) -> None:
    """Cut the connections of the present group only, not those of a later one."""
    threading.Timer(after_s, state["lines"].cut).start()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_cutting_connections_ends_the_wait_for_half_a_message() -> None:
    """Without an abort the wait takes 30 s, the group's time limit.

    After each abort the survivor goes on with another group, and may use the memory of the half-written message again.
    """
    ways = [("receive", "send"), ("both", "both"), ("muon", "muon")]
    with Fleet(1 + len(ways)) as fleet:
        for peer, (survivors, dead) in enumerate(ways, 1):
            prefix = fleet.prefix()
            fleet.run_each({0: (fleet.port, prefix, 0, 2), peer: (fleet.port, prefix, 1, 2)}, _form)
            if peer > 1:
                outcomes = fleet.run_each({0: ("both",), peer: ("both",)}, _exchange)
                assert {said for said, _ in outcomes.values()} == {"arrived"}
            fleet.run([0], _cut, 0.8)
            fleet.start(peer, _stop_half_way, dead)
            began = time.monotonic()
            fleet.start(0, _exchange, survivors)
            time.sleep(0.5)
            os.kill(fleet.pid(peer), signal.SIGKILL)
            said, left = fleet.results([0], timeout=40)[0]
            assert said.startswith("exchange: "), "it came whole before the other was stopped"
            assert left - began < 15.0, said


def _meet(state: State, late_s: Mapping[str, float], port: int, prefix: str, rank: int, limit_s: float) -> dict[str, tuple[str, float]]:
    """Send a message from rank 1 to rank 0, in the group and in a transfer group, with rank 1 late.

    Both groups have a forming timeout of 1 s. Returns the outcome and the time taken, in seconds, by group.
    """
    process_groups.form(HOST, port, prefix, rank, 2, "gloo", limit_s, form_timeout_s=1.0)
    both = {"group": None, "transfer": process_groups.open_transfer(HOST, port, f"{prefix}/transfer", rank, 2, limit_s, form_timeout_s=1.0)}
    told = {}
    for name, group in both.items():
        dist.barrier()
        began = time.monotonic()
        messages = process_groups.messages(group)
        try:
            with process_groups.collectives("exchange"):
                if rank:
                    time.sleep(late_s[name])
                    messages.send(torch.ones(4), 0)
                else:
                    messages.receive(torch.zeros(4), 1)
                messages.wait()
            told[name] = "arrived", time.monotonic() - began
        except GroupFailed as failure:
            told[name] = str(failure), time.monotonic() - began
    process_groups.dissolve()
    return told


@pytest.mark.slow
def test_messages_use_collective_timeout_not_forming_timeout() -> None:
    """By default gloo limits messages by the timeout with which the group was formed.

    Moves of large shards failed after that time, and so did steps with ranks far apart, regardless of ``elastic.collective_timeout_s``.
    """
    with Fleet(2) as fleet:
        prefix = fleet.prefix()
        late = {"group": 2.5, "transfer": 2.5}
        arrived = fleet.run_each({rank: (late, fleet.port, prefix, rank, 20.0) for rank in (0, 1)}, _meet)[0]
        assert {said for said, _ in arrived.values()} == {"arrived"} and all(2.0 < took < 10.0 for _, took in arrived.values()), arrived
        prefix = fleet.prefix()
        late = {"group": 0.0, "transfer": 5.0}
        told = fleet.run_each({rank: (late, fleet.port, prefix, rank, 2.0) for rank in (0, 1)}, _meet)[0]
        assert told["group"][0] == "arrived"
        said, took = told["transfer"]
        assert "Timed out waiting 2000ms" in said and 1.9 < took < 4.0, told


def test_give_up_ends_waits_for_older_messages_only() -> None:
    class Work:
        def __init__(self) -> None:
            self.waited = 0

        def wait(self, limit: timedelta) -> bool:
            assert limit == LIMIT
            self.waited += 1
            return True

    before, since = Work(), abortable_waits.mark()
    abortable_waits.wait(before, since, LIMIT)
    assert abortable_waits.give_up() == 0, "nobody waits"
    with pytest.raises(abortable_waits.Waited, match="gloo: a message .* was given up") as raised:
        abortable_waits.wait(before, since, LIMIT)
    assert before.waited == 1 and process_groups.is_collective_error(raised.value)
    abortable_waits.wait(Work(), abortable_waits.mark(), LIMIT)


def test_gloo_s_messages_and_nothing_else_are_aborted() -> None:
    pair = _pair()
    waiting = pair[0].recv([torch.zeros(4)], 1, 9)
    assert abortable_waits._abort(waiting) and waiting.wait() is False
    collective = pair[0].allreduce([torch.ones(4)])
    assert not abortable_waits._abort(collective), "a collective is no message"
    pair[1].allreduce([torch.ones(4)]).wait()
    collective.wait()
    assert not abortable_waits._abort(torch._C._distributed_c10d.Work())
    out = torch.zeros(4)
    arriving = pair[0].recv([out], 1, 10)
    pair[1].send([torch.ones(4)], 0, 10).wait()
    abortable_waits.wait(arriving, abortable_waits.mark(), LIMIT)
    assert out.tolist() == [1.0] * 4


def test_a_wait_that_another_thread_gives_up_is_woken_at_once() -> None:
    pair = _pair()
    began = time.monotonic()
    threading.Timer(0.3, abortable_waits.give_up).start()
    with pytest.raises(abortable_waits.Waited):
        abortable_waits.wait(pair[0].recv([torch.zeros(4)], 1, 9), abortable_waits.mark(), LIMIT)
    assert 0.2 < time.monotonic() - began < 3.0


def _pair() -> dict[int, dist.ProcessGroupGloo]:
    """Both ranks of a group, in this process."""
    store = dist.HashStore()
    pair: dict[int, dist.ProcessGroupGloo] = {}

    def join(rank: int) -> None:
        pair[rank] = gloo.create(store, rank, 2, timedelta(seconds=30))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return pair
