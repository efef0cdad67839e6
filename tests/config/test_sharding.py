"""``train.sharding`` and ``train.offload``: the arrangement of workers, and mistakes that are found before a worker starts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vescale_ray.config import ConfigError, load_config
from vescale_ray.config.sharding import RankGrid

PAIRS = ["train.sharding.shard_group=2", "train.slots=8", "elastic.workers=4"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["elastic.workers=5"], "elastic.workers = 5 is no multiple of train.sharding.shard_group = 2: give 4 or 6"),
        (["elastic.max_workers=7"], "elastic.max_workers = 7 is no multiple of train.sharding.shard_group = 2: give 6 or 8"),
        (["elastic.min_workers=3"], "elastic.min_workers = 3 is no multiple of train.sharding.shard_group = 2: give 2 or 4"),
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
