"""``train.sharding``, ``train.expert_parallel`` and ``train.offload``: the arrangement of workers, and mistakes found before one starts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vescale_ray.config import ConfigError, load_config
from vescale_ray.config.rank_grid import RankGrid
from vescale_ray.config.sections import ShardingSettings

PAIRS = ["train.sharding.shard_group=2", "train.slots=8", "elastic.workers=4"]
EXPERTS = ["train.expert_parallel=2", "train.slots=8", "elastic.workers=4", "model.factory=some.models:experts"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["elastic.workers=5"], "elastic.workers = 5 is not a multiple of train.sharding.shard_group = 2: give 4 or 6"),
        (["elastic.max_workers=7"], "elastic.max_workers = 7 is not a multiple of train.sharding.shard_group = 2: give 6 or 8"),
        (["elastic.min_workers=3"], "elastic.min_workers = 3 is not a multiple of train.sharding.shard_group = 2: give 2 or 4"),
        (["train.sharding.shard_group=8"], "elastic.workers = 4 is fewer than train.sharding.shard_group = 8: raise elastic.workers or"),
        (["train.sharding.shard_group=0"], "train.sharding.shard_group = 0: give at least 1"),
        (["train.sharding.replicas=0"], "train.sharding.replicas = 0: give at least 1"),
        (["train.sharding.replicas=auto"], "train.sharding.replicas = auto: give a whole number"),
        (
            ["train.sharding.replicas=1"],
            "elastic.workers = 4 is more than train.sharding.shard_group = 2 times train.sharding.replicas = 1",
        ),
        (["elastic.deterministic=true"], "elastic.deterministic = true with train.sharding.shard_group = 2: gradients of replicas"),
        (["train.sharding={replicas: 2}"], "train.sharding.shard_group must be given"),
        (["train.sharding=2"], "train.sharding = 2: give keys and values in braces"),
        (["train.offload=cpu", "train.device=cpu"], "train.offload = cpu with train.device = cpu: the shards are in host memory anyway"),
        (["train.offload=disk"], "train.offload = disk: give one of none or cpu"),
    ],
)
def test_unfit_numbers_of_workers_are_refused_in_one_line(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [*PAIRS, *overrides])
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["elastic.workers=5"], "elastic.workers = 5 is not a multiple of train.expert_parallel = 2: give 4 or 6"),
        (["elastic.max_workers=7"], "elastic.max_workers = 7 is not a multiple of train.expert_parallel = 2: give 6 or 8"),
        (["elastic.min_workers=3"], "elastic.min_workers = 3 is not a multiple of train.expert_parallel = 2: give 2 or 4"),
        (["train.expert_parallel=8"], "elastic.workers = 4 is fewer than train.expert_parallel = 8: raise elastic.workers or lower"),
        (["train.expert_parallel=0"], "train.expert_parallel = 0: give at least 1"),
        (["train.expert_parallel=null"], "train.expert_parallel = null: give a whole number"),
        (
            ["train.sharding.shard_group=2", "train.expert_parallel=4"],
            "train.expert_parallel = 4 does not divide train.sharding.shard_group = 2: choose a divisor of it",
        ),
        (["train.sharding.shard_group=4", "elastic.workers=6"], "elastic.workers = 6 is not a multiple of train.sharding.shard_group = 4"),
        (["elastic.deterministic=true"], "elastic.deterministic = true with train.expert_parallel = 2: an expert's gradient is a sum"),
        (
            ["train.compile=true", "train.activation_checkpointing=selective"],
            "train.compile = true with train.expert_parallel = 2 and train.activation_checkpointing = selective: the exchange of rows",
        ),
        (["model.factory=null"], "train.expert_parallel = 2 with model.kind = llama: it has no experts; set model.factory or model.hf"),
    ],
)
def test_unfit_expert_parallelism_is_refused_in_one_line(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [*EXPERTS, *overrides])
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_workers_below_expert_parallelism_share_what_they_can() -> None:
    config = load_config(None, ["train.expert_parallel=4", "train.slots=12", "elastic.workers=8", "model.factory=some.models:experts"])
    grids = [(1, 1), (2, 2), (3, 1), (4, 4), (4, 4), (4, 4), (4, 4), (8, 4)]
    assert [config.grid(workers) for workers in range(1, 9)] == [RankGrid(1, shards, experts) for shards, experts in grids]
    assert config.max_workers == 12 and config.step_of_workers == ("train.expert_parallel", 4)
    both = config.model_copy(update={"train": config.train.model_copy(update={"sharding": ShardingSettings(shard_group=8)})})
    of_both = [RankGrid(1, 6, 2), RankGrid(1, 7, 1), RankGrid(1, 8, 4), RankGrid(1, 8, 4), RankGrid(2, 8, 4)]
    assert [both.grid(workers) for workers in (6, 7, 8, 15, 17)] == of_both
    assert both.step_of_workers == ("train.sharding.shard_group", 8) and load_config(None, []).grid(5) == RankGrid(1, 5)


@pytest.mark.parametrize(
    ("overrides", "most"), [([], 8), (["train.slots=7"], 6), (["elastic.max_workers=6"], 6), (["train.sharding.replicas=3"], 6)]
)
def test_most_workers_are_whole_replicas(overrides: list[str], most: int) -> None:
    assert load_config(None, [*PAIRS, *overrides]).max_workers == most


def test_workers_below_a_shard_group_are_one_group() -> None:
    config = load_config(None, ["train.sharding.shard_group=3", "train.slots=12", "elastic.workers=6"])
    assert [config.grid(workers) for workers in (1, 2, 3, 5, 6, 11)] == [
        RankGrid(1, 1),
        RankGrid(1, 2),
        RankGrid(1, 3),
        RankGrid(1, 3),
        RankGrid(2, 3),
        RankGrid(3, 3),
    ]
    alone = load_config(None, [])
    assert alone.grid(5) == RankGrid(1, 5) and alone.whole(5) == 5


@given(st.integers(1, 6), st.integers(1, 6))
def test_each_shard_has_one_writer_among_its_replicas(replicas: int, shards: int) -> None:
    grid = RankGrid(replicas, shards)
    assert sorted(rank for shard in range(shards) for rank in grid.replicas_of(shard)) == list(range(grid.size))
    writers = [grid.writer_of(shard) for shard in range(shards)]
    assert [grid.shard_of(rank) for rank in writers] == list(range(shards))
    per_replica = [sum(rank // shards == replica for rank in writers) for replica in range(replicas)]
    assert max(per_replica) - min(per_replica) <= 1, "the replicas write equal amounts"
