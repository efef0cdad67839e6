"""The control loop with shard groups and replicas (HSDP): whole replicas train, and a lost shard comes from its replica."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.controller.stage import PEER, TICKET, WORLD, Stage, WorkerGroup, node_of, report
from vescale_ray.config import RunConfig, parse_config
from vescale_ray.config.rank_grid import RankGrid
from vescale_ray.controller import policy, states
from vescale_ray.controller.checkpointing.parked import assign_ranks, by_node, staying
from vescale_ray.controller.failures.budget import Cause
from vescale_ray.controller.policy import CommittedCheckpoint
from vescale_ray.controller.protocol import RequestRefused, RunState
from vescale_ray.controller.scaling.autoscaling import Autoscaling, RunProgress
from vescale_ray.controller.scaling.capacity import Free
from vescale_ray.workers.messages import RESCALE, Filled, Join, Origin, WorkerPhase
from vescale_ray.workers.resharding.held_state import HeldState, choose_resume
from vescale_ray.workers.resharding.shard_layouts import Layouts

pytestmark = pytest.mark.usefixtures("clock")

FOUR = replace(WORLD, members=("a", "b", "c", "d"))
"""Two replicas of two shards: (a, b) and (c, d)."""


def hsdp(**elastic: Any) -> RunConfig:
    return parse_config({"train": {"slots": 8, "sharding": {"shard_group": 2}}, "elastic": {"workers": 4, **elastic}})


def running(folder: Path, **about: Any) -> tuple[WorkerGroup, Stage]:
    group = WorkerGroup(*(report(w, WorkerPhase.TRAINING) for w in "abcd"))
    group.infos |= {w: node_of(w) for w in "abcd"}
    config = {"elastic_workers": 4, "train_slots": 8, "train_sharding": {"shard_group": 2}}
    stage = Stage(group, folder, filled=True, state=RunState.RUNNING, world=FOUR, config=config, **about)
    stage.loop.commands.want(4, "manual")
    stage.run.stats.steps.last["generation"] = TICKET.generation
    stage.run.stats.steps.step = 40
    return group, stage


def park(
    group: WorkerGroup, workers: str, step: int = 40, members: str = "abcd", number: int = TICKET.generation, fault: Any = PEER
) -> None:
    """These workers have left their generation, each with its own copy and no other."""
    for worker in workers:
        ticket = replace(TICKET, generation=number)
        held = (HeldState(number, 2, step, (members.index(worker) % 2,)),)
        group.reports[worker] = replace(report(worker, WorkerPhase.PARKED, ticket, fault), held=held)


def next_world(stage: Stage) -> Any:
    before = len(stage.worker_group.orders)
    while len(stage.worker_group.orders) == before:
        stage.loop.step()
    world = stage.loop.state.world
    joins = {w: order for w, order in stage.worker_group.orders[-1].items() if isinstance(order, Join)}
    assert [joins[w].seat.rank for w in world.members] == list(range(world.size)) and len(joins) == world.size
    return world


@pytest.mark.fault("W19")
def test_a_lost_shard_comes_from_its_replica(tmp_path: Path) -> None:
    group, stage = running(tmp_path)
    stage.lose("c", Cause.KILLED)
    stage.loop.step()
    park(group, "abd")
    world = next_world(stage)
    assert world.members[0] == "a" and world.members[1] in "bd", "each keeps its shard"
    assert (world.source.origin, world.source.step, world.source.lender) == (Origin.MEMORY, 40, "replica")
    assert stage.loop.commands.target == 2 and group.dismissed == [{"b", "d"}.difference(world.members).pop()]


@pytest.mark.fault("W19")
def test_a_worker_without_a_whole_replica_waits_for_another(tmp_path: Path) -> None:
    """The worker that is left over stays warm. It joins with the replacement, in one change."""
    group, stage = running(tmp_path, replace_lost=True)
    stage.lose("c", Cause.KILLED)
    stage.loop.step()
    park(group, "abd")
    world = next_world(stage)
    (over,) = {"a", "b", "d"}.difference(world.members)
    assert world.size == 2 and stage.loop.commands.target == 4 and not group.dismissed and not group.asked
    for worker in world.members:
        group.reports[worker] = report(worker, WorkerPhase.TRAINING, world.ticket)
        stage.executor.generation.filled(worker, Filled(world.ticket, 40, Origin.MEMORY, {}))
    while not group.hired:
        stage.loop.step()
    for _ in range(10):
        stage.loop.step()
    assert group.hired == 1 and not group.asked and not group.dismissed, "it waits for the second worker"
    stage.warm("new1")
    group.infos["new1"] = node_of("new1")
    group.on_the_way.clear()
    while not group.asked:
        stage.loop.step()
    assert group.asked == [RESCALE]
    park(group, "".join(world.members), 41, "".join(world.members), world.ticket.generation, fault=None)
    grown = next_world(stage)
    assert sorted(grown.members) == sorted((*world.members, over, "new1")) and grown.source.lender is None
    assert grown.source.step == 41, "not the older state that the left-over worker still holds"


@pytest.mark.fault("W6")
def test_loss_of_all_replicas_of_a_shard_needs_the_checkpoint(tmp_path: Path) -> None:
    group, stage = running(tmp_path)
    stage.has(CommittedCheckpoint("c30", "/c30", 30))
    for worker in "ac":
        stage.lose(worker, Cause.KILLED)
    stage.loop.step()
    park(group, "bd")
    world = next_world(stage)
    assert (world.size, world.source.origin, world.source.step) == (2, Origin.CHECKPOINT, 30)


def test_too_few_workers_for_a_replica_are_one_shard_group(tmp_path: Path) -> None:
    group, stage = running(tmp_path)
    stage.has(CommittedCheckpoint("c30", "/c30", 30))
    for worker in "abc":
        stage.lose(worker, Cause.KILLED)
    stage.loop.step()
    park(group, "d")
    assert next_world(stage).members == ("d",)


def test_numbers_of_workers_are_those_of_whole_replicas() -> None:
    config = hsdp()
    assert [config.whole(count) for count in range(8)] == [0, 1, 2, 2, 4, 4, 6, 6]
    assert policy.next_members("abc", "", 4, whole=config.whole) == (("a", "b"), ("c",))
    assert policy.next_members("abc", "de", 4, whole=config.whole) == (("a", "b", "c", "d"), ())
    assert policy.next_members("a", "de", 4, {"a"}, config.whole) == (("d", "e"), ("a",))
    with pytest.raises(RequestRefused, match="workers = 5 is not a multiple of train.sharding.shard_group: give 4, or the next multiple"):
        policy.check_rescale(5, fewest=1, most=8, slots=8, capacity=None, whole=config.whole)
    assert policy.check_rescale(6, fewest=1, most=8, slots=8, capacity=None, whole=config.whole) == 6


def test_numbers_of_workers_are_those_that_share_experts_evenly() -> None:
    config = parse_config(
        {"train": {"slots": 8, "expert_parallel": 2}, "elastic": {"workers": 4}, "model": {"factory": "some.models:experts"}}
    )
    assert [config.whole(count) for count in range(8)] == [0, 1, 2, 2, 4, 4, 6, 6]
    assert policy.next_members("abc", "", 4, whole=config.whole) == (("a", "b"), ("c",))
    with pytest.raises(RequestRefused, match="workers = 5 is not a multiple of train.expert_parallel: give 4, or the next multiple"):
        policy.check_rescale(5, fewest=1, most=8, slots=8, capacity=None, whole=config.whole, key=config.step_of_workers[0])
    group = WorkerGroup()
    group.infos |= {w: replace(node_of(w), node=w[0]) for w in ("x1", "y1", "x2", "y2")}
    workers: Any = group
    assert by_node(["x1", "y1", "x2", "y2"], config.grid(4), workers) == ("x1", "x2", "y1", "y2"), "a node shares the experts"


@pytest.mark.parametrize(("room", "aim"), [(1, None), (2, 4), (3, 4), (4, 6)])
def test_run_grows_by_whole_replicas(room: int, aim: int | None) -> None:
    config = hsdp(grow=True, grow_after_s=0.0)
    growth = Autoscaling(config.elastic, config.whole)
    for now in (0.0, 1.0):
        growth.look(Free(now, {"n": room}, frozenset("n")), (), ())
    assert growth.grow(RunProgress(2, 0, 0, 2, 8, 100, 0.1, 0.0), 2.0)[0] == aim


def test_replicas_of_a_shard_are_on_different_nodes() -> None:
    group = WorkerGroup()
    group.infos |= {w: replace(node_of(w), node=w[0]) for w in ("x1", "y1", "x2", "y2", "y3", "x3")}
    workers: Any = group
    assert by_node(["x1", "y1", "x2", "y2"], RankGrid(2, 2), workers) == ("x1", "x2", "y1", "y2")
    assert by_node(["x1", "y1"], RankGrid(1, 2), workers) == ("x1", "y1")
    held = {"x1": [HeldState(4, 2, 9, (0,))], "y1": [HeldState(4, 2, 9, (1,))]}
    members, layouts = ["x1", "y1", "x2", "y2"], Layouts(4)
    ranked, _ = assign_ranks(members, choose_resume(held), held, workers, layouts, RankGrid(2, 2))
    assert {ranked.index("x1") % 2, ranked.index("y1") % 2} == {0, 1} and ranked.index("x1") % 2 == 0, "both keep their shards"
    held = {w: [HeldState(4, 2, 9, (rank % 2,))] for rank, w in enumerate(["y1", "x1", "x2", "y2"])}
    assert assign_ranks(["y1", "x1", "x2", "y2"], choose_resume(held), held, workers, layouts, RankGrid(2, 2))[0] in (
        ("y1", "y2", "x2", "x1"),
        ("x2", "x1", "y1", "y2"),
    )
    assert _shards(staying(["y1", "x1", "x2"], RankGrid(1, 2), choose_resume(held), held, workers, layouts), held) == [0, 1]


def _shards(workers: Sequence[str], held: Any) -> list[int]:
    return sorted(held[w][0].ranks[0] for w in workers)


def test_each_shard_of_a_state_is_written_by_one_replica() -> None:
    held = {w: [HeldState(TICKET.generation, 2, 40, (rank % 2,))] for rank, w in enumerate("abcd")}
    resume = choose_resume(held)
    assert resume is not None
    owners = policy.owners_of(FOUR, resume)
    assert owners == [("a", "c"), ("b", "d")] and policy.owners_of(WORLD, replace(resume, world=3)) == []
    written = policy.spread_saving({0: ["a", "c"], 1: ["b", "d"]}, [of[shard % len(of)] for shard, of in enumerate(owners)])
    assert written == {"a": (0,), "d": (1,)}, "the replicas take turns"
    assert [RankGrid(2, 2).writer_of(shard) for shard in (0, 1)] == [0, 3], "and so they do during training"


def test_first_generation_of_late_workers_has_whole_replicas(tmp_path: Path) -> None:
    group, stage = running(tmp_path)
    group.reports = {w: report(w, WorkerPhase.IDLE) for w in "abc"}
    state, do = stage.step(states.Gathering(stage.worker_group.now - 1.0))
    assert state.world.members == ("a", "b")  # type: ignore[union-attr]
    assert any(getattr(one, "fields", {}).get("target") == 2 for one in do)
