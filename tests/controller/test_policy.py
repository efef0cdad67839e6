"""The controller's decisions, as functions of values, without processes."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vescale_ray.config import ElasticSection, RunConfig
from vescale_ray.controller import actions, policy, states
from vescale_ray.controller.failures.budget import Budget, Cause, Limits
from vescale_ray.controller.observations import Observations
from vescale_ray.controller.policy import CommittedCheckpoint
from vescale_ray.controller.protocol import Ending, RequestRefused, World
from vescale_ray.controller.state.durable_state import DurableState
from vescale_ray.controller.states import Goal
from vescale_ray.controller.transitions.recovery import Recovery
from vescale_ray.controller.transitions.run_end import RunEnd
from vescale_ray.workers.messages import NO_TICKET, FaultKind, Origin, Ticket, WorkerFault
from vescale_ray.workers.resharding.held_state import HeldState

PEER = WorkerFault(FaultKind.PEER, "Connection closed by peer")


def budget(crashes: int, nodes: int = 20, controllers: int = 20, **total: int) -> Budget:
    return Budget(Limits(crashes, nodes, controllers, {Cause(name): limit for name, limit in total.items()}))


def after(
    ending: Ending,
    *,
    stop: str | None = None,
    target: int = 3,
    fewest: int = 1,
    ready: tuple[str, ...] = (),
    warming: int = 0,
    replace_lost: bool = False,
    used: Budget | None = None,
    waited: bool = False,
    leaving: str = "",
) -> Any:
    """The sequel of a generation: members and leavers of the next, the number of workers to wait for and to hire, the goal of a
    checkpoint, or an error."""
    elastic = ElasticSection(workers=3, min_workers=fewest, replace_lost=replace_lost)
    config = RunConfig(elastic=elastic)
    slow = SimpleNamespace(leaving=lambda *about: frozenset(leaving))
    scaling: Any = SimpleNamespace(stragglers=slow, untried=(), forget_hires=lambda: None)
    nothing: Any = None
    recovery = Recovery(nothing, config, scaling, nothing, nothing, RunEnd(config))
    workers: Any = SimpleNamespace(silent=lambda seconds: (), ready=lambda: ready, warming=lambda: ("w",) * warming, hiring=0)
    stats: Any = SimpleNamespace(waiting=False)
    seen = Observations(0.0, 0.0, workers, stats, DurableState("r", 0, target=target), used or budget(3), stop)
    state, do = recovery.recovering(states.Recovering(ending, waited), seen)
    match state:
        case states.Locating():
            return (state.members, state.leavers)
        case states.Waiting():
            return state.workers, sum(isinstance(one, actions.Hire) for one in do)
        case states.Checkpointing():
            return (True, state.error) if state.refused else state.error or state.goal
        case states.Concluding():
            return state.refused, state.error


LOST_ONE = Ending(("a", "c"), {"b": "its process died"}, {"a": PEER, "c": PEER})


def test_finished_run_is_completed_despite_a_loss_or_a_stop() -> None:
    ending = Ending(("a",), {"b": "its process died"}, finished=True)
    assert after(ending, stop="asked to") == Goal.LAST
    assert after(Ending((), {"a": "died"}, finished=True), target=1) != Goal.LAST


def test_too_few_workers_end_the_run_with_reason_and_remedy() -> None:
    assert after(LOST_ONE, fewest=3) == (
        "2 workers are left (lost b: its process died), fewer than elastic.min_workers = 3: "
        "set elastic.replace_lost=true to have lost workers replaced"
    )


def test_too_few_workers_wait_for_hires_but_not_for_ever() -> None:
    assert after(LOST_ONE, fewest=3, warming=1) == (3, 0)
    assert after(LOST_ONE, fewest=3, replace_lost=True) == (3, 1)
    assert "no replacement came in time" in after(LOST_ONE, fewest=3, replace_lost=True, waited=True)


def spent(used: Budget) -> str | None:
    answer = after(LOST_ONE, used=used)
    return answer if isinstance(answer, str) else None


@pytest.mark.fault("B1")
def test_recoveries_without_progress_end_the_run_at_the_limit() -> None:
    used = budget(2).progressed(10)
    for cause in (Cause.KILLED, Cause.HANG):
        used = used.failed([cause], ["b: its process died"])
        assert spent(used) is None
    used = used.failed([Cause.ERROR], ["c: out of memory"])
    assert spent(used) == "3 recoveries in a row without one more step: b: its process died; c: out of memory"


def test_replayed_steps_are_no_progress() -> None:
    used = budget(1).progressed(20).failed([Cause.KILLED], ["x"])
    assert used.progressed(20) == used and used.progressed(19) == used
    assert used.progressed(21).tries == 0
    assert used.progressed(21).total == {Cause.KILLED: 1}, "what is counted in all stays"


def test_node_losses_have_a_limit_apart_from_crashes() -> None:
    used = budget(1, nodes=5)
    for _ in range(5):
        used = used.failed([Cause.NODE], ["b: its node was lost"])
        assert spent(used) is None
    used = used.failed([Cause.KILLED], ["a: its process died"])
    assert spent(used) is None, "the first crash"
    assert (used.crashes, used.nodes, used.total) == (1, 5, {Cause.NODE: 5, Cause.KILLED: 1})
    crashed = used.failed([Cause.ERROR, Cause.NODE], ["a: no memory"])
    assert spent(crashed) == "2 recoveries in a row without one more step: b: its node was lost; a: its process died; a: no memory"
    lost = used.failed([Cause.NODE], ["b: its node was lost"])
    assert spent(lost) == (
        "nodes were lost 6 times in a row without one more step (elastic.max_node_losses_without_progress = 5): "
        "b: its node was lost; a: its process died"
    )
    assert spent(lost.progressed(1)) is None


def test_controller_restarts_without_progress_end_the_run() -> None:
    used = budget(1, controllers=2)
    for step in range(30):
        used = used.failed([Cause.CONTROLLER], []).progressed(step + 1)
    assert used.verdict is None and used.total == {Cause.CONTROLLER: 30} and used.tries == 0
    for _ in range(3):
        assert used.verdict is None
        used = used.failed([Cause.CONTROLLER], [])
    assert used.verdict == (
        "the controller was restarted 3 times without one more step (elastic.max_controller_restarts_without_progress = 2)"
    )


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        (Cause.ERROR, "3 errors of workers, more than elastic.max_errors = 2: x"),
        (Cause.KILLED, "3 killed workers, more than elastic.max_kills = 2: x"),
        (Cause.HANG, "3 hangs, more than elastic.max_hangs = 2: x"),
    ],
)
def test_run_wide_limit_ignores_progress_and_counts_one_cause(cause: Cause, words: str) -> None:
    used = budget(9, error=2, killed=2, hang=2)
    for step, each in enumerate([Cause.ERROR, Cause.KILLED, Cause.HANG, Cause.NODE] * 2):
        used = used.failed([each], ["y"]).progressed(step + 1)
    assert spent(used) is None
    assert spent(used.failed([cause], ["x"])) == words


@given(
    living=st.lists(st.sampled_from("abcdefgh"), unique=True),
    ready=st.lists(st.sampled_from("stuvwxyz"), unique=True),
    target=st.integers(1, 10),
)
def test_next_members_match_the_target_and_drop_no_worker(living: list[str], ready: list[str], target: int) -> None:
    members, leavers = policy.next_members(living, ready, target)
    assert len(members) == min(target, len(living) + len(ready))
    assert sorted((*members, *leavers)) == sorted({*living, *members})
    staying = [w for w in members if w in living]
    assert staying == living[: len(staying)] == list(members[: len(staying)])
    assert not leavers or set(members) <= set(living)


COUNTS = {"world": st.integers(1, 6), "ready": st.integers(0, 6), "warming": st.integers(0, 6), "target": st.integers(1, 8)}


@given(**COUNTS, spares=st.integers(0, 3))
def test_staffing_fills_target_and_spares_and_regroups_when_warm(world: int, ready: int, warming: int, target: int, spares: int) -> None:
    todo = policy.staffing(world, ready, warming, target, spares)
    assert not ((todo.hire or todo.spares) and todo.dismiss)
    assert world + ready + warming + todo.hire + todo.spares - todo.dismiss == max(world, target) + spares
    assert todo.hire == max(0, max(world, target) - world - ready - warming), "what is not hired for members is hired for spares"
    assert todo.regroup == (target < world or (target > world and world + ready >= target))


def test_rescale_outside_the_bounds_is_refused_with_the_bound() -> None:
    def check(asked: object, capacity: int | None = 4) -> int:
        return policy.check_rescale(asked, fewest=2, most=5, slots=6, capacity=capacity)

    assert check(3) == 3
    for asked, words in [
        (7, "more than train.slots = 6"),
        (6, "more than elastic.max_workers = 5"),
        (5, "room for 4"),
        (1, "fewer than elastic.min_workers = 2"),
        (0, "at least 1"),
        (-1, "at least 1"),
        ("3", "whole number"),
        (True, "whole number"),
        (None, "whole number"),
        (2.0, "whole number"),
    ]:
        with pytest.raises(RequestRefused, match=words):
            check(asked)
    assert check(5, capacity=None) == 5


# ------------------------------------------------------------------------------------------------------------------- source

BEFORE = World(Ticket(4, 1), ("a", "b", "c"), policy.StateSource(Origin.FRESH, 0))


def held_state(step: int, *ranks: int, generation: int = 4) -> HeldState:
    return HeldState(generation, 3, step, ranks)


def test_memory_state_is_used_unless_a_newer_one_is_on_disk() -> None:
    held = {"a": [held_state(20, 0, 2)], "b": [held_state(20, 0, 1)], "c": [held_state(20, 1, 2)]}
    on_disk = [
        CommittedCheckpoint("old", "/k/old", 10),
        CommittedCheckpoint("same", "/k/same", 20),
        CommittedCheckpoint("new", "/k/new", 25),
    ]
    sources = [policy.choose_source(held, "abc", kept, BEFORE) for kept in on_disk]
    assert [(s.origin, s.step, s.commit) for s in sources] == [
        (Origin.MEMORY, 20, None),
        (Origin.MEMORY, 20, None),
        (Origin.CHECKPOINT, 25, "new"),
    ]
    assert sources[0].lender is None


def test_missing_shard_falls_back_to_checkpoint_then_beginning() -> None:
    held = {"a": [held_state(20, 0, 2)]}
    assert policy.choose_source(held, "a", CommittedCheckpoint("k", "/k", 7), BEFORE).commit == "k"
    assert policy.choose_source(held, "a", None, BEFORE) == policy.StateSource(Origin.FRESH, 0)
    assert policy.choose_source({}, "a", None, None).origin is Origin.FRESH


def test_draining_workers_leave_and_are_not_chosen_to_join() -> None:
    assert policy.next_members("abc", "de", 3, leaving={"b", "d"}) == (("a", "c", "e"), ("b",))
    assert policy.next_members("abc", "", 2, leaving={"a"}) == (("b", "c"), ("a",))
    assert policy.next_members("abc", "", 3, leaving={"a", "b", "c"}) == ((), ("a", "b", "c"))
    assert after(Ending(("a", "b")), target=2, leaving="b") == (("a",), ("b",))
    assert after(Ending(("a", "b")), target=2, fewest=2, leaving="b") == (("a", "b"), ()), "better with them than not at all"


def test_each_worker_writes_its_own_shard_and_copies_are_spread() -> None:
    holders = {0: ["a", "b"], 1: ["b", "c"], 2: ["c", "d"], 3: ["d", "a"]}
    assert policy.spread_saving(holders, "abcd") == {w: (r,) for r, w in enumerate("abcd")}
    without_b = {rank: [w for w in workers if w != "b"] for rank, workers in holders.items()}
    assert policy.spread_saving(without_b, "abcd") == {"a": (0,), "c": (1, 2), "d": (3,)}


@given(st.sets(st.integers(0, 5), min_size=2))
def test_every_rank_is_written_exactly_once_by_a_holder(living: set[int]) -> None:
    holders = {rank: [f"w{o}" for o in (rank, (rank + 1) % 6) if o in living] for rank in range(6)}
    held = {rank: workers for rank, workers in holders.items() if workers}
    plan = policy.spread_saving(held, [f"w{rank}" for rank in range(6)])
    assert sorted(itertools.chain(*plan.values())) == sorted(held)
    assert all(worker in held[rank] for worker, ranks in plan.items() for rank in ranks)


def test_tickets_are_ordered_by_generation_then_attempt() -> None:
    assert sorted([Ticket(2, 1), Ticket(1, 3), NO_TICKET, Ticket(1, 1)]) == [NO_TICKET, Ticket(1, 1), Ticket(1, 3), Ticket(2, 1)]
